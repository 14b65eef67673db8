//! What a transformer keeps between the forward and the backward pass.

use crate::Result;
use crate::error::plan::PlanErrorKind as Kind;
use crate::mesh::{Axis, Mesh};
use crate::weight_files::shown;
use serde::Serialize;
use serde_json::{Map, Value};

/// What the numbers are called in `config.json`, the most common name first.
const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HIDDEN: &[&str] = &["hidden_size", "n_embd", "dim"];
const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
const INTERMEDIATE: &[&str] = &["intermediate_size", "n_inner", "hidden_dim", "ffn_dim"];
const VOCABULARY: &[&str] = &["vocab_size"];

/// Families whose layers are those of the published formula: attention with all of its scores in memory, an MLP of two
/// matrices, dropout.
const OF_THE_FORMULA: [&str; 16] = [
    "bert",
    "biogpt",
    "bloom",
    "camembert",
    "codegen",
    "distilbert",
    "electra",
    "ernie",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "megatron-bert",
    "opt",
    "roberta",
    "xlm-roberta",
];

/// The numbers of a transformer that decide how large its activations are.
///
/// ```
/// use accelerate_core::plan::TransformerShape;
/// let gpt2 = r#"{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": null, "vocab_size": 50257}"#;
/// let shape = TransformerShape::from_config(gpt2)?;
/// assert_eq!((shape.num_layers, shape.hidden_size, shape.intermediate_size), (12, 768, 3072));
/// assert!(shape.is_of_the_formula());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TransformerShape {
    /// The family, for example `bert`; empty where the file does not say.
    pub model_type: String,
    /// How many layers there are.
    pub num_layers: u64,
    /// Elements of the vector of one token.
    pub hidden_size: u64,
    /// Heads of the attention of one layer.
    pub num_heads: u64,
    /// Elements between the two matrices of an MLP; four times the hidden size where the file does not say.
    pub intermediate_size: u64,
    /// How many logits there are for each token.
    pub vocab_size: u64,
}

/// What one rank computes with in one forward and backward pass.
///
/// ```
/// use accelerate_core::plan::MicroBatch;
/// let batch = MicroBatch { batch_size: 8, sequence_length: 512, activation_checkpointing: false };
/// assert_eq!(batch.num_tokens(), 4096);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MicroBatch {
    /// Rows.
    pub batch_size: u64,
    /// Tokens of each row.
    pub sequence_length: u64,
    /// Only the inputs of layers are kept, and layers are computed again in the backward pass.
    pub activation_checkpointing: bool,
}

impl MicroBatch {
    /// What a rank has of it where ranks divide sequences.
    #[must_use]
    pub fn divided(self, mesh: &Mesh) -> Self {
        let num_ranks = mesh.divided_sequences().map_or(1, |(_, size)| size as u64);
        Self { sequence_length: self.sequence_length.div_ceil(num_ranks), ..self }
    }

    /// Tokens of all rows.
    pub fn num_tokens(&self) -> u64 {
        self.batch_size.saturating_mul(self.sequence_length)
    }
}

/// An estimate of activations, in bytes.
///
/// ```
/// use accelerate_core::plan::ActivationBytes;
/// assert_eq!(ActivationBytes { layers: 100, embeddings: 5, logits: 20 }.total(), 125);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ActivationBytes {
    /// Of all layers. With activation checkpointing: of their inputs, and of the one layer that is computed again.
    pub layers: u64,
    /// Before and after the layers: the mask of the embedding's dropout, the last norm, the input of the output layer.
    pub embeddings: u64,
    /// The logits, in 32 bits. A model without a vocabulary at its end, such as a classifier, has none.
    pub logits: u64,
}

impl ActivationBytes {
    /// All together.
    pub fn total(&self) -> u64 {
        self.layers.saturating_add(self.embeddings).saturating_add(self.logits)
    }
}

impl TransformerShape {
    /// Longest `config.json` that is worth reading: the longest ones list thousands of labels.
    pub const MAX_CONFIG_BYTES: u64 = 10_000_000;

    /// Reads the numbers out of a `config.json`, by the names of any of the common families.
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): not JSON, a number is missing or is none, or the model has an encoder and a
    /// decoder, for which the formula does not hold.
    pub fn from_config(text: &str) -> Result<Self> {
        let config: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| Kind::Config { reason: error.to_string() })?;
        if config.get("is_encoder_decoder") == Some(&Value::Bool(true)) {
            return Err(Kind::EncoderDecoder.into());
        }
        let hidden_size = needed(&config, "a hidden size", HIDDEN)?;
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        Ok(Self {
            model_type: shown(model_type),
            num_layers: needed(&config, "a number of layers", LAYERS)?,
            hidden_size,
            num_heads: needed(&config, "a number of attention heads", HEADS)?,
            intermediate_size: number(&config, INTERMEDIATE)?.unwrap_or(hidden_size.saturating_mul(4)),
            vocab_size: needed(&config, "a size of the vocabulary", VOCABULARY)?,
        })
    }

    /// Whether [`activation_bytes`](Self::activation_bytes) was published for layers like these. Others have, for example, an
    /// MLP with a gate, which keeps more, or attention that keeps no scores, which keeps less.
    pub fn is_of_the_formula(&self) -> bool {
        OF_THE_FORMULA.contains(&self.model_type.as_str())
    }

    /// An estimate of what one rank keeps for the backward pass, by Korthikanti et al., "Reducing Activation Recomputation in
    /// Large Transformer Models" (2022), §4, without parallelism inside of a layer.
    ///
    /// With `s` tokens in each of `b` rows, hidden size `h`, intermediate size `f`, `a` heads and elements of `e` bytes, a layer
    /// keeps
    ///
    /// - in its attention: its input, queries, keys, values and the input of the projection, `5e·sbh`; a mask of dropout,
    ///   `sbh`; scores after softmax and after dropout, `2e·abs²`, and their mask, `abs²`;
    /// - in its MLP: the inputs of both matrices and of the activation function, `e·sbh + 2e·sbf`; a mask, `sbh`;
    /// - the inputs of two norms, `2e·sbh`.
    ///
    /// That is `sb·((8e + 2)·h + 2e·f) + (2e + 1)·abs²`: for 16 bits and `f = 4h` the paper's `sbh·(34 + 5as/h)`, for 32 bits
    /// `sbh·(66 + 9as/h)`. With activation checkpointing every layer keeps its input, `e·sbh`, and one at a time all of that.
    /// Beside layers there are `(2e + 1)·sbh`, and `4·sbv` for logits of `v` words.
    ///
    /// ```
    /// use accelerate_core::plan::{MicroBatch, TransformerShape};
    /// let shape = TransformerShape {
    ///     model_type: "gpt2".to_owned(), num_layers: 1, hidden_size: 64, num_heads: 4, intermediate_size: 256, vocab_size: 100,
    /// };
    /// let batch = MicroBatch { batch_size: 2, sequence_length: 16, activation_checkpointing: false };
    /// let (s, b, h, a) = (16, 2, 64, 4);
    /// assert_eq!(shape.activation_bytes(&batch, 2).layers, 34 * s * b * h + 5 * a * s * s * b);
    /// ```
    pub fn activation_bytes(&self, batch: &MicroBatch, element_bytes: u64) -> ActivationBytes {
        self.activation_bytes_on(&Mesh::replicated(1), batch, element_bytes)
    }

    /// The same of a rank that has a part of every sequence and of every layer: `s` tokens are `s/c` on each of `c` ranks that divide
    /// sequences. Of `t` ranks that divide layers each keeps a `t`th of queries, keys, values, the projection's input, the scores and
    /// what lies between the two matrices of the MLP (§4.2.1 of the paper: `sbh·(10 + 24/t + 5as/(ht))` for 16 bits), and all of the
    /// rest, logits among it.
    pub fn activation_bytes_on(&self, mesh: &Mesh, batch: &MicroBatch, element_bytes: u64) -> ActivationBytes {
        let times = |factors: &[u64]| factors.iter().fold(1, |product: u64, &factor| product.saturating_mul(factor));
        let (tokens, e) = (batch.divided(mesh).num_tokens(), element_bytes);
        let num_parts = mesh.size(Axis::Tp) as u64;
        let scores = times(&[tokens, batch.sequence_length, self.num_heads]);
        let divided = times(&[4 * e, tokens, self.hidden_size])
            .saturating_add(times(&[2 * e, tokens, self.intermediate_size]))
            .saturating_add(times(&[2 * e + 1, scores]));
        let layer = times(&[4 * e + 2, tokens, self.hidden_size]).saturating_add(divided.div_ceil(num_parts));
        let layers = match batch.activation_checkpointing {
            true => times(&[e, tokens, self.hidden_size, self.num_layers]).saturating_add(layer),
            false => layer.saturating_mul(self.num_layers),
        };
        ActivationBytes {
            layers,
            embeddings: times(&[2 * e + 1, tokens, self.hidden_size]),
            logits: times(&[4, tokens, self.vocab_size]),
        }
    }
}

fn needed(config: &Map<String, Value>, what: &'static str, names: &'static [&'static str]) -> Result<u64> {
    number(config, names)?.ok_or_else(|| Kind::NotATransformer { what, names }.into())
}

/// The number under the first of the names that is there; files say `null` for what they leave open.
fn number(config: &Map<String, Value>, names: &'static [&'static str]) -> Result<Option<u64>> {
    let there =
        names.iter().find_map(|&name| config.get(name).filter(|value| !value.is_null()).map(|value| (name, value)));
    let Some((name, value)) = there else { return Ok(None) };
    match value.as_u64() {
        Some(number) if number > 0 => Ok(Some(number)),
        _ => Err(Kind::ConfigNumber { name, found: shown(&value.to_string()) }.into()),
    }
}
