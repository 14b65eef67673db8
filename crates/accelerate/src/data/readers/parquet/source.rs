//! One Parquet file: its footer, the columns that are wanted, and row groups decoded whole.

use super::super::columns::{Selection, check_names};
use super::super::file::{FromPosition, PositionedFile};
use super::super::guarded::guarded;
use super::super::limits::unpacked_limit;
use super::super::table::{self, Source as _};
use super::ParquetOptions;
use super::field::Fields;
use super::promises::{Pages, Problem, check_footer};
use crate::error::{Name, Place, Position, ReaderError, RowProblem};
use bytes::Bytes;
use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::{Type, TypePtr};
use std::fmt;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

/// The library's own access to files moves one cursor that all threads share.
struct Chunks(Arc<PositionedFile>);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.num_bytes()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<FromPosition<Arc<PositionedFile>>>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::new(FromPosition { file: Arc::clone(&self.0), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let end = start.checked_add(length as u64).filter(|&end| end <= self.0.num_bytes());
        // Before anything is allocated: the numbers come out of the file.
        let end = end.ok_or_else(|| {
            let num_bytes = self.0.num_bytes();
            ParquetError::EOF(format!("{length} bytes at byte {start} are promised, but the file has {num_bytes}"))
        })?;
        Ok(self.0.read(start, end).map_err(|error| ParquetError::External(Box::new(error)))?.into())
    }
}

/// Decoded rows, one behind the other.
#[derive(Debug)]
pub(super) struct RowGroup {
    fields: Vec<Field>,
    num_columns: usize,
}

impl RowGroup {
    pub(super) fn row(&self, row: usize) -> Fields<'_> {
        let start = row * self.num_columns;
        Fields(self.fields.get(start..start + self.num_columns).unwrap_or_default())
    }
}

/// A Parquet file whose footer has been read.
pub(super) struct Source {
    file: Arc<PositionedFile>,
    reader: SerializedFileReader<Chunks>,
    /// The wanted columns in the order of the file.
    projection: Type,
    /// Where in a row of the projection each wanted column is.
    order: Vec<usize>,
    /// Names of the wanted columns, in the order in which they are wanted.
    columns: Vec<String>,
    /// Where in a row group the parts of wanted columns are, which may have columns inside.
    leaves: Vec<usize>,
    max_row_group_bytes: Option<u64>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl Source {
    /// Names of all columns, of whatever types.
    pub(super) fn column_names(file: PositionedFile) -> Result<Vec<String>, ReaderError> {
        Ok(names(&read_footer(&Arc::new(file))?))
    }

    /// Reads the footer and finds the columns; all of them without a choice.
    pub(super) fn open(file: PositionedFile, options: &ParquetOptions) -> Result<Self, ReaderError> {
        let path = file.path().to_owned();
        let file = Arc::new(file);
        let reader = read_footer(&file)?;
        let schema = reader.metadata().file_metadata().schema();
        let fields = schema.get_fields();
        let Selection { positions, names: columns } =
            Selection::new(&path, &names(&reader), options.columns.as_deref(), "ParquetOptions.columns")?;
        let mut in_file = positions.clone();
        in_file.sort_unstable();
        let chosen: Vec<TypePtr> = in_file.iter().map(|&position| Arc::clone(&fields[position])).collect();
        for field in &chosen {
            check_type(&path, field.name(), field)?;
        }
        // The library wants the columns in the order of the file.
        let projection = Type::group_type_builder(schema.name()).with_fields(chosen).build();
        let projection = projection.map_err(|error| unreadable(&path)(error.to_string()))?;
        let order = positions.iter().map(|position| in_file.partition_point(|other| other < position)).collect();
        let descriptions = reader.metadata().file_metadata().schema_descr();
        let is_wanted = |&leaf: &usize| in_file.binary_search(&descriptions.get_column_root_idx(leaf)).is_ok();
        let leaves = (0..descriptions.num_columns()).filter(is_wanted).collect();
        let max_row_group_bytes = options.max_row_group_bytes;
        let source = Self { file, reader, projection, order, columns, leaves, max_row_group_bytes };
        source.check_row_groups()?;
        Ok(source)
    }

    /// Whether row groups can be what they are said to be.
    fn check_row_groups(&self) -> Result<(), ReaderError> {
        for (position, row_group) in self.reader.metadata().row_groups().iter().enumerate() {
            if row_group.num_rows() < 0 {
                let reason = format!("row group {position} is said to have {} rows", row_group.num_rows());
                return Err(unreadable(self.path())(reason));
            }
            self.check_size(position, self.part_bytes(position))?;
        }
        Ok(())
    }

    /// The wanted columns of a row group, and of the columns inside of them.
    fn chunks(&self, row_group: usize) -> impl Iterator<Item = &ColumnChunkMetaData> {
        let row_group = self.reader.metadata().row_groups().get(row_group);
        self.leaves.iter().filter_map(move |&leaf| row_group?.columns().get(leaf))
    }

    /// Whether the pages of a row group become no more than they may.
    fn check_pages(&self, row_group: usize) -> Result<(), ReaderError> {
        let mut pages = Pages::default();
        for chunk in self.chunks(row_group) {
            let added = guarded(|| Ok::<_, String>(chunk.byte_range()))
                .map_err(Problem::Content)
                .and_then(|(start, length)| pages.add(&self.file, start, start.saturating_add(length)));
            added.map_err(|problem| match problem {
                Problem::Read(error) => error,
                Problem::Content(message) => {
                    let message = format!("column {}: {message}", Name(&chunk.column_path().string()));
                    let place = self.place(row_group, 0);
                    ReaderError::Row { place, problem: RowProblem::Undecodable { message } }
                }
            })?;
            let field_bytes = pages.num_values.saturating_mul(size_of::<Field>() as u64);
            self.check_size(row_group, pages.num_bytes.saturating_add(field_bytes))?;
        }
        Ok(())
    }

    /// Decodes the wanted columns of a row group.
    fn decode_fields(&self, row_group: usize) -> Result<RowGroup, ReaderError> {
        self.check_pages(row_group)?;
        let (mut num_bytes, limit) = (0u64, self.limit(row_group));
        let num_columns = self.columns.len();
        let num_rows = self.part_rows().nth(row_group).unwrap_or_default();
        let mut fields = Vec::new();
        let decoded = guarded(|| {
            let group = self.reader.get_row_group(row_group)?;
            let rows = group.get_row_iter(Some(self.projection.clone()))?;
            for row in rows {
                let mut row: Vec<Field> = row?.into_columns().into_iter().map(|(_, field)| field).collect();
                let taken =
                    |&position: &usize| row.get_mut(position).map(|field| std::mem::replace(field, Field::Null));
                fields.extend(self.order.iter().filter_map(taken));
                let added = fields.iter().rev().take(num_columns).map(field_bytes);
                num_bytes = added.fold(num_bytes, u64::saturating_add);
                if limit < num_bytes {
                    break;
                }
            }
            Ok::<_, ParquetError>(())
        });
        let row = fields.len() / num_columns;
        let wrong = |message| {
            let place = self.place(row_group, row);
            Err(ReaderError::Row { place, problem: RowProblem::Undecodable { message } })
        };
        self.check_size(row_group, num_bytes)?;
        match decoded {
            Err(reason) => wrong(reason),
            Ok(()) if row != num_rows => wrong(format!("the row group ends here, but promises {num_rows} rows")),
            Ok(()) => Ok(RowGroup { fields, num_columns }),
        }
    }
}

impl table::Source for Source {
    const PART: &'static str = "row group";
    const LIMIT: &'static str = "ParquetOptions.max_row_group_bytes";

    type Part = RowGroup;
    type Cells<'a> = Fields<'a>;

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn columns(&self) -> &[String] {
        &self.columns
    }

    fn part_rows(&self) -> impl Iterator<Item = usize> {
        let groups = self.reader.metadata().row_groups().iter();
        groups.map(|group| usize::try_from(group.num_rows()).unwrap_or_default())
    }

    fn part_bytes(&self, row_group: usize) -> u64 {
        let data_bytes = self.chunks(row_group).map(|chunk| chunk.uncompressed_size().unsigned_abs());
        let num_rows = self.part_rows().nth(row_group).unwrap_or_default() as u64;
        let num_fields = num_rows.saturating_mul(self.columns.len() as u64);
        data_bytes.fold(num_fields.saturating_mul(size_of::<Field>() as u64), u64::saturating_add)
    }

    fn limit(&self, row_group: usize) -> u64 {
        let stored_bytes = self.chunks(row_group).map(|chunk| chunk.compressed_size().unsigned_abs());
        let stored_bytes = stored_bytes.fold(0, u64::saturating_add);
        unpacked_limit(self.file.written_bytes(stored_bytes), self.max_row_group_bytes)
    }

    fn place(&self, row_group: usize, row: usize) -> Place {
        Place { path: self.path().to_owned(), position: Position::RowGroup { row_group, row } }
    }

    fn decode(&self, row_group: usize, _: usize) -> Result<(RowGroup, u64), ReaderError> {
        Ok((self.decode_fields(row_group)?, self.part_bytes(row_group)))
    }

    fn cells(row_group: &RowGroup, row: usize) -> Fields<'_> {
        row_group.row(row)
    }
}

/// About how many bytes a field takes.
fn field_bytes(field: &Field) -> u64 {
    let inside: u64 = match field {
        Field::Str(text) => text.len() as u64,
        // They lie in a page, which is counted as such, but keep it.
        Field::Bytes(_) => 0,
        Field::Group(row) => row
            .get_column_iter()
            .map(|(name, field)| (name.len() + size_of_val(name)) as u64 + field_bytes(field))
            .sum(),
        Field::ListInternal(list) => list.elements().iter().map(field_bytes).sum(),
        Field::MapInternal(map) => map.entries().iter().map(|(key, value)| field_bytes(key) + field_bytes(value)).sum(),
        _ => 0,
    };
    inside + size_of_val(field) as u64
}

fn read_footer(file: &Arc<PositionedFile>) -> Result<SerializedFileReader<Chunks>, ReaderError> {
    check_footer(file).map_err(|problem| match problem {
        Problem::Read(error) => error,
        Problem::Content(reason) => unreadable(file.path())(reason),
    })?;
    guarded(|| SerializedFileReader::new(Chunks(Arc::clone(file)))).map_err(unreadable(file.path()))
}

fn unreadable(path: &Path) -> impl FnOnce(String) -> ReaderError {
    let path = path.to_owned();
    move |reason| ReaderError::Unreadable { path, format: "Parquet", reason }
}

fn names(reader: &SerializedFileReader<Chunks>) -> Vec<String> {
    let fields = reader.metadata().file_metadata().schema().get_fields();
    fields.iter().map(|field| field.name().to_owned()).collect()
}

/// Refuses types that the library cannot turn into fields: it would panic on the first row.
fn check_type(path: &Path, column: &str, field: &Type) -> Result<(), ReaderError> {
    if !field.is_primitive() {
        check_names(path, field.get_fields().iter().map(|child| child.name()))?;
        return field.get_fields().iter().try_for_each(|child| check_type(path, column, child));
    }
    use ConvertedType as C;
    let (physical, converted) = (field.get_physical_type(), field.get_basic_info().converted_type());
    let is_known = match (physical, converted) {
        (_, C::DECIMAL) => 0 <= field.get_scale() && field.get_scale() <= field.get_precision(),
        (PhysicalType::INT32, converted) => matches!(
            converted,
            C::NONE | C::INT_8 | C::INT_16 | C::INT_32 | C::UINT_8 | C::UINT_16 | C::UINT_32 | C::DATE | C::TIME_MILLIS
        ),
        (PhysicalType::INT64, converted) => matches!(
            converted,
            C::NONE | C::INT_64 | C::UINT_64 | C::TIME_MICROS | C::TIMESTAMP_MILLIS | C::TIMESTAMP_MICROS
        ),
        (PhysicalType::BYTE_ARRAY, converted) => {
            matches!(converted, C::NONE | C::UTF8 | C::ENUM | C::JSON | C::BSON)
        }
        (PhysicalType::FIXED_LEN_BYTE_ARRAY, converted) => converted == C::NONE,
        _ => true,
    };
    if is_known {
        return Ok(());
    }
    let (column, found) = (column.to_owned(), format!("{physical} ({converted})"));
    Err(ReaderError::ColumnType { path: path.to_owned(), column, found, setting: "ParquetOptions.columns" })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn promised_bytes_that_are_not_there_are_not_allocated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("short");
        std::fs::write(&path, "0123456789").unwrap();
        let chunks = Chunks(Arc::new(PositionedFile::open(&path).unwrap()));
        assert_eq!(&*chunks.get_bytes(7, 3).unwrap(), b"789");
        for (start, length) in [(8, 3), (1, usize::MAX), (u64::MAX, 1)] {
            let message = chunks.get_bytes(start, length).unwrap_err().to_string();
            assert!(message.contains("the file has 10"), "{message}");
        }
    }
}
