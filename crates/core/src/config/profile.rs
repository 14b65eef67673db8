//! What a profiler records, and in which steps.

use super::Callback;
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::names::spelled_enum;
use crate::settings::object_value;
use crate::settings::record::record;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

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

object_value!(ScheduleOption);

record! {
    /// What a profiler records (`ProfileKwargs` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{ProfileKwargs, ProfileSettings};
    /// let kwargs = ProfileKwargs { record_shapes: Some(true), ..Default::default() };
    /// assert!(ProfileSettings::from(kwargs).record_shapes);
    /// ```
    ProfileKwargs => ProfileSettings, section "profile_config", keys "profile_", variables "ACCELERATE_PROFILE_" {
        /// What to record: cpu, cuda.
        ///
        /// Default `None`: the CPU, and CUDA where the accelerator computes there. Devices that libtorch was not built for
        /// are an error.
        activities: Vec<ProfilerActivity> => setting();
        /// In which steps, counted by `Profiler::step`. Default `None`: from beginning to end.
        schedule_option: ScheduleOption => setting();
        /// Called with each finished recording: at the end of each cycle, and at the end of the block if that cuts a cycle
        /// short. Default `None`.
        #[serde(skip)]
        on_trace_ready: Callback => setting().code_only();
        /// Record the shapes of the operators' inputs. Default false.
        record_shapes: bool = false => setting();
        /// Record allocations and releases of tensor memory. Default false.
        profile_memory: bool = false => setting();
        /// Record where in the source of a TorchScript module an operator was called.
        ///
        /// Default false. There is no Python here to have a stack, and Rust's is not recorded: operators that are called from
        /// Rust have none, `Profiler::record_function` names them.
        with_stack: bool = false => setting();
        /// Estimate the floating-point operations of matrix products, convolutions, sums and products. Default false.
        with_flops: bool = false => setting();
        /// Record which modules of a TorchScript module called an operator; modules written in Rust have none, as for
        /// `with_stack`. Default false.
        with_modules: bool = false => setting();
        /// Folder of traces in Chrome's JSON format, made if it is missing: `profile_<rank>.json`, and for further cycles of a
        /// schedule `profile_<rank>_cycle_1.json` and so on. A later call of `profile` writes over the files of an earlier
        /// one. Default `None`: nothing is written. Python Accelerate keeps the last cycle only.
        output_trace_dir: PathBuf => setting();
    }
}
