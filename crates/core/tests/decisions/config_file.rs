//! Configuration files that are written: what they say is what was said.

use crate::settings::samples;
use accelerate_core::config::{
    ConfigFile, FileFormat, PartialRunConfig, RunConfig, Sources, changed_lines, default_config_files,
    is_in_files_of_reference, settings,
};
use accelerate_core::settings::{Setting, ValueKind};
use proptest::prelude::*;
use rstest::rstest;

const FORMATS: [FileFormat; 2] = [FileFormat::Yaml, FileFormat::Json];

fn said(texts: &[(&str, &str)]) -> PartialRunConfig {
    let setting = |path: &str| settings().find(|setting| setting.path == path).unwrap();
    let texts: Vec<_> = texts.iter().map(|(path, text)| (setting(path), (*text).to_owned())).collect();
    PartialRunConfig::of_texts(&texts)
}

fn read(text: &str) -> PartialRunConfig {
    ConfigFile::read(text, "run.yaml".as_ref()).unwrap_or_else(|error| panic!("{error}\n{text}")).into_partial()
}

fn with_text() -> impl Iterator<Item = &'static Setting> {
    settings().filter(|setting| !setting.is_code_only() && setting.path != "compute_environment")
}

#[test]
fn every_setting_is_read_back_as_it_was_written() {
    for setting in with_text() {
        for sample in samples(setting) {
            let said = PartialRunConfig::of_texts(&[(setting, sample)]);
            for format in FORMATS {
                let text = ConfigFile::write(&said, format);
                assert_eq!(read(&text), said.in_file(), "{}:\n{text}", setting.path);
            }
        }
    }
}

/// Words that YAML could take for something else, and characters that it does not print.
fn any_word() -> impl Strategy<Value = String> {
    let says_something = |text: &String| {
        let word = text.trim();
        !word.is_empty()
            && !word.starts_with('{')
            && !["none", "null"].iter().any(|none| word.eq_ignore_ascii_case(none))
    };
    let tricky = prop_oneof![
        Just("no".to_owned()),
        Just("Y".to_owned()),
        Just("012".to_owned()),
        Just("1e3".to_owned()),
        Just("0,1".to_owned()),
        Just("- a".to_owned()),
        Just("a: b".to_owned()),
        Just("# a".to_owned()),
        Just("a #b".to_owned()),
        Just("a\nb\r\u{85}\u{2028}\u{feff}c".to_owned()),
        Just("\"'\\".to_owned()),
        Just("2026-01-01".to_owned()),
        Just("12:30".to_owned()),
        Just("~/a b".to_owned()),
        Just("*a".to_owned()),
    ];
    prop_oneof![tricky, any::<String>(), "[ -~]{1,40}"].prop_filter("it says nothing", says_something)
}

fn any_of(setting: &'static Setting) -> BoxedStrategy<String> {
    match setting.kind {
        ValueKind::Text | ValueKind::Path => any_word().boxed(),
        _ => proptest::sample::select(samples(setting).to_vec()).boxed(),
    }
}

proptest! {
    #[test]
    fn any_settings_together_are_read_back(
        texts in proptest::sample::subsequence(with_text().collect::<Vec<_>>(), 0..12)
            .prop_flat_map(|chosen| chosen.into_iter().map(|setting| (Just(setting), any_of(setting))).collect::<Vec<_>>()),
    ) {
        let said = PartialRunConfig::of_texts(&texts);
        for format in FORMATS {
            let text = ConfigFile::write(&said, format);
            let read = ConfigFile::read(&text, "run.yaml".as_ref()).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
            prop_assert_eq!(read.into_partial(), said.in_file(), "{}", text);
        }
    }
}

#[rstest]
#[case::nothing(&[], "MULTI_GPU", None)]
#[case::one_process(&[("num_processes", "1")], "NO", None)]
#[case::the_cpu(&[("use_cpu", "true"), ("num_processes", "4")], "MULTI_CPU", None)]
#[case::fsdp(&[("use_fsdp", "true"), ("use_deepspeed", "false")], "FSDP", None)]
#[case::fsdp_on_gpus(&[("use_fsdp", "true"), ("distributed_type", "MULTI_GPU")], "FSDP", None)]
#[case::fsdp_on_the_cpu(&[("use_fsdp", "true"), ("distributed_type", "MULTI_CPU")], "FSDP", Some("use_cpu"))]
#[case::fsdp_in_one_process(&[("use_fsdp", "true"), ("distributed_type", "NO")], "FSDP", Some("num_processes"))]
#[case::what_contradicts_stays(&[("use_fsdp", "true"), ("distributed_type", "DEEPSPEED")], "DEEPSPEED", Some("use_fsdp"))]
fn the_distributed_type_stands_for_switches(
    #[case] texts: &[(&str, &str)],
    #[case] wanted: &str,
    #[case] beside: Option<&str>,
) {
    let text = ConfigFile::write(&said(texts), FileFormat::Yaml);
    assert!(
        text.contains(&format!("distributed_type: {}\n", if wanted == "NO" { "\"NO\"" } else { wanted })),
        "{text}"
    );
    for switch in ["use_fsdp", "use_deepspeed", "multi_gpu"] {
        assert_eq!(text.contains(&format!("{switch}:")), beside == Some(switch), "{text}");
    }
    assert!(beside.is_none_or(|key| text.contains(&format!("{key}: "))), "{text}");
}

#[test]
fn values_have_the_types_that_python_expects() {
    let said = said(&[
        ("mixed_precision", "no"),
        ("gpu_ids", "0"),
        ("num_processes", "2"),
        ("use_deepspeed", "true"),
        ("commands", "echo a,echo b"),
        ("deepspeed_config.zero_stage", "3"),
        ("deepspeed_config.gradient_clipping", "auto"),
        ("deepspeed_config.gradient_accumulation_steps", "2"),
        ("fsdp_config.reshard_after_forward", "true"),
        ("fsdp_config.transformer_cls_names_to_wrap", "A,B"),
        ("fsdp_config.max_memory", "5"),
        ("dynamo_config.options", r#"{"a": {"x": [1e-9, null]}, "b": ["on"]}"#),
    ]);
    let wanted = "\
commands:
- \"echo a\"
- \"echo b\"
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: auto
  zero_stage: 3
distributed_type: DEEPSPEED
dynamo_config:
  options:
    a:
      x:
      - 1.0e-9
      - null
    b:
    - \"on\"
fsdp_config:
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: \"A,B\"
  max_memory: 5
gpu_ids: \"0\"
mixed_precision: \"no\"
num_processes: 2
";
    let text = ConfigFile::write(&said, FileFormat::Yaml);
    assert_eq!(text, wanted);
    let json: serde_json::Value = serde_json::from_str(&ConfigFile::write(&said, FileFormat::Json)).unwrap();
    assert_eq!(json["deepspeed_config"]["zero_stage"], 3);
    assert_eq!(json["commands"][1], "echo b");
}

#[test]
fn what_python_has_no_key_for_is_known() {
    for (path, wanted) in [
        ("num_processes", true),
        ("use_fsdp", false),
        ("torch_device", false),
        ("deepspeed_config.zero_stage", true),
        ("dataloader_config.split_batches", false),
        ("fsdp_config.param_init_fn", false),
    ] {
        let setting = settings().find(|setting| setting.path == path).unwrap();
        assert_eq!(is_in_files_of_reference(setting), wanted, "{path}");
    }
}

/// Mistakes of different kinds, each with its line; the rest of the file counts.
#[test]
fn every_mistake_of_a_file_is_found() {
    let text = "\
num_proceses: 2
mixed_precision: bf61
fsdp_config:
  fsdp_sharding_strategi: FULL_SHARD
  fsdp_version: two
deepspeed_config: yes
debug: [true]
megatron_lm_config:
  megatron_lm_tp_degree: 2
use_cpu: true
";
    let (file, errors) = ConfigFile::read_all(text, "run.yaml".as_ref());
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    let wanted = [
        "run.yaml:1:1: there is no key \"num_proceses\" in a configuration file; the nearest one is \"num_processes\"",
        "run.yaml:2:18: mixed_precision is \"bf61\"",
        "run.yaml:4:3: there is no key \"fsdp_sharding_strategi\" in fsdp_config; the nearest one is \"sharding_strategy\"",
        "run.yaml:5:17: fsdp_version is \"two\"",
        "run.yaml:6:19: deepspeed_config must be a mapping",
        "run.yaml:7:8: debug is a list",
        "megatron_lm_config is a section with keys (run.yaml:8:1), which is refused",
    ];
    assert_eq!(errors.len(), wanted.len(), "{errors:#?}");
    for (error, wanted) in errors.iter().zip(wanted) {
        assert!(error.starts_with(wanted), "{error}");
    }
    assert_eq!(file.into_partial().cluster.use_cpu, Some(true));
    let first = ConfigFile::read(text, "run.yaml".as_ref()).unwrap_err().to_string();
    assert_eq!(first, errors[0]);
}

#[test]
fn no_more_than_a_hundred_mistakes_are_looked_for() {
    let text: String = (0..1000).map(|number| format!("key_{number}: 1\n")).collect();
    assert_eq!(ConfigFile::read_all(&text, "run.yaml".as_ref()).1.len(), 100);
}

/// Settings that contradict each other do not hide settings that are refused.
#[test]
fn what_is_wrong_with_settings_is_found_together() {
    let text = "distributed_type: FSDP\nuse_fsdp: false\ntpu_name: a\nrdzv_backend: etcd\nmonitor_interval: 3\n";
    let file = Some(ConfigFile::read(text, "run.yaml".as_ref()).unwrap());
    let (errors, messages) = RunConfig::problems(Sources { file, ..Default::default() });
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    for (number, line) in ["run.yaml:2", "run.yaml:4", "run.yaml:3"].into_iter().enumerate() {
        assert!(errors[number].contains(line), "{errors:#?}");
    }
    assert_eq!((errors.len(), messages.len()), (3, 1));
}

#[rstest]
#[case::hub(&[("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/u")], Some("/h/accelerate"))]
#[case::cache(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/u")], Some("/x/huggingface/accelerate"))]
#[case::home(&[("HOME", "/u")], Some("/u/.cache/huggingface/accelerate"))]
#[case::tilde(&[("HF_HOME", "~/h"), ("HOME", "/u")], Some("/u/h/accelerate"))]
#[case::tilde_alone(&[("XDG_CACHE_HOME", "~"), ("HOME", "/u")], Some("/u/huggingface/accelerate"))]
#[case::somebody_elses_home(&[("HF_HOME", "~ada/h"), ("HOME", "/u")], Some("~ada/h/accelerate"))]
#[case::set_to_nothing(&[("HF_HOME", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/u")], Some("/u/.cache/huggingface/accelerate"))]
#[case::nowhere(&[], None)]
fn the_first_variable_that_is_set_has_the_default_file(
    #[case] variables: &[(&str, &str)],
    #[case] folder: Option<&str>,
) {
    let lookup = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    let files = default_config_files(&lookup);
    let wanted = folder.map(|folder| ["yaml", "json"].map(|kind| format!("{folder}/default_config.{kind}").into()));
    assert_eq!(files, wanted);
}

#[rstest]
#[case::spelled_otherwise("a: 'no'\nb:\n  c: [1, 2]\n", "b: {c: ['1', \"2\"]}\na: no # word\n", &[])]
#[case::renamed("fp16: true\n", "mixed_precision: fp16\n", &["- fp16: true", "+ mixed_precision: fp16"])]
#[case::in_a_section("s: {a: 1, b: 2}\n", "s: {a: 3, b: 2}\n", &["- s.a: 1", "+ s.a: 3"])]
#[case::nothing_said("a: null\ns: {}\n", "b: ~\n", &["- a: null", "+ b: null", "- s: {}"])]
#[case::secret("tpu_env: [A=secret]\n", "tpu_env: A=secret\n", &["- tpu_env: (not shown)", "+ tpu_env: (not shown)"])]
fn what_changes_is_told_by_keys(#[case] old: &str, #[case] new: &str, #[case] wanted: &[&str]) {
    assert_eq!(changed_lines(old, new, "run.yaml".as_ref()).unwrap(), wanted);
}

/// Of each strategy what Python Accelerate's own conversion makes of it.
#[rstest]
#[case("FULL_SHARD", Some(true))]
#[case("HYBRID_SHARD", Some(true))]
#[case("SHARD_GRAD_OP", Some(false))]
#[case("HYBRID_SHARD_ZERO2", Some(false))]
#[case("NO_SHARD", Some(false))]
#[case("OPTIMIZER_STATE", None)]
fn strategies_become_answers(#[case] strategy: &str, #[case] frees: Option<bool>) {
    let converted = said(&[("fsdp_config.sharding_strategy", strategy)]).to_fsdp2();
    let Some(frees) = frees else {
        let error = converted.unwrap_err().to_string();
        assert!(error.contains("sharding_strategy is OPTIMIZER_STATE") && error.contains("version 1"), "{error}");
        return;
    };
    let converted = converted.unwrap();
    let is_told = strategy.starts_with("HYBRID") || strategy == "NO_SHARD";
    assert_eq!((converted.is_converted, converted.notes.len()), (true, usize::from(is_told)), "{:?}", converted.notes);
    let wanted = [
        ("fsdp_config.fsdp_version", "2"),
        ("fsdp_config.reshard_after_forward", if frees { "true" } else { "false" }),
    ];
    assert_eq!(converted.said, said(&wanted));
}

#[test]
fn what_version_2_does_not_have_is_left_out_and_told() {
    let before = said(&[
        ("use_fsdp", "true"),
        ("fsdp_config.fsdp_version", "1"),
        ("fsdp_config.reshard_after_forward", "SHARD_GRAD_OP"),
        ("fsdp_config.backward_prefetch", "BACKWARD_PRE"),
        ("fsdp_config.forward_prefetch", "true"),
        ("fsdp_config.sync_module_states", "true"),
        ("fsdp_config.use_orig_params", "true"),
        ("fsdp_config.cpu_offload", "true"),
        ("fsdp_config.state_dict_type", "SHARDED_STATE_DICT"),
    ]);
    let converted = before.to_fsdp2().unwrap();
    let wanted = said(&[
        ("use_fsdp", "true"),
        ("fsdp_config.fsdp_version", "2"),
        ("fsdp_config.reshard_after_forward", "false"),
        ("fsdp_config.cpu_offload", "true"),
        ("fsdp_config.state_dict_type", "SHARDED_STATE_DICT"),
    ]);
    assert_eq!(converted.said, wanted);
    for (field, note) in
        ["sync_module_states", "backward_prefetch", "forward_prefetch", "use_orig_params"].iter().zip(&converted.notes)
    {
        assert!(note.starts_with(field), "{note}");
    }
    let again = converted.said.to_fsdp2().unwrap();
    assert_eq!((again.is_converted, again.said), (false, converted.said));
    assert!(!said(&[("num_processes", "2")]).to_fsdp2().unwrap().is_converted);
}

#[rstest]
#[case(0, "NO", "1", "true")]
#[case(1, "NO", "1", "false")]
#[case(8, "MULTI_GPU", "8", "false")]
fn a_file_for_a_machine_asks_for_its_gpus(
    #[case] gpus: usize,
    #[case] kind: &str,
    #[case] processes: &str,
    #[case] cpu: &str,
) {
    let wanted = said(&[
        ("compute_environment", "LOCAL_MACHINE"),
        ("distributed_type", kind),
        ("mixed_precision", "bf16"),
        ("num_processes", processes),
        ("use_cpu", cpu),
    ]);
    assert_eq!(PartialRunConfig::for_machine(gpus, "bf16".parse().unwrap()), wanted);
}

#[test]
fn what_a_value_goes_before_is_known_closest_first() {
    let setting = settings().find(|setting| setting.path == "num_processes").unwrap();
    let lookup = |name: &str| (name == "ACCELERATE_NUM_PROCESSES").then(|| "3".to_owned());
    let file = Some(ConfigFile::read("num_processes: 4\ndebug: true\n", "run.yaml".as_ref()).unwrap());
    let flags = vec![(setting, "2".to_owned())];
    let run = RunConfig::resolve(Sources { flags, environment: Some(&lookup), file, ..Default::default() }).unwrap();
    let overridden: Vec<_> =
        run.overridden("num_processes").map(|other| (other.value.as_str(), other.origin.to_string())).collect();
    let variable = "environment variable ACCELERATE_NUM_PROCESSES".to_owned();
    assert_eq!(overridden, [("3", variable), ("4", "run.yaml:1:1".to_owned())]);
    assert_eq!(run.overridden("debug").count(), 0);
}

/// CUDA would use none of them, and say nothing.
#[rstest]
#[case("all", true)]
#[case("ALL", true)]
#[case("''", true)]
#[case("0", true)]
#[case("0, 2", true)]
#[case("GPU-8f6d,MIG-1a", true)]
#[case("foo", false)]
#[case("0,0", false)]
#[case("0,", false)]
#[case("GPU-", false)]
#[case("-1", false)]
fn gpus_are_numbers_or_names_of_gpus(#[case] gpu_ids: &str, #[case] is_right: bool) {
    let file = Some(ConfigFile::read(&format!("gpu_ids: {gpu_ids}\n"), "run.yaml".as_ref()).unwrap());
    let (errors, _) = RunConfig::problems(Sources { file, ..Default::default() });
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(errors.is_empty(), is_right, "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("gpu_ids") && error.contains("run.yaml:1:1")), "{errors:?}");
}

/// What is worth knowing before a launch, of a machine with so many GPUs. `...` is where it stands.
#[rstest]
#[case("distributed_type: MULTI_GPU\ngpu_ids: all\nuse_cpu: false\n", 0, &["distributed_type MULTI_GPU (run.yaml:1:1) has no effect: no NVIDIA"])]
#[case("distributed_type: MULTI_GPU\ngpu_ids: all\nuse_cpu: false\n", 2, &[])]
#[case("gpu_ids: 0,1\n", 0, &["gpu_ids 0,1 (run.yaml:1:1) has no effect: no NVIDIA GPU"])]
#[case("gpu_ids: 0,1\nuse_cpu: true\n", 2, &["are kept on the CPU"])]
#[case("gpu_ids: all\n", 0, &[])]
#[case(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: a.*,BertLayer\n",
    0,
    &["fsdp_config.fsdp_transformer_layer_cls_to_wrap is a.*,BertLayer (run.yaml:4:3), and \"BertLayer\" looks like a class"]
)]
#[case(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  transformer_layer_cls_to_wrap: encoder.Layer.*,H,h\n",
    0,
    &[]
)]
fn warnings_tell_what_will_happen(#[case] text: &str, #[case] num_gpus: usize, #[case] wanted: &[&str]) {
    let file = || Some(ConfigFile::read(text, "run.yaml".as_ref()).unwrap());
    let run = RunConfig::resolve(Sources { file: file(), ..Default::default() }).unwrap();
    let warnings = run.warnings(num_gpus);
    assert_eq!(warnings.len(), wanted.len(), "{warnings:?}");
    for (warning, wanted) in warnings.iter().zip(wanted) {
        assert!(warning.contains(wanted), "{wanted} in {warning}");
    }
    let for_python = Sources { file: file(), is_for_python: true, ..Default::default() };
    let of_classes = RunConfig::resolve(for_python).unwrap().warnings(num_gpus);
    assert!(of_classes.iter().all(|warning| !warning.contains("class")), "{of_classes:?}");
}

/// Every setting that another one makes meaningless, by the words of the file.
#[rstest]
#[case("fsdp_config: {fsdp_version: 2, transformer_layer_cls_to_wrap: a}\n", &["fsdp_config.fsdp_transformer_layer_cls_to_wrap is a (run.yaml:1:32)"])]
#[case("grad_scaler_config:\n  init_scale: 2.0\n", &["grad_scaler_config.init_scale is 2 (run.yaml:2:3), which has no effect: only losses in fp16"])]
#[case("mixed_precision: fp16\ngrad_scaler_config:\n  init_scale: 2.0\n", &[])]
#[case(
    "use_deepspeed: true\ndeepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: true\n  offload_param_nvme_path: /a\n",
    &["deepspeed_config.offload_param_nvme_path is /a (run.yaml:5:3)", "deepspeed_config.zero3_init_flag is true (run.yaml:4:3)"]
)]
#[case("use_deepspeed: true\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n", &[])]
#[case(
    "num_processes: 2\nparallelism_config:\n  parallelism_config_sp_size: 2\n  parallelism_config_sp_seq_length: 8\n",
    &["parallelism_config.parallelism_config_sp_seq_length is 8 (run.yaml:4:3), which has no effect: sequences may have any length"]
)]
#[case(
    "num_processes: 2\nparallelism_config:\n  parallelism_config_sp_size: 2\n  parallelism_config_sp_seq_length: 8\n  \
     parallelism_config_sp_seq_length_is_variable: false\n",
    &[]
)]
fn settings_that_others_make_meaningless_are_all_named(#[case] text: &str, #[case] wanted: &[&str]) {
    let file = Some(ConfigFile::read(text, "run.yaml".as_ref()).unwrap());
    let unused: Vec<_> = RunConfig::resolve(Sources { file, ..Default::default() })
        .unwrap()
        .unused()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(unused.len(), wanted.len(), "{unused:?}");
    for (unused, wanted) in unused.iter().zip(wanted) {
        assert!(unused.starts_with(wanted), "{wanted} in {unused}");
    }
}

/// A file without a type of machines means this one.
#[rstest]
#[case("num_processes: 2\n", 0, "MULTI_CPU", Some("true"))]
#[case("num_processes: 2\n", 4, "MULTI_GPU", None)]
#[case("num_processes: 1\n", 0, "NO", None)]
#[case("debug: true\n", 0, "NO", None)]
#[case("debug: true\n", 1, "MULTI_GPU", None)]
#[case("use_cpu: false\nnum_processes: 2\n", 0, "MULTI_GPU", Some("false"))]
#[case("use_cpu: true\nnum_processes: 2\n", 4, "MULTI_CPU", Some("true"))]
#[case("gpu_ids: '0,1'\nnum_processes: 2\n", 0, "MULTI_GPU", None)]
#[case("use_fsdp: true\nnum_processes: 2\n", 0, "FSDP", None)]
#[case("distributed_type: MULTI_GPU\nnum_processes: 2\n", 0, "MULTI_GPU", None)]
fn the_type_of_machines_that_nobody_says_is_that_of_this_one(
    #[case] text: &str,
    #[case] num_gpus: usize,
    #[case] distributed_type: &str,
    #[case] use_cpu: Option<&str>,
) {
    let said = ConfigFile::read(text, "run.yaml".as_ref()).unwrap().into_partial().on_machine(num_gpus).in_file();
    assert_eq!(said.cluster.distributed_type.map(|it| it.to_string()).as_deref(), Some(distributed_type));
    assert_eq!(said.cluster.use_cpu.map(|it| it.to_string()).as_deref(), use_cpu);
}
