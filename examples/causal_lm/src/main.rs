//! Trains a model that continues texts, in one process or many: the loop is the same.
//!
//! `causal_lm --help` lists what it can be told; `README.md` beside this file shows how to start it.

use accelerate::data::DataLoaderShard;
use accelerate::lora::{LoraConfig, PeftModel, TaskType, get_peft_model};
use accelerate::metrics::Perplexity;
use accelerate::nn::ParamStore;
use accelerate::optim::{AdamW, LinearWithWarmup, no_decay};
use accelerate::tch::{self, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, BnbQuantizationConfig, DataLoaderConfiguration, Error, FullyShardedDataParallelPlugin,
    MixedPrecision, PreparedModel, QuantType, SaveModelOptions, ShardingStrategy, main_println, set_seed,
};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::hub::model_folder;
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use accelerate_models::{
    CONFIG_FILE, CausalLM, CausalLMInput, Generation, GenerationConfig, LoadOptions, PretrainedConfig, PretrainedModel,
};
use anyhow::{Context, Result, bail, ensure};
use causal_lm::arguments::{Arguments, Model, Precision};
use causal_lm::blocks::Blocks;
use causal_lm::tokens::{NUM_BYTES, TOKENIZER_FILE, Tokens};
use std::collections::BTreeMap;
use std::path::Path;

fn main() -> Result<()> {
    let arguments = Arguments::parse_line(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let accelerator = accelerator(&arguments)?;
    set_seed(arguments.seed);
    // Found now, and not after hours of training.
    accelerator.check_save_directory(&arguments.output_dir)?;
    // On each machine one process fetches what is not there yet.
    let name = arguments.model_name_or_path.as_ref();
    let folder = accelerator.local_main_process_first(|| {
        name.map(|name| model_folder(name, None)).transpose().map_err(accelerate::Error::other)
    })?;
    match (&folder, arguments.model) {
        (Some(folder), _) => match model_type(folder)?.as_str() {
            "gpt2" => go_on_from::<GPT2LMHeadModel>(&accelerator, &arguments, folder, |config| config.vocab_size),
            "llama" | "mistral" | "qwen2" => {
                go_on_from::<LlamaForCausalLM>(&accelerator, &arguments, folder, |config| config.vocab_size)
            }
            other => bail!("{}: the model_type {other:?} does not continue texts here", folder.display()),
        },
        (None, Model::Gpt2) => {
            let config = GPT2Config {
                vocab_size: NUM_BYTES,
                n_positions: longest(&arguments),
                n_embd: 128,
                n_layer: 3,
                n_head: 4,
                resid_pdrop: 0.0,
                embd_pdrop: 0.0,
                attn_pdrop: 0.0,
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..Default::default()
            };
            from_scratch::<GPT2LMHeadModel>(&accelerator, &arguments, &config)
        }
        (None, Model::Llama) => {
            let config = LlamaConfig {
                vocab_size: NUM_BYTES,
                hidden_size: 128,
                intermediate_size: 352,
                num_hidden_layers: 3,
                max_position_embeddings: longest(&arguments),
                tie_word_embeddings: true,
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..Default::default()
            };
            from_scratch::<LlamaForCausalLM>(&accelerator, &arguments, &config.with_heads(4, 2))
        }
    }
}

/// Blocks fit, and so do samples.
fn longest(arguments: &Arguments) -> i64 {
    (arguments.block_size.max(PROMPT_TOKENS + arguments.sample_tokens)) as i64
}

fn accelerator(arguments: &Arguments) -> accelerate::Result<Accelerator> {
    let mut builder = Accelerator::builder().cpu(arguments.cpu).dataloader_config(DataLoaderConfiguration {
        // Each epoch's order depends on the seed alone, not on how many processes drew numbers before it.
        use_seedable_sampler: Some(true),
        data_seed: Some(arguments.seed),
        ..Default::default()
    });
    if let Some(steps) = arguments.gradient_accumulation_steps {
        builder = builder.gradient_accumulation_steps(steps);
    }
    if let Some(precision) = arguments.mixed_precision {
        builder = builder.mixed_precision(match precision {
            Precision::No => MixedPrecision::No,
            Precision::Fp16 => MixedPrecision::Fp16,
            Precision::Bf16 => MixedPrecision::Bf16,
        });
    }
    if arguments.use_fsdp {
        builder = builder.fsdp_plugin(FullyShardedDataParallelPlugin {
            sharding_strategy: Some(ShardingStrategy::FullShard),
            // A layer is gathered while it is used.
            auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
            ..Default::default()
        });
    }
    builder.build()
}

/// Those of the largest models have a few thousand.
const MOST_CONFIG_BYTES: u64 = 1 << 20;

fn model_type(folder: &Path) -> Result<String> {
    let path = folder.join(CONFIG_FILE);
    let text = accelerate_models::files::read_text(&path, MOST_CONFIG_BYTES)?;
    let config: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let found = config.get("model_type").and_then(serde_json::Value::as_str);
    Ok(found.with_context(|| format!("{} has no model_type", path.display()))?.to_owned())
}

fn from_scratch<M: CausalLM + PretrainedModel>(
    accelerator: &Accelerator,
    arguments: &Arguments,
    config: &M::Config,
) -> Result<()> {
    let store = ParamStore::new(accelerator.device());
    let model = M::from_config(&store.root(), config)?;
    let files = BTreeMap::from([(CONFIG_FILE.to_owned(), config.to_json()?.into_bytes())]);
    train(accelerator, arguments, model, &Tokens::Bytes, files)
}

fn go_on_from<M: CausalLM + PretrainedModel>(
    accelerator: &Accelerator,
    arguments: &Arguments,
    folder: &Path,
    vocab_size: impl Fn(&M::Config) -> i64,
) -> Result<()> {
    let config = M::Config::from_folder(folder)?;
    let tokens = Tokens::from_folder(folder, vocab_size(&config))?;
    // Weights are trained in float32, whatever they were saved in; mixed precision is for what is computed.
    let (dtype, device) = (Some(tch::Kind::Float), accelerator.device());
    let quantization_config = arguments.load_in_4bit.then(four_bit);
    let (model, report) =
        M::from_pretrained(folder, &LoadOptions { dtype, device, quantization_config, ..Default::default() })?;
    if !report.missing_keys.is_empty() {
        main_println!(accelerator, "learned from scratch: {}", report.missing_keys.join(", "));
    }
    let mut files = BTreeMap::from([(CONFIG_FILE.to_owned(), config.to_json()?.into_bytes())]);
    if let Tokens::Tokenizer(tokenizer) = &tokens {
        let json = tokenizer.to_string(true).map_err(|error| anyhow::anyhow!(error))?;
        files.insert(TOKENIZER_FILE.to_owned(), json.into_bytes());
    }
    train(accelerator, arguments, model, &tokens, files)
}

/// As the article on QLoRA has it (arXiv 2305.14314). Products are computed in the type of their inputs.
fn four_bit() -> BnbQuantizationConfig {
    BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        bnb_4bit_use_double_quant: Some(true),
        ..Default::default()
    }
}

/// Matrices beside all linear layers, if they were asked for; the weights of the model are frozen then.
fn adapters<M: CausalLM>(
    accelerator: &Accelerator,
    arguments: &Arguments,
    model: &M,
) -> accelerate::Result<Option<PeftModel>> {
    let Some(r) = arguments.lora_rank else { return Ok(None) };
    let base = arguments.model_name_or_path.as_ref().map(|folder| folder.display().to_string());
    let config = LoraConfig {
        r,
        lora_alpha: arguments.lora_alpha.unwrap_or(2.0 * r as f64),
        lora_dropout: arguments.lora_dropout,
        target_modules: Some("all-linear".into()),
        task_type: Some(TaskType::CausalLm),
        base_model_name_or_path: base,
        ..Default::default()
    };
    let adapters = get_peft_model(model.params(), config)?;
    let (trained, all) = adapters.num_parameters();
    main_println!(accelerator, "{trained} of {all} numbers are trained");
    Ok(Some(adapters))
}

fn train<M: CausalLM>(
    accelerator: &Accelerator,
    arguments: &Arguments,
    model: M,
    tokens: &Tokens,
    files: BTreeMap<String, Vec<u8>>,
) -> Result<()> {
    set_up(&model, arguments)?;
    let adapters = adapters(accelerator, arguments, &model)?;
    let (train, validation) = Blocks::load(arguments, tokens)?;
    let prompt = match &arguments.prompt {
        Some(prompt) => tokens.encode(prompt)?,
        None => validation.beginning(PROMPT_TOKENS)?,
    };
    let optimizer = AdamW::builder(model.params())
        .lr(arguments.learning_rate())
        .weight_decay(0.01)
        .param_groups(no_decay(model.params(), &["bias", "ln_", "norm"]))
        .build()?;
    let (train, validation) =
        (train.loader(arguments.batch_size, true)?, validation.loader(arguments.batch_size, false)?);
    let num_steps = accelerator.num_training_steps(&train, arguments.num_epochs);
    let scheduler = LinearWithWarmup::new(&optimizer, num_steps / 10, num_steps);
    let (model, mut optimizer, train, validation, mut scheduler) =
        accelerator.prepare((model, optimizer, train, validation, scheduler))?;

    for epoch in 1..=arguments.num_epochs {
        model.params().train();
        let (mut sum, mut count) = (0.0, 0);
        for batch in train.iter()? {
            let input = input_of(batch?);
            accelerator.accumulate(&model, || {
                // Where processes divide sequences (cp_size, sp_size), this one gets its tokens of each.
                let loss = accelerator.maybe_context_parallel(&input, &Default::default(), |input| {
                    let loss = model.forward(&input)?.loss.ok_or_else(|| Error::other("a batch without labels"))?;
                    accelerator.backward(&loss)?;
                    Ok(loss)
                })?;
                if accelerator.sync_gradients() {
                    accelerator.clip_grad_norm_(&model, 1.0)?;
                }
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                sum += loss.f_double_value(&[])?;
                count += 1;
                Ok(())
            })?;
        }
        let perplexity = evaluate(accelerator, &model, &validation)?.compute();
        let num_epochs = arguments.num_epochs;
        let loss = sum / f64::from(count);
        main_println!(accelerator, "epoch {epoch}/{num_epochs}: loss={loss:.4} perplexity={perplexity:.4}");
        if arguments.sample_tokens > 0 {
            let text = sample(&*model, tokens, &prompt, arguments)?;
            main_println!(accelerator, "sample: {text}");
        }
    }
    save(accelerator, arguments, &model, adapters.as_ref(), files)
}

/// Refuses blocks that the model has no positions for, and turns on what was asked for.
fn set_up<M: CausalLM>(model: &M, arguments: &Arguments) -> Result<()> {
    if let Some(most) = model.max_length() {
        let found = arguments.block_size;
        ensure!(found as i64 <= most, "--block_size {found} is more than the {most} positions of the model");
    }
    if arguments.gradient_checkpointing {
        model.params().gradient_checkpointing_enable(Default::default())?;
    }
    Ok(())
}

/// Weights and sizes, so that the folder can be given to `--model_name_or_path`; of adapters, they alone.
fn save<M: CausalLM>(
    accelerator: &Accelerator,
    arguments: &Arguments,
    model: &PreparedModel<M>,
    adapters: Option<&PeftModel>,
    files: BTreeMap<String, Vec<u8>>,
) -> Result<()> {
    accelerator.wait_for_everyone()?;
    let folder = &arguments.output_dir;
    if let Some(adapters) = adapters {
        accelerator.save_adapter(adapters, folder, &Default::default())?;
        main_println!(accelerator, "the adapter is in {}", folder.display());
        return Ok(());
    }
    accelerator.save_model(model, folder, &SaveModelOptions { files, ..Default::default() })?;
    main_println!(accelerator, "the model is in {}", folder.display());
    Ok(())
}

fn input_of(input_ids: Tensor) -> CausalLMInput {
    // What follows each token is to be learned, all of it.
    let labels = Some(input_ids.shallow_clone());
    CausalLMInput { input_ids, attention_mask: None, labels }
}

/// On all rows of the loader; every process gets the same.
fn evaluate<M: CausalLM>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    loader: &DataLoaderShard<Tensor>,
) -> accelerate::Result<Perplexity> {
    let _no_grad = tch::no_grad_guard();
    model.params().eval();
    let mut perplexity = Perplexity::default();
    for batch in loader.iter()? {
        let labels = batch?;
        let output = model.forward(&input_of(labels.shallow_clone()))?;
        perplexity.add_batch(accelerator, &output.logits, &labels)?;
    }
    Ok(perplexity)
}

/// Tokens of the held-out part that a sample begins with.
const PROMPT_TOKENS: usize = 24;

/// A text that the model continues. All processes make it, for a sharded model is gathered by all.
fn sample<M: CausalLM>(model: &M, tokens: &Tokens, prompt: &[i64], arguments: &Arguments) -> Result<String> {
    let room = model.max_length().map_or(usize::MAX, |most| (most as usize).saturating_sub(prompt.len()));
    let options = GenerationConfig {
        max_new_tokens: arguments.sample_tokens.min(room),
        do_sample: true,
        temperature: arguments.temperature,
        ..Default::default()
    };
    let input_ids = Tensor::f_from_slice(prompt)?.f_unsqueeze(0)?.f_to(model.params().device())?;
    let mut text = prompt.to_vec();
    for token in Generation::new(model, &input_ids, None, &options)? {
        text.extend(token?);
    }
    tokens.decode(&text)
}
