//! Hidden folders beside checkpoints, in which `convert` writes until all is complete.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use accelerate_core::files::in_one_line;
use serde::Serialize;

use super::files::names_in;
use super::folder::CHECKPOINTS;

/// How their names end. They begin with a dot and the name of the destination, or what stands for it.
pub(super) const SUFFIX: &str = ".converting";

/// One of them.
#[derive(Debug, Serialize)]
pub(super) struct Conversion {
    folder: String,
    /// Nobody writes it any more.
    abandoned: bool,
}

/// Those in a project, or in its folder of checkpoints.
pub(super) fn conversions_in(project: &Path) -> Vec<Conversion> {
    let conversion =
        |folder: PathBuf| Conversion { abandoned: is_abandoned(&folder), folder: folder.display().to_string() };
    [project.to_owned(), project.join(CHECKPOINTS)].iter().flat_map(|it| folders_in(it, ".")).map(conversion).collect()
}

/// The folders of conversions whose names begin so.
pub(super) fn folders_in(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut names = names_in(parent).unwrap_or_default();
    names.retain(|name| name.starts_with(prefix) && name.ends_with(SUFFIX));
    let is_folder = |path: &PathBuf| path.symlink_metadata().is_ok_and(|found| found.is_dir());
    names.iter().map(|name| parent.join(name)).filter(is_folder).collect()
}

/// A conversion holds a lock while it lives.
fn is_abandoned(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|folder| folder.try_lock_shared().is_ok())
}

/// For people, one line for each.
pub(super) fn described(conversions: &[Conversion]) -> String {
    conversions.iter().map(|conversion| format!("{conversion}\n")).collect()
}

impl fmt::Display for Conversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.abandoned {
            true => "left by a conversion that was ended; the next one to the same folder removes it",
            false => "a conversion is writing it",
        };
        write!(f, "{}: {what}", in_one_line(&self.folder))
    }
}
