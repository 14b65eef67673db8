//! Texts that are continued token by token: greedily or by chance.
//!
//! Order of what is done to the scores, and defaults, are those of Transformers: temperature, `top_k`, `top_p`, then one draw from
//! libtorch's generator, so that the same seed gives the same tokens.

use crate::causal_lm::OneOrMore;
use crate::config::{MOST_BYTES, with_key};
use crate::files;
use crate::{CausalLM, ConfigError, KeyValueCache};
use accelerate::tch::{self, Kind, Tensor};
use accelerate::{Error, Result};
use serde::Deserialize;
use std::path::Path;
use torch_ext::scalar;

/// The file of a model's folder that says how its texts are continued.
const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// How texts are continued; names and defaults are those of Transformers' `GenerationConfig`, but for `max_new_tokens`, which there
/// is 20 tokens with the prompt.
///
/// ```
/// let config = accelerate_models::GenerationConfig { do_sample: true, top_p: 0.9, ..Default::default() };
/// assert_eq!((config.max_new_tokens, config.top_k, config.temperature), (20, 50, 1.0));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Most tokens to add. Default: 20.
    pub max_new_tokens: usize,
    /// Draw tokens by their probability (`true`), or take the likeliest (`false`, the default)? Without, the next three are not
    /// looked at.
    pub do_sample: bool,
    /// Scores are divided by it: less than 1 sharpens the choice. Default: 1.
    pub temperature: f64,
    /// Only so many of the likeliest tokens are drawn from; 0 for all. Default: 50.
    pub top_k: usize,
    /// Only the likeliest tokens that together have this probability are drawn from. Default: 1, which is all.
    pub top_p: f64,
    /// Tokens that end a text. `None`, the default: those of the model's configuration.
    pub eos_token_id: Option<Vec<i64>>,
    /// What a text that has ended is filled up with while others go on. `None`, the default: what the model's configuration has, or else
    /// the first of `eos_token_id`.
    pub pad_token_id: Option<i64>,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 20,
            do_sample: false,
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            eos_token_id: None,
            pad_token_id: None,
        }
    }
}

/// What texts cannot be continued with.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// A number that decides nothing, or nonsense.
    #[error("{key} is {found}; wanted {wanted}")]
    Value {
        /// Which field of the configuration.
        key: &'static str,
        /// What it is.
        found: String,
        /// What would do.
        wanted: &'static str,
    },
    /// Prompts of another form.
    #[error(
        "input_ids are {found:?} of {kind:?}; wanted [batch, length] of Int64, with at least one token in each row"
    )]
    Prompt {
        /// Their shape.
        found: Vec<i64>,
        /// Their element type.
        kind: Kind,
    },
    /// A mask that does not belong to the prompts.
    #[error("attention_mask is {found:?}; wanted the shape of input_ids, {wanted:?}")]
    Mask {
        /// Its shape.
        found: Vec<i64>,
        /// That of the prompts.
        wanted: Vec<i64>,
    },
    /// A prompt that is filled up behind its text.
    #[error(
        "attention_mask ends with 0 in row {row}: what follows a prompt is its continuation, so fill up short prompts in front \
         (padding_side=\"left\")"
    )]
    PaddedBehind {
        /// The first such row.
        row: usize,
    },
    /// More tokens than the model has places for.
    #[error(
        "a prompt of {prompt} tokens and {max_new_tokens} new ones do not fit into the {max_length} positions of the model; shorten \
         the prompt or lower max_new_tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: i64,
        /// Tokens to add.
        max_new_tokens: usize,
        /// Places.
        max_length: i64,
    },
}

/// What of `generation_config.json` is looked at.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct GenerationFile {
    max_new_tokens: Option<usize>,
    do_sample: Option<bool>,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    pub(crate) eos_token_id: Option<OneOrMore>,
    pad_token_id: Option<i64>,
}

impl GenerationFile {
    /// `None` where there is no such file.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, ConfigError> {
        let path = folder.join(GENERATION_CONFIG_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = files::read_text(&path, MOST_BYTES)?;
        let malformed = |reason| ConfigError::Malformed { path: path.clone(), model: "generation", reason };
        files::from_json(&text).map(Some).map_err(|reason| malformed(with_key::<Self>(&text, reason)))
    }
}

impl GenerationConfig {
    /// As the `generation_config.json` of a folder has it, and the defaults where it, or the file, says nothing. Of what Transformers
    /// reads there, these are the keys that this library has.
    ///
    /// ```
    /// use accelerate_models::GenerationConfig;
    /// let folder = std::env::temp_dir().join(format!("accelerate-generation-doc-{}", std::process::id()));
    /// std::fs::create_dir_all(&folder).unwrap();
    /// std::fs::write(folder.join("generation_config.json"), r#"{"do_sample": true, "eos_token_id": [2, 7]}"#).unwrap();
    /// let config = GenerationConfig::from_pretrained(&folder)?;
    /// assert!(config.do_sample && config.eos_token_id == Some(vec![2, 7]));
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), accelerate_models::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn from_pretrained(folder: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let (file, default) = (GenerationFile::read(folder.as_ref())?.unwrap_or_default(), Self::default());
        Ok(Self {
            max_new_tokens: file.max_new_tokens.unwrap_or(default.max_new_tokens),
            do_sample: file.do_sample.unwrap_or(default.do_sample),
            temperature: file.temperature.unwrap_or(default.temperature),
            top_k: file.top_k.unwrap_or(default.top_k),
            top_p: file.top_p.unwrap_or(default.top_p),
            eos_token_id: file.eos_token_id.map(|ids| OneOrMore::all(Some(ids))),
            pad_token_id: file.pad_token_id,
        })
    }

    fn check(&self) -> Result<(), GenerationError> {
        let wrong = |key, found: f64, wanted| Err(GenerationError::Value { key, found: format!("{found:?}"), wanted });
        if !self.do_sample {
            return Ok(());
        }
        // Scores are divided in float32.
        if !(f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&self.temperature) {
            return wrong(
                "temperature",
                self.temperature,
                "a number above 0 that float32 has; do_sample = false takes the likeliest token",
            );
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", self.top_p, "a probability above 0 and at most 1");
        }
        Ok(())
    }
}

/// The continuation of a batch of texts: an iterator that gives the next token of each, as they come.
///
/// Dropout is off while a token is made; the mode of the model is what it was, before and after. No gradients are recorded.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
/// use accelerate_models::{Generation, GenerationConfig};
///
/// let config = GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, ..Default::default() };
/// let model = GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// let options = GenerationConfig { max_new_tokens: 3, ..Default::default() };
/// for tokens in Generation::new(&model, &Tensor::from_slice2(&[[3i64, 1, 4]]), None, &options)? {
///     print!("{} ", tokens?[0]); // a tokenizer would make text of it
/// }
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Generation<'a, M> {
    model: &'a M,
    config: GenerationConfig,
    cache: KeyValueCache,
    /// What the model has not seen yet `[batch, length]`.
    input_ids: Tensor,
    /// Of all tokens so far; nothing where none fills up a row.
    attention_mask: Option<Tensor>,
    eos_token_id: Vec<i64>,
    pad_token_id: i64,
    has_ended: Vec<bool>,
    left: usize,
}

impl<'a, M: CausalLM> Generation<'a, M> {
    /// Continues `input_ids [batch, length]`, int64. `attention_mask` of the same shape is 0 for what fills up short prompts in
    /// front; `None` means that all are tokens.
    ///
    /// # Errors
    /// A [`GenerationError`].
    pub fn new(
        model: &'a M,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        config: &GenerationConfig,
    ) -> Result<Self> {
        config.check().map_err(Error::other)?;
        let attention_mask = check_prompts(input_ids, attention_mask)?;
        let (batch, prompt) = input_ids.size2()?;
        let max_new_tokens = config.max_new_tokens;
        if let Some(max_length) = model.max_length() {
            // The last token is not looked at by the model.
            let places = max_length.saturating_sub(prompt).saturating_add(1);
            if i64::try_from(max_new_tokens).map_or(true, |wanted| places < wanted) || max_length < prompt {
                return Err(Error::other(GenerationError::TooLong { prompt, max_new_tokens, max_length }));
            }
        }
        let eos_token_id = config.eos_token_id.clone().unwrap_or_else(|| model.eos_token_id().to_vec());
        Ok(Self {
            model,
            config: config.clone(),
            cache: KeyValueCache::new(),
            input_ids: input_ids.f_detach()?,
            attention_mask,
            pad_token_id: config
                .pad_token_id
                .or(model.pad_token_id())
                .or(eos_token_id.first().copied())
                .unwrap_or_default(),
            eos_token_id,
            has_ended: vec![false; usize::try_from(batch).unwrap_or_default()],
            left: max_new_tokens,
        })
    }

    fn step(&mut self) -> Result<Vec<i64>> {
        let _no_grad = tch::no_grad_guard();
        let _evaluation = Evaluation::of(self.model);
        let logits = self.model.next_logits(&self.input_ids, self.attention_mask.as_ref(), &mut self.cache)?;
        let next = match self.config.do_sample {
            true => sampled(&logits, &self.config)?,
            false => logits.f_argmax(-1, false)?,
        };
        let mut tokens = Vec::<i64>::try_from(&next)?;
        for (token, has_ended) in tokens.iter_mut().zip(&mut self.has_ended) {
            if *has_ended {
                *token = self.pad_token_id;
            }
            *has_ended |= self.eos_token_id.contains(token);
        }
        let device = self.input_ids.device();
        self.input_ids = Tensor::f_from_slice(&tokens)?.f_unsqueeze(1)?.f_to(device)?;
        if let Some(mask) = &mut self.attention_mask {
            *mask = Tensor::f_cat(&[&*mask, &self.input_ids.f_ones_like()?], 1)?;
        }
        Ok(tokens)
    }
}

impl<M: CausalLM> Iterator for Generation<'_, M> {
    /// The next token of each text.
    type Item = Result<Vec<i64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 || self.has_ended.iter().all(|has_ended| *has_ended) {
            return None;
        }
        self.left -= 1;
        let step = self.step();
        if step.is_err() {
            self.left = 0;
        }
        Some(step)
    }
}

/// `input_ids [batch, length]` and what follows: `[batch, length + new tokens]`, int64, on their device. See [`Generation`] for
/// tokens as they come.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::generate;
/// use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
///
/// let config = LlamaConfig { vocab_size: 40, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, ..LlamaConfig::default() }
///     .with_heads(2, 1);
/// let model = LlamaForCausalLM::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// // The second prompt is shorter, and filled up in front.
/// let prompts = Tensor::from_slice2(&[[3i64, 1, 4], [0, 1, 5]]);
/// let mask = Tensor::from_slice2(&[[1i64, 1, 1], [0, 1, 1]]);
/// let texts = generate(&model, &prompts, Some(&mask), &Default::default())?;
/// assert_eq!(texts.size()[0], 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// Those of [`Generation::new`] and of the model.
pub fn generate<M: CausalLM>(
    model: &M,
    input_ids: &Tensor,
    attention_mask: Option<&Tensor>,
    config: &GenerationConfig,
) -> Result<Tensor> {
    let mut texts = vec![input_ids.f_detach()?];
    for tokens in Generation::new(model, input_ids, attention_mask, config)? {
        texts.push(Tensor::f_from_slice(&tokens?)?.f_unsqueeze(1)?.f_to(input_ids.device())?);
    }
    Ok(Tensor::f_cat(&texts, 1)?)
}

/// The mask, if there is anything to leave out.
fn check_prompts(input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Option<Tensor>> {
    let (found, kind) = (input_ids.size(), input_ids.f_kind()?);
    if kind != Kind::Int64 || found.len() != 2 || found.contains(&0) {
        return Err(Error::other(GenerationError::Prompt { found, kind }));
    }
    let Some(mask) = attention_mask else { return Ok(None) };
    if mask.size() != found {
        return Err(Error::other(GenerationError::Mask { found: mask.size(), wanted: found }));
    }
    let mask = scalar::ne(mask, 0)?;
    let is_token = Vec::<bool>::try_from(&mask.f_select(1, -1)?)?;
    if let Some(row) = is_token.iter().position(|is_token| !is_token) {
        return Err(Error::other(GenerationError::PaddedBehind { row }));
    }
    let needs_mask = mask.f_all()?.f_int64_value(&[])? == 0;
    Ok(needs_mask.then(|| mask.f_to_kind(Kind::Int64)).transpose()?)
}

/// One token of each row, drawn by its probability.
fn sampled(logits: &Tensor, config: &GenerationConfig) -> Result<Tensor> {
    let GenerationConfig { temperature, top_k, top_p, .. } = *config;
    let mut scores = logits.f_to_kind(Kind::Float)?;
    if temperature != 1.0 {
        scores = scores.f_divide(&scalar::full(&[], temperature, (Kind::Float, scores.device()))?)?;
    }
    let vocab_size = scores.size().last().copied().unwrap_or_default();
    let top_k = i64::try_from(top_k).unwrap_or(i64::MAX);
    if (1..vocab_size).contains(&top_k) {
        let smallest = scores.f_topk(top_k, -1, true, true)?.0.f_narrow(-1, top_k - 1, 1)?;
        scores = scalar::masked_fill(&scores, &scores.f_lt_tensor(&smallest)?, f64::NEG_INFINITY)?;
    }
    if top_p < 1.0 {
        // From the unlikeliest on, what all before have together: at most what is left out. The likeliest always stays.
        let (sorted, order) = scores.f_sort(-1, false)?;
        let before = sorted.f_softmax(-1, Kind::Float)?.f_cumsum(-1, Kind::Float)?;
        let left_out = before.f_le_tensor(&scalar::full(&[], 1.0 - top_p, (Kind::Float, before.device()))?)?;
        let likeliest = left_out.f_narrow(-1, vocab_size - 1, 1)?.f_zeros_like()?;
        let left_out = Tensor::f_cat(&[&left_out.f_narrow(-1, 0, vocab_size - 1)?, &likeliest], -1)?;
        let left_out = left_out.f_scatter(-1, &order, &left_out)?;
        scores = scalar::masked_fill(&scores, &left_out, f64::NEG_INFINITY)?;
    }
    Ok(scores.f_softmax(-1, Kind::Float)?.f_multinomial(1, false)?.f_squeeze_dim(1)?)
}

/// While it lives, the model is in evaluation mode.
struct Evaluation<'a, M: CausalLM> {
    model: &'a M,
    was_training: bool,
}

impl<'a, M: CausalLM> Evaluation<'a, M> {
    fn of(model: &'a M) -> Self {
        let was_training = model.params().is_training();
        model.params().eval();
        Self { model, was_training }
    }
}

impl<M: CausalLM> Drop for Evaluation<'_, M> {
    fn drop(&mut self) {
        self.model.params().set_training(self.was_training);
    }
}
