//! `tests/test_scheduler.py`: how far a schedule moves with its optimizer.

use crate::regression::{RegressionModel, mse, rank_batch};
use accelerate::nn::Module;
use accelerate::optim::{
    AcceleratedOptimizer, AcceleratedScheduler, AdamW, LambdaLr, LinearWithWarmup, LrScheduler, OneCycleLr,
};
use accelerate::{
    Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, MixedPrecision, PreparedModel, SchedulerUnit,
    main_println,
};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    for split_batches in [false, true] {
        for step_with_optimizer in [false, true] {
            for unit in [SchedulerUnit::Reference, SchedulerUnit::OptimizerStep] {
                let case = Case { split_batches, step_with_optimizer, unit };
                lambda_test(&accelerator, case)?;
                one_cycle_test(&accelerator, case)?;
            }
        }
    }
    for num_steps in [1, 2, 4] {
        for adjust_scheduler in [None, Some(false), Some(true)] {
            accumulation_test(&accelerator, num_steps, adjust_scheduler)?;
        }
    }
    main_println!(accelerator, "test_scheduler: all checks passed");
    Ok(())
}

#[derive(Clone, Copy, Debug)]
struct Case {
    split_batches: bool,
    step_with_optimizer: bool,
    unit: SchedulerUnit,
}

impl Case {
    /// One tick for every process, where the schedule counts as for one.
    fn ticks(self, accelerator: &Accelerator) -> usize {
        if self.counts_processes() { accelerator.num_processes() } else { 1 }
    }

    fn counts_processes(self) -> bool {
        self.step_with_optimizer && !self.split_batches && self.unit == SchedulerUnit::Reference
    }

    /// In fp16, where steps can be skipped.
    fn accelerator(self, run: &Accelerator) -> Result<Accelerator> {
        let config = DataLoaderConfiguration { split_batches: Some(self.split_batches), ..Default::default() };
        Ok(Accelerator::builder()
            .mixed_precision(MixedPrecision::Fp16)
            .dataloader_config(config)
            .step_scheduler_with_optimizer(self.step_with_optimizer)
            .scheduler_unit(self.unit)
            .build_from(run)?)
    }
}

struct Training<S> {
    accelerator: Accelerator,
    model: PreparedModel<RegressionModel>,
    optimizer: AcceleratedOptimizer<AdamW>,
    scheduler: AcceleratedScheduler<S>,
}

impl<S: LrScheduler> Training<S> {
    fn start(
        accelerator: Accelerator,
        lr: f64,
        schedule: impl FnOnce(&AdamW) -> accelerate::Result<S>,
    ) -> Result<Self> {
        let model = RegressionModel::new(accelerator.device(), 0.0, 0.0)?;
        let optimizer = AdamW::new(model.params(), lr)?;
        let scheduler = schedule(&optimizer)?;
        let (model, optimizer, scheduler) = accelerator.prepare((model, optimizer, scheduler))?;
        Ok(Self { accelerator, model, optimizer, scheduler })
    }

    /// One micro-batch; a factor that is not finite makes the optimizer skip its step.
    fn step(&mut self, loss_factor: f64) -> Result<()> {
        let Self { accelerator, model, optimizer, scheduler } = self;
        let (x, y) = rank_batch(accelerator, 0)?;
        let factor = if accelerator.is_last_process() { loss_factor } else { 1.0 };
        Ok(accelerator.accumulate(&*model, || {
            accelerator.backward(&(mse(&model.forward(&x)?, &y)? * factor))?;
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()
        })?)
    }

    /// The rate that the schedule says and the one that the optimizer uses are the same.
    fn lr(&mut self) -> Result<f64> {
        let (said, used) = (self.scheduler.get_last_lr(), self.scheduler.scheduler().handle().learning_rates());
        ensure!(said == used && said.len() == 1, "the schedule says {said:?}, the optimizer uses {used:?}");
        Ok(said[0])
    }
}

fn lambda_test(accelerator: &Accelerator, case: Case) -> Result<()> {
    let lambda = |optimizer: &AdamW| Ok(LambdaLr::new(optimizer, |step| 1.0 - step as f64 / 20.0));
    let mut training = Training::start(case.accelerator(accelerator)?, 1.0, lambda)?;
    let mut ticks = 0;
    for (step, loss_factor) in [1.0, f64::INFINITY, f64::NAN, 1.0, 1.0].into_iter().enumerate() {
        training.step(loss_factor)?;
        // What does not follow the optimizer moves when its step was skipped, too.
        if loss_factor.is_finite() || !case.step_with_optimizer {
            ticks += case.ticks(accelerator);
        }
        let (found, wanted) = (training.lr()?, 1.0 - ticks as f64 / 20.0);
        ensure!((found - wanted).abs() < 1e-12, "{case:?}, step {step}: learning rate {found}, not {wanted}");
    }
    Ok(())
}

/// A schedule with an end stays at its last rate where ticks of several processes overshoot it. The reference lets it go one
/// tick too far.
fn one_cycle_test(accelerator: &Accelerator, case: Case) -> Result<()> {
    let total_steps = 9;
    let cycle = |optimizer: &AdamW| OneCycleLr::new(optimizer, 0.01, total_steps);
    let mut training = Training::start(case.accelerator(accelerator)?, 1.0, cycle)?;
    let alone = RegressionModel::new(accelerator.device(), 0.0, 0.0)?;
    let mut plain = cycle(&AdamW::new(alone.params(), 1.0)?)?;
    let last = total_steps - usize::from(case.counts_processes());
    for step in 1..=total_steps {
        training.step(1.0)?;
        let wanted = (step * case.ticks(accelerator)).min(last);
        while plain.last_epoch() < wanted {
            plain.step()?;
        }
        let found = training.scheduler.scheduler().last_epoch();
        ensure!(found == wanted, "{case:?}, step {step}: the cycle is at {found}, not {wanted}");
        ensure!(training.lr()? == plain.get_last_lr()[0], "{case:?}, step {step}: the rate of step {wanted}");
    }
    let beyond = training.step(1.0);
    ensure!(beyond.is_ok() == case.counts_processes(), "{case:?}: beyond the end of the cycle, {beyond:?}");
    Ok(())
}

/// However many micro-batches a window has, the schedule is at 0 after ten steps of the optimizer and not before.
/// With `adjust_scheduler` that is a schedule written for micro-batches; in the reference it changes no rate.
fn accumulation_test(accelerator: &Accelerator, num_steps: usize, adjust_scheduler: Option<bool>) -> Result<()> {
    let plugin = GradientAccumulationPlugin { num_steps: Some(num_steps), adjust_scheduler, ..Default::default() };
    let configured = Accelerator::builder().gradient_accumulation_plugin(plugin).build_from(accelerator)?;
    let counted = if adjust_scheduler == Some(true) { num_steps } else { 1 };
    let total = 10 * counted * accelerator.num_processes();
    let linear = |optimizer: &AdamW| Ok(LinearWithWarmup::new(optimizer, 0, total));
    let mut training = Training::start(configured, 10.0, linear)?;
    for micro_batch in 1..=10 * num_steps {
        training.step(1.0)?;
        let (found, wanted) = (training.lr()?, 10.0 - (micro_batch / num_steps) as f64);
        let what = format!("windows of {num_steps}, after {micro_batch} micro-batches");
        ensure!((found - wanted).abs() < 1e-12, "{what}: learning rate {found}, not {wanted}");
    }
    ensure!(training.lr()? == 0.0, "windows of {num_steps}: the schedule ends above 0");
    Ok(())
}
