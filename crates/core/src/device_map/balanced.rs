//! Budgets by which accelerators get about the same.

use super::tree::{ModuleTree, NodeId, ROOT, whole_bytes};
use super::{
    InferOptions, InferredDeviceMap, MachineMemory, MapDevice, MaxMemory, get_max_memory, infer_auto_device_map,
};
use crate::names::spelled_enum;
use std::collections::BTreeMap;

spelled_enum! {
    /// How a map is found, by the reference's names.
    ///
    /// ```
    /// use accelerate_core::device_map::DeviceMapStrategy;
    /// assert_eq!("balanced_low_0".parse::<DeviceMapStrategy>()?, DeviceMapStrategy::BalancedLow0);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    DeviceMapStrategy, "device map" {
        /// The same as `balanced`.
        Auto = "auto",
        /// Every accelerator gets about the same.
        Balanced = "balanced",
        /// The first gets as little as it can, for what else is computed there; the others get about the same.
        BalancedLow0 = "balanced_low_0",
        /// The first is filled before the second gets anything.
        Sequential = "sequential",
    }
}

impl DeviceMapStrategy {
    /// The map of a model, with the budgets by which it was made. `asked` are those of the user, `options.max_memory` does not
    /// count.
    ///
    /// ```
    /// use accelerate_core::device_map::{DeviceMap, DeviceMapStrategy, MachineMemory, MapDevice, MapTensor, ModuleTree};
    /// let tree = ModuleTree::new(["a.weight", "b.weight"].map(|name| MapTensor::new(name, 1000, "float32").unwrap()))?;
    /// let machine = MachineMemory { available_bytes: 1 << 30, ..Default::default() };
    /// let (inferred, _) = DeviceMapStrategy::Auto.device_map(&tree, None, &machine, &Default::default());
    /// assert_eq!(inferred.device_map, DeviceMap::all_on(MapDevice::Cpu));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn device_map(
        self,
        tree: &ModuleTree,
        asked: Option<&MaxMemory>,
        machine: &MachineMemory,
        options: &InferOptions,
    ) -> (InferredDeviceMap, MaxMemory) {
        let max_memory = match self {
            Self::Sequential => get_max_memory(asked, machine),
            _ => get_balanced_memory(tree, asked, machine, options, self == Self::BalancedLow0),
        };
        let inferred = infer_auto_device_map(tree, &InferOptions { max_memory: max_memory.clone(), ..options.clone() });
        (inferred, max_memory)
    }
}

/// Budgets with which [`infer_auto_device_map`] gives every accelerator about the same (`get_balanced_memory` of the reference).
///
/// Each gets its share of the model and 1.25 times the largest block that is not split, or the mean layer if that is more; the
/// last one keeps its whole budget. A single accelerator keeps 90 % where nobody has `asked` for a budget. With `low_zero` the
/// first gets only what the others have no room for. Of the `options`, types and `no_split_module_classes` count: the first
/// module of each pattern stands for all of them.
///
/// ```
/// use accelerate_core::device_map::{MapDevice, MapTensor, MaxMemory, ModuleTree, get_balanced_memory};
/// let tree = ModuleTree::new(["a.weight", "b.weight"].map(|name| MapTensor::new(name, 100, "float32").unwrap()))?;
/// let asked = MaxMemory::from_texts([("0", "10KB"), ("1", "10KB")])?;
/// let balanced = get_balanced_memory(&tree, Some(&asked), &Default::default(), &Default::default(), false);
/// // Half of the model, and 1.25 times a layer.
/// assert_eq!(balanced.get(MapDevice::Accelerator(0)), Some(400 + 500));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn get_balanced_memory(
    tree: &ModuleTree,
    asked: Option<&MaxMemory>,
    machine: &MachineMemory,
    options: &InferOptions,
    low_zero: bool,
) -> MaxMemory {
    let mut max_memory = get_max_memory(asked, machine);
    let in_use: Vec<usize> =
        max_memory.iter().filter(|(_, bytes)| *bytes > 0).filter_map(|(device, _)| index(device)).collect();
    let num_devices = in_use.len();
    let low_zero = low_zero && num_devices > 1;
    if num_devices == 0 {
        return max_memory;
    }
    if let (&[only], None) = (in_use.as_slice(), asked) {
        let device = MapDevice::Accelerator(only);
        let bytes = u128::from(max_memory.get(device).unwrap_or(0)) * 9 / 10;
        max_memory.insert(device, bytes as u64);
    }
    let sizes = tree.sizes(&options.sizes, |_| true);
    let num_shares = if low_zero { num_devices - 1 } else { num_devices };
    let buffer = largest_block(tree, &sizes, &options.no_split_module_classes).max(mean_leaf(tree, &sizes));
    // Whole bytes, as the reference counts them: 1.25 is 5 / 4, and a byte has 8 bits.
    let share = sizes[ROOT] / (8 * num_shares as i128) + buffer * 5 / 32;
    let share = u64::try_from(share).unwrap_or(u64::MAX);
    let budget = |max_memory: &MaxMemory, index: usize| max_memory.get(MapDevice::Accelerator(index)).unwrap_or(0);
    for &index in in_use.iter().take(num_devices - 1) {
        if !(low_zero && index == 0) {
            let bytes = share.min(budget(&max_memory, index));
            max_memory.insert(MapDevice::Accelerator(index), bytes);
        }
    }
    if low_zero && max_memory.get(MapDevice::Accelerator(0)).is_some() {
        let others: i128 = (1..num_devices).map(|index| i128::from(budget(&max_memory, index)) * 8).sum();
        let bytes = whole_bytes(sizes[ROOT] - others).min(budget(&max_memory, 0));
        max_memory.insert(MapDevice::Accelerator(0), bytes);
    }
    max_memory
}

fn index(device: MapDevice) -> Option<usize> {
    match device {
        MapDevice::Accelerator(index) => Some(index),
        _ => None,
    }
}

/// Bits of the largest among the first modules of each pattern.
fn largest_block(tree: &ModuleTree, sizes: &[i128], patterns: &[String]) -> i128 {
    let matching = tree.matching(patterns);
    let mut first: BTreeMap<usize, NodeId> = BTreeMap::new();
    for id in tree.in_order() {
        if let Some(&pattern) = matching.get(&id).filter(|_| has_own_tensor(tree, id)) {
            first.entry(pattern).or_insert(id);
        }
    }
    first.values().map(|&id| sizes[id]).max().unwrap_or(0)
}

/// Does it hold a tensor under its first name?
fn has_own_tensor(tree: &ModuleTree, id: NodeId) -> bool {
    let mut open = vec![id];
    while let Some(id) = open.pop() {
        let node = &tree.nodes[id];
        if node.tensor.as_ref().is_some_and(|tensor| tensor.tied_to.is_none()) {
            return true;
        }
        open.extend(node.parameters.iter().chain(&node.children).chain(&node.buffers));
    }
    false
}

/// The mean, in bits, of modules that hold no modules, rounded down to bytes.
fn mean_leaf(tree: &ModuleTree, sizes: &[i128]) -> i128 {
    let is_leaf = |id: &NodeId| {
        let node = &tree.nodes[*id];
        *id != ROOT && node.tensor.is_none() && !node.children.iter().any(|&child| has_own_tensor(tree, child))
    };
    let leaves: Vec<NodeId> =
        tree.in_order().into_iter().filter(is_leaf).filter(|&id| has_own_tensor(tree, id)).collect();
    let sum: i128 = leaves.iter().map(|&id| sizes[id]).sum();
    sum / 8 / (leaves.len().max(1) as i128) * 8
}
