//! The one value behind an accelerator, which everything that it prepares shares, in place of global state: who this process
//! is and how it reaches the others, where accumulation and loops stand, and what was prepared.
//!
//! Two sessions in one process do not know of each other.

mod elsewhere;
mod engine;
mod gradient_state;
mod join;
mod left_out;
mod mesh;
mod registry;
mod scaling;

pub(crate) use elsewhere::{StateReader, StateReaders};
pub(crate) use engine::{Concerns, Engine, ForwardScope, Takeover, Visit};
pub(crate) use gradient_state::{GradientState, LoaderGuard, LoaderPosition, ShortStep};
pub(crate) use join::{Call, Join, Pass, Summary};
pub(crate) use left_out::{AllLeftOut, left_out_of, note_left_out};
pub(crate) use mesh::DeviceMesh;
pub(crate) use registry::{Object, Objects, PreparedOptimizer, PreparedParameters, check_same_objects};
pub use registry::{ObjectState, Stateful};
pub(crate) use scaling::Scaling;

use crate::error::Result;
use crate::group::Group;
use crate::state::PartialState;
use accelerate_core::mesh::Mesh;
use registry::Registry;
use std::sync::{Arc, Mutex, PoisonError};
use tch::Device;

/// What an [`Accelerator`](crate::Accelerator) and all that it prepared have in common. Clones are the same session.
#[derive(Clone, Debug)]
pub(crate) struct Session(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) state: PartialState,
    pub(crate) device: Device,
    /// All processes of the job.
    pub(crate) group: Group,
    /// The same processes, by what they divide a model along.
    pub(crate) mesh: DeviceMesh,
    pub(crate) gradient_state: GradientState,
    registry: Registry,
    /// Inside `join_uneven_inputs`.
    join: Mutex<Option<Arc<Join>>>,
}

impl std::ops::Deref for Session {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Session {
    /// A session with nothing prepared, for the processes of `state`, laid out as `mesh`.
    pub(crate) fn new(state: PartialState, mesh: Mesh, gradient_state: GradientState) -> Self {
        Self(Arc::new(Inner {
            device: state.device(),
            group: state.group().clone(),
            mesh: DeviceMesh::new(state.group().clone(), mesh),
            gradient_state: gradient_state.told_by(state.status()),
            state,
            registry: Registry::default(),
            join: Mutex::new(None),
        }))
    }

    /// What was prepared so far, and what the program still has of it, in order.
    pub(crate) fn objects(&self) -> Objects {
        self.registry.objects()
    }

    pub(crate) fn register(&self, object: Object) {
        self.registry.add(object);
    }

    /// Forgets everything prepared so far, and begins to count micro-batches anew.
    pub(crate) fn clear(&self) {
        self.registry.clear().models().for_each(|model| model.release());
        self.gradient_state.restart();
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
        self.objects().models().try_for_each(|model| model.engine.complete_gradients())
    }

    /// Drops those gradients of parameters that a call `concerns`, and that ranks have not reduced yet.
    pub(crate) fn drop_unreduced(&self, concerns: Concerns<'_>) -> Result<()> {
        self.objects().models().try_for_each(|model| model.engine.drop_unreduced(concerns))
    }

    /// To be called before parameters are updated: gradients must be complete on every rank.
    pub(crate) fn before_step(&self) -> Result<()> {
        self.objects().models().try_for_each(|model| {
            model.engine.before_step()?;
            model.scaling.as_ref().map_or(Ok(()), |scaling| scaling.before_step())
        })
    }

    /// To be called before the state of the run is saved. Collective.
    pub(crate) fn before_save(&self) -> Result<()> {
        self.objects().models().try_for_each(|model| model.engine.before_save())
    }

    /// One process on the CPU: what tests of single-process behaviour need.
    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub(crate) fn single_process() -> Self {
        let gradient_state = GradientState::new(Default::default(), Default::default()).unwrap();
        Self::new(PartialState::single_process(Device::Cpu), Mesh::replicated(1), gradient_state)
    }
}
