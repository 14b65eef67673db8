//! GPT-2 that says which token follows.

use super::{GPT2Config, GPT2Model};
use crate::causal_lm::last_logits;
use crate::{CausalLM, CausalLMInput, CausalLMOutput, KeyValueCache, PretrainedModel};
use accelerate::Result;
use accelerate::TensorParallelPlan;
use accelerate::nn::{Init, Linear, LinearConfig, Module, ParamStore, Path, Pipelined};
use accelerate::tch::{self, Tensor};
use std::ops::Range;

/// `transformers.GPT2LMHeadModel`, by names and numbers.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::CausalLMInput;
/// use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
///
/// let store = ParamStore::new(Device::Cpu);
/// let config = GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, ..Default::default() };
/// let model = GPT2LMHeadModel::new(&store.root(), &config)?;
/// let input_ids = Tensor::from_slice2(&[[2i64, 7, 3, 1]]);
/// let labels = Some(input_ids.shallow_clone());
/// let output = model.forward(&CausalLMInput { input_ids, attention_mask: None, labels })?;
/// assert_eq!(output.logits.size(), [1, 4, 40]);
/// output.loss.unwrap().backward();
/// assert!(store.get("transformer.h.0.attn.c_attn.weight").unwrap().grad().is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct GPT2LMHeadModel {
    store: ParamStore,
    transformer: GPT2Model,
    lm_head: Linear,
    config: GPT2Config,
}

impl GPT2LMHeadModel {
    /// Registers all parameters under `path`, with GPT-2's random initial values.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &GPT2Config) -> Result<Self> {
        let transformer = GPT2Model::new(&(path / "transformer"), config)?;
        let head = path / "lm_head";
        let lm_head = match config.tie_word_embeddings {
            true => Linear::from_params(&head, head.alias("weight", &transformer.wte.weight)?, None),
            false => {
                let weight_init = Init::Normal { mean: 0.0, std: config.initializer_range };
                let options = LinearConfig { bias: false, weight_init, ..Default::default() };
                Linear::new(&head, config.n_embd, config.vocab_size, options)?
            }
        };
        Ok(Self { store: path.store().clone(), transformer, lm_head, config: config.clone() })
    }

    /// Its sizes.
    pub fn config(&self) -> &GPT2Config {
        &self.config
    }
}

impl Module for GPT2LMHeadModel {
    type Input = CausalLMInput;
    type Output = CausalLMOutput;

    fn forward(&self, input: &CausalLMInput) -> Result<CausalLMOutput> {
        let hidden = self.transformer.forward(&input.input_ids, input.attention_mask.as_ref())?;
        CausalLMOutput::of_head(&self.lm_head, &hidden, input.labels.as_ref(), &*self.transformer.attention_kernel())
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    /// Heads of attention and inner features are divided, and the vocabulary.
    fn tensor_parallel_plan(&self) -> Option<TensorParallelPlan> {
        Some(self.config.tensor_parallel_plan())
    }
}

/// Logits of [`CausalLMOutput`]; labels are not looked at.
impl Pipelined for GPT2LMHeadModel {
    fn block_paths(&self) -> Vec<String> {
        self.transformer.block_paths()
    }

    fn begin(&self, input: &CausalLMInput) -> Result<Vec<Tensor>> {
        self.transformer.begin(&input.input_ids, input.attention_mask.as_ref())
    }

    fn blocks(&self, blocks: Range<usize>, carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let (_, length, _) = carried[0].size3()?;
        self.transformer.through(blocks, carried, length)
    }

    fn end(&self, carried: Vec<Tensor>) -> Result<Tensor> {
        self.lm_head.forward(&self.transformer.end(&carried)?)
    }
}

impl CausalLM for GPT2LMHeadModel {
    fn next_logits(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        cache: &mut KeyValueCache,
    ) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let hidden = self.transformer.go_on(input_ids, attention_mask, cache)?;
        last_logits(&self.lm_head, &hidden)
    }

    fn max_length(&self) -> Option<i64> {
        Some(self.config.n_positions)
    }

    fn eos_token_id(&self) -> &[i64] {
        &self.config.eos_token_id
    }

    fn pad_token_id(&self) -> Option<i64> {
        self.config.pad_token_id
    }
}

impl PretrainedModel for GPT2LMHeadModel {
    type Config = GPT2Config;

    const BASE: &'static str = "transformer.";
    const HEADS: &'static [&'static str] = &["lm_head."];

    fn from_config(path: &Path, config: &GPT2Config) -> Result<Self> {
        Self::new(path, config)
    }

    /// Masks that old files keep as buffers.
    fn is_of_no_use(name: &str) -> bool {
        name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
    }
}
