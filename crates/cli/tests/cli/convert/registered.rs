//! Registered objects with tensors in dictionaries, there and back.

use std::fs;

use accelerate_core::weight_files::{Plain, StoredTensor};
use rstest::rstest;

use super::{NAMED, copied, description, plain, run, write_torch};

/// Averages of weights are registered as dictionaries in dictionaries, whose keys have dots.
#[test]
fn tensors_of_registered_dictionaries_are_in_them_again_after_both_ways() {
    let folder = copied("adamw");
    let weights =
        || Plain::dict([("head.weight", Plain::Tensor(vec![1.0, 2.0])), ("b", Plain::Tensor(vec![3.0, 4.0]))]);
    let value = Plain::dict([
        ("decay", Plain::Float(0.5)),
        ("ema", Plain::dict([("shadow", weights()), ("steps", Plain::Int(3))])),
        ("a.b", Plain::dict([("c", Plain::Tensor(vec![5.0, 6.0]))])),
        ("empty", Plain::Dict(Vec::new())),
    ]);
    write_torch(&folder.path().join("src/custom_checkpoint_0.pkl"), &value);
    run(folder.path(), NAMED).expect(0, &[]);
    let object = &description(&folder.path().join("dst")).objects["custom_checkpoint_0"];
    let names: Vec<&str> = object.tensors.keys().map(String::as_str).collect();
    assert_eq!(names, ["a.b.c", "ema.shadow.b", "ema.shadow.head.weight"]);
    run(folder.path(), "convert dst python").expect(0, &[]);
    let found = plain(&folder.path().join("python/custom_checkpoint_0.pkl"));
    let ema = found.get("ema").unwrap();
    assert_eq!((found.get("decay"), ema.get("steps")), (Some(&Plain::Float(0.5)), Some(&Plain::Int(3))));
    let shape = |value: Option<&Plain<StoredTensor>>| match value {
        Some(Plain::Tensor(stored)) => stored.shape().to_vec(),
        other => panic!("{other:?}"),
    };
    let shadow = ema.get("shadow").unwrap();
    assert_eq!([shape(shadow.get("head.weight")), shape(shadow.get("b"))], [[2], [2]]);
    assert_eq!(shape(found.get("a.b").unwrap().get("c")), [2]);
    assert_eq!(found.get("empty"), Some(&Plain::Dict(Vec::new())));
}

/// Loading of either side takes no object more or less.
#[rstest]
#[case::none(&[0, 1], None)]
#[case::in_the_middle(&[0, 2], Some("custom_checkpoint_1"))]
#[case::several(&[3, 7], Some("custom_checkpoint_0 to 2, custom_checkpoint_4 to 6"))]
#[case::very_many(&[usize::MAX], Some("custom_checkpoint_0 to 18446744073709551614"))]
fn numbers_of_registered_objects_that_are_free_are_told(#[case] numbers: &[usize], #[case] wanted: Option<&str>) {
    let folder = copied("adamw");
    let src = folder.path().join("src");
    (0..3).for_each(|number| fs::remove_file(src.join(format!("custom_checkpoint_{number}.pkl"))).unwrap());
    for number in numbers {
        write_torch(&src.join(format!("custom_checkpoint_{number}.pkl")), &Plain::dict([("k", Plain::Int(1))]));
    }
    for (line, side) in
        [(NAMED, "SRC the free numbers and convert again"), ("convert dst python", "DST the free numbers")]
    {
        let found = run(folder.path(), line);
        found.expect(0, &[]);
        let told = found.stdout.lines().find(|line| line.contains("nothing is there under these names"));
        assert_eq!(told.map(|told| told.trim().split_once(": ").unwrap().0), wanted, "{}", found.stdout);
        assert!(told.is_none_or(|told| told.ends_with(side)), "{}", found.stdout);
    }
}

/// One that is left behind at the end has its number told, too.
#[test]
fn the_last_registered_object_that_is_left_behind_is_told() {
    let folder = copied("adamw");
    let src = folder.path().join("src");
    fs::rename(src.join("custom_checkpoint_1.pkl"), src.join("custom_checkpoint_3.pkl")).unwrap();
    fs::rename(src.join("custom_checkpoint_2.pkl"), src.join("custom_checkpoint_1.pkl")).unwrap();
    fs::rename(src.join("custom_checkpoint_3.pkl"), src.join("custom_checkpoint_2.pkl")).unwrap();
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    assert!(found.stdout.contains("\n  custom_checkpoint_2: nothing is there under these names"), "{}", found.stdout);
}

/// On the way back it would be in the dictionary.
#[test]
fn a_tensor_whose_name_leads_into_a_dictionary_stays_behind() {
    let folder = copied("adamw");
    let value = Plain::dict([
        ("a", Plain::dict([("x", Plain::Int(1))])),
        ("a.b", Plain::Tensor(vec![1.0])),
        ("c.d", Plain::Tensor(vec![2.0])),
    ]);
    write_torch(&folder.path().join("src/custom_checkpoint_0.pkl"), &value);
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    assert!(found.stdout.contains("the name `a.b` is that of another place, too"), "{}", found.stdout);
    let object = &description(&folder.path().join("dst")).objects["custom_checkpoint_0"];
    assert_eq!(object.tensors.keys().collect::<Vec<_>>(), ["c.d"]);
}

/// The rest of the run is converted.
#[test]
fn an_object_that_holds_more_than_is_read_or_has_a_reserved_name_stays_behind_alone() {
    let folder = copied("adamw");
    let deep = (0..40).fold(Plain::Int(1), |value, _| Plain::dict([("within", value)]));
    write_torch(&folder.path().join("src/custom_checkpoint_0.pkl"), &Plain::dict([("deep", deep)]));
    let reserved = Plain::dict([("__metadata__", Plain::Tensor(vec![1.0])), ("other", Plain::Tensor(vec![2.0]))]);
    write_torch(&folder.path().join("src/custom_checkpoint_1.pkl"), &reserved);
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    for words in [
        "custom_checkpoint_0.pkl",
        "more than 32 deep",
        "a tensor that is called `__metadata__`, which is the key of the notes",
    ] {
        assert!(found.stdout.contains(words), "{words}: {}", found.stdout);
    }
    let objects = description(&folder.path().join("dst")).objects;
    assert!(!objects.contains_key("custom_checkpoint_0"));
    assert_eq!(objects["custom_checkpoint_1"].tensors.keys().collect::<Vec<_>>(), ["other"]);
}
