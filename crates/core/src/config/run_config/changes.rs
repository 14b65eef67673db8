//! What is otherwise in a file that was written again.

use super::settings;
use crate::Result;
use crate::files::in_one_line;
use crate::settings::{Document, Node, NodeValue, is_nothing, shortened_line};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The keys by which two texts of the file at `path` differ, in the order of their names: what the old text has begins with `-`,
/// and what the new one has with `+`. Order, comments and quotation marks make no difference.
///
/// # Errors
///
/// What [`Document::parse`] refuses.
///
/// ```
/// use accelerate_core::config::changed_lines;
/// let new = "debug: true\nmixed_precision: fp16\n";
/// let changes = changed_lines("fp16: yes # half\ndebug: true\n", new, "run.yaml".as_ref())?;
/// assert_eq!(changes, ["- fp16: yes", "+ mixed_precision: fp16"]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn changed_lines(old: &str, new: &str, path: &Path) -> Result<Vec<String>> {
    let [old, new] = [entries(&Document::parse(old, path)?), entries(&Document::parse(new, path)?)];
    let mut keys: Vec<_> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    let differing = keys.into_iter().filter(|key| old.get(key) != new.get(key));
    let line = |sign: char, key: &Key, value: &Value| {
        let text = match value {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let value = if is_secret(key) && !is_nothing(&text) { "(not shown)".to_owned() } else { text };
        let name = key.0.iter().chain([&key.1]).map(String::as_str).collect::<Vec<_>>().join(".");
        format!("{sign} {}: {}", in_one_line(&name), shortened_line(&value))
    };
    let both = differing.flat_map(|key| {
        let of = |sign, entries: &BTreeMap<Key, Value>| entries.get(key).map(|value| line(sign, key, value));
        [of('-', &old), of('+', &new)]
    });
    Ok(both.flatten().collect())
}

/// A section, unless it is the top level, and a key in it.
type Key = (Option<String>, String);

fn entries(document: &Document) -> BTreeMap<Key, Value> {
    let mut all = BTreeMap::new();
    let NodeValue::Mapping(entries) = &document.root.value else { return all };
    for (key, _, node) in entries {
        match &node.value {
            NodeValue::Mapping(entries) if !entries.is_empty() => {
                let inner = entries.iter().map(|(inner, _, node)| ((Some(key.clone()), inner.clone()), plain(node)));
                all.extend(inner);
            }
            _ => drop(all.insert((None, key.clone()), plain(node))),
        }
    }
    all
}

/// The value without its quotation marks.
fn plain(node: &Node) -> Value {
    match &node.value {
        NodeValue::Scalar { text, .. } if !node.is_null() => Value::String(text.clone()),
        NodeValue::List(items) => items.iter().map(plain).collect(),
        NodeValue::Mapping(entries) => {
            Value::Object(entries.iter().map(|(key, _, node)| (key.clone(), plain(node))).collect())
        }
        NodeValue::Scalar { .. } => Value::Null,
    }
}

fn is_secret((section, key): &Key) -> bool {
    let section = section.as_deref().unwrap_or_default();
    settings().any(|setting| setting.is_secret() && setting.section == section && setting.has_key(key))
}
