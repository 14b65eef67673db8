//! What is recorded, and where it goes.

use super::ProfileTrace;
use crate::error::{ProfileError, Result};
use accelerate_core::config::{ProfilerActivity, ScheduleOption};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tch::Device;
use torch_ext::profiler::ProfilerOptions;

/// What [`Accelerator::profile`](crate::Accelerator::profile) records (`ProfileKwargs` of the reference,
/// `utils/dataclasses.py`).
///
/// ```
/// use accelerate::Accelerator;
/// use accelerate::profile::ProfileKwargs;
/// use accelerate::tch::Tensor;
///
/// # let folder = std::env::temp_dir().join(format!("accelerate-profile-doc-{}", std::process::id()));
/// let kwargs = ProfileKwargs {
///     record_shapes: true,
///     output_trace_dir: Some(folder.clone()),
///     ..Default::default()
/// };
/// let accelerator = Accelerator::builder().cpu(true).kwargs_handler(kwargs).build()?;
/// accelerator.profile(None, |_| Ok(Tensor::from_slice(&[1.0f32]).f_relu()?))?;
/// assert!(folder.join("profile_0.json").is_file());
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ProfileKwargs {
    /// What to record. Default `None`: the CPU, and CUDA where the accelerator computes there. Devices that libtorch was
    /// not built for are an error.
    pub activities: Option<Vec<ProfilerActivity>>,
    /// In which steps, counted by [`Profiler::step`](super::Profiler::step). Default `None`: from beginning to end.
    pub schedule_option: Option<ScheduleOption>,
    /// Called with each finished recording: at the end of each cycle, and at the end of the block if that cuts a cycle
    /// short. Default `None`.
    pub on_trace_ready: Option<OnTraceReady>,
    /// Record the shapes of the operators' inputs. Default false.
    pub record_shapes: bool,
    /// Record allocations and releases of tensor memory. Default false.
    pub profile_memory: bool,
    /// Record where in the source of a TorchScript module ([`ScriptModule`](crate::nn::ScriptModule)) an operator was
    /// called. Default false. There is no Python here to have a stack, and Rust's is not recorded: operators that are called
    /// from Rust have none, [`record_function`](super::Profiler::record_function) names them.
    pub with_stack: bool,
    /// Estimate the floating-point operations of matrix products, convolutions, sums and products. Default false.
    pub with_flops: bool,
    /// Record which modules of a TorchScript module called an operator; modules written in Rust have none, as for
    /// `with_stack`. Default false.
    pub with_modules: bool,
    /// Folder of traces in Chrome's JSON format, made if it is missing: `profile_<rank>.json`, and for further cycles of a
    /// schedule `profile_<rank>_cycle_1.json` and so on. A later call of `profile` writes over the files of an earlier
    /// one. Default `None`: nothing is written. Python Accelerate keeps the last cycle only.
    pub output_trace_dir: Option<PathBuf>,
}

impl ProfileKwargs {
    /// What libtorch is to record for an accelerator on `device`.
    pub(super) fn options(&self, device: Device) -> Result<ProfilerOptions> {
        if let Some(schedule) = &self.schedule_option {
            schedule.check()?;
        }
        let (mut cpu, mut cuda) = (self.activities.is_none(), self.activities.is_none() && device.is_cuda());
        for activity in self.activities.iter().flatten() {
            match activity {
                ProfilerActivity::Cpu => cpu = true,
                ProfilerActivity::Cuda => cuda = true,
                other => return Err(ProfileError::Activity { found: *other }.into()),
            }
        }
        if !cpu && !cuda {
            return Err(ProfileError::NoActivities.into());
        }
        if cuda && !tch::Cuda::is_available() {
            return Err(ProfileError::NoCuda.into());
        }
        Ok(ProfilerOptions {
            cpu,
            cuda,
            record_shapes: self.record_shapes,
            profile_memory: self.profile_memory,
            with_stack: self.with_stack,
            with_flops: self.with_flops,
            with_modules: self.with_modules,
        })
    }
}

/// What to do with a finished recording.
///
/// ```
/// use accelerate::profile::{OnTraceReady, SortBy};
/// let print = OnTraceReady::new(|trace| {
///     println!("{}", trace.key_averages()?.table(SortBy::CpuTime, 10));
///     Ok(())
/// });
/// ```
#[derive(Clone)]
pub struct OnTraceReady(Arc<Handler>);

type Handler = dyn Fn(&ProfileTrace) -> Result<()> + Send + Sync;

impl OnTraceReady {
    /// Wraps a closure.
    pub fn new(handler: impl Fn(&ProfileTrace) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(handler))
    }

    pub(super) fn call(&self, trace: &ProfileTrace) -> Result<()> {
        (self.0)(trace)
    }
}

impl fmt::Debug for OnTraceReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnTraceReady")
    }
}
