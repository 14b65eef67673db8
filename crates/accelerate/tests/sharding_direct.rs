//! Ranks that read each other's parts out of memory: whoever changes or drops parameters meanwhile is found out.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, Result, testing};
use std::sync::Barrier;
use torch_ext::autograd::backward;
use torch_ext::hooks::register_hook;

fn builder() -> AcceleratorBuilder {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    Accelerator::builder()
        .fsdp_plugin(FullyShardedDataParallelPlugin { auto_wrap_policy: Some(auto_wrap_policy), ..Default::default() })
}

const WIDTH: i64 = 8;

fn ones() -> Tensor {
    Tensor::ones([1, WIDTH], (Kind::Float, Device::Cpu))
}

/// Three layers of ones over `WIDTH`; `between` is called before the last one.
fn layers<F: Fn(&Tensor) + Send + 'static>(
    store: &ParamStore,
    between: F,
) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<F>> {
    let layer = |index: usize| Linear::new(store.root() / "layers" / index, WIDTH, WIDTH, Default::default());
    let layers = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
    for param in store.parameters() {
        param.copy_(&Tensor::from(1.0))?;
    }
    Ok(ModuleFn::new(store, move |input: &Tensor| {
        let mut x = input.shallow_clone();
        for (index, layer) in layers.iter().enumerate() {
            if index == 2 {
                between(&x);
            }
            x = layer.forward(&x)? / WIDTH as f64;
        }
        Ok(x)
    }))
}

/// When rank 0 ends, while rank 1 still needs its parts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    InForward,
    /// Of gradients that are not added up over ranks: those would keep rank 0.
    InBackward,
}

/// A rank whose model is gone early still gives the others what they need of it.
#[test]
fn a_rank_that_has_ended_waits_until_nobody_reads_its_parts() {
    for ends in [Ends::InForward, Ends::InBackward] {
        let left: &'static Barrier = Box::leak(Box::new(Barrier::new(2)));
        let results = testing::ranks(2, builder(), |accelerator| {
            let waits = accelerator.process_index() == 1;
            let store = ParamStore::new(Device::Cpu);
            let between = move |x: &Tensor| match ends {
                Ends::InForward if waits => drop(left.wait()),
                Ends::InBackward if waits => {
                    let wait = move |_: &Tensor| {
                        left.wait();
                        Ok(None)
                    };
                    register_hook(x, wait).unwrap();
                }
                _ => {}
            };
            let model = accelerator.prepare(layers(&store, between)?)?;
            let input = ones().set_requires_grad(true);
            let output = model.forward(&input)?;
            if ends == Ends::InBackward {
                // Not the accelerator's: nothing is compared afterwards.
                accelerator.no_sync(&model, || Ok(backward(&[&output.sum(Kind::Float)], None, Default::default())?))?;
            }
            if !waits {
                left.wait();
            }
            let gradient = (ends == Ends::InBackward).then(|| input.grad().double_value(&[0, 0]));
            Ok((output.double_value(&[0, 0]), gradient))
        });
        // Of layers of ones, divided by their width: each adds an eighth, and hands gradients on as they are.
        assert_eq!(results.unwrap(), [(1.375, (ends == Ends::InBackward).then_some(1.0)); 2], "{ends:?}");
    }
}

#[test]
fn parts_that_change_between_the_passes_are_an_error() {
    let texts = testing::ranks(2, builder(), |accelerator| {
        let store = ParamStore::new(Device::Cpu);
        let model = accelerator.prepare(layers(&store, |_| ())?)?;
        let _output = model.forward(&ones())?;
        for param in store.parameters() {
            let _ = tch::no_grad(|| param.local().f_add_scalar_(1.0))?;
        }
        let text = model.forward(&ones()).unwrap_err().to_string();
        // The next pass is as any other.
        let again = model.forward(&ones())?.double_value(&[0, 0]);
        Ok((text, again))
    });
    for (text, again) in texts.unwrap() {
        assert!(text.contains("were changed between a forward pass and its backward pass"), "{text}");
        assert!(again > 2.0, "computed with the new values: {again}");
    }
}

/// Values that everyone sets between the passes of two graphs are seen by the second one.
#[test]
fn parameters_may_be_overwritten_between_passes_without_a_step() {
    let outputs = testing::ranks(3, builder(), |accelerator| {
        let store = ParamStore::new(Device::Cpu);
        let model = accelerator.prepare(layers(&store, |_| ())?)?;
        let mut outputs = Vec::new();
        for value in 0..20 {
            for param in store.parameters() {
                param.copy_(&Tensor::from(f64::from(value)))?;
            }
            // With and without gradients, and without a backward pass.
            let output =
                if value % 2 == 0 { model.forward(&ones())? } else { tch::no_grad(|| model.forward(&ones()))? };
            outputs.push(output.double_value(&[0, 0]));
        }
        Ok(outputs)
    });
    for found in outputs.unwrap() {
        for (value, found) in found.into_iter().enumerate() {
            let v = value as f64;
            let wanted = (0..3).fold(1.0, |x, _| v * x + v / 8.0);
            assert!((found - wanted).abs() <= 1e-5 * wanted.max(1.0), "{value}: {found} {wanted}");
        }
    }
}

/// Ranks are as unequal as they can be, and all have the same sums.
#[test]
fn ranks_of_different_speed_train_alike() {
    let losses = testing::ranks(3, builder(), |accelerator| {
        let store = ParamStore::new(Device::Cpu);
        let rank = accelerator.process_index();
        let busy = move |_: &Tensor| {
            // Work that only some ranks have.
            let size = 200 * rank as i64 + 1;
            let table = Tensor::ones([size, size], (Kind::Float, Device::Cpu));
            let _ = table.mm(&table);
        };
        let (model, mut optimizer) = accelerator.prepare((layers(&store, busy)?, Sgd::new(&store, 0.01)?))?;
        let mut losses = Vec::new();
        for _ in 0..10 {
            let input = ones() * (rank + 1) as f64;
            let loss = (model.forward(&input)? - 0.5).square().mean(Kind::Float);
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(loss.double_value(&[]));
        }
        let state = store.state_dict()?;
        let weight = state.get("layers.2.weight").unwrap();
        Ok((losses, Vec::<f32>::try_from(weight.reshape([-1])).unwrap()))
    });
    let trained = losses.unwrap();
    assert!(trained.iter().all(|(losses, weight)| losses[9] < losses[0] && *weight == trained[0].1), "{trained:?}");
}

/// Two models of one accelerator, each sharded on its own, one of them computing with what the other one makes.
#[test]
fn several_models_and_optimizers() {
    let run = |builder: AcceleratorBuilder| {
        let values = testing::ranks(2, builder, |accelerator| {
            let stores = [0, 1].map(|_| ParamStore::new(Device::Cpu));
            let models = (layers(&stores[0], |_| ())?, layers(&stores[1], |_| ())?);
            let optimizers = (Sgd::new(&stores[0], 0.02)?, Sgd::new(&stores[1], 0.01)?);
            let (generator, judge) = accelerator.prepare(models)?;
            let (mut first, mut second) = accelerator.prepare(optimizers)?;
            let input = ones() * (1.0 + accelerator.process_index() as f64);
            for _ in 0..3 {
                let made = generator.forward(&input)?;
                accelerator.backward(&judge.forward(&made.detach())?.square().mean(None))?;
                second.step()?;
                second.zero_grad()?;
                accelerator.backward(&(judge.forward(&made)? + 1.0).square().mean(None))?;
                first.step()?;
                first.zero_grad()?;
                second.zero_grad()?;
            }
            let mut values = Vec::new();
            for store in &stores {
                for (_, tensor) in store.state_dict()?.iter() {
                    values.push(Vec::<f32>::try_from(tensor.reshape([-1])).unwrap());
                }
            }
            Ok(values)
        });
        values.unwrap()
    };
    let wanted = run(Accelerator::builder());
    assert!(wanted[0].iter().flatten().all(|value| value.is_finite() && *value != 1.0));
    assert!(run(builder()) == wanted);
}
