//! Records of separated values: where they begin, and their fields.

use super::super::file::PositionedFile;
use super::CsvOptions;
use crate::error::{ReaderError, RowProblem};
use csv::StringRecord;
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use std::io::BufRead;

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

/// What knows how records are written.
#[derive(Debug)]
pub(super) struct Parser {
    builder: ReaderBuilder,
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
        Ok(Self { builder, delimiter: options.delimiter, has_quotes: options.quote.is_some() })
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

    /// Finds all records of a file, in constant memory.
    pub(super) fn scan(
        &self,
        file: &PositionedFile,
        mut on_record: impl FnMut(Span) -> Result<(), ReaderError>,
    ) -> Result<(), ReaderError> {
        let mut reader = self.reader();
        let mut at = file.text_start()?;
        let mut scan = file.scan(at);
        // What is written there is not looked at.
        let (mut fields, mut ends) = (vec![0; 16 * 1024], [0; 64]);
        let mut record: Option<Span> = None;
        loop {
            let buffer = scan.fill_buf().map_err(ReaderError::io("read", file.path()))?;
            if buffer.is_empty() {
                break;
            }
            let (num_read, is_over) = if let Some(span) = &mut record {
                let (result, num_read, _, num_ends) = reader.read_record(buffer, &mut fields, &mut ends);
                span.num_fields += num_ends;
                (num_read, matches!(result, ReadRecordResult::Record))
            } else {
                let blank = buffer.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
                let (num_blank, newlines) =
                    blank.fold((0, 0), |(bytes, lines), &byte| (bytes + 1, lines + u64::from(byte == b'\n')));
                reader.set_line(reader.line() + newlines);
                if num_blank < buffer.len() {
                    let (start, line) = (at + num_blank as u64, reader.line());
                    record = Some(Span { start, line, num_fields: 0, spans_lines: false, is_closed: true });
                }
                (num_blank, false)
            };
            let ended_by_newline = is_over && num_read.checked_sub(1).and_then(|last| buffer.get(last)) == Some(&b'\n');
            at += num_read as u64;
            scan.consume(num_read);
            if let (true, Some(mut span)) = (is_over, record) {
                span.spans_lines = span.line + u64::from(ended_by_newline) < reader.line();
                on_record(span)?;
                record = None;
            }
        }
        let Some(mut span) = record else {
            return Ok(());
        };
        span.spans_lines = span.line < reader.line();
        // A line end closes the record unless it stands inside of quotation marks.
        let (result, _, _, num_ends) = reader.read_record(b"\n", &mut fields, &mut ends);
        span.is_closed = matches!(result, ReadRecordResult::Record);
        span.num_fields += num_ends;
        on_record(span)
    }

    /// The fields of the record with which `bytes` begin; there must be `num_fields`. `name` is for error messages.
    pub(super) fn fields(
        &self,
        bytes: &[u8],
        num_fields: usize,
        name: impl Fn(usize) -> Option<String>,
    ) -> Result<StringRecord, RowProblem> {
        let mut reader = self.reader();
        let (mut fields, mut ends) = (vec![0; bytes.len() + 1], vec![0; num_fields + 1]);
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
