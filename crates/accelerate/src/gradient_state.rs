//! Where the training loop stands: is this the micro-batch that synchronises, is this the last batch.

use accelerate_core::config::GradientAccumulationPlugin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shared by the accelerator, loaders, optimizers and schedulers of one [`Context`](crate::context::Context).
#[derive(Clone, Debug)]
pub(crate) struct GradientState(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    plugin: GradientAccumulationPlugin,
    sync_gradients: bool,
    /// Loaders being iterated, innermost last.
    active_loaders: Vec<ActiveLoader>,
    next_loader_id: u64,
}

#[derive(Debug)]
struct ActiveLoader {
    id: u64,
    position: LoaderPosition,
}

/// What a loader says about the batch it has just handed out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoaderPosition {
    /// No batch follows on any rank.
    pub(crate) end_of_dataloader: bool,
    /// For every rank, for every row of its batch in this round: does the row count in metrics
    /// (`true`), or does it only fill up the batch (`false`)? Empty when the loader cannot know.
    pub(crate) counted_rows: Vec<Vec<bool>>,
}

impl GradientState {
    pub(crate) fn new(plugin: GradientAccumulationPlugin) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            plugin,
            sync_gradients: true,
            active_loaders: Vec::new(),
            next_loader_id: 0,
        })))
    }

    // The state stays consistent between statements, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn plugin(&self) -> GradientAccumulationPlugin {
        self.lock().plugin.clone()
    }

    pub(crate) fn set_num_steps(&self, num_steps: usize) {
        self.lock().plugin.num_steps = num_steps;
    }

    pub(crate) fn sync_gradients(&self) -> bool {
        self.lock().sync_gradients
    }

    pub(crate) fn set_sync_gradients(&self, sync: bool) {
        self.lock().sync_gradients = sync;
    }

    /// Registers a loader whose iteration begins. It is the innermost until the guard is dropped.
    pub(crate) fn begin_loader(&self) -> LoaderGuard {
        let mut inner = self.lock();
        let id = inner.next_loader_id;
        inner.next_loader_id += 1;
        inner.active_loaders.push(ActiveLoader { id, position: LoaderPosition::default() });
        LoaderGuard { state: self.clone(), id }
    }

    /// The innermost loader's position, if any loader is being iterated.
    pub(crate) fn active_position(&self) -> Option<LoaderPosition> {
        self.lock().active_loaders.last().map(|loader| loader.position.clone())
    }

    /// Is the innermost loader at its last batch? `false` outside of loops.
    pub(crate) fn end_of_dataloader(&self) -> bool {
        self.lock().active_loaders.last().is_some_and(|loader| loader.position.end_of_dataloader)
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
}

impl Drop for LoaderGuard {
    fn drop(&mut self) {
        self.state.lock().active_loaders.retain(|loader| loader.id != self.id);
    }
}
