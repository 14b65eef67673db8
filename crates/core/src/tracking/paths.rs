//! Where a tracker writes.

use crate::error::tracking::TrackingErrorKind;
use crate::{Error, Result};
use std::path::{Component, Path, PathBuf};

/// The folder of a project below the folder of logs, as the reference joins them. A name with a `/` is a folder in a folder; an empty
/// one is the folder of logs itself.
///
/// ```
/// use accelerate_core::tracking::run_folder;
/// use std::path::Path;
/// assert_eq!(run_folder(Path::new("logs"), "team/bert")?, Path::new("logs/team/bert"));
/// assert!(run_folder(Path::new("logs"), "../bert").is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// A name that leads out of the folder of logs.
pub fn run_folder(logging_dir: &Path, project_name: &str) -> Result<PathBuf> {
    Ok(logging_dir.join(inside("project_name", project_name)?))
}

/// The folder of one line of a chart that has several (`add_scalars` of PyTorch): each has an event file of its own.
///
/// ```
/// use accelerate_core::tracking::scalars_folder;
/// use std::path::Path;
/// assert_eq!(scalars_folder(Path::new("logs"), "loss/all", "train")?, Path::new("logs/loss_all_train"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// Names that lead out of the folder.
pub fn scalars_folder(folder: &Path, main_tag: &str, tag: &str) -> Result<PathBuf> {
    let name = format!("{}_{tag}", main_tag.replace('/', "_"));
    Ok(folder.join(inside("the name of a value", &name)?))
}

fn inside<'a>(what: &'static str, name: &'a str) -> Result<&'a Path> {
    let path = Path::new(name);
    let stays = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !stays || name.contains('\0') {
        return Err(Error::new(TrackingErrorKind::LeadsElsewhere { what, found: name.to_owned() }));
    }
    Ok(path)
}
