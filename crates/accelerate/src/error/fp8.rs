//! What can go wrong with computing in FP8.

use super::nn::kind_name;
use tch::Kind;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Fp8Error {
    #[error(
        "mixed_precision is fp8, and {device} cannot multiply FP8 numbers, for which a GPU needs compute capability 8.9 or above; \
         choose mixed_precision bf16"
    )]
    Device { device: String, source: tch::TchError },

    #[error(
        "the layer {path} has delayed scaling, and a backward pass was made without the accelerator, so that its scales would stay as they \
         are; call Accelerator::backward(&loss) in place of loss.backward()"
    )]
    OtherBackward { path: String },

    #[error("the layer {path} cannot compute in FP8 (mixed_precision fp8): {why}; choose mixed_precision bf16")]
    Layer { path: String, why: &'static str },

    #[error(
        "the layer {path} computes in FP8, and cannot take an input of shape {found:?} and element type {}; it takes {wanted}",
        kind_name(.kind)
    )]
    Input { path: String, wanted: String, found: Vec<i64>, kind: Option<Kind> },

    #[error(
        "the layer {path} got {rows} rows, and a product in FP8 on a GPU adds up over a multiple of 16; set pad_inner_dim to true, or \
         make batches of such a size"
    )]
    Rows { path: String, rows: i64 },

    #[error(
        "FP8RecipeKwargs was given, and mixed_precision is {found}; it counts with mixed_precision fp8, so choose that, or leave it out"
    )]
    WithoutPrecision { found: String },

    #[error(
        "join_uneven_inputs does not go with delayed scaling of FP8: each backward pass compares largest values over ranks, and ranks \
         that are out of batches have none; use even batches, or backend AO"
    )]
    Join,
}

impl Fp8Error {
    /// Is it about what was asked for, and not about an input?
    pub(crate) fn is_config(&self) -> bool {
        !matches!(self, Self::Input { .. } | Self::Rows { .. })
    }
}
