//! Sizes of models, read from and written to `config.json`.

use crate::files::{self, FileError, shortened};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The file that holds the sizes, beside the weights.
pub const CONFIG_FILE: &str = "config.json";

/// Names of a hundred thousand classes fit.
pub(crate) const MOST_BYTES: u64 = 16_000_000;

/// A `config.json` that does not describe a model which can be built here.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not JSON, or a value has the wrong type.
    #[error("{path} does not describe a {model} model: {reason}", path = .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should describe.
        model: &'static str,
        /// What is wrong, and where.
        reason: String,
    },
    /// A value cannot be honoured.
    #[error("{path}: {key} is {found}; wanted {wanted}", path = .path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Which value.
        key: &'static str,
        /// What stands there.
        found: String,
        /// What would do.
        wanted: String,
    },
}

/// A value of a configuration that cannot be honoured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} is {found}; wanted {wanted}")]
pub struct WrongValue {
    /// Which value.
    pub key: &'static str,
    /// What it is.
    pub found: String,
    /// What would do.
    pub wanted: String,
}

impl WrongValue {
    pub(crate) fn new(key: &'static str, found: impl ToString, wanted: impl Into<String>) -> Self {
        Self { key, found: shortened(&found.to_string()), wanted: wanted.into() }
    }

    pub(crate) fn of(self, path: &Path) -> ConfigError {
        let Self { key, found, wanted } = self;
        ConfigError::Value { path: path.to_owned(), key, found, wanted }
    }
}

/// Sizes and rates of a model, with the names and defaults of its `PreTrainedConfig` in Transformers. Keys that are not read
/// here may stand in the file; values that would make another model than the file means are errors.
pub trait PretrainedConfig: Sized {
    /// The file as Transformers writes it.
    #[doc(hidden)]
    type File: Serialize + DeserializeOwned;

    /// What errors call a model of this kind.
    const MODEL: &'static str;

    /// From what the file says, before [`check`](Self::check).
    ///
    /// # Errors
    /// What of it is not built here.
    #[doc(hidden)]
    fn from_file(file: Self::File) -> Result<Self, WrongValue>;

    /// As Transformers reads it.
    #[doc(hidden)]
    fn to_file(&self) -> Self::File;

    /// Can a model of these sizes be built?
    ///
    /// # Errors
    /// The first value that cannot be honoured.
    fn check(&self) -> Result<(), WrongValue>;

    /// Standard deviation of new weights.
    fn initializer_range(&self) -> f64;

    /// Takes the tokens that end a text from `generation_config.json`, which goes before `config.json`. Only models that continue texts
    /// do.
    #[doc(hidden)]
    fn set_eos_token_id(&mut self, _eos_token_id: Vec<i64>) {}

    /// Reads `config.json` from a folder.
    ///
    /// # Errors
    /// When the file is missing, malformed, of another kind of model, or asks for something that is not built here.
    fn from_folder(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join(CONFIG_FILE);
        Self::from_json(&files::read_text(&path, MOST_BYTES)?, &path)
    }

    /// Reads the text of a `config.json`, which errors call `path`.
    ///
    /// # Errors
    /// When it is malformed, of another kind of model, or asks for something that is not built here.
    fn from_json(json: &str, path: &Path) -> Result<Self, ConfigError> {
        let malformed = |reason| ConfigError::Malformed { path: path.to_owned(), model: Self::MODEL, reason };
        files::check_json(json).map_err(malformed)?;
        let file = serde_json::from_str::<Self::File>(json)
            .map_err(|error| malformed(with_key::<Self::File>(json, shortened(&error.to_string()))))?;
        let config = Self::from_file(file).map_err(|wrong| wrong.of(path))?;
        config.check().map_err(|wrong| wrong.of(path))?;
        Ok(config)
    }

    /// The text of a `config.json`, in a form that Transformers reads.
    ///
    /// # Errors
    /// Never in practice.
    fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(&self.to_file()).map(|text| text + "\n")
    }
}

/// The reason with the key that it is about, where a single key is to blame: the parser knows only lines and columns.
pub(crate) fn with_key<T: DeserializeOwned>(json: &str, reason: String) -> String {
    let Ok(serde_json::Value::Object(all)) = serde_json::from_str(json) else { return reason };
    let is_wrong = |(key, value): &(String, serde_json::Value)| {
        let alone = serde_json::Map::from_iter([(key.clone(), value.clone())]);
        serde_json::from_value::<T>(serde_json::Value::Object(alone)).is_err()
    };
    match all.into_iter().find(is_wrong) {
        Some((key, _)) => format!("{}: {reason}", shortened(&key)),
        None => reason,
    }
}

/// A size, and what sizes may be.
pub(crate) type Size = (&'static str, i64, RangeInclusive<i64>);

/// The first size that no model has.
pub(crate) fn check_sizes(sizes: impl IntoIterator<Item = Size>) -> Result<(), WrongValue> {
    match sizes.into_iter().find(|(_, size, wanted)| !wanted.contains(size)) {
        Some((key, found, wanted)) => {
            Err(WrongValue::new(key, found, format!("a number from {} to {}", wanted.start(), wanted.end())))
        }
        None => Ok(()),
    }
}

/// The first number of layers that no model has.
pub(crate) fn check_depths(depths: impl IntoIterator<Item = (&'static str, usize)>) -> Result<(), WrongValue> {
    match depths.into_iter().find(|(_, depth)| !(1..=10_000).contains(depth)) {
        Some((key, found)) => Err(WrongValue::new(key, found, "a number from 1 to 10000")),
        None => Ok(()),
    }
}

/// The first rate of dropout that is not a probability.
pub(crate) fn check_probabilities(rates: impl IntoIterator<Item = (&'static str, f64)>) -> Result<(), WrongValue> {
    match rates.into_iter().find(|(_, rate)| !(0.0..=1.0).contains(rate)) {
        Some((key, rate)) => Err(WrongValue::new(key, format!("{rate:?}"), "a probability from 0 to 1")),
        None => Ok(()),
    }
}

/// What is added to variances, and the spread of new weights.
pub(crate) fn check_numbers((eps_key, eps): (&'static str, f64), initializer_range: f64) -> Result<(), WrongValue> {
    // Less is zero in float32, and divides by the variance of equal numbers.
    if !(1e-30..=1.0).contains(&eps) {
        return Err(WrongValue::new(eps_key, format!("{eps:?}"), "a number from 1e-30 to 1"));
    }
    if !(0.0..=10.0).contains(&initializer_range) {
        let found = format!("{initializer_range:?}");
        return Err(WrongValue::new("initializer_range", found, "a number from 0 to 10"));
    }
    Ok(())
}

/// Fewer parameters than `most`. `key` is a size that has a share in them, `found` its value.
pub(crate) fn check_num_parameters(
    (key, found): (&'static str, i64),
    num_parameters: i128,
    most: i128,
) -> Result<(), WrongValue> {
    if num_parameters > most {
        let wanted = format!("sizes of a model with at most {most} parameters, and these make {num_parameters}");
        return Err(WrongValue::new(key, found, wanted));
    }
    Ok(())
}

/// A number that another one must be a multiple of.
pub(crate) fn check_divides(
    (key, parts): (&'static str, i64),
    (whole_key, whole): (&'static str, i64),
) -> Result<(), WrongValue> {
    if parts <= 0 || whole % parts != 0 {
        return Err(WrongValue::new(key, parts, format!("a divisor of {whole_key}, which is {whole}")));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(default)]
    #[allow(dead_code)]
    struct File {
        width: i64,
        name: String,
    }

    #[test]
    fn the_key_that_is_to_blame_is_named() {
        let rows = [
            (r#"{"name": "a", "width": "b"}"#, "width: why"),
            (r#"{"name": 7}"#, "name: why"),
            (r#"{"name": "a"}"#, "why"),
            ("no JSON", "why"),
        ];
        for (json, wanted) in rows {
            assert_eq!(with_key::<File>(json, "why".to_owned()), wanted, "{json}");
        }
    }
}
