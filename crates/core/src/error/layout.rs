//! What can be wrong with a layout.

use std::ops::Range;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutErrorKind {
    #[error("a tensor of shape {shape:?} has more elements than can be counted")]
    TooLarge { shape: Vec<usize> },
    #[error("block_elements is 0, and a block has at least 1 element")]
    EmptyBlocks,
    #[error(
        "a slice of a dim was asked for of {layout}, which is a part already; slice the full tensor, and then take a flat range of it"
    )]
    SliceOfPart { layout: String },
    #[error("a tensor of shape {shape:?} has no indices {indices:?} of dim {dim}")]
    NoSuchIndices { dim: usize, indices: Range<usize>, shape: Vec<usize> },
    #[error("dim {dim} of a tensor of shape {shape:?} does not consist of {parts} equal parts")]
    UnevenParts { dim: usize, parts: usize, shape: Vec<usize> },
    #[error("elements {elements:?} were asked for of {layout}, which has {held}")]
    NoSuchElements { elements: Range<usize>, layout: String, held: usize },
    #[error(
        "elements {elements:?} of {layout} cut through a block of {block_elements}; begin and end at multiples of \
         {block_elements}, or at the end"
    )]
    CutBlock { elements: Range<usize>, layout: String, block_elements: usize },
}
