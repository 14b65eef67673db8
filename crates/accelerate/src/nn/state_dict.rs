//! Named tensors of a model, outside of it.

use std::collections::{BTreeMap, HashMap};
use tch::Tensor;

/// Names and tensors in a fixed order, tied weights once.
///
/// ```
/// use accelerate::nn::StateDict;
/// use accelerate::tch::Tensor;
///
/// let state: StateDict = [("bias".to_string(), Tensor::from_slice(&[1.0f32]))].into_iter().collect();
/// assert_eq!(state.names().collect::<Vec<_>>(), ["bias"]);
/// assert!(state.get("bias").is_some() && state.get("weight").is_none());
/// ```
#[derive(Debug, Default)]
pub struct StateDict {
    entries: Vec<(String, Tensor)>,
    positions: HashMap<String, usize>,
    aliases: BTreeMap<String, String>,
}

impl StateDict {
    /// Adds a tensor, or replaces the one of the same name in its place.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        let name = name.into();
        if let Some(&position) = self.positions.get(&name) {
            self.entries[position].1 = tensor;
        } else {
            self.positions.insert(name.clone(), self.entries.len());
            self.entries.push((name, tensor));
        }
    }

    pub(crate) fn with_aliases(mut self, aliases: BTreeMap<String, String>) -> Self {
        self.aliases = aliases;
        self
    }

    /// The tensor of this name, or of the name it is an alias of.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        let first_name = self.aliases.get(name).map_or(name, String::as_str);
        self.positions.get(first_name).map(|&position| &self.entries[position].1)
    }

    /// Other names of tensors in this state: alias to the name under which the tensor is kept.
    pub fn aliases(&self) -> &BTreeMap<String, String> {
        &self.aliases
    }

    /// Names in order, without aliases.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_str())
    }

    /// Names and tensors in order, without aliases.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// No tensors?
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl FromIterator<(String, Tensor)> for StateDict {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(entries: I) -> Self {
        let mut state = Self::default();
        for (name, tensor) in entries {
            state.insert(name, tensor);
        }
        state
    }
}

impl IntoIterator for StateDict {
    type Item = (String, Tensor);
    type IntoIter = std::vec::IntoIter<(String, Tensor)>;
    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

/// How [`ParamStore::load_state_dict`](super::ParamStore::load_state_dict) compares names.
///
/// ```
/// assert!(accelerate::nn::LoadStateDictOptions::default().strict);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadStateDictOptions {
    /// Is a name that only the model or only the state has an error? Default true.
    pub strict: bool,
}

impl Default for LoadStateDictOptions {
    fn default() -> Self {
        Self { strict: true }
    }
}

/// What a tolerant load left out; PyTorch's `_IncompatibleKeys`. Both lists are empty after a strict load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Parameters and buffers that kept their values because nothing was found for them.
    pub missing_keys: Vec<String>,
    /// Names found that the model does not have.
    pub unexpected_keys: Vec<String>,
}
