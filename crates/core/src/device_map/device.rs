//! The places that a map can name.

use crate::error::device_map::DeviceMapErrorKind;
use crate::{Error, Result};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Where a module is kept. The order is that in which a map is filled.
///
/// ```
/// use accelerate_core::device_map::MapDevice;
/// assert_eq!("cuda:1".parse::<MapDevice>()?, MapDevice::Accelerator(1));
/// assert_eq!("disk".parse::<MapDevice>()?.to_string(), "disk");
/// assert!(MapDevice::Accelerator(7) < MapDevice::Cpu);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MapDevice {
    /// The accelerator of this index: an NVIDIA GPU here.
    Accelerator(usize),
    /// Apple's GPU, which shares its memory with the CPU.
    Mps,
    /// The memory of the CPU.
    Cpu,
    /// A folder on a disk.
    Disk,
}

impl MapDevice {
    /// Is it a place where a forward pass can be computed while other modules are elsewhere, that is neither the CPU nor a
    /// disk?
    pub const fn is_accelerator(self) -> bool {
        matches!(self, Self::Accelerator(_) | Self::Mps)
    }
}

impl fmt::Display for MapDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accelerator(index) => f.pad(&index.to_string()),
            Self::Mps => f.pad("mps"),
            Self::Cpu => f.pad("cpu"),
            Self::Disk => f.pad("disk"),
        }
    }
}

impl FromStr for MapDevice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let index = |text: &str| text.parse().ok().map(Self::Accelerator);
        let found = match text.trim() {
            "cpu" => Some(Self::Cpu),
            "disk" => Some(Self::Disk),
            "mps" | "mps:0" => Some(Self::Mps),
            "cuda" => Some(Self::Accelerator(0)),
            other => index(other.strip_prefix("cuda:").unwrap_or(other)),
        };
        found.ok_or_else(|| DeviceMapErrorKind::Device { found: text.to_owned() }.into())
    }
}

impl Serialize for MapDevice {
    /// Accelerators as numbers, as the reference writes them.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Accelerator(index) => serializer.serialize_u64(*index as u64),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for MapDevice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Device;

        impl Visitor<'_> for Device {
            type Value = MapDevice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the index of an accelerator, \"mps\", \"cpu\" or \"disk\"")
            }

            fn visit_u64<E: de::Error>(self, index: u64) -> Result<MapDevice, E> {
                usize::try_from(index).map(MapDevice::Accelerator).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<MapDevice, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Device)
    }
}
