//! Rules divide the layers of their patterns, and what does not go is named.

use super::*;
use rstest::rstest;
use serde_json::json;

fn layers() -> Vec<LayerEntry> {
    let linear = |path: &str, sizes| LayerEntry::new(path, LayerKind::Linear, sizes);
    let mut head = linear("lm_head", [11, 8]);
    head.weight = "model.wte.weight".to_owned();
    vec![
        LayerEntry::new("model.wte", LayerKind::Embedding, [11, 8]),
        linear("model.h.0.qkv", [24, 8]),
        linear("model.h.0.out", [8, 8]),
        LayerEntry::new("model.norm", LayerKind::Other("LayerNorm"), [8, 0]),
        head,
    ]
}

fn divide(rules: Value, tp_size: usize) -> Result<Vec<DividedLayer>> {
    TensorParallelPlan::from_json(rules.as_object().unwrap())?.divide(&layers(), tp_size)
}

#[rstest]
#[case(json!({ "model.h.*.out": "rowwise" }), 3, 2, ParallelStyle::Rowwise, vec![0..3, 3..6, 6..8])]
#[case(json!({ "h.0.out": "rowwise" }), 2, 2, ParallelStyle::Rowwise, vec![0..4, 4..8])]
#[case(json!({ "model.h.*.out": { "style": "rowwise", "unit": 4 } }), 2, 2, ParallelStyle::Rowwise, vec![0..4, 4..8])]
#[case(
    json!({ "h.*.qkv": { "style": "packed_colwise", "parts": 3, "unit": 2 } }), 3, 1,
    ParallelStyle::PackedColwise, vec![0..4, 4..6, 6..8]
)]
#[case(json!({ "wte": "rowwise" }), 2, 0, ParallelStyle::EmbeddingRowwise, vec![0..6, 6..11])]
#[case(json!({ "wte": "vocab_parallel_rowwise" }), 2, 0, ParallelStyle::EmbeddingRowwise, vec![0..6, 6..11])]
#[case(json!({ "model.wte": "colwise_rep" }), 2, 0, ParallelStyle::EmbeddingColwise, vec![0..4, 4..8])]
#[case(json!({ "lm_head": "colwise_rep" }), 1, 4, ParallelStyle::ColwiseGatherOutput, vec![0..11])]
fn a_rule_divides_the_layers_of_its_pattern(
    #[case] rules: Value,
    #[case] tp_size: usize,
    #[case] layer: usize,
    #[case] style: ParallelStyle,
    #[case] slices: Vec<Range<usize>>,
) {
    let divided = divide(rules, tp_size).unwrap();
    assert_eq!(divided.len(), 1);
    assert_eq!((divided[0].layer, divided[0].style, &divided[0].slices), (layer, style, &slices));
}

#[test]
fn layers_that_share_a_weight_are_divided_alike() {
    let divided = divide(json!({ "wte": "embedding_rowwise", "lm_head": "colwise" }), 2).unwrap();
    assert_eq!(divided[0].slices, divided[1].slices);
    assert!(divide(json!({ "norm": "replicate", "lm_head": "colwise" }), 2).is_ok());
}

#[rstest]
#[case(json!({ "h.*.mlp": "colwise" }), 2, "\"h.*.mlp\" is the path of no layer")]
#[case(json!({ "h.*.out": "rowwise", "model.h.0.out": "colwise" }), 2, "two rules for model.h.0.out")]
#[case(json!({ "wte": "embedding_rowwise", "lm_head": "rowwise" }), 2, "model.wte.weight")]
#[case(json!({ "model.norm": "colwise" }), 2, "model.norm is a LayerNorm")]
#[case(json!({ "wte": "packed_colwise" }), 2, "model.wte is an embedding")]
#[case(json!({ "h.*.out": "embedding_rowwise" }), 2, "model.h.0.out is a linear layer")]
#[case(json!({ "h.*.out": { "style": "rowwise", "unit": 3 } }), 2, "8 features do not divide into 1 equal parts of whole units of 3")]
#[case(json!({ "h.*.out": { "style": "rowwise", "unit": 4 } }), 3, "need 3 units of 4 features, of which there are 2")]
#[case(json!({ "h.*.out": { "style": "rowwise", "unit": 0 } }), 2, "\"h.*.out\" has a 0")]
#[case(json!({ "h.*.out": "sideways" }), 2, "\"sideways\"")]
#[case(json!({ "h.*.out": "sequence_parallel" }), 2, "model.h.0.out is a linear layer, and the plan says sequence_parallel")]
#[case(json!({ "norm": { "style": "sequence_parallel", "output_layouts": "Shard(1)" } }), 2, "\"output_layouts\"")]
#[case(json!({ "norm": { "style": "replicate", "output_layouts": "Replicate" } }), 2, "\"output_layouts\"")]
#[case(json!({ "wte": "embedding_rowwise", "lm_head": "replicated_with_grad_allreduce" }), 2, "model.wte.weight")]
#[case(json!({ "norm": "moe_tp_experts" }), 2, "mixtures of experts")]
#[case(json!({ "h.*.out": { "style": "rowwise", "units": 3 } }), 2, "\"units\":3")]
#[case(json!({ "h.*.out": 7 }), 2, "found 7")]
fn what_does_not_go_is_named(#[case] rules: Value, #[case] tp_size: usize, #[case] words: &str) {
    let error = divide(rules, tp_size).unwrap_err();
    assert!((error.is_plan() || error.is_config()) && error.to_string().contains(words), "{error}");
}

#[test]
fn layers_that_ranks_have_whole_may_compute_some_tokens_alone() {
    let norm = |rule: Value| divide(json!({ "norm": rule }), 2).unwrap();
    for (rule, style, gathers_tokens) in [
        (json!("SequenceParallel"), ParallelStyle::SequenceParallel, false),
        (json!({ "style": "sequence_parallel", "output_layouts": "Replicate" }), ParallelStyle::SequenceParallel, true),
        (json!("replicated_with_grad_allreduce"), ParallelStyle::ReplicateWithGradAllReduce, false),
    ] {
        let wanted = DividedLayer { layer: 3, style, parts: 1, slices: Vec::new(), gathers_tokens };
        assert_eq!(norm(rule), [wanted]);
    }
}

#[test]
fn the_rules_of_a_model_or_of_names_count_where_they_are_asked_for() {
    let plan = |rules: Value| TensorParallelPlan::from_json(rules.as_object().unwrap()).unwrap();
    let feed_forward = [("model.h.0.fc1", [16, 8]), ("model.h.0.fc2", [8, 16])];
    let feed_forward = feed_forward.map(|(path, sizes)| LayerEntry::new(path, LayerKind::Linear, sizes));
    let layers = [layers(), feed_forward.to_vec()].concat();
    let paths = |plan: TensorParallelPlan, known: Option<&TensorParallelPlan>| -> Vec<String> {
        let divided = plan.for_layers(known, &layers).unwrap().divide(&layers, 2).unwrap();
        divided.into_iter().map(|own| layers[own.layer].path.clone()).collect()
    };
    let known = TensorParallelPlan::default().with("h.*.out", ParallelStyle::Rowwise);
    let stack = ["model.wte", "lm_head", "model.h.0.fc1", "model.h.0.fc2"];
    assert_eq!(paths(plan(json!({})), Some(&known)), ["model.h.0.out"]);
    assert_eq!(paths(plan(json!({ "auto": {} })), Some(&known)), ["model.h.0.out"]);
    assert_eq!(paths(plan(json!({ "auto": {} })), None), stack);
    let norms = plan(json!({ "auto": { "head_dim": 4 }, "norm": "sequence_parallel" }));
    assert_eq!(paths(norms, None).len(), stack.len() + 1);
    assert_eq!(paths(plan(json!({ "lm_head": "colwise" })), Some(&known)), ["lm_head"]);
    // The program's own rules count first.
    assert_eq!(paths(plan(json!({ "auto": {}, "lm_head": "replicate", "wte": "replicate" })), None), stack[2..]);
    let divided = plan(json!({ "auto": {}, "lm_head": "colwise" })).for_layers(None, &layers).unwrap();
    assert!(
        divided.divide(&layers, 2).unwrap().iter().any(|own| own.style == ParallelStyle::Colwise && own.layer == 4)
    );
    assert!(plan(json!({})).for_layers(None, &layers).unwrap_err().is_plan());
    for wrong in [json!("auto"), json!({ "head_dim": -1 }), json!({ "head_dim": 4, "unit": 4 }), json!({ "unit": 4 })] {
        let map = json!({ "auto": wrong });
        let error = TensorParallelPlan::from_json(map.as_object().unwrap()).unwrap_err();
        assert!(error.is_config() && error.to_string().contains("head_dim"), "{error}");
    }
}

/// A weight of which some ranks' gradients are parts, and all ranks' the whole, has none that is right.
#[rstest]
#[case(json!({ "wte": "sequence_parallel" }))]
#[case(json!({ "wte": "replicated_with_grad_allreduce", "lm_head": "replicate" }))]
fn a_weight_is_summed_for_all_its_layers_or_for_none(#[case] rules: Value) {
    let error = divide(rules, 2).unwrap_err();
    assert!(error.is_plan() && error.to_string().contains("model.wte and lm_head share"), "{error}");
}

#[test]
fn a_pattern_that_is_a_whole_path_means_that_one() {
    let layers = ["fc1", "glu.fc1"].map(|path| LayerEntry::new(path, LayerKind::Linear, [8, 4]));
    let divided = |pattern: &str| {
        let plan = TensorParallelPlan::default().with(pattern, ParallelStyle::Colwise);
        plan.divide(&layers, 2).unwrap().iter().map(|own| own.layer).collect::<Vec<_>>()
    };
    assert_eq!(divided("fc1"), [0]);
    assert_eq!(divided("*.fc1"), [1]);
    assert_eq!(divided("glu.fc1"), [1]);
    let error = TensorParallelPlan::default()
        .with("fc1", LayerRule::from(ParallelStyle::Colwise).with_all_tokens())
        .divide(&layers, 2)
        .unwrap_err();
    assert!(error.to_string().contains("with_all_tokens"), "{error}");
}

#[test]
fn rules_for_the_sequence_count_where_it_is_divided() {
    let known = TensorParallelPlan::default().with_sequence_rule("norm", ParallelStyle::SequenceParallel);
    let own = TensorParallelPlan::default().with("lm_head", ParallelStyle::Colwise);
    assert!(known.is_empty() && !known.divides_sequence());
    let both = own.clone().with_sequence_parallelism(Some(&known)).unwrap();
    assert!(both.divides_sequence());
    assert_eq!(both.divide(&layers(), 2).unwrap().len(), 2);
    // What the plan says itself counts first, and is enough.
    let whole = own.clone().with("norm", ParallelStyle::Replicate).with_sequence_parallelism(Some(&known)).unwrap();
    assert_eq!(whole.divide(&layers(), 2).unwrap().len(), 1);
    let alone = own.clone().with("norm", ParallelStyle::SequenceParallel);
    assert!(alone.with_sequence_parallelism(None).unwrap().divides_sequence());
    for (plan, known) in [(&own, None), (&own, Some(&own))] {
        let error = plan.clone().with_sequence_parallelism(known).unwrap_err();
        assert!(error.is_plan() && error.to_string().contains("sequence_parallel"), "{error}");
    }
}

#[test]
fn a_plan_takes_over_the_units_of_a_model() {
    let known = TensorParallelPlan::default()
        .with("h.*.qkv", LayerRule::from(ParallelStyle::PackedColwise).with_parts(3).with_unit(4))
        .with("h.*.out", LayerRule::from(ParallelStyle::Rowwise).with_unit(4));
    for style in [ParallelStyle::Colwise, ParallelStyle::PackedColwise] {
        let own = TensorParallelPlan::default()
            .with("model.h.*.qkv", style)
            .with("model.h.*.out", ParallelStyle::Rowwise)
            .with("lm_head", ParallelStyle::Colwise);
        let divided = own.with_units_of(&known, &layers()).divide(&layers(), 2).unwrap();
        let slices: Vec<_> = divided.iter().map(|layer| (layer.parts, layer.slices.clone())).collect();
        assert_eq!(slices, [(3, vec![0..4, 4..8]), (1, vec![0..4, 4..8]), (1, vec![0..6, 6..11])]);
    }
}
