//! Parquet.

use super::{assert_shareable, check_refused, file, rows};
use accelerate::Result;
use accelerate::data::Dataset;
use accelerate::data::readers::{ParquetDataset, ParquetOptions, Position, parquet_column_names};
use parquet::basic::Compression;
use parquet::column::writer::ColumnWriter;
use parquet::data_type::{ByteArray, FixedLenByteArray};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const REVIEWS: &str =
    "message m { required binary sentence (UTF8); optional int64 label; required int32 idx; required double score; }";

#[derive(Debug, Deserialize, PartialEq)]
struct Review {
    sentence: String,
    label: Option<i64>,
    idx: u32,
}

/// Values of one column and, where it can be absent or repeat, definition and repetition levels.
enum Column {
    Texts(Vec<&'static [u8]>),
    Fixed(Vec<Vec<u8>>),
    Ints(Vec<i32>),
    Longs(Vec<i64>, Option<Vec<i16>>, Option<Vec<i16>>),
    Doubles(Vec<f64>),
    Bools(Vec<bool>),
}

/// A file with these row groups, each with its columns.
fn parquet_file(schema: &str, row_groups: Vec<Vec<Column>>, compression: Compression) -> (TempDir, PathBuf) {
    let (folder, path) = file("a.parquet", "");
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(std::fs::File::create(&path).unwrap(), schema, properties).unwrap();
    for columns in row_groups {
        let mut group = writer.next_row_group().unwrap();
        for values in columns {
            let mut column = group.next_column().unwrap().unwrap();
            match (column.untyped(), values) {
                (ColumnWriter::ByteArrayColumnWriter(writer), Column::Texts(texts)) => {
                    let texts: Vec<_> = texts.into_iter().map(ByteArray::from).collect();
                    writer.write_batch(&texts, None, None).unwrap()
                }
                (ColumnWriter::FixedLenByteArrayColumnWriter(writer), Column::Fixed(values)) => {
                    let values: Vec<_> = values.into_iter().map(FixedLenByteArray::from).collect();
                    writer.write_batch(&values, None, None).unwrap()
                }
                (ColumnWriter::Int32ColumnWriter(writer), Column::Ints(values)) => {
                    writer.write_batch(&values, None, None).unwrap()
                }
                (ColumnWriter::Int64ColumnWriter(writer), Column::Longs(values, definition, repetition)) => {
                    writer.write_batch(&values, definition.as_deref(), repetition.as_deref()).unwrap()
                }
                (ColumnWriter::DoubleColumnWriter(writer), Column::Doubles(values)) => {
                    writer.write_batch(&values, None, None).unwrap()
                }
                (ColumnWriter::BoolColumnWriter(writer), Column::Bools(values)) => {
                    writer.write_batch(&values, None, None).unwrap()
                }
                _ => panic!("the column has another type"),
            };
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    (folder, path)
}

/// Row groups of these sizes, the rows counted from `first`: row `i` says `i`, and every third one has no label.
fn reviews(first: i32, row_groups: &[i32]) -> (TempDir, PathBuf) {
    let mut next = first;
    let group = |&num_rows: &i32| {
        let rows = next..next + num_rows;
        next = rows.end;
        let text = |row: i32| -> &'static [u8] { format!("review {row}").leak().as_bytes() };
        let labels = rows.clone().filter(|row| row % 3 != 0).map(i64::from).collect();
        let definition = rows.clone().map(|row| i16::from(row % 3 != 0)).collect();
        vec![
            Column::Texts(rows.clone().map(text).collect()),
            Column::Longs(labels, Some(definition), None),
            Column::Ints(rows.clone().collect()),
            Column::Doubles(rows.clone().map(f64::from).collect()),
        ]
    };
    parquet_file(REVIEWS, row_groups.iter().map(group).collect(), Compression::SNAPPY)
}

fn review(row: i64) -> Review {
    Review { sentence: format!("review {row}"), label: (row % 3 != 0).then_some(row), idx: row as u32 }
}

fn select(columns: &[&str]) -> ParquetOptions {
    let columns = Some(columns.iter().map(|&column| column.to_owned()).collect());
    ParquetOptions { columns, ..ParquetOptions::default() }
}

#[test]
fn several_files_and_row_groups_are_one_dataset() {
    let (_a, first) = reviews(0, &[3, 1]);
    let (_b, empty) = reviews(0, &[]);
    let (_c, last) = reviews(4, &[0, 5]);
    let dataset = ParquetDataset::<Review>::from_files([&first, &empty, &last]).unwrap();
    assert_shareable(&dataset);
    assert_eq!(rows(&dataset), (0..9).map(review).collect::<Vec<_>>());
    assert_eq!(dataset.columns(), ["sentence", "label", "idx", "score"]);
    let place = dataset.place(6).unwrap();
    assert_eq!((place.path, place.position), (last, Position::RowGroup { row_group: 1, row: 2 }));
    check_refused(dataset.get(9), &["row 9 does not exist: the dataset has 9 rows"]);
    check_refused(dataset.place(9), &["row 9 does not exist"]);
}

#[test]
fn any_order_and_any_cache_give_the_same_rows() {
    let (_folder, path) = reviews(0, &[10, 10, 10]);
    for cache_bytes in [0, 2000, 1 << 20] {
        let options = ParquetOptions { cache_bytes, ..ParquetOptions::default() };
        let dataset = ParquetDataset::<Review>::with_options([&path], &options).unwrap();
        for step in 0..60 {
            let row = step * 7 % 30;
            assert_eq!(dataset.get(row).unwrap(), review(row as i64));
        }
    }
}

#[test]
fn threads_read_at_once() {
    let (_folder, path) = reviews(0, &[50, 50, 50, 50]);
    let options = ParquetOptions { cache_bytes: 0, ..ParquetOptions::default() };
    let dataset = ParquetDataset::<Review>::with_options([&path], &options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let dataset = &dataset;
            scope.spawn(move || {
                for step in 0..20 {
                    let row = (step * 59 + thread * 50) % 200;
                    assert_eq!(dataset.get(row).unwrap(), review(row as i64));
                }
            });
        }
    });
}

#[test]
fn columns_come_in_the_order_in_which_they_are_wanted() {
    let (_folder, path) = reviews(0, &[5]);
    let wanted = ["score", "sentence", "label"];
    let dataset = ParquetDataset::<(f64, String, Option<i64>)>::with_options([&path], &select(&wanted)).unwrap();
    assert_eq!(dataset.get(4).unwrap(), (4.0, "review 4".to_owned(), Some(4)));
    assert_eq!(dataset.columns(), wanted);
    let one = ParquetDataset::<String>::with_options([&path], &select(&["sentence"])).unwrap();
    assert_eq!(one.get(2).unwrap(), "review 2");
    let labels = ParquetDataset::<Option<i64>>::with_options([&path], &select(&["label"])).unwrap();
    assert_eq!(rows(&labels), [None, Some(1), Some(2), None, Some(4)]);
    assert_eq!(parquet_column_names(&path).unwrap(), ["sentence", "label", "idx", "score"]);
}

#[test]
fn wrong_columns_are_refused_when_a_file_is_opened() {
    let (_a, path) = reviews(0, &[5]);
    let open = |columns: &[&str]| ParquetDataset::<BTreeMap<String, String>>::with_options([&path], &select(columns));
    let columns = "[\"sentence\", \"label\", \"idx\", \"score\"]";
    check_refused(
        open(&["sentence", "stars"]),
        &["a.parquet has the columns", columns, "wanted a column named \"stars\""],
    );
    check_refused(open(&["label", "label"]), &["[\"label\", \"label\"], but must name each column once"]);
    check_refused(open(&[]), &["must name each column once, and at least one"]);
    let (_b, other) = parquet_file("message m { required int32 idx; }", vec![], Compression::UNCOMPRESSED);
    let joined = ParquetDataset::<(i32,)>::from_files([&path, &other]);
    check_refused(joined, &["has the columns [\"idx\"], but", columns]);
    let joined = ParquetDataset::<(i32,)>::with_options([&path, &other], &select(&["idx"])).unwrap();
    assert_eq!(joined.len(), 5);
}

/// The one row of a file with one column.
fn value<T: serde::de::DeserializeOwned>(column: &str, values: Column) -> Result<T> {
    let schema = format!("message m {{ {column} }}");
    let (_folder, path) = parquet_file(&schema, vec![vec![values]], Compression::ZSTD(Default::default()));
    ParquetDataset::<(T,)>::from_files([&path])?.get(0).map(|(value,)| value)
}

#[test]
fn every_type_of_column_has_a_value() {
    assert!(value::<bool>("required boolean a;", Column::Bools(vec![true])).unwrap());
    assert_eq!(value::<i8>("required int32 a (INTEGER(8,true));", Column::Ints(vec![-5])).unwrap(), -5);
    assert_eq!(value::<u8>("required int32 a (INTEGER(8,false));", Column::Ints(vec![250])).unwrap(), 250);
    assert_eq!(value::<u32>("required int32 a (INTEGER(32,false));", Column::Ints(vec![-1])).unwrap(), u32::MAX);
    let longs = |value| Column::Longs(vec![value], None, None);
    assert_eq!(value::<u64>("required int64 a (INTEGER(64,false));", longs(-1)).unwrap(), u64::MAX);
    assert_eq!(value::<i64>("required int64 a (TIMESTAMP_MICROS);", longs(7)).unwrap(), 7);
    assert_eq!(value::<f64>("required int64 a (DECIMAL(9,2));", longs(1234)).unwrap(), 12.34);
    assert_eq!(value::<String>("required int64 a (DECIMAL(2,2));", longs(-5)).unwrap(), "-0.05");
    assert_eq!(value::<f32>("required double a;", Column::Doubles(vec![0.5])).unwrap(), 0.5);
    assert_eq!(value::<Vec<u8>>("required binary a;", Column::Texts(vec![b"\x00\xff"])).unwrap(), [0, 255]);
    assert_eq!(value::<String>("required binary a;", Column::Texts(vec![b"text"])).unwrap(), "text");
    let half = Column::Fixed(vec![vec![0x00, 0x38]]);
    assert_eq!(value::<f32>("required fixed_len_byte_array(2) a (FLOAT16);", half).unwrap(), 0.5);

    let list = "optional group a (LIST) { repeated group list { optional int64 element; } }";
    let ids = || Column::Longs(vec![5, 6], Some(vec![3, 2, 3]), Some(vec![0, 1, 1]));
    assert_eq!(value::<Vec<Option<i64>>>(list, ids()).unwrap(), [Some(5), None, Some(6)]);
    let absent = Column::Longs(vec![], Some(vec![0]), Some(vec![0]));
    assert_eq!(value::<Option<Vec<i64>>>(list, absent).unwrap(), None);
    let group = value::<BTreeMap<String, i64>>("required group a { required int64 b; }", longs(9)).unwrap();
    assert_eq!(group, BTreeMap::from([("b".to_owned(), 9)]));

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Stars {
        One,
        Two,
    }
    assert_eq!(value::<Stars>("required binary a (UTF8);", Column::Texts(vec![b"two"])).unwrap(), Stars::Two);
    assert!(value::<Stars>("required binary a (UTF8);", Column::Texts(vec![b"one"])).unwrap() == Stars::One);
}

#[test]
fn values_that_do_not_fit_are_named_by_column_and_row() {
    let text = "a.parquet, row group 0, row 0: the row does not have the wanted form: column \"a\": ";
    let longs = || Column::Longs(vec![300], None, None);
    check_refused(value::<u8>("required int64 a;", longs()), &[text, "invalid value: integer `300`, expected u8"]);
    check_refused(
        value::<String>("required int64 a;", longs()),
        &[text, "invalid type: integer `300`, expected a string"],
    );
    let absent = Column::Longs(vec![], Some(vec![0]), None);
    check_refused(value::<i64>("optional int64 a;", absent), &[text, "invalid type: unit value, expected i64"]);
    let latin_1 = Column::Texts(vec![b"caf\xe9"]);
    check_refused(value::<String>("required binary a;", latin_1), &[text, "the bytes are not UTF-8 text"]);
    let latin_1 = Column::Texts(vec![b"caf\xe9"]);
    let undecodable = "a.parquet, row group 0, row 0: the row cannot be decoded: ";
    check_refused(value::<String>("required binary a (UTF8);", latin_1), &[undecodable]);
    let months = Column::Fixed(vec![vec![0; 12]]);
    let unknown = "the column \"a\" of";
    let interval = value::<Vec<u8>>("required fixed_len_byte_array(12) a (INTERVAL);", months);
    check_refused(interval, &[unknown, "FIXED_LEN_BYTE_ARRAY (INTERVAL), which this reader does not know"]);

    let (_folder, path) = reviews(0, &[2, 2]);
    let dataset = ParquetDataset::<BTreeMap<String, String>>::from_files([&path]).unwrap();
    check_refused(dataset.get(3), &["a.parquet, row group 1, row 1: ", "column \"label\": invalid type"]);
    #[derive(Debug, Deserialize)]
    struct Stars {
        #[allow(dead_code)]
        stars: i64,
    }
    let dataset = ParquetDataset::<Stars>::from_files([&path]).unwrap();
    check_refused(dataset.get(1), &["missing field `stars`; it has the columns [\"sentence\", \"label\""]);
    let pairs = ParquetDataset::<(String, i64)>::from_files([&path]).unwrap();
    check_refused(pairs.get(1), &["4 columns found, but 2 wanted by the tuple"]);
    check_refused(ParquetDataset::<i64>::from_files([&path]).unwrap().get(0), &["a row of several columns becomes"]);
}

#[test]
fn damaged_files_are_errors() {
    let (folder, path) = reviews(0, &[100, 100]);
    let good = std::fs::read(&path).unwrap();
    let open = |path: &Path| ParquetDataset::<Review>::from_files([path]);
    check_refused(open(folder.path()), &["is a folder"]);
    check_refused(open(&folder.path().join("absent.parquet")), &["cannot open", "absent.parquet"]);
    check_refused(ParquetDataset::<Review>::from_files([""; 0]), &["no file was given"]);
    for length in [0, 4, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        check_refused(open(&path), &["a.parquet is not a readable Parquet file"]);
    }
    std::fs::write(&path, &good).unwrap();
    let dataset = open(&path).unwrap();
    std::fs::write(&path, &good[..20]).unwrap();
    check_refused(dataset.get(150), &["a.parquet ends at byte 20, but had"]);
    std::fs::write(&path, &good).unwrap();
    assert_eq!(dataset.get(150).unwrap(), review(150), "what failed once is tried again");
}

#[test]
fn no_flipped_byte_panics() {
    let (_folder, path) = reviews(0, &[5]);
    let good = std::fs::read(&path).unwrap();
    let mut num_refused = 0;
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, bytes).unwrap();
        let read = ParquetDataset::<Review>::from_files([&path])
            .and_then(|dataset| (0..dataset.len().min(10)).try_for_each(|index| dataset.get(index).map(|_| ())));
        num_refused += usize::from(read.is_err_and(|error| error.is_data()));
    }
    assert!(good.len() / 4 < num_refused, "{num_refused} of {} damaged files were refused", good.len());
}

#[test]
fn the_file_of_the_documentation_holds_what_its_examples_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/readers/reviews.parquet");
    let dataset = ParquetDataset::<(String, i64)>::from_files([&path]).unwrap();
    assert_eq!(rows(&dataset), [("a joy to watch".to_owned(), 1), ("two lost hours".to_owned(), 0)]);
}
