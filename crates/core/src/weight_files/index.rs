//! The index that says which file holds which tensor.

use super::json::{AtMost, Entries, Object};
use super::shown::{shortened_reason, shown};
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::{Error, Result};
use serde::Serialize;
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Most values in the metadata.
const MAX_NOTES: usize = 10_000;
/// The most that file systems allow.
const MAX_FILE_NAME_BYTES: usize = 255;

/// The contents of `model.safetensors.index.json`.
///
/// ```
/// use accelerate_core::weight_files::Index;
/// let index = Index::from_json(r#"{
///     "metadata": {"total_size": 12},
///     "weight_map": {"bias": "model-00002-of-00002.safetensors", "weight": "model-00001-of-00002.safetensors"}
/// }"#)?;
/// assert_eq!(index.files().len(), 2);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Index {
    /// What is known about the whole. May be missing in files from elsewhere.
    pub metadata: IndexMetadata,
    /// Tensor name to name of the file that holds it, in the folder of the index.
    pub weight_map: BTreeMap<String, String>,
}

/// The `metadata` of an [`Index`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IndexMetadata {
    /// Bytes of all tensors together. 0 when a file from elsewhere does not say, or says no whole number.
    pub total_size: u64,
    /// Whatever else the writer noted, kept as it is.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl Index {
    /// Longest text that is read as an index: some times as long as those of the largest models.
    pub const MAX_BYTES: u64 = 50_000_000;

    /// The name of the index file for weight files called `stem`.
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// assert_eq!(Index::file_name("model"), "model.safetensors.index.json");
    /// assert_eq!(Index::file_name("pytorch_model"), "pytorch_model.bin.index.json");
    /// ```
    pub fn file_name(stem: &str) -> String {
        format!("{stem}.{}.index.json", super::extension_of(stem))
    }

    /// Reads an index.
    ///
    /// # Errors
    ///
    /// [`Error::is_weight_files`]: not JSON, no `weight_map`, a key that is there twice, or a file name that leads out of the
    /// index's own folder (an index may come from anywhere, and must not make the reader open other files).
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// let error = Index::from_json(r#"{"weight_map": {"weight": "../secret"}}"#).unwrap_err();
    /// assert!(error.to_string().contains("\"../secret\""));
    /// ```
    pub fn from_json(json: &str) -> Result<Self> {
        // Not the parser's error itself, which repeats what it has found, however long that is.
        serde_json::from_str::<Contents>(json)
            .map(|contents| contents.0)
            .map_err(|cause| Error::new(Kind::Index { reason: shortened_reason(&cause.to_string()) }))
    }

    /// Writes the index as JSON, indented by two, with a newline at the end.
    ///
    /// # Errors
    ///
    /// [`Error::is_weight_files`]: never in practice; JSON has no way to write some metadata values.
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// let json = Index::default().to_json()?;
    /// assert_eq!(Index::from_json(&json)?, Index::default());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn to_json(&self) -> Result<String> {
        match serde_json::to_string_pretty(self) {
            Ok(json) => Ok(json + "\n"),
            Err(cause) => Err(Error::new(Kind::Index { reason: cause.to_string() }).caused_by(cause)),
        }
    }

    /// The files named, each once, in order of name.
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// assert!(Index::default().files().is_empty());
    /// ```
    pub fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// An index as it is read.
struct Contents(Index);

impl<'de> Deserialize<'de> for Contents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = deserializer.deserialize_map(Object(Parts::default()))?;
        let WeightMap(weight_map) = parts.weight_map.ok_or_else(|| de::Error::missing_field("weight_map"))?;
        Ok(Self(Index { metadata: parts.metadata, weight_map }))
    }
}

#[derive(Default)]
struct Parts {
    metadata: IndexMetadata,
    weight_map: Option<WeightMap>,
}

impl<'de> Entries<'de> for Parts {
    const WANTED: &'static str = "an object with weight_map";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            // Python reads the weight map alone, so that there may be nothing.
            "metadata" => self.metadata = map.next_value::<Option<_>>()?.unwrap_or_default(),
            "weight_map" => self.weight_map = Some(map.next_value()?),
            _ => {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for IndexMetadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let notes = Notes { metadata: Self::default(), left: MAX_NOTES };
        deserializer.deserialize_map(Object(notes)).map(|notes| notes.metadata)
    }
}

struct Notes {
    metadata: IndexMetadata,
    /// How many values there may still be.
    left: usize,
}

impl<'de> Entries<'de> for Notes {
    const WANTED: &'static str = "an object as metadata";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        let value = map.next_value_seed(AtMost(&mut self.left))?;
        if key == "total_size" {
            self.metadata.total_size = size(&value);
        } else {
            self.metadata.other.insert(key.to_owned(), value);
        }
        Ok(())
    }
}

/// Whatever is there in place of a size: nobody needs it to read weights. 0 if it is no whole number.
fn size(value: &Value) -> u64 {
    const TOO_LARGE: f64 = 18_446_744_073_709_551_616.0;
    let whole = |number: &f64| number.fract() == 0.0 && (0.0..TOO_LARGE).contains(number);
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|number| number as u64)).unwrap_or(0)
}

#[derive(Default)]
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(Self::default()))
    }
}

impl<'de> Entries<'de> for WeightMap {
    const WANTED: &'static str = "the names of files by the names of tensors as weight_map";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        let file: String = map.next_value()?;
        if !is_plain_file_name(&file) {
            let (name, file) = (shown(key), shown(&file));
            return Err(de::Error::custom(Kind::FileOutsideFolder { name, file }));
        }
        self.0.insert(key.to_owned(), file);
        Ok(())
    }
}

pub(super) fn is_plain_file_name(name: &str) -> bool {
    let is_within = !["", ".", ".."].contains(&name) && !name.contains(['/', '\\']);
    is_within && name.len() <= MAX_FILE_NAME_BYTES && !name.chars().any(char::is_control)
}
