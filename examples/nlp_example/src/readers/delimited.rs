//! Rows of TSV and CSV files.

use super::{DataError, LABEL_COLUMNS, Place, Row, RowProblem, TEXT_COLUMNS, row};
use std::path::Path;

/// Which fields of a record are the text and the label, and how many fields each record has.
struct Columns {
    text: usize,
    label: usize,
    num_fields: usize,
}

/// Rows of a file whose fields are separated by `delimiter`.
///
/// Tab-separated files of sentences are usually written without any quoting, and a stray quotation mark
/// would otherwise swallow the lines up to the next one; so quotes only count with other delimiters.
pub(super) fn parse(path: &Path, bytes: &[u8], delimiter: u8) -> Result<Vec<Row>, DataError> {
    let quoting = delimiter != b'\t';
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .quoting(quoting)
        .has_headers(false)
        .flexible(true)
        .from_reader(bytes);
    let mut lines = LineCounter { bytes, counted_to: 0, line: 1 };
    let mut columns = None;
    let mut rows = Vec::new();
    let mut record = csv::ByteRecord::new();
    let unreadable = |error: csv::Error| DataError::Unreadable { path: path.to_owned(), source: error.into() };
    while reader.read_byte_record(&mut record).map_err(unreadable)? {
        let start = record.position().map_or(0, |position| position.byte() as usize);
        let place = Place::Line(lines.line_at(start));
        let problem = |problem| DataError::Row { path: path.to_owned(), place, problem };
        let fields = record
            .iter()
            .map(std::str::from_utf8)
            .collect::<Result<Vec<&str>, _>>()
            .map_err(|_| problem(RowProblem::NotUtf8))?;
        let columns = match &columns {
            Some(columns) => columns,
            None => {
                let header = header(path, &fields)?;
                let is_header = header.is_some();
                let found = columns.insert(header.unwrap_or(Columns { text: 0, label: 1, num_fields: 2 }));
                if is_header {
                    continue;
                }
                &*found
            }
        };
        rows.push(to_row(&fields, columns, quoting, place).map_err(problem)?);
    }
    Ok(rows)
}

fn to_row(fields: &[&str], columns: &Columns, quoting: bool, place: Place) -> Result<Row, RowProblem> {
    if fields.len() != columns.num_fields {
        let spans_lines = fields.iter().any(|field| field.contains('\n'));
        let hint = match fields.len() < columns.num_fields {
            true if spans_lines => "; a quotation mark that opens here is perhaps never closed",
            false if quoting => "; a text that contains commas needs quotation marks around it",
            _ => "",
        };
        let (found, wanted) = (fields.len(), columns.num_fields);
        return Err(RowProblem::FieldCount { found, wanted, hint });
    }
    row(fields[columns.text], fields[columns.label], place)
}

/// The columns that `fields` name, if they are names and not yet data.
///
/// A record is a header when a field has the name of a needed column and no field could be a label.
fn header(path: &Path, fields: &[&str]) -> Result<Option<Columns>, DataError> {
    let names: Vec<String> = fields.iter().map(|field| field.trim().to_ascii_lowercase()).collect();
    let position = |wanted: &[&str]| wanted.iter().find_map(|&wanted| names.iter().position(|name| name == wanted));
    let (text, label) = (position(&TEXT_COLUMNS), position(&LABEL_COLUMNS));
    let is_data = names.iter().any(|name| name.parse::<i64>().is_ok());
    let missing = |wanted: &'static [&'static str]| DataError::MissingColumn {
        path: path.to_owned(),
        found: names.clone(),
        wanted,
    };
    match (text, label) {
        _ if is_data => Ok(None),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(missing(&TEXT_COLUMNS)),
        (Some(_), None) => Err(missing(&LABEL_COLUMNS)),
        (Some(text), Some(label)) => Ok(Some(Columns { text, label, num_fields: fields.len() })),
    }
}

/// Turns byte positions, which must not decrease, into line numbers.
///
/// The line numbers of the `csv` crate count from the end of the previous record and so are too small after
/// blank lines.
struct LineCounter<'a> {
    bytes: &'a [u8],
    counted_to: usize,
    line: u64,
}

impl LineCounter<'_> {
    fn line_at(&mut self, start: usize) -> u64 {
        let blank = self.bytes[start..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        let new = &self.bytes[self.counted_to..start + blank];
        self.line += new.iter().filter(|&&byte| byte == b'\n').count() as u64;
        self.counted_to = start + blank;
        self.line
    }
}
