//! How names and shapes that were found differ from those of a model.

use std::fmt;

/// All differences between what a model has and what was found for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// In the model, not found.
    pub(crate) missing: Vec<String>,
    /// Found, not in the model.
    pub(crate) unexpected: Vec<String>,
    pub(crate) misshaped: Vec<Misshaped>,
}

/// A tensor of the right name and the wrong shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Misshaped {
    pub(crate) name: String,
    pub(crate) found: Vec<i64>,
    pub(crate) wanted: Vec<i64>,
}

impl Mismatch {
    /// Wrong shapes are fatal always, names only when `strict`: as PyTorch's `load_state_dict`.
    pub(crate) fn is_fatal(&self, strict: bool) -> bool {
        !self.misshaped.is_empty() || (strict && !(self.missing.is_empty() && self.unexpected.is_empty()))
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            parts.push(format!("{} missing: {}", self.missing.len(), self.missing.join(", ")));
        }
        if !self.unexpected.is_empty() {
            let (count, names) = (self.unexpected.len(), self.unexpected.join(", "));
            parts.push(format!("{count} unexpected: {names}"));
        }
        if !self.misshaped.is_empty() {
            let each = |m: &Misshaped| format!("{} is {:?} but the model has {:?}", m.name, m.found, m.wanted);
            let list: Vec<_> = self.misshaped.iter().map(each).collect();
            parts.push(format!("{} of another shape: {}", list.len(), list.join(", ")));
        }
        f.write_str(&parts.join("; "))
    }
}
