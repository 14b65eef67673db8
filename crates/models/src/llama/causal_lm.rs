//! The model that says which token follows.

use super::decoder::linear;
use super::{LlamaConfig, LlamaModel};
use crate::causal_lm::last_logits;
use crate::{CausalLM, CausalLMInput, CausalLMOutput, KeyValueCache, PretrainedModel};
use accelerate::Result;
use accelerate::TensorParallelPlan;
use accelerate::nn::{Linear, Module, ParamStore, Path, Pipelined};
use accelerate::tch::{self, Tensor};
use std::ops::Range;

/// `transformers.LlamaForCausalLM`, `MistralForCausalLM` or `Qwen2ForCausalLM`, by names and numbers.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::CausalLMInput;
/// use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
///
/// let store = ParamStore::new(Device::Cpu);
/// let config = LlamaConfig { vocab_size: 40, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() }
///     .with_heads(4, 2);
/// let model = LlamaForCausalLM::new(&store.root(), &config)?;
/// let input_ids = Tensor::from_slice2(&[[2i64, 7, 3, 1]]);
/// let labels = Some(input_ids.shallow_clone());
/// let output = model.forward(&CausalLMInput { input_ids, attention_mask: None, labels })?;
/// output.loss.unwrap().backward();
/// assert!(store.get("model.layers.0.mlp.gate_proj.weight").unwrap().grad().is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LlamaForCausalLM {
    store: ParamStore,
    model: LlamaModel,
    lm_head: Linear,
    config: LlamaConfig,
}

impl LlamaForCausalLM {
    /// Registers all parameters under `path`, with the random initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &LlamaConfig) -> Result<Self> {
        let model = LlamaModel::new(&(path / "model"), config)?;
        let head = path / "lm_head";
        let lm_head = match config.tie_word_embeddings {
            true => Linear::from_params(&head, head.alias("weight", &model.embed_tokens.weight)?, None),
            false => linear(&head, (config.hidden_size, config.vocab_size), false, config)?,
        };
        Ok(Self { store: path.store().clone(), model, lm_head, config: config.clone() })
    }

    /// Its sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }
}

impl Module for LlamaForCausalLM {
    type Input = CausalLMInput;
    type Output = CausalLMOutput;

    fn forward(&self, input: &CausalLMInput) -> Result<CausalLMOutput> {
        let hidden = self.model.forward(&input.input_ids, input.attention_mask.as_ref())?;
        CausalLMOutput::of_head(&self.lm_head, &hidden, input.labels.as_ref(), &*self.model.attention_kernel())
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
impl Pipelined for LlamaForCausalLM {
    fn block_paths(&self) -> Vec<String> {
        self.model.block_paths()
    }

    fn begin(&self, input: &CausalLMInput) -> Result<Vec<Tensor>> {
        self.model.begin(&input.input_ids, input.attention_mask.as_ref())
    }

    fn blocks(&self, blocks: Range<usize>, carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let (_, length, _) = carried[0].size3()?;
        self.model.through(blocks, carried, length)
    }

    fn end(&self, carried: Vec<Tensor>) -> Result<Tensor> {
        self.lm_head.forward(&self.model.end(&carried)?)
    }
}

impl CausalLM for LlamaForCausalLM {
    fn next_logits(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        cache: &mut KeyValueCache,
    ) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let hidden = self.model.go_on(input_ids, attention_mask, cache)?;
        last_logits(&self.lm_head, &hidden)
    }

    fn max_length(&self) -> Option<i64> {
        None
    }

    fn eos_token_id(&self) -> &[i64] {
        &self.config.eos_token_id
    }

    fn pad_token_id(&self) -> Option<i64> {
        self.config.pad_token_id
    }
}

impl PretrainedModel for LlamaForCausalLM {
    type Config = LlamaConfig;

    const BASE: &'static str = "model.";
    const HEADS: &'static [&'static str] = &["lm_head."];

    fn from_config(path: &Path, config: &LlamaConfig) -> Result<Self> {
        Self::new(path, config)
    }

    /// Frequencies that old files keep as buffers.
    fn is_of_no_use(name: &str) -> bool {
        name.ends_with("rotary_emb.inv_freq")
    }
}
