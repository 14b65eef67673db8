//! The index that says which file holds which tensor.

use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// What is known about the whole. May be missing in files from elsewhere.
    #[serde(default)]
    pub metadata: IndexMetadata,
    /// Tensor name to name of the file that holds it, in the folder of the index.
    pub weight_map: BTreeMap<String, String>,
}

/// The `metadata` of an [`Index`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IndexMetadata {
    /// Bytes of all tensors together. 0 when a file from elsewhere does not say.
    #[serde(default)]
    pub total_size: u64,
    /// Whatever else the writer noted, kept as it is.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl Index {
    /// The name of the index file for weight files called `stem`.
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// assert_eq!(Index::file_name("model"), "model.safetensors.index.json");
    /// ```
    pub fn file_name(stem: &str) -> String {
        format!("{stem}.{}.index.json", super::EXTENSION)
    }

    /// Reads an index.
    ///
    /// # Errors
    ///
    /// [`Error::is_weight_files`]: not JSON, no `weight_map`, or a file name that leads out of the index's own
    /// folder (an index may come from anywhere, and must not make the reader open other files).
    ///
    /// ```
    /// # use accelerate_core::weight_files::Index;
    /// let error = Index::from_json(r#"{"weight_map": {"weight": "../secret"}}"#).unwrap_err();
    /// assert!(error.to_string().contains("\"../secret\""));
    /// ```
    pub fn from_json(json: &str) -> Result<Self> {
        let index: Self = serde_json::from_str(json)
            .map_err(|cause| Error::new(Kind::Index { reason: cause.to_string() }).caused_by(cause))?;
        let outside = index
            .weight_map
            .iter()
            .find(|(_, file)| !is_plain_file_name(file))
            .map(|(name, file)| Kind::FileOutsideFolder { name: name.clone(), file: file.clone() });
        outside.map_or(Ok(index), |kind| Err(kind.into()))
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

fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}
