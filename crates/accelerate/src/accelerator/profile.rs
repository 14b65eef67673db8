//! Profiling a block of a program.

use super::Accelerator;
use crate::error::{Error, Result};
use crate::profile::{ProfileKwargs, ProfileTrace, Profiler};
use accelerate_core::config::ProfileSettings;

impl Accelerator {
    /// Records what libtorch does inside `body` on this thread, as `kwargs` say; `None` stands for the
    /// [`ProfileKwargs`] given to [`AcceleratorBuilder::kwargs_handler`](crate::AcceleratorBuilder::kwargs_handler).
    ///
    /// Returns what `body` returns, and the last recording; there is none if a schedule came to no cycle. With
    /// `output_trace_dir` each rank writes Chrome traces there, for `chrome://tracing` or Perfetto, and ranks wait for each
    /// other at the end: then it is collective.
    ///
    /// There is one profiler in a process: ranks that are threads cannot profile at the same time.
    ///
    /// ```
    /// use accelerate::Accelerator;
    /// use accelerate::profile::SortBy;
    /// use accelerate::tch::{Device, Kind, Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let x = Tensor::ones([16, 16], (Kind::Float, Device::Cpu));
    /// let (_, trace) = accelerator.profile(None, |_| Ok(x.f_matmul(&x)?.f_relu()?))?;
    /// let averages = trace.expect("without a schedule everything is recorded").key_averages(Default::default())?;
    /// accelerate::main_println!(accelerator, "{}", averages.table(SortBy::SelfCpuTime, 10));
    /// assert_eq!(averages.get("aten::mm").map(|row| row.count), Some(1));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// Here, steps 1 and 3 of a loop are recorded, each after a step of warmup:
    ///
    /// ```
    /// use accelerate::profile::{OnTraceReady, ProfileKwargs};
    /// use accelerate::tch::Tensor;
    /// use accelerate::{Accelerator, ScheduleOption};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let kwargs = ProfileKwargs {
    ///     schedule_option: Some(ScheduleOption { warmup: 1, active: 1, repeat: 2, ..Default::default() }),
    ///     on_trace_ready: Some(OnTraceReady::new(|trace| {
    ///         println!("{}", trace.key_averages(Default::default())?);
    ///         Ok(())
    ///     }).into()),
    ///     ..Default::default()
    /// };
    /// let (steps, _) = accelerator.profile(kwargs, |profiler| {
    ///     for _ in 0..6 {
    ///         let _ = Tensor::from_slice(&[1.0f32]).f_relu()?;
    ///         profiler.step()?;
    ///     }
    ///     Ok(profiler.step_num())
    /// })?;
    /// assert_eq!(steps, 6);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`, after which nothing is written; settings that cannot be honoured; another profiler in this process; a
    /// trace that cannot be written; those of `on_trace_ready`; a peer that is gone.
    pub fn profile<T>(
        &self,
        kwargs: impl Into<Option<ProfileKwargs>>,
        body: impl FnOnce(&mut Profiler) -> Result<T>,
    ) -> Result<(T, Option<ProfileTrace>)> {
        let kwargs = kwargs.into().map_or_else(|| self.config().profile.clone(), ProfileSettings::from);
        let writes_traces = kwargs.output_trace_dir.is_some();
        let mut profiler = Profiler::start(kwargs, self.device(), self.process_index(), self.num_processes())?;
        let output = body(&mut profiler);
        // What has failed leaves no trace behind.
        let finished = if output.is_ok() { profiler.finish() } else { Ok(None) };
        let is_lost = |error: &Error| error.is_timeout() || error.is_peer_failure();
        let waited = match writes_traces && !output.as_ref().is_err_and(is_lost) {
            // Also where this rank has failed or could not write, so that the others do not wait for it in vain.
            true => self.wait_for_everyone(),
            false => Ok(()),
        };
        let output = output?;
        waited?;
        Ok((output, finished?))
    }
}
