//! What the labels of a classifier mean, and the loss that follows from it.

use crate::WrongValue;
use crate::image_classification::label_names;
use accelerate::Result;
use accelerate::tch::{Kind, Reduction, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What labels are (`problem_type` of Transformers). Where a configuration does not say it, a model with one label is for regression, and
/// any other has one class for each row, if labels are whole numbers, or several.
///
/// ```
/// let json = r#"{"model_type": "bert", "problem_type": "multi_label_classification"}"#;
/// use accelerate_models::{PretrainedConfig, ProblemType, bert::BertConfig};
/// let config = BertConfig::from_json(json, std::path::Path::new("config.json"))?;
/// assert_eq!(config.problem_type, Some(ProblemType::MultiLabelClassification));
/// # Ok::<(), accelerate_models::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// Numbers, `[batch]` for one label and `[batch, num_labels]` for more: the loss is their mean squared error.
    Regression,
    /// Classes, `[batch]`, int64: the loss is their cross-entropy.
    SingleLabelClassification,
    /// 0 or 1 for each class, `[batch, num_labels]`: the loss is their binary cross-entropy.
    MultiLabelClassification,
}

/// Mean loss of logits `[batch, num_labels]`, a scalar.
pub(crate) fn classification_loss(
    logits: &Tensor,
    labels: &Tensor,
    problem_type: Option<ProblemType>,
) -> Result<Tensor> {
    let num_labels = logits.size().last().copied().unwrap_or_default();
    let is_whole = matches!(labels.f_kind()?, Kind::Int64 | Kind::Int);
    let problem = problem_type.unwrap_or(match (num_labels, is_whole) {
        (1, _) => ProblemType::Regression,
        (_, true) => ProblemType::SingleLabelClassification,
        (_, false) => ProblemType::MultiLabelClassification,
    });
    Ok(match problem {
        ProblemType::Regression => {
            let labels = labels.f_to_kind(logits.f_kind()?)?;
            match num_labels {
                1 => logits.f_squeeze()?.f_mse_loss(&labels.f_squeeze()?, Reduction::Mean)?,
                _ => logits.f_mse_loss(&labels, Reduction::Mean)?,
            }
        }
        ProblemType::SingleLabelClassification => {
            logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?
        }
        ProblemType::MultiLabelClassification => {
            let labels = labels.f_to_kind(logits.f_kind()?)?;
            let no_weight = None::<Tensor>;
            logits.f_binary_cross_entropy_with_logits(
                &labels,
                no_weight.as_ref(),
                no_weight.as_ref(),
                Reduction::Mean,
            )?
        }
    })
}

/// The names of the classes: a file may say their number alone.
pub(crate) fn labels_of(
    id2label: BTreeMap<usize, String>,
    num_labels: Option<usize>,
) -> Result<BTreeMap<usize, String>, WrongValue> {
    // No file has more than is checked afterwards.
    const MOST_LABELS: usize = 1_000_000;
    match num_labels {
        None => Ok(id2label),
        Some(number) if number == id2label.len() => Ok(id2label),
        // What a file has that does not name them.
        Some(number) if id2label == label_names(2) && (1..=MOST_LABELS).contains(&number) => Ok(label_names(number)),
        Some(number) => {
            let wanted = format!("the number of names in id2label, {}", id2label.len());
            Err(WrongValue::new("num_labels", number, wanted))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// By the definitions of `torch.nn.MSELoss`, `CrossEntropyLoss` and `BCEWithLogitsLoss`.
    #[rstest]
    #[case::one_label(&[[0.5f32], [2.0]], Tensor::from_slice(&[0i64, 1]), None, (0.25 + 1.0) / 2.0)]
    #[case::classes(&[[0.0f32, 0.0]], Tensor::from_slice(&[1i64]), None, 2f64.ln())]
    #[case::several_classes(&[[0.0f32, 0.0]], Tensor::from_slice2(&[[1.0f32, 0.0]]), None, 2f64.ln())]
    #[case::numbers(
        &[[1.0f32, 2.0]], Tensor::from_slice2(&[[0.0f32, 0.0]]), Some(ProblemType::Regression), 2.5
    )]
    #[case::told(&[[3.0f32]], Tensor::from_slice(&[0i64]), Some(ProblemType::SingleLabelClassification), 0.0)]
    fn the_loss_follows_from_what_labels_are<const N: usize>(
        #[case] logits: &[[f32; N]],
        #[case] labels: Tensor,
        #[case] problem_type: Option<ProblemType>,
        #[case] wanted: f64,
    ) {
        let loss = classification_loss(&Tensor::from_slice2(logits), &labels, problem_type).unwrap();
        assert!((loss.double_value(&[]) - wanted).abs() < 1e-6, "{loss}");
    }
}
