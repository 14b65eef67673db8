//! Arrow, both formats.

use super::{assert_shareable, check_refused, file, rows};
use accelerate::Result;
use accelerate::data::readers::{ArrowDataset, ArrowOptions, Position, arrow_column_names};
use accelerate::data::{DataLoader, Dataset};
use accelerate::tch::Tensor;
use arrow_array::builder::{
    FixedSizeListBuilder, Int32Builder, ListBuilder, MapBuilder, StringBuilder, StringDictionaryBuilder,
};
use arrow_array::types::*;
use arrow_array::*;
use arrow_buffer::OffsetBuffer;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{DictionaryHandling, FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef, UnionFields};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    File,
    Streaming,
}

const FORMATS: [Format; 2] = [Format::File, Format::Streaming];

#[derive(Debug, Deserialize, PartialEq)]
struct Review {
    sentence: String,
    label: Option<i64>,
    idx: u32,
}

fn written(format: Format, schema: &SchemaRef, batches: &[RecordBatch], options: IpcWriteOptions) -> Vec<u8> {
    let mut bytes = Vec::new();
    match format {
        Format::File => {
            let mut writer = FileWriter::try_new_with_options(&mut bytes, schema, options).unwrap();
            batches.iter().for_each(|batch| writer.write(batch).unwrap());
            writer.finish().unwrap();
        }
        Format::Streaming => {
            let mut writer = StreamWriter::try_new_with_options(&mut bytes, schema, options).unwrap();
            batches.iter().for_each(|batch| writer.write(batch).unwrap());
            writer.finish().unwrap();
        }
    }
    bytes
}

fn arrow_file(format: Format, schema: &SchemaRef, batches: &[RecordBatch]) -> (TempDir, PathBuf) {
    file("a.arrow", written(format, schema, batches, IpcWriteOptions::default()))
}

/// Record batches of these sizes, the rows counted from `first`: row `i` says `i`, and every third one has no label.
fn reviews(first: i64, num_rows: &[i64]) -> (SchemaRef, Vec<RecordBatch>) {
    let schema = Arc::new(Schema::new(vec![
        Field::new("sentence", DataType::Utf8, false),
        Field::new("label", DataType::Int64, true),
        Field::new("idx", DataType::UInt32, false),
        Field::new("score", DataType::Float64, false),
    ]));
    let mut next = first;
    let batch = |&num_rows: &i64| {
        let rows = next..next + num_rows;
        next = rows.end;
        let columns: [ArrayRef; 4] = [
            Arc::new(StringArray::from_iter_values(rows.clone().map(|row| format!("review {row}")))),
            Arc::new(Int64Array::from_iter(rows.clone().map(|row| (row % 3 != 0).then_some(row)))),
            Arc::new(UInt32Array::from_iter_values(rows.clone().map(|row| row as u32))),
            Arc::new(Float64Array::from_iter_values(rows.map(|row| row as f64))),
        ];
        RecordBatch::try_new(Arc::clone(&schema), columns.to_vec()).unwrap()
    };
    let batches = num_rows.iter().map(batch).collect();
    (schema, batches)
}

fn reviews_file(format: Format, first: i64, num_rows: &[i64]) -> (TempDir, PathBuf) {
    let (schema, batches) = reviews(first, num_rows);
    arrow_file(format, &schema, &batches)
}

fn review(row: i64) -> Review {
    Review { sentence: format!("review {row}"), label: (row % 3 != 0).then_some(row), idx: row as u32 }
}

fn select(columns: &[&str]) -> ArrowOptions {
    let columns = Some(columns.iter().map(|&column| column.to_owned()).collect());
    ArrowOptions { columns, ..ArrowOptions::default() }
}

#[test]
fn several_files_of_both_formats_are_one_dataset() {
    let (_a, first) = reviews_file(Format::Streaming, 0, &[3, 1]);
    let (_b, empty) = reviews_file(Format::File, 0, &[]);
    let (_c, last) = reviews_file(Format::File, 4, &[0, 5]);
    let dataset = ArrowDataset::<Review>::from_files([&first, &empty, &last]).unwrap();
    assert_shareable(&dataset);
    assert_eq!(rows(&dataset), (0..9).map(review).collect::<Vec<_>>());
    assert_eq!(dataset.columns(), ["sentence", "label", "idx", "score"]);
    let place = dataset.place(6).unwrap();
    assert_eq!((place.path, place.position), (last, Position::RecordBatch { record_batch: 1, row: 2 }));
    check_refused(dataset.get(9), &["row 9 does not exist: the dataset has 9 rows"]);
    check_refused(dataset.place(9), &["row 9 does not exist"]);
}

#[test]
fn any_order_and_any_cache_give_the_same_rows() {
    for format in FORMATS {
        let (_folder, path) = reviews_file(format, 0, &[10, 10, 10]);
        for cache_bytes in [0, 2000, 1 << 20] {
            let options = ArrowOptions { cache_bytes, ..ArrowOptions::default() };
            let dataset = ArrowDataset::<Review>::with_options([&path], &options).unwrap();
            for step in 0..60 {
                let row = step * 7 % 30;
                assert_eq!(dataset.get(row).unwrap(), review(row as i64), "{format:?}");
            }
        }
    }
}

#[test]
fn two_workers_shuffle_each_row_once() {
    let (_a, first) = reviews_file(Format::Streaming, 0, &[7, 20]);
    let (_b, last) = reviews_file(Format::File, 27, &[13]);
    let options = ArrowOptions { cache_bytes: 0, ..select(&["idx"]) };
    let dataset = ArrowDataset::<u32>::with_options([&first, &last], &options).unwrap();
    let collate = |rows: Vec<u32>| Ok(Tensor::f_from_slice(&rows.into_iter().map(i64::from).collect::<Vec<_>>())?);
    let loader = DataLoader::builder(dataset).batch_size(4).shuffle(true).num_workers(2).collate_fn(collate);
    let loader = loader.build().unwrap();
    let found: Vec<i64> =
        loader.iter().unwrap().flat_map(|batch| Vec::<i64>::try_from(batch.unwrap()).unwrap()).collect();
    let mut sorted = found.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..40).collect::<Vec<_>>());
    assert_ne!(found, sorted, "the order is shuffled");
}

#[test]
fn columns_come_in_the_order_in_which_they_are_wanted() {
    for format in FORMATS {
        let (_folder, path) = reviews_file(format, 0, &[5]);
        let wanted = ["score", "sentence", "label"];
        let dataset = ArrowDataset::<(f64, String, Option<i64>)>::with_options([&path], &select(&wanted)).unwrap();
        assert_eq!(dataset.get(4).unwrap(), (4.0, "review 4".to_owned(), Some(4)));
        assert_eq!(dataset.columns(), wanted);
        let one = ArrowDataset::<String>::with_options([&path], &select(&["sentence"])).unwrap();
        assert_eq!(one.get(2).unwrap(), "review 2");
        let labels = ArrowDataset::<Option<i64>>::with_options([&path], &select(&["label"])).unwrap();
        assert_eq!(rows(&labels), [None, Some(1), Some(2), None, Some(4)]);
        assert_eq!(arrow_column_names(&path).unwrap(), ["sentence", "label", "idx", "score"]);
    }
}

#[test]
fn wrong_columns_are_refused_when_a_file_is_opened() {
    let (_a, path) = reviews_file(Format::Streaming, 0, &[5]);
    let open = |columns: &[&str]| ArrowDataset::<BTreeMap<String, String>>::with_options([&path], &select(columns));
    let columns = "[\"sentence\", \"label\", \"idx\", \"score\"]";
    check_refused(open(&["sentence", "stars"]), &["a.arrow has the columns", columns, "a column named \"stars\""]);
    let once = "[\"label\", \"label\"], but must name each column once";
    check_refused(open(&["label", "label"]), &["ArrowOptions.columns is", once]);
    check_refused(open(&[]), &["must name each column once, and at least one"]);
    let schema = Arc::new(Schema::new(vec![Field::new("idx", DataType::UInt32, false)]));
    let (_b, other) = arrow_file(Format::File, &schema, &[]);
    check_refused(ArrowDataset::<(u32,)>::from_files([&path, &other]), &["has the columns [\"idx\"], but", columns]);
    let joined = ArrowDataset::<(u32,)>::with_options([&path, &other], &select(&["idx"])).unwrap();
    assert_eq!(joined.len(), 5);
}

/// The rows of a file with the column `a` between two others, which are not wanted.
fn values<T: serde::de::DeserializeOwned>(array: impl Array + 'static) -> Result<Vec<T>> {
    let array: ArrayRef = Arc::new(array);
    let row_numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(0..array.len() as i32));
    let columns = [("before", Arc::clone(&row_numbers)), ("a", array), ("after", row_numbers)];
    let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, array)| (name, array, true))).unwrap();
    let read = |format, columns: &[&str], compression| {
        let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
        let (_folder, path) = file("a.arrow", written(format, &batch.schema(), std::slice::from_ref(&batch), options));
        let dataset = ArrowDataset::<(T,)>::with_options([&path], &select(columns))?;
        (0..dataset.len()).map(|index| dataset.get(index).map(|(value,)| value)).collect::<Result<Vec<_>>>()
    };
    // The columns around it are found behind it, whatever it is made of.
    for format in FORMATS {
        let (_folder, path) = arrow_file(format, &batch.schema(), std::slice::from_ref(&batch));
        let around = ArrowDataset::<(i32, i32)>::with_options([&path], &select(&["after", "before"]))?;
        assert_eq!(rows(&around), (0..batch.num_rows() as i32).map(|row| (row, row)).collect::<Vec<_>>());
    }
    read(Format::File, &["a"], Some(CompressionType::LZ4_FRAME))?;
    read(Format::File, &["a"], None)?;
    read(Format::Streaming, &["a"], Some(CompressionType::ZSTD))
}

fn value<T: serde::de::DeserializeOwned>(array: impl Array + 'static) -> Result<T> {
    Ok(values(array)?.remove(0))
}

#[test]
fn numbers_text_and_bytes_are_themselves() {
    assert_eq!(values::<bool>(BooleanArray::from(vec![true, false])).unwrap(), [true, false]);
    assert_eq!(value::<i8>(Int8Array::from(vec![-5])).unwrap(), -5);
    assert_eq!(value::<i64>(Int16Array::from(vec![i16::MIN])).unwrap(), -32_768);
    assert_eq!(value::<i32>(Int32Array::from(vec![i32::MIN])).unwrap(), i32::MIN);
    assert_eq!(value::<i64>(Int64Array::from(vec![i64::MIN])).unwrap(), i64::MIN);
    assert_eq!(value::<u8>(UInt8Array::from(vec![250])).unwrap(), 250);
    assert_eq!(value::<u16>(UInt16Array::from(vec![u16::MAX])).unwrap(), u16::MAX);
    assert_eq!(value::<u32>(UInt32Array::from(vec![u32::MAX])).unwrap(), u32::MAX);
    assert_eq!(value::<u64>(UInt64Array::from(vec![u64::MAX])).unwrap(), u64::MAX);
    let half = <Float16Type as ArrowPrimitiveType>::Native::from_f32(0.5);
    let half = Float16Array::from_iter_values([half]);
    assert_eq!(value::<f32>(half).unwrap(), 0.5);
    assert_eq!(value::<f32>(Float32Array::from(vec![0.1])).unwrap(), 0.1);
    assert_eq!(value::<f64>(Float64Array::from(vec![0.1])).unwrap(), 0.1);
    assert_eq!(value::<i64>(Date32Array::from(vec![20_000])).unwrap(), 20_000);
    assert_eq!(value::<i64>(Time64NanosecondArray::from(vec![7])).unwrap(), 7);
    let instant = TimestampMicrosecondArray::from(vec![8]).with_timezone("Europe/Vilnius");
    assert_eq!(value::<i64>(instant).unwrap(), 8);
    assert_eq!(value::<i64>(DurationSecondArray::from(vec![9])).unwrap(), 9);
    let price = || Decimal128Array::from(vec![-1234]).with_precision_and_scale(9, 2).unwrap();
    assert_eq!(value::<f64>(price()).unwrap(), -12.34);
    assert_eq!(value::<String>(price()).unwrap(), "-12.34");

    let texts = ["", "text longer than the twelve bytes of a view", "short"];
    assert_eq!(values::<String>(StringArray::from_iter_values(texts)).unwrap(), texts);
    assert_eq!(values::<String>(LargeStringArray::from_iter_values(texts)).unwrap(), texts);
    assert_eq!(values::<String>(StringViewArray::from_iter_values(texts)).unwrap(), texts);
    let bytes = [vec![], vec![0, 255], vec![7; 20]];
    assert_eq!(values::<Vec<u8>>(BinaryArray::from_iter_values(&bytes)).unwrap(), bytes);
    assert_eq!(values::<Vec<u8>>(LargeBinaryArray::from_iter_values(&bytes)).unwrap(), bytes);
    assert_eq!(values::<Vec<u8>>(BinaryViewArray::from_iter_values(&bytes)).unwrap(), bytes);
    let fixed = FixedSizeBinaryArray::try_from_iter([[1u8, 2], [3, 4]].into_iter()).unwrap();
    assert_eq!(values::<Vec<u8>>(fixed).unwrap(), [[1, 2], [3, 4]]);
    assert_eq!(value::<String>(BinaryArray::from(vec![&b"text"[..]])).unwrap(), "text");

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Stars {
        One,
        Two,
    }
    assert_eq!(values::<Stars>(StringArray::from(vec!["two", "one"])).unwrap(), [Stars::Two, Stars::One]);
}

#[test]
fn what_is_null_is_none() {
    assert_eq!(values::<Option<i32>>(Int32Array::from(vec![Some(1), None])).unwrap(), [Some(1), None]);
    assert_eq!(values::<Option<bool>>(BooleanArray::from(vec![None, Some(true)])).unwrap(), [None, Some(true)]);
    let texts = values::<Option<String>>(StringArray::from(vec![Some("a"), None])).unwrap();
    assert_eq!(texts, [Some("a".to_owned()), None]);
    assert_eq!(values::<Option<i32>>(NullArray::new(2)).unwrap(), [None, None]);
    let text = "record batch 0, row 1: the row does not have the wanted form: column \"a\": invalid type: unit value";
    check_refused(values::<i32>(Int32Array::from(vec![Some(1), None])), &[text]);
}

type Lists = Vec<Option<Vec<Option<i32>>>>;

#[test]
fn lists_structs_and_maps_nest() {
    let lists: Lists = vec![Some(vec![Some(5), None, Some(6)]), None, Some(vec![]), Some(vec![Some(7)])];
    let array = ListArray::from_iter_primitive::<Int32Type, _, _>(lists.clone());
    assert_eq!(values::<Option<Vec<Option<i32>>>>(array.clone()).unwrap(), lists);
    assert_eq!(values::<Option<Vec<Option<i32>>>>(array.slice(1, 3)).unwrap(), lists[1..]);
    let large = LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists.clone());
    assert_eq!(values::<Option<Vec<Option<i32>>>>(large).unwrap(), lists);
    let mut fixed = FixedSizeListBuilder::new(Int32Builder::new(), 2);
    for row in [Some([1, 2]), None, Some([3, 4])] {
        fixed.values().append_slice(&row.unwrap_or_default());
        fixed.append(row.is_some());
    }
    assert_eq!(values::<Option<[i32; 2]>>(fixed.finish()).unwrap(), [Some([1, 2]), None, Some([3, 4])]);
    let field = Arc::new(Field::new_list_field(array.data_type().clone(), true));
    let nested = ListArray::new(field, OffsetBuffer::from_lengths([3, 1]), Arc::new(array), None);
    assert_eq!(values::<Lists>(nested).unwrap(), [lists[..3].to_vec(), lists[3..].to_vec()]);
    let mut tokens = ListBuilder::new(StringBuilder::new());
    tokens.append_value([Some("a"), Some("joy")]);
    assert_eq!(value::<Vec<String>>(tokens.finish()).unwrap(), ["a", "joy"]);

    /// As `datasets` keeps images.
    #[derive(Debug, Deserialize, PartialEq)]
    struct Image {
        bytes: Option<Vec<u8>>,
        path: Option<String>,
    }
    let fields =
        Fields::from(vec![Field::new("bytes", DataType::Binary, true), Field::new("path", DataType::Utf8, true)]);
    let (bytes, paths) =
        (BinaryArray::from(vec![Some(&b"\x89PNG"[..]), None]), StringArray::from(vec![None, Some("b")]));
    let images = StructArray::new(fields, vec![Arc::new(bytes), Arc::new(paths)], None);
    let wanted =
        [Image { bytes: Some(b"\x89PNG".to_vec()), path: None }, Image { bytes: None, path: Some("b".to_owned()) }];
    assert_eq!(values::<Image>(images).unwrap(), wanted);

    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    map.keys().append_value("b");
    map.values().append_value(9);
    map.append(true).unwrap();
    let wanted = BTreeMap::from([("b".to_owned(), 9)]);
    assert_eq!(value::<BTreeMap<String, i32>>(map.finish()).unwrap(), wanted);
}

fn coded(texts: &[Option<&str>]) -> DictionaryArray<Int8Type> {
    let mut builder = StringDictionaryBuilder::new();
    builder.extend(texts.iter().copied());
    builder.finish()
}

fn coded_batch(texts: &[Option<&str>]) -> RecordBatch {
    let column: ArrayRef = Arc::new(coded(texts));
    RecordBatch::try_from_iter_with_nullable([("a", column, true)]).unwrap()
}

#[test]
fn dictionaries_are_looked_up() {
    let texts = [Some("red"), None, Some("green"), Some("red")];
    let owned = |texts: &[Option<&str>]| texts.iter().map(|text| text.map(str::to_owned)).collect::<Vec<_>>();
    assert_eq!(values::<Option<String>>(coded(&texts)).unwrap(), owned(&texts));
    // Each record batch has values of its own, in place of those before or in addition to them.
    let more = coded_batch(&[Some("red"), Some("green"), Some("blue")]);
    let batches = [coded_batch(&texts), more, coded_batch(&[Some("black")])];
    let wanted = owned(&[texts.to_vec(), vec![Some("red"), Some("green"), Some("blue"), Some("black")]].concat());
    for handling in [DictionaryHandling::Resend, DictionaryHandling::Delta] {
        let options = IpcWriteOptions::default().with_dictionary_handling(handling);
        let content = written(Format::Streaming, &batches[0].schema(), &batches, options);
        let (_folder, path) = file("a.arrow", content);
        for cache_bytes in [0, 1 << 20] {
            let options = ArrowOptions { cache_bytes, ..ArrowOptions::default() };
            let dataset = ArrowDataset::<(Option<String>,)>::with_options([&path], &options).unwrap();
            let mut found: Vec<_> = (0..8).rev().map(|index| dataset.get(index).unwrap().0).collect();
            found.reverse();
            assert_eq!(found, wanted);
        }
    }
}

#[test]
fn types_that_are_not_known_are_named_with_their_column() {
    let unknown = "the column \"a\" of";
    let months = IntervalYearMonthArray::from(vec![3]);
    check_refused(value::<i64>(months), &[unknown, "has the type Interval(YearMonth)", "ArrowOptions.columns"]);
    let ends = RunArray::<Int32Type>::try_new(&Int32Array::from(vec![2]), &Int32Array::from(vec![7])).unwrap();
    check_refused(value::<i64>(ends), &[unknown, "which this reader does not know"]);
    let fields =
        UnionFields::from_fields([Field::new("x", DataType::Int32, false), Field::new("y", DataType::Utf8, true)]);
    let children: Vec<ArrayRef> = vec![Arc::new(Int32Array::from(vec![1])), Arc::new(StringArray::from(vec!["b"]))];
    let union = UnionArray::try_new(fields, vec![0].into(), None, children).unwrap();
    check_refused(value::<i64>(union), &[unknown, "Union"]);
}

#[test]
fn values_that_do_not_fit_are_named_by_column_and_row() {
    let text = "a.arrow, record batch 0, row 0: the row does not have the wanted form: column \"a\": ";
    let wide = || Int64Array::from(vec![300]);
    check_refused(value::<u8>(wide()), &[text, "invalid value: integer `300`, expected u8"]);
    check_refused(value::<String>(wide()), &[text, "invalid type: integer `300`, expected a string"]);
    check_refused(value::<String>(BinaryArray::from(vec![&b"caf\xe9"[..]])), &[text, "the bytes are not UTF-8 text"]);

    let (_folder, path) = reviews_file(Format::File, 0, &[2, 2]);
    let dataset = ArrowDataset::<BTreeMap<String, String>>::from_files([&path]).unwrap();
    check_refused(dataset.get(3), &["a.arrow, record batch 1, row 1: ", "column \"label\": invalid type"]);
    #[derive(Debug, Deserialize)]
    struct Stars {
        #[allow(dead_code)]
        stars: i64,
    }
    let dataset = ArrowDataset::<Stars>::from_files([&path]).unwrap();
    check_refused(dataset.get(1), &["missing field `stars`; it has the columns [\"sentence\", \"label\""]);
    let pairs = ArrowDataset::<(String, i64)>::from_files([&path]).unwrap();
    check_refused(pairs.get(1), &["4 columns found, but 2 wanted by the tuple"]);
    check_refused(ArrowDataset::<i64>::from_files([&path]).unwrap().get(0), &["a row of several columns becomes"]);
}

/// All rows, at most so many.
fn read_all(path: &Path, columns: &ArrowOptions) -> Result<usize> {
    let dataset = ArrowDataset::<BTreeMap<String, serde::de::IgnoredAny>>::with_options([path], columns)?;
    let num_rows = dataset.len().min(20);
    (0..num_rows).try_for_each(|index| dataset.get(index).map(|_| ()))?;
    Ok(num_rows)
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_an_error() {
    for format in FORMATS {
        let (_folder, path) = reviews_file(format, 0, &[2, 3]);
        let good = std::fs::read(&path).unwrap();
        let cut = File::options().write(true).open(&path).unwrap();
        for length in (0..good.len()).rev() {
            cut.set_len(length as u64).unwrap();
            check_refused(ArrowDataset::<Review>::from_files([&path]), &["a.arrow is not a readable Arrow file"]);
        }
        std::fs::write(&path, [&good[..], &good[..]].concat()).unwrap();
        let twice = ArrowDataset::<Review>::from_files([&path]);
        match format {
            Format::Streaming => check_refused(twice, &["the stream ends at byte"]),
            Format::File => assert_eq!(twice.map(|dataset| dataset.len()).ok(), Some(5), "the last footer counts"),
        }
    }
}

#[test]
fn what_is_no_arrow_file_is_an_error() {
    let (folder, path) = reviews_file(Format::Streaming, 0, &[100, 100]);
    let good = std::fs::read(&path).unwrap();
    let open = |path: &Path| ArrowDataset::<Review>::from_files([path]);
    check_refused(open(folder.path()), &["is a folder"]);
    check_refused(open(&folder.path().join("absent.arrow")), &["cannot open", "absent.arrow"]);
    check_refused(ArrowDataset::<Review>::from_files([""; 0]), &["no file was given"]);
    for content in ["sentence,label\na joy to watch,1\n", "PAR1", "\0\0\0\0", "ARROW1\0\0\0\0\0\0ARROW1"] {
        std::fs::write(&path, content).unwrap();
        check_refused(open(&path), &["a.arrow is not a readable Arrow file"]);
        check_refused(arrow_column_names(&path), &["a.arrow is not a readable Arrow file"]);
    }
    std::fs::write(&path, &good).unwrap();
    let dataset = open(&path).unwrap();
    std::fs::write(&path, &good[..20]).unwrap();
    check_refused(dataset.get(150), &["a.arrow ends at byte 20, but had"]);
    std::fs::write(&path, vec![0; good.len()]).unwrap();
    check_refused(dataset.get(150), &["a.arrow, record batch 1, row 50: the row cannot be decoded"]);
    std::fs::write(&path, &good).unwrap();
    assert_eq!(dataset.get(150).unwrap(), review(150), "what failed once is tried again");
}

#[test]
fn no_flipped_byte_panics() {
    let (schema, batches) = reviews(0, &[5]);
    let compressed = |codec| IpcWriteOptions::default().try_with_compression(Some(codec)).unwrap();
    let mut files: Vec<Vec<u8>> =
        FORMATS.iter().map(|&format| written(format, &schema, &batches, IpcWriteOptions::default())).collect();
    files.push(written(Format::Streaming, &schema, &batches, compressed(CompressionType::ZSTD)));
    files.push(written(Format::Streaming, &schema, &batches, compressed(CompressionType::LZ4_FRAME)));
    let coded = coded_batch(&[Some("red"), None, Some("green")]);
    files.push(written(Format::File, &coded.schema(), &[coded], IpcWriteOptions::default()));
    let lists = vec![Some(vec![Some(5), None]), None, Some(vec![])];
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
    let lists = RecordBatch::try_from_iter([("a", lists)]).unwrap();
    files.push(written(Format::Streaming, &lists.schema(), &[lists], IpcWriteOptions::default()));
    for good in files {
        let (_folder, path) = file("a.arrow", &good);
        assert!(0 < read_all(&path, &ArrowOptions::default()).unwrap());
        let damaged = File::options().write(true).open(&path).unwrap();
        let mut num_refused = 0;
        for (at, byte) in good.iter().enumerate() {
            for change in [1 << (at % 8), 0xff] {
                damaged.write_all_at(&[byte ^ change], at as u64).unwrap();
                let read = read_all(&path, &ArrowOptions::default());
                num_refused += usize::from(read.is_err_and(|error| error.is_data()));
            }
            damaged.write_all_at(&[*byte], at as u64).unwrap();
        }
        assert!(good.len() / 8 < num_refused, "{num_refused} of {} damaged files were refused", 2 * good.len());
    }
}

#[test]
fn compressed_bytes_that_promise_too_much_are_refused() {
    let column: ArrayRef = Arc::new(Int64Array::from(vec![7; 1000]));
    let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
    for codec in [CompressionType::ZSTD, CompressionType::LZ4_FRAME] {
        let options = IpcWriteOptions::default().try_with_compression(Some(codec)).unwrap();
        let content = written(Format::Streaming, &batch.schema(), std::slice::from_ref(&batch), options);
        let length = 8000i64.to_le_bytes();
        let at = content.windows(8).rposition(|bytes| bytes == length).unwrap();
        for promised in [i64::MAX, 1 << 50, i64::MIN, 8001] {
            let mut content = content.clone();
            content[at..at + 8].copy_from_slice(&promised.to_le_bytes());
            let (_folder, path) = file("a.arrow", content);
            let read = ArrowDataset::<(i64,)>::from_files([&path]).unwrap().get(999);
            let is_too_large = 8001 < promised;
            let message = if is_too_large { "the record batch becomes" } else { "the row cannot be decoded" };
            check_refused(read, &["a.arrow, record batch 0, row 999: ", message]);
        }
    }
}

#[test]
fn the_file_of_the_documentation_holds_what_its_examples_say() {
    // Written by pyarrow 26.0.1, as `datasets` does.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/readers/reviews.arrow");
    let dataset = ArrowDataset::<(String, i64)>::from_files([&path]).unwrap();
    assert_eq!(rows(&dataset), [("a joy to watch".to_owned(), 1), ("two lost hours".to_owned(), 0)]);
}
