//! The one value that everything prepared shares, in place of global state.

use crate::gradient_state::GradientState;
use crate::group::Group;
use std::sync::Arc;
use tch::Device;

/// What an [`Accelerator`](crate::Accelerator) and all it prepared have in common.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) device: Device,
    /// All processes of the job.
    pub(crate) group: Group,
    pub(crate) gradient_state: GradientState,
}

impl std::ops::Deref for Context {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Context {
    pub(crate) fn new(device: Device, group: Group, gradient_state: GradientState) -> Self {
        Self(Arc::new(Inner { device, group, gradient_state }))
    }

    /// One process on the CPU: what tests of single-process behaviour need.
    #[cfg(test)]
    pub(crate) fn single_process() -> Self {
        Self::new(Device::Cpu, Group::single_process(), GradientState::new(Default::default()))
    }
}
