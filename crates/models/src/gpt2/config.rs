//! The sizes of a GPT-2 model.

use crate::Activation;
use crate::causal_lm::OneOrMore;
use crate::config::{
    PretrainedConfig, WrongValue, check_depths, check_divides, check_num_parameters, check_numbers,
    check_probabilities, check_sizes,
};
use crate::tensor_parallel::features;
use accelerate::TensorParallelPlan;
use serde::{Deserialize, Serialize};

/// Some times as many as the largest models of this kind have.
const MOST_PARAMETERS: i128 = 200_000_000_000;

/// Sizes and rates of a GPT-2 model; field names and defaults are those of Transformers' `GPT2Config`, which are the sizes of the
/// smallest published model (124 million parameters).
///
/// ```
/// use accelerate_models::gpt2::GPT2Config;
/// assert_eq!((GPT2Config::default().n_embd, GPT2Config::default().n_layer), (768, 12));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GPT2Config {
    /// Number of tokens.
    pub vocab_size: i64,
    /// Longest text in tokens.
    pub n_positions: i64,
    /// Width of the stream of activations.
    pub n_embd: i64,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads; divides `n_embd`.
    pub n_head: i64,
    /// Width inside of the feed-forward blocks; `None` means four times `n_embd`.
    pub n_inner: Option<i64>,
    /// Their activation.
    pub activation_function: Activation,
    /// Dropout after attention and feed-forward blocks.
    pub resid_pdrop: f64,
    /// Dropout after embeddings.
    pub embd_pdrop: f64,
    /// Dropout on attention weights.
    pub attn_pdrop: f64,
    /// Added to variances.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// Are attention scores divided by the root of a head's width?
    pub scale_attn_weights: bool,
    /// Are they divided by the number of the block as well, counted from 1?
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Is the table of tokens the output layer as well?
    pub tie_word_embeddings: bool,
    /// The token that begins a text.
    pub bos_token_id: Option<i64>,
    /// Tokens that end a text.
    pub eos_token_id: Vec<i64>,
    /// The token that fills up short texts.
    pub pad_token_id: Option<i64>,
}

impl Default for GPT2Config {
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluTanh,
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
            bos_token_id: Some(50256),
            eos_token_id: vec![50256],
            pad_token_id: None,
        }
    }
}

impl GPT2Config {
    /// Width inside of the feed-forward blocks.
    pub fn inner_size(&self) -> i64 {
        self.n_inner.unwrap_or_else(|| self.n_embd.saturating_mul(4))
    }

    /// How ranks divide the layers of a [`GPT2LMHeadModel`](super::GPT2LMHeadModel): heads stay whole.
    pub(super) fn tensor_parallel_plan(&self) -> TensorParallelPlan {
        TensorParallelPlan::gpt2(features(self.n_embd.checked_div(self.n_head)))
    }
}

impl PretrainedConfig for GPT2Config {
    type File = ConfigFile;

    const MODEL: &'static str = "GPT-2";

    fn from_file(file: ConfigFile) -> Result<Self, WrongValue> {
        if file.model_type != "gpt2" {
            return Err(WrongValue::new("model_type", format!("{:?}", file.model_type), "\"gpt2\""));
        }
        if file.add_cross_attention {
            return Err(WrongValue::new("add_cross_attention", true, "false: a decoder alone is built here"));
        }
        Ok(Self {
            vocab_size: file.vocab_size,
            n_positions: file.n_positions,
            n_embd: file.n_embd,
            n_layer: file.n_layer,
            n_head: file.n_head,
            n_inner: file.n_inner,
            activation_function: file.activation_function,
            resid_pdrop: file.resid_pdrop,
            embd_pdrop: file.embd_pdrop,
            attn_pdrop: file.attn_pdrop,
            layer_norm_epsilon: file.layer_norm_epsilon,
            initializer_range: file.initializer_range,
            scale_attn_weights: file.scale_attn_weights,
            scale_attn_by_inverse_layer_idx: file.scale_attn_by_inverse_layer_idx,
            tie_word_embeddings: file.tie_word_embeddings,
            bos_token_id: file.bos_token_id,
            eos_token_id: OneOrMore::all(file.eos_token_id),
            pad_token_id: file.pad_token_id,
        })
    }

    fn to_file(&self) -> ConfigFile {
        let Self { n_inner, activation_function, bos_token_id, pad_token_id, .. } = *self;
        ConfigFile {
            architectures: vec!["GPT2LMHeadModel".to_owned()],
            model_type: "gpt2".to_owned(),
            vocab_size: self.vocab_size,
            n_positions: self.n_positions,
            n_embd: self.n_embd,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_inner,
            activation_function,
            resid_pdrop: self.resid_pdrop,
            embd_pdrop: self.embd_pdrop,
            attn_pdrop: self.attn_pdrop,
            layer_norm_epsilon: self.layer_norm_epsilon,
            initializer_range: self.initializer_range,
            scale_attn_weights: self.scale_attn_weights,
            scale_attn_by_inverse_layer_idx: self.scale_attn_by_inverse_layer_idx,
            add_cross_attention: false,
            tie_word_embeddings: self.tie_word_embeddings,
            bos_token_id,
            eos_token_id: OneOrMore::of(&self.eos_token_id),
            pad_token_id,
        }
    }

    fn check(&self) -> Result<(), WrongValue> {
        check_depths([("n_layer", self.n_layer)])?;
        check_sizes([
            ("vocab_size", self.vocab_size, 1..=100_000_000),
            ("n_positions", self.n_positions, 1..=10_000_000),
            ("n_embd", self.n_embd, 1..=1_000_000),
            ("n_head", self.n_head, 1..=1_000_000),
            ("n_inner", self.inner_size(), 1..=10_000_000),
        ])?;
        check_probabilities([
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
            ("attn_pdrop", self.attn_pdrop),
        ])?;
        check_numbers(("layer_norm_epsilon", self.layer_norm_epsilon), self.initializer_range)?;
        check_divides(("n_head", self.n_head), ("n_embd", self.n_embd))?;
        let [width, inner] = [self.n_embd, self.inner_size()].map(i128::from);
        let block = 4 * width * width + 2 * width * inner;
        let rows = i128::from(self.vocab_size) + i128::from(self.n_positions);
        let num_parameters = width * rows + self.n_layer as i128 * block;
        check_num_parameters(("n_embd", self.n_embd), num_parameters, MOST_PARAMETERS)
    }

    fn set_eos_token_id(&mut self, eos_token_id: Vec<i64>) {
        self.eos_token_id = eos_token_id;
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
    #[serde(alias = "max_position_embeddings")]
    n_positions: i64,
    #[serde(alias = "hidden_size")]
    n_embd: i64,
    #[serde(alias = "num_hidden_layers")]
    n_layer: usize,
    #[serde(alias = "num_attention_heads")]
    n_head: i64,
    n_inner: Option<i64>,
    activation_function: Activation,
    resid_pdrop: f64,
    embd_pdrop: f64,
    attn_pdrop: f64,
    layer_norm_epsilon: f64,
    initializer_range: f64,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    add_cross_attention: bool,
    tie_word_embeddings: bool,
    bos_token_id: Option<i64>,
    eos_token_id: Option<OneOrMore>,
    pad_token_id: Option<i64>,
}

impl Default for ConfigFile {
    fn default() -> Self {
        GPT2Config::default().to_file()
    }
}
