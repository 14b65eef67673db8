//! What a plan takes of each rank's memory, phase by phase, and whether that is there.

use super::{Inventory, ParameterEntry, Placement, Plan, Unit, plan_sharded};
use crate::Result;
use crate::config::{AutoWrapPolicy, FullyShardedSettings, OffloadDevice, ShardingStrategy};
use crate::error::plan::{Alternative, PlanErrorKind as Kind};
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::iter::successors;

spelled_enum! {
    /// A part of a training run in which memory is used in one way.
    ///
    /// ```
    /// use accelerate_core::plan::Phase;
    /// assert_eq!(Phase::Backward.to_string(), "backward");
    /// ```
    Phase, "phase" {
        /// `prepare`: every rank has the whole model, and gives away unit by unit what is not its own.
        Load = "load",
        /// The forward pass.
        Forward = "forward",
        /// The backward pass.
        Backward = "backward",
        /// The optimizer's step.
        Step = "step",
    }
}

/// Memory of one rank while it trains with Adam, in bytes (Rajbhandari et al., "ZeRO", SC 2020, §3).
///
/// It is what outlives single operations: a few MiB of messages on their way come on top, and activations do unless
/// [`Plan::activation_bytes`] says what they take. Element
/// types are those in which parameters are kept; mixed precision makes what is gathered smaller. What is offloaded to the host's memory
/// counts as memory, what is on NVMe does not.
///
/// ```
/// use accelerate_core::config::FullyShardedSettings;
/// use accelerate_core::plan::{Inventory, ParameterEntry, Phase, plan_sharded};
/// let parameters = vec![ParameterEntry::new("weight", &[8], "float32", 4)];
/// let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 4);
/// let bytes = plan.bytes_per_rank();
/// assert_eq!((bytes.parameters, bytes.gradients, bytes.optimizer_state, bytes.largest_unit), (8, 8, 16, 32));
/// assert_eq!(bytes.peak(), (Phase::Backward, 8 + 8 + 16 + 32 + 32)); // the unit and its gradients are unsharded
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankBytes {
    /// Of parameters between steps.
    pub parameters: usize,
    /// Of gradients between the backward pass and the step. With `FULL_SHARD` and `SHARD_GRAD_OP` of a step with one
    /// micro-batch; windows of several add up full gradients, as with `OPTIMIZER_STATE`.
    pub gradients: usize,
    /// Of two averages for every element that is trained, of its own element type: what Adam keeps.
    pub optimizer_state: usize,
    /// Of the largest unit, gathered; 0 where parameters stay unsharded.
    pub largest_unit: usize,
    /// Of all units that are gathered at the same time: the root, the largest module beside it and what is asked for
    /// ahead, or everything with `SHARD_GRAD_OP`; 0 where parameters stay unsharded.
    pub gathered_units: usize,
    /// Of full gradients that wait in the backward pass until those of their unit are complete: the root's, which its
    /// first and its last parameter share, and those of the largest module beside it. 0 without sharding.
    pub unsharded_gradients: usize,
    /// Of the buckets of data parallelism, beside the gradients.
    pub buckets: usize,
    /// The most there is while the whole model is divided, unit by unit.
    pub loading: usize,
    /// Of blocks on their way between memory and NVMe: no more than is on NVMe, and [`NVME_BLOCKS_BYTES`] at most of
    /// parameters and of what Adam keeps each.
    #[serde(default)]
    pub nvme_blocks: usize,
    /// Of shards of parameters and of what Adam keeps that are files on NVMe: on the disk, not in memory.
    #[serde(default)]
    pub on_nvme: usize,
    /// Of activations: [`Plan::activation_bytes`].
    #[serde(default)]
    pub activations: usize,
}

/// The most bytes of one kind (parameters, or what the optimizer keeps) that a rank has on their way between memory and
/// NVMe: 16 blocks of 512 KiB.
pub const NVME_BLOCKS_BYTES: usize = 16 * crate::offload::MAX_BLOCK_BYTES;

/// Memory of one rank in one [`Phase`], in bytes.
///
/// ```
/// use accelerate_core::plan::{Phase, RankBytes};
/// let bytes = RankBytes { parameters: 4, optimizer_state: 8, ..RankBytes::default() };
/// assert_eq!(bytes.in_phase(Phase::Forward).total(), 12);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseBytes {
    /// Of parameters, or shards of them.
    pub parameters: usize,
    /// Of gradients, full ones and shards.
    pub gradients: usize,
    /// Of what Adam keeps.
    pub optimizer_state: usize,
    /// Of gathered units, beside this rank's shards.
    pub gathered_units: usize,
    /// Of the buckets of data parallelism, beside the gradients.
    pub buckets: usize,
    /// Of blocks on their way between memory and NVMe.
    #[serde(default)]
    pub nvme_blocks: usize,
    /// Of activations.
    #[serde(default)]
    pub activations: usize,
}

impl PhaseBytes {
    /// All together.
    pub fn total(&self) -> usize {
        let Self { parameters, gradients, optimizer_state, gathered_units, buckets, nvme_blocks, activations } = *self;
        let all = [parameters, gradients, optimizer_state, gathered_units, buckets, nvme_blocks, activations];
        all.into_iter().fold(0, usize::saturating_add)
    }
}

impl RankBytes {
    /// What is there in one phase. From the first step on, the optimizer's state is there in all but the first.
    ///
    /// | phase | bytes |
    /// |---|---|
    /// | load | `loading`, `buckets`, `nvme_blocks` |
    /// | forward | `parameters`, `optimizer_state`, `buckets`, `nvme_blocks`, `gathered_units`, `activations` |
    /// | backward | the same, `gradients`, `unsharded_gradients` |
    /// | step | `parameters`, `optimizer_state`, `buckets`, `nvme_blocks`, `gradients` |
    ///
    /// ```
    /// use accelerate_core::plan::{Phase, RankBytes};
    /// let bytes = RankBytes { parameters: 4, gradients: 4, optimizer_state: 8, loading: 5, ..RankBytes::default() };
    /// assert_eq!(Phase::ALL.iter().map(|&phase| bytes.in_phase(phase).total()).collect::<Vec<_>>(), [5, 12, 16, 16]);
    /// ```
    pub fn in_phase(&self, phase: Phase) -> PhaseBytes {
        let Self { parameters, gradients, optimizer_state, gathered_units, buckets, nvme_blocks, .. } = *self;
        let Self { unsharded_gradients, loading, activations, .. } = *self;
        let always = PhaseBytes { parameters, optimizer_state, buckets, nvme_blocks, ..PhaseBytes::default() };
        match phase {
            Phase::Load => PhaseBytes { parameters: loading, buckets, nvme_blocks, ..PhaseBytes::default() },
            Phase::Forward => PhaseBytes { gathered_units, activations, ..always },
            Phase::Backward => {
                let gradients = gradients.saturating_add(unsharded_gradients);
                PhaseBytes { gathered_units, gradients, activations, ..always }
            }
            Phase::Step => PhaseBytes { gradients, ..always },
        }
    }

    /// The phase that takes most, the first of equals, and its bytes.
    ///
    /// ```
    /// use accelerate_core::plan::{Phase, RankBytes};
    /// assert_eq!(RankBytes { parameters: 4, loading: 9, ..RankBytes::default() }.peak(), (Phase::Load, 9));
    /// ```
    pub fn peak(&self) -> (Phase, usize) {
        let totals = Phase::ALL.iter().map(|&phase| (phase, self.in_phase(phase).total()));
        totals.rev().max_by_key(|&(_, total)| total).unwrap_or((Phase::Load, 0))
    }
}

/// Bytes of one unit.
struct UnitBytes {
    /// As a model without sharding has it.
    original: usize,
    /// Of all elements, padding included.
    whole: usize,
    /// The same as what is gathered: codes take a byte for each element.
    gathered: usize,
    parameters: usize,
    gradients: usize,
    optimizer_state: usize,
}

impl UnitBytes {
    fn of(unit: &Unit, inventory: &Inventory, strategy: ShardingStrategy, shard_size: usize) -> Self {
        let members = unit.parameters.iter().map(|&position| &inventory.parameters[position]);
        let element_bytes = members.clone().next().map_or(0, |first| first.element_bytes);
        let own = unit.num_elements.div_ceil(shard_size.max(1)).saturating_mul(element_bytes);
        let whole = own.saturating_mul(shard_size);
        let (parameters, gradients) = match strategy {
            ShardingStrategy::OptimizerState | ShardingStrategy::NoShard => (whole, whole),
            ShardingStrategy::OptimizerStateAndGradients => (whole, own),
            ShardingStrategy::FullShard
            | ShardingStrategy::ShardGradOp
            | ShardingStrategy::HybridShard
            | ShardingStrategy::HybridShardZero2 => (own, own),
        };
        let if_trained = |bytes| if unit.requires_grad { bytes } else { 0 };
        Self {
            original: members.map(ParameterEntry::original_bytes).fold(0, usize::saturating_add),
            whole,
            gathered: if unit.in_fp8 { whole / element_bytes.max(1) } else { whole },
            parameters,
            gradients: if_trained(gradients),
            optimizer_state: if_trained(own.saturating_mul(2)),
        }
    }
}

/// Ranks beyond which no plan is sought that fits.
const MOST_RANKS: usize = 1 << 16;

impl Plan {
    /// What the plan takes on each rank.
    pub fn bytes_per_rank(&self) -> RankBytes {
        self.bytes_with(self.sharding_strategy, self.shard_size())
    }

    /// Of a whole unit as it is gathered, padding included.
    pub(super) fn gathered_bytes(&self, unit: usize) -> usize {
        self.unit_bytes(unit).gathered
    }

    /// Of the gradients of a whole unit, padding included.
    pub(super) fn reduced_bytes(&self, unit: usize) -> usize {
        self.unit_bytes(unit).whole
    }

    fn unit_bytes(&self, unit: usize) -> UnitBytes {
        UnitBytes::of(&self.units[unit], &self.inventory, self.sharding_strategy, self.shard_size())
    }

    /// Among how many ranks units are divided.
    pub(super) fn shard_size(&self) -> usize {
        self.world_size / self.num_replicas.max(1)
    }

    /// The same if the same units were kept by another strategy, divided among another number of ranks.
    pub(super) fn bytes_with(&self, strategy: ShardingStrategy, shard_size: usize) -> RankBytes {
        let mut bytes = self.replicated_bytes();
        // Gathered and trained bytes of each module: frozen parameters of one are a unit of their own.
        let mut modules: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        let originals = self.inventory.parameters.iter().map(ParameterEntry::original_bytes);
        let mut undivided = originals.fold(0, usize::saturating_add);
        let [are_params_away, is_state_away] =
            [self.params_offload, self.optimizer_offload].map(|device| device == OffloadDevice::Nvme);
        let mut params_on_nvme = 0;
        // Optimizers offload what they keep for parameters that are whole, too.
        let mut state_on_nvme = if is_state_away { std::mem::take(&mut bytes.optimizer_state) } else { 0 };
        bytes.loading = undivided;
        for unit in &self.units {
            let UnitBytes { original, whole, gathered, parameters, gradients, optimizer_state } =
                UnitBytes::of(unit, &self.inventory, strategy, shard_size);
            // A unit's shards are made while it is still there in full, in memory wherever they go then.
            let with_parts = undivided.saturating_add(bytes.parameters).saturating_add(parameters);
            bytes.loading = bytes.loading.max(with_parts);
            undivided = undivided.saturating_sub(original);
            add(if are_params_away { &mut params_on_nvme } else { &mut bytes.parameters }, parameters);
            add(if is_state_away { &mut state_on_nvme } else { &mut bytes.optimizer_state }, optimizer_state);
            add(&mut bytes.gradients, gradients);
            // What is on the disk has to be read to be used, also by a rank that has all of it.
            let is_here = parameters == whole && gathered == whole && !are_params_away;
            let gathered = if is_here { 0 } else { gathered };
            bytes.largest_unit = bytes.largest_unit.max(gathered);
            let of_module = modules.entry(&unit.path).or_default();
            add(&mut of_module.0, gathered);
            // One rank has nobody to reduce with: what arrives is the gradient.
            add(&mut of_module.1, if unit.requires_grad && shard_size > 1 { whole } else { 0 });
        }
        let root = modules.remove("").unwrap_or_default();
        let most = |bytes_of: fn(&(usize, usize)) -> usize| modules.values().map(bytes_of).max().unwrap_or(0);
        bytes.unsharded_gradients = root.1.saturating_add(most(|module| module.1));
        let all = modules.values().fold(0, |sum: usize, module| sum.saturating_add(module.0));
        let beside_root = match strategy {
            ShardingStrategy::ShardGradOp | ShardingStrategy::HybridShardZero2 => all,
            _ => most(|module| module.0).saturating_add(self.bytes_ahead).min(all),
        };
        bytes.gathered_units = root.0.saturating_add(beside_root);
        bytes.on_nvme = params_on_nvme.saturating_add(state_on_nvme);
        bytes.activations = self.activation_bytes;
        // Each of the two has blocks of its own.
        bytes.nvme_blocks = params_on_nvme.min(NVME_BLOCKS_BYTES) + state_on_nvme.min(NVME_BLOCKS_BYTES);
        bytes
    }

    /// Of the parameters that are whole on every rank.
    fn replicated_bytes(&self) -> RankBytes {
        let mut bytes = RankBytes::default();
        for (parameter, placement) in self.inventory.parameters.iter().zip(&self.placements) {
            let whole = parameter.bytes();
            match placement {
                Placement::Replicate => {
                    add(&mut bytes.parameters, whole);
                    add(&mut bytes.gradients, whole);
                    add(&mut bytes.optimizer_state, whole.saturating_mul(2));
                }
                Placement::Frozen => add(&mut bytes.parameters, whole),
                Placement::Shard { .. } => {}
            }
        }
        if !self.gradient_as_bucket_view {
            self.buckets.iter().for_each(|bucket| add(&mut bytes.buckets, bucket.bytes));
        }
        bytes
    }

    /// Checks that every phase fits into `available_bytes` on each rank. Unless [`activation_bytes`](Self::activation_bytes)
    /// says what activations take, that has to be subtracted from them first.
    ///
    /// # Errors
    ///
    /// [`Error::is_plan`](crate::Error::is_plan): says what is needed and when, what is largest, and which other plans fit:
    /// more ranks, a strategy that keeps less, smaller units.
    ///
    /// ```
    /// use accelerate_core::config::FullyShardedSettings;
    /// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
    /// let parameters = vec![ParameterEntry::new("0.weight", &[1000], "float32", 4)];
    /// let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    /// plan.check_fits(16_000)?;
    /// let error = plan.check_fits(15_000).unwrap_err();
    /// assert!(error.is_plan() && error.to_string().contains("FULL_SHARD on 4 ranks"), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn check_fits(&self, available_bytes: u64) -> Result<()> {
        let (phase, needed) = self.bytes_per_rank().peak();
        if needed as u64 <= available_bytes {
            return Ok(());
        }
        let (what, name, largest) = self.largest();
        Err(Kind::DoesNotFit {
            strategy: self.sharding_strategy,
            world_size: self.world_size,
            phase,
            needed_bytes: needed as u64,
            available_bytes,
            activation_bytes: self.activation_bytes as u64,
            largest: (what, name.to_owned(), largest as u64),
            alternatives: self.alternatives(available_bytes),
        }
        .into())
    }

    /// What is largest of what is used together: what it is, its name and its bytes.
    fn largest(&self) -> (&'static str, &str, usize) {
        let positions = self.units.iter().enumerate();
        let units = positions.map(|(position, unit)| ("unit", unit.shown_path(), self.gathered_bytes(position)));
        let parameters =
            self.inventory.parameters.iter().map(|entry| ("parameter", entry.name.as_str(), entry.bytes()));
        let largest = if self.units.is_empty() {
            parameters.max_by_key(|&(.., bytes)| bytes)
        } else {
            units.max_by_key(|&(.., bytes)| bytes)
        };
        largest.unwrap_or(("unit", "(root)", 0))
    }

    /// Plans of the same model that fit, the nearest first.
    fn alternatives(&self, available_bytes: u64) -> Vec<Alternative> {
        let full = ShardingStrategy::FullShard;
        let own = match self.sharding_strategy {
            // Groups of ranks hold the same, and need not.
            ShardingStrategy::HybridShard => full,
            ShardingStrategy::HybridShardZero2 => ShardingStrategy::ShardGradOp,
            own => own,
        };
        let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
        let plugin = FullyShardedSettings { auto_wrap_policy, ..Default::default() };
        let by_block = Plan {
            optimizer_offload: self.optimizer_offload,
            params_offload: self.params_offload,
            activation_bytes: self.activation_bytes,
            ..plan_sharded(&self.inventory, &plugin, self.world_size)
        };
        let mut candidates = vec![(&by_block, full, self.world_size.max(2))];
        if !self.units.is_empty() {
            candidates.insert(0, (&by_block, own, self.world_size));
            candidates.insert(0, (self, own, self.world_size));
        }
        let mut found = Vec::new();
        for (plan, strategy, least_ranks) in candidates {
            let has_blocks = plan.units.iter().zip(&self.units).any(|(new, old)| new.path != old.path)
                || plan.units.len() != self.units.len();
            let numbers = successors(Some(least_ranks), |number| number.checked_mul(2));
            let fitting = numbers.take_while(|&number| number <= MOST_RANKS).find_map(|world_size| {
                let bytes = plan.bytes_with(strategy, world_size).peak().1 as u64;
                let alternative = Alternative { strategy, world_size, has_blocks, bytes };
                (bytes <= available_bytes).then_some(alternative)
            });
            found.extend(fitting.filter(|alternative| !found.contains(alternative)));
        }
        found
    }
}

fn add(sum: &mut usize, bytes: usize) {
    *sum = sum.saturating_add(bytes);
}
