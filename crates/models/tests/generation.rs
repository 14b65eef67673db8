//! Texts that are continued: with the cache as without it, by the options, and with the model left as it was.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::save_model_weights;
use accelerate::nn::{Module, ParamStore};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM, LlamaModelType};
use accelerate_models::{
    CausalLM, CausalLMInput, Generation, GenerationConfig, PretrainedConfig, PretrainedModel, generate,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// libtorch has one generator per process, and tests of one file may run as threads.
fn seeded(seed: i64) -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(seed);
    guard
}

/// Weights large enough that tokens differ.
fn enlarged<M: Module>(model: M) -> M {
    for param in model.params().parameters().iter().filter(|param| param.shape().len() == 2) {
        param.copy_(&(param.get().unwrap().detach() * 12.0)).unwrap();
    }
    model
}

fn gpt2_config() -> GPT2Config {
    let sizes = GPT2Config { vocab_size: 30, n_positions: 20, n_embd: 16, n_layer: 2, n_head: 2, ..Default::default() };
    GPT2Config { eos_token_id: Vec::new(), ..sizes }
}

fn gpt2() -> GPT2LMHeadModel {
    enlarged(GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &gpt2_config()).unwrap())
}

fn llama(window: Option<i64>) -> LlamaForCausalLM {
    let sizes = LlamaConfig { vocab_size: 30, hidden_size: 16, intermediate_size: 24, ..Default::default() };
    let config = LlamaConfig {
        model_type: if window.is_some() { LlamaModelType::Mistral } else { LlamaModelType::Llama },
        num_hidden_layers: 2,
        sliding_windows: if window.is_some() { vec![window; 2] } else { Vec::new() },
        eos_token_id: Vec::new(),
        ..sizes
    };
    enlarged(LlamaForCausalLM::new(&ParamStore::new(Device::Cpu).root(), &config.with_heads(4, 2)).unwrap())
}

fn prompts() -> Tensor {
    Tensor::from_slice2(&[[3i64, 1, 4, 1], [5, 9, 2, 6]])
}

fn greedy(max_new_tokens: usize) -> GenerationConfig {
    GenerationConfig { max_new_tokens, ..Default::default() }
}

/// Every token computed from the whole text before it.
fn without_cache<M: CausalLM>(model: &M, input_ids: &Tensor, max_new_tokens: usize) -> Tensor {
    model.params().eval();
    let mut texts = input_ids.copy();
    for _ in 0..max_new_tokens {
        let input = CausalLMInput { input_ids: texts.copy(), attention_mask: None, labels: None };
        let logits = tch::no_grad(|| model.forward(&input)).unwrap().logits;
        texts = Tensor::cat(&[&texts, &logits.select(1, -1).argmax(-1, true)], 1);
    }
    model.params().train();
    texts
}

#[test]
fn the_cache_changes_nothing() {
    let _seeded = seeded(1);
    fn check<M: CausalLM>(model: &M, max_new_tokens: usize) {
        let texts = generate(model, &prompts(), None, &greedy(max_new_tokens)).unwrap();
        assert_eq!(texts, without_cache(model, &prompts(), max_new_tokens));
        let distinct =
            Vec::<i64>::try_from(texts.select(0, 0)).unwrap().into_iter().collect::<std::collections::HashSet<_>>();
        assert!(distinct.len() > 4, "{texts:?} says nothing");
    }
    check(&gpt2(), 17);
    // More than the cache first has room for.
    check(&llama(None), 140);
    check(&llama(Some(3)), 12);
}

#[test]
fn what_fills_up_a_prompt_in_front_changes_nothing() {
    let _seeded = seeded(2);
    fn check<M: CausalLM>(model: &M) {
        let alone = generate(model, &Tensor::from_slice2(&[[5i64, 9]]), None, &greedy(6)).unwrap();
        let padded = Tensor::from_slice2(&[[3i64, 1, 4, 1], [29, 7, 5, 9]]);
        let mask = Tensor::from_slice2(&[[1i64, 1, 1, 1], [0, 0, 1, 1]]);
        let together = generate(model, &padded, Some(&mask), &greedy(6)).unwrap();
        assert_eq!(together.select(0, 1).narrow(0, 2, 8), alone.select(0, 0));
    }
    check(&gpt2());
    check(&llama(None));
    check(&llama(Some(3)));
}

#[test]
fn a_text_that_has_ended_is_filled_up_until_all_have() {
    let _seeded = seeded(3);
    let model = gpt2();
    let free = generate(&model, &prompts(), None, &greedy(10)).unwrap();
    let row = |texts: &Tensor, row: i64| Vec::<i64>::try_from(texts.select(0, row)).unwrap().split_off(4);
    let (first, second) = (row(&free, 0), row(&free, 1));
    let eos = first[2];
    let cut = |tokens: &[i64]| tokens.iter().position(|token| *token == eos).map_or(tokens.len(), |at| at + 1);
    let (first_length, second_length) = (cut(&first), cut(&second));
    let options = GenerationConfig { eos_token_id: Some(vec![eos]), pad_token_id: Some(29), ..greedy(10) };
    let texts = generate(&model, &prompts(), None, &options).unwrap();
    let length = first_length.max(second_length);
    assert_eq!(texts.size(), [2, 4 + length as i64]);
    for (tokens, own, at) in [(first, first_length, 0), (second, second_length, 1)] {
        let mut wanted = tokens[..own].to_vec();
        wanted.resize(length, 29);
        assert_eq!(row(&texts, at), wanted);
    }
}

/// What `generation_config.json` says of the end of texts goes before `config.json`, and fillers are those of the configuration.
#[test]
fn files_say_where_texts_end_and_what_follows() {
    let seeded = seeded(3);
    let config = GPT2Config { pad_token_id: Some(28), ..gpt2_config() };
    let model = enlarged(GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &config).unwrap());
    drop(seeded);
    let folder = tempfile::tempdir().unwrap();
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_json().unwrap()).unwrap();
    let free = generate(&model, &prompts(), None, &greedy(10)).unwrap();
    let row = |texts: &Tensor, row: i64| Vec::<i64>::try_from(texts.select(0, row)).unwrap().split_off(4);
    let (first, second) = (row(&free, 0), row(&free, 1));
    // A token with which the first text ends, and not the second.
    let at = first.iter().position(|token| !second.contains(token)).unwrap();
    std::fs::write(folder.path().join("generation_config.json"), format!("{{\"eos_token_id\": [{}]}}", first[at]))
        .unwrap();
    let (loaded, _) = GPT2LMHeadModel::from_pretrained(folder.path(), &Default::default()).unwrap();
    let texts = generate(&loaded, &prompts(), None, &greedy(10)).unwrap();
    let mut wanted = first[..=at].to_vec();
    wanted.resize(10, 28);
    assert_eq!((row(&texts, 0), row(&texts, 1)), (wanted, second));
}

#[test]
fn chance_is_bounded_by_the_options_and_repeats_with_its_seed() {
    let guard = seeded(4);
    let model = gpt2();
    let likeliest = generate(&model, &prompts(), None, &greedy(8)).unwrap();
    drop(guard);
    let drawn = |seed, change: &dyn Fn(&mut GenerationConfig)| {
        let _seeded = seeded(seed);
        let mut options = GenerationConfig { do_sample: true, ..greedy(8) };
        change(&mut options);
        generate(&model, &prompts(), None, &options).unwrap()
    };
    assert_eq!(drawn(1, &|_| ()), drawn(1, &|_| ()));
    assert_ne!(drawn(1, &|_| ()), drawn(2, &|_| ()));
    // Each of these leaves one token to draw.
    assert_eq!(drawn(5, &|options| options.top_k = 1), likeliest);
    assert_eq!(drawn(5, &|options| options.top_p = 1e-6), likeliest);
    assert_eq!(drawn(5, &|options| options.temperature = 1e-4), likeliest);
    // All tokens, and more than there are.
    assert_eq!(drawn(6, &|options| options.top_k = 0), drawn(6, &|options| options.top_k = 1000));
}

#[test]
fn the_model_is_left_as_it_was() {
    let _seeded = seeded(5);
    let model = gpt2();
    assert!(model.params().is_training());
    // Dropout is off: the same text twice.
    let text = || generate(&model, &prompts(), None, &greedy(8)).unwrap();
    assert_eq!(text(), text());
    assert!(model.params().is_training() && !text().requires_grad());
    let mut tokens = Generation::new(&model, &prompts(), None, &greedy(2)).unwrap();
    assert!(tokens.next().is_some() && tokens.next().is_some() && tokens.next().is_none());
}

#[test]
fn bfloat16_says_what_libtorchs_products_say() {
    let _seeded = seeded(6);
    for model in [gpt2(), gpt2()] {
        let exact = generate(&model, &prompts().narrow(0, 0, 1), None, &greedy(1)).unwrap();
        model.params().to_kind(Kind::BFloat16).unwrap();
        assert_eq!(generate(&model, &prompts().narrow(0, 0, 1), None, &greedy(1)).unwrap(), exact);
    }
}

#[test]
fn what_makes_no_sense_is_named() {
    let _seeded = seeded(7);
    let model = gpt2();
    let message = |input_ids: &Tensor, mask: Option<&Tensor>, options: &GenerationConfig| {
        Generation::new(&model, input_ids, mask, options).unwrap_err().to_string()
    };
    let with = |change: &dyn Fn(&mut GenerationConfig)| {
        let mut options = GenerationConfig { do_sample: true, ..greedy(2) };
        change(&mut options);
        message(&prompts(), None, &options)
    };
    assert!(with(&|options| options.temperature = 0.0).contains("temperature is 0.0; wanted a number above 0"));
    assert!(with(&|options| options.temperature = 1e300).contains("temperature is 1e300; wanted a number above 0"));
    assert!(with(&|options| options.temperature = 1e-300).contains("temperature is 1e-300"));
    assert!(with(&|options| options.temperature = f64::NAN).contains("temperature is NaN"));
    assert!(with(&|options| options.top_p = 0.0).contains("top_p is 0.0"));
    assert!(with(&|options| options.top_p = 1.5).contains("top_p is 1.5"));
    let found = with(&|options| options.max_new_tokens = 18);
    assert!(found.contains("a prompt of 4 tokens and 18 new ones do not fit into the 20 positions"), "{found}");
    let plain = greedy(2);
    let floats = prompts().to_kind(Kind::Float);
    assert!(message(&floats, None, &plain).contains("input_ids are [2, 4] of Float"));
    assert!(message(&prompts().select(0, 0), None, &plain).contains("wanted [batch, length]"));
    assert!(message(&prompts().narrow(1, 0, 0), None, &plain).contains("at least one token"));
    let behind = Tensor::from_slice2(&[[1i64, 1, 1, 1], [1, 1, 1, 0]]);
    assert!(message(&prompts(), Some(&behind), &plain).contains("attention_mask ends with 0 in row 1"));
    assert!(message(&prompts(), Some(&behind.narrow(1, 0, 3)), &plain).contains("attention_mask is [2, 3]"));
}
