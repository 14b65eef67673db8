//! What a profiler records, and in which steps.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};

spelled_enum! {
    /// A kind of activity that a profiler can record (`ProfilerActivity` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::ProfilerActivity;
    /// assert_eq!("cuda".parse::<ProfilerActivity>()?, ProfilerActivity::Cuda);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ProfilerActivity, "profiler activity" {
        /// Operators and named ranges on the CPU.
        Cpu = "cpu",
        /// Kernels and copies on CUDA devices.
        Cuda = "cuda",
        /// Intel devices; known by name only.
        Xpu = "xpu",
        /// Meta's inference devices; known by name only.
        Mtia = "mtia",
        /// Gaudi devices; known by name only.
        Hpu = "hpu",
    }
}

/// Which steps of a loop are recorded: after `skip_first` steps, cycles of `wait` steps without profiler, `warmup` steps in
/// which it is set up, and `active` steps that are recorded (`schedule_option` of the reference; the arguments of
/// `torch.profiler.schedule`).
///
/// ```
/// use accelerate_core::config::ScheduleOption;
/// use accelerate_core::profile::ProfilerAction::{None, Record, RecordAndSave, Warmup};
///
/// let schedule = ScheduleOption { wait: 1, warmup: 1, active: 2, ..Default::default() };
/// let actions: Vec<_> = (0..6).map(|step| schedule.action(step)).collect();
/// assert_eq!(actions, [None, Warmup, Record, RecordAndSave, None, Warmup]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleOption {
    /// Steps at the beginning of each cycle without profiler. Default 0; Python's schedule requires it.
    pub wait: u64,
    /// Steps in which the profiler is set up, so that its beginning does not weigh on what is recorded. Default 0; Python's
    /// schedule requires it.
    pub warmup: u64,
    /// Steps that are recorded, at least 1. Default 1; Python's schedule requires it.
    pub active: u64,
    /// Number of cycles. Default 0: until the loop ends.
    pub repeat: u64,
    /// Steps before the first cycle. Default 0.
    pub skip_first: u64,
    /// The first cycle begins without its `wait`. Default false.
    pub skip_first_wait: bool,
}

impl Default for ScheduleOption {
    fn default() -> Self {
        Self { wait: 0, warmup: 0, active: 1, repeat: 0, skip_first: 0, skip_first_wait: false }
    }
}

impl ScheduleOption {
    /// Checks that something is recorded.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `active` is 0.
    ///
    /// ```
    /// # use accelerate_core::config::ScheduleOption;
    /// let schedule = ScheduleOption { active: 0, ..Default::default() };
    /// assert_eq!(schedule.check().unwrap_err().to_string(), "schedule_option.active is 0, but must be at least 1");
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.active == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "schedule_option.active" }.into());
        }
        Ok(())
    }
}
