//! A finished recording.

use super::{Event, KeyAverages, KeyAveragesOptions};
use crate::error::{ProfileError, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use torch_ext::profiler::Trace;

/// What was recorded in one cycle of a schedule, or from beginning to end without one.
#[derive(Debug)]
pub struct ProfileTrace {
    recording: Mutex<Recording>,
    step: u64,
    cycle: u64,
}

#[derive(Debug)]
struct Recording {
    trace: Trace,
    /// Where libtorch has written it, which it does once.
    written: Option<PathBuf>,
}

impl ProfileTrace {
    pub(super) fn new(trace: Trace, step: u64, cycle: u64) -> Self {
        Self { recording: Mutex::new(Recording { trace, written: None }), step, cycle }
    }

    /// Number of steps that had ended when the recording did.
    pub fn step_num(&self) -> u64 {
        self.step
    }

    /// Number of the schedule's cycle, from 0.
    pub fn cycle(&self) -> u64 {
        self.cycle
    }

    /// Everything that was recorded.
    ///
    /// # Errors
    /// libtorch's.
    pub fn events(&self) -> Result<Vec<Event>> {
        Ok(self.recording().trace.events()?)
    }

    /// Sums over events of the same name, or of the same name and input shapes: counts, times, memory. They display as a table.
    ///
    /// ```
    /// use accelerate::{Accelerator, ProfileKwargs, profile::KeyAveragesOptions, tch::Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let kwargs = ProfileKwargs { record_shapes: Some(true), ..Default::default() };
    /// let (_, trace) = accelerator.profile(kwargs, |_| {
    ///     Ok(Tensor::from_slice(&[1f32]).f_relu()? + Tensor::from_slice(&[1f32, 2.0]).f_relu()?)
    /// })?;
    /// let averages = trace.unwrap().key_averages(KeyAveragesOptions { group_by_input_shape: true })?;
    /// assert_eq!(averages.rows().iter().filter(|row| row.name == "aten::relu").count(), 2);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// libtorch's.
    pub fn key_averages(&self, options: KeyAveragesOptions) -> Result<KeyAverages> {
        Ok(KeyAverages::of(&self.events()?, options))
    }

    /// Writes the recording in Chrome's JSON format, for `chrome://tracing` or Perfetto; an existing file is replaced.
    ///
    /// ```
    /// use accelerate::{Accelerator, tch::Tensor};
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let (_, trace) = accelerator.profile(None, |_| Ok(Tensor::from_slice(&[1.0f32]).f_relu()?))?;
    /// # let path = std::env::temp_dir().join(format!("accelerate-trace-doc-{}.json", std::process::id()));
    /// trace.unwrap().export_chrome_trace(&path)?;
    /// assert!(path.is_file());
    /// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// A file that cannot be written. libtorch writes a recording once; further files are copies of the first, which must
    /// still be there.
    pub fn export_chrome_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut recording = self.recording();
        match &recording.written {
            Some(first) if first == path => Ok(()),
            Some(first) => {
                let (from, to) = (first.clone(), path.to_owned());
                std::fs::copy(first, path).map_err(|source| ProfileError::Copy { from, to, source })?;
                Ok(())
            }
            None => {
                recording.trace.save(path)?;
                recording.written = Some(path.to_owned());
                Ok(())
            }
        }
    }

    fn recording(&self) -> std::sync::MutexGuard<'_, Recording> {
        // Whole after every statement, also where a handler has panicked.
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
