//! The accelerator's trackers, under the reference's names.

use super::Accelerator;
use crate::error::Result;
use crate::messages;
use crate::tracking::{InitTrackersOptions, LogOptions, TrackerHandle, Values};

impl Accelerator {
    /// Starts the trackers that [`log_with`](super::AcceleratorBuilder::log_with) named, for a project of this name, and has them store
    /// the settings of the run, if there are any. Built-in ones write into a folder of this name below the folder of logs.
    ///
    /// Not collective, and on processes that call no trackers it does nothing: it may be called on all processes or on the main
    /// process alone. A run that goes on from a checkpoint calls it as the run before did; what is there is added to.
    ///
    /// ```
    /// use accelerate::tracking::InitTrackersOptions;
    /// use accelerate::{Accelerator, ProjectConfiguration, values};
    ///
    /// # let folder = std::env::temp_dir().join(format!("accelerate-init-trackers-doc-{}", std::process::id()));
    /// let project = ProjectConfiguration { project_dir: Some(folder.clone()), ..Default::default() };
    /// let accelerator = Accelerator::builder().cpu(true).project_config(project).log_with("tensorboard").build()?;
    /// // Goes on at step 100: what was logged after that before the run was killed is not shown.
    /// let init_kwargs = [("tensorboard".to_owned(), values! { "purge_step" => 100 })].into();
    /// let config = Some(values! { "learning_rate" => 1e-3 });
    /// accelerator.init_trackers("demo", InitTrackersOptions { config, init_kwargs })?;
    /// accelerator.end_training()?;
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Trackers that are at work already; options that a tracker does not have, or for one that is not there; a name that leads out of
    /// the folder of logs; what keeps a tracker from working, such as a folder that cannot be written to. No tracker is at work
    /// then. The error is one of this process.
    #[track_caller]
    pub fn init_trackers(&self, project_name: &str, options: impl Into<InitTrackersOptions>) -> Result<()> {
        let _called = crate::status::here();
        self.0.trackers.start(project_name, options.into())
    }

    /// Hands values to the trackers: numbers, booleans, texts, maps of numbers, and tensors of one element. Without trackers it does
    /// nothing.
    ///
    /// Not collective, and ranks do not wait for each other. Only the main process logs its values, unless a tracker says otherwise;
    /// call it on all processes or on that one. Values of other processes count where they were gathered first
    /// ([`reduce`](Self::reduce), [`gather_for_metrics`](Self::gather_for_metrics)). A tensor is read only where it is logged: on a
    /// GPU the process waits for what it is computed from.
    ///
    /// ```
    /// use accelerate::tracking::LogOptions;
    /// use accelerate::{Accelerator, ProjectConfiguration, tch::Tensor, values};
    ///
    /// # let folder = std::env::temp_dir().join(format!("accelerate-log-doc-{}", std::process::id()));
    /// # let project = ProjectConfiguration { project_dir: Some(folder.clone()), ..Default::default() };
    /// let accelerator = Accelerator::builder().cpu(true).project_config(project).log_with("all").build()?;
    /// accelerator.init_trackers("demo", None)?;
    /// let loss = Tensor::from(0.25f32);
    /// accelerator.log([("loss", &loss)], 0)?;
    /// accelerator.log(values! { "phase" => "warm-up", "accuracy" => [("train", 0.9), ("dev", 0.8)], "loss" => &loss }, 1)?;
    /// let log_kwargs = [("tensorboard".to_owned(), values! { "double_precision" => true, "new_style" => true })].into();
    /// accelerator.log([("perplexity", 12.5)], LogOptions { step: Some(2), log_kwargs })?;
    /// accelerator.end_training()?;
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// A call before [`init_trackers`](Self::init_trackers); values that a tracker does not take, such as a tensor of several
    /// elements; a full disk. All other trackers have the values then, what was logged before stays, and the next call may succeed: a
    /// program that does not want to end for it looks at [`is_tracking`](crate::Error::is_tracking) and goes on. The error is one of
    /// this process.
    #[track_caller]
    pub fn log(&self, values: impl Into<Values>, options: impl Into<LogOptions>) -> Result<()> {
        let _called = crate::status::here();
        self.0.trackers.log(values.into(), options.into())
    }

    /// The tracker of this name, for calls that are meant for it alone: [`TrackerHandle::with`] is what `unwrap=True` is in
    /// the reference. `None` on a process that does not call it.
    ///
    /// # Errors
    /// `log_with` named no such tracker; a call before [`init_trackers`](Self::init_trackers).
    pub fn get_tracker(&self, name: &str) -> Result<Option<TrackerHandle>> {
        self.0.trackers.get(name)
    }

    /// The trackers at work on this process, in the order of `log_with`. None before [`init_trackers`](Self::init_trackers) and
    /// after [`end_training`](Self::end_training).
    pub fn trackers(&self) -> Vec<TrackerHandle> {
        self.0.trackers.running("trackers").unwrap_or_default()
    }

    /// Ends what goes on beside the training: finishes the trackers, and waits for the save in the background. To be called at the end
    /// of a program, which learns here of what went wrong last. [`init_trackers`](Self::init_trackers) may begin another project
    /// after it.
    ///
    /// Collective.
    ///
    /// # Errors
    /// As [`wait_for_save`](Self::wait_for_save), and what kept a tracker from finishing, on any process. An error on every rank. Where
    /// both fail, the save is the error, and the tracker a warning.
    #[track_caller]
    pub fn end_training(&self) -> Result<()> {
        let _called = crate::status::here();
        let finished = self.0.trackers.finish();
        // Whatever became of the trackers: the others wait for this process here.
        let saved = self.wait_for_save();
        if self.0.trackers.is_empty() {
            return saved;
        }
        if let (Err(error), Err(_)) = (&finished, &saved) {
            messages::warning_here!("{error}");
        }
        saved.and(self.group().agree_on_success("end_training", finished))
    }
}
