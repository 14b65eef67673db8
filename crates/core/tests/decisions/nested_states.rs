//! What `torch.distributed.checkpoint` has taken apart becomes what it was, or is an error.

use accelerate_core::weight_files::{DistributedCheckpoint, DistributedItem, Plain, StoredTensor};
use rstest::rstest;
use std::io::Cursor;
use std::path::Path;

/// What `parity/checkpoints/generate.py` and `parity/weights/generate.py` have written.
fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity").join(name)).unwrap()
}

const NESTED: &str = "weights/dcp_nested_2";
const OPTIMIZERS: [&str; 2] = ["checkpoints/fsdp1/optimizer_0", "checkpoints/fsdp2/optimizer_0"];

/// What was saved, with tensors by their names.
fn read(folder: &str) -> Plain<String> {
    let (checkpoint, state) = DistributedCheckpoint::read_nested(&fixture(&format!("{folder}/.metadata"))).unwrap();
    let read = state.try_map(&mut |item| match item {
        DistributedItem::Tensor(number) => Ok(Plain::Tensor(checkpoint.tensors[number].name.clone())),
        DistributedItem::Value { file, range, .. } => {
            let file = fixture(&format!("{folder}/{}", checkpoint.files[file]));
            let value = Plain::<StoredTensor>::read_range(&mut Cursor::new(file), range)?;
            value.try_map(&mut |_| Ok(Plain::text("a tensor in a value")))
        }
    });
    read.map_err(|error: accelerate_core::Error| error).unwrap()
}

#[test]
fn names_with_dots_are_keys_of_one_dictionary() {
    let of_weight =
        Plain::dict([("exp_avg", Plain::Tensor("state.a.weight.exp_avg".to_owned())), ("step", Plain::Int(3))]);
    let state = Plain::dict([("state", Plain::dict([("a.weight", of_weight)]))]);
    let found = read(NESTED);
    let sorted = |value: &Plain<String>| match value.get("optimizer").and_then(|it| it.get("state")?.get("a.weight")) {
        Some(Plain::Dict(pairs)) => {
            let mut pairs: Vec<_> = pairs.iter().map(|pair| format!("{pair:?}")).collect();
            pairs.sort();
            pairs
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(sorted(&found), sorted(&Plain::dict([("optimizer", state)])));
}

#[test]
fn groups_are_a_list_in_their_order_with_the_names_of_parameters() {
    let found = read(OPTIMIZERS[1]);
    let Some(Plain::List(groups)) = found.get("optimizer").and_then(|it| it.get("param_groups")) else {
        panic!("{found:?}")
    };
    let names = |names: &[&str]| Plain::List(names.iter().map(|name| Plain::text(*name)).collect());
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0].get("params"), Some(&names(&["0.weight", "1.weight", "2.weight"])));
    assert_eq!(groups[1].get("params"), Some(&names(&["0.bias", "1.bias", "2.bias"])));
    assert_eq!(groups[1].get("weight_decay"), Some(&Plain::Float(0.0)));
    assert_eq!(groups[0].get("betas"), Some(&Plain::Tuple(vec![Plain::Float(0.9), Plain::Float(0.999)])));
    assert_eq!(groups[0].get("fused"), Some(&Plain::None));
}

/// The metadata, with some bytes in the place of others wherever they are.
fn with(folder: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    let (mut rest, mut changed, mut times) = (fixture(&format!("{folder}/.metadata")), Vec::new(), 0);
    while let Some(at) = rest.windows(from.len()).position(|bytes| bytes == from) {
        changed.extend(rest.drain(..at + from.len()).take(at));
        changed.extend(to);
        times += 1;
    }
    assert!(times > 0, "the fixture has these bytes");
    [changed, rest].concat()
}

#[rstest]
#[case::another_way(
    with(NESTED, b"\x8c\x08a.weight", b"\x8c\x08a.wright"),
    "what dictionaries and lists `optimizer.state.a.weight"
)]
#[case::no_ways(
    with(NESTED, b"planner_data", b"planner_date"),
    "what dictionaries and lists `optimizer.state.a.weight"
)]
#[case::a_way_that_goes_on(
    with(NESTED, b"\x8c\x04step", b"\x8c\x04stip"),
    "what dictionaries and lists `optimizer.state.a.weight"
)]
#[case::a_value_without_place(
    with(NESTED, b"\x8c\x1doptimizer.state.a.weight.step", b"\x8c\x1doptimizer.state.a.weight.stop"),
    "optimizer.state.a.weight.st"
)]
fn what_was_taken_apart_in_another_way_is_refused(#[case] metadata: Vec<u8>, #[case] words: &str) {
    let error = DistributedCheckpoint::read_nested(&metadata).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(words), "{words:?} is not in: {error}");
}

/// Pseudo-random numbers, the same in every run.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

#[test]
fn damaged_metadata_are_refused_or_name_what_they_have() {
    let mut random = 7;
    for folder in [NESTED, OPTIMIZERS[0], OPTIMIZERS[1]] {
        let metadata = fixture(&format!("{folder}/.metadata"));
        for length in (0..metadata.len()).step_by(61) {
            assert!(DistributedCheckpoint::read_nested(&metadata[..length]).is_err(), "{length} bytes");
        }
        for _ in 0..1500 {
            let mut flipped = metadata.clone();
            let at = next(&mut random) % metadata.len();
            flipped[at] ^= 1 << (next(&mut random) % 8);
            let Ok((checkpoint, state)) = DistributedCheckpoint::read_nested(&flipped) else { continue };
            let mut numbers = Vec::new();
            let seen = state.try_map(&mut |item| {
                match item {
                    DistributedItem::Tensor(number) => numbers.push(number),
                    DistributedItem::Value { file, .. } => assert!(file < checkpoint.files.len(), "byte {at}"),
                }
                Ok::<Plain<()>, ()>(Plain::None)
            });
            assert!(seen.is_ok());
            numbers.sort_unstable();
            assert_eq!(numbers, (0..checkpoint.tensors.len()).collect::<Vec<_>>(), "byte {at} of {folder}");
        }
    }
}
