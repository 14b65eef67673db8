//! Activations that are computed twice give the gradients of those that are kept, in less memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::*;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, MixedPrecision, Result,
    ShardingStrategy, testing,
};
use std::sync::{Arc, Mutex};
use torch_ext::autograd::{BackwardOptions, backward};
use torch_ext::storage::storage_use_count;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A layer with dropout, so that its random numbers matter.
#[derive(Debug)]
struct Block {
    up: Linear,
    norm: LayerNorm,
    dropout: Dropout,
    down: Linear,
}

impl Block {
    fn new(path: &Path, p: f64) -> Result<Self> {
        Ok(Self {
            up: Linear::new(path / "up", 5, 7, Default::default())?,
            norm: LayerNorm::new(path / "norm", [7], Default::default())?,
            dropout: Dropout::new(path / "dropout", p)?,
            down: Linear::new(path / "down", 7, 5, Default::default())?,
        })
    }
}

impl Layer for Block {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.norm.forward(&self.up.forward(input)?.f_gelu("none")?)?;
        Ok(self.down.forward(&self.dropout.forward(&hidden)?)? + input)
    }
}

/// Three blocks, a frozen weight, and a root that is used at both ends.
fn model(device: Device, p: f64) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor> + use<>)> {
    let store = ParamStore::new(device);
    let embed = Embedding::new(store.root() / "embed", 11, 5, Default::default())?;
    let block = |index: usize| Checkpointed::new(store.root() / "blocks" / index, |path| Block::new(path, p));
    let blocks = [block(0)?, block(1)?, block(2)?];
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.5).reshape(param.shape()))?;
    }
    store.get("blocks.1.up.weight").unwrap().set_requires_grad(false)?;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let hidden = blocks.iter().try_fold(embed.forward(tokens)?, |hidden, block| block.forward(&hidden))?;
        Ok(hidden.f_linear(&embed.weight.get()?, None::<&Tensor>)?)
    });
    Ok((store, module))
}

fn gradients(store: &ParamStore) -> Vec<(String, Option<Tensor>)> {
    let gradient = |param: &Param| (param.name().to_owned(), param.grad().map(|gradient| gradient.copy()));
    store.parameters().iter().map(gradient).collect()
}

#[test]
fn gradients_are_the_same_to_the_bit() {
    for mixed_precision in [MixedPrecision::No, MixedPrecision::Bf16] {
        let mut runs = Vec::new();
        for checkpoints in [false, true] {
            let accelerator = Accelerator::builder().cpu(true).mixed_precision(mixed_precision).build().unwrap();
            let (store, module) = model(accelerator.device(), 0.5).unwrap();
            let model = accelerator.prepare(module).unwrap();
            if checkpoints {
                store.gradient_checkpointing_enable(Default::default()).unwrap();
            }
            tch::manual_seed(3);
            let output = model.forward(&Tensor::from_slice(&[1i64, 4, 2, 8])).unwrap();
            accelerator.backward(&output.square().f_mean(None).unwrap()).unwrap();
            let next = Tensor::rand([2], FLOAT);
            store.gradient_checkpointing_disable();
            runs.push((output.copy(), gradients(&store), next));
        }
        assert_eq!(runs[0], runs[1], "{mixed_precision}");
    }
}

#[test]
fn a_graph_may_be_gone_through_twice_and_segments_may_hold_segments() {
    let run = |checkpoints: bool| {
        let x = Tensor::from_slice(&[0.3f32, -1.0]).set_requires_grad(true);
        let scale = Tensor::from(1.5f32).set_requires_grad(true);
        let inner = move |inputs: &[Tensor]| Ok(inputs[0].f_sin()?.f_exp()? * &inputs[1]);
        let outer = move |inputs: &[Tensor]| {
            let [x, scale] = [&inputs[0], &inputs[1]];
            let hidden = x.f_tanh()?;
            let hidden = if checkpoints {
                checkpoint(&[&hidden, scale], Default::default(), inner)?
            } else {
                inner(&[hidden, scale.shallow_clone()])?
            };
            Ok(hidden.f_square()?.f_mul(x)?)
        };
        let y = if checkpoints {
            checkpoint(&[&x, &scale], Default::default(), outer).unwrap()
        } else {
            outer(&[x.shallow_clone(), scale.shallow_clone()]).unwrap()
        };
        for keeps in [true, false] {
            backward(&[&y.sum(None)], None, BackwardOptions { retain_graph: keeps, ..Default::default() }).unwrap();
        }
        (y.detach(), x.grad(), scale.grad())
    };
    assert_eq!(run(true), run(false));
}

/// What its operations have saved is not there before the segment has an output; waiting for that would have no end.
#[test]
fn a_segment_cannot_be_differentiated_within_itself() {
    let x = Tensor::from_slice(&[0.3f32, -1.0]).set_requires_grad(true);
    let found = checkpoint(&[&x], Default::default(), |inputs| {
        let y = inputs[0].f_exp()?.f_square()?;
        let gradients = torch_ext::autograd::grad(&[&y.f_sum(None)?], &[&inputs[0]], None, Default::default())?;
        Ok(gradients[0].as_ref().unwrap().shallow_clone())
    });
    let error = format!("{:?}", found.unwrap_err());
    assert!(error.contains("within a checkpointed segment"), "{error}");
}

#[test]
fn what_operations_save_is_not_kept() {
    let seen: Arc<Mutex<Vec<Tensor>>> = Arc::default();
    let all = Arc::clone(&seen);
    let x = Tensor::from_slice(&[0.3f32, -1.0]).set_requires_grad(true);
    let run = |checkpoints: bool| {
        let all = Arc::clone(&all);
        let function = move |inputs: &[Tensor]| {
            let hidden = inputs[0].f_exp()?;
            // Not a view, which would keep the tensor.
            all.lock().unwrap().push(Tensor::empty([0], FLOAT).set_source_tensor(&hidden.detach()));
            Ok(hidden.f_sin()?)
        };
        if checkpoints { checkpoint(&[&x], Default::default(), function) } else { function(&[x.shallow_clone()]) }
    };
    for checkpoints in [true, false] {
        let output = run(checkpoints).unwrap();
        let in_use = storage_use_count(seen.lock().unwrap().last().unwrap());
        assert_eq!(in_use > 1, !checkpoints, "looked at by {in_use}");
        output.sum(None).backward();
    }
    assert_eq!(seen.lock().unwrap().len(), 3, "called twice with, once without");
    let _no_grad = tch::no_grad_guard();
    let _ = run(true).unwrap();
    assert_eq!(seen.lock().unwrap().len(), 4);
}

#[test]
fn what_would_be_silently_wrong_is_an_error() {
    let store = ParamStore::new(Device::Cpu);
    let linear = Linear::new(store.root() / "head", 2, 2, Default::default()).unwrap();
    let bias = linear.bias.clone().unwrap();
    let calls = Arc::new(Mutex::new(0));
    let run = |x: &Tensor, changes: bool| {
        let (linear, calls) = (linear.clone(), Arc::clone(&calls));
        checkpoint(&[x], Default::default(), move |inputs| {
            *calls.lock().unwrap() += 1;
            let hidden = linear.forward(&inputs[0])?.f_exp()?;
            if changes && *calls.lock().unwrap() == 2 { Ok(hidden) } else { Ok(hidden.f_sin()?) }
        })
    };
    let text = |output: Tensor| backward(&[&output.sum(None)], None, Default::default()).unwrap_err().to_string();
    let x = || Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);

    // A bias is saved by nobody, and yet what comes of it is.
    let output = run(&x(), false).unwrap();
    let _ = tch::no_grad(|| bias.local().f_add_scalar_(1.0)).unwrap();
    let error = text(output);
    assert!(error.contains("\"head.bias\" of a checkpointed segment was changed"), "{error}");

    let input = x();
    let output = run(&input, false).unwrap();
    let _ = tch::no_grad(|| input.shallow_clone().f_add_scalar_(1.0)).unwrap();
    let error = text(output);
    assert!(error.contains("input 0 of a checkpointed segment was changed"), "{error}");

    *calls.lock().unwrap() = 0;
    let error = text(run(&x(), true).unwrap());
    assert!(error.contains("saved 4 tensors in the forward pass and 3 when"), "{error}");
}

/// Losses and gradients of three micro-batches in one window, and of one more.
fn train(accelerator: &Accelerator) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let (store, module) = model(accelerator.device(), 0.0)?;
    let optimizer = accelerate::optim::AdamW::new(&store, 0.01)?;
    let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
    let mut losses = Vec::new();
    for index in 0..6 {
        accelerator.accumulate(&model, || {
            let tokens =
                (Tensor::arange(6, (Kind::Int64, Device::Cpu)) * 3 + index + 2 * accelerator.process_index() as i64)
                    .remainder(11);
            let loss = model.forward(&tokens)?.square().f_mean(None)?;
            losses.push(loss.double_value(&[]));
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
    }
    let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap();
    Ok((losses, store.state_dict()?.iter().map(|(_, tensor)| values(tensor)).collect()))
}

#[test]
fn replicated_and_sharded_models_train_as_without() {
    use ShardingStrategy::*;
    for world_size in [1, 2, 3] {
        let unused = DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..Default::default() };
        let builder = Accelerator::builder().gradient_accumulation_steps(3).kwargs_handler(unused);
        let wanted = testing::ranks(world_size, builder.clone(), |accelerator| train(&accelerator)).unwrap();
        for sharding_strategy in [NoShard, FullShard, ShardGradOp, OptimizerState, OptimizerStateAndGradients] {
            let plugin = FullyShardedDataParallelPlugin {
                sharding_strategy: Some(sharding_strategy),
                auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
                activation_checkpointing: Some(true),
                activation_checkpointing_offload: Some(world_size == 2),
                ..Default::default()
            };
            let builder = builder.clone().fsdp_plugin(plugin);
            let found = testing::ranks(world_size, builder, |accelerator| train(&accelerator)).unwrap();
            for (found, wanted) in found.iter().zip(&wanted) {
                let pairs = found.1.iter().flatten().zip(wanted.1.iter().flatten());
                let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(difference < 1e-6, "{sharding_strategy} on {world_size}: {difference}");
                assert!(found.0.iter().zip(&wanted.0).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
            }
        }
    }
}

#[test]
fn a_model_without_such_layers_is_refused() {
    let plugin = FullyShardedDataParallelPlugin { activation_checkpointing: Some(true), ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build().unwrap();
    let store = ParamStore::new(Device::Cpu);
    let linear = Linear::new(store.root(), 2, 2, Default::default()).unwrap();
    let module = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    let text = accelerator.prepare(module).map(drop).unwrap_err().to_string();
    assert!(text.contains("put its blocks into nn::Checkpointed"), "{text}");
}
