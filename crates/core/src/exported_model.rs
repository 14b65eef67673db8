//! What a package that `accelerate export-model` has made says of itself.

use crate::error::{Result, exported_model::ExportedModelErrorKind as Kind};
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};

/// Under which name the signature stands in the metadata of each program of a package.
pub const METADATA_KEY: &str = "accelerate";
/// The program that computes outputs and gradients.
pub const TRAIN: &str = "train";
/// The program that computes outputs in evaluation mode.
pub const EVAL: &str = "eval";
/// The version of the signature that is written and read.
const VERSION: u32 = 1;

/// What the programs of a package take and give.
///
/// Both take all parameters, all buffers and then the inputs. "train" gives the outputs, of which the first is the loss, and
/// then [`gradients`](Self::gradients); "eval" gives the outputs. Buffers are changed in place.
///
/// ```
/// use accelerate_core::exported_model::Signature;
/// let signature = Signature::parse(
///     r#"{"version": 1, "parameters": [{"name": "weight", "shape": [2], "dtype": "float32", "requires_grad": true}],
///         "buffers": [], "aliases": {}, "inputs": [{"shape": [-1, 2], "dtype": "float32"}], "gradients": [0]}"#,
/// )?;
/// assert_eq!(signature.parameters[0].tensor.shape, [2]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Signature {
    version: u32,
    /// Each once, in the order in which they are given.
    pub parameters: Vec<Parameter>,
    /// In the order in which they are given.
    pub buffers: Vec<Buffer>,
    /// Other names of parameters and buffers, with the name under which each of them is listed.
    pub aliases: BTreeMap<String, String>,
    /// What the model takes, in its order; a size of -1 may vary.
    pub inputs: Vec<TensorType>,
    /// Positions of the parameters whose gradients "train" gives, in its order.
    pub gradients: Vec<usize>,
}

/// Shape and element type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct TensorType {
    /// Sizes of the dims.
    pub shape: Vec<i64>,
    /// The name that PyTorch has for the type of its elements, such as "float32".
    pub dtype: String,
}

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Parameter {
    /// As in the model's state dict.
    pub name: String,
    /// What it is.
    #[serde(flatten)]
    pub tensor: TensorType,
    /// Whether it was to be trained when it was exported.
    pub requires_grad: bool,
}

/// A buffer of the model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Buffer {
    /// As in the model's state dict.
    pub name: String,
    /// What it is.
    #[serde(flatten)]
    pub tensor: TensorType,
    /// Whether it belongs to the model's state dict.
    pub persistent: bool,
}

impl Signature {
    /// Reads what stands in the metadata under [`METADATA_KEY`].
    ///
    /// # Errors
    /// A text that is no signature, or one of another version; a name twice; an alias of nothing; a gradient of no parameter or
    /// two of one; a negative size of a parameter or buffer.
    pub fn parse(text: &str) -> Result<Self> {
        let unreadable = |error: serde_json::Error| Kind::Unreadable { reason: error.to_string() };
        let version = serde_json::from_str::<Version>(text).map_err(unreadable)?.version;
        if version != VERSION {
            return Err(Kind::Version { found: version, wanted: VERSION }.into());
        }
        let signature: Self = serde_json::from_str(text).map_err(unreadable)?;
        signature.check()?;
        Ok(signature)
    }

    fn check(&self) -> Result<()> {
        let stored = || {
            let parameters = self.parameters.iter().map(|parameter| (&parameter.name, &parameter.tensor));
            parameters.chain(self.buffers.iter().map(|buffer| (&buffer.name, &buffer.tensor)))
        };
        let mut names = HashSet::new();
        if let Some(twice) = stored().map(|(name, _)| name).chain(self.aliases.keys()).find(|name| !names.insert(*name))
        {
            return Err(Kind::NameTwice { name: twice.clone() }.into());
        }
        if let Some((alias, of)) = self.aliases.iter().find(|(_, of)| !stored().any(|(name, _)| name == *of)) {
            return Err(Kind::AliasOfNothing { alias: alias.clone(), of: of.clone() }.into());
        }
        if let Some((name, _)) = stored().find(|(_, tensor)| tensor.shape.iter().any(|size| *size < 0)) {
            return Err(Kind::OpenShape { name: name.clone() }.into());
        }
        let mut given = HashSet::new();
        let is_wrong = |position: &&usize| **position >= self.parameters.len() || !given.insert(**position);
        match self.gradients.iter().find(is_wrong) {
            Some(position) => Err(Kind::Gradient { position: *position, num_parameters: self.parameters.len() }.into()),
            None => Ok(()),
        }
    }
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}
