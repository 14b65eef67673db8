//! Parameters in shards: which are gathered together, and which elements each rank keeps.

use super::display::counted_tensors;
use super::{Inventory, ParameterEntry, Placement, Plan};
use crate::Result;
use crate::config::{
    AutoWrapPolicy, BackwardPrefetch, FloatType, FullyShardedSettings, MixedPrecision, OffloadDevice, OffloadTarget,
    ShardingStrategy,
};
use crate::error::config::ConfigErrorKind;
use crate::files::in_one_line;
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// Parameters that are gathered in one message.
///
/// Their elements stand one behind the other, padded at the end so that every rank keeps as many (FlatParameter of
/// Zhao et al., "PyTorch FSDP", arXiv 2304.11277). A parameter's elements may lie on several ranks, or on none but one.
///
/// ```
/// use accelerate_core::config::FullyShardedSettings;
/// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
/// let parameters = vec![
///     ParameterEntry::new("weight", &[3, 2], "float32", 4),
///     ParameterEntry::new("bias", &[3], "float32", 4),
/// ];
/// let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
/// let unit = &plan.units[0];
/// assert_eq!((unit.num_elements, unit.shard_elements), (9, 5));
/// assert_eq!(unit.member_shard(0, 1), 5..6); // the weight's last element is on rank 1
/// assert_eq!(unit.member_shard(1, 1), 0..3); // so is the whole bias
/// assert_eq!(plan.layout(1, 0).to_string(), "elements 0..0 of [3]");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    /// The module that is the unit; empty for what belongs to no other.
    pub path: String,
    /// The element type of all its parameters.
    pub dtype: String,
    /// Whether its parameters get gradients; all or none do.
    pub requires_grad: bool,
    /// Whether they are gathered and reduced in their own element type, also in mixed precision; all or none are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_dtype: bool,
    /// Whether they are gathered as FP8 codes; all or none are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_fp8: bool,
    /// Positions in the inventory, in registration order.
    pub parameters: Vec<usize>,
    /// Where each of them begins, and at the end the number of elements.
    pub offsets: Vec<usize>,
    /// Elements of all of them.
    pub num_elements: usize,
    /// Elements that each rank keeps, padding included.
    pub shard_elements: usize,
}

/// What the parameters of a unit have in common.
#[derive(PartialEq, Eq)]
struct Key {
    path: String,
    dtype: String,
    requires_grad: bool,
    keeps_dtype: bool,
    in_fp8: bool,
}

impl Unit {
    fn new(
        Key { path, dtype, requires_grad, keeps_dtype, in_fp8 }: Key,
        parameters: Vec<usize>,
        inventory: &Inventory,
        shard_size: usize,
    ) -> Self {
        let mut offsets = vec![0];
        let mut num_elements: usize = 0;
        for &position in &parameters {
            num_elements = num_elements.saturating_add(inventory.parameters[position].num_elements());
            offsets.push(num_elements);
        }
        let shard_elements = num_elements.div_ceil(shard_size);
        Self { path, dtype, requires_grad, keeps_dtype, in_fp8, parameters, offsets, num_elements, shard_elements }
    }

    /// What people read in the place of its path.
    pub(super) fn shown_path(&self) -> &str {
        if self.path.is_empty() { "(root)" } else { &self.path }
    }

    /// What is in it, for people.
    pub(super) fn content(&self) -> String {
        let frozen = if self.requires_grad { "" } else { ", frozen" };
        let (tensors, elements, own) = (counted_tensors(self.parameters.len()), self.num_elements, self.shard_elements);
        let kept = if self.keeps_dtype { " in any precision" } else { "" };
        let gathered = if self.in_fp8 { " gathered as FP8 codes" } else { "" };
        format!("{tensors} of {}{kept}{gathered}{frozen}, {elements} elements, {own} on each rank", self.dtype)
    }

    /// Elements of the unit that rank `rank` keeps, without padding.
    pub fn shard_of(&self, rank: usize) -> Range<usize> {
        let at = |rank: usize| rank.saturating_mul(self.shard_elements).min(self.num_elements);
        at(rank)..at(rank + 1)
    }

    /// Elements of the unit's `member`-th parameter that rank `rank` keeps, counted from the parameter's first; empty if
    /// there are none.
    pub fn member_shard(&self, member: usize, rank: usize) -> Range<usize> {
        let (start, end) = (self.offsets[member], self.offsets[member + 1]);
        let shard = self.shard_of(rank);
        let (from, to) = (shard.start.clamp(start, end), shard.end.clamp(start, end));
        from - start..to - start
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", in_one_line(self.shown_path()), self.content())
    }
}

/// Plans full sharding: every parameter in a unit, every unit in equal shards on the ranks of each row of `mesh`; a number is
/// that of ranks in a single row.
///
/// Parameters of different element types, frozen ones, those that keep their element type in mixed precision, and those that are gathered
/// as FP8 codes, have units of their own. A tied parameter that several units
/// use belongs to the root unit.
///
/// ```
/// use accelerate_core::config::{AutoWrapPolicy, FullyShardedSettings};
/// use accelerate_core::plan::{Inventory, ParameterEntry, plan_sharded};
/// let parameters = ["embed.weight", "layers.0.weight", "layers.1.weight"]
///     .map(|name| ParameterEntry::new(name, &[4], "float32", 4)).to_vec();
/// let plugin = FullyShardedSettings {
///     auto_wrap_policy: AutoWrapPolicy::TransformerBasedWrap,
///     ..Default::default()
/// };
/// let plan = plan_sharded(&Inventory { parameters }, &plugin, 2);
/// let paths: Vec<_> = plan.units.iter().map(|unit| unit.path.as_str()).collect();
/// assert_eq!(paths, ["", "layers.0", "layers.1"]);
/// ```
pub fn plan_sharded(inventory: &Inventory, plugin: &FullyShardedSettings, mesh: impl Into<Mesh>) -> Plan {
    let mesh = mesh.into();
    let by_size = match (plugin.auto_wrap_policy, plugin.min_num_params) {
        (AutoWrapPolicy::SizeBasedWrap, Some(least)) => modules_by_size(inventory, least),
        _ => Vec::new(),
    };
    let path_of = |name| unit_path(name, plugin, &by_size);
    let mut placements = vec![Placement::Frozen; inventory.parameters.len()];
    let mut keys: Vec<Key> = Vec::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    for (position, parameter) in inventory.parameters.iter().enumerate() {
        let &ParameterEntry { ref name, ref dtype, requires_grad, ref ties, keeps_dtype, in_fp8, .. } = parameter;
        if is_ignored(name, plugin) {
            placements[position] = if requires_grad { Placement::Replicate } else { Placement::Frozen };
            continue;
        }
        let path = path_of(name);
        let path = if ties.iter().all(|tie| path_of(tie) == path) { path } else { "" };
        let (path, dtype) = (path.to_owned(), dtype.clone());
        let key = Key { path, dtype, requires_grad, keeps_dtype, in_fp8 };
        match keys.iter().position(|known| *known == key) {
            Some(unit) => members[unit].push(position),
            None => {
                keys.push(key);
                members.push(vec![position]);
            }
        }
    }
    let units: Vec<Unit> = keys
        .into_iter()
        .zip(members)
        .map(|(key, members)| Unit::new(key, members, inventory, mesh.shard_size()))
        .collect();
    for (unit, content) in units.iter().enumerate() {
        content.parameters.iter().for_each(|&position| placements[position] = Placement::Shard { unit });
    }
    let device = |target: Option<&OffloadTarget>| target.map_or(OffloadDevice::None, OffloadTarget::device);
    let plan = Plan {
        world_size: mesh.world_size(),
        num_replicas: mesh.num_replicas(),
        sharding_strategy: strategy_in_effect(plugin),
        inventory: inventory.clone(),
        placements,
        buckets: Vec::new(),
        gradient_as_bucket_view: false,
        units,
        optimizer_offload: device(plugin.optimizer_offload()),
        params_offload: device(plugin.params_offload()),
        bytes_ahead: 0,
        activation_bytes: 0,
    };
    Plan { bytes_ahead: bytes_ahead(&plan, plugin), ..plan }
}

/// The root is not fetched ahead of anything: it stays through a pass.
fn bytes_ahead(plan: &Plan, plugin: &FullyShardedSettings) -> usize {
    if !plugin.forward_prefetch && plugin.backward_prefetch == BackwardPrefetch::NoPrefetch {
        return 0;
    }
    let modules = plan.units.iter().enumerate().filter(|(_, unit)| !unit.path.is_empty());
    let bytes = modules.map(|(unit, _)| plan.gathered_bytes(unit));
    if plugin.limit_all_gathers { bytes.max().unwrap_or(0) } else { bytes.fold(0, usize::saturating_add) }
}

/// Of two that differ in it only, the one that `reshard_after_forward` names, which is version 2's word for the choice.
fn strategy_in_effect(plugin: &FullyShardedSettings) -> ShardingStrategy {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, ShardGradOp};
    match (plugin.sharding_strategy, plugin.frees_after_forward()) {
        (FullShard | ShardGradOp, true) => FullShard,
        (FullShard | ShardGradOp, false) => ShardGradOp,
        (HybridShard | HybridShardZero2, true) => HybridShard,
        (HybridShard | HybridShardZero2, false) => HybridShardZero2,
        (other, _) => other,
    }
}

/// Is a parameter in a module that is not to be divided?
fn is_ignored(name: &str, plugin: &FullyShardedSettings) -> bool {
    modules(name).any(|module| plugin.ignored_modules.iter().any(|pattern| matches_path(pattern, module)))
}

impl FullyShardedSettings {
    /// Checks that there is a module for each of `transformer_cls_names_to_wrap` and `ignored_modules`.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), naming the first that stands for nothing and the model's modules.
    ///
    /// ```
    /// use accelerate_core::config::FullyShardedSettings;
    /// use accelerate_core::plan::{Inventory, ParameterEntry};
    /// let inventory = Inventory { parameters: vec![ParameterEntry::new("head.weight", &[2], "float32", 4)] };
    /// let plugin = |path: &str| {
    ///     FullyShardedSettings { ignored_modules: vec![path.to_owned()], ..Default::default() }
    /// };
    /// plugin("head").check_modules(&inventory)?;
    /// assert!(plugin("tail").check_modules(&inventory).unwrap_err().to_string().contains("\"tail\""));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn check_modules(&self, inventory: &Inventory) -> Result<()> {
        let names = inventory.parameters.iter().flat_map(|entry| entry.ties.iter().chain([&entry.name]));
        let known: BTreeSet<&str> = names.flat_map(|name| modules(name)).collect();
        let is_absent = |pattern: &&String| !known.iter().any(|module| matches_path(pattern, module));
        let fields = [
            ("transformer_cls_names_to_wrap", &self.transformer_cls_names_to_wrap),
            ("ignored_modules", &self.ignored_modules),
        ];
        match fields.iter().find_map(|(field, paths)| Some((*field, paths.iter().find(is_absent)?))) {
            None => Ok(()),
            Some((field, found)) => {
                let (found, known) = (found.clone(), known.into_iter().map(str::to_owned).collect());
                Err(ConfigErrorKind::NoSuchModule { field, found, known }.into())
            }
        }
    }
}

impl FullyShardedSettings {
    /// The parameters as a run in `mixed_precision` keeps and trains them: those of 16 bits in float32, because steps would be
    /// lost in fewer bits (`_prepare_fsdp` and `fsdp2_prepare_model` of the reference). Frozen ones, and those of
    /// `ignored_modules`, stay what they are.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedSettings, MixedPrecision};
    /// use accelerate_core::plan::{Inventory, ParameterEntry};
    /// let inventory = Inventory { parameters: vec![ParameterEntry::new("weight", &[2], "bfloat16", 2)] };
    /// let plugin = FullyShardedSettings::default();
    /// assert_eq!(plugin.kept(inventory.clone(), MixedPrecision::Bf16).parameters[0].dtype, "float32");
    /// assert_eq!(plugin.kept(inventory.clone(), MixedPrecision::No), inventory);
    /// ```
    pub fn kept(&self, mut inventory: Inventory, mixed_precision: MixedPrecision) -> Inventory {
        let is_widened = |entry: &&mut ParameterEntry| {
            entry.requires_grad
                && matches!(entry.dtype.as_str(), "float16" | "bfloat16")
                && !is_ignored(&entry.name, self)
        };
        if mixed_precision != MixedPrecision::No {
            for entry in inventory.parameters.iter_mut().filter(is_widened) {
                entry.original_element_bytes = Some(entry.element_bytes);
                entry.dtype = FloatType::Float32.to_string();
                entry.element_bytes = FloatType::Float32.element_bytes();
            }
        }
        inventory
    }
}

/// The module that is a parameter's unit; empty for the root.
fn unit_path<'a>(name: &'a str, plugin: &FullyShardedSettings, by_size: &[String]) -> &'a str {
    let patterns = &plugin.transformer_cls_names_to_wrap;
    match plugin.auto_wrap_policy {
        AutoWrapPolicy::NoWrap => "",
        AutoWrapPolicy::SizeBasedWrap => longest_prefix(name, |module| by_size.iter().any(|unit| unit == module)),
        AutoWrapPolicy::TransformerBasedWrap if patterns.is_empty() => numbered_module(name),
        AutoWrapPolicy::TransformerBasedWrap => {
            longest_prefix(name, |module| patterns.iter().any(|pattern| matches_path(pattern, module)))
        }
    }
}

/// The modules that a parameter is in, outermost first: of `a.b.weight` these are `a` and `a.b`.
pub(super) fn modules(name: &str) -> impl DoubleEndedIterator<Item = &str> {
    name.match_indices('.').map(|(end, _)| &name[..end])
}

fn longest_prefix(name: &str, is_unit: impl Fn(&str) -> bool) -> &str {
    modules(name).rev().find(|module| is_unit(module)).unwrap_or("")
}

/// The outermost module with a number for a name: one of a list.
pub(super) fn numbered_module(name: &str) -> &str {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    modules(name).find(|module| module.rsplit('.').next().is_some_and(is_number)).unwrap_or("")
}

/// `*` stands for any one name between dots.
fn matches_path(pattern: &str, path: &str) -> bool {
    let (mut patterns, mut parts) = (pattern.split('.'), path.split('.'));
    loop {
        match (patterns.next(), parts.next()) {
            (None, None) => return true,
            (Some(pattern), Some(part)) if pattern == "*" || pattern == part => {}
            _ => return false,
        }
    }
}

/// From the leaves up, the modules with at least so many elements that are in no unit further down
/// (`torch.distributed.fsdp.wrap.size_based_auto_wrap_policy`).
fn modules_by_size(inventory: &Inventory, least: usize) -> Vec<String> {
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    for parameter in &inventory.parameters {
        for module in modules(&parameter.name) {
            let count = left.entry(module).or_default();
            *count = count.saturating_add(parameter.num_elements());
        }
    }
    let mut deepest_first: Vec<&str> = left.keys().copied().collect();
    deepest_first.sort_by_key(|module| std::cmp::Reverse(module.matches('.').count()));
    let mut units = Vec::new();
    for module in deepest_first {
        let own = left[module];
        if own < least {
            continue;
        }
        for outer in modules(module).chain([module]) {
            if let Some(count) = left.get_mut(outer) {
                *count -= own;
            }
        }
        units.push(module.to_owned());
    }
    units
}
