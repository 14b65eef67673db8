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
    /// Made when they are first asked for, by axes.
    along: Mutex<Vec<(Vec<Axis>, Group)>>,
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

    /// The ranks along these axes: those that differ from this one in their places on them alone. Collective when axes are first
    /// asked for, unless all ranks are along them.
    pub(crate) fn group(&self, axes: &[Axis]) -> Result<Group> {
        if axes.iter().map(|&axis| self.shape.size(axis)).product::<usize>() == self.job.world_size() {
            return Ok(self.job.clone());
        }
        // Axes of one rank change nothing.
        let axes: Vec<Axis> = axes.iter().copied().filter(|&axis| self.shape.size(axis) > 1).collect();
        // Held while ranks connect: they ask in the same order, and a panic leaves the list whole.
        let mut along = self.along.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, group)) = along.iter().find(|(known, _)| *known == axes) {
            return Ok(group.clone());
        }
        let group = self.job.subgroup(&self.shape.ranks_in(&axes, self.job.rank()))?;
        along.push((axes, group.clone()));
        Ok(group)
    }
}
