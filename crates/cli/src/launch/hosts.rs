//! The machines of `--hosts`, of a host file, or of DeepSpeed's: from settings to the agents of a launch.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use accelerate_core::config::{RunConfig, settings};
use accelerate_core::files::ShownPath;
use accelerate_core::hosts::{Host, Hosts, MachineSource, NumMachines, is_loopback};
use accelerate_core::settings::{Origin, read_file};
use accelerate_launch::{AgentCommand, LaunchConfig};

use crate::resolve::machines;

/// A launch on several machines, each with its number of processes.
#[derive(Debug, PartialEq)]
pub(crate) struct Machines {
    hosts: Hosts,
    num_processes: Vec<usize>,
}

/// What is wrong with the machines that were named.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{first} and {second} both name machines; keep one of the two")]
    TwoLists { first: &'static str, second: &'static str },
    #[error("the host file {} cannot be read", path.shown())]
    File { path: PathBuf, source: std::io::Error },
    #[error("--deepspeed_inclusion_filter and --deepspeed_exclusion_filter contradict each other; keep one of the two")]
    TwoFilters,
    #[error(
        "{filter} has no effect without --deepspeed_hostfile, which names the machines; add it, or leave the filter out"
    )]
    FilterOfNothing { filter: &'static str },
    #[error(
        "--machine_rank is {said}, but it is for machines that are started one by one; leave it out: the order of the hosts is \
         that of their ranks"
    )]
    MachineRank { said: usize },
    #[error("--ssh_command is {found:?}, which is no command; write its words as for a shell, such as \"ssh -p 2222\"")]
    SshCommand { found: String },
}

impl Machines {
    /// The machines that `run` names; `None` where this machine takes part in a run by itself. `per_machine` is how many processes
    /// a machine gets where nobody says a number.
    pub(crate) fn of_run(run: &RunConfig, per_machine: usize) -> Result<Option<Self>, Box<dyn Error>> {
        let Some(hosts) = listed(run)? else { return Ok(None) };
        num_machines(run).check(MachineSource::Hosts { num_hosts: hosts.list.len() })?;
        if run.cluster.machine_rank > 0 {
            return Err(Problem::MachineRank { said: run.cluster.machine_rank }.into());
        }
        let num_processes = hosts.num_processes(run.cluster.num_processes, per_machine)?;
        Ok(Some(Self { hosts, num_processes }))
    }

    /// How many processes there are on all of them.
    pub(crate) fn total(&self) -> usize {
        self.num_processes.iter().sum()
    }

    /// The configuration with what the machines need beside it: the settings of variables that the processes of this machine would
    /// inherit.
    fn configured(config: LaunchConfig) -> LaunchConfig {
        let is_set = |name: &str| config.environment.iter().any(|(other, _)| other == name);
        let of_processes = settings().filter(|setting| !setting.is_for_launcher());
        let names = of_processes.filter_map(|setting| setting.variable());
        let names = names.chain([accelerate_launch::SECRET_VARIABLE.to_owned()]).filter(|name| !is_set(name));
        // An empty secret is none: one is made then.
        let is_there = |name: &str, value: &OsString| name != accelerate_launch::SECRET_VARIABLE || !value.is_empty();
        let value = |name: &str| std::env::var_os(name).filter(|value| is_there(name, value));
        let inherited = names.filter_map(|name| Some((OsString::from(&name), value(&name)?)));
        let environment = inherited.chain(config.environment.iter().cloned()).collect();
        LaunchConfig { environment, ..config }
    }

    /// How the agent of each machine is started.
    fn agents(&self, run: &RunConfig, this_machine: &str) -> Result<Vec<AgentCommand>, Box<dyn Error>> {
        let text = &run.cluster.ssh_command;
        let words = shlex::split(text).filter(|words| !words.is_empty());
        let words = words.ok_or_else(|| Problem::SshCommand { found: text.clone() })?;
        let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        let hosts = self.hosts.list.iter().zip(self.hosts.addresses(this_machine)).zip(&self.num_processes);
        let agents = hosts.map(|((host, address), num_processes)| {
            let is_here = is_loopback(&host.name) || host.name == this_machine;
            let agent = match is_here {
                true => AgentCommand::here(&host.name, *num_processes),
                false => AgentCommand::by_ssh(&host.name, *num_processes, &words),
            };
            AgentCommand { address, environment: visible_gpus(host), ..agent }
        });
        Ok(agents.collect())
    }
}

/// Of how many machines the run is to be made.
pub(super) fn num_machines(run: &RunConfig) -> NumMachines {
    let is_said = run.cluster.num_machines > 1 || matches!(run.origin("num_machines"), Origin::Flag(_));
    NumMachines { most: is_said.then_some(run.cluster.num_machines), least: run.cluster.min_machines }
}

/// The agents of the machines that are started on from here; `None` where this machine takes part in a run by itself.
pub(super) fn agents(run: &RunConfig) -> Result<Option<Vec<AgentCommand>>, Box<dyn Error>> {
    machines(run)?.map(|machines| machines.agents(run, &this_machine())).transpose()
}

/// `config` as such a launch needs it. What is wrong with the list of machines, [`agents`] has told.
pub(super) fn configured(config: LaunchConfig, run: &RunConfig) -> LaunchConfig {
    match machines(run) {
        Ok(Some(_)) => Machines::configured(config),
        _ => config,
    }
}

/// The name that this machine has for itself.
pub(super) fn this_machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Does a host file of DeepSpeed's hold, and its filters? As under the reference, not where one machine is asked for.
fn is_deepspeeds(run: &RunConfig) -> bool {
    let is_of_runner = run.deepspeed.multinode_launcher.as_deref() != Some("standard");
    run.cluster.use_deepspeed && is_of_runner && !run.says_one_machine()
}

/// The lists of machines that are named.
fn lists(run: &RunConfig) -> impl Iterator<Item = (&'static str, List<'_>)> {
    let of_deepspeed =
        run.deepspeed.hostfile.as_deref().filter(|path| is_deepspeeds(run) && !path.as_os_str().is_empty());
    let lists = [
        ("--hosts", run.cluster.hosts.as_deref().map(List::Text)),
        ("--hostfile", run.cluster.hostfile.as_deref().map(List::File)),
        ("--deepspeed_hostfile", of_deepspeed.map(List::File)),
    ];
    lists.into_iter().filter_map(|(flag, list)| Some((flag, list?)))
}

/// The first setting that says on which machines a launch takes place.
pub(super) fn flag_of_machines(run: &RunConfig) -> Option<&'static str> {
    let cluster = &run.cluster;
    let others =
        [("--main_process_ip", cluster.main_process_ip.is_some()), ("--machine_rank", cluster.machine_rank > 0)];
    let others = others.into_iter().filter(|(_, is_said)| *is_said).map(|(flag, _)| flag);
    lists(run).map(|(flag, _)| flag).chain(others).next()
}

fn listed(run: &RunConfig) -> Result<Option<Hosts>, Box<dyn Error>> {
    let mut named = lists(run);
    let hosts = match (named.next(), named.next()) {
        (Some((first, _)), Some((second, _))) => return Err(Problem::TwoLists { first, second }.into()),
        (Some((_, list)), None) => Some(list.read()?),
        (None, _) => None,
    };
    // Files of the reference have empty ones.
    let filter = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
    let filters = (filter(&run.deepspeed.inclusion_filter), filter(&run.deepspeed.exclusion_filter));
    Ok(match (hosts, filters) {
        (_, (Some(_), Some(_))) => return Err(Problem::TwoFilters.into()),
        (Some(hosts), (Some(filter), None)) => Some(hosts.included(&filter)?),
        (Some(hosts), (None, Some(filter))) => Some(hosts.excluded(&filter)?),
        (None, (Some(_), _)) if is_deepspeeds(run) => return Err(no_list("--deepspeed_inclusion_filter")),
        (None, (_, Some(_))) if is_deepspeeds(run) => return Err(no_list("--deepspeed_exclusion_filter")),
        (hosts, _) => hosts,
    })
}

fn no_list(filter: &'static str) -> Box<dyn Error> {
    Problem::FilterOfNothing { filter }.into()
}

/// Where machines are listed.
enum List<'a> {
    Text(&'a str),
    File(&'a Path),
}

impl List<'_> {
    fn read(self) -> Result<Hosts, Box<dyn Error>> {
        match self {
            Self::Text(text) => Ok(Hosts::parse(text)?),
            Self::File(path) => {
                let text = read_file(path).map_err(|source| Problem::File { path: path.to_owned(), source })?;
                Ok(Hosts::parse_file(&text, path)?)
            }
        }
    }
}

/// A filter chooses GPUs by their numbers.
fn visible_gpus(host: &Host) -> Vec<(OsString, OsString)> {
    let Some(slots) = &host.slots else { return Vec::new() };
    let slots: Vec<_> = slots.iter().map(ToString::to_string).collect();
    vec![("CUDA_VISIBLE_DEVICES".into(), slots.join(",").into())]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::resolve::resolve;
    use rstest::rstest;

    fn run(flags: &str) -> RunConfig {
        let words: Vec<_> = flags.split_whitespace().collect();
        let flags = words.split(|word| word.starts_with("--")).skip(1).map(|values| values.concat());
        let names = words.iter().filter_map(|word| word.strip_suffix('=').or(word.starts_with("--").then_some(*word)));
        let pairs: Vec<_> = names.zip(flags).collect();
        let said = pairs.into_iter().map(|(flag, value)| {
            let setting = settings().find(|setting| setting.flag().is_some_and(|known| format!("--{known}") == flag));
            (setting.unwrap(), value)
        });
        resolve(said.collect(), None, false, &|_| None).unwrap().run
    }

    #[rstest]
    #[case("--num_processes 4", None)]
    #[case("--hosts a:4,b:2", Some(6))]
    #[case("--hosts a,b --num_processes 6 --num_machines 2", Some(6))]
    #[case("--hosts a,b", Some(16))]
    #[case::fewer_than_there_may_be("--hosts a,b --num_machines 4 --min_machines 1", Some(16))]
    #[case::nothing_of_the_reference("--use_deepspeed true --deepspeed_hostfile= --deepspeed_exclusion_filter=", None)]
    #[case::by_hand_as_the_reference_does(
        "--use_deepspeed true --deepspeed_hostfile no/file --deepspeed_multinode_launcher standard",
        None
    )]
    #[case::one_machine("--use_deepspeed true --deepspeed_hostfile no/file --num_machines 1", None)]
    fn how_many_processes_all_machines_have(#[case] flags: &str, #[case] expected: Option<usize>) {
        let machines = Machines::of_run(&run(flags), 8).unwrap();
        assert_eq!(machines.map(|machines| machines.total()), expected);
    }

    #[rstest]
    #[case("--hosts a --hostfile b", "--hosts and --hostfile both name machines")]
    #[case("--hostfile no/such/file", "no/such/file cannot be read")]
    #[case("--hostfile /dev/zero", "/dev/zero cannot be read")]
    #[case("--hosts a,b --num_machines 3", "--num_machines (or --nnodes) is 3, but 2 hosts are named")]
    #[case("--hosts a,b --num_machines 1", "--num_machines (or --nnodes) is 1, but 2 hosts are named; leave it out")]
    #[case(
        "--hosts a,b,c --num_machines 2 --min_machines 1",
        "--num_machines (or --nnodes) is 2, but 3 hosts are named"
    )]
    #[case("--hosts a,b --min_machines 3", "--min_machines (or MIN of --nnodes MIN:MAX) is 3, but 2 hosts are named")]
    #[case("--hosts a,b --machine_rank 1", "--machine_rank is 1")]
    #[case("--hosts a:1,b:2 --num_processes 4", "--num_processes is 4")]
    #[case("--hosts a,-b", "\"-b\" is no host")]
    #[case("--use_deepspeed true --deepspeed_inclusion_filter a", "no effect without --deepspeed_hostfile")]
    #[case(
        "--use_deepspeed true --hosts a,b --deepspeed_inclusion_filter a --deepspeed_exclusion_filter b",
        "contradict each other"
    )]
    fn what_names_no_machines(#[case] flags: &str, #[case] words: &str) {
        let error = Machines::of_run(&run(flags), 1).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn a_host_file_of_deepspeed_is_filtered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hostfile");
        std::fs::write(&path, "a slots=4\nb slots=4\nc slots=4\n").unwrap();
        let flags = format!(
            "--use_deepspeed true --deepspeed_hostfile {} --deepspeed_inclusion_filter a@b:1,3",
            path.display()
        );
        let run = run(&flags);
        let machines = Machines::of_run(&run, 1).unwrap().unwrap();
        let agents = machines.agents(&run, "here").unwrap();
        let shown: Vec<_> = agents.iter().map(|agent| (agent.machine.as_str(), agent.num_processes)).collect();
        assert_eq!(shown, [("a", 4), ("b", 2)]);
        assert_eq!(agents[1].environment, [("CUDA_VISIBLE_DEVICES".into(), "1,3".into())]);
        assert!(agents[0].environment.is_empty());
    }

    #[rstest]
    #[case("a", "ssh")]
    #[case("localhost", "sh")]
    #[case("127.0.0.1", "sh")]
    #[case("here", "sh")]
    #[case::somebody_else_here("me@localhost", "ssh")]
    fn this_machine_is_reached_without_ssh(#[case] host: &str, #[case] program: &str) {
        let run = run(&format!("--hosts {host}"));
        let agents = Machines::of_run(&run, 1).unwrap().unwrap().agents(&run, "here").unwrap();
        assert_eq!(agents[0].command[0], program);
    }

    #[test]
    fn a_command_that_is_none_is_refused() {
        let mut run = run("--hosts a");
        for text in ["", "ssh 'a"] {
            run.cluster.ssh_command = text.to_owned();
            let error = Machines::of_run(&run, 1).unwrap().unwrap().agents(&run, "here").unwrap_err().to_string();
            assert!(error.contains("--ssh_command"), "{error}");
        }
    }
}
