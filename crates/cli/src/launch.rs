//! `accelerate launch`: from flags to a [`LaunchConfig`], and from its outcome to an exit code.

mod arguments;
pub(crate) mod dry_run;
pub(crate) mod help;
pub(crate) mod hosts;
mod origins;
mod over;
mod place;
mod slurm;

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::SystemTime;

use accelerate_core::config::{Lookup, RunConfig, misspelt_variables, settings};
use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_launch::{
    AgentCommand, Helper, LaunchConfig, Machine, Preflight, TerminalOptions, TerminalReporter, launch,
    launch_on_machines, unusable_threads,
};

pub(crate) use arguments::Arguments;
use origins::with_origins;
pub(crate) use place::check_working_folder;
use place::placed;

use crate::config_file::{self, Found};
use crate::resolve::{Resolved, num_gpus, num_processes, resolve, why_num_processes};

const SPEAKER: &str = "accelerate launch";

/// # Errors
///
/// The plan of a dry run that cannot be printed. What goes wrong with a launch is told here, with a code of its own.
pub(crate) fn run(arguments: Arguments, words: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let (is_quiet, has_prefix) = (arguments.quiet, !arguments.no_prefix);
    let preflight = if arguments.no_preflight { Preflight::None } else { Preflight::Full };
    let resolved = check_working_folder().and_then(|()| resolved(&arguments, &config_file::variable));
    let mut run = None;
    let found = resolved.and_then(|resolved| {
        run = Some(resolved.run.clone());
        let over = over::check(&resolved.run, SystemTime::now(), &config_file::variable)?;
        let (resolved, place) = placed(resolved, &arguments.cluster)?;
        Ok((resolved, place, over))
    });
    let (resolved, place, over) = match found {
        Ok(found) => found,
        Err(error) => {
            let text = error.to_string();
            let text = run.map_or_else(|| text.clone(), |run| with_origins(&run, &text));
            crate::print_error(SPEAKER, error.as_ref(), &text);
            return Ok(ExitCode::from(2));
        }
    };
    for notice in over.iter().filter(|_| !is_quiet) {
        crate::print_message(&format!("{SPEAKER}: {notice}"));
    }
    if arguments.cluster.is_asked() {
        return slurm::run(&arguments.cluster, &resolved, words, &arguments.program, is_quiet);
    }
    let dry_run = arguments.dry_run.then_some(arguments.json);
    let has_preflight = !arguments.no_preflight;
    let config = place.fitted(config(arguments, &resolved.run));
    let unused = place.unused(&resolved.run, &config, has_preflight);
    let notices = notices(&resolved, &config, place.agents.as_deref());
    for notice in place.notices.iter().chain(&notices).chain(&unused).filter(|_| !is_quiet) {
        crate::print_message(&format!("{SPEAKER}: {notice}"));
    }
    let outcome = match dry_run {
        Some(as_json) => match dry_run::described(&config, &place.agents, &resolved.run, as_json) {
            Ok(text) => return Ok(crate::print_result(&text).map(|()| ExitCode::SUCCESS)?),
            Err(error) => Err(error),
        },
        None => {
            // A single process writes as if it had been started by hand, also where its output is looked at.
            let has_prefix = has_prefix && (place.agents.is_some() || config.num_processes > 1);
            let reporter = &mut TerminalReporter::new(TerminalOptions { has_prefix, is_quiet });
            match &place.agents {
                Some(agents) => launch_on_machines(&config, agents, preflight, reporter),
                None => launch(&config, reporter),
            }
        }
    };
    let Err(error) = outcome else { return Ok(ExitCode::SUCCESS) };
    let text = if is_quiet { error.to_string() } else { error.story() };
    // Who has said what matters where that is at fault, and not where a rank has failed.
    let text = if error.exit_code() == 2 { with_origins(&resolved.run, &text) } else { text };
    let print = if error.stopped_by().is_some() { crate::print_last_error } else { crate::print_error };
    print(SPEAKER, &error, &text);
    Ok(ExitCode::from(error.exit_code()))
}

/// Nobody has named the file, and yet it holds.
fn default_file(file: &Option<Found>) -> Option<String> {
    let file = file.as_ref().filter(|file| file.is_default)?;
    Some(format!("settings of {} hold where flags and variables say nothing", file.path.shown()))
}

/// What somebody should know before the processes start, although it stops nobody.
fn notices(Resolved { run, file }: &Resolved, config: &LaunchConfig, agents: Option<&[AgentCommand]>) -> Vec<String> {
    let chosen = (run.cluster.num_processes.is_none() && agents.is_none()).then(|| {
        format!("--num_processes was not given, starting {} ({})", num_processes(run), why_num_processes(run))
    });
    let lost = std::env::vars_os()
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value)).filter(|(_, value)| value.to_str().is_none())
        })
        .filter(|(name, _)| is_read(name))
        .map(|(name, value)| format!("the variable {name} is {}, which is no UTF-8 and has no effect", value.shown()));
    let set: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    let misspelt = misspelt_variables(set.iter().map(String::as_str)).map(|(name, meant)| {
        format!("the variable {} is no setting and has no effect; {meant} would have one", in_one_line(name))
    });
    let unusable = unusable_threads(config, &Machine::probe()).map(|unusable| unusable.to_string());
    default_file(file)
        .into_iter()
        .chain(chosen)
        .chain(misspelt)
        .chain(lost)
        .chain(run.warnings(num_gpus(run)).iter().map(ToString::to_string))
        .chain(unusable)
        .collect()
}

/// Does a launch read this variable?
fn is_read(name: &str) -> bool {
    let of_machine = ["HF_HOME", "XDG_CACHE_HOME", "HOME", "CUDA_VISIBLE_DEVICES"];
    of_machine.contains(&name) || settings().any(|setting| setting.variable().is_some_and(|known| known == name))
}

fn resolved(arguments: &Arguments, lookup: Lookup<'_>) -> Result<Resolved, Box<dyn Error>> {
    resolve(arguments.said(), arguments.config_file.as_deref(), arguments.target().is_python(), lookup)
}

fn config(arguments: Arguments, run: &RunConfig) -> LaunchConfig {
    let program = arguments.target();
    let mut words = arguments.program.into_iter().skip(1).peekable();
    words.next_if(|first| first == "--");
    let config = LaunchConfig {
        args: words.collect(),
        grace_period: arguments.grace_period,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        ..LaunchConfig::of_run(run, program, num_processes(run))
    };
    hosts::configured(config, run)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use accelerate_launch::Program;
    use clap::Parser;
    use rstest::rstest;
    use std::fs;
    use std::time::Duration;

    fn arguments(line: &str) -> Arguments {
        let words = ["accelerate", "launch"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Launch(arguments) => *arguments,
            other => unreachable!("{other:?}"),
        }
    }

    fn resolve(arguments: &Arguments, lookup: Lookup<'_>) -> Result<RunConfig, Box<dyn Error>> {
        resolved(arguments, lookup).map(|resolved| resolved.run)
    }

    fn parsed(line: &str) -> LaunchConfig {
        let arguments = arguments(line);
        let run = resolve(&arguments, &|_| None).unwrap();
        config(arguments, &run)
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
        let mut config = config;
        let said: Vec<_> = std::mem::take(&mut config.environment)
            .into_iter()
            .map(|(name, value)| (name.into_string().unwrap(), value.into_string().unwrap()))
            .collect();
        let said: Vec<_> = said.iter().filter(|(name, _)| name != "ACCELERATE_CONFIG_ORIGINS").collect();
        let wanted = [
            ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3"),
            ("ACCELERATE_MIXED_PRECISION", "bf16"),
            ("ACCELERATE_USE_CPU", "true"),
        ];
        assert!(said.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(wanted), "{said:?}");
        let expected = LaunchConfig {
            num_cpu_threads_per_process: Some(2),
            use_cpu: true,
            num_machines: 2,
            machine_rank: 1,
            main_process_ip: Some("10.0.0.1".into()),
            main_process_port: Some(4000),
            grace_period: Duration::from_millis(250),
            shutdown_grace_period: Duration::from_secs(60),
            helper: Some(Helper::this_executable()),
            dedicated_process: true,
            reference: config.reference.clone(),
            ..LaunchConfig::new(Program::Executable("train".into()), 4)
        };
        assert_eq!(config, expected);
    }

    #[rstest]
    #[case("--nnodes 2", 2, None)]
    #[case("--nnodes 1:3", 3, Some(1))]
    #[case("--num_machines 3 --min_machines 1", 3, Some(1))]
    fn numbers_of_machines_may_be_said_as_torchrun_does(
        #[case] flags: &str,
        #[case] num_machines: usize,
        #[case] min_machines: Option<usize>,
    ) {
        let config = parsed(&format!("{flags} --max_restarts 4 train"));
        assert_eq!((config.num_machines, config.min_machines, config.max_restarts), (num_machines, min_machines, 4));
    }

    /// The launcher keeps it to itself, from whichever source.
    #[rstest]
    #[case::flag("--shutdown-grace-period 60", "", 60)]
    #[case::variable("", "90", 90)]
    #[case::both("--shutdown_grace_period 60", "90", 60)]
    #[case::neither("", "", 10)]
    fn how_long_processes_may_save_is_said_by_flag_or_variable(
        #[case] flags: &str,
        #[case] variable: &str,
        #[case] seconds: u64,
    ) {
        let arguments = arguments(&format!("{flags} --num_processes 2 train"));
        let lookup = |name: &str| (name == "ACCELERATE_SHUTDOWN_GRACE_PERIOD").then(|| variable.to_owned());
        let run = resolve(&arguments, &lookup).unwrap();
        let config = config(arguments, &run);
        assert_eq!(config.shutdown_grace_period, Duration::from_secs(seconds));
        assert!(config.environment.iter().all(|(name, _)| !name.to_string_lossy().contains("GRACE_PERIOD")));
    }

    #[rstest]
    #[case("", &[])]
    #[case("--use_fsdp", &["ACCELERATE_USE_DEEPSPEED=false", "ACCELERATE_USE_FSDP=true"])]
    #[case(
        "--use_fsdp --fsdp_sharding_strategy 2 --fsdp-forward-prefetch no",
        &["ACCELERATE_USE_DEEPSPEED=false", "ACCELERATE_USE_FSDP=true", "FSDP_FORWARD_PREFETCH=false",
          "FSDP_RESHARD_AFTER_FORWARD=true", "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP"]
    )]
    #[case(
        "--use-deepspeed --zero-stage 3 --gradient_clipping auto",
        &["ACCELERATE_DEEPSPEED_ZERO_STAGE=3", "ACCELERATE_GRADIENT_CLIPPING=auto", "ACCELERATE_USE_DEEPSPEED=true",
          "ACCELERATE_USE_FSDP=false"]
    )]
    fn flags_become_variables(#[case] flags: &str, #[case] wanted: &[&str]) {
        let found = parsed(&format!("{flags} --num_processes 2 train")).environment;
        let found: Vec<String> =
            found.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect();
        let found: Vec<_> = found.iter().filter(|pair| !pair.starts_with("ACCELERATE_CONFIG_ORIGINS")).collect();
        assert_eq!(found, wanted);
    }

    /// Flags go before variables, and these before a file; what nobody says is left open.
    #[test]
    fn a_file_fills_what_flags_and_variables_leave_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        fs::write(&path, "num_processes: 3\nmixed_precision: fp16\nuse_cpu: true\nmachine_rank: 0\n").unwrap();
        let arguments = arguments(&format!("--config_file {} --mixed_precision bf16 train", path.display()));
        let lookup = |name: &str| (name == "ACCELERATE_NUM_PROCESSES").then(|| "4".to_owned());
        let run = resolve(&arguments, &lookup).unwrap();
        assert_eq!((run.cluster.num_processes, run.cluster.use_cpu), (Some(4), true));
        assert_eq!(run.origin("mixed_precision").to_string(), "flag --mixed_precision");
        assert_eq!(run.origin("use_cpu").to_string(), format!("{}:3:1", path.display()));
        fs::write(&path, "num_process: 3\n").unwrap();
        let error = resolve(&arguments, &|_| None).unwrap_err().to_string();
        assert!(error.contains("run.yaml:1") && error.contains("\"num_processes\""), "{error}");
    }

    /// Both places of a contradiction are named: the key of the DeepSpeed configuration, and the setting.
    #[test]
    fn a_deepspeed_file_and_a_setting_that_differ_are_named_with_their_lines() {
        let folder = tempfile::tempdir().unwrap();
        let [run, json] = ["run.yaml", "ds.json"].map(|name| folder.path().join(name));
        fs::write(&json, "{\n  \"zero_optimization\": {\n    \"stage\": 3\n  }\n}\n").unwrap();
        let text = format!("deepspeed_config:\n  zero_stage: 2\n  deepspeed_config_file: {}\n", json.display());
        fs::write(&run, format!("distributed_type: DEEPSPEED\n{text}")).unwrap();
        let arguments = arguments(&format!("--config_file {} train", run.display()));
        let error = resolve(&arguments, &|_| None).unwrap_err().to_string();
        assert!(error.contains("zero_optimization.stage is 3") && error.contains("ds.json:3:5)"), "{error}");
        assert!(error.contains(&format!("(deepspeed_config.zero_stage: {}:3:3)", run.display())), "{error}");
    }

    #[rstest]
    #[case("--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP", "min_num_params")]
    #[case("--use_fsdp --fsdp_version 3", "--fsdp_version")]
    #[case("--use_fsdp --fsdp_min_num_params 5", "only SIZE_BASED_WRAP counts parameters")]
    #[case(
        "--use_deepspeed --gradient_accumulation_steps 2 --zero_stage 2 --deepspeed_config_file \
         {\"gradient_accumulation_steps\":4,\"zero_optimization\":{\"stage\":2}}",
        "gradient_accumulation_steps is 4"
    )]
    #[case("--use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT", "--fsdp_state_dict_type")]
    #[case(
        "--use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states false",
        "--fsdp_sync_module_states"
    )]
    #[case("--use_deepspeed --offload_optimizer_device nvme", "nvme_path")]
    #[case("--use_deepspeed --deepspeed_config_file /nowhere/ds.json", "/nowhere/ds.json")]
    #[case("--fp8_backend msamp", "MS-AMP is not available")]
    #[case("--mixed_precision fp8 --fp8_format E5M2", "HYBRID or E4M3")]
    #[case("--tpu", "no TPU")]
    #[case("--fsdp_version 2", "--use_fsdp")]
    #[case("--zero_stage 2", "--use_deepspeed")]
    #[case("--use_fsdp --use_deepspeed", "use_deepspeed")]
    #[case("--use_fsdp --zero_stage 2", "--zero_stage 2 (flag) and use_fsdp true (flag --use_fsdp) contradict")]
    #[case("--use_deepspeed --fsdp_version 2", "--fsdp_version 2 (flag) and use_deepspeed true (flag --use_deepspeed)")]
    #[case("--use_deepspeed --deepspeed_config_file /dev/zero", "it is a device")]
    #[case("--use_deepspeed --deepspeed_config_file /", "it is a folder")]
    #[case(
        "--config_file /dev/zero",
        "/dev/zero cannot be read: it is a device; settings are read from a regular file"
    )]
    #[case("--config_file /", "it is a folder")]
    fn what_ranks_would_fail_on_is_told_before_there_are_any(#[case] flags: &str, #[case] words: &str) {
        let text = whole(resolve(&arguments(&format!("{flags} train")), &|_| None).unwrap_err().as_ref());
        assert!(text.contains(words), "{text}");
    }

    /// An error with its causes, as they are printed.
    fn whole(error: &(dyn Error + 'static)) -> String {
        let causes = std::iter::successors(Some(error), |error| (*error).source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    /// What every process would refuse is refused before there is one, in the same words, with file and line.
    #[rstest]
    #[case::two_precisions(
        r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#, "", &["fp16.enabled and bf16.enabled contradict", "line 1"]
    )]
    #[case::precision_of_the_launcher(
        r#"{"fp16": {"enabled": true}}"#, "--mixed_precision bf16",
        &["fp16.enabled is true", "mixed_precision of the program is \"bf16\"", "flag --mixed_precision"]
    )]
    #[case::no_folder(
        r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}"#, "",
        &["zero_optimization.offload_optimizer.nvme_path is missing", "(line 1 column"]
    )]
    #[case::product(
        r#"{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#, "",
        &["train_batch_size is 10", "* 2 processes is 8", "train_batch_size: line 1"]
    )]
    #[case::steps_of_the_launcher(
        r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}"#, "--gradient_accumulation_steps 4",
        &["train_batch_size is 16", "* 2 processes is 32", "flag --gradient_accumulation_steps"]
    )]
    #[case::no_steps_at_all(
        r#"{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}"#, "",
        &["train_batch_size is 9, which cannot be divided"]
    )]
    #[case::groups(
        r#"{"zero_optimization": {"stage": 3, "mics_shard_size": 3}}"#, "", &["mics_shard_size is 3 among 2 processes"]
    )]
    fn a_deepspeed_file_that_no_process_would_take(#[case] json: &str, #[case] flags: &str, #[case] words: &[&str]) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ds.json");
        let json = match json.contains("zero_optimization") {
            true => json.to_owned(),
            false => json.replacen('{', "{\"zero_optimization\": {\"stage\": 2}, ", 1),
        };
        fs::write(&path, json).unwrap();
        let file = format!("--use_deepspeed --deepspeed_config_file {}", path.display());
        let arguments = arguments(&format!("--num_processes 2 {file} {flags} train"));
        let text = whole(resolve(&arguments, &|_| None).unwrap_err().as_ref());
        for word in words.iter().chain(&["ds.json: "]) {
            assert!(text.contains(word), "{word}: {text}");
        }
    }

    /// Engines in Python have what those here refuse, and say by themselves what is wrong.
    #[rstest]
    #[case(
        "--use_deepspeed --deepspeed_moe_layer_cls_names Experts",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES=Experts"
    )]
    #[case("--use_deepspeed --deepspeed_config_file no.json", "ACCELERATE_DEEPSPEED_CONFIG_FILE=no.json")]
    #[case("--dynamo_backend inductor --dynamo_use_fullgraph", "ACCELERATE_DYNAMO_BACKEND=inductor")]
    #[case("--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP", "FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP")]
    #[case("--use_fsdp --fsdp_use_orig_params false", "FSDP_USE_ORIG_PARAMS=false")]
    fn what_only_engines_in_python_have_is_handed_on_to_them(#[case] flags: &str, #[case] wanted: &str) {
        let arguments = arguments(&format!("--num_processes 2 {flags} train.py"));
        let run = resolve(&arguments, &|_| None).unwrap();
        assert!(run.messages().is_empty(), "{:?}", run.messages());
        let pair = |(name, value): &(OsString, OsString)| format!("{}={}", name.display(), value.display());
        assert!(config(arguments, &run).environment.iter().any(|variable| pair(variable) == wanted), "{run}");
    }

    /// To a constructor in Python the variable goes before its argument, so it is not set.
    #[rstest]
    #[case("train.py", 1, false)]
    #[case("-m train", 1, false)]
    #[case("--use_deepspeed train.py", 0, true)]
    #[case("train", 0, true)]
    fn a_number_of_micro_batches_goes_where_it_does_no_harm(
        #[case] rest: &str,
        #[case] num_messages: usize,
        #[case] is_set: bool,
    ) {
        let arguments = arguments(&format!("--num_processes 2 --gradient_accumulation_steps 4 {rest}"));
        let run = resolve(&arguments, &|_| None).unwrap();
        assert_eq!(run.messages().len(), num_messages, "{:?}", run.messages());
        let environment = config(arguments, &run).environment;
        assert_eq!(environment.iter().any(|(name, _)| name == "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), is_set);
    }

    /// The program may still say the number of micro-batches, so the launcher does not guess it.
    #[test]
    fn steps_that_the_program_may_say_are_left_open() {
        let json = r#"{"zero_optimization":{"stage":2},"train_batch_size":16,"train_micro_batch_size_per_gpu":2,
            "gradient_accumulation_steps":"auto"}"#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ds.json");
        fs::write(&path, json).unwrap();
        let flags = format!("--num_processes 2 --use_deepspeed --deepspeed_config_file {} train", path.display());
        assert!(resolve(&arguments(&flags), &|_| None).is_ok());
    }
}
