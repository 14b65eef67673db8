//! The zip archives that `torch.save` writes: nothing in them is compressed, so that each entry is a range of the file.
//!
//! An archive may be a part of a larger file. A library for zip has compression, dates and folders, which these archives do
//! not, and takes what an archive with overlapping or hidden entries says. Here the list of entries has to end where the
//! archive ends, each entry has to be where the list says, and no two share a byte.

use crate::Result;
use crate::error::pytorch::{ArchiveProblem as Problem, PytorchErrorKind as Kind};
use crate::weight_files::shown;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

/// Longest list of entries: some times that of files with as many tensors as are read.
const MAX_LIST_BYTES: u64 = 64 << 20;
/// What ends an archive, the two that stand before it in large ones, an entry of the list, and an entry's own header.
const END_BYTES: usize = 22;
const LOCATOR_BYTES: usize = 20;
const LARGE_END_BYTES: usize = 56;
const LISTED_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;
/// A number that did not fit, and stands elsewhere.
pub(super) const ELSEWHERE: u64 = u32::MAX as u64;
/// The extra field for such numbers.
pub(super) const LARGE_EXTRA: u16 = 1;
const ENCRYPTED: u16 = 1;

/// A range of a file, and what its content was when it was written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StoredBytes {
    /// The range, counted from the beginning of the file.
    pub range: Range<u64>,
    /// The CRC-32 of the content. `None` where the writer left it out.
    pub crc32: Option<u32>,
}

impl StoredBytes {
    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

/// The entries of an archive by name.
#[derive(Debug)]
pub(super) struct Archive {
    entries: BTreeMap<String, StoredBytes>,
}

impl Archive {
    /// Reads the list of entries of the archive that is this range of a file.
    pub(super) fn read(file: &mut (impl Read + Seek), range: Range<u64>) -> Result<Self> {
        let mut source = Source { file, range };
        let list = source.list()?;
        let mut entries = BTreeMap::new();
        let mut places: Vec<(Range<u64>, String)> = Vec::new();
        let mut rest = list.bytes.as_slice();
        for number in 0..list.num_entries {
            let entry = Listed::take(&mut rest).ok_or(Problem::Entry { number }).map_err(Kind::from)?;
            let header = source.place(&entry, list.at)?;
            places.push((entry.at..header.end, entry.name.clone()));
            let start = source.range.start;
            let stored = StoredBytes {
                range: start + header.start..start + header.end,
                crc32: (entry.crc32 != 0).then_some(entry.crc32),
            };
            if entries.insert(entry.name.clone(), stored).is_some() {
                return Err(Kind::from(Problem::Twice { name: shown(&entry.name) }).into());
            }
        }
        if !rest.is_empty() {
            return Err(Kind::from(Problem::List { found_bytes: source.length() }).into());
        }
        places.sort_unstable_by_key(|(range, _)| range.start);
        for pair in places.windows(2) {
            if let [(first, name), (second, other)] = pair
                && first.end > second.start
            {
                return Err(Kind::from(Problem::Overlap { name: shown(name), other: shown(other) }).into());
            }
        }
        Ok(Self { entries })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn find(&self, name: &str) -> Option<&StoredBytes> {
        self.entries.get(name)
    }

    /// All of an entry.
    pub(super) fn content(&self, file: &mut (impl Read + Seek), name: &str) -> Result<Vec<u8>> {
        let absent = || Kind::from(Problem::Absent { name: shown(name) });
        let stored = self.find(name).ok_or_else(absent)?;
        let mut content = vec![0; stored.len() as usize];
        read_exact_at(file, &mut content, stored.range.start)?;
        if stored.crc32.is_some_and(|crc32| crc32 != crc32fast::hash(&content)) {
            return Err(Kind::from(Problem::Checksum { name: shown(name) }).into());
        }
        Ok(content)
    }
}

pub(super) fn read_exact_at(file: &mut (impl Read + Seek), bytes: &mut [u8], at: u64) -> Result<()> {
    file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes)).map_err(|cause| {
        let reason = cause.to_string();
        crate::Error::new(Kind::Unreadable { reason }).caused_by(cause)
    })
}

/// The list of entries, as bytes.
struct List {
    /// Where it begins in the archive.
    at: u64,
    bytes: Vec<u8>,
    num_entries: usize,
}

/// An archive within a file. Places are counted from its beginning.
struct Source<'a, F> {
    file: &'a mut F,
    range: Range<u64>,
}

impl<F: Read + Seek> Source<'_, F> {
    fn length(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    /// The bytes at this place, if the archive has them.
    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<bool> {
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.length()) {
            return Ok(false);
        }
        read_exact_at(self.file, bytes, self.range.start + at).map(|()| true)
    }

    fn list(&mut self) -> Result<List> {
        let found_bytes = self.length();
        let no_end = || Kind::from(Problem::NoEnd { found_bytes });
        let mut end = [0; END_BYTES];
        let end_at = found_bytes.checked_sub(END_BYTES as u64).ok_or_else(no_end)?;
        if !self.read(&mut end, end_at)? || !end.starts_with(b"PK\x05\x06") {
            return Err(no_end().into());
        }
        let damaged = || Kind::from(Problem::List { found_bytes });
        // Number of entries, length and beginning of the list.
        let mut counts = [u64::from(u16_at(&end, 10)), u64::from(u32_at(&end, 12)), u64::from(u32_at(&end, 16))];
        let mut list_end = end_at;
        let mut locator = [0; LOCATOR_BYTES];
        let locator_at = end_at.checked_sub(LOCATOR_BYTES as u64);
        if let Some(locator_at) = locator_at
            && self.read(&mut locator, locator_at)?
            && locator.starts_with(b"PK\x06\x07")
        {
            let mut large = [0; LARGE_END_BYTES];
            let large_at = u64_at(&locator, 8);
            let is_there = large_at.checked_add(LARGE_END_BYTES as u64) == Some(locator_at);
            if !is_there || !self.read(&mut large, large_at)? || !large.starts_with(b"PK\x06\x06") {
                return Err(damaged().into());
            }
            counts = [u64_at(&large, 32), u64_at(&large, 40), u64_at(&large, 48)];
            list_end = large_at;
        }
        let [num_entries, bytes, at] = counts;
        let is_counted = num_entries.checked_mul(LISTED_BYTES as u64).is_some_and(|least| least <= bytes);
        if at.checked_add(bytes) != Some(list_end) || !is_counted {
            return Err(damaged().into());
        }
        if bytes > MAX_LIST_BYTES {
            let problem = Problem::LongList { found_bytes: bytes, most_bytes: MAX_LIST_BYTES };
            return Err(Kind::from(problem).into());
        }
        let mut list = vec![0; bytes as usize];
        if !self.read(&mut list, at)? {
            return Err(damaged().into());
        }
        Ok(List { at, bytes: list, num_entries: num_entries as usize })
    }

    /// The range of an entry's content, from its own header.
    fn place(&mut self, entry: &Listed, list_at: u64) -> Result<Range<u64>> {
        let elsewhere = || Kind::from(Problem::Place { name: shown(&entry.name) });
        let mut header = vec![0; LOCAL_BYTES + entry.name.len()];
        let is_header = self.read(&mut header, entry.at)?
            && header.starts_with(b"PK\x03\x04")
            && usize::from(u16_at(&header, 26)) == entry.name.len()
            && &header[LOCAL_BYTES..] == entry.name.as_bytes();
        if !is_header {
            return Err(elsewhere().into());
        }
        let is_plain = u16_at(&header, 8) == 0 && u16_at(&header, 6) & ENCRYPTED == 0;
        if entry.is_packed || !is_plain {
            return Err(Kind::from(Problem::Packed { name: shown(&entry.name) }).into());
        }
        let before = header.len() as u64 + u64::from(u16_at(&header, 28));
        let start = entry.at.checked_add(before);
        let end = start.and_then(|start| start.checked_add(entry.bytes)).filter(|&end| end <= list_at);
        start.zip(end).map(|(start, end)| start..end).ok_or_else(|| elsewhere().into())
    }
}

/// An entry of the list.
struct Listed {
    name: String,
    at: u64,
    bytes: u64,
    crc32: u32,
    is_packed: bool,
}

impl Listed {
    /// Takes the first entry off the list; nothing if it is damaged.
    fn take(list: &mut &[u8]) -> Option<Self> {
        let (fixed, rest) = list.split_at_checked(LISTED_BYTES)?;
        let (name, rest) = rest.split_at_checked(u16_at(fixed, 28).into())?;
        let (extra, rest) = rest.split_at_checked(u16_at(fixed, 30).into())?;
        let (_, rest) = rest.split_at_checked(u16_at(fixed, 32).into())?;
        *list = rest;
        if !fixed.starts_with(b"PK\x01\x02") {
            return None;
        }
        let mut sizes = [u64::from(u32_at(fixed, 24)), u64::from(u32_at(fixed, 20)), u64::from(u32_at(fixed, 42))];
        // Which of them stand in the extra field instead, in this order.
        let mut large = large_numbers(extra);
        for size in sizes.iter_mut().filter(|size| **size == ELSEWHERE) {
            let (number, others) = large.split_first_chunk()?;
            (*size, large) = (u64::from_le_bytes(*number), others);
        }
        let [bytes, packed_bytes, at] = sizes;
        let is_packed = u16_at(fixed, 10) != 0 || u16_at(fixed, 8) & ENCRYPTED != 0 || bytes != packed_bytes;
        let name = std::str::from_utf8(name).ok()?.to_owned();
        Some(Self { name, at, bytes, crc32: u32_at(fixed, 16), is_packed })
    }
}

/// The part of an extra field that has large numbers.
fn large_numbers(mut extra: &[u8]) -> &[u8] {
    while let Some((head, rest)) = extra.split_at_checked(4)
        && let Some((content, rest)) = rest.split_at_checked(u16_at(head, 2).into())
    {
        if u16_at(head, 0) == LARGE_EXTRA {
            return content;
        }
        extra = rest;
    }
    &[]
}

fn number_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(number_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(number_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(number_at(bytes, at))
}
