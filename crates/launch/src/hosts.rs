//! One run on several machines. On each of them an agent, which is this same program, supervises the ranks there; the launcher
//! starts the agents through connections such as `ssh`, and sends them all that they need over their standard input. So nothing
//! is quoted for a remote shell, and nothing secret is in a command line.
//!
//! An agent ends its ranks when its connection ends. That is what ends them everywhere, whatever becomes of the launcher. Launcher
//! and agents tell each other that they live (`heart`), so each of them also notices a connection that stays and carries nothing.

mod agent;
mod checks;
mod conduct;
mod connection;
mod ending;
mod fitting;
mod heart;
mod machine;
mod message;
mod paths;
mod versions;
mod words;

use std::ffi::OsString;
use std::path::PathBuf;

pub(crate) use agent::run as run_agent;
pub(crate) use message::Problem;
pub(crate) use paths::{optional_path, path};

use accelerate_core::status::{LauncherName, RunPart};

use crate::config::{LaunchConfig, LocalRanks, Program};
use crate::error::{Error, Result};
use crate::failure::LeftBehind;
use crate::program::{ProgramSearch, resolve_program};
use crate::report::{Notice, Reporter};
use crate::status::{StatusFile, new_launcher_name};
use crate::supervise::Outcome;
use crate::supervise::signals::Signals;
use crate::{SECRET_VARIABLE, restart};

/// What a shell on each machine runs. It reads the path of the agent from its input: the same as that of the launcher, if it is
/// there, else what PATH has. It needs no quoting but one pair of `'`.
pub const AGENT_SCRIPT: &str =
    r#"IFS= read -r accelerate; test -x "$accelerate" || accelerate=accelerate; exec "$accelerate" __accelerate_agent"#;

/// How the agent of one machine is started.
///
/// ```
/// use accelerate_launch::AgentCommand;
/// let agent = AgentCommand::by_ssh("node1", 4, &["ssh".into(), "-p".into(), "2222".into()]);
/// assert_eq!(agent.command[..4], ["ssh", "-p", "2222", "node1"]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentCommand {
    /// What messages call the machine.
    pub machine: String,
    /// A name or an address by which the other machines reach it, if the main process runs there.
    pub address: String,
    /// A command that runs `sh -c AGENT_SCRIPT` on the machine, with the input and output of the command.
    pub command: Vec<OsString>,
    /// How many ranks the machine has.
    pub num_processes: usize,
    /// Variables of the ranks of this machine, beside those of all.
    pub environment: Vec<(OsString, OsString)>,
}

impl AgentCommand {
    /// On this machine.
    pub fn here(machine: &str, num_processes: usize) -> Self {
        let command = ["sh", "-c", AGENT_SCRIPT].map(OsString::from).to_vec();
        let (machine, address) = (machine.to_owned(), machine.to_owned());
        Self { machine, address, command, num_processes, environment: Vec::new() }
    }

    /// On `machine`, by a command such as `ssh` that takes a host and a command for a shell there.
    pub fn by_ssh(machine: &str, num_processes: usize, ssh_command: &[OsString]) -> Self {
        // Whatever the login shell is, it understands this much.
        let script = format!("exec sh -c '{AGENT_SCRIPT}'");
        let command = ssh_command.iter().cloned().chain([machine.into(), script.into()]).collect();
        let address = machine.rsplit_once('@').map_or(machine, |(_, address)| address).to_owned();
        Self { machine: machine.to_owned(), address, command, num_processes, environment: Vec::new() }
    }
}

/// Whether machines are looked at before anything starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preflight {
    /// Program, libtorch, port of the main process, free space, clocks.
    Full,
    /// Only that the agents are there, and of this version.
    None,
}

/// Starts the ranks of `config` on several machines, watches them until all have ended, and says how it went.
///
/// The machines have their ranks in the order of `agents`; what `config` says of numbers of processes and machines is filled in
/// from there. Without [`main_process_ip`](LaunchConfig::main_process_ip), machines look for the main process at the
/// [`address`](AgentCommand::address) of the first. Machine 0 chooses the port, unless `config` names one. Without
/// [`SECRET_VARIABLE`](crate::SECRET_VARIABLE) in [`environment`](LaunchConfig::environment) each attempt gets a secret of its own.
///
/// With [`LaunchConfig::max_restarts`] all machines are prepared and started again, by new connections, after a rank has failed or a
/// machine was lost; a failure of that counts as an attempt, too. With [`LaunchConfig::min_machines`], machines that cannot be reached
/// or that fail their preflight are left out as long as so many are left: each of the others keeps its number of processes, so
/// there are fewer in all, which are ranked anew. Each restart tries all machines again.
///
/// # Errors
///
/// As [`launch`](crate::launch()), and [`Error::is_machine`](crate::Error::is_machine): machines that cannot take part, each with
/// the reason, before anything has started; or one that was lost.
///
/// ```no_run
/// use accelerate_launch::{AgentCommand, LaunchConfig, Preflight, Program, Silent, launch_on_machines};
/// let ssh = ["ssh".into()];
/// let agents = [AgentCommand::by_ssh("node1", 4, &ssh), AgentCommand::by_ssh("node2", 2, &ssh)];
/// let config = LaunchConfig::new(Program::guess("target/release/train".as_ref()), 6);
/// launch_on_machines(&config, &agents, Preflight::Full, &mut Silent)?;
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
pub fn launch_on_machines(
    config: &LaunchConfig,
    agents: &[AgentCommand],
    preflight: Preflight,
    reporter: &mut dyn Reporter,
) -> Result<Outcome> {
    let search = ProgramSearch::of_this_process();
    check_connections(agents, &search)?;
    let num_processes = agents.iter().map(|agent| agent.num_processes).fold(0, usize::saturating_add);
    let config = LaunchConfig { num_processes, ..with_program_of_this_machine(config.clone(), &search) };
    let mut left = Left { least: least(&config, agents), found: Vec::new() };
    restart::run(&config, reporter, |config, signals, reporter| {
        let mut config = config.clone();
        if !config.environment.iter().any(|(name, _)| name == SECRET_VARIABLE) {
            config.environment.push((SECRET_VARIABLE.into(), crate::new_secret()?));
        }
        let ended = attempt(&config, agents, &left, preflight, signals, reporter);
        ended.map_err(|error| left.take(error, agents))
    })
}

/// So many machines are enough.
fn least(config: &LaunchConfig, agents: &[AgentCommand]) -> usize {
    config.min_machines.unwrap_or(agents.len()).max(1)
}

/// Machines on which something of an earlier attempt goes on, each with what that is. No later attempt has them.
#[derive(Debug)]
struct Left {
    least: usize,
    found: Vec<(String, String)>,
}

impl Left {
    fn has(&self, agent: &AgentCommand) -> bool {
        self.found.iter().any(|(machine, _)| *machine == agent.machine)
    }

    /// What goes on somewhere is no obstacle to another attempt, if the other machines are enough for that.
    fn take(&mut self, error: Error, agents: &[AgentCommand]) -> Error {
        let new = error.left_behind().iter().filter_map(|left| Some((left.machine.clone()?, words::goes_on(left))));
        let found: Vec<_> = self.found.iter().cloned().chain(new).collect();
        let is_out = |agent: &&AgentCommand| found.iter().any(|(machine, _)| *machine == agent.machine);
        if agents.len() - agents.iter().filter(is_out).count() < self.least {
            return error;
        }
        self.found = found;
        let left = error.left_behind().iter().map(|left| LeftBehind { is_left_out: true, ..left.clone() }).collect();
        error.with_left_behind(left)
    }
}

/// With all machines, or with those that can take part if they are enough. Whoever is left out has to be found before any rank is
/// told its number, so the others are connected to once more.
fn attempt(
    config: &LaunchConfig,
    agents: &[AgentCommand],
    left: &Left,
    preflight: Preflight,
    signals: &mut Signals,
    reporter: &mut dyn Reporter,
) -> Result<Outcome> {
    let mut numbered: Vec<_> = agents.iter().enumerate().filter(|(_, agent)| !left.has(agent)).collect();
    for (machine, why) in &left.found {
        tell_left_out(machine, why, &numbered, reporter)?;
    }
    loop {
        let configs = configs_of(config, &numbered)?;
        let agents: Vec<_> = numbered.iter().map(|(_, agent)| (*agent).clone()).collect();
        let helper = config.helper.as_ref();
        let launcher = new_launcher_name();
        // For as long as this attempt goes on.
        let _told = configs.first().and_then(|config| StatusFile::without_ranks(config, part(&launcher, &agents)));
        let conductor =
            conduct::Conductor::connect(&agents, &configs, &launcher, (preflight, helper), signals, reporter)?;
        let error = match conductor.run() {
            Err(error) if !error.machines_out().is_empty() => error,
            outcome => return outcome,
        };
        let out = error.machines_out();
        let is_out = |agent: &AgentCommand| out.iter().any(|(machine, _)| *machine == agent.machine);
        let rest: Vec<_> = numbered.iter().copied().filter(|(_, agent)| !is_out(agent)).collect();
        if rest.len() < left.least {
            return Err(error);
        }
        for agent in agents.iter().filter(|agent| is_out(agent)) {
            let problem = out.iter().find(|(machine, _)| *machine == agent.machine);
            let why = problem.map(|(_, problem)| problem.text.as_str()).unwrap_or_default();
            tell_left_out(&agent.machine, why, &rest, reporter)?;
        }
        numbered = rest;
    }
}

fn tell_left_out(machine: &str, why: &str, rest: &[(usize, &AgentCommand)], reporter: &mut dyn Reporter) -> Result<()> {
    let num_processes = rest.iter().map(|(_, agent)| agent.num_processes).fold(0, usize::saturating_add);
    let text = words::left_out(rest.len(), num_processes, why);
    reporter.notice(&Notice::OnMachine { machine: machine.to_owned(), text }).map_err(Error::output_closed)
}

/// What this process is to those who ask what runs here.
fn part(launcher: &LauncherName, agents: &[AgentCommand]) -> RunPart {
    let machines = agents.iter().map(|agent| agent.machine.clone()).collect();
    RunPart::LauncherOfAgents { id: launcher.id, machines, num_machines: agents.len() }
}

/// What each machine is told: its ranks, and its own variables.
///
/// # Errors
///
/// [`Error::is_invalid_configuration`](crate::Error::is_invalid_configuration), as of [`LaunchConfig::check`].
///
/// ```
/// use accelerate_launch::{AgentCommand, LaunchConfig, Program, configs_of_machines};
/// let config = LaunchConfig::new(Program::Executable("true".into()), 3);
/// let agents = [AgentCommand::here("a", 2), AgentCommand::here("b", 1)];
/// let configs = configs_of_machines(&config, &agents)?;
/// assert_eq!((configs[1].first_rank(), configs[1].main_process_ip.as_deref()), (2, Some("a")));
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
pub fn configs_of_machines(config: &LaunchConfig, agents: &[AgentCommand]) -> Result<Vec<LaunchConfig>> {
    configs_of(config, &agents.iter().enumerate().collect::<Vec<_>>())
}

/// The same for those that take part, each with its number among all machines of the run.
fn configs_of(config: &LaunchConfig, agents: &[(usize, &AgentCommand)]) -> Result<Vec<LaunchConfig>> {
    let num_processes = agents.iter().map(|(_, agent)| agent.num_processes).fold(0, usize::saturating_add);
    let main_process_ip = agents.first().filter(|_| agents.len() > 1).map(|(_, agent)| agent.address.clone());
    let mut first_rank = 0_usize;
    let configs = agents.iter().enumerate().map(|(machine_rank, (number, agent))| {
        let local_ranks = LocalRanks { first_rank, num_processes: agent.num_processes };
        first_rank = first_rank.saturating_add(agent.num_processes);
        let mut environment = config.environment.clone();
        environment.retain(|(name, _)| !agent.environment.iter().any(|(own, _)| own == name));
        environment.extend(agent.environment.iter().cloned());
        let config = LaunchConfig {
            num_processes,
            num_machines: agents.len(),
            machine_rank,
            local_ranks: Some(local_ranks),
            main_process_ip: config.main_process_ip.clone().or_else(|| main_process_ip.clone()),
            // Machines may share the folder that these are in. Ranks change where a machine is left out; this number does not.
            log_name: config.log_name.as_ref().map(|name| format!("{name}_{number}")),
            environment,
            ..config.clone()
        };
        // What the agents fill in.
        LaunchConfig { enable_cpu_affinity: false, main_process_port: None, ..config.clone() }.check().map(|()| config)
    });
    configs.collect()
}

/// A command that is not here is no fault of the machines that it should lead to.
fn check_connections(agents: &[AgentCommand], search: &ProgramSearch) -> Result<()> {
    let program = |agent: &AgentCommand| agent.command.first().cloned().unwrap_or_default();
    for agent in agents {
        let program_here = program(agent);
        let Err(error) = search.look_for(&program_here) else { continue };
        let machines = agents.iter().filter(|other| program(other) == program_here).map(|agent| agent.machine.clone());
        let cure = words::without_command(&program_here, agents);
        return Err(Error::not_connected(machines.collect(), program_here, cure, error.into()));
    }
    Ok(())
}

/// The program under the path that it has here, since machines share folders. One that is not found here may be found there.
fn with_program_of_this_machine(config: LaunchConfig, search: &ProgramSearch) -> LaunchConfig {
    let Ok(mut command) = resolve_program(&config.program, search) else { return config };
    let first = PathBuf::from(command.remove(0));
    let program = Program::Executable(std::path::absolute(&first).unwrap_or(first).into());
    let args = command.into_iter().chain(config.args).collect();
    LaunchConfig { program, args, ..config }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::failure::Survivor;

    fn agent(machine: &str, num_processes: usize) -> AgentCommand {
        AgentCommand::by_ssh(machine, num_processes, &["ssh".into()])
    }

    #[test]
    fn machines_have_their_ranks_one_after_another() {
        let mut agents = [agent("a", 4), agent("b", 1), agent("c", 2)];
        agents[1].environment = vec![("CUDA_VISIBLE_DEVICES".into(), "3".into())];
        let environment = vec![("CUDA_VISIBLE_DEVICES".into(), "0".into())];
        let main_process_ip = Some("a".into());
        let config = LaunchConfig::new(Program::Executable("train".into()), 1);
        let config = LaunchConfig { environment, main_process_ip, ..config };
        let configs = configs_of_machines(&config, &agents).unwrap();
        let ranks: Vec<_> = configs.iter().map(|config| (config.first_rank(), config.num_local_processes())).collect();
        assert_eq!(ranks, [(0, 4), (4, 1), (5, 2)]);
        assert!(configs.iter().all(|config| (config.num_processes, config.num_machines) == (7, 3)));
        let values: Vec<_> = configs.iter().map(|config| config.environment[0].1.to_str().unwrap()).collect();
        assert_eq!(values, ["0", "3", "0"]);
    }

    #[test]
    fn a_machine_keeps_its_folder_when_another_is_left_out() {
        let agents = [agent("a", 4), agent("b", 1), agent("c", 2)];
        let config = LaunchConfig::new(Program::Executable("train".into()), 1);
        let config = LaunchConfig { log_name: Some("none_x".to_owned()), ..config };
        let names = |taking_part: &[usize]| {
            let numbered: Vec<_> = taking_part.iter().map(|number| (*number, &agents[*number])).collect();
            let configs = configs_of(&config, &numbered).unwrap();
            configs.into_iter().map(|config| (config.machine_rank, config.log_name.unwrap())).collect::<Vec<_>>()
        };
        let named =
            |found: &[(usize, &str)]| found.iter().map(|(rank, name)| (*rank, (*name).to_owned())).collect::<Vec<_>>();
        assert_eq!(names(&[0, 1, 2]), named(&[(0, "none_x_0"), (1, "none_x_1"), (2, "none_x_2")]));
        assert_eq!(names(&[1, 2]), named(&[(0, "none_x_1"), (1, "none_x_2")]));
    }

    #[test]
    fn a_connecting_command_that_is_not_here_is_told_once() {
        let search = ProgramSearch { path: Some("/bin:/usr/bin".into()), ..ProgramSearch::default() };
        let check = |command: &str| {
            let agents = ["a", "b"].map(|machine| AgentCommand::by_ssh(machine, 1, &[command.into()]));
            check_connections(&[&agents[..], &[AgentCommand::here("c", 1)]].concat(), &search)
        };
        assert!(check("sh").is_ok() && check("/bin/sh").is_ok());
        let error = check("nosuch").unwrap_err();
        assert_eq!(error.exit_code(), 127);
        assert!(
            error.to_string().starts_with("the command nosuch cannot be run here, by which a, b would be"),
            "{error}"
        );
        assert_eq!(
            (check("/no/ssh").unwrap_err().exit_code(), check("/etc/passwd").unwrap_err().exit_code()),
            (127, 126)
        );
    }

    /// It stays out, and one more would be one too many.
    #[test]
    fn a_machine_on_which_something_lives_on_is_left_out_if_the_others_are_enough() {
        let agents = [agent("a", 1), agent("b", 1), agent("c", 1)];
        let mut left = Left { least: 2, found: Vec::new() };
        let error = |machine: &str, survivors: &[Survivor]| {
            let (machine, survivors) = (Some(machine.to_owned()), survivors.to_vec());
            let left = LeftBehind { machine, survivors, is_left_out: false };
            Error::interrupted(15).with_left_behind(vec![left])
        };
        assert!(left.take(error("b", &[]), &agents).left_behind()[0].is_left_out);
        assert_eq!(agents.iter().map(|agent| left.has(agent)).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(left.found[0].1, "it has not said that the ranks of an earlier attempt have ended");
        let kept = left.take(error("c", &[Survivor { process_id: 8, is_refused: true }]), &agents);
        assert!(!kept.left_behind()[0].is_left_out && left.found.len() == 1);
        let words = words::goes_on(&kept.left_behind()[0]);
        assert_eq!(words, "process 8 of an earlier attempt is still there");
    }

    /// Both shells have it between a pair of quotes.
    #[test]
    fn the_script_needs_no_quoting() {
        assert!(!AGENT_SCRIPT.contains(['\'', '\\', '!', '\n']));
        let command = agent("a", 1).command;
        assert_eq!(command[2].to_str().unwrap(), format!("exec sh -c '{AGENT_SCRIPT}'"));
    }

    #[test]
    fn a_program_keeps_its_path_and_a_script_its_interpreter() {
        let search = ProgramSearch { path: Some("/bin:/usr/bin".into()), ..ProgramSearch::default() };
        let config = LaunchConfig { args: vec!["x".into()], ..LaunchConfig::new(Program::Executable("sh".into()), 1) };
        let found = with_program_of_this_machine(config, &search);
        assert_eq!((found.program, found.args), (Program::Executable("/bin/sh".into()), vec!["x".into()]));
        let missing = LaunchConfig::new(Program::Executable("no such program".into()), 1);
        assert_eq!(with_program_of_this_machine(missing.clone(), &search), missing);
    }
}
