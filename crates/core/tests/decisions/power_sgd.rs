//! What PowerSGD compresses, how factors lie in memory, and its seeds.

use accelerate_core::config::PowerSGDState;
use accelerate_core::power_sgd::{Matrices, Seeds, plan, square_side};
use proptest::prelude::*;
use rstest::rstest;

fn state(matrix_approximation_rank: usize, min_compression_rate: f64) -> PowerSGDState {
    PowerSGDState { matrix_approximation_rank, min_compression_rate, ..Default::default() }
}

#[rstest]
#[case::worth_it(&[100, 100], state(1, 2.0), Some((100, 100, 1)))]
#[case::trailing_dimensions_are_columns(&[8, 3, 3, 3], state(1, 2.0), Some((8, 27, 1)))]
#[case::exactly_the_rate_is_not_more(&[4, 4], state(1, 2.0), None)]
#[case::a_vector_saves_nothing(&[100], state(1, 1.0), None)]
#[case::rank_is_at_most_a_side(&[3, 100], state(8, 0.0), Some((3, 100, 3)))]
#[case::scalar(&[], state(1, 0.0), None)]
#[case::empty(&[0, 5], state(1, 0.0), None)]
#[case::empty_columns(&[5, 0], state(1, 0.0), None)]
fn one_gradient(
    #[case] shape: &[usize],
    #[case] state: PowerSGDState,
    #[case] expected: Option<(usize, usize, usize)>,
) {
    let plan = plan(&[shape], &state);
    let found = plan.compressed.first().map(|matrices| (matrices.rows, matrices.columns, matrices.rank));
    assert_eq!(found, expected);
    assert_eq!(plan.uncompressed.is_empty(), expected.is_some());
}

#[test]
fn equal_shapes_lie_together_whether_batched_or_not() {
    let shapes: [&[usize]; 5] = [&[20, 30], &[5], &[30, 20], &[20, 5, 6], &[30, 20]];
    let matrices =
        |gradients: &[usize], rows, columns| Matrices { gradients: gradients.to_vec(), rows, columns, rank: 1 };
    let mut options = state(1, 2.0);
    let single = plan(&shapes, &options);
    let order = [(0, 20, 30), (3, 20, 30), (2, 30, 20), (4, 30, 20)].map(|(at, n, m)| matrices(&[at], n, m));
    assert_eq!(single.compressed, order);
    assert_eq!(single.uncompressed, [1]);
    options.batch_tensors_with_same_shape = true;
    let batched = plan(&shapes, &options);
    assert_eq!(batched.compressed, [matrices(&[0, 3], 20, 30), matrices(&[2, 4], 30, 20)]);
    assert_eq!((batched.p_elements(), batched.q_elements()), (single.p_elements(), single.q_elements()));
}

#[rstest]
#[case(PowerSGDState { matrix_approximation_rank: 0, ..Default::default() }, "matrix_approximation_rank is 0")]
#[case(PowerSGDState { min_compression_rate: f64::NAN, ..Default::default() }, "min_compression_rate is NaN")]
#[case(PowerSGDState { orthogonalization_epsilon: -1e-8, ..Default::default() }, "orthogonalization_epsilon is -")]
#[case(PowerSGDState { start_power_sgd_iter: 1, warm_start: false, ..Default::default() }, "start_powerSGD_iter is 1")]
#[case(PowerSGDState { start_power_sgd_iter: 0, use_error_feedback: false, ..Default::default() }, "start_powerSGD_iter is 0")]
fn impossible_options(#[case] state: PowerSGDState, #[case] message: &str) {
    PowerSGDState::default().check().unwrap();
    let error = state.check().unwrap_err();
    assert!(error.is_config() && error.to_string().starts_with(message), "{error}");
}

/// `numpy.random.RandomState(seed).randint(1_000_000_000)`, numpy 2.4.
#[rstest]
#[case(0, [209652396, 398764591, 924231285, 404868288, 441365315, 463622907].as_slice())]
#[case(u32::MAX, [419326371, 479346978, 697429004].as_slice())]
fn seeds_are_numpys(#[case] seed: u32, #[case] expected: &[u32]) {
    assert_eq!(Seeds::new(seed).take(expected.len()).collect::<Vec<_>>(), expected);
}

proptest! {
    #[test]
    fn every_gradient_travels_once_and_no_larger_than_before(
        shapes in prop::collection::vec(prop::collection::vec(0..12_usize, 0..4), 0..8),
        rank in 1..5_usize,
        rate in 1.0..4.0,
        batch_tensors_with_same_shape: bool,
    ) {
        let options = PowerSGDState { batch_tensors_with_same_shape, ..state(rank, rate) };
        let plan = plan(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>(), &options);
        let mut seen: Vec<usize> = plan.compressed.iter().flat_map(|matrices| matrices.gradients.clone()).collect();
        seen.extend(&plan.uncompressed);
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..shapes.len()).collect::<Vec<_>>());
        let elements: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
        prop_assert_eq!(plan.elements_before(), elements);
        prop_assert!(plan.elements_after() <= elements);
    }

    #[test]
    fn the_square_is_the_smallest_that_holds_the_bucket(elements in 0..10_000_000_usize) {
        let side = square_side(elements);
        prop_assert!(side * side >= elements);
        prop_assert!(side == 0 || (side - 1) * (side - 1) < elements);
    }
}
