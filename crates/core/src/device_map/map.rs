//! The map itself.

use super::tree::ModuleTree;
use super::{DeviceMapTable, MapDevice, MaxMemory, SizeOptions};
use crate::error::device_map::DeviceMapErrorKind;
use crate::weight_files::shortened_reason;
use crate::{Error, Result};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::HashMap;
use std::fmt;

/// Paths of modules, or of single tensors, with the device that keeps them. The path that is nearest to a tensor counts; the
/// empty path stands for the whole model.
///
/// As JSON it is the `hf_device_map` of the reference: `{"embed": 0, "layers.0": "cpu", "layers.1": "disk"}`.
///
/// ```
/// use accelerate_core::device_map::{DeviceMap, MapDevice};
/// let map = DeviceMap::from_json(r#"{"": 0, "layers.1": "disk"}"#)?;
/// assert_eq!(map.device_of("layers.0.weight"), Some(MapDevice::Accelerator(0)));
/// assert_eq!(map.device_of("layers.1.weight"), Some(MapDevice::Disk));
/// assert_eq!(map.device_of("layers.10.weight"), Some(MapDevice::Accelerator(0)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct DeviceMap {
    entries: Vec<(String, MapDevice)>,
    positions: HashMap<String, usize>,
}

impl DeviceMap {
    /// A map that puts the whole model on one device.
    pub fn all_on(device: MapDevice) -> Self {
        [("", device)].into_iter().collect()
    }

    /// Reads a map as the reference has it in JSON.
    ///
    /// # Errors
    /// [`is_plan`](Error::is_plan): not an object of devices by path, or a path that is there twice.
    ///
    /// ```
    /// use accelerate_core::device_map::DeviceMap;
    /// assert!(DeviceMap::from_json(r#"{"head": "gpu"}"#).unwrap_err().to_string().contains("\"gpu\""));
    /// ```
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|cause| {
            let reason = shortened_reason(&cause.to_string());
            Error::new(DeviceMapErrorKind::Json { reason }).caused_by(cause)
        })
    }

    /// Adds an entry, or changes that of the same path.
    pub fn insert(&mut self, path: impl Into<String>, device: MapDevice) {
        let path = path.into();
        if let Some(&position) = self.positions.get(&path) {
            self.entries[position].1 = device;
        } else {
            self.positions.insert(path.clone(), self.entries.len());
            self.entries.push((path, device));
        }
    }

    /// The device of exactly this path.
    pub fn get(&self, path: &str) -> Option<MapDevice> {
        self.positions.get(path).map(|&position| self.entries[position].1)
    }

    /// The device of a tensor: that of the longest path in the map that leads to it.
    pub fn device_of(&self, tensor: &str) -> Option<MapDevice> {
        let mut path = tensor;
        loop {
            if let Some(device) = self.get(path) {
                return Some(device);
            }
            match path.rfind('.') {
                Some(end) => path = &path[..end],
                None => return self.get(""),
            }
        }
    }

    /// Paths and devices in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, MapDevice)> {
        self.entries.iter().map(|(path, device)| (path.as_str(), *device))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// No entries?
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The devices that it names, in the order in which maps are filled.
    pub fn devices(&self) -> Vec<MapDevice> {
        let mut devices: Vec<MapDevice> = self.iter().map(|(_, device)| device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// The map with bytes, for people: each module, then each device with what it keeps and may keep.
    ///
    /// ```
    /// use accelerate_core::device_map::{DeviceMap, MapDevice, MapTensor, MaxMemory, ModuleTree};
    /// let tree = ModuleTree::new([MapTensor::new("head.weight", 500, "float32")?])?;
    /// let map = DeviceMap::all_on(MapDevice::Cpu);
    /// let budgets = MaxMemory::from_texts([("cpu", "4KB")])?;
    /// let table = map.table(&tree, &Default::default(), &budgets).to_string();
    /// assert!(table.contains("2 KB of 4 KB"), "{table}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn table(&self, tree: &ModuleTree, sizes: &SizeOptions, max_memory: &MaxMemory) -> DeviceMapTable {
        DeviceMapTable::new(self, tree, sizes, max_memory)
    }
}

/// The same entries in any order.
impl PartialEq for DeviceMap {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(path, device)| other.get(path) == Some(device))
    }
}

impl Eq for DeviceMap {}

impl<P: Into<String>> FromIterator<(P, MapDevice)> for DeviceMap {
    fn from_iter<I: IntoIterator<Item = (P, MapDevice)>>(entries: I) -> Self {
        let mut map = Self::default();
        for (path, device) in entries {
            map.insert(path, device);
        }
        map
    }
}

impl Serialize for DeviceMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        for (path, device) in self.iter() {
            map.serialize_entry(path, &device)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for DeviceMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;

        impl<'de> Visitor<'de> for Map {
            type Value = DeviceMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of paths and devices")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<DeviceMap, A::Error> {
                let mut map = DeviceMap::default();
                while let Some((path, device)) = entries.next_entry::<String, MapDevice>()? {
                    if map.get(&path).is_some() {
                        return Err(A::Error::custom(format_args!("the path {path:?} is there twice")));
                    }
                    map.insert(path, device);
                }
                Ok(map)
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// Does a map say for every tensor of a model where it goes (`check_device_map` of the reference)? Returns the paths in it that
/// the model has no tensors under, such as those of layers without parameters.
///
/// # Errors
/// [`is_plan`](crate::Error::is_plan): tensors without a device, by name.
///
/// ```
/// use accelerate_core::device_map::{DeviceMap, MapDevice, MapTensor, ModuleTree, check_device_map};
/// let tree = ModuleTree::new([MapTensor::new("a.weight", 4, "float32")?, MapTensor::new("b.weight", 4, "float32")?])?;
/// let map: DeviceMap = [("a", MapDevice::Cpu), ("dropout", MapDevice::Cpu)].into_iter().collect();
/// assert!(check_device_map(&tree, &map).unwrap_err().to_string().contains("b.weight"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn check_device_map(tree: &ModuleTree, map: &DeviceMap) -> Result<Vec<String>> {
    let missing: Vec<String> = tree
        .tensors()
        .filter(|tensor| map.device_of(&tensor.name).is_none())
        .map(|tensor| tensor.name.clone())
        .collect();
    if !missing.is_empty() {
        return Err(DeviceMapErrorKind::NotCovered { missing }.into());
    }
    Ok(map.iter().map(|(path, _)| path).filter(|path| !tree.contains(path)).map(str::to_owned).collect())
}
