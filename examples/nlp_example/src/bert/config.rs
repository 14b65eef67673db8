//! The sizes of a BERT model, read from and written to `config.json`.

use crate::files::{self, FileError, shortened};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The file that holds the sizes, beside the weights.
pub const CONFIG_FILE: &str = "config.json";

/// Names of a hundred thousand classes fit.
const MOST_BYTES: u64 = 16_000_000;

/// Some times as many as the largest BERT models have.
const MOST_PARAMETERS: i128 = 20_000_000_000;

/// A `config.json` that does not describe a BERT model which can be built.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not JSON, or a value has the wrong type.
    #[error("{path} does not describe a BERT model: {reason}", path = .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A value cannot be honoured.
    #[error("{path}: {key} is {found}; wanted {wanted}", path = .path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Which value.
        key: &'static str,
        /// What stands there.
        found: String,
        /// What would do.
        wanted: String,
    },
}

/// What lies between the two linear layers of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// The exact Gaussian error linear unit.
    #[serde(rename = "gelu")]
    Gelu,
    /// Its approximation by a hyperbolic tangent.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluTanh,
    /// The rectifier.
    #[serde(rename = "relu")]
    Relu,
}

/// Sizes and rates of a BERT model; field names and defaults are those of Transformers' `BertConfig`, which are
/// the sizes of `bert-base-uncased`.
///
/// ```
/// use nlp_example::bert::BertConfig;
///
/// let config = BertConfig::small(8000, 2, 128);
/// assert_eq!((config.hidden_size, config.num_hidden_layers), (128, 2));
/// assert_eq!(BertConfig::default().hidden_size, 768);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "ConfigFile", into = "ConfigFile")]
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

    /// Reads `config.json` from a folder.
    ///
    /// # Errors
    /// When the file is missing, malformed, of another model type, or asks for something that is not built
    /// here.
    pub fn from_folder(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join(CONFIG_FILE);
        Self::from_json(&files::read_text(&path, MOST_BYTES)?, &path)
    }

    /// Reads the text of a `config.json`, which errors call `path`.
    ///
    /// # Errors
    /// When it is malformed, of another model type, or asks for something that is not built here.
    pub fn from_json(json: &str, path: &Path) -> Result<Self, ConfigError> {
        let malformed = |reason| ConfigError::Malformed { path: path.to_owned(), reason };
        let file: ConfigFile = files::from_json(json).map_err(malformed)?;
        check(path, &file)?;
        Ok(file.into())
    }

    /// The text of a `config.json`, in a form that Transformers reads.
    ///
    /// # Errors
    /// Never in practice.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

fn label_names(num_labels: usize) -> BTreeMap<usize, String> {
    (0..num_labels).map(|label| (label, format!("LABEL_{label}"))).collect()
}

/// The file as Transformers writes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
struct ConfigFile {
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
            ..Self::default()
        }
    }
}

/// Refuses what would build another model than the file means, or none.
fn check(path: &Path, file: &ConfigFile) -> Result<(), ConfigError> {
    let value = |key, found: String, wanted: &str| {
        let (found, wanted) = (shortened(&found), wanted.to_owned());
        Err(ConfigError::Value { path: path.to_owned(), key, found, wanted })
    };
    if file.model_type != "bert" {
        return value("model_type", format!("{:?}", file.model_type), "\"bert\"");
    }
    if file.position_embedding_type != "absolute" {
        let found = format!("{:?}", file.position_embedding_type);
        return value("position_embedding_type", found, "\"absolute\"");
    }
    if let Some((key, found, wanted)) = size_out_of_range(file) {
        return value(key, found.to_string(), &format!("a number from {} to {}", wanted.start(), wanted.end()));
    }
    if let Some((key, found, wanted)) = rate_out_of_range(file) {
        return value(key, format!("{found:?}"), wanted);
    }
    if file.hidden_size % file.num_attention_heads != 0 {
        let wanted = format!("a divisor of hidden_size, which is {}", file.hidden_size);
        return value("num_attention_heads", file.num_attention_heads.to_string(), &wanted);
    }
    if !(0..file.vocab_size).contains(&file.pad_token_id) {
        let wanted = format!("a token from 0 to {}", file.vocab_size - 1);
        return value("pad_token_id", file.pad_token_id.to_string(), &wanted);
    }
    if !file.id2label.keys().copied().eq(0..file.id2label.len()) || file.id2label.is_empty() {
        let found = format!("{:?}", file.id2label.keys().collect::<Vec<_>>());
        return value("id2label", found, "names for 0, 1, 2, ... without a gap");
    }
    let num_parameters = num_parameters(file);
    if num_parameters > MOST_PARAMETERS {
        let wanted =
            format!("sizes of a model with at most {MOST_PARAMETERS} parameters, and these make {num_parameters}");
        return value("hidden_size", file.hidden_size.to_string(), &wanted);
    }
    Ok(())
}

/// The first size that no model has: key, size, and what sizes may be.
fn size_out_of_range(file: &ConfigFile) -> Option<(&'static str, i128, RangeInclusive<i128>)> {
    let sizes = [
        ("vocab_size", file.vocab_size.into(), 1..=100_000_000),
        ("hidden_size", file.hidden_size.into(), 1..=1_000_000),
        ("num_hidden_layers", file.num_hidden_layers as i128, 1..=10_000),
        ("num_attention_heads", file.num_attention_heads.into(), 1..=1_000_000),
        ("intermediate_size", file.intermediate_size.into(), 1..=10_000_000),
        ("max_position_embeddings", file.max_position_embeddings.into(), 1..=10_000_000),
        ("type_vocab_size", file.type_vocab_size.into(), 1..=1_000_000),
    ];
    sizes.into_iter().find(|(_, size, wanted)| !wanted.contains(size))
}

/// The first rate that would train to nonsense: key, rate, and what rates may be.
fn rate_out_of_range(file: &ConfigFile) -> Option<(&'static str, f64, &'static str)> {
    let probabilities = [
        ("hidden_dropout_prob", file.hidden_dropout_prob),
        ("attention_probs_dropout_prob", file.attention_probs_dropout_prob),
        ("classifier_dropout", file.classifier_dropout.unwrap_or(0.0)),
    ];
    let probability = probabilities.into_iter().find(|(_, rate)| !(0.0..=1.0).contains(rate));
    let (eps, range) = (file.layer_norm_eps, file.initializer_range);
    match probability {
        Some((key, rate)) => Some((key, rate, "a probability from 0 to 1")),
        // Less is zero in float32, and divides by the variance of equal numbers.
        None if !(1e-30..=1.0).contains(&eps) => Some(("layer_norm_eps", eps, "a number from 1e-30 to 1")),
        None if !(0.0..=10.0).contains(&range) => Some(("initializer_range", range, "a number from 0 to 10")),
        None => None,
    }
}

/// Of the large tables and matrices; biases and norms are left out.
fn num_parameters(file: &ConfigFile) -> i128 {
    let [hidden, inner] = [file.hidden_size, file.intermediate_size].map(i128::from);
    let rows = [file.vocab_size, file.max_position_embeddings, file.type_vocab_size].map(i128::from);
    let layer = 4 * hidden * hidden + 2 * hidden * inner;
    hidden * (rows.iter().sum::<i128>() + file.id2label.len() as i128) + file.num_hidden_layers as i128 * layer
}
