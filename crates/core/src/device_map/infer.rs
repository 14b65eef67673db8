//! `infer_auto_device_map`: devices are filled one after the other, in the order of the modules.

use super::queue::{Largest, Layers};
use super::tree::{ModuleTree, NodeId, ROOT, SizeOptions, whole_bytes};
use super::{DeviceMap, MapDevice, MaxMemory, clean_device_map};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// What [`infer_auto_device_map`] is told besides the model, with the reference's names.
///
/// ```
/// use accelerate_core::device_map::InferOptions;
/// assert!(InferOptions::default().clean_result);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferOptions {
    /// Bytes that each device may keep. What does not fit anywhere goes to the disk, which has no limit.
    pub max_memory: MaxMemory,
    /// Modules that stay on one device, such as blocks with a residual connection: patterns of paths (the reference takes names
    /// of classes). `*` stands for any letters within a name, `**` for any at all: `model.layers.*`, `**.attention`.
    pub no_split_module_classes: Vec<String>,
    /// In which types the model will be loaded.
    pub sizes: SizeOptions,
    /// Write modules whose parts are all on one device as one. Default true.
    pub clean_result: bool,
    /// Are buffers of modules on the CPU or the disk kept there, too? Default false.
    pub offload_buffers: bool,
    /// Look for a smaller module further behind where the next one is too large for a device that is still empty. Default
    /// false.
    pub fallback_allocation: bool,
}

impl Default for InferOptions {
    fn default() -> Self {
        Self {
            max_memory: MaxMemory::default(),
            no_split_module_classes: Vec::new(),
            sizes: SizeOptions::default(),
            clean_result: true,
            offload_buffers: false,
            fallback_allocation: false,
        }
    }
}

/// A map, and what is to be known of how it came about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InferredDeviceMap {
    /// Where each module goes.
    pub device_map: DeviceMap,
    /// Bytes of buffers of modules on the CPU or the disk, where no accelerator has room for them: `offload_buffers` helps.
    pub buffers_without_room: Option<u64>,
    /// Devices that got nothing because nothing fitted, with the bytes that the module at hand would have taken there.
    pub minimum_bytes: BTreeMap<MapDevice, u64>,
}

/// Assigns modules to devices: the first device until it is full, then the next, at last the disk.
///
/// On the first accelerator and on the CPU (on the CPU alone where there is no accelerator) room is left for the largest layer
/// that is still to be placed, because layers that are kept elsewhere are loaded there to be computed. Modules that do not fit
/// are split, unless they are `no_split_module_classes` or have no modules. Tied parameters go to one device. The first device
/// is that of the lowest index; `max_memory` names them all, and an accelerator that it does not name gets nothing.
///
/// Method: `infer_auto_device_map` of the reference (`utils/modeling.py`). Every tensor has a device in the map.
///
/// ```
/// use accelerate_core::device_map::{InferOptions, MapDevice, MapTensor, MaxMemory, ModuleTree, infer_auto_device_map};
/// let tensors = ["a.weight", "b.weight", "c.weight"].map(|name| MapTensor::new(name, 10, "float32").unwrap());
/// let max_memory = MaxMemory::from_texts([("0", "80"), ("cpu", "80")])?;
/// let options = InferOptions { max_memory, ..Default::default() };
/// let map = infer_auto_device_map(&ModuleTree::new(tensors)?, &options).device_map;
/// // Each takes 40 bytes, and as many are left free on the accelerator.
/// assert_eq!(map.device_of("a.weight"), Some(MapDevice::Accelerator(0)));
/// assert_eq!(map.device_of("b.weight"), Some(MapDevice::Cpu));
/// assert_eq!(map.device_of("c.weight"), Some(MapDevice::Cpu));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn infer_auto_device_map(tree: &ModuleTree, options: &InferOptions) -> InferredDeviceMap {
    let mut allocation = Allocation::new(tree, options);
    while let Some(id) = allocation.queue.pop_front() {
        allocation.place(id);
    }
    allocation.finish()
}

/// A device that is being filled.
struct Place {
    device: MapDevice,
    /// In bits; a disk has none.
    budget: Option<i128>,
    /// Is room left for the largest layer?
    is_main: bool,
    used: i128,
    buffers: i128,
    /// What it would have taken to put anything there.
    minimum: Option<i128>,
}

struct Allocation<'a> {
    options: &'a InferOptions,
    layers: Layers<'a>,
    buffer_sizes: Vec<i128>,
    places: Vec<Place>,
    current: usize,
    queue: VecDeque<NodeId>,
    largest: Largest,
    assigned: HashMap<NodeId, MapDevice>,
    /// Has a smaller module been looked for since the last one was placed?
    has_fallen_back: bool,
}

impl<'a> Allocation<'a> {
    fn new(tree: &'a ModuleTree, options: &'a InferOptions) -> Self {
        let whole = tree.matching(&options.no_split_module_classes);
        let layers = Layers { tree, sizes: tree.sizes(&options.sizes, |_| true), whole };
        let root = &tree.nodes[ROOT];
        let queue: VecDeque<NodeId> = tree.parts(ROOT).chain(root.buffers.iter().copied()).collect();
        let largest = layers.largest(queue.iter().copied());
        let buffer_sizes = tree.sizes(&options.sizes, |tensor| tensor.is_buffer);
        let (places, assigned) = (places(&options.max_memory), HashMap::new());
        Self { options, layers, buffer_sizes, places, current: 0, queue, largest, assigned, has_fallen_back: false }
    }

    fn place(&mut self, id: NodeId) {
        let Self { layers, largest, queue, .. } = self;
        largest.layers.retain(|&layer| !layers.tree.is_within(layer, id));
        if largest.layers.is_empty() {
            *largest = layers.largest(queue.iter().copied().filter(|&node| layers.is_module(node)));
        }
        let ties = layers.ties_outside(id);
        let (bits_with_ties, partners) = layers.with_partners(id, &ties, queue);
        let bits = layers.sizes[id];
        let reserve = if self.places[self.current].is_main { largest.bits } else { 0 };
        let Place { used, budget, .. } = self.places[self.current];
        let Some(budget) = budget.map(|budget| budget - reserve).filter(|budget| used + bits_with_ties > *budget)
        else {
            return self.assign(id, bits_with_ties, &partners);
        };
        if !ties.is_empty() && used + bits <= budget && self.split_partner(id, &partners) {
            return;
        }
        if used + bits >= budget && self.layers.is_splittable(id) {
            self.split(id);
            return;
        }
        if self.fall_back(id, bits_with_ties) {
            return;
        }
        let place = &mut self.places[self.current];
        if place.used == 0 {
            place.minimum = Some(bits_with_ties + reserve);
        }
        place.used += reserve;
        self.current += 1;
        self.has_fallen_back = false;
        self.queue.push_front(id);
    }

    /// Puts a node with those that are tied to it on the current device.
    fn assign(&mut self, id: NodeId, bits: i128, partners: &[NodeId]) {
        let place = &mut self.places[self.current];
        place.used += bits;
        if self.layers.is_module(id) {
            place.buffers += self.buffer_sizes[id];
        }
        self.assigned.insert(id, place.device);
        for &partner in partners {
            self.queue.retain(|&node| node != partner);
            self.assigned.insert(partner, place.device);
        }
        self.has_fallen_back = false;
    }

    /// Splits the first of the tied modules that can be.
    fn split_partner(&mut self, id: NodeId, partners: &[NodeId]) -> bool {
        let splittable = partners.iter().find(|&&partner| self.layers.is_splittable(partner));
        let Some(&partner) = splittable else { return false };
        let parts: Vec<NodeId> = self.layers.tree.parts(partner).collect();
        let before = std::mem::take(&mut self.queue);
        self.queue.push_back(id);
        for node in before {
            if node == partner { self.queue.extend(&parts) } else { self.queue.push_back(node) }
        }
        self.look_for_largest();
        true
    }

    /// Puts the parts of a module in its place.
    fn split(&mut self, id: NodeId) {
        let parts: Vec<NodeId> = self.layers.tree.parts(id).collect();
        for part in parts.into_iter().rev() {
            self.queue.push_front(part);
        }
        self.look_for_largest();
    }

    fn look_for_largest(&mut self) {
        let modules = self.queue.iter().copied().filter(|&node| self.layers.is_module(node));
        self.largest = self.layers.largest(modules);
    }

    /// Puts another module before this one, if the device is still empty and another one fits.
    fn fall_back(&mut self, id: NodeId, bits_with_ties: i128) -> bool {
        let Place { used, budget, .. } = self.places[self.current];
        let Some(budget) = budget.filter(|_| used == 0 && self.options.fallback_allocation && !self.has_fallen_back)
        else {
            return false;
        };
        let limit = budget - self.largest.bits.max(bits_with_ties);
        let Some(found) = self.smaller_module(limit) else { return false };
        self.take_out(found);
        self.queue.push_front(id);
        self.queue.push_front(found);
        self.has_fallen_back = true;
        true
    }

    /// The first module that takes no more than `limit`, larger ones being looked into.
    fn smaller_module(&self, limit: i128) -> Option<NodeId> {
        if limit < 0 {
            return None;
        }
        let mut search = self.queue.clone();
        while let Some(id) = search.pop_front() {
            let ties = self.layers.ties_outside(id);
            if self.layers.with_partners(id, &ties, &search).0 <= limit {
                return Some(id);
            }
            if self.layers.is_splittable(id) {
                let parts: Vec<NodeId> = self.layers.tree.parts(id).collect();
                parts.into_iter().rev().for_each(|part| search.push_front(part));
            }
        }
        None
    }

    /// Takes a node out of the queue, where modules around it are split first.
    fn take_out(&mut self, id: NodeId) {
        while let Some(at) = self.queue.iter().position(|&node| self.layers.tree.is_within(id, node)) {
            let Some(outer) = self.queue.remove(at).filter(|&outer| outer != id) else { return };
            let parts: Vec<NodeId> = self.layers.tree.parts(outer).collect();
            for part in parts.into_iter().rev() {
                self.queue.insert(at, part);
            }
        }
    }

    fn finish(mut self) -> InferredDeviceMap {
        self.cover_the_rest();
        let tree = self.layers.tree;
        let order = tree.in_order();
        let entry = |id: &NodeId| Some((tree.nodes[*id].name.clone(), *self.assigned.get(id)?));
        let mut device_map: DeviceMap = order.iter().filter_map(entry).collect();
        if self.options.clean_result {
            device_map = clean_device_map(&device_map);
        }
        let minimum = self.places.iter().filter_map(|place| Some((place.device, whole_bytes(place.minimum?))));
        InferredDeviceMap {
            device_map,
            minimum_bytes: minimum.collect(),
            buffers_without_room: self.buffers_without_room(),
        }
    }

    /// Buffers that a split module has beside its modules go where the last of its parts is; the reference forgets them.
    fn cover_the_rest(&mut self) {
        let tree = self.layers.tree;
        // The last device of each module, and whether all of it has one.
        let mut device: Option<MapDevice> = None;
        let mut open: Vec<(NodeId, bool)> = vec![(ROOT, false)];
        while let Some((id, is_done)) = open.pop() {
            if let Some(&assigned) = self.assigned.get(&id) {
                device = Some(assigned);
            } else if is_done {
                for &buffer in &tree.nodes[id].buffers {
                    let device = device.unwrap_or(MapDevice::Cpu);
                    self.assigned.entry(buffer).or_insert(device);
                }
            } else {
                open.push((id, true));
                let parts: Vec<NodeId> = tree.parts(id).collect();
                open.extend(parts.into_iter().rev().map(|part| (part, false)));
            }
        }
    }

    fn buffers_without_room(&self) -> Option<u64> {
        let offloaded = self.places.iter().filter(|place| !place.device.is_accelerator());
        let bits: i128 = offloaded.map(|place| place.buffers).sum();
        let accelerators: Vec<&Place> = self.places.iter().filter(|place| place.device.is_accelerator()).collect();
        let has_room = |place: &&Place| place.budget.is_some_and(|budget| budget >= bits + place.used);
        let is_lost = !self.options.offload_buffers && bits > 0 && !accelerators.is_empty();
        (is_lost && !accelerators.iter().any(has_room)).then(|| whole_bytes(bits))
    }
}

/// The devices in the order in which they are filled; the disk is the last, and always there.
fn places(max_memory: &MaxMemory) -> Vec<Place> {
    let mut devices: Vec<(MapDevice, Option<u64>)> = max_memory
        .iter()
        .filter(|(device, _)| *device != MapDevice::Disk)
        .map(|(device, bytes)| (device, Some(bytes)))
        .collect();
    devices.push((MapDevice::Disk, None));
    let first_accelerator = devices.iter().map(|(device, _)| *device).find(|device| device.is_accelerator());
    let has_mps = devices.iter().any(|(device, _)| *device == MapDevice::Mps);
    let is_main = |device: MapDevice| match device {
        MapDevice::Mps => true,
        MapDevice::Cpu => !has_mps,
        other => !has_mps && Some(other) == first_accelerator,
    };
    let place = |(device, bytes): (MapDevice, Option<u64>)| Place {
        device,
        budget: bytes.map(|bytes| i128::from(bytes) * 8),
        is_main: is_main(device),
        used: 0,
        buffers: 0,
        minimum: None,
    };
    devices.into_iter().map(place).collect()
}
