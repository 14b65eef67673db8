//! The sizes of a Llama, Mistral or Qwen2 model.

use super::config_file::ConfigFile;
use crate::Activation;
use crate::config::{
    PretrainedConfig, WrongValue, check_depths, check_divides, check_num_parameters, check_numbers,
    check_probabilities, check_sizes,
};
use crate::tensor_parallel::features;
use accelerate::TensorParallelPlan;
use serde::{Deserialize, Serialize};

/// Some times as many as the largest models of this kind have.
const MOST_PARAMETERS: i128 = 2_000_000_000_000;

/// Which of the models of this shape it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LlamaModelType {
    /// `LlamaForCausalLM`.
    #[default]
    Llama,
    /// `MistralForCausalLM`.
    Mistral,
    /// `Qwen2ForCausalLM`, whose projections of queries, keys and values have biases.
    Qwen2,
}

/// How frequencies of rotary embeddings are stretched for longer texts; `rope_type` of Transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All by the same factor.
    Linear {
        /// How many times longer.
        factor: f64,
    },
    /// Low ones by a factor, high ones not at all, those between in between (Llama 3.1).
    Llama3 {
        /// How many times longer.
        factor: f64,
        /// What is low: the length of the original texts, divided by a wavelength.
        low_freq_factor: f64,
        /// What is high.
        high_freq_factor: f64,
        /// Length of the texts that the model was first trained on.
        original_max_position_embeddings: i64,
    },
}

/// Sizes and rates of a model; field names and defaults are those of Transformers' `LlamaConfig` (the sizes of Llama 2 7B).
/// Defaults of a file are those of its `model_type`.
///
/// ```
/// use accelerate_models::llama::LlamaConfig;
/// let config = LlamaConfig { hidden_size: 64, ..Default::default() }.with_heads(8, 2);
/// assert_eq!((config.head_dim, config.num_key_value_heads), (8, 2));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Which of the models of this shape.
    pub model_type: LlamaModelType,
    /// Number of tokens.
    pub vocab_size: i64,
    /// Width of the stream of activations.
    pub hidden_size: i64,
    /// Width inside of the feed-forward blocks.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads of queries.
    pub num_attention_heads: i64,
    /// Number of heads of keys and values; divides `num_attention_heads`.
    pub num_key_value_heads: i64,
    /// Width of a head, an even number.
    pub head_dim: i64,
    /// Activation of the gate of a feed-forward block.
    pub hidden_act: Activation,
    /// Length of the texts that the model was trained on. Longer ones are computed as they are.
    pub max_position_embeddings: i64,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Is the table of tokens the output layer as well?
    pub tie_word_embeddings: bool,
    /// The longest wavelength of the rotary embeddings is about 2π times this.
    pub rope_theta: f64,
    /// How their frequencies are stretched.
    pub rope_scaling: RopeScaling,
    /// Do all projections of the attention have biases? Of a Llama only.
    pub attention_bias: bool,
    /// Do the layers of the feed-forward blocks have biases? Of a Llama only.
    pub mlp_bias: bool,
    /// Dropout on attention weights.
    pub attention_dropout: f64,
    /// How many tokens, its own included, a token looks at in each layer; `None` for all. As many as there are layers, or empty
    /// for all tokens in all layers.
    pub sliding_windows: Vec<Option<i64>>,
    /// The token that begins a text.
    pub bos_token_id: Option<i64>,
    /// Tokens that end a text.
    pub eos_token_id: Vec<i64>,
    /// The token that fills up short texts.
    pub pad_token_id: Option<i64>,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            model_type: LlamaModelType::Llama,
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            hidden_act: Activation::Silu,
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            rope_theta: 10000.0,
            rope_scaling: RopeScaling::Default,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            sliding_windows: Vec::new(),
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            pad_token_id: None,
        }
    }
}

impl LlamaConfig {
    /// So many heads of queries and of keys and values; queries together are as wide as the stream of activations.
    #[must_use]
    pub fn with_heads(self, num_attention_heads: i64, num_key_value_heads: i64) -> Self {
        let head_dim = self.hidden_size.checked_div(num_attention_heads).unwrap_or_default();
        Self { num_attention_heads, num_key_value_heads, head_dim, ..self }
    }

    /// How ranks divide the layers of a [`LlamaForCausalLM`](super::LlamaForCausalLM): heads stay whole, and those of queries stay
    /// with their head of keys and values.
    pub(super) fn tensor_parallel_plan(&self) -> TensorParallelPlan {
        let head_dim = features(Some(self.head_dim));
        let group_size = features(self.num_attention_heads.checked_div(self.num_key_value_heads));
        TensorParallelPlan::llama(head_dim, group_size)
    }

    /// Do the projections of queries, keys and values have biases?
    pub(super) fn has_qkv_bias(&self) -> bool {
        self.model_type == LlamaModelType::Qwen2 || self.attention_bias
    }
}

impl PretrainedConfig for LlamaConfig {
    type File = ConfigFile;

    const MODEL: &'static str = "Llama, Mistral or Qwen2";

    fn from_file(file: ConfigFile) -> Result<Self, WrongValue> {
        file.read()
    }

    fn to_file(&self) -> ConfigFile {
        ConfigFile::of(self)
    }

    fn check(&self) -> Result<(), WrongValue> {
        check_depths([("num_hidden_layers", self.num_hidden_layers)])?;
        check_sizes([
            ("vocab_size", self.vocab_size, 1..=100_000_000),
            ("hidden_size", self.hidden_size, 1..=1_000_000),
            ("intermediate_size", self.intermediate_size, 1..=10_000_000),
            ("num_attention_heads", self.num_attention_heads, 1..=1_000_000),
            ("num_key_value_heads", self.num_key_value_heads, 1..=1_000_000),
            ("head_dim", self.head_dim, 1..=1_000_000),
            ("max_position_embeddings", self.max_position_embeddings, 1..=1_000_000_000),
        ])?;
        check_probabilities([("attention_dropout", self.attention_dropout)])?;
        check_numbers(("rms_norm_eps", self.rms_norm_eps), self.initializer_range)?;
        let heads = ("num_attention_heads", self.num_attention_heads);
        check_divides(("num_key_value_heads", self.num_key_value_heads), heads)?;
        if self.head_dim % 2 != 0 {
            return Err(WrongValue::new("head_dim", self.head_dim, "an even number: rotary embeddings turn pairs"));
        }
        if !(self.rope_theta > 0.0 && self.rope_theta <= f64::from(f32::MAX)) {
            let wanted = "a number above 0 that float32 holds";
            return Err(WrongValue::new("rope_theta", format!("{:?}", self.rope_theta), wanted));
        }
        self.rope_scaling.check()?;
        if ![0, self.num_hidden_layers].contains(&self.sliding_windows.len()) {
            let wanted = format!("one for each of the {} layers", self.num_hidden_layers);
            return Err(WrongValue::new("layer_types", format!("a list of {}", self.sliding_windows.len()), wanted));
        }
        if let Some(window) = self.sliding_windows.iter().flatten().find(|window| **window < 1) {
            return Err(WrongValue::new("sliding_window", window, "a number from 1, or null"));
        }
        // As `padding_idx` of PyTorch: numbers below 0 count from the end.
        if let Some(pad) = self.pad_token_id.filter(|pad| !(-self.vocab_size..self.vocab_size).contains(pad)) {
            let wanted = format!("null, or a token below vocab_size, which is {}", self.vocab_size);
            return Err(WrongValue::new("pad_token_id", pad, wanted));
        }
        check_num_parameters(("hidden_size", self.hidden_size), self.num_parameters(), MOST_PARAMETERS)
    }

    fn set_eos_token_id(&mut self, eos_token_id: Vec<i64>) {
        self.eos_token_id = eos_token_id;
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }
}

impl LlamaConfig {
    /// Of the large tables and matrices; biases and norms are left out.
    fn num_parameters(&self) -> i128 {
        let sizes = [self.hidden_size, self.head_dim, self.num_attention_heads, self.num_key_value_heads];
        let [hidden, head, heads, key_value_heads] = sizes.map(i128::from);
        let layer = 2 * hidden * head * (heads + key_value_heads) + 3 * hidden * i128::from(self.intermediate_size);
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        tables * hidden * i128::from(self.vocab_size) + self.num_hidden_layers as i128 * layer
    }
}

impl RopeScaling {
    fn check(self) -> Result<(), WrongValue> {
        let number = |key, found: f64, wanted: &str| match found >= 1.0 && found.is_finite() {
            true => Ok(()),
            false => Err(WrongValue::new(key, format!("{found:?}"), wanted)),
        };
        match self {
            Self::Default => Ok(()),
            Self::Linear { factor } => number("factor", factor, "a number from 1"),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                number("factor", factor, "a number from 1")?;
                if !(low_freq_factor > 0.0 && low_freq_factor < high_freq_factor && high_freq_factor.is_finite()) {
                    let wanted = format!("a number between 0 and high_freq_factor, which is {high_freq_factor:?}");
                    return Err(WrongValue::new("low_freq_factor", format!("{low_freq_factor:?}"), wanted));
                }
                let length = original_max_position_embeddings;
                check_sizes([("original_max_position_embeddings", length, 1..=1_000_000_000)])
            }
        }
    }
}
