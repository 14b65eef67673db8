//! Plugins from the variables of a launcher.

use accelerate_core::config::*;
use accelerate_core::{Error, Result};
use rstest::rstest;

fn lookup<'a>(variables: &'a [(&'a str, &'a str)], prefix: &'a str) -> impl Fn(&str) -> Option<String> + 'a {
    move |name| {
        let name = name.strip_prefix(prefix)?;
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }
}

fn resolve(lookup: &dyn Fn(&str) -> Option<String>, switch: &str) -> Result<RunConfig> {
    let flags = settings().filter(|setting| setting.path == switch).map(|setting| (setting, "true".to_owned()));
    RunConfig::resolve(Sources { flags: flags.collect(), environment: Some(lookup), ..Default::default() })
}

fn deep_speed(variables: &[(&str, &str)]) -> Result<DeepSpeedSettings> {
    Ok(resolve(&lookup(variables, "ACCELERATE_"), "use_deepspeed")?.deepspeed)
}

fn fully_sharded(variables: &[(&str, &str)]) -> Result<FullyShardedSettings> {
    let settings = resolve(&lookup(variables, "FSDP_"), "use_fsdp")?.fsdp;
    // What changes nothing is as nobody had said it.
    Ok(FullyShardedSettings {
        cpu_ram_efficient_loading: false,
        use_orig_params: true,
        state_dict_type: None,
        ..settings
    })
}

#[track_caller]
fn is_about<T: std::fmt::Debug>(result: Result<T>, messages: &[&str]) -> Error {
    let error = result.unwrap_err();
    assert!(error.is_environment() || error.is_config(), "{error}");
    for message in messages {
        assert!(error.to_string().contains(message), "{message}: {error}");
    }
    error
}

#[test]
fn all_of_deep_speed() {
    assert_eq!(deep_speed(&[]).unwrap(), DeepSpeedSettings::default());
    let all = [
        ("DEEPSPEED_CONFIG_FILE", "ds.json"),
        ("DEEPSPEED_ZERO_STAGE", "3"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/a"),
        ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/b"),
        ("DEEPSPEED_ZERO3_INIT", "false"),
        ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true"),
        ("GRADIENT_ACCUMULATION_STEPS", "4"),
        ("GRADIENT_CLIPPING", "0.5"),
        ("CONFIG_DS_FIELDS", "zero_stage"),
    ];
    let wanted = DeepSpeedSettings {
        hf_ds_config: Some(DeepSpeedSource::Path("ds.json".into())),
        gradient_accumulation_steps: Some(Auto::Value(4)),
        gradient_clipping: Some(Auto::Value(0.5)),
        zero_stage: Some(ZeroStage::Parameters),
        offload_optimizer_device: Some(OffloadDevice::Cpu),
        offload_param_device: Some(OffloadDevice::Nvme),
        offload_optimizer_nvme_path: Some("/a".into()),
        offload_param_nvme_path: Some("/b".into()),
        zero3_init_flag: Some(false),
        zero3_save_16bit_model: Some(true),
        ..Default::default()
    };
    assert_eq!(deep_speed(&all).unwrap(), wanted);
}

#[test]
fn words_that_say_nothing() {
    let none = [
        ("DEEPSPEED_CONFIG_FILE", "none"),
        ("DEEPSPEED_ZERO_STAGE", " "),
        ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "none"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "none"),
        ("GRADIENT_CLIPPING", "none"),
    ];
    assert_eq!(deep_speed(&none).unwrap(), DeepSpeedSettings::default());
    let auto = deep_speed(&[("GRADIENT_CLIPPING", "auto"), ("DEEPSPEED_GRADIENT_ACCUMULATION_STEPS", "auto")]).unwrap();
    assert_eq!((auto.gradient_clipping, auto.gradient_accumulation_steps), (Some(Auto::Auto), Some(Auto::Auto)));
}

#[rstest]
#[case("DEEPSPEED_ZERO_STAGE", "4", "one of 0, 1, 2, 3")]
#[case("DEEPSPEED_ZERO_STAGE", "two", "one of 0, 1, 2, 3")]
#[case("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "disk", "one of none, cpu, nvme")]
#[case("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "gpu", "one of none, cpu, nvme")]
#[case("DEEPSPEED_ZERO3_INIT", "maybe", "one of y, yes")]
#[case("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "2", "one of y, yes")]
#[case("DEEPSPEED_CONFIG_FILE", "{", "a path")]
#[case("GRADIENT_ACCUMULATION_STEPS", "0", "at least 1")]
#[case("GRADIENT_CLIPPING", "-1", "a number of at least 0")]
#[case("GRADIENT_CLIPPING", "NaN", "a number of at least 0")]
#[case("DEEPSPEED_MOE_LAYER_CLS_NAMES", "Block", "transformer_cls_names_to_wrap")]
#[case("FP8_BACKEND", "MSAMP", "not available")]
fn wrong_variables_of_deep_speed(#[case] name: &str, #[case] value: &str, #[case] wanted: &str) {
    is_about(deep_speed(&[(name, value)]), &[name, value, wanted]);
}

#[test]
fn a_variable_beside_a_document_that_says_something_else() {
    let mut code = PartialRunConfig::default();
    code.cluster.use_deepspeed = Some(true);
    code.deepspeed = DeepSpeedPlugin {
        hf_ds_config: Some(r#"{"zero_optimization": {"stage": 3}}"#.parse().unwrap()),
        is_train_batch_min: Some(false),
        ..Default::default()
    };
    let stage = lookup(&[("DEEPSPEED_ZERO_STAGE", "2")], "ACCELERATE_");
    let both = RunConfig::resolve(Sources { code, environment: Some(&stage), ..Default::default() }).unwrap().deepspeed;
    assert!(!both.is_train_batch_min);
    let error = both.config(&|_| Ok(String::new())).unwrap_err().to_string();
    assert!(error.contains("zero_optimization.stage is 3, but DeepSpeedPlugin.zero_stage is 2"), "{error}");
}

/// What `accelerate launch --use_fsdp` sets when it is asked for nothing else.
const LAUNCHER: [(&str, &str); 11] = [
    ("VERSION", "1"),
    ("SHARDING_STRATEGY", "FULL_SHARD"),
    ("RESHARD_AFTER_FORWARD", "true"),
    ("OFFLOAD_PARAMS", "false"),
    ("MIN_NUM_PARAMS", "100000000"),
    ("FORWARD_PREFETCH", "false"),
    ("USE_ORIG_PARAMS", "true"),
    ("CPU_RAM_EFFICIENT_LOADING", "true"),
    ("SYNC_MODULE_STATES", "true"),
    ("ACTIVATION_CHECKPOINTING", "false"),
    ("ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
];

fn launcher_with<'a>(changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    changes.iter().copied().chain(LAUNCHER).collect()
}

#[rstest]
#[case(&[], FullyShardedSettings::default())]
#[case(&[("SHARDING_STRATEGY", "2")], FullyShardedSettings {
    sharding_strategy: ShardingStrategy::ShardGradOp, ..Default::default() })]
#[case::questionnaire(&[("RESHARD_AFTER_FORWARD", "shard_grad_op")], FullyShardedSettings {
    sharding_strategy: ShardingStrategy::ShardGradOp, ..Default::default() })]
#[case::both_alike(&[("RESHARD_AFTER_FORWARD", "NO_SHARD"), ("SHARDING_STRATEGY", "NO_SHARD")],
    FullyShardedSettings { sharding_strategy: ShardingStrategy::NoShard, ..Default::default() })]
#[case(&[("RESHARD_AFTER_FORWARD", "False")], FullyShardedSettings {
    reshard_after_forward: Some(false.into()), ..Default::default() })]
#[case(&[("VERSION", "2")], FullyShardedSettings {
    fsdp_version: 2, reshard_after_forward: Some(true.into()), ..Default::default() })]
#[case(&[("VERSION", "2"), ("RESHARD_AFTER_FORWARD", "no"), ("STATE_DICT_TYPE", "SHARDED_STATE_DICT")],
    FullyShardedSettings { fsdp_version: 2, reshard_after_forward: Some(false.into()), ..Default::default() })]
#[case(&[("SYNC_MODULE_STATES", "false"), ("CPU_RAM_EFFICIENT_LOADING", "0"), ("USE_ORIG_PARAMS", "False")],
    FullyShardedSettings { sync_module_states: false, ..Default::default() })]
#[case(&[("AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"), ("MIN_NUM_PARAMS", "2000")], FullyShardedSettings {
    auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, min_num_params: Some(2000), ..Default::default() })]
#[case(&[("AUTO_WRAP_POLICY", "transformer_based_wrap"), ("TRANSFORMER_CLS_TO_WRAP", "a.*, b.*")],
    FullyShardedSettings {
        auto_wrap_policy: AutoWrapPolicy::TransformerBasedWrap,
        transformer_cls_names_to_wrap: vec!["a.*".to_owned(), "b.*".to_owned()],
        ..Default::default()
    })]
#[case(&[("ACTIVATION_CHECKPOINTING", "true")],
    FullyShardedSettings { activation_checkpointing: true, ..Default::default() })]
#[case(&[("OFFLOAD_PARAMS", "True")], FullyShardedSettings { cpu_offload: true, ..Default::default() })]
#[case(&[("ACTIVATION_CHECKPOINTING", "true"), ("ACTIVATION_CHECKPOINTING_OFFLOAD", "1")],
    FullyShardedSettings {
        activation_checkpointing: true, activation_checkpointing_offload: true, ..Default::default()
    })]
#[case(&[("IGNORED_MODULES", "head, blocks.*.norm")],
    FullyShardedSettings { ignored_modules: vec!["head".into(), "blocks.*.norm".into()], ..Default::default() })]
#[case(&[("SHARDING_STRATEGY", "HYBRID_SHARD_ZERO2")],
    FullyShardedSettings { sharding_strategy: ShardingStrategy::HybridShardZero2, ..Default::default() })]
#[case(&[("STATE_DICT_TYPE", "FULL_STATE_DICT"), ("BACKWARD_PREFETCH", "NO_PREFETCH"), ("IGNORED_MODULES", "None")],
    FullyShardedSettings::default())]
fn sharding_by_variables(#[case] changes: &[(&str, &str)], #[case] wanted: FullyShardedSettings) {
    let found = fully_sharded(&launcher_with(changes)).unwrap();
    found.check().unwrap();
    assert_eq!(found, wanted);
}

#[test]
fn nothing_set_is_the_default() {
    assert_eq!(fully_sharded(&[]).unwrap(), FullyShardedSettings::default());
    assert_eq!(fully_sharded(&LAUNCHER).unwrap(), FullyShardedSettings::default());
}

#[rstest]
#[case(&[("VERSION", "3")], &["fsdp_version is 3", "1 or 2", "FSDP_VERSION"])]
#[case(&[("VERSION", "x")], &["FSDP_VERSION is \"x\"", "a whole number"])]
#[case(&[("SHARDING_STRATEGY", "HYBRID")], &["FSDP_SHARDING_STRATEGY is \"HYBRID\""])]
#[case(&[("RESHARD_AFTER_FORWARD", "maybe")], &["FSDP_RESHARD_AFTER_FORWARD is \"maybe\"", "SHARD_GRAD_OP"])]
#[case(&[("VERSION", "2"), ("RESHARD_AFTER_FORWARD", "shard_grad_op")], &["FSDP_RESHARD_AFTER_FORWARD", "true or false"])]
#[case(&[("VERSION", "2"), ("SHARDING_STRATEGY", "NO_SHARD")], &["FSDP_SHARDING_STRATEGY", "version 2"])]
#[case(&[("SHARDING_STRATEGY", "NO_SHARD"), ("RESHARD_AFTER_FORWARD", "FULL_SHARD")],
    &["FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD", "contradict"])]
#[case(&[("AUTO_WRAP_POLICY", "ALWAYS")], &["FSDP_AUTO_WRAP_POLICY is \"ALWAYS\""])]
#[case(&[("MIN_NUM_PARAMS", "1e8")], &["FSDP_MIN_NUM_PARAMS is \"1e8\""])]
#[case(&[("SYNC_MODULE_STATES", "maybe")], &["FSDP_SYNC_MODULE_STATES is \"maybe\""])]
#[case(&[("OFFLOAD_PARAMS", "cpu")], &["FSDP_OFFLOAD_PARAMS is \"cpu\"", "one of y, yes"])]
#[case(&[("BACKWARD_PREFETCH", "BACKWARD")], &["FSDP_BACKWARD_PREFETCH", "NO_PREFETCH"])]
#[case(&[("FORWARD_PREFETCH", "ahead")], &["FSDP_FORWARD_PREFETCH is \"ahead\""])]
#[case(&[("ACTIVATION_CHECKPOINTING", "maybe")], &["FSDP_ACTIVATION_CHECKPOINTING is \"maybe\""])]
#[case(&[("ACTIVATION_CHECKPOINTING_OFFLOAD", "cpu")], &["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD is \"cpu\""])]
#[case(&[("USE_ORIG_PARAMS", "maybe")], &["FSDP_USE_ORIG_PARAMS is \"maybe\""])]
#[case(&[("VERSION", "2"), ("STATE_DICT_TYPE", "LOCAL_STATE_DICT")], &["FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT"])]
fn no_sharding_by_variables(#[case] changes: &[(&str, &str)], #[case] messages: &[&str]) {
    is_about(fully_sharded(&launcher_with(changes)), messages);
}
