//! How long a step takes at least.

use accelerate_core::config::{DistributedDataParallelSettings, FullyShardedSettings, ShardingStrategy};
use accelerate_core::plan::*;
use rstest::rstest;

fn inventory() -> Inventory {
    let mut frozen = ParameterEntry::new("frozen", &[50], "float32", 4);
    frozen.requires_grad = false;
    Inventory { parameters: vec![ParameterEntry::new("weight", &[1000], "float32", 4), frozen] }
}

fn replicated(world_size: usize) -> Plan {
    plan_data_parallel(&inventory(), &DistributedDataParallelSettings::default(), world_size)
}

fn sharded(sharding_strategy: ShardingStrategy, world_size: usize) -> Plan {
    let plugin = FullyShardedSettings { sharding_strategy, ..Default::default() };
    plan_sharded(&Inventory { parameters: inventory().parameters[..1].to_vec() }, &plugin, world_size)
}

fn batch(activation_checkpointing: bool) -> MicroBatch {
    MicroBatch { batch_size: 5, sequence_length: 2, activation_checkpointing }
}

use ShardingStrategy::{FullShard, ShardGradOp};

/// Operations, bytes that a rank sends; at 1000 operations and 1000 bytes a second.
#[rstest]
#[case::alone(replicated(1), false, 60_000.0, 0)]
#[case::again(replicated(1), true, 80_000.0, 0)]
// Half of the gradients, then half of their sum.
#[case::two(replicated(2), false, 60_000.0, 4_000)]
#[case::four(replicated(4), false, 60_000.0, 6_000)]
// Gathered in each pass, reduced once: half of 4000 bytes each time.
#[case::sharded(sharded(FullShard, 2), false, 60_000.0, 6_000)]
#[case::gathered_once(sharded(ShardGradOp, 2), false, 60_000.0, 4_000)]
fn a_step_computes_and_sends(
    #[case] plan: Plan,
    #[case] is_checkpointed: bool,
    #[case] operations: f64,
    #[case] sent_bytes: u64,
) {
    let time = plan.step_time(&batch(is_checkpointed), &RankSpeed { flops: 1000.0, bandwidth: Some(1000) });
    let (computing, sending) = (operations / 1000.0, sent_bytes as f64 / 1000.0);
    let wanted = StepTime {
        num_tokens: 10,
        floating_point_operations: operations,
        sent_bytes,
        compute_seconds: computing,
        communication_seconds: Some(sending),
        overlapped_seconds: Some(computing.max(sending)),
        not_overlapped_seconds: Some(computing + sending),
    };
    assert_eq!(time, wanted);
}

#[test]
fn slow_networks_are_the_bound() {
    let time = replicated(2).step_time(&batch(false), &RankSpeed { flops: 60_000.0, bandwidth: Some(100) });
    assert_eq!((time.overlapped_seconds, time.not_overlapped_seconds), (Some(40.0), Some(41.0)));
}

#[test]
fn without_a_bandwidth_only_one_rank_has_a_time() {
    let speed = RankSpeed { flops: 1000.0, bandwidth: None };
    assert_eq!(replicated(2).step_time(&batch(false), &speed).overlapped_seconds, None);
    assert_eq!(replicated(2).step_time(&batch(false), &speed).not_overlapped_seconds, None);
    assert_eq!(replicated(1).step_time(&batch(false), &speed).not_overlapped_seconds, Some(60.0));
}

#[rstest]
#[case("100Gbit", Some(12_500_000_000))]
#[case("100 Gbit/s", Some(12_500_000_000))]
#[case("25Gbps", Some(3_125_000_000))]
#[case("1Gb", Some(125_000_000))]
#[case("800Mbits", Some(100_000_000))]
#[case("8Gibit", Some(1 << 30))]
#[case("12GB/s", Some(12_000_000_000))]
#[case("12GBps", Some(12_000_000_000))]
#[case("1.5 GiB/s", Some(3 << 29))]
#[case("900B/s", Some(900))]
#[case("100", None)]
#[case("100G", None)]
#[case("7b", None)]
#[case("0GB", None)]
#[case("-1GB", None)]
#[case("1QB", None)]
#[case("fast", None)]
#[case("", None)]
#[case("99999999999999999999999TB", None)]
fn bandwidths_have_a_number_and_a_unit(#[case] text: &str, #[case] wanted: Option<u64>) {
    let found = parse_bandwidth(text);
    assert_eq!(found.as_ref().ok().copied(), wanted, "{text}");
    if let Err(error) = found {
        assert!(error.is_plan() && error.to_string().contains("is not a bandwidth"), "{error}");
    }
}

#[rstest]
#[case("312T", Some(312e12))]
#[case("312 TFLOPS", Some(312e12))]
#[case("312tflop/s", Some(312e12))]
#[case("1.5P", Some(1.5e15))]
#[case("3.12e14", Some(3.12e14))]
#[case("50G", Some(50e9))]
#[case("1E", Some(1e18))]
#[case("0T", None)]
#[case("-1T", None)]
#[case("inf", None)]
#[case("NaN", None)]
#[case("1e999", None)]
#[case("T", None)]
#[case("", None)]
#[case("12 parsecs", None)]
fn speeds_of_computing_are_numbers_above_zero(#[case] text: &str, #[case] wanted: Option<f64>) {
    let found = parse_flops(text);
    assert_eq!(found.as_ref().ok().copied(), wanted, "{text}");
    if let Err(error) = found {
        assert!(error.is_plan() && error.to_string().contains("312T"), "{error}");
    }
}
