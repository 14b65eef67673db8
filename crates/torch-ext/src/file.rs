//! Between files and the memory of tensors, without a copy in between.

use crate::border::{Handle, handle};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use tch::{Device, Kind, TchError, Tensor};

unsafe extern "C" {
    fn te_read_at(tensor: Handle, file: i32, offset: i64) -> i32;
    fn te_write_at(tensor: Handle, file: i32, offset: i64) -> i32;
    fn te_memory(tensor: Handle, changed: bool, address: *mut *mut u8, size: *mut usize) -> i32;
}

/// Fills a tensor with the bytes of a file from `offset` on. Other tensors over the same memory see them; nobody may
/// be using it meanwhile.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`] if the file ends before; [`io::ErrorKind::InvalidInput`] for a tensor that is not
/// contiguous, or not on the CPU; the system's own. What the tensor holds is not defined then.
///
/// ```
/// use torch_ext::file::{read_at, write_at};
/// let file = tempfile::tempfile()?;
/// write_at(&file, &tch::Tensor::from_slice(&[1f32, 2.0, 3.0]), 0)?;
/// let two = tch::Tensor::from_slice(&[0f32; 2]);
/// read_at(&file, &two, 4)?;
/// assert_eq!(two, tch::Tensor::from_slice(&[2f32, 3.0]));
/// assert_eq!(read_at(&file, &two, 8).unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read_at(file: &File, tensor: &Tensor, offset: u64) -> io::Result<()> {
    let offset = signed(offset)?;
    // SAFETY: both handles are borrowed for the call, which writes no further than the tensor's own bytes.
    done(unsafe { te_read_at(handle(tensor), file.as_raw_fd(), offset) }, io::ErrorKind::UnexpectedEof)
}

/// Writes a tensor's bytes into a file from `offset` on, in the order of its dims.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a tensor that is not contiguous, or not on the CPU; the system's own. What the file
/// holds there is not defined then.
///
/// See [`read_at`] for an example.
pub fn write_at(file: &File, tensor: &Tensor, offset: u64) -> io::Result<()> {
    let offset = signed(offset)?;
    // SAFETY: both handles are borrowed for the call, which reads no further than the tensor's own bytes.
    done(unsafe { te_write_at(handle(tensor), file.as_raw_fd(), offset) }, io::ErrorKind::WriteZero)
}

/// Sets or clears `O_DIRECT`: what is read and written from now on goes past the page cache, from and to memory, and at offsets, that
/// are multiples of what the disk wants (see [`aligned_bytes`]). Handles that were cloned from this one change with it.
///
/// # Errors
/// The system's own: file systems refuse it that have no such way.
///
/// ```
/// let file = tempfile::tempfile()?;
/// if torch_ext::file::set_direct(&file, true).is_ok() {
///     torch_ext::file::set_direct(&file, false)?;
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(fcntl_setfl(file, flags)?)
}

/// A tensor of `num_bytes` bytes (`[num_bytes]`, uint8, on the CPU, with anything in it) whose memory begins at a
/// multiple of `alignment`: what a file opened with `O_DIRECT` is read into.
///
/// # Errors
/// libtorch's own: there is not as much memory.
///
/// ```
/// let bytes = torch_ext::file::aligned_bytes(8192, 4096)?;
/// assert_eq!((bytes.size(), bytes.data_ptr() as usize % 4096), (vec![8192], 0));
/// # Ok::<(), tch::TchError>(())
/// ```
pub fn aligned_bytes(num_bytes: usize, alignment: usize) -> Result<Tensor, TchError> {
    let alignment = alignment.max(1);
    let bytes = Tensor::f_empty([(num_bytes + alignment) as i64], (Kind::Uint8, Device::Cpu))?;
    let address = memory_of(&bytes, false).map_err(|error| TchError::Torch(error.to_string()))?.0 as usize;
    bytes.f_narrow(0, (address.next_multiple_of(alignment) - address) as i64, num_bytes as i64)
}

pub(crate) fn signed(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no file reaches that far"))
}

/// Where a tensor's bytes are, which will be `changed` or only read, and how many there are. They may be used as long as the
/// tensor lives and its storage is not freed.
pub(crate) fn memory_of(tensor: &Tensor, changed: bool) -> io::Result<(*mut u8, usize)> {
    let (mut address, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the handle is borrowed for the call, which writes to both places.
    let status = unsafe { te_memory(handle(tensor), changed, &raw mut address, &raw mut size) };
    done(status, io::ErrorKind::InvalidInput).map(|()| (address, size))
}

pub(crate) fn done(status: i32, at_end: io::ErrorKind) -> io::Result<()> {
    match status {
        0 => Ok(()),
        -1 => Err(at_end.into()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "the tensor's memory is not in one piece on the CPU")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_one_piece_travels_and_other_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let table = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]);
        write_at(&file, &table, 8).unwrap();
        let read = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        // A view in the middle of other memory.
        let row = read.select(0, 1);
        read_at(&file, &row, 8 + 4 * 5).unwrap();
        assert_eq!(Vec::<f32>::try_from(&read.view([-1])).unwrap(), [0.0, 0.0, 0.0, 5.0, 6.0, 7.0]);
        for gaps in [table.tr(), table.narrow(1, 0, 2)] {
            assert_eq!(write_at(&file, &gaps, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(read_at(&file, &gaps, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(read_at(&file, &row, u64::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// More than one call to the kernel moves.
    #[test]
    fn large_memory_travels_whole() {
        let numbers = Tensor::arange(1_300_001, (Kind::Float, Device::Cpu));
        let place = || Tensor::full([1_300_001], -1, (Kind::Float, Device::Cpu));
        let (file, from_file, from_memory) = (tempfile::tempfile().unwrap(), place(), place());
        write_at(&file, &numbers, 12).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 12 + 4 * 1_300_001);
        read_at(&file, &from_file, 12).unwrap();
        crate::process_memory::read(std::process::id(), numbers.data_ptr() as usize, &from_memory).unwrap();
        assert!(from_file == numbers && from_memory == numbers);
    }

    #[test]
    fn the_systems_errors_come_through() {
        let readable = std::fs::File::open("/dev/null").unwrap();
        let tensor = Tensor::from_slice(&[1f32]);
        assert_eq!(write_at(&readable, &tensor, 0).unwrap_err().raw_os_error(), Some(9), "EBADF");
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(write_at(&full, &tensor, 0).unwrap_err().kind(), io::ErrorKind::StorageFull);
        memory_that_is_gone_is_refused(&tensor);
    }

    fn memory_that_is_gone_is_refused(tensor: &Tensor) {
        let tensor = tensor.copy();
        crate::storage::free_storage(&tensor).unwrap();
        let file = tempfile::tempfile().unwrap();
        assert!(read_at(&file, &tensor, 0).is_err());
    }

    #[test]
    fn aligned_memory_begins_where_it_should() {
        for (num_bytes, alignment) in [(0, 4096), (1, 512), (4096, 4096), (100, 0)] {
            let bytes = aligned_bytes(num_bytes, alignment).unwrap();
            assert_eq!(bytes.numel(), num_bytes);
            assert_eq!(bytes.data_ptr() as usize % alignment.max(1), 0);
        }
    }
}
