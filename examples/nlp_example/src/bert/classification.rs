//! The whole model: embeddings, encoder, pooled first token, classifier.

use super::BertConfig;
use super::embeddings::Embeddings;
use super::encoder::Encoder;
use super::init::linear;
use crate::batch::Batch;
use accelerate::nn::{Dropout, Linear, Module, ParamStore, Path};
use accelerate::tch::{Kind, Reduction, Tensor};
use accelerate::{Result, TensorTree};

/// BERT with a linear classifier on the pooled first token; parameter names are those of
/// `transformers.BertForSequenceClassification`.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Tensor};
/// use nlp_example::batch::Batch;
/// use nlp_example::bert::{BertConfig, BertForSequenceClassification};
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
    embeddings: Embeddings,
    encoder: Encoder,
    pooler: Linear,
    dropout: Dropout,
    classifier: Linear,
}

/// What a forward pass gives.
#[derive(Debug, TensorTree)]
pub struct SequenceClassifierOutput {
    /// Mean cross-entropy over the batch: a scalar.
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
        let bert = path / "bert";
        let hidden = config.hidden_size;
        let dropout = config.classifier_dropout.unwrap_or(config.hidden_dropout_prob);
        Ok(Self {
            store: path.store().clone(),
            embeddings: Embeddings::new(&(&bert / "embeddings"), config)?,
            encoder: Encoder::new(&(&bert / "encoder"), config)?,
            pooler: linear(&bert / "pooler" / "dense", hidden, hidden, config)?,
            dropout: Dropout::new(path, dropout)?,
            classifier: linear(path / "classifier", hidden, config.num_labels() as i64, config)?,
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
        let mask = batch.attention_mask.f_to_kind(Kind::Bool)?.f_unsqueeze(1)?.f_unsqueeze(1)?;
        let hidden = self.embeddings.forward(&batch.input_ids, &batch.token_type_ids)?;
        let hidden = self.encoder.forward(hidden, &mask)?;
        let first_token = hidden.f_select(1, 0)?;
        let pooled = self.pooler.forward(&first_token)?.f_tanh()?;
        self.classifier.forward(&self.dropout.forward(&pooled)?)
    }
}

impl Module for BertForSequenceClassification {
    type Input = Batch;
    type Output = SequenceClassifierOutput;

    fn forward(&self, batch: &Batch) -> Result<SequenceClassifierOutput> {
        let logits = self.logits(batch)?;
        let no_weight: Option<Tensor> = None;
        let loss = logits.f_cross_entropy_loss(&batch.labels, no_weight, Reduction::Mean, -100, 0.0)?;
        Ok(SequenceClassifierOutput { loss, logits })
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}
