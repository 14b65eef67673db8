//! Rows of files with one JSON object per line.

use super::error::{missing_label_key, missing_text_key};
use super::{DataError, LABEL_COLUMNS, Place, Row, RowProblem, TEXT_COLUMNS, checked_row};
use serde_json::{Map, Value};
use std::path::Path;

pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Row>, DataError> {
    let is_blank = |line: &&[u8]| line.iter().all(u8::is_ascii_whitespace);
    (1..)
        .zip(bytes.split(|&byte| byte == b'\n'))
        .filter(|(_, line)| !is_blank(line))
        .map(|(number, line)| {
            let place = Place::Line(number);
            to_row(line, place).map_err(|problem| DataError::Row { path: path.to_owned(), place, problem })
        })
        .collect()
}

fn to_row(line: &[u8], place: Place) -> Result<Row, RowProblem> {
    let line = std::str::from_utf8(line).map_err(|_| RowProblem::NotUtf8)?;
    let value = serde_json::from_str(line).map_err(|error| RowProblem::NotJson {
        // The parser's own position says "line 1" for every line of the file.
        message: format!(
            "{} at character {}",
            error.to_string().split(" at line ").next().unwrap_or("syntax error"),
            error.column()
        ),
    })?;
    let Value::Object(object) = value else {
        return Err(RowProblem::NotAnObject { found: kind_of(&value) });
    };
    let keys = || object.keys().cloned().collect();
    let text = find(&object, &TEXT_COLUMNS).ok_or_else(|| missing_text_key(keys()))?;
    let label = find(&object, &LABEL_COLUMNS).ok_or_else(|| missing_label_key(keys()))?;
    let text = text.as_str().ok_or_else(|| RowProblem::TextNotString { found: kind_of(text).to_owned() })?;
    let label = label.as_i64().ok_or_else(|| RowProblem::LabelNotInteger { found: label.to_string() })?;
    checked_row(text, label, place)
}

fn find<'a>(object: &'a Map<String, Value>, names: &[&str]) -> Option<&'a Value> {
    names.iter().find_map(|&name| object.get(name))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
