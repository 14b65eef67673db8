//! `accelerate launch --dry_run`: the plan of a launch as text or JSON, and nothing started.

mod machines;

use accelerate_core::names::counted;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use accelerate_core::config::RunConfig;
use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_launch::{
    AgentCommand, Error, LaunchConfig, Machine, Plan, PortReservation, ProgramSearch, RankCommand, SECRET_VARIABLE,
    core_list, plan, resolve_program, temporary_folder,
};
use serde_json::{Map, Value, json};

/// Stands in for the end of a name that each launch makes up.
const MADE_UP: &str = "RANDOM";

/// What a launch of `config` would start, to be printed.
pub(super) fn described(
    config: &LaunchConfig,
    agents: &Option<Vec<AgentCommand>>,
    run: &RunConfig,
    as_json: bool,
) -> Result<String, Error> {
    if let Some(agents) = agents {
        return machines::described(config, agents, run, as_json);
    }
    config.check()?;
    let machine = Machine::probe();
    let command = resolve_program(&config.program, &ProgramSearch::of_this_process())?;
    let port = PortReservation::named(config);
    let plan = plan(&as_started(config), &command, port.unwrap_or(0), &machine);
    let view = View { plan: &plan, run, machine: &machine, has_port: port.is_some(), guesses_threads: false };
    Ok(if as_json { format!("{:#}\n", view.json(config)) } else { view.text(config) })
}

/// With what a launch adds by itself.
fn as_started(config: &LaunchConfig) -> LaunchConfig {
    let mut config = config.clone();
    let has_secret = config.environment.iter().any(|(name, _)| name == SECRET_VARIABLE);
    if config.num_machines == 1 && config.num_processes > 1 && !has_secret {
        config.environment.push((SECRET_VARIABLE.into(), MADE_UP.into()));
    }
    let base = config
        .log_dir
        .take()
        .or_else(|| config.tee.any().then(|| temporary_folder().join(format!("accelerate_{MADE_UP}"))));
    let base = base.map(|base| std::path::absolute(&base).unwrap_or(base));
    config.log_dir = base.map(|base| base.join(format!("none_{MADE_UP}")));
    config
}

struct View<'a> {
    plan: &'a Plan,
    run: &'a RunConfig,
    machine: &'a Machine,
    has_port: bool,
    /// How many cores the machines of the ranks have is not known.
    guesses_threads: bool,
}

impl View<'_> {
    fn text(&self, config: &LaunchConfig) -> String {
        let mut text = format!(
            "nothing is started; a launch would start {} of {} on this machine\ncommand: {}\n",
            self.plan.ranks.len(),
            counted(config.world_size(), "process"),
            self.command(),
        );
        let shared = self.shared();
        // Writing into a string cannot fail.
        let _ = writeln!(text, "variables of each process:");
        self.lines(&shared, &mut text);
        for rank in &self.plan.ranks {
            let own: Vec<_> = rank.environment.iter().filter(|variable| !shared.contains(variable)).cloned().collect();
            let _ =
                writeln!(text, "rank {}: device {}, cores {}", rank.rank, self.device(config, rank), self.cores(rank));
            for file in log_files(rank) {
                let _ = writeln!(text, "  writes {}", in_one_line(&file));
            }
            self.lines(&own, &mut text);
        }
        text
    }

    fn json(&self, config: &LaunchConfig) -> Value {
        let ranks: Vec<_> = self.plan.ranks.iter().map(|rank| self.rank_as_json(config, rank)).collect();
        let command = self.plan.ranks.first().map(|rank| &rank.command);
        let command: Vec<_> = command.into_iter().flatten().map(|word| text(word)).collect();
        json!({
            "command": command,
            "num_processes": config.world_size(),
            "ranks": ranks,
            "not_utf8": self.not_utf8(),
        })
    }

    fn rank_as_json(&self, config: &LaunchConfig, rank: &RankCommand) -> Value {
        json!({
            "rank": rank.rank,
            "local_rank": local_rank(config, rank),
            "device": self.device(config, rank),
            "cores": rank.cores.as_ref().unwrap_or(&self.machine.cores),
            "log_files": log_files(rank),
            "environment": self.set(rank),
        })
    }

    /// The variables that are set.
    fn set(&self, rank: &RankCommand) -> Map<String, Value> {
        let set = rank.environment.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        set.map(|(name, value)| (text(name), self.value(name, value).into())).collect()
    }

    /// What is no UTF-8, which JSON cannot hold: words of the command by number, variables and files of ranks.
    fn not_utf8(&self) -> Vec<String> {
        let is_other = |value: &OsStr| value.to_str().is_none();
        let command = self.plan.ranks.first().into_iter().flat_map(|rank| rank.command.iter().enumerate());
        let words = command.filter(|(_, word)| is_other(word)).map(|(number, _)| format!("command[{number}]"));
        let of_rank = |(number, rank): (usize, &RankCommand)| {
            let set = rank.environment.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
            let set = set.filter(|(name, value)| is_other(name) || is_other(value));
            let variables = set.map(|(name, _)| format!("ranks[{number}].environment.{}", text(name)));
            let files = paths(rank).enumerate().filter(|(_, file)| is_other(file.as_os_str()));
            let files = files.map(|(place, _)| format!("ranks[{number}].log_files[{place}]"));
            variables.chain(files).collect::<Vec<_>>()
        };
        words.chain(self.plan.ranks.iter().enumerate().flat_map(of_rank)).collect()
    }

    fn command(&self) -> String {
        let words = self.plan.ranks.first().map(|rank| rank.command.as_slice()).unwrap_or_default();
        crate::shell_command(words.iter().map(OsString::as_os_str))
    }

    /// The variables that all ranks get alike.
    fn shared(&self) -> Vec<(OsString, Option<OsString>)> {
        let Some((first, others)) = self.plan.ranks.split_first() else { return Vec::new() };
        let is_shared = |variable: &&_| others.iter().all(|rank| rank.environment.contains(variable));
        first.environment.iter().filter(is_shared).cloned().collect()
    }

    /// A line for each variable that is set, and for each one that is there now and would be taken away.
    fn lines(&self, variables: &[(OsString, Option<OsString>)], lines: &mut String) {
        for (name, value) in variables {
            let _ = match value {
                Some(value) => writeln!(lines, "  {}={}", name.shown(), in_one_line(&self.value(name, value))),
                None if std::env::var_os(name).is_some() => writeln!(lines, "  {} is removed", name.shown()),
                None => Ok(()),
            };
        }
    }

    fn value(&self, name: &OsStr, value: &OsStr) -> String {
        if name == "MASTER_PORT" && !self.has_port {
            return "(any free port)".to_owned();
        }
        if name == "OMP_NUM_THREADS" && self.guesses_threads {
            return "(a share of the cores there)".to_owned();
        }
        let (name, value) = (text(name), text(value));
        let shown = crate::env::shown(&name, &value);
        shown.split_once('=').map(|(_, value)| value.to_owned()).unwrap_or_default()
    }

    fn device(&self, config: &LaunchConfig, rank: &RankCommand) -> String {
        let cluster = &self.run.cluster;
        match (&cluster.torch_device, super::num_gpus(self.run)) {
            (Some(device), _) => device.clone(),
            (None, num_gpus @ 1..) if !cluster.use_cpu => format!("cuda:{}", local_rank(config, rank) % num_gpus),
            _ => "cpu".to_owned(),
        }
    }

    fn cores(&self, rank: &RankCommand) -> String {
        match &rank.cores {
            Some(cores) => core_list(cores),
            None => format!("any of {}", core_list(&self.machine.cores)),
        }
    }
}

/// Among the ranks of its machine, of which other launchers may have started some.
fn local_rank(config: &LaunchConfig, rank: &RankCommand) -> usize {
    config.outer_world.and_then(|world| world.local_rank).unwrap_or(rank.local_rank)
}

fn paths(rank: &RankCommand) -> impl Iterator<Item = &PathBuf> {
    [&rank.log_files.stdout, &rank.log_files.stderr].into_iter().flatten()
}

fn log_files(rank: &RankCommand) -> Vec<String> {
    paths(rank).map(|file| text(file.as_os_str())).collect()
}

/// The value as text. Bytes that are no UTF-8 become numbers, so that two different values do not look alike.
fn text(value: &OsStr) -> String {
    let mut text = String::new();
    for chunk in value.as_bytes().utf8_chunks() {
        text += chunk.valid();
        chunk.invalid().iter().for_each(|byte| text += &format!("\\x{byte:02x}"));
    }
    text
}
