//! Plans for plain data parallel.

use accelerate_core::config::DistributedDataParallelSettings;
use accelerate_core::plan::*;

const MIB: usize = 1024 * 1024;

fn entry(name: &str, mib: usize) -> ParameterEntry {
    ParameterEntry::new(name, &[mib, MIB / 4], "float32", 4)
}

fn kwargs(bucket_cap_mb: f64) -> DistributedDataParallelSettings {
    DistributedDataParallelSettings { bucket_cap_mb, ..Default::default() }
}

#[test]
fn buckets_start_with_a_small_one_and_travel_last_first() {
    let names = ["a", "b", "c", "d", "e"];
    let inventory = Inventory { parameters: names.map(|name| entry(name, 1)).to_vec() };
    let plan = plan_data_parallel(&inventory, &kwargs(2.0), 2);
    let buckets: Vec<&[usize]> = plan.buckets.iter().map(|bucket| &bucket.parameters[..]).collect();
    assert_eq!(buckets, [&[3, 4][..], &[1, 2], &[0]]);
    assert_eq!(plan.buckets[0].bytes, 2 * MIB);
}

#[test]
fn one_rank_needs_no_buckets_and_frozen_parameters_have_none() {
    let mut frozen = entry("frozen", 1);
    frozen.requires_grad = false;
    let inventory = Inventory { parameters: vec![frozen, entry("weight", 1)] };
    assert!(plan_data_parallel(&inventory, &kwargs(25.0), 1).buckets.is_empty());
    let plan = plan_data_parallel(&inventory, &kwargs(25.0), 2);
    assert_eq!(plan.placements, [Placement::Frozen, Placement::Replicate]);
    assert_eq!(plan.buckets[0].parameters, [1]);
}

#[test]
fn a_plan_is_printed_for_people() {
    let mut weight = ParameterEntry::new("embedding.weight", &[300, 2], "float32", 4);
    weight.ties = vec!["head.weight".to_owned()];
    let mut frozen = ParameterEntry::new("scale", &[], "float16", 2);
    frozen.requires_grad = false;
    let plan = plan_data_parallel(&Inventory { parameters: vec![weight, frozen] }, &kwargs(25.0), 2);
    assert_eq!(
        plan.to_string(),
        "\
plan for 2 ranks: NO_SHARD, 2 parameter tensors, 2.4 KB on each
  embedding.weight  float32 [300, 2]  replicate  also head.weight
  scale             float16 []  frozen
  bucket 0: 1 gradients of float32, 2.4 KB
  backward: all-reduce bucket 0, 2.4 KB
  collectives of a step: 1 all-reduce of 2.4 KB; each rank sends 2.4 KB
  memory of each rank: 2.4 KB parameters, 2.4 KB gradients, 4.8 KB optimizer state (Adam), 2.4 KB buckets; at most \
12 KB (backward), without activations
"
    );
}

#[test]
fn a_plan_survives_json() {
    let inventory = Inventory { parameters: vec![entry("weight", 3)] };
    let plan = plan_data_parallel(&inventory, &kwargs(1.0), 4);
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
}

#[test]
fn absurd_shapes_do_not_overflow() {
    let parameters = vec![ParameterEntry::new("w", &[usize::MAX, 2], "float32", 4); 2];
    let plan = plan_data_parallel(&Inventory { parameters }, &kwargs(25.0), 2);
    assert_eq!(plan.inventory.total_bytes(), usize::MAX);
    assert_eq!(plan.buckets.len(), 2);
}
