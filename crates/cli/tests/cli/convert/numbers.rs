//! Numbers that one side has and the other one could round, and counts that nothing but their own word speaks for.

use std::fs;

use accelerate_core::accumulation::WindowState;
use accelerate_core::checkpoint::Checkpoint;
use accelerate_core::weight_files::Plain;
use rstest::rstest;
use serde_json::json;

use super::{NAMED, Value, copied, description, hexadecimal, own, plain, run, tensors_in, write_torch};
use crate::checkpoint::folders::{describe, write_checkpoint};

#[rstest]
#[case(json!(9_223_372_036_854_775_809_u64), Plain::LargeInt(9_223_372_036_854_775_809))]
#[case(json!(u64::MAX), Plain::LargeInt(u64::MAX))]
#[case(json!(i64::MAX), Plain::Int(i64::MAX))]
#[case(json!(i64::MIN), Plain::Int(i64::MIN))]
#[case(json!(0.1), Plain::Float(0.1))]
fn a_registered_number_is_the_same_on_both_sides(
    #[case] number: Value,
    #[case] wanted: Plain<accelerate_core::weight_files::StoredTensor>,
) {
    let folder = tempfile::tempdir().unwrap();
    let (tensors, mut values) = own();
    values.insert("custom_checkpoint_0", json!({ "seed": number }));
    write_checkpoint(&folder.path().join("own"), 1, &tensors, &values);
    run(folder.path(), "convert own python").expect(0, &[]);
    assert_eq!(plain(&folder.path().join("python/custom_checkpoint_0.pkl")).get("seed"), Some(&wanted));
    run(folder.path(), "convert python again").expect(0, &[]);
    let again = &description(&folder.path().join("again")).objects["custom_checkpoint_0"].values;
    assert_eq!(again, &json!({ "seed": number }));
}

/// The optimizer of `adamw` with this state for its first parameter.
fn with_state(step: Plain<Vec<f32>>) -> tempfile::TempDir {
    let folder = copied("adamw");
    let params = (0..6).map(Plain::Int).collect();
    let group = Plain::dict([("lr", Plain::Float(0.1)), ("params", Plain::List(params))]);
    let state = Plain::Dict(vec![(Plain::Int(0), Plain::dict([("step", step)]))]);
    let optimizer = Plain::dict([("state", state), ("param_groups", Plain::List(vec![group]))]);
    write_torch(&folder.path().join("src/optimizer.bin"), &optimizer);
    folder
}

#[rstest]
#[case::exact(Plain::Int(16_777_216), &16_777_216_f32.to_le_bytes(), false)]
#[case::infinite(Plain::Float(f64::INFINITY), &f32::INFINITY.to_le_bytes(), false)]
#[case::one_more(Plain::Int(16_777_217), &16_777_217_f64.to_le_bytes(), true)]
#[case::large(Plain::Float(1e300), &1e300_f64.to_le_bytes(), true)]
#[case::a_tenth(Plain::Float(0.1), &0.1_f64.to_le_bytes(), true)]
fn a_plain_number_of_an_optimizer_is_not_rounded(
    #[case] step: Plain<Vec<f32>>,
    #[case] wanted: &[u8],
    #[case] is_told: bool,
) {
    let folder = with_state(step);
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    assert_eq!(found.stdout.contains("the last digits of step."), is_told, "{}", found.stdout);
    run(folder.path(), "verify dst").expect(0, &[]);
    let tensors = tensors_in(&folder.path().join("dst/optimizer.safetensors"));
    assert_eq!(tensors.values().collect::<Vec<_>>(), [&hexadecimal(wanted)]);
}

#[rstest]
#[case(Plain::Int((1 << 53) + 1), "is 9007199254740993, which is not a number that a 64-bit float has")]
#[case(Plain::LargeInt(u64::MAX), "is 18446744073709551615")]
fn a_number_that_no_float_has_is_named(#[case] step: Plain<Vec<f32>>, #[case] words: &str) {
    let folder = with_state(step);
    run(folder.path(), NAMED).expect(1, &["src/optimizer.bin cannot be converted", words]);
    assert!(!folder.path().join("dst").exists());
}

#[rstest]
#[case(64, 0, 0)]
#[case(65, 65, 0)]
#[case(65, 64, 1)]
#[case(1 << 20, 0, 1)]
fn many_processes_have_saved_something(#[case] world_size: usize, #[case] num_seen: usize, #[case] code: i32) {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own");
    let mut checkpoint = Checkpoint::new(world_size);
    let random = checkpoint.objects.entry("random_states".to_owned()).or_default();
    random.values_of_ranks = (0..num_seen).map(|rank| (rank, json!(rank))).collect();
    fs::create_dir(&own).unwrap();
    describe(&own, &checkpoint);
    let words = format!("is said to be of {world_size} processes, and has state of {num_seen} of them");
    let words = [words.as_str()];
    run(folder.path(), "convert own dst").expect(code, if code == 0 { &[] } else { &words });
    assert_eq!(folder.path().join("dst").exists(), code == 0);
}

#[test]
fn a_projects_newest_checkpoint_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (tensors, values) = own();
    for number in [2, 10] {
        write_checkpoint(&folder.path().join(format!("project/checkpoints/checkpoint_{number}")), 1, &tensors, &values);
    }
    let words = "whose newest checkpoint is project/checkpoints/checkpoint_10";
    run(folder.path(), "convert project dst").expect(1, &["project is no checkpoint", words]);
    // Not completed, as all of Python's are.
    for number in [2, 10] {
        let path = format!("project/checkpoints/checkpoint_{number}/checkpoint.manifest.json");
        fs::remove_file(folder.path().join(path)).unwrap();
        run(folder.path(), "convert project dst").expect(1, &[words]);
    }
}

/// PyTorch computes with 32 bits where such a setting is a tensor of 32 bits.
#[test]
fn settings_that_were_tensors_are_listed() {
    let folder = copied("adamw");
    let params = (0..6).map(Plain::Int).collect();
    let betas = Plain::Tuple(vec![Plain::Float(0.5), Plain::Tensor(vec![0.75])]);
    let settings = [("lr", Plain::Tensor(vec![0.125])), ("betas", betas), ("params", Plain::List(params))];
    let groups = Plain::List(vec![Plain::dict(settings)]);
    let optimizer = Plain::dict([("state", Plain::Dict(Vec::new())), ("param_groups", groups)]);
    write_torch(&folder.path().join("src/optimizer.bin"), &optimizer);
    let schedule =
        Plain::dict([("base_lrs", Plain::List(vec![Plain::Tensor(vec![0.125])])), ("last_epoch", Plain::Int(1))]);
    write_torch(&folder.path().join("src/scheduler.bin"), &schedule);
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    for path in ["param_groups[0].lr", "param_groups[0].betas[1]", "base_lrs[0]"] {
        let words = format!("{path} (a tensor of one element, which is a number now)");
        assert!(found.stdout.contains(&words), "{words}: {}", found.stdout);
    }
    let group = &description(&folder.path().join("dst")).objects["optimizer"].values["param_groups"][0];
    assert_eq!((&group["lr"], &group["momentum"]), (&json!(0.125), &json!(0.5)));
}

#[test]
fn what_only_this_library_says_of_a_run_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own");
    let (tensors, values) = own();
    write_checkpoint(&path, 1, &tensors, &values);
    let mut checkpoint = description(&path);
    checkpoint.metric = Some(0.75);
    checkpoint.accumulation = WindowState { step: 5, seen: 1, num_steps: 4 };
    describe(&path, &checkpoint);
    let found = run(folder.path(), "convert own python");
    found.expect(0, &[]);
    for words in [
        "  metric 0.75: ",
        "  a window of gradient accumulation, 1 micro-batch into it: Python counts on from the step",
    ] {
        assert!(found.stdout.contains(words), "{}", found.stdout);
    }
}
