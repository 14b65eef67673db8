//! Rows of Parquet files, through the record reader: no Arrow needed for two columns.

use super::{DataError, LABEL_COLUMNS, Place, Row, RowProblem, TEXT_COLUMNS, checked_row};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use parquet::schema::types::{Type, TypePtr};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

pub(super) fn parse(path: &Path) -> Result<Vec<Row>, DataError> {
    let file = File::open(path).map_err(|source| DataError::Unreadable { path: path.to_owned(), source })?;
    let unreadable = |source| DataError::Parquet { path: path.to_owned(), source };
    let reader = SerializedFileReader::new(file).map_err(unreadable)?;
    let schema = reader.metadata().file_metadata().schema();
    let text = column(path, schema, &TEXT_COLUMNS)?;
    let label = column(path, schema, &LABEL_COLUMNS)?;
    let wanted = projection(schema, &[&text, &label]).map_err(unreadable)?;

    let mut rows = Vec::new();
    for row_group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(row_group).map_err(unreadable)?;
        let records = group.get_row_iter(Some(wanted.clone())).map_err(unreadable)?;
        for (row, record) in records.enumerate() {
            let place = Place::ParquetRow { row_group, row };
            let row = record
                .map_err(|error| RowProblem::Undecodable { message: error.to_string() })
                .and_then(|record| to_row(&record, text.name(), label.name(), place))
                .map_err(|problem| DataError::Row { path: path.to_owned(), place, problem })?;
            rows.push(row);
        }
    }
    Ok(rows)
}

fn column(path: &Path, schema: &Type, names: &'static [&'static str]) -> Result<TypePtr, DataError> {
    let fields = schema.get_fields();
    let found = names.iter().find_map(|&name| fields.iter().find(|field| field.name() == name));
    found.cloned().ok_or_else(|| DataError::MissingColumn {
        path: path.to_owned(),
        found: fields.iter().map(|field| field.name().to_owned()).collect(),
        wanted: names,
    })
}

/// The schema cut down to some of its columns, so that the others are not decoded.
fn projection(schema: &Type, columns: &[&TypePtr]) -> Result<Type, ParquetError> {
    // The reader wants the columns in the order of the file.
    let fields = schema
        .get_fields()
        .iter()
        .filter(|field| columns.iter().any(|column| Arc::ptr_eq(column, field)))
        .cloned()
        .collect();
    Type::group_type_builder(schema.name()).with_fields(fields).build()
}

fn to_row(record: &Record, text: &str, label: &str, place: Place) -> Result<Row, RowProblem> {
    let field =
        |name: &str| record.get_column_iter().find(|(column, _)| *column == name).map_or(&Field::Null, |(_, f)| f);
    let text = match field(text) {
        Field::Str(text) => text.as_str(),
        // Writers that know no text type leave plain bytes.
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_err(|_| RowProblem::NotUtf8)?,
        other => return Err(RowProblem::TextNotString { found: other.to_string() }),
    };
    let label = match field(label) {
        Field::Byte(label) => i64::from(*label),
        Field::Short(label) => i64::from(*label),
        Field::Int(label) => i64::from(*label),
        Field::Long(label) => *label,
        Field::UByte(label) => i64::from(*label),
        Field::UShort(label) => i64::from(*label),
        Field::UInt(label) => i64::from(*label),
        Field::ULong(label) => {
            i64::try_from(*label).map_err(|_| RowProblem::LabelNotInteger { found: label.to_string() })?
        }
        other => return Err(RowProblem::LabelNotInteger { found: other.to_string() }),
    };
    checked_row(text, label, place)
}
