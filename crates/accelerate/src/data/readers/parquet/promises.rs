//! What Parquet's own descriptions promise, looked at before the library believes it.
//!
//! The library goes down a schema by recursion without an end, and sets memory aside for whatever a page is said to
//! become.

use super::super::file::PositionedFile;
use super::super::limits::{MAX_COLUMNS, MAX_METADATA_BYTES, MAX_NESTED_TYPES};
use super::footer::{FOOTER, PAGE_HEADER};
use super::thrift::Compact;
use crate::error::ReaderError;

/// How Thrift marks values.
const INTEGER_32: u8 = 5;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// The file ends with the length of the footer and the magic.
const TAIL_BYTES: u64 = 8;
const MAGIC: &[u8] = b"PAR1";

/// How much of a file is read at once to find headers of pages, and how much for one that holds long values.
const WINDOW_BYTES: [u64; 2] = [64 * 1024, 4 << 20];

/// Refuses a footer that the library should not see: one that is too long, or whose schema is too large or too deep.
pub(super) fn check_footer(file: &PositionedFile) -> Result<(), Problem> {
    let Some(tail_at) = file.num_bytes().checked_sub(TAIL_BYTES) else { return Ok(()) };
    let tail = file.read(tail_at, file.num_bytes())?;
    let Some((length, MAGIC)) = tail.split_first_chunk() else { return Ok(()) };
    let length = u64::from(u32::from_le_bytes(*length));
    let Some(start) = tail_at.checked_sub(length) else { return Ok(()) };
    if MAX_METADATA_BYTES < length {
        return Err(format!("its footer has {length} bytes, and at most {MAX_METADATA_BYTES} are read").into());
    }
    Ok(check_schema(&file.read(start, tail_at)?)?)
}

fn check_schema(footer: &[u8]) -> Result<(), String> {
    let mut checked = Ok(());
    let read = Compact { rest: footer }.fields(|id, kind, footer| {
        (id == 2 && kind == LIST).then(|| {
            let (length, kind) = footer.list()?;
            if kind != STRUCT {
                return None;
            }
            let mut schema = Schema { num_to_come: length, open: Vec::new() };
            for _ in 0..length {
                let mut num_children = 0;
                footer.fields(|id, kind, element| {
                    (id == 5 && kind == INTEGER_32).then(|| element.integer().map(|number| num_children = number))
                })?;
                checked = schema.add(num_children);
                checked.is_ok().then_some(())?;
            }
            Some(())
        })
    });
    checked?;
    let mut description = Compact { rest: footer };
    let marked = description.conform(&FOOTER).filter(|()| description.rest.is_empty());
    read.and(marked).ok_or_else(|| "its footer is damaged".to_owned())
}

/// A tree that is written as its nodes from the top down, each with the number of those right below it.
struct Schema {
    num_to_come: u64,
    /// How many nodes each level still lacks, from the top.
    open: Vec<u64>,
}

impl Schema {
    fn add(&mut self, num_children: i64) -> Result<(), String> {
        self.num_to_come = self.num_to_come.saturating_sub(1);
        while self.open.last() == Some(&0) {
            self.open.pop();
        }
        if let Some(lacking) = self.open.last_mut() {
            *lacking -= 1;
        }
        let Ok(num_children) = u64::try_from(num_children) else {
            return Err(format!("a column of {num_children} columns is promised"));
        };
        if num_children == 0 {
            return Ok(());
        }
        if self.num_to_come < num_children {
            return Err(format!("{num_children} columns are promised where {} are described", self.num_to_come));
        }
        self.open.push(num_children);
        if MAX_NESTED_TYPES < self.open.len() {
            return Err(format!("a column is nested more than {MAX_NESTED_TYPES} deep, and deeper ones are not read"));
        }
        if 2 * MAX_COLUMNS as u64 <= self.num_to_come {
            let found = self.num_to_come;
            return Err(format!(
                "it has {found} columns with those inside of others, and at most {MAX_COLUMNS} are read"
            ));
        }
        Ok(())
    }
}

/// What the headers of some pages promise, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pages {
    /// Bytes that the pages become.
    pub(super) num_bytes: u64,
    /// Values that they hold, those that are absent included.
    pub(super) num_values: u64,
}

/// A page that is about to be read.
#[derive(Default)]
struct Header {
    stored_bytes: i64,
    num_bytes: i64,
    num_values: i64,
}

impl Header {
    /// The header with which `bytes` begin, and how long it is.
    fn read(bytes: &[u8]) -> Option<(Self, u64)> {
        let (mut found, mut compact) = (Self::default(), Compact { rest: bytes });
        Compact { rest: bytes }.conform(&PAGE_HEADER)?;
        compact.fields(|id, kind, compact| match (id, kind) {
            (2, INTEGER_32) => Some(compact.integer().map(|number| found.num_bytes = number)),
            (3, INTEGER_32) => Some(compact.integer().map(|number| found.stored_bytes = number)),
            // Pages of the first and the second version, and of a dictionary.
            (5 | 7 | 8, STRUCT) => Some(compact.fields(|id, kind, compact| {
                (id == 1 && kind == INTEGER_32).then(|| compact.integer().map(|number| found.num_values = number))
            })),
            _ => None,
        })?;
        Some((found, (bytes.len() - compact.rest.len()) as u64))
    }
}

impl Pages {
    /// Adds what bytes `at..end` of a file hold, one page behind the other.
    pub(super) fn add(&mut self, file: &PositionedFile, mut at: u64, end: u64) -> Result<(), Problem> {
        let end = end.min(file.num_bytes());
        let (mut window, mut window_at) = (Vec::new(), at);
        while at < end {
            let held = |window: &[u8], window_at| {
                let passed = usize::try_from(at - window_at).ok()?;
                Header::read(window.get(passed..)?)
            };
            let mut header = held(&window, window_at);
            for num_bytes in WINDOW_BYTES {
                if header.is_none() {
                    window = file.read(at, end.min(at.saturating_add(num_bytes)))?;
                    window_at = at;
                    header = held(&window, window_at);
                }
            }
            let Some((header, header_bytes)) = header else {
                return Err(format!("the header of a page at byte {at} is damaged").into());
            };
            let sizes = [header.stored_bytes, header.num_bytes, header.num_values].map(u64::try_from);
            let [Ok(stored_bytes), Ok(num_bytes), Ok(num_values)] = sizes else {
                return Err(format!("the page at byte {at} is said to have a negative size").into());
            };
            self.num_bytes = self.num_bytes.saturating_add(num_bytes);
            self.num_values = self.num_values.saturating_add(num_values);
            at = at.saturating_add(header_bytes).saturating_add(stored_bytes);
        }
        Ok(())
    }
}

/// Why promises were not accepted.
pub(super) enum Problem {
    Read(ReaderError),
    Content(String),
}

impl From<ReaderError> for Problem {
    fn from(error: ReaderError) -> Self {
        Self::Read(error)
    }
}

impl From<String> for Problem {
    fn from(reason: String) -> Self {
        Self::Content(reason)
    }
}
