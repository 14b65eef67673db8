//! Arrow files that were made to do harm, or damaged.

use super::file;
use super::hostile::check_refused;
use accelerate::data::Dataset;
use accelerate::data::readers::{ArrowDataset, ArrowOptions, arrow_column_names};
use arrow_array::types::Int8Type;
use arrow_array::*;
use arrow_buffer::OffsetBuffer;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field, Fields, Schema};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

type AnyRow = BTreeMap<String, IgnoredAny>;

const UNREADABLE: &str = "is not a readable Arrow file";
const UNDECODABLE: &str = "the row cannot be decoded";
/// Of [`longs`], so odd that nothing else in a file is the same number.
const NUM_ROWS: i64 = 7777;
const NUM_BYTES: i64 = 8 * NUM_ROWS;
/// With the filling bytes behind it.
const BODY_BYTES: i64 = 62_272;

/// Opens a file and reads its first and last rows.
fn read<T: DeserializeOwned>(path: &Path) -> accelerate::Result<usize> {
    let dataset = ArrowDataset::<T>::from_files([path])?;
    for index in (0..dataset.len()).take(10).chain(dataset.len().checked_sub(1)) {
        dataset.get(index)?;
    }
    Ok(dataset.len())
}

fn check_as<T: DeserializeOwned>(case: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    let (_folder, path) = file("a.arrow", content);
    check_refused(case, &path, parts, || read::<T>(&path));
}

fn check(case: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    check_as::<AnyRow>(case, content, parts);
}

fn batch(array: impl Array + 'static) -> RecordBatch {
    let array: ArrayRef = Arc::new(array);
    RecordBatch::try_from_iter_with_nullable([("a", array, true)]).unwrap()
}

fn stream_of(batch: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::try_new_with_options(&mut bytes, &batch.schema(), options).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    drop(writer);
    bytes
}

fn stream(array: impl Array + 'static) -> Vec<u8> {
    stream_of(&batch(array), None)
}

/// A stream of one record batch with one column of integers, all zero.
fn longs() -> Vec<u8> {
    stream(Int64Array::from(vec![0; NUM_ROWS as usize]))
}

/// With another number wherever one stands.
fn patched(mut content: Vec<u8>, found: i64, wanted: i64) -> Vec<u8> {
    let places: Vec<usize> =
        content.windows(8).enumerate().filter(|(_, bytes)| *bytes == found.to_le_bytes()).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the number {found} is in the file");
    for at in places {
        content[at..at + 8].copy_from_slice(&wanted.to_le_bytes());
    }
    content
}

/// With other bytes in the one place where some stand.
fn replaced(mut content: Vec<u8>, found: &[u8], wanted: &[u8]) -> Vec<u8> {
    let at = content.windows(found.len()).rposition(|bytes| bytes == found).expect("the bytes are in the file");
    content[at..at + wanted.len()].copy_from_slice(wanted);
    content
}

#[test]
fn files_of_another_kind_are_not_taken_for_arrow() {
    for (case, content) in [
        ("nothing", &b""[..]),
        ("a byte", b"A"),
        ("the magic alone", b"ARROW1"),
        ("the magic twice", b"ARROW1\0\0\0\0\0\0ARROW1"),
        ("a footer without an end", b"ARROW1\0\0\xff\xff\xff\x7fARROW1"),
        ("a footer of negative length", b"ARROW1\0\0\xff\xff\xff\xffARROW1"),
        ("a footer of nothing", b"ARROW1\0\0\0\0\0\0\0\0\0\0ARROW1"),
        ("a table", b"text,stars\na joy to watch,5\n"),
        ("Parquet", b"PAR1\x15\x00\x15\x00\x15\x00PAR1"),
        ("zeros", &[0; 1000]),
        ("the mark of a message alone", &[0xff; 4]),
        ("a message without an end", b"\xff\xff\xff\xff\xf0\xff\xff\x7f\x10\0\0\0"),
        ("a message of zeros", b"\xff\xff\xff\xff\x08\0\0\0\0\0\0\0\0\0\0\0"),
        ("a message that refers to nothing", b"\xff\xff\xff\xff\x08\0\0\0\xff\xff\xff\x7f\0\0\0\0"),
        ("old Feather", b"FEA1\0\0\0\0\0\0\0\0FEA1"),
    ] {
        check(case, content, &[UNREADABLE, "download it again"]);
    }
}

#[test]
fn descriptions_in_holes_are_not_read() {
    let (_folder, path) = file("a.arrow", b"\xff\xff\xff\xff\xf0\xff\xff\xff");
    let hole = File::options().write(true).open(&path).unwrap();
    hole.set_len(256 << 30).unwrap();
    let message = ["a description of 4294967288 bytes is promised", "at most 67108864 are read"];
    check_refused("a message of 4 GB", &path, &message[1..], || read::<AnyRow>(&path));
    check_refused("its names", &path, &message[1..], || arrow_column_names(&path));
    hole.write_all_at(b"ARROW1\0\0", 0).unwrap();
    hole.write_all_at(b"\xff\xff\xff\x7fARROW1", (256 << 30) - 10).unwrap();
    let message = ["a description of 2147483647 bytes is promised"];
    check_refused("a footer of 2 GB", &path, &message, || read::<AnyRow>(&path));
    hole.write_all_at(b"\0\0\0\x02ARROW1", (256 << 30) - 10).unwrap();
    check_refused("a footer of zeros", &path, &[UNREADABLE], || read::<AnyRow>(&path));
}

#[test]
fn record_batches_that_promise_too_much_are_refused_when_a_file_is_opened() {
    let limit = ["record batch 0", "134217728 are the limit", "ArrowOptions.max_record_batch_bytes"];
    check("more rows than there can be", patched(longs(), NUM_ROWS, i64::MAX), &limit);
    check("a trillion rows", patched(longs(), NUM_ROWS, 1 << 40), &limit);
    check("a trillion rows of nothing", stream(NullArray::new(1 << 40)), &limit);
    check("a negative number of rows", patched(longs(), NUM_ROWS, -1), &[UNREADABLE, "of -1 rows is promised"]);
    let beyond = ["are promised, but the file has"];
    check("a body behind the end of the file", patched(longs(), BODY_BYTES, 1 << 40), &beyond);
    check("a body behind all numbers", patched(longs(), BODY_BYTES, i64::MAX), &beyond);
    check("a body of negative length", patched(longs(), BODY_BYTES, -64), &[UNREADABLE]);
}

#[test]
fn record_batches_that_cannot_be_are_refused_by_row() {
    let undecodable = ["a.arrow, record batch 0, row 0", UNDECODABLE];
    check("more rows than values", patched(longs(), NUM_ROWS, 2 * NUM_ROWS), &undecodable);
    let promised = "bytes at byte";
    for (case, length) in [("values behind the body", 1 << 40), ("values behind all numbers", i64::MAX)] {
        check(case, patched(longs(), NUM_BYTES, length), &[undecodable[0], promised, "but the body has"]);
    }
    check("values of negative length", patched(longs(), NUM_BYTES, -8), &[undecodable[0], "-8 bytes at byte"]);
    let texts = || stream(StringArray::from(vec!["aaaa", "bbbb"]));
    let offsets = |last: i32| [0i32, 4, last].map(i32::to_le_bytes).concat();
    for (case, last) in
        [("a text behind all texts", i32::MAX), ("a text of negative length", 3), ("a text at a negative position", -8)]
    {
        check(case, replaced(texts(), &offsets(8), &offsets(last)), &undecodable);
    }
    check("texts that are no text", replaced(texts(), b"aaaabbbb", b"aaaa\xff\xff\xff\xff"), &undecodable);
    let characters = stream(StringArray::from(vec!["xxx", "é"]));
    let cut = replaced(
        characters,
        &[0i32, 3, 5].map(i32::to_le_bytes).concat(),
        &[0i32, 4, 5].map(i32::to_le_bytes).concat(),
    );
    check("texts that cut a character", cut, &undecodable);
    let words = DictionaryArray::<Int8Type>::from_iter(["red", "blue", "red"]);
    let keys = replaced(stream(words), &[0, 1, 0, 0, 0, 0, 0, 0], &[0, 77, 0]);
    check("a word that is not in the dictionary", keys, &undecodable);
}

#[test]
fn names_are_looked_at_before_rows() {
    let of = |fields: Vec<Field>| stream_of(&RecordBatch::new_empty(Arc::new(Schema::new(fields))), None);
    let long = |name: &str| Field::new(name, DataType::Int64, true);
    let twice = "both named \"b\"";
    check("twice the same", of(vec![long("a"), long("b"), long("b")]), &["columns 2 and 3", twice]);
    let pair = DataType::Struct(Fields::from(vec![long("b"), long("b")]));
    check("twice inside of a column", of(vec![Field::new("a", pair.clone(), true)]), &[twice]);
    let list = DataType::List(Arc::new(Field::new_list_field(pair, true)));
    check("twice inside of a list", of(vec![Field::new("a", list, true)]), &[twice]);
    check("a name of 1 MB", of(vec![long("a"), long(&"x".repeat(1_000_000))]), &["column 2", "1000000 bytes"]);
    check("no columns", of(vec![]), &["has no columns"]);
    let many = |count: usize| of((0..count).map(|column| long(&format!("c{column}"))).collect());
    check("150,000 columns", many(150_000), &["150000 columns", "at most 100000"]);
    let (_folder, path) = file("a.arrow", many(100_000));
    let options = ArrowOptions { columns: Some(vec!["x".repeat(1_000_000)]), ..ArrowOptions::default() };
    check_refused("none of 100,000", &path, &["wanted a column named \"xxx", "and 99988 more]"], || {
        ArrowDataset::<AnyRow>::with_options([&path], &options)
    });
    let inside: Vec<Field> = (0..1000).map(|field| long(&format!("field {field}"))).collect();
    let views = DataType::ListView(Arc::new(Field::new("item", DataType::Struct(inside.into()), true)));
    check("an unknown type of 1000 fields", of(vec![Field::new("a", views, true)]), &["column \"a\"", "does not know"]);
}

#[test]
fn a_hole_in_a_file_cannot_fill_the_memory() {
    let num_bytes = 200i64 << 30;
    let content = patched(patched(longs(), NUM_BYTES, num_bytes), BODY_BYTES, num_bytes);
    let (_folder, path) = file("a.arrow", &content);
    let mark = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    let end = content.len() as u64 - mark.len() as u64 - BODY_BYTES as u64 + num_bytes as u64;
    File::options().write(true).open(&path).unwrap().write_all_at(&mark, end).unwrap();
    check_refused("200 GB of values", &path, &["record batch 0", "max_record_batch_bytes"], || read::<AnyRow>(&path));
}

#[test]
fn compressed_values_cannot_fill_the_memory() {
    let values = batch(Int64Array::from(vec![0; 25_000_000]));
    for compression in [CompressionType::ZSTD, CompressionType::LZ4_FRAME] {
        let (_folder, path) = file("a.arrow", stream_of(&values, Some(compression)));
        let options = ArrowOptions { max_record_batch_bytes: Some(100 << 20), ..ArrowOptions::default() };
        let parts = ["record batch 0", "200000000 bytes or more", "set ArrowOptions.max_record_batch_bytes"];
        check_refused(&format!("200 MB of {compression:?}"), &path, &parts, || {
            ArrowDataset::<AnyRow>::with_options([&path], &options)?.get(0)
        });
    }
    let content = stream_of(&batch(Int64Array::from(vec![0; NUM_ROWS as usize])), Some(CompressionType::ZSTD));
    for (case, promised) in [("1.5 GB", 1_500_000_000), ("more than there can be", i64::MAX)] {
        check(case, patched(content.clone(), NUM_BYTES, promised), &["record batch 0", "134217728 are the limit"]);
    }
    check("more than there is", patched(content.clone(), NUM_BYTES, NUM_BYTES + 1), &["record batch 0", UNDECODABLE]);
    check("a negative length", patched(content, NUM_BYTES, -2), &["record batch 0", UNDECODABLE]);
}

#[test]
fn one_row_cannot_fill_the_memory() {
    type Row = (Vec<Option<String>>,);
    let limit = ["record batch 0, row 0", "the row becomes", "max_record_batch_bytes"];
    let item = |data_type| Arc::new(Field::new_list_field(data_type, true));
    let offsets = |length: i32| OffsetBuffer::new(vec![0, length].into());
    let nulls =
        ListArray::new(item(DataType::Null), offsets(i32::MAX), Arc::new(NullArray::new(i32::MAX as usize)), None);
    check_as::<Row>("a list of 2 billion nulls", stream(nulls), &limit);
    let nulls =
        FixedSizeListArray::new(item(DataType::Null), i32::MAX, Arc::new(NullArray::new(i32::MAX as usize)), None);
    check_as::<Row>("as many in a list of fixed size", stream(nulls), &limit);
    let text = "x".repeat(1 << 20);
    let texts = DictionaryArray::<Int8Type>::new(vec![0; 10_000].into(), Arc::new(StringArray::from(vec![text])));
    let texts = ListArray::new(item(texts.data_type().clone()), offsets(10_000), Arc::new(texts), None);
    check_as::<Row>("10 GB of one text", stream(texts), &limit);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let values = batch(Int64Array::from(vec![0; NUM_ROWS as usize]));
    let mut file_format = Vec::new();
    let mut writer = FileWriter::try_new(&mut file_format, &values.schema()).unwrap();
    writer.write(&values).unwrap();
    writer.finish().unwrap();
    drop(writer);
    for content in [longs(), file_format] {
        let (_folder, path) = file("a.arrow", content);
        let dataset = ArrowDataset::<AnyRow>::from_files([&path]).unwrap();
        for length in [10_000, 100, 0] {
            File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
            let ends = format!("ends at byte {length}");
            check_refused(&format!("to {length} bytes"), &path, &[&ends, "files must not change"], || dataset.get(0));
        }
    }
}
