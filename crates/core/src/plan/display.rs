//! Plans for people.

use super::{Collective, Operation, ParameterEntry, Placement, Plan, RankBytes, Unit};
use crate::config::OffloadDevice;
use crate::files::in_one_line;
use crate::mesh::Mesh;
use crate::names::counted;
use crate::weight_files::format_size;
use std::fmt;
use std::ops::Deref;

/// The plans of several models, and the mesh that they are for: a slice of them that prints as a whole.
///
/// ```
/// use accelerate_core::config::DistributedDataParallelSettings;
/// use accelerate_core::mesh::Mesh;
/// use accelerate_core::plan::{Inventory, Plans, plan_data_parallel};
/// let plan = plan_data_parallel(&Inventory::default(), &DistributedDataParallelSettings::default(), 1);
/// let one = Plans { mesh: Mesh::replicated(1), plans: vec![plan.clone()] };
/// assert_eq!((one.len(), one.to_string()), (1, plan.to_string()));
/// let two = Plans { plans: vec![plan.clone(), plan], ..one };
/// assert!(two.to_string().contains("model 1: plan for 1 ranks"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plans {
    /// All ranks of the job. Those that compute layers together are one rank of a plan.
    pub mesh: Mesh,
    /// By model, in the order in which they were prepared.
    pub plans: Vec<Plan>,
}

impl Deref for Plans {
    type Target = [Plan];

    fn deref(&self) -> &[Plan] {
        &self.plans
    }
}

impl fmt::Display for Plans {
    /// Plan after plan, each with what the axes of the mesh do; several are numbered in the order of the models, from 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, plan) in self.iter().enumerate() {
            if self.len() > 1 {
                write!(f, "model {number}: ")?;
            }
            write!(f, "{plan}{}", plan.along(&self.mesh))?;
        }
        Ok(())
    }
}

/// What each axis of a mesh does, a line each.
struct Along<'a>(&'a Plan, Mesh);

impl fmt::Display for Along<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(plan, mesh) = self;
        let axes = plan.bytes_per_axis(mesh);
        if !axes.is_empty() {
            writeln!(
                f,
                "  mesh of {} ranks: {mesh}; a model is its parameters, gradients and Adam's state",
                mesh.world_size()
            )?;
        }
        axes.iter().try_for_each(|axis| writeln!(f, "    {axis}"))
    }
}

impl fmt::Display for Plan {
    /// Placements, buckets, units, what is offloaded, the collectives of a step, and the memory of each rank.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_head(f)?;
        self.write_placements(f)?;
        for (number, bucket) in self.buckets.iter().enumerate() {
            let bytes = format_size(bucket.bytes as u64);
            let num_gradients = bucket.parameters.len();
            writeln!(f, "  bucket {number}: {num_gradients} gradients of {}, {bytes}", bucket.dtype)?;
        }
        for (number, unit) in self.units.iter().enumerate() {
            writeln!(f, "  unit {number}: {unit}")?;
        }
        let collectives = self.collectives();
        for collective in &collectives {
            writeln!(f, "  {}: {collective}, {}", collective.phase, format_size(collective.bytes as u64))?;
        }
        write_collectives(&collectives, f)?;
        write_memory(&self.bytes_per_rank(), f)
    }
}

impl Plan {
    /// What each axis of `mesh` does to the model and sends, in a line each, the last axis first. Nothing on one rank.
    pub fn along(&self, mesh: &Mesh) -> impl fmt::Display + '_ {
        Along(self, *mesh)
    }

    /// The plan in a few lines, whatever the size of the model: no parameters, equal units in one line, and no memory.
    ///
    /// ```
    /// use accelerate_core::config::{AutoWrapPolicy, FullyShardedSettings};
    /// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
    /// let parameters = (0..24).map(|i| ParameterEntry::new(&format!("h.{i}.w"), &[4], "float32", 4)).collect();
    /// let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    /// let plugin = FullyShardedSettings { auto_wrap_policy, ..Default::default() };
    /// let plan = plan_sharded(&Inventory { parameters }, &plugin, 2);
    /// assert!(plan.summary().to_string().contains("units 0 to 23: h.0 to h.23, each with 1 parameter tensor of float32"));
    /// ```
    pub fn summary(&self) -> impl fmt::Display + '_ {
        Summary(self)
    }

    fn write_head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = format_size(self.inventory.total_bytes() as u64);
        let tensors = counted_tensors(self.inventory.parameters.len());
        let (ranks, how) = (self.world_size, if self.units.is_empty() { "on each" } else { "in all" });
        writeln!(f, "plan for {ranks} ranks: {}, {tensors}, {bytes} {how}", self.sharding_strategy)?;
        let offloads = [("optimizer state", self.optimizer_offload), ("parameters", self.params_offload)];
        for (what, device) in offloads {
            match device {
                OffloadDevice::None => {}
                OffloadDevice::Cpu => writeln!(f, "  {what}: in the host's memory while not in use")?,
                OffloadDevice::Nvme => writeln!(f, "  {what}: on NVMe while not in use")?,
            }
        }
        Ok(())
    }

    fn write_placements(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widest = self.inventory.parameters.iter().map(|entry| entry.name.len()).max();
        for (parameter, placement) in self.inventory.parameters.iter().zip(&self.placements) {
            let placement = match placement {
                Placement::Replicate => "replicate".to_owned(),
                Placement::Frozen => "frozen".to_owned(),
                Placement::Shard { unit } => format!("shard of unit {unit}"),
            };
            let ParameterEntry { name, shape, dtype, ties, .. } = parameter;
            let name = in_one_line(name);
            write!(f, "  {name:width$}  {dtype} {shape:?}  {placement}", width = widest.unwrap_or(0))?;
            match ties.as_slice() {
                [] => writeln!(f)?,
                ties => writeln!(f, "  also {}", in_one_line(&ties.join(", ")))?,
            }
        }
        Ok(())
    }
}

/// A count of tensors, which is not what people mean by the parameters of a model: those are elements.
pub(super) fn counted_tensors(number: usize) -> String {
    counted(number, "parameter tensor")
}

/// How often what is done with how many bytes, and what each rank has to send for it.
fn write_collectives(collectives: &[Collective], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let count = |&operation: &Operation| {
        let bytes = collectives.iter().filter(|collective| collective.operation == operation).map(|own| own.bytes);
        let (count, bytes) = bytes.fold((0, 0_usize), |(count, sum), bytes| (count + 1, sum.saturating_add(bytes)));
        (count > 0).then(|| format!("{count} {operation} of {}", format_size(bytes as u64)))
    };
    let counts: Vec<String> = Operation::ALL.iter().filter_map(count).collect();
    if counts.is_empty() {
        return Ok(());
    }
    let sent = collectives.iter().fold(0, |sum: usize, own| sum.saturating_add(own.sent_bytes()));
    writeln!(f, "  collectives of a step: {}; each rank sends {}", counts.join(", "), format_size(sent as u64))
}

fn write_memory(bytes: &RankBytes, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let components = [
        (bytes.parameters, "parameters"),
        (bytes.gradients, "gradients"),
        (bytes.optimizer_state, "optimizer state (Adam)"),
        (bytes.buckets, "buckets"),
        (bytes.gathered_units, "gathered at once"),
        (bytes.nvme_blocks, "blocks from and to NVMe"),
        (bytes.activations, "activations"),
    ];
    let present = components.into_iter().filter(|&(bytes, _)| bytes > 0);
    let listed: Vec<String> = present.map(|(bytes, what)| format!("{} {what}", format_size(bytes as u64))).collect();
    let (phase, peak) = bytes.peak();
    let peak = format_size(peak as u64);
    write!(f, "  memory of each rank: {}; at most {peak} ({phase})", listed.join(", "))?;
    if bytes.activations == 0 {
        f.write_str(", without activations")?;
    }
    match bytes.on_nvme {
        0 => writeln!(f),
        on_nvme => writeln!(f, "; on NVMe: {}", format_size(on_nvme as u64)),
    }
}

struct Summary<'a>(&'a Plan);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { buckets, units, .. } = self.0;
        self.0.write_head(f)?;
        if let Some(largest) = buckets.iter().map(|bucket| bucket.bytes).max() {
            writeln!(f, "  gradients travel in {} buckets of up to {}", buckets.len(), format_size(largest as u64))?;
        }
        let mut first = 0;
        for run in units.chunk_by(is_alike) {
            match run {
                [start, _, .., end] => writeln!(
                    f,
                    "  units {first} to {}: {} to {}, each with {}",
                    first + run.len() - 1,
                    in_one_line(&start.path),
                    in_one_line(&end.path),
                    start.content()
                )?,
                few => {
                    for (number, unit) in few.iter().enumerate() {
                        writeln!(f, "  unit {}: {unit}", first + number)?;
                    }
                }
            }
            first += run.len();
        }
        write_collectives(&self.0.collectives(), f)
    }
}

/// Whether two units differ in their paths only.
fn is_alike(one: &Unit, other: &Unit) -> bool {
    let kind = |unit: &Unit| (unit.dtype.clone(), unit.requires_grad, unit.keeps_dtype, unit.in_fp8);
    one.offsets == other.offsets && kind(one) == kind(other)
}
