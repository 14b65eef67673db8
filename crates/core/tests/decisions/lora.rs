//! Which layers a configuration of an adapter means, and what files say: rows beside PEFT's rules.

use accelerate_core::lora::{
    InitLoraWeights, LayerEntry, LayerKind, LoraBias, LoraConfig, Modules, TaskType, check_adapter_name,
};
use rstest::rstest;

/// A small Llama with a table of words that the output layer shares.
fn llama() -> Vec<LayerEntry> {
    let linear = |path: String| LayerEntry::new(path, LayerKind::Linear, [8, 8]);
    let mut layers = vec![LayerEntry::new("model.embed_tokens", LayerKind::Embedding, [32, 8])];
    for number in 0..12 {
        for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"] {
            layers.push(linear(format!("model.layers.{number}.{name}")));
        }
        let norm = LayerKind::Other("RMSNorm".to_owned());
        layers.push(LayerEntry::new(format!("model.layers.{number}.input_layernorm"), norm, [0, 0]));
    }
    layers.push(LayerEntry { is_tied: true, ..LayerEntry::new("lm_head", LayerKind::Linear, [32, 8]) });
    layers
}

fn list(names: &[&str]) -> LoraConfig {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    LoraConfig { target_modules: Some(names.into()), ..Default::default() }
}

fn pattern(pattern: &str) -> LoraConfig {
    LoraConfig { target_modules: Some(pattern.into()), ..Default::default() }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[rstest]
#[case::by_last_name(list(&["q_proj", "v_proj"]), 24, "model.layers.0.self_attn.q_proj")]
#[case::by_last_parts(list(&["self_attn.q_proj"]), 12, "model.layers.0.self_attn.q_proj")]
#[case::by_whole_path(list(&["model.layers.3.mlp.up_proj"]), 1, "model.layers.3.mlp.up_proj")]
#[case::a_part_of_a_name_is_none(list(&["proj", "q_proj"]), 12, "model.layers.0.self_attn.q_proj")]
#[case::a_dot_is_a_dot_in_a_list(list(&["self_attn.q_proj", "self_attn_q_proj"]), 12, "model.layers.0.self_attn.q_proj")]
#[case::a_pattern_is_for_the_whole_path(pattern(r".*\.q_proj"), 12, "model.layers.0.self_attn.q_proj")]
#[case::alternatives(pattern(r".*_proj|lm_head"), 61, "model.layers.0.self_attn.q_proj")]
#[case::look_ahead(pattern(r"^(?!.*layers\.(?:0|1)\b).*q_proj$"), 10, "model.layers.2.self_attn.q_proj")]
#[case::look_behind(pattern(r".*(?<=layers\.1\.self_attn\.)q_proj"), 1, "model.layers.1.self_attn.q_proj")]
#[case::all_linear(pattern("all-linear"), 60, "model.layers.0.self_attn.q_proj")]
#[case::all_linear_in_capitals(pattern("All-Linear"), 60, "model.layers.0.self_attn.q_proj")]
#[case::tables(list(&["embed_tokens"]), 1, "model.embed_tokens")]
#[case::without_some(
    LoraConfig { exclude_modules: Some(["layers.0.self_attn.q_proj"].into()), ..list(&["q_proj"]) },
    11, "model.layers.1.self_attn.q_proj"
)]
#[case::without_a_pattern(
    LoraConfig { exclude_modules: Some(r".*layers\.\d\..*".into()), ..list(&["q_proj"]) },
    2, "model.layers.10.self_attn.q_proj"
)]
#[case::some_numbers(
    LoraConfig { layers_to_transform: vec![1, 11], ..list(&["q_proj"]) }, 2, "model.layers.1.self_attn.q_proj"
)]
#[case::numbers_of_a_list(
    LoraConfig { layers_to_transform: vec![1], layers_pattern: owned(&["blocks", "layers"]), ..list(&["q_proj"]) },
    1, "model.layers.1.self_attn.q_proj"
)]
#[case::a_saved_module_has_no_adapter(
    LoraConfig { modules_to_save: owned(&["layers.0"]), exclude_modules: Some(["input_layernorm"].into()), ..list(&["lm_head"]) },
    0, "modules_to_save means model.layers.0.input_layernorm, which is a RMSNorm"
)]
#[case::nothing(list(&["query"]), 0, "no layer of the model is meant by target_modules (query)")]
#[case::nothing_is_left(
    LoraConfig { exclude_modules: Some(["lm_head"].into()), ..list(&["lm_head"]) },
    0, "because exclude_modules or modules_to_save have all of them"
)]
#[case::a_number_needs_a_module_before_its_list(
    LoraConfig { layers_to_transform: vec![1], layers_pattern: owned(&["blocks"]), ..list(&["q_proj"]) },
    0, "no layer of the model"
)]
#[case::no_layer_for_adapters(list(&["input_layernorm"]), 0, "which is a RMSNorm; adapters go on")]
#[case::no_targets(LoraConfig::default(), 0, "target_modules is missing")]
#[case::no_names(list(&[]), 0, "target_modules is missing")]
#[case::no_pattern(pattern("("), 0, "the pattern \"(\" of target_modules cannot be used")]
#[case::no_pattern_of_ranks(
    LoraConfig { rank_pattern: [("*".to_owned(), 2)].into(), ..list(&["q_proj"]) }, 0, "of rank_pattern cannot be used"
)]
#[case::numbers_with_a_pattern(
    LoraConfig { layers_to_transform: vec![1], ..pattern(".*q_proj") }, 0, "layers_to_transform goes with a list"
)]
#[case::lists_without_numbers(
    LoraConfig { layers_pattern: owned(&["layers"]), ..list(&["q_proj"]) }, 0, "give both or neither"
)]
#[case::no_rank(LoraConfig { r: 0, ..list(&["q_proj"]) }, 0, "r is 0")]
#[case::no_rank_of_some(
    LoraConfig { rank_pattern: [("q".to_owned(), 0)].into(), ..list(&["q_proj"]) }, 0, "rank_pattern[\"q\"] is 0"
)]
#[case::an_alpha_beyond_float32(LoraConfig { lora_alpha: 1e308, ..list(&["q_proj"]) }, 0, "lora_alpha is 1e308")]
#[case::no_alpha(LoraConfig { lora_alpha: f64::NAN, ..list(&["q_proj"]) }, 0, "lora_alpha is NaN")]
#[case::no_dropout(LoraConfig { lora_dropout: -0.1, ..list(&["q_proj"]) }, 0, "lora_dropout is -0.1")]
#[case::no_bias_of_tables(LoraConfig { lora_bias: true, ..list(&["embed_tokens"]) }, 0, "model.embed_tokens is one")]
#[case::no_bias_with_gaussian(
    LoraConfig { lora_bias: true, init_lora_weights: InitLoraWeights::Gaussian, ..list(&["q_proj"]) },
    0, "lora_bias goes with"
)]
fn a_configuration_means_layers(#[case] config: LoraConfig, #[case] count: usize, #[case] first_or_error: &str) {
    let layers = llama();
    match config.resolve(&layers) {
        Ok(resolved) => {
            assert_eq!(resolved.layers.len(), count);
            assert_eq!(layers[resolved.layers[0].layer].path, first_or_error);
        }
        Err(error) => {
            assert!(error.is_config() && error.to_string().contains(first_or_error), "{error}");
            assert_eq!(count, 0, "{error}");
        }
    }
}

#[test]
fn ranks_and_factors_have_patterns() {
    let config = LoraConfig {
        r: 8,
        lora_alpha: 16.0,
        // In alphabetical order, the first that fits counts.
        rank_pattern: [("layers.1.self_attn.q_proj".to_owned(), 2), (r"^model\.layers\.1\..*".to_owned(), 4)].into(),
        alpha_pattern: [("v_proj".to_owned(), 64.0)].into(),
        ..list(&["q_proj", "v_proj"])
    };
    let layers = llama();
    let found = |config: &LoraConfig, path: &str| {
        let resolved = config.resolve(&layers).unwrap();
        let own = resolved.layers.iter().find(|own| layers[own.layer].path.ends_with(path)).unwrap();
        (own.r, own.scaling)
    };
    assert_eq!(found(&config, ".0.self_attn.q_proj"), (8, 2.0));
    assert_eq!(found(&config, ".1.self_attn.q_proj"), (4, 4.0));
    assert_eq!(found(&config, ".1.self_attn.v_proj"), (4, 16.0));
    assert_eq!(found(&config, ".11.self_attn.v_proj"), (8, 8.0));
    let stabilised = LoraConfig { use_rslora: true, ..config };
    assert_eq!(found(&stabilised, ".1.self_attn.q_proj"), (4, 8.0));
}

#[test]
fn what_means_nothing_is_listed() {
    let config = LoraConfig {
        modules_to_save: owned(&["score", "embed_tokens"]),
        rank_pattern: [("q_proj".to_owned(), 2), ("up_proj".to_owned(), 2)].into(),
        alpha_pattern: [("nothing".to_owned(), 2.0)].into(),
        task_type: Some(TaskType::TokenCls),
        ..list(&["q_proj", "query"])
    };
    let resolved = config.resolve(&llama()).unwrap();
    let wanted = [
        ("target_modules", "query"),
        ("modules_to_save", "score"),
        ("rank_pattern", "up_proj"),
        ("alpha_pattern", "nothing"),
    ];
    assert_eq!(resolved.unmatched, wanted.map(|(field, name)| (field, name.to_owned())));
    assert_eq!(resolved.saved, [0]);
}

#[rstest]
#[case::a_layer(&["score"], &["score"], &["score"])]
#[case::what_is_in_a_module(&["classifier"], &["classifier.dense", "classifier.out"], &["classifier.dense", "classifier.out"])]
#[case::letter_by_letter(&["head"], &["lm_head", "heads"], &["lm_head"])]
#[case::nothing(&["head"], &["score"], &[])]
fn modules_to_save_are_ends_of_paths(#[case] names: &[&str], #[case] paths: &[&str], #[case] wanted: &[&str]) {
    let paths = paths.iter().chain(&["q_proj"]);
    let layers: Vec<_> = paths.map(|path| LayerEntry::new(*path, LayerKind::Linear, [2, 2])).collect();
    let resolved = LoraConfig { modules_to_save: owned(names), ..list(&["q_proj"]) }.resolve(&layers).unwrap();
    let saved: Vec<&str> = resolved.saved.iter().map(|&position| layers[position].path.as_str()).collect();
    assert_eq!(saved, wanted);
}

#[test]
fn tensors_have_the_names_of_peft() {
    let layers = [
        LayerEntry::new("embed", LayerKind::Embedding, [11, 6]),
        LayerEntry { has_bias: true, ..LayerEntry::new("layers.0.q_proj", LayerKind::Linear, [4, 6]) },
        LayerEntry { has_bias: true, ..LayerEntry::new("score", LayerKind::Linear, [3, 6]) },
    ];
    let config = LoraConfig { r: 2, task_type: Some(TaskType::SeqCls), ..list(&["embed", "q_proj"]) };
    let resolved = config.resolve(&layers).unwrap();
    let found = resolved.tensors("mine", &layers).into_iter().map(|it| (it.name, it.file_key, it.shape));
    let wanted = [
        ("lora_embedding_A.mine", "embed.lora_embedding_A", &[2, 11][..]),
        ("lora_embedding_B.mine", "embed.lora_embedding_B", &[6, 2]),
        ("lora_A.mine.weight", "layers.0.q_proj.lora_A.weight", &[2, 6]),
        ("lora_B.mine.weight", "layers.0.q_proj.lora_B.weight", &[4, 2]),
        ("modules_to_save.mine.weight", "score.weight", &[3, 6]),
        ("modules_to_save.mine.bias", "score.bias", &[3]),
    ];
    let wanted = wanted.map(|(name, key, shape)| (name.to_owned(), format!("base_model.model.{key}"), shape.to_vec()));
    assert_eq!(found.collect::<Vec<_>>(), wanted);
    assert_eq!(resolved.bias_key("layers.0.q_proj.bias", &layers), "base_model.model.layers.0.q_proj.base_layer.bias");
    assert_eq!(resolved.bias_key("score.bias", &layers), "base_model.model.score.bias");
}

#[test]
fn files_are_written_and_read() {
    let config = LoraConfig {
        r: 3,
        lora_alpha: 1.5,
        lora_dropout: 0.1,
        exclude_modules: Some(Modules::Pattern(".*k_proj".to_owned())),
        modules_to_save: owned(&["score"]),
        bias: LoraBias::LoraOnly,
        use_rslora: true,
        init_lora_weights: InitLoraWeights::Gaussian,
        fan_in_fan_out: true,
        layers_to_transform: vec![0, 3],
        layers_pattern: owned(&["layers"]),
        rank_pattern: [("a".to_owned(), 1)].into(),
        alpha_pattern: [("a".to_owned(), 0.5), ("b".to_owned(), 2.0)].into(),
        task_type: Some(TaskType::CausalLm),
        base_model_name_or_path: Some("base".to_owned()),
        revision: Some("main".to_owned()),
        inference_mode: true,
        ..list(&["q_proj"])
    };
    let text = config.to_json();
    assert_eq!(LoraConfig::from_json(&text).unwrap(), config);
    assert!(text.contains("\"b\": 2\n") && text.contains("\"lora_alpha\": 1.5"), "{text}");
    // The heads of the task are in the file, and in the configuration after that.
    let config = LoraConfig { task_type: Some(TaskType::SeqCls), inference_mode: true, ..config };
    let read = LoraConfig::from_json(&config.to_json()).unwrap();
    assert_eq!(read.modules_to_save, ["score", "classifier"]);
    assert_eq!(read.all_modules_to_save(), config.all_modules_to_save());
}

#[rstest]
#[case("default", true)]
#[case("task-1_b", true)]
#[case("", false)]
#[case("a.b", false)]
#[case("a/b", false)]
#[case("..", false)]
#[case("lora_A", false)]
#[case("modules_to_save", false)]
fn adapters_have_names(#[case] name: &str, #[case] is_allowed: bool) {
    assert_eq!(check_adapter_name(name).is_ok(), is_allowed);
}
