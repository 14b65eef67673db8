//! Text files whose rows are found by an index of byte offsets.

use super::file::{Joined, PositionedFile};
use crate::error::{Place, Position, ReaderError, Result, RowProblem};

/// The line number of one row in so many is kept; those of the others are counted from there when an error needs them.
const ROWS_PER_LINE_NUMBER: usize = 16;

/// Where the rows of one file are: eight bytes of memory per row.
#[derive(Debug)]
pub(super) struct RowStarts {
    starts: Vec<u64>,
    end: u64,
    lines: Vec<u64>,
    max_row_bytes: u64,
}

impl RowStarts {
    /// No rows yet, in a file of so many bytes.
    pub(super) fn new(num_bytes: u64, max_row_bytes: u64) -> Self {
        Self { starts: Vec::new(), end: num_bytes, lines: Vec::new(), max_row_bytes }
    }

    /// The next row begins at byte `start`, which is in line `line`, counted from 1.
    pub(super) fn push(&mut self, start: u64, line: u64) {
        if self.starts.len().is_multiple_of(ROWS_PER_LINE_NUMBER) {
            self.lines.push(line);
        }
        self.starts.push(start);
    }

    /// First byte of a row, and of what follows it.
    fn span(&self, row: usize) -> (u64, u64) {
        let at = |row: usize| self.starts.get(row).copied().unwrap_or(self.end);
        (at(row), at(row + 1))
    }
}

/// Rows of several text files, one behind the other.
#[derive(Debug)]
pub(super) struct TextRows {
    files: Vec<(PositionedFile, RowStarts)>,
    joined: Joined,
}

impl TextRows {
    pub(super) fn new(mut files: Vec<(PositionedFile, RowStarts)>) -> Self {
        files.iter_mut().for_each(|(_, rows)| rows.starts.shrink_to_fit());
        let joined = Joined::new(files.iter().map(|(_, rows)| rows.starts.len()));
        Self { files, joined }
    }

    pub(super) fn len(&self) -> usize {
        self.joined.len()
    }

    /// The position of the row's file, and the row's bytes with the white space behind them.
    pub(super) fn read(&self, index: usize) -> Result<(usize, Vec<u8>)> {
        let (position, row) = self.joined.locate(index)?;
        let (file, rows) = &self.files[position];
        let (start, end) = rows.span(row);
        // What is behind the longest row can only be white space, of which there may be any amount.
        let end = end.min(start.saturating_add(rows.max_row_bytes).saturating_add(1));
        Ok((position, file.read(start, end)?))
    }

    pub(super) fn place(&self, index: usize) -> Result<Place> {
        let (position, row) = self.joined.locate(index)?;
        let (file, rows) = &self.files[position];
        let numbered = row - row % ROWS_PER_LINE_NUMBER;
        let mut between = file.scan(rows.span(numbered).0, rows.span(row).0);
        let mut newlines = 0;
        loop {
            let bytes = between.fill()?;
            if bytes.is_empty() {
                break;
            }
            newlines += memchr::memchr_iter(b'\n', bytes).count() as u64;
            let num_read = bytes.len();
            between.consume(num_read);
        }
        let line = rows.lines.get(numbered / ROWS_PER_LINE_NUMBER).copied().unwrap_or_default() + newlines;
        Ok(Place { path: file.path().to_owned(), position: Position::Line(line) })
    }

    /// The error that says what is wrong with a row and where it stands.
    pub(super) fn wrong(&self, index: usize, problem: RowProblem) -> crate::Error {
        match self.place(index) {
            Ok(place) => ReaderError::Row { place, problem }.into(),
            Err(error) => error,
        }
    }
}
