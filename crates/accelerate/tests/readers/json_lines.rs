//! JSON lines.

use super::{assert_shareable, check_refused, file, rows};
use accelerate::data::Dataset;
use accelerate::data::readers::{JsonLinesDataset, Position};
use serde::Deserialize;
use std::fmt::Write;
use std::path::Path;

#[derive(Debug, Deserialize, PartialEq)]
struct Review {
    text: String,
    stars: Option<u8>,
}

/// `(text, line)` of every row of a good file.
#[track_caller]
fn check(content: impl AsRef<[u8]>, wanted: &[(&str, u64)]) {
    let (_folder, path) = file("a.jsonl", content);
    let dataset = JsonLinesDataset::<Review>::from_files([&path]).unwrap();
    let line = |index| match dataset.place(index).unwrap().position {
        Position::Line(line) => line,
        other => panic!("{other}"),
    };
    let texts = rows(&dataset).into_iter().map(|row| row.text);
    let found: Vec<_> = texts.enumerate().map(|(index, text)| (text, line(index))).collect();
    let wanted: Vec<_> = wanted.iter().map(|&(text, line)| (text.to_owned(), line)).collect();
    assert_eq!(found, wanted);
}

#[test]
fn lines_become_rows() {
    check("{\"text\": \"a\", \"stars\": 1}\n{\"text\": \"b\"}\n", &[("a", 1), ("b", 2)]);
    check("{\"text\": \"no final newline\"}", &[("no final newline", 1)]);
    check("\n \t\r\n{\"text\": \"blank\"}\r\n\r\n  {\"text\": \"lines\"}\r\n\n", &[("blank", 3), ("lines", 5)]);
    check("\u{feff}{\"text\": \"marked\"}\n", &[("marked", 1)]);
    check("{\"text\": \"傑\\u4f5c\\n👍\"}\n", &[("傑作\n👍", 1)]);
    check("", &[]);
    check("\n\r\n", &[]);
}

#[test]
fn any_row_of_a_long_file_is_found_with_its_line() {
    // Longer than what is read at once, so that lines cross buffers.
    let long = "x".repeat(70_000);
    let mut content = String::new();
    for number in 0..50 {
        write!(content, "{{\"text\": \"{number}{long}\"}}\n\n").unwrap();
    }
    let (_folder, path) = file("long.jsonl", content);
    let dataset = JsonLinesDataset::<Review>::from_files([&path]).unwrap();
    for index in [49, 0, 17, 16, 15, 31] {
        assert!(dataset.get(index).unwrap().text.starts_with(&format!("{index}x")), "row {index}");
        assert_eq!(dataset.place(index).unwrap().position, Position::Line(2 * index as u64 + 1));
    }
}

#[test]
fn several_files_are_one_dataset() {
    let (_a, first) = file("first.jsonl", "1\n2\n");
    let (_b, empty) = file("empty.jsonl", "");
    let (_c, last) = file("last.jsonl", "\n3\nfour\n");
    let dataset = JsonLinesDataset::<i64>::from_files([&first, &empty, &last]).unwrap();
    assert_shareable(&dataset);
    assert_eq!(dataset.len(), 4);
    assert_eq!((dataset.get(2).unwrap(), dataset.get(0).unwrap()), (3, 1));
    assert_eq!(dataset.place(2).unwrap().path, last);
    check_refused(dataset.get(3), &["last.jsonl, line 3: not valid JSON"]);
    check_refused(dataset.get(4), &["row 4 does not exist: the dataset has 4 rows"]);
    check_refused(dataset.place(4), &["row 4 does not exist"]);
}

/// The last row of `content` is refused.
#[track_caller]
fn check_row_refused(content: impl AsRef<[u8]>, message: &str) {
    let (_folder, path) = file("a.jsonl", content);
    let dataset = JsonLinesDataset::<Review>::from_files([&path]).unwrap();
    check_refused(dataset.get(dataset.len() - 1), &["a.jsonl, ", message]);
}

#[test]
fn malformed_rows_are_named_by_line() {
    let good = "{\"text\": \"a\"}\n\n";
    check_row_refused(format!("{good}{{\"text\": \"cut o"), "line 3: not valid JSON: EOF while parsing a string");
    check_row_refused(
        format!("{good}{{\"stars\": 1}}"),
        "line 3: the row does not have the wanted form: missing field `text`",
    );
    check_row_refused(format!("{good}{{\"text\": 5}}"), "line 3: the row does not have the wanted form: invalid type");
    check_row_refused(
        format!("{good}{{\"text\": \"a\", \"stars\": 256}}"),
        "invalid value: integer `256`, expected u8",
    );
    check_row_refused(format!("{good}{{\"text\": \"a\"}} {{}}"), "line 3: not valid JSON: trailing characters");
    check_row_refused(b"{\"text\": \"caf\xe9\"}", "line 1: the bytes are not UTF-8 text");
    check_row_refused("[\n", "line 1: not valid JSON");
    check_row_refused("\0\0\0\0", "line 1: not valid JSON");
}

#[test]
fn what_is_no_readable_file_is_refused_when_it_is_opened() {
    let (folder, path) = file("a.jsonl", "1\n2\n");
    let open = |path: &Path| JsonLinesDataset::<i64>::from_files([path]);
    check_refused(open(folder.path()), &["is a folder"]);
    check_refused(open(&folder.path().join("absent.jsonl")), &["cannot open", "absent.jsonl", "No such file"]);
    check_refused(JsonLinesDataset::<i64>::from_files([""; 0]), &["no file was given"]);
    let dataset = open(&path).unwrap();
    std::fs::write(&path, "1\n").unwrap();
    check_refused(dataset.get(1), &["a.jsonl ends at byte 2, but had 4 bytes"]);
}
