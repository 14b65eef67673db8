//! Where to keep what is not in use, for both doors to sharding.

use crate::files::ShownPath;
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

spelled_enum! {
    /// Where something is kept that is not in use (`device` of DeepSpeed's offload sections).
    ///
    /// ```
    /// use accelerate_core::config::OffloadDevice;
    /// assert_eq!("cpu".parse::<OffloadDevice>()?, OffloadDevice::Cpu);
    /// assert_eq!(OffloadDevice::default().to_string(), "none");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    OffloadDevice, "device to offload to" {
        /// On the device that computes. The default.
        #[default]
        None = "none",
        /// In the memory of the host.
        Cpu = "cpu",
        /// In files on a fast disk.
        Nvme = "nvme",
    }
}

/// Where something is kept, once everything is known. Nothing of the kind is `None` around it. In files `"cpu"`, or an
/// object with the folder.
///
/// ```
/// use accelerate_core::config::OffloadTarget;
/// let target: OffloadTarget = serde_json::from_str(r#"{"nvme": "/local_nvme"}"#).unwrap();
/// assert_eq!(target, OffloadTarget::Nvme("/local_nvme".into()));
/// assert_eq!(target.to_string(), "nvme at /local_nvme");
/// assert_eq!(serde_json::to_string(&OffloadTarget::Cpu).unwrap(), r#""cpu""#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OffloadTarget {
    /// In the memory of the host.
    Cpu,
    /// In files below this folder.
    Nvme(PathBuf),
}

impl OffloadTarget {
    /// The kind of place, without the folder.
    ///
    /// ```
    /// use accelerate_core::config::{OffloadDevice, OffloadTarget};
    /// assert_eq!(OffloadTarget::Nvme("/local_nvme".into()).device(), OffloadDevice::Nvme);
    /// ```
    pub const fn device(&self) -> OffloadDevice {
        match self {
            Self::Cpu => OffloadDevice::Cpu,
            Self::Nvme(_) => OffloadDevice::Nvme,
        }
    }
}

impl fmt::Display for OffloadTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Nvme(path) => write!(f, "nvme at {}", path.shown()),
        }
    }
}
