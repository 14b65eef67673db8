//! Checkpoints of whole runs: every rank writes its part of the state of everything prepared, and the folder counts when the
//! main process has committed it. What is in the folder, and in which order it comes to be there, is written down in the
//! page "Checkpoint format" of the book.

mod load;
mod random;
mod save;
#[cfg(test)]
mod tests;
mod whole;

pub(crate) use load::OpenCheckpoint;
pub(crate) use random::{random_states, restore_random_states};
pub(crate) use save::{FolderWriters, RunState, save_checkpoint};
pub(crate) use whole::gather_whole;

use super::atomic::{folder_of, io_error, names_in, remove_abandoned, sync_folder};
use super::fault;
use super::folder::{is_committed, prepare_folder};
use crate::error::Result;
use accelerate_core::checkpoint::{STEM, checkpoint_number};
use accelerate_core::weight_files::SaveManifest;
use std::fs;
use std::path::Path;

/// Under this name, the states of the random numbers of all ranks.
pub(crate) const RANDOM_STATES: &str = "random_states";

/// What folders are called while they are removed.
const REMOVING: &str = ".removing_";

/// Makes the folder of a checkpoint that is going to be written, and clears away what interrupted saves have left in it.
pub(crate) fn make_checkpoint_folder(folder: &Path) -> Result<()> {
    prepare_folder(folder, STEM)
}

/// The numbers of the checkpoints in a folder of automatically named ones, and whether each has been committed.
pub(crate) fn checkpoints_in(folder: &Path) -> Vec<(usize, bool)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let number = |entry: fs::DirEntry| {
        let number = checkpoint_number(entry.file_name().to_str()?)?;
        Some((number, is_committed(&entry.path(), STEM)))
    };
    let mut found: Vec<(usize, bool)> = entries.flatten().filter_map(number).collect();
    found.sort_unstable();
    found
}

/// Removes a checkpoint. It gets another name first, so that half of it is never taken for the whole; whoever removes one later
/// removes what a crash has left under such a name.
pub(crate) fn remove_checkpoint(folder: &Path) -> Result<()> {
    let parent = folder_of(folder);
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let hidden = parent.join(format!("{REMOVING}{name}"));
    let left: Vec<String> = names_in(parent)?.into_iter().filter(|name| name.starts_with(REMOVING)).collect();
    for name in left {
        remove_folder(&parent.join(name))?;
    }
    fault::step().and_then(|()| fs::rename(folder, &hidden)).map_err(io_error("remove", folder))?;
    sync_folder(parent)?;
    remove_folder(&hidden)
}

fn remove_folder(folder: &Path) -> Result<()> {
    Ok(fault::step().and_then(|()| fs::remove_dir_all(folder)).map_err(io_error("remove", folder))?)
}

/// Removes what a save that was killed has left of a checkpoint, if nothing else is in its folder, and nobody writes there.
pub(crate) fn remove_abandoned_checkpoint(folder: &Path) {
    // One of a later version, or one that cannot be read now, may be whole.
    if folder.join(SaveManifest::file_name(STEM)).exists() {
        return;
    }
    // A folder in which something is left stays: whatever it is, it is not ours to remove.
    let _ = remove_abandoned(folder, STEM, &[]).map(|()| fs::remove_dir(folder));
}
