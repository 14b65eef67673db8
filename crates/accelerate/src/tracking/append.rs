//! A file that grows by whole records.

use crate::error::{Result, TrackingError};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// What a call that fails leaves behind.
const KEPT: &str =
    "The values of this call are lost; those before it are in the file, and later calls go on behind them";
const NOTHING: &str = "Nothing is recorded";

/// A file to which records are appended, each in full or not at all: of one that found no room nothing is left, so that whatever comes
/// later can be read.
#[derive(Debug)]
pub(super) struct AppendFile {
    path: PathBuf,
    file: File,
    /// Up to here there are whole records.
    length: u64,
    /// Something may stand behind them.
    is_torn: bool,
}

impl AppendFile {
    /// A file that was not there, and its folders.
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        make_folder_of(&path)?;
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(|source| error("create", &path, source, NOTHING))?;
        Ok(Self { path, file, length: 0, is_torn: false })
    }

    /// A file that may be there.
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        make_folder_of(&path)?;
        let file = OpenOptions::new().append(true).read(true).create(true).open(&path);
        let file = file.map_err(|source| error("open", &path, source, NOTHING))?;
        let length = file.metadata().map_err(|source| error("look at", &path, source, NOTHING))?.len();
        Ok(Self { path, file, length, is_torn: false })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The last byte, if there is one.
    pub(super) fn last_byte(&mut self) -> Result<Option<u8>> {
        use std::io::{Read, Seek, SeekFrom};
        let Some(last) = self.length.checked_sub(1) else { return Ok(None) };
        let mut byte = [0];
        let mut read = || {
            self.file.seek(SeekFrom::Start(last))?;
            self.file.read_exact(&mut byte)
        };
        read().map_err(|source| error("read", &self.path, source, NOTHING))?;
        Ok(Some(byte[0]))
    }

    /// Appends one record or several. When this returns, the system has them: they outlive the process.
    pub(super) fn append(&mut self, records: &[u8]) -> Result<()> {
        self.append_or_tear(records).map_err(|source| error("write to", &self.path, source, KEPT).into())
    }

    fn append_or_tear(&mut self, records: &[u8]) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.length)?;
            self.is_torn = false;
        }
        if let Err(error) = fault::write_all(&mut self.file, records) {
            // Where this fails as well, the next call tries it again.
            self.is_torn = self.file.set_len(self.length).is_err();
            return Err(error);
        }
        self.length += records.len() as u64;
        Ok(())
    }

    /// Has the disk keep it. What is no file on a disk, such as a pipe, has nothing to keep.
    pub(super) fn sync(&self) -> Result<()> {
        match self.file.sync_all() {
            Err(source) if source.kind() != io::ErrorKind::InvalidInput => {
                Err(error("flush", &self.path, source, "What was written last may be lost if the machine fails now")
                    .into())
            }
            _ => Ok(()),
        }
    }
}

/// Writes a file in one piece.
pub(super) fn write_file(path: &Path, content: &str) -> Result<()> {
    make_folder_of(path)?;
    fs::write(path, content).map_err(|source| error("write", path, source, NOTHING).into())
}

fn make_folder_of(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    fs::create_dir_all(folder).map_err(|source| error("make the folder", folder, source, NOTHING).into())
}

fn error(action: &'static str, path: &Path, source: io::Error, lost: &'static str) -> TrackingError {
    TrackingError::Io { action, path: path.to_owned(), source, lost }
}

/// In tests of this module, a disk that becomes full in the middle of a record.
mod fault {
    use std::fs::File;
    use std::io::{self, Write};

    #[cfg(not(test))]
    pub(super) fn write_all(file: &mut File, records: &[u8]) -> io::Result<()> {
        file.write_all(records)
    }

    #[cfg(test)]
    pub(super) fn write_all(file: &mut File, records: &[u8]) -> io::Result<()> {
        match IS_FULL.get() {
            true => {
                file.write_all(&records[..records.len() / 2])?;
                Err(io::ErrorKind::StorageFull.into())
            }
            false => file.write_all(records),
        }
    }

    #[cfg(test)]
    thread_local! {
        pub(super) static IS_FULL: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_finds_no_room_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/log");
        let mut file = AppendFile::create(path.clone()).unwrap();
        file.append(b"one\n").unwrap();
        fault::IS_FULL.set(true);
        let error = file.append(b"two two two\n").unwrap_err();
        fault::IS_FULL.set(false);
        let text = error.to_string();
        assert!(text.contains("a/b/log") && text.contains("make room") && error.is_tracking(), "{text}");
        file.append(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "one\nthree\n");
    }

    #[test]
    fn what_is_there_is_gone_on_with_or_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(AppendFile::open(path.clone()).unwrap().last_byte().unwrap(), None);
        fs::write(&path, "one").unwrap();
        let mut file = AppendFile::open(path.clone()).unwrap();
        assert_eq!(file.last_byte().unwrap(), Some(b'e'));
        file.append(b"\ntwo\n").unwrap();
        file.sync().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert!(AppendFile::create(path).is_err(), "an event file is never written into twice");
    }
}
