//! Comma- and tab-separated files that were made to do harm, or damaged.

use super::file;
use super::hostile::{Outcome, check_refused, outcome};
use accelerate::data::Dataset;
use accelerate::data::readers::{CsvDataset, CsvOptions, csv_column_names};
use serde::Deserialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Debug, Deserialize)]
#[allow(dead_code, reason = "what is refused is not looked at")]
struct Review {
    text: String,
    stars: i64,
}

/// Opens a file and reads all of its rows.
fn read(path: &Path) -> accelerate::Result<usize> {
    let dataset = CsvDataset::<Review>::from_files([path])?;
    (0..dataset.len()).try_for_each(|index| dataset.get(index).map(|_| ()))?;
    Ok(dataset.len())
}

fn check(case: &str, name: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    let (_folder, path) = file(name, content);
    check_refused(case, &path, parts, || read(&path));
}

#[test]
fn files_of_another_kind_are_not_taken_for_tables() {
    let cases: &[(&str, &[u8], &[&str])] = &[
        ("nothing", b"", &["is empty"]),
        ("a byte order mark alone", b"\xef\xbb\xbf", &["is empty"]),
        ("line ends alone", b"\n\r\n\n\r", &["is empty"]),
        ("UTF-16", b"\xff\xfet\0e\0x\0t\0\n\0", &["line 1", "not UTF-8"]),
        ("gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff\x4b\xcc", &["line 1", "not UTF-8"]),
        ("a spreadsheet", b"PK\x03\x04\x14\x00\x06\x00\xff\n", &["line 1", "not UTF-8"]),
        ("a web page", b"<!DOCTYPE html>\n<title>404, not found</title>\n", &["line 2", "2 fields found, 1 wanted"]),
        (
            "a pointer of Git LFS",
            b"version https://git-lfs\noid sha256:0\nsize 7\n",
            &["line 2", "missing field `text`"],
        ),
        ("semicolons", b"text;stars\na;1\n", &["line 2", "missing field `text`", "[\"text;stars\"]"]),
        ("zeros behind the header", b"text,stars\n\0\0\0\0\0\0", &["line 2", "1 fields found, 2 wanted"]),
        ("zeros in a name", b"te\0xt,stars\na,1\n", &["line 2", "missing field `text`"]),
        ("two byte order marks", b"\xef\xbb\xbf\xef\xbb\xbftext,stars\na,1\n", &["line 2", "missing field `text`"]),
        ("marks of a merge", b"text,stars\na,1\n<<<<<<< HEAD\nb,2\n", &["line 3", "1 fields found, 2 wanted"]),
    ];
    for (case, content, parts) in cases {
        check(case, "a.csv", content, parts);
    }
}

#[test]
fn names_that_occur_twice_are_refused() {
    for (case, content, parts) in [
        ("side by side", "text,text,stars\na,b,1\n", ["columns 1 and 2", "both named \"text\""]),
        ("far apart", "stars,text,stars\n1,a,2\n", ["columns 1 and 3", "both named \"stars\""]),
        ("with a space", "text,stars,text \na,1,b\n", ["columns 1 and 3", "both named \"text\""]),
        ("in quotation marks", "\"text\",stars,text\na,1,b\n", ["columns 1 and 3", "a name of its own"]),
        ("in a file without rows", "text,stars,stars", ["columns 2 and 3", "both named \"stars\""]),
        ("behind columns without names", ",,text,,text\n,,a,,b\n", ["columns 3 and 5", "both named \"text\""]),
    ] {
        check(case, "a.csv", content, &parts);
    }
    check("in a tab-separated file", "a.tsv", "text\ttext\na\tb\n", &["columns 1 and 2", "both named \"text\""]);
    let columns = Some(vec!["a".to_owned(), "a".to_owned()]);
    let options = CsvOptions { columns, ..CsvOptions::default() };
    let (_folder, path) = file("a.csv", "1,2\n");
    check_refused("in the options", &path, &["columns 1 and 2"], || {
        CsvDataset::<(i64, i64)>::with_options([&path], &options)
    });
}

#[test]
fn malformed_rows_are_named_by_line_and_column() {
    let cases: &[(&str, &[u8], &[&str])] = &[
        ("an open quotation mark", b"text,stars\na,1\n\"b,2\nc,3\n", &["line 3", "never closed"]),
        ("an open quotation mark in the header", b"\"text,stars\na,1\n", &["line 1", "never closed"]),
        ("an odd number of quotation marks", b"text,stars\n\"\"\"\"\",1\n", &["line 2", "never closed"]),
        ("a quotation mark that closes too late", b"text,stars\n\"a,1\nb\"\n", &["line 2", "closed too late"]),
        ("a row that was cut off", b"text,stars\na,1\nb", &["line 3", "1 fields found, 2 wanted"]),
        ("a character that was cut off", b"stars,text\n1,\xf0\x9f\x91", &["line 2", "column \"text\"", "not UTF-8"]),
        ("Latin-1", b"text,stars\ncaf\xe9,1\n", &["line 2", "column \"text\"", "not UTF-8"]),
        ("an overlong zero", b"text,stars\n\xc0\x80,1\n", &["line 2", "column \"text\"", "not UTF-8"]),
        ("half of a surrogate pair", b"text,stars\n\xed\xa0\x80,1\n", &["line 2", "column \"text\"", "not UTF-8"]),
        ("a separator of thousands", b"text,stars\na,1,000\n", &["line 2", "3 fields found, 2 wanted"]),
        ("an exponent", b"text,stars\na,1e999\n", &["line 2", "column \"stars\" holds \"1e999\""]),
        ("a number of 20 digits", b"text,stars\na,99999999999999999999\n", &["column \"stars\"", "too large"]),
        ("no number", b"text,stars\na,NaN\n", &["line 2", "column \"stars\" holds \"NaN\""]),
        ("digits of another script", "text,stars\na,１\n".as_bytes(), &["column \"stars\" holds \"１\""]),
        ("a zero byte behind a number", b"text,stars\na,1\0\n", &["column \"stars\" holds \"1\\0\""]),
        ("a byte order mark in a number", "text,stars\na,\u{feff}1\n".as_bytes(), &["holds \"\\u{feff}1\""]),
        ("a fraction behind mixed line ends", b"text,stars\r\na,1\n\rb,2\r\n\nc,0.5\n", &["line 5", "\"0.5\""]),
    ];
    for (case, content, parts) in cases {
        check(case, "a.csv", content, parts);
    }
    check("a tab too many", "a.tsv", "text\tstars\na\tb\t1\n", &["line 2", "3 fields found, 2 wanted"]);
    check("spaces for tabs", "a.tsv", "text    stars\na       1\n", &["line 2", "missing field `text`"]);
    check("a line end in a text", "a.tsv", "text\tstars\n\"a\nb\"\t1\n", &["line 2", "1 fields found, 2 wanted"]);
}

#[test]
fn rows_without_an_end_are_refused() {
    let limit = "longer than 16777216 bytes";
    let long = "x".repeat(80_000_000);
    check("a line of 80 MB", "a.csv", &long, &["line 1", limit]);
    check("a line of 80 MB further down", "a.csv", format!("text,stars\na,1\n{long},2\n"), &["line 3", limit]);
    check("80 MB of fields", "a.tsv", "\t".repeat(80_000_000), &["line 1", limit]);
    let quoted = format!("text,stars\n\"{}", "a,1\n".repeat(20_000_000));
    check("a quotation mark in front of 80 MB", "a.csv", quoted, &["line 2", limit, "max_row_bytes"]);
    let (_folder, path) = file("a.csv", format!("text,stars\n{}\n", "x".repeat(30)));
    let options = CsvOptions { max_row_bytes: 29, ..CsvOptions::default() };
    check_refused("a row that is longer than the options say", &path, &["line 2", "longer than 29 bytes"], || {
        CsvDataset::<Review>::with_options([&path], &options)
    });
}

#[test]
fn a_row_of_the_longest_length_is_read() {
    for end in ["", "\n", "\r\n"] {
        let (_folder, path) = file("a.csv", format!("text,stars\n{},1{end}", "x".repeat(28)));
        let options = CsvOptions { max_row_bytes: 30 + u64::from(end.len() == 2), ..CsvOptions::default() };
        let dataset = CsvDataset::<Review>::with_options([&path], &options).unwrap();
        assert_eq!(dataset.get(0).unwrap().text.len(), 28);
    }
}

#[test]
fn files_with_holes_are_not_read_to_their_end() {
    for (case, start, parts) in [
        ("a hole of 256 GB", "", ["line 1", "longer than 16777216 bytes"]),
        ("rows in front of a hole", "text,stars\na,1\nb,2\n", ["line 4", "longer than 16777216 bytes"]),
        ("a hole in quotation marks", "text,stars\na,1\n\"", ["line 3", "longer than 16777216 bytes"]),
    ] {
        let (_folder, path) = file("a.csv", start);
        File::options().write(true).open(&path).unwrap().set_len(256 << 30).unwrap();
        check_refused(case, &path, &parts, || read(&path));
    }
}

#[test]
fn many_columns_make_short_messages() {
    let names = |count: usize| (0..count).map(|column| format!("c{column}")).collect::<Vec<_>>();
    let table = |names: &[String], rows: &str| format!("{}\n{rows}", names.join(","));
    let many = names(100_000);
    check("a million columns", "a.csv", table(&names(1_000_000), ""), &["1000000 columns", "at most 100000"]);
    check("a million commas", "a.csv", ",".repeat(1_000_000), &["1000001 columns", "at most 100000"]);
    check("a million fields", "a.csv", format!("text,stars\n{}", ",".repeat(999_999)), &["1000000 fields", "2 wanted"]);
    let ones = vec!["1"; 100_000].join(",");
    check("none of 100,000 is wanted", "a.csv", table(&many, &ones), &["line 2", "missing field", "and 99988 more]"]);
    let mut twice = many.clone();
    twice[99_999] = "c7".to_owned();
    check("two of 100,000 are the same", "a.csv", table(&twice, ""), &["columns 8 and 100000", "\"c7\""]);
    let (_folder, first) = file("first.csv", table(&many, ""));
    let mut other = many;
    other[70_000] = "other".to_owned();
    let (_folder, path) = file("other.csv", table(&other, ""));
    check_refused("one of 100,000 differs", &path, &["first.csv", "column 70001 is the first"], || {
        CsvDataset::<Review>::from_files([&first, &path])
    });
}

#[test]
fn long_names_and_values_make_short_messages() {
    let long = "x".repeat(1_000_000);
    check("a name of 1 MB", "a.csv", format!("{long},stars\na,1\n"), &["column 1", "1000000 bytes", "at most 4096"]);
    check(
        "a value of 1 MB",
        "a.csv",
        format!("text,stars\na,{long}\n"),
        &["line 2", "\"stars\" holds \"xxx", "1000000"],
    );
    let zeros = "\0".repeat(10_000_000);
    check("a value of 10 MB of zeros", "a.csv", format!("text,stars\na,{zeros}\n"), &["line 2", "holds \"\\0\\0"]);
    let digits = "9".repeat(10_000_000);
    check("a number of 10 MB", "a.csv", format!("text,stars\na,{digits}\n"), &["line 2", "column \"stars\""]);
    let names = (0..50).map(|column| "\u{feff}".repeat(1000) + &column.to_string()).collect::<Vec<_>>();
    let content = format!("{}\n{}\n", names.join(","), ",".repeat(49));
    check("names that are shown as escapes", "a.csv", content, &["line 2", "missing field `text`", "38 more"]);
}

#[test]
fn blank_lines_take_neither_memory_nor_lines() {
    let blank = "\n".repeat(40_000_000);
    let content = format!("text,stars\na,1{blank}b\n");
    check("40 million blank lines", "a.csv", content, &["line 40000002", "1 fields found, 2 wanted"]);
    let content = format!("text,stars\na,1{blank}b,x\n");
    check("a bad value behind them", "a.csv", content, &["line 40000002", "column \"stars\" holds \"x\""]);
    let rows = format!("{},1\n", "x".repeat(8 << 20)).repeat(15);
    check("a bad value behind long rows", "a.csv", format!("text,stars\n{rows}a,x\n"), &["line 17", "\"stars\""]);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let (_folder, path) = file("a.csv", format!("text,stars\n{}", "a,1\n".repeat(1000)));
    let dataset = CsvDataset::<Review>::from_files([&path]).unwrap();
    for (length, case) in [(2000, "to a half"), (13, "to its first row"), (0, "to nothing")] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let ends = format!("ends at byte {length}");
        check_refused(case, &path, &[&ends, "but had 4011 bytes"], || dataset.get(999));
    }
    std::fs::write(&path, vec![b','; 4011]).unwrap();
    check_refused("other bytes", &path, &["line", "fields found, 2 wanted"], || dataset.get(999));
    File::options().write(true).open(&path).unwrap().write_all_at(&[0xff; 4011], 0).unwrap();
    check_refused("no text", &path, &["line"], || dataset.get(0));
}

#[test]
fn the_first_line_is_read_alone() {
    let (_folder, path) = file("a.csv", "text,text\n\"never closed");
    assert_eq!(csv_column_names(&path, &CsvOptions::default()).unwrap(), ["text", "text"]);
    File::options().write(true).open(&path).unwrap().set_len(256 << 30).unwrap();
    let read = outcome("a hole behind the first line", &path, 0, || csv_column_names(&path, &CsvOptions::default()));
    assert!(matches!(read, Outcome::Read), "{read:?}");
    for (case, content, parts) in [
        ("nothing", "".to_owned(), ["is empty", ""]),
        ("a million columns", ",".repeat(999_999), ["1000000 columns", "at most 100000"]),
        ("an open quotation mark", "\"text".to_owned(), ["line 1", "never closed"]),
    ] {
        std::fs::write(&path, content).unwrap();
        check_refused(case, &path, &parts, || csv_column_names(&path, &CsvOptions::default()));
    }
}
