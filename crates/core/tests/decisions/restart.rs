//! Whether a run starts again, and when.

use accelerate_core::environment::restart_count;
use accelerate_core::restart::{FailedAttempt, GiveUp, NextStep, next_step};
use rstest::rstest;
use std::time::Duration;

/// Attempts that lived for these seconds and failed by 1.
fn failed(lived: &[u64]) -> Vec<FailedAttempt> {
    lived.iter().map(|lived| FailedAttempt { lived: Duration::from_secs(*lived), exit_code: 1 }).collect()
}

#[rstest]
#[case::nothing_has_failed(&[], 0)]
#[case::at_once(&[1], 0)]
#[case::at_once_after_hours(&[9000], 0)]
#[case::soon(&[1, 1], 1)]
#[case::soon(&[1, 1, 1], 2)]
#[case::soon(&[0, 5, 59, 3], 4)]
#[case::soon(&[1; 5], 8)]
#[case::soon(&[1; 6], 16)]
#[case::no_longer_than_this(&[1; 7], 30)]
#[case::no_longer_than_this(&[0; 99], 30)]
#[case::long_life(&[1, 1, 1, 60], 0)]
#[case::soon_after_a_long_life(&[1, 1, 60, 1], 0)]
#[case::anew_after_a_long_life(&[1, 1, 1, 3600, 1, 1], 1)]
fn pauses_grow_where_attempts_die_soon(#[case] lived: &[u64], #[case] seconds: u64) {
    let after = Duration::from_secs(seconds);
    assert_eq!(next_step(&failed(lived), 100), NextStep::Restart { after });
}

#[rstest]
#[case(&[1], 0)]
#[case(&[1, 9000], 1)]
#[case(&[9000, 9000, 9000], 2)]
fn all_restarts_count(#[case] lived: &[u64], #[case] max_restarts: usize) {
    assert_eq!(next_step(&failed(lived), max_restarts), NextStep::GiveUp(GiveUp::NoneLeft));
    assert!(matches!(next_step(&failed(lived), max_restarts + 1), NextStep::Restart { .. }));
}

#[rstest]
#[case::wrong_arguments(2, Some(GiveUp::SameAgain { exit_code: 2 }))]
#[case::no_program(126, Some(GiveUp::SameAgain { exit_code: 126 }))]
#[case::no_program(127, Some(GiveUp::SameAgain { exit_code: 127 }))]
#[case::interrupted(130, Some(GiveUp::ByHand { exit_code: 130 }))]
#[case::quit(131, Some(GiveUp::ByHand { exit_code: 131 }))]
#[case::any(1, None)]
#[case::panic(101, None)]
#[case::abort(134, None)]
#[case::kill(137, None)]
#[case::segmentation_fault(139, None)]
#[case::asked_to_end(143, None)]
fn some_codes_are_the_same_the_next_time(#[case] exit_code: u8, #[case] why: Option<GiveUp>) {
    let attempts = [FailedAttempt { lived: Duration::from_secs(9000), exit_code }];
    let wanted = why.map_or(NextStep::Restart { after: Duration::ZERO }, NextStep::GiveUp);
    assert_eq!(next_step(&attempts, 3), wanted);
}

/// Whoever knows a better cause than "none left" shall say it.
#[test]
fn the_last_attempt_says_why_it_is_the_last() {
    let attempts = [failed(&[1, 1]), vec![FailedAttempt { lived: Duration::ZERO, exit_code: 127 }]].concat();
    assert_eq!(next_step(&attempts, 2), NextStep::GiveUp(GiveUp::SameAgain { exit_code: 127 }));
}

#[rstest]
#[case::nobody_says_so(None, None, None, Some(0))]
#[case::launcher(Some("2"), None, None, Some(2))]
#[case::queued_again(None, Some("3"), None, Some(3))]
#[case::pods(None, None, Some("4"), Some(4))]
#[case::all_of_them(Some("2"), Some("3"), Some("4"), Some(9))]
#[case::a_launch_in_pods_that_were_started_again(Some("0"), None, Some("1"), Some(1))]
#[case::first_attempt_of_a_job_that_was_queued_again(Some("0"), Some("1"), None, Some(1))]
#[case::empty(Some(""), Some(" "), Some(""), Some(0))]
#[case::as_many_as_can_be(Some("18446744073709551615"), Some("1"), Some("1"), Some(usize::MAX))]
#[case::no_number(Some("two"), None, None, None)]
#[case::no_number(None, Some("-1"), None, None)]
#[case::no_number(None, None, Some("x"), None)]
fn restarts_of_launchers_and_of_clusters_are_one_number(
    #[case] launcher: Option<&str>,
    #[case] slurm: Option<&str>,
    #[case] job_set: Option<&str>,
    #[case] wanted: Option<usize>,
) {
    let lookup = |name: &str| match name {
        "TORCHELASTIC_RESTART_COUNT" => launcher.map(str::to_owned),
        "SLURM_RESTART_COUNT" => slurm.map(str::to_owned),
        "JOBSET_RESTART_ATTEMPT" => job_set.map(str::to_owned),
        _ => None,
    };
    match (restart_count(&lookup), wanted) {
        (Ok(count), Some(wanted)) => assert_eq!(count, wanted),
        (Err(error), None) => assert!(error.is_environment() && error.to_string().contains("_RESTART_"), "{error}"),
        other => panic!("{other:?}"),
    }
}
