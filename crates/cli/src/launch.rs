//! `accelerate launch`: from flags to a [`LaunchConfig`], and from its outcome to an exit code.

mod sharding;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use accelerate_core::config::MixedPrecision;
use accelerate_launch::{Helper, LaunchConfig, Program, TerminalOptions, TerminalReporter, launch, num_visible_gpus};
use clap::Args;
use sharding::{DeepSpeedArguments, FsdpArguments};

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
    A model in parts on four processes, a unit for each block:\n    \
      accelerate launch --num_processes 4 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\\n      \
        target/release/train\n  \
    The same by a DeepSpeed configuration:\n    \
      accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file zero3.json target/release/train\n  \
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

    #[command(flatten)]
    fsdp: FsdpArguments,

    #[command(flatten)]
    deep_speed: DeepSpeedArguments,

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
    if let Err(error) = check_sharding(&arguments) {
        crate::print_error("accelerate launch", &error, &error.to_string());
        return ExitCode::from(2);
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

/// What the flags about sharding set for the ranks.
fn sharding_variables(arguments: &Arguments) -> Vec<(OsString, OsString)> {
    [arguments.fsdp.variables(), arguments.deep_speed.variables()].concat()
}

/// Fails on what every rank would fail on, before there are any.
fn check_sharding(arguments: &Arguments) -> Result<(), accelerate_core::Error> {
    let mut variables = sharding_variables(arguments);
    let steps = arguments.gradient_accumulation_steps.map(|steps| steps.to_string().into());
    variables.extend(steps.map(|steps| ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS".into(), steps)));
    let lookup = |name: &str| {
        let given = variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        given.or_else(|| std::env::var_os(name)).map(|value| value.to_string_lossy().into_owned())
    };
    arguments.fsdp.check(&lookup)?;
    arguments.deep_speed.check(&lookup)
}

fn config(arguments: Arguments) -> LaunchConfig {
    let environment = sharding_variables(&arguments);
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
        environment,
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
    use accelerate_core::config::{AutoWrapPolicy, BackwardPrefetch, FullyShardedDataParallelPlugin, ShardingStrategy};
    use clap::Parser;
    use rstest::rstest;

    fn parsed(line: &str) -> LaunchConfig {
        let words = ["accelerate", "launch"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Launch(arguments) => config(*arguments),
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
    #[case("", &[])]
    #[case("--use_fsdp", &["ACCELERATE_USE_FSDP=true", "ACCELERATE_USE_DEEPSPEED=false"])]
    #[case(
        "--use_fsdp --fsdp_version 1 --fsdp_sharding_strategy 2 --fsdp_reshard_after_forward true --fsdp_min_num_params 5 \
         --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap layer.*,head --fsdp_ignored_modules a.b \
         --fsdp_backward_prefetch BACKWARD_PRE --fsdp_forward_prefetch no --fsdp_offload_params 1 \
         --fsdp_sync_module_states true --fsdp_activation_checkpointing true \
         --fsdp_activation_checkpointing_offload false --fsdp_state_dict_type FULL_STATE_DICT --fsdp_use_orig_params true \
         --fsdp_cpu_ram_efficient_loading true",
        &[
            "ACCELERATE_USE_FSDP=true", "ACCELERATE_USE_DEEPSPEED=false", "FSDP_VERSION=1", "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP",
            "FSDP_RESHARD_AFTER_FORWARD=true", "FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP=layer.*,head", "FSDP_MIN_NUM_PARAMS=5", "FSDP_IGNORED_MODULES=a.b",
            "FSDP_BACKWARD_PREFETCH=BACKWARD_PRE", "FSDP_FORWARD_PREFETCH=false", "FSDP_OFFLOAD_PARAMS=true",
            "FSDP_SYNC_MODULE_STATES=true", "FSDP_ACTIVATION_CHECKPOINTING=true",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=false", "FSDP_STATE_DICT_TYPE=FULL_STATE_DICT",
            "FSDP_USE_ORIG_PARAMS=true", "FSDP_CPU_RAM_EFFICIENT_LOADING=true",
        ]
    )]
    #[case(
        "--use-deepspeed --deepspeed-config-file ds.json --zero-stage 3 --offload_optimizer_device nvme \
         --offload_param_device cpu --offload_optimizer_nvme_path /a --offload_param_nvme_path /b \
         --gradient_clipping auto --zero3_init_flag true --zero3_save_16bit_model off",
        &[
            "ACCELERATE_USE_DEEPSPEED=true", "ACCELERATE_USE_FSDP=false", "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE=3", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=nvme",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH=/a",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=/b", "ACCELERATE_GRADIENT_CLIPPING=auto",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT=true", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=false",
        ]
    )]
    fn flags_about_sharding_become_variables(#[case] flags: &str, #[case] wanted: &[&str]) {
        let found = parsed(&format!("{flags} --num_processes 2 train")).environment;
        let found: Vec<String> =
            found.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect();
        assert_eq!(found, wanted);
    }

    /// What the library reads of these variables.
    #[test]
    fn variables_are_those_that_the_library_reads() {
        let environment = parsed(
            "--use_fsdp --fsdp_sharding_strategy HYBRID_SHARD --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
             --fsdp_transformer_layer_cls_to_wrap layer.* --fsdp_ignored_modules head --fsdp_backward_prefetch BACKWARD_POST \
             --fsdp_forward_prefetch true --fsdp_offload_params true --fsdp_sync_module_states false \
             --fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true train",
        );
        let lookup = |name: &str| {
            let found = environment.environment.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        let wanted = FullyShardedDataParallelPlugin {
            sharding_strategy: ShardingStrategy::HybridShard,
            auto_wrap_policy: AutoWrapPolicy::TransformerBasedWrap,
            transformer_cls_names_to_wrap: vec!["layer.*".into()],
            ignored_modules: vec!["head".into()],
            backward_prefetch: BackwardPrefetch::BackwardPost,
            forward_prefetch: true,
            cpu_offload: true,
            sync_module_states: false,
            activation_checkpointing: true,
            activation_checkpointing_offload: true,
            ..Default::default()
        };
        assert_eq!(FullyShardedDataParallelPlugin::from_environment(&lookup).unwrap(), wanted);
    }

    #[rstest]
    #[case("--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP", "min_num_params")]
    #[case("--use_fsdp --fsdp_version 3", "FSDP_VERSION")]
    #[case("--use_fsdp --fsdp_min_num_params 5", "only SIZE_BASED_WRAP counts parameters")]
    #[case("--use_fsdp --fsdp_reshard_after_forward maybe", "FSDP_RESHARD_AFTER_FORWARD")]
    #[case(
        "--use_deepspeed --gradient_accumulation_steps 2 --zero_stage 2 --deepspeed_config_file \
         {\"gradient_accumulation_steps\":4,\"zero_optimization\":{\"stage\":2}}",
        "gradient_accumulation_steps is 4"
    )]
    #[case("--use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT", "FSDP_STATE_DICT_TYPE")]
    #[case(
        "--use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states false",
        "FSDP_SYNC_MODULE_STATES"
    )]
    #[case("--use_deepspeed --offload_optimizer_device nvme", "nvme_path")]
    #[case("--use_deepspeed --deepspeed_config_file /nowhere/ds.json", "/nowhere/ds.json")]
    #[case("--use_deepspeed --gradient_clipping much", "ACCELERATE_GRADIENT_CLIPPING")]
    fn what_ranks_would_fail_on_is_told_before_there_are_any(#[case] flags: &str, #[case] words: &str) {
        let line = ["accelerate", "launch"].into_iter().chain(flags.split_whitespace()).chain(["train"]);
        let Command::Launch(arguments) = Cli::try_parse_from(line).unwrap().command else { unreachable!() };
        let text = check_sharding(&arguments).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }

    #[rstest]
    #[case("", "PROGRAM")]
    #[case("--fsdp_version 2 train", "--use_fsdp")]
    #[case("--zero_stage 2 train", "--use_deepspeed")]
    #[case("--use_deepspeed --zero_stage 4 train", "not a stage of ZeRO")]
    #[case("--use_fsdp --use_deepspeed train", "--use_deepspeed")]
    #[case("--use_fsdp --fsdp_forward_prefetch maybe train", "maybe")]
    #[case("--use_fsdp --fsdp_sharding_strategy SOME train", "SOME")]
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
