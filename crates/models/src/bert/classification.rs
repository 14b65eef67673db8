//! BERT with a classifier on its pooled first token.

use super::init::linear;
use super::{BertConfig, BertModel};
use crate::PretrainedModel;
use crate::problem::{ProblemType, classification_loss};
use crate::tensor_parallel::{encoder_plan, features};
use accelerate::nn::{Dropout, Linear, Module, ParamStore, Path};
use accelerate::tch::Tensor;
use accelerate::{ParallelStyle, Result, TensorParallelPlan, TensorTree};

/// What the model takes: int64 tensors.
#[derive(Debug, TensorTree)]
pub struct Batch {
    /// Ids of word pieces `[batch, length]`.
    pub input_ids: Tensor,
    /// 1 for a token, 0 for what fills up the row `[batch, length]`.
    pub attention_mask: Tensor,
    /// Segments `[batch, length]`.
    pub token_type_ids: Tensor,
    /// Classes `[batch]`.
    pub labels: Tensor,
}

/// BERT with a linear classifier on the pooled first token; parameter names are those of
/// `transformers.BertForSequenceClassification`.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::bert::{Batch, BertConfig, BertForSequenceClassification};
///
/// let store = ParamStore::new(Device::Cpu);
/// let model = BertForSequenceClassification::new(&store.root(), &BertConfig::small(50, 2, 16))?;
/// let batch = Batch {
///     input_ids: Tensor::from_slice2(&[[2i64, 7, 8, 3], [2, 9, 3, 0]]),
///     attention_mask: Tensor::from_slice2(&[[1i64, 1, 1, 1], [1, 1, 1, 0]]),
///     token_type_ids: Tensor::from_slice2(&[[0i64; 4]; 2]),
///     labels: Tensor::from_slice(&[1i64, 0]),
/// };
/// let output = model.forward(&batch)?;
/// assert_eq!(output.logits.size(), [2, 2]);
/// assert_eq!(output.loss.size(), [0i64; 0]);
/// assert_eq!(store.parameters()[0].name(), "bert.embeddings.word_embeddings.weight");
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct BertForSequenceClassification {
    store: ParamStore,
    bert: BertModel,
    dropout: Dropout,
    classifier: Linear,
    /// Features of a head of attention.
    head_dim: usize,
    problem_type: Option<ProblemType>,
}

/// What a forward pass gives.
#[derive(Debug, TensorTree)]
pub struct SequenceClassifierOutput {
    /// Mean loss over the batch, by [`ProblemType`] the cross-entropy: a scalar.
    pub loss: Tensor,
    /// Scores before softmax `[batch, num_labels]`.
    pub logits: Tensor,
}

impl BertForSequenceClassification {
    /// Registers all parameters under `path`, with BERT's random initial values.
    ///
    /// # Errors
    /// The names are taken, or a dropout rate is not a probability.
    pub fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        let dropout = config.classifier_dropout.unwrap_or(config.hidden_dropout_prob);
        Ok(Self {
            store: path.store().clone(),
            bert: BertModel::new(&(path / "bert"), config)?,
            dropout: Dropout::new(path / "dropout", dropout)?,
            classifier: linear(path / "classifier", config.hidden_size, config.num_labels() as i64, config)?,
            head_dim: features(config.hidden_size.checked_div(config.num_attention_heads)),
            problem_type: config.problem_type,
        })
    }

    /// Number of classes.
    pub fn num_labels(&self) -> usize {
        self.classifier.out_features() as usize
    }

    /// Scores before softmax `[batch, num_labels]`; the labels of the batch are not looked at.
    ///
    /// # Errors
    /// A token, a position or a segment that the model does not have; texts longer than it allows.
    pub fn logits(&self, batch: &Batch) -> Result<Tensor> {
        let Batch { input_ids, attention_mask, token_type_ids, .. } = batch;
        let hidden = self.bert.forward(input_ids, Some(attention_mask), Some(token_type_ids))?;
        self.classifier.forward(&self.dropout.forward(&self.bert.pooled(&hidden)?)?)
    }
}

impl PretrainedModel for BertForSequenceClassification {
    type Config = BertConfig;

    const BASE: &'static str = "bert.";
    const HEADS: &'static [&'static str] = &["classifier.", "bert.pooler."];

    fn from_config(path: &Path, config: &BertConfig) -> Result<Self> {
        Self::new(path, config)
    }

    /// Without the `gamma` and `beta` of old norms.
    fn todays_name(name: &str) -> String {
        match name.rsplit_once('.') {
            Some((module, "gamma")) if module.ends_with("LayerNorm") => format!("{module}.weight"),
            Some((module, "beta")) if module.ends_with("LayerNorm") => format!("{module}.bias"),
            _ => name.to_owned(),
        }
    }

    /// Heads of pretraining, and the numbers 0, 1, 2, ... that old files keep as a buffer.
    fn is_of_no_use(name: &str) -> bool {
        name.starts_with("cls.") || name.ends_with("embeddings.position_ids")
    }
}

impl Module for BertForSequenceClassification {
    type Input = Batch;
    type Output = SequenceClassifierOutput;

    fn forward(&self, batch: &Batch) -> Result<SequenceClassifierOutput> {
        let logits = self.logits(batch)?;
        let loss = classification_loss(&logits, &batch.labels, self.problem_type)?;
        Ok(SequenceClassifierOutput { loss, logits })
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    /// Heads of attention and inner features are divided, and the vocabulary.
    fn tensor_parallel_plan(&self) -> Option<TensorParallelPlan> {
        let plan = encoder_plan("bert.encoder.layer", "self", self.head_dim);
        Some(plan.with("bert.embeddings.word_embeddings", ParallelStyle::EmbeddingRowwise))
    }
}
