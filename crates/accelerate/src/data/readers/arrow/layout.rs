//! Where the messages of an Arrow file stand: found by their headers, what they hold is passed over.

use super::super::columns::check_columns;
use super::super::file::PositionedFile;
use super::super::guarded::guarded;
use super::super::limits::MAX_METADATA_BYTES;
use crate::error::ReaderError;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::read_footer_length;
use arrow_ipc::{Message, MessageHeader, root_as_footer, root_as_message};
use arrow_schema::{Schema, SchemaRef};
use std::path::Path;
use std::sync::Arc;

/// How the file format begins and ends; the streaming format begins with a message.
const MAGIC: &[u8] = b"ARROW1";
/// At the end of the file format: the length of the footer and the magic.
const TRAILER_BYTES: usize = 10;
/// In front of a message's length. Files from before 2020 lack it.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// One message: a header, and the bytes that it describes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) start: u64,
    /// With the length in front.
    pub(super) header_bytes: u64,
    pub(super) body_bytes: u64,
}

/// A message of values that columns refer to by number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dictionary {
    pub(super) block: Block,
    pub(super) id: i64,
    /// Whether it adds values to those of the same id so far, or replaces them.
    pub(super) is_delta: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    pub(super) block: Block,
    pub(super) num_rows: usize,
    /// How many of the dictionaries hold for it.
    pub(super) num_dictionaries: usize,
}

/// What a file is made of.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) schema: SchemaRef,
    pub(super) batches: Vec<Batch>,
    pub(super) dictionaries: Vec<Dictionary>,
}

impl Layout {
    pub(super) fn read(file: &PositionedFile) -> Result<Self, ReaderError> {
        let magic_bytes = MAGIC.len() as u64;
        if magic_bytes <= file.num_bytes() && file.read(0, magic_bytes)? == MAGIC {
            read_file_format(file)
        } else {
            read_streaming_format(file)
        }
    }

    pub(super) fn column_names(&self) -> Vec<String> {
        self.schema.fields().iter().map(|field| field.name().clone()).collect()
    }

    fn new(file: &PositionedFile, schema: arrow_ipc::Schema<'_>) -> Result<Self, ReaderError> {
        check_columns(file.path(), schema.fields().map_or(0, |fields| fields.len()))?;
        let schema = Self::schema(schema).map_err(unreadable(file.path()))?;
        Ok(Self { schema, batches: Vec::new(), dictionaries: Vec::new() })
    }

    fn schema(schema: arrow_ipc::Schema<'_>) -> Result<SchemaRef, String> {
        if !schema.endianness().equals_to_target_endianness() {
            return Err("its numbers have the byte order of another kind of machine".to_owned());
        }
        let schema: Schema = guarded(|| try_fb_to_schema(schema))?;
        Ok(Arc::new(schema))
    }

    /// Takes in a message behind the schema.
    fn add(&mut self, message: Message<'_>, block: Block) -> Result<(), String> {
        if let Some(batch) = message.header_as_record_batch() {
            let num_rows = usize::try_from(batch.length());
            let num_rows = num_rows.map_err(|_| format!("a record batch of {} rows is promised", batch.length()))?;
            self.batches.push(Batch { block, num_rows, num_dictionaries: self.dictionaries.len() });
        } else if let Some(dictionary) = message.header_as_dictionary_batch() {
            self.dictionaries.push(Dictionary { block, id: dictionary.id(), is_delta: dictionary.isDelta() });
        } else {
            return Err(format!("a {} stands where a record batch is expected", kind(message.header_type())));
        }
        Ok(())
    }
}

fn kind(header: MessageHeader) -> &'static str {
    header.variant_name().unwrap_or("message of an unknown kind")
}

pub(super) fn unreadable(path: &Path) -> impl Fn(String) -> ReaderError + use<> {
    let path = path.to_owned();
    move |reason| ReaderError::Unreadable { path: path.clone(), format: "Arrow", reason }
}

/// The header of a message without the length in front.
pub(super) fn parse(header: &[u8]) -> Result<Message<'_>, String> {
    let prefix_bytes = if header.starts_with(&CONTINUATION) { 8 } else { 4 };
    let header = header.get(prefix_bytes..).ok_or("a message ends in its first bytes")?;
    guarded(|| root_as_message(header))
}

/// Bytes `start..start + num_bytes`, which describe something, if the file has them: the numbers come out of the file.
fn promised(file: &PositionedFile, start: u64, num_bytes: u64) -> Result<Vec<u8>, ReaderError> {
    if MAX_METADATA_BYTES < num_bytes {
        let reason =
            format!("a description of {num_bytes} bytes is promised, and at most {MAX_METADATA_BYTES} are read");
        return Err(unreadable(file.path())(reason));
    }
    let end = start.checked_add(num_bytes).filter(|&end| end <= file.num_bytes());
    let end = end.ok_or_else(|| missing(file, start, num_bytes))?;
    file.read(start, end)
}

fn missing(file: &PositionedFile, start: u64, num_bytes: u64) -> ReaderError {
    let found = file.num_bytes();
    unreadable(file.path())(format!("{num_bytes} bytes at byte {start} are promised, but the file has {found}"))
}

fn read_file_format(file: &PositionedFile) -> Result<Layout, ReaderError> {
    let unreadable = unreadable(file.path());
    let trailer_at = file.num_bytes().saturating_sub(TRAILER_BYTES as u64);
    let trailer = promised(file, trailer_at, TRAILER_BYTES as u64)?;
    let trailer: [u8; TRAILER_BYTES] = trailer.try_into().unwrap_or_default();
    let footer_bytes = guarded(|| read_footer_length(trailer)).map_err(&unreadable)? as u64;
    let footer_at = trailer_at.checked_sub(footer_bytes);
    let footer_at = footer_at.ok_or_else(|| unreadable(format!("a footer of {footer_bytes} bytes is promised")))?;
    let footer = promised(file, footer_at, footer_bytes)?;
    let footer = guarded(|| root_as_footer(&footer)).map_err(&unreadable)?;
    let schema = footer.schema().ok_or_else(|| unreadable("the footer has no schema".to_owned()))?;
    let mut layout = Layout::new(file, schema)?;
    // All dictionaries first: in this format they hold for all record batches.
    let dictionaries = footer.dictionaries().into_iter().flatten();
    let batches = footer.recordBatches().into_iter().flatten();
    for listed in dictionaries.chain(batches) {
        let start = u64::try_from(listed.offset());
        let header_bytes = u64::try_from(listed.metaDataLength());
        let body_bytes = u64::try_from(listed.bodyLength());
        let (Ok(start), Ok(header_bytes), Ok(body_bytes)) = (start, header_bytes, body_bytes) else {
            return Err(unreadable("the footer lists a message at a negative position".to_owned()));
        };
        let header = promised(file, start, header_bytes)?;
        let end = start.saturating_add(header_bytes).saturating_add(body_bytes);
        if file.num_bytes() < end {
            return Err(missing(file, start, header_bytes.saturating_add(body_bytes)));
        }
        let message = parse(&header).map_err(&unreadable)?;
        layout.add(message, Block { start, header_bytes, body_bytes }).map_err(&unreadable)?;
    }
    Ok(layout)
}

fn read_streaming_format(file: &PositionedFile) -> Result<Layout, ReaderError> {
    let unreadable = unreadable(file.path());
    let mut layout: Option<Layout> = None;
    let mut at = 0;
    loop {
        let (header_bytes, is_end) = header_bytes(file, at)?;
        if is_end {
            at += header_bytes;
            break;
        }
        let header = promised(file, at, header_bytes)?;
        let message = parse(&header).map_err(&unreadable)?;
        let body_bytes = u64::try_from(message.bodyLength()).map_err(|error| unreadable(error.to_string()))?;
        let block = Block { start: at, header_bytes, body_bytes };
        let body_at = at + header_bytes;
        let end = body_at.checked_add(body_bytes).filter(|&end| end <= file.num_bytes());
        at = end.ok_or_else(|| missing(file, body_at, body_bytes))?;
        match &mut layout {
            Some(layout) => layout.add(message, block).map_err(&unreadable)?,
            None => {
                let found = || unreadable(format!("it begins with a {}, not a schema", kind(message.header_type())));
                layout = Some(Layout::new(file, message.header_as_schema().ok_or_else(found)?)?);
            }
        }
    }
    // Another stream behind this one would otherwise be left out without a word.
    if at != file.num_bytes() {
        return Err(unreadable(format!("the stream ends at byte {at}, but the file has {}", file.num_bytes())));
    }
    layout.ok_or_else(|| unreadable("it has no schema".to_owned()))
}

/// Length of the header of the message at `at` with what stands in front of it, and whether the stream ends there.
fn header_bytes(file: &PositionedFile, at: u64) -> Result<(u64, bool), ReaderError> {
    if at == file.num_bytes() {
        // The format allows a stream to just end, but a file that was cut off between two messages looks the same.
        let reason = "the mark at the end of the stream is missing: the file was cut off, or is still being written";
        return Err(unreadable(file.path())(reason.to_owned()));
    }
    let mut prefix_bytes = 4;
    let mut length = promised(file, at, 4)?;
    if length == CONTINUATION {
        prefix_bytes = 8;
        length = promised(file, at + 4, 4)?;
    }
    let length = u32::from_le_bytes(length.try_into().unwrap_or_default());
    Ok((prefix_bytes + u64::from(length), length == 0))
}
