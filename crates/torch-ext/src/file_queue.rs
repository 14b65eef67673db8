//! Reads and writes between a file and the memory of tensors that the kernel does on its own, several at once.
//!
//! Method: Axboe, "Efficient IO with io_uring", 2019. Beside threads that read and write, nobody has to be woken up but the
//! one who waits.

use crate::file::{memory_of, signed};
use io_uring::{IoUring, Probe, opcode, types};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use tch::Tensor;

/// The most that one request moves: the kernel counts bytes in 31 bits.
const MOST_BYTES: usize = 1 << 30;

/// Transfers between one file and tensors.
///
/// The queue holds the tensors until their transfers have ended, also when it is dropped, which waits for all. Nobody may
/// free or resize their storage meanwhile.
///
/// ```
/// use torch_ext::file_queue::FileQueue;
/// let file = tempfile::tempfile()?;
/// // Containers may forbid it.
/// let Ok(mut queue) = FileQueue::new(&file, 2) else { return Ok(()) };
/// queue.start_write(&tch::Tensor::from_slice(&[1f32, 2.0]), 0, 7)?;
/// let finished = queue.wait()?.expect("one has been started");
/// assert_eq!((finished.tag, finished.result.is_ok()), (7, true));
/// let number = tch::Tensor::from_slice(&[0f32]);
/// queue.start_read(&number, 4, 8)?;
/// queue.wait()?;
/// assert_eq!(number, tch::Tensor::from_slice(&[2f32]));
/// assert!(queue.wait()?.is_none());
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct FileQueue {
    ring: IoUring,
    file: File,
    /// By the number under which the kernel knows them.
    transfers: Vec<Option<Transfer>>,
}

/// A transfer that has ended.
#[derive(Debug)]
pub struct Finished {
    /// What its starter called it.
    pub tag: u64,
    /// Whether it was a write.
    pub is_write: bool,
    /// [`io::ErrorKind::UnexpectedEof`] if the file ended before the tensor did; the system's own. What the tensor, or the file
    /// in its place, holds is not defined then.
    pub result: io::Result<()>,
}

struct Transfer {
    tag: u64,
    bytes: Tensor,
    is_write: bool,
    offset: u64,
    /// Bytes that have been moved.
    done: usize,
}

impl FileQueue {
    /// A queue for at most `most` transfers at once.
    ///
    /// # Errors
    /// The system's own: the kernel is too old or forbids it to this process, as containers do.
    pub fn new(file: &File, most: usize) -> io::Result<Self> {
        let too_many = |_| io::Error::new(io::ErrorKind::InvalidInput, "no kernel has so long a queue");
        let ring = IoUring::new(u32::try_from(most.max(1)).map_err(too_many)?)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !(probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE)) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring cannot read or write"));
        }
        Ok(Self { ring, file: file.try_clone()?, transfers: (0..most.max(1)).map(|_| None).collect() })
    }

    /// Begins to fill `bytes`, contiguous and on the CPU, with the file's from `offset` on; nobody may use them until
    /// [`wait`](Self::wait) has returned `tag`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a tensor that is not contiguous, or not on the CPU; [`io::ErrorKind::WouldBlock`]
    /// if as many transfers are on their way as the queue is long. Then nothing has begun; the system's own errors come with
    /// [`wait`](Self::wait).
    pub fn start_read(&mut self, bytes: &Tensor, offset: u64, tag: u64) -> io::Result<()> {
        self.start(Transfer { tag, bytes: bytes.shallow_clone(), is_write: false, offset, done: 0 })
    }

    /// Begins to write `bytes`, contiguous and on the CPU, into the file from `offset` on; nobody may change them until
    /// [`wait`](Self::wait) has returned `tag`.
    ///
    /// # Errors
    /// As [`start_read`](Self::start_read).
    pub fn start_write(&mut self, bytes: &Tensor, offset: u64, tag: u64) -> io::Result<()> {
        self.start(Transfer { tag, bytes: bytes.shallow_clone(), is_write: true, offset, done: 0 })
    }

    fn start(&mut self, transfer: Transfer) -> io::Result<()> {
        signed(transfer.offset)?;
        let Some(place) = self.transfers.iter().position(Option::is_none) else {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "the queue is full: wait for a transfer first"));
        };
        let transfer = self.transfers[place].insert(transfer);
        let submitted = submit(&mut self.ring, &self.file, place, transfer);
        if submitted.is_err() {
            self.transfers[place] = None;
        }
        submitted
    }

    /// Waits until any transfer has ended; `None` if there is none.
    ///
    /// # Errors
    /// The system's own. Nothing is known of the transfers then, and their memory is never given back.
    pub fn wait(&mut self) -> io::Result<Option<Finished>> {
        while self.transfers.iter().any(Option::is_some) {
            let Some(completion) = self.ring.completion().next() else {
                match self.ring.submit_and_wait(1) {
                    Err(error) if !is_passing(&error) => return Err(error),
                    _ => continue,
                }
            };
            let place = completion.user_data() as usize;
            let Some(transfer) = self.transfers.get_mut(place).and_then(Option::as_mut) else { continue };
            let result = match transfer.advance(completion.result()) {
                Ok(true) => Ok(()),
                Ok(false) => match submit(&mut self.ring, &self.file, place, transfer) {
                    Ok(()) => continue,
                    error => error,
                },
                Err(error) => Err(error),
            };
            let finished = |Transfer { tag, is_write, .. }| Finished { tag, is_write, result };
            return Ok(self.transfers[place].take().map(finished));
        }
        Ok(None)
    }
}

/// Asks the kernel for what is left of a transfer. An error says that it will never see it.
fn submit(ring: &mut IoUring, file: &File, place: usize, transfer: &Transfer) -> io::Result<()> {
    let (address, size) = memory_of(&transfer.bytes, !transfer.is_write)?;
    let left = size.saturating_sub(transfer.done);
    let (address, count) = (address.wrapping_add(transfer.done), left.min(MOST_BYTES) as u32);
    let (file, offset) = (types::Fd(file.as_raw_fd()), transfer.offset + transfer.done as u64);
    let entry = match transfer.is_write {
        true => opcode::Write::new(file, address, count).offset(offset).build(),
        false => opcode::Read::new(file, address, count).offset(offset).build(),
    };
    // SAFETY: the queue keeps the tensor, and with it the memory, until the kernel has said that it is done, and the file as
    // long as itself.
    unsafe { ring.submission().push(&entry.user_data(place as u64)) }
        .map_err(|full| io::Error::new(io::ErrorKind::WouldBlock, full))?;
    // What the kernel does not take now stays in the ring, with the tensor's address: the transfer goes on. Who waits tries
    // again, and is told why it fails.
    let _ = ring.submit();
    Ok(())
}

/// The kernel would have taken it at another moment.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, ResourceBusy, WouldBlock};
    matches!(error.kind(), Interrupted | ResourceBusy | WouldBlock)
}

impl Transfer {
    /// Counts what one request has moved; whether that is all.
    fn advance(&mut self, moved: i32) -> io::Result<bool> {
        let size = memory_of(&self.bytes, false)?.1;
        match usize::try_from(moved) {
            Ok(0) if self.done < size => Err(match self.is_write {
                true => io::ErrorKind::WriteZero.into(),
                false => io::ErrorKind::UnexpectedEof.into(),
            }),
            Ok(moved) => {
                self.done += moved;
                Ok(size <= self.done)
            }
            Err(_) => {
                let error = io::Error::from_raw_os_error(moved.saturating_neg());
                if is_passing(&error) { Ok(false) } else { Err(error) }
            }
        }
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        while let Ok(Some(_)) = self.wait() {}
        // Where waiting fails, the kernel may still be at it.
        self.transfers.drain(..).flatten().for_each(std::mem::forget);
    }
}

impl fmt::Debug for FileQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.transfers.iter().flatten().count();
        f.debug_struct("FileQueue").field("file", &self.file).field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Write;
    use tch::{Device, Kind};

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// `None` where it is forbidden.
    fn queue(file: &File, most: usize) -> Option<FileQueue> {
        FileQueue::new(file, most).inspect_err(|error| eprintln!("not tested: {error}")).ok()
    }

    fn wait_for_all(queue: &mut FileQueue) -> BTreeMap<u64, io::Result<()>> {
        std::iter::from_fn(|| queue.wait().unwrap()).map(|finished| (finished.tag, finished.result)).collect()
    }

    #[test]
    fn many_transfers_go_where_they_should() {
        let file = tempfile::tempfile().unwrap();
        let Some(mut queue) = queue(&file, 8) else { return };
        for round in 0..3 {
            let numbers = Tensor::arange(80_000, FLOAT) + f64::from(round);
            for (tag, part) in numbers.chunk(8, 0).iter().enumerate() {
                queue.start_write(part, 4 * 10_000 * tag as u64, tag as u64).unwrap();
            }
            let finished = wait_for_all(&mut queue);
            assert!(finished.len() == 8 && finished.values().all(Result::is_ok), "{finished:?}");
            let read = Tensor::zeros([80_000], FLOAT);
            for (tag, part) in read.chunk(8, 0).iter().enumerate() {
                queue.start_read(part, 4 * 10_000 * tag as u64, tag as u64).unwrap();
            }
            assert_eq!(wait_for_all(&mut queue).len(), 8);
            assert_eq!(read, numbers);
        }
    }

    #[test]
    fn what_comes_in_pieces_is_put_together() {
        let (reader, mut writer) = io::pipe().unwrap();
        let Some(mut queue) = queue(&File::from(std::os::fd::OwnedFd::from(reader)), 1) else { return };
        let read = Tensor::zeros([3], FLOAT);
        // A pipe has no offsets, and hands out what is there.
        let numbers = [1f32, 2.0, 3.0].map(f32::to_le_bytes).concat();
        writer.write_all(&numbers[..5]).unwrap();
        queue.start_read(&read, 0, 3).unwrap();
        let rest = std::thread::spawn(move || writer.write_all(&numbers[5..]));
        assert!(wait_for_all(&mut queue)[&3].is_ok());
        rest.join().unwrap().unwrap();
        assert_eq!(Vec::<f32>::try_from(&read).unwrap(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_cannot_be_moved_is_said_and_the_rest_goes_on() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8).unwrap();
        let Some(mut queue) = queue(&file, 2) else { return };
        let table = Tensor::zeros([2, 3], FLOAT);
        assert_eq!(queue.start_read(&table.tr(), 0, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(queue.start_read(&table, u64::MAX, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        queue.start_read(&table, 0, 1).unwrap();
        queue.start_read(&table.select(0, 0).narrow(0, 0, 2), 0, 2).unwrap();
        assert_eq!(queue.start_read(&table, 0, 3).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let finished = wait_for_all(&mut queue);
        assert_eq!(finished[&1].as_ref().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(finished[&2].is_ok() && finished.len() == 2, "{finished:?}");
    }

    #[test]
    fn the_systems_errors_come_through() {
        let tensor = Tensor::from_slice(&[1f32]);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let Some(mut of_full) = queue(&full, 1) else { return };
        of_full.start_write(&tensor, 0, 0).unwrap();
        assert_eq!(wait_for_all(&mut of_full)[&0].as_ref().unwrap_err().kind(), io::ErrorKind::StorageFull);
        let mut of_readable = queue(&File::open("/dev/null").unwrap(), 1).unwrap();
        of_readable.start_write(&tensor, 0, 0).unwrap();
        assert_eq!(wait_for_all(&mut of_readable)[&0].as_ref().unwrap_err().raw_os_error(), Some(9), "EBADF");
    }

    #[test]
    fn dropping_a_queue_waits() {
        let file = tempfile::tempfile().unwrap();
        let numbers = Tensor::arange(500_000, FLOAT);
        let Some(mut queue) = queue(&file, 4) else { return };
        for (tag, part) in numbers.chunk(4, 0).iter().enumerate() {
            queue.start_write(part, 4 * 125_000 * tag as u64, tag as u64).unwrap();
        }
        drop(queue);
        let read = numbers.zeros_like();
        crate::file::read_at(&file, &read, 0).unwrap();
        assert_eq!(read, numbers);
    }
}
