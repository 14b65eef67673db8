//! The reference's estimate: what a model takes to be loaded and to be trained with Adam, by element type.

use super::sharded::{modules, numbered_module};
use super::{Inventory, ParameterEntry};
use crate::config::FloatType;
use crate::names::spelled_enum;
use serde::Serialize;
use std::collections::BTreeMap;

spelled_enum! {
    /// An element type in which a model could be loaded (`--dtypes` of `accelerate estimate-memory`). The reference has no
    /// `bfloat16` there.
    ///
    /// ```
    /// use accelerate_core::plan::EstimateDtype;
    /// assert_eq!("int4".parse::<EstimateDtype>()?, EstimateDtype::Int4);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    EstimateDtype, "dtype to estimate for" {
        /// 32 bits.
        Float32 = "float32",
        /// 16 bits.
        Float16 = "float16",
        /// 16 bits with the range of `float32`.
        BFloat16 = "bfloat16",
        /// 8 bits, not to be trained.
        Int8 = "int8",
        /// 4 bits, not to be trained.
        Int4 = "int4",
    }
}

impl EstimateDtype {
    /// The reference's choices where nothing is said.
    pub const DEFAULT: [Self; 4] = [Self::Float32, Self::Float16, Self::Int8, Self::Int4];

    /// The type to train in; `None` for those that cannot be trained.
    ///
    /// ```
    /// use accelerate_core::plan::EstimateDtype;
    /// assert_eq!(EstimateDtype::Int8.float_type(), None);
    /// ```
    pub const fn float_type(self) -> Option<FloatType> {
        match self {
            Self::Float32 => Some(FloatType::Float32),
            Self::Float16 => Some(FloatType::Float16),
            Self::BFloat16 => Some(FloatType::BFloat16),
            Self::Int8 | Self::Int4 => None,
        }
    }

    /// How many elements take as much as one of `float32`.
    const fn per_float32(self) -> u64 {
        match self {
            Self::Float32 => 1,
            Self::Float16 | Self::BFloat16 => 2,
            Self::Int8 => 4,
            Self::Int4 => 8,
        }
    }
}

/// What a model takes in one element type, on one process.
///
/// ```
/// use accelerate_core::plan::{EstimateDtype, Inventory, estimate_memory};
/// assert_eq!(estimate_memory(&Inventory::default(), EstimateDtype::Float32).training_bytes, Some(0));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// The element type.
    pub dtype: EstimateDtype,
    /// The path of the largest layer; empty for a model without parameters.
    pub largest_layer: String,
    /// Its bytes.
    pub largest_layer_bytes: u64,
    /// Of the whole model.
    pub total_bytes: u64,
    /// Of training it with Adam on a batch of one row; `None` for types that cannot be trained.
    pub training_bytes: Option<u64>,
}

/// What a model takes to be loaded in `dtype`, and to be trained (`calculate_maximum_sizes` of the reference,
/// `utils/modeling.py`, and `estimate_training_usage`, `commands/estimate.py`).
///
/// Parameters and gradients of one size, and twice that for Adam: four times the model in `float32`. In 16 bits the largest
/// moment is that of Adam's state, twice the model in `float32`. A layer is a module without modules in it, and one of a
/// list, such as the block of a transformer, is never divided: the reference asks the model's class (`_no_split_modules`),
/// which files do not know.
///
/// ```
/// use accelerate_core::plan::{EstimateDtype, Inventory, ParameterEntry, estimate_memory};
/// let entry = |name, size| ParameterEntry::new(name, &[size], "bfloat16", 2);
/// let inventory = Inventory { parameters: vec![entry("embed.weight", 10), entry("h.0.up.weight", 8), entry("h.0.down.weight", 8)] };
/// let estimate = estimate_memory(&inventory, EstimateDtype::Float16);
/// assert_eq!((estimate.largest_layer.as_str(), estimate.largest_layer_bytes), ("h.0", 2 * 16));
/// assert_eq!((estimate.total_bytes, estimate.training_bytes), (2 * 26, Some(2 * 4 * 26)));
/// ```
pub fn estimate_memory(inventory: &Inventory, dtype: EstimateDtype) -> MemoryEstimate {
    let mut total: u64 = 0;
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    for parameter in &inventory.parameters {
        let bytes = float32_bytes(parameter);
        total = total.saturating_add(bytes);
        let layer = layers.entry(layer_of(&parameter.name)).or_default();
        *layer = layer.saturating_add(bytes);
    }
    // The first of equals, as the reference says it.
    let (largest_layer, largest) = layers.into_iter().rev().max_by_key(|&(_, bytes)| bytes).unwrap_or_default();
    let training_bytes = match dtype {
        EstimateDtype::Float32 => Some(total.saturating_mul(4)),
        EstimateDtype::Float16 | EstimateDtype::BFloat16 => Some(total.saturating_mul(2)),
        EstimateDtype::Int8 | EstimateDtype::Int4 => None,
    };
    MemoryEstimate {
        dtype,
        largest_layer: largest_layer.to_owned(),
        largest_layer_bytes: largest / dtype.per_float32(),
        total_bytes: total / dtype.per_float32(),
        training_bytes,
    }
}

/// The reference makes every model in `float32`, where integers stay what they are.
fn float32_bytes(parameter: &ParameterEntry) -> u64 {
    let element_bytes = if parameter.is_floating_point() { 4 } else { parameter.element_bytes };
    parameter.num_elements().saturating_mul(element_bytes) as u64
}

/// What stands in no module is a layer of its own.
fn layer_of(name: &str) -> &str {
    match numbered_module(name) {
        "" => modules(name).next_back().unwrap_or(name),
        block => block,
    }
}
