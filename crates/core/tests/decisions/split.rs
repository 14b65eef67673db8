//! Parts of inputs.

use accelerate_core::split::{Padding, Split, common_length, split_between_processes};
use proptest::prelude::*;
use rstest::rstest;

#[rstest]
#[case::seventeen_over_three((17, 3), &[0..6, 6..12, 12..17])]
#[case::fewer_items_than_processes((2, 4), &[0..1, 1..2, 2..2, 2..2])]
#[case::nothing((0, 2), &[0..0, 0..0])]
fn parts(#[case] (n, p): (usize, usize), #[case] wanted: &[std::ops::Range<usize>]) {
    for (rank, range) in wanted.iter().enumerate() {
        let split = split_between_processes(n, p, rank, false).unwrap();
        assert_eq!(split, Split { range: range.clone(), padding: None });
    }
}

#[test]
fn padding_repeats_the_last_of_all_inputs() {
    let split = |n, rank| split_between_processes(n, 3, rank, true).unwrap();
    assert_eq!(split(4, 1).padding, Some(Padding { index: 3, count: 1 }));
    assert_eq!(split(4, 0).padding, None);
    assert_eq!(split(1, 2).indices().collect::<Vec<_>>(), [0]);
    assert_eq!(split(0, 2).indices().count(), 0);
    assert_eq!(split(3, 2).padding, None);
}

#[test]
fn impossible_ranks_are_refused() {
    let error = split_between_processes(4, 2, 2, false).unwrap_err();
    assert!(error.is_data());
    assert_eq!(error.to_string(), "rank 2 does not exist: there are 2 processes, counted from 0");
    assert!(split_between_processes(4, 0, 0, false).unwrap_err().is_data());
}

#[test]
fn values_of_a_dictionary_have_one_length() {
    assert_eq!(common_length([]).unwrap(), None);
    let error = common_length([("a", 2), ("b", 2), ("c", 5)]).unwrap_err().to_string();
    assert!(error.contains("\"a\" has 2 and \"c\" has 5"), "{error}");
}

proptest! {
    #[test]
    fn every_item_is_in_one_part(n in 0..50_usize, p in 1..9_usize) {
        let parts: Vec<Split> =
            (0..p).map(|rank| split_between_processes(n, p, rank, true).unwrap()).collect();
        let items: Vec<usize> = parts.iter().flat_map(|part| part.range.clone()).collect();
        prop_assert_eq!(items, (0..n).collect::<Vec<_>>());
        let longest = n.div_ceil(p);
        prop_assert!(parts.iter().all(|part| part.indices().count() == longest));
    }
}
