//! How the ranks of a run find each other.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::settings::record::record;
use serde::{Deserialize, Deserializer, Serializer};
use std::time::Duration;

record! {
    /// How the ranks of a run find each other, and how long they wait for each other
    /// (`InitProcessGroupKwargs` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{InitProcessGroupKwargs, ProcessGroupSettings};
    /// use std::time::Duration;
    /// let kwargs: InitProcessGroupKwargs = serde_json::from_str(r#"{"timeout": 90}"#).unwrap();
    /// assert_eq!(kwargs.timeout, Some(Duration::from_secs(90)));
    /// assert_eq!(ProcessGroupSettings::default().timeout_for("nccl"), Duration::from_secs(600));
    /// ```
    InitProcessGroupKwargs => ProcessGroupSettings,
    section "process_group_config", keys "", variables "ACCELERATE_PROCESS_GROUP_" {
        /// `gloo`, `nccl`, or one per device kind such as `cuda:nccl,cpu:gloo`. Default `None`: `nccl` on CUDA
        /// devices, `gloo` on the CPU. Python Accelerate's default is "nccl", replaced where it does not apply.
        backend: String => setting().reference_default("nccl");
        /// Where the ranks meet: `env://` (the rank variables), `tcp://host:port` or `file:///path`. Default
        /// `None`, the same as `env://`.
        init_method: String => setting();
        /// How long any collective may wait for its peers; seconds in files, fractions allowed. Default `None`:
        /// 600 seconds for NCCL and 1800 otherwise ([`ProcessGroupSettings::timeout_for`]).
        #[serde(serialize_with = "seconds_of_duration", deserialize_with = "duration_of_seconds")]
        timeout: Duration => setting().seed_default("1800");
        /// How long ranks wait for each other before the main process says which of them is where, and again after twice that
        /// time; seconds. Default `None`: 30 seconds ([`ProcessGroupSettings::waiting_notice`]). The reference says nothing
        /// before the timeout.
        #[serde(serialize_with = "seconds_of_duration", deserialize_with = "duration_of_seconds")]
        waiting_notice: Duration => setting();
    }
}

impl ProcessGroupSettings {
    /// The timeout in force for `backend`.
    ///
    /// ```
    /// # use accelerate_core::config::ProcessGroupSettings;
    /// # use std::time::Duration;
    /// let kwargs = ProcessGroupSettings::default();
    /// assert_eq!(kwargs.timeout_for("gloo"), Duration::from_secs(1800));
    /// ```
    pub fn timeout_for(&self, backend: &str) -> Duration {
        let default = if backend.contains("nccl") { 600 } else { 1800 };
        self.timeout.unwrap_or(Duration::from_secs(default))
    }

    /// How long nothing is said of ranks that wait for each other.
    ///
    /// ```
    /// # use accelerate_core::config::ProcessGroupSettings;
    /// # use std::time::Duration;
    /// assert_eq!(ProcessGroupSettings::default().waiting_notice(), Duration::from_secs(30));
    /// ```
    pub fn waiting_notice(&self) -> Duration {
        self.waiting_notice.unwrap_or(Duration::from_secs(30))
    }

    /// Checks that there is time to meet.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): a timeout of 0.
    ///
    /// ```
    /// # use accelerate_core::config::ProcessGroupSettings;
    /// # use std::time::Duration;
    /// let kwargs = ProcessGroupSettings { timeout: Some(Duration::ZERO), ..Default::default() };
    /// assert!(kwargs.check().unwrap_err().is_config());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.timeout.is_some_and(|timeout| timeout.is_zero()) {
            let wanted = "above 0 seconds; leave it out for the default of the backend";
            return Err(ConfigErrorKind::OutOfRange { name: "timeout", found: 0.0, wanted }.into());
        }
        Ok(())
    }
}

pub(super) fn seconds_of_duration<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        None => serializer.serialize_none(),
        Some(duration) if duration.subsec_nanos() == 0 => serializer.serialize_u64(duration.as_secs()),
        Some(duration) => serializer.serialize_f64(duration.as_secs_f64()),
    }
}

pub(super) fn duration_of_seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let Some(seconds) = Option::<f64>::deserialize(deserializer)? else {
        return Ok(None);
    };
    Duration::try_from_secs_f64(seconds)
        .map(Some)
        .map_err(|cause| serde::de::Error::custom(format!("{seconds} seconds are no length of time: {cause}")))
}
