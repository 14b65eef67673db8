//! Maps for people.

use super::tree::{ModuleTree, SizeOptions, whole_bytes};
use super::{DeviceMap, MapDevice, MaxMemory};
use crate::files::in_one_line;
use crate::weight_files::format_size;
use std::collections::BTreeMap;
use std::fmt;

/// A map with what its entries and devices take: see [`DeviceMap::table`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMapTable {
    /// Path, device and bytes of each entry.
    pub modules: Vec<(String, MapDevice, u64)>,
    /// Each device with the bytes that it keeps, and that it may keep if that is said.
    pub devices: BTreeMap<MapDevice, (u64, Option<u64>)>,
}

impl DeviceMapTable {
    pub(super) fn new(map: &DeviceMap, tree: &ModuleTree, sizes: &SizeOptions, max_memory: &MaxMemory) -> Self {
        let bits = tree.bits_by_device(|tensor| map.device_of(tensor), sizes);
        let mut devices: BTreeMap<MapDevice, (u64, Option<u64>)> =
            max_memory.iter().map(|(device, bytes)| (device, (0, Some(bytes)))).collect();
        for (device, bits) in bits {
            devices.entry(device).or_default().0 = whole_bytes(bits);
        }
        let bytes = |path: &str| tree.module_bytes(path, sizes).unwrap_or(0);
        let modules = map.iter().map(|(path, device)| (path.to_owned(), device, bytes(path))).collect();
        Self { modules, devices }
    }
}

impl fmt::Display for DeviceMapTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            |path: &str| if path.is_empty() { "(the whole model)".to_owned() } else { in_one_line(path).to_string() };
        let width = self.modules.iter().map(|(path, ..)| name(path).chars().count()).max().unwrap_or(0).clamp(6, 60);
        writeln!(f, "{:width$}  {:6}  {:>10}", "module", "device", "bytes")?;
        for (path, device, bytes) in &self.modules {
            writeln!(f, "{:width$}  {device:6}  {:>10}", name(path), format_size(*bytes))?;
        }
        for (device, (used, budget)) in &self.devices {
            write!(f, "device {device}: {}", format_size(*used))?;
            match budget {
                Some(budget) => writeln!(f, " of {}", format_size(*budget))?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}
