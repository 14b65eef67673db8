//! What a folder holds: saves, completed or not.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use accelerate_core::checkpoint::python::PythonFile;
use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, STEM, checkpoint_number};
use accelerate_core::weight_files::{Checksum, SaveManifest, SavedFile};

use super::conversions::conversions_in;
use super::error::{CheckpointError, Fault, Problem};
use super::files::{names_in, open, read_small};

/// Larger manifests are an attack or a damaged file; the library reads no larger ones either.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;
/// The same of descriptions.
pub(super) const MAX_DESCRIPTION_BYTES: u64 = 1 << 30;
/// Where a project keeps checkpoints that are named automatically.
pub(super) const CHECKPOINTS: &str = "checkpoints";

/// A save that counts: its manifest is there.
#[derive(Debug)]
pub(super) struct Save {
    pub(super) folder: PathBuf,
    /// What its manifest is named after: `checkpoint`, `model`.
    pub(super) stem: String,
    pub(super) manifest: SaveManifest,
    /// Where in the manifest the files are, by name.
    places: HashMap<String, usize>,
}

impl Save {
    /// `None` where no save of this stem was completed.
    pub(super) fn read(folder: &Path, stem: &str) -> Result<Option<Self>, Fault> {
        let name = SaveManifest::file_name(stem);
        let json = match read_small(&folder.join(&name), MAX_MANIFEST_BYTES) {
            Ok(json) => json,
            // A link that leads nowhere is there.
            Err(Problem::Missing) if fs::symlink_metadata(folder.join(&name)).is_err() => return Ok(None),
            Err(problem) => return Err(problem.at(name)),
        };
        let manifest = SaveManifest::from_json(&String::from_utf8_lossy(&json), stem)
            .map_err(|error| Problem::Format(error).at(name))?;
        let places = manifest.files.iter().zip(0..).map(|(file, place)| (file.name.clone(), place)).collect();
        Ok(Some(Self { folder: folder.to_owned(), stem: stem.to_owned(), manifest, places }))
    }

    /// The file of this name that the manifest lists.
    pub(super) fn file(&self, name: &str) -> Option<&SavedFile> {
        self.manifest.files.get(*self.places.get(name)?)
    }

    /// Of all files that its manifest lists.
    pub(super) fn num_bytes(&self) -> u64 {
        self.manifest.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Where a file of it is now: under its temporary name if nothing has given it its own yet.
    pub(super) fn path_of(&self, file: &SavedFile) -> PathBuf {
        self.pending(file).unwrap_or_else(|| self.folder.join(&file.name))
    }

    fn pending(&self, file: &SavedFile) -> Option<PathBuf> {
        let temporary = self.folder.join(file.temporary_name.as_ref()?);
        let is_file = fs::symlink_metadata(&temporary).is_ok_and(|metadata| metadata.is_file());
        is_file.then_some(temporary)
    }

    /// Was it ended, or is it still under way, after it counted and before all files had their names?
    pub(super) fn is_interrupted(&self) -> bool {
        self.manifest.files.iter().any(|file| self.pending(file).is_some())
    }

    /// Are all files there with their sizes? The first one that is not.
    fn check_sizes(&self) -> Result<(), Fault> {
        self.manifest.files.iter().try_for_each(|file| {
            let size = open(&self.path_of(file)).and_then(|(_, found_bytes)| check_size(file, found_bytes));
            size.map_err(|problem| problem.at(&file.name))
        })
    }

    /// The description that belongs to it, of which the content is what was saved.
    pub(super) fn read_description(&self) -> Result<Checkpoint, Fault> {
        let read = || {
            let file = self.file(DESCRIPTION).ok_or(Problem::NoDescription)?;
            let path = self.path_of(file);
            let (_, found_bytes) = open(&path)?;
            check_size(file, found_bytes)?;
            let json = read_small(&path, MAX_DESCRIPTION_BYTES)?;
            check_checksum(file, &Checksum::of(&json))?;
            Checkpoint::from_json(&String::from_utf8_lossy(&json)).map_err(Problem::Format)
        };
        read().map_err(|problem: Problem| problem.at(DESCRIPTION))
    }
}

pub(super) fn check_size(file: &SavedFile, found_bytes: u64) -> Result<(), Problem> {
    if found_bytes == file.bytes { Ok(()) } else { Err(Problem::Size { found_bytes, wanted_bytes: file.bytes }) }
}

pub(super) fn check_checksum(file: &SavedFile, found: &Checksum) -> Result<(), Problem> {
    let found = found.to_string();
    if found == file.xxh3_128 { Ok(()) } else { Err(Problem::Content { found, wanted: file.xxh3_128.clone() }) }
}

/// A checkpoint that was completed, with what it says of itself.
#[derive(Debug)]
pub(super) struct OpenCheckpoint {
    pub(super) save: Save,
    pub(super) description: Checkpoint,
}

impl OpenCheckpoint {
    pub(super) fn open(folder: &Path) -> Result<Self, CheckpointError> {
        list(folder)?;
        Self::read(folder)?.ok_or_else(|| CheckpointError::NotCompleted { folder: folder.to_owned() })
    }

    /// The checkpoint in this folder, or of a project the newest that was completed.
    pub(super) fn open_newest(folder: &Path) -> Result<Self, CheckpointError> {
        let names = list(folder)?;
        if is_checkpoint(folder, &names) {
            return Self::open(folder);
        }
        let numbered = numbered_in(folder);
        if numbered.is_empty() {
            return Err(no_checkpoint(folder, &names));
        }
        let mut completed = numbered.iter().rev().filter_map(|(_, folder)| Self::read(folder).ok().flatten());
        completed.next().ok_or_else(|| CheckpointError::NoneCompleted { folder: folder.to_owned() })
    }

    fn read(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let unusable = |source| CheckpointError::Unusable { folder: folder.to_owned(), source };
        let Some(save) = Save::read(folder, STEM).map_err(unusable)? else { return Ok(None) };
        let description = save.read_description().map_err(unusable)?;
        save.check_sizes().map_err(unusable)?;
        Ok(Some(Self { save, description }))
    }
}

/// What has become of a checkpoint.
#[derive(Debug)]
pub(super) enum State {
    Completed(OpenCheckpoint),
    /// All of it is there, some files under temporary names.
    Interrupted(OpenCheckpoint),
    NotCompleted,
    /// It is damaged, or this program may not or cannot read it.
    Unusable(Fault),
}

impl State {
    pub(super) fn of(folder: &Path) -> Self {
        match OpenCheckpoint::read(folder) {
            Ok(Some(open)) => Self::of_open(open),
            Ok(None) => Self::NotCompleted,
            Err(CheckpointError::Unusable { source, .. }) => Self::Unusable(source),
            Err(_) => Self::NotCompleted,
        }
    }

    pub(super) fn of_open(open: OpenCheckpoint) -> Self {
        if open.save.is_interrupted() { Self::Interrupted(open) } else { Self::Completed(open) }
    }

    pub(super) fn open(&self) -> Option<&OpenCheckpoint> {
        match self {
            Self::Completed(open) | Self::Interrupted(open) => Some(open),
            Self::NotCompleted | Self::Unusable(_) => None,
        }
    }
}

/// Has Python Accelerate's `save_state` written a folder with these names?
pub(super) fn is_of_python(names: &[String]) -> bool {
    let manifest = SaveManifest::file_name(STEM);
    let is_its_own = |name: &String| match PythonFile::named(name) {
        None | Some(PythonFile::Model(_) | PythonFile::TorchModel(_)) => false,
        Some(_) => true,
    };
    !names.contains(&manifest) && names.iter().any(is_its_own)
}

/// The error of a folder without checkpoints.
pub(super) fn no_checkpoint(folder: &Path, names: &[String]) -> CheckpointError {
    let has_weights = names.iter().any(|name| SaveManifest::stem(name).is_some());
    let (folder, conversions) = (folder.to_owned(), conversions_in(folder));
    CheckpointError::NoCheckpoint { folder, has_weights, is_of_python: is_of_python(names), conversions }
}

/// Is it the folder of one checkpoint, completed or not?
pub(super) fn is_checkpoint(folder: &Path, names: &[String]) -> bool {
    let manifest = SaveManifest::file_name(STEM);
    let is_numbered = folder.file_name().and_then(|name| checkpoint_number(name.to_str()?)).is_some();
    is_numbered || names.iter().any(|name| *name == manifest || name == DESCRIPTION)
}

/// The numbered checkpoints in a folder, or in `checkpoints` within it, in the order of their numbers.
pub(super) fn numbered_in(folder: &Path) -> Vec<(usize, PathBuf)> {
    let numbered = |folder: &Path| {
        let number = |name: &String| Some((checkpoint_number(name)?, folder.join(name)));
        let mut found: Vec<_> = names_in(folder).unwrap_or_default().iter().filter_map(number).collect();
        found.retain(|(_, path)| path.is_dir());
        found.sort_unstable();
        found
    };
    let here = numbered(folder);
    if here.is_empty() { numbered(&folder.join(CHECKPOINTS)) } else { here }
}

/// The newest checkpoint of a project: of those that were completed, or of all if none was, as Python's have no manifests.
pub(crate) fn newest_in(project: &Path) -> Option<PathBuf> {
    let numbered = numbered_in(project);
    let is_completed = |folder: &&PathBuf| OpenCheckpoint::read(folder).is_ok_and(|found| found.is_some());
    let folders = || numbered.iter().rev().map(|(_, folder)| folder);
    folders().find(is_completed).or_else(|| folders().next()).cloned()
}

/// The names in a folder that has to be there.
pub(super) fn list(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    use io::ErrorKind::{NotADirectory, NotFound};
    names_in(folder).map_err(|source| match source.kind() {
        NotFound | NotADirectory => CheckpointError::NoFolder { folder: folder.to_owned() },
        _ => CheckpointError::Unlistable { folder: folder.to_owned(), source },
    })
}

/// How large a checkpoint is: what its manifest lists, and where that says nothing, what is in the folder.
pub(super) fn num_bytes(folder: &Path) -> u64 {
    match Save::read(folder, STEM) {
        Ok(Some(save)) => save.num_bytes(),
        _ => bytes_on_disk(folder),
    }
}

/// Bytes of all files in a folder.
pub(super) fn bytes_on_disk(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let files = entries.flatten().filter_map(|entry| entry.metadata().ok()).filter(fs::Metadata::is_file);
    files.fold(0, |sum: u64, metadata| sum.saturating_add(metadata.len()))
}

/// When the save that a folder holds was completed, or when something was last written there.
pub(super) fn saved_at(folder: &Path) -> Option<SystemTime> {
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    modified(&folder.join(SaveManifest::file_name(STEM))).or_else(|| modified(folder))
}
