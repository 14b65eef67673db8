//! Records of separated values: where they begin, and their fields.

use super::super::file::{PositionedFile, Scan};
use super::CsvOptions;
use crate::error::{Place, Position, ReaderError, RowProblem};
use csv::StringRecord;
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

/// One record, without its fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Its first byte.
    pub(super) start: u64,
    /// The line of its first byte, counted from 1.
    pub(super) line: u64,
    pub(super) num_fields: usize,
    /// Does a field contain a line end?
    pub(super) spans_lines: bool,
    /// False for a last record that ends inside of quotation marks.
    pub(super) is_closed: bool,
}

impl Span {
    pub(super) fn wrong(&self, file: &PositionedFile, problem: RowProblem) -> ReaderError {
        let place = Place { path: file.path().to_owned(), position: Position::Line(self.line) };
        ReaderError::Row { place, problem }
    }
}

/// What knows how records are written.
#[derive(Debug)]
pub(super) struct Parser {
    builder: ReaderBuilder,
    max_row_bytes: u64,
    delimiter: u8,
    has_quotes: bool,
}

impl Parser {
    pub(super) fn new(options: &CsvOptions) -> Result<Self, ReaderError> {
        let wrong = |setting, byte: u8, wanted| {
            let found = char::from(byte).to_string();
            Err(ReaderError::Setting { setting, found, wanted })
        };
        let is_line_end = |byte| matches!(byte, b'\r' | b'\n');
        if is_line_end(options.delimiter) {
            return wrong("CsvOptions.delimiter", options.delimiter, "line ends separate rows; choose another byte");
        }
        let mut builder = ReaderBuilder::new();
        builder.delimiter(options.delimiter).quoting(options.quote.is_some());
        if let Some(quote) = options.quote {
            if is_line_end(quote) || quote == options.delimiter {
                return wrong("CsvOptions.quote", quote, "must be neither a line end nor the delimiter");
            }
            builder.quote(quote);
        }
        let (delimiter, has_quotes, max_row_bytes) =
            (options.delimiter, options.quote.is_some(), options.max_row_bytes);
        Ok(Self { builder, max_row_bytes, delimiter, has_quotes })
    }

    /// A reader for one use. (A clone of one that is built lacks half of its tables, csv-core 0.1.13.)
    fn reader(&self) -> Reader {
        let mut reader = self.builder.build();
        // A reader takes a byte order mark away from the first bytes that it sees, but here these are those of any row;
        // the file's own mark is skipped elsewhere.
        reader.read_record(b"\n", &mut [0], &mut [0]);
        reader.set_line(1);
        reader
    }

    /// All records of a file, in constant memory.
    pub(super) fn records<'a>(&self, file: &'a PositionedFile) -> Result<Records<'a>, ReaderError> {
        let scan = file.scan(file.text_start()?, file.num_bytes());
        Ok(Records { reader: self.reader(), file, scan, max_row_bytes: self.max_row_bytes })
    }

    /// The fields of the record with which `bytes` begin; there must be `num_fields`. `name` is for error messages.
    pub(super) fn fields(
        &self,
        bytes: &[u8],
        num_fields: usize,
        name: impl Fn(usize) -> Option<String>,
    ) -> Result<StringRecord, RowProblem> {
        let mut reader = self.reader();
        // One more than there may be: a field too many is seen.
        let (mut fields, mut ends) = (vec![0; bytes.len() + 1], vec![0; num_fields.saturating_add(1)]);
        let (result, _, _, mut found) = reader.read_record(bytes, &mut fields, &mut ends);
        if matches!(result, ReadRecordResult::InputEmpty) {
            let last = ends.get_mut(found..).unwrap_or_default();
            found += reader.read_record(&[], &mut [], last).3;
        }
        if found != num_fields {
            return Err(self.field_count(found, num_fields, false));
        }
        let mut record = StringRecord::with_capacity(fields.len(), num_fields);
        let mut start = 0;
        for (position, &end) in ends.iter().take(found).enumerate() {
            match std::str::from_utf8(&fields[start..end]) {
                Ok(field) => record.push_field(field),
                Err(_) => return Err(RowProblem::NotUtf8 { column: name(position) }),
            }
            start = end;
        }
        Ok(record)
    }

    /// What to say of a record with too few or too many fields.
    pub(super) fn field_count(&self, found: usize, wanted: usize, spans_lines: bool) -> RowProblem {
        let hint = match (found < wanted, self.has_quotes, self.delimiter) {
            (true, true, _) if spans_lines => "; a quotation mark that opens here is perhaps closed too late",
            (false, true, b',') => "; a text that contains commas needs quotation marks around it",
            (false, true, _) => "; a text that contains the delimiter needs quotation marks around it",
            _ => "",
        };
        RowProblem::FieldCount { found, wanted, hint }
    }
}

/// The records of a file, from front to back.
pub(super) struct Records<'a> {
    reader: Reader,
    file: &'a PositionedFile,
    scan: Scan<'a>,
    max_row_bytes: u64,
}

impl Records<'_> {
    /// The position behind the last record.
    pub(super) fn at(&self) -> u64 {
        self.scan.at()
    }

    /// The next record; `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<Span>, ReaderError> {
        // What is written there is not looked at.
        let (mut fields, mut ends) = ([0; 4096], [0; 64]);
        let Some(mut span) = self.begin()? else { return Ok(None) };
        loop {
            let buffer = self.scan.fill()?;
            if buffer.is_empty() {
                break;
            }
            let (result, num_read, _, num_ends) = self.reader.read_record(buffer, &mut fields, &mut ends);
            let last = num_read.checked_sub(1).and_then(|last| buffer.get(last)).copied();
            self.scan.consume(num_read);
            span.num_fields += num_ends;
            let is_over = matches!(result, ReadRecordResult::Record);
            // A line end is not part of the row.
            let num_bytes = self.scan.at() - span.start - u64::from(is_over);
            if self.max_row_bytes < num_bytes {
                return Err(span.wrong(self.file, too_long(self.max_row_bytes)));
            }
            if is_over {
                span.spans_lines = span.line + u64::from(last == Some(b'\n')) < self.reader.line();
                return Ok(Some(span));
            }
        }
        span.spans_lines = span.line < self.reader.line();
        // A line end closes the record unless it stands inside of quotation marks.
        let (result, _, _, num_ends) = self.reader.read_record(b"\n", &mut fields, &mut ends);
        span.is_closed = matches!(result, ReadRecordResult::Record);
        span.num_fields += num_ends;
        Ok(Some(span))
    }

    /// Where the next record begins: behind blank lines.
    fn begin(&mut self) -> Result<Option<Span>, ReaderError> {
        loop {
            let buffer = self.scan.fill()?;
            if buffer.is_empty() {
                return Ok(None);
            }
            let blank = buffer.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
            let (num_blank, newlines) =
                blank.fold((0, 0), |(bytes, lines), &byte| (bytes + 1, lines + u64::from(byte == b'\n')));
            let is_found = num_blank < buffer.len();
            self.scan.consume(num_blank);
            self.reader.set_line(self.reader.line() + newlines);
            if is_found {
                let (start, line) = (self.scan.at(), self.reader.line());
                return Ok(Some(Span { start, line, num_fields: 0, spans_lines: false, is_closed: true }));
            }
        }
    }
}

fn too_long(limit: u64) -> RowProblem {
    let cure = "look for a quotation mark that is never closed, or raise CsvOptions.max_row_bytes";
    RowProblem::TooLong { limit, cure }
}
