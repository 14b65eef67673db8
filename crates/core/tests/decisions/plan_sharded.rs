//! Units and shards.

use accelerate_core::config::{
    AutoWrapPolicy, FloatType, FullyShardedSettings, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy,
};
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::plan::*;
use proptest::prelude::*;
use rstest::rstest;

fn entry(name: &str, size: usize) -> ParameterEntry {
    ParameterEntry::new(name, &[size], "float32", 4)
}

fn plugin(policy: AutoWrapPolicy, patterns: &[&str], min_num_params: Option<usize>) -> FullyShardedSettings {
    FullyShardedSettings {
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
use FloatType::{BFloat16, Float16, Float32};
use ShardingStrategy::{FullShard, NoShard};

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
fn parameters_go_to_the_units_that_the_policy_says(#[case] plugin: FullyShardedSettings, #[case] wanted: &[&str]) {
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
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    let members: Vec<&[usize]> = plan.units.iter().map(|unit| unit.parameters.as_slice()).collect();
    assert_eq!(members, [&[0, 3][..], &[1], &[2]]);
    let bytes = plan.bytes_per_rank();
    assert_eq!((bytes.parameters, bytes.gradients, bytes.optimizer_state), (8 + 4 + 4, 8 + 4, 2 * (8 + 4)));
    assert_eq!((bytes.largest_unit, bytes.gathered_units, bytes.unsharded_gradients), (16, 16 + 8 + 8, 16 + 8));
}

#[test]
fn parameters_that_keep_their_element_type_have_a_unit_of_their_own() {
    let mut parameters = vec![entry("a", 2), entry("norm", 2), entry("c", 2)];
    parameters[1].keeps_dtype = true;
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    let members: Vec<(&[usize], bool)> =
        plan.units.iter().map(|unit| (unit.parameters.as_slice(), unit.keeps_dtype)).collect();
    assert_eq!(members, [(&[0, 2][..], false), (&[1], true)]);
    assert!(plan.units[1].to_string().contains("float32 in any precision"), "{}", plan.units[1]);
}

#[test]
fn parameters_that_are_gathered_as_codes_take_a_byte_for_each_element() {
    let mut parameters = vec![entry("a", 2), entry("codes", 6), entry("c", 2)];
    parameters[1].in_fp8 = true;
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), 2);
    let members: Vec<(&[usize], bool)> =
        plan.units.iter().map(|unit| (unit.parameters.as_slice(), unit.in_fp8)).collect();
    assert_eq!(members, [(&[0, 2][..], false), (&[1], true)]);
    assert!(plan.units[1].to_string().contains("float32 gathered as FP8 codes"), "{}", plan.units[1]);
    let of_codes = plan.collectives().into_iter().filter(|it| it.content == Content::Unit(1));
    let bytes: Vec<(Operation, usize)> = of_codes.map(|it| (it.operation, it.bytes)).collect();
    assert_eq!(bytes, [(Operation::AllGather, 6), (Operation::AllGather, 6), (Operation::ReduceScatter, 24)]);
    assert_eq!(plan.bytes_per_rank().gathered_units, 16 + 6);
}

#[test]
fn what_several_units_share_belongs_to_the_root() {
    let mut parameters = vec![entry("layers.0.weight", 4), entry("layers.1.bias", 1)];
    parameters[0].ties = vec!["layers.1.weight".to_owned()];
    let plan = plan_sharded(&Inventory { parameters }, &plugin(TransformerBasedWrap, &[], None), 2);
    assert_eq!(plan.units.iter().map(|unit| unit.path.as_str()).collect::<Vec<_>>(), ["", "layers.1"]);
}

#[rstest]
#[case(ShardingStrategy::HybridShard, None, 2, 3)]
#[case(ShardingStrategy::HybridShardZero2, Some(2), 3, 5)]
#[case(ShardingStrategy::HybridShard, Some(6), 1, 2)]
#[case(ShardingStrategy::FullShard, None, 1, 2)]
fn groups_divide_the_model_among_their_own_ranks(
    #[case] sharding_strategy: ShardingStrategy,
    #[case] dp_shard_size: Option<usize>,
    #[case] num_replicas: usize,
    #[case] shard_elements: usize,
) {
    let plugin = FullyShardedSettings { sharding_strategy, dp_shard_size, ..Default::default() };
    plugin.check().unwrap();
    let inventory = Inventory { parameters: vec![entry("weight", 9)] };
    let plan = plan_sharded(&inventory, &plugin, plugin.mesh(6, 3).unwrap());
    assert_eq!((plan.world_size, plan.num_replicas), (6, num_replicas));
    assert_eq!(plan.units[0].shard_elements, shard_elements);
    assert_eq!(plan.bytes_per_rank().largest_unit, 4 * shard_elements * 6 / num_replicas);
}

#[rstest]
#[case(6, 4)]
#[case(6, 0)]
#[case(2, 3)]
fn groups_that_ranks_do_not_fill_are_refused(#[case] world_size: usize, #[case] dp_shard_size: usize) {
    let sharding_strategy = ShardingStrategy::HybridShard;
    let dp_shard_size = Some(dp_shard_size);
    let plugin = FullyShardedSettings { sharding_strategy, dp_shard_size, ..Default::default() };
    let error = plugin.mesh(world_size, world_size).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("let dp_shard_size divide"), "{error}");
    let plugin = FullyShardedSettings { dp_shard_size, ..Default::default() };
    assert!(plugin.check().unwrap_err().to_string().contains("only the hybrid strategies"));
}

#[test]
fn what_is_ignored_stays_whole() {
    let mut parameters = NAMES.map(|(name, size)| entry(name, size)).to_vec();
    parameters[2].requires_grad = false;
    let ignored_modules = ["layers.0".to_owned(), "*".to_owned()];
    let plugin = |count: usize| FullyShardedSettings {
        ignored_modules: ignored_modules[..count].to_vec(),
        ..plugin(TransformerBasedWrap, &[], None)
    };
    let placements = |count| plan_sharded(&Inventory { parameters: parameters.clone() }, &plugin(count), 2).placements;
    let shard = |unit| Placement::Shard { unit };
    assert_eq!(placements(1), [shard(0), Placement::Replicate, Placement::Frozen, shard(1), shard(1), shard(0)]);
    assert!(placements(2).iter().all(|placement| !matches!(placement, Placement::Shard { .. })));
}

#[rstest]
#[case(&["layers.*", "embed"], &["layers.0"], None)]
#[case(&["layers.*", "head"], &["head"], None)]
#[case(&["BertLayer"], &[], Some("transformer_cls_names_to_wrap has \"BertLayer\""))]
#[case(&["layers.*", "layers.*.*"], &[], Some("transformer_cls_names_to_wrap has \"layers.*.*\""))]
#[case(&[], &["layers.0", "layers.9"], Some("ignored_modules has \"layers.9\""))]
fn modules_that_are_named_have_to_be_there(
    #[case] to_wrap: &[&str],
    #[case] ignored: &[&str],
    #[case] message: Option<&str>,
) {
    let tied = ParameterEntry { ties: vec!["head.weight".to_owned()], ..entry("embed.weight", 5) };
    let parameters = vec![tied, entry("layers.0.weight", 4), entry("layers.1.weight", 4)];
    let ignored_modules = ignored.iter().map(|&path| path.to_owned()).collect();
    let plugin = FullyShardedSettings { ignored_modules, ..plugin(TransformerBasedWrap, to_wrap, None) };
    let found = plugin.check_modules(&Inventory { parameters });
    match message {
        None => found.unwrap(),
        Some(message) => {
            let text = found.unwrap_err().to_string();
            assert!(
                text.contains(message) && text.contains("there are embed, head, layers, layers.0, layers.1"),
                "{text}"
            );
        }
    }
}

/// Types of the policy, the run's mixed precision and strategy; what is gathered and what travels, or what is wrong.
#[rstest]
#[case([None, None], MixedPrecision::No, FullShard, Ok([None, None]))]
#[case([None, None], MixedPrecision::Bf16, FullShard, Ok([Some(BFloat16), Some(BFloat16)]))]
#[case([None, Some(Float32)], MixedPrecision::Fp16, FullShard, Ok([Some(Float16), Some(Float32)]))]
#[case([Some(BFloat16), None], MixedPrecision::No, FullShard, Ok([Some(BFloat16), Some(BFloat16)]))]
#[case([Some(BFloat16), None], MixedPrecision::Fp8, FullShard, Ok([Some(BFloat16), Some(BFloat16)]))]
#[case([Some(Float32), None], MixedPrecision::Bf16, FullShard, Err("autocast would copy every whole parameter"))]
#[case([Some(Float16), None], MixedPrecision::Bf16, FullShard, Err("autocast would copy every whole parameter"))]
#[case([None, Some(BFloat16)], MixedPrecision::No, NoShard, Err("nothing is ever gathered; set mixed_precision"))]
fn precision_of_a_policy(
    #[case] types: [Option<FloatType>; 2],
    #[case] mixed_precision: MixedPrecision,
    #[case] sharding_strategy: ShardingStrategy,
    #[case] wanted: Result<[Option<FloatType>; 2], &str>,
) {
    let [param_dtype, reduce_dtype] = types;
    let policy = MixedPrecisionPolicy { param_dtype, reduce_dtype, ..Default::default() };
    let plugin = FullyShardedSettings { sharding_strategy, mixed_precision_policy: Some(policy), ..Default::default() };
    let checked = plugin.check().and_then(|()| plugin.check_precision(mixed_precision));
    match wanted {
        Ok(types) => {
            checked.unwrap();
            let found = plugin.precision(mixed_precision);
            assert_eq!([found.param_dtype, found.reduce_dtype], types);
        }
        Err(words) => {
            let text = checked.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
}

#[rstest]
#[case(MixedPrecision::Bf16, ["float32", "float16", "float32", "float64", "bfloat16"])]
#[case(MixedPrecision::Fp16, ["float32", "float16", "float32", "float64", "bfloat16"])]
#[case(MixedPrecision::No, ["bfloat16", "float16", "float32", "float64", "bfloat16"])]
fn weights_of_16_bits_are_kept_in_float32(#[case] mixed_precision: MixedPrecision, #[case] wanted: [&str; 5]) {
    let of = |name: &str, dtype: &str, element_bytes| ParameterEntry::new(name, &[10], dtype, element_bytes);
    let frozen = ParameterEntry { requires_grad: false, ..of("b.frozen", "float16", 2) };
    let parameters = vec![
        of("a.weight", "bfloat16", 2),
        frozen,
        of("b.weight", "float32", 4),
        of("b.wide", "float64", 8),
        of("c.weight", "bfloat16", 2),
    ];
    let plugin = FullyShardedSettings { ignored_modules: vec!["c".to_owned()], ..Default::default() };
    let given = Inventory { parameters };
    let kept = plugin.kept(given.clone(), mixed_precision);
    assert_eq!(kept.parameters.iter().map(|entry| entry.dtype.as_str()).collect::<Vec<_>>(), wanted);
    // Loading takes what the program has made, and the parts in the type that is kept.
    let loading = |inventory: &Inventory| plan_sharded(inventory, &plugin, 10).bytes_per_rank().loading;
    let parts = kept.total_bytes() - 10 * 2;
    assert!((given.total_bytes()..=given.total_bytes() + 10 * 2 + parts / 10).contains(&loading(&kept)));
    assert_eq!(loading(&kept) == loading(&given), mixed_precision == MixedPrecision::No);
}

#[test]
fn people_can_read_it() {
    let parameters = vec![entry("layers.0.weight", 5), entry("head", 4)];
    let text = plan_sharded(&Inventory { parameters }, &plugin(TransformerBasedWrap, &[], None), 2).to_string();
    assert!(text.contains("layers.0.weight  float32 [5]  shard of unit 0"), "{text}");
    assert!(text.contains("unit 0: layers.0: 1 parameter tensor of float32, 5 elements, 3 on each rank"), "{text}");
    assert!(text.contains("unit 1: (root): 1 parameter tensor of"), "{text}");
    assert!(text.starts_with("plan for 2 ranks: FULL_SHARD, 2 parameter tensors, 36 B in all\n"), "{text}");
    let memory = "memory of each rank: 20 B parameters, 20 B gradients, 40 B optimizer state (Adam), 40 B gathered at once; \
                  at most 160 B (backward), without activations";
    assert!(text.contains(memory), "{text}");
}

proptest! {
    #[test]
    fn every_rank_is_in_one_row_and_one_column(num_replicas in 1usize..6, shard_size in 1usize..6) {
        let mesh = Mesh::new(num_replicas * shard_size, shard_size).unwrap();
        for rank in 0..mesh.world_size() {
            let (row, column) = (mesh.ranks_along(Axis::DpShard, rank), mesh.ranks_along(Axis::DpReplicate, rank));
            prop_assert_eq!((row.len(), column.len()), (shard_size, num_replicas));
            prop_assert_eq!(row.iter().filter(|other| column.contains(other)).collect::<Vec<_>>(), [&rank]);
            prop_assert!(row.iter().all(|&other| mesh.ranks_along(Axis::DpShard, other) == row));
            prop_assert!(column.iter().all(|&other| mesh.ranks_along(Axis::DpReplicate, other) == column));
        }
    }

    #[test]
    fn every_element_is_on_exactly_one_rank(
        sizes in prop::collection::vec(0usize..20, 1..8),
        world_size in 1usize..9,
    ) {
        let parameters = sizes.iter().enumerate().map(|(i, &size)| entry(&i.to_string(), size)).collect();
        let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), world_size);
        let unit = &plan.units[0];
        prop_assert!(unit.shard_elements * world_size >= unit.num_elements);
        prop_assert!(unit.shard_elements * world_size < unit.num_elements + world_size);
        for (member, &size) in sizes.iter().enumerate() {
            let mut next = 0;
            for rank in 0..world_size {
                let part = unit.member_shard(member, rank);
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
