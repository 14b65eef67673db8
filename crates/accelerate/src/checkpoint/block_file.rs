//! New files, written block by block.

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use tempfile::NamedTempFile;

/// What goes through the page cache goes at multiples of this: the cache then keeps as much in one piece, and whoever maps the
/// file later has one page fault for each, in place of eight. For larger pieces a kernel has to find more memory in a row, which
/// made a save three times as long on a virtual machine that lends its free memory to others.
const BUFFERED_BLOCK_BYTES: usize = 512 << 10;
/// What goes past it, which costs the less of the processor the larger it is.
const DIRECT_BLOCK_BYTES: usize = 1 << 20;
/// Of addresses, of places in the file and of lengths, if a file is written past the page cache. It suits usual disks.
const ALIGNMENT: usize = 4096;

/// How the bytes of a file come to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoMode {
    /// Through the page cache, where whoever reads the file soon finds them.
    Buffered,
    /// Past it (`O_DIRECT`), where the file system can do that. What goes through the cache is copied there, needs pages, and is written
    /// by the kernel later. A training that goes on meanwhile loses that time, and what it keeps in the cache, such as its data.
    Direct,
}

/// A new file. It is written as usual where its file system has no direct way, or wants other blocks for it.
#[derive(Debug)]
pub(super) struct BlockFile {
    file: NamedTempFile,
    /// Never grows: a block has to stay at its address, `start` bytes behind the beginning.
    memory: Vec<u8>,
    start: usize,
    block_bytes: usize,
    /// How much of the block is filled.
    num_bytes: usize,
    is_direct: bool,
}

impl BlockFile {
    pub(super) fn new(file: NamedTempFile, mode: IoMode) -> Self {
        let is_direct = mode == IoMode::Direct && set_direct(file.as_file(), true).is_ok();
        let block_bytes = if is_direct { DIRECT_BLOCK_BYTES } else { BUFFERED_BLOCK_BYTES };
        let memory = vec![0; block_bytes + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { file, memory, start, block_bytes, num_bytes: 0, is_direct }
    }

    pub(super) fn as_file(&self) -> &File {
        self.file.as_file()
    }

    /// Is nothing kept in the page cache that would have to be flushed?
    pub(super) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// All bytes are written, and none of them flushed. Whoever uses the file later finds no restrictions.
    pub(super) fn finish(mut self) -> io::Result<NamedTempFile> {
        // The rest need not be a multiple of anything.
        self.become_usual()?;
        self.write_block()?;
        Ok(self.file)
    }

    fn become_usual(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_direct) {
            set_direct(self.file.as_file(), false)?;
        }
        Ok(())
    }

    fn write_block(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.num_bytes {
            let left = self.start + written..self.start + self.num_bytes;
            match self.file.as_file_mut().write(&self.memory[left]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(num_bytes) => written += num_bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The file system wants other blocks, or has taken a part of this one.
                Err(error) if self.is_direct && error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                    self.become_usual()?;
                }
                Err(error) => return Err(error),
            }
        }
        self.num_bytes = 0;
        Ok(())
    }
}

impl Write for BlockFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.num_bytes == self.block_bytes {
            self.write_block()?;
        }
        let num_bytes = bytes.len().min(self.block_bytes - self.num_bytes);
        let at = self.start + self.num_bytes;
        self.memory[at..at + num_bytes].copy_from_slice(&bytes[..num_bytes]);
        self.num_bytes += num_bytes;
        Ok(num_bytes)
    }

    /// A part of a block cannot be written before the end of the file.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(fcntl_setfl(file, flags)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
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

    /// As where a file system wants other blocks: an address that is no multiple of anything is refused.
    #[test]
    fn what_the_file_system_refuses_is_written_as_usual() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = new_in(folder.path(), IoMode::Direct);
        file.start = if file.start == 0 { 1 } else { file.start - 1 };
        let content = numbered(3 * DIRECT_BLOCK_BYTES + 10);
        file.write_all(&content).unwrap();
        assert_eq!(fcntl_getfl(file.as_file()).unwrap().contains(OFlags::DIRECT), file.is_direct);
        let written = file.finish().unwrap();
        assert!(std::fs::read(written.path()).unwrap() == content);
    }
}
