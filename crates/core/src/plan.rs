//! What `prepare` will do to a model, as a value: printable, serialisable, decided without libtorch.
//!
//! A plan either replicates every parameter and averages gradients in buckets, or shards parameters in [`Unit`]s.

mod activations;
mod axes;
mod collectives;
mod display;
mod estimate;
mod memory;
mod sharded;
mod step_time;

use crate::config::{DistributedDataParallelSettings, FIRST_BUCKET_BYTES, FloatType, OffloadDevice, ShardingStrategy};
use crate::layout::Layout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub use activations::{ActivationBytes, MicroBatch, TransformerShape};
pub use axes::{AxisBytes, UseOfRanks};
pub use collectives::{Collective, Content, Operation};
pub use display::Plans;
pub use estimate::{EstimateDtype, MemoryEstimate, estimate_memory};
pub use memory::{NVME_BLOCKS_BYTES, Phase, PhaseBytes, RankBytes};
pub use sharded::{Unit, plan_sharded};
pub use step_time::{RankSpeed, StepTime, parse_bandwidth, parse_flops};

/// What a plan has to know of a model: its parameters, in the order they were registered.
///
/// ```
/// use accelerate_core::plan::{Inventory, ParameterEntry};
/// let inventory = Inventory {
///     parameters: vec![ParameterEntry::new("weight", &[3, 2], "float32", 4)],
/// };
/// assert_eq!(inventory.total_bytes(), 24);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// One entry per distinct parameter; further names of a tied one are in `ties`.
    pub parameters: Vec<ParameterEntry>,
}

impl Inventory {
    /// Bytes of all parameters together, tied ones once.
    pub fn total_bytes(&self) -> usize {
        self.parameters.iter().map(ParameterEntry::bytes).fold(0, usize::saturating_add)
    }

    /// The same parameters after [`Module::to`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html):
    /// floating-point numbers of another type, everything else as it was.
    ///
    /// ```
    /// use accelerate_core::config::FloatType;
    /// use accelerate_core::plan::{Inventory, ParameterEntry};
    /// let inventory = Inventory {
    ///     parameters: vec![ParameterEntry::new("weight", &[2], "bfloat16", 2), ParameterEntry::new("ids", &[2], "int64", 8)],
    /// };
    /// assert_eq!(inventory.in_type(FloatType::Float32).total_bytes(), 2 * 4 + 2 * 8);
    /// ```
    pub fn in_type(&self, wanted: FloatType) -> Self {
        let mut inventory = self.clone();
        for parameter in inventory.parameters.iter_mut().filter(|parameter| parameter.is_floating_point()) {
            parameter.dtype = wanted.to_string();
            parameter.element_bytes = wanted.element_bytes();
            parameter.original_element_bytes = None;
        }
        inventory
    }
}

/// One parameter of an [`Inventory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterEntry {
    /// Its path, which is its key in a state dict.
    pub name: String,
    /// Its sizes, outermost dimension first; empty for a scalar. Where ranks compute its layer together, those of this rank's slice.
    pub shape: Vec<usize>,
    /// What they are for all of those ranks together, if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_shape: Option<Vec<usize>>,
    /// PyTorch's name of its element type, for example `float32`.
    pub dtype: String,
    /// Bytes of one element.
    pub element_bytes: usize,
    /// Bytes of one element before the model is prepared, where that is another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_element_bytes: Option<usize>,
    /// Whether it gets a gradient.
    pub requires_grad: bool,
    /// Other paths under which the same parameter is used.
    pub ties: Vec<String>,
    /// Whether a run in mixed precision computes with it in its own element type: that of a batch normalisation, whose statistics are
    /// sums over many batches.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_dtype: bool,
    /// Whether its layer computes with FP8 codes and a scale for all of it, so that ranks gather codes in its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_fp8: bool,
}

impl ParameterEntry {
    /// A trainable parameter with one name.
    ///
    /// ```
    /// # use accelerate_core::plan::ParameterEntry;
    /// assert_eq!(ParameterEntry::new("bias", &[5], "float16", 2).bytes(), 10);
    /// ```
    pub fn new(name: &str, shape: &[usize], dtype: &str, element_bytes: usize) -> Self {
        Self {
            name: name.to_owned(),
            shape: shape.to_owned(),
            whole_shape: None,
            dtype: dtype.to_owned(),
            element_bytes,
            original_element_bytes: None,
            requires_grad: true,
            ties: Vec::new(),
            keeps_dtype: false,
            in_fp8: false,
        }
    }

    /// Number of elements; 1 for a scalar.
    ///
    /// ```
    /// # use accelerate_core::plan::ParameterEntry;
    /// assert_eq!(ParameterEntry::new("scale", &[], "float32", 4).num_elements(), 1);
    /// ```
    pub fn num_elements(&self) -> usize {
        self.shape.iter().fold(1, |elements, &size| elements.saturating_mul(size))
    }

    /// Whether its elements are floating-point numbers, of any width.
    ///
    /// ```
    /// # use accelerate_core::plan::ParameterEntry;
    /// assert!(ParameterEntry::new("weight", &[2], "bfloat16", 2).is_floating_point());
    /// assert!(!ParameterEntry::new("ids", &[2], "int64", 8).is_floating_point());
    /// ```
    pub fn is_floating_point(&self) -> bool {
        ["float", "bfloat"].iter().any(|prefix| self.dtype.starts_with(prefix))
    }

    /// Bytes of the full parameter.
    pub fn bytes(&self) -> usize {
        self.num_elements().saturating_mul(self.element_bytes)
    }

    /// The same before the model is prepared.
    fn original_bytes(&self) -> usize {
        self.num_elements().saturating_mul(self.original_element_bytes.unwrap_or(self.element_bytes))
    }
}

/// Where a parameter lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Whole on every rank; gradients are averaged over ranks.
    Replicate,
    /// Whole on every rank and never changed: it gets no gradient.
    Frozen,
    /// In shards, one per rank, as a piece of this unit.
    Shard {
        /// Position in [`Plan::units`].
        unit: usize,
    },
}

/// Gradients that travel together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// Their element type; a bucket has one.
    pub dtype: String,
    /// Positions in the inventory, in registration order.
    pub parameters: Vec<usize>,
    /// Bytes of all of them together.
    pub bytes: usize,
}

/// What happens to each parameter, and how gradients travel.
///
/// ```
/// use accelerate_core::config::DistributedDataParallelSettings;
/// use accelerate_core::plan::{Inventory, ParameterEntry, plan_data_parallel};
/// let inventory = Inventory {
///     parameters: vec![ParameterEntry::new("weight", &[256, 256], "float32", 4)],
/// };
/// let plan = plan_data_parallel(&inventory, &DistributedDataParallelSettings::default(), 2);
/// assert_eq!(plan.buckets.len(), 1);
/// println!("{plan}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Number of ranks the plan is for.
    pub world_size: usize,
    /// How many groups of ranks hold the same shards; they average their gradients. 1 except for hybrid strategies.
    #[serde(default = "one")]
    pub num_replicas: usize,
    /// What each rank keeps only a shard of.
    #[serde(default = "replicated")]
    pub sharding_strategy: ShardingStrategy,
    /// What the plan was made from.
    pub inventory: Inventory,
    /// One entry per parameter of the inventory, in its order.
    pub placements: Vec<Placement>,
    /// Buckets in the order in which their all-reduce is expected to start: gradients become ready from the
    /// last registered parameter to the first. Empty on one rank.
    pub buckets: Vec<Bucket>,
    /// Gradients are views into their buckets, which then take no memory of their own.
    #[serde(default)]
    pub gradient_as_bucket_view: bool,
    /// What is gathered together, in the order of the first parameters. Empty without sharding.
    #[serde(default)]
    pub units: Vec<Unit>,
    /// Where the optimizer's state of units is kept between steps. Folders are each rank's own matter; the plan is the
    /// same on all.
    #[serde(default)]
    pub optimizer_offload: OffloadDevice,
    /// Where shards of units are kept while they are not used.
    #[serde(default)]
    pub params_offload: OffloadDevice,
    /// The most that units take together which are asked for before they are used; 0 if none are.
    #[serde(default)]
    pub bytes_ahead: usize,
    /// What activations take on each rank, from the forward pass to the end of the backward pass; 0 where nobody has said.
    #[serde(default)]
    pub activation_bytes: usize,
}

impl Plan {
    /// Which elements of the parameter at this position of the inventory a rank keeps; ranks are counted among those that hold
    /// one replica together.
    ///
    /// # Panics
    /// The inventory has no such parameter.
    pub fn layout(&self, parameter: usize, rank: usize) -> Layout {
        let full = Layout::full(self.inventory.parameters[parameter].shape.clone());
        let Placement::Shard { unit } = self.placements[parameter] else { return full };
        let unit = &self.units[unit];
        match unit.parameters.iter().position(|&member| member == parameter) {
            Some(member) => full.with_flat(unit.member_shard(member, rank)),
            None => full,
        }
    }
}

fn one() -> usize {
    1
}

/// Of plans that were written before there was a choice.
fn replicated() -> ShardingStrategy {
    ShardingStrategy::NoShard
}

/// Plans plain data parallel: every rank has everything, and gradients are averaged in buckets of at most
/// `bucket_cap_mb`, except for one bucket of 1 MiB.
///
/// ```
/// # use accelerate_core::config::DistributedDataParallelSettings;
/// # use accelerate_core::plan::{Inventory, Placement, ParameterEntry, plan_data_parallel};
/// let mut frozen = ParameterEntry::new("embedding", &[10, 4], "float32", 4);
/// frozen.requires_grad = false;
/// let inventory = Inventory { parameters: vec![frozen] };
/// let plan = plan_data_parallel(&inventory, &DistributedDataParallelSettings::default(), 2);
/// assert_eq!(plan.placements, [Placement::Frozen]);
/// assert!(plan.buckets.is_empty());
/// ```
pub fn plan_data_parallel(inventory: &Inventory, kwargs: &DistributedDataParallelSettings, world_size: usize) -> Plan {
    let placements = inventory
        .parameters
        .iter()
        .map(|parameter| match parameter.requires_grad {
            true => Placement::Replicate,
            false => Placement::Frozen,
        })
        .collect();
    let mut buckets = Vec::new();
    if world_size > 1 {
        buckets = assign_buckets(inventory, &[FIRST_BUCKET_BYTES, kwargs.bucket_cap_bytes()]);
        buckets.reverse();
    }
    Plan {
        world_size,
        num_replicas: one(),
        sharding_strategy: replicated(),
        inventory: inventory.clone(),
        placements,
        buckets,
        gradient_as_bucket_view: kwargs.gradient_as_bucket_view,
        units: Vec::new(),
        optimizer_offload: OffloadDevice::None,
        params_offload: OffloadDevice::None,
        bytes_ahead: 0,
        activation_bytes: 0,
    }
}

/// Deals the parameters that get gradients to buckets, in registration order
/// (`compute_bucket_assignment_by_size` of `c10d::Reducer`, `reducer.cpp`).
///
/// A bucket is closed by the parameter that makes it reach its limit. `limits_bytes` holds the limit of
/// the first bucket, of the second, and so on; the last limit stands for all further ones. Element types
/// have buckets and limits of their own. Buckets come sorted by their first parameter.
///
/// ```
/// # use accelerate_core::plan::{Inventory, ParameterEntry, assign_buckets};
/// let parameters = (0..3).map(|i| ParameterEntry::new(&i.to_string(), &[2], "float32", 4)).collect();
/// let buckets = assign_buckets(&Inventory { parameters }, &[8, 16]);
/// assert_eq!(buckets[0].parameters, [0]);
/// assert_eq!(buckets[1].parameters, [1, 2]);
/// ```
pub fn assign_buckets(inventory: &Inventory, limits_bytes: &[usize]) -> Vec<Bucket> {
    struct Open {
        bucket: Bucket,
        num_closed: usize,
    }
    let mut open: BTreeMap<&str, Open> = BTreeMap::new();
    let mut closed = Vec::new();
    for (position, parameter) in inventory.parameters.iter().enumerate() {
        if !parameter.requires_grad {
            continue;
        }
        let empty = || Bucket { dtype: parameter.dtype.clone(), parameters: Vec::new(), bytes: 0 };
        let current = open.entry(&parameter.dtype).or_insert_with(|| Open { bucket: empty(), num_closed: 0 });
        current.bucket.parameters.push(position);
        current.bucket.bytes = current.bucket.bytes.saturating_add(parameter.bytes());
        let limit = limits_bytes.get(current.num_closed).or(limits_bytes.last());
        if limit.is_some_and(|&limit| current.bucket.bytes >= limit) {
            closed.push(std::mem::replace(&mut current.bucket, empty()));
            current.num_closed += 1;
        }
    }
    closed.extend(open.into_values().map(|open| open.bucket));
    closed.retain(|bucket| !bucket.parameters.is_empty());
    closed.sort_by_key(|bucket| bucket.parameters[0]);
    closed
}
