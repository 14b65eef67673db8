//! Schedules with warmup, whose reference is a formula, and ticks.

use accelerate_core::schedule::*;
use proptest::prelude::*;
use rstest::rstest;

#[track_caller]
fn check(schedule: impl Fn(usize) -> f64, wanted: &[(usize, f64)]) {
    for &(step, wanted) in wanted {
        let found = schedule(step);
        assert!((found - wanted).abs() < 1e-12, "{found} instead of {wanted} at {step}");
    }
}

/// The tables that `transformers` tests its own schedules with, for 2 steps of warmup and 10 in all, divided
/// by the initial rate of 10.
#[test]
fn schedules_with_warmup() {
    check(|_| constant(3), &[(0, 1.0)]);
    check(|step| constant_with_warmup(step, 4), &[(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (9, 1.0)]);
    check(
        |step| linear_with_warmup(step, 2, 10),
        &[(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.875), (6, 0.5), (9, 0.125), (10, 0.0), (99, 0.0)],
    );
    let half = |step: f64| 0.5 * (1.0 + (std::f64::consts::PI * step / 8.0).cos());
    check(
        |step| cosine_with_warmup(step, 2, 10, 0.5),
        &[(1, 0.5), (2, 1.0), (3, half(1.0)), (6, 0.5), (9, half(7.0)), (10, 0.0)],
    );
    check(
        |step| cosine_with_hard_restarts_with_warmup(step, 2, 10, 2),
        &[(1, 0.5), (2, 1.0), (4, 0.5), (5, half(6.0)), (6, 1.0), (8, 0.5), (10, 0.0), (11, 0.0)],
    );
    check(
        |step| polynomial_with_warmup(step, 2, 10, 2.0, 1e-7 / 10.0),
        &[(0, 0.0), (1, 0.5), (2, 1.0), (6, 0.25 + 0.75e-8), (10, 1e-8), (50, 1e-8)],
    );
    check(
        |step| inverse_sqrt_with_warmup(step, 2, 2),
        &[(0, 0.0), (1, 0.5), (2, 1.0), (3, (2.0_f64 / 3.0).sqrt()), (8, 0.5)],
    );
}

#[test]
fn degenerate_lengths_stay_finite() {
    for step in 0..4 {
        for multiplier in [
            linear_with_warmup(step, 0, 0),
            linear_with_warmup(step, 9, 3),
            cosine_with_warmup(step, 0, 0, 0.5),
            cosine_with_hard_restarts_with_warmup(step, 0, 0, 0),
            polynomial_with_warmup(step, 0, 0, 1.0, 0.0),
            polynomial_with_warmup(step, 3, 2, 0.5, 0.0),
            inverse_sqrt_with_warmup(step, 0, 0),
            step_decay(step, 0, 0.5),
            cosine_annealing(step, 0, 0.0),
        ] {
            assert!(multiplier.is_finite(), "{multiplier} at {step}");
        }
    }
}

/// Which of the metrics lower the rate. Every number of PyTorch's rule is compared in `crates/accelerate`.
#[rstest]
#[case::patience(Plateau { patience: 1, ..Plateau::default() }, &[2.0, 2.0, 2.0, 2.0, 2.0], &[2, 4])]
#[case::cooldown(Plateau { patience: 0, cooldown: 2, ..Plateau::default() }, &[2.0; 6], &[1, 4])]
#[case::higher(Plateau { patience: 0, mode: PlateauMode::Max, ..Plateau::default() }, &[1.0, 2.0, 1.9, 3.0], &[2])]
#[case::no_number(Plateau { patience: 0, ..Plateau::default() }, &[f64::NAN, 1.0, f64::NAN], &[0, 2])]
#[case::by_difference(
    Plateau { patience: 0, threshold: 0.5, threshold_mode: ThresholdMode::Abs, ..Plateau::default() },
    &[3.0, 2.6, 2.4],
    &[1]
)]
fn a_plateau_is_noticed(#[case] plateau: Plateau, #[case] metrics: &[f64], #[case] wanted: &[usize]) {
    let mut state = PlateauState::default();
    let lowered = (0..metrics.len()).filter(|&index| plateau.observe(&mut state, metrics[index]));
    assert_eq!(lowered.collect::<Vec<_>>(), wanted);
    assert_eq!(state.last_epoch, metrics.len());
}

#[test]
fn a_lowered_rate_has_a_floor_and_a_least_change() {
    let plateau = Plateau { factor: 0.5, eps: 0.01, ..Plateau::default() };
    let rows = [(1.0, 0.0, 0.5), (1.0, 0.8, 0.8), (1.0, 2.0, 1.0), (0.02, 0.0, 0.02), (0.021, 0.0, 0.0105)];
    for (lr, min_lr, wanted) in rows {
        assert_eq!(plateau.lowered(lr, min_lr), wanted, "{lr}, at least {min_lr}");
    }
    for (factor, threshold) in [(1.0, 0.0), (-0.1, 0.0), (f64::NAN, 0.0), (0.5, -1.0), (0.5, f64::INFINITY)] {
        assert!(Plateau { factor, threshold, ..Plateau::default() }.check().unwrap_err().is_config());
    }
}

#[rstest]
#[case::no_steps(OneCycle { total_steps: 0, ..OneCycle::default() }, 0, "total_steps is 0")]
#[case::over(OneCycle { total_steps: 5, ..OneCycle::default() }, 6, "at most total_steps")]
#[case::too_late_a_peak(
    OneCycle { total_steps: 5, pct_start: 1.5, ..OneCycle::default() }, 0, "pct_start is 1.5"
)]
fn a_cycle_has_an_end(#[case] cycle: OneCycle, #[case] step: usize, #[case] message: &str) {
    let error = cycle.at(step).unwrap_err();
    assert!(error.is_config());
    assert!(error.to_string().contains(message), "{error}");
}

proptest! {
    #[test]
    fn a_cycle_stays_between_its_ends(
        total_steps in 1..200_usize, pct_start in 0.0..=1.0_f64, three_phase: bool, linear: bool,
    ) {
        let anneal_strategy = if linear { AnnealStrategy::Linear } else { AnnealStrategy::Cos };
        let cycle = OneCycle { total_steps, pct_start, three_phase, anneal_strategy, ..Default::default() };
        for step in 0..total_steps {
            let point = cycle.at(step).unwrap();
            prop_assert!(point.multiplier.is_finite(), "{} at {}", point.multiplier, step);
            prop_assert!(point.multiplier <= 1.0 + 1e-12);
        }
    }
}

#[rstest]
#[case::like_the_reference((4, false, true, SchedulerUnit::Reference), 4)]
#[case::split((4, true, true, SchedulerUnit::Reference), 1)]
#[case::not_with_the_optimizer((4, false, false, SchedulerUnit::Reference), 1)]
#[case::optimizer_steps((4, false, true, SchedulerUnit::OptimizerStep), 1)]
#[case::one_process((1, false, true, SchedulerUnit::Reference), 1)]
fn ticks(#[case] case: (usize, bool, bool, SchedulerUnit), #[case] wanted: usize) {
    let (num_processes, split_batches, step_with_optimizer, unit) = case;
    assert_eq!(ticks_per_step(num_processes, split_batches, step_with_optimizer, unit), wanted);
    let rule = SchedulerRule { num_processes, split_batches, step_with_optimizer, unit };
    assert_eq!(rule.ticks(true, false), wanted);
    let apart = if step_with_optimizer { 0 } else { 1 };
    assert_eq!(rule.ticks(false, false), apart);
    assert_eq!(rule.ticks(true, true), apart);
}

#[test]
fn a_schedule_that_ends_is_not_stepped_past_its_end() {
    // Ten steps over three processes: three ticks each time, but never beyond the tenth, which is number 9.
    let mut step = 0;
    let mut steps = Vec::new();
    for _ in 0..5 {
        step += capped_ticks(3, step, Some(10));
        steps.push(step);
    }
    assert_eq!(steps, [3, 6, 9, 9, 9]);
    assert_eq!(capped_ticks(3, 0, Some(0)), 0);
}

/// `num_batches` of each process, micro-batches per step, processes, ticks per step.
fn pass(
    num_batches: usize,
    gradient_accumulation_steps: usize,
    num_processes: usize,
    ticks_per_step: usize,
) -> ScheduledPass {
    ScheduledPass { num_batches, gradient_accumulation_steps, num_processes, ticks_per_step, adjust_scheduler: false }
}

fn by_batches(pass: ScheduledPass) -> ScheduledPass {
    ScheduledPass { adjust_scheduler: true, ..pass }
}

#[rstest]
// 100 batches for two processes: 50 steps each, which move the schedule by 100.
#[case::as_for_one_process(pass(50, 1, 2, 2), 300, "")]
#[case::optimizer_steps(
    pass(50, 1, 2, 2),
    150,
    "moves it by 100, so it ends after 1.5 passes. 150 steps are 3 passes in optimizer steps. \
    Make it 300 steps long for 3 passes, or build with SchedulerUnit::OptimizerStep"
)]
#[case::less_than_a_pass(pass(50, 1, 2, 2), 50, "ends after 0.5 passes. 50 steps are 1 pass in optimizer steps")]
#[case::could_be_two_passes(pass(50, 1, 2, 2), 200, "")]
#[case::a_number_of_steps_that_is_no_pass(pass(734, 1, 2, 2), 1000, "")]
// 100 batches for four processes, two at a time: 13 steps each.
#[case::batches_of_the_prepared_loader(
    pass(25, 2, 4, 4),
    75,
    "moves it by 52, so it ends after 1.44 passes. 75 steps are 3 passes in \
    batches of one process. Make it 156 steps long for 3 passes"
)]
#[case::rounded(pass(25, 2, 4, 4), 150, "")]
#[case::batches_before_prepare(pass(50, 4, 2, 2), 300, "")]
#[case::alone(pass(100, 1, 1, 1), 150, "")]
#[case::alone_with_accumulation(pass(100, 4, 1, 1), 300, "")]
#[case::adjusted(by_batches(pass(50, 5, 2, 2)), 300, "")]
#[case::adjusted_but_counted_in_steps(
    by_batches(pass(50, 5, 2, 2)),
    30,
    "moves it by 100, so it ends after 0.3 passes. 30 steps are 3 passes in \
    optimizer steps"
)]
#[case::counts_optimizer_steps(pass(50, 1, 2, 1), 150, "")]
#[case::no_batches(pass(0, 4, 2, 2), 150, "")]
#[case::no_steps(pass(50, 1, 2, 2), 0, "")]
fn lengths_that_only_another_count_explains(#[case] pass: ScheduledPass, #[case] total: usize, #[case] wanted: &str) {
    let found = pass.check_length(total).map(|mismatch| mismatch.to_string()).unwrap_or_default();
    assert!(found.contains(wanted) && found.is_empty() == wanted.is_empty(), "{found}");
}

#[rstest]
#[case::at_the_end(pass(50, 1, 2, 2), 200, 0, false)]
#[case::rounding(pass(50, 1, 2, 2), 200, 4, false)]
#[case::beyond(pass(50, 1, 2, 2), 200, 6, true)]
#[case::many_passes_round_often(pass(50, 1, 2, 2), 2000, 40, false)]
#[case::alone(pass(100, 1, 1, 1), 100, 50, false)]
#[case::alone_with_accumulation(pass(100, 4, 1, 1), 75, 4, true)]
#[case::less_than_a_pass(pass(734, 1, 2, 2), 1000, 3, true)]
fn a_loop_that_goes_on_after_the_end(
    #[case] pass: ScheduledPass,
    #[case] total: usize,
    #[case] beyond: usize,
    #[case] is_told: bool,
) {
    let found = pass.check_end(total, beyond).map(|mismatch| mismatch.to_string());
    assert_eq!(found.is_some(), is_told, "{found:?}");
    assert!(found.is_none_or(|text| text.contains(&format!("its {total} steps, and training goes on"))));
}

#[rstest]
// Three passes of 100 batches, four at a time.
#[case::counted_in_batches(
    pass(100, 4, 1, 1),
    300,
    75,
    "at step 75 of 300: 300 steps are 3 passes in batches of one process, and a pass \
    over the data moves it by 25. Make it 75 steps long for 3 passes"
)]
#[case::stopped_early(pass(100, 4, 1, 1), 300, 74, "")]
#[case::stopped_after_a_pass(pass(100, 4, 1, 1), 300, 25, "")]
#[case::reached(pass(100, 4, 1, 1), 75, 75, "")]
#[case::rounded(pass(102, 4, 1, 1), 306, 78, "306 steps are 3 passes in batches of one process")]
#[case::rounded_well(pass(102, 4, 1, 1), 75, 78, "")]
#[case::before_prepare(pass(50, 1, 2, 1), 300, 150, "300 steps are 3 passes in batches of all processes")]
#[case::before_prepare_with_a_short_round(
    pass(50, 1, 2, 1),
    297,
    150,
    "297 steps are 3 passes in batches of all processes"
)]
#[case::in_a_cured_way(
    pass(25, 4, 4, 4),
    300,
    84,
    "Make it 84 steps long for 3 passes, or set GradientAccumulationPlugin.adjust_scheduler"
)]
#[case::alone(pass(100, 1, 1, 1), 300, 100, "")]
#[case::not_moved(pass(100, 4, 1, 1), 300, 0, "")]
fn a_schedule_that_was_not_reached(
    #[case] pass: ScheduledPass,
    #[case] total: usize,
    #[case] moved: usize,
    #[case] wanted: &str,
) {
    let found = pass.check_moved(total, moved).map(|mismatch| mismatch.to_string()).unwrap_or_default();
    assert!(found.contains(wanted) && found.is_empty() == wanted.is_empty(), "{found}");
}

/// A cure that is named makes the length right.
#[test]
fn settings_are_named_where_they_help() {
    let unit = ", or build with SchedulerUnit::OptimizerStep, which counts optimizer steps";
    let plugin = ", or set GradientAccumulationPlugin.adjust_scheduler, which counts batches";
    let rows = [
        (pass(50, 1, 2, 2).check_length(150), "Make it 300 steps long for 3 passes", unit),
        (pass(25, 2, 4, 4).check_length(75), "Make it 156 steps long for 3 passes", ""),
        (by_batches(pass(50, 5, 2, 2)).check_length(30), "Make it 300 steps long for 3 passes", ""),
        (pass(100, 4, 1, 1).check_moved(100, 25), "Make it 25 steps long for 1 pass", plugin),
        (pass(25, 4, 4, 4).check_moved(300, 84), "Make it 84 steps long for 3 passes", plugin),
        (pass(50, 1, 2, 1).check_moved(300, 150), "Make it 150 steps long for 3 passes", ""),
        (pass(50, 4, 2, 1).check_moved(150, 39), "Make it 39 steps long for 3 passes", plugin),
    ];
    for (found, length, setting) in rows {
        let text = found.unwrap().to_string();
        assert!(text.ends_with(&format!("{length}{setting}")), "{text}");
    }
    assert_eq!(pass(50, 1, 2, 1).check_length(150), None);
    assert_eq!(by_batches(pass(100, 4, 1, 1)).check_moved(100, 100), None);
    assert_eq!(by_batches(pass(25, 4, 4, 4)).check_moved(300, 300), None);
    assert_eq!(by_batches(pass(50, 4, 2, 1)).check_moved(150, 150), None);
}

proptest! {
    /// Whoever counts as for one process is never told anything, however the division comes out.
    #[test]
    fn a_schedule_that_is_counted_as_documented_is_right(
        batches in 1_usize..500, steps in 1_usize..9, processes in 1_usize..9, passes in 1_usize..40, up in any::<bool>(), adjusts in any::<bool>()
    ) {
        let found = ScheduledPass { adjust_scheduler: adjusts, ..pass(batches.div_ceil(processes), steps, processes, processes) };
        let counted = match (adjusts, up) {
            (true, _) => batches,
            (false, true) => batches.div_ceil(steps),
            (false, false) => batches / steps,
        };
        let total = passes * counted;
        let moved = passes * found.ticks();
        prop_assert_eq!(found.check_length(total), None);
        prop_assert_eq!(found.check_end(total, moved.saturating_sub(total)), None);
        prop_assert_eq!(found.check_moved(total, moved), None);
    }
}
