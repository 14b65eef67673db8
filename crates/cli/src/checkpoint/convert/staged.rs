//! A folder that appears when all files in it are complete and on the disk.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use accelerate_core::weight_files::{Checksum, SavedFile};
use tempfile::TempDir;

use super::super::conversions::{SUFFIX, folders_in};
use super::super::verify::sample;
use super::error::ConvertError;
use crate::paths::{is_within, resolved};
use crate::weights::{self, BLOCK_BYTES, Sink, WeightsError};

/// Files under the names that they will have, in a hidden folder beside the one that they will be in. Dropped, it is removed.
#[derive(Debug)]
pub(super) struct Staged {
    folder: TempDir,
    /// Locked while this lives, which tells the next conversion that the folder is not abandoned.
    _lock: Option<File>,
    target: PathBuf,
    /// What has been written, as a manifest lists it.
    pub(super) files: Vec<SavedFile>,
}

/// A name may have 255 bytes, and a hidden one has more than that of the destination.
const LONG_NAME_BYTES: usize = 200;
/// So many conversions to the same place are not begun at the same moment.
const MOST_TRIES: usize = 100;

/// Removes what conversions that were killed have left. What cannot be removed, or is being written, stays.
fn remove_abandoned(parent: &Path, prefix: &str) {
    for path in folders_in(parent, prefix) {
        // The lock is held until the folder is gone.
        if let Ok(lock) = File::open(&path)
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Makes sure that a folder with this name can be made in `parent`, and that it would not be in the folder that is read.
fn check_target(source: &Path, target: &Path, parent: &Path) -> Result<(), ConvertError> {
    let path = || target.to_owned();
    let failed = |source| ConvertError::Write { path: path(), source };
    // `.` and `..` are no names to give to a folder.
    let name = target.file_name().ok_or_else(|| ConvertError::NoName { path: path() })?;
    // Folders on the way there need not exist yet.
    let place = resolved(parent).map_err(failed)?.join(name);
    let is_within = is_within(&place, source).map_err(failed)?;
    let is_free = match fs::symlink_metadata(&place) {
        // It would have to be replaced.
        Ok(found) if found.is_symlink() => return Err(ConvertError::NoName { path: path() }),
        Ok(found) => found.is_dir() && is_empty(&place, is_within).map_err(failed)?,
        Err(error) if error.kind() == ErrorKind::NotFound => true,
        Err(error) => return Err(failed(error)),
    };
    match (is_free, is_within) {
        (false, _) => Err(ConvertError::Exists { path: path() }),
        (true, true) => Err(ConvertError::Within { destination: path(), source_folder: source.to_owned() }),
        (true, false) => Ok(()),
    }
}

/// Is there nothing in a folder? What a killed merge-weights has left, and nothing else, is removed, but not from the folder that is read.
fn is_empty(folder: &Path, is_read: bool) -> io::Result<bool> {
    if !is_read && weights::has_only_temporary(folder)? {
        weights::remove_abandoned(folder);
    }
    Ok(fs::read_dir(folder)?.next().is_none())
}

/// What the hidden folders of a destination begin with. A checksum stands for a name that leaves no room for the rest of theirs, or
/// is no UTF-8.
fn prefix_of(name: &OsStr) -> String {
    match name.to_str() {
        Some(name) if name.len() <= LONG_NAME_BYTES => format!(".{name}."),
        _ => format!(".{}.", Checksum::of(name.as_bytes())),
    }
}

/// A new folder, and its lock where the file system has locks.
fn locked_folder(parent: &Path, prefix: &str) -> io::Result<(TempDir, Option<File>)> {
    let mut named = tempfile::Builder::new();
    let builder = named.prefix(prefix).suffix(SUFFIX).permissions(Permissions::from_mode(0o777));
    for _ in 0..MOST_TRIES {
        let folder = builder.tempdir_in(parent)?;
        let opened = File::open(folder.path());
        match opened.as_ref().map(File::try_lock) {
            // Another conversion may have taken it for abandoned before it had its lock.
            Ok(Ok(())) if folder.path().exists() => return Ok((folder, opened.ok())),
            Ok(Err(TryLockError::Error(_))) => return Ok((folder, None)),
            Ok(_) | Err(_) => {}
        }
    }
    Err(ErrorKind::WouldBlock.into())
}

/// A file with the checksum of what is written into it.
struct Summed {
    file: BufWriter<File>,
    checksum: Checksum,
    num_bytes: u64,
}

impl Write for Summed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        self.num_bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Staged {
    /// Makes sure that the target can be made, of which nothing is there yet.
    pub(super) fn create(source: &Path, target: &Path) -> Result<Self, ConvertError> {
        // `dst/` and `dst/.` are `dst`.
        let target = &target.components().collect::<PathBuf>();
        let failed = |source| ConvertError::Write { path: target.to_owned(), source };
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        check_target(source, target, parent)?;
        fs::create_dir_all(parent).map_err(failed)?;
        let prefix = prefix_of(target.file_name().unwrap_or_default());
        remove_abandoned(parent, &prefix);
        let (folder, lock) = locked_folder(parent, &prefix).map_err(failed)?;
        Ok(Self { folder, _lock: lock, target: target.to_owned(), files: Vec::new() })
    }

    /// Where it is until then.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The folder that it will be.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// The name that the folder will have.
    pub(super) fn name(&self) -> Option<&str> {
        self.target.file_name()?.to_str()
    }

    /// Differs from one conversion to the next.
    pub(super) fn id(&self) -> String {
        self.folder.path().file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Writes a file, flushes it to the disk, and notes its size and checksum.
    pub(super) fn write(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut Sink<'_>) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let path = self.target.join(name);
        let failed = |source| WeightsError::Write { path: path.clone(), source };
        let own_path = self.folder.path().join(name);
        let file = OpenOptions::new().write(true).read(true).create_new(true).open(own_path).map_err(failed)?;
        let file = BufWriter::with_capacity(BLOCK_BYTES, file);
        let mut summed = Summed { file, checksum: Checksum::new(), num_bytes: 0 };
        write(&mut Sink { output: &mut summed, path: &path })?;
        let Summed { file, checksum, num_bytes } = summed;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let sample = sample(&file, num_bytes).map_err(failed)?.to_string();
        let xxh3_128 = checksum.to_string();
        self.files.push(SavedFile { name: name.to_owned(), temporary_name: None, bytes: num_bytes, xxh3_128, sample });
        Ok(())
    }

    /// Gives the folder its name. From here on it counts. Where the name does not get to the disk, it is taken back.
    pub(super) fn commit(self) -> Result<(), ConvertError> {
        self.commit_by(|folder| File::open(folder)?.sync_all())
    }

    /// The same with `sync` for flushing a folder.
    fn commit_by(self, sync: impl Fn(&Path) -> io::Result<()>) -> Result<(), ConvertError> {
        let failed = |source| ConvertError::Write { path: self.target.clone(), source };
        sync(self.folder.path()).map_err(failed)?;
        let was_there = self.target.is_dir();
        // An empty folder gives way; one in which there is something by now does not.
        if let Err(error) = fs::rename(self.folder.path(), &self.target) {
            return Err(match error.kind() {
                ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                    ConvertError::Exists { path: self.target.clone() }
                }
                _ => failed(error),
            });
        }
        let parent = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        let synced = sync(parent.unwrap_or(Path::new("."))).map_err(failed);
        if synced.is_err() && fs::rename(&self.target, self.folder.path()).is_ok() {
            // It is removed under its old name, and whoever had made an empty folder has it again. The first error is the one to report.
            let _ = if was_there { fs::create_dir(&self.target) } else { Ok(()) };
            return synced;
        }
        // It has another name now, under which it stays.
        let _ = self.folder.keep();
        synced
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::new(false)]
    #[case::empty_before(true)]
    fn what_does_not_get_to_the_disk_is_not_left(#[case] was_there: bool) {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("dst");
        if was_there {
            fs::create_dir(&target).unwrap();
        }
        let staged = || {
            let mut staged = Staged::create(Path::new("/nowhere"), &target).unwrap();
            staged.write("file", |sink| sink.append(b"content")).unwrap();
            staged
        };
        let is_parent = |path: &Path| path == folder.path();
        let full = |path: &Path| if is_parent(path) { Err(ErrorKind::StorageFull.into()) } else { Ok(()) };
        assert!(staged().commit_by(full).is_err());
        let found: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(found.len(), usize::from(was_there), "{found:?}");
        assert!(!target.join("file").exists());
        staged().commit_by(|_| Ok(())).unwrap();
        assert!(target.join("file").exists());
    }
}
