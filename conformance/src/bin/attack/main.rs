//! Attacks runs that train and save: kills and stops ranks and launchers, lets ranks fail, lets strangers connect, and takes
//! the network away. After each attack everything has to be over in time, nobody may be left, the right rank has to be named, and what was saved
//! has to be whole.
//!
//! `cargo xtask soak attack` builds and starts it. It starts itself once more for every launcher.

mod attempt;
mod checkpoints;
mod launches;
mod run;

use accelerate_launch::{
    Capture, Helper, LaunchConfig, Preflight, Program, TerminalOptions, TerminalReporter, helper, launch,
    launch_on_machines,
};
use attempt::{Attempt, Kind};
use clap::Parser;
use run::Network;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Attack runs of a program that trains and saves.
#[derive(Debug, Parser)]
struct Arguments {
    /// The program that trains: `conformance`, built with this one
    #[arg(long)]
    program: PathBuf,
    /// How many runs to attack
    #[arg(long, default_value_t = 500)]
    tries: u64,
    /// Where the random numbers begin; the same seed makes the same plans
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many seconds later than it has to be everything may be over
    #[arg(long, default_value_t = 2)]
    slack: u64,
    /// Kill runs that save checkpoints so many times instead, and let them go on each time
    #[arg(long)]
    checkpoints: Option<u64>,
    /// Strike runs that are started again so many times instead: ranks, launchers, machines and the links between them
    #[arg(long, conflicts_with = "checkpoints")]
    launches: Option<u64>,
    /// Of those, make this one only, counted from 0
    #[arg(long, requires = "launches")]
    only: Option<u64>,
    /// Do this in all of them
    #[arg(long, requires = "launches")]
    event: Option<launches::Kind>,
    /// No machines beside this one
    #[arg(long, requires = "launches")]
    one_machine: bool,
    /// Be the launcher of one run, of this many ranks
    #[arg(long, hide = true)]
    launch: Option<usize>,
    /// What the ranks run
    #[arg(long, hide = true, default_value = "soak_train")]
    script: String,
    /// The folder that the run saves to
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
    /// The machines of the run, with their numbers of ranks: `10.0.0.1:2,10.0.0.2:1`
    #[arg(long, hide = true, value_delimiter = ',')]
    hosts: Vec<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    max_restarts: usize,
    /// In seconds
    #[arg(long, hide = true, default_value_t = 30.0)]
    connection_timeout: f64,
    /// Of how many machines the run is made at least
    #[arg(long, hide = true)]
    min_machines: Option<usize>,
    /// The port of the main process
    #[arg(long, hide = true)]
    main_port: Option<u16>,
}

fn main() -> ExitCode {
    if let Some(code) = helper::run_if_asked() {
        return code;
    }
    if let Some(code) = launches::login::run_if_asked().or_else(launches::strangers::run_if_asked) {
        return code;
    }
    let arguments = Arguments::parse();
    if let (Some(num_processes), Some(folder)) = (arguments.launch, &arguments.folder) {
        return be_launcher(&arguments, num_processes, folder.clone());
    }
    let Arguments { program, seed, slack, .. } = &arguments;
    match (arguments.checkpoints, arguments.launches) {
        (Some(kills), _) => told(checkpoints::kill(program, kills, *seed)),
        (_, Some(trials)) => {
            let slack = Duration::from_secs(*slack);
            let (only, event, one_machine) = (arguments.only, arguments.event, arguments.one_machine);
            told(launches::Soak { program, trials, seed: *seed, only, event, one_machine, slack }.run())
        }
        _ => attack(&arguments),
    }
}

fn told(faults: anyhow::Result<u64>) -> ExitCode {
    match faults {
        Ok(0) => ExitCode::SUCCESS,
        Ok(faults) => {
            eprintln!("{faults} faults");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What ranks on machines get of the variables of this process.
fn is_handed_on(name: &str) -> bool {
    ["ACCELERATE_", "CHECKPOINTED_"].iter().any(|prefix| name.starts_with(prefix))
}

fn be_launcher(arguments: &Arguments, num_processes: usize, folder: PathBuf) -> ExitCode {
    let handed_on = std::env::vars().filter(|(name, _)| !arguments.hosts.is_empty() && is_handed_on(name));
    let config = LaunchConfig {
        args: vec![arguments.script.clone().into(), "--folder".into(), folder.into()],
        num_cpu_threads_per_process: Some(1),
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        max_restarts: arguments.max_restarts,
        min_machines: arguments.min_machines,
        main_process_port: arguments.main_port,
        connection_timeout: Duration::from_secs_f64(arguments.connection_timeout),
        environment: handed_on.map(|(name, value)| (name.into(), value.into())).collect(),
        ..LaunchConfig::new(Program::Executable(arguments.program.clone().into()), num_processes)
    };
    let mut reporter = TerminalReporter::new(TerminalOptions { has_prefix: true, is_quiet: false });
    let outcome = match launches::agents(&arguments.hosts) {
        Ok(None) => launch(&config, &mut reporter),
        Ok(Some(agents)) => launch_on_machines(&config, &agents, Preflight::Full, &mut reporter),
        Err(error) => return told(Err(error)),
    };
    match outcome {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            let text = error.failure().map_or_else(|| error.to_string(), ToString::to_string);
            eprintln!("launcher: {text}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn attack(arguments: &Arguments) -> ExitCode {
    let began = Instant::now();
    let mut faults = 0;
    let has_networks = Network::can_be_made();
    if !has_networks {
        println!(
            "no network falls silent, because this process may not make any: start as root, with `ip` and `unshare`"
        );
    }
    let mut counts = [0_u64; Kind::ALL.len()];
    for number in 0..arguments.tries {
        let attempt = Attempt::plan(arguments.seed.wrapping_add(number), has_networks);
        counts[attempt.kind as usize] += 1;
        if let Err(error) = attempt.carry_out(&arguments.program, Duration::from_secs(arguments.slack)) {
            faults += 1;
            eprintln!("fault in try {number}, {attempt:?}: {error:#}");
        }
        let done = number + 1;
        if done % 25 == 0 || done == arguments.tries {
            println!("{done} of {} tries, {faults} faults, {} s", arguments.tries, began.elapsed().as_secs());
        }
    }
    for (kind, count) in Kind::ALL.iter().zip(counts) {
        println!("{count} x {kind:?}");
    }
    if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
