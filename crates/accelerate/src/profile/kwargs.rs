//! What is recorded, and where it goes.

use super::ProfileTrace;
use crate::error::{ProfileError, Result};
use accelerate_core::config::{Callback, ProfileSettings, ProfilerActivity};
use std::fmt;
use std::sync::Arc;
use tch::Device;
use torch_ext::profiler::ProfilerOptions;

/// What libtorch is to record for an accelerator on `device`.
pub(super) fn options(settings: &ProfileSettings, device: Device) -> Result<ProfilerOptions> {
    if let Some(schedule) = &settings.schedule_option {
        schedule.check()?;
    }
    let by_device = settings.activities.is_none();
    let (mut cpu, mut cuda) = (by_device, by_device && device.is_cuda());
    for activity in settings.activities.iter().flatten() {
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
        record_shapes: settings.record_shapes,
        profile_memory: settings.profile_memory,
        with_stack: settings.with_stack,
        with_flops: settings.with_flops,
        with_modules: settings.with_modules,
    })
}

/// What to do with a finished recording.
///
/// ```
/// use accelerate::profile::{OnTraceReady, SortBy};
/// let print = OnTraceReady::new(|trace| {
///     println!("{}", trace.key_averages(Default::default())?.table(SortBy::CpuTime, 10));
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

/// For `on_trace_ready` of `ProfileKwargs`.
impl From<OnTraceReady> for Callback {
    fn from(handler: OnTraceReady) -> Self {
        Self::new(handler)
    }
}

impl fmt::Debug for OnTraceReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnTraceReady")
    }
}
