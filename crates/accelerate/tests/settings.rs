//! Settings that must not be accepted and passed over: each has its effect here, or is an error that names both places.

#![allow(clippy::unwrap_used)]

use accelerate::data::TensorDataset;
use accelerate::nn::{Init, Linear, ModuleFn, Param, ParamStore};
use accelerate::optim::{LambdaLr, Sgd};
use accelerate::prelude::*;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    AutocastKwargs, DataLoaderConfiguration, DeepSpeedPlugin, DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin, GradScalerKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs,
    PrepareModelOptions, ShardingStrategy, testing,
};
use rstest::rstest;

/// By how many of its steps a schedule has moved after ten micro-batches in windows of four.
fn ticks(adjust_scheduler: Option<bool>) -> f64 {
    let plugin = GradientAccumulationPlugin { num_steps: Some(4), adjust_scheduler, ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).gradient_accumulation_plugin(plugin).build().unwrap();
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, Default::default()).unwrap();
    let optimizer = Sgd::new(&store, 1.0).unwrap();
    let scheduler = LambdaLr::new(&optimizer, |step| 1.0 + step as f64);
    let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    let rows = TensorDataset::new(Tensor::arange(10, (Kind::Float, Device::Cpu))).unwrap();
    let loader = DataLoader::builder(rows).batch_size(1).build().unwrap();
    let prepared = accelerator.prepare((model, optimizer, loader, scheduler)).unwrap();
    let (model, mut optimizer, loader, mut scheduler) = prepared;
    for batch in loader.iter().unwrap() {
        let batch = batch.unwrap();
        accelerator
            .accumulate(&model, || {
                let input = batch.view([-1, 1]);
                accelerator.backward(&model.forward(&input)?.sum(None))?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()
            })
            .unwrap();
    }
    scheduler.get_last_lr()[0] - 1.0
}

#[rstest]
#[case::reference(None, 3.0)]
#[case::by_optimizer_steps(Some(false), 3.0)]
#[case::by_micro_batches(Some(true), 10.0)]
fn a_schedule_moves_by_windows_or_by_micro_batches(#[case] adjust_scheduler: Option<bool>, #[case] wanted: f64) {
    assert_eq!(ticks(adjust_scheduler), wanted);
}

fn message(builder: accelerate::AcceleratorBuilder) -> String {
    let error = builder.cpu(true).build().unwrap_err();
    assert!(error.is_config(), "{error}");
    error.to_string()
}

#[test]
fn accumulation_of_a_loader_configuration_must_agree_with_the_plugin() {
    let of = |num_steps| GradientAccumulationPlugin { num_steps: Some(num_steps), ..Default::default() };
    let config = DataLoaderConfiguration { gradient_accumulation_kwargs: Some(of(4)), ..Default::default() };
    let alone = Accelerator::builder().cpu(true).dataloader_config(config.clone()).build().unwrap();
    assert_eq!(alone.gradient_accumulation_steps(), 4);
    let both = Accelerator::builder().dataloader_config(config).gradient_accumulation_plugin(of(2));
    let text = message(both);
    assert!(text.contains("num_steps 2") && text.contains("gradient_accumulation_kwargs 4"), "{text}");
}

#[test]
fn loss_scaling_beside_a_deepspeed_configuration_must_agree() {
    let json = r#"{"fp16": {"enabled": true, "initial_scale_power": 4}, "zero_optimization": {"stage": 1}}"#;
    let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse().unwrap()), ..Default::default() };
    let builder = |init_scale| {
        let kwargs = GradScalerKwargs { init_scale: Some(init_scale), ..Default::default() };
        Accelerator::builder().deepspeed_plugin(plugin.clone()).kwargs_handler(kwargs)
    };
    assert!(builder(16.0).cpu(true).build().is_ok());
    let text = message(builder(1024.0));
    assert!(text.contains("GradScalerKwargs.init_scale is 1024") && text.contains("makes it 16"), "{text}");
}

/// The key of the DeepSpeed configuration and the setting are named with the lines where they stand, when the accelerator is
/// built and when objects are prepared.
#[test]
fn contradictions_with_a_deepspeed_configuration_name_lines() {
    let folder = tempfile::tempdir().unwrap();
    let [run, json] = ["run.yaml", "ds.json"].map(|name| folder.path().join(name));
    let build = |of_run: &str, of_json: &str| {
        std::fs::write(&json, of_json).unwrap();
        let text = format!("use_deepspeed: true\ndeepspeed_config: {{deepspeed_config_file: {}}}\n", json.display());
        std::fs::write(&run, text + of_run).unwrap();
        Accelerator::builder().cpu(true).config_file(&run).build()
    };
    let zero = "{\n\"zero_optimization\": {\"stage\": 2},\n";
    for (of_run, of_json, words) in [
        (
            "mixed_precision: fp16\n",
            "\"bf16\": {\n  \"enabled\": true}",
            ["ds.json:4:3), but mixed_precision", "(mixed_precision: "],
        ),
        (
            "gradient_accumulation_steps: 4\n",
            "\"gradient_accumulation_steps\": 2",
            ["gradient_accumulation_steps is 2 (", "(deepspeed_config.gradient_accumulation_steps: "],
        ),
    ] {
        let text = build(of_run, &format!("{zero}{of_json}}}")).unwrap_err().to_string();
        assert!(words.iter().all(|words| text.contains(words)) && text.contains("run.yaml:3:1)"), "{text}");
    }
    let of_json = "\"train_batch_size\": 24, \"train_micro_batch_size_per_gpu\": \"auto\"}";
    let accelerator = build("gradient_accumulation_steps: 3\n", &format!("{zero}{of_json}")).unwrap();
    let rows = TensorDataset::new(Tensor::arange(10, (Kind::Float, Device::Cpu))).unwrap();
    let loader = DataLoader::builder(rows).batch_size(5).build().unwrap();
    let text = accelerator.prepare(loader).map(drop).unwrap_err().to_string();
    assert!(
        text.contains("processes is 15")
            && text.contains("gradient_accumulation_steps: ")
            && text.contains("run.yaml:3:1)"),
        "{text}"
    );
}

#[test]
fn hooks_of_replicas_are_refused_where_models_are_sharded() {
    let hook = DistributedDataParallelKwargs { comm_hook: Some("fp16".parse().unwrap()), ..Default::default() };
    let builder = || Accelerator::builder().kwargs_handler(hook.clone());
    assert!(builder().cpu(true).build().is_ok());
    let text = message(builder().fsdp_plugin(Default::default()));
    assert!(text.contains("ddp_config.comm_hook fp16 (code)") && text.contains("use_fsdp"), "{text}");
}

#[rstest]
#[case::modules(FullyShardedDataParallelPlugin { ignored_modules: Some(vec!["head".into()]), ..Default::default() }, "ignored_modules")]
#[case::memory(FullyShardedDataParallelPlugin { max_memory: Some(1), ..Default::default() }, "max_memory")]
#[case::states(FullyShardedDataParallelPlugin { sync_module_states: Some(false), ..Default::default() }, "sync_module_states")]
fn settings_of_shards_are_refused_where_nothing_is_sharded(
    #[case] plugin: FullyShardedDataParallelPlugin,
    #[case] field: &str,
) {
    let sharding_strategy = Some(ShardingStrategy::NoShard);
    let text =
        message(Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin { sharding_strategy, ..plugin }));
    assert!(text.contains(field) && text.contains("NO_SHARD"), "{text}");
}

#[test]
fn what_is_not_available_yet_is_refused_by_name() {
    let axes = accelerate::ParallelismConfig { sp_attn_implementation: Some("eager".into()), ..Default::default() };
    let text = message(Accelerator::builder().parallelism_config(axes));
    assert!(text.contains("sp_attn_implementation is \"eager\"") && text.contains("\"sdpa\" alone"), "{text}");
    let text = message(Accelerator::builder().kwargs_handler(accelerate::MSAMPRecipeKwargs::default()));
    assert!(text.contains("fp8_config.backend is MSAMP (code)") && text.contains("MS-AMP is not available"), "{text}");
    let none = accelerate::ParallelismConfig { tp_size: Some(1), ..Default::default() };
    assert!(Accelerator::builder().cpu(true).parallelism_config(none).build().is_ok());
}

/// Processes that have met have their devices and connections, which a second accelerator cannot change.
#[test]
fn settings_of_a_meeting_are_refused_after_it() {
    let first = Accelerator::builder().cpu(true).build().unwrap();
    let kwargs = InitProcessGroupKwargs { timeout: Some(std::time::Duration::from_secs(7)), ..Default::default() };
    for (builder, words) in [
        (Accelerator::builder().cpu(true), "use_cpu is true"),
        (Accelerator::builder().cpu(false), "use_cpu is false"),
        (Accelerator::builder().kwargs_handler(kwargs), "process_group_config.timeout is 7"),
    ] {
        let error = builder.build_from(&first).unwrap_err();
        assert!(error.is_config(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(words) && text.contains("build_from") && text.contains("the first accelerator"),
            "{text}"
        );
    }
    // Kwargs that say nothing ask for nothing, and a file may be that of the first accelerator.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "use_cpu: true\ngradient_accumulation_config: {num_steps: 4}\n").unwrap();
    let second = Accelerator::builder().kwargs_handler(InitProcessGroupKwargs::default()).config_file(&path);
    assert_eq!(second.build_from(&first).unwrap().gradient_accumulation_steps(), 4);
}

#[test]
fn a_device_that_is_none_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "mixed_precision: no\ntorch_device: tpu\n").unwrap();
    let error = Accelerator::builder().config_file(&path).build().unwrap_err();
    let wanted = format!("torch_device is \"tpu\" ({}:2:1)", path.display());
    assert!(error.is_config() && error.to_string().contains(&wanted), "{error}");
}

#[test]
fn a_file_is_read_without_a_launcher_and_code_goes_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "mixed_precision: bf16\ngradient_accumulation_config:\n  num_steps: 4\n").unwrap();
    let build = |builder: accelerate::AcceleratorBuilder| builder.cpu(true).config_file(&path).build();
    let accelerator = build(Accelerator::builder()).unwrap();
    assert_eq!((accelerator.mixed_precision(), accelerator.gradient_accumulation_steps()), (Bf16, 4));
    assert_eq!(accelerator.config().origin("mixed_precision").to_string(), format!("{}:1:1", path.display()));
    let accelerator = build(Accelerator::builder().gradient_accumulation_steps(2)).unwrap();
    assert_eq!(accelerator.gradient_accumulation_steps(), 2);
    std::fs::write(&path, "mixed_precison: bf16\n").unwrap();
    let text = build(Accelerator::builder()).unwrap_err().to_string();
    assert!(text.contains("run.yaml:1") && text.contains("\"mixed_precision\""), "{text}");
    std::fs::remove_file(&path).unwrap();
    let error = build(Accelerator::builder()).unwrap_err();
    assert!(error.to_string().contains("run.yaml"), "{error}");
}

/// A product with a weight that is changed before the second of two, under autocast: do both use one cast copy?
fn keeps_cast_copy(weight: &Param, x: &Tensor) -> Result<bool> {
    weight.copy_(&Tensor::ones([2, 2], (Kind::Float, Device::Cpu)))?;
    let before = x.f_matmul(&weight.get()?)?;
    weight.copy_(&Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)))?;
    assert_eq!(before.kind(), Kind::BFloat16);
    Ok(before == x.f_matmul(&weight.get()?)?)
}

#[rstest]
#[case::reference(None, true)]
#[case::on(Some(true), true)]
#[case::off(Some(false), false)]
fn cast_copies_of_weights_are_kept_where_the_cache_is_on(#[case] cache_enabled: Option<bool>, #[case] wanted: bool) {
    let kwargs = AutocastKwargs { cache_enabled, ..Default::default() };
    let builder = Accelerator::builder().cpu(true).mixed_precision(Bf16);
    let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    let store = ParamStore::new(Device::Cpu);
    let weight = store.root().param("weight", ([2, 2], Init::Ones)).unwrap();
    // For one block, whatever holds for the run.
    let other = AutocastKwargs { cache_enabled: Some(!wanted), ..Default::default() };
    let accelerator = builder.clone().kwargs_handler(other).build().unwrap();
    assert_eq!(accelerator.autocast(kwargs.clone(), || keeps_cast_copy(&weight, &x)).unwrap(), wanted);
    // For the run.
    let accelerator = builder.kwargs_handler(kwargs).build().unwrap();
    assert_eq!(accelerator.autocast(None, || keeps_cast_copy(&weight, &x)).unwrap(), wanted);
    let module = ModuleFn::new(&store, move |x: &Tensor| Ok(Tensor::from(keeps_cast_copy(&weight, x)?)));
    let model = accelerator.prepare(module).unwrap();
    assert_eq!(model.forward(&x).unwrap(), Tensor::from(wanted));
}

#[rstest]
#[case::reference(None, [1.0, 1.0])]
#[case::on(Some(true), [1.0, 1.0])]
#[case::off(Some(false), [1.0, 2.0])]
fn buffers_are_those_of_rank_0_unless_each_rank_keeps_its_own(
    #[case] broadcast_buffers: Option<bool>,
    #[case] wanted: [f64; 2],
) {
    let kwargs = DistributedDataParallelKwargs { broadcast_buffers, ..Default::default() };
    let found = testing::ranks(2, Accelerator::builder().kwargs_handler(kwargs), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 1, 1, Default::default())?;
        let buffer = store.root().buffer("seen", ([], Init::Zeros), Default::default())?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        buffer.copy_(&Tensor::from(1.0 + accelerator.process_index() as f32))?;
        accelerator.backward(&model.forward(&Tensor::ones([1, 1], (Kind::Float, Device::Cpu)))?.sum(None))?;
        Ok(buffer.local().double_value(&[]))
    });
    assert_eq!(found.unwrap(), wanted);
}

/// Nothing is allocated on the other device, so there need not be one.
#[rstest]
#[case::reference(None, None, true)]
#[case::off(Some(false), None, false)]
#[case::off_for_one_model(Some(true), Some(false), false)]
#[case::on_for_one_model(Some(false), Some(true), true)]
fn models_and_batches_stay_where_they_are_without_device_placement(
    #[case] of_run: Option<bool>,
    #[case] of_model: Option<bool>,
    #[case] moves: bool,
) {
    let elsewhere = Device::Cuda(0);
    let builder = Accelerator::builder().cpu(true);
    let builder = of_run.map_or(builder.clone(), |device_placement| builder.device_placement(device_placement));
    let accelerator = builder.build().unwrap();
    let store = ParamStore::new(elsewhere);
    let module = ModuleFn::new(&store, |x: &Tensor| Ok(x.shallow_clone()));
    let model = match of_model {
        Some(_) => {
            let options = PrepareModelOptions { device_placement: of_model, ..Default::default() };
            accelerator.prepare_model(module, options).unwrap()
        }
        None => accelerator.prepare(module).unwrap(),
    };
    assert_eq!(model.params().device(), if moves { Device::Cpu } else { elsewhere });
    let loader = accelerator.prepare(DataLoader::builder(VecDataset::new(vec![1i64])).build().unwrap()).unwrap();
    assert_eq!(loader.device(), of_run.unwrap_or(true).then_some(Device::Cpu));
}
