//! The profiler that a block is given: it follows the schedule, step by step.

use super::ProfileTrace;
use super::kwargs::{OnTraceReady, options};
use crate::error::{ProfileError, Result};
use accelerate_core::config::ProfileSettings;
use accelerate_core::profile::{ProfilerAction, transition};
use tch::Device;
use torch_ext::profiler::{ProfilerOptions, RecordFunction, record_function};

/// Follows the steps of a loop inside of [`Accelerator::profile`](crate::Accelerator::profile).
///
/// It belongs to the thread that the block runs on.
#[derive(Debug)]
pub struct Profiler {
    kwargs: ProfileSettings,
    options: ProfilerOptions,
    rank: usize,
    world_size: usize,
    step: u64,
    action: ProfilerAction,
    cycle: u64,
    // Before `running`: a range must end while it is recorded.
    range: Option<RecordFunction>,
    running: Option<torch_ext::profiler::Profiler>,
    last: Option<ProfileTrace>,
}

impl Profiler {
    /// For rank `rank` of `world_size`, which computes on `device`.
    pub(crate) fn start(kwargs: ProfileSettings, device: Device, rank: usize, world_size: usize) -> Result<Self> {
        let options = options(&kwargs, device)?;
        let mut profiler = Self {
            kwargs,
            options,
            rank,
            world_size,
            step: 0,
            action: ProfilerAction::None,
            cycle: 0,
            range: None,
            running: None,
            last: None,
        };
        let first = profiler.scheduled_action();
        profiler.go_to(Some(first))?;
        Ok(profiler)
    }

    /// Ends a step of the loop: the schedule moves on. Without a schedule steps only divide the recording, into ranges
    /// `ProfilerStep#0`, `ProfilerStep#1` and so on.
    ///
    /// # Errors
    /// A trace that cannot be written, and those of `on_trace_ready`, where a cycle ends; libtorch's.
    pub fn step(&mut self) -> Result<()> {
        self.range = None;
        self.step += 1;
        self.go_to(Some(self.scheduled_action()))
    }

    /// Number of steps that have ended.
    pub fn step_num(&self) -> u64 {
        self.step
    }

    /// Runs `body` as a range of this name in the recording (`torch.profiler.record_function`).
    ///
    /// ```
    /// use accelerate::{Accelerator, tch::Tensor};
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let (_, trace) = accelerator.profile(None, |profiler| {
    ///     profiler.record_function("tokenize", || Ok(Tensor::from_slice(&[1.0f32]).f_relu()?))
    /// })?;
    /// assert!(trace.unwrap().key_averages(Default::default())?.get("tokenize").is_some());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`.
    pub fn record_function<T>(&self, name: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let _range = record_function(name)?;
        body()
    }

    /// Ends the last step and gives the last recording.
    pub(crate) fn finish(mut self) -> Result<Option<ProfileTrace>> {
        self.range = None;
        self.go_to(None)?;
        Ok(self.last)
    }

    fn scheduled_action(&self) -> ProfilerAction {
        self.kwargs.schedule_option.map_or(ProfilerAction::Record, |schedule| schedule.action(self.step))
    }

    fn go_to(&mut self, next: Option<ProfilerAction>) -> Result<()> {
        let change = transition(self.action, next);
        self.action = next.unwrap_or_default();
        if change.finish {
            self.hand_over()?;
        }
        if change.discard {
            self.running = None;
        }
        if change.prepare {
            self.running = Some(torch_ext::profiler::Profiler::prepare(&self.options).map_err(ProfileError::of_start)?);
        }
        if change.record
            && let Some(running) = &mut self.running
        {
            running.record()?;
            let place = format!("{{\"rank\": {}, \"world_size\": {}}}", self.rank, self.world_size);
            running.add_metadata_json("distributedInfo", &place)?;
        }
        if matches!(self.action, ProfilerAction::Record | ProfilerAction::RecordAndSave) {
            self.range = Some(record_function(&format!("ProfilerStep#{}", self.step))?);
        }
        Ok(())
    }

    /// Ends a cycle: writes its trace, and shows it to the user.
    fn hand_over(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let trace = ProfileTrace::new(running.stop()?, self.step, self.cycle);
        if let Some(folder) = &self.kwargs.output_trace_dir {
            std::fs::create_dir_all(folder).map_err(|source| ProfileError::Write { path: folder.clone(), source })?;
            let name = match self.cycle {
                0 => format!("profile_{}.json", self.rank),
                cycle => format!("profile_{}_cycle_{cycle}.json", self.rank),
            };
            trace.export_chrome_trace(folder.join(name))?;
        }
        self.cycle += 1;
        let handler = self.kwargs.on_trace_ready.as_ref();
        if let Some(handler) = handler.and_then(|handler| handler.downcast_ref::<OnTraceReady>()) {
            handler.call(&trace)?;
        }
        self.last = Some(trace);
        Ok(())
    }
}
