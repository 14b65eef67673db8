//! A schedule of known length that cannot end with the loop is told of: once, on the main process, with the length that would.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, TensorDataset, skip_first_batches};
use accelerate::nn::{Init, ModuleFn, ParamStore};
use accelerate::optim::{LinearWithWarmup, LrScheduler, OneCycleLr, Sgd, StepLr, Warmup};
use accelerate::testing::ranks;
use accelerate::{Accelerator, AcceleratorBuilder, DataLoaderConfiguration, GradientAccumulationPlugin, JoinOptions};
use accelerate::{Result, SchedulerUnit};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use warnings::Warnings;

mod warnings;

#[derive(Clone, Copy)]
struct Loop {
    num_processes: usize,
    /// Batches of all processes together.
    num_batches: i64,
    num_passes: usize,
    /// Ends each pass before this batch.
    end: usize,
    skipped: usize,
}

const THREE_PASSES: Loop = Loop { num_processes: 2, num_batches: 20, num_passes: 3, end: usize::MAX, skipped: 0 };
const ONE_LONG_PASS: Loop = Loop { num_batches: 120, num_passes: 1, ..THREE_PASSES };
const ALONE: Loop = Loop { num_processes: 1, ..THREE_PASSES };

/// What each process is warned of.
fn warnings<S: LrScheduler>(
    builder: AcceleratorBuilder,
    Loop { num_processes, num_batches, num_passes, end, skipped }: Loop,
    schedule: impl Fn(&Sgd) -> Result<S> + Sync,
) -> Vec<Vec<String>> {
    let train = |accelerator: Accelerator| -> Result<()> {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([1], Init::Ones))?;
        let optimizer = Sgd::builder(&store).lr(0.1).momentum(0.9).build()?;
        let scheduler = schedule(&optimizer)?;
        let model = ModuleFn::new(&store, move |x: &Tensor| Ok(weight.get()? * x));
        let rows = TensorDataset::new(Tensor::ones([num_batches, 1], (Kind::Float, Device::Cpu)))?;
        let loader = DataLoader::builder(rows).batch_size(1).build()?;
        let prepared = accelerator.prepare((model, optimizer, loader, scheduler))?;
        let (model, mut optimizer, loader, mut scheduler) = prepared;
        for _ in 0..num_passes {
            for batch in skip_first_batches(&loader, skipped).iter()?.take(end) {
                let batch = batch?;
                accelerator.accumulate(&model, || {
                    accelerator.backward(&model.forward(&batch)?.sum(Kind::Float))?;
                    optimizer.step()?;
                    scheduler.step()?;
                    optimizer.zero_grad()
                })?;
            }
        }
        Ok(())
    };
    let run = |accelerator| {
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || train(accelerator))?;
        Ok(warnings.taken())
    };
    ranks(num_processes, builder, run).unwrap()
}

fn linear(total: usize) -> impl Fn(&Sgd) -> Result<LinearWithWarmup> + Sync {
    move |optimizer| Ok(LinearWithWarmup::new(optimizer, 0, total))
}

fn accumulating(num_steps: usize) -> AcceleratorBuilder {
    Accelerator::builder().gradient_accumulation_steps(num_steps)
}

fn adjusting(num_steps: usize) -> AcceleratorBuilder {
    let plugin =
        GradientAccumulationPlugin { num_steps: Some(num_steps), adjust_scheduler: Some(true), ..Default::default() };
    Accelerator::builder().gradient_accumulation_plugin(plugin)
}

/// The main process is warned once, of what `wanted` says, and the others are not.
#[track_caller]
fn check(warnings: &[Vec<String>], wanted: &str) {
    assert!(warnings[1..].iter().all(Vec::is_empty), "{warnings:?}");
    match (&warnings[0][..], wanted) {
        ([], "") => {}
        ([found], wanted) if !wanted.is_empty() => assert!(found.contains(wanted), "{found}"),
        (found, _) => panic!("{found:?}, wanted: {wanted}"),
    }
}

#[rstest]
#[case::as_for_one_process(accumulating(1), THREE_PASSES, 60, "")]
#[case::optimizer_steps(
    accumulating(1),
    THREE_PASSES,
    30,
    "has 30 steps, and a pass over the data moves it by 20, so it ends after 1.5 passes"
)]
#[case::by_optimizer_steps(accumulating(1).scheduler_unit(SchedulerUnit::OptimizerStep), THREE_PASSES, 30, "")]
#[case::as_if_for_one_pass(accumulating(1), THREE_PASSES, 20, "at the end of its 20 steps, and training goes on")]
#[case::accumulating(accumulating(4), ALONE, 15, "")]
#[case::batches(accumulating(4), ALONE, 60, "at step 15 of 60: 60 steps are 3 passes in batches of one process")]
#[case::batches_of_a_loop_that_was_left(accumulating(4), Loop { end: 10, ..ALONE }, 60, "")]
#[case::adjusted(adjusting(4), ALONE, 60, "")]
#[case::alone(accumulating(1), ALONE, 30, "")]
#[case::in_the_middle_of_a_pass(accumulating(1), Loop { skipped: 20, ..ONE_LONG_PASS }, 120, "")]
#[case::explained_twice(accumulating(3), ONE_LONG_PASS, 60, "so it ends after 1.5 passes")]
#[case::every_call(accumulating(1).step_scheduler_with_optimizer(false), THREE_PASSES, 30, "")]
fn a_length_that_cannot_meet_the_end_of_the_loop(
    #[case] builder: AcceleratorBuilder,
    #[case] training: Loop,
    #[case] total: usize,
    #[case] wanted: &str,
) {
    check(&warnings(builder, training, linear(total)), wanted);
}

#[test]
fn schedules_that_know_their_length_and_those_that_do_not() {
    let ended = "is at the end of its 20 steps";
    let cycle = |optimizer: &Sgd| OneCycleLr::new(optimizer, 0.1, 20);
    check(&warnings(accumulating(1), THREE_PASSES, cycle), ended);
    let warm = |optimizer: &Sgd| Warmup::new(LinearWithWarmup::new(optimizer, 0, 15), 5, 0.0);
    check(&warnings(accumulating(1), THREE_PASSES, warm), ended);
    check(&warnings(accumulating(1), THREE_PASSES, |optimizer: &Sgd| StepLr::new(optimizer, 20, 0.5)), "");
}

fn loading(even_batches: bool, split_batches: bool) -> AcceleratorBuilder {
    let config = DataLoaderConfiguration {
        even_batches: Some(even_batches),
        split_batches: Some(split_batches),
        ..Default::default()
    };
    accumulating(4).dataloader_config(config)
}

/// Windows go on in the next pass.
fn across_passes(num_steps: usize) -> AcceleratorBuilder {
    let plugin = GradientAccumulationPlugin {
        num_steps: Some(num_steps),
        sync_with_dataloader: Some(false),
        ..Default::default()
    };
    Accelerator::builder().gradient_accumulation_plugin(plugin)
}

/// The number that is given out before anything is prepared is the number of steps that the prepared schedule makes.
#[rstest]
fn a_schedule_of_the_length_that_is_given_out_ends_with_the_loop(
    #[values(1, 2, 3)] num_processes: usize,
    #[values(
        accumulating(1),
        accumulating(4),
        adjusting(4),
        across_passes(4),
        loading(false, false),
        loading(true, true),
        accumulating(2).scheduler_unit(SchedulerUnit::OptimizerStep),
        accumulating(2).step_scheduler_with_optimizer(false)
    )]
    builder: AcceleratorBuilder,
) {
    let counts = ranks(num_processes, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([1], Init::Ones))?;
        let optimizer = Sgd::builder(&store).lr(0.1).build()?;
        let scheduler = StepLr::new(&optimizer, 1000, 0.5)?;
        let model = ModuleFn::new(&store, move |x: &Tensor| Ok(weight.get()? * x));
        let rows = TensorDataset::new(Tensor::ones([41, 1], (Kind::Float, Device::Cpu)))?;
        let loader = DataLoader::builder(rows).batch_size(6).build()?;
        let given_out = accelerator.num_training_steps(&loader, 3);
        let (model, mut optimizer, loader, mut scheduler) =
            accelerator.prepare((model, optimizer, loader, scheduler))?;
        for _ in 0..3 {
            accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
                for batch in loader.iter()? {
                    let batch = batch?;
                    accelerator.accumulate(&model, || {
                        accelerator.backward(&model.forward(&batch)?.sum(Kind::Float))?;
                        optimizer.step()?;
                        scheduler.step()?;
                        optimizer.zero_grad()
                    })?;
                }
                Ok(())
            })?;
        }
        Ok((given_out, scheduler.scheduler().last_epoch()))
    });
    let counts = counts.unwrap();
    // Without even batches, other ranks may make fewer steps.
    assert_eq!(counts[0].0, counts[0].1);
    assert!(counts.iter().all(|(given_out, _)| *given_out == counts[0].0), "{counts:?}");
}
