//! Checkpoints of whole runs: every rank writes its part of the state of everything prepared, and the folder counts when the
//! main process has committed it. What is in the folder, and in which order it comes to be there, is written down in the
//! page "Checkpoint format" of the book.

mod blocks;
mod load;
mod random;
mod save;
#[cfg(test)]
mod tests;
mod whole;

pub(crate) use load::OpenCheckpoint;
pub(crate) use random::{random_states, restore_random_states};
pub(crate) use save::{FolderWriters, PlannedSave, RunState};
pub(crate) use whole::gather_whole;

use super::atomic::{folder_of, io_error, names_in, remove_abandoned, sync_folder};
use super::fault;
use super::folder::{is_committed, prepare_folder};
use crate::error::Result;
use crate::messages;
use accelerate_core::checkpoint::{
    Checkpoint, Completed, DESCRIPTION, Retention, STEM, checkpoint_name, checkpoint_number,
};
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

/// Makes room in a folder of automatically named checkpoints after checkpoint `newest` has been committed. What cannot be removed
/// stays, which is no reason to stop.
pub(crate) fn remove_outdated_checkpoints(folder: &Path, newest: usize, retention: Retention) {
    let found = checkpoints_in(folder);
    // What is not asked for is not read: descriptions are long.
    let metric = |number| retention.keep_best.and_then(|_| metric_of(&folder.join(checkpoint_name(number))));
    let completed = found.iter().filter(|(_, is_committed)| *is_committed);
    let completed: Vec<Completed> =
        completed.map(|&(number, _)| Completed { number, metric: metric(number) }).collect();
    for number in retention.outdated(&completed, newest) {
        remove_checkpoint(&folder.join(checkpoint_name(number)))
            .unwrap_or_else(|error| messages::warning_here!("{error}"));
    }
    // What killed runs have left of checkpoints that were never completed.
    for (number, _) in found.iter().filter(|(number, is_committed)| !is_committed && *number < newest) {
        remove_abandoned_checkpoint(&folder.join(checkpoint_name(*number)));
    }
}

/// How good the run was, as the description of a checkpoint has it. `None` where it cannot be read, or says nothing.
fn metric_of(folder: &Path) -> Option<f64> {
    let path = folder.join(DESCRIPTION);
    let is_short = fs::metadata(&path).is_ok_and(|it| it.is_file() && it.len() <= save::MAX_DESCRIPTION_BYTES);
    let text = is_short.then(|| fs::read_to_string(&path).ok()).flatten()?;
    Checkpoint::from_json(&text).ok()?.metric
}

/// Removes a checkpoint. It gets another name first, so that half of it is never taken for the whole; whoever removes one later
/// removes what a crash has left under such a name.
fn remove_checkpoint(folder: &Path) -> Result<()> {
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
fn remove_abandoned_checkpoint(folder: &Path) {
    // One of a later version, or one that cannot be read now, may be whole.
    if folder.join(SaveManifest::file_name(STEM)).exists() {
        return;
    }
    // A folder in which something is left stays: whatever it is, it is not ours to remove.
    let _ = remove_abandoned(folder, STEM, &[]).map(|()| fs::remove_dir(folder));
}
