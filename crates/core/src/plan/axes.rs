//! What the axes of a mesh do to the memory of a model, and what travels along them.

use super::{Operation, ParameterEntry, Plan, RankBytes};
use crate::config::ShardingStrategy;
use crate::mesh::{Axis, Mesh};
use crate::weight_files::format_size;
use serde::Serialize;
use std::fmt;

/// What ranks along an axis share, and what they send each other in a step.
///
/// ```
/// use accelerate_core::config::FullyShardedSettings;
/// use accelerate_core::mesh::{Axis, Mesh};
/// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
/// let inventory = Inventory { parameters: vec![ParameterEntry::new("weight", &[8], "float32", 4)] };
/// let mesh = Mesh::of(4, &[(Axis::DpShard, 4)])?;
/// let plan = plan_sharded(&inventory, &FullyShardedSettings::default(), mesh);
/// let axes = plan.bytes_per_axis(&mesh);
/// assert_eq!((axes[0].held_before, axes[0].held), (128, 32));
/// assert_eq!(axes[0].to_string(), "dp_shard, 4 ranks: 128 B of a model become 32 B on each; each sends 72 B in a step");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AxisBytes {
    /// Several where ranks along them act as along one: those that divide sequences shard parameters together with `dp_shard`.
    pub axes: Vec<Axis>,
    /// Along all of them.
    pub num_ranks: usize,
    /// What ranks along these axes are there for.
    pub use_of_ranks: UseOfRanks,
    /// Bytes of parameters, gradients and what Adam keeps (wherever they are kept) that a rank would hold without these axes and those
    /// above them in the mesh.
    pub held_before: usize,
    /// The same with them.
    pub held: usize,
    /// The least that a rank has to send along them in a step of one micro-batch, in bytes. `None` where activations travel: how many
    /// there are is the batch's matter.
    pub sent: Option<usize>,
}

/// What ranks along an axis are there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UseOfRanks {
    /// Each has other rows, and all of what the others have.
    Replicas,
    /// Each has other rows, and a shard of parameters, gradients or optimizer state.
    Shards,
    /// Each has a part of every sequence.
    Sequences,
    /// Each computes a part of every layer that is divided.
    Layers,
}

impl fmt::Display for AxisBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.axes.iter().map(|axis| axis.name()).collect();
        write!(f, "{}, {} ranks: ", names.join(" x "), self.num_ranks)?;
        let [before, held] = [self.held_before, self.held].map(|bytes| format_size(bytes as u64));
        match self.use_of_ranks {
            UseOfRanks::Replicas => write!(f, "each has {held} of a model")?,
            UseOfRanks::Shards | UseOfRanks::Layers => write!(f, "{before} of a model become {held} on each")?,
            UseOfRanks::Sequences => f.write_str("each has a part of every sequence")?,
        }
        match self.sent {
            Some(bytes) => write!(f, "; each sends {} in a step", format_size(bytes as u64)),
            None => f.write_str("; each sends activations of its batch"),
        }
    }
}

impl Plan {
    /// What each axis of `mesh` along which there are several ranks does, for the mesh that this plan was made for: from the last axis
    /// to the first, so that what one leaves is what the next one divides.
    pub fn bytes_per_axis(&self, mesh: &Mesh) -> Vec<AxisBytes> {
        let several = |axes: &[Axis]| axes.iter().copied().filter(|&axis| mesh.size(axis) > 1).collect::<Vec<_>>();
        let (is_sharded, kept) = (!self.units.is_empty(), self.bytes_per_rank().held());
        let [shard, replicate] = match is_sharded {
            true => [several(Mesh::SHARD), several(&[Axis::DpReplicate])],
            false => [Vec::new(), several(Mesh::GRADIENTS)],
        };
        let undivided = self.bytes_with(ShardingStrategy::NoShard, 1).held();
        let whole = self.inventory.parameters.iter().map(whole_bytes).fold(0, usize::saturating_add);
        let mut rows = Vec::new();
        let mut row = |axes: Vec<Axis>, use_of_ranks, [held_before, held]: [usize; 2], sent| {
            if !axes.is_empty() {
                let num_ranks = axes.iter().map(|&axis| mesh.size(axis)).product();
                rows.push(AxisBytes { axes, num_ranks, use_of_ranks, held_before, held, sent });
            }
        };
        row(several(&[Axis::Tp]), UseOfRanks::Layers, [whole, undivided], None);
        row(several(Mesh::SEQUENCE), UseOfRanks::Sequences, [undivided, undivided], None);
        let [among_shards, among_replicas] = self.sent(!replicate.is_empty());
        row(shard, UseOfRanks::Shards, [undivided, kept], Some(among_shards));
        row(replicate, UseOfRanks::Replicas, [kept, kept], Some(among_replicas));
        rows
    }

    /// What a rank sends to those that have other shards, and to those that have the same. What all ranks have, all of them sum up: it
    /// counts among the latter, if there are any.
    fn sent(&self, has_replicas: bool) -> [usize; 2] {
        let mut sent = [0_usize; 2];
        for collective in self.collectives() {
            let is_among_replicas = has_replicas && collective.operation == Operation::AllReduce;
            let place = &mut sent[usize::from(is_among_replicas)];
            *place = place.saturating_add(collective.sent_bytes());
        }
        sent
    }
}

impl RankBytes {
    /// Of parameters, gradients and what Adam keeps, in memory and elsewhere, between the backward pass and the step.
    fn held(&self) -> usize {
        let Self { parameters, gradients, optimizer_state, on_nvme, .. } = *self;
        [parameters, gradients, optimizer_state, on_nvme].into_iter().fold(0, usize::saturating_add)
    }
}

/// Of a parameter, its gradient, and what Adam keeps for it, before ranks divided its layer.
fn whole_bytes(parameter: &ParameterEntry) -> usize {
    let shape = parameter.whole_shape.as_ref().unwrap_or(&parameter.shape);
    let elements = shape.iter().fold(1, |elements: usize, &size| elements.saturating_mul(size));
    let copies = if parameter.requires_grad { 4 } else { 1 };
    elements.saturating_mul(parameter.element_bytes).saturating_mul(copies)
}
