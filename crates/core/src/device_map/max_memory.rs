//! How much each device may keep.

use super::MapDevice;
use crate::Result;
use crate::error::device_map::DeviceMapErrorKind;
use crate::weight_files::parse_size;
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes by device, in the order in which devices are filled.
///
/// ```
/// use accelerate_core::device_map::{MapDevice, MaxMemory};
/// let max_memory = MaxMemory::from_texts([("cpu", "8GiB"), ("0", "10GB")])?;
/// let wanted = [(MapDevice::Accelerator(0), 10_000_000_000), (MapDevice::Cpu, 8 << 30)];
/// assert_eq!(max_memory, wanted.into_iter().collect());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct MaxMemory(BTreeMap<MapDevice, u64>);

impl MaxMemory {
    /// Reads devices and sizes as people write them: `("0", "10GB")`, `("cpu", "8GiB")`, `("1", "123456")`.
    ///
    /// # Errors
    /// [`is_plan`](crate::Error::is_plan): not a device, or one that is there twice;
    /// [`is_weight_files`](crate::Error::is_weight_files): not a size.
    pub fn from_texts<D: AsRef<str>, S: AsRef<str>>(texts: impl IntoIterator<Item = (D, S)>) -> Result<Self> {
        let mut max_memory = Self::default();
        for (device, size) in texts {
            let device: MapDevice = device.as_ref().parse()?;
            if max_memory.0.insert(device, parse_size(size.as_ref())?).is_some() {
                return Err(DeviceMapErrorKind::DeviceTwice { device }.into());
            }
        }
        Ok(max_memory)
    }

    /// What one device may keep; `None` if it is not named.
    pub fn get(&self, device: MapDevice) -> Option<u64> {
        self.0.get(&device).copied()
    }

    /// Names a device, or changes what it may keep.
    pub fn insert(&mut self, device: MapDevice, bytes: u64) {
        self.0.insert(device, bytes);
    }

    /// Devices and bytes in order.
    pub fn iter(&self) -> impl Iterator<Item = (MapDevice, u64)> {
        self.0.iter().map(|(&device, &bytes)| (device, bytes))
    }

    /// Is no device named?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(MapDevice, u64)> for MaxMemory {
    fn from_iter<I: IntoIterator<Item = (MapDevice, u64)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

/// What the machine has, as the caller has found it.
///
/// ```
/// let machine = accelerate_core::device_map::MachineMemory::default();
/// assert_eq!(machine.available_bytes, 0);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// Free bytes of each accelerator, by index.
    pub accelerators: BTreeMap<usize, u64>,
    /// Do accelerators use the memory of the CPU?
    pub is_integrated: bool,
    /// Is there an Apple GPU?
    pub has_mps: bool,
    /// Memory of the CPU that programs can have without swapping.
    pub available_bytes: u64,
}

/// What each device may keep (`get_max_memory` of the reference): what was asked for, or else all that the machine has. Memory that
/// an accelerator and the CPU share counts once, for the accelerator.
///
/// ```
/// use accelerate_core::device_map::{MachineMemory, MapDevice, get_max_memory};
/// let machine = MachineMemory { accelerators: [(0, 500)].into(), available_bytes: 900, ..Default::default() };
/// let wanted = [(MapDevice::Accelerator(0), 500), (MapDevice::Cpu, 900)];
/// assert_eq!(get_max_memory(None, &machine), wanted.into_iter().collect());
/// ```
pub fn get_max_memory(asked: Option<&MaxMemory>, machine: &MachineMemory) -> MaxMemory {
    if let Some(asked) = asked {
        return asked.clone();
    }
    let accelerators = machine.accelerators.iter().map(|(&index, &bytes)| (MapDevice::Accelerator(index), bytes));
    let mut max_memory: MaxMemory = accelerators.collect();
    if machine.has_mps {
        max_memory.insert(MapDevice::Mps, machine.available_bytes);
    } else if !machine.is_integrated {
        max_memory.insert(MapDevice::Cpu, machine.available_bytes);
    }
    max_memory
}
