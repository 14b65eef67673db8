//! What plans take of each rank's memory, and whether it is there.

use accelerate_core::config::{
    AutoWrapPolicy, BackwardPrefetch, DistributedDataParallelSettings, FloatType, FullyShardedSettings,
    ShardingStrategy,
};
use accelerate_core::plan::*;
use rstest::rstest;

fn entry(name: &str, size: usize) -> ParameterEntry {
    ParameterEntry::new(name, &[size], "float32", 4)
}

/// 100 elements in the root, 60 in each of two blocks, 10 of the second frozen.
fn inventory() -> Inventory {
    let mut frozen = entry("h.1.scale", 10);
    frozen.requires_grad = false;
    Inventory { parameters: vec![entry("embed.weight", 100), entry("h.0.weight", 60), entry("h.1.weight", 50), frozen] }
}

fn sharded(sharding_strategy: ShardingStrategy, world_size: usize) -> Plan {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    let plugin = FullyShardedSettings { sharding_strategy, auto_wrap_policy, ..Default::default() };
    plan_sharded(&inventory(), &plugin, world_size)
}

const TRAINED: usize = 4 * 210;
const ALL: usize = 4 * 220;
/// The root and the largest block.
const AT_ONCE: usize = 4 * 160;

use BackwardPrefetch::{BackwardPost, BackwardPre, NoPrefetch};
use ShardingStrategy::{FullShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};

/// Parameters, gradients, state; the largest unit, gathered units, whole gradients; loading.
#[rstest]
#[case(FullShard, 2, [ALL / 2, TRAINED / 2, TRAINED, 400, AT_ONCE, AT_ONCE, ALL + 200])]
#[case(FullShard, 10, [ALL / 10, TRAINED / 10, TRAINED / 5, 400, AT_ONCE, AT_ONCE, ALL + 40])]
#[case(ShardGradOp, 2, [ALL / 2, TRAINED / 2, TRAINED, 400, ALL, AT_ONCE, ALL + 200])]
#[case(OptimizerStateAndGradients, 2, [ALL, TRAINED / 2, TRAINED, 0, 0, AT_ONCE, ALL + 400])]
#[case(OptimizerState, 2, [ALL, TRAINED, TRAINED, 0, 0, AT_ONCE, ALL + 400])]
#[case(FullShard, 1, [ALL, TRAINED, 2 * TRAINED, 0, 0, 0, ALL + 400])]
fn every_strategy_takes_what_its_table_says(
    #[case] strategy: ShardingStrategy,
    #[case] world_size: usize,
    #[case] wanted: [usize; 7],
) {
    let bytes = sharded(strategy, world_size).bytes_per_rank();
    let RankBytes {
        parameters,
        gradients,
        optimizer_state,
        largest_unit,
        gathered_units,
        unsharded_gradients,
        buckets,
        loading,
        nvme_blocks,
        on_nvme,
        activations,
    } = bytes;
    let found = [parameters, gradients, optimizer_state, largest_unit, gathered_units, unsharded_gradients, loading];
    assert_eq!(found, wanted);
    assert_eq!([buckets, nvme_blocks, on_nvme, activations], [0; 4]);
}

#[rstest]
#[case(1, false, 0)]
#[case(4, false, TRAINED)]
#[case(4, true, 0)]
fn buckets_hold_gradients_again_unless_these_are_views(
    #[case] world_size: usize,
    #[case] gradient_as_bucket_view: bool,
    #[case] buckets: usize,
) {
    let kwargs = DistributedDataParallelSettings { gradient_as_bucket_view, ..Default::default() };
    let plan = plan_data_parallel(&inventory(), &kwargs, world_size);
    let wanted = RankBytes {
        parameters: ALL,
        gradients: TRAINED,
        optimizer_state: 2 * TRAINED,
        buckets,
        loading: ALL,
        ..RankBytes::default()
    };
    assert_eq!(plan.bytes_per_rank(), wanted);
}

#[test]
fn phases_are_sums_of_what_is_there_in_them() {
    let bytes = RankBytes {
        parameters: 1,
        gradients: 10,
        optimizer_state: 100,
        largest_unit: 7,
        gathered_units: 1_000,
        unsharded_gradients: 10_000,
        buckets: 100_000,
        loading: 1_000_000,
        nvme_blocks: 20_000_000,
        on_nvme: 7,
        activations: 300,
    };
    let totals: Vec<_> = Phase::ALL.iter().map(|&phase| (phase, bytes.in_phase(phase).total())).collect();
    let wanted = [
        (Phase::Load, 21_100_000),
        (Phase::Forward, 20_101_401),
        (Phase::Backward, 20_111_411),
        (Phase::Step, 20_100_111),
    ];
    assert_eq!(totals, wanted);
    assert_eq!(bytes.peak(), (Phase::Load, 21_100_000));
    assert_eq!(RankBytes { loading: 0, ..bytes }.peak(), (Phase::Backward, 20_111_411));
    assert_eq!(RankBytes::default().peak(), (Phase::Load, 0), "the first of equals");
}

#[rstest]
#[case(FullShard, None, FullShard)]
#[case(FullShard, Some(false), ShardGradOp)]
#[case(ShardGradOp, Some(true), FullShard)]
#[case(ShardGradOp, Some(false), ShardGradOp)]
#[case(OptimizerState, None, OptimizerState)]
fn version_two_names_the_strategy_by_reshard_after_forward(
    #[case] sharding_strategy: ShardingStrategy,
    #[case] reshard_after_forward: Option<bool>,
    #[case] wanted: ShardingStrategy,
) {
    let plugin = FullyShardedSettings {
        sharding_strategy,
        reshard_after_forward: reshard_after_forward.map(Into::into),
        ..Default::default()
    };
    assert_eq!(plan_sharded(&inventory(), &plugin, 2).sharding_strategy, wanted);
}

#[test]
fn a_plan_fits_into_its_peak_and_nothing_less() {
    for plan in [sharded(FullShard, 2), sharded(OptimizerState, 3), sharded(ShardGradOp, 1)] {
        let peak = plan.bytes_per_rank().peak().1 as u64;
        plan.check_fits(peak).unwrap();
        assert!(plan.check_fits(peak - 1).unwrap_err().is_plan());
    }
}

/// Available bytes, and what the message must say: what is needed, what there is, what is largest, and what would do.
#[rstest]
#[case(
    sharded(OptimizerState, 2), 3000,
    &["OPTIMIZER_STATE on 2 ranks takes 3.2 KB", "at its peak (backward)", "there is only 3 KB", "the largest unit is (root) with 400 B",
      "\n  - OPTIMIZER_STATE on 4 ranks takes 2.81 KB", "\n  - FULL_SHARD on 2 ranks takes 2.98 KB"]
)]
#[case(
    plan_data_parallel(&inventory(), &DistributedDataParallelSettings::default(), 1), 3000,
    &["NO_SHARD on 1 rank takes 3.4 KB", "the largest parameter is embed.weight with 400 B",
      "\n  - FULL_SHARD on 2 ranks with auto_wrap_policy TRANSFORMER_BASED_WRAP takes 2.98 KB"]
)]
#[case(
    plan_sharded(&inventory(), &FullyShardedSettings::default(), 2), 3000,
    &["FULL_SHARD on 2 ranks takes 3.42 KB", "\n  - FULL_SHARD on 4 ranks takes 2.6 KB",
      "\n  - FULL_SHARD on 2 ranks with auto_wrap_policy TRANSFORMER_BASED_WRAP takes 2.98 KB"]
)]
#[case(sharded(FullShard, 2), 800, &["No strategy and no number of ranks helps", "narrower element type"])]
fn what_does_not_fit_says_what_would(#[case] plan: Plan, #[case] available: u64, #[case] words: &[&str]) {
    let text = plan.check_fits(available).unwrap_err().to_string();
    for words in words {
        assert!(text.contains(words), "{words:?} is missing in\n{text}");
    }
    assert_eq!(text.matches("\n  - ").count(), words.iter().filter(|words| words.starts_with('\n')).count(), "{text}");
}

#[test]
fn absurd_sizes_do_not_overflow() {
    let parameters = vec![ParameterEntry::new("h.0.w", &[usize::MAX, 2], "float32", 4); 3];
    let plan = plan_sharded(&Inventory { parameters }, &FullyShardedSettings::default(), usize::MAX);
    assert_eq!(plan.bytes_per_rank().peak().1, usize::MAX);
    plan.check_fits(u64::MAX).unwrap();
    assert!(plan.check_fits(1).unwrap_err().is_plan());
}

#[test]
fn a_summary_is_short_whatever_the_size_of_the_model() {
    let mut parameters = vec![entry("embed", 8)];
    parameters.extend((0..40).map(|block| entry(&format!("h.{block}.w"), 4)));
    parameters.extend([entry("tail.0.w", 2), entry("tail.1.w", 2)]);
    let inventory = Inventory { parameters };
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    let plugin = FullyShardedSettings { auto_wrap_policy, ..Default::default() };
    assert_eq!(
        plan_sharded(&inventory, &plugin, 2).summary().to_string(),
        "\
plan for 2 ranks: FULL_SHARD, 43 parameter tensors, 688 B in all
  unit 0: (root): 1 parameter tensor of float32, 8 elements, 4 on each rank
  units 1 to 40: h.0 to h.39, each with 1 parameter tensor of float32, 4 elements, 2 on each rank
  unit 41: tail.0: 1 parameter tensor of float32, 2 elements, 1 on each rank
  unit 42: tail.1: 1 parameter tensor of float32, 2 elements, 1 on each rank
  collectives of a step: 86 all-gather of 1.38 KB, 43 reduce-scatter of 688 B; each rank sends 1.03 KB
"
    );
    let plan = plan_data_parallel(&inventory, &DistributedDataParallelSettings::default(), 2);
    assert_eq!(
        plan.summary().to_string(),
        "plan for 2 ranks: NO_SHARD, 43 parameter tensors, 688 B on each\n  gradients travel in 1 buckets of up to 688 B\n  \
         collectives of a step: 1 all-reduce of 688 B; each rank sends 688 B\n"
    );
}

/// Of a forward and a backward pass, with the units that stay within the limit: the root takes 400 bytes, blocks 240 and 200
/// trained and 40 frozen.
#[rstest]
#[case::none(false, NoPrefetch, true, 0, AT_ONCE)]
#[case::limited(true, NoPrefetch, true, 240, 4 * (100 + 60 + 60))]
#[case::in_backward(false, BackwardPost, true, 240, 4 * (100 + 60 + 60))]
#[case::unlimited(true, BackwardPre, false, 480, 4 * (100 + 60 + 60))]
fn what_is_asked_for_ahead_takes_memory(
    #[case] forward_prefetch: bool,
    #[case] backward_prefetch: BackwardPrefetch,
    #[case] limit_all_gathers: bool,
    #[case] bytes_ahead: usize,
    #[case] gathered_units: usize,
) {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    let plugin = FullyShardedSettings {
        auto_wrap_policy,
        forward_prefetch,
        backward_prefetch,
        limit_all_gathers,
        ..Default::default()
    };
    let plan = plan_sharded(&inventory(), &plugin, 2);
    assert_eq!((plan.bytes_ahead, plan.bytes_per_rank().gathered_units), (bytes_ahead, gathered_units));
}

#[rstest]
#[case(EstimateDtype::Float32, 400, 880, Some(3520))]
#[case(EstimateDtype::Float16, 200, 440, Some(1760))]
#[case(EstimateDtype::BFloat16, 200, 440, Some(1760))]
#[case(EstimateDtype::Int8, 100, 220, None)]
#[case(EstimateDtype::Int4, 50, 110, None)]
fn estimates_follow_the_reference(
    #[case] dtype: EstimateDtype,
    #[case] largest_layer_bytes: u64,
    #[case] total_bytes: u64,
    #[case] training_bytes: Option<u64>,
) {
    for file_type in [FloatType::Float32, FloatType::BFloat16] {
        let largest_layer = "embed".to_owned();
        let wanted = MemoryEstimate { dtype, largest_layer, largest_layer_bytes, total_bytes, training_bytes };
        assert_eq!(estimate_memory(&inventory().in_type(file_type), dtype), wanted);
    }
}

/// Names with sizes, and the largest layer with its elements.
#[rstest]
#[case(&[("a.b.weight", 5), ("a.b.bias", 1), ("a.c.weight", 5)], "a.b", 6)]
#[case(&[("h.0.up.w", 3), ("h.0.down.w", 3), ("head.w", 5)], "h.0", 6)]
#[case(&[("h.0.w", 5), ("h.1.w", 5), ("a.w", 4)], "h.0", 5)]
#[case(&[("scale", 7), ("bias", 2), ("a.w", 6)], "scale", 7)]
fn a_layer_is_a_module_or_a_whole_block(
    #[case] sizes: &[(&str, usize)],
    #[case] largest_layer: &str,
    #[case] num_elements: u64,
) {
    let parameters = sizes.iter().map(|&(name, size)| entry(name, size)).collect();
    let estimate = estimate_memory(&Inventory { parameters }, EstimateDtype::Float32);
    assert_eq!((estimate.largest_layer.as_str(), estimate.largest_layer_bytes), (largest_layer, 4 * num_elements));
}

#[test]
fn integers_stay_what_they_are() {
    let parameters = vec![ParameterEntry::new("ids", &[3], "int64", 8), entry("weight", 3)];
    let estimate = estimate_memory(&Inventory { parameters }, EstimateDtype::Float32);
    assert_eq!(estimate.total_bytes, 3 * 8 + 3 * 4);
}
