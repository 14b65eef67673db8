//! Checkpoints of whole runs: every rank writes its part of the state of everything prepared, and the folder counts when the
//! main process has committed it. What is in the folder, and in which order it comes to be there, is written down in the
//! page "Checkpoint format" of the book.

mod blocks;
mod kept;
mod load;
mod random;
mod save;
#[cfg(test)]
mod tests;
mod whole;

pub(crate) use kept::{differing_in, is_kept_elsewhere, keep_differing, kept_by_rank, put_back};
pub(crate) use load::OpenCheckpoint;
pub(crate) use random::{random_states, restore_random_states};
pub(crate) use save::{FolderWriters, PlannedSave, RunState};
pub(crate) use whole::gather_whole;

use super::atomic::{folder_of, io_error, names_in, remove_abandoned, sync_folder};
use super::fault;
use super::folder::{is_committed, prepare_folder, read_committed, read_manifest};
use crate::error::{CheckpointError, Kind, Result, WeightsError};
use crate::messages;
use accelerate_core::checkpoint::{
    Checkpoint, Completed, DESCRIPTION, Retention, STEM, checkpoint_name, checkpoint_number,
};
use accelerate_core::weight_files::SaveManifest;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Under this name, the states of the random numbers of all ranks.
pub(crate) const RANDOM_STATES: &str = "random_states";

/// What folders are called while they are removed.
const REMOVING: &str = ".removing_";

/// Makes the folder of a checkpoint that is going to be written, and clears away what interrupted saves have left in it.
pub(crate) fn make_checkpoint_folder(folder: &Path) -> Result<()> {
    prepare_folder(folder, STEM)
}

/// The files of the checkpoint that is in a folder already. A save into the folder removes those that it does not write anew, so that
/// nobody else may write into them.
#[derive(Debug)]
pub(crate) struct EarlierFiles(BTreeMap<PathBuf, Option<Stamp>>);

/// When a file was changed, and how long it is.
type Stamp = (Option<SystemTime>, u64);

impl EarlierFiles {
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        let manifest = read_manifest(folder, STEM)?;
        let files = manifest.into_iter().flat_map(|manifest| manifest.files).map(|file| folder.join(file.name));
        Ok(Self(files.map(|path| (path.clone(), Self::stamp(&path))).collect()))
    }

    /// Fails if somebody has written into one of them, or removed it.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        match self.0.iter().find(|(path, before)| Self::stamp(path) != **before) {
            Some((path, _)) => Err(CheckpointError::ChangedByHook { path: path.clone() }.into()),
            None => Ok(()),
        }
    }

    fn stamp(path: &Path) -> Option<Stamp> {
        fs::metadata(path).ok().map(|found| (found.modified().ok(), found.len()))
    }
}

/// An automatically named checkpoint.
#[derive(Debug)]
pub(crate) struct FoundCheckpoint {
    pub(crate) number: usize,
    pub(crate) is_committed: bool,
    /// Why it cannot be said whether it was committed.
    pub(crate) problem: Option<String>,
    /// The system could not read it, so that it may be whole, and readable at another time or by another process.
    pub(crate) is_unreadable: bool,
}

/// The checkpoints in a folder of automatically named ones, in the order of their numbers; none if there is no such folder.
pub(crate) fn checkpoints_in(folder: &Path) -> Result<Vec<FoundCheckpoint>> {
    let entries = match fs::read_dir(folder) {
        // Any other error leaves open what is there, and a run that takes it for nothing begins anew.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("read", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("read", folder))?;
        let Some(number) = entry.file_name().to_str().and_then(checkpoint_number) else { continue };
        let is_committed = is_committed(&entry.path(), STEM);
        let error = is_committed.as_ref().err();
        let is_unreadable = error.is_some_and(|error| matches!(error.kind(), Kind::Weights(WeightsError::Io { .. })));
        let problem = error.map(ToString::to_string);
        found.push(FoundCheckpoint { number, is_committed: is_committed.unwrap_or(false), problem, is_unreadable });
    }
    found.sort_unstable_by_key(|checkpoint| checkpoint.number);
    Ok(found)
}

/// Makes room in a folder of automatically named checkpoints after checkpoint `newest` has been committed. What cannot be removed
/// stays, which is no reason to stop.
pub(crate) fn remove_outdated_checkpoints(folder: &Path, newest: usize, retention: Retention) {
    let found = checkpoints_in(folder).unwrap_or_else(|error| {
        messages::warning_here!("{error}; no older checkpoint is removed");
        Vec::new()
    });
    // What is not asked for is not read: descriptions are long.
    let metric = |number| retention.keep_best.map_or(Ok(None), |_| metric_of(&folder.join(checkpoint_name(number))));
    let completed = found.iter().filter(|checkpoint| checkpoint.is_committed);
    // One of which it cannot be known how good it is may be the best.
    let completed: Vec<Completed> = completed
        .filter_map(|&FoundCheckpoint { number, .. }| Some(Completed { number, metric: metric(number).ok()? }))
        .collect();
    for number in retention.outdated(&completed, newest) {
        remove_checkpoint(&folder.join(checkpoint_name(number)))
            .unwrap_or_else(|error| messages::warning_here!("{error}"));
    }
    // What killed runs have left of checkpoints that were never completed.
    for FoundCheckpoint { number, .. } in found.iter().filter(|it| !it.is_committed && it.number < newest) {
        remove_abandoned_checkpoint(&folder.join(checkpoint_name(*number)));
    }
}

/// How good the run was, as the description of a checkpoint has it. `None` where it says nothing.
fn metric_of(folder: &Path) -> Result<Option<f64>> {
    let read = read_committed(folder, STEM, DESCRIPTION, save::MAX_DESCRIPTION_BYTES)?;
    let Some((_, json)) = read else { return Ok(None) };
    let path = folder.join(DESCRIPTION);
    let description = Checkpoint::from_json(&String::from_utf8_lossy(&json));
    Ok(description.map_err(|source| CheckpointError::Description { path, source })?.metric)
}

/// Removes a checkpoint. It gets another name first, so that half of it is never taken for the whole; whoever removes one later
/// removes what a crash has left under such a name.
fn remove_checkpoint(folder: &Path) -> Result<()> {
    let parent = folder_of(folder);
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let hidden = parent.join(format!("{REMOVING}{name}"));
    let is_left = |name: &String| name.strip_prefix(REMOVING).and_then(checkpoint_number).is_some();
    for left in names_in(parent)?.into_iter().filter(is_left).map(|name| parent.join(name)) {
        // A file, or a link to elsewhere, is nothing that was left here.
        if fs::symlink_metadata(&left).is_ok_and(|found| found.is_dir()) {
            remove_folder(&left)?;
        }
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
    if !matches!(folder.join(SaveManifest::file_name(STEM)).try_exists(), Ok(false)) {
        return;
    }
    // A folder in which something is left stays: whatever it is, it is not ours to remove.
    let _ = remove_abandoned(folder, STEM, &[]).map(|()| fs::remove_dir(folder));
}
