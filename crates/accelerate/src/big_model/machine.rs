//! The devices of this process.

use crate::error::{BigModelError, Result};
use accelerate_core::device_map::{MachineMemory, MapDevice};
use tch::Device;
use torch_ext::device::device_memory;

/// The free memory of each GPU and the memory of the CPU that programs can have without swapping, for
/// [`get_max_memory`](super::get_max_memory) and [`DeviceMapStrategy::device_map`](super::DeviceMapStrategy::device_map). Where the system
/// does not say how much memory it has (`/proc/meminfo`), the CPU counts as having none: say it by `max_memory`.
///
/// ```
/// assert!(accelerate::big_model::machine_memory().available_bytes > 0);
/// ```
pub fn machine_memory() -> MachineMemory {
    let free = |index: usize| {
        let memory = device_memory(Device::Cuda(index)).ok()?;
        Some((index, u64::try_from(memory.free_bytes).unwrap_or(0)))
    };
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    MachineMemory {
        accelerators: (0..num_gpus()).filter_map(free).collect(),
        available_bytes: available_bytes(&text).unwrap_or(0),
        has_mps: tch::utils::has_mps(),
        is_integrated: false,
    }
}

fn num_gpus() -> usize {
    usize::try_from(tch::Cuda::device_count()).unwrap_or(0)
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// What libtorch calls the device of a map; a disk is none.
pub(super) fn device_of(map_device: MapDevice) -> Result<Option<Device>> {
    let num_devices = num_gpus();
    match map_device {
        MapDevice::Accelerator(index) if index < num_devices => Ok(Some(Device::Cuda(index))),
        MapDevice::Mps if tch::utils::has_mps() => Ok(Some(Device::Mps)),
        MapDevice::Cpu => Ok(Some(Device::Cpu)),
        MapDevice::Disk => Ok(None),
        device => Err(BigModelError::NoSuchDevice { device, num_devices }.into()),
    }
}

/// What maps call a device of libtorch.
pub(crate) fn map_device(device: Device) -> Result<MapDevice> {
    match device {
        Device::Cuda(index) => Ok(MapDevice::Accelerator(index)),
        Device::Mps => Ok(MapDevice::Mps),
        Device::Cpu => Ok(MapDevice::Cpu),
        Device::Vulkan => Err(BigModelError::NoName { device }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::available_bytes;

    #[test]
    fn the_available_memory_is_read_in_bytes() {
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        for text in ["", "MemAvailable: 5 MB", "MemAvailable: x kB", "MemAvailable: 18446744073709551615 kB"] {
            assert_eq!(available_bytes(text), None);
        }
    }
}
