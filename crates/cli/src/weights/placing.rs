//! How complete files get their names: by one command at a time, and all of them or none.
//!
//! Whoever writes weights into a folder holds a lock on a hidden file in it. Before files get their names, it notes in that file which
//! ones do. The last of them names the others, so that without it they are no weights: what a command that was killed in between
//! has left is taken back by the next one.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use accelerate_core::files::other_than_file;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::error::WeightsError;

/// The hidden file. It is called like a temporary one, since it is one.
pub(super) const NOTE: &str = ".model.merging.saving";
/// More than any list of files has.
const MAX_NOTE_BYTES: u64 = 64 << 20;
/// So many commands do not end in the moment between opening their file and locking it.
const MOST_TRIES: usize = 100;

/// The right to write weights into a folder. Dropped, its file is removed.
#[derive(Debug)]
pub(super) struct Turn {
    file: File,
    folder: PathBuf,
}

/// A file that gets its name.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Noted {
    name: String,
    /// By these it is known again.
    inode: u64,
    bytes: u64,
}

impl Turn {
    /// Takes back what the last one has left, if it was killed.
    ///
    /// # Errors
    /// Somebody else is writing.
    pub(super) fn take(folder: &Path) -> Result<Self, WeightsError> {
        let path = folder.join(NOTE);
        let failed = |source| WeightsError::Write { path: path.clone(), source };
        for _ in 0..MOST_TRIES {
            let file = open(&path, true).map_err(failed)?;
            let found = file.metadata().map_err(failed)?;
            if let Some(found) = other_than_file(found.file_type()) {
                return Err(WeightsError::Kind { path, found, wanted: "a file for a lock" });
            }
            // Where the file system has no locks, nobody can be kept out.
            if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
                return Err(WeightsError::Busy { folder: folder.to_owned() });
            }
            // Whoever had it before may have removed it in between.
            if is_still_at(&found, &path) {
                take_back(&file, folder).and_then(|()| file.set_len(0)).map_err(failed)?;
                return Ok(Self { file, folder: folder.to_owned() });
            }
        }
        Err(failed(ErrorKind::WouldBlock.into()))
    }

    /// Notes which files are to get their names now, in their order.
    pub(super) fn note(&self, files: &[(NamedTempFile, PathBuf)]) -> Result<(), WeightsError> {
        let path = self.folder.join(NOTE);
        let write = || {
            let noted = files.iter().map(|(file, path)| Noted::of(file.as_file(), path));
            let noted: Vec<Noted> = noted.collect::<io::Result<_>>()?;
            (&self.file).write_all(&serde_json::to_vec(&noted)?)?;
            self.file.sync_all()?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| WeightsError::Write { path, source })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // The lock is kept until the file is gone.
        let _ = fs::remove_file(self.folder.join(NOTE));
    }
}

impl Noted {
    fn of(file: &File, path: &Path) -> io::Result<Self> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let found = file.metadata()?;
        Ok(Self { name, inode: found.ino(), bytes: found.len() })
    }

    /// Has it its name?
    fn is_in(&self, folder: &Path) -> bool {
        // Only the name of a file in the folder itself is one that was noted.
        let is_name = Path::new(&self.name).file_name().is_some_and(|name| name == self.name.as_str());
        let is_it = |found: Metadata| found.is_file() && (found.ino(), found.len()) == (self.inode, self.bytes);
        is_name && fs::symlink_metadata(folder.join(&self.name)).is_ok_and(is_it)
    }
}

fn open(path: &Path, create: bool) -> io::Result<File> {
    // Something else may be there: a link, or a pipe whose reader would be waited for.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    OpenOptions::new().read(true).write(true).create(create).truncate(false).custom_flags(flags).open(path)
}

fn is_still_at(opened: &Metadata, path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()))
}

/// The files that have their names by a note, and do not count without the last, which has none.
fn without_the_last(mut note: &File, folder: &Path) -> io::Result<Vec<Noted>> {
    note.rewind()?;
    let mut text = Vec::new();
    note.take(MAX_NOTE_BYTES).read_to_end(&mut text)?;
    // Of one that was killed while it noted, no file has its name.
    let mut noted: Vec<Noted> = serde_json::from_slice(&text).unwrap_or_default();
    if noted.last().is_none_or(|last| last.is_in(folder)) {
        return Ok(Vec::new());
    }
    noted.retain(|noted| noted.is_in(folder));
    Ok(noted)
}

/// Removes such files of one that was killed. The note stays.
pub(super) fn take_back(mut note: &File, folder: &Path) -> io::Result<()> {
    let removed =
        without_the_last(note, folder)?.iter().try_for_each(|noted| fs::remove_file(folder.join(&noted.name)));
    note.rewind()?;
    removed
}

/// The names of such files in a folder, whether somebody is writing there or not.
pub(super) fn left_in(folder: &Path) -> Vec<String> {
    let found = open(&folder.join(NOTE), false).and_then(|note| without_the_last(&note, folder));
    found.unwrap_or_default().into_iter().map(|noted| noted.name).collect()
}
