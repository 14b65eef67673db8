//! Files of labelled text: what is read, and what a person is told when a row is malformed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../crates/accelerate/tests/hostile/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared by several test programs")]
mod hostile;

use hostile::{Outcome, check_refused, outcome};
use nlp_example::readers::{DataError, Position, read};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use rstest::rstest;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

fn file(name: &str, content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path)
}

/// `(text, label, line)` of every row.
fn rows(name: &str, content: &str) -> Vec<(String, usize, u64)> {
    let (_folder, path) = file(name, content);
    let line = |position| match position {
        Position::Line(line) => line,
        other => panic!("a text file has lines, not {other}"),
    };
    let table = read(&path).unwrap_or_else(|error| panic!("{error}"));
    table.rows.into_iter().map(|row| (row.text, row.label, line(row.position))).collect()
}

#[rstest]
#[case::tsv("a.tsv", "good\t1\nbad\t0\n", &[("good", 1, 1), ("bad", 0, 2)])]
#[case::tsv_header("a.tsv", "sentence\tlabel\ngood\t1\n", &[("good", 1, 2)])]
#[case::no_final_newline("a.tsv", "good\t1\nbad\t0", &[("good", 1, 1), ("bad", 0, 2)])]
#[case::windows_lines("a.tsv", "text\tlabel\r\ngood\t1\r\nbad\t0\r\n", &[("good", 1, 2), ("bad", 0, 3)])]
#[case::blank_lines("a.tsv", "\n\ngood\t1\n\n\nbad\t0\n\n", &[("good", 1, 3), ("bad", 0, 6)])]
#[case::quotes_are_plain_in_tsv("a.tsv", "\"good\t1\nit is \"bad\"\t0\n", &[("\"good", 1, 1), ("it is \"bad\"", 0, 2)])]
#[case::byte_order_mark("a.tsv", "\u{feff}label\ttext\n1\tgood\n", &[("good", 1, 2)])]
#[case::any_order_and_more("a.csv", "id,LABEL,Text\n7,1,good\n8,0,bad\n", &[("good", 1, 2), ("bad", 0, 3)])]
#[case::sentence_before_text("a.csv", "text,label,sentence\nno,1,yes\n", &[("yes", 1, 2)])]
#[case::csv_quotes("a.csv", "\"good, very\",1\n\"two\nlines\",0\nbad,0\n",
    &[("good, very", 1, 1), ("two\nlines", 0, 2), ("bad", 0, 4)])]
#[case::white_space("a.csv", "  good  , 1 \n", &[("good", 1, 1)])]
#[case::capital_extension("A.CSV", "good,1\n", &[("good", 1, 1)])]
#[case::json("a.jsonl", "{\"text\": \"good\", \"label\": 1}\n\n {\"label\":0,\"sentence\":\"b\\u0061d\",\"id\":3}\r\n",
    &[("good", 1, 1), ("bad", 0, 3)])]
#[case::json_other_name("a.json", "{\"text\": \"good\", \"labels\": 1}", &[("good", 1, 1)])]
#[case::other_scripts("a.tsv", "傑作\t1\nchef-d'œuvre 👍\t1\n", &[("傑作", 1, 1), ("chef-d'œuvre 👍", 1, 2)])]
fn good_files(#[case] name: &str, #[case] content: &str, #[case] wanted: &[(&str, usize, u64)]) {
    let wanted: Vec<_> = wanted.iter().map(|&(text, label, line)| (text.to_owned(), label, line)).collect();
    assert_eq!(rows(name, content), wanted);
}

#[rstest]
#[case::words_for_labels(
    "a.tsv",
    "fine\t1\ngood\tpositive\n",
    "line 2: the label is \"positive\"; wanted a whole number"
)]
#[case::words_in_line_one("a.tsv", "good\tpositive\n", "line 1: the label is \"positive\"")]
#[case::fractions("a.csv", "good,1.0\n", "line 1: the label is \"1.0\"")]
#[case::no_label("a.csv", "good,\n", "line 1: the label is \"\"")]
#[case::negative("a.tsv", "good\t1\nbad\t-1\n", "line 2: the label is -1; wanted")]
#[case::huge("a.tsv", "good\t99999999999999999999\n", "line 1: the label is \"99999999999999999999\"")]
#[case::one_field("a.tsv", "good\t1\nbad\n", "line 2: 1 fields found, 2 wanted")]
#[case::three_fields("a.tsv", "good\t1\n\nbad\tworse\t0\n", "line 3: 3 fields found, 2 wanted")]
#[case::unquoted_comma(
    "a.csv",
    "good,1\nbad, really,0\n",
    "line 2: 3 fields found, 2 wanted; a text that contains commas"
)]
#[case::unclosed_quote(
    "a.csv",
    "good,1\n\"bad,0\nfine,1\n",
    "line 2: a quotation mark that opens in this row is never closed"
)]
#[case::header_counts("a.csv", "id,text,label\n1,good,1\nbad,0\n", "line 3: 2 fields found, 3 wanted")]
#[case::no_text_column(
    "a.csv",
    "review,label\ngood,1\n",
    "columns [\"review\", \"label\"]; wanted a column named sentence or text"
)]
#[case::no_label_column(
    "a.tsv",
    "text\tstars\ngood\t1\n",
    "columns [\"text\", \"stars\"]; wanted a column named label or labels"
)]
#[case::empty_text("a.tsv", "good\t1\n   \t0\n", "line 2: the text is empty")]
#[case::latin_1("a.tsv", b"good\t1\ncaf\xe9\t1\n", "line 2: the bytes of column \"text\" are not UTF-8")]
#[case::binary("a.csv", b"\x00\xff\xfe", "line 1: the bytes are not UTF-8")]
#[case::latin_1_json("a.jsonl", b"{\"text\": \"caf\xe9\", \"label\": 1}", "line 1: the bytes are not UTF-8")]
#[case::broken_json(
    "a.jsonl",
    "{\"text\": \"a\", \"label\": 1}\n{\"text\": \"a\",\n",
    "line 2: not valid JSON: EOF while parsing"
)]
#[case::json_array("a.json", "[{\"text\": \"a\", \"label\": 1}]", "line 1: found an array; wanted an object")]
#[case::json_number("a.jsonl", "7\n", "line 1: found 7; wanted an object")]
#[case::json_no_text(
    "a.jsonl",
    "{\"review\": \"a\", \"label\": 1}",
    "line 1: the keys are [\"label\", \"review\"]; wanted a key named sentence or text"
)]
#[case::json_no_label(
    "a.jsonl",
    "{\"text\": \"a\"}",
    "line 1: the keys are [\"text\"]; wanted a key named label or labels"
)]
#[case::json_null_text("a.jsonl", "{\"text\": null, \"label\": 1}", "line 1: the text is null; wanted a string")]
#[case::json_text_label(
    "a.jsonl",
    "{\"text\": \"a\", \"label\": \"1\"}",
    "line 1: the label is \"1\"; wanted a whole number"
)]
#[case::json_true("a.jsonl", "{\"text\": \"a\", \"label\": true}", "line 1: the label is true; wanted a whole number")]
#[case::json_fraction(
    "a.jsonl",
    "{\"text\": \"a\", \"label\": 0.5}",
    "line 1: the label is 0.5; wanted a whole number"
)]
#[case::json_negative("a.jsonl", "{\"text\": \"a\", \"label\": -3}", "line 1: the label is -3; wanted")]
#[case::empty("a.tsv", "", "is empty; wanted a first line")]
#[case::only_blank("a.jsonl", "\n \n", "holds no rows")]
#[case::only_header("a.csv", "sentence,label\n", "holds no rows")]
#[case::no_extension("train", "good\t1\n", "the file name has no extension; wanted .tsv, .csv, .jsonl or .parquet")]
#[case::other_extension("a.xlsx", "good\t1\n", "the extension .xlsx is not known")]
#[case::no_parquet("a.parquet", "good\t1\n", "not a readable Parquet file")]
fn malformed_files(#[case] name: &str, #[case] content: impl AsRef<[u8]>, #[case] message: &str) {
    let (_folder, path) = file(name, content);
    let error = read(&path).expect_err("the file is malformed").to_string();
    assert!(error.contains(message), "{error}");
    assert!(error.contains(&path.display().to_string()), "the file is not named: {error}");
}

#[test]
fn a_missing_file_is_named() {
    let error = read(&PathBuf::from("no/such/file.tsv")).unwrap_err();
    assert!(matches!(error, DataError::Reader(_)));
    assert!(error.to_string().starts_with("cannot open no/such/file.tsv: "), "{error}");
}

#[rstest]
#[case::gap("a\t0\nb\t2\nc\t4\n", "labels go up to 4, but no row has label 1")]
#[case::not_from_zero("a\t1\nb\t2\n", "labels go up to 2, but no row has label 0")]
#[case::far_away("a\t0\nb\t9000000000000000000\n", "no row has label 1")]
#[case::one_label("a\t0\nb\t0\n", "all 2 rows have label 0")]
fn labels_must_count_from_zero(#[case] content: &str, #[case] message: &str) {
    let (_folder, path) = file("a.tsv", content);
    let error = read(&path).unwrap().num_labels().unwrap_err().to_string();
    assert!(error.contains(message) && error.contains("a.tsv"), "{error}");
}

#[test]
fn labels_beyond_the_model_are_refused_by_line() {
    let (_folder, path) = file("a.tsv", "text\tlabel\na\t0\nb\t1\nc\t2\n");
    let table = read(&path).unwrap();
    assert_eq!(table.num_labels().unwrap(), 3);
    table.check_labels(3).unwrap();
    let error = table.check_labels(2).unwrap_err().to_string();
    assert!(
        error.ends_with("a.tsv, line 4: the label is 2; wanted one of 0 to 1, the labels that the model knows"),
        "{error}"
    );
}

/// A Parquet file with two row groups of two rows.
fn parquet_file(schema: &str, labels: [[i64; 2]; 2], texts: &[u8]) -> (TempDir, PathBuf) {
    let (folder, path) = file("a.parquet", "");
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let output = std::fs::File::create(&path).unwrap();
    let compression = parquet::basic::Compression::SNAPPY;
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut writer = SerializedFileWriter::new(output, schema, Arc::new(properties)).unwrap();
    for labels in labels {
        let mut group = writer.next_row_group().unwrap();
        while let Some(mut column) = group.next_column().unwrap() {
            match column.untyped() {
                ColumnWriter::ByteArrayColumnWriter(writer) => {
                    let texts = [ByteArray::from(texts.to_vec()), ByteArray::from("second")];
                    writer.write_batch(&texts, None, None).unwrap()
                }
                ColumnWriter::Int32ColumnWriter(writer) => {
                    writer.write_batch(&labels.map(|label| label as i32), None, None).unwrap()
                }
                ColumnWriter::Int64ColumnWriter(writer) => writer.write_batch(&labels, None, None).unwrap(),
                ColumnWriter::DoubleColumnWriter(writer) => {
                    writer.write_batch(&labels.map(|label| label as f64), None, None).unwrap()
                }
                _ => panic!("no test has such a column"),
            };
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    (folder, path)
}

#[rstest]
#[case::as_the_hub_writes_it(
    "message m { required binary sentence (UTF8); required int64 label; required int32 idx; }"
)]
#[case::label_first("message m { required int32 label; required binary text (UTF8); }")]
#[case::small_integers("message m { required int32 label (INTEGER(8,false)); required binary text (UTF8); }")]
#[case::plain_bytes("message m { required double score; required binary text; required int64 labels; }")]
fn parquet_columns_are_found(#[case] schema: &str) {
    let (_folder, path) = parquet_file(schema, [[0, 1], [2, 0]], b"first");
    let table = read(&path).unwrap();
    let found: Vec<_> = table.rows.iter().map(|row| (row.text.as_str(), row.label)).collect();
    assert_eq!(found, [("first", 0), ("second", 1), ("first", 2), ("second", 0)]);
    assert_eq!(table.rows[3].position, Position::RowGroup { row_group: 1, row: 1 });
}

#[rstest]
#[case::negative(
    "message m { required binary text (UTF8); required int64 label; }",
    "row group 1, row 1: the label is -1"
)]
#[case::fraction(
    "message m { required binary text (UTF8); required double label; }",
    "row group 0, row 0: the label is 0"
)]
#[case::no_label(
    "message m { required binary text (UTF8); required int64 stars; }",
    "columns [\"text\", \"stars\"]; wanted a column named label"
)]
#[case::number_as_text(
    "message m { required int32 text; required int64 label; }",
    "row group 0, row 0: the text is 0; wanted a string"
)]
fn malformed_parquet(#[case] schema: &str, #[case] message: &str) {
    let (_folder, path) = parquet_file(schema, [[0, 1], [0, -1]], b"first");
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains(message) && error.contains("a.parquet"), "{error}");
}

#[test]
fn parquet_bytes_must_be_text() {
    let schema = "message m { required binary text; required int64 label; }";
    let (_folder, path) = parquet_file(schema, [[0, 1], [0, 1]], b"caf\xe9");
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("row group 0, row 0: the bytes are not UTF-8"), "{error}");
}

#[test]
fn a_truncated_parquet_file_is_an_error() {
    let schema = "message m { required binary text (UTF8); required int64 label; }";
    let (_folder, path) = parquet_file(schema, [[0, 1], [0, 1]], b"first");
    let bytes = std::fs::read(&path).unwrap();
    for length in [4, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = read(&path).unwrap_err();
        assert!(matches!(error, DataError::Reader(_)), "{error}");
    }
}

#[rstest]
#[case::the_same_column_twice("a.csv", "text,label,text\na,1,b\n", &["more than one column named \"text\""])]
#[case::the_same_column_in_capitals("a.csv", "text,label,Text\na,1,b\n", &["more than one column named \"text\""])]
#[case::the_same_label_with_a_space(
    "a.tsv",
    "label\ttext\tLABEL \n1\ta\t0\n",
    &["more than one column named \"label\""]
)]
#[case::the_same_key_twice(
    "a.jsonl",
    "{\"text\": \"a\", \"label\": 1, \"label\": 0}",
    &["line 1", "the key \"label\" occurs twice"]
)]
fn a_value_is_not_lost_in_silence(#[case] name: &str, #[case] content: &str, #[case] parts: &[&str]) {
    let (_folder, path) = file(name, content);
    check_refused(name, &path, parts, || read(&path));
}

#[test]
fn a_first_row_with_the_same_value_twice_is_no_header() {
    assert_eq!(rows("a.tsv", "1\t1\n0\t0\n"), [("1".to_owned(), 1, 1), ("0".to_owned(), 0, 2)]);
}

#[test]
fn large_files_make_short_messages() {
    let long = "x".repeat(80_000_000);
    let letters = "x".repeat(1_000_000);
    let columns: Vec<_> = (0..99_999).map(|column| format!("column_{column}")).collect();
    let keys: String = (0..100_000).map(|key| format!("\"key_{key}\": 1,")).collect();
    let limit = "longer than 16777216 bytes";
    for (case, name, content, parts) in [
        ("a line of 80 MB", "a.tsv", format!("good\t1\n{long}\t1\n"), ["line 2", limit]),
        ("a first line of 80 MB", "a.csv", long.clone(), ["line 1", limit]),
        ("an object of 80 MB", "a.jsonl", format!("{{\"text\": \"{long}\", \"label\": 1}}"), ["line 1", limit]),
        ("a label of 1 MB", "a.csv", format!("good,{letters}\n"), ["line 1", "the label is \"xxx"]),
        (
            "a label of 1 MB in JSON",
            "a.jsonl",
            format!("{{\"text\": \"a\", \"label\": \"{letters}\"}}"),
            ["line 1", "the label is \"xxx"],
        ),
        ("a text of 2 MB", "a.tsv", format!("good\t1\n{letters}{letters}\t1\n"), ["line 2", "wanted at most 1048576"]),
        (
            "100,000 columns",
            "a.csv",
            format!("text,{}", columns.join(",")),
            ["wanted a column named label", "99988 more]"],
        ),
        ("100,000 keys", "a.jsonl", format!("{{{keys}\"text\": \"a\"}}"), ["line 1", "99989 more]"]),
        (
            "a label of a million digits",
            "a.jsonl",
            format!("{{\"text\": \"a\", \"label\": 1{}}}", "0".repeat(1_000_000)),
            ["line 1", "number out of range"],
        ),
    ] {
        let (_folder, path) = file(name, content);
        check_refused(case, &path, &parts, || read(&path));
    }
}

#[rstest]
#[case::tsv("a.tsv")]
#[case::csv("a.csv")]
#[case::json("a.jsonl")]
#[case::parquet("a.parquet")]
fn a_file_with_a_hole_of_256_gb_is_refused(#[case] name: &str) {
    let (_folder, path) = file(name, "");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(256 << 30).unwrap();
    check_refused(name, &path, &[], || read(&path));
}

#[test]
fn a_long_text_is_read() {
    let (_folder, path) = file("a.tsv", format!("{}\t1\n", "good ".repeat(200_000)));
    let read = outcome("a text of 1 MB", &path, 1 << 20, || read(&path));
    assert!(matches!(read, Outcome::Read), "{read:?}");
}
