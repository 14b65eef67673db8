//! A training step on one process takes no memory of its own once it has warmed up: allocations of Rust code are counted
//! by the allocator. Tensors are libtorch's, which does not use it.
#![allow(clippy::unwrap_used)]

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::{Adagrad, AdamW, Optimizer, Sgd, no_decay};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, Result};

/// Allocations of one step after three, with what `optimizer` makes; the loss must have fallen.
fn allocations_of_a_step<O: Optimizer>(num_steps: usize, optimizer: impl FnOnce(&ParamStore) -> Result<O>) -> u64 {
    let accelerator = Accelerator::builder().cpu(true).gradient_accumulation_steps(num_steps).build().unwrap();
    let store = ParamStore::new(accelerator.device());
    let first = Linear::new(store.root() / "first", 8, 16, Default::default()).unwrap();
    let second = Linear::new(store.root() / "second", 16, 1, Default::default()).unwrap();
    let optimizer = optimizer(&store).unwrap();
    let model = ModuleFn::new(&store, move |input: &Tensor| second.forward(&first.forward(input)?.f_relu()?));
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let input = Tensor::ones([4, 8], (Kind::Float, tch::Device::Cpu));
    // A distance of one, whatever the weights: nothing here steps so far that it could miss.
    let target = model.forward(&input).unwrap().detach() + 1.0;

    let mut step = || -> Result<Tensor> {
        accelerator.accumulate(&model, || {
            let loss = (model.forward(&input)? - &target).f_square()?.f_mean(Kind::Float)?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            Ok(loss.detach())
        })
    };
    let mut before = Ok(Tensor::new());
    let cold = allocation_counter::measure(|| (0..num_steps).for_each(|_| before = step()));
    assert!(cold.count_total > 0, "the first step makes its lists");
    let before = before.unwrap();
    for _ in 0..3 * num_steps {
        let _ = step().unwrap();
    }
    let mut after = Ok(Tensor::new());
    let counted = allocation_counter::measure(|| (0..2 * num_steps).for_each(|_| after = step()));
    assert!(after.unwrap().double_value(&[]) < before.double_value(&[]));
    counted.count_total
}

#[test]
fn a_warm_step_takes_no_memory() {
    assert_eq!(allocations_of_a_step(1, |store| AdamW::new(store, 0.001)), 0, "AdamW");
    let groups = |store: &ParamStore| no_decay(store, &["bias"]);
    let builder = |store: &ParamStore| AdamW::builder(store).lr(0.001).amsgrad(true).param_groups(groups(store));
    assert_eq!(allocations_of_a_step(1, |store| builder(store).build()), 0, "AdamW with groups and amsgrad");
    assert_eq!(allocations_of_a_step(1, |store| Sgd::new(store, 0.01)), 0, "SGD");
    assert_eq!(allocations_of_a_step(1, |store| Sgd::builder(store).lr(0.01).momentum(0.5).build()), 0, "momentum");
    assert_eq!(allocations_of_a_step(1, |store| Adagrad::new(store, 0.001)), 0, "Adagrad");
}

#[test]
fn neither_does_accumulation() {
    assert_eq!(allocations_of_a_step(3, |store| AdamW::new(store, 0.001)), 0);
}
