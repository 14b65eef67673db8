//! DeepSpeed configurations filled from a run, and how they are carried out.

use super::deep_speed_objects::{SILENT_OPTIM, objects};
use accelerate_core::Error;
use accelerate_core::config::*;
use rstest::rstest;
use serde_json::{Value, json};

pub(super) fn resolve(document: Value, facts: &DeepSpeedFacts) -> Result<ResolvedDeepSpeedConfig, Error> {
    let source = Some(document.to_string().parse()?);
    let plugin =
        DeepSpeedSettings { hf_ds_config: source, zero_stage: Some(ZeroStage::Parameters), ..Default::default() };
    plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, facts)
}

pub(super) fn loaders(sizes: &[usize]) -> DeepSpeedFacts {
    let objects = PreparedFacts { batch_sizes: sizes.iter().copied().map(Some).collect(), ..Default::default() };
    DeepSpeedFacts { world_size: 2, objects, ..Default::default() }
}

#[track_caller]
pub(super) fn refuses(result: Result<ResolvedDeepSpeedConfig, Error>, messages: &[&str]) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert!(error.is_config());
    for message in messages {
        assert!(text.contains(message), "{message}: {text}");
    }
    let listed = text.matches("\n  - ").count();
    assert!(listed == 0 || listed == messages.len(), "{text}");
}

#[rstest]
#[case(json!(null), None)]
#[case(json!(0), None)]
#[case(json!("auto"), Some(1.0))]
#[case(json!(0.3), Some(0.3))]
fn clipping(#[case] written: Value, #[case] wanted: Option<f64>) {
    let document = json!({"zero_optimization": {}, "gradient_clipping": written});
    assert_eq!(resolve(document, &loaders(&[1])).unwrap().gradient_clipping, wanted);
}

#[rstest]
#[case("auto", Some(1000), [Some(1_000_000), Some(900_000), Some(10_000)])]
#[case("auto", Some(7), [Some(49), Some(44), Some(70)])]
#[case("auto", None, [None, None, None])]
#[case("5", Some(7), [Some(5), Some(5), Some(5)])]
fn sizes_of_messages(#[case] written: &str, #[case] hidden_size: Option<u64>, #[case] wanted: [Option<u64>; 3]) {
    let written = written.parse::<u64>().map_or(json!(written), |size| json!(size));
    let document = json!({"zero_optimization": {
        "reduce_bucket_size": written, "stage3_prefetch_bucket_size": written,
        "stage3_param_persistence_threshold": written
    }});
    let found = resolve(document, &DeepSpeedFacts { hidden_size, ..loaders(&[1]) }).unwrap();
    let sizes = [found.reduce_bucket_size, found.stage3_prefetch_bucket_size, found.stage3_param_persistence_threshold];
    assert_eq!(sizes, wanted);
}

#[rstest]
#[case::nothing(json!({}), MixedPrecision::No, MixedPrecision::No)]
#[case::asked(json!({}), MixedPrecision::Fp16, MixedPrecision::Fp16)]
#[case::asked_with_auto(json!({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}), MixedPrecision::Bf16, MixedPrecision::Bf16)]
#[case::section_without_word(json!({"fp16": {"hysteresis": 2}}), MixedPrecision::Fp16, MixedPrecision::Fp16)]
#[case::written(json!({"bf16": {"enabled": true}}), MixedPrecision::No, MixedPrecision::Bf16)]
#[case::off(json!({"bf16": {"enabled": false}}), MixedPrecision::Fp16, MixedPrecision::Fp16)]
#[case::eight_bits(json!({"bf16": {"enabled": true}}), MixedPrecision::Fp8, MixedPrecision::Fp8)]
fn precision(#[case] mut document: Value, #[case] asked: MixedPrecision, #[case] wanted: MixedPrecision) {
    document["zero_optimization"] = json!({});
    let found = resolve(document, &DeepSpeedFacts { mixed_precision: asked, ..loaders(&[1]) }).unwrap();
    assert_eq!((found.mixed_precision, found.grad_scaler.is_some()), (wanted, wanted == MixedPrecision::Fp16));
}

#[rstest]
#[case(json!({"fp16": {"enabled": true}}), MixedPrecision::Bf16,
    &["fp16.enabled is true, but mixed_precision of the program is \"bf16\""])]
#[case(json!({"fp16": {"enabled": false}}), MixedPrecision::Fp16, &["fp16.enabled is false"])]
#[case(json!({"bf16": {"enabled": true}}), MixedPrecision::Fp16, &["bf16.enabled is true"])]
#[case(json!({"bf16": {"enabled": false}}), MixedPrecision::Fp8, &["bf16.enabled is false, but mixed_precision of the program is \"fp8\""])]
#[case(json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}}), MixedPrecision::No,
    &["fp16.enabled and bf16.enabled contradict each other"])]
fn no_precision(#[case] mut document: Value, #[case] asked: MixedPrecision, #[case] messages: &[&str]) {
    document["zero_optimization"] = json!({});
    refuses(resolve(document, &DeepSpeedFacts { mixed_precision: asked, ..loaders(&[1]) }), messages);
}

#[test]
fn losses_are_scaled_as_written() {
    let document =
        json!({"zero_optimization": {}, "fp16": {"enabled": true, "initial_scale_power": 4, "loss_scale_window": 7}});
    let scaler = resolve(document, &loaders(&[1])).unwrap().grad_scaler.unwrap();
    assert_eq!((scaler.init_scale, scaler.growth_interval), (16.0, 7));
    let asked = DeepSpeedFacts { mixed_precision: MixedPrecision::Fp16, ..loaders(&[1]) };
    let scaler = resolve(json!({"zero_optimization": {}}), &asked).unwrap().grad_scaler.unwrap();
    assert_eq!((scaler.init_scale, scaler.growth_interval), (65_536.0, 1000));
    scaler.check().unwrap();
}

/// Numbers of DeepSpeed's formulas for a rise of 4 steps and an end at 10.
#[rstest]
#[case::cosine(
    DeepSpeedSchedule::WarmupCosineLr {
        warmup_min_ratio: 0.1, cos_min_ratio: 0.2, warmup_num_steps: 4, warmup_type: WarmupType::Linear, total_num_steps: 10
    },
    [0.0, 0.2, 0.65, 1.1, 1.55, 1.892820323028, 1.6, 1.2, 0.8, 0.507179676972, 0.4, 0.4, 0.4, 0.4]
)]
#[case::decay(
    DeepSpeedSchedule::WarmupDecayLr {
        warmup_min_lr: 0.5, warmup_max_lr: 1.0, warmup_num_steps: 4, warmup_type: WarmupType::Log, total_num_steps: 10
    },
    [0.5, 0.5, 0.75, 0.89624062518, 1.0, 1.0, 0.916666666667, 0.833333333333, 0.75, 0.666666666667, 0.583333333333, 0.5,
     0.5, 0.5]
)]
fn rates(#[case] schedule: DeepSpeedSchedule, #[case] wanted: [f64; 14]) {
    for (step, wanted) in wanted.into_iter().enumerate() {
        let found = schedule.lr(step as u64, 2.0);
        assert!((found - wanted).abs() < 1e-11, "{step}: {found} {wanted}");
    }
}

#[test]
fn a_rise_takes_two_steps_at_least_and_ends_at_the_optimizers_rate() {
    let schedule = DeepSpeedSchedule::WarmupLr {
        warmup_min_lr: 0.0,
        warmup_max_lr: None,
        warmup_num_steps: 1,
        warmup_type: WarmupType::Log,
    };
    assert_eq!([0, 1, 2, 3].map(|step| schedule.lr(step, 0.5)), [0.0, 0.0, 0.5, 0.5]);
    let short = DeepSpeedSchedule::WarmupCosineLr {
        warmup_min_ratio: 0.0,
        cos_min_ratio: 0.0,
        warmup_num_steps: u64::MAX,
        warmup_type: WarmupType::Linear,
        total_num_steps: 0,
    };
    assert!(short.lr(u64::MAX, 1.0).is_finite());
}

#[rstest]
#[case::stage_0(0, "none", "none", &[])]
#[case::offload_of_nothing(0, "cpu", "cpu", &["zero_optimization.offload_optimizer", "zero_optimization.offload_param"])]
#[case::parameters_are_whole(2, "none", "nvme", &["zero_optimization.offload_param"])]
#[case::all(3, "none", "none", &[])]
fn offload_where_there_is_nothing_to_offload(
    #[case] stage: u8,
    #[case] optimizer: &str,
    #[case] param: &str,
    #[case] inert: &[&str],
) {
    let document = json!({"zero_optimization": {
        "stage": stage, "offload_optimizer": {"device": optimizer}, "offload_param": {"device": param, "nvme_path": "/n"}
    }});
    let plugin = DeepSpeedSettings { hf_ds_config: Some(document.to_string().parse().unwrap()), ..Default::default() };
    let config = plugin.config(&|_| Ok(String::new())).unwrap();
    let found = plugin.resolve(&config, &loaders(&[1])).unwrap();
    assert_eq!((found.offload_optimizer, found.offload_param), (None, None));
    assert_eq!(found.inert_keys.iter().map(|inert| inert.key.as_str()).collect::<Vec<_>>(), inert);
}

fn nvme(path: &str) -> Option<OffloadTarget> {
    Some(OffloadTarget::Nvme(path.into()))
}

/// Stage, the two sections as device and folder; what becomes of them.
#[rstest]
#[case::state_of_stage_1(1, ["cpu", "/o"], ["none", "/p"], Some(OffloadTarget::Cpu), None)]
#[case::state_of_stage_2(2, ["nvme", "/o"], ["none", "/p"], nvme("/o"), None)]
#[case::parameters_alone(3, ["none", "/o"], ["cpu", "/p"], None, Some(OffloadTarget::Cpu))]
#[case::both_on_disks(3, ["nvme", "/o"], ["nvme", "/p"], nvme("/o"), nvme("/p"))]
#[case::state_on_a_disk(3, ["nvme", "/o"], ["cpu", "/p"], nvme("/o"), Some(OffloadTarget::Cpu))]
#[case::nothing_on_the_disk_below_stage_3(2, ["cpu", "/o"], ["nvme", "/p"], Some(OffloadTarget::Cpu), None)]
fn offload_is_carried_over(
    #[case] stage: u8,
    #[case] optimizer: [&str; 2],
    #[case] param: [&str; 2],
    #[case] optimizer_target: Option<OffloadTarget>,
    #[case] param_target: Option<OffloadTarget>,
) {
    let section = |[device, path]: [&str; 2]| json!({"device": device, "nvme_path": path});
    let document = json!({"zero_optimization": {
        "stage": stage, "offload_optimizer": section(optimizer), "offload_param": section(param)
    }});
    let plugin = DeepSpeedSettings { hf_ds_config: Some(document.to_string().parse().unwrap()), ..Default::default() };
    let config = plugin.config(&|_| Ok(String::new())).unwrap();
    let resolved = plugin.resolve(&config, &loaders(&[1])).unwrap();
    assert_eq!((&resolved.offload_optimizer, &resolved.offload_param), (&optimizer_target, &param_target));
    let found = resolved.fully_sharded_settings();
    found.check().unwrap();
    assert_eq!((found.optimizer_offload(), found.params_offload()), (optimizer_target.as_ref(), param_target.as_ref()));
}

#[rstest]
#[case::no_folder(json!({"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}), &[
    "zero_optimization.offload_optimizer.nvme_path is missing", "zero_optimization.offload_param.nvme_path is missing"])]
#[case::empty_folder(json!({"offload_optimizer": {"device": "nvme", "nvme_path": ""}}),
    &["zero_optimization.offload_optimizer.nvme_path is missing"])]
#[case::state_elsewhere(
    json!({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/n"}}),
    &["zero_optimization.offload_param.device is \"nvme\" without the optimizer's state, which is not available: a step \
       changes parameters block by block together with their state; write \"nvme\" with its \"nvme_path\" in \
       \"offload_optimizer\" too, or \"cpu\" here"])]
#[case::state_nowhere(json!({"offload_param": {"device": "nvme", "nvme_path": "/n"}}),
    &["zero_optimization.offload_param.device is \"nvme\" without the optimizer's state"])]
fn no_offload(#[case] zero: Value, #[case] messages: &[&str]) {
    for computes_on_cpu in [false, true] {
        let facts = DeepSpeedFacts { computes_on_cpu, ..loaders(&[1]) };
        refuses(resolve(json!({"zero_optimization": zero}), &facts), messages);
    }
}

#[test]
fn where_everything_is_on_the_host_nothing_is_offloaded_to_it() {
    let document = json!({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}});
    let found = resolve(document, &DeepSpeedFacts { computes_on_cpu: true, ..loaders(&[1]) }).unwrap();
    assert_eq!(found.offload_optimizer, None);
    assert_eq!(found.inert_keys[0].key, "zero_optimization.offload_optimizer");
}

/// Stage, size of a group, and what becomes of it on six processes.
#[rstest]
#[case(3, json!(null), ShardingStrategy::FullShard, None, 1, 0)]
#[case(3, json!(-1), ShardingStrategy::FullShard, None, 1, 0)]
#[case(3, json!(0), ShardingStrategy::FullShard, None, 1, 0)]
#[case(3, json!(2), ShardingStrategy::HybridShard, Some(2), 3, 0)]
#[case(3, json!(6), ShardingStrategy::HybridShard, Some(6), 1, 0)]
#[case(2, json!(2), ShardingStrategy::OptimizerStateAndGradients, None, 1, 1)]
#[case(0, json!(4), ShardingStrategy::NoShard, None, 1, 1)]
fn groups_of_ranks(
    #[case] stage: u8,
    #[case] size: Value,
    #[case] strategy: ShardingStrategy,
    #[case] dp_shard_size: Option<usize>,
    #[case] num_replicas: usize,
    #[case] num_inert: usize,
) {
    let document = json!({"zero_optimization": {"stage": stage, "mics_shard_size": size}});
    let plugin = DeepSpeedSettings { hf_ds_config: Some(document.to_string().parse().unwrap()), ..Default::default() };
    let config = plugin.config(&|_| Ok(String::new())).unwrap();
    let resolved = plugin.resolve(&config, &DeepSpeedFacts { world_size: 6, ..loaders(&[1]) }).unwrap();
    let inert: Vec<&str> = resolved.inert_keys.iter().map(|inert| inert.key.as_str()).collect();
    assert_eq!(inert, ["zero_optimization.mics_shard_size"][..num_inert]);
    let found = resolved.fully_sharded_settings();
    found.check().unwrap();
    assert_eq!((found.sharding_strategy, found.dp_shard_size), (strategy, dp_shard_size));
    assert_eq!(found.mesh(6, 3).unwrap().num_replicas(), num_replicas);
}

#[rstest]
#[case(json!(4), "mics_shard_size is 4 among 6 processes, but must be a number that divides that of the processes")]
#[case(json!(12), "mics_shard_size is 12 among 6 processes")]
#[case(json!(-2), "mics_shard_size is -2, but must be -1 for none, or a whole number of at least 0")]
#[case(json!(1.5), "mics_shard_size is 1.5, but must be")]
#[case(json!("auto"), "zero_optimization.mics_shard_size: nothing in the program tells it")]
fn no_groups_of_ranks(#[case] size: Value, #[case] message: &str) {
    let document = json!({"zero_optimization": {"mics_shard_size": size}});
    refuses(resolve(document, &DeepSpeedFacts { world_size: 6, ..loaders(&[1]) }), &[message]);
}

#[rstest]
#[case(0, ShardingStrategy::NoShard, AutoWrapPolicy::NoWrap)]
#[case(1, ShardingStrategy::OptimizerState, AutoWrapPolicy::TransformerBasedWrap)]
#[case(2, ShardingStrategy::OptimizerStateAndGradients, AutoWrapPolicy::TransformerBasedWrap)]
#[case(3, ShardingStrategy::FullShard, AutoWrapPolicy::TransformerBasedWrap)]
fn stages(#[case] stage: u64, #[case] strategy: ShardingStrategy, #[case] policy: AutoWrapPolicy) {
    let plugin = DeepSpeedSettings { zero_stage: ZeroStage::new(stage), ..Default::default() };
    let facts = DeepSpeedFacts::default();
    let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new())).unwrap(), &facts).unwrap();
    let found = resolved.fully_sharded_settings();
    found.check().unwrap();
    assert_eq!((found.sharding_strategy, found.auto_wrap_policy), (strategy, policy));
}

#[rstest]
#[case(3, None, true, 0)]
#[case(3, Some(false), false, 0)]
#[case(2, None, false, 0)]
#[case(2, Some(true), false, 1)]
fn parameters_in_parts_from_the_start(
    #[case] stage: u64,
    #[case] flag: Option<bool>,
    #[case] wanted: bool,
    #[case] num_inert: usize,
) {
    let plugin = DeepSpeedSettings { zero_stage: ZeroStage::new(stage), zero3_init_flag: flag, ..Default::default() };
    let found = plugin.resolve(&plugin.config(&|_| Ok(String::new())).unwrap(), &loaders(&[1])).unwrap();
    assert_eq!((found.zero3_init, found.inert_keys.len()), (wanted, num_inert));
}

/// What a document is resolved to that no field of the plugin adds to.
fn resolve_alone(document: &Value) -> Result<ResolvedDeepSpeedConfig, Error> {
    let plugin = DeepSpeedSettings { hf_ds_config: Some(document.to_string().parse().unwrap()), ..Default::default() };
    plugin.resolve(&plugin.config(&|_| Ok(String::new())).unwrap(), &loaders(&[1]))
}

#[test]
fn stages_have_defaults() {
    let found = |zero: Value| resolve_alone(&json!({"zero_optimization": zero})).unwrap();
    assert_eq!(found(json!({})).zero_stage, ZeroStage::Disabled);
    assert_eq!(found(json!({"stage": "auto"})).zero_stage, ZeroStage::Gradients);
}

#[rstest]
#[case(3, json!(true), json!({"bf16": {"enabled": true}}), Some(FloatType::BFloat16), None)]
#[case(3, json!(true), json!({"fp16": {"enabled": true}}), Some(FloatType::Float16), None)]
#[case(3, json!("auto"), json!({"bf16": {"enabled": true}}), None, None)]
#[case(3, json!(false), json!({"bf16": {"enabled": true}}), None, Some("in 32 bits"))]
#[case(3, json!(true), json!({}), None, Some("nothing is in 16 bits"))]
#[case(2, json!(true), json!({"bf16": {"enabled": true}}), None, Some("below stage 3"))]
fn weights_are_saved_in_16_bits_where_they_are_computed_with_in_16(
    #[case] stage: u8,
    #[case] asked: Value,
    #[case] mut document: Value,
    #[case] wanted: Option<FloatType>,
    #[case] why_not: Option<&str>,
) {
    document["zero_optimization"] = json!({"stage": stage, "stage3_gather_16bit_weights_on_model_save": asked});
    let found = resolve_alone(&document).unwrap();
    assert_eq!(found.saved_dtype(), wanted);
    let told: Vec<_> = found.inert_keys.iter().map(|inert| inert.key.rsplit('.').next().unwrap()).collect();
    assert_eq!(told, Vec::from_iter(why_not.map(|_| "stage3_gather_16bit_weights_on_model_save")));
    assert!(why_not.is_none_or(|words| found.inert_keys[0].why.contains(words)), "{:?}", found.inert_keys);
}

#[rstest]
#[case(2, json!(null), json!(null), None)]
#[case(2, json!("fp32"), json!(null), Some(FloatType::Float32))]
#[case(3, json!(null), json!("fp32"), Some(FloatType::Float32))]
#[case(3, json!("bf16"), json!("bf16"), Some(FloatType::BFloat16))]
#[case(1, json!("fp16"), json!(null), Some(FloatType::Float16))]
#[case(0, json!("fp32"), json!("fp32"), None)]
fn gradients_travel_and_add_up_in_the_type_that_is_written(
    #[case] stage: u8,
    #[case] travels: Value,
    #[case] adds_up: Value,
    #[case] wanted: Option<FloatType>,
) {
    let document = json!({
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": true},
        "communication_data_type": travels, "data_types": {"grad_accum_dtype": adds_up}
    });
    let found = resolve_alone(&document).unwrap();
    assert_eq!(found.reduce_dtype, wanted);
    let precision = found.fully_sharded_settings().precision(found.mixed_precision);
    assert_eq!(precision.param_dtype, Some(FloatType::BFloat16));
    assert_eq!(precision.reduce_dtype, wanted.or(Some(FloatType::BFloat16)));
    found.fully_sharded_settings().check().unwrap();
}

#[rstest]
#[case(2, "bf16", "fp32", "data_types.grad_accum_dtype is another type than communication_data_type, \"bfloat16\"")]
#[case(0, "fp32", "bf16", "data_types.grad_accum_dtype is another type than communication_data_type, \"float32\"")]
#[case(0, "bf16", "bf16", "communication_data_type is \"bfloat16\" at stage 0, which is not available: set comm_hook")]
fn types_of_gradients_that_cannot_be(
    #[case] stage: u8,
    #[case] travels: &str,
    #[case] adds_up: &str,
    #[case] message: &str,
) {
    let document = json!({
        "zero_optimization": {"stage": stage}, "communication_data_type": travels,
        "data_types": {"grad_accum_dtype": adds_up}
    });
    refuses(resolve_alone(&document), &[message]);
}

/// The example that users of the Python API are shown: fields and document say the same, or one of them says nothing.
#[test]
fn fields_beside_a_document() {
    let document = json!({
        "train_batch_size": 16, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": true, "contiguous_gradients": true
        },
        "fp16": {"enabled": true}
    });
    let plugin = DeepSpeedSettings {
        hf_ds_config: Some(document.to_string().parse().unwrap()),
        zero_stage: Some(ZeroStage::Gradients),
        gradient_accumulation_steps: Some(Auto::Value(4)),
        gradient_clipping: Some(Auto::Value(1.0)),
        ..Default::default()
    };
    let config = plugin.config(&|_| Ok(String::new())).unwrap();
    let found = plugin.resolve(&config, &objects(&[SILENT_OPTIM], &[])).unwrap();
    assert_eq!((found.train_micro_batch_size_per_gpu, found.gradient_clipping), (Some(2), Some(1.0)));
    assert_eq!((found.mixed_precision, found.optimizer.unwrap().lr), (MixedPrecision::Fp16, 1e-4));
    assert_eq!(found.offload_optimizer, Some(OffloadTarget::Cpu));
}
