//! Outputs of which each rank has a slice of the last dim.

use crate::error::Result;
use std::fmt::Debug;
use std::ops::Range;
use tch::{Reduction, Tensor};

/// What a layer's output is on ranks that each compute some of its features (colwise tensor parallelism without a gather of the
/// output): found by [`Linear::sharded_output`](super::Linear::sharded_output).
pub trait ShardedOutput: Send + Sync + Debug {
    /// The features that this rank has.
    fn range(&self) -> Range<i64>;

    /// `[.., own features]` to `[.., out_features]`, the same on all ranks. Each rank's slice of the gradient goes back: it has to be
    /// the same on all ranks. Collective over the ranks that divide the layer.
    ///
    /// # Errors
    /// A failure between ranks.
    fn gather(&self, output: &Tensor) -> Result<Tensor>;

    /// Cross-entropy of logits `[rows, own features]` and classes `[rows]`, int64, in float32, the same on all ranks: the mean or the
    /// sum over the rows whose class is not `ignore_index`, a scalar, or with [`Reduction::None`] that of each row `[rows]`, 0 where its
    /// class is `ignore_index`. The mean is not a number if all rows are ignored. Logits are never gathered: two numbers of each row
    /// travel, and its largest. Method: Shoeybi et al., arXiv 1909.08053, section 3. Collective over the ranks that divide the layer.
    ///
    /// # Errors
    /// A class that does not exist; [`Reduction::Other`]; a failure between ranks.
    fn cross_entropy(
        &self,
        logits: &Tensor,
        classes: &Tensor,
        reduction: Reduction,
        ignore_index: i64,
    ) -> Result<Tensor>;
}
