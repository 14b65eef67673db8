//! What travels between ranks in a training step, in the order in which it is asked for.

use super::memory::Phase;
use super::{Placement, Plan};
use crate::config::ShardingStrategy;
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};
use std::fmt;

spelled_enum! {
    /// What ranks do together with a tensor.
    ///
    /// ```
    /// use accelerate_core::plan::Operation;
    /// assert_eq!(Operation::ReduceScatter.to_string(), "reduce-scatter");
    /// ```
    Operation, "collective operation" {
        /// Each rank has a shard, and gets all of it.
        AllGather = "all-gather",
        /// Each rank has all of it, and gets the sum of one shard.
        ReduceScatter = "reduce-scatter",
        /// Each rank has all of it, and gets the sum of all of it.
        AllReduce = "all-reduce",
    }
}

/// What a collective is about.
///
/// ```
/// use accelerate_core::plan::Content;
/// assert_eq!(Content::Unit(3).to_string(), "unit 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Parameters or gradients of the unit with this position in [`Plan::units`].
    Unit(usize),
    /// Gradients of the bucket with this position in [`Plan::buckets`].
    Bucket(usize),
    /// Gradients of all parameters of a divided model that every rank has in full.
    Replicated,
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit(unit) => write!(f, "unit {unit}"),
            Self::Bucket(bucket) => write!(f, "bucket {bucket}"),
            Self::Replicated => f.write_str("replicated parameters"),
        }
    }
}

/// One collective of a training step.
///
/// ```
/// use accelerate_core::plan::{Collective, Content, Operation, Phase};
/// let (phase, operation, content) = (Phase::Backward, Operation::AllReduce, Content::Bucket(0));
/// let collective = Collective { phase, operation, content, num_ranks: 4, bytes: 1000 };
/// assert_eq!(collective.to_string(), "all-reduce bucket 0");
/// assert_eq!(collective.sent_bytes(), 1500); // three quarters of the sum, then three quarters of the result
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// In which it is asked for; without prefetching also when it is waited for.
    pub phase: Phase,
    /// What is done.
    pub operation: Operation,
    /// With what.
    pub content: Content,
    /// Among how many ranks.
    pub num_ranks: usize,
    /// Of the full tensor, padding included: what an all-gather makes, and what a reduction takes from each rank. In the
    /// parameters' own element type; mixed precision makes it less.
    pub bytes: usize,
}

impl Collective {
    /// The least that one rank has to send for it (Thakur et al., "Optimization of Collective Communication Operations in
    /// MPICH", 2005): all of the tensor but its own shard, twice for an all-reduce.
    ///
    /// ```
    /// use accelerate_core::plan::{Collective, Content, Operation, Phase};
    /// let (phase, operation, content) = (Phase::Forward, Operation::AllGather, Content::Unit(0));
    /// assert_eq!(Collective { phase, operation, content, num_ranks: 4, bytes: 1000 }.sent_bytes(), 750);
    /// ```
    pub fn sent_bytes(&self) -> usize {
        let own = self.bytes.div_ceil(self.num_ranks.max(1));
        let once = self.bytes - own;
        if self.operation == Operation::AllReduce { once.saturating_mul(2) } else { once }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.operation, self.content)
    }
}

impl Plan {
    /// The collectives of a training step of one micro-batch, in order, if its forward pass uses units in that of their
    /// first parameters. Empty on one rank. A unit of which the backward pass needs no values is not gathered again, which
    /// nobody can know in advance; ranks compare a few bytes to be sure of each other, and agree on the scales of FP8 codes.
    ///
    /// ```
    /// use accelerate_core::config::FullyShardedSettings;
    /// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
    /// let parameters = vec![ParameterEntry::new("weight", &[8], "float32", 4)];
    /// let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    /// let step: Vec<String> = plan.collectives().iter().map(ToString::to_string).collect();
    /// assert_eq!(step, ["all-gather unit 0", "all-gather unit 0", "reduce-scatter unit 0"]);
    /// ```
    pub fn collectives(&self) -> Vec<Collective> {
        let shard_size = self.shard_size();
        let strategy = self.sharding_strategy;
        let regathers = matches!(strategy, ShardingStrategy::FullShard | ShardingStrategy::HybridShard);
        let mut step = Vec::new();
        let mut add = |phase, operation, content, num_ranks, bytes| {
            if num_ranks > 1 {
                step.push(Collective { phase, operation, content, num_ranks, bytes });
            }
        };
        for unit in 0..self.units.len() {
            add(Phase::Forward, Operation::AllGather, Content::Unit(unit), shard_size, self.gathered_bytes(unit));
        }
        for unit in (0..self.units.len()).rev() {
            let (content, bytes) = (Content::Unit(unit), self.reduced_bytes(unit));
            if regathers {
                add(Phase::Backward, Operation::AllGather, content, shard_size, self.gathered_bytes(unit));
            }
            if self.units[unit].requires_grad {
                add(Phase::Backward, Operation::ReduceScatter, content, shard_size, bytes);
                add(Phase::Backward, Operation::AllReduce, content, self.num_replicas, bytes / shard_size.max(1));
            }
        }
        for (position, bucket) in self.buckets.iter().enumerate() {
            add(Phase::Backward, Operation::AllReduce, Content::Bucket(position), self.world_size, bucket.bytes);
        }
        let placed = self.inventory.parameters.iter().zip(&self.placements);
        let replicated = placed.filter(|(_, placement)| **placement == Placement::Replicate);
        let bytes = replicated.fold(0, |sum: usize, (parameter, _)| sum.saturating_add(parameter.bytes()));
        // Buckets are of these parameters.
        if self.buckets.is_empty() && bytes > 0 {
            add(Phase::Backward, Operation::AllReduce, Content::Replicated, self.world_size, bytes);
        }
        step
    }

    /// How many of the units that a pass will use next, `expected` in this order, may be on their way while it computes with
    /// another: as many as fit into [`bytes_ahead`](Self::bytes_ahead) together, of those that are not here, and always one.
    ///
    /// ```
    /// use accelerate_core::config::{AutoWrapPolicy, FullyShardedSettings};
    /// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
    /// let parameters = [("0.weight", 8), ("1.weight", 2), ("2.weight", 6), ("3.weight", 2)]
    ///     .map(|(name, size)| ParameterEntry::new(name, &[size], "float32", 4)).to_vec();
    /// let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    /// let plugin = FullyShardedSettings { auto_wrap_policy, forward_prefetch: true, ..Default::default() };
    /// let plan = plan_sharded(&Inventory { parameters }, &plugin, 2);
    /// assert_eq!(plan.bytes_ahead, 32); // the largest
    /// assert_eq!(plan.num_ahead(&[1, 2, 3], |_| false), 2);
    /// assert_eq!(plan.num_ahead(&[1, 2, 3], |unit| unit == 1), 3);
    /// ```
    pub fn num_ahead(&self, expected: &[usize], is_here: impl Fn(usize) -> bool) -> usize {
        let mut sum: usize = 0;
        let fits = |&&unit: &&usize| {
            let bytes = if is_here(unit) { 0 } else { self.gathered_bytes(unit) };
            let is_first = sum == 0;
            sum = sum.saturating_add(bytes);
            is_first || sum <= self.bytes_ahead
        };
        expected.iter().take_while(fits).count()
    }
}
