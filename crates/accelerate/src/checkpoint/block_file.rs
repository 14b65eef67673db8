//! New files, written block by block.

use super::fault;
use crate::messages;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use tempfile::NamedTempFile;
use torch_ext::file::set_direct;

/// Buffered writes are aligned to this size, so that the page cache can hold each in one large folio. Kernels that map a whole folio
/// on a fault (seen on Linux 6.18) then need one page fault for it. Larger folios need more contiguous memory: with 1 MiB, a save took
/// three times as long on a virtual machine (`bench/README.md`).
const BUFFERED_BLOCK_BYTES: usize = 512 << 10;
/// Size of direct writes. Each is a request of its own, for which the writer waits.
const DIRECT_BLOCK_BYTES: usize = 1 << 20;
/// Alignment of the buffer's address: the largest page size in common use. Offsets and lengths are multiples of
/// [`DIRECT_BLOCK_BYTES`].
const ALIGNMENT: usize = 64 << 10;

const _: () = assert!(DIRECT_BLOCK_BYTES.is_multiple_of(ALIGNMENT));

/// How a file's bytes get to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoMode {
    /// Through the page cache: a reader soon afterwards need not touch the disk.
    Buffered,
    /// With `O_DIRECT` where it is supported. Buffered writes cost a copy, page allocation and kernel writeback, which take CPU time
    /// from the training, and they evict cached data such as the dataset. The file is not in the page cache afterwards.
    Direct,
}

/// A new file, written in large blocks. It falls back to buffered writes if the file system rejects `O_DIRECT` or needs a larger
/// alignment.
#[derive(Debug)]
pub(super) struct BlockFile {
    file: NamedTempFile,
    block: Block,
    is_direct: bool,
}

impl BlockFile {
    pub(super) fn new(file: NamedTempFile, mode: IoMode) -> Self {
        let direct = if mode == IoMode::Direct { set_direct(file.as_file(), true) } else { Ok(()) };
        let is_direct = mode == IoMode::Direct && direct.is_ok();
        if let Err(error) = direct {
            messages::debug!("{} is written through the page cache: {error}", file.path().display());
        }
        let block = Block::new(if is_direct { DIRECT_BLOCK_BYTES } else { BUFFERED_BLOCK_BYTES });
        Self { file, block, is_direct }
    }

    pub(super) fn as_file(&self) -> &File {
        self.file.as_file()
    }

    /// Writes the rest and clears `O_DIRECT`, so that later reads and writes need no alignment. Does not flush.
    pub(super) fn finish(mut self) -> io::Result<NamedTempFile> {
        // The last write may have any length, which `O_DIRECT` does not allow.
        self.disable_direct()?;
        self.write_block()?;
        Ok(self.file)
    }

    fn disable_direct(&mut self) -> io::Result<()> {
        if self.is_direct {
            set_direct(self.file.as_file(), false)?;
            self.is_direct = false;
        }
        Ok(())
    }

    fn write_block(&mut self) -> io::Result<()> {
        let mut block = std::mem::take(&mut self.block);
        let written = block.write_by(|bytes| self.write_some(bytes));
        self.block = block;
        written
    }

    fn write_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        fault::step()?;
        if self.is_direct {
            match self.file.as_file_mut().write(bytes) {
                // The file system needs a larger alignment, or a short write has left the rest unaligned. The file position is
                // unchanged.
                Err(error) if is_refusal(&error) => {
                    messages::debug!("{} is written through the page cache: {error}", self.file.path().display());
                    self.disable_direct()?;
                }
                written => return written,
            }
        }
        let most = bytes.len().min(BUFFERED_BLOCK_BYTES);
        self.file.as_file_mut().write(&bytes[..most])
    }
}

impl Write for BlockFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.block.is_full() {
            self.write_block()?;
        }
        Ok(self.block.fill(bytes))
    }

    /// Does nothing: only [`finish`](Self::finish) writes the last, partial block.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes on their way to a file.
#[derive(Debug, Default)]
struct Block {
    /// Not resized, because the aligned block begins at `start`.
    memory: Box<[u8]>,
    start: usize,
    capacity: usize,
    num_filled: usize,
    /// How many of them the file has. A write that fails and is tried again goes on from here.
    num_written: usize,
}

impl Block {
    fn new(capacity: usize) -> Self {
        let memory = vec![0; capacity + ALIGNMENT].into_boxed_slice();
        // `usize::MAX` would mean that alignment is impossible: `O_DIRECT` then refuses the block, which is written without it.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, capacity, num_filled: 0, num_written: 0 }
    }

    fn is_full(&self) -> bool {
        self.num_filled == self.capacity
    }

    /// Takes as many bytes as there is room for.
    fn fill(&mut self, bytes: &[u8]) -> usize {
        let num_bytes = bytes.len().min(self.capacity - self.num_filled);
        let at = self.start + self.num_filled;
        self.memory[at..at + num_bytes].copy_from_slice(&bytes[..num_bytes]);
        self.num_filled += num_bytes;
        num_bytes
    }

    /// Empties the block by calls of `write`, which takes as much as it likes.
    fn write_by(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while self.num_written < self.num_filled {
            match write(&self.memory[self.start + self.num_written..self.start + self.num_filled]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(num_bytes) => self.num_written += num_bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        (self.num_filled, self.num_written) = (0, 0);
        Ok(())
    }
}

/// What file systems say to a direct write that they do not make.
fn is_refusal(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTBLK].contains(&errno))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
    use rustix::fs::{OFlags, fcntl_getfl};
    use std::path::Path;

    fn numbered(num_bytes: usize) -> Vec<u8> {
        (0..num_bytes).map(|number| (number % 251) as u8).collect()
    }

    fn new_in(folder: &Path, mode: IoMode) -> BlockFile {
        BlockFile::new(NamedTempFile::new_in(folder).unwrap(), mode)
    }

    #[rstest]
    #[case::nothing(0, 1)]
    #[case::less_than_a_block(77, 5)]
    #[case::a_block(DIRECT_BLOCK_BYTES, 4096)]
    #[case::a_byte_more(DIRECT_BLOCK_BYTES + 1, 1 << 19)]
    #[case::pieces_that_cross_blocks(2 * DIRECT_BLOCK_BYTES + 4099, 300_007)]
    #[case::pieces_larger_than_blocks(5 * DIRECT_BLOCK_BYTES, 2 * DIRECT_BLOCK_BYTES + 3)]
    fn all_bytes_are_in_the_file(
        #[case] num_bytes: usize,
        #[case] piece: usize,
        #[values(IoMode::Buffered, IoMode::Direct)] mode: IoMode,
    ) {
        // One that may be on a disk, one in memory.
        let usual = tempfile::tempdir().unwrap();
        let folders = [usual.path(), Path::new("/dev/shm")];
        for folder in folders.into_iter().filter(|folder| folder.is_dir()) {
            let content = numbered(num_bytes);
            let mut file = new_in(folder, mode);
            content.chunks(piece).for_each(|piece| file.write_all(piece).unwrap());
            let written = file.finish().unwrap();
            assert!(std::fs::read(written.path()).unwrap() == content, "{}", folder.display());
            assert!(!fcntl_getfl(written.as_file()).unwrap().contains(OFlags::DIRECT));
        }
    }

    /// Where the file system makes direct writes, and refuses those of an address that is no multiple of anything.
    #[test]
    fn direct_writes_are_made_and_what_is_refused_is_written_as_usual() {
        let folder = tempfile::tempdir().unwrap();
        let mut probe = NamedTempFile::new_in(folder.path()).unwrap();
        let is_capable = set_direct(probe.as_file(), true).is_ok();
        let odd = Block::new(8192);
        let refused = probe.as_file_mut().write(&odd.memory[odd.start + 1..odd.start + 4097]);
        if !is_capable || !refused.is_err_and(|error| is_refusal(&error)) {
            eprintln!("skipped, because {} takes all writes, or no direct ones", folder.path().display());
            return;
        }
        let content = numbered(3 * DIRECT_BLOCK_BYTES + 10);
        let mut file = new_in(folder.path(), IoMode::Direct);
        file.write_all(&content).unwrap();
        assert!(file.is_direct && fcntl_getfl(file.as_file()).unwrap().contains(OFlags::DIRECT));
        assert!(std::fs::read(file.finish().unwrap().path()).unwrap() == content);

        let mut file = new_in(folder.path(), IoMode::Direct);
        file.block.start = if file.block.start == 0 { 1 } else { file.block.start - 1 };
        file.write_all(&content).unwrap();
        assert!(!file.is_direct && !fcntl_getfl(file.as_file()).unwrap().contains(OFlags::DIRECT));
        assert!(std::fs::read(file.finish().unwrap().path()).unwrap() == content);
    }

    #[test]
    fn no_write_but_the_last_is_smaller_than_a_block() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = new_in(folder.path(), IoMode::Buffered);
        for piece in numbered(3 * BUFFERED_BLOCK_BYTES + 5).chunks(BUFFERED_BLOCK_BYTES + 7) {
            file.write_all(piece).unwrap();
            let written = file.as_file().metadata().unwrap().len();
            assert_eq!(written % BUFFERED_BLOCK_BYTES as u64, 0);
        }
    }

    /// What a call of the system does.
    #[derive(Clone, Copy)]
    enum Call {
        Takes(usize),
        Fails(ErrorKind),
    }
    use Call::{Fails, Takes};

    #[rstest]
    #[case::all(&[Takes(10)], None)]
    #[case::by_and_by(&[Takes(3), Takes(1), Takes(6)], None)]
    #[case::a_signal(&[Takes(3), Fails(ErrorKind::Interrupted), Takes(7)], None)]
    #[case::a_full_disk(&[Fails(ErrorKind::StorageFull)], Some(ErrorKind::StorageFull))]
    #[case::a_disk_that_becomes_full(&[Takes(4), Fails(ErrorKind::StorageFull)], Some(ErrorKind::StorageFull))]
    #[case::nothing_is_taken(&[Takes(4), Takes(0)], Some(ErrorKind::WriteZero))]
    fn each_byte_is_written_once_whatever_calls_do(#[case] calls: &[Call], #[case] wanted: Option<ErrorKind>) {
        let mut block = Block::new(10);
        assert_eq!(block.fill(b"0123456789ab"), 10);
        let (mut taken, mut calls) = (Vec::new(), calls.iter());
        let result = block.write_by(|bytes| match calls.next().unwrap() {
            Takes(num_bytes) => {
                taken.extend_from_slice(&bytes[..*num_bytes]);
                Ok(*num_bytes)
            }
            Fails(kind) => Err((*kind).into()),
        });
        assert_eq!(result.err().map(|error| error.kind()), wanted);
        assert_eq!(calls.len(), 0);
        // Tried again, or nothing if all is written.
        block
            .write_by(|bytes| {
                taken.extend_from_slice(bytes);
                Ok(bytes.len())
            })
            .unwrap();
        assert_eq!(taken, b"0123456789");
        assert_eq!((block.num_filled, block.is_full()), (0, false));
    }

    #[rstest]
    #[case(Errno::INVAL, true)]
    #[case(Errno::OPNOTSUPP, true)]
    #[case(Errno::NOTBLK, true)]
    #[case(Errno::NOSPC, false)]
    #[case(Errno::DQUOT, false)]
    #[case(Errno::IO, false)]
    #[case(Errno::INTR, false)]
    fn only_what_is_about_the_way_is_written_in_another(#[case] errno: Errno, #[case] wanted: bool) {
        assert_eq!(is_refusal(&errno.into()), wanted);
    }
}
