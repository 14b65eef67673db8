//! Configurations that would make another model than their file means, or none: refused, by file and key.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_models::bert::BertConfig;
use accelerate_models::gpt2::GPT2Config;
use accelerate_models::llama::{LlamaConfig, LlamaModelType, RopeScaling};
use accelerate_models::resnet::ResNetConfig;
use accelerate_models::vit::ViTConfig;
use accelerate_models::{ConfigError, PretrainedConfig, ProblemType};
use std::path::Path;

fn read<C: PretrainedConfig>(json: &str) -> Result<C, ConfigError> {
    C::from_json(json, Path::new("folder/config.json"))
}

fn check<C: PretrainedConfig>(rows: &[(&str, &str)]) {
    for (json, part) in rows {
        match read::<C>(json) {
            Ok(_) => panic!("{json} was read"),
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains(part) && message.contains("folder/config.json"), "{json}: {message}");
            }
        }
    }
}

#[test]
fn gpt2_names_file_and_key() {
    check::<GPT2Config>(&[
        (r#"{"model_type": "gpt_neo"}"#, r#"model_type is "gpt_neo"; wanted "gpt2""#),
        (r#"{"n_embd": "wide"}"#, "n_embd: invalid type: string"),
        (r#"{"n_embd": 10, "n_head": 4}"#, "n_head is 4; wanted a divisor of n_embd, which is 10"),
        (r#"{"n_embd": 0}"#, "n_embd is 0; wanted a number from 1"),
        (r#"{"n_layer": -1}"#, "n_layer: invalid value: integer `-1`"),
        (r#"{"n_inner": 0}"#, "n_inner is 0"),
        (r#"{"activation_function": "mish"}"#, "activation_function: unknown variant `mish`"),
        (r#"{"attn_pdrop": 1.5}"#, "attn_pdrop is 1.5; wanted a probability"),
        (r#"{"layer_norm_epsilon": 0}"#, "layer_norm_epsilon is 0.0"),
        (r#"{"add_cross_attention": true}"#, "add_cross_attention is true"),
        (r#"{"vocab_size": 100000000, "n_embd": 120000}"#, "n_embd is 120000; wanted sizes of a model with at most"),
        (r#"{"n_embd": 8, "n_embd": 16}"#, "\"n_embd\" is there twice"),
        ("[]", "does not describe a GPT-2 model"),
    ]);
}

#[test]
fn llama_names_file_and_key() {
    check::<LlamaConfig>(&[
        (
            r#"{"model_type": "gemma"}"#,
            "model_type: unknown variant `gemma`, expected one of `llama`, `mistral`, `qwen2`",
        ),
        (
            r#"{"hidden_size": 10, "num_attention_heads": 4}"#,
            "num_attention_heads is 4; wanted a divisor of hidden_size",
        ),
        (r#"{"num_attention_heads": 0}"#, "num_attention_heads is 0"),
        (
            r#"{"num_key_value_heads": 5}"#,
            "num_key_value_heads is 5; wanted a divisor of num_attention_heads, which is 32",
        ),
        (r#"{"head_dim": 7}"#, "head_dim is 7; wanted an even number"),
        (r#"{"rms_norm_eps": -1}"#, "rms_norm_eps is -1.0"),
        (
            r#"{"pad_token_id": 32000}"#,
            "pad_token_id is 32000; wanted null, or a token below vocab_size, which is 32000",
        ),
        (r#"{"pad_token_id": -32001}"#, "pad_token_id is -32001"),
        (r#"{"rope_theta": 0}"#, "rope_theta is 0.0"),
        (
            r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#,
            r#"rope_type is "dynamic"; wanted "default", "linear""#,
        ),
        (r#"{"rope_scaling": {"rope_type": "linear"}}"#, "factor is missing"),
        (r#"{"rope_scaling": {"rope_type": "linear", "factor": 0.5}}"#, "factor is 0.5"),
        (r#"{"rope_parameters": {"rope_type": "llama3", "factor": 8}}"#, "low_freq_factor is missing"),
        (
            r#"{"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
                "original_max_position_embeddings": 8192}}"#,
            "low_freq_factor is 4.0; wanted a number between 0 and high_freq_factor",
        ),
        (r#"{"rope_parameters": {"partial_rotary_factor": 0.5}}"#, "partial_rotary_factor is 0.5"),
        (r#"{"model_type": "mistral", "sliding_window": 0}"#, "sliding_window is 0"),
        (r#"{"model_type": "mistral", "attention_bias": true}"#, "attention_bias is true"),
        (
            r#"{"model_type": "qwen2", "num_hidden_layers": 2, "use_sliding_window": true, "layer_types": ["sliding_attention"]}"#,
            "layer_types is a list of 1; wanted one for each of the 2 layers",
        ),
        (
            r#"{"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}"#,
            "use_sliding_window is not true",
        ),
        (
            r#"{"model_type": "qwen2", "num_hidden_layers": 3, "layer_types": ["full_attention"]}"#,
            "layer_types is a list of 1",
        ),
        (r#"{"sliding_window": 4}"#, r#"model_type is missing; wanted "mistral" or "qwen2""#),
        (r#"{"model_type": "qwen2", "layer_types": ["linear_attention"]}"#, "layer_types: unknown variant"),
        (r#"{"num_hidden_layers": 100000}"#, "num_hidden_layers is 100000"),
    ]);
}

#[test]
fn image_models_name_file_and_key() {
    check::<ViTConfig>(&[
        (r#"{"model_type": "deit"}"#, r#"model_type is "deit"; wanted "vit""#),
        (r#"{"image_size": 8}"#, "patch_size is [16, 16]; wanted at most image_size, [8, 8]"),
        (r#"{"patch_size": 0}"#, "patch_size is 0"),
        (r#"{"image_size": [224, 224, 3]}"#, "image_size: "),
        (r#"{"id2label": {}}"#, "id2label is []"),
    ]);
    check::<ResNetConfig>(&[
        (r#"{"model_type": "regnet"}"#, r#"model_type is "regnet"; wanted "resnet""#),
        (r#"{"depths": [1, 2]}"#, "depths is a list of 2; wanted as many as hidden_sizes, 4"),
        (r#"{"hidden_sizes": [], "depths": []}"#, "hidden_sizes is a list of 0"),
        (r#"{"hidden_sizes": [6], "depths": [1]}"#, "hidden_sizes is 6; wanted a multiple of 4"),
        (r#"{"depths": [3, 0, 6, 3]}"#, "depths is 0"),
        (r#"{"layer_type": "wide"}"#, "layer_type: unknown variant `wide`"),
    ]);
}

/// `transformers.GPT2Config()`, `MistralConfig()`, ... without a key.
#[test]
fn what_is_absent_has_the_default_of_transformers() {
    assert_eq!(read::<GPT2Config>("{}").unwrap(), GPT2Config::default());
    assert_eq!(read::<BertConfig>("{}").unwrap(), BertConfig::default());
    assert_eq!(read::<ViTConfig>("{}").unwrap(), ViTConfig::default());
    assert_eq!(read::<ResNetConfig>("{}").unwrap(), ResNetConfig::default());
    assert_eq!(read::<LlamaConfig>("{}").unwrap(), LlamaConfig::default());
    let mistral: LlamaConfig = read(r#"{"model_type": "mistral"}"#).unwrap();
    assert_eq!(mistral.model_type, LlamaModelType::Mistral);
    assert_eq!((mistral.intermediate_size, mistral.num_key_value_heads), (14336, 8));
    assert_eq!((mistral.max_position_embeddings, mistral.sliding_windows[31]), (131_072, Some(4096)));
    let qwen2: LlamaConfig = read(r#"{"model_type": "qwen2"}"#).unwrap();
    assert_eq!((qwen2.vocab_size, qwen2.intermediate_size, qwen2.num_key_value_heads), (151_936, 22016, 32));
    assert_eq!((qwen2.sliding_windows.len(), qwen2.eos_token_id.len()), (0, 0));
}

#[test]
fn files_of_both_versions_of_transformers_mean_the_same() {
    let old = r#"{"model_type": "llama", "rope_theta": 500000.0, "eos_token_id": [1, 2], "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}, "pretraining_tp": 1}"#;
    let new = r#"{"model_type": "llama", "eos_token_id": [1, 2], "dtype": "bfloat16", "rope_parameters": {"rope_type": "llama3",
        "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}"#;
    let (old, new): (LlamaConfig, LlamaConfig) = (read(old).unwrap(), read(new).unwrap());
    assert_eq!(old, new);
    assert!(matches!(new.rope_scaling, RopeScaling::Llama3 { original_max_position_embeddings: 8192, .. }));
    assert_eq!((new.rope_theta, new.eos_token_id.as_slice()), (500_000.0, &[1i64, 2][..]));
}

/// As one that is built in a program is.
#[test]
fn what_is_built_is_checked_as_what_is_read() {
    use accelerate::nn::ParamStore;
    use accelerate::tch::Device;
    let root = ParamStore::new(Device::Cpu).root();
    let message = |error: accelerate::Error| error.to_string();
    let gpt2 = GPT2Config { n_embd: 10, n_head: 4, ..Default::default() };
    assert!(message(accelerate_models::gpt2::GPT2Model::new(&root, &gpt2).unwrap_err()).contains("n_head is 4"));
    let llama = LlamaConfig { num_key_value_heads: 5, ..Default::default() };
    assert!(
        message(accelerate_models::llama::LlamaModel::new(&root, &llama).unwrap_err())
            .contains("num_key_value_heads is 5")
    );
    let vit = ViTConfig { patch_size: [0; 2], ..Default::default() };
    assert!(message(accelerate_models::vit::ViTModel::new(&root, &vit).unwrap_err()).contains("patch_size is 0"));
    let resnet = ResNetConfig { depths: vec![1], ..Default::default() };
    assert!(
        message(accelerate_models::resnet::ResNetModel::new(&root, &resnet).unwrap_err()).contains("depths is a list")
    );
}

#[test]
fn keys_that_transformers_maps_count() {
    let gpt2: GPT2Config = read(r#"{"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}"#).unwrap();
    assert_eq!((gpt2.n_embd, gpt2.n_head, gpt2.n_layer), (12, 3, 2));
    check::<GPT2Config>(&[(r#"{"n_head": 12, "num_attention_heads": 3}"#, "n_head")]);
    let five = |labels: usize| assert_eq!(labels, 5);
    five(read::<BertConfig>(r#"{"num_labels": 5}"#).unwrap().num_labels());
    five(read::<ViTConfig>(r#"{"num_labels": 5}"#).unwrap().num_labels());
    five(read::<ResNetConfig>(r#"{"num_labels": 5}"#).unwrap().num_labels());
    check::<BertConfig>(&[
        (r#"{"num_labels": 5, "id2label": {"0": "a", "1": "b", "2": "c"}}"#, "num_labels is 5"),
        (r#"{"is_decoder": true}"#, "is_decoder is true"),
        (r#"{"problem_type": "ranking"}"#, "problem_type: unknown variant `ranking`"),
    ]);
    let config = BertConfig { problem_type: Some(ProblemType::Regression), ..Default::default() };
    assert_eq!(read::<BertConfig>(&config.to_json().unwrap()).unwrap(), config);
}

#[test]
fn a_base_of_rope_that_float32_does_not_hold_is_refused() {
    check::<LlamaConfig>(&[(
        r#"{"rope_theta": 1e300}"#,
        "rope_theta is 1e300; wanted a number above 0 that float32 holds",
    )]);
}

/// What Transformers takes where a file says it twice, or not at all.
#[test]
fn rope_is_read_as_transformers_reads_it() {
    let scaling = r#""rope_scaling": {"rope_type": "linear", "factor": 2.0}"#;
    let parameters = r#""rope_parameters": {"rope_type": "linear", "factor": 4.0}"#;
    let config: LlamaConfig = read(&format!("{{{scaling}, {parameters}}}")).unwrap();
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let llama3 = |inner: &str, outer: &str| {
        let rope = r#""rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0"#;
        let json = format!(r#"{{"max_position_embeddings": 64, "rope_scaling": {{{rope}{inner}}}{outer}}}"#);
        match read::<LlamaConfig>(&json).unwrap().rope_scaling {
            RopeScaling::Llama3 { original_max_position_embeddings, .. } => original_max_position_embeddings,
            other => panic!("{other:?}"),
        }
    };
    let (inner, outer) = (r#", "original_max_position_embeddings": 16"#, r#", "original_max_position_embeddings": 32"#);
    assert_eq!([llama3(inner, ""), llama3(inner, outer), llama3("", outer), llama3("", "")], [16, 32, 32, 64]);
}
