//! Rows of Parquet files.

use super::cell::Cell;
use super::{DataError, LABEL_COLUMNS, Row, TEXT_COLUMNS, at};
use accelerate::data::Dataset;
use accelerate::data::readers::{ParquetDataset, ParquetOptions, parquet_column_names};
use std::path::Path;

pub(super) fn parse(path: &Path) -> Result<Vec<Row>, DataError> {
    let found = parquet_column_names(path)?;
    let column = |wanted: &'static [&'static str]| {
        let name = wanted.iter().find(|&name| found.iter().any(|found| found == name));
        name.map(|&name| name.to_owned()).ok_or_else(|| DataError::missing_column(path, &found, wanted))
    };
    let columns = Some(vec![column(&TEXT_COLUMNS)?, column(&LABEL_COLUMNS)?]);
    let options = ParquetOptions { columns, ..ParquetOptions::default() };
    let dataset = ParquetDataset::<(Cell, Cell)>::with_options([path], &options)?;
    let row = |index| {
        let (text, label) = dataset.get(index)?;
        let place = dataset.place(index)?;
        Cell::row(&text, &label, &place).map_err(at(&place))
    };
    (0..dataset.len()).map(row).collect()
}
