//! Files that appear whole or not at all.

use super::block_file::{BlockFile, IoMode};
use super::fault;
use crate::error::{Result, WeightsError};
use accelerate_core::weight_files::{
    Checksum, SavedFile, TEMPORARY_SUFFIX, is_temporary_file_of, sample_blocks, temporary_prefix,
};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::thread::{self, JoinHandle};
use tempfile::NamedTempFile;

/// After so many bytes a file begins to be flushed.
const FLUSHED_BYTES: u64 = 32 << 20;

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    let path = path.to_owned();
    move |source| WeightsError::Io { action, path, source }
}

/// Where and how a new file is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewFile<'a> {
    pub(super) path: &'a Path,
    /// What files of the save are called, which is part of the temporary name.
    pub(super) stem: &'a str,
    pub(super) mode: IoMode,
}

impl<'a> NewFile<'a> {
    pub(super) fn buffered(path: &'a Path, stem: &'a str) -> Self {
        Self { path, stem, mode: IoMode::Buffered }
    }
}

/// A file that is being written, under a temporary name. Dropped without [`finish`](Self::finish), it is removed.
#[derive(Debug)]
pub(super) struct OpenFile {
    file: BlockFile,
    target: PathBuf,
    checksum: Checksum,
    num_bytes: u64,
    flusher: Option<Flusher>,
}

/// Flushes a long file while it is still being written, so that the disk is not idle until the end.
#[derive(Debug)]
struct Flusher {
    wake: SyncSender<()>,
    /// An error of the disk is told once, so that this one may be the only to hear of it.
    thread: JoinHandle<io::Result<()>>,
}

impl Flusher {
    fn start(file: &File) -> io::Result<Self> {
        let file = file.try_clone()?;
        let (wake, woken) = mpsc::sync_channel(1);
        let flush = move || woken.into_iter().try_for_each(|()| file.sync_data());
        let thread = thread::Builder::new().name("flush".to_owned()).spawn(flush)?;
        Ok(Self { wake, thread })
    }

    fn finish(self) -> io::Result<()> {
        drop(self.wake);
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that flushes it has panicked")))
    }
}

impl OpenFile {
    /// Begins a file.
    ///
    /// Its temporary name is random, and the file is made anew: nobody can put a link there beforehand that leads elsewhere.
    pub(super) fn create(NewFile { path: target, stem, mode }: NewFile<'_>) -> Result<Self> {
        let folder = folder_of(target);
        let mut builder = tempfile::Builder::new();
        let prefix = temporary_prefix(stem);
        builder.prefix(&prefix).suffix(TEMPORARY_SUFFIX).rand_bytes(16);
        // The umask decides who may read it.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = fault::step().and_then(|()| {
            let mut file = builder.tempfile_in(folder)?;
            // Another process may have cleaned the folder before this one has locked the file.
            while !is_ours(file.as_file())? {
                file = builder.tempfile_in(folder)?;
            }
            Ok(file)
        });
        let file = file.map_err(io_error("create a file in", folder))?;
        let file = BlockFile::new(file, mode);
        Ok(Self { file, target: target.to_owned(), checksum: Checksum::new(), num_bytes: 0, flusher: None })
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.write_all(bytes).map_err(io_error("write", &self.target))?)
    }

    /// Flushes what is written so far, in another thread. If that fails, [`finish`](Self::finish) still flushes everything.
    fn flush_beside(&mut self) {
        if self.flusher.is_none() {
            self.flusher = Flusher::start(self.file.as_file()).ok();
        }
        if let Some(flusher) = &self.flusher {
            let _ = flusher.wake.try_send(());
        }
    }

    /// Writes the rest and flushes the file.
    pub(super) fn finish(self) -> Result<PendingFile> {
        let Self { file, target, checksum, num_bytes, flusher } = self;
        let file = file.finish().map_err(io_error("write", &target))?;
        flusher.map_or(Ok(()), Flusher::finish).map_err(io_error("flush", &target))?;
        // Without this, a power cut after the rename could leave the name on an empty file.
        let flushed = fault::step().and_then(|()| file.as_file().sync_all());
        flushed.map_err(io_error("flush", &target))?;
        let sample = sample(file.as_file(), num_bytes).map_err(io_error("read", &target))?;
        Ok(PendingFile { file, target, checksum, sample, num_bytes })
    }
}

impl Write for OpenFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes)?;
        // Before it leaves the processor's cache.
        self.checksum.update(bytes);
        let num_flushes = self.num_bytes / FLUSHED_BYTES;
        self.num_bytes += bytes.len() as u64;
        if self.num_bytes / FLUSHED_BYTES > num_flushes {
            self.flush_beside();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A file that is complete on the disk but still under its temporary name. Dropped, it is removed.
#[derive(Debug)]
pub(super) struct PendingFile {
    file: NamedTempFile,
    target: PathBuf,
    checksum: Checksum,
    sample: Checksum,
    num_bytes: u64,
}

impl PendingFile {
    /// Writes all of it.
    pub(super) fn write(target: &Path, stem: &str, content: &[u8]) -> Result<Self> {
        let mut file = OpenFile::create(NewFile::buffered(target, stem))?;
        file.append(content)?;
        file.finish()
    }

    /// What the file is called until it has its name.
    pub(super) fn temporary_name(&self) -> String {
        name_of(self.file.path())
    }

    /// What the manifest of a save says of it.
    pub(super) fn saved_file(&self) -> SavedFile {
        SavedFile {
            name: name_of(&self.target),
            temporary_name: Some(self.temporary_name()),
            bytes: self.num_bytes,
            xxh3_128: self.checksum.to_string(),
            sample: self.sample.to_string(),
        }
    }

    /// Leaves the file under its temporary name when this is dropped.
    pub(super) fn leave(&mut self) {
        self.file.disable_cleanup(true);
    }

    /// Gives the file its name, over an older one.
    pub(super) fn commit(self) -> Result<PathBuf> {
        let Self { file, target, .. } = self;
        let renamed = fault::step().and_then(|()| Ok(file.persist(&target)?));
        renamed.map_err(io_error("move into place", &target))?;
        Ok(target)
    }
}

/// The checksum of blocks at even distances in a file of so many bytes, the first and the last among them, as they are read from it:
/// it says that the file is still the same, and not that it is what was to be written, which its checksum says.
pub(super) fn sample(file: &File, num_bytes: u64) -> io::Result<Checksum> {
    let mut checksum = Checksum::new();
    let mut block = Vec::new();
    for Range { start, end } in sample_blocks(num_bytes) {
        block.resize((end - start) as usize, 0);
        file.read_exact_at(&mut block, start)?;
        checksum.update(&block);
    }
    Ok(checksum)
}

/// Locks a new file, which tells whoever cleans the folder that its writer lives. False where somebody was quicker and removes it.
///
/// Where a file system has no locks, nothing is told, and two processes that save into one folder at a time may remove each
/// other's files.
fn is_ours(file: &File) -> io::Result<bool> {
    let is_being_removed = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    Ok(!is_being_removed && file.metadata()?.nlink() > 0)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The folder that a file is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Removes what saves of weights called `stem` left under temporary names when they were ended, but for the names in `kept`.
/// Files whose writer lives stay: only what can be locked has none.
pub(super) fn remove_abandoned(folder: &Path, stem: &str, kept: &[String]) -> Result<()> {
    for name in names_in(folder)? {
        if !is_temporary_file_of(&name, stem) || kept.contains(&name) {
            continue;
        }
        let path = folder.join(&name);
        if !fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
            continue;
        }
        // Network file systems lock only what is open for writing.
        let Ok(file) = File::options().write(true).open(&path) else { continue };
        // The lock is kept until the file is gone, so that no writer takes it in between.
        if file.try_lock().is_ok() {
            remove(&path)?;
        }
    }
    Ok(())
}

/// The names of everything in a folder, in order.
pub(super) fn names_in(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io_error("read", folder))? {
        let entry = entry.map_err(io_error("read", folder))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Removes a file, if it is there.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fault::step().and_then(|()| fs::remove_file(path)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove the outdated", path)(error).into()),
        _ => Ok(()),
    }
}

/// Makes renames and removals in a folder last through a power cut.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    // Only Unix lets a folder be opened and flushed.
    if cfg!(unix) {
        let folder_file = File::open(folder).map_err(io_error("open", folder))?;
        fault::step().and_then(|()| folder_file.sync_all()).map_err(io_error("flush", folder))?;
    }
    Ok(())
}
