//! How names and shapes that were found differ from those of a model.

use accelerate_core::weight_files::{listed, shown};
use std::fmt;

/// What a message has room for of each list of names.
const LIST_BYTES: usize = 300;
/// What it has room for of names with shapes.
const SHAPES_BYTES: usize = 600;

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
        for (names, are) in [(&self.missing, "missing"), (&self.unexpected, "unexpected")] {
            if !names.is_empty() {
                parts.push(format!("{} {are}: {}", names.len(), listed(names, LIST_BYTES)));
            }
        }
        if !self.misshaped.is_empty() {
            parts.push(format!("{} of another shape: {}", self.misshaped.len(), misshaped(&self.misshaped)));
        }
        f.write_str(&parts.join("; "))
    }
}

/// The first of them, as far as there is room, and the number of the others.
fn misshaped(all: &[Misshaped]) -> String {
    let mut text = String::new();
    for (position, one) in all.iter().enumerate() {
        if text.len() > SHAPES_BYTES {
            return format!("{text} and {} more", all.len() - position);
        }
        let separator = if position == 0 { "" } else { ", " };
        let [found, wanted] = [&one.found, &one.wanted].map(|shape| shown(&format!("{shape:?}")));
        text += &format!("{separator}{} is {found} but the model has {wanted}", shown(&one.name));
    }
    text
}
