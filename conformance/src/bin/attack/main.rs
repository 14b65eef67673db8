//! Attacks runs that train and save: kills and stops ranks and launchers, lets ranks fail, lets strangers connect, and takes
//! the network away. After each attack everything has to be over in time, nobody may be left, the right rank has to be named, and what was saved
//! has to be whole.
//!
//! `cargo xtask soak attack` builds and starts it. It starts itself once more for every launcher.

mod attempt;
mod checkpoints;
mod run;

use accelerate_launch::{Capture, Helper, LaunchConfig, Program, TerminalOptions, TerminalReporter, helper, launch};
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
    /// Be the launcher of one run, of this many ranks
    #[arg(long, hide = true)]
    launch: Option<usize>,
    /// What the ranks run
    #[arg(long, hide = true, default_value = "soak_train")]
    script: String,
    /// The folder that the run saves to
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

fn main() -> ExitCode {
    if let Some(code) = helper::run_if_asked() {
        return code;
    }
    let arguments = Arguments::parse();
    match (arguments.launch, &arguments.folder) {
        (Some(num_processes), Some(folder)) => be_launcher(&arguments, num_processes, folder.clone()),
        _ => arguments.checkpoints.map_or_else(|| attack(&arguments), |kills| kill_checkpointed(&arguments, kills)),
    }
}

fn kill_checkpointed(arguments: &Arguments, kills: u64) -> ExitCode {
    match checkpoints::kill(&arguments.program, kills, arguments.seed) {
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

fn be_launcher(arguments: &Arguments, num_processes: usize, folder: PathBuf) -> ExitCode {
    let config = LaunchConfig {
        args: vec![arguments.script.clone().into(), "--folder".into(), folder.into()],
        num_cpu_threads_per_process: Some(1),
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        ..LaunchConfig::new(Program::Executable(arguments.program.clone().into()), num_processes)
    };
    let mut reporter = TerminalReporter::new(TerminalOptions { has_prefix: true, is_quiet: false });
    match launch(&config, &mut reporter) {
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
