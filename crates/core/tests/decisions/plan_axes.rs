//! What each axis of a mesh divides, and what travels along it.

use accelerate_core::config::{DistributedDataParallelSettings, FullyShardedSettings, ShardingStrategy};
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::plan::*;
use accelerate_core::tensor_parallel::KnownModel;
use proptest::prelude::*;
use rstest::rstest;

fn entry(name: &str, shape: &[usize]) -> ParameterEntry {
    ParameterEntry::new(name, shape, "float32", 4)
}

fn mesh(sizes: [usize; 5]) -> Mesh {
    let sizes: Vec<_> = Axis::ALL.into_iter().zip(sizes).collect();
    Mesh::of(sizes.iter().map(|(_, size)| size).product(), &sizes).unwrap()
}

/// Of 120 elements, 30 of which are this rank's slice of a layer that four ranks compute together.
fn inventory(tp_size: usize) -> Inventory {
    let mut weight = entry("up.weight", &[100 / tp_size, 1]);
    weight.whole_shape = (tp_size > 1).then(|| vec![100, 1]);
    let mut frozen = entry("frozen", &[20]);
    frozen.requires_grad = false;
    Inventory { parameters: vec![weight, frozen] }
}

fn plan(strategy: ShardingStrategy, mesh: &Mesh) -> Plan {
    let inventory = inventory(mesh.size(Axis::Tp));
    let plugin = FullyShardedSettings { sharding_strategy: strategy, ..Default::default() };
    let data = mesh.data();
    match strategy {
        NoShard => plan_data_parallel(&inventory, &DistributedDataParallelSettings::default(), data.world_size()),
        _ => plan_sharded(&inventory, &plugin, data),
    }
}

use ShardingStrategy::{FullShard, HybridShard, NoShard};

/// Bytes: 400 of the weight, as many of its gradient, 800 of Adam's averages, and 80 that are frozen.
#[rstest]
#[case::one_rank(NoShard, [1, 1, 1, 1, 1], &[])]
#[case::replicas(NoShard, [4, 1, 1, 1, 1], &["dp_replicate, 4 ranks: each has 1.68 KB of a model; each sends 600 B in a step"])]
#[case::sequences(NoShard, [2, 1, 2, 1, 1], &[
    "cp, 2 ranks: each has a part of every sequence; each sends activations of its batch",
    "dp_replicate x cp, 4 ranks: each has 1.68 KB of a model; each sends 600 B in a step",
])]
#[case::shards(FullShard, [1, 4, 1, 1, 1], &[
    "dp_shard, 4 ranks: 1.68 KB of a model become 420 B on each; each sends 1.02 KB in a step",
])]
#[case::hybrid(HybridShard, [2, 2, 1, 1, 1], &[
    "dp_shard, 2 ranks: 1.68 KB of a model become 840 B on each; each sends 680 B in a step",
    "dp_replicate, 2 ranks: each has 840 B of a model; each sends 200 B in a step",
])]
#[case::layers(NoShard, [1, 1, 1, 1, 4], &["tp, 4 ranks: 1.68 KB of a model become 480 B on each; each sends activations of its batch"])]
#[case::all(HybridShard, [2, 2, 1, 2, 4], &[
    "tp, 4 ranks: 1.68 KB of a model become 480 B on each; each sends activations of its batch",
    "sp, 2 ranks: each has a part of every sequence; each sends activations of its batch",
    "dp_shard x sp, 4 ranks: 480 B of a model become 132 B on each; each sends 372 B in a step",
    "dp_replicate, 2 ranks: each has 132 B of a model; each sends 28 B in a step",
])]
fn each_axis_says_what_it_does(#[case] strategy: ShardingStrategy, #[case] sizes: [usize; 5], #[case] wanted: &[&str]) {
    let mesh = mesh(sizes);
    let axes = plan(strategy, &mesh).bytes_per_axis(&mesh);
    assert_eq!(axes.iter().map(ToString::to_string).collect::<Vec<_>>(), wanted);
}

#[test]
fn plans_print_what_their_mesh_does() {
    let mesh = mesh([1, 2, 1, 1, 2]);
    let text = Plans { mesh, plans: vec![plan(FullShard, &mesh)] }.to_string();
    let lines: Vec<_> = text.lines().skip_while(|line| !line.contains("mesh of 4 ranks: dp_shard 2 x tp 2")).collect();
    assert!(lines.len() == 3 && lines[1].starts_with("    tp, 2 ranks") && lines[2].contains("dp_shard, 2"), "{text}");
}

proptest! {
    /// What one axis leaves is what the next one divides, nothing becomes more but by padding, and all that is sent is counted once.
    #[test]
    fn axes_follow_each_other(sizes in prop::array::uniform5(1_usize..4), is_sharded: bool) {
        let [replicas, shards, cp, sp, tp] = sizes;
        let sizes = [replicas, if is_sharded { shards } else { 1 }, cp, if cp > 1 { 1 } else { sp }, tp];
        let mesh = mesh(sizes);
        let plan = plan(if is_sharded { HybridShard } else { NoShard }, &mesh);
        let axes = plan.bytes_per_axis(&mesh);
        for pair in axes.windows(2) {
            prop_assert_eq!(pair[0].held, pair[1].held_before);
        }
        prop_assert!(axes.iter().all(|axis| axis.num_ranks > 1 && axis.held <= axis.held_before));
        let sent: usize = axes.iter().filter_map(|axis| axis.sent).sum();
        prop_assert_eq!(sent, plan.collectives().iter().map(Collective::sent_bytes).sum::<usize>());
    }
}

/// GPT-2's files have `[in_features, out_features]`, and leave out a head that shares the embedding's weight.
#[test]
fn slices_of_gpt2_are_whole_heads() {
    let model = KnownModel::from_config(r#"{"model_type": "gpt2", "n_embd": 12, "n_head": 3}"#).unwrap();
    let names = [
        ("wte.weight", vec![11, 12], vec![6, 12]),
        ("wpe.weight", vec![8, 12], vec![8, 12]),
        ("h.0.ln_1.weight", vec![12], vec![12]),
        ("h.0.attn.c_attn.weight", vec![12, 36], vec![12, 24]),
        ("h.0.attn.c_attn.bias", vec![36], vec![24]),
        ("h.0.attn.c_proj.weight", vec![12, 12], vec![8, 12]),
        ("h.0.attn.c_proj.bias", vec![12], vec![12]),
        ("h.0.mlp.c_fc.weight", vec![12, 47], vec![12, 24]),
        ("h.0.mlp.c_fc.bias", vec![47], vec![24]),
        ("h.0.mlp.c_proj.weight", vec![47, 12], vec![24, 12]),
    ];
    for prefix in ["", "transformer."] {
        let parameters = names.iter().map(|(name, shape, _)| entry(&format!("{prefix}{name}"), shape)).collect();
        let found = model.first_slices(&Inventory { parameters }, 2).unwrap();
        for (entry, (name, whole, own)) in found.parameters.iter().zip(&names) {
            assert_eq!(&entry.shape, own, "{prefix}{name}");
            assert_eq!(entry.whole_shape.as_ref(), (whole != own).then_some(whole), "{prefix}{name}");
        }
    }
}

/// Two heads of queries stay with their head of keys and values.
#[test]
fn slices_of_llama_keep_groups_of_heads() {
    let config = r#"{"model_type": "qwen2", "hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 3}"#;
    let parameters = [("q_proj", [12, 12]), ("k_proj", [6, 12]), ("o_proj", [12, 12])]
        .map(|(name, shape)| entry(&format!("model.layers.0.self_attn.{name}.weight"), &shape));
    let model = KnownModel::from_config(config).unwrap();
    let found = model.first_slices(&Inventory { parameters: parameters.to_vec() }, 2).unwrap();
    let shapes: Vec<_> = found.parameters.iter().map(|entry| entry.shape.clone()).collect();
    assert_eq!(shapes, [[8, 12], [4, 12], [12, 8]]);
    let error = model.first_slices(&Inventory { parameters: parameters.to_vec() }, 4).unwrap_err();
    assert!(error.is_plan() && error.to_string().contains("use fewer ranks along tp"), "{error}");
}

#[rstest]
#[case("[]", "does not say how layers are divided")]
#[case("{}", "model_type \"\"")]
#[case(r#"{"model_type": "bert"}"#, "gpt2, llama, mistral and qwen2")]
#[case(r#"{"model_type": "gpt2", "n_embd": 12}"#, "how wide heads of attention are")]
#[case(r#"{"model_type": "gpt2", "n_embd": 12, "n_head": 0}"#, "how wide heads of attention are")]
#[case(r#"{"model_type": "llama", "hidden_size": 2, "num_attention_heads": 4}"#, "how wide heads of attention are")]
fn a_config_that_names_no_known_model_is_refused(#[case] text: &str, #[case] words: &str) {
    let error = KnownModel::from_config(text).unwrap_err();
    assert!(error.is_plan() && error.to_string().contains(words), "{error}");
}
