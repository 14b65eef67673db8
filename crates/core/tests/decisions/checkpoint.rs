//! Who writes what of a checkpoint, and what a description of one may say.

use accelerate_core::checkpoint::{
    Checkpoint, Completed, HeldTensor, MOST_STEPS, Retention, assign, checkpoint_number,
};
use accelerate_core::layout::Layout;
use proptest::prelude::*;
use rstest::rstest;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

fn held(name: &str, shape: &[usize], layout: Option<Layout>) -> HeldTensor {
    HeldTensor {
        object: "model".into(),
        name: name.into(),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        layout,
        may_differ: false,
    }
}

/// What each rank holds of tensors of these sizes, of which `shard_size` neighbours share each sharded one.
fn ranks(sizes: &[(usize, bool)], num_replicas: usize, shard_size: usize) -> Vec<Vec<HeldTensor>> {
    let rank = |rank: usize| {
        let place = rank % shard_size;
        let tensor = |(number, &(size, is_sharded)): (usize, &(usize, bool))| {
            let part = size.div_ceil(shard_size);
            let range = (place * part).min(size)..((place + 1) * part).min(size);
            let layout = is_sharded.then(|| Layout::full([size]).flat(range.clone()).unwrap());
            held(&format!("t{number}"), &[if is_sharded { range.len() } else { size }], layout)
        };
        sizes.iter().enumerate().map(tensor).collect()
    };
    (0..num_replicas * shard_size).map(rank).collect()
}

proptest! {
    #[test]
    fn every_number_is_written_once_by_a_rank_that_has_it(
        sizes in prop::collection::vec((0usize..40, any::<bool>()), 0..12),
        num_replicas in 1usize..4,
        shard_size in 1usize..4,
    ) {
        let all = ranks(&sizes, num_replicas, shard_size);
        let assignment = assign(&all).unwrap();
        let mut written: BTreeMap<&str, Vec<Layout>> = BTreeMap::new();
        for file in &assignment.files {
            for name in &file.tensors {
                let own = all[file.writer].iter().find(|tensor| tensor.name == *name);
                let own = own.expect("a rank writes what it holds");
                let layout = own.layout.clone().unwrap_or_else(|| Layout::full(own.shape.clone()));
                written.entry(name).or_default().push(layout);
            }
        }
        for (number, (size, _)) in sizes.iter().enumerate() {
            let pieces = written.remove(format!("t{number}").as_str()).unwrap_or_default();
            prop_assert_eq!(pieces.iter().map(Layout::numel).sum::<usize>(), *size);
            prop_assert!(Layout::full([*size]).copies_from(&pieces).is_ok());
        }
        prop_assert!(written.is_empty());
        // The description says the same as the files.
        for (name, tensor) in assignment.tensors.values().flatten() {
            for piece in &tensor.pieces {
                prop_assert!(assignment.files[piece.file].tensors.contains(name));
            }
        }
        let names: std::collections::BTreeSet<&String> = assignment.files.iter().map(|file| &file.name).collect();
        prop_assert_eq!(names.len(), assignment.files.len());
    }

    #[test]
    fn what_all_ranks_hold_is_divided_into_about_equal_parts(sizes in prop::collection::vec(1usize..100, 1..40), world_size in 1usize..6) {
        let sizes: Vec<(usize, bool)> = sizes.into_iter().map(|size| (size, false)).collect();
        let assignment = assign(&ranks(&sizes, world_size, 1)).unwrap();
        let size_of = |name: &String| sizes[name[1..].parse::<usize>().unwrap()].0;
        let load = |rank: usize| assignment.of_writer(rank).flat_map(|file| &file.tensors).map(size_of).sum::<usize>();
        let loads: Vec<usize> = (0..world_size).map(load).collect();
        // Nobody has more than the others by more than one tensor.
        let largest = sizes.iter().map(|(size, _)| *size).max().unwrap();
        prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= largest, "{:?}", loads);
    }

    #[test]
    fn with_a_limit_the_newest_are_left(mut numbers in prop::collection::btree_set(0usize..50, 0..20), newest in 0usize..60, limit in 0usize..10) {
        numbers.insert(newest);
        let completed: Vec<Completed> = numbers.iter().rev().map(|&number| Completed { number, metric: None }).collect();
        let retention = Retention { total_limit: Some(limit), ..Default::default() };
        for number in retention.outdated(&completed, newest) {
            prop_assert!(number != newest && numbers.remove(&number));
            prop_assert!(numbers.iter().all(|&left| left > number || left == newest));
        }
        prop_assert!(numbers.len() <= limit.max(1));
    }

    #[test]
    fn what_is_kept_beside_the_newest_is_what_was_asked_for(
        found in prop::collection::btree_map(0usize..50, prop::option::of(prop::num::f64::ANY), 1..20),
        every in 0usize..10, best in 0usize..5, limit in 0usize..4,
    ) {
        let completed: Vec<Completed> = found.iter().map(|(&number, &metric)| Completed { number, metric }).collect();
        let newest = *found.keys().next_back().unwrap();
        let only_newest = Retention { total_limit: Some(limit), ..Default::default() };
        let retention = Retention { keep_every: Some(every), keep_best: Some(best), ..only_newest };
        let gone = retention.outdated(&completed, newest);
        prop_assert!(gone.iter().all(|number| only_newest.outdated(&completed, newest).contains(number)));
        prop_assert!(gone.iter().all(|number| every == 0 || number % every != 0));
        let metric = |number: usize| found[&number].filter(|metric| !metric.is_nan());
        let num_better = |metric: f64| completed.iter().filter(|it| it.metric.is_some_and(|it| it > metric)).count();
        for number in only_newest.outdated(&completed, newest) {
            let is_best = metric(number).is_some_and(|metric| num_better(metric) < best);
            let is_gone = gone.contains(&number);
            // Of equal ones the later counts, so that a best one may be gone; one that is not best may only stay as one of every so many.
            prop_assert!(is_gone || is_best || every != 0 && number % every == 0, "{number} stays");
            let is_alone = metric(number).is_some_and(|own| completed.iter().filter(|it| it.metric == Some(own)).count() == 1);
            prop_assert!(!(is_gone && is_best && is_alone), "{number} is gone");
        }
    }
}

#[rstest]
#[case::other_shapes(held("w", &[2], None), held("w", &[3], None))]
#[case::whole_and_part(held("w", &[2], None), held("w", &[1], Some(Layout::full([2]).flat(0..1).unwrap())))]
#[case::other_types(held("w", &[2], None), HeldTensor { dtype: Dtype::F16, ..held("w", &[2], None) })]
#[case::parts_of_other_shapes(
    held("w", &[1], Some(Layout::full([2]).flat(0..1).unwrap())),
    held("w", &[1], Some(Layout::full([3]).flat(1..2).unwrap()))
)]
fn ranks_that_hold_different_tensors_under_one_name_are_told(#[case] first: HeldTensor, #[case] second: HeldTensor) {
    let error = assign(&[vec![first], vec![second]]).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("rank 1") && error.contains("`w` of `model`"), "{error}");
}

#[test]
fn what_may_differ_is_that_of_the_first_rank() {
    let buffer = || HeldTensor { may_differ: true, ..held("running_mean", &[100], None) };
    let assignment = assign(&[vec![held("w", &[1000], None), buffer()], vec![held("w", &[1000], None), buffer()]]);
    let writer = |name: &str| {
        let files = &assignment.as_ref().unwrap().files;
        files.iter().find(|file| file.tensors.iter().any(|tensor| tensor == name)).unwrap().writer
    };
    assert_eq!(writer("running_mean"), 0);
}

/// Ranks that compute layers together hold others whole, and divide these at other elements if their slices are of other sizes.
#[rstest]
#[case::two_that_divide_otherwise(&[0..4, 0..5, 4..10, 5..10], &[0..4, 4..10])]
#[case::one_without_elements(&[0..6, 0..4, 6..6, 4..10, 6..10], &[0..6, 6..10])]
#[case::pieces_that_go_on_with_another_ranks(&[0..3, 0..5, 3..7, 7..10], &[0..3, 3..7, 7..10])]
#[case::the_first_leads_nowhere(&[0..3, 0..5, 5..10], &[0..5, 5..10])]
fn of_pieces_that_overlap_those_stay_that_follow_each_other(
    #[case] held_by: &[Range<usize>],
    #[case] wanted: &[Range<usize>],
) {
    let piece =
        |range: &Range<usize>| held("w", &[range.len()], Some(Layout::full([5, 2]).flat(range.clone()).unwrap()));
    let slice =
        |rank: usize| held("sliced", &[5], Some(Layout::full([5, 2]).slice(1, rank % 2..rank % 2 + 1).unwrap()));
    let all: Vec<Vec<HeldTensor>> =
        held_by.iter().enumerate().map(|(rank, range)| vec![piece(range), slice(rank)]).collect();
    let assignment = assign(&all).unwrap();
    let layouts = |name: &str| {
        let pieces = assignment.tensors["model"][name].pieces.iter();
        pieces.map(|piece| piece.layout.clone().unwrap()).collect::<Vec<_>>()
    };
    let found: BTreeSet<String> = layouts("w").iter().map(Layout::to_string).collect();
    assert_eq!(found, wanted.iter().map(|range| piece(range).layout.unwrap().to_string()).collect());
    assert_eq!(Layout::full([5, 2]).copies_from(&layouts("w")).unwrap().len(), wanted.len());
    assert_eq!(layouts("sliced").len(), 2);
}

#[test]
fn state_in_blocks_may_have_any_shape_with_its_layout() {
    let part = |range| Some(Layout::full([100]).flat(range).unwrap());
    let assignment = assign(&[vec![held("q", &[3], part(0..50))], vec![held("q", &[7], part(50..100))]]).unwrap();
    assert!(!assignment.tensors["model"]["q"].is_elementwise);
    assert_eq!(assignment.tensors["model"]["q"].pieces.len(), 2);
}

/// A description with this in place of its last key.
fn described(rest: &str) -> String {
    format!(r#"{{"format":"accelerate-checkpoint","version":1,"world_size":2{rest}}}"#)
}

#[rstest]
#[case::nothing("", "EOF")]
#[case::a_list("[]", "invalid")]
#[case::other_format(r#"{"format":"zip","version":1,"world_size":1}"#, "`zip`")]
#[case::later_version(r#"{"format":"accelerate-checkpoint","version":2,"world_size":1}"#, "version 2")]
#[case::no_processes(r#"{"format":"accelerate-checkpoint","version":1,"world_size":0}"#, "0 processes")]
#[case::too_many(r#"{"format":"accelerate-checkpoint","version":1,"world_size":99999999999}"#, "99999999999")]
#[case::odd_shares(&described(r#","shard_size":3"#), "3 share a model")]
#[case::no_shares(&described(r#","shard_size":0"#), "0 share a model")]
#[case::an_object_twice(&described(r#","objects":{"model":{},"model":{}}"#), "`model` is there twice")]
#[case::a_rank_twice(&described(r#","objects":{"model":{"values_of_ranks":{"1":1,"1":2}}}"#), "`1` is there twice")]
#[case::a_tensor_twice(&described(r#","objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[],"pieces":[]},"w":{"dtype":"F32","shape":[],"pieces":[]}}}}"#), "`w` is there twice")]
#[case::many_dims(&described(&format!(r#","files":["a"],"objects":{{"model":{{"tensors":{{"w":{{"dtype":"F32","shape":[{}1],"pieces":[{{"file":0}}]}}}}}}}}"#, "1,".repeat(64))), "has 65 dims")]
#[case::unknown_key(&described(r#","secret":1"#), "secret")]
#[case::a_path(&described(r#","files":["../model.safetensors"]"#), "../model.safetensors")]
#[case::a_hidden_file(&described(r#","files":[".ssh"]"#), ".ssh")]
#[case::no_such_file(&described(r#","objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[1],"pieces":[{"file":0}]}}}}"#), "`w` is in file 0")]
#[case::in_no_file(&described(r#","objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[1],"pieces":[]}}}}"#), "`w` is in no file")]
#[case::unknown_type(&described(r#","objects":{"model":{"tensors":{"w":{"dtype":"F31","shape":[1],"pieces":[]}}}}"#), "F31")]
#[case::piece_of_another(&described(r#","files":["a"],"objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[1],"pieces":[{"file":0,"layout":{"shape":[2]}}]}}}}"#), "shape [1]")]
#[case::elements_beyond(&described(r#","files":["a"],"objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[2],"pieces":[{"file":0,"layout":{"shape":[2],"elements":{"start":0,"end":3}}}]}}}}"#), "0..3")]
#[case::a_file_twice(&described(r#","files":["a","b","a"]"#), "the file `a` twice")]
#[case::pieces_in_one_file(&described(r#","files":["a","b"],"objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[4],"pieces":[{"file":1,"layout":{"shape":[4],"elements":{"start":0,"end":2}}},{"file":1,"layout":{"shape":[4],"elements":{"start":2,"end":4}}}]}}}}"#), "`w` has two pieces in the file `b`")]
#[case::blocks_in_one_file(&described(r#","files":["a"],"objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[1],"is_elementwise":false,"pieces":[{"file":0,"layout":{"shape":[4],"elements":{"start":0,"end":2}}},{"file":0,"layout":{"shape":[4],"elements":{"start":2,"end":4}}}]}}}}"#), "`w` has two pieces in the file `a`")]
#[case::rows_without_end(&described(r#","files":["a"],"objects":{"model":{"tensors":{"w":{"dtype":"F32","shape":[1099511627776,2],"pieces":[{"file":0,"layout":{"shape":[1099511627776,2],"slice":{"dim":1,"indices":{"start":0,"end":1}}}}]}}}}"#), "`w` is divided into 1099511627776 runs")]
#[case::kept_by_a_rank_beyond(&described(r#","objects":{"kept_by_rank_2":{}}"#), "`kept_by_rank_2` is of none of the ranks")]
#[case::kept_by_the_first_rank(&described(r#","objects":{"kept_by_rank_0":{}}"#), "`kept_by_rank_0` is of none of the ranks")]
#[case::gradients_of_a_rank_beyond(&described(r#","objects":{"gradients_2":{}}"#), "`gradients_2` is of none of the ranks")]
#[case::a_hook_of_no_number(&described(r#","objects":{"comm_hook_":{}}"#), "`comm_hook_` is of none of the ranks")]
#[case::another_spelling_of_a_rank(&described(r#","objects":{"gradients_01":{}}"#), "`gradients_01` is of none of the ranks")]
#[case::a_rank_beyond(&described(r#","objects":{"model":{"values_of_ranks":{"2":1}}}"#), "rank 2")]
fn a_description_that_contradicts_itself_is_refused(#[case] json: &str, #[case] part: &str) {
    let error = Checkpoint::from_json(json).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(part), "{error}");
    assert!(error.to_string().len() < 2048);
}

#[test]
fn objects_of_ranks_of_the_run_are_read() {
    let json = described(r#","objects":{"gradients_0":{},"gradients_1":{},"comm_hook_0":{},"kept_by_rank_1":{}}"#);
    assert_eq!(Checkpoint::from_json(&json).unwrap().objects.len(), 4);
}

#[test]
fn ranks_have_their_own_values_where_these_differ() {
    let json = described(r#","objects":{"custom_checkpoint_0":{"values":"rank 0","values_of_ranks":{"1":"rank 1"}}}"#);
    let checkpoint = Checkpoint::from_json(&json).unwrap();
    let object = &checkpoint.objects["custom_checkpoint_0"];
    assert_eq!([object.values_of(0), object.values_of(1)], ["rank 0", "rank 1"]);
    assert_eq!(Checkpoint::from_json(&checkpoint.to_json().unwrap()).unwrap(), checkpoint);
}

#[test]
fn numbers_of_folders_are_read_as_they_are_written() {
    // A run goes on from the largest of them, and saves one more.
    assert_eq!(checkpoint_number(&format!("checkpoint_{}", MOST_STEPS - 1)), Some(MOST_STEPS - 1));
    assert_eq!(checkpoint_number(&format!("checkpoint_{MOST_STEPS}")), None);
    assert_eq!(checkpoint_number("checkpoint_18446744073709551616"), None);
}

/// One element takes one scale, so that a part of one element looks as if it went element by element.
#[rstest]
#[case::the_small_part_first([0..1, 1..1000])]
#[case::the_small_part_last([0..999, 999..1000])]
#[case::an_empty_part([0..0, 0..1000])]
fn a_part_of_one_element_goes_with_parts_in_blocks(#[case] parts: [std::ops::Range<usize>; 2]) {
    let scale = |elements: std::ops::Range<usize>| {
        held("w", &[elements.len().div_ceil(256)], Some(Layout::full([1000]).flat(elements).unwrap()))
    };
    let all = parts.map(|elements| vec![scale(elements)]);
    let assignment = assign(&all).unwrap();
    let tensor = &assignment.tensors["model"]["w"];
    assert!(!tensor.is_elementwise && tensor.pieces.len() == 2, "{tensor:?}");
    assert_eq!(tensor.shape, [4]);
}

/// In a safetensors file, notes have the name. Each rank is told the same.
#[test]
fn a_tensor_with_the_name_of_notes_is_not_saved() {
    let own = vec![held("weight", &[2], None), held("__metadata__", &[2], None)];
    let error = assign(&[own.clone(), own.clone()]).unwrap_err();
    assert!(error.is_weight_files());
    let text = error.to_string();
    for words in ["`model` cannot be saved", "called `__metadata__`", "rename the tensor"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(assign(&[own[..1].to_vec()]).is_ok());
}
