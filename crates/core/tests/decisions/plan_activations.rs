//! What activations take: the published formula, and the files that its numbers come from.

use accelerate_core::config::FullyShardedSettings;
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::plan::*;
use rstest::rstest;

/// GPT-3 of 175 billion parameters, the first model in table 3 of Korthikanti et al.
fn gpt3() -> TransformerShape {
    TransformerShape {
        model_type: "gpt2".to_owned(),
        num_layers: 96,
        hidden_size: 12_288,
        num_heads: 96,
        intermediate_size: 4 * 12_288,
        vocab_size: 51_200,
    }
}

fn batch(batch_size: u64, sequence_length: u64, activation_checkpointing: bool) -> MicroBatch {
    MicroBatch { batch_size, sequence_length, activation_checkpointing }
}

/// Bytes of one element, and the factors of `sbh` and of `abs²` in what a layer keeps.
#[rstest]
#[case(2, 34, 5)]
#[case(4, 66, 9)]
fn a_layer_keeps_what_the_formula_says(#[case] element_bytes: u64, #[case] of_tokens: u64, #[case] of_scores: u64) {
    let shape = gpt3();
    let (s, b, h, a) = (2048, 3, shape.hidden_size, shape.num_heads);
    let layer = of_tokens * s * b * h + of_scores * a * s * s * b;
    let bytes = shape.activation_bytes(&batch(b, s, false), element_bytes);
    assert_eq!(bytes.layers, 96 * layer);
    assert_eq!(bytes.embeddings, (2 * element_bytes + 1) * s * b * h);
    assert_eq!(bytes.logits, 4 * s * b * shape.vocab_size, "logits are in 32 bits whatever the model is in");
    let again = shape.activation_bytes(&batch(b, s, true), element_bytes);
    assert_eq!(again.layers, 96 * element_bytes * s * b * h + layer);
    assert_eq!((again.embeddings, again.logits), (bytes.embeddings, bytes.logits));
}

/// Korthikanti et al. print `5as/h` of this model as 80, so that a layer keeps `114·sbh` bytes.
#[test]
fn the_published_example_comes_out() {
    let layer = gpt3().activation_bytes(&batch(1, 2048, false), 2).layers / 96;
    assert_eq!(layer, 114 * 2048 * 12_288);
}

#[test]
fn a_narrow_mlp_keeps_less() {
    let narrow = TransformerShape { intermediate_size: 1000, ..gpt3() };
    let difference = 96 * 2 * 2 * 10 * (4 * 12_288 - 1000);
    let bytes = |shape: &TransformerShape| shape.activation_bytes(&batch(1, 10, false), 2).layers;
    assert_eq!(bytes(&gpt3()) - bytes(&narrow), difference);
}

#[test]
fn numbers_that_no_machine_has_do_not_overflow() {
    let shape = TransformerShape { num_layers: u64::MAX, vocab_size: u64::MAX, ..gpt3() };
    assert_eq!(shape.activation_bytes(&batch(u64::MAX, u64::MAX, true), 4).total(), u64::MAX);
}

/// A file, and layers, hidden size, heads, intermediate size, vocabulary.
#[rstest]
#[case::bert(
    r#"{"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 28996, "is_encoder_decoder": false}"#,
    [12, 768, 12, 3072, 28_996]
)]
#[case::gpt2(
    r#"{"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16, "n_inner": null, "vocab_size": 50257}"#,
    [24, 1024, 16, 4096, 50_257]
)]
#[case::distilbert(
    r#"{"model_type": "distilbert", "n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522}"#,
    [6, 768, 12, 3072, 30_522]
)]
#[case::gpt_neo(
    r#"{"model_type": "gpt_neo", "num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50257}"#,
    [12, 768, 12, 3072, 50_257]
)]
fn families_name_their_numbers_differently(#[case] config: &str, #[case] wanted: [u64; 5]) {
    let shape = TransformerShape::from_config(config).unwrap();
    let TransformerShape { num_layers, hidden_size, num_heads, intermediate_size, vocab_size, .. } = shape;
    assert_eq!([num_layers, hidden_size, num_heads, intermediate_size, vocab_size], wanted);
    assert!(shape.is_of_the_formula());
}

#[rstest]
#[case::another_family("llama", false)]
#[case::nothing("", false)]
#[case::known("roberta", true)]
fn families_beyond_the_formula_are_known(#[case] model_type: &str, #[case] wanted: bool) {
    let shape = TransformerShape { model_type: model_type.to_owned(), ..gpt3() };
    assert_eq!(shape.is_of_the_formula(), wanted);
}

const LAYERS_AND_HIDDEN: &str = r#""n_layer": 1, "n_embd": 8"#;

#[rstest]
#[case::nothing("", "config.json cannot be understood")]
#[case::a_list("[]", "config.json cannot be understood")]
#[case::deep(&"[".repeat(100_000), "config.json cannot be understood")]
#[case::other_models(
    r#"{"model_type": "resnet", "depths": [3, 4]}"#,
    "nothing of a hidden size (hidden_size, n_embd, dim)"
)]
#[case::no_heads(&format!("{{{LAYERS_AND_HIDDEN}}}"), "nothing of a number of attention heads")]
#[case::no_words(&format!("{{{LAYERS_AND_HIDDEN}, \"n_head\": 2}}"), "nothing of a size of the vocabulary")]
#[case::zero(r#"{"n_embd": 0}"#, "config.json has 0 as n_embd")]
#[case::negative(r#"{"n_embd": -8}"#, "config.json has -8 as n_embd")]
#[case::a_text(r#"{"n_embd": "8"}"#, r#"config.json has "8" as n_embd"#)]
#[case::a_fraction(r#"{"n_embd": 1e99}"#, "as n_embd, and a number of at least 1 is wanted")]
#[case::two_stacks(r#"{"is_encoder_decoder": true, "hidden_size": 8}"#, "an encoder and a decoder")]
fn what_is_no_transformer_is_refused(#[case] config: &str, #[case] words: &str) {
    let error = TransformerShape::from_config(config).unwrap_err();
    assert!(error.is_plan());
    assert!(error.to_string().contains(words) && error.to_string().len() < 600, "{error}");
}

#[test]
fn activations_are_there_in_the_passes_and_count_for_what_fits() {
    let parameters = vec![ParameterEntry::new("0.weight", &[100], "float32", 4)];
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    let with = Plan { activation_bytes: 5000, ..plan.clone() };
    let totals =
        |plan: &Plan| Phase::ALL.iter().map(|&phase| plan.bytes_per_rank().in_phase(phase).total()).collect::<Vec<_>>();
    let added: Vec<usize> = totals(&with).iter().zip(totals(&plan)).map(|(with, without)| with - without).collect();
    assert_eq!(added, [0, 5000, 5000, 0]);
    let peak = plan.bytes_per_rank().peak().1 as u64;
    plan.check_fits(peak).unwrap();
    with.check_fits(peak + 5000).unwrap();
    let error = with.check_fits(peak + 4999).unwrap_err().to_string();
    assert!(error.contains("5 KB of it activations"), "{error}");
    let hopeless = with.check_fits(4000).unwrap_err().to_string();
    assert!(hopeless.contains("use a smaller batch, shorter rows, activation checkpointing"), "{hopeless}");
    // What is proposed has the activations, too.
    assert!(error.contains("FULL_SHARD on 4 ranks takes 6.2 KB"), "{error}");
    assert!(
        with.to_string().contains("5 KB activations; at most") && !with.to_string().contains("without activations")
    );
}

/// §4.2.1 of the paper: `sbh·(10 + 24/t + 5as/(ht))`, and a `c`th of it where ranks divide sequences.
#[rstest]
#[case(1, 1)]
#[case(2, 1)]
#[case(8, 1)]
#[case(1, 4)]
#[case(8, 4)]
fn ranks_that_divide_layers_and_sequences_keep_less(#[case] t: u64, #[case] c: u64) {
    let shape = gpt3();
    let (s, b, h, a) = (2048, 2, shape.hidden_size, shape.num_heads);
    let sizes = [(Axis::Tp, t as usize), (Axis::Cp, c as usize)];
    let mesh = Mesh::of((t * c) as usize, &sizes).unwrap();
    let bytes = shape.activation_bytes_on(&mesh, &batch(b, s, false), 2);
    assert_eq!(bytes.layers, 96 * (s * b * h * 10 + (s * b * h * 24 + 5 * a * s * s * b) / t) / c);
    assert_eq!(bytes.logits, 4 * s * b * shape.vocab_size / c);
}
