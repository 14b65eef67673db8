//! Settings that say two things at once: an error that names both places, or the one that was said closer to the program.

use accelerate_core::Result;
use accelerate_core::config::{ConfigFile, DeepSpeedConfig, RunConfig, Sources, settings};
use rstest::rstest;
use std::path::Path;

fn resolve(file: &str, flags: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<RunConfig> {
    let file = Some(ConfigFile::read(file, Path::new("run.yaml"))?);
    let by_flag = |name: &str| settings().find(|setting| setting.flag() == Some(name)).expect("there is such a flag");
    let flags = flags.iter().map(|(name, text)| (by_flag(name), (*text).to_owned())).collect();
    let lookup = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned());
    RunConfig::resolve(Sources { flags, environment: Some(&lookup), file, ..Default::default() })
}

#[rstest]
#[case::type_and_switch(
    "distributed_type: FSDP\nuse_fsdp: false\n", &[],
    &["distributed_type FSDP (run.yaml:1:1) and use_fsdp false (run.yaml:2:1) contradict"]
)]
#[case::two_strategies(
    "use_fsdp: true\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: NO_SHARD\n", &[],
    &["fsdp_config.sharding_strategy FULL_SHARD (run.yaml:3:3)", "fsdp_config.reshard_after_forward NO_SHARD (run.yaml:4:3)"]
)]
#[case::size_without_policy(
    "use_fsdp: true\nfsdp_config:\n  min_num_params: 2000\n", &[],
    &["only SIZE_BASED_WRAP counts parameters", "fsdp_config.fsdp_min_num_params: run.yaml:3"]
)]
#[case::size_beside_another_policy(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_min_num_params: 2000\n", &[],
    &[
        "fsdp_min_num_params and fsdp_auto_wrap_policy contradict each other",
        "set fsdp_auto_wrap_policy to it, or leave fsdp_min_num_params out",
        "(fsdp_config.fsdp_auto_wrap_policy: run.yaml:3:3, fsdp_config.fsdp_min_num_params: run.yaml:4:3)",
    ]
)]
#[case::size_by_flag_beside_a_policy_in_the_file(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", &[("fsdp_min_num_params", "2000")],
    &[
        "min_num_params and fsdp_auto_wrap_policy contradict each other",
        "(fsdp_config.fsdp_auto_wrap_policy: run.yaml:3:3, fsdp_config.min_num_params: flag --fsdp_min_num_params)",
    ]
)]
#[case::names_without_their_policy(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n  fsdp_transformer_layer_cls_to_wrap: h\n", &[],
    &[
        "fsdp_transformer_layer_cls_to_wrap and fsdp_auto_wrap_policy contradict each other",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap: run.yaml:4:3",
    ]
)]
#[case::one_process_and_two(
    "distributed_type: 'NO'\nnum_processes: 2\n", &[],
    &["distributed_type NO (run.yaml:1:1) and num_processes 2 (run.yaml:2:1) contradict", "NO is one process"]
)]
#[case::flags_of_the_other_way(
    "", &[("use_fsdp", "true"), ("zero_stage", "2")],
    &["--zero_stage 2 (flag) and use_fsdp true (flag --use_fsdp) contradict"]
)]
#[case::flags_of_the_other_way_round(
    "", &[("use_deepspeed", "true"), ("fsdp_version", "2")],
    &["--fsdp_version 2 (flag) and use_deepspeed true (flag --use_deepspeed) contradict"]
)]
#[case::flags_without_their_switch(
    "", &[("fsdp_min_num_params", "1000")],
    &["--fsdp_min_num_params 1000 has no effect without --use_fsdp; add --use_fsdp"]
)]
#[case::policy_without_a_size(
    "use_fsdp: true\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n", &[],
    &["set fsdp_min_num_params, such as 100000000", "fsdp_config.fsdp_auto_wrap_policy: run.yaml:3:3"]
)]
#[case::flags_beside_the_file(
    "distributed_type: FSDP\n", &[("zero_stage", "2")],
    &["--zero_stage 2 (flag) and use_fsdp true (run.yaml:1:1) contradict"]
)]
#[case::flags_of_what_a_file_switches_off(
    "use_deepspeed: false\n", &[("zero_stage", "2")],
    &["--zero_stage 2 (flag) and use_deepspeed false (run.yaml:1:1) contradict"]
)]
#[case::offload_by_the_word_of_the_file(
    "use_fsdp: true\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n  fsdp_offload_params: true\n", &[],
    &["fsdp_offload_params and fsdp_sharding_strategy", "(offload_optimizer works", "fsdp_config.fsdp_offload_params: run.yaml:4"]
)]
#[case::no_file_of_deepspeed(
    "use_deepspeed: true\ndeepspeed_config:\n  deepspeed_config_file: /nowhere/ds.json\n", &[],
    &["/nowhere/ds.json cannot be read; deepspeed_config_file", "deepspeed_config.deepspeed_config_file: run.yaml:3"]
)]
fn both_places_are_named(#[case] file: &str, #[case] flags: &[(&str, &str)], #[case] words: &[&str]) {
    let no_file = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let error = resolve(file, flags, &[]).and_then(|run| run.check_deepspeed(1, &no_file)).unwrap_err();
    for word in words {
        assert!(error.is_config() && error.to_string().contains(word), "{word}: {error}");
    }
}

/// A configuration that is no file is named by the variable that holds it, and is bounded as a file is.
#[rstest]
#[case::a_section(r#"{"fp16": 3}"#, &["fp16 is 3, but must be an object", "variable ACCELERATE_DEEPSPEED_CONFIG_FILE"])]
#[case::an_auto(
    r#"{"zero_optimization": {"stage": 3}, "steps_per_print": "auto"}"#,
    &["steps_per_print", "variable ACCELERATE_DEEPSPEED_CONFIG_FILE"]
)]
#[case::no_json("{", &["variable ACCELERATE_DEEPSPEED_CONFIG_FILE is \"{\", but must be a path, or an object"])]
fn a_configuration_in_a_variable(#[case] json: &str, #[case] words: &[&str]) {
    let variables = [("ACCELERATE_USE_DEEPSPEED", "true"), ("ACCELERATE_DEEPSPEED_CONFIG_FILE", json)];
    let no_file = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let error = resolve("", &[], &variables).and_then(|run| run.check_deepspeed(1, &no_file)).unwrap_err();
    for word in words {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

#[test]
fn a_configuration_of_megabytes_is_not_read() {
    let json = format!("{{\"aio\": \"{}\"}}", "x".repeat(1 << 20));
    let error = DeepSpeedConfig::from_json(&json).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("bytes, but may have at most 1048576"), "{error}");
}

/// What the reference's own questionnaires and launchers write is accepted.
#[rstest]
#[case::one_process("distributed_type: 'NO'\nnum_processes: 1\n", &[], &[("num_processes", "1")])]
#[case::one_process_unsaid("distributed_type: 'NO'\n", &[], &[("num_processes", "1")])]
#[case::strategy_of_the_questionnaire(
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: HYBRID_SHARD\n",
    &[("FSDP_SHARDING_STRATEGY", "FULL_SHARD")], &[("fsdp_config.sharding_strategy", "HYBRID_SHARD")]
)]
#[case::size_of_the_launcher(
    "distributed_type: FSDP\n", &[("FSDP_MIN_NUM_PARAMS", "100000000")], &[("use_fsdp", "true")]
)]
#[case::size_of_the_questionnaire(
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 2000\n", &[],
    &[("fsdp_config.min_num_params", "2000")]
)]
fn what_the_reference_writes_is_read(
    #[case] file: &str,
    #[case] variables: &[(&str, &str)],
    #[case] wanted: &[(&str, &str)],
) {
    let run = resolve(file, &[], variables).unwrap();
    for (path, value) in wanted {
        let setting = settings().find(|setting| setting.path == *path).unwrap();
        assert_eq!(run.text(setting).as_deref(), Some(*value), "{path}");
    }
}

/// Of a type and a number in two places, the closer one counts.
#[rstest]
#[case("distributed_type: 'NO'\nnum_processes: 1\n", &[("num_processes", "2")], &[], 2)]
#[case("num_processes: 4\n", &[], &[("ACCELERATE_DISTRIBUTED_TYPE", "NO")], 1)]
#[case("distributed_type: 'NO'\n", &[], &[("ACCELERATE_NUM_PROCESSES", "3")], 3)]
fn the_closer_of_type_and_number_counts(
    #[case] file: &str,
    #[case] flags: &[(&str, &str)],
    #[case] variables: &[(&str, &str)],
    #[case] wanted: usize,
) {
    assert_eq!(resolve(file, flags, variables).unwrap().cluster.num_processes, Some(wanted));
}

/// A rank may be a program that does not know the variable of the type, so that it gets the switch.
#[rstest]
#[case("FSDP", "ACCELERATE_USE_FSDP")]
#[case("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED")]
#[case("MULTI_CPU", "ACCELERATE_USE_CPU")]
fn a_distributed_type_in_the_environment_reaches_the_ranks(#[case] name: &str, #[case] variable: &str) {
    let run = resolve("", &[], &[("ACCELERATE_DISTRIBUTED_TYPE", name)]).unwrap();
    assert_eq!(run.variables().get(variable).map(String::as_str), Some("true"));
}
