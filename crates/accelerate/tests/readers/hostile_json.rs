//! Files of JSON lines that were made to do harm, or damaged.

use super::file;
use super::hostile::check_refused;
use accelerate::data::Dataset;
use accelerate::data::readers::JsonLinesDataset;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

#[derive(Debug, Deserialize)]
#[allow(dead_code, reason = "what is refused is not looked at")]
struct Review {
    text: String,
    stars: Option<u8>,
}

/// Opens a file and reads all of its rows.
fn read<T: DeserializeOwned>(path: &Path) -> accelerate::Result<usize> {
    let dataset = JsonLinesDataset::<T>::from_files([path])?;
    (0..dataset.len()).try_for_each(|index| dataset.get(index).map(|_| ()))?;
    Ok(dataset.len())
}

fn check_as<T: DeserializeOwned>(case: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    let (_folder, path) = file("a.jsonl", content);
    check_refused(case, &path, parts, || read::<T>(&path));
}

fn check(case: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    check_as::<Review>(case, content, parts);
}

#[test]
fn keys_that_occur_twice_are_refused() {
    let twice = "the key \"text\" occurs twice";
    check("in a struct", "{\"text\": \"a\", \"text\": \"b\"}", &["line 1", twice]);
    check("with an escape", "{\"text\": \"a\", \"t\\u0065xt\": \"b\"}", &["line 1", twice]);
    check("that nobody wants", "{\"text\": \"a\", \"x\": 1, \"x\": 2}", &["line 1", "the key \"x\" occurs twice"]);
    check(
        "inside of a value that nobody wants",
        "{\"text\": \"a\", \"x\": [{\"y\": 1, \"y\": 2}]}",
        &["the key \"y\""],
    );
    check_as::<BTreeMap<String, i64>>("in a map", "{\"a\": 1}\n\n{\"a\": 1, \"b\": 2, \"a\": 3}", &["line 3", "\"a\""]);
    check_as::<Value>("in any value", "[[{\"\": 1, \"\": 2}]]", &["line 1", "the key \"\" occurs twice"]);
    let long = "k".repeat(1_000_000);
    check_as::<Value>("of 1 MB", format!("{{\"{long}\": 1, \"{long}\": 2}}"), &["line 1", "kkk ...\" (1000000 bytes)"]);
    let many: String = (0..500_000).map(|key| format!("\"{key}\":1,")).collect();
    check("among half a million", format!("{{{many}\"7\":1}}"), &["line 1", "the key \"7\" occurs twice"]);
}

#[test]
fn what_is_no_json_is_named_by_line() {
    let cases: &[(&str, &[u8], &str)] = &[
        ("an object that was cut off", b"{\"text\": \"a\"", "EOF while parsing an object"),
        ("a text that was cut off", b"{\"text\": \"a", "EOF while parsing a string"),
        ("a word that was cut off", b"{\"text\": tru", "EOF while parsing a value"),
        ("an escape that was cut off", b"{\"text\": \"\\u00", "EOF"),
        ("two values", b"{\"text\": \"a\"}{\"text\": \"b\"}", "trailing characters"),
        ("old line ends", b"{\"text\": \"a\"}\r{\"text\": \"b\"}\r", "trailing characters"),
        ("a comma behind", b"{\"text\": \"a\",}", "trailing comma"),
        ("a comment", b"// reviews", "expected"),
        ("single quotation marks", b"{'text': 'a'}", "key must be a string"),
        ("a key without quotation marks", b"{text: 1}", "key must be a string"),
        ("NaN", b"{\"text\": \"a\", \"stars\": NaN}", "expected"),
        ("infinity", b"{\"text\": \"a\", \"stars\": -Infinity}", "invalid number"),
        ("a number that begins with zero", b"{\"text\": \"a\", \"stars\": 01}", "invalid number"),
        ("an unknown escape", b"{\"text\": \"\\x61\"}", "invalid escape"),
        ("half of a surrogate pair", b"{\"text\": \"\\ud83d\"}", "line 3: not valid JSON"),
        ("a tab in a text", b"{\"text\": \"a\tb\"}", "control character"),
        ("a zero byte in a text", b"{\"text\": \"a\0b\"}", "control character"),
        ("zero bytes", b"\0\0\0\0\0\0\0\0", "expected value"),
        ("a byte order mark inside", b"\xef\xbb\xbf{\"text\": \"a\"}", "expected value"),
        ("a table", b"text,stars", "expected"),
        ("marks of a merge", b"=======", "expected value"),
    ];
    for (case, line, message) in cases {
        let content = [b"{\"text\": \"a\"}\n \t\n", *line, b"\n\n"].concat();
        check(case, content, &["a.jsonl, line 3: ", "not valid JSON", message]);
    }
    check("one value on several lines", "{\n  \"text\": \"a\"\n}\n", &["line 1", "wanted one value on each line"]);
    for (case, line) in [
        ("Latin-1", &b"{\"text\": \"caf\xe9\"}"[..]),
        ("UTF-16", b"\xff\xfe{\0\"\0"),
        ("gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"),
        ("a character that was cut off", b"{\"text\": \"\xf0\x9f\x91"),
        ("half of a surrogate pair in three bytes", b"{\"text\": \"\xed\xa0\xbd\"}"),
    ] {
        check(case, line, &["a.jsonl, line 1: ", "not UTF-8"]);
    }
}

#[test]
fn what_does_not_fit_is_named_by_line() {
    for (case, line, message) in [
        ("a missing key", "{\"stars\": 1}", "missing field `text`"),
        ("null for a text", "{\"text\": null}", "invalid type: null"),
        ("a number for a text", "{\"text\": 7}", "invalid type: integer `7`"),
        ("a list for an object", "[]", "invalid length 0"),
        ("a text for an object", "\"text\"", "invalid type: string"),
        ("a number that is too large", "{\"text\": \"a\", \"stars\": 256}", "integer `256`, expected u8"),
        ("a negative number", "{\"text\": \"a\", \"stars\": -1}", "integer `-1`, expected u8"),
        ("a fraction", "{\"text\": \"a\", \"stars\": 0.5}", "floating point `0.5`"),
        ("a number of 20 digits", "{\"text\": \"a\", \"stars\": 99999999999999999999}", "floating point"),
        ("a number beyond all", "{\"text\": \"a\", \"stars\": 1e999}", "number out of range"),
        ("a number below all", "{\"text\": \"a\", \"stars\": -1e999}", "number out of range"),
    ] {
        check(case, format!("\n\n{line}\n"), &["a.jsonl, line 3: ", message]);
    }
}

#[test]
fn lines_without_an_end_are_refused() {
    let limit = "longer than 16777216 bytes";
    let long = "x".repeat(80_000_000);
    check("a line of 80 MB", format!("{{\"text\": \"{long}\"}}\n"), &["line 1", limit, "Parquet or Arrow"]);
    check("a line of 80 MB further down", format!("{{\"text\": \"a\"}}\n\n\"{long}"), &["line 3", limit]);
    check(
        "80 MB of spaces behind a value",
        format!("{{\"text\": \"a\"}}{}", " ".repeat(80_000_000)),
        &["line 1", limit],
    );
    for (case, start, line) in
        [("a hole of 256 GB", "", "line 1"), ("a hole behind a row", "{\"text\": \"a\"}\n", "line 2")]
    {
        let (_folder, path) = file("a.jsonl", start);
        File::options().write(true).open(&path).unwrap().set_len(256 << 30).unwrap();
        check_refused(case, &path, &[line, limit], || read::<Review>(&path));
    }
}

#[test]
fn a_line_of_the_longest_length_is_read() {
    for (length, is_read) in [(16_777_214, true), (16_777_215, false)] {
        for end in ["", "\n"] {
            let (_folder, path) = file("a.jsonl", format!("1\n\"{}\"{end}", "x".repeat(length)));
            let texts = JsonLinesDataset::<Value>::from_files([&path]);
            assert_eq!(texts.is_ok(), is_read, "{length} letters and {end:?}");
            if let Ok(texts) = texts {
                assert_eq!(texts.get(1).unwrap().as_str().map(str::len), Some(length));
            }
        }
    }
}

#[test]
fn deep_values_end_in_a_message_and_not_in_a_crash() {
    for (case, open) in [("a million lists", "["), ("a million objects", "{\"a\":"), ("a million of both", "[{\"a\":")]
    {
        check_as::<Value>(case, open.repeat(1_000_000), &["line 1", "not valid JSON: recursion limit exceeded"]);
    }
    let nobody_wants = format!("{{\"text\": \"a\", \"x\": {}", "[".repeat(1_000_000));
    check("a million lists that nobody wants", nobody_wants, &["line 1", "EOF while parsing a list"]);
}

#[test]
fn long_values_make_short_messages() {
    let long = "x".repeat(1_000_000);
    let wrong = "does not have the wanted form: invalid type: string \"xxx";
    check("a text of 1 MB for a number", format!("{{\"text\": \"a\", \"stars\": \"{long}\"}}"), &["line 1", wrong]);
    let escapes = "\\u0000".repeat(1_000_000);
    let wrong = "invalid type: string \"\\0\\0";
    check("zeros for a number", format!("{{\"text\": \"a\", \"stars\": \"{escapes}\"}}"), &["line 1", wrong]);
    let zeros = "0".repeat(1_000_000);
    let number = format!("{{\"text\": \"a\", \"stars\": 1{zeros}}}");
    check("a number of a million digits", number, &["line 1", "number out of range"]);

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Strict {}
    let unknown = "unknown field `xxx";
    check_as::<Strict>("a name of 1 MB", format!("{{\"{long}\": 1}}"), &["line 1", unknown]);
    #[derive(Debug, Deserialize)]
    enum Stars {
        One,
    }
    check_as::<Stars>("a word of 1 MB", format!("\"One\"\n\"{long}\""), &["line 2", "unknown variant `xxx", " ..."]);
    let _known = Stars::One;
}

#[test]
fn blank_lines_take_neither_memory_nor_lines() {
    let blank = "\r\n".repeat(20_000_000);
    check("20 million blank lines", format!("{{\"text\": \"a\"}}{blank}7"), &["line 20000001", "invalid type"]);
    let spaces = " ".repeat(80_000_000);
    check("80 MB of spaces", format!("{spaces}\n{{\"text\": 1}}"), &["line 2", "invalid type: integer `1`"]);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let (_folder, path) = file("a.jsonl", "{\"text\": \"a\"}\n".repeat(1000));
    let dataset = JsonLinesDataset::<Review>::from_files([&path]).unwrap();
    for (length, case) in [(7000, "to a half"), (1, "to a byte"), (0, "to nothing")] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let ends = format!("ends at byte {length}");
        check_refused(case, &path, &[&ends, "but had 14000 bytes"], || dataset.get(999));
    }
    std::fs::write(&path, vec![b'['; 14_000]).unwrap();
    check_refused("other bytes", &path, &["line ", "invalid type: sequence"], || dataset.get(999));
}
