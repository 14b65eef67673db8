//! DeepSpeed configurations as documents: what is read, what is refused, who says what.

use accelerate_core::Error;
use accelerate_core::config::*;
use rstest::rstest;
use serde_json::json;

fn read(value: serde_json::Value) -> Result<DeepSpeedConfig, Error> {
    DeepSpeedConfig::from_json(&value.to_string())
}

fn no_file(_: &std::path::Path) -> std::io::Result<String> {
    Err(std::io::ErrorKind::NotFound.into())
}

fn with(value: serde_json::Value) -> DeepSpeedSettings {
    DeepSpeedSettings { hf_ds_config: Some(value.to_string().parse().unwrap()), ..Default::default() }
}

/// The kind of document that Accelerate's own documentation shows for stage 3.
fn template() -> serde_json::Value {
    json!({
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true,
                                                  "adam_w_mode": true}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                          "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "pin_memory": true},
            "offload_param": {"device": "none", "nvme_path": "/nvme"},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto"
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": false
    })
}

#[test]
fn a_template_is_read_and_what_changes_nothing_is_listed() {
    let config = read(template()).unwrap();
    let zero = config.zero_optimization.unwrap();
    assert_eq!(zero.stage, Some(Auto::Value(ZeroStage::Parameters)));
    assert_eq!(zero.offload_param.nvme_path, Some(Auto::Value("/nvme".into())));
    assert_eq!((zero.reduce_bucket_size, config.train_batch_size), (Some(Auto::Auto), Some(Auto::Auto)));
    assert_eq!(config.scheduler.unwrap().total_num_steps, Some(Auto::Auto));
    assert_eq!(config.unfilled_autos, Vec::<String>::new());
    let mut inert: Vec<_> = config.inert_keys.iter().map(|inert| inert.key.as_str()).collect();
    inert.sort_unstable();
    let wanted = [
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "optimizer.params.torch_adam",
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.sub_group_size",
    ];
    assert_eq!(inert, wanted);
}

#[test]
fn everything_that_cannot_be_honoured_is_in_one_error() {
    let error = read(json!({
        "gradient_acumulation_steps": 2,
        "stage": 3,
        "qqq": null,
        "zero_optimization": {"stage": 3, "overlap_com": true, "offload_param": {"devices": "cpu"}},
        "amp": {"enabled": true},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1, "freeze_step": 400}},
        "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5, "warmup_num_steps": 0}}
    }))
    .unwrap_err();
    assert!(error.is_config());
    let text = error.to_string();
    for wanted in [
        "gradient_acumulation_steps is not known; gradient_accumulation_steps is",
        "stage is not known; zero_optimization.stage is",
        "qqq is not known; remove it",
        "zero_optimization.overlap_com is not known; zero_optimization.overlap_comm is",
        "zero_optimization.offload_param.devices is not known; zero_optimization.offload_param.device is",
        "amp is {\"enabled\":true}, which is not available: set \"fp16\"",
        "optimizer.type: \"OneBitAdam\" is not a DeepSpeed optimizer that is available; the choices are \"Adam\", \"AdamW\"",
        "scheduler.params.total_num_steps is not a setting of WarmupLR",
        "scheduler.params.warmup_num_steps is 0, but must be a whole number of at least 1",
    ] {
        assert!(text.contains(&format!("\n  - {wanted}")), "{wanted}: {text}");
    }
    assert_eq!(text.lines().count(), 10, "{text}");
}

#[rstest]
#[case::no_json("{", "not a JSON object")]
#[case::a_list("[1]", "it is [1], not an object")]
#[case::twice(r#"{"a": {"b": 1, "b": 2}}"#, "the key \"b\" is written twice")]
#[case::more("{} {}", "trailing characters")]
#[case::a_flag_for_zero(r#"{"zero_optimization": true}"#, "zero_optimization is true, but must be an object")]
#[case::no_rows(r#"{"train_batch_size": 0}"#, "train_batch_size is 0, but must be a whole number of at least 1")]
#[case::half_a_row(r#"{"train_batch_size": 1.5}"#, "train_batch_size is 1.5")]
#[case::text(r#"{"gradient_clipping": "1.0"}"#, "gradient_clipping is \"1.0\", but must be a number of at least 0")]
#[case::negative(r#"{"gradient_clipping": -1}"#, "gradient_clipping is -1")]
#[case::power(r#"{"fp16": {"initial_scale_power": 65}}"#, "fp16.initial_scale_power is 65")]
#[case::window(r#"{"fp16": {"loss_scale_window": 0}}"#, "fp16.loss_scale_window is 0")]
#[case::static_scale(r#"{"fp16": {"loss_scale": 128}}"#, "fp16.loss_scale is 128, which is not available: write 0")]
#[case::two_spellings(r#"{"bf16": {}, "bfloat16": {}}"#, "bfloat16 is given, but must be left out")]
#[case::device(r#"{"zero_optimization": {"offload_param": {"device": "disk"}}}"#, "offload_param.device is \"disk\"")]
#[case::betas(r#"{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}"#, "optimizer.params.betas is [0.9]")]
#[case::one(r#"{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 2]}}}"#, "optimizer.params.betas is [0.9,2]")]
#[case::no_optimizer(r#"{"optimizer": {"params": {"lr": 1}}}"#, "optimizer.type is missing: name one")]
#[case::momentum(r#"{"optimizer": {"type": "Adam", "params": {"momentum": 1}}}"#, "momentum is not a setting of Adam")]
#[case::norm(
    r#"{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}"#,
    "set \"gradient_clipping\" at the top"
)]
#[case::scheduler(r#"{"scheduler": {"type": "OneCycle"}}"#, "the choices are \"WarmupLR\", \"WarmupDecayLR\"")]
#[case::no_scheduler(r#"{"scheduler": {}}"#, "scheduler.type is missing")]
#[case::no_total(r#"{"scheduler": {"type": "WarmupCosineLR"}}"#, "scheduler.params.total_num_steps is missing")]
#[case::no_total_either(
    r#"{"scheduler": {"type": "WarmupDecayLR", "params": {}}}"#,
    "params.total_num_steps is missing"
)]
#[case::warmup(r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "slow"}}}"#, "is not a warmup type")]
#[case::groups(r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1]}}}"#, "warmup_max_lr is [1]")]
#[case::long(
    r#"{"sparse_attention": {"mode": "fixed", "block": 16, "different_layout_per_head": true, "num_local_blocks": 4}}"#,
    "...,"
)]
fn documents_that_are_refused(#[case] json: &str, #[case] message: &str) {
    let error = DeepSpeedConfig::from_json(json).unwrap_err();
    assert!(error.is_config() && error.to_string().contains(message), "{error}");
}

#[rstest]
#[case("Adam", json!({}), OptimizerAlgorithm::Adam { betas: [0.9, 0.999], eps: 1e-8, decoupled_weight_decay: true })]
#[case("adam", json!({"adam_w_mode": false, "eps": 0.1}),
    OptimizerAlgorithm::Adam { betas: [0.9, 0.999], eps: 0.1, decoupled_weight_decay: false })]
#[case("AdamW", json!({"adam_w_mode": false}),
    OptimizerAlgorithm::Adam { betas: [0.9, 0.999], eps: 1e-8, decoupled_weight_decay: true })]
#[case("Adagrad", json!({}), OptimizerAlgorithm::Adagrad { eps: 1e-10 })]
#[case("Lion", json!({"betas": [0.5, 0.6]}), OptimizerAlgorithm::Lion { betas: [0.5, 0.6] })]
#[case("Lion", json!({}), OptimizerAlgorithm::Lion { betas: [0.9, 0.99] })]
#[case("SGD", json!({"momentum": 0.9, "nesterov": true}),
    OptimizerAlgorithm::Sgd { momentum: 0.9, dampening: 0.0, nesterov: true })]
#[case("RMSprop", json!({"alpha": 0.5, "centered": true}),
    OptimizerAlgorithm::RmsProp { alpha: 0.5, eps: 1e-8, momentum: 0.0, centered: true })]
fn optimizers(#[case] name: &str, #[case] params: serde_json::Value, #[case] wanted: OptimizerAlgorithm) {
    let optimizer = read(json!({"optimizer": {"type": name, "params": params}})).unwrap().optimizer.unwrap();
    assert_eq!(optimizer.algorithm, wanted);
    assert_eq!((optimizer.lr, optimizer.weight_decay), (None, None));
}

#[test]
fn null_is_absent_and_data_types_may_say_what_holds() {
    let config = read(json!({
        "train_batch_size": null,
        "zero_optimization": {"stage": null, "offload_param": {"device": "none", "nvme_path": null}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "bfloat16": {"enabled": true},
    }))
    .unwrap();
    assert_eq!((config.train_batch_size, config.bf16.enabled), (None, Some(Auto::Value(true))));
    assert_eq!(config.zero_optimization.unwrap().offload_param.nvme_path, None);
    assert_eq!(config.grad_accum_dtype, Some(FloatType::Float32));
    let error = read(json!({"data_types": {"grad_accum_dtype": "int8"}})).unwrap_err().to_string();
    assert!(error.contains("data_types.grad_accum_dtype is \"int8\", but must be \"fp32\""), "{error}");
}

#[test]
fn fields_fill_what_the_document_leaves_open() {
    let open = json!({
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}},
        "gradient_accumulation_steps": "auto"
    });
    let plugin = DeepSpeedSettings {
        gradient_accumulation_steps: Some(Auto::Value(4)),
        gradient_clipping: Some(Auto::Value(0.5)),
        zero_stage: Some(ZeroStage::Parameters),
        offload_param_device: Some(OffloadDevice::Nvme),
        offload_param_nvme_path: Some("/nvme".into()),
        offload_optimizer_device: Some(OffloadDevice::Cpu),
        zero3_save_16bit_model: Some(true),
        ..with(open)
    };
    let config = plugin.config(&no_file).unwrap();
    let zero = config.zero_optimization.unwrap();
    assert_eq!(config.gradient_accumulation_steps, Some(Auto::Value(4)));
    assert_eq!(config.gradient_clipping, Some(Auto::Value(0.5)));
    assert_eq!(zero.stage, Some(Auto::Value(ZeroStage::Parameters)));
    assert_eq!(zero.offload_param.device, Some(Auto::Value(OffloadDevice::Nvme)));
    assert_eq!(zero.offload_param.nvme_path, Some(Auto::Value("/nvme".into())));
    assert_eq!(zero.offload_optimizer.device, Some(Auto::Value(OffloadDevice::Cpu)));
    assert_eq!(zero.stage3_gather_16bit_weights_on_model_save, Some(Auto::Value(true)));
}

#[test]
fn fields_that_differ_are_listed_together() {
    let written = json!({
        "zero_optimization": {
            "stage": 2, "offload_param": {"device": "cpu", "nvme_path": "/a"},
            "offload_optimizer": {"device": "cpu", "nvme_path": "/a"},
            "stage3_gather_16bit_weights_on_model_save": false
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0
    });
    let plugin = DeepSpeedSettings {
        gradient_accumulation_steps: Some(Auto::Value(4)),
        gradient_clipping: Some(Auto::Value(0.5)),
        zero_stage: Some(ZeroStage::Parameters),
        offload_param_device: Some(OffloadDevice::None),
        offload_param_nvme_path: Some("/b".into()),
        offload_optimizer_device: Some(OffloadDevice::Nvme),
        offload_optimizer_nvme_path: Some("/b".into()),
        zero3_save_16bit_model: Some(true),
        ..with(written.clone())
    };
    let error = plugin.config(&no_file).unwrap_err();
    assert!(error.is_config());
    let text = error.to_string();
    for wanted in [
        "gradient_accumulation_steps is 1, but DeepSpeedPlugin.gradient_accumulation_steps is 4",
        "gradient_clipping is 1.0, but DeepSpeedPlugin.gradient_clipping is 0.5",
        "zero_optimization.stage is 2, but DeepSpeedPlugin.zero_stage is 3",
        "zero_optimization.offload_param.device is \"cpu\", but DeepSpeedPlugin.offload_param_device is \"none\"",
        "zero_optimization.offload_param.nvme_path is \"/a\", but DeepSpeedPlugin.offload_param_nvme_path is \"/b\"",
        "zero_optimization.offload_optimizer.device is \"cpu\", but DeepSpeedPlugin.offload_optimizer_device is \"nvme\"",
        "zero_optimization.offload_optimizer.nvme_path is \"/a\"",
        "stage3_gather_16bit_weights_on_model_save is false, but DeepSpeedPlugin.zero3_save_16bit_model is true",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert_eq!(text.lines().count(), 9, "{text}");

    let agreeing = DeepSpeedSettings {
        gradient_accumulation_steps: Some(Auto::Value(1)),
        gradient_clipping: Some(Auto::Auto),
        zero_stage: Some(ZeroStage::Gradients),
        ..with(written)
    };
    agreeing.config(&no_file).unwrap();
}

#[test]
fn a_plugin_alone_is_a_configuration() {
    let config = DeepSpeedSettings::default().config(&no_file).unwrap();
    let zero = config.zero_optimization.unwrap();
    assert_eq!((zero.stage, config.train_batch_size), (Some(Auto::Value(ZeroStage::Gradients)), Some(Auto::Auto)));
    assert_eq!(config.gradient_clipping, Some(Auto::Auto));
}

#[test]
fn a_configuration_says_something_about_zero() {
    let error = with(json!({"train_batch_size": 8})).config(&no_file).unwrap_err().to_string();
    assert!(error.contains("zero_optimization is missing"), "{error}");
    let plugin = DeepSpeedSettings { zero_stage: Some(ZeroStage::Disabled), ..with(json!({"train_batch_size": 8})) };
    plugin.config(&no_file).unwrap();
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let plugin = DeepSpeedSettings { hf_ds_config: Some("absent.json".parse().unwrap()), ..Default::default() };
    let error = plugin.config(&no_file).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("file absent.json cannot be read"), "{error}");
    assert!(std::error::Error::source(&error).is_some());
}

#[rstest]
#[case(DeepSpeedSettings { gradient_accumulation_steps: Some(Auto::Value(0)), ..Default::default() },
    "gradient_accumulation_steps is 0")]
#[case(DeepSpeedSettings { gradient_clipping: Some(Auto::Value(-1.0)), ..Default::default() }, "gradient_clipping is -1")]
#[case(DeepSpeedSettings { gradient_clipping: Some(Auto::Value(f64::NAN)), ..Default::default() }, "gradient_clipping is NaN")]
#[case(DeepSpeedSettings { offload_optimizer_device: Some(OffloadDevice::Nvme), ..Default::default() },
    "offload_optimizer_nvme_path is missing")]
fn impossible_plugins(#[case] plugin: DeepSpeedSettings, #[case] message: &str) {
    DeepSpeedSettings::default().check().unwrap();
    let error = plugin.check().unwrap_err();
    assert!(error.is_config() && error.to_string().contains(message), "{error}");
    assert_eq!(plugin.config(&no_file).unwrap_err().to_string(), error.to_string());
}

#[rstest]
#[case(r#"{"hf_ds_config": "none", "offload_param_nvme_path": "none", "is_train_batch_min": null}"#, None)]
#[case(r#"{"hf_ds_config": "a.json", "zero_stage": null}"#, Some(DeepSpeedSource::Path("a.json".into())))]
#[case(r#"{"hf_ds_config": {}}"#, Some(DeepSpeedSource::Entries(Default::default())))]
#[case(r#"{"hf_ds_config": " {}"}"#, Some(DeepSpeedSource::Entries(Default::default())))]
fn plugins_in_files(#[case] json: &str, #[case] wanted: Option<DeepSpeedSource>) {
    let plugin: DeepSpeedPlugin = serde_json::from_str(json).unwrap();
    assert_eq!(plugin, DeepSpeedPlugin { hf_ds_config: wanted, ..Default::default() });
    let written = serde_json::to_string(&plugin).unwrap();
    assert_eq!(serde_json::from_str::<DeepSpeedPlugin>(&written).unwrap(), plugin, "{written}");
}

#[rstest]
#[case(r#"{"zero_stage": 4}"#, "4 is not a ZeRO stage")]
#[case(r#"{"offload_param_device": "disk"}"#, "is not a device to offload to")]
#[case(r#"{"hf_ds_config": 3}"#, "a path or an object")]
#[case(r#"{"hf_ds_config": "{"}"#, "not a JSON object")]
#[case(r#"{"gradient_clipping": "automatic"}"#, "automatic")]
#[case(r#"{"transformer_cls_names": "A"}"#, "unknown field")]
fn no_plugins_in_files(#[case] json: &str, #[case] message: &str) {
    let error = serde_json::from_str::<DeepSpeedPlugin>(json).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

const OWN_OPTIMIZER: Option<OptimizerInCode> = Some(OptimizerInCode::Own { lr: Some(0.1) });
const DUMMY_OPTIMIZER: Option<OptimizerInCode> = Some(OptimizerInCode::Dummy { lr: None, weight_decay: None });
const OWN: Option<SchedulerInCode> = Some(SchedulerInCode::Own);
const DUMMY: Option<SchedulerInCode> =
    Some(SchedulerInCode::Dummy { total_num_steps: None, warmup_num_steps: None, has_callable: false });
const CALLABLE: Option<SchedulerInCode> =
    Some(SchedulerInCode::Dummy { total_num_steps: None, warmup_num_steps: None, has_callable: true });

/// The later of two calls of `prepare` may bring what the earlier one excludes.
#[test]
fn objects_of_several_calls_are_looked_at_together() {
    let config = read(json!({"optimizer": {"type": "AdamW"}})).unwrap();
    let scheduler = PreparedFacts { schedulers: OWN.into_iter().collect(), ..Default::default() };
    let optimizer = PreparedFacts { optimizers: DUMMY_OPTIMIZER.into_iter().collect(), ..Default::default() };
    for (first, second) in [(&scheduler, &optimizer), (&optimizer, &scheduler)] {
        let mut facts = first.clone();
        facts.check(&config).unwrap();
        facts.extend(second);
        assert!(facts.check(&config).unwrap_err().to_string().contains("together with a DummyOptim"));
        let before = facts.clone();
        facts.extend(second);
        assert_eq!(facts, before, "what is known already is not kept twice");
    }
}

#[rstest]
#[case::nothing("", None, None, "")]
#[case::own_both("", OWN_OPTIMIZER, OWN, "")]
#[case::own_and_callable("", OWN_OPTIMIZER, CALLABLE, "")]
#[case::written_both("os", DUMMY_OPTIMIZER, DUMMY, "")]
#[case::written_optimizer("o", DUMMY_OPTIMIZER, CALLABLE, "")]
#[case::written_scheduler("s", OWN_OPTIMIZER, DUMMY, "")]
#[case::not_passed_yet("os", None, None, "")]
#[case::two_optimizers("o", OWN_OPTIMIZER, None, "pass a DummyOptim in its place")]
#[case::no_optimizer("s", DUMMY_OPTIMIZER, None, "has no \"optimizer\"")]
#[case::two_schedulers("s", OWN_OPTIMIZER, OWN, "pass a DummyScheduler without a callable")]
#[case::two_by_callable("s", OWN_OPTIMIZER, CALLABLE, "pass a DummyScheduler without a callable")]
#[case::no_scheduler("o", DUMMY_OPTIMIZER, DUMMY, "has no \"scheduler\"")]
#[case::scheduler_of_dummy("o", DUMMY_OPTIMIZER, OWN, "together with a DummyOptim")]
fn who_makes_optimizer_and_scheduler(
    #[case] written: &str,
    #[case] optimizer: Option<OptimizerInCode>,
    #[case] scheduler: Option<SchedulerInCode>,
    #[case] message: &str,
) {
    let mut document = json!({});
    if written.contains('o') {
        document["optimizer"]["type"] = json!("AdamW");
    }
    if written.contains('s') {
        document["scheduler"]["type"] = json!("WarmupLR");
    }
    let config = read(document).unwrap();
    let (optimizers, schedulers) = (optimizer.into_iter().collect(), scheduler.into_iter().collect());
    match (PreparedFacts { optimizers, schedulers, ..Default::default() }).check(&config) {
        Ok(()) => assert_eq!(message, ""),
        Err(error) => {
            assert!(error.is_config() && !message.is_empty() && error.to_string().contains(message), "{error}");
        }
    }
}
