//! Where the training loop stands: is this the micro-batch that synchronises, is this the last batch.

use crate::error::Result;
use crate::status::Status;
use accelerate_core::accumulation::{Decision, PartialWindow, Window, WindowState};
use accelerate_core::config::GradientAccumulationSettings;
use accelerate_core::schedule::{ScheduledPass, SchedulerRule, ticks_per_step};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shared by the accelerator, loaders, optimizers and schedulers of one [`Session`](super::Session).
#[derive(Clone, Debug)]
pub(crate) struct GradientState {
    inner: Arc<Mutex<Inner>>,
    /// Tells others how far the loop is.
    status: Status,
}

#[derive(Debug)]
struct Inner {
    window: Window,
    sync_gradients: bool,
    /// How to treat the gradients of the micro-batch at hand; `None` outside of `accumulate`.
    decision: Option<Decision>,
    /// Loaders being iterated, innermost last.
    active_loaders: Vec<ActiveLoader>,
    next_loader_id: u64,
    /// What holds in place of the loaders' own setting, inside `join_uneven_inputs`.
    even_batches: Option<bool>,
    /// Backward passes outside of `accumulate` since the last step of an optimizer.
    passes_outside: usize,
    /// Steps that take fewer passes than their losses were divided by are told of once.
    was_told_of_short_steps: bool,
}

/// An optimizer steps outside of `accumulate` before as many backward passes as its losses were divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShortStep {
    pub(crate) num_passes: usize,
    pub(crate) num_steps: usize,
}

#[derive(Debug)]
struct ActiveLoader {
    id: u64,
    /// Batches of a whole pass on this process, if that is known.
    num_batches: Option<usize>,
    position: LoaderPosition,
}

/// What a loader says about the batch it has just handed out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoaderPosition {
    /// No batch follows on any rank.
    pub(crate) end_of_dataloader: bool,
    /// For every rank, for every row of its batch in this round: does the row count in metrics
    /// (`true`), or does it only fill up the batch (`false`)? Empty when the loader cannot know.
    pub(crate) counted_rows: Vec<Vec<bool>>,
}

/// What a backward pass has to do to its loss and to what is accumulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardScaling {
    pub(crate) loss_scale: f64,
    pub(crate) rescale_accumulated: Option<f64>,
}

impl GradientState {
    pub(crate) fn new(plugin: GradientAccumulationSettings, partial_window: PartialWindow) -> Result<Self> {
        Ok(Self::of(Window::new(plugin)?.partial_window(partial_window)))
    }

    fn of(window: Window) -> Self {
        let inner = Inner {
            window,
            sync_gradients: true,
            decision: None,
            active_loaders: Vec::new(),
            next_loader_id: 0,
            even_batches: None,
            passes_outside: 0,
            was_told_of_short_steps: false,
        };
        Self { inner: Arc::new(Mutex::new(inner)), status: Status::default() }
    }

    /// The same, which tells others of the loop's progress.
    pub(crate) fn told_by(self, status: &Status) -> Self {
        Self { inner: self.inner, status: status.clone() }
    }

    // The state stays consistent between statements, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that accumulates in the same way, at the beginning of a window and outside of all loops.
    pub(crate) fn anew(&self) -> Self {
        let mut window = self.lock().window.clone();
        window.reset();
        Self::of(window)
    }

    /// What passes that begin now use in place of their loaders' `even_batches`.
    pub(crate) fn even_batches(&self) -> Option<bool> {
        self.lock().even_batches
    }

    /// Sets [`GradientState::even_batches`]; returns what held before.
    pub(crate) fn set_even_batches(&self, even_batches: Option<bool>) -> Option<bool> {
        std::mem::replace(&mut self.lock().even_batches, even_batches)
    }

    /// Micro-batches whose gradients the coming step of the optimizer takes; outside of `accumulate` it is one.
    pub(crate) fn micro_batches(&self) -> usize {
        self.lock().decision.map_or(1, |decision| decision.micro_batches)
    }

    /// How gradients are accumulated.
    pub(crate) fn plugin(&self) -> GradientAccumulationSettings {
        self.lock().window.plugin().clone()
    }

    /// Does a schedule move by micro-batches?
    pub(crate) fn adjusts_scheduler(&self) -> bool {
        self.lock().window.plugin().adjust_scheduler == Some(true)
    }

    /// What a whole pass over the innermost loader is for a scheduler with this rule, if its length is known.
    pub(crate) fn scheduled_pass(&self, rule: SchedulerRule) -> Option<ScheduledPass> {
        let inner = self.lock();
        let num_batches = inner.active_loaders.last()?.num_batches?;
        let SchedulerRule { num_processes, split_batches, step_with_optimizer, unit } = rule;
        let ticks_per_step = ticks_per_step(num_processes, split_batches, step_with_optimizer, unit);
        let plugin = inner.window.plugin();
        // Outside of `accumulate` every batch is a step.
        let gradient_accumulation_steps = inner.decision.map_or(1, |_| plugin.num_steps);
        let adjust_scheduler = plugin.adjust_scheduler == Some(true);
        Some(ScheduledPass {
            num_batches,
            gradient_accumulation_steps,
            num_processes,
            ticks_per_step,
            adjust_scheduler,
        })
    }

    /// Where the accumulation window stands.
    pub(crate) fn window_state(&self) -> WindowState {
        self.lock().window.state()
    }

    /// Goes on where another rank's window stands.
    pub(crate) fn restore_window(&self, state: WindowState) {
        self.lock().window.restore(state);
    }

    /// The factor that the next backward pass will apply to what is accumulated, and whether gradients are complete
    /// after it.
    pub(crate) fn reduction_to_come(&self) -> (f64, bool) {
        let decision = self.lock().decision;
        decision.map_or((1.0, true), |decision| (decision.rescale_accumulated.unwrap_or(1.0), decision.sync))
    }

    pub(crate) fn num_steps(&self) -> usize {
        self.lock().window.plugin().num_steps
    }

    pub(crate) fn set_num_steps(&self, num_steps: usize) -> Result<()> {
        Ok(self.lock().window.set_num_steps(num_steps)?)
    }

    /// Begins counting micro-batches anew.
    pub(crate) fn restart(&self) {
        let mut inner = self.lock();
        inner.window.reset();
        inner.sync_gradients = true;
        inner.decision = None;
    }

    pub(crate) fn sync_gradients(&self) -> bool {
        self.lock().sync_gradients
    }

    pub(crate) fn set_sync_gradients(&self, sync: bool) {
        self.lock().sync_gradients = sync;
    }

    /// Takes in a micro-batch; the decision holds until the next one.
    pub(crate) fn begin_micro_batch(&self) -> Decision {
        let mut inner = self.lock();
        let end = inner.active_loaders.last().is_some_and(|loader| loader.position.end_of_dataloader);
        let decision = inner.window.advance(end);
        inner.sync_gradients = decision.sync;
        inner.decision = Some(decision);
        decision
    }

    /// The scaling of the backward pass that begins. What is accumulated is rescaled by the first one of
    /// a micro-batch only.
    pub(crate) fn begin_backward(&self) -> BackwardScaling {
        let mut inner = self.lock();
        let num_steps = inner.window.plugin().num_steps as f64;
        let inner = &mut *inner;
        match &mut inner.decision {
            Some(decision) => BackwardScaling {
                loss_scale: decision.loss_scale,
                rescale_accumulated: decision.rescale_accumulated.take(),
            },
            // As the reference: the division is by the number of steps, whether or not `accumulate` is used.
            None => {
                inner.passes_outside += 1;
                BackwardScaling { loss_scale: 1.0 / num_steps, rescale_accumulated: None }
            }
        }
    }

    /// Takes note of a step of an optimizer; the first one that is too short.
    pub(crate) fn optimizer_steps(&self) -> Option<ShortStep> {
        let mut inner = self.lock();
        let num_passes = std::mem::take(&mut inner.passes_outside);
        let num_steps = inner.window.plugin().num_steps;
        // A second optimizer may step after the same passes.
        let is_short = 0 < num_passes && num_passes < num_steps;
        let is_first = is_short && !std::mem::replace(&mut inner.was_told_of_short_steps, true);
        is_first.then_some(ShortStep { num_passes, num_steps })
    }

    /// An optimizer has taken so many steps.
    pub(crate) fn optimizer_has_stepped(&self, num_steps: usize) {
        self.status.stepped(num_steps);
    }

    /// Registers a loader whose iteration begins, and which has so many batches if that is known. It is the innermost until the
    /// guard is dropped.
    pub(crate) fn begin_loader(&self, num_batches: Option<usize>) -> LoaderGuard {
        let mut inner = self.lock();
        let id = inner.next_loader_id;
        inner.next_loader_id += 1;
        inner.active_loaders.push(ActiveLoader { id, num_batches, position: LoaderPosition::default() });
        LoaderGuard { state: self.clone(), id }
    }

    /// Is the innermost loader at its last batch? `false` outside of loops.
    pub(crate) fn end_of_dataloader(&self) -> bool {
        self.lock().active_loaders.last().is_some_and(|loader| loader.position.end_of_dataloader)
    }

    /// The innermost loader's position, if any loader is being iterated.
    pub(crate) fn active_position(&self) -> Option<LoaderPosition> {
        self.lock().active_loaders.last().map(|loader| loader.position.clone())
    }
}

/// Ends a loader's registration when the iterator goes away, also by `break`, `?` or a panic.
#[derive(Debug)]
pub(crate) struct LoaderGuard {
    state: GradientState,
    id: u64,
}

impl LoaderGuard {
    /// To be called right before a batch is handed to the user.
    pub(crate) fn publish(&self, position: LoaderPosition) {
        let mut inner = self.state.lock();
        if let Some(loader) = inner.active_loaders.iter_mut().find(|loader| loader.id == self.id) {
            loader.position = position;
        }
    }

    /// So many samples were handed out to all ranks.
    pub(crate) fn handed_out(&self, num_samples: u64) {
        self.state.status.handed_out(num_samples);
    }
}

impl Drop for LoaderGuard {
    fn drop(&mut self) {
        self.state.lock().active_loaders.retain(|loader| loader.id != self.id);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn state(num_steps: usize) -> GradientState {
        let plugin = GradientAccumulationSettings { num_steps, ..Default::default() };
        GradientState::new(plugin, PartialWindow::default()).unwrap()
    }

    #[test]
    fn the_innermost_loader_tells_the_position() {
        let state = state(1);
        assert_eq!(state.active_position(), None);
        let outer = state.begin_loader(None);
        outer.publish(LoaderPosition { end_of_dataloader: true, ..Default::default() });
        {
            let _inner = state.begin_loader(None);
            assert!(!state.active_position().unwrap().end_of_dataloader);
        }
        assert!(state.active_position().unwrap().end_of_dataloader);
        drop(outer);
        assert_eq!(state.active_position(), None);
    }

    #[test]
    fn a_step_that_takes_fewer_passes_than_losses_were_divided_by_is_told_of_once() {
        let of_passes = |num_steps, num_passes| {
            let state = state(num_steps);
            for _ in 0..num_passes {
                let _ = state.begin_backward();
            }
            (state.optimizer_steps(), state)
        };
        assert_eq!(of_passes(1, 1).0, None);
        assert_eq!(of_passes(4, 4).0, None, "a loop that accumulates by itself");
        assert_eq!(of_passes(4, 0).0, None, "a second optimizer");
        let (told, state) = of_passes(4, 1);
        assert_eq!(told, Some(ShortStep { num_passes: 1, num_steps: 4 }));
        let _ = state.begin_backward();
        assert_eq!(state.optimizer_steps(), None);
    }

    #[test]
    fn a_window_cut_short_rescales_once() {
        let state = state(4);
        let loader = state.begin_loader(None);
        assert!(!state.begin_micro_batch().sync);
        assert_eq!(state.begin_backward().loss_scale, 0.25);
        loader.publish(LoaderPosition { end_of_dataloader: true, ..Default::default() });
        assert!(state.begin_micro_batch().sync && state.sync_gradients());
        let scaling = state.begin_backward();
        assert_eq!(scaling, BackwardScaling { loss_scale: 0.5, rescale_accumulated: Some(2.0) });
        assert_eq!(state.begin_backward().rescale_accumulated, None);
    }
}
