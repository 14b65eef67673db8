//! Rows of TSV and CSV files.

use super::shown::quoted;
use super::{DataError, LABEL_COLUMNS, Row, RowProblem, TEXT_COLUMNS, at, checked_row};
use accelerate::data::Dataset;
use accelerate::data::readers::{CsvDataset, CsvOptions, csv_column_names};
use std::path::Path;

/// Rows of a file whose first line may name its columns or be a row: a text and a label.
pub(super) fn parse(path: &Path) -> Result<Vec<Row>, DataError> {
    let options = CsvOptions::for_path(path);
    if let Some((text, label)) = header(path, &csv_column_names(path, &options)?)? {
        return rows(&CsvDataset::with_options([path], &options)?, text, label);
    }
    let columns = Some(["text", "label"].map(str::to_owned).to_vec());
    rows(&CsvDataset::with_options([path], &CsvOptions { columns, ..options })?, 0, 1)
}

fn rows(dataset: &CsvDataset<Vec<String>>, text: usize, label: usize) -> Result<Vec<Row>, DataError> {
    let row = |index| {
        let fields = dataset.get(index)?;
        let place = dataset.place(index)?;
        let found = fields[label].trim();
        let label = found.parse().map_err(|_| RowProblem::LabelNotInteger { found: quoted(found) });
        label.and_then(|label| checked_row(&fields[text], label, &place)).map_err(at(&place))
    };
    (0..dataset.len()).map(row).collect()
}

/// Which columns are the text and the label, if `fields` name columns and are not yet data.
///
/// A line is a header when a field has the name of a needed column and no field could be a label.
fn header(path: &Path, fields: &[String]) -> Result<Option<(usize, usize)>, DataError> {
    let names: Vec<String> = fields.iter().map(|field| field.trim().to_ascii_lowercase()).collect();
    let position = |wanted: &[&str]| wanted.iter().find_map(|&wanted| names.iter().position(|name| name == wanted));
    let is_data = names.iter().any(|name| name.parse::<i64>().is_ok());
    let missing = |wanted| Err(DataError::missing_column(path, &names, wanted));
    // The reader compares names as they are, but here "Text" and "text" are the same.
    let is_twice = |&wanted: &&str| 1 < names.iter().filter(|&name| name == wanted).count();
    let twice = TEXT_COLUMNS.iter().chain(&LABEL_COLUMNS).copied().find(is_twice);
    match (position(&TEXT_COLUMNS), position(&LABEL_COLUMNS)) {
        _ if is_data => Ok(None),
        (None, None) => Ok(None),
        (None, Some(_)) => missing(&TEXT_COLUMNS),
        (Some(_), None) => missing(&LABEL_COLUMNS),
        found @ (Some(_), Some(_)) => match twice {
            Some(name) => Err(DataError::DuplicateColumn { path: path.to_owned(), name }),
            None => Ok(found.0.zip(found.1)),
        },
    }
}
