//! What travels in a step, and how much of it ahead of its use.

use accelerate_core::config::{
    AutoWrapPolicy, DistributedDataParallelSettings, FullyShardedSettings, ShardingStrategy,
};
use accelerate_core::plan::*;
use proptest::prelude::*;
use rstest::rstest;

fn entry(name: &str, size: usize) -> ParameterEntry {
    ParameterEntry::new(name, &[size], "float32", 4)
}

fn blocks(sizes: &[usize]) -> Inventory {
    Inventory { parameters: sizes.iter().enumerate().map(|(i, &size)| entry(&format!("h.{i}.w"), size)).collect() }
}

fn plugin(sharding_strategy: ShardingStrategy) -> FullyShardedSettings {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    FullyShardedSettings { sharding_strategy, auto_wrap_policy, ..Default::default() }
}

/// `phase: operation content, ranks, bytes, bytes sent`.
fn lines(plan: &Plan) -> Vec<String> {
    let line = |own: &Collective| {
        format!(
            "{}: {own} {} {} {}",
            own.phase.to_string().chars().take(1).collect::<String>(),
            own.num_ranks,
            own.bytes,
            own.sent_bytes()
        )
    };
    plan.collectives().iter().map(line).collect()
}

const GATHERS: [&str; 2] = ["f: all-gather unit 0 2 24 12", "f: all-gather unit 1 2 8 4"];
const REDUCE: [&str; 2] = ["b: reduce-scatter unit 1 2 8 4", "b: reduce-scatter unit 0 2 24 12"];
use ShardingStrategy::*;

#[rstest]
#[case::full(FullShard, &["b: all-gather unit 1 2 8 4", REDUCE[0], "b: all-gather unit 0 2 24 12", REDUCE[1]])]
#[case::kept(ShardGradOp, &REDUCE)]
#[case::zero1(OptimizerState, &REDUCE)]
#[case::zero2(OptimizerStateAndGradients, &REDUCE)]
fn two_ranks_divide_two_units(#[case] strategy: ShardingStrategy, #[case] backward: &[&str]) {
    // Five elements are padded to six.
    let plan = plan_sharded(&blocks(&[5, 2]), &plugin(strategy), 2);
    assert_eq!(lines(&plan), [&GATHERS, backward].concat());
}

#[rstest]
#[case(HybridShard, true)]
#[case(HybridShardZero2, false)]
fn groups_add_up_their_parts(#[case] strategy: ShardingStrategy, #[case] regathers: bool) {
    let plugin = FullyShardedSettings { dp_shard_size: Some(2), ..plugin(strategy) };
    let plan = plan_sharded(&blocks(&[5]), &plugin, plugin.mesh(6, 6).unwrap());
    let mut wanted =
        vec!["f: all-gather unit 0 2 24 12", "b: reduce-scatter unit 0 2 24 12", "b: all-reduce unit 0 3 12 16"];
    if regathers {
        wanted.insert(1, "b: all-gather unit 0 2 24 12");
    }
    assert_eq!(lines(&plan), wanted);
}

#[test]
fn what_needs_no_gradient_is_only_gathered() {
    let mut inventory = blocks(&[2, 2]);
    inventory.parameters[1].requires_grad = false;
    let plan = plan_sharded(&inventory, &plugin(ShardGradOp), 2);
    assert_eq!(
        lines(&plan),
        ["f: all-gather unit 0 2 8 4", "f: all-gather unit 1 2 8 4", "b: reduce-scatter unit 0 2 8 4"]
    );
}

#[test]
fn parameters_that_are_whole_are_added_up_at_the_end() {
    let plugin = FullyShardedSettings { ignored_modules: vec!["h.1".to_owned()], ..plugin(ShardGradOp) };
    let plan = plan_sharded(&blocks(&[2, 3]), &plugin, 2);
    let wanted =
        ["f: all-gather unit 0 2 8 4", "b: reduce-scatter unit 0 2 8 4", "b: all-reduce replicated parameters 2 12 12"];
    assert_eq!(lines(&plan), wanted);
}

#[test]
fn buckets_are_added_up_in_order() {
    let kwargs = DistributedDataParallelSettings { bucket_cap_mb: 8e-6, ..Default::default() };
    let plan = plan_data_parallel(&blocks(&[300_000, 2]), &kwargs, 4);
    assert_eq!(lines(&plan).len(), plan.buckets.len());
    assert_eq!(
        lines(&plan)[0],
        format!("b: all-reduce bucket 0 4 {0} {1}", plan.buckets[0].bytes, plan.buckets[0].bytes / 2 * 3)
    );
}

#[test]
fn one_rank_sends_nothing() {
    assert_eq!(plan_sharded(&blocks(&[2, 3]), &plugin(FullShard), 1).collectives(), []);
    assert_eq!(plan_data_parallel(&blocks(&[2]), &DistributedDataParallelSettings::default(), 1).collectives(), []);
}

/// Sizes of units, those that are here, and how many of the others may be asked for.
#[rstest]
#[case::nothing_is_expected(&[8], &[], 0)]
#[case::the_largest_alone(&[8, 8, 8], &[], 1)]
#[case::small_ones_together(&[8, 4, 4, 2], &[], 2)]
#[case::up_to_the_limit(&[8, 4, 2, 4], &[], 2)]
#[case::what_is_here_counts_nothing(&[8, 8, 8, 2], &[1], 2)]
#[case::all_is_here(&[8, 8, 8], &[1, 2], 2)]
fn as_much_is_asked_for_as_the_largest_unit_takes(
    #[case] sizes: &[usize],
    #[case] here: &[usize],
    #[case] wanted: usize,
) {
    let plugin = FullyShardedSettings { forward_prefetch: true, ..plugin(FullShard) };
    let plan = plan_sharded(&blocks(sizes), &plugin, 2);
    let expected: Vec<usize> = (1..sizes.len()).collect();
    assert_eq!(plan.num_ahead(&expected, |unit| here.contains(&unit)), wanted);
    let unlimited = FullyShardedSettings { limit_all_gathers: false, ..plugin };
    assert_eq!(plan_sharded(&blocks(sizes), &unlimited, 2).num_ahead(&expected, |_| false), expected.len());
}

#[test]
fn a_root_larger_than_all_others_is_asked_for_alone() {
    let mut inventory = blocks(&[2, 2]);
    inventory.parameters.push(entry("embed", 100));
    let plugin = FullyShardedSettings { forward_prefetch: true, ..plugin(FullShard) };
    let plan = plan_sharded(&inventory, &plugin, 2);
    assert_eq!((plan.bytes_ahead, plan.num_ahead(&[2, 0, 1], |_| false)), (8, 1));
}

proptest! {
    #[test]
    fn no_more_than_the_limit_is_on_its_way(sizes in prop::collection::vec(1usize..50, 1..12), skip in 0usize..12) {
        let plugin = FullyShardedSettings { forward_prefetch: true, ..plugin(FullShard) };
        let plan = plan_sharded(&blocks(&sizes), &plugin, 2);
        let expected: Vec<usize> = (skip.min(sizes.len())..sizes.len()).collect();
        let count = plan.num_ahead(&expected, |_| false);
        let bytes = |count: usize| expected[..count].iter().map(|&unit| 8 * sizes[unit].div_ceil(2)).sum::<usize>();
        prop_assert!(bytes(count) <= plan.bytes_ahead);
        prop_assert!(count == expected.len() || plan.bytes_ahead < bytes(count + 1));
    }
}
