//! Training by a DeepSpeed configuration.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, DummyOptim, DummyScheduler};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, DeepSpeedPlugin, DistributedType, Result, testing};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn by(json: &str) -> AcceleratorBuilder {
    let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse().unwrap()), ..Default::default() };
    Accelerator::builder().deepspeed_plugin(plugin)
}

fn model(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let mut layers = Vec::new();
    for layer in 0..3 {
        let linear = Linear::new(store.root() / "layers" / layer, 5, 5, Default::default())?;
        linear.weight.copy_(&(Tensor::arange(25, FLOAT) * 0.7 + layer as i64).sin().view([5, 5]))?;
        linear.bias.as_ref().unwrap().copy_(&Tensor::zeros([5], FLOAT))?;
        layers.push(linear);
    }
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        layers.iter().try_fold(input.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.f_tanh()?))
    });
    Ok((store, module))
}

fn loader() -> Result<DataLoader<(Tensor, Tensor)>> {
    let rows = Tensor::arange(48 * 5, FLOAT).view([48, 5]);
    DataLoader::builder(TensorDataset::new((rows.sin(), rows.cos()))?).batch_size(4).build()
}

/// The parameters after one pass over the data; `max_norm` is clipped to by hand.
fn train(builder: AcceleratorBuilder, world_size: usize, max_norm: Option<f64>) -> Vec<f64> {
    let runs = testing::ranks(world_size, builder, |accelerator| {
        let (store, module) = model(&accelerator)?;
        let (model, mut optimizer, loader) = accelerator.prepare((module, AdamW::new(&store, 0.05)?, loader()?))?;
        for batch in loader.iter()? {
            let (rows, wanted) = batch?;
            accelerator.accumulate(&model, || {
                let loss = (model.forward(&rows)? - wanted).f_square()?.f_mean(Kind::Float)? * 100.0;
                accelerator.backward(&loss)?;
                if let Some(max_norm) = max_norm.filter(|_| accelerator.sync_gradients()) {
                    accelerator.clip_grad_norm_(&model, max_norm)?;
                }
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
        let state = store.state_dict()?;
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap();
        Ok(state.iter().flat_map(|(_, tensor)| values(tensor)).collect::<Vec<_>>())
    });
    runs.unwrap().swap_remove(0)
}

#[test]
fn every_stage_trains_as_replicas_with_the_same_accumulation_and_clipping_do() {
    for world_size in [1, 2, 3] {
        let replicas = Accelerator::builder().gradient_accumulation_steps(2);
        let wanted = train(replicas.clone(), world_size, Some(0.5));
        let unclipped = train(replicas, world_size, None);
        for stage in 0..=3 {
            let json = format!(
                r#"{{"zero_optimization": {{"stage": {stage}}}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}}"#
            );
            let found = train(by(&json), world_size, None);
            let differs = |other: &[f64]| found.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(differs(&wanted) < 1e-5, "stage {stage} on {world_size} ranks differs by {}", differs(&wanted));
            assert!(differs(&unclipped) > 1e-3, "clipping is seen in the parameters");
        }
    }
}

/// A third is no number of bfloat16: three ranks see in which type gradients travel.
#[test]
fn gradients_travel_and_add_up_in_the_type_that_is_asked_for() {
    let run = |keys: &str| {
        let json = format!(
            r#"{{"zero_optimization": {{"stage": 3}}, "bf16": {{"enabled": true}}, {keys}
                "gradient_accumulation_steps": 2, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}}"#
        );
        train(by(&json), 3, None)
    };
    let in_bf16 = run("");
    let in_float32 = run(r#""communication_data_type": "fp32","#);
    assert_ne!(in_float32, in_bf16);
    assert_eq!(run(r#""data_types": {"grad_accum_dtype": "fp32"},"#), in_float32);
    assert_eq!(run(r#""communication_data_type": "bf16","#), in_bf16);
}

#[test]
fn models_are_saved_in_16_bits_where_that_is_asked_for() {
    for world_size in [1, 2] {
        for (asked, wanted) in [(true, Kind::BFloat16), (false, Kind::Float)] {
            let json = format!(
                r#"{{"zero_optimization": {{"stage": 3, "stage3_gather_16bit_weights_on_model_save": {asked}}},
                    "bf16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}}"#
            );
            let folder = tempfile::tempdir().unwrap();
            let trained = testing::ranks(world_size, by(&json), |accelerator| {
                let (store, module) = model(&accelerator)?;
                let prepared = accelerator.prepare(module)?;
                accelerator.save_model(&prepared, folder.path(), &Default::default())?;
                store.state_dict()
            });
            let mut found = Vec::new();
            for file in std::fs::read_dir(folder.path()).unwrap() {
                let path = file.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "safetensors") {
                    let state = accelerate::checkpoint::load_file(&path).unwrap();
                    found.extend(state.iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())));
                }
            }
            let trained = trained.unwrap().swap_remove(0);
            assert_eq!(found.len(), trained.iter().count());
            for (name, tensor) in found {
                assert_eq!(tensor.kind(), wanted, "{name} on {world_size} ranks");
                assert_eq!(tensor, trained.get(&name).unwrap().to_kind(wanted), "{name} on {world_size} ranks");
            }
        }
    }
}

#[test]
fn numbers_that_the_loaders_contradict_are_refused() {
    let stage = r#""zero_optimization": {"stage": 2}"#;
    for (json, words) in [
        (
            format!(
                r#"{{{stage}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}}"#
            ),
            "16",
        ),
        (
            format!(r#"{{{stage}, "train_batch_size": "auto", "communication_data_typo": 1}}"#),
            "communication_data_typo",
        ),
    ] {
        let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse().unwrap()), ..Default::default() };
        let prepared = testing::ranks(2, Accelerator::builder().deepspeed_plugin(plugin), |accelerator| {
            accelerator.prepare(loader()?).map(drop)
        });
        let error = format!("{:?}", prepared.unwrap_err());
        assert!(error.contains(words), "{error}");
    }
    // What is left open follows from the rest: 16 rows of 4, on 2 ranks, are 2 micro-batches.
    let open = format!(r#"{{{stage}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}}"#);
    let steps = testing::ranks(2, by(&open), |accelerator| {
        assert_eq!(accelerator.distributed_type(), DistributedType::DeepSpeed);
        Ok(accelerator.gradient_accumulation_steps())
    });
    assert_eq!(steps.unwrap(), [2, 2]);
    let open = format!(r#"{{{stage}, "train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}}"#);
    let steps = testing::ranks(2, by(&open), |accelerator| {
        let _loader = accelerator.prepare(loader()?)?;
        Ok(accelerator.gradient_accumulation_steps())
    });
    assert_eq!(steps.unwrap(), [3, 3]);
}

#[test]
fn an_optimizer_is_made_by_one_side_only() {
    let json = r#"{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}"#;
    let accelerator = by(json).cpu(true).build().unwrap();
    let (store, _) = model(&accelerator).unwrap();
    let error = accelerator.prepare(AdamW::new(&store, 0.1).unwrap()).unwrap_err();
    assert!(error.is_config(), "{error}");
}

/// What the configuration's optimizer and schedule are made of, and the rates that they go through.
fn rates_of_dummies(json: &str, dummy: impl Fn(DummyOptim) -> DummyOptim) -> Result<Vec<f64>> {
    let accelerator = by(json).cpu(true).build()?;
    let (store, module) = model(&accelerator)?;
    let optimizer = dummy(DummyOptim::new(&store));
    let scheduler = DummyScheduler::new(&optimizer).total_num_steps(8).warmup_num_steps(3);
    let (model, mut optimizer, mut scheduler) = accelerator.prepare((module, optimizer, scheduler))?;
    let mut rates = Vec::new();
    for _ in 0..4 {
        accelerator.backward(&model.forward(&Tensor::ones([1, 5], FLOAT))?.f_sum(Kind::Float)?)?;
        optimizer.step()?;
        scheduler.step()?;
        rates.push(scheduler.get_last_lr()[0]);
    }
    Ok(rates)
}

#[test]
fn dummies_become_what_the_configuration_describes() {
    let schedule =
        r#""scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}}"#;
    for optimizer in ["Adam", "AdamW", "Adagrad", "Lion", "SGD", "RMSprop"] {
        let json = format!(
            r#"{{"zero_optimization": {{"stage": 2}}, {schedule}, "optimizer": {{"type": "{optimizer}", "params": {{"lr": "auto"}}}}}}"#
        );
        let rates = rates_of_dummies(&json, |dummy| dummy.lr(0.3)).unwrap();
        let wanted = [0.0, 0.1, 0.2, 0.3];
        assert!(rates.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{optimizer}: {rates:?}");
    }
    let stage = r#""zero_optimization": {"stage": 2}"#;
    let adam = r#""optimizer": {"type": "Adam", "params": {"lr": 0.1}}"#;
    for (json, words) in [
        (format!("{{{stage}, {schedule}}}"), "optimizer"),
        (format!("{{{stage}, {}}}", adam.replace("0.1", "0.3")), "scheduler"),
        (format!("{{{stage}, {adam}, {schedule}}}"), "0.3"),
    ] {
        let error = rates_of_dummies(&json, |dummy| dummy.lr(0.3)).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(words), "{error}");
    }
    let plain = Accelerator::builder().cpu(true).build().unwrap();
    let (store, _) = model(&plain).unwrap();
    let error = plain.prepare(DummyOptim::new(&store)).map(drop).unwrap_err().to_string();
    assert!(error.contains("DummyOptim") && error.contains("deepspeed_plugin"), "{error}");
}
