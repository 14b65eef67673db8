//! Comma- and tab-separated values.

use super::{assert_shareable, check_refused, file, rows};
use accelerate::data::Dataset;
use accelerate::data::readers::{CsvDataset, CsvOptions, Position};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

#[derive(Debug, Deserialize, PartialEq)]
struct Review {
    text: String,
    stars: i64,
}

/// `(text, stars, line)` of every row of a good file.
#[track_caller]
fn check(name: &str, content: impl AsRef<[u8]>, wanted: &[(&str, i64, u64)]) {
    let (_folder, path) = file(name, content);
    let dataset = CsvDataset::<Review>::from_files([&path]).unwrap_or_else(|error| panic!("{error}"));
    let line = |index| match dataset.place(index).unwrap().position {
        Position::Line(line) => line,
        other => panic!("{other}"),
    };
    let found: Vec<_> =
        rows(&dataset).into_iter().enumerate().map(|(index, row)| (row.text, row.stars, line(index))).collect();
    let wanted: Vec<_> = wanted.iter().map(|&(text, stars, line)| (text.to_owned(), stars, line)).collect();
    assert_eq!(found, wanted);
}

#[test]
fn records_become_rows() {
    check("a.csv", "text,stars\na,1\nb,2\n", &[("a", 1, 2), ("b", 2, 3)]);
    check("a.csv", "text,stars\na,1\nb,2", &[("a", 1, 2), ("b", 2, 3)]);
    check("a.csv", "text,stars\r\na,1\r\nb,2\r\n", &[("a", 1, 2), ("b", 2, 3)]);
    check("a.csv", "\n\r\ntext,stars\n\n\na,1\n\n\r\nb,2\n\n", &[("a", 1, 6), ("b", 2, 9)]);
    check("a.csv", "\u{feff}text,stars\na,1\n", &[("a", 1, 2)]);
    check("a.csv", "id,stars,text,,\n7,1,a,,\n", &[("a", 1, 2)]);
    check(
        "a.csv",
        "text,stars\n\"a, \"\"b\"\"\",1\n\"two\r\nlines\n\n\",2\nc,3\n",
        &[("a, \"b\"", 1, 2), ("two\r\nlines\n\n", 2, 3), ("c", 3, 7)],
    );
    check("a.tsv", "text\tstars\n\"a\t1\nit is \"b\", no\t2\n", &[("\"a", 1, 2), ("it is \"b\", no", 2, 3)]);
    check("A.TSV", "text\tstars\n傑作 👍\t1\n", &[("傑作 👍", 1, 2)]);
    check("a.csv", "text,stars\n", &[]);
    // A byte order mark is one only at the start of the file.
    check("a.csv", "text,stars\n\u{feff}a,1\n", &[("\u{feff}a", 1, 2)]);
}

#[test]
fn any_row_of_a_long_file_is_found_with_its_line() {
    // Records cross the buffers, line ends and all, and their fields the room for parsed ones.
    let long = "x,\n".repeat(20_000);
    let mut content = "text,stars\n".to_owned();
    for number in 0..40 {
        writeln!(content, "\"{number}{long}\",{number}\r\n\r").unwrap();
    }
    let (_folder, path) = file("long.csv", content);
    let dataset = CsvDataset::<Review>::from_files([&path]).unwrap();
    assert_eq!(dataset.len(), 40);
    for index in [39, 0, 17, 16, 15, 31] {
        let row = dataset.get(index).unwrap();
        assert_eq!((row.stars, row.text.len()), (index as i64, index.to_string().len() + long.len()));
        assert_eq!(dataset.place(index).unwrap().position, Position::Line(20_002 * index as u64 + 2));
    }
}

#[test]
fn rows_of_many_columns_are_counted() {
    let header: Vec<_> = (0..1000).map(|column| format!("c{column}")).collect();
    let (_folder, path) = file("wide.csv", format!("{}\n{}\n", header.join(","), vec!["1"; 1000].join(",")));
    let row = CsvDataset::<BTreeMap<String, i64>>::from_files([&path]).unwrap().get(0).unwrap();
    assert_eq!((row.len(), row["c999"]), (1000, 1));
}

#[test]
fn files_of_the_same_columns_are_one_dataset() {
    let (_a, first) = file("first.csv", "text,stars\na,1\n");
    let (_b, empty) = file("empty.csv", "text,stars\n");
    let (_c, last) = file("last.tsv", "text\tstars\nb\t2\nc\tthree\n");
    let dataset = CsvDataset::<Review>::from_files([&first, &empty, &last]).unwrap();
    assert_shareable(&dataset);
    assert_eq!(dataset.len(), 3);
    assert_eq!(dataset.get(1).unwrap(), Review { text: "b".to_owned(), stars: 2 });
    check_refused(dataset.get(2), &["last.tsv, line 3: column \"stars\" holds \"three\"", "invalid digit"]);
    check_refused(dataset.get(3), &["row 3 does not exist: the dataset has 3 rows"]);

    let (_d, other) = file("other.csv", "stars,text\n1,a\n");
    let refused = CsvDataset::<Review>::from_files([&first, &other]);
    check_refused(refused, &["other.csv has the columns [\"stars\", \"text\"]", "first.csv", "[\"text\", \"stars\"]"]);
}

#[test]
fn options_are_honoured() {
    let (_folder, path) = file("a.txt", "'a;''b';1\nc;2\n");
    let columns = Some(vec!["text".to_owned(), "stars".to_owned()]);
    let options = CsvOptions { delimiter: b';', quote: Some(b'\''), columns, ..CsvOptions::default() };
    let dataset = CsvDataset::<Review>::with_options([&path], &options).unwrap();
    let found: Vec<_> = rows(&dataset).into_iter().map(|row| row.text).collect();
    assert_eq!(found, ["a;'b", "c"]);
    assert_eq!(dataset.place(0).unwrap().position, Position::Line(1));

    let refused = |options| CsvDataset::<Review>::with_options([&path], &options);
    check_refused(refused(CsvOptions { delimiter: b'\n', ..options.clone() }), &["delimiter is \"\\n\""]);
    check_refused(
        refused(CsvOptions { quote: Some(b';'), ..options.clone() }),
        &["quote is \";\", but must be neither"],
    );
    let one = Some(vec!["text".to_owned()]);
    check_refused(refused(CsvOptions { columns: one, ..options }), &["a.txt, line 1: 2 fields found, 1 wanted"]);
}

/// The file cannot be opened.
#[track_caller]
fn check_file_refused(name: &str, content: impl AsRef<[u8]>, message: &str) {
    let (_folder, path) = file(name, content);
    check_refused(CsvDataset::<Review>::from_files([&path]), &[name, message]);
}

#[test]
fn rows_of_the_wrong_length_are_refused_when_a_file_is_opened() {
    check_file_refused("a.csv", "text,stars\na,1\n\nb\n", "a.csv, line 4: 1 fields found, 2 wanted");
    check_file_refused(
        "a.csv",
        "text,stars\na, b,1\n",
        "line 2: 3 fields found, 2 wanted; a text that contains commas",
    );
    check_file_refused("a.tsv", "text\tstars\na\tb\t1\n", "line 2: 3 fields found, 2 wanted");
    check_file_refused(
        "a.csv",
        "text,stars\n\"a,1\nb\",2,\"\n\n",
        "line 2: a quotation mark that opens in this row is never",
    );
    check_file_refused("a.csv", "text,stars\n\"a,1\nb\"\nc,2\n", "line 2: 1 fields found, 2 wanted; a quotation mark");
    // One column: the number of fields does not give the open quotation mark away.
    check_file_refused("a.csv", "text\n\"a\nb\nc", "line 2: a quotation mark that opens in this row is never closed");
    check_file_refused(
        "a.csv",
        "\"text,stars\na,1\n",
        "line 1: a quotation mark that opens in this row is never closed",
    );
}

#[test]
fn what_is_no_readable_file_is_refused_when_it_is_opened() {
    check_file_refused("a.csv", "", "a.csv is empty; wanted a first line with the names of the columns");
    check_file_refused("a.csv", "\n\r\n", "is empty");
    check_file_refused("a.csv", b"te\xffxt,stars\na,1\n", "line 1: the bytes are not UTF-8 text");
    let (folder, path) = file("a.csv", "text,stars\na,1\nb,2\n");
    let open = |path: &Path| CsvDataset::<Review>::from_files([path]);
    check_refused(open(folder.path()), &["is a folder"]);
    check_refused(open(&folder.path().join("absent.csv")), &["cannot open", "absent.csv"]);
    check_refused(CsvDataset::<Review>::from_files([""; 0]), &["no file was given"]);
    let dataset = open(&path).unwrap();
    std::fs::write(&path, "text,stars\na").unwrap();
    check_refused(dataset.get(1), &["a.csv ends at byte 12, but had 19 bytes"]);
    std::fs::write(&path, "text,stars\na,b,c,\n,").unwrap();
    check_refused(dataset.get(0), &["a.csv, line 2: 3 fields found, 2 wanted"]);
}

/// The last row of `content` is refused.
#[track_caller]
fn check_row_refused(content: impl AsRef<[u8]>, message: &str) {
    let (_folder, path) = file("a.csv", content);
    let dataset = CsvDataset::<Review>::from_files([&path]).unwrap();
    check_refused(dataset.get(dataset.len() - 1), &["a.csv, ", message]);
}

#[test]
fn malformed_rows_are_named_by_line() {
    check_row_refused(
        "text,stars\na,1\nb,1.0\n",
        "line 3: column \"stars\" holds \"1.0\", which does not fit: invalid digit",
    );
    check_row_refused("text,stars\na,\n", "line 2: column \"stars\" holds \"\"");
    check_row_refused(b"stars,text\n1,caf\xe9\n", "line 2: the bytes of column \"text\" are not UTF-8 text");
    check_row_refused(
        "text,rating\na,1\n",
        "line 2: the row does not have the wanted form: missing field `stars`; it has the columns [\"text\", \"rating\"]",
    );
}
