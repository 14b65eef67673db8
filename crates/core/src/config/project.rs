//! Where a run writes.

use crate::checkpoint::{Retention, checkpoint_name};
use crate::settings::record::record;
use std::path::{Path, PathBuf};

record! {
    /// Where a run writes its checkpoints and logs (`ProjectConfiguration` of the reference,
    /// `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{ProjectConfiguration, ProjectSettings};
    /// use std::path::{Path, PathBuf};
    /// let project = ProjectSettings::from(ProjectConfiguration {
    ///     project_dir: Some(PathBuf::from("runs")),
    ///     logging_dir: Some(PathBuf::from("logs")),
    ///     ..Default::default()
    /// });
    /// assert_eq!(project.resolved_logging_dir(), Path::new("runs/logs"));
    /// assert_eq!(project.checkpoint_dir(3), Path::new("runs/checkpoints/checkpoint_3"));
    /// ```
    ProjectConfiguration => ProjectSettings, section "project_config", keys "", variables "ACCELERATE_PROJECT_" {
        /// Folder of everything the run writes. Default `None`, which means the current folder.
        project_dir: PathBuf => setting().seed_default(".");
        /// Folder of logs; a relative one is inside `project_dir`. Default `None`: `project_dir` itself. Python
        /// Accelerate takes a relative one as it is.
        logging_dir: PathBuf => setting();
        /// Name checkpoints `checkpoints/checkpoint_<iteration>` inside `project_dir`. Default false.
        automatic_checkpoint_naming: bool = false => setting();
        /// How many automatically named checkpoints to keep. Default `None`: all.
        total_limit: usize => setting();
        /// Keep, beside the newest `total_limit`, every automatically named checkpoint whose number is a multiple of this. Default
        /// `None`; Python Accelerate has no such field.
        keep_every: usize => setting().at_least(1);
        /// Keep, beside the newest `total_limit`, so many automatically named checkpoints with the largest metric, as the program has
        /// given it to `set_checkpoint_metric`. Default `None`; Python Accelerate has no such field.
        keep_best: usize => setting();
        /// Number of the next automatically named checkpoint. Default 0.
        iteration: usize = 0 => setting();
        /// The other documented spelling of `automatic_checkpoint_naming`: number checkpoints by iteration.
        /// Default false; Python Accelerate has no such field. Either of the two turns naming on.
        iteration_checkpoints: bool = false => setting();
        /// Write on the main process of every machine, not only on that of the first. Default false.
        save_on_each_node: bool = false => setting();
        /// Leave frozen parameters out of the checkpoints of `save_state`, such as the weights that an adapter is trained beside. A
        /// checkpoint then says what is left out, and `load_state` compares that with the model. Default false; Python Accelerate
        /// has no such field.
        adapter_only: bool = false => setting();
    }
}

impl ProjectSettings {
    /// The folder of everything the run writes: `project_dir`, or the current folder.
    ///
    /// ```
    /// # use accelerate_core::config::ProjectSettings;
    /// assert_eq!(ProjectSettings::default().resolved_project_dir(), std::path::Path::new("."));
    /// ```
    pub fn resolved_project_dir(&self) -> &Path {
        self.project_dir.as_deref().unwrap_or(Path::new("."))
    }

    /// The folder of logs: `logging_dir` inside the project folder, or the project folder.
    ///
    /// ```
    /// # use accelerate_core::config::ProjectSettings;
    /// let absolute = ProjectSettings { logging_dir: Some("/logs".into()), ..Default::default() };
    /// assert_eq!(absolute.resolved_logging_dir(), std::path::Path::new("/logs"));
    /// ```
    pub fn resolved_logging_dir(&self) -> PathBuf {
        match &self.logging_dir {
            Some(logging_dir) => self.resolved_project_dir().join(logging_dir),
            None => self.resolved_project_dir().to_owned(),
        }
    }

    /// Has anybody said where logs belong? The current folder is nobody's wish, so trackers do not write there.
    pub const fn has_logging_dir(&self) -> bool {
        self.logging_dir.is_some() || self.project_dir.is_some()
    }

    /// Whether checkpoints are named and numbered automatically.
    ///
    /// ```
    /// # use accelerate_core::config::ProjectSettings;
    /// let project = ProjectSettings { iteration_checkpoints: true, ..Default::default() };
    /// assert!(project.names_checkpoints());
    /// ```
    pub const fn names_checkpoints(&self) -> bool {
        self.automatic_checkpoint_naming || self.iteration_checkpoints
    }

    /// The folder of all automatically named checkpoints.
    pub fn checkpoints_dir(&self) -> PathBuf {
        self.resolved_project_dir().join("checkpoints")
    }

    /// Which automatically named checkpoints stay.
    pub const fn retention(&self) -> Retention {
        Retention { total_limit: self.total_limit, keep_every: self.keep_every, keep_best: self.keep_best }
    }

    /// The folder of the automatically named checkpoint number `iteration`.
    pub fn checkpoint_dir(&self, iteration: usize) -> PathBuf {
        self.checkpoints_dir().join(checkpoint_name(iteration))
    }
}
