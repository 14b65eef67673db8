//! Writing YAML.

use serde_json::{Map, Number, Value};
use std::fmt::Write as _;

/// YAML of version 1.1, which Python reads.
pub(crate) fn yaml(root: &Map<String, Value>) -> String {
    let mut text = String::new();
    mapping(&mut text, root, 0);
    text
}

fn mapping(text: &mut String, entries: &Map<String, Value>, depth: usize) {
    for (key, value) in entries {
        // Writing to a string cannot fail, here and below.
        let _ = write!(text, "{:1$}{2}:", "", 2 * depth, quoted_if_needed(key));
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                text.push('\n');
                mapping(text, entries, depth + 1);
            }
            Value::Array(items)
                if !items.is_empty() && items.iter().all(|item| !item.is_array() && !item.is_object()) =>
            {
                text.push('\n');
                for item in items {
                    let _ = writeln!(text, "{:1$}- {2}", "", 2 * depth, flow(item));
                }
            }
            Value::Array(items) if !items.is_empty() && items.iter().all(is_block) => {
                text.push('\n');
                for entries in items.iter().filter_map(Value::as_object) {
                    let start = text.len() + 2 * depth;
                    mapping(text, entries, depth + 1);
                    text.replace_range(start..start + 2, "- ");
                }
            }
            value => {
                let _ = writeln!(text, " {}", flow(value));
            }
        }
    }
}

fn is_block(item: &Value) -> bool {
    item.as_object().is_some_and(|entries| !entries.is_empty())
}

/// A value in one line.
fn flow(value: &Value) -> String {
    match value {
        Value::String(text) => quoted_if_needed(text),
        Value::Number(number) => yaml_number(number),
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| format!("{}: {}", quoted(key), flow(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Null | Value::Bool(_) => value.to_string(),
    }
}

/// YAML 1.1 takes `1e-6` for text: it wants a point and a sign.
fn yaml_number(number: &Number) -> String {
    let text = number.to_string();
    let Some((mantissa, exponent)) = text.split_once(['e', 'E']) else { return text };
    let point = if mantissa.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) { "" } else { "+" };
    format!("{mantissa}{point}e{sign}{exponent}")
}

/// Words of YAML 1.1 that are no text.
const RESERVED: [&str; 9] = ["y", "yes", "n", "no", "true", "false", "on", "off", "null"];

/// Text as it is where nobody could take it for something else, and in quotes otherwise.
fn quoted_if_needed(text: &str) -> String {
    let is_plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.chars().all(|character| character.is_ascii_alphanumeric() || "_-./".contains(character))
        && !RESERVED.iter().any(|reserved| reserved.eq_ignore_ascii_case(text));
    if is_plain { text.to_owned() } else { quoted(text) }
}

fn quoted(text: &str) -> String {
    // What YAML does not print, and what it breaks lines at.
    let is_escaped = |character: char| {
        character.is_control() || ['\u{2028}', '\u{2029}', '\u{feff}', '\u{fffe}', '\u{ffff}'].contains(&character)
    };
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            _ if is_escaped(character) => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(character));
            }
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}
