//! One Arrow file: its messages, the columns that are wanted, and record batches decoded whole.

use super::super::cache::Cache;
use super::super::columns::{Selection, check_names};
use super::super::file::PositionedFile;
use super::super::guarded::guarded;
use super::super::limits::unpacked_limit;
use super::super::table::{self, Source as _};
use super::ArrowOptions;
use super::cell::{BatchRow, unknown};
use super::layout::{Batch, Block, Dictionary, Layout, parse};
use crate::error::{Place, Position, ReaderError, RowProblem};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::MetadataVersion;
use arrow_ipc::reader::{RecordBatchDecoder, read_dictionary};
use arrow_schema::{DataType, Field, SchemaRef, UnionMode};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes between two wanted ranges that are read with them, rather than by a call of their own.
const GAP_BYTES: u64 = 64 * 1024;

type Dictionaries = HashMap<i64, ArrayRef>;

/// An Arrow file whose messages have been found.
#[derive(Debug)]
pub(super) struct Source {
    file: PositionedFile,
    layout: Layout,
    selection: Selection,
    /// Only the wanted columns, in the order in which they are wanted.
    schema: SchemaRef,
    /// By how many of the dictionaries hold for the record batch.
    dictionaries: Cache<Dictionaries>,
    max_record_batch_bytes: Option<u64>,
}

/// What can go wrong in a record batch: reading it, or its content.
enum Failure {
    Read(ReaderError),
    Content(String),
    /// It becomes so many bytes, which are more than it may.
    Size(u64),
}

impl From<ReaderError> for Failure {
    fn from(error: ReaderError) -> Self {
        Self::Read(error)
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Content(reason)
    }
}

impl Source {
    /// Finds messages and columns; all of them without a choice.
    pub(super) fn open(file: PositionedFile, options: &ArrowOptions) -> Result<Self, ReaderError> {
        let layout = Layout::read(&file)?;
        let path = file.path();
        let setting = "ArrowOptions.columns";
        let selection = Selection::new(path, &layout.column_names(), options.columns.as_deref(), setting)?;
        let fields: Vec<_> =
            selection.positions.iter().filter_map(|&position| layout.schema.fields().get(position)).cloned().collect();
        for field in &fields {
            check_nested_names(path, field.data_type())?;
            if let Some(found) = unknown(field.data_type()) {
                let (column, found) = (field.name().clone(), found.to_string());
                return Err(ReaderError::ColumnType { path: path.to_owned(), column, found, setting });
            }
        }
        let schema = Arc::new(arrow_schema::Schema::new(fields));
        let dictionaries = Cache::new(options.cache_bytes);
        let max_record_batch_bytes = options.max_record_batch_bytes;
        let source = Self { file, layout, selection, schema, dictionaries, max_record_batch_bytes };
        for (position, batch) in source.layout.batches.iter().enumerate() {
            // Rows that take no bytes, of which there may be any number: each is taken for one byte.
            source.check_size(position, batch.num_rows as u64)?;
        }
        Ok(source)
    }

    fn block_limit(&self, block: Block) -> u64 {
        unpacked_limit(self.file.written_bytes(block.body_bytes), self.max_record_batch_bytes)
    }

    fn decode_batch(&self, batch: &Batch) -> Result<(RecordBatch, u64), Failure> {
        let dictionaries =
            self.dictionaries.get(batch.num_dictionaries, 0, || self.read_dictionaries(batch.num_dictionaries))?;
        let header = self.header(batch.block)?;
        let message = parse(&header)?;
        let version = message.version();
        let found = message.header_as_record_batch().ok_or_else(changed)?;
        let mut is_wanted = vec![false; self.layout.schema.fields().len()];
        for &position in &self.selection.positions {
            is_wanted.get_mut(position).into_iter().for_each(|is_wanted| *is_wanted = true);
        }
        let wanted = |position: usize| is_wanted.get(position).copied().unwrap_or_default();
        // The library compares each column with each wanted one.
        let is_whole = self.selection.positions.iter().copied().eq(0..is_wanted.len());
        let projection = (!is_whole).then_some(self.selection.positions.as_slice());
        let (body, num_bytes) = self.body(batch.block, found, version, self.layout.schema.fields(), wanted)?;
        let decoded = guarded(|| {
            let schema = Arc::clone(&self.layout.schema);
            RecordBatchDecoder::try_new(&body, found, schema, &dictionaries, &version)?
                .with_projection(projection)
                .read_record_batch()
        })?;
        if decoded.num_rows() != batch.num_rows {
            return Err(changed().into());
        }
        Ok((decoded, num_bytes))
    }

    /// The values that record batches behind the first `num_dictionaries` dictionaries refer to.
    fn read_dictionaries(&self, num_dictionaries: usize) -> Result<(Dictionaries, u64), Failure> {
        // What is replaced later on need not be read.
        let mut live: HashMap<i64, Vec<&Dictionary>> = HashMap::new();
        for dictionary in self.layout.dictionaries.iter().take(num_dictionaries) {
            let chain = live.entry(dictionary.id).or_default();
            if !dictionary.is_delta {
                chain.clear();
            }
            chain.push(dictionary);
        }
        let ids: HashSet<i64> =
            self.schema.fields().iter().fold(HashSet::new(), |ids, field| dictionary_ids(field, ids));
        let mut values = Dictionaries::new();
        let mut num_bytes = 0u64;
        // Dictionaries may refer to others, which a writer puts in front of them.
        let mut needed: Vec<&Dictionary> =
            live.into_iter().filter(|(id, _)| ids.contains(id)).flat_map(|(_, chain)| chain).collect();
        needed.sort_by_key(|dictionary| dictionary.block.start);
        for dictionary in needed {
            let header = self.header(dictionary.block)?;
            let message = parse(&header)?;
            let version = message.version();
            let found = message.header_as_dictionary_batch().ok_or_else(changed)?;
            let batch = found.data().ok_or_else(changed)?;
            let (body, body_bytes) = self.body(dictionary.block, batch, version, &Default::default(), |_| true)?;
            num_bytes = num_bytes.saturating_add(body_bytes);
            guarded(|| read_dictionary(&body, found, &self.layout.schema, &mut values, &version))?;
        }
        Ok((values, num_bytes))
    }

    fn header(&self, block: Block) -> Result<Vec<u8>, ReaderError> {
        self.file.read(block.start, block.start + block.header_bytes)
    }

    /// The body of a message, zero where it belongs to columns that are not wanted, and how many bytes it takes when it is
    /// decoded.
    ///
    /// Pages of zeros that nobody writes to take no memory, so that one narrow column of a wide file costs little.
    fn body(
        &self,
        block: Block,
        batch: arrow_ipc::RecordBatch<'_>,
        version: MetadataVersion,
        fields: &arrow_schema::Fields,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<(Buffer, u64), Failure> {
        let ranges = wanted_ranges(batch, block.body_bytes, version, fields, wanted)?;
        let limit = self.block_limit(block);
        let within_limit = |num_bytes| if num_bytes <= limit { Ok(num_bytes) } else { Err(Failure::Size(num_bytes)) };
        let stored_bytes = ranges.iter().map(|range| range.end - range.start);
        let stored_bytes = within_limit(stored_bytes.fold(0, u64::saturating_add))?;
        let mut body = self.file.room(block.body_bytes)?;
        let body_at = block.start + block.header_bytes;
        for range in joined(ranges.clone()) {
            let bytes = body.get_mut(range.start as usize..range.end as usize);
            let bytes = bytes.ok_or_else(changed)?;
            self.file.read_into(bytes, body_at + range.start)?;
        }
        let num_bytes = if batch.compression().is_some() {
            within_limit(decompressed_bytes(&body, &ranges))?
        } else {
            stored_bytes
        };
        Ok((Buffer::from_vec(body), num_bytes))
    }
}

fn changed() -> String {
    "the message is not the one that was there when the file was opened".to_owned()
}

impl table::Source for Source {
    const PART: &'static str = "record batch";
    const LIMIT: &'static str = "ArrowOptions.max_record_batch_bytes";

    type Part = RecordBatch;
    type Cells<'a> = BatchRow<'a>;

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn columns(&self) -> &[String] {
        &self.selection.names
    }

    fn part_rows(&self) -> impl Iterator<Item = usize> {
        self.layout.batches.iter().map(|batch| batch.num_rows)
    }

    fn part_bytes(&self, record_batch: usize) -> u64 {
        // Few columns of many may take next to nothing; how much is only known when they are read.
        let is_whole = self.selection.positions.len() == self.layout.schema.fields().len();
        let batch = self.layout.batches.get(record_batch).filter(|_| is_whole);
        batch.map_or(0, |batch| batch.block.body_bytes)
    }

    fn limit(&self, record_batch: usize) -> u64 {
        self.layout.batches.get(record_batch).map_or(0, |batch| self.block_limit(batch.block))
    }

    fn place(&self, record_batch: usize, row: usize) -> Place {
        Place { path: self.path().to_owned(), position: Position::RecordBatch { record_batch, row } }
    }

    fn decode(&self, record_batch: usize, row: usize) -> Result<(RecordBatch, u64), ReaderError> {
        let batch = self.layout.batches.get(record_batch);
        let decoded = batch.ok_or_else(|| Failure::Content(changed())).and_then(|batch| self.decode_batch(batch));
        decoded.map_err(|failure| match failure {
            Failure::Read(error) => error,
            Failure::Content(message) => {
                let place = self.place(record_batch, row);
                ReaderError::Row { place, problem: RowProblem::Undecodable { message } }
            }
            Failure::Size(found) => {
                let (what, limit) = (<Self as table::Source>::PART, self.limit(record_batch));
                let problem = RowProblem::TooLarge { what, found, limit, setting: <Self as table::Source>::LIMIT };
                ReaderError::Row { place: self.place(record_batch, row), problem }
            }
        })
    }

    fn cells(batch: &RecordBatch, row: usize) -> BatchRow<'_> {
        BatchRow { columns: batch.columns(), row }
    }
}

/// Which bytes of the body hold the wanted columns. All of it where the columns cannot be told apart.
fn wanted_ranges(
    batch: arrow_ipc::RecordBatch<'_>,
    body_bytes: u64,
    version: MetadataVersion,
    fields: &arrow_schema::Fields,
    wanted: impl Fn(usize) -> bool,
) -> Result<Vec<Range<u64>>, String> {
    let buffers = batch.buffers().into_iter().flatten();
    let ranges = buffers.map(|buffer| {
        let (start, length) = (u64::try_from(buffer.offset()), u64::try_from(buffer.length()));
        let range = start.ok().zip(length.ok()).and_then(|(start, length)| Some(start..start.checked_add(length)?));
        range.filter(|range| range.end <= body_bytes).ok_or_else(|| {
            let (length, start) = (buffer.length(), buffer.offset());
            format!("{length} bytes at byte {start} of its body are promised, but the body has {body_bytes}")
        })
    });
    let ranges: Vec<Range<u64>> = ranges.collect::<Result<_, _>>()?;
    let mut view_counts = batch.variadicBufferCounts().into_iter().flatten();
    let mut is_wanted = Vec::with_capacity(ranges.len());
    for (position, field) in fields.iter().enumerate() {
        let num_buffers = num_buffers(field, version, &mut view_counts);
        // Counts come out of the file.
        let num_buffers = num_buffers.filter(|&count| count <= ranges.len() - is_wanted.len());
        let Some(num_buffers) = num_buffers else { return Ok(ranges) };
        is_wanted.resize(is_wanted.len() + num_buffers, wanted(position));
    }
    if is_wanted.len() != ranges.len() {
        return Ok(ranges);
    }
    Ok(ranges.into_iter().zip(is_wanted).filter_map(|(range, is_wanted)| is_wanted.then_some(range)).collect())
}

/// How many buffers a column of this type has. `None` for what cannot be.
fn num_buffers(field: &Field, version: MetadataVersion, view_counts: &mut impl Iterator<Item = i64>) -> Option<usize> {
    let mut num_inner = |field: &Field| num_buffers(field, version, &mut *view_counts);
    let of_all = |fields: &mut dyn Iterator<Item = Option<usize>>| fields.sum::<Option<usize>>();
    match field.data_type() {
        DataType::Null => Some(0),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary => Some(3),
        DataType::Utf8View | DataType::BinaryView => usize::try_from(view_counts.next()?).ok()?.checked_add(2),
        DataType::List(inner) | DataType::LargeList(inner) | DataType::Map(inner, _) => {
            num_inner(inner)?.checked_add(2)
        }
        DataType::ListView(inner) | DataType::LargeListView(inner) => num_inner(inner)?.checked_add(3),
        DataType::FixedSizeList(inner, _) => num_inner(inner)?.checked_add(1),
        DataType::Struct(fields) => of_all(&mut fields.iter().map(|field| num_inner(field)))?.checked_add(1),
        DataType::RunEndEncoded(ends, values) => num_inner(ends)?.checked_add(num_inner(values)?),
        DataType::Union(fields, mode) => {
            let own = usize::from(version < MetadataVersion::V5) + if *mode == UnionMode::Dense { 2 } else { 1 };
            of_all(&mut fields.iter().map(|(_, field)| num_inner(field)))?.checked_add(own)
        }
        _ => Some(2),
    }
}

/// In order, with those that overlap or nearly touch made one.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(GAP_BYTES) => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// How many bytes compressed buffers are said to take once they are not. The library sets them aside at the file's word.
fn decompressed_bytes(body: &[u8], ranges: &[Range<u64>]) -> u64 {
    let promised = ranges.iter().filter_map(|range| {
        let buffer = body.get(range.start as usize..range.end as usize)?;
        let (length, compressed) = buffer.split_first_chunk()?;
        // -1: not compressed after all. Other negative numbers are left to the library, which refuses them.
        Some(u64::try_from(i64::from_le_bytes(*length)).unwrap_or(compressed.len() as u64))
    });
    promised.fold(0, u64::saturating_add)
}

/// The numbers under which a file has the values of a column, and of those inside of it.
fn dictionary_ids(field: &Field, mut ids: HashSet<i64>) -> HashSet<i64> {
    if let DataType::Dictionary(_, values) = field.data_type() {
        #[allow(deprecated, reason = "the only way to the number under which a file has its dictionaries")]
        ids.extend(field.dict_id());
        return inner_fields(values).fold(ids, |ids, field| dictionary_ids(field, ids));
    }
    inner_fields(field.data_type()).fold(ids, |ids, field| dictionary_ids(field, ids))
}

/// The columns right inside of a column of this type.
fn inner_fields(data_type: &DataType) -> Box<dyn Iterator<Item = &Field> + '_> {
    match data_type {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::FixedSizeList(field, _)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::Map(field, _) => Box::new(std::iter::once(field.as_ref())),
        DataType::Struct(fields) => Box::new(fields.iter().map(|field| field.as_ref())),
        _ => Box::new(std::iter::empty()),
    }
}

fn check_nested_names(path: &Path, data_type: &DataType) -> Result<(), ReaderError> {
    check_names(path, inner_fields(data_type).map(|field| field.name().as_str()))?;
    inner_fields(data_type).try_for_each(|field| check_nested_names(path, field.data_type()))
}
