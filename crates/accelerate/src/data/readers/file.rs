//! A file that is read by position, and rows of several files in one count.

use crate::error::{DataError, ReaderError, Result};
use accelerate_core::files::other_than_file;
use rustix::fs::OFlags;
use std::fs::{File, FileType};
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Deref;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What is read ahead when a file is scanned from front to back.
const SCAN_BYTES: usize = 256 * 1024;

/// A file that many threads read at once, each where it wants.
///
/// Read by position rather than mapped: pages of a map count as memory of this process once touched, and a map over a
/// file that another program cuts off ends this one with SIGBUS, where a read is an error. The
/// operating system caches the file in both cases.
#[derive(Debug)]
pub(super) struct PositionedFile {
    path: PathBuf,
    file: File,
    num_bytes: u64,
    #[cfg_attr(
        not(any(feature = "arrow", feature = "parquet")),
        expect(dead_code, reason = "only Parquet and Arrow files are compared with what they take on the disk")
    )]
    disk_bytes: u64,
}

impl PositionedFile {
    pub(super) fn open(path: &Path) -> Result<Self, ReaderError> {
        let opened = |source| ReaderError::io("open", path)(source);
        // Asked before opening, which can do harm: it waits for the writer of a pipe, and some devices act on it.
        check_kind(path, std::fs::metadata(path).map_err(opened)?.file_type())?;
        // Asked again of what was opened, for the path may lead elsewhere by now. Nothing waits for a writer.
        let without_waiting = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(without_waiting).open(path).map_err(opened)?;
        let metadata = file.metadata().map_err(opened)?;
        check_kind(path, metadata.file_type())?;
        let num_bytes = metadata.len();
        // Some file systems do not count blocks.
        let disk_bytes = if metadata.blocks() == 0 { num_bytes } else { metadata.blocks().saturating_mul(512) };
        Ok(Self { path: path.to_owned(), file, num_bytes, disk_bytes })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Size when it was opened.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// How many of `num_bytes` can have been written: a file may have holes, which take no room and are read as zeros.
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    pub(super) fn written_bytes(&self, num_bytes: u64) -> u64 {
        num_bytes.min(self.disk_bytes)
    }

    /// Bytes `start..end`.
    pub(super) fn read(&self, start: u64, end: u64) -> Result<Vec<u8>, ReaderError> {
        let mut bytes = self.room(end.saturating_sub(start))?;
        self.read_into(&mut bytes, start)?;
        Ok(bytes)
    }

    /// So many zeros, for bytes of this file. Memory that cannot be had is an error here and not the end of the process.
    pub(super) fn room(&self, num_bytes: u64) -> Result<Vec<u8>, ReaderError> {
        let no_memory = || ReaderError::NoMemory { path: self.path.clone(), wanted_bytes: num_bytes };
        let length = usize::try_from(num_bytes).map_err(|_| no_memory())?;
        Vec::<u8>::new().try_reserve_exact(length).map_err(|_| no_memory())?;
        // Zeros that come so from the system take no memory until they are touched.
        Ok(vec![0; length])
    }

    /// As many bytes as there is room for, from byte `start` on.
    pub(super) fn read_into(&self, bytes: &mut [u8], start: u64) -> Result<(), ReaderError> {
        self.file.read_exact_at(bytes, start).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => self.shrunk(start),
            _ => ReaderError::io("read", &self.path)(source),
        })
    }

    fn shrunk(&self, start: u64) -> ReaderError {
        ReaderError::Shrunk {
            path: self.path.clone(),
            found_bytes: self.file.metadata().map_or(start, |metadata| metadata.len()),
            wanted_bytes: self.num_bytes,
        }
    }

    /// Bytes `start..end`, through a buffer.
    pub(super) fn scan(&self, start: u64, end: u64) -> Scan<'_> {
        let end = end.min(self.num_bytes);
        let reader = BufReader::with_capacity(SCAN_BYTES, FromPosition { file: self, at: start });
        Scan { reader, at: start, end }
    }

    /// Where text begins: behind the byte order mark that spreadsheet programs write.
    pub(super) fn text_start(&self) -> Result<u64, ReaderError> {
        const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
        let mark = BYTE_ORDER_MARK.len() as u64;
        let is_marked = mark <= self.num_bytes && self.read(0, mark)? == BYTE_ORDER_MARK;
        Ok(if is_marked { mark } else { 0 })
    }
}

/// A file from front to back, as far as it went when it was opened.
#[derive(Debug)]
pub(super) struct Scan<'a> {
    reader: BufReader<FromPosition<&'a PositionedFile>>,
    at: u64,
    end: u64,
}

impl Scan<'_> {
    /// The position of the next byte.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The next bytes; none at the end.
    pub(super) fn fill(&mut self) -> Result<&[u8], ReaderError> {
        let file = self.reader.get_ref().file;
        let wanted = self.end.saturating_sub(self.at);
        if wanted == 0 {
            return Ok(&[]);
        }
        let found = self.reader.fill_buf().map_err(ReaderError::io("read", file.path()))?;
        if found.is_empty() {
            return Err(file.shrunk(self.at));
        }
        let length = usize::try_from(wanted).map_or(found.len(), |wanted| wanted.min(found.len()));
        Ok(found.get(..length).unwrap_or(found))
    }

    pub(super) fn consume(&mut self, num_bytes: usize) {
        self.reader.consume(num_bytes);
        self.at += num_bytes as u64;
    }
}

fn check_kind(path: &Path, kind: FileType) -> Result<(), ReaderError> {
    match other_than_file(kind) {
        Some(found) => Err(ReaderError::NotAFile { path: path.to_owned(), found }),
        None => Ok(()),
    }
}

/// Reads on from a position of its own.
#[derive(Debug)]
pub(super) struct FromPosition<F> {
    pub(super) file: F,
    pub(super) at: u64,
}

impl<F: Deref<Target = PositionedFile>> Read for FromPosition<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num_read = self.file.file.read_at(buffer, self.at)?;
        self.at += num_read as u64;
        Ok(num_read)
    }
}

/// Opens every file; there must be one.
pub(super) fn open_all<F>(
    paths: impl IntoIterator<Item: AsRef<Path>>,
    open: impl FnMut(PositionedFile) -> Result<F>,
) -> Result<Vec<F>> {
    let mut open = open;
    let files: Vec<F> =
        paths.into_iter().map(|path| open(PositionedFile::open(path.as_ref())?)).collect::<Result<_>>()?;
    if files.is_empty() {
        return Err(ReaderError::NoFiles.into());
    }
    Ok(files)
}

/// Parts that lie one behind the other, each with so many rows.
#[derive(Debug)]
pub(super) struct Joined {
    /// Number of rows before the end of each part.
    ends: Vec<usize>,
}

impl Joined {
    pub(super) fn new(num_rows: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let ends = num_rows.into_iter().map(|rows| {
            end = usize::saturating_add(end, rows);
            end
        });
        Self { ends: ends.collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Which part row `index` is in, and which row of that part it is.
    pub(super) fn locate(&self, index: usize) -> Result<(usize, usize)> {
        if self.len() <= index {
            return Err(DataError::NoSuchRow { index, num_rows: self.len() }.into());
        }
        let part = self.ends.partition_point(|&end| end <= index);
        let first = part.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or_default();
        Ok((part, index - first))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, "0123456789").unwrap();
        let file = PositionedFile::open(&path).unwrap();
        assert_eq!(file.read(2, 5).unwrap(), b"234");
        let message = file.read(0, u64::MAX).unwrap_err().to_string();
        assert!(message.contains("there is no memory for 18446744073709551615 bytes of"), "{message}");
    }

    #[test]
    fn rows_are_located_across_parts_that_may_be_empty() {
        let joined = Joined::new([0, 2, 0, 0, 1]);
        let places: Vec<_> = (0..3).map(|index| joined.locate(index).unwrap()).collect();
        assert_eq!(places, [(1, 0), (1, 1), (4, 0)]);
        assert!(joined.locate(3).unwrap_err().to_string().contains("row 3 does not exist: the dataset has 3 rows"));
        assert!(Joined::new([]).locate(0).is_err());
    }
}
