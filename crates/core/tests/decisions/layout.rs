//! Which elements a layout holds, and how they are made up from others.

use accelerate_core::layout::{Copied, Layout};
use proptest::prelude::*;
use std::collections::HashSet;

/// How a layout is made from a shape; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
struct Cuts {
    /// Dim, two indices, parts.
    slice: Option<(usize, usize, usize, usize)>,
    flat: Option<(usize, usize)>,
}

fn cuts() -> impl Strategy<Value = Cuts> {
    let slice = prop::option::of((0usize..3, 0usize..6, 0usize..6, 1usize..4));
    let flat = prop::option::of((0usize..40, 0usize..40));
    (slice, flat).prop_map(|(slice, flat)| Cuts { slice, flat })
}

/// The layout, and the positions in the full tensor that it has to hold, found by going through all elements.
fn cut(shape: &[usize], cuts: &Cuts) -> (Layout, Vec<usize>) {
    let numel: usize = shape.iter().product();
    let mut layout = Layout::full(shape);
    let mut held: Vec<usize> = (0..numel).collect();
    if let Some((dim, one, other, parts)) = cuts.slice.filter(|_| !shape.is_empty()) {
        let dim = dim % shape.len();
        let parts = if shape[dim].is_multiple_of(parts) { parts } else { 1 };
        let size = shape[dim] / parts;
        let [one, other] = [one, other].map(|index| index % (size + 1));
        let indices = one.min(other)..one.max(other);
        let inner: usize = shape[dim + 1..].iter().product();
        held.retain(|element| indices.contains(&(element / inner % shape[dim] % size)));
        layout = layout.slice_of_parts(dim, parts, indices).unwrap();
    }
    if let Some((one, other)) = cuts.flat {
        let [one, other] = [one, other].map(|element| element % (held.len() + 1));
        let elements = one.min(other)..one.max(other);
        held = held[elements.clone()].to_vec();
        layout = layout.flat(elements).unwrap();
    }
    (layout, held)
}

proptest! {
    #[test]
    fn a_layout_holds_the_elements_that_it_says(shape in prop::collection::vec(0usize..5, 0..4), cuts in cuts()) {
        let (layout, held) = cut(&shape, &cuts);
        prop_assert_eq!(layout.runs().flatten().collect::<Vec<_>>(), held.clone());
        prop_assert!(layout.runs().all(|run| !run.is_empty()));
        let runs: Vec<_> = layout.runs().collect();
        prop_assert!(runs.windows(2).all(|two| two[0].end < two[1].start), "{:?}", runs);
        prop_assert_eq!(layout.numel(), held.len());
        prop_assert_eq!(layout.local_shape().iter().product::<usize>(), held.len());
        prop_assert_eq!(layout.is_full(), held.len() == shape.iter().product::<usize>());
        let text = serde_json::to_string(&layout).unwrap();
        prop_assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
    }

    /// Every element comes from where it stands in a piece, or the first that is missing is named.
    #[test]
    fn copies_bring_each_element_to_its_place(
        shape in prop::collection::vec(1usize..5, 0..4),
        wanted in cuts(),
        pieces in prop::collection::vec(cuts(), 0..6),
    ) {
        let (wanted, elements) = cut(&shape, &wanted);
        let pieces: Vec<_> = pieces.iter().map(|cuts| cut(&shape, cuts)).collect();
        let there: HashSet<usize> = pieces.iter().flat_map(|(_, held)| held.iter().copied()).collect();
        let missing = elements.iter().find(|element| !there.contains(*element)).copied();
        match wanted.copies_from(pieces.iter().map(|(layout, _)| layout)) {
            Ok(copies) => {
                prop_assert_eq!(missing, None);
                let mut found = vec![usize::MAX; elements.len()];
                for Copied { source, from, to } in copies {
                    for (place, element) in from.enumerate() {
                        found[to + place] = pieces[source].1[element];
                    }
                }
                prop_assert_eq!(found, elements);
            }
            Err(gap) => {
                prop_assert_eq!(missing, Some(gap.start));
                prop_assert!(!gap.is_empty() && gap.clone().all(|element| !there.contains(&element)));
            }
        }
    }
}

#[test]
fn a_flat_range_of_a_flat_range_counts_from_its_first() {
    let layout = Layout::full([4, 4]).slice(1, 1..3).unwrap().flat(2..7).unwrap().flat(1..3).unwrap();
    assert_eq!(layout.runs().collect::<Vec<_>>(), [6..7, 9..10]);
    assert_eq!(layout.to_string(), "elements 3..5 of dim 1, 1..3 of [4, 4]");
}

#[test]
fn what_does_not_exist_is_refused() {
    let blocks = Layout::full([3, 5]).blocks(4).unwrap();
    let errors = [
        (Layout::full([3]).slice(1, 0..1), "no indices 0..1 of dim 1"),
        (Layout::full([3]).slice(0, 2..4), "no indices 2..4 of dim 0"),
        (Layout::full([]).slice(0, 0..0), "shape []"),
        (
            Layout::full([3]).slice_of_parts(0, 2, 0..1),
            "dim 0 of a tensor of shape [3] does not consist of 2 equal parts",
        ),
        (Layout::full([4]).slice_of_parts(0, 0, 0..1), "0 equal parts"),
        (Layout::full([4]).slice_of_parts(0, 2, 0..3), "no indices 0..3"),
        (Layout::full([3]).flat(1..4), "elements 1..4 were asked for of [3], which has 3"),
        (Layout::full([3]).flat(1..2).and_then(|part| part.slice(0, 0..1)), "a part already"),
        (Layout::full([3]).blocks(0), "block_elements is 0"),
        (blocks.clone().flat(3..8), "a block of 4"),
        (blocks.flat(4..13), "a block of 4"),
        (Layout::full([9]).flat(2..4).and_then(|part| part.blocks(4)), "a block of 4"),
    ];
    for (found, wanted) in errors {
        let error = found.unwrap_err();
        assert!(error.is_plan() && error.to_string().contains(wanted), "{error}");
    }
}

/// A manifest may come from anywhere.
#[test]
fn a_layout_from_a_file_is_checked() {
    for (text, wanted) in [
        (r#"{"shape": [3], "elements": {"start": 2, "end": 4}}"#, "which has 3"),
        (r#"{"shape": [3], "elements": {"start": 2, "end": 1}}"#, "elements 2..1"),
        (r#"{"shape": [3], "slice": {"dim": 0, "indices": {"start": 3, "end": 2}}}"#, "no indices 3..2"),
        (r#"{"shape": [18446744073709551615, 2]}"#, "more elements than can be counted"),
        (r#"{"shape": [0, 4294967296, 4294967296]}"#, "more elements than can be counted"),
        (r#"{"shape": [3], "block_elements": 0}"#, "at least 1"),
        (r#"{"shape": [3], "blocks": 2}"#, "unknown field"),
    ] {
        let error = serde_json::from_str::<Layout>(text).unwrap_err().to_string();
        assert!(error.contains(wanted), "{text}: {error}");
    }
}
