//! The index of a folder of offloaded weights, as the reference writes it.

use super::index::is_plain_file_name;
use super::json::{Entries, Object};
use super::shown::{shortened_reason, shown};
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::{Error, Result};
use serde::Serialize;
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess};
use std::collections::BTreeMap;

/// Most dims of a tensor.
const MAX_DIMS: usize = 64;

/// The contents of `index.json` in a folder of offloaded weights: what each tensor is, by name. Its elements are in
/// `{name}.dat`, in the order of its dims and without anything else, unless a safetensors file is named.
///
/// ```
/// use accelerate_core::weight_files::{OffloadIndex, OffloadedWeight};
/// let index = OffloadIndex::from_json(r#"{"proj.weight": {"dtype": "bfloat16", "shape": [4, 2]}}"#)?;
/// let wanted = OffloadedWeight::Dat { dtype: "bfloat16".into(), shape: vec![4, 2] };
/// assert_eq!(index.weights["proj.weight"], wanted);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct OffloadIndex {
    /// Tensors by name.
    pub weights: BTreeMap<String, OffloadedWeight>,
}

/// Where an offloaded tensor is, and what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum OffloadedWeight {
    /// In a file of its own.
    Dat {
        /// NumPy's name of the element type; `bfloat16` and `float8_*` by PyTorch's.
        dtype: String,
        /// Sizes, outermost dim first; none for a scalar, which is written as one element.
        shape: Vec<usize>,
    },
    /// In a safetensors file of the same folder.
    Safetensors {
        /// The name of the file.
        safetensors_file: String,
        /// The name of the tensor there, if it is another.
        #[serde(skip_serializing_if = "Option::is_none")]
        weight_name: Option<String>,
        /// PyTorch's name of the element type that the tensor is cast to, if it is another.
        #[serde(skip_serializing_if = "Option::is_none")]
        dtype: Option<String>,
    },
}

impl OffloadIndex {
    /// The name of the index in its folder.
    pub const FILE_NAME: &str = "index.json";

    /// Longest text that is read as an index.
    pub const MAX_BYTES: u64 = 50_000_000;

    /// The name of the file that holds a tensor.
    ///
    /// # Errors
    /// [`Error::is_weight_files`]: it would lie in another folder, or no file can have it.
    ///
    /// ```
    /// use accelerate_core::weight_files::OffloadIndex;
    /// assert_eq!(OffloadIndex::dat_file_name("layer.0.weight")?, "layer.0.weight.dat");
    /// assert!(OffloadIndex::dat_file_name("../weight").is_err());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn dat_file_name(tensor: &str) -> Result<String> {
        let file = format!("{tensor}.dat");
        match is_plain_file_name(&file) {
            true => Ok(file),
            false => Err(Kind::FileOutsideFolder { name: shown(tensor), file: shown(&file) }.into()),
        }
    }

    /// Reads an index.
    ///
    /// # Errors
    /// [`Error::is_weight_files`]: not JSON, a key that is there twice, an entry that says neither type and shape nor a file, or a
    /// name that leads out of the folder.
    pub fn from_json(json: &str) -> Result<Self> {
        // Not the parser's error itself, which repeats what it has found, however long that is.
        serde_json::from_str::<Contents>(json)
            .map(|contents| contents.0)
            .map_err(|cause| Error::new(Kind::OffloadIndex { reason: shortened_reason(&cause.to_string()) }))
    }

    /// Writes the index as JSON, indented by two as the reference does.
    ///
    /// # Errors
    /// [`Error::is_weight_files`]: never in practice.
    ///
    /// ```
    /// # use accelerate_core::weight_files::OffloadIndex;
    /// assert_eq!(OffloadIndex::from_json(&OffloadIndex::default().to_json()?)?, OffloadIndex::default());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string_pretty(self)
            .map_err(|cause| Error::new(Kind::OffloadIndex { reason: cause.to_string() }).caused_by(cause))
    }
}

struct Contents(OffloadIndex);

impl<'de> Deserialize<'de> for Contents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_map(Object(Weights::default()))
            .map(|weights| Self(OffloadIndex { weights: weights.0 }))
    }
}

#[derive(Default)]
struct Weights(BTreeMap<String, OffloadedWeight>);

impl<'de> Entries<'de> for Weights {
    const WANTED: &'static str = "an object of tensors";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        OffloadIndex::dat_file_name(key).map_err(de::Error::custom)?;
        let Weight { dtype, shape, safetensors_file, weight_name } = map.next_value()?;
        let weight = match (safetensors_file, dtype, shape) {
            (Some(file), dtype, _) if is_plain_file_name(&file) => {
                OffloadedWeight::Safetensors { safetensors_file: file, weight_name, dtype }
            }
            (Some(file), ..) => {
                return Err(de::Error::custom(Kind::FileOutsideFolder { name: shown(key), file: shown(&file) }));
            }
            (None, Some(dtype), Some(shape)) => OffloadedWeight::Dat { dtype, shape },
            _ => {
                let key = shown(key);
                return Err(de::Error::custom(format_args!(
                    "`{key}` has neither dtype and shape nor safetensors_file"
                )));
            }
        };
        self.0.insert(key.to_owned(), weight);
        Ok(())
    }
}

#[derive(Default)]
struct Weight {
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    safetensors_file: Option<String>,
    weight_name: Option<String>,
}

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(Self::default()))
    }
}

impl<'de> Entries<'de> for Weight {
    const WANTED: &'static str = "an object that says what a tensor is";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "dtype" => self.dtype = map.next_value()?,
            "safetensors_file" => self.safetensors_file = map.next_value()?,
            "weight_name" => self.weight_name = map.next_value()?,
            "shape" => {
                let shape: Vec<usize> = map.next_value()?;
                if shape.len() > MAX_DIMS {
                    return Err(de::Error::custom(format_args!("a shape has {} dims", shape.len())));
                }
                self.shape = Some(shape);
            }
            _ => {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}
