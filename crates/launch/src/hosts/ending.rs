//! Deciding what a run on several machines came to, from what each machine said.

use std::time::{Duration, Instant};

use accelerate_core::status::RankSummary;
use signal_hook::consts as names;

use super::message::{AgentEnd, Problem};
use super::words;
use crate::error::{Error, Result, exit_code_of_signal};
use crate::failure::{Ended, Failure, OtherRank, StopTrouble};
use crate::supervise::{CRASH_WINDOW, RankOutcome};

/// One machine of a run that is over.
#[derive(Debug)]
pub(super) struct MachineEnd {
    pub(super) machine: String,
    pub(super) ranks: std::ops::Range<usize>,
    pub(super) end: End,
    /// When something was first known to have gone wrong there.
    pub(super) failed_at: Option<Instant>,
}

/// How it ended there.
#[derive(Debug)]
pub(super) enum End {
    Told(AgentEnd),
    /// The connection ended before the agent had told.
    Broken(Problem),
}

impl End {
    /// By one that has not said what its ranks were doing.
    pub(super) fn stopped() -> Self {
        Self::Told(AgentEnd::stopped())
    }
}

impl MachineEnd {
    fn has_failed(&self) -> bool {
        !matches!(self.end, End::Told(AgentEnd::Succeeded(_) | AgentEnd::Stopped { .. }))
    }

    /// What its ranks were doing when something had gone wrong.
    fn activities(&self) -> &[RankSummary] {
        match &self.end {
            End::Told(AgentEnd::Failed(failure)) => &failure.activities,
            End::Told(AgentEnd::Stopped { activities, .. }) => activities,
            End::Told(AgentEnd::Succeeded(_) | AgentEnd::Problem(_)) | End::Broken(_) => &[],
        }
    }

    /// Has its first rank ended by this signal, or with the code that shells report for it?
    fn has_failed_by(&self, signal: i32) -> bool {
        match &self.end {
            End::Told(AgentEnd::Failed(failure)) => failure.ended.exit_code() == exit_code_of_signal(signal),
            End::Told(_) | End::Broken(_) => false,
        }
    }

    /// How its ranks ended that were told to stop, where that is worth a word.
    fn troubles(&self, signal: i32) -> Vec<StopTrouble> {
        match &self.end {
            End::Told(AgentEnd::Stopped { troubles, .. }) => troubles.clone(),
            End::Told(AgentEnd::Failed(_)) => {
                others(self).iter().filter_map(|other| StopTrouble::of_other(other, signal)).collect()
            }
            End::Told(AgentEnd::Succeeded(_) | AgentEnd::Problem(_)) | End::Broken(_) => Vec::new(),
        }
    }

    /// Not by losing another machine.
    fn has_crashed(&self) -> bool {
        let faults = [names::SIGSEGV, names::SIGBUS, names::SIGILL, names::SIGFPE, names::SIGSYS, names::SIGKILL];
        match &self.end {
            End::Broken(_) => true,
            End::Told(AgentEnd::Failed(failure)) => {
                matches!(failure.ended, Ended::Signalled { signal, .. } if faults.contains(&signal))
            }
            End::Told(_) => false,
        }
    }
}

/// All ranks in order, or the error of the run. `stopped_by` is the signal that told the launcher to stop, and when; `grace_period`
/// is what ranks had then.
pub(super) fn outcome(
    ends: Vec<MachineEnd>,
    stopped_by: Option<(i32, Instant)>,
    grace_period: Duration,
) -> Result<Vec<RankOutcome>> {
    // What fails after a signal to stop has stopped. Whoever sends it may tell ranks as well, some of which end before.
    let is_in_time = |end: &MachineEnd| match (stopped_by, end.failed_at) {
        (Some((signal, _)), _) if end.has_failed_by(signal) => false,
        (Some((_, stopped_at)), Some(failed_at)) => failed_at < stopped_at,
        (stopped, _) => stopped.is_none(),
    };
    match (cause(&ends, is_in_time), stopped_by) {
        (Some(cause), _) => Err(error(ends, cause, stopped_by.map(|(signal, _)| signal))),
        (None, Some((signal, _))) => {
            let troubles = ends.iter().flat_map(|end| end.troubles(signal)).collect();
            let unconfirmed = ends.into_iter().filter(|end| matches!(end.end, End::Broken(_)));
            let error = Error::interrupted_on(signal, unconfirmed.map(|end| end.machine).collect());
            Err(error.with_troubles(troubles, grace_period))
        }
        (None, None) => {
            let ranks = ends.into_iter().map(|end| match end.end {
                End::Told(AgentEnd::Succeeded(ranks)) => Ok(ranks),
                _ => Err(Error::on_machine(end.machine, words::stopped_there())),
            });
            ranks.collect::<Result<Vec<_>>>().map(|ranks| ranks.into_iter().flatten().collect())
        }
    }
}

/// The machine that failed first. One whose ranks exited may have lost another that crashed or vanished at the same time.
fn cause(ends: &[MachineEnd], is_in_time: impl Fn(&MachineEnd) -> bool) -> Option<usize> {
    let failed = || ends.iter().enumerate().filter(|(_, end)| end.has_failed() && is_in_time(end));
    let (first, end) = failed().min_by_key(|(_, end)| end.failed_at)?;
    let is_soon = |other: &MachineEnd| {
        let between = other.failed_at.zip(end.failed_at).map(|(other, first)| other.saturating_duration_since(first));
        between.unwrap_or(Duration::MAX) < CRASH_WINDOW
    };
    let crashed = || failed().find(|(_, other)| other.has_crashed() && is_soon(other)).map(|(index, _)| index);
    Some(if end.has_crashed() { first } else { crashed().unwrap_or(first) })
}

fn error(mut ends: Vec<MachineEnd>, cause: usize, stopped_by: Option<i32>) -> Error {
    let mut activities: Vec<_> = ends.iter().flat_map(MachineEnd::activities).cloned().collect();
    activities.sort_by_key(|doing| doing.rank);
    let MachineEnd { machine, end, .. } = ends.remove(cause);
    match end {
        End::Told(AgentEnd::Failed(failure)) => {
            let mut failure = Failure { machine: Some(machine), activities, ..*failure };
            failure.others.extend(ends.iter().flat_map(others));
            failure.others.sort_by_key(|other| other.rank);
            Error::child_failed(failure, stopped_by)
        }
        End::Told(AgentEnd::Problem(problem)) | End::Broken(problem) => {
            Error::on_machine(machine, problem).with_activities(activities)
        }
        End::Told(AgentEnd::Succeeded(_) | AgentEnd::Stopped { .. }) => {
            Error::interrupted(stopped_by.unwrap_or(names::SIGTERM))
        }
    }
}

/// What became of the ranks of a machine that did not fail first.
fn others(end: &MachineEnd) -> Vec<OtherRank> {
    let other = |rank, ended, was_told_to| OtherRank { rank, ended, was_told_to };
    match &end.end {
        End::Told(AgentEnd::Succeeded(ranks)) => ranks.iter().map(|rank| other(rank.rank, rank.ended, false)).collect(),
        End::Told(AgentEnd::Failed(failure)) => {
            let first = other(failure.rank, failure.ended, false);
            failure.others.iter().copied().chain([first]).collect()
        }
        End::Told(AgentEnd::Stopped { had_ended, .. }) => {
            let told = Ended::Signalled { signal: names::SIGTERM, core_dumped: false };
            let ranks = end.ranks.clone().map(|rank| match had_ended.contains(&rank) {
                true => other(rank, Ended::Exited(0), false),
                false => other(rank, told, true),
            });
            ranks.collect()
        }
        // Nothing is known of them.
        End::Told(AgentEnd::Problem(_)) | End::Broken(_) => Vec::new(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::failure::MemoryPressure;
    use accelerate_core::status::RankActivity;
    use rstest::rstest;

    fn computing(rank: usize) -> RankSummary {
        RankSummary { rank, activity: RankActivity::Computing { after: None }, is_stopped: false }
    }

    fn stopped(activities: Vec<RankSummary>, troubles: Vec<StopTrouble>) -> AgentEnd {
        AgentEnd::Stopped { activities, had_ended: Vec::new(), troubles }
    }

    /// `0` succeeded, `exit N`, `signal N`, `stopped`, `broken`; with the time in milliseconds at which it was known.
    fn ends(texts: &[(&str, u64)]) -> Vec<MachineEnd> {
        let start = Instant::now();
        let failure = |rank, ended| {
            let last_lines = Vec::new();
            let (process_id, elapsed, memory) = (7, Duration::from_secs(1), MemoryPressure::Unknown);
            let (machine, address_problem) = (None, None);
            let (activities, others) = (vec![computing(rank)], Vec::new());
            Failure {
                machine,
                rank,
                process_id,
                ended,
                elapsed,
                last_lines,
                memory,
                address_problem,
                activities,
                others,
            }
        };
        let machines = texts.iter().enumerate().map(|(rank, (text, at))| {
            let end = match text.split_once(' ') {
                Some(("exit", code)) => {
                    End::Told(AgentEnd::Failed(Box::new(failure(rank, Ended::Exited(code.parse().unwrap())))))
                }
                Some(("signal", signal)) => {
                    let ended = Ended::Signalled { signal: signal.parse().unwrap(), core_dumped: false };
                    End::Told(AgentEnd::Failed(Box::new(failure(rank, ended))))
                }
                _ if *text == "stopped" => End::Told(stopped(vec![computing(rank)], Vec::new())),
                _ if *text == "broken" => End::Broken(Problem { text: "the line is dead".to_owned(), exit_code: 1 }),
                _ => {
                    let (process_id, ended, elapsed) = (7, Ended::Exited(0), Duration::from_secs(1));
                    End::Told(AgentEnd::Succeeded(vec![RankOutcome { rank, process_id, ended, elapsed }]))
                }
            };
            let failed_at = (*at > 0).then(|| start + Duration::from_millis(*at));
            MachineEnd { machine: format!("node{rank}"), ranks: rank..rank + 1, end, failed_at }
        });
        machines.collect()
    }

    #[test]
    fn ranks_of_all_machines_are_one_outcome() {
        let ranks = outcome(ends(&[("0", 0), ("0", 0)]), None, Duration::ZERO).unwrap();
        assert_eq!(ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1]);
    }

    #[rstest]
    #[case::the_only_one(&[("stopped", 0), ("exit 3", 5)], "rank 1 on node1 (process 7) exited with code 3")]
    #[case::the_first(&[("exit 4", 900), ("exit 3", 5)], "rank 1 on node1")]
    #[case::a_crash_just_after_is_its_cause(&[("exit 1", 5), ("signal 11", 100)], "rank 1 on node1 (process 7) was ended by SIGSEGV")]
    #[case::a_crash_later_is_not(&[("exit 1", 5), ("signal 11", 500)], "rank 0 on node0")]
    #[case::an_abort_is_no_crash(&[("exit 1", 5), ("signal 6", 100)], "rank 0 on node0")]
    #[case::a_machine_that_vanishes(&[("exit 1", 5), ("broken", 100)], "node1: the line is dead")]
    #[case::another_that_vanishes_later(&[("exit 1", 5), ("broken", 800)], "rank 0 on node0")]
    fn the_machine_that_failed_first_is_named(#[case] texts: &[(&str, u64)], #[case] words: &str) {
        let error = outcome(ends(texts), None, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn machines_that_have_stopped_without_a_reason_are_no_success() {
        let error = outcome(ends(&[("0", 0), ("stopped", 0)]), None, Duration::ZERO).unwrap_err();
        assert!(error.to_string().starts_with("node1: ") && error.exit_code() != 0, "{error}");
    }

    #[test]
    fn ranks_of_other_machines_belong_to_the_story() {
        let error = outcome(ends(&[("stopped", 0), ("exit 3", 5), ("0", 0), ("exit 1", 90)]), None, Duration::ZERO)
            .unwrap_err();
        let text = error.failure().unwrap().to_string();
        for words in
            ["rank 3 exited with code 1 on its own too", "rank 2 had ended before", "rank 0 was running and has been"]
        {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(error.exit_code(), 3);
    }

    /// Its agent was told to end while the others of its ranks were running.
    #[test]
    fn a_rank_that_had_ended_before_its_machine_was_stopped_was_not_running() {
        let mut ends = ends(&[("exit 3", 5), ("stopped", 0)]);
        ends[1].ranks = 1..4;
        ends[1].end = End::Told(AgentEnd::Stopped { activities: Vec::new(), had_ended: vec![2], troubles: Vec::new() });
        let text = outcome(ends, None, Duration::ZERO).unwrap_err().failure().unwrap().to_string();
        for words in ["rank 2 had ended before, with code 0", "ranks 1, 3 were running and have been ended"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[rstest]
    #[case::of_a_rank(&[("exit 1", 90), ("0", 0), ("stopped", 0), ("exit 3", 5)], "ranks 0, 2-3 were computing")]
    #[case::of_a_machine(&[("stopped", 0), ("broken", 5), ("exit 1", 90)], "ranks 0, 2 were computing")]
    fn the_story_has_what_the_ranks_of_all_machines_were_doing(#[case] texts: &[(&str, u64)], #[case] words: &str) {
        let story = outcome(ends(texts), None, Duration::ZERO).unwrap_err().story();
        assert!(story.contains(&format!("\n  {words} and had made no call to other ranks")), "{story}");
    }

    /// One machine has killed a rank, and a rank of another has failed after the signal.
    #[test]
    fn what_went_wrong_during_a_stop_is_told() {
        let mut ends = ends(&[("stopped", 0), ("exit 3", 5)]);
        let killed = Ended::Signalled { signal: 9, core_dumped: false };
        let troubles = vec![StopTrouble { rank: 0, ended: killed, was_killed: true }];
        ends[0].end = End::Told(stopped(Vec::new(), troubles));
        let stopped_at = ends[1].failed_at.unwrap() - Duration::from_millis(1);
        let story = outcome(ends, Some((15, stopped_at)), Duration::from_secs(2)).unwrap_err().story();
        let wanted = "stopped by SIGTERM\n  rank 0 did not end within 2 s and was killed; raise --shutdown_grace_period if that is too \
             short\n  told to stop, rank 1 exited with code 3";
        assert_eq!(story, wanted);
    }

    #[rstest]
    #[case::stopped(&[("stopped", 0), ("stopped", 0)], 10, 143)]
    #[case::what_breaks_later_has_stopped(&[("stopped", 0), ("broken", 50)], 10, 143)]
    #[case::a_rank_that_was_told_as_well(&[("stopped", 0), ("signal 15", 5)], 10, 143)]
    #[case::a_rank_that_was_told_something_else(&[("stopped", 0), ("signal 1", 5)], 10, 129)]
    #[case::what_failed_before_has_failed(&[("stopped", 0), ("exit 3", 5)], 10, 3)]
    fn a_signal_to_stop_is_told_from_a_failure(#[case] texts: &[(&str, u64)], #[case] at: u64, #[case] code: u8) {
        let ends = ends(texts);
        // The same clock that the ends were made with, up to the moment between.
        let is_unconfirmed = texts.iter().any(|(text, _)| *text == "broken");
        let start = ends.iter().zip(texts).find_map(|(end, (_, at))| Some(end.failed_at? - Duration::from_millis(*at)));
        let stopped_at = start.unwrap_or_else(Instant::now) + Duration::from_millis(at);
        let error = outcome(ends, Some((15, stopped_at)), Duration::ZERO).unwrap_err();
        assert_eq!((error.exit_code(), error.is_interrupted()), (code, code == 143));
        let words = "SIGTERM; node1 did not confirm the end of its ranks";
        assert_eq!(error.to_string().contains(words), is_unconfirmed, "{error}");
    }
}
