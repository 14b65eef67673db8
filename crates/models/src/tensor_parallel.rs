//! What the plans of models for tensor parallelism have in common.

use accelerate::{LayerRule, ParallelStyle, TensorParallelPlan};

/// A number of features, of which there is at least one.
pub(crate) fn features(number: Option<i64>) -> usize {
    number.and_then(|number| usize::try_from(number).ok()).unwrap_or(1).max(1)
}

/// Layers of an encoder under `path`, by the names that BERT and ViT have in common; `heads` is the path of the projections within a
/// layer.
pub(crate) fn encoder_plan(path: &str, heads: &str, head_dim: usize) -> TensorParallelPlan {
    let colwise = LayerRule::from(ParallelStyle::Colwise);
    TensorParallelPlan::default()
        .with(format!("{path}.*.attention.{heads}.query"), colwise.with_unit(head_dim))
        .with(format!("{path}.*.attention.{heads}.key"), colwise.with_unit(head_dim))
        .with(format!("{path}.*.attention.{heads}.value"), colwise.with_unit(head_dim))
        .with(format!("{path}.*.attention.output.dense"), LayerRule::from(ParallelStyle::Rowwise).with_unit(head_dim))
        .with(format!("{path}.*.intermediate.dense"), colwise)
        .with(format!("{path}.*.output.dense"), ParallelStyle::Rowwise)
}
