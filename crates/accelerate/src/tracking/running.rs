//! The trackers of an accelerator, from their start to their end.

use super::{TrackerHandle, TrackerRun, Value, Values, Wanted};
use crate::error::{Error, Result, TrackingError};
use crate::messages;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Options for trackers, by their names.
pub type TrackerKwargs = BTreeMap<String, Values>;

/// What [`Accelerator::init_trackers`](crate::Accelerator::init_trackers) is told beside the name of the project. [`Values`] alone
/// are the configuration.
#[derive(Debug, Default)]
pub struct InitTrackersOptions {
    /// The settings of the run, for trackers to store. Default `None`.
    pub config: Option<Values>,
    /// Options of single trackers. Default none.
    pub init_kwargs: TrackerKwargs,
}

impl From<Values> for InitTrackersOptions {
    fn from(config: Values) -> Self {
        Self { config: Some(config), ..Self::default() }
    }
}

impl From<Option<Values>> for InitTrackersOptions {
    fn from(config: Option<Values>) -> Self {
        Self { config, ..Self::default() }
    }
}

/// What [`Accelerator::log`](crate::Accelerator::log) is told beside the values. A number alone is the step.
#[derive(Debug, Default)]
pub struct LogOptions {
    /// The step of the training. Default `None`.
    pub step: Option<usize>,
    /// Options of single trackers. Default none.
    pub log_kwargs: TrackerKwargs,
}

impl From<usize> for LogOptions {
    fn from(step: usize) -> Self {
        Some(step).into()
    }
}

impl From<Option<usize>> for LogOptions {
    fn from(step: Option<usize>) -> Self {
        Self { step, ..Self::default() }
    }
}

/// Which process it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pub(crate) index: usize,
    pub(crate) count: usize,
}

impl Process {
    const fn is_main(self) -> bool {
        self.index == 0
    }
}

/// Those that are wanted, and those that are at work. Dropped, it finishes them.
#[derive(Debug)]
pub(crate) struct Trackers {
    wanted: Vec<Wanted>,
    logging_dir: Option<PathBuf>,
    process: Process,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    project: String,
    /// On this process.
    trackers: Vec<TrackerHandle>,
}

impl Trackers {
    pub(crate) fn new(wanted: Vec<Wanted>, logging_dir: Option<PathBuf>, process: Process) -> Self {
        Self { wanted, logging_dir, process, running: Mutex::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        // Whole after every statement, also where a tracker has panicked.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> Vec<String> {
        self.wanted.iter().map(|wanted| wanted.name().to_owned()).collect()
    }

    /// Those that this process calls.
    fn own(&self) -> impl Iterator<Item = &Wanted> {
        self.wanted.iter().filter(|wanted| wanted.is_called(self.process.is_main()))
    }

    pub(crate) fn start(&self, project_name: &str, options: InitTrackersOptions) -> Result<()> {
        let InitTrackersOptions { config, init_kwargs } = options;
        let mut init_kwargs = self.resolved("init_kwargs", init_kwargs)?;
        let mut running = self.lock();
        if let Some(Running { project, .. }) = &*running {
            return Err(TrackingError::Started { project: project.clone() }.into());
        }
        let handles: Vec<TrackerHandle> = self.own().map(Wanted::handle).collect();
        let config = config.filter(|_| !handles.is_empty()).map(Values::resolve).transpose()?;
        let Process { index: process_index, count: num_processes } = self.process;
        let logging_dir: Option<&Path> = self.logging_dir.as_deref();
        let mut started = Vec::new();
        for handle in handles {
            let init_kwargs = init_kwargs.remove(handle.name()).unwrap_or_default();
            let run = TrackerRun { project_name, logging_dir, init_kwargs: &init_kwargs, process_index, num_processes };
            let start = || {
                let mut tracker = handle.lock();
                tracker.start(&run)?;
                config.as_ref().map_or(Ok(()), |config| tracker.store_init_configuration(config))
            };
            if let Err(error) = start() {
                // The run has no trackers then, and those before it write no more.
                drop(finish_all(&started));
                return Err(of_tracker(&handle, error));
            }
            started.push(handle);
        }
        *running = Some(Running { project: project_name.to_owned(), trackers: started });
        Ok(())
    }

    pub(crate) fn log(&self, values: Values, options: LogOptions) -> Result<()> {
        let LogOptions { step, log_kwargs } = options;
        let mut log_kwargs = self.resolved("log_kwargs", log_kwargs)?;
        let trackers = self.running("log")?;
        if trackers.is_empty() {
            return Ok(());
        }
        let values = values.resolve()?;
        let log = |handle: &TrackerHandle| {
            let kwargs = log_kwargs.remove(handle.name()).unwrap_or_default();
            handle.lock().log(&values, step, &kwargs)
        };
        of_all(&trackers, log)
    }

    /// Those at work on this process.
    pub(crate) fn running(&self, call: &'static str) -> Result<Vec<TrackerHandle>> {
        match &*self.lock() {
            Some(running) => Ok(running.trackers.clone()),
            // A process without trackers of its own need not have been told that there is a project.
            None if self.own().next().is_none() => Ok(Vec::new()),
            None => Err(TrackingError::NotStarted { call }.into()),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Result<Option<TrackerHandle>> {
        if !self.wanted.iter().any(|wanted| wanted.name() == name) {
            return Err(TrackingError::NoTracker { name: name.to_owned(), known: self.names() }.into());
        }
        Ok(self.running("get_tracker")?.into_iter().find(|handle| handle.name() == name))
    }

    /// Each of them finishes, whatever the others do.
    pub(crate) fn finish(&self) -> Result<()> {
        let running = self.lock().take();
        running.map_or(Ok(()), |running| finish_all(&running.trackers))
    }

    /// Options for trackers that there are.
    fn resolved(&self, what: &'static str, kwargs: TrackerKwargs) -> Result<BTreeMap<String, Vec<(String, Value)>>> {
        let mut resolved = BTreeMap::new();
        for (name, values) in kwargs {
            if !self.wanted.iter().any(|wanted| wanted.name() == name) {
                return Err(TrackingError::NoTrackerForOptions { what, name, known: self.names() }.into());
            }
            resolved.insert(name, values.resolve()?);
        }
        Ok(resolved)
    }
}

impl Drop for Trackers {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            messages::warning_here!("{error}");
        }
    }
}

fn finish_all(trackers: &[TrackerHandle]) -> Result<()> {
    of_all(trackers, |handle| handle.lock().finish())
}

/// Calls all of them. The first failure is returned, and the others are told.
fn of_all(trackers: &[TrackerHandle], mut call: impl FnMut(&TrackerHandle) -> Result<()>) -> Result<()> {
    let mut first = Ok(());
    for handle in trackers {
        let Err(error) = call(handle) else { continue };
        let error = of_tracker(handle, error);
        match &first {
            Ok(()) => first = Err(error),
            Err(_) => messages::warning_here!("{error}"),
        }
    }
    first
}

fn of_tracker(handle: &TrackerHandle, error: Error) -> Error {
    error.context(format!("the tracker \"{}\"", handle.name()))
}
