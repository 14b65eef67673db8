//! `config.json` of the three models, as Transformers writes it, in versions 4 and 5.

use super::{LlamaConfig, LlamaModelType, RopeScaling};
use crate::Activation;
use crate::causal_lm::OneOrMore;
use crate::config::WrongValue;
use serde::{Deserialize, Serialize};

/// What is absent has the default of the model type.
#[doc(hidden)]
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    architectures: Vec<String>,
    model_type: Option<LlamaModelType>,
    vocab_size: Option<i64>,
    hidden_size: Option<i64>,
    intermediate_size: Option<i64>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<i64>,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    hidden_act: Option<Activation>,
    max_position_embeddings: Option<i64>,
    initializer_range: Option<f64>,
    rms_norm_eps: Option<f64>,
    tie_word_embeddings: bool,
    attention_bias: bool,
    mlp_bias: bool,
    attention_dropout: Option<f64>,
    // Transformers tells these apart: a window that is null is none, one that is absent is the default.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    sliding_window: Option<Option<i64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    use_sliding_window: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_window_layers: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer_types: Option<Vec<LayerType>>,
    /// Version 4.
    rope_theta: Option<f64>,
    /// Version 4.
    rope_scaling: Option<RopeFile>,
    /// Version 5.
    #[serde(skip_serializing)]
    original_max_position_embeddings: Option<i64>,
    rope_parameters: Option<RopeFile>,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    bos_token_id: Option<Option<i64>>,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    eos_token_id: Option<Option<OneOrMore>>,
    pad_token_id: Option<i64>,
}

/// A value that is there, null included.
fn present<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(reader: D) -> Result<Option<T>, D::Error> {
    T::deserialize(reader).map(Some)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum LayerType {
    #[serde(rename = "full_attention")]
    Full,
    #[serde(rename = "sliding_attention")]
    Sliding,
}

/// Older files say `type` in place of `rope_type`, and some say both.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct RopeFile {
    rope_type: Option<String>,
    #[serde(rename = "type", skip_serializing)]
    old_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<i64>,
    #[serde(skip_serializing)]
    partial_rotary_factor: Option<f64>,
}

impl RopeFile {
    fn scaling(&self) -> Result<RopeScaling, WrongValue> {
        if let Some(part) = self.partial_rotary_factor.filter(|part| *part != 1.0) {
            return Err(WrongValue::new("partial_rotary_factor", format!("{part:?}"), "1: all of a head is turned"));
        }
        let missing = |key| WrongValue::new(key, "missing", "the number that this rope_type needs");
        let number = |key, number: Option<f64>| number.ok_or_else(|| missing(key));
        match self.rope_type.as_deref().or(self.old_type.as_deref()) {
            None | Some("default") => Ok(RopeScaling::Default),
            Some("linear") => Ok(RopeScaling::Linear { factor: number("factor", self.factor)? }),
            Some("llama3") => {
                let key = "original_max_position_embeddings";
                Ok(RopeScaling::Llama3 {
                    factor: number("factor", self.factor)?,
                    low_freq_factor: number("low_freq_factor", self.low_freq_factor)?,
                    high_freq_factor: number("high_freq_factor", self.high_freq_factor)?,
                    original_max_position_embeddings: self
                        .original_max_position_embeddings
                        .ok_or_else(|| missing(key))?,
                })
            }
            Some(other) => {
                Err(WrongValue::new("rope_type", format!("{other:?}"), "\"default\", \"linear\" or \"llama3\""))
            }
        }
    }

    fn of(config: &LlamaConfig) -> Self {
        let named = |name: &str| Self {
            rope_type: Some(name.to_owned()),
            rope_theta: Some(config.rope_theta),
            ..Self::default()
        };
        match config.rope_scaling {
            RopeScaling::Default => named("default"),
            RopeScaling::Linear { factor } => Self { factor: Some(factor), ..named("linear") },
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                Self {
                    factor: Some(factor),
                    low_freq_factor: Some(low_freq_factor),
                    high_freq_factor: Some(high_freq_factor),
                    original_max_position_embeddings: Some(original_max_position_embeddings),
                    ..named("llama3")
                }
            }
        }
    }
}

/// Defaults that the model types have of their own.
struct Defaults {
    vocab_size: i64,
    intermediate_size: i64,
    num_key_value_heads: Option<i64>,
    max_position_embeddings: i64,
    sliding_window: Option<i64>,
    bos_token_id: Option<i64>,
    eos_token_id: Option<OneOrMore>,
}

impl Defaults {
    fn of(model_type: LlamaModelType) -> Self {
        let llama = Self {
            vocab_size: 32000,
            intermediate_size: 11008,
            num_key_value_heads: None,
            max_position_embeddings: 2048,
            sliding_window: None,
            bos_token_id: Some(1),
            eos_token_id: Some(OneOrMore::One(2)),
        };
        match model_type {
            LlamaModelType::Llama => llama,
            LlamaModelType::Mistral => Self {
                intermediate_size: 14336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                sliding_window: Some(4096),
                ..llama
            },
            LlamaModelType::Qwen2 => Self {
                vocab_size: 151_936,
                intermediate_size: 22016,
                num_key_value_heads: Some(32),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: None,
            },
        }
    }
}

impl ConfigFile {
    pub(super) fn read(self) -> Result<LlamaConfig, WrongValue> {
        let model_type = self.model_type.unwrap_or_default();
        let (defaults, llama) = (Defaults::of(model_type), LlamaConfig::default());
        let is_llama = model_type == LlamaModelType::Llama;
        if self.model_type.is_none() && (self.sliding_window.flatten().is_some() || self.layer_types.is_some()) {
            let wanted = "\"mistral\" or \"qwen2\", because sliding_window or layer_types is there";
            return Err(WrongValue::new("model_type", "missing", wanted));
        }
        for (key, is_set) in [("attention_bias", self.attention_bias), ("mlp_bias", self.mlp_bias)] {
            if is_set && !is_llama {
                return Err(WrongValue::new(key, true, "false: only the model_type \"llama\" has it"));
            }
        }
        let hidden_size = self.hidden_size.unwrap_or(llama.hidden_size);
        let num_attention_heads = self.num_attention_heads.unwrap_or(llama.num_attention_heads);
        let of_hidden_size = hidden_size.checked_div(num_attention_heads).unwrap_or_default();
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if of_hidden_size * num_attention_heads == hidden_size => of_hidden_size,
            None => {
                let wanted = format!("a divisor of hidden_size, which is {hidden_size}, where head_dim is not there");
                return Err(WrongValue::new("num_attention_heads", num_attention_heads, wanted));
            }
        };
        // As Transformers decides where a file has both, or the same number twice.
        let rope = self.rope_scaling.clone().or(self.rope_parameters.clone()).unwrap_or_default();
        let max_position_embeddings = self.max_position_embeddings.unwrap_or(defaults.max_position_embeddings);
        let original = self.original_max_position_embeddings.or(rope.original_max_position_embeddings);
        let rope = RopeFile { original_max_position_embeddings: original.or(Some(max_position_embeddings)), ..rope };
        let num_key_value_heads = self.num_key_value_heads.or(defaults.num_key_value_heads);
        let num_hidden_layers = self.num_hidden_layers.unwrap_or(llama.num_hidden_layers);
        Ok(LlamaConfig {
            model_type,
            vocab_size: self.vocab_size.unwrap_or(defaults.vocab_size),
            hidden_size,
            intermediate_size: self.intermediate_size.unwrap_or(defaults.intermediate_size),
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_key_value_heads.unwrap_or(num_attention_heads),
            head_dim,
            hidden_act: self.hidden_act.unwrap_or(llama.hidden_act),
            max_position_embeddings,
            initializer_range: self.initializer_range.unwrap_or(llama.initializer_range),
            rms_norm_eps: self.rms_norm_eps.unwrap_or(llama.rms_norm_eps),
            tie_word_embeddings: self.tie_word_embeddings,
            rope_theta: rope.rope_theta.or(self.rope_theta).unwrap_or(llama.rope_theta),
            rope_scaling: rope.scaling()?,
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            attention_dropout: self.attention_dropout.unwrap_or_default(),
            sliding_windows: self.sliding_windows(num_hidden_layers, &defaults)?,
            bos_token_id: self.bos_token_id.unwrap_or(defaults.bos_token_id),
            eos_token_id: OneOrMore::all(self.eos_token_id.unwrap_or(defaults.eos_token_id)),
            pad_token_id: self.pad_token_id,
        })
    }

    /// As Transformers decides: a Mistral has its window in all layers, a Qwen2 where it is told to.
    fn sliding_windows(&self, num_layers: usize, defaults: &Defaults) -> Result<Vec<Option<i64>>, WrongValue> {
        // No file has more layers than are checked afterwards.
        let num_layers = num_layers.min(10_001);
        let window = self.sliding_window.unwrap_or(defaults.sliding_window);
        let model_type = self.model_type.unwrap_or_default();
        if let Some(types) = self.layer_types.as_ref().filter(|types| types.len() != num_layers) {
            let found = format!("a list of {}", types.len());
            let wanted = format!("one for each of the {num_layers} layers (num_hidden_layers)");
            return Err(WrongValue::new("layer_types", found, wanted));
        }
        let has_window: Vec<bool> = match (model_type, &self.layer_types) {
            (LlamaModelType::Llama, _) => return Ok(Vec::new()),
            (LlamaModelType::Mistral, _) => vec![true; num_layers],
            (LlamaModelType::Qwen2, Some(types)) => types.iter().map(|layer| *layer == LayerType::Sliding).collect(),
            (LlamaModelType::Qwen2, None) => {
                let first = self.max_window_layers.unwrap_or(28);
                (0..num_layers).map(|layer| first <= layer && self.use_sliding_window == Some(true)).collect()
            }
        };
        if model_type == LlamaModelType::Qwen2 && self.use_sliding_window != Some(true) && has_window.contains(&true) {
            return Err(WrongValue::new(
                "use_sliding_window",
                "not true",
                "true, because layer_types has sliding_attention",
            ));
        }
        if window.is_none() || !has_window.contains(&true) {
            return Ok(Vec::new());
        }
        Ok(has_window.into_iter().map(|has_window| window.filter(|_| has_window)).collect())
    }

    pub(super) fn of(config: &LlamaConfig) -> Self {
        let LlamaConfig { model_type, sliding_windows, .. } = config;
        let window = sliding_windows.iter().flatten().next().copied();
        let layer_type = |window: &Option<i64>| if window.is_some() { LayerType::Sliding } else { LayerType::Full };
        let is_qwen = *model_type == LlamaModelType::Qwen2;
        Self {
            architectures: vec![format!("{model_type:?}ForCausalLM")],
            model_type: Some(*model_type),
            vocab_size: Some(config.vocab_size),
            hidden_size: Some(config.hidden_size),
            intermediate_size: Some(config.intermediate_size),
            num_hidden_layers: Some(config.num_hidden_layers),
            num_attention_heads: Some(config.num_attention_heads),
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: Some(config.head_dim),
            hidden_act: Some(config.hidden_act),
            max_position_embeddings: Some(config.max_position_embeddings),
            initializer_range: Some(config.initializer_range),
            rms_norm_eps: Some(config.rms_norm_eps),
            tie_word_embeddings: config.tie_word_embeddings,
            attention_bias: config.attention_bias,
            mlp_bias: config.mlp_bias,
            attention_dropout: Some(config.attention_dropout),
            sliding_window: (*model_type != LlamaModelType::Llama).then_some(window),
            use_sliding_window: is_qwen.then_some(window.is_some()),
            max_window_layers: None,
            layer_types: (is_qwen && window.is_some()).then(|| sliding_windows.iter().map(layer_type).collect()),
            rope_theta: Some(config.rope_theta),
            rope_scaling: match config.rope_scaling {
                RopeScaling::Default => None,
                _ => Some(RopeFile::of(config)),
            },
            rope_parameters: Some(RopeFile::of(config)),
            original_max_position_embeddings: None,
            bos_token_id: Some(config.bos_token_id),
            eos_token_id: Some(OneOrMore::of(&config.eos_token_id)),
            pad_token_id: config.pad_token_id,
        }
    }
}
