//! Where blocks are kept: a file, or the memory of the host.

use super::queued::Queued;
use super::threads::Threads;
use crate::error::{OffloadError, Result};
use crate::messages;
use accelerate_core::config::OffloadTarget;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::device::pin_memory;
use torch_ext::file::{aligned_bytes, read_at, set_direct, write_at};
use torch_ext::file_queue::FileQueue;
use torch_ext::storage::{LARGE_PAGE_BYTES, prefer_large_pages};

/// Bytes that are read and written at offsets, beside what the caller does.
pub(super) trait BlockStore: fmt::Debug + Send {
    /// Memory that transfers work with: `[num_bytes]`, uint8.
    fn buffer(&self, num_bytes: usize) -> Result<Tensor>;

    /// Begins a transfer. Nobody may use its memory until [`finish`](Self::finish) has returned its number.
    fn start(&mut self, transfer: Transfer) -> Result<()>;

    /// Waits for any transfer that has been started: its number, and how it has ended; `None` if there is none. An error of
    /// its own says that nothing is known of any.
    fn finish(&mut self) -> Result<Option<(usize, Result<()>)>>;
}

/// A part of the store that goes to memory or comes from there.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) offset: u64,
    /// `[num_bytes]`, uint8, of a buffer.
    pub(super) bytes: Tensor,
    /// What the caller calls it.
    pub(super) number: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the store to memory.
    Read,
    /// From memory to the store.
    Write,
}

/// What can be read and written by several threads at once.
pub(super) trait Place: fmt::Debug + Send + Sync {
    /// As [`BlockStore::buffer`].
    fn buffer(&self, num_bytes: usize) -> Result<Tensor>;
    /// Fills such memory from `offset` on.
    fn read(&self, offset: u64, bytes: &Tensor) -> Result<()>;
    /// Keeps what is in it from `offset` on.
    fn write(&self, offset: u64, bytes: &Tensor) -> Result<()>;
}

/// Room for `num_bytes` of state of tensors on `device`; at most `most_transfers` will be on their way at once.
///
/// # Errors
/// The folder is not there, or there is no room in it: nothing is found out only when it is written.
pub(super) fn open(
    target: &OffloadTarget,
    num_bytes: u64,
    device: Device,
    most_transfers: usize,
) -> Result<Box<dyn BlockStore>> {
    let folder = match target {
        OffloadTarget::Cpu => return Ok(Box::new(Threads::new(HostMemory::new(num_bytes, device)?, most_transfers)?)),
        OffloadTarget::Nvme(folder) => folder,
    };
    let file = ScratchFile::create(folder, num_bytes)?;
    match FileQueue::new(&file.file, most_transfers) {
        Ok(queue) => Ok(Box::new(Queued { file, queue })),
        Err(error) => {
            messages::debug!("threads read and write in {}, because io_uring cannot: {error}", folder.display());
            Ok(Box::new(Threads::new(file, most_transfers)?))
        }
    }
}

/// A file without a name: it is gone when the process is, however that ends.
pub(super) struct ScratchFile {
    file: File,
    folder: PathBuf,
}

impl ScratchFile {
    /// All of its room is taken from the file system now.
    pub(super) fn create(folder: &Path, num_bytes: u64) -> Result<Self> {
        let failed = |source| OffloadError::Folder { folder: folder.to_owned(), source };
        let file = tempfile::tempfile_in(folder).map_err(failed)?;
        match fallocate(&file, FallocateFlags::empty(), 0, num_bytes.max(1)) {
            Ok(()) => {}
            // A file system that cannot promise room: writing to it may fail later.
            Err(Errno::OPNOTSUPP) => file.set_len(num_bytes).map_err(failed)?,
            Err(errno) => {
                let folder = folder.to_owned();
                return Err(OffloadError::NoRoom { folder, num_bytes, source: errno.into() }.into());
            }
        }
        // Otherwise the kernel keeps a copy of everything in memory, which is what this file is to save, and takes the
        // time of one. Where the file system refuses, it has to be.
        if let Err(error) = set_direct(&file, true) {
            messages::debug!("files in {} go through the page cache: {error}", folder.display());
        }
        Ok(Self { file, folder: folder.to_owned() })
    }

    pub(super) fn failed(&self, direction: Direction, source: io::Error) -> OffloadError {
        let action = match direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        OffloadError::Transfer { action, folder: self.folder.clone(), source }
    }
}

impl Place for ScratchFile {
    fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
        // Disks take requests twice as fast that are in one piece, and so do what virtual machines have for them.
        let bytes = aligned_bytes(num_bytes, LARGE_PAGE_BYTES)?;
        prefer_large_pages(&bytes);
        Ok(bytes)
    }

    fn read(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        Ok(read_at(&self.file, bytes, offset).map_err(|source| self.failed(Direction::Read, source))?)
    }

    fn write(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        Ok(write_at(&self.file, bytes, offset).map_err(|source| self.failed(Direction::Write, source))?)
    }
}

impl fmt::Debug for ScratchFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScratchFile").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Memory of the host for what belongs to a device; pinned for CUDA, which then copies without a detour.
pub(super) struct HostMemory {
    /// tch's tensors may be sent but not shared.
    bytes: Mutex<Tensor>,
    device: Device,
}

impl HostMemory {
    pub(super) fn new(num_bytes: u64, device: Device) -> Result<Self> {
        let bytes = Tensor::f_empty([num_bytes as i64], (Kind::Uint8, Device::Cpu))?;
        let bytes = if device.is_cuda() { pin_memory(&bytes)? } else { bytes };
        Ok(Self { bytes: Mutex::new(bytes), device })
    }

    fn part(&self, offset: u64, num_bytes: usize) -> Result<Tensor> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(bytes.f_narrow(0, offset as i64, num_bytes as i64)?)
    }
}

impl Place for HostMemory {
    fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
        Ok(Tensor::f_empty([num_bytes as i64], (Kind::Uint8, self.device))?)
    }

    fn read(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        bytes.shallow_clone().f_copy_(&self.part(offset, bytes.numel())?)?;
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        self.part(offset, bytes.numel())?.f_copy_(bytes)?;
        Ok(())
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("device", &self.device).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use accelerate_core::offload::ALIGNMENT;

    /// Every kind of store with room for `num_bytes`, the files' in `folder`.
    pub(in super::super) fn all_kinds(folder: &Path, num_bytes: u64, most: usize) -> Vec<Box<dyn BlockStore>> {
        let file = || ScratchFile::create(folder, num_bytes).unwrap();
        vec![
            open(&OffloadTarget::Nvme(folder.to_owned()), num_bytes, Device::Cpu, most).unwrap(),
            Box::new(Threads::new(file(), most).unwrap()),
            open(&OffloadTarget::Cpu, num_bytes, Device::Cpu, most).unwrap(),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for mut store in all_kinds(folder.path(), 3 * ALIGNMENT as u64, 2) {
            let buffers = [store.buffer(ALIGNMENT).unwrap(), store.buffer(ALIGNMENT).unwrap()];
            let mut move_both = |direction: Direction, values: [(u64, f64); 2]| {
                for (number, (block, value)) in values.into_iter().enumerate() {
                    let bytes = buffers[number].shallow_clone().fill_(value);
                    store.start(Transfer { direction, offset: block * ALIGNMENT as u64, bytes, number }).unwrap();
                }
                let mut ended = [store.finish().unwrap(), store.finish().unwrap()].map(|ended| {
                    let (number, result) = ended.unwrap();
                    result.unwrap();
                    number
                });
                ended.sort_unstable();
                assert_eq!(ended, [0, 1]);
                assert!(store.finish().unwrap().is_none());
                [0, 1].map(|number: usize| Vec::<u8>::try_from(&buffers[number]).unwrap())
            };
            move_both(Direction::Write, [(2, 7.0), (0, 5.0)]);
            assert_eq!(move_both(Direction::Read, [(0, 0.0), (2, 0.0)]), [[5; ALIGNMENT], [7; ALIGNMENT]]);
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "files have no names");
    }

    #[test]
    fn missing_folders_and_missing_room_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = OffloadTarget::Nvme(folder.path().join("nvme"));
        let error = open(&nowhere, 1, Device::Cpu, 1).unwrap_err().to_string();
        assert!(error.contains("nvme") && error.contains("mount"), "{error}");
        // More than any file system has.
        let error = open(&OffloadTarget::Nvme(folder.path().to_owned()), 1 << 55, Device::Cpu, 1).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("33554432.0 GiB") && text.contains(&*folder.path().to_string_lossy()), "{text}");
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
        assert!(source.is_some(), "{error:?}");
    }

    #[test]
    fn a_file_that_ends_early_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for mut store in all_kinds(folder.path(), ALIGNMENT as u64, 1).into_iter().take(2) {
            let bytes = store.buffer(ALIGNMENT).unwrap();
            let transfer = Transfer { direction: Direction::Read, offset: 1 << 20, bytes, number: 4 };
            store.start(transfer).unwrap();
            let (number, result) = store.finish().unwrap().unwrap();
            let error = result.unwrap_err().to_string();
            assert!(number == 4 && error.contains("cannot read"), "{error}");
        }
    }
}
