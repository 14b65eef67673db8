//! What models that classify images have in common.

use crate::WrongValue;
use crate::problem::{ProblemType, classification_loss};
use accelerate::tch::Tensor;
use accelerate::{Result, TensorTree};
use std::collections::BTreeMap;

/// What a model that classifies images takes.
#[derive(Debug, TensorTree)]
pub struct ImageClassificationInput {
    /// `[batch, num_channels, height, width]`, floating point.
    pub pixel_values: Tensor,
    /// Classes `[batch]`, int64, or what [`ProblemType`] says. `None`: no loss.
    pub labels: Option<Tensor>,
}

/// What a forward pass gives.
#[derive(Debug, TensorTree)]
pub struct ImageClassifierOutput {
    /// Mean loss over the batch, by [`ProblemType`] the cross-entropy: a scalar. `None` without labels.
    pub loss: Option<Tensor>,
    /// Scores before softmax `[batch, num_labels]`.
    pub logits: Tensor,
}

impl ImageClassifierOutput {
    pub(crate) fn new(logits: Tensor, labels: Option<&Tensor>, problem_type: Option<ProblemType>) -> Result<Self> {
        let loss = labels.map(|labels| classification_loss(&logits, labels, problem_type)).transpose()?;
        Ok(Self { loss, logits })
    }
}

/// `LABEL_0`, `LABEL_1`, ...
pub(crate) fn label_names(num_labels: usize) -> BTreeMap<usize, String> {
    (0..num_labels).map(|label| (label, format!("LABEL_{label}"))).collect()
}

pub(crate) fn labels_by_name(id2label: &BTreeMap<usize, String>) -> BTreeMap<String, usize> {
    id2label.iter().map(|(&label, name)| (name.clone(), label)).collect()
}

pub(crate) fn check_labels(id2label: &BTreeMap<usize, String>) -> Result<(), WrongValue> {
    if !id2label.keys().copied().eq(0..id2label.len()) || id2label.is_empty() {
        let found = format!("{:?}", id2label.keys().collect::<Vec<_>>());
        return Err(WrongValue::new("id2label", found, "names for 0, 1, 2, ... without a gap"));
    }
    Ok(())
}
