//! `float32[batch,64]`: what a model takes, and what the examples are with which it is exported.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Serialize;

/// The types that packages can be trained with, by PyTorch's names, and whether they have whole numbers only.
const TYPES: [(&str, bool); 10] = [
    ("float32", false),
    ("float64", false),
    ("float16", false),
    ("bfloat16", false),
    ("int64", true),
    ("int32", true),
    ("int16", true),
    ("int8", true),
    ("uint8", true),
    ("bool", true),
];
/// The first of the sizes of examples. They differ, for those that are equal by chance could become one.
const FIRST_SIZE: u64 = 6;

/// One of `--inputs`, as it was written.
#[derive(Clone, Debug)]
pub(super) struct Input {
    dtype: &'static str,
    is_whole: bool,
    sizes: Vec<Size>,
}

#[derive(Clone, Debug)]
enum Size {
    Fixed(u64),
    Named { name: String, example: Option<u64> },
}

impl FromStr for Input {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write a type and its sizes, with names for those that vary: float32[batch,64]";
        let parts = text.trim().strip_suffix(']').and_then(|text| text.split_once('['));
        let (dtype, sizes) = parts.ok_or_else(|| form.to_owned())?;
        let Some((dtype, is_whole)) = TYPES.into_iter().find(|(name, _)| *name == dtype.trim()) else {
            let names: Vec<_> = TYPES.iter().map(|(name, _)| *name).collect();
            return Err(format!("`{dtype}` is no type of an input; there are {}", names.join(", ")));
        };
        let sizes = match sizes.trim() {
            "" => Vec::new(),
            sizes => sizes.split(',').map(|size| size.trim().parse()).collect::<Result<_, _>>()?,
        };
        Ok(Self { dtype, is_whole, sizes })
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(size) = text.parse() {
            return Ok(Self::Fixed(size));
        }
        let (name, example) = match text.split_once('=') {
            Some((name, example)) => (name.trim_end(), Some(example.trim_start())),
            None => (text, None),
        };
        let is_name = |name: &str| name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        if name.is_empty() || name.starts_with(|letter: char| letter.is_ascii_digit()) || !is_name(name) {
            return Err(format!(
                "`{text}` is no size; it is a number, or a name of letters, digits and _ that does not begin with a digit, as in float32[batch,64]"
            ));
        }
        // PyTorch makes a constant of a size of 0 or 1.
        let example = match example.map(str::parse::<u64>) {
            None => None,
            Some(Ok(size)) if size >= 2 => Some(size),
            Some(_) => return Err(format!("`{text}`: the size of an example is a number from 2 on, as in {name}=8")),
        };
        Ok(Self::Named { name: name.to_owned(), example })
    }
}

/// The sizes that examples have, by name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Examples(BTreeMap<String, u64>);

/// An input as Python takes it.
#[derive(Debug, Serialize)]
pub(super) struct Example {
    dtype: &'static str,
    is_whole: bool,
    sizes: Vec<u64>,
    count: u64,
    /// Of the sizes that vary, by their position.
    names: BTreeMap<usize, String>,
}

/// An input as the signature of a package has it.
#[derive(Debug, Serialize)]
pub(super) struct Described {
    dtype: &'static str,
    /// -1 for sizes that vary.
    shape: Vec<i64>,
}

impl Examples {
    /// Sizes that were asked for, and for other names ones that nothing else has.
    ///
    /// # Errors
    /// Two sizes for one name, or one size for two names.
    pub(super) fn of(inputs: &[Input]) -> Result<Self, String> {
        let (mut chosen, mut names) = (BTreeMap::new(), Vec::new());
        for size in inputs.iter().flat_map(|input| &input.sizes) {
            let Size::Named { name, example } = size else { continue };
            if !names.contains(name) {
                names.push(name.clone());
            }
            let Some(size) = *example else { continue };
            match chosen.insert(name.clone(), size) {
                Some(other) if other != size => {
                    return Err(format!("{name} is {other} and {size} in --inputs; the size of a name is one number"));
                }
                _ => {}
            }
            if let Some((other, _)) = chosen.iter().find(|(other, taken)| *other != name && **taken == size) {
                return Err(format!(
                    "{other} and {name} are both {size} in --inputs; sizes of examples differ, so that none is taken for another"
                ));
            }
        }
        let mut next = FIRST_SIZE;
        for name in names {
            while chosen.values().any(|taken| *taken == next) {
                next += 1;
            }
            chosen.entry(name).or_insert(next);
        }
        Ok(Self(chosen))
    }

    pub(super) fn example(&self, input: &Input) -> Example {
        let (mut sizes, mut names) = (Vec::new(), BTreeMap::new());
        for (index, size) in input.sizes.iter().enumerate() {
            sizes.push(match size {
                Size::Fixed(size) => *size,
                Size::Named { name, .. } => {
                    names.insert(index, name.clone());
                    self.0.get(name).copied().unwrap_or(FIRST_SIZE)
                }
            });
        }
        let count = sizes.iter().fold(1, |count: u64, size| count.saturating_mul(*size));
        Example { dtype: input.dtype, is_whole: input.is_whole, sizes, count, names }
    }

    /// `batch=6, length=7`; empty if all sizes are fixed.
    pub(super) fn shown(&self) -> String {
        let sizes: Vec<_> = self.0.iter().map(|(name, size)| format!("{name}={size}")).collect();
        sizes.join(", ")
    }
}

impl Input {
    pub(super) fn described(&self) -> Described {
        let size = |size: &Size| match size {
            Size::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
            Size::Named { .. } => -1,
        };
        Described { dtype: self.dtype, shape: self.sizes.iter().map(size).collect() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Examples, Input};

    fn inputs(texts: &str) -> Result<Vec<Input>, String> {
        texts.split(' ').map(str::parse).collect()
    }

    #[test]
    fn names_have_sizes_that_nothing_else_has() {
        for (texts, sizes) in [
            ("float32[b,64] int64[b]", "b=6"),
            ("float32[b,t] int64[t]", "b=6, t=7"),
            ("float32[t,b=6]", "b=6, t=7"),
            ("float32[b] float32[b=4,length=32]", "b=4, length=32"),
            ("float32[] int8[3]", ""),
        ] {
            assert_eq!(Examples::of(&inputs(texts).unwrap()).unwrap().shown(), sizes, "{texts}");
        }
        let given = inputs("bfloat16[3,b,t=2]").unwrap();
        let example = serde_json::to_string(&Examples::of(&given).unwrap().example(&given[0])).unwrap();
        let wanted = r#"{"dtype":"bfloat16","is_whole":false,"sizes":[3,6,2],"count":36,"names":{"1":"b","2":"t"}}"#;
        assert_eq!(example, wanted);
        assert_eq!(serde_json::to_string(&given[0].described()).unwrap(), r#"{"dtype":"bfloat16","shape":[3,-1,-1]}"#);
    }

    #[test]
    fn what_is_no_input_says_what_one_is() {
        for (texts, words) in [
            ("float32", "float32[batch,64]"),
            ("int65[b]", "`int65` is no type"),
            ("int64[1b]", "does not begin with a digit"),
            ("int64[b,]", "`` is no size"),
            ("int64[b=1]", "from 2 on"),
            ("int64[b=x]", "from 2 on"),
            ("int64[b=4] int64[b=5]", "b is 4 and 5"),
            ("int64[b=4,t=4]", "b and t are both 4"),
        ] {
            let found = inputs(texts).and_then(|inputs| Examples::of(&inputs)).unwrap_err();
            assert!(found.contains(words), "{texts}: {found}");
        }
    }
}
