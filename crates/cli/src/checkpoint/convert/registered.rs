//! What a program has registered: for Python a dictionary with tensors in it, and here tensors by name beside JSON values.
//!
//! A tensor within dictionaries is named by its way there, with dots between. The dictionaries stay among the values, so that the way
//! back is known even where keys have dots, too.

use std::collections::HashSet;

use accelerate_core::checkpoint::python::{Left, to_json};
use accelerate_core::weight_files::{Plain, StoredTensor, check_saved_name, check_tensor_name, shown};
use serde_json::Value;

use crate::weights::Tensor;

/// What comes before the number of such an object in its name.
const PREFIX: &str = "custom_checkpoint_";

/// The name of the one with this number, on both sides.
pub(super) fn name(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// The number in such a name.
pub(super) fn number(name_of: &str) -> Option<usize> {
    name_of.strip_prefix(PREFIX)?.parse().ok().filter(|&number| name(number) == name_of)
}

/// An object as this library has it.
#[derive(Debug, Default)]
pub(super) struct Registered {
    pub(super) tensors: Vec<Tensor>,
    pub(super) values: Value,
}

/// Takes an object of Python's apart. `None` if nothing of it can be carried over. Names that cannot be here are `problems`.
pub(super) fn from_python(
    value: Plain<StoredTensor>,
    left: &mut Left,
    problems: &mut Vec<String>,
) -> Option<Registered> {
    let is_empty = matches!(&value, Plain::Dict(pairs) if pairs.is_empty());
    let mut found = Vec::new();
    let values = to_json(&without_tensors(value, &[], &mut found), "", left)?;
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut names = HashSet::new();
    for (path, stored) in found {
        let name = path.join(".");
        let problem = match check_tensor_name(&name).and_then(|()| check_saved_name(&name)) {
            Err(problem) => Some(problem.to_string()),
            Ok(()) if place_of(&values, &name) != path || !names.insert(name.clone()) => {
                Some(format!("the name `{}` is that of another place, too", shown(&name)))
            }
            Ok(()) => None,
        };
        match problem {
            Some(problem) => problems.push(problem),
            None => tensors.push(Tensor::stored(name, 0, stored)),
        }
    }
    let has_something = !tensors.is_empty() || values.as_object().is_none_or(|values| !values.is_empty());
    (has_something || is_empty).then_some(Registered { tensors, values })
}

/// The same value, but for the tensors in dictionaries whose keys are texts.
fn without_tensors(
    value: Plain<StoredTensor>,
    path: &[String],
    found: &mut Vec<(Vec<String>, StoredTensor)>,
) -> Plain<StoredTensor> {
    // Other dictionaries are none of JSON's, and stay behind as a whole.
    let pairs = match value {
        Plain::Dict(pairs) if pairs.iter().all(|(key, _)| matches!(key, Plain::Text(_))) => pairs,
        value => return value,
    };
    let mut rest = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        let path: Vec<String> = path.iter().cloned().chain([key_text(&key)]).collect();
        match value {
            Plain::Tensor(stored) => found.push((path, stored)),
            value => rest.push((key, without_tensors(value, &path, found))),
        }
    }
    Plain::Dict(rest)
}

fn key_text(key: &Plain<StoredTensor>) -> String {
    if let Plain::Text(key) = key { key.clone() } else { key.kind() }
}

/// The keys on the way to the tensor of this name: through dictionaries that are among the values, as far as they go.
fn place_of<'a>(values: &Value, name: &'a str) -> Vec<&'a str> {
    let (mut within, mut rest, mut place) = (values, name, Vec::new());
    while let Some((dot, dictionary)) = rest.match_indices('.').find_map(|(dot, _)| {
        within.get(&rest[..dot]).filter(|value| value.is_object()).map(|dictionary| (dot, dictionary))
    }) {
        place.push(&rest[..dot]);
        (within, rest) = (dictionary, &rest[dot + 1..]);
    }
    place.push(rest);
    place
}

/// Puts a tensor into the dictionary that these values became for Python.
///
/// # Errors
/// What has its place.
pub(super) fn insert<'t>(
    entries: &mut Vec<(Plain<&'t Tensor>, Plain<&'t Tensor>)>,
    values: &Value,
    tensor: &'t Tensor,
) -> Result<(), String> {
    let place = place_of(values, &tensor.name);
    let taken = || format!("`{}` is the name of a tensor and of a value of it", shown(&tensor.name));
    let (Some((last, dictionaries)), mut entries) = (place.split_last(), entries) else { return Err(taken()) };
    for key in dictionaries {
        let is_it =
            |(found, _): &&mut (Plain<&Tensor>, Plain<&Tensor>)| matches!(found, Plain::Text(found) if found == key);
        let Some((_, Plain::Dict(within))) = entries.iter_mut().find(is_it) else { return Err(taken()) };
        entries = within;
    }
    let dictionary = dictionaries.iter().try_fold(values, |within, key| within.get(*key));
    if dictionary.is_some_and(|dictionary| dictionary.get(*last).is_some()) {
        return Err(taken());
    }
    entries.push((Plain::text(*last), Plain::Tensor(tensor)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(json!({}), "a.b", &["a.b"])]
    #[case(json!({ "a": {} }), "a.b", &["a", "b"])]
    #[case(json!({ "a": {} }), "a.b.c", &["a", "b.c"])]
    #[case(json!({ "a": { "b": {} } }), "a.b.c", &["a", "b", "c"])]
    #[case(json!({ "a.b": {} }), "a.b.c", &["a.b", "c"])]
    #[case(json!({ "a": 1 }), "a.b", &["a.b"])]
    #[case(json!(null), "a", &["a"])]
    fn a_tensor_is_in_the_dictionaries_that_its_name_begins_with(
        #[case] values: Value,
        #[case] name: &str,
        #[case] wanted: &[&str],
    ) {
        assert_eq!(place_of(&values, name), wanted);
    }
}
