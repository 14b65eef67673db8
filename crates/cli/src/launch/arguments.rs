//! The flags of `accelerate launch`, and what follows them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use accelerate_core::config::settings;
use accelerate_core::environment::MAX_WORLD_SIZE;
use accelerate_core::settings::{LONGEST_DURATION, Setting, SettingValue};
use accelerate_launch::Program;
use clap::{Arg, Args};

use super::{help, slurm};
use crate::settings::{Selection, SettingFlags};

/// Start a program on one or many processes, watch over them, and explain what went wrong.
///
/// The program is a binary (target/release/train), a Python file (train.py) or a Python module
/// (-m package.train). Each process is told its rank by the variables that torchrun uses (RANK, LOCAL_RANK,
/// WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...), so any distributed program can be started, not only those of
/// this project.
///
/// With several processes each line of output begins with [rank N]. If one fails, the others are ended
/// within a second, its last lines are shown again, and its exit code becomes that of this command. If nobody
/// reads their output any more, they go on. A single process writes as if it had been started by hand. With
/// --max_restarts all of them start again.
///
/// No process outlives this command, even if it is killed. There are three exceptions when this command is killed
/// by SIGKILL: a process that a rank has started with a cleared environment (env -i) is not found, one that
/// has changed its user (su, sudo) lives on, and what ranks have started does if the guard of this command is
/// killed with it.
#[derive(Debug, Args)]
// As under the reference, the last one of a flag that is there twice counts.
#[command(args_override_self = true)]
#[command(after_help = help::MORE)]
#[command(after_long_help = concat!("Examples:\n  \
    Two processes on this machine, with arguments for the program:\n    \
      accelerate launch --num_processes 2 target/release/train --epochs 3\n  \
    A Python script on the CPU although there is a GPU:\n    \
      accelerate launch --cpu --num_processes 4 train.py --batch_size 8\n  \
    Mixed precision and gradient accumulation for a program that leaves them open:\n    \
      accelerate launch --mixed_precision bf16 --gradient_accumulation_steps 4 target/release/train\n  \
    A model in parts on four processes, a unit for each block:\n    \
      accelerate launch --num_processes 4 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\\n      \
        target/release/train\n  \
    The same by a DeepSpeed configuration:\n    \
      accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file zero3.json target/release/train\n  \
    What a configuration file says, but in bf16:\n    \
      accelerate launch --config_file run.yaml --mixed_precision bf16 target/release/train\n  \
    Two nodes of a Slurm cluster, from its login node; the job is queued again before its time is over:\n    \
      accelerate launch --slurm --nodes 2 --gpus_per_node 8 --time 1:00:00 --requeue target/release/train\n  \
    What would be started, without starting it:\n    \
      accelerate launch --num_processes 2 --dry_run target/release/train\n  \
    Two machines from here, by ssh, with four processes and two:\n    \
      accelerate launch --hosts node1:4,node2:2 target/release/train\n  \
    The same, started again after a failure, with the machines that can be reached if there are two:\n    \
      accelerate launch --hosts node1:4,node2:4,node3:4 --nnodes 2:3 --max_restarts 5 target/release/train\n  \
    Two machines, each started by hand; the second one uses --machine_rank 1:\n    \
      accelerate launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 \\\n      \
        --main_process_port 29500 --num_processes 16 target/release/train\n\n\
    Exit code: that of the first process that failed, 128 + N if signal N ended it; 2 for wrong flags or settings, \
    126 or 127 for a program that cannot be run or does not exist; 0 if all processes ended with 0.\n\n", help::more!()))]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) settings: SettingFlags<ForLaunch>,

    /// A configuration file (YAML or JSON). Flags and variables that are set win over it.
    ///
    /// Default: accelerate/default_config.yaml in HF_HOME, else in huggingface of XDG_CACHE_HOME, else in
    /// ~/.cache/huggingface, if it exists. `accelerate config explain` shows what holds.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    pub(super) config_file: Option<PathBuf>,

    /// The program is the name of a Python module, run with python -m.
    #[arg(short = 'm', long, conflicts_with = "no_python")]
    pub(super) module: bool,

    /// Run the program directly even if its name ends in .py.
    #[arg(long = "no_python", alias = "no-python")]
    pub(super) no_python: bool,

    /// Do not begin lines with [rank N].
    #[arg(long = "no_prefix", alias = "no-prefix")]
    pub(super) no_prefix: bool,

    /// Print nothing of the launcher's own except one line when something went wrong. The output of the processes is still shown.
    #[arg(short, long)]
    pub(super) quiet: bool,

    /// Do not look at the machines of --hosts, of a host file or of a Slurm job before the start: at program, port, folder, GPUs, clock.
    #[arg(long = "no_preflight", alias = "no-preflight", help_heading = help::MACHINES)]
    pub(super) no_preflight: bool,

    /// Number of machines, as torchrun's flag has it: all N of them, or from MIN to MAX, where some cannot take part.
    ///
    /// N is another word for --num_machines N, and MIN:MAX for --num_machines MAX --min_machines MIN. A range needs machines that are
    /// named by --hosts, a host file or a Slurm job: the run begins when at least MIN of them can take part, and goes on, after a
    /// restart (--max_restarts), with at least MIN. Each restart tries all that are named again. Unlike under torchrun, machines that
    /// are not named cannot join later.
    #[arg(long, value_name = "N or MIN:MAX", value_parser = nnodes, help_heading = help::MACHINES)]
    #[arg(conflicts_with_all = ["num_machines", "min_machines"])]
    pub(super) nnodes: Option<Nnodes>,

    /// Print what would be started, with variables, cores and device of each process, and start nothing.
    #[arg(long = "dry_run", alias = "dry-run")]
    pub(super) dry_run: bool,

    /// With --dry_run: print it as JSON.
    #[arg(long, requires = "dry_run", conflicts_with_all = ["emit", "slurm"])]
    pub(super) json: bool,

    /// Seconds between asking processes to end (SIGTERM) and making them (SIGKILL) after one has failed.
    #[arg(long = "grace_period", alias = "grace-period", value_name = "SECONDS", default_value = "0.5", value_parser = seconds,
          help_heading = help::WATCHING)]
    pub(super) grace_period: Duration,

    /// The program (a path, a name, a .py file, or with -m a module), then its arguments.
    ///
    /// A name without / is looked up in PATH, and then among what Cargo has built for the project around this folder: the newer of
    /// target/release and target/debug. Everything after the program belongs to it. A -- directly after the program is dropped.
    #[arg(value_names = ["PROGRAM", "ARGUMENTS"], num_args = 1.., required = true, trailing_var_arg = true)]
    pub(super) program: Vec<OsString>,

    // The last, because its heading would hold for what follows.
    #[command(flatten)]
    pub(super) cluster: slurm::ClusterFlags,
}

/// Of how many machines a run is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nnodes {
    least: Option<usize>,
    most: usize,
}

fn nnodes(text: &str) -> Result<Nnodes, String> {
    let (least, most) = text.split_once(':').map_or((None, text), |(least, most)| (Some(least), most));
    let number = |text: &str| text.parse().ok().filter(|number| (1..=MAX_WORLD_SIZE).contains(number));
    match (least.map(number), number(most)) {
        (None, Some(most)) => Ok(Nnodes { least: None, most }),
        (Some(Some(least)), Some(most)) if least <= most => Ok(Nnodes { least: Some(least), most }),
        (Some(Some(least)), Some(most)) => Err(format!(
            "the least number of machines, {least}, is above the most, {most}; write the smaller one first, as in {most}:{least}"
        )),
        _ => Err(format!(
            "it must be a number of machines from 1 to {MAX_WORLD_SIZE} such as 2, or the least and the most of them such as 2:4"
        )),
    }
}

impl Arguments {
    /// What was said by flags of settings, or by one that stands for some of them.
    pub(super) fn said(&self) -> Vec<(&'static Setting, String)> {
        let of_nnodes = self.nnodes.map(|nnodes| [("num_machines", Some(nnodes.most)), ("min_machines", nnodes.least)]);
        let of_nnodes = of_nnodes
            .into_iter()
            .flatten()
            .filter_map(|(path, number)| Some((settings().find(|setting| setting.path == path)?, number?.to_string())));
        self.settings.said.iter().cloned().chain(of_nnodes).collect()
    }

    /// What every rank runs.
    pub(super) fn target(&self) -> Program {
        // Never missing: the flags' definition requires it.
        let program = self.program.first().cloned().unwrap_or_default();
        if self.module {
            Program::PythonModule(program)
        } else if self.no_python {
            Program::Executable(program)
        } else {
            Program::guess(Path::new(&program))
        }
    }
}

/// Every flag of the table is one of `accelerate launch`.
#[derive(Debug)]
pub(super) struct ForLaunch;

impl Selection for ForLaunch {
    fn includes(_: &Setting) -> bool {
        true
    }

    fn adjust(flag: &str, argument: Arg) -> Arg {
        let argument = match help::heading(flag) {
            Some(heading) => argument.help_heading(heading),
            None => argument,
        };
        // The one flag that the reference has a letter for.
        if flag == "tee" { argument.short('t') } else { argument }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wanted = || format!("it must be a number of seconds from 0 to {}, which is a year", LONGEST_DURATION.as_secs());
    Duration::read(text).ok_or_else(wanted)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("2", Some((None, 2)))]
    #[case("1:4", Some((Some(1), 4)))]
    #[case("3:3", Some((Some(3), 3)))]
    #[case("0", None)]
    #[case("0:2", None)]
    #[case("3:2", None)]
    #[case("1:", None)]
    #[case("-1", None)]
    #[case("1:2:3", None)]
    #[case("", None)]
    fn numbers_of_machines_as_torchrun_has_them(#[case] text: &str, #[case] wanted: Option<(Option<usize>, usize)>) {
        assert_eq!(nnodes(text).ok().map(|nnodes| (nnodes.least, nnodes.most)), wanted);
    }

    /// Is a tip wanted: a flag that is almost one of those that exist?
    fn line_has_a_slip(words: &str) -> bool {
        words == "--num_process"
    }

    #[rstest]
    #[case("", "PROGRAM")]
    #[case("--use_deepspeed --zero_stage 4 train", "one of 0, 1, 2, 3")]
    #[case("--use_fsdp --fsdp_reshard_after_forward maybe train", "FULL_SHARD")]
    #[case("--use_deepspeed --gradient_clipping much train", "auto, or a number")]
    #[case("--use_fsdp --fsdp_forward_prefetch maybe train", "maybe")]
    #[case("--use_fsdp --fsdp_sharding_strategy SOME train", "SOME")]
    #[case("--num_process 2 train", "--num_process")]
    #[case("--num_processes two train", "two")]
    #[case("--num_processes -1 train", "--num_processes is \"-1\", but must be a whole number of at least 1")]
    #[case("--gradient_accumulation_steps -2 train", "--gradient_accumulation_steps is \"-2\"")]
    #[case("--machine_rank -1 train", "--machine_rank is \"-1\"")]
    #[case("--use_megatron_lm train", "Megatron-LM is not available")]
    #[case("--megatron-lm-tp-degree 2 train", "Megatron-LM is not available")]
    #[case("--use_xpu train", "--use_xpu is refused: CPUs and NVIDIA GPUs")]
    #[case("--ipex train", "--ipex is refused")]
    #[case("--aws_access_key_id x train", "--aws_access_key_id is refused: Amazon SageMaker")]
    #[case("--nproc_per_node 2 train", "--nproc_per_node is refused: it is torchrun's; use --num_processes")]
    #[case("--node-rank=1 train", "--node_rank is refused: it is torchrun's; use --machine_rank")]
    #[case("--rdzv_endpoint a:29500 train", "--rdzv_endpoint is refused: it is torchrun's; use --main_process_ip")]
    #[case("--rdzv-id 7 train", "--rdzv_id is refused: it is torchrun's; runs are kept apart by their ports")]
    #[case(
        "--standalone train",
        "--standalone is refused: it is torchrun's; a launch on one machine takes any free port"
    )]
    #[case("--local_addr 10.0.0.2 train", "GLOO_SOCKET_IFNAME")]
    #[case("--redirects 3 train", "--redirects is refused: it is torchrun's; use --tee")]
    #[case("--log_line_prefix_template x train", "lines begin with [rank N], or with nothing if --no_prefix is given")]
    #[case("--local-ranks-filter 0 train", "--local_ranks_filter is refused: it is torchrun's; use --tee")]
    #[case("--duplicate_stderr_filters a train", "--duplicate_stderr_filters is refused: it is torchrun's; use --tee")]
    #[case("--logs_specs x train", "use --tee and --log_dir")]
    #[case("--numa-binding node train", "--numa_binding is refused: it is torchrun's; use --enable_cpu_affinity")]
    #[case("--signals_to_handle SIGTERM train", "SIGUSR1 and SIGUSR2 are passed on; leave it out")]
    #[case("--run_path train.py", "name the script in the place of the program")]
    #[case(
        "--nnodes 3:2 train",
        "the least number of machines, 3, is above the most, 2; write the smaller one first, as in 2:3"
    )]
    #[case("--nnodes 2-4 train", "from 1 to 1048576 such as 2, or the least and the most of them such as 2:4")]
    #[case("--nnodes 2 --num_machines 2 train", "cannot be used with")]
    #[case("--nnodes 1:2 --min_machines 1 train", "cannot be used with")]
    #[case("--tee 4 train", "--tee is \"4\", but must be 0 (none), 1")]
    #[case("--json train", "--dry_run")]
    #[case("--json --emit slurm train", "--emit")]
    #[case("--mixed_precision fp64 train", "fp64")]
    #[case(
        "--max_restarts 99999999999999999999 train",
        "\"99999999999999999999\", but must be a whole number from 0 to 1844"
    )]
    #[case("--machine_rank +99999999999999999999 train", "but must be a whole number from 0 to 18446744073709551615")]
    #[case(
        "--num_machines 1048577 train",
        "--num_machines is \"1048577\", but must be a whole number from 1 to 1048576"
    )]
    #[case(
        "--min_machines 1048577 train",
        "--min_machines is \"1048577\", but must be a whole number from 1 to 1048576"
    )]
    #[case(
        "--nnodes 99999999999999999999 train",
        "'--nnodes <N or MIN:MAX>': it must be a number of machines from 1 to 1048576"
    )]
    #[case("--nnodes 1:1048577 train", "invalid value '1:1048577' for '--nnodes <N or MIN:MAX>'")]
    #[case("--nodes 99999999999999999999 train", "'--nodes <N>': it must be a whole number from 1 to 4294967295")]
    #[case("--gpus_per_node 4294967296 train", "'--gpus_per_node <N>': it must be a whole number from 1 to 4294967295")]
    #[case(
        "--connection_timeout 1e30 train",
        "\"1e30\", but must be a number of seconds from 0 to 31536000, which is a year"
    )]
    #[case(
        "--shutdown_grace_period 1e10 train",
        "\"1e10\", but must be a number of seconds from 0 to 31536000, which is a year"
    )]
    #[case("--max_restarts 1.5 train", "\"1.5\", but must be a whole number of at least 0")]
    #[case("--main_process_port 70000 train", "\"70000\", but must be a whole number from 0 to 65535")]
    #[case(
        "--grace_period -1 train",
        "'-1' for '--grace_period <SECONDS>': it must be a number of seconds from 0 to 31536000"
    )]
    #[case(
        "--grace_period 1e10 train",
        "'1e10' for '--grace_period <SECONDS>': it must be a number of seconds from 0 to 31536000"
    )]
    #[case("--log_dir=-1 --tee -1 train", "--tee is \"-1\", but must be 0 (none), 1")]
    #[case("--zero_stage -1 train", "--zero_stage is \"-1\", but must be one of 0, 1, 2, 3")]
    #[case("-1 train", "unexpected argument '-1' found")]
    #[case("-m --no_python train", "--no_python")]
    fn wrong_flags_are_named(#[case] line: &str, #[case] words: &str) {
        let line: Vec<_> =
            ["accelerate", "launch"].into_iter().chain(line.split_whitespace()).map(OsString::from).collect();
        let error = crate::flags::explained(crate::parsed(&line).unwrap_err());
        assert!(!error.to_string().contains("tip:") || line_has_a_slip(words), "{error}");
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(words), "{error}");
    }
}
