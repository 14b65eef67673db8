//! Files that appear whole or not at all.

use crate::error::{Result, WeightsError};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

const TEMPORARY_EXTENSION: &str = "tmp";

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    let path = path.to_owned();
    move |source| WeightsError::Io { action, path, source }
}

/// A file that is complete on the disk but not yet in its place. Dropped without
/// [`commit`](Self::commit), it is removed.
#[derive(Debug)]
pub(super) struct PendingFile {
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl PendingFile {
    /// Writes all of it.
    pub(super) fn write(target: &Path, content: &[u8]) -> Result<Self> {
        let mut file = OpenFile::create(target)?;
        file.append(content)?;
        file.finish()
    }

    /// What the file is called until it is in its place.
    pub(super) fn temporary_name(&self) -> String {
        self.temporary.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Puts the file in its place, over an older one.
    pub(super) fn commit(mut self) -> Result<PathBuf> {
        fs::rename(&self.temporary, &self.target).map_err(io_error("move into place", &self.target))?;
        self.committed = true;
        Ok(std::mem::take(&mut self.target))
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if !self.committed {
            // The error that led here is the one to report.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A file that is being written. Dropped without [`finish`](Self::finish), it is removed.
#[derive(Debug)]
pub(super) struct OpenFile {
    // Closed before it is removed.
    file: BufWriter<File>,
    pending: PendingFile,
}

impl OpenFile {
    /// Begins a file beside `target`, under a hidden name that no reader looks for.
    pub(super) fn create(target: &Path) -> Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let process = std::process::id();
        let temporary = target.with_file_name(format!(".{name}.{process}.{TEMPORARY_EXTENSION}"));
        let file = File::create(&temporary).map_err(io_error("create", &temporary))?;
        let pending = PendingFile { temporary, target: target.to_owned(), committed: false };
        Ok(Self { file: BufWriter::with_capacity(1 << 20, file), pending })
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_all(bytes).map_err(io_error("write", &self.pending.target))?)
    }

    /// Sees to it that all is on the disk.
    pub(super) fn finish(self) -> Result<PendingFile> {
        let Self { file, pending } = self;
        let target = &pending.target;
        let file = file.into_inner().map_err(|error| io_error("write", target)(error.into_error()))?;
        // Without this, a power cut after the rename could leave the name on an empty file.
        file.sync_all().map_err(io_error("flush", target))?;
        Ok(pending)
    }
}

/// If `file_name` is what a writer that died has left behind, the name it was written for.
pub(super) fn abandoned(file_name: &str) -> Option<&str> {
    let (name, process) =
        file_name.strip_prefix('.')?.strip_suffix(TEMPORARY_EXTENSION)?.strip_suffix('.')?.rsplit_once('.')?;
    (!process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// Makes renames and removals in a folder last through a power cut.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    // Only Unix lets a folder be opened and flushed.
    if cfg!(unix) {
        let folder_file = File::open(folder).map_err(io_error("open", folder))?;
        folder_file.sync_all().map_err(io_error("flush", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_of_unfinished_files_are_abandoned() {
        assert_eq!(abandoned(".model.safetensors.123.tmp"), Some("model.safetensors"));
        for other in ["model.safetensors", ".model.safetensors.tmp", ".a.x1.tmp", "a.1.tmp", ".tmp", ""] {
            assert_eq!(abandoned(other), None, "{other}");
        }
    }
}
