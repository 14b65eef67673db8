//! The one value that everything prepared shares, in place of global state.

mod engine;
mod gradient_state;
mod join;

pub(crate) use engine::{Engine, ForwardScope, Visit};
pub(crate) use gradient_state::{GradientState, LoaderGuard, LoaderPosition};
pub(crate) use join::{Call, Join, Reduction, Summary};

use crate::error::Result;
use crate::group::Group;
use crate::nn::ParamStore;
use crate::state::PartialState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Device;

/// What an [`Accelerator`](crate::Accelerator) and all it prepared have in common.
#[derive(Clone, Debug)]
pub(crate) struct Session(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) state: PartialState,
    pub(crate) device: Device,
    /// All processes of the job.
    pub(crate) group: Group,
    pub(crate) gradient_state: GradientState,
    /// Replaced as a whole, so that a step borrows it without copying.
    models: Mutex<Arc<[PreparedParameters]>>,
    /// Inside `join_uneven_inputs`.
    join: Mutex<Option<Arc<Join>>>,
}

/// The parameters of a prepared model and what keeps them in step.
#[derive(Clone, Debug)]
pub(crate) struct PreparedParameters {
    pub(crate) store: ParamStore,
    pub(crate) engine: Arc<dyn Engine>,
}

impl std::ops::Deref for Session {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Session {
    pub(crate) fn new(state: PartialState, gradient_state: GradientState) -> Self {
        Self(Arc::new(Inner {
            device: state.device(),
            group: state.group().clone(),
            state,
            gradient_state,
            models: Mutex::default(),
            join: Mutex::new(None),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[PreparedParameters]>> {
        // A shared pointer: whole after every statement, also where another thread panicked.
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The models prepared so far, in order.
    pub(crate) fn models(&self) -> Arc<[PreparedParameters]> {
        self.lock().clone()
    }

    pub(crate) fn register(&self, model: PreparedParameters) {
        let mut models = self.lock();
        *models = models.iter().cloned().chain([model]).collect();
    }

    pub(crate) fn forget_models(&self) {
        let models = std::mem::take(&mut *self.lock());
        models.iter().for_each(|model| model.store.set_of_prepared_model(false));
    }

    /// The `join_uneven_inputs` that is under way.
    pub(crate) fn join(&self) -> Option<Arc<Join>> {
        self.join.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_join(&self, join: Option<Arc<Join>>) {
        *self.join.lock().unwrap_or_else(PoisonError::into_inner) = join;
    }

    /// To be called before gradients are looked at: those that no backward pass has reduced are reduced.
    pub(crate) fn complete_gradients(&self) -> Result<()> {
        self.models().iter().try_for_each(|model| model.engine.complete_gradients())
    }

    /// To be called before parameters are updated: gradients must be complete on every rank.
    pub(crate) fn before_step(&self) -> Result<()> {
        self.models().iter().try_for_each(|model| model.engine.before_step())
    }

    /// One process on the CPU: what tests of single-process behaviour need.
    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub(crate) fn single_process() -> Self {
        let gradient_state = GradientState::new(Default::default(), Default::default()).unwrap();
        Self::new(PartialState::single_process(Device::Cpu), gradient_state)
    }
}
