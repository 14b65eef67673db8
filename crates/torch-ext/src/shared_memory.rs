//! A part of a file in memory that processes share, as words that each of them may read and write at any time.

use crate::file::memory_of;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use tch::Tensor;

const WORD_BYTES: usize = size_of::<AtomicU64>();

/// Words of a file that is in memory (`memfd_create`). A store is seen by all processes that map the file or read it.
///
/// ```
/// use torch_ext::shared_memory::SharedWords;
/// // A file on a disk can become shorter at any time.
/// assert!(SharedWords::map(&tempfile::tempfile()?, 0, 1).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct SharedWords {
    address: NonNull<AtomicU64>,
    num_words: usize,
}

// SAFETY: the memory belongs to no thread, and is only ever used through atomics.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps `num_words` words of the file from byte `offset` on, for reading and for writing. The mapping outlives the descriptor.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that could become shorter, since whoever then touched what is gone would be
    /// killed: it has to be sealed against that (`F_SEAL_SHRINK`), which only files in memory can be; for an `offset` that is not
    /// at the beginning of a page, for no words at all, and for a file that ends before. Otherwise the system's own.
    pub fn map(file: &File, offset: u64, num_words: usize) -> io::Result<Self> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        // SAFETY: asks the kernel about a descriptor that is open for as long as the file is borrowed.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals == -1 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(invalid("the file may become shorter"));
        }
        let num_bytes = num_words.checked_mul(size_of::<AtomicU64>()).filter(|&number| number > 0);
        let num_bytes = num_bytes.ok_or_else(|| invalid("no memory has so many words"))?;
        let end = offset.checked_add(num_bytes as u64).filter(|&end| end <= i64::MAX as u64);
        if end.is_none_or(|end| file.metadata().map_or(true, |metadata| metadata.len() < end)) {
            return Err(invalid("the file ends before"));
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: the kernel chooses an address where nothing is, so no memory of this process changes; what is wrong with the
        // other arguments is the kernel's to find.
        let address = unsafe {
            libc::mmap(ptr::null_mut(), num_bytes, protection, flags, file.as_raw_fd(), offset as libc::off_t)
        };
        match NonNull::new(address.cast::<AtomicU64>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { address, num_words }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl SharedWords {
    /// Copies a tensor's bytes into the words from word `first` on; the rest of the last word becomes zeros. Each word is written whole, in
    /// any order: that all of them are there has to be told by another word, stored afterwards with [`Release`](Ordering::Release).
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if there are not as many words, and for a tensor that is not contiguous, or not on the CPU.
    pub fn store_tensor(&self, first: usize, tensor: &Tensor) -> io::Result<()> {
        let (from, num_bytes) = memory_of(tensor, false)?;
        let words = self.range(first, num_bytes.div_ceil(WORD_BYTES))?;
        let num_whole = num_bytes / WORD_BYTES;
        for (number, word) in words[..num_whole].iter().enumerate() {
            // SAFETY: one of the whole words that the tensor's bytes make, wherever they begin; the tensor is borrowed.
            word.store(unsafe { from.add(number * WORD_BYTES).cast::<u64>().read_unaligned() }, Ordering::Relaxed);
        }
        if let Some(last) = words.get(num_whole) {
            let mut bytes = [0; WORD_BYTES];
            // SAFETY: the tensor's bytes behind the last whole word, fewer than a word has.
            unsafe {
                let rest = from.add(num_whole * WORD_BYTES);
                ptr::copy_nonoverlapping(rest, bytes.as_mut_ptr(), num_bytes - num_whole * WORD_BYTES);
            }
            last.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fills a tensor with the bytes that begin `offset` bytes behind word `first`. Other tensors over its memory see them; nobody may be
    /// using it. Whoever needs to know that all words are there loads the word that tells it with [`Acquire`](Ordering::Acquire) before.
    ///
    /// ```
    /// # use std::os::fd::AsRawFd;
    /// use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    /// use torch_ext::shared_memory::SharedWords;
    /// let file = std::fs::File::from(memfd_create("words", MemfdFlags::ALLOW_SEALING)?);
    /// file.set_len(4096)?;
    /// fcntl_add_seals(&file, SealFlags::SHRINK)?;
    /// let (here, there) = (SharedWords::map(&file, 0, 8)?, SharedWords::map(&file, 0, 8)?);
    /// here.store_tensor(1, &tch::Tensor::from_slice(&[1f32, 2.0, 3.0]))?;
    /// let two = tch::Tensor::from_slice(&[0f32; 2]);
    /// there.load_tensor(1, 4, &two)?;
    /// assert_eq!(two, tch::Tensor::from_slice(&[2f32, 3.0]));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`store_tensor`](Self::store_tensor).
    pub fn load_tensor(&self, first: usize, offset: usize, tensor: &Tensor) -> io::Result<()> {
        let (to, num_bytes) = memory_of(tensor, true)?;
        let first = first.saturating_add(offset / WORD_BYTES);
        let begin = offset % WORD_BYTES;
        let words = self.range(first, (begin + num_bytes).div_ceil(WORD_BYTES))?;
        let mut filled = 0;
        for (number, word) in words.iter().enumerate() {
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            let skipped = if number == 0 { begin } else { 0 };
            let count = (WORD_BYTES - skipped).min(num_bytes - filled);
            // SAFETY: as many bytes as are left of the tensor at most, which is borrowed.
            unsafe {
                if count == WORD_BYTES {
                    to.add(filled).cast::<[u8; WORD_BYTES]>().write_unaligned(bytes);
                } else {
                    ptr::copy_nonoverlapping(bytes.as_ptr().add(skipped), to.add(filled), count);
                }
            }
            filled += count;
        }
        Ok(())
    }

    fn range(&self, first: usize, num_words: usize) -> io::Result<&[AtomicU64]> {
        let words = self.get(first..).and_then(|words| words.get(..num_words));
        words.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "there are not as many words"))
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: mapped at the beginning of a page for as long as this lives, and of this length; the file cannot become shorter.
        // All bits are words, and whoever else writes them, in this process or another, is what atomics are for.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.num_words) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nothing borrows from it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.num_words * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;
    use tch::{Device, Kind};

    fn file(num_bytes: u64, seals: libc::c_int) -> File {
        // SAFETY: the name ends with a zero byte; the descriptor is new, and this file's alone.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING)) };
        file.set_len(num_bytes).unwrap();
        // SAFETY: changes a file that is open.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        file
    }

    #[test]
    fn stores_are_read_from_the_file_and_writes_to_it_are_seen() {
        let file = file(8192, libc::F_SEAL_SHRINK);
        let words = SharedWords::map(&file, 4096, 512).unwrap();
        assert_eq!(words.len(), 512);
        words[511].store(7, Ordering::Relaxed);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 8184).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 7);
        file.write_all_at(&9u64.to_ne_bytes(), 4096).unwrap();
        drop(file);
        assert_eq!(words[0].load(Ordering::Relaxed), 9);
    }

    #[test]
    fn tensors_of_any_length_travel_from_any_byte_on() {
        let file = file(8192, libc::F_SEAL_SHRINK);
        let (words, seen) = (SharedWords::map(&file, 0, 1024).unwrap(), SharedWords::map(&file, 0, 1024).unwrap());
        for num_bytes in [0, 1, 7, 8, 9, 16, 8184, 8185 - 8] {
            let sent = Tensor::arange(num_bytes, (Kind::Int64, Device::Cpu)).to_kind(Kind::Uint8);
            words.store_tensor(1, &sent).unwrap();
            for (start, count) in [(0, num_bytes), (1, num_bytes - 1), (5, 2), (8, 1), (3, num_bytes / 2)] {
                if count < 0 || num_bytes < start + count {
                    continue;
                }
                let all = Tensor::full([count + 2], 255, (Kind::Uint8, Device::Cpu));
                seen.load_tensor(1, start as usize, &all.narrow(0, 1, count)).unwrap();
                assert_eq!(all.narrow(0, 1, count), sent.narrow(0, start, count), "{num_bytes} {start} {count}");
                let around: [i64; 2] = [0, count + 1].map(|at| all.int64_value(&[at]));
                assert_eq!(around, [255, 255], "bytes beside it have changed");
            }
        }
        let long = Tensor::zeros([8192], (Kind::Uint8, Device::Cpu));
        let gaps = Tensor::zeros([4, 4], (Kind::Uint8, Device::Cpu)).tr();
        for (first, offset, tensor) in
            [(1, 0, &long), (usize::MAX, 0, &long), (0, 1, &long), (0, usize::MAX, &long), (0, 0, &gaps)]
        {
            assert_eq!(words.load_tensor(first, offset, tensor).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        for (first, tensor) in [(1, &long), (usize::MAX, &long), (0, &gaps)] {
            assert_eq!(words.store_tensor(first, tensor).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn what_could_vanish_or_is_not_there_is_refused() {
        let sealed = || file(8192, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
        let refused = |file: &File, offset, num_words| SharedWords::map(file, offset, num_words).unwrap_err().kind();
        for (file, offset, num_words) in [
            (file(8192, libc::F_SEAL_GROW), 4096, 512),
            (tempfile::tempfile().unwrap(), 0, 1),
            (File::open("/dev/zero").unwrap(), 0, 1),
            (sealed(), 4096, 513),
            (sealed(), 8192, 1),
            (sealed(), 0, 0),
            (sealed(), 0, usize::MAX),
            (sealed(), u64::MAX - 7, 1),
            (sealed(), 8, 1),
        ] {
            assert_eq!(refused(&file, offset, num_words), io::ErrorKind::InvalidInput, "{file:?} {offset} {num_words}");
        }
    }
}
