//! Files that are written under temporary names, and what is left of them when their writers are killed.
//!
//! A writer holds a lock on its file, which ends with it. So whoever can take the lock knows that nobody writes the file any more, and a
//! writer that is stopped, or on another machine that shares the locks, keeps its own.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufWriter, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use accelerate_core::weight_files::{
    DEFAULT_STEM, SaveManifest, TEMPORARY_SUFFIX, is_temporary_file_of, temporary_prefix,
};
use rustix::fs::OFlags;
use tempfile::NamedTempFile;

use super::copy::{BLOCK_BYTES, Sink};
use super::error::WeightsError;
use super::placing::{NOTE, left_in, take_back};

/// So many files are not taken for abandoned in the moment between their beginning and their lock.
const MOST_TRIES: usize = 100;

/// A file under a temporary name. Dropped, it is removed.
pub(super) struct OpenFile {
    file: BufWriter<NamedTempFile>,
    path: PathBuf,
}

impl OpenFile {
    /// Begins the file that is to have this path.
    pub(super) fn create(path: PathBuf) -> Result<Self, WeightsError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        match locked_file(folder) {
            Ok(file) => Ok(Self { file: BufWriter::with_capacity(BLOCK_BYTES, file), path }),
            Err(source) => Err(WeightsError::Write { path, source }),
        }
    }

    pub(super) fn sink(&mut self) -> Sink<'_> {
        Sink { output: &mut self.file, path: &self.path }
    }

    /// Sees to it that all is on the disk.
    pub(super) fn finish(self) -> Result<(NamedTempFile, PathBuf), WeightsError> {
        let Self { file, path } = self;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error);
        let flushed = file.and_then(|file| file.as_file().sync_all().map(|()| file));
        match flushed {
            Ok(file) => Ok((file, path)),
            Err(source) => Err(WeightsError::Write { path, source }),
        }
    }
}

/// A new file, and its lock where the file system has locks. The umask decides who may read it.
fn locked_file(folder: &Path) -> io::Result<NamedTempFile> {
    let prefix = temporary_prefix(DEFAULT_STEM);
    let mut named = tempfile::Builder::new();
    named.prefix(&prefix).suffix(TEMPORARY_SUFFIX).rand_bytes(16).permissions(Permissions::from_mode(0o666));
    for _ in 0..MOST_TRIES {
        let file = named.tempfile_in(folder)?;
        if is_ours(file.as_file())? {
            return Ok(file);
        }
    }
    Err(ErrorKind::WouldBlock.into())
}

/// Locks a new file. False where somebody was quicker, and removes it.
fn is_ours(file: &File) -> io::Result<bool> {
    let is_being_removed = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    Ok(!is_being_removed && file.metadata()?.nlink() > 0)
}

/// Removes what writers of weights have left in a folder under temporary names when they were killed. What cannot be removed, or is
/// being written, stays.
pub(crate) fn remove_abandoned(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let own = entries.flatten().filter(|entry| is_temporary(&entry.file_name().to_string_lossy()));
    own.for_each(|entry| drop(remove_if_abandoned(&entry.path())));
}

/// Does a folder have nothing in it but files with such names, and those to which a killed writer has given their names without the
/// one that names them?
pub(crate) fn has_only_temporary(folder: &Path) -> io::Result<bool> {
    let left = left_in(folder);
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !is_temporary(&name) && !left.contains(&name) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_temporary(name: &str) -> bool {
    is_temporary_file_of(name, DEFAULT_STEM)
}

fn remove_if_abandoned(path: &Path) -> io::Result<()> {
    // To open a pipe is to wait for its reader.
    if !fs::symlink_metadata(path)?.is_file() {
        return Ok(());
    }
    // Something else may have come there since. Network file systems lock only what is open for writing.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    // The lock is kept until the file is gone, so that no writer takes it in between.
    if file.try_lock().is_err() {
        return Ok(());
    }
    let (opened, found) = (file.metadata()?, fs::symlink_metadata(path)?);
    let is_it = (opened.dev(), opened.ino()) == (found.dev(), found.ino());
    // A save that was interrupted after its manifest was written is whole, and has files under temporary names.
    let manifest = fs::symlink_metadata(path.with_file_name(SaveManifest::file_name(DEFAULT_STEM)));
    let is_saved = !manifest.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    if !is_it || is_saved {
        return Ok(());
    }
    if let (Some(NOTE), Some(folder)) = (path.file_name().and_then(|name| name.to_str()), path.parent()) {
        take_back(&file, folder)?;
    }
    fs::remove_file(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_somebody_removes_is_not_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".model.a1.saving");
        let mine = File::create(&path).unwrap();
        let other = File::open(&path).unwrap();
        other.lock().unwrap();
        assert!(!is_ours(&mine).unwrap(), "somebody has its lock");
        fs::remove_file(&path).unwrap();
        drop(other);
        assert!(!is_ours(&mine).unwrap(), "it has no name");
        assert!(is_ours(&File::create(&path).unwrap()).unwrap());
    }

    #[test]
    fn a_file_that_is_being_written_is_not_abandoned() {
        let folder = tempfile::tempdir().unwrap();
        let file = OpenFile::create(folder.path().join("model.safetensors")).unwrap();
        let num_files = || fs::read_dir(folder.path()).unwrap().count();
        remove_abandoned(folder.path());
        assert!(has_only_temporary(folder.path()).unwrap() && num_files() == 1);
        let (file, _) = file.finish().unwrap();
        remove_abandoned(folder.path());
        assert_eq!(num_files(), 1, "it waits for its name");
        let (file, path) = file.keep().unwrap();
        drop(file);
        assert!(path.exists());
        remove_abandoned(folder.path());
        assert_eq!(num_files(), 0);
    }
}
