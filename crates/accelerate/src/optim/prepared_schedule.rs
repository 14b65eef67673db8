//! What `prepare` makes of a learning-rate scheduler.

use super::IntoInnerError;
use super::schedule::{LrScheduler, SchedulerState};
use super::schedule_length::LengthWatch;
use super::shared_object::SharedObject;
use crate::error::{Error, OptimError, Result};
use crate::messages;
use crate::session::{Object, ObjectState, Session, Stateful};
use accelerate_core::schedule::{SchedulerRule, SchedulerUnit, capped_ticks, ticks_per_step};
use std::fmt;
use std::ops::DerefMut;
use std::sync::Arc;

pub(crate) use accelerate_core::schedule::SchedulerRule as SchedulerOptions;

/// A scheduler that moves with its optimizer. Made by
/// [`Accelerator::prepare`](crate::Accelerator::prepare). The accelerator knows of it as long as it lives;
/// [`scheduler`](Self::scheduler) is your own.
///
/// [`step`](Self::step) does nothing while gradients are being accumulated, or when the optimizer
/// skipped its step because of an overflow. Otherwise the schedule moves by
/// [`ticks_per_step`](Self::ticks_per_step): as in Python Accelerate one tick for every process, because
/// the processes together see that many batches, so a schedule written for one process keeps its length in
/// samples. With `split_batches`, or in [`SchedulerUnit::OptimizerStep`], it is one tick.
///
/// A schedule of [known length](LrScheduler::num_training_steps) that cannot end with a loop over a prepared loader, with
/// several processes or accumulation, is told of once in a warning, with the length that would.
///
/// ```
/// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::{LinearWithWarmup, LrScheduler, Sgd}};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let store = ParamStore::new(accelerator.device());
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let optimizer = Sgd::new(&store, 0.1)?;
/// let scheduler = LinearWithWarmup::new(&optimizer, 1, 10);
/// let (mut optimizer, mut scheduler) = accelerator.prepare((optimizer, scheduler))?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct AcceleratedScheduler<S> {
    shared: Arc<SharedObject<S>>,
    session: Session,
    rule: SchedulerRule,
    /// On the main process, where the schedule has a length and moves with the optimizer.
    length: Option<LengthWatch>,
}

impl<S: LrScheduler> Stateful for SharedObject<S> {
    fn state_dict(&self) -> Result<ObjectState> {
        let values = serde_json::to_value(self.try_lock("state_dict")?.state_dict()?).map_err(Error::other)?;
        Ok(ObjectState { values, ..Default::default() })
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        let state = serde_json::from_value(state.values.clone()).map_err(Error::other)?;
        self.try_lock("load_state_dict")?.load_state_dict(&state)
    }
}

impl<S: LrScheduler> AcceleratedScheduler<S> {
    /// Registers the scheduler with the session.
    pub(crate) fn new(scheduler: S, session: Session, rule: SchedulerRule) -> Self {
        let is_main = session.group.rank() == 0;
        let length = scheduler.num_training_steps().filter(|_| is_main && rule.step_with_optimizer);
        let shared = Arc::new(SharedObject::new("scheduler", scheduler));
        let registered = Arc::downgrade(&shared);
        session.register(Object::Scheduler(registered));
        let prepared = Self { shared, session, rule, length: length.map(LengthWatch::new) };
        if is_main {
            messages::info!("{}", prepared.describe());
        }
        prepared
    }

    /// Moves the schedule if the optimizer has moved.
    ///
    /// # Errors
    /// Those of the scheduler, such as the end of a one-cycle schedule; its optimizer was not prepared.
    pub fn step(&mut self) -> Result<()> {
        let mut scheduler = self.shared.lock();
        if self.rule.step_with_optimizer && !scheduler.handle().is_prepared() {
            let optimizer = scheduler.handle().optimizer_name();
            return Err(OptimError::OptimizerNotPrepared { optimizer }.into());
        }
        let sync_gradients = self.session.gradient_state.sync_gradients();
        // Asking may wait for the device, so only when the answer matters.
        let asks_optimizer = self.rule.step_with_optimizer && sync_gradients;
        let was_skipped = asks_optimizer && scheduler.handle().step_was_skipped();
        let ticks = self.rule.ticks(sync_gradients, was_skipped);
        if ticks == 0 {
            return Ok(());
        }
        let micro_batches = self.micro_batches();
        let ticks = ticks.saturating_mul(micro_batches);
        let from = scheduler.last_epoch();
        for _ in 0..self.capped(&*scheduler, ticks, micro_batches) {
            scheduler.step()?;
        }
        if let Some(length) = &mut self.length {
            let (rule, gradient_state) = (self.rule, &self.session.gradient_state);
            length.moved(ticks, (from, scheduler.last_epoch()), || gradient_state.scheduled_pass(rule));
        }
        Ok(())
    }

    /// One tick for every process may overshoot the end of a schedule by a few; that is no mistake of
    /// the caller's. Where one step is one tick, it is.
    fn capped(&self, scheduler: &S, ticks: usize, micro_batches: usize) -> usize {
        if self.counts_processes() || micro_batches > 1 {
            capped_ticks(ticks, scheduler.last_epoch(), scheduler.total_steps())
        } else {
            ticks
        }
    }

    /// By how many micro-batches a schedule that is written for them moves at this step of the optimizer.
    fn micro_batches(&self) -> usize {
        let gradient_state = &self.session.gradient_state;
        match gradient_state.adjusts_scheduler() && self.rule.step_with_optimizer {
            true => gradient_state.micro_batches(),
            false => 1,
        }
    }

    fn counts_processes(&self) -> bool {
        let SchedulerRule { step_with_optimizer, split_batches, unit, .. } = self.rule;
        step_with_optimizer && !split_batches && unit == SchedulerUnit::Reference
    }

    /// By how many of its steps the schedule moves for one step of the optimizer.
    pub fn ticks_per_step(&self) -> usize {
        let SchedulerRule { num_processes, split_batches, step_with_optimizer, unit } = self.rule;
        ticks_per_step(num_processes, split_batches, step_with_optimizer, unit)
    }

    /// One sentence on what a call of [`step`](Self::step) does to the schedule. `prepare` logs it.
    pub fn describe(&self) -> String {
        let ticks = self.ticks_per_step();
        if !self.rule.step_with_optimizer {
            return "the learning-rate schedule moves one step at every call of scheduler.step(), whatever the \
                    optimizer does"
                .to_string();
        }
        if ticks == 1 {
            return "the learning-rate schedule moves one step with each optimizer step".to_string();
        }
        format!(
            "the learning-rate schedule moves {ticks} steps with each optimizer step, one for every process, so its \
             length is counted as for a single process; SchedulerUnit::OptimizerStep counts optimizer steps"
        )
    }

    /// The learning rates set last, one for each parameter group.
    pub fn get_last_lr(&self) -> Vec<f64> {
        self.shared.lock().get_last_lr()
    }

    /// Everything needed to go on later; see [`LrScheduler::state_dict`].
    ///
    /// # Errors
    /// Those of the scheduler.
    pub fn state_dict(&self) -> Result<SchedulerState> {
        self.shared.lock().state_dict()
    }

    /// Takes over saved state; see [`LrScheduler::load_state_dict`].
    ///
    /// # Errors
    /// Those of the scheduler.
    pub fn load_state_dict(&mut self, state: &SchedulerState) -> Result<()> {
        self.shared.lock().load_state_dict(state)
    }

    /// Your own scheduler (`AcceleratedScheduler.scheduler` of the reference). As long as what this returns lives, the
    /// accelerator's `state_dict` and `load_state_dict` are errors.
    pub fn scheduler(&mut self) -> impl DerefMut<Target = S> + '_ {
        self.shared.lock()
    }

    /// The scheduler as it was before `prepare`, no longer among the accelerator's.
    ///
    /// # Errors
    /// Another thread is just using it through the accelerator; the error gives the prepared one back.
    pub fn into_inner(self) -> Result<S, IntoInnerError<Self>> {
        let Self { shared, session, rule, length } = self;
        Arc::try_unwrap(shared)
            .map(SharedObject::into_inner)
            .map_err(|shared| IntoInnerError::new("scheduler", Self { shared, session, rule, length }))
    }
}

impl<S: fmt::Debug> fmt::Debug for AcceleratedScheduler<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceleratedScheduler")
            .field("scheduler", &*self.shared.lock())
            .field("rule", &self.rule)
            .finish_non_exhaustive()
    }
}
