//! How gradients are averaged over replicas.

use super::{Callback, PowerSGDState};
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::names::spelled_enum;
use crate::settings::record::record;
use crate::settings::{SettingValue, ValueKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Size of the first bucket in bytes, 1 MiB: small, so that the first all-reduce starts early
/// (`kDefaultFirstBucketBytes` of `c10d::Reducer`).
pub const FIRST_BUCKET_BYTES: usize = 1024 * 1024;

spelled_enum! {
    /// How gradient buckets are compressed on their way between ranks
    /// (`DDPCommunicationHookType` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::DDPCommunicationHookType;
    /// assert_eq!(DDPCommunicationHookType::default().to_string(), "no");
    /// assert_eq!("power_sgd".parse::<DDPCommunicationHookType>()?, DDPCommunicationHookType::PowerSgd);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    DDPCommunicationHookType, "communication hook", false_is = No {
        /// Not at all. The default.
        #[default]
        No = "no",
        /// Cast to half precision, averaged, and cast back.
        Fp16 = "fp16",
        /// Cast to bfloat16, averaged, and cast back.
        Bf16 = "bf16",
        /// Low-rank approximation per tensor (Vogels et al., "PowerSGD", arXiv 1905.13727).
        PowerSgd = "power_sgd",
        /// Low-rank approximation of each bucket as one square matrix.
        BatchedPowerSgd = "batched_power_sgd",
    }
}

/// What `comm_hook` may be: one of the hooks that have names, or a function of the program.
///
/// ```
/// use accelerate_core::config::{DDPCommunicationHook, DDPCommunicationHookType};
/// let hook: DDPCommunicationHook = "fp16".parse()?;
/// assert_eq!(hook, DDPCommunicationHookType::Fp16.into());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum DDPCommunicationHook {
    /// A hook of the library.
    Named(DDPCommunicationHookType),
    /// The program's own: a `CommHook` of the library, which only code can say.
    Function(Callback),
}

impl DDPCommunicationHook {
    /// Are buckets averaged without any hook?
    pub fn is_none(&self) -> bool {
        *self == Self::Named(DDPCommunicationHookType::No)
    }
}

impl Default for DDPCommunicationHook {
    fn default() -> Self {
        Self::Named(DDPCommunicationHookType::No)
    }
}

impl From<DDPCommunicationHookType> for DDPCommunicationHook {
    fn from(hook: DDPCommunicationHookType) -> Self {
        Self::Named(hook)
    }
}

impl FromStr for DDPCommunicationHook {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self> {
        name.parse().map(Self::Named)
    }
}

impl fmt::Display for DDPCommunicationHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(hook) => hook.fmt(f),
            Self::Function(function) => f.pad(&function.write()),
        }
    }
}

impl SettingValue for DDPCommunicationHook {
    const KIND: ValueKind = DDPCommunicationHookType::KIND;

    fn read(text: &str) -> Option<Self> {
        DDPCommunicationHookType::read(text).map(Self::Named)
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Serialize for DDPCommunicationHook {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Named(hook) => hook.serialize(serializer),
            Self::Function(_) => {
                Err(ser::Error::custom("comm_hook is a function of the program, for which there is no text"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for DDPCommunicationHook {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Deserialize::deserialize(deserializer).map(Self::Named)
    }
}

record! {
    /// How gradients are averaged over replicas of a model (`DistributedDataParallelKwargs` of the reference,
    /// `utils/dataclasses.py`; the fields up to `static_graph` are those of PyTorch's
    /// `DistributedDataParallel`).
    ///
    /// ```
    /// use accelerate_core::config::{DistributedDataParallelKwargs, DistributedDataParallelSettings};
    /// let kwargs: DistributedDataParallelKwargs =
    ///     serde_json::from_str(r#"{"bucket_cap_mb": 15, "comm_hook": "bf16"}"#).unwrap();
    /// assert_eq!(DistributedDataParallelSettings::from(kwargs).bucket_cap_bytes(), 15 * 1024 * 1024);
    /// ```
    DistributedDataParallelKwargs => DistributedDataParallelSettings,
    section "ddp_config", keys "ddp_", variables "ACCELERATE_DDP_" {
        /// The dimension along which inputs would be scattered over the devices of one process. Default 0; only
        /// 0 is possible, because a process has one device.
        dim: i64 = 0 => setting().refused("a process has one device, so nothing is scattered within it; leave it out");
        /// Copy the buffers of rank 0 (running means and the like) to all ranks before the first forward pass after one
        /// that averaged gradients, in training or evaluation. Default true.
        broadcast_buffers: bool = true => setting();
        /// Gradients are averaged in buckets of about this many MiB, above 0. Default 25.
        bucket_cap_mb: f64 = 25.0 => setting();
        /// Look for parameters that took no part in the forward pass before each backward pass. Default false:
        /// an unused parameter is an error.
        find_unused_parameters: bool = false => setting();
        /// Has no effect in PyTorch any more, and none here. Default false.
        check_reduction: bool = false => setting().without_effect("PyTorch checks nothing with it any more");
        /// Gradients are views into the buckets, which saves their size in memory. Default false.
        gradient_as_bucket_view: bool = false => setting();
        /// The same parameters take part in the same order in every step. Default false.
        static_graph: bool = false => setting();
        /// How buckets are compressed: by a hook that has a name, or in code by a function of the program. Default no.
        comm_hook: DDPCommunicationHook = DDPCommunicationHook::default() => setting().seed_default("None");
        /// A cast around the hook: `no`, `fp16` or `bf16`. Default no.
        comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType::No => setting();
        /// Options of PowerSGD, the fields of [`PowerSGDState`]. Default empty.
        comm_state_option: BTreeMap<String, Value> = BTreeMap::new() => setting().seed_default("None");
    }
}

impl DistributedDataParallelSettings {
    /// `bucket_cap_mb` in bytes, rounded down but at least 1.
    ///
    /// ```
    /// # use accelerate_core::config::{DistributedDataParallelKwargs, DistributedDataParallelSettings};
    /// assert_eq!(DistributedDataParallelSettings::default().bucket_cap_bytes(), 26_214_400);
    /// ```
    pub fn bucket_cap_bytes(&self) -> usize {
        ((self.bucket_cap_mb * 1024.0 * 1024.0) as usize).max(1)
    }

    /// Checks that the fields are possible and do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `dim` other than 0, a bucket without room, a
    /// `comm_wrapper` that is no cast, or a `comm_state_option` that the hook does not know.
    ///
    /// ```
    /// # use accelerate_core::config::{DistributedDataParallelKwargs, DistributedDataParallelSettings};
    /// let kwargs = DistributedDataParallelSettings { bucket_cap_mb: 0.0, ..Default::default() };
    /// assert!(kwargs.check().unwrap_err().is_config());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.dim != 0 {
            let wanted = "0: a process has one device, so nothing is scattered within it";
            let name = "dim";
            return Err(ConfigErrorKind::OutOfRange { name, found: self.dim as f64, wanted }.into());
        }
        if self.bucket_cap_mb.is_nan() || self.bucket_cap_mb <= 0.0 {
            let (name, found) = ("bucket_cap_mb", self.bucket_cap_mb);
            return Err(ConfigErrorKind::OutOfRange { name, found, wanted: "above 0" }.into());
        }
        let wrapper = self.comm_wrapper;
        if matches!(wrapper, DDPCommunicationHookType::PowerSgd | DDPCommunicationHookType::BatchedPowerSgd) {
            return Err(ConfigErrorKind::UnknownName {
                what: "comm_wrapper",
                found: wrapper.to_string(),
                choices: &["no", "fp16", "bf16"],
            }
            .into());
        }
        if self.uses_power_sgd() {
            return self.power_sgd_state()?.check();
        }
        if !self.comm_state_option.is_empty() {
            let (first, second) = ("comm_state_option", "comm_hook");
            let why =
                "only power_sgd and batched_power_sgd have options; a function of the program keeps its own state";
            return Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        }
        Ok(())
    }

    fn uses_power_sgd(&self) -> bool {
        let of = |hook: DDPCommunicationHookType| self.comm_hook == hook.into();
        of(DDPCommunicationHookType::PowerSgd) || of(DDPCommunicationHookType::BatchedPowerSgd)
    }

    /// `comm_state_option` as the options of PowerSGD, defaults where it is silent.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): an option that PowerSGD does not have, or a value of another type.
    ///
    /// ```
    /// # use accelerate_core::config::{DistributedDataParallelKwargs, DistributedDataParallelSettings};
    /// let kwargs: DistributedDataParallelKwargs =
    ///     serde_json::from_str(r#"{"comm_hook": "power_sgd", "comm_state_option": {"warm_start": false}}"#).unwrap();
    /// assert!(!DistributedDataParallelSettings::from(kwargs).power_sgd_state()?.warm_start);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn power_sgd_state(&self) -> Result<PowerSGDState> {
        let options = Value::Object(self.comm_state_option.clone().into_iter().collect());
        serde_json::from_value(options).map_err(|source| ConfigErrorKind::PowerSgdOptions { source }.into())
    }
}
