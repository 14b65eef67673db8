//! What a tracker is.

use super::Value;
use crate::error::{Result, TrackingError};
use std::any::{Any, type_name};
use std::fmt;
use std::ops::DerefMut;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The run that a tracker is started for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TrackerRun<'a> {
    /// As [`Accelerator::init_trackers`](crate::Accelerator::init_trackers) was told.
    pub project_name: &'a str,
    /// `logging_dir` of the [`ProjectConfiguration`](crate::ProjectConfiguration), else `project_dir`, else nothing.
    pub logging_dir: Option<&'a Path>,
    /// What `init_kwargs` has for this tracker.
    pub init_kwargs: &'a [(String, Value)],
    /// Number of this process among all.
    pub process_index: usize,
    /// Count of all processes.
    pub num_processes: usize,
}

impl<'a> TrackerRun<'a> {
    /// The folder for a tracker that requires one.
    ///
    /// # Errors
    /// There is none. A tracker whose [`requires_logging_directory`](GeneralTracker::requires_logging_directory) says that it needs
    /// it does not come to this: the accelerator is not built then.
    pub fn logging_dir(&self) -> Result<&'a Path> {
        self.logging_dir.ok_or_else(|| TrackingError::NoLoggingDir.into())
    }
}

/// Hands the values of a run to somebody: a file, a terminal, a service (`GeneralTracker` of the reference, `tracking.py`). Implement
/// it for what you use.
///
/// Calls come one after the other, and on the main process only, unless
/// [`main_process_only`](Self::main_process_only) says otherwise. None of them is collective, so none may call a collective.
///
/// ```
/// use accelerate::Accelerator;
/// use accelerate::tracking::{GeneralTracker, TrackerRun, Value};
///
/// /// Keeps the largest value of each name.
/// #[derive(Default)]
/// struct Best(std::collections::BTreeMap<String, f64>);
///
/// impl GeneralTracker for Best {
///     fn name(&self) -> &str {
///         "best"
///     }
///
///     fn log(&mut self, values: &[(String, Value)], _: Option<usize>, _: &[(String, Value)]) -> accelerate::Result<()> {
///         for (name, number) in values.iter().filter_map(|(name, value)| Some((name, value.number()?))) {
///             let best = self.0.entry(name.clone()).or_insert(number);
///             *best = best.max(number);
///         }
///         Ok(())
///     }
/// }
///
/// let accelerator = Accelerator::builder().cpu(true).log_with(Best::default()).build()?;
/// accelerator.init_trackers("doc", None)?;
/// for (step, accuracy) in [0.5, 0.75, 0.7].into_iter().enumerate() {
///     accelerator.log([("accuracy", accuracy)], step)?;
/// }
/// let tracker = accelerator.get_tracker("best")?;
/// assert_eq!(tracker.map(|tracker| tracker.with(|best: &mut Best| best.0["accuracy"])).transpose()?, Some(0.75));
/// accelerator.end_training()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait GeneralTracker: Any + Send {
    /// What it is called in [`get_tracker`](crate::Accelerator::get_tracker), `init_kwargs` and `log_kwargs`. Always the same.
    fn name(&self) -> &str;

    /// Does it write below the folder of logs? Then an accelerator without one is not built. Default false. Always the same.
    fn requires_logging_directory(&self) -> bool {
        false
    }

    /// Is it called on the main process only? Default true. Otherwise every process starts its own and hands its own values to it.
    /// Always the same.
    fn main_process_only(&self) -> bool {
        true
    }

    /// The run begins. Before this, nothing else is called.
    ///
    /// # Errors
    /// What keeps it from working; `init_trackers` returns it.
    fn start(&mut self, run: &TrackerRun<'_>) -> Result<()> {
        let _ = run;
        Ok(())
    }

    /// The settings of the run, once after [`start`](Self::start), if the program has given them.
    ///
    /// # Errors
    /// `init_trackers` returns them.
    fn store_init_configuration(&mut self, values: &[(String, Value)]) -> Result<()> {
        let _ = values;
        Ok(())
    }

    /// Values of one step, in the order in which the program has given them. Tensors have become numbers. `kwargs` is what
    /// `log_kwargs` has for this tracker.
    ///
    /// # Errors
    /// `Accelerator::log` returns them.
    fn log(&mut self, values: &[(String, Value)], step: Option<usize>, kwargs: &[(String, Value)]) -> Result<()>;

    /// The run ends: whatever is still on its way has to arrive. After this, nothing is called but [`start`](Self::start).
    ///
    /// # Errors
    /// What did not arrive; `end_training` returns it.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A tracker of an accelerator. Clones are the same tracker.
#[derive(Clone)]
pub struct TrackerHandle {
    name: String,
    requires_logging_directory: bool,
    main_process_only: bool,
    tracker: Arc<Mutex<Box<dyn GeneralTracker>>>,
}

impl TrackerHandle {
    pub(super) fn new(tracker: impl GeneralTracker) -> Self {
        Self {
            name: tracker.name().to_owned(),
            requires_logging_directory: tracker.requires_logging_directory(),
            main_process_only: tracker.main_process_only(),
            tracker: Arc::new(Mutex::new(Box::new(tracker))),
        }
    }

    /// What the tracker is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn requires_logging_directory(&self) -> bool {
        self.requires_logging_directory
    }

    /// Is it called on this process?
    pub(super) fn is_called(&self, is_main_process: bool) -> bool {
        is_main_process || !self.main_process_only
    }

    /// The tracker, for calls that are meant for it alone. The accelerator waits as long as it is held.
    pub fn lock(&self) -> impl DerefMut<Target = Box<dyn GeneralTracker>> + '_ {
        self.guard()
    }

    fn guard(&self) -> MutexGuard<'_, Box<dyn GeneralTracker>> {
        // Whether a tracker that has panicked can go on, is its own affair.
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tracker as the type that it was made of (`get_tracker(name, unwrap=True)` of the reference). The accelerator waits for
    /// the function.
    ///
    /// # Errors
    /// It is of another type.
    pub fn with<T: GeneralTracker, R>(&self, function: impl FnOnce(&mut T) -> R) -> Result<R> {
        let mut guard = self.guard();
        let tracker: &mut dyn Any = &mut **guard;
        match tracker.downcast_mut::<T>() {
            Some(tracker) => Ok(function(tracker)),
            None => Err(TrackingError::OtherType { name: self.name.clone(), wanted: type_name::<T>() }.into()),
        }
    }
}

impl fmt::Debug for TrackerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackerHandle").field("name", &self.name).finish_non_exhaustive()
    }
}
