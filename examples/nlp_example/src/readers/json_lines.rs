//! Rows of files with one JSON object per line.

use super::cell::Cell;
use super::{DataError, LABEL_COLUMNS, Row, RowProblem, TEXT_COLUMNS, at};
use accelerate::data::Dataset;
use accelerate::data::readers::JsonLinesDataset;
use std::path::Path;

pub(super) fn parse(path: &Path) -> Result<Vec<Row>, DataError> {
    let dataset = JsonLinesDataset::<Cell>::from_files([path])?;
    let row = |index| {
        let object = dataset.get(index)?;
        let place = dataset.place(index)?;
        let row = match &object {
            Cell::Object(values) => {
                let find = |names: &'static [&'static str]| {
                    let missing = || RowProblem::MissingKey { found: values.keys().cloned().collect(), wanted: names };
                    names.iter().find_map(|&name| values.get(name)).ok_or_else(missing)
                };
                find(&TEXT_COLUMNS).and_then(|text| Cell::row(text, find(&LABEL_COLUMNS)?, &place))
            }
            other => Err(RowProblem::NotAnObject { found: other.to_string() }),
        };
        row.map_err(at(&place))
    };
    (0..dataset.len()).map(row).collect()
}
