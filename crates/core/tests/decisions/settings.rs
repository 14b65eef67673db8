//! The table of settings: every one from every source.

use accelerate_core::Result;
use accelerate_core::config::{
    Callback, ConfigFile, FullyShardedDataParallelPlugin, MixedPrecision, PartialRunConfig, RunConfig,
    ShardingStrategy, Sources, settings,
};
use accelerate_core::settings::{Origin, Record, Setting, Standing, ValueKind};
use proptest::prelude::*;
use rstest::rstest;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Two values of the setting that are not its default, and that no other setting contradicts.
pub(crate) fn samples(setting: &Setting) -> [String; 2] {
    let texts: [&str; 2] = match (setting.path, setting.kind) {
        ("dynamo_config.backend", _) => ["eager", "ts"],
        ("fp8_config.backend", _) => ["TE", "AO"],
        ("dynamo_config.disable", _) => ["true", "true"],
        ("fsdp_config.auto_wrap_policy", _) => ["TRANSFORMER_BASED_WRAP", "NO_WRAP"],
        ("ddp_config.dim", _) => ["1", "2"],
        // Programs have one word for each.
        ("parallelism_config.cp_backend", _) => ["torch", "torch"],
        ("parallelism_config.sp_backend", _) => ["deepspeed", "deepspeed"],
        ("parallelism_config.sp_attn_implementation", _) => ["sdpa", "sdpa"],
        ("parallelism_config.cp_comm_strategy", _) => ["alltoall", "allgather"],
        ("mixed_precision", _) => ["bf16", "fp16"],
        ("fsdp_config.fsdp_version", _) => ["2", "2"],
        ("fsdp_config.sharding_strategy", _) => ["SHARD_GRAD_OP", "OPTIMIZER_STATE"],
        ("fsdp_config.reshard_after_forward", _) => ["false", "false"],
        ("fsdp_config.state_dict_type", _) => ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
        ("fsdp_config.state_dict_config" | "fsdp_config.optim_state_dict_config", _) => {
            [r#"{"offload_to_cpu":true}"#, r#"{"rank0_only":false}"#]
        }
        ("grad_scaler_config.growth_factor" | "grad_scaler_config.init_scale", _) => ["1.5", "3"],
        ("grad_scaler_config.backoff_factor", _) => ["0.25", "0.75"],
        ("distributed_type", _) => ["MULTI_GPU", "NO"],
        ("quantization_config.bnb_4bit_quant_type", _) => ["nf4", "nf4"],
        ("ddp_config.comm_hook" | "ddp_config.comm_wrapper", _) => ["bf16", "fp16"],
        ("ddp_config.comm_state_option", _) => ["{\"warm_start\":false}", "{\"random_seed\":1}"],
        ("profile_config.activities", _) => ["cpu", "cpu,cuda"],
        ("accelerator_config.rng_types", _) => ["torch", "torch,generator"],
        ("profile_config.schedule_option", _) => [
            r#"{"wait":1,"warmup":0,"active":2,"repeat":0,"skip_first":0,"skip_first_wait":false}"#,
            r#"{"wait":2,"warmup":0,"active":2,"repeat":0,"skip_first":0,"skip_first_wait":false}"#,
        ],
        ("dataloader_config.gradient_accumulation_kwargs", _) => [r#"{"num_steps":2}"#, r#"{"num_steps":3}"#],
        ("fsdp_config.mixed_precision_policy", _) => [
            r#"{"param_dtype":null,"reduce_dtype":"bfloat16","output_dtype":null,"buffer_dtype":null,"keep_low_precision_grads":null,"cast_forward_inputs":null}"#,
            r#"{"param_dtype":null,"reduce_dtype":"float16","output_dtype":null,"buffer_dtype":null,"keep_low_precision_grads":null,"cast_forward_inputs":null}"#,
        ],
        (_, ValueKind::Bool) if setting.default().as_deref() == Some("true") => ["false", "false"],
        (_, ValueKind::Bool) => ["true", "true"],
        (_, ValueKind::Integer { .. } | ValueKind::Auto(&ValueKind::Integer { .. })) => ["3", "4"],
        (_, ValueKind::Number | ValueKind::Seconds | ValueKind::Auto(_)) => ["2.5", "3.5"],
        (_, ValueKind::Path) => ["/some/path", "/other/path"],
        (_, ValueKind::Time) => ["2030-01-31T18:00:00Z", "2031-01-31T18:00:00Z"],
        ("gpu_ids", _) => ["0", "1,2"],
        (_, ValueKind::Text) => ["some", "other"],
        (_, ValueKind::List) => ["a.b,c", "d"],
        (_, ValueKind::Choice(names)) => [names[names.len() - 1], names[names.len() - 2]],
        (_, ValueKind::Object) => [r#"{"key":1}"#, r#"{"key":2}"#],
        (_, ValueKind::RendezvousOptions) => ["join_timeout=900", "join_timeout=0.5"],
        (_, ValueKind::Streams) => ["3", "0:1,1:3"],
        (_, ValueKind::OffloadTarget) => ["cpu", r#"{"nvme":"/n"}"#],
    };
    texts.map(str::to_owned)
}

fn by_path(path: &str) -> &'static Setting {
    settings().find(|setting| setting.path == path).unwrap_or_else(|| panic!("there is no setting {path}"))
}

/// Settings without effect that a launcher of the reference says unasked, so that nobody is told.
const HARMLESS: [&str; 2] = ["same_network", "fsdp_config.cpu_ram_efficient_loading"];

/// What must be said beside `setting` so that it counts.
fn beside(setting: &Setting) -> Vec<(&'static Setting, String)> {
    let also: &[(&str, &str)] = match (setting.path, setting.section) {
        ("fsdp_config.dp_shard_size", _) => &[("use_fsdp", "true"), ("fsdp_config.sharding_strategy", "HYBRID_SHARD")],
        ("fsdp_config.transformer_cls_names_to_wrap", _) => {
            &[("use_fsdp", "true"), ("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP")]
        }
        ("fsdp_config.min_num_params", _) => {
            &[("use_fsdp", "true"), ("fsdp_config.auto_wrap_policy", "SIZE_BASED_WRAP")]
        }
        ("fsdp_config.activation_checkpointing_offload", _) => {
            &[("use_fsdp", "true"), ("fsdp_config.activation_checkpointing", "true")]
        }
        ("fsdp_config.offload_params", _) => {
            &[("use_fsdp", "true"), ("fsdp_config.offload_optimizer", r#"{"nvme":"/n"}"#)]
        }
        ("deepspeed_config.offload_optimizer_device", _) => {
            &[("use_deepspeed", "true"), ("deepspeed_config.offload_optimizer_nvme_path", "/n")]
        }
        ("deepspeed_config.offload_param_device", _) => {
            &[("use_deepspeed", "true"), ("deepspeed_config.offload_param_nvme_path", "/n")]
        }
        ("ddp_config.comm_state_option", _) => &[("ddp_config.comm_hook", "power_sgd")],
        ("dynamo_config.mode" | "dynamo_config.options", _) => &[("dynamo_config.disable", "true")],
        (path, "dynamo_config") if path != "dynamo_config.backend" && path != "dynamo_config.disable" => {
            &[("dynamo_config.disable", "true")]
        }
        (_, "fsdp_config") => &[("use_fsdp", "true")],
        ("parallelism_config.sp_seq_length_is_variable", _) => {
            &[("use_parallelism_config", "true"), ("parallelism_config.sp_seq_length", "8")]
        }
        (_, "parallelism_config") => &[("use_parallelism_config", "true")],
        (_, "deepspeed_config") => &[("use_deepspeed", "true")],
        _ => &[],
    };
    also.iter().map(|(path, text)| (by_path(path), (*text).to_owned())).collect()
}

/// One source with one value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Code,
    Flag,
    Environment,
    File,
}

/// The configuration that comes of these values, each from its source, beside what makes them count (in code).
fn resolve(setting: &'static Setting, said: &[(Source, &str)]) -> Result<RunConfig> {
    let mut code = beside(setting);
    let (mut flags, mut variables, mut lines) = (Vec::new(), BTreeMap::new(), String::new());
    for (source, text) in said {
        let text = (*text).to_owned();
        match source {
            Source::Code => code.push((setting, text)),
            Source::Flag => flags.push((setting, text)),
            Source::Environment => drop(variables.insert(setting.variable().unwrap(), text)),
            Source::File => lines = document(setting, &text),
        }
    }
    let lookup = |name: &str| variables.get(name).cloned();
    let file = Some(ConfigFile::read(&lines, Path::new("run.yaml"))?);
    RunConfig::resolve(Sources { code: partial(&code), flags, environment: Some(&lookup), file, is_for_python: false })
}

fn document(setting: &Setting, text: &str) -> String {
    let value = if text.starts_with('{') { text.to_owned() } else { format!("\"{text}\"") };
    match setting.section {
        "" => format!("# a comment\n{}: {value}\n", setting.key()),
        section => format!("{section}:\n  {}: {value}\n", setting.key()),
    }
}

/// What a program says: read from a file, because the fields have as many types as there are.
fn partial(said: &[(&'static Setting, String)]) -> PartialRunConfig {
    let mut sections: BTreeMap<&str, serde_json::Map<String, serde_json::Value>> = BTreeMap::new();
    for (setting, text) in said {
        let value = serde_json::from_str(text).ok().filter(serde_json::Value::is_object);
        let value = value.unwrap_or_else(|| text.clone().into());
        sections.entry(setting.section).or_default().insert(setting.key().to_owned(), value);
    }
    let mut root = sections.remove("").unwrap_or_default();
    root.extend(sections.into_iter().map(|(section, entries)| (section.to_owned(), entries.into())));
    let text = serde_json::Value::Object(root).to_string();
    ConfigFile::read(&text, Path::new("code")).unwrap().into_partial()
}

/// Every setting, from every source that it has: value and origin. What is refused is refused from everywhere, and what is
/// without effect is told.
#[test]
fn every_setting_from_every_source() {
    let mut checked = 0;
    for setting in settings().filter(|setting| !setting.is_code_only()) {
        let mut sources = vec![Source::Environment, Source::File];
        // Code is read from a file here, and no file can say it.
        sources.extend((setting.path != "compute_environment").then_some(Source::Code));
        sources.extend(setting.flag().map(|_| Source::Flag));
        for source in sources {
            let [text, _] = samples(setting);
            let found = resolve(setting, &[(source, &text)]);
            if let Standing::Refused(why) = setting.standing() {
                let error = found.expect_err(setting.path).to_string();
                let name = if matches!(source, Source::File) { setting.file_key() } else { setting.path.to_owned() };
                assert!(error.contains(why) && error.contains(&name), "{} {source:?}: {error}", setting.path);
                continue;
            }
            let config = found.unwrap_or_else(|error| panic!("{} from {source:?}: {error}", setting.path));
            assert_eq!(config.text(setting).as_deref(), Some(text.as_str()), "{} from {source:?}", setting.path);
            let is_right = match (source, config.origin(setting.path)) {
                (Source::Code, origin) => *origin == Origin::Code,
                (Source::Flag, Origin::Flag(flag)) => flag.trim_start_matches("--") == setting.flag().unwrap(),
                (Source::Environment, Origin::Environment(name)) => Some(name) == setting.variable().as_ref(),
                (Source::File, Origin::File { path, position: Some(position) }) => {
                    path == Path::new("run.yaml") && position.line == 2
                }
                _ => false,
            };
            assert!(is_right, "{} from {source:?}: {}", setting.path, config.origin(setting.path));
            if matches!(setting.standing(), Standing::WithoutEffect(_)) && !HARMLESS.contains(&setting.path) {
                assert!(config.messages().iter().any(|message| message.setting == setting.path), "{}", setting.path);
            }
            checked += 1;
        }
    }
    assert!(checked > 300, "{checked}");
}

/// Of two sources that say different things, the one closer to the program counts.
#[test]
fn the_order_of_sources_is_the_same_for_every_setting() {
    for setting in settings().filter(|setting| !setting.is_code_only() && setting.standing() == Standing::Honoured) {
        let [first, second] = samples(setting);
        let mut sources = vec![Source::Code, Source::Environment, Source::File];
        if setting.flag().is_some() {
            sources.insert(1, Source::Flag);
        }
        for pair in sources.windows(2) {
            let config = resolve(setting, &[(pair[0], &first), (pair[1], &second)]);
            let config = config.unwrap_or_else(|error| panic!("{} from {pair:?}: {error}", setting.path));
            assert_eq!(config.text(setting).as_deref(), Some(first.as_str()), "{} from {pair:?}", setting.path);
        }
    }
}

#[test]
fn nothing_said_is_the_default_everywhere() {
    let config = RunConfig::resolve(Sources::default()).unwrap();
    for setting in settings() {
        assert_eq!(config.text(setting), setting.default(), "{}", setting.path);
        assert_eq!(*config.origin(setting.path), Origin::Default, "{}", setting.path);
    }
    assert!(config.messages().is_empty() && config.variables().is_empty());
}

/// What flags and files say to a launcher arrives at the processes, with the place where it was said.
#[test]
fn what_the_launcher_is_told_reaches_the_processes() {
    for setting in settings().filter(|setting| !setting.is_code_only() && setting.standing() == Standing::Honoured) {
        let mut sources = vec![Source::File];
        sources.extend(setting.flag().map(|_| Source::Flag));
        for source in sources {
            let [text, _] = samples(setting);
            let launcher = resolve(setting, &[(source, &text)]).unwrap();
            let variables = launcher.variables();
            let lookup = |name: &str| variables.get(name).cloned();
            let code = partial(&beside(setting));
            let process = RunConfig::resolve(Sources { code, environment: Some(&lookup), ..Default::default() });
            let process = process.unwrap_or_else(|error| panic!("{} by {variables:?}: {error}", setting.path));
            if variables.contains_key(&setting.variable().unwrap()) {
                assert_eq!(process.text(setting).as_deref(), Some(text.as_str()), "{}", setting.path);
                assert_eq!(process.origin(setting.path), launcher.origin(setting.path), "{}", setting.path);
            }
        }
    }
}

/// What a file says of a record whose switch is off reaches programs that switch it on, with its line; others are not bothered.
#[test]
fn what_a_file_says_of_a_record_that_is_off_reaches_programs_that_switch_it_on() {
    let is_switched = |setting: &&Setting| {
        ["fsdp_config", "deepspeed_config"].contains(&setting.section) && !setting.is_for_launcher()
    };
    let mut checked = 0;
    for setting in settings().filter(is_switched).filter(|setting| !setting.is_code_only()) {
        let [text, _] = samples(setting);
        let file = ConfigFile::read(&document(setting, &text), Path::new("run.yaml")).unwrap();
        let launcher = RunConfig::resolve(Sources { file: Some(file), ..Default::default() }).unwrap();
        assert!(launcher.messages().iter().any(|message| message.setting == setting.path), "{}", setting.path);
        assert_eq!(*launcher.origin(setting.path), Origin::Default, "{}", setting.path);
        let variables = launcher.variables();
        let lookup = |name: &str| variables.get(name).cloned();
        let sources = || Sources { environment: Some(&lookup), ..Default::default() };
        let other = RunConfig::resolve(sources()).unwrap();
        let nothing = RunConfig::resolve(Sources::default()).unwrap();
        assert_eq!(PartialRunConfig::from(other), PartialRunConfig::from(nothing), "{}", setting.path);
        let process = RunConfig::resolve(Sources { code: partial(&beside(setting)), ..sources() });
        if let Standing::Refused(why) = setting.standing() {
            assert!(process.unwrap_err().to_string().contains(why), "{}", setting.path);
            continue;
        }
        let process = process.unwrap_or_else(|error| panic!("{} by {variables:?}: {error}", setting.path));
        assert_eq!(process.text(setting).as_deref(), Some(text.as_str()), "{}", setting.path);
        assert!(process.origin(setting.path).to_string().starts_with("run.yaml:2:"), "{}", setting.path);
        checked += 1;
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn names_are_used_once() {
    let (mut seen, mut variables) = (HashSet::new(), HashSet::new());
    for setting in settings() {
        assert!(seen.insert(setting.path), "{} is declared twice", setting.path);
        assert!(!setting.help().is_empty(), "{} has no help", setting.path);
        for flag in setting.flag().iter().chain(setting.flag_aliases()) {
            assert!(seen.insert(flag) || setting.path == *flag, "--{flag} is there twice");
            assert!(!flag.contains('-'), "--{flag} is not spelled as in the reference");
        }
        let variable = setting.variable();
        assert!(variable.as_ref().is_none_or(|name| variables.insert(name.clone())), "{variable:?} is there twice");
        let section = settings().filter(|other| other.section == setting.section && !other.is_code_only());
        let known: Vec<_> = section.filter(|other| other.has_key(setting.key())).map(|other| other.path).collect();
        assert!(setting.is_code_only() || known == [setting.path], "{} is also {known:?}", setting.key());
    }
}

#[rstest]
#[case("num_procesess: 2\n", &["run.yaml:1:1: there is no key \"num_procesess\"", "\"num_processes\""])]
#[case("fsdp_config:\n  fsdp_shardin_strategy: 1\n", &["run.yaml:2:", "in fsdp_config", "sharding_strategy"])]
#[case("a: &x 1\nb: *x\n", &["run.yaml:2:", "aliases"])]
#[case("debug: true\ndebug: false\n", &["run.yaml:2:", "twice"])]
#[case("- 1\n", &["run.yaml:1:", "mapping"])]
#[case("fsdp_config: 3\n", &["run.yaml:1:", "fsdp_config must be a mapping"])]
#[case("use_cpu: maybe\n", &["run.yaml:1:10: use_cpu is \"maybe\"", "one of y, yes"])]
#[case("num_processes: 0\n", &["num_processes is \"0\"", "at least 1"])]
#[case("main_process_port: 70000\n", &["main_process_port is \"70000\"", "must be a whole number from 0 to 65535"])]
#[case("grad_scaler_config:\n  growth_interval: 5000000000\n", &["run.yaml:2:", "a whole number from 1 to 4294967295"])]
#[case("base_job_name: mine\ncompute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.2xlarge\n",
    &["compute_environment is AMAZON_SAGEMAKER (run.yaml:2:1), which is refused", "write a file for LOCAL_MACHINE"])]
#[case("mixed_precision: [bf16\n", &["run.yaml:"])]
#[case("megatron_lm_config:\n  tp_degree: 2\n", &["megatron_lm_config", "run.yaml:1", "not available"])]
#[case("---\na: 1\n---\nb: 2\n", &["run.yaml:3:", "second document"])]
fn files_that_are_wrong(#[case] text: &str, #[case] words: &[&str]) {
    let error = ConfigFile::read(text, Path::new("run.yaml")).unwrap_err();
    assert!(error.is_config());
    for word in words {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

/// What the reference's own tests read (its `tests/test_configs`): the keys of old versions, empty sections, nulls.
#[rstest]
#[case("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nfp16: true\nmachine_rank: 0\nmain_process_ip: null\n\
        main_process_port: null\nmain_training_function: main\nnum_machines: 1\nnum_processes: 1\nuse_cpu: false\n",
       &[("mixed_precision", "fp16"), ("num_processes", "1")])]
#[case("compute_environment: LOCAL_MACHINE\ndeepspeed_config: {}\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\n\
        dynamo_backend: 'NO'\nfsdp_config: {}\ngpu_ids: all\nmegatron_lm_config: {}\nmixed_precision: no\n\
        rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\nuse_cpu: no\n",
       &[("mixed_precision", "no"), ("gpu_ids", "all")])]
#[case("distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
        fsdp_backward_prefetch_policy: BACKWARD_PRE\n  fsdp_offload_params: false\n  sharding_strategy: 2\n  \
        fsdp_reshard_after_forward: true\n",
       &[("use_fsdp", "true"), ("fsdp_config.sharding_strategy", "SHARD_GRAD_OP"),
         ("fsdp_config.backward_prefetch", "BACKWARD_PRE")])]
#[case("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n\
        gradient_accumulation_steps: 4\n",
       &[("use_deepspeed", "true"), ("deepspeed_config.zero3_init_flag", "false"), ("gradient_accumulation_config.num_steps", "4")])]
#[case("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\ndowncast_bf16: 'yes'\nuse_cpu: true\n",
       &[("downcast_bf16", "true"), ("use_cpu", "true")])]
#[case("{\"mixed_precision\": \"bf16\", \"num_processes\": 2,\n\t\"dynamo_config\": {\"dynamo_use_dynamic\": false}}",
       &[("mixed_precision", "bf16"), ("dynamo_config.dynamic", "false")])]
fn files_of_the_reference(#[case] text: &str, #[case] wanted: &[(&str, &str)]) {
    let file = ConfigFile::read(text, Path::new("run.yaml")).unwrap();
    let config = RunConfig::resolve(Sources { file: Some(file), ..Default::default() }).unwrap();
    for (path, value) in wanted {
        assert_eq!(config.text(by_path(path)).as_deref(), Some(*value), "{path}");
    }
}

#[rstest]
#[case(&[("mixed_precision", "fp8"), ("fp8_config.backend", "MSAMP")],
    &["fp8_config.backend is MSAMP (flag --fp8_backend)", "choose backend AO or TE"])]
#[case(&[("mixed_precision", "fp8"), ("fp8_config.fp8_format", "E5M2")], &["fp8_format is E5M2", "HYBRID or E4M3"])]
#[case(&[("use_fsdp", "true"), ("use_deepspeed", "true")],
    &["use_fsdp true (flag --use_fsdp) and use_deepspeed true (flag --use_deepspeed) contradict"])]
#[case(&[("fsdp_config.fsdp_version", "2")], &["--fsdp_version 2", "--use_fsdp"])]
#[case(&[("deepspeed_config.zero_stage", "2")], &["--zero_stage 2", "--use_deepspeed"])]
#[case(&[("use_fsdp", "true"), ("fsdp_config.activation_checkpointing_offload", "true")],
    &["fsdp_config.activation_checkpointing_offload: flag --fsdp_activation_checkpointing_offload"])]
fn flags_that_cannot_be(#[case] said: &[(&str, &str)], #[case] words: &[&str]) {
    let flags = said.iter().map(|(path, text)| (by_path(path), (*text).to_owned())).collect();
    let error = RunConfig::resolve(Sources { flags, ..Default::default() }).unwrap_err();
    for word in words {
        assert!(error.is_config() && error.to_string().contains(word), "{word}: {error}");
    }
}

/// The places of an error are those of the settings that it is about: not of every word in its text, and not of settings of
/// other sections that have the same name.
#[rstest]
#[case(
    "mixed_precision: bf16\nddp_config: {dim: 0}\ndistributed_type: FSDP\nfsdp_config:\n  sharding_strategy: NO_SHARD\n  \
        mixed_precision_policy: {reduce_dtype: bfloat16}\n",
    "set mixed_precision",
    "(fsdp_config.fsdp_sharding_strategy: run.yaml:5:3, fsdp_config.mixed_precision_policy: run.yaml:6:3)"
)]
#[case(
    "process_group_config: {backend: gloo}\ndynamo_config: {backend: inductor}\n",
    "dynamo backend \"inductor\" needs Python",
    "(dynamo_config.dynamo_backend: run.yaml:2:17)"
)]
#[case(
    "mixed_precision: fp16\nuse_fsdp: true\nfsdp_config: {mixed_precision_policy: {param_dtype: bfloat16}}\n",
    "autocast",
    "(mixed_precision: run.yaml:1:1, fsdp_config.mixed_precision_policy: run.yaml:3:15)"
)]
fn places_are_those_of_the_settings_that_an_error_is_about(
    #[case] text: &str,
    #[case] words: &str,
    #[case] places: &str,
) {
    let file = Some(ConfigFile::read(text, Path::new("run.yaml")).unwrap());
    let error = RunConfig::resolve(Sources { file, ..Default::default() }).unwrap_err().to_string();
    assert!(error.contains(words) && error.ends_with(places), "{error}");
}

/// `distributed_type` stands for a switch. In one file the two must agree; of two sources the closer one counts.
#[rstest]
#[case("MULTI_CPU", "use_cpu")]
#[case("FSDP", "use_fsdp")]
#[case("DEEPSPEED", "use_deepspeed")]
fn a_distributed_type_stands_for_its_switch(#[case] name: &str, #[case] switch: &str) {
    let file = |text: String| Some(ConfigFile::read(&text, Path::new("run.yaml")).unwrap());
    let both = file(format!("distributed_type: {name}\n{switch}: false\n"));
    let error = RunConfig::resolve(Sources { file: both, ..Default::default() }).unwrap_err().to_string();
    let wanted = format!("distributed_type {name} (run.yaml:1:1) and {switch} false (run.yaml:2:1) contradict");
    assert!(error.contains(&wanted), "{error}");

    let lookup = |variable: &str| (variable == "ACCELERATE_DISTRIBUTED_TYPE").then(|| name.to_owned());
    let no = file(format!("{switch}: false\n"));
    let closer = RunConfig::resolve(Sources { environment: Some(&lookup), file: no, ..Default::default() }).unwrap();
    assert_eq!(closer.text(by_path(switch)).as_deref(), Some("true"), "the type is closer");

    let lookup =
        |variable: &str| by_path(switch).variable().filter(|known| known == variable).map(|_| "false".to_owned());
    let yes = file(format!("distributed_type: {name}\n"));
    let closer = RunConfig::resolve(Sources { environment: Some(&lookup), file: yes, ..Default::default() }).unwrap();
    assert_eq!(closer.text(by_path(switch)).as_deref(), Some("false"), "the switch is closer");
}

/// Help texts and the page of settings are read as they are, without links.
#[test]
fn help_shows_the_words_of_links_alone() {
    for setting in settings() {
        for text in [setting.help(), setting.details()] {
            assert!(!text.contains(['[', ']', '`']) && !text.contains("](") && !text.contains("crate::"), "{text}");
        }
    }
    assert!(by_path("fsdp_config.max_memory").help().contains("is divided (Plan::check_fits). Default none."));
}

/// What names a strategy in two places of different rank: the closer one counts, and what launchers write unasked does not.
#[rstest]
#[case::flag_before_file(&[("sharding_strategy", "FULL_SHARD")], "fsdp_reshard_after_forward: SHARD_GRAD_OP", "FULL_SHARD")]
#[case::flag_beside_the_questionnaire(&[("sharding_strategy", "SHARD_GRAD_OP")], "fsdp_reshard_after_forward: FULL_SHARD", "SHARD_GRAD_OP")]
#[case::file_alone(&[], "fsdp_reshard_after_forward: SHARD_GRAD_OP", "SHARD_GRAD_OP")]
#[case::flag_of_resharding(&[("reshard_after_forward", "NO_SHARD")], "fsdp_sharding_strategy: SHARD_GRAD_OP", "NO_SHARD")]
fn the_closer_word_for_a_strategy_counts(#[case] flags: &[(&str, &str)], #[case] file: &str, #[case] wanted: &str) {
    let by_field = |(field, text): &(&str, &str)| (by_path(&format!("fsdp_config.{field}")), (*text).to_owned());
    let mut flags: Vec<_> = flags.iter().map(by_field).collect();
    flags.push((by_path("use_fsdp"), "true".to_owned()));
    let file =
        ConfigFile::read(&format!("fsdp_config: {file}").replace(": fsdp_", ":\n  fsdp_"), Path::new("run.yaml"))
            .unwrap();
    let launcher = RunConfig::resolve(Sources { flags, file: Some(file), ..Default::default() }).unwrap();
    assert_eq!(launcher.fsdp.sharding_strategy.to_string(), wanted);
    // Processes that inherit another word for it decide as the launcher did.
    let variables = launcher.variables();
    let lookup = |name: &str| {
        let inherited = (name == "FSDP_RESHARD_AFTER_FORWARD").then(|| "HYBRID_SHARD_ZERO2".to_owned());
        variables.get(name).cloned().or(inherited)
    };
    let process = RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() }).unwrap();
    assert_eq!(process.fsdp.sharding_strategy.to_string(), wanted);
}

#[rstest]
#[case("fp16: true\nmixed_precision: bf16\n", "run.yaml:1")]
#[case("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  sharding_strategy: NO_SHARD\n", "said twice")]
#[case("fp16: ture\n", "\"ture\"")]
fn one_setting_under_two_keys_must_agree(#[case] text: &str, #[case] words: &str) {
    let error = ConfigFile::read(text, Path::new("run.yaml")).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn values_that_may_hold_passwords_are_not_printed() {
    let file = ConfigFile::read("tpu_env: [WANDB_API_KEY=abc123]\n", Path::new("run.yaml")).unwrap();
    let error = RunConfig::resolve(Sources { file: Some(file), ..Default::default() }).unwrap_err().to_string();
    assert!(error.contains("tpu_env is (not shown)") && !error.contains("abc123"), "{error}");
}

/// A compressed gradient is another gradient, so a hook that nobody runs is an error; the rest is told.
#[test]
fn settings_of_replicas_beside_sharding() {
    let with = |ddp: &str, strategy: ShardingStrategy| {
        let mut code = partial(&[(by_path("use_fsdp"), "true".to_owned())]);
        code.fsdp = FullyShardedDataParallelPlugin { sharding_strategy: Some(strategy), ..Default::default() };
        code.ddp = serde_json::from_str(ddp).unwrap();
        RunConfig::resolve(Sources { code, ..Default::default() })
    };
    let error = with(r#"{"comm_hook": "fp16"}"#, ShardingStrategy::FullShard).unwrap_err().to_string();
    assert!(error.contains("ddp_config.comm_hook fp16 (code) and use_fsdp true (code) contradict"), "{error}");
    with(r#"{"comm_hook": "fp16"}"#, ShardingStrategy::NoShard).unwrap();
    let told = with(r#"{"static_graph": true, "bucket_cap_mb": 25}"#, ShardingStrategy::FullShard).unwrap();
    let told: Vec<_> = told.messages().iter().map(|message| message.setting).collect();
    assert_eq!(told, ["ddp_config.static_graph"]);
}

#[test]
fn accumulation_is_said_in_several_places_that_must_agree() {
    let with = |plugin: &str, kwargs: &str| {
        let gradient_accumulation = serde_json::from_str(plugin).unwrap();
        let mut code = PartialRunConfig { gradient_accumulation, ..Default::default() };
        code.dataloader.gradient_accumulation_kwargs = Some(serde_json::from_str(kwargs).unwrap());
        RunConfig::resolve(Sources { code, ..Default::default() })
    };
    let both = with(r#"{"num_steps": 2}"#, r#"{"num_steps": 2, "sync_each_batch": true}"#).unwrap();
    assert!(both.gradient_accumulation.num_steps == 2 && both.gradient_accumulation.sync_each_batch);
    let error = with(r#"{"num_steps": 2}"#, r#"{"num_steps": 3}"#).unwrap_err().to_string();
    assert!(error.contains("num_steps 2 (code)") && error.contains("gradient_accumulation_kwargs 3 (code)"), "{error}");
}

#[test]
fn a_plugin_for_one_field_leaves_the_others_to_the_launcher() {
    let mut code = PartialRunConfig::default();
    code.gradient_accumulation.sync_each_batch = Some(true);
    let lookup = |name: &str| (name == "ACCELERATE_GRADIENT_ACCUMULATION_STEPS").then(|| "4".to_owned());
    let config = RunConfig::resolve(Sources { code, environment: Some(&lookup), ..Default::default() }).unwrap();
    assert_eq!((config.gradient_accumulation.num_steps, config.gradient_accumulation.sync_each_batch), (4, true));
}

#[test]
fn a_printed_configuration_is_a_table_of_values_and_origins() {
    let mut code = PartialRunConfig::default();
    code.cluster.mixed_precision = Some(MixedPrecision::Bf16);
    code.fsdp.param_init_fn = Some(Callback::new(1_u8));
    code.cluster.use_fsdp = Some(true);
    let config = RunConfig::resolve(Sources { code, ..Default::default() }).unwrap();
    let short = format!("{config:#}");
    let words: Vec<Vec<&str>> =
        short.lines().map(|line| line.split("  ").filter(|word| !word.is_empty()).collect()).collect();
    assert_eq!(words[0].iter().map(|word| word.trim()).collect::<Vec<_>>(), ["mixed_precision", "bf16", "code"]);
    assert!(short.contains("a function of the program"), "{short}");
    assert!(config.to_string().lines().count() > 80);
}

proptest! {
    /// No text makes the reader panic, and nothing that it accepts is lost.
    #[test]
    fn any_text_is_a_configuration_or_an_error(text in "[ \\-:{}\\[\\],a-z\"'\n\t#&*!|>%@0-9]{0,200}") {
        match ConfigFile::read(&text, Path::new("x")) {
            Ok(file) => drop(RunConfig::resolve(Sources { file: Some(file), ..Default::default() })),
            Err(error) => prop_assert!(error.is_config() && error.to_string().len() < 2000),
        }
    }

    /// A record that is written to text and read again is the same.
    #[test]
    fn texts_of_values_read_back(num_steps in 1_usize..1000, sync in any::<bool>()) {
        let mut first = accelerate_core::config::GradientAccumulationPlugin {
            num_steps: Some(num_steps), sync_each_batch: Some(sync), ..Default::default()
        };
        let mut second = accelerate_core::config::GradientAccumulationPlugin::default();
        for setting in accelerate_core::config::GradientAccumulationPlugin::settings() {
            if let Some(text) = first.text(setting) {
                prop_assert!(second.say(setting, &text));
            }
        }
        prop_assert_eq!(&first, &second);
        prop_assert!(first.fill(&second).is_empty());
    }
}

/// An empty value of this variable ends a script in Python with an error.
#[test]
fn a_strategy_goes_to_the_ranks_with_the_word_that_says_nothing_against_it() {
    let flag =
        |name: &str, value: &str| (settings().find(|setting| setting.flag() == Some(name)).unwrap(), value.to_owned());
    for (version, strategy) in [("1", "SHARD_GRAD_OP"), ("1", "HYBRID_SHARD"), ("2", "FULL_SHARD")] {
        let flags =
            vec![flag("use_fsdp", "true"), flag("fsdp_version", version), flag("fsdp_sharding_strategy", strategy)];
        let variables = RunConfig::resolve(Sources { flags, ..Default::default() }).unwrap().variables();
        assert_eq!(variables["FSDP_RESHARD_AFTER_FORWARD"], "true");
        let lookup = |name: &str| variables.get(name).cloned();
        let run = RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() }).unwrap();
        assert_eq!(run.fsdp.sharding_strategy.to_string(), strategy, "version {version}");
    }
}
