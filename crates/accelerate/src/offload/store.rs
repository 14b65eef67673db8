//! Where blocks are kept: a file, or the memory of the host.

use crate::error::{OffloadError, Result};
use accelerate_core::config::OffloadTarget;
use accelerate_core::offload::ALIGNMENT;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::file::{aligned_bytes, read_at, write_at};

/// Bytes that are read and written at offsets, by several threads at once.
pub(crate) trait BlockStore: fmt::Debug + Send + Sync {
    /// Memory that [`read`](Self::read) and [`write`](Self::write) work with: `[num_bytes]`, uint8.
    fn buffer(&self, num_bytes: usize) -> Result<Tensor>;
    /// Fills such memory from `offset` on.
    fn read(&self, offset: u64, bytes: &Tensor) -> Result<()>;
    /// Keeps what is in it from `offset` on.
    fn write(&self, offset: u64, bytes: &Tensor) -> Result<()>;
}

/// Room for `num_bytes` of state of tensors on `device`.
///
/// # Errors
/// The folder is not there, or there is no room in it: nothing is found out only when it is written.
pub(crate) fn open(target: &OffloadTarget, num_bytes: u64, device: Device) -> Result<Arc<dyn BlockStore>> {
    Ok(match target {
        OffloadTarget::Cpu => Arc::new(HostMemory::new(num_bytes, device)?),
        OffloadTarget::Nvme(folder) => Arc::new(ScratchFile::create(folder, num_bytes)?),
    })
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
        let direct = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::DIRECT));
        if let Err(errno) = direct {
            tracing::debug!("files in {} go through the page cache: {errno}", folder.display());
        }
        Ok(Self { file, folder: folder.to_owned() })
    }
}

impl BlockStore for ScratchFile {
    fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
        Ok(aligned_bytes(num_bytes, ALIGNMENT)?)
    }

    fn read(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        let failed = |source| OffloadError::Transfer { action: "read", folder: self.folder.clone(), source };
        Ok(read_at(&self.file, bytes, offset).map_err(failed)?)
    }

    fn write(&self, offset: u64, bytes: &Tensor) -> Result<()> {
        let failed = |source| OffloadError::Transfer { action: "write", folder: self.folder.clone(), source };
        Ok(write_at(&self.file, bytes, offset).map_err(failed)?)
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
    fn new(num_bytes: u64, device: Device) -> Result<Self> {
        let bytes = Tensor::f_empty([num_bytes as i64], (Kind::Uint8, Device::Cpu))?;
        let bytes = if device.is_cuda() { bytes.f_pin_memory(device)? } else { bytes };
        Ok(Self { bytes: Mutex::new(bytes), device })
    }

    fn part(&self, offset: u64, num_bytes: usize) -> Result<Tensor> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(bytes.f_narrow(0, offset as i64, num_bytes as i64)?)
    }
}

impl BlockStore for HostMemory {
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
mod tests {
    use super::*;

    fn bytes(store: &dyn BlockStore, value: f64) -> Tensor {
        let mut bytes = store.buffer(ALIGNMENT).unwrap();
        bytes.fill_(value)
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for target in [OffloadTarget::Cpu, OffloadTarget::Nvme(folder.path().to_owned())] {
            let store = open(&target, 3 * ALIGNMENT as u64, Device::Cpu).unwrap();
            for (block, value) in [(2, 7.0), (0, 5.0)] {
                store.write(block * ALIGNMENT as u64, &bytes(&*store, value)).unwrap();
            }
            for (block, value) in [(0, 5), (2, 7)] {
                let found = bytes(&*store, 0.0);
                store.read(block * ALIGNMENT as u64, &found).unwrap();
                assert_eq!(Vec::<u8>::try_from(&found).unwrap(), [value; ALIGNMENT], "{target}");
            }
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "the file has no name");
    }

    #[test]
    fn missing_folders_and_missing_room_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = OffloadTarget::Nvme(folder.path().join("nvme"));
        let error = open(&nowhere, 1, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("nvme") && error.contains("mount"), "{error}");
        // More than any file system has.
        let error = open(&OffloadTarget::Nvme(folder.path().to_owned()), 1 << 55, Device::Cpu).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("33554432.0 GiB") && text.contains(&*folder.path().to_string_lossy()), "{text}");
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
        assert!(source.is_some(), "{error:?}");
    }
}
