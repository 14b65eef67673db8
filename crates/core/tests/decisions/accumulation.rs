//! Windows: where they end, and that their gradients are means.

use accelerate_core::accumulation::{Decision, PartialWindow, Window, WindowState};
use accelerate_core::config::GradientAccumulationSettings;
use proptest::prelude::*;
use rstest::rstest;

fn steps(num_steps: usize) -> GradientAccumulationSettings {
    GradientAccumulationSettings { num_steps, ..Default::default() }
}

/// Runs `num_batches` micro-batches, the last of which ends the data loader.
fn run(window: &mut Window, num_batches: usize) -> Vec<Decision> {
    (1..=num_batches).map(|number| window.advance(number == num_batches)).collect()
}

/// The gradient the optimizer sees at each sync, when micro-batch `k` has gradient `gradients[k]`.
fn gradients_at_sync(decisions: &[Decision], gradients: &[f64]) -> Vec<f64> {
    let mut accumulated = 0.0;
    let mut seen = Vec::new();
    for (decision, gradient) in decisions.iter().zip(gradients) {
        accumulated *= decision.rescale_accumulated.unwrap_or(1.0);
        accumulated += decision.loss_scale * gradient;
        if decision.sync {
            seen.push(std::mem::take(&mut accumulated));
        }
    }
    seen
}

#[rstest]
#[case::every_batch(steps(1), 3, &[1, 2, 3])]
#[case::two(steps(2), 4, &[2, 4])]
#[case::a_short_window_at_the_end(steps(4), 6, &[4, 6])]
#[case::an_epoch_shorter_than_a_window(steps(4), 2, &[2])]
#[case::the_end_of_the_loader_does_not_count(
    GradientAccumulationSettings { sync_with_dataloader: false, ..steps(4) }, 6, &[4]
)]
fn windows_end(#[case] plugin: GradientAccumulationSettings, #[case] num_batches: usize, #[case] wanted: &[usize]) {
    let decisions = run(&mut Window::new(plugin).unwrap(), num_batches);
    let syncs: Vec<usize> = (1..).zip(&decisions).filter(|(_, d)| d.sync).map(|(n, _)| n).collect();
    assert_eq!(syncs, wanted);
}

#[rstest]
#[case::full((2, 2), &[(0.5, None), (0.5, None)])]
#[case::half((4, 2), &[(0.25, None), (0.5, Some(2.0))])]
#[case::one_of_four((4, 1), &[(1.0, None)])]
#[case::three_of_four((4, 3), &[(0.25, None), (0.25, None), (1.0 / 3.0, Some(4.0 / 3.0))])]
fn scales(#[case] (num_steps, num_batches): (usize, usize), #[case] wanted: &[(f64, Option<f64>)]) {
    let decisions = run(&mut Window::new(steps(num_steps)).unwrap(), num_batches);
    let found: Vec<(f64, Option<f64>)> = decisions.iter().map(|d| (d.loss_scale, d.rescale_accumulated)).collect();
    assert_eq!(found, wanted);
}

#[test]
fn a_new_epoch_starts_a_new_window() {
    let mut window = Window::new(steps(4)).unwrap();
    run(&mut window, 6);
    assert_eq!(window.state(), WindowState::default());
    assert_eq!(run(&mut window, 6), run(&mut Window::new(steps(4)).unwrap(), 6));
}

#[test]
fn without_the_data_loader_windows_go_on_over_epochs() {
    let plugin = GradientAccumulationSettings { sync_with_dataloader: false, ..steps(4) };
    let mut window = Window::new(plugin).unwrap();
    let decisions = [run(&mut window, 6), run(&mut window, 6)].concat();
    assert_eq!(gradients_at_sync(&decisions, &[1.0; 12]), [1.0, 1.0, 1.0]);
    assert!(decisions.iter().all(|decision| decision.rescale_accumulated.is_none()));
}

#[test]
fn only_sync_each_batch_reduces_in_between() {
    let reduces = |plugin| {
        let decisions = run(&mut Window::new(plugin).unwrap(), 3);
        decisions.iter().map(|decision| (decision.sync, decision.reduce)).collect::<Vec<_>>()
    };
    assert_eq!(reduces(steps(2)), [(false, false), (true, true), (true, true)]);
    let each = GradientAccumulationSettings { sync_each_batch: true, ..steps(2) };
    assert_eq!(reduces(each), [(false, true), (true, true), (true, true)]);
}

#[test]
fn the_reference_divides_by_the_configured_number() {
    let window = Window::new(steps(4)).unwrap();
    let decisions = run(&mut window.partial_window(PartialWindow::Reference), 5);
    assert_eq!(gradients_at_sync(&decisions, &[1.0; 5]), [1.0, 0.25]);
    assert!(decisions.iter().all(|decision| decision.rescale_accumulated.is_none()));
}

#[test]
fn the_documented_example_of_the_reference_comes_out_the_same() {
    // x = 1..8, y = 2x, weight 0 + learning rate 0.02, batches of 2, four of them per step: the weight
    // moves once, by the mean gradient over all eight samples.
    let gradients: Vec<f64> = (0..4)
        .map(|batch| {
            let xs = [2 * batch + 1, 2 * batch + 2].map(f64::from);
            xs.iter().map(|x| 2.0 * (0.0 - 2.0 * x) * x).sum::<f64>() / 2.0
        })
        .collect();
    let decisions = run(&mut Window::new(steps(4)).unwrap(), 4);
    let weight = -0.02 * gradients_at_sync(&decisions, &gradients)[0];
    assert!((weight - 2.04).abs() < 1e-12, "{weight}");
}

#[test]
fn a_changed_number_of_steps_holds_for_the_open_window_too() {
    let mut window = Window::new(steps(4)).unwrap();
    let mut decisions = vec![window.advance(false)];
    window.set_num_steps(2).unwrap();
    decisions.push(window.advance(false));
    assert_eq!(gradients_at_sync(&decisions, &[3.0, 5.0]), [4.0]);
    assert_eq!(window.plugin().num_steps, 2);
}

#[test]
fn a_window_that_goes_on_elsewhere_keeps_the_scale_of_its_losses() {
    let mut window = Window::new(steps(4)).unwrap();
    let mut decisions = vec![window.advance(false), window.advance(false), window.advance(false)];
    for (num_steps, older) in [(2, false), (4, false), (4, true)] {
        let mut resumed = Window::new(steps(num_steps)).unwrap();
        let state = window.state();
        resumed.restore(if older { WindowState { num_steps: 0, ..state } } else { state });
        decisions.truncate(3);
        decisions.push(resumed.advance(false));
        assert_eq!(gradients_at_sync(&decisions, &[3.0, 5.0, 7.0, 9.0]), [6.0], "{num_steps} {older}");
        assert_eq!(resumed.state().seen, 0);
    }
}

#[test]
fn reset_forgets_what_was_seen() {
    let mut window = Window::new(steps(3)).unwrap();
    window.advance(false);
    window.reset();
    assert_eq!(window.state(), WindowState::default());
}

#[test]
fn zero_steps_are_refused() {
    assert!(Window::new(steps(0)).unwrap_err().is_config());
}

proptest! {
    #[test]
    fn gradients_are_means_over_the_micro_batches_seen(
        num_steps in 1..7_usize,
        epochs in prop::collection::vec(1..12_usize, 1..4),
        seed in any::<u32>(),
    ) {
        let mut window = Window::new(steps(num_steps)).unwrap();
        let decisions: Vec<Decision> =
            epochs.iter().flat_map(|&num_batches| run(&mut window, num_batches)).collect();
        let gradient = |k: usize| f64::from((seed.wrapping_add(k as u32)).wrapping_mul(2_654_435_761) >> 8);
        let gradients: Vec<f64> = (0..decisions.len()).map(gradient).collect();
        let mut means = Vec::new();
        let mut rest = &gradients[..];
        for &num_batches in &epochs {
            let (epoch, after) = rest.split_at(num_batches);
            means.extend(epoch.chunks(num_steps).map(|w| w.iter().sum::<f64>() / w.len() as f64));
            rest = after;
        }
        let found = gradients_at_sync(&decisions, &gradients);
        prop_assert_eq!(found.len(), means.len());
        for (found, wanted) in found.iter().zip(&means) {
            prop_assert!((found - wanted).abs() <= 1e-12 * wanted.abs().max(1.0));
        }
    }

    #[test]
    fn a_restored_window_goes_on_alike(num_steps in 1..7_usize, done in 0..20_usize, more in 1..20_usize) {
        let mut window = Window::new(steps(num_steps)).unwrap();
        (0..done).for_each(|_| { window.advance(false); });
        let json = serde_json::to_string(&window.state()).unwrap();
        let mut resumed = Window::new(steps(num_steps)).unwrap();
        resumed.restore(serde_json::from_str(&json).unwrap());
        prop_assert_eq!(run(&mut resumed, more), run(&mut window, more));
    }
}
