//! The ranks of a job by named axes, and the groups along them.

use crate::error::Result;
use crate::group::Group;
use accelerate_core::mesh::{Axis, Mesh};
use std::sync::{Mutex, PoisonError};

/// A [`Mesh`] with connections along its axes.
#[derive(Debug)]
pub(crate) struct DeviceMesh {
    job: Group,
    shape: Mesh,
    /// Made when they are first asked for.
    along: Mutex<Vec<(Axis, Group)>>,
}

impl DeviceMesh {
    pub(crate) fn new(job: Group, shape: Mesh) -> Self {
        Self { job, shape, along: Mutex::default() }
    }

    /// All ranks.
    pub(crate) fn job(&self) -> &Group {
        &self.job
    }

    pub(crate) fn shape(&self) -> Mesh {
        self.shape
    }

    /// The ranks along an axis: those that differ from this one in their place on it alone. Collective when an axis is first
    /// asked for, unless all ranks are along it.
    pub(crate) fn group(&self, axis: Axis) -> Result<Group> {
        if self.shape.size(axis) == self.job.world_size() {
            return Ok(self.job.clone());
        }
        // Held while ranks connect: they ask in the same order, and a panic leaves the list whole.
        let mut along = self.along.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, group)) = along.iter().find(|(known, _)| *known == axis) {
            return Ok(group.clone());
        }
        let group = self.job.subgroup(&self.shape.ranks_along(axis, self.job.rank()))?;
        along.push((axis, group.clone()));
        Ok(group)
    }
}
