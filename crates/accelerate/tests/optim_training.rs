//! Optimizers, schedules and loss scaling inside a prepared training loop, on one and on two ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, LambdaLr};
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DataLoaderConfiguration, MixedPrecision, Result, SchedulerUnit, testing,
};

/// A model of one weight, 1.0: `weight * input`.
fn line(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor> + use<>)> {
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", Tensor::from_slice(&[1.0f32]))?;
    let model = ModuleFn::new(&store, move |input: &Tensor| Ok(weight.get()?.f_mul(input)?));
    Ok((store, model))
}

/// The learning rate after one step of a schedule 1 - n/10, for each rank.
fn rates_after_one_step(world_size: usize, builder: AcceleratorBuilder) -> Vec<f64> {
    let rates = testing::ranks(world_size, builder, |accelerator| {
        let (store, model) = line(&accelerator)?;
        let optimizer = AdamW::new(&store, 1.0)?;
        let scheduler = LambdaLr::new(&optimizer, |n| 1.0 - n as f64 / 10.0);
        let (model, mut optimizer, mut scheduler) = accelerator.prepare((model, optimizer, scheduler))?;
        let loss = model.forward(&Tensor::from_slice(&[2.0f32]))?.f_sum(Kind::Float)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        scheduler.step()?;
        Ok(scheduler.get_last_lr()[0])
    });
    rates.unwrap()
}

#[test]
fn optim_schedule_ticks_once_per_process() {
    let split = DataLoaderConfiguration { split_batches: Some(true), ..Default::default() };
    for (world_size, builder, wanted) in [
        (1, Accelerator::builder(), 0.9),
        (2, Accelerator::builder(), 0.8),
        (2, Accelerator::builder().dataloader_config(split), 0.9),
        (2, Accelerator::builder().step_scheduler_with_optimizer(false), 0.9),
        (2, Accelerator::builder().scheduler_unit(SchedulerUnit::OptimizerStep), 0.9),
    ] {
        assert_eq!(rates_after_one_step(world_size, builder), vec![wanted; world_size], "{world_size} ranks");
    }
}

#[test]
fn optim_overflow_on_one_rank_skips_the_step_on_all() {
    let builder = Accelerator::builder().mixed_precision(MixedPrecision::Fp16);
    let outcomes = testing::ranks(2, builder, |accelerator| {
        let (store, model) = line(&accelerator)?;
        let (model, mut optimizer) = accelerator.prepare((model, AdamW::new(&store, 0.1)?))?;
        let mut outcomes = Vec::new();
        for overflows in [true, false] {
            let input = if overflows && accelerator.is_main_process() { f32::INFINITY } else { 1.0 };
            let loss = model.forward(&Tensor::from_slice(&[input]))?.f_sum(Kind::Float)?;
            accelerator.backward(&loss)?;
            let params = store.trainable_parameters();
            let norm = accelerator.clip_grad_norm_(&params, 100.0)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            let weight = params[0].local().f_double_value(&[0])?;
            outcomes.push((optimizer.step_was_skipped(), weight == 1.0, norm.f_double_value(&[])?));
        }
        Ok(outcomes)
    });
    for outcome in outcomes.unwrap() {
        assert_eq!((outcome[0].0, outcome[0].1), (true, true));
        // The norm is that of the true gradient, not of the scaled one.
        assert_eq!(outcome[1], (false, false, 1.0));
    }
}
