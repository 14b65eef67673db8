//! The memory of other processes on this machine, read without their help (`process_vm_readv`).

use crate::border::{Handle, handle};
use crate::file::done;
use std::io;
use tch::Tensor;

unsafe extern "C" {
    fn te_read_process(tensor: Handle, process: i32, address: usize) -> i32;
    fn te_let_siblings_read() -> i32;
}

/// Fills a tensor with the bytes at an address of process `process`, which may be this one. Whether they are what the
/// reader takes them for is between the two: nothing keeps the other process from writing meanwhile. Other tensors over the
/// same memory see them; nobody may be using it.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a tensor that is not contiguous, or not on the CPU; the system's own: no such process,
/// no permission (another user's; or see [`let_siblings_read`]), nothing at the address. What the tensor holds is not
/// defined then.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::process_memory::read;
/// let (source, copy) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from_slice(&[0f32; 2]));
/// read(std::process::id(), source.data_ptr() as usize + 4, &copy)?;
/// assert_eq!(copy, Tensor::from_slice(&[2f32, 3.0]));
/// assert!(read(std::process::id(), 0, &copy).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read(process: u32, address: usize, tensor: &Tensor) -> io::Result<()> {
    let process = i32::try_from(process).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no such process"))?;
    // SAFETY: the tensor's handle is borrowed for the call, which writes no further than its own bytes; what is wrong with
    // the address is the kernel's to find.
    done(unsafe { te_read_process(handle(tensor), process, address) }, io::ErrorKind::UnexpectedEof)
}

/// The same for a few words, of which each is read whole, though not all at the same moment.
///
/// # Errors
/// As [`read`].
///
/// ```
/// use std::sync::atomic::AtomicI64;
/// let there = [AtomicI64::new(7), AtomicI64::new(-8)];
/// let mut words = [0; 2];
/// torch_ext::process_memory::read_words(std::process::id(), there.as_ptr() as usize, &mut words)?;
/// assert_eq!(words, [7, -8]);
/// assert!(torch_ext::process_memory::read_words(std::process::id(), 0, &mut words).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read_words(process: u32, address: usize, words: &mut [i64]) -> io::Result<()> {
    let process = i32::try_from(process).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no such process"))?;
    let num_bytes = size_of_val(words);
    let here = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: num_bytes };
    let there = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: num_bytes };
    // SAFETY: the kernel writes no further than the words, which are borrowed for the call; any bits are a word. What is wrong
    // with the address is the kernel's to find.
    match unsafe { libc::process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0) } {
        -1 => Err(io::Error::last_os_error()),
        read if read as usize == num_bytes => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Lets processes with the same parent, and their children, [`read`] this one where the system allows that to a process's
/// ancestors only (Yama's `ptrace_scope` 1, the default of some distributions). Debuggers among them may attach as well.
///
/// # Errors
/// The system's own; without Yama there is nothing to allow, and an error too.
///
/// ```
/// // Elsewhere it is not needed.
/// let _ = torch_ext::process_memory::let_siblings_read();
/// ```
pub fn let_siblings_read() -> io::Result<()> {
    // SAFETY: sets an attribute of this process.
    done(unsafe { te_let_siblings_read() }, io::ErrorKind::Unsupported)
}
