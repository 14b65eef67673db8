//! The sizes of a BERT model.

use crate::Activation;
use crate::config::{
    PretrainedConfig, WrongValue, check_depths, check_divides, check_num_parameters, check_numbers,
    check_probabilities, check_sizes,
};
use crate::image_classification::{check_labels, label_names};
use crate::problem::{ProblemType, labels_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Some times as many as the largest BERT models have.
const MOST_PARAMETERS: i128 = 20_000_000_000;

/// Sizes and rates of a BERT model; field names and defaults are those of Transformers' `BertConfig`, which are
/// the sizes of `bert-base-uncased`.
///
/// ```
/// use accelerate_models::bert::BertConfig;
///
/// let config = BertConfig::small(8000, 2, 128);
/// assert_eq!((config.hidden_size, config.num_hidden_layers), (128, 2));
/// assert_eq!(BertConfig::default().hidden_size, 768);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Number of tokens.
    pub vocab_size: i64,
    /// Width of the stream of activations.
    pub hidden_size: i64,
    /// Number of encoder layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads; divides `hidden_size`.
    pub num_attention_heads: i64,
    /// Width inside of the feed-forward blocks.
    pub intermediate_size: i64,
    /// Their activation.
    pub hidden_act: Activation,
    /// Dropout after embeddings, attention and feed-forward blocks.
    pub hidden_dropout_prob: f64,
    /// Dropout on attention weights.
    pub attention_probs_dropout_prob: f64,
    /// Dropout before the classifier; `None` means `hidden_dropout_prob`.
    pub classifier_dropout: Option<f64>,
    /// Longest text in tokens.
    pub max_position_embeddings: i64,
    /// Number of segment kinds.
    pub type_vocab_size: i64,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// Added to variances.
    pub layer_norm_eps: f64,
    /// The token that fills up short texts.
    pub pad_token_id: i64,
    /// Names of the classes, by label; at least one.
    pub id2label: BTreeMap<usize, String>,
    /// What labels are, where it does not follow from their number and type.
    pub problem_type: Option<ProblemType>,
}

impl Default for BertConfig {
    fn default() -> Self {
        ConfigFile::default().into()
    }
}

impl BertConfig {
    /// A model that learns from a few thousand sentences in minutes on two processor cores.
    pub fn small(vocab_size: i64, num_labels: usize, max_position_embeddings: i64) -> Self {
        Self {
            vocab_size,
            hidden_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            intermediate_size: 512,
            max_position_embeddings,
            ..Self::default()
        }
        .with_num_labels(num_labels)
    }

    /// The same sizes for another number of classes, named `LABEL_0`, `LABEL_1`, ...
    #[must_use]
    pub fn with_num_labels(self, num_labels: usize) -> Self {
        Self { id2label: label_names(num_labels), ..self }
    }

    /// Number of classes.
    pub fn num_labels(&self) -> usize {
        self.id2label.len()
    }
}

impl PretrainedConfig for BertConfig {
    type File = ConfigFile;

    const MODEL: &'static str = "BERT";

    fn from_file(file: ConfigFile) -> Result<Self, WrongValue> {
        if file.model_type != "bert" {
            return Err(WrongValue::new("model_type", format!("{:?}", file.model_type), "\"bert\""));
        }
        if file.position_embedding_type != "absolute" {
            let found = format!("{:?}", file.position_embedding_type);
            return Err(WrongValue::new("position_embedding_type", found, "\"absolute\""));
        }
        if file.is_decoder {
            return Err(WrongValue::new("is_decoder", true, "false: every token sees all others here"));
        }
        let id2label = labels_of(file.id2label.clone(), file.num_labels)?;
        Ok(Self { id2label, ..file.into() })
    }

    fn to_file(&self) -> ConfigFile {
        self.clone().into()
    }

    /// Refuses what would build another model than the file means, or none.
    fn check(&self) -> Result<(), WrongValue> {
        check_depths([("num_hidden_layers", self.num_hidden_layers)])?;
        check_sizes([
            ("vocab_size", self.vocab_size, 1..=100_000_000),
            ("hidden_size", self.hidden_size, 1..=1_000_000),
            ("num_attention_heads", self.num_attention_heads, 1..=1_000_000),
            ("intermediate_size", self.intermediate_size, 1..=10_000_000),
            ("max_position_embeddings", self.max_position_embeddings, 1..=10_000_000),
            ("type_vocab_size", self.type_vocab_size, 1..=1_000_000),
        ])?;
        check_probabilities([
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("classifier_dropout", self.classifier_dropout.unwrap_or(0.0)),
        ])?;
        check_numbers(("layer_norm_eps", self.layer_norm_eps), self.initializer_range)?;
        check_divides(("num_attention_heads", self.num_attention_heads), ("hidden_size", self.hidden_size))?;
        if !(0..self.vocab_size).contains(&self.pad_token_id) {
            let wanted = format!("a token from 0 to {}", self.vocab_size - 1);
            return Err(WrongValue::new("pad_token_id", self.pad_token_id, wanted));
        }
        check_labels(&self.id2label)?;
        check_num_parameters(("hidden_size", self.hidden_size), num_parameters(self), MOST_PARAMETERS)
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }
}

/// The file as Transformers writes it.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    architectures: Vec<String>,
    model_type: String,
    vocab_size: i64,
    hidden_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    intermediate_size: i64,
    hidden_act: Activation,
    hidden_dropout_prob: f64,
    attention_probs_dropout_prob: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    classifier_dropout: Option<f64>,
    max_position_embeddings: i64,
    position_embedding_type: String,
    type_vocab_size: i64,
    initializer_range: f64,
    layer_norm_eps: f64,
    pad_token_id: i64,
    id2label: BTreeMap<usize, String>,
    label2id: BTreeMap<String, usize>,
    #[serde(skip_serializing)]
    is_decoder: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem_type: Option<ProblemType>,
    #[serde(skip_serializing)]
    num_labels: Option<usize>,
}

impl Default for ConfigFile {
    fn default() -> Self {
        Self {
            architectures: vec!["BertForSequenceClassification".to_owned()],
            model_type: "bert".to_owned(),
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            classifier_dropout: None,
            max_position_embeddings: 512,
            position_embedding_type: "absolute".to_owned(),
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            pad_token_id: 0,
            id2label: label_names(2),
            label2id: BTreeMap::new(),
            is_decoder: false,
            problem_type: None,
            num_labels: None,
        }
    }
}

impl From<ConfigFile> for BertConfig {
    fn from(file: ConfigFile) -> Self {
        Self {
            vocab_size: file.vocab_size,
            hidden_size: file.hidden_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            intermediate_size: file.intermediate_size,
            hidden_act: file.hidden_act,
            hidden_dropout_prob: file.hidden_dropout_prob,
            attention_probs_dropout_prob: file.attention_probs_dropout_prob,
            classifier_dropout: file.classifier_dropout,
            max_position_embeddings: file.max_position_embeddings,
            type_vocab_size: file.type_vocab_size,
            initializer_range: file.initializer_range,
            layer_norm_eps: file.layer_norm_eps,
            pad_token_id: file.pad_token_id,
            id2label: file.id2label,
            problem_type: file.problem_type,
        }
    }
}

impl From<BertConfig> for ConfigFile {
    fn from(config: BertConfig) -> Self {
        Self {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            intermediate_size: config.intermediate_size,
            hidden_act: config.hidden_act,
            hidden_dropout_prob: config.hidden_dropout_prob,
            attention_probs_dropout_prob: config.attention_probs_dropout_prob,
            classifier_dropout: config.classifier_dropout,
            max_position_embeddings: config.max_position_embeddings,
            type_vocab_size: config.type_vocab_size,
            initializer_range: config.initializer_range,
            layer_norm_eps: config.layer_norm_eps,
            pad_token_id: config.pad_token_id,
            label2id: config.id2label.iter().map(|(&label, name)| (name.clone(), label)).collect(),
            id2label: config.id2label,
            problem_type: config.problem_type,
            ..Self::default()
        }
    }
}

/// Of the large tables and matrices; biases and norms are left out.
fn num_parameters(config: &BertConfig) -> i128 {
    let [hidden, inner] = [config.hidden_size, config.intermediate_size].map(i128::from);
    let rows = [config.vocab_size, config.max_position_embeddings, config.type_vocab_size].map(i128::from);
    let layer = 4 * hidden * hidden + 2 * hidden * inner;
    hidden * (rows.iter().sum::<i128>() + config.id2label.len() as i128) + config.num_hidden_layers as i128 * layer
}
