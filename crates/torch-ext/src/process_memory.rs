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
