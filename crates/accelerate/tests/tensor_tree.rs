//! `#[derive(TensorTree)]` on the batches and outputs that users write, with real tensors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset, concatenate, find_batch_size, slice_tensors, stack_tensors};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Error, Parcel, TensorTree};
use std::collections::{BTreeMap, HashMap};

fn numbers(tree: &impl TensorTree) -> Vec<i64> {
    let mut found = Vec::new();
    tree.for_each_tensor(&mut |tensor| found.push(tensor.int64_value(&[])));
    found
}

fn negated<T: TensorTree>(tree: &T) -> T {
    tree.try_map_tensors(&mut |tensor| Ok(tensor.f_neg()?)).unwrap()
}

fn scalar(value: i64) -> Tensor {
    Tensor::from(value)
}

/// Every tree visits its tensors in the given order, and keeps the order when they are replaced.
fn check(tree: &impl TensorTree, wanted: &[i64]) {
    assert_eq!(numbers(tree), wanted);
    let wanted: Vec<i64> = wanted.iter().map(|number| -number).collect();
    assert_eq!(numbers(&negated(tree)), wanted);
}

#[derive(TensorTree)]
struct Batch {
    input_ids: Tensor,
    labels: Option<Tensor>,
    names: Vec<String>,
    index: usize,
}

fn batch(first: i64) -> Batch {
    Batch { input_ids: scalar(first), labels: Some(scalar(first + 1)), names: vec!["a".to_owned()], index: 7 }
}

#[test]
fn named_fields_are_visited_in_order() {
    check(&batch(1), &[1, 2]);
    check(&Batch { labels: None, ..batch(1) }, &[1]);
    let copy = negated(&batch(1));
    assert_eq!((copy.names, copy.index), (vec!["a".to_owned()], 7));
}

#[derive(TensorTree)]
struct Pair(Tensor, Vec<Tensor>);

#[derive(TensorTree)]
struct Nothing;

#[derive(TensorTree)]
struct Nested<T> {
    inner: T,
    pairs: [Pair; 2],
    empty: Nothing,
}

#[test]
fn trees_nest() {
    let pair = |first| Pair(scalar(first), vec![scalar(first + 1), scalar(first + 2)]);
    let nested = Nested { inner: Box::new(batch(1)), pairs: [pair(3), pair(6)], empty: Nothing };
    check(&nested, &[1, 2, 3, 4, 5, 6, 7, 8]);
}

#[derive(TensorTree)]
enum Output {
    Logits(Tensor),
    WithLoss { loss: Tensor, logits: Tensor },
    Skipped,
}

#[test]
fn enums_visit_the_variant_they_are() {
    check(&Output::Logits(scalar(1)), &[1]);
    check(&Output::WithLoss { loss: scalar(1), logits: scalar(2) }, &[1, 2]);
    check(&Output::Skipped, &[]);
    assert!(matches!(negated(&Output::Skipped), Output::Skipped));
}

#[derive(Clone, Debug, PartialEq)]
struct Vocabulary(&'static str);

#[derive(TensorTree)]
struct WithExtras {
    #[tensor_tree(skip)]
    vocabulary: Vocabulary,
    ids: Tensor,
}

#[test]
fn skipped_fields_are_cloned() {
    let tree = WithExtras { vocabulary: Vocabulary("en"), ids: scalar(3) };
    check(&tree, &[3]);
    assert_eq!(negated(&tree).vocabulary, Vocabulary("en"));
}

#[test]
fn maps_are_visited_by_sorted_key_on_every_rank() {
    let keys = ["mask", "ids", "labels", "types"];
    let entries = || keys.iter().zip(1..).map(|(key, value)| (key.to_string(), scalar(value)));
    check(&entries().collect::<BTreeMap<_, _>>(), &[2, 3, 1, 4]);
    for _ in 0..8 {
        // Every hash map has keys of its own.
        check(&entries().collect::<HashMap<_, _>>(), &[2, 3, 1, 4]);
    }
}

#[test]
fn the_first_error_ends_the_visit() {
    let mut visited = 0;
    let result = Pair(scalar(1), vec![scalar(2), scalar(3)]).try_map_tensors(&mut |tensor| {
        visited += 1;
        if visited == 2 { Err(Error::other("enough")) } else { Ok(tensor.shallow_clone()) }
    });
    assert_eq!(result.err().map(|error| error.to_string()).as_deref(), Some("enough"));
    assert_eq!(visited, 2);
}

#[derive(TensorTree)]
struct Example {
    ids: Tensor,
    label: Tensor,
    split: String,
}

fn example(value: i64) -> Example {
    Example { ids: Tensor::from_slice(&[value, value + 1]), label: scalar(value), split: "train".to_owned() }
}

#[test]
fn structs_go_through_a_loader() {
    let dataset = VecDataset::new((0..5).map(example).collect());
    let loader = DataLoader::builder(dataset).batch_size(3).collate_fn(stack_tensors).build().unwrap();
    let batches: Vec<Example> = loader.iter().unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(batches[0].ids, Tensor::from_slice2(&[[0i64, 1], [1, 2], [2, 3]]));
    assert_eq!(batches[1].label, Tensor::from_slice(&[3i64, 4]));
    assert_eq!(batches[1].split, "train");
    assert_eq!(batches[1].ids.kind(), Kind::Int64);
}

#[test]
fn structs_are_sliced_and_put_together_again() {
    let whole = stack_tensors((0..5).map(example).collect()).unwrap();
    assert_eq!(find_batch_size(&whole).unwrap(), 5);
    let parts = [slice_tensors(&whole, 0..2).unwrap(), slice_tensors(&whole, 2..9).unwrap()];
    assert_eq!(parts.iter().map(|part| find_batch_size(part).unwrap()).collect::<Vec<_>>(), [2, 3]);
    let again = concatenate(&parts, 0).unwrap();
    assert_eq!((again.ids, again.label), (whole.ids, whole.label));
}

fn there_and_back<T: TensorTree>(tree: &T) -> accelerate::Result<T> {
    let mut parcel = Parcel::default();
    tree.pack(&mut parcel)?;
    T::unpack(&mut parcel)
}

#[test]
fn derived_trees_can_be_sent_unless_they_skip_something() {
    #[derive(Debug, TensorTree, PartialEq)]
    struct Inner(Tensor, i64);

    #[derive(Debug, TensorTree, PartialEq)]
    enum Sent {
        Nothing,
        Pair { first: Inner, second: Option<Tensor> },
    }

    let pair = Sent::Pair { first: Inner(scalar(1), 5), second: Some(scalar(2)) };
    assert_eq!(there_and_back(&pair).unwrap(), pair);
    assert_eq!(there_and_back(&Sent::Nothing).unwrap(), Sent::Nothing);

    let mut parcel = Parcel::default();
    parcel.put(&7u32).unwrap();
    assert!(Sent::unpack(&mut parcel).unwrap_err().to_string().contains("no such variant"));

    #[derive(Debug, TensorTree)]
    struct Skipping {
        tensor: Tensor,
        #[tensor_tree(skip)]
        handle: std::sync::Arc<()>,
    }
    let skipping = Skipping { tensor: scalar(1), handle: Default::default() };
    let error = there_and_back(&skipping).unwrap_err().to_string();
    assert!(error.contains("Skipping") && error.contains("dispatch_batches"), "{error}");
    assert_eq!((skipping.tensor.numel(), std::sync::Arc::strong_count(&skipping.handle)), (1, 1));
}
