//! Communication hooks leave in the parameters what PyTorch's leave there.
//!
//! The numbers were written by `parity/comm_hooks/generate.py` with torch 2.11.0; both sides train the same
//! network from the same fractions on two ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod processor;

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::testing::ranks;
use accelerate::{Accelerator, DistributedDataParallelKwargs, Result};
use accelerate_core::config::DistributedDataParallelSettings;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const LAYERS: [(i64, i64); 4] = [(8, 10), (10, 10), (10, 10), (10, 4)];

fn fractions(count: i64, salt: i64) -> Tensor {
    let values: Vec<f32> = (0..count).map(|i| (((i * 37 + salt * 11) % 101) as f64 / 101.0 - 0.5) as f32).collect();
    Tensor::from_slice(&values)
}

fn train(accelerator: &Accelerator, steps: i64) -> Result<Vec<Vec<f32>>> {
    let store = ParamStore::new(accelerator.device());
    let layers: Vec<Linear> = LAYERS
        .iter()
        .enumerate()
        .map(|(index, &(inputs, outputs))| {
            Linear::new(store.root() / (2 * index).to_string(), inputs, outputs, Default::default())
        })
        .collect::<Result<_>>()?;
    for (salt, param) in store.parameters().iter().enumerate() {
        let shape = param.shape();
        param.copy_(&fractions(shape.iter().product(), salt as i64).view(&shape[..]))?;
    }
    let optimizer = Sgd::new(&store, 0.005)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let mut x = x.shallow_clone();
        for (index, layer) in layers.iter().enumerate() {
            x = layer.forward(&x)?;
            if index + 1 < layers.len() {
                x = x.f_tanh()?;
            }
        }
        Ok(x)
    });
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let rank = accelerator.process_index() as i64;
    for step in 0..steps {
        let rows = fractions(8 * LAYERS[0].0, 100 + 10 * step + rank).view([8, LAYERS[0].0]);
        let targets = fractions(8 * LAYERS[3].1, 200 + 10 * step + rank).view([8, LAYERS[3].1]);
        let error = model.forward(&rows)? - targets;
        accelerator.backward(&(&error * &error).sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(store
        .parameters()
        .iter()
        .map(|param| Vec::try_from(param.get().unwrap().detach().reshape(-1)).unwrap())
        .collect())
}

fn train_with(kwargs: Value, steps: i64) -> Vec<Vec<f32>> {
    let kwargs: DistributedDataParallelKwargs = serde_json::from_value(kwargs).unwrap();
    let builder = Accelerator::builder().kwargs_handler(kwargs);
    let mut ranks = ranks(2, builder, |accelerator| train(&accelerator, steps)).unwrap();
    assert_eq!(ranks[0], ranks[1], "the ranks' parameters differ");
    ranks.swap_remove(0)
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), b.iter().map(Vec::len).collect::<Vec<_>>());
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn every_hook_trains_to_pytorchs_parameters() {
    let document: Value = serde_json::from_str(include_str!("../../../parity/comm_hooks/comm_hooks.json")).unwrap();
    let plain = train_with(json!({}), 6);
    for (name, case) in document.as_object().unwrap() {
        let wanted: Vec<Vec<f32>> = serde_json::from_value(case["parameters"].clone()).unwrap();
        let mut kwargs = case.clone();
        kwargs.as_object_mut().unwrap().remove("parameters");
        let found = train_with(kwargs, 6);
        let difference = largest_difference(&found, &wanted);
        // Equal to the last bit but for products, whose sums may be taken in another order on another processor; what travels
        // in 16 bits may then be rounded to the other side.
        let tolerance = if processor::is_intel() { 1e-6 } else { 1e-5 };
        assert!(difference <= tolerance, "{name}: {difference:e} from PyTorch's parameters");
        assert_ne!(found, plain, "{name} changes what travels, so the last bits have to differ");
    }
}

#[test]
fn compression_begins_when_asked() {
    let plain = train_with(json!({}), 3);
    let hook = |start: u64| {
        json!({"comm_hook": "power_sgd", "comm_state_option":
            {"start_powerSGD_iter": start, "min_compression_rate": 1.0}})
    };
    assert_eq!(train_with(hook(3), 3), plain);
    assert_ne!(train_with(hook(2), 3), plain);
}

#[test]
fn a_gradient_of_zeros_stays_zero() {
    for rank in [1, 3] {
        let kwargs: DistributedDataParallelKwargs = serde_json::from_value(json!({
            "comm_hook": "power_sgd",
            "comm_state_option": {"start_powerSGD_iter": 2, "matrix_approximation_rank": rank},
        }))
        .unwrap();
        let builder = Accelerator::builder().kwargs_handler(kwargs);
        let changed = ranks(2, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let linear = Linear::new(store.root(), 16, 16, Default::default())?;
            let optimizer = Sgd::new(&store, 0.1)?;
            let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
            let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
            let before: Vec<Tensor> =
                store.parameters().iter().map(|param| param.get().unwrap().detach().copy()).collect();
            for _ in 0..4 {
                let rows = Tensor::zeros([2, 16], (Kind::Float, accelerator.device()));
                accelerator.backward(&(model.forward(&rows)?.sum(Kind::Float) * 0.0))?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            Ok(store.parameters().iter().zip(&before).any(|(param, before)| param.get().unwrap().detach() != *before))
        })
        .unwrap();
        assert_eq!(changed, [false, false], "rank {rank}");
    }
}

#[test]
fn options_that_no_hook_knows_are_refused() {
    for (kwargs, words) in [
        (json!({"comm_hook": "power_sgd", "comm_state_option": {"rank": 4}}), "unknown field `rank`"),
        (
            json!({"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 0}}),
            "must be at least 1",
        ),
        (json!({"comm_hook": "fp16", "comm_state_option": {"warm_start": true}}), "contradict each other"),
    ] {
        let kwargs: DistributedDataParallelKwargs = serde_json::from_value(kwargs).unwrap();
        let error = DistributedDataParallelSettings::from(kwargs).check().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
