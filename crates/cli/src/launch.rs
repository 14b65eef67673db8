//! `accelerate launch`: from flags to a [`LaunchConfig`], and from its outcome to an exit code.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use accelerate_core::config::MixedPrecision;
use accelerate_launch::{Helper, LaunchConfig, Program, TerminalOptions, TerminalReporter, launch, num_visible_gpus};
use clap::Args;

/// Start a program on one or many processes, watch over them, and explain what went wrong.
///
/// The program is a binary (target/release/train), a Python file (train.py) or a Python module
/// (-m package.train). Each process is told its rank by the variables that torchrun uses (RANK, LOCAL_RANK,
/// WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...), so any distributed program can be started, not only those of
/// this project.
///
/// With several processes each line of output begins with [rank N]. If one fails, the others are ended
/// within a second, its last lines are shown again, and its exit code becomes that of this command. No
/// process outlives this command, even if it is killed.
#[derive(Debug, Args)]
#[command(after_help = "Every flag may also be spelled with - instead of _.")]
#[command(after_long_help = "Examples:\n  \
    Two processes on this machine, with arguments for the program:\n    \
      accelerate launch --num_processes 2 target/release/train --epochs 3\n  \
    A Python script on the CPU although there is a GPU:\n    \
      accelerate launch --cpu --num_processes 4 train.py --batch_size 8\n  \
    Mixed precision and gradient accumulation for a program that leaves them open:\n    \
      accelerate launch --mixed_precision bf16 --gradient_accumulation_steps 4 target/release/train\n  \
    Two machines with eight processes each; the second one uses --machine_rank 1:\n    \
      accelerate launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 \\\n      \
        --main_process_port 29500 --num_processes 16 target/release/train\n\n\
    Every flag may also be spelled with - instead of _ (--num-processes).\n\n\
    Exit code: that of the first process that failed, 128 + N if signal N ended it; 2 for wrong flags,\n\
    126 or 127 for a program that cannot be run or does not exist; 0 if all processes ended with 0.")]
pub(crate) struct Arguments {
    /// Number of processes, counted over all machines.
    ///
    /// Without it: one per NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves visible; one if there is none, or with --cpu.
    #[arg(long = "num_processes", alias = "num-processes", value_name = "N")]
    num_processes: Option<usize>,

    /// Keep the program on the CPU even if there is a GPU.
    #[arg(long)]
    cpu: bool,

    /// Precision of the computation, for a program that does not choose one itself.
    ///
    /// Handed on as ACCELERATE_MIXED_PRECISION. One of no, fp16, bf16, fp8.
    #[arg(long = "mixed_precision", alias = "mixed-precision", value_name = "PRECISION")]
    mixed_precision: Option<MixedPrecision>,

    /// Number of batches whose gradients are added up before each optimizer step.
    ///
    /// Handed on as ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
    #[arg(long = "gradient_accumulation_steps", alias = "gradient-accumulation-steps", value_name = "N")]
    gradient_accumulation_steps: Option<usize>,

    /// Threads of each process (OMP_NUM_THREADS).
    ///
    /// Without it, several processes share the cores evenly unless OMP_NUM_THREADS is set.
    #[arg(long = "num_cpu_threads_per_process", alias = "num-cpu-threads-per-process", value_name = "N")]
    num_cpu_threads_per_process: Option<usize>,

    /// Number of machines. Run the same command on each, with its own --machine_rank.
    #[arg(long = "num_machines", alias = "num-machines", value_name = "N", default_value_t = 1)]
    num_machines: usize,

    /// Which machine this is, counted from 0.
    #[arg(long = "machine_rank", alias = "machine-rank", value_name = "N", default_value_t = 0)]
    machine_rank: usize,

    /// Address of machine 0, where rank 0 runs. Needed on several machines.
    #[arg(long = "main_process_ip", alias = "main-process-ip", value_name = "ADDRESS")]
    main_process_ip: Option<String>,

    /// TCP port on machine 0 where the processes find each other.
    ///
    /// 0, which is the default on one machine, takes any free port. On several machines the default is 29500.
    #[arg(long = "main_process_port", alias = "main-process-port", value_name = "PORT")]
    main_process_port: Option<u16>,

    /// The program is the name of a Python module, run with python -m.
    #[arg(short = 'm', long, conflicts_with = "no_python")]
    module: bool,

    /// Run the program directly even if its name ends in .py.
    #[arg(long = "no_python", alias = "no-python")]
    no_python: bool,

    /// Do not begin lines with [rank N].
    #[arg(long = "no_prefix", alias = "no-prefix")]
    no_prefix: bool,

    /// Say nothing but what went wrong, in one line.
    #[arg(short, long)]
    quiet: bool,

    /// Seconds between asking processes to end (SIGTERM) and making them (SIGKILL) after one has failed.
    #[arg(long = "grace_period", alias = "grace-period", value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    grace_period: Duration,

    /// The same after this command was interrupted or told to end.
    ///
    /// Raise it for programs that write a checkpoint on SIGTERM. A second Ctrl-C does not wait.
    #[arg(long = "shutdown_grace_period", alias = "shutdown-grace-period", value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    shutdown_grace_period: Duration,

    /// The program (a path, a name in PATH, a .py file, or with -m a module), then its arguments.
    ///
    /// Everything after the program belongs to it. A -- directly after the program is dropped.
    #[arg(value_names = ["PROGRAM", "ARGUMENTS"], num_args = 1.., required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

pub(crate) fn run(arguments: Arguments) -> ExitCode {
    let is_quiet = arguments.quiet;
    let has_prefix = !arguments.no_prefix;
    if let (None, false) = (arguments.num_processes, is_quiet) {
        anstream::eprintln!("accelerate launch: {}", explain_default(&arguments));
    }
    let config = config(arguments);
    let mut reporter = TerminalReporter::new(TerminalOptions { has_prefix, is_quiet });
    match launch(&config, &mut reporter) {
        Ok(_) => ExitCode::SUCCESS,
        // Whoever read the output is gone; nobody is left to tell.
        Err(error) if error.is_output_closed() => ExitCode::from(error.exit_code()),
        Err(error) => {
            let text = match error.failure() {
                Some(failure) if !is_quiet => failure.to_string(),
                _ => error.to_string(),
            };
            crate::print_error("accelerate launch", &error, &text);
            ExitCode::from(error.exit_code())
        }
    }
}

fn config(arguments: Arguments) -> LaunchConfig {
    let num_processes = arguments.num_processes.unwrap_or_else(|| default_num_processes(&arguments));
    let mut words = arguments.program.into_iter();
    // Never missing: the flags' definition requires it.
    let program = words.next().unwrap_or_default();
    let program = if arguments.module {
        Program::PythonModule(program)
    } else if arguments.no_python {
        Program::Executable(program)
    } else {
        Program::guess(Path::new(&program))
    };
    let mut words = words.peekable();
    words.next_if(|first| first == "--");
    LaunchConfig {
        args: words.collect(),
        num_machines: arguments.num_machines,
        machine_rank: arguments.machine_rank,
        cpu: arguments.cpu,
        main_process_ip: arguments.main_process_ip,
        main_process_port: arguments.main_process_port,
        mixed_precision: arguments.mixed_precision,
        gradient_accumulation_steps: arguments.gradient_accumulation_steps,
        num_cpu_threads_per_process: arguments.num_cpu_threads_per_process,
        grace_period: arguments.grace_period,
        shutdown_grace_period: arguments.shutdown_grace_period,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        ..LaunchConfig::new(program, num_processes)
    }
}

fn default_num_processes(arguments: &Arguments) -> usize {
    let per_machine = if arguments.cpu { 1 } else { num_gpus().max(1) };
    per_machine * arguments.num_machines
}

fn num_gpus() -> usize {
    num_visible_gpus(Path::new("/dev"), std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

fn explain_default(arguments: &Arguments) -> String {
    let num_processes = default_num_processes(arguments);
    let reason = match (arguments.cpu, num_gpus()) {
        (true, _) => "with --cpu".to_string(),
        (false, 0) => "no NVIDIA GPU found".to_string(),
        (false, num_gpus) => format!("one for each of {num_gpus} NVIDIA GPU(s)"),
    };
    format!("--num_processes was not given, starting {num_processes} ({reason})")
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("\"{text}\" is not a number of seconds"))?;
    Duration::try_from_secs_f64(number).map_err(|_| format!("{text} seconds are negative or too many"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser;
    use rstest::rstest;

    fn parsed(line: &str) -> LaunchConfig {
        let words = ["accelerate", "launch"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Launch(arguments) => config(arguments),
            other => unreachable!("{other:?}"),
        }
    }

    #[rstest]
    #[case("--num_processes 2 train a b", &["a", "b"])]
    #[case("--num_processes 2 train --num_processes 3 -q --help -x=1", &["--num_processes", "3", "-q", "--help", "-x=1"])]
    #[case("--num_processes 2 train -- --epochs 3", &["--epochs", "3"])]
    #[case("--num_processes 2 train -- -- --epochs", &["--", "--epochs"])]
    #[case("--num_processes 2 train a -- b", &["a", "--", "b"])]
    #[case("--num_processes 2 -- train a", &["a"])]
    #[case("--num-processes=2 train", &[])]
    fn what_belongs_to_the_program(#[case] line: &str, #[case] expected: &[&str]) {
        let config = parsed(line);
        assert_eq!((config.num_processes, config.program), (2, Program::Executable("train".into())));
        assert_eq!(config.args, expected.iter().map(OsString::from).collect::<Vec<_>>());
    }

    #[rstest]
    #[case("train.py", Program::PythonScript("train.py".into()))]
    #[case("--no_python ./train.py", Program::Executable("./train.py".into()))]
    #[case("-m package.train", Program::PythonModule("package.train".into()))]
    #[case("--module package.train", Program::PythonModule("package.train".into()))]
    fn what_is_run(#[case] line: &str, #[case] expected: Program) {
        assert_eq!(parsed(line).program, expected);
    }

    #[test]
    fn every_flag_reaches_the_configuration() {
        let config = parsed(
            "--num_processes 4 --cpu --mixed_precision bf16 --gradient_accumulation_steps 3 \
             --num_cpu_threads_per_process 2 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 \
             --main_process_port 4000 --grace_period 0.25 --shutdown_grace_period 60 train",
        );
        let expected = LaunchConfig {
            cpu: true,
            mixed_precision: Some(MixedPrecision::Bf16),
            gradient_accumulation_steps: Some(3),
            num_cpu_threads_per_process: Some(2),
            num_machines: 2,
            machine_rank: 1,
            main_process_ip: Some("10.0.0.1".into()),
            main_process_port: Some(4000),
            grace_period: Duration::from_millis(250),
            shutdown_grace_period: Duration::from_secs(60),
            helper: Some(Helper::this_executable()),
            dedicated_process: true,
            ..LaunchConfig::new(Program::Executable("train".into()), 4)
        };
        assert_eq!(config, expected);
    }

    #[rstest]
    #[case("", "PROGRAM")]
    #[case("--num_process 2 train", "--num_process")]
    #[case("--num_processes two train", "two")]
    #[case("--num_processes -1 train", "-1")]
    #[case("--mixed_precision fp64 train", "fp64")]
    #[case("--main_process_port 70000 train", "70000")]
    #[case("--grace_period -1 train", "-1")]
    #[case("-m --no_python train", "--no_python")]
    fn wrong_flags_are_named(#[case] line: &str, #[case] words: &str) {
        let line = ["accelerate", "launch"].into_iter().chain(line.split_whitespace());
        let error = Cli::try_parse_from(line).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(words), "{error}");
    }
}
