//! The same for a launch on several machines: what is decided here is shown, and nothing is known of the machines themselves.

use accelerate_core::names::counted;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use accelerate_core::config::RunConfig;
use accelerate_core::files::in_one_line;
use accelerate_launch::{
    AgentCommand, Capture, Error, LaunchConfig, Machine, Plan, ProgramSearch, RankCommand, SECRET_VARIABLE,
    configs_of_machines, plan, resolve_program,
};
use serde_json::{Value, json};

use super::{MADE_UP, View, as_started, log_files, text};

/// Which machine would have which ranks, the command that leads there, and what each rank would be given.
pub(super) fn described(
    config: &LaunchConfig,
    agents: &[AgentCommand],
    run: &RunConfig,
    as_json: bool,
) -> Result<String, Error> {
    let mut config = config.clone();
    if !config.environment.iter().any(|(name, _)| name == SECRET_VARIABLE) {
        config.environment.push((SECRET_VARIABLE.into(), MADE_UP.into()));
    }
    let configs = configs_of_machines(&config, agents)?;
    let command = program(&config);
    let port = config.main_process_port.filter(|port| *port != 0);
    // Of another machine, which has variables of its own.
    let machine = Machine {
        omp_num_threads: None,
        pythonunbuffered_is_set: false,
        set_variables: Vec::new(),
        python_path: None,
        cuda_visible_devices: None,
        stdin_is_terminal: false,
        ..Machine::probe()
    };
    let plans: Vec<Plan> = configs
        .iter()
        .map(|config| {
            let (capture, hands_on_input, enable_cpu_affinity) = (Capture::Always, false, false);
            let config = LaunchConfig { capture, hands_on_input, enable_cpu_affinity, ..as_started(config) };
            plan(&config, &command, port.unwrap_or(0), &machine)
        })
        .collect();
    let Some(all) = plans.first().map(|first| {
        let ranks = plans.iter().flat_map(|plan| plan.ranks.iter().cloned()).collect();
        Plan { ranks, ..first.clone() }
    }) else {
        return Ok(String::new());
    };
    let guesses_threads = config.num_cpu_threads_per_process.is_none();
    let view = View { plan: &all, run, machine: &machine, has_port: port.is_some(), guesses_threads };
    let machines: Vec<_> = agents.iter().zip(&plans).collect();
    Ok(match as_json {
        true => format!("{:#}\n", view.machines_as_json(&config, &machines)),
        false => view.machines_as_text(&machines),
    })
}

/// As a launch tells it to the machines: under the path that it has here, if it is here.
fn program(config: &LaunchConfig) -> Vec<OsString> {
    let Ok(mut command) = resolve_program(&config.program, &ProgramSearch::of_this_process()) else {
        return vec![config.program.name().to_owned()];
    };
    if let Some(first) = command.first_mut() {
        let path = PathBuf::from(&*first);
        *first = std::path::absolute(&path).unwrap_or(path).into();
    }
    command
}

impl View<'_> {
    fn machines_as_text(&self, machines: &[(&AgentCommand, &Plan)]) -> String {
        let (total, mut shared) = (self.plan.ranks.len(), self.shared());
        // What is taken away depends on what a machine has.
        shared.retain(|(_, value)| value.is_some());
        let mut shown = format!(
            "nothing is started; a launch would start {} on {}\ncommand: {}\n",
            counted(total, "process"),
            counted(machines.len(), "machine"),
            self.command(),
        );
        // Writing into a string cannot fail.
        let _ = writeln!(shown, "variables of each process, beside those of its machine:");
        self.lines(&shared, &mut shown);
        for (agent, plan) in machines {
            let first = plan.ranks.first().map_or(0, |rank| rank.rank);
            let ranks = match plan.ranks.len() {
                1 => format!("rank {first}"),
                number => format!("ranks {first}-{}", first + number.saturating_sub(1)),
            };
            let command = crate::shell_command(agent.command.iter().map(OsString::as_os_str));
            let _ = writeln!(shown, "{}: {ranks}, by: {command}", agent.machine);
            for rank in &plan.ranks {
                let _ = writeln!(shown, "rank {} on {}:", rank.rank, agent.machine);
                for file in log_files(rank) {
                    let _ = writeln!(shown, "  writes {}", in_one_line(&file));
                }
                self.lines(&own(rank, &shared), &mut shown);
            }
        }
        shown
    }

    fn machines_as_json(&self, config: &LaunchConfig, machines: &[(&AgentCommand, &Plan)]) -> Value {
        let words = |words: &[OsString]| words.iter().map(|word| text(word)).collect::<Vec<_>>();
        let of_first = machines.first().filter(|_| machines.len() > 1).map(|(agent, _)| &agent.address);
        let main_process_ip = config.main_process_ip.as_ref().or(of_first);
        let machines = machines.iter().map(|(agent, plan)| {
            let ranks = plan.ranks.iter().map(|rank| {
                json!({
                    "rank": rank.rank,
                    "local_rank": rank.local_rank,
                    "log_files": log_files(rank),
                    "environment": self.set(rank),
                })
            });
            json!({
                "machine": agent.machine,
                "first_rank": plan.ranks.first().map(|rank| rank.rank),
                "num_processes": agent.num_processes,
                "command": words(&agent.command),
                "ranks": ranks.collect::<Vec<_>>(),
            })
        });
        let machines: Vec<_> = machines.collect();
        json!({
            "command": self.plan.ranks.first().map(|rank| words(&rank.command)),
            "main_process_ip": main_process_ip,
            "num_processes": self.plan.ranks.len(),
            "machines": machines,
            "not_utf8": self.not_utf8(),
        })
    }
}

/// The variables of one rank, without those of all.
fn own(rank: &RankCommand, shared: &[(OsString, Option<OsString>)]) -> Vec<(OsString, Option<OsString>)> {
    let own = rank.environment.iter().filter(|variable| variable.1.is_some() && !shared.contains(variable));
    own.cloned().collect()
}
