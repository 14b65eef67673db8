//! Every collective goes through a [`Group`]: it knows the operation's name, number, shape and deadline.

use crate::error::Result;
use tch::Tensor;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Sum over ranks divided by the world size.
    Mean,
    /// Largest value.
    Max,
    /// Smallest value.
    Min,
}

/// Processes that work together. A group of one answers without communication.
#[derive(Clone, Debug)]
pub struct Group {}

impl Group {
    pub(crate) fn single_process() -> Self {
        Self {}
    }
    /// This process's number in the group, from 0.
    pub fn rank(&self) -> usize {
        0
    }
    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        1
    }
    /// Reduces in place over all ranks. Collective.
    pub fn all_reduce(&self, _tensor: &Tensor, _op: ReduceOp) -> Result<()> {
        Ok(())
    }
    /// Overwrites the tensor on every rank with that of rank `source`. Collective.
    pub fn broadcast(&self, _tensor: &Tensor, _source: usize) -> Result<()> {
        Ok(())
    }
    /// Every rank's tensor, in rank order; shapes and dtypes are equal on all ranks. Collective.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        Ok(vec![tensor.f_copy()?])
    }
    /// Returns when every rank has called it. Collective.
    pub fn barrier(&self) -> Result<()> {
        Ok(())
    }
}
