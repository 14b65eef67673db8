//! Parquet files that were made to do harm, or damaged.

mod thrift;

use super::file;
use super::hostile::{Outcome, check_refused, outcome};
use accelerate::data::Dataset;
use accelerate::data::readers::{ParquetDataset, ParquetOptions, parquet_column_names};
use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use thrift::{Chunk, Struct, data_page, dictionary_page, footer, group, long_column, row_group, text_column};

type AnyRow = BTreeMap<String, IgnoredAny>;

const UNREADABLE: &str = "is not a readable Parquet file";
const UNDECODABLE: &str = "the row cannot be decoded";

/// Opens a file and reads its first and last rows.
fn read(path: &Path) -> accelerate::Result<usize> {
    let dataset = ParquetDataset::<AnyRow>::from_files([path])?;
    for index in (0..dataset.len()).take(10).chain(dataset.len().checked_sub(1)) {
        dataset.get(index)?;
    }
    Ok(dataset.len())
}

fn check(case: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    let (_folder, path) = file("a.parquet", content);
    check_refused(case, &path, parts, || read(&path));
}

/// One column of 64-bit integers, the pages of which follow the magic.
fn longs(num_values: i64, stored_bytes: i64) -> Chunk {
    let (name, num_bytes) = ("a".to_owned(), stored_bytes);
    Chunk { name, kind: 2, codec: 0, num_values, num_bytes, stored_bytes, page_at: 4, dictionary_at: None }
}

fn schema(columns: Vec<Struct>) -> Vec<Struct> {
    [vec![group("schema", columns.len() as i64)], columns].concat()
}

/// A file of one column `a` of 64-bit integers in one row group.
fn longs_file(pages: &[u8], num_rows: i64, chunk: Chunk) -> Vec<u8> {
    let groups = vec![row_group(vec![chunk], num_rows)];
    thrift::file(pages, &footer(schema(vec![long_column("a")]), num_rows, groups))
}

/// A page of integers that are all absent: a run of zeros for the levels, of whatever length.
fn absent(num_values: i64) -> Vec<u8> {
    let mut run = Vec::new();
    let mut head = (num_values as u64) << 1;
    while 0x80 <= head {
        run.push(head as u8 | 0x80);
        head >>= 7;
    }
    run.extend([head as u8, 0]);
    let levels = [(run.len() as u32).to_le_bytes().to_vec(), run].concat();
    [data_page(levels.len() as i64, levels.len() as i64, num_values, 0), levels].concat()
}

#[test]
fn files_made_by_hand_are_read() {
    let pages = absent(3);
    let (_folder, path) = file("a.parquet", longs_file(&pages, 3, longs(3, pages.len() as i64)));
    let dataset = ParquetDataset::<(Option<i64>,)>::from_files([&path]).unwrap();
    assert_eq!(super::rows(&dataset), [(None,), (None,), (None,)]);
}

#[test]
fn files_of_another_kind_are_not_taken_for_parquet() {
    for (case, content) in [
        ("nothing", &b""[..]),
        ("the magic alone", b"PAR1"),
        ("the magic twice", b"PAR1PAR1"),
        ("a table", b"text,stars\na joy to watch,5\n"),
        ("zeros", &[0; 1000]),
        ("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"),
        ("Arrow", b"ARROW1\0\0\0\0\0\0ARROW1"),
        ("an encrypted footer", b"PAR1\x15\x00\x00\x01\x00\x00\x00PARE"),
        ("a footer without an end", b"PAR1\xff\xff\xff\xffPAR1"),
        ("a footer longer than the file", b"PAR1\0\0\0\0\x40\0\0\0PAR1"),
        ("an empty footer", b"PAR1\0\0\0\0PAR1"),
        ("a footer of nothing", b"PAR1\0\x01\0\0\0PAR1"),
    ] {
        check(case, content, &[UNREADABLE, "download it again"]);
    }
}

#[test]
fn a_footer_in_a_hole_is_not_read() {
    let (_folder, path) = file("a.parquet", "PAR1");
    let hole = File::options().write(true).open(&path).unwrap();
    hole.set_len(256 << 30).unwrap();
    hole.write_all_at(b"\xf0\xff\xff\xffPAR1", (256 << 30) - 8).unwrap();
    let message = ["its footer has 4294967280 bytes", "at most 67108864 are read"];
    check_refused("a footer of 4 GB", &path, &message, || read(&path));
    check_refused("its names", &path, &message, || parquet_column_names(&path));
    hole.write_all_at(b"\0\0\0\x03PAR1", (256 << 30) - 8).unwrap();
    check_refused("a footer of zeros", &path, &[UNREADABLE], || read(&path));
}

#[test]
fn schemas_that_cannot_be_are_refused() {
    let of = |schema: Vec<Struct>| thrift::file(&[], &footer(schema, 0, vec![]));
    let deep = |depth: usize| {
        let groups = (0..depth).map(|_| group("g", 1));
        of(groups.chain([long_column("a")]).collect())
    };
    check("a schema 1000 deep", deep(1000), &["nested more than 64 deep"]);
    check("a schema a million deep", deep(1_000_000), &["1000000 columns with those inside of others"]);
    for (case, num_children, message) in [
        ("more columns than there are", 2, "2 columns are promised where 1 are described"),
        ("columns without an end", i64::from(i32::MAX), "2147483647 columns are promised where 1 are described"),
        ("a negative number of columns", -1, "a column of -1 columns is promised"),
        ("fewer columns than there are", 0, UNREADABLE),
    ] {
        check(case, of(vec![group("schema", num_children), long_column("a")]), &[UNREADABLE, message]);
    }
    check("no schema", thrift::file(&[], &Struct::default().int(1, 1).done()), &[UNREADABLE]);
    let endless = Struct::default().int(1, 1).list(2, 12, u64::from(u32::MAX), &[]).done();
    check("a schema without an end", thrift::file(&[], &endless), &[UNREADABLE, "footer is damaged"]);
    let endless = Struct::default().int(1, 1).structs(2, schema(vec![long_column("a")])).long(3, 0);
    let endless = endless.list(4, 12, i32::MAX as u64, &[]).done();
    check("row groups without an end", thrift::file(&[], &endless), &[UNREADABLE]);
    let nested = Struct::default().int(1, 1).list(9, 9, 1_000_000, &[0x19; 1_000_000]).done();
    check("a million lists in each other", thrift::file(&[], &nested), &[UNREADABLE]);
    let described =
        Struct::default().int(1, 0).structs(2, schema(vec![long_column("a")])).long(3, 0).structs(4, vec![]);
    let mut booleans = described.list(10, 1, 1 << 40, &[]).done();
    check("booleans without an end", thrift::file(&[], &booleans), &[UNREADABLE, "footer is damaged"]);
    // By its types this footer ends here, and the parquet crate reads on.
    booleans[0] = 0x12;
    check("a version that is a boolean", thrift::file(&[], &booleans), &[UNREADABLE, "footer is damaged"]);
    check("no columns", of(vec![group("schema", 0)]), &["has no columns"]);
}

#[test]
fn names_are_looked_at_before_rows() {
    let of = |columns: Vec<Struct>| thrift::file(&[], &footer(schema(columns), 0, vec![]));
    check("twice the same", of(vec![long_column("a"), text_column("a")]), &["columns 1 and 2", "both named \"a\""]);
    let inside = vec![group("schema", 1), group("g", 2), long_column("a"), text_column("a")];
    check("twice inside of a column", thrift::file(&[], &footer(inside, 0, vec![])), &["both named \"a\""]);
    let long = "x".repeat(1_000_000);
    check("a name of 1 MB", of(vec![long_column(&long)]), &["the name of column 1", "1000000 bytes"]);
    let many = |count: usize| (0..count).map(|column| long_column(&format!("c{column}"))).collect::<Vec<_>>();
    check("a million columns", of(many(1_000_000)), &["1000000 columns", "at most 100000"]);
    check("150,000 columns", of(many(150_000)), &["150000 columns", "at most 100000 are read"]);
    let (_folder, path) = file("a.parquet", of(many(100_000)));
    let options = |name: &str| ParquetOptions { columns: Some(vec![name.to_owned()]), ..ParquetOptions::default() };
    check_refused("none of 100,000", &path, &["wanted a column named \"xxx", "and 99988 more]"], || {
        ParquetDataset::<AnyRow>::with_options([&path], &options(&long))
    });
    let odd = Struct::default().int(1, 7).int(2, 12).int(3, 0).text(4, &"\0".repeat(4000)).int(6, 21);
    check("a long name of an unknown type", of(vec![odd]), &["the column \"\\0", "INTERVAL", "does not know"]);
}

#[test]
fn row_groups_that_promise_too_much_are_refused_when_a_file_is_opened() {
    let of = |num_rows, chunk| longs_file(&absent(3), num_rows, chunk);
    let good = longs(3, 30);
    for (case, num_rows) in [("a trillion rows", 1 << 40), ("more rows than there can be", i64::MAX)] {
        check(case, of(num_rows, good.clone()), &["row group 0", "bytes or more in memory", "max_row_group_bytes"]);
    }
    check("a negative number of rows", of(-5, good.clone()), &[UNREADABLE, "row group 0 is said to have -5 rows"]);
    for (case, num_bytes) in [("a column of 1.5 GB", 1_500_000_000), ("a column without an end", i64::MAX)] {
        let chunk = Chunk { num_bytes, ..good.clone() };
        check(case, of(3, chunk), &["row group 0", "134217728 are the limit", "max_row_group_bytes"]);
    }
    let groups: Vec<_> =
        (0..10).map(|_| row_group(vec![Chunk { num_bytes: i64::MAX, ..good.clone() }; 1], 1)).collect();
    let many = thrift::file(&absent(3), &footer(schema(vec![long_column("a")]), 10, groups));
    check("ten columns without an end", many, &["row group 0", "the limit"]);
}

#[test]
fn pages_that_cannot_be_are_refused_by_row_group_and_column() {
    let page = |num_bytes, stored_bytes, num_values| data_page(num_bytes, stored_bytes, num_values, 0);
    let of =
        |pages: &[u8], codec| longs_file(pages, 3, Chunk { codec, num_bytes: 100, ..longs(3, pages.len() as i64) });
    let limit = "134217728 are the limit";
    let too_large = ["a.parquet, row group 0", limit, "ParquetOptions.max_row_group_bytes"];
    check("a page that becomes 2 GB", of(&[page(i32::MAX.into(), 8, 3), vec![0; 8]].concat(), 6), &too_large);
    check("a page of 2 billion values", of(&absent(i32::MAX.into()), 0), &too_large);
    let negative = "is said to have a negative size";
    for (case, header) in [
        ("a page of -1 bytes", page(8, -1, 3)),
        ("a page that becomes -1 bytes", page(-1, 8, 3)),
        ("a page of -1 values", page(8, 8, -1)),
    ] {
        let pages = [header, vec![0; 8]].concat();
        check(case, of(&pages, 0), &["row group 0, row 0", UNDECODABLE, "column \"a\"", negative]);
    }
    let damaged = "the header of a page at byte 4 is damaged";
    check("a page without a header", of(&[0xff; 100], 0), &["row group 0, row 0", UNDECODABLE, damaged]);
    check("a header without an end", of(&[0x15; 100_000], 0), &["row group 0, row 0", UNDECODABLE, damaged]);
    let values = [page(8, 8, 3), vec![0xff; 8]].concat();
    for (case, codec) in [("a codec that is not there", 2), ("an unknown codec", 77), ("snappy that is none", 1)] {
        check(case, of(&values, codec), &["a.parquet"]);
    }
    for (case, codec) in [("zstd that is none", 6), ("levels longer than their page", 0)] {
        check(case, of(&values, codec), &["row group 0, row 0", UNDECODABLE]);
    }
    check("pages of nothing", of(&page(0, 0, 0), 0), &["row group 0, row 0", UNDECODABLE]);
    let odd = [data_page(8, 8, 3, 99), vec![0; 8]].concat();
    check("an unknown encoding", of(&odd, 0), &["row group 0, row 0", UNDECODABLE]);
    check(
        "fewer rows than promised",
        longs_file(&absent(2), 3, longs(2, absent(2).len() as i64)),
        &["row group 0, row 2"],
    );
}

#[test]
fn columns_that_lie_elsewhere_are_refused_by_row_group() {
    let pages = absent(3);
    let good = longs(3, pages.len() as i64);
    for (case, chunk) in [
        ("at a negative position", Chunk { page_at: -4, ..good.clone() }),
        ("of a negative length", Chunk { stored_bytes: -1, ..good.clone() }),
        ("behind the end of the file", Chunk { page_at: 1 << 40, ..good.clone() }),
        ("behind all numbers", Chunk { page_at: i64::MAX, stored_bytes: i64::MAX, ..good.clone() }),
        ("in the footer", Chunk { page_at: 4 + pages.len() as i64, ..good.clone() }),
        ("at a negative dictionary", Chunk { dictionary_at: Some(-1), ..good.clone() }),
        ("with a dictionary in the footer", Chunk { dictionary_at: Some(4 + pages.len() as i64), ..good.clone() }),
    ] {
        check(case, longs_file(&pages, 3, chunk), &["a.parquet", ""]);
    }
    let cut = Chunk { stored_bytes: 1 << 30, ..good };
    check("longer than the file", longs_file(&pages, 3, cut), &["row group 0"]);
}

/// A file of texts of one dictionary, which has one text of 1 MiB: each row refers to it.
fn dictionary_file(num_rows: i64, promised_bytes: i64) -> Vec<u8> {
    let text = [(1u32 << 20).to_le_bytes().to_vec(), vec![b'x'; 1 << 20]].concat();
    let dictionary = [dictionary_page(text.len() as i64, 1), text].concat();
    // Width of an index, and a run of zeros.
    let mut indices = vec![1];
    let mut head = (num_rows as u64) << 1;
    while 0x80 <= head {
        indices.push(head as u8 | 0x80);
        head >>= 7;
    }
    indices.extend([head as u8, 0]);
    let page = [data_page(indices.len() as i64, indices.len() as i64, num_rows, 8), indices].concat();
    let chunk = Chunk {
        name: "text".to_owned(),
        kind: 6,
        codec: 0,
        num_values: num_rows,
        num_bytes: promised_bytes,
        stored_bytes: (dictionary.len() + page.len()) as i64,
        page_at: 4 + dictionary.len() as i64,
        dictionary_at: Some(4),
    };
    let groups = vec![row_group(vec![chunk], num_rows)];
    thrift::file(&[dictionary, page].concat(), &footer(schema(vec![text_column("text")]), num_rows, groups))
}

#[test]
fn a_dictionary_cannot_fill_the_memory() {
    let (_folder, path) = file("a.parquet", dictionary_file(100, 1 << 20));
    let read_whole = outcome("100 MB of text in 1 MB", &path, 100 << 20, || read(&path));
    assert!(matches!(read_whole, Outcome::Read), "{read_whole:?}");
    let options = ParquetOptions { max_row_group_bytes: Some(50 << 20), ..ParquetOptions::default() };
    let (_folder, path) = file("a.parquet", dictionary_file(1500, 1 << 20));
    let parts = ["a.parquet, row group 0", "52428800 are the limit", "set ParquetOptions.max_row_group_bytes"];
    check_refused("1.5 GB of text in 1 MB", &path, &parts, || {
        ParquetDataset::<AnyRow>::with_options([&path], &options)?.get(0)
    });
}

#[test]
fn compressed_text_cannot_fill_the_memory() {
    let (_folder, path) = file("a.parquet", "");
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_dictionary_enabled(false);
    let schema = Arc::new(parse_message_type("message m { required binary text (UTF8); }").unwrap());
    let output = File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(output, schema, Arc::new(properties.build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let ColumnWriter::ByteArrayColumnWriter(texts) = column.untyped() else { panic!("a column of texts") };
    let text = ByteArray::from(vec![b'x'; 1 << 20]);
    for _ in 0..1500 {
        texts.write_batch(std::slice::from_ref(&text), None, None).unwrap();
    }
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() < 1_000_000, "a small file");
    check_refused("1.5 GB of text", &path, &["row group 0", "max_row_group_bytes"], || read(&path));
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_an_error() {
    let pages = absent(3);
    let good = longs_file(&pages, 3, longs(3, pages.len() as i64));
    let (_folder, path) = file("a.parquet", &good);
    let cut = File::options().write(true).open(&path).unwrap();
    for length in (0..good.len()).rev() {
        cut.set_len(length as u64).unwrap();
        check_refused(&format!("{length} bytes of {}", good.len()), &path, &[UNREADABLE], || read(&path));
    }
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let pages = absent(3);
    let good = longs_file(&pages, 3, longs(3, pages.len() as i64));
    let (_folder, path) = file("a.parquet", &good);
    let dataset = ParquetDataset::<AnyRow>::from_files([&path]).unwrap();
    for length in [10, 4, 0] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let ends = format!("ends at byte {length}");
        check_refused(&format!("to {length} bytes"), &path, &[&ends, "files must not change"], || dataset.get(0));
    }
    std::fs::write(&path, &good).unwrap();
    dataset.get(2).unwrap();
}
