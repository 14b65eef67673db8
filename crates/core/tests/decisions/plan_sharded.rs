//! Units and shards.

use accelerate_core::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin};
use accelerate_core::plan::*;
use proptest::prelude::*;
use rstest::rstest;

fn entry(name: &str, size: usize) -> ParameterEntry {
    ParameterEntry::new(name, &[size], "float32", 4)
}

fn plugin(policy: AutoWrapPolicy, patterns: &[&str], min_num_params: Option<usize>) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        auto_wrap_policy: policy,
        transformer_cls_names_to_wrap: patterns.iter().map(|pattern| (*pattern).to_owned()).collect(),
        min_num_params,
        ..Default::default()
    }
}

const NAMES: [(&str, usize); 6] = [
    ("embed.weight", 40),
    ("layers.0.attn.weight", 16),
    ("layers.0.norm.weight", 4),
    ("layers.1.attn.weight", 16),
    ("layers.1.norm.weight", 4),
    ("head.weight", 10),
];

use AutoWrapPolicy::{NoWrap, SizeBasedWrap, TransformerBasedWrap};

#[rstest]
#[case(plugin(NoWrap, &[], None), &["", "", "", "", "", ""])]
#[case(plugin(TransformerBasedWrap, &[], None), &["", "layers.0", "layers.0", "layers.1", "layers.1", ""])]
#[case(plugin(TransformerBasedWrap, &["layers.1", "head"], None), &["", "", "", "layers.1", "layers.1", "head"])]
#[case(
    plugin(TransformerBasedWrap, &["layers.*", "layers.*.attn"], None),
    &["", "layers.0.attn", "layers.0", "layers.1.attn", "layers.1", ""]
)]
#[case(plugin(SizeBasedWrap, &[], Some(20)), &["embed", "layers.0", "layers.0", "layers.1", "layers.1", ""])]
#[case(
    plugin(SizeBasedWrap, &[], Some(16)),
    &["embed", "layers.0.attn", "", "layers.1.attn", "", ""]
)]
#[case(
    plugin(SizeBasedWrap, &[], Some(8)),
    &["embed", "layers.0.attn", "layers", "layers.1.attn", "layers", "head"]
)]
#[case(plugin(SizeBasedWrap, &[], Some(1000)), &["", "", "", "", "", ""])]
fn parameters_go_to_the_units_that_the_policy_says(
    #[case] plugin: FullyShardedDataParallelPlugin,
    #[case] wanted: &[&str],
) {
    let parameters = NAMES.map(|(name, size)| entry(name, size)).to_vec();
    let plan = plan_sharded(&Inventory { parameters }, &plugin, 2);
    let found: Vec<&str> = plan
        .placements
        .iter()
        .map(|placement| match placement {
            Placement::Shard { unit } => plan.units[*unit].path.as_str(),
            _ => "not sharded",
        })
        .collect();
    assert_eq!(found, wanted);
}

#[test]
fn element_types_and_frozen_parameters_have_units_of_their_own() {
    let mut parameters = vec![entry("a", 2), entry("b", 2), entry("c", 2), entry("d", 2)];
    parameters[1].dtype = "bfloat16".to_owned();
    parameters[2].requires_grad = false;
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedDataParallelPlugin::default(), 2);
    let members: Vec<&[usize]> = plan.units.iter().map(|unit| unit.parameters.as_slice()).collect();
    assert_eq!(members, [&[0, 3][..], &[1], &[2]]);
    let bytes = plan.bytes_per_rank();
    assert_eq!((bytes.parameters, bytes.gradients, bytes.optimizer_state), (8 + 4 + 4, 8 + 4, 2 * (8 + 4)));
    assert_eq!((bytes.largest_unit, bytes.gathered_units, bytes.whole_gradients), (16, 16 + 8 + 8, 16 + 8));
}

#[test]
fn what_several_units_share_belongs_to_the_root() {
    let mut parameters = vec![entry("layers.0.weight", 4), entry("layers.1.bias", 1)];
    parameters[0].ties = vec!["layers.1.weight".to_owned()];
    let plan = plan_sharded(&Inventory { parameters }, &plugin(TransformerBasedWrap, &[], None), 2);
    assert_eq!(plan.units.iter().map(|unit| unit.path.as_str()).collect::<Vec<_>>(), ["", "layers.1"]);
}

#[test]
fn people_can_read_it() {
    let parameters = vec![entry("layers.0.weight", 5), entry("head", 4)];
    let text = plan_sharded(&Inventory { parameters }, &plugin(TransformerBasedWrap, &[], None), 2).to_string();
    assert!(text.contains("layers.0.weight  float32 [5]  shard of unit 0"), "{text}");
    assert!(text.contains("unit 0: layers.0: 1 parameters of float32, 5 elements, 3 on each rank"), "{text}");
    assert!(text.contains("unit 1: (root): 1 parameters"), "{text}");
    assert!(text.starts_with("plan for 2 ranks: FULL_SHARD, 2 parameters, 36 B in all\n"), "{text}");
    let memory = "memory of each rank: 20 B parameters, 20 B gradients, 40 B optimizer state (Adam), 40 B gathered at once; \
                  at most 160 B (backward), without activations";
    assert!(text.contains(memory), "{text}");
}

proptest! {
    #[test]
    fn every_element_is_on_exactly_one_rank(
        sizes in prop::collection::vec(0usize..20, 1..8),
        world_size in 1usize..9,
    ) {
        let parameters = sizes.iter().enumerate().map(|(i, &size)| entry(&i.to_string(), size)).collect();
        let plan = plan_sharded(&Inventory { parameters }, &FullyShardedDataParallelPlugin::default(), world_size);
        let unit = &plan.units[0];
        prop_assert!(unit.shard_elements * world_size >= unit.num_elements);
        prop_assert!(unit.shard_elements * world_size < unit.num_elements + world_size);
        for (member, &size) in sizes.iter().enumerate() {
            let mut next = 0;
            for rank in 0..world_size {
                let part = unit.part_of(member, rank);
                prop_assert!(part.is_empty() || part.start == next);
                next += part.len();
                // As long as the overlap of the parameter and the rank's shard.
                let shard = unit.shard_of(rank);
                let overlap = (unit.offsets[member]..unit.offsets[member + 1]).filter(|i| shard.contains(i)).count();
                prop_assert_eq!(part.len(), overlap);
            }
            prop_assert_eq!(next, size);
        }
    }
}
