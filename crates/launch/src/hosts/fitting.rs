//! Deciding whether a message can be true: an agent that is broken, or a program that only looks like one, decides nothing of a
//! run.

use std::ops::Range;

use accelerate_core::status::{CallName, PAGE_BYTES, RankActivity, RankSummary};

use super::message::{AgentEnd, FromAgent, Prepared};
use crate::report::Source;

/// What a machine may speak of now.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub(super) ranks: Range<usize>,
    /// Machine 0, which chooses the port.
    pub(super) is_first: bool,
    pub(super) is_asked: Asked,
    /// It has told of a rank that failed.
    pub(super) has_failed: bool,
    /// Its end has been told already.
    pub(super) has_ended: bool,
}

/// What the agent was told last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Nothing,
    ToPrepare,
    ToReach,
    ToReachBack,
    ToStart,
}

/// What is wrong with a message, if something is.
pub(super) fn misfit(message: &FromAgent, stage: &Stage) -> Option<String> {
    if stage.has_ended {
        return Some("a message after its end".to_owned());
    }
    let is_own = |rank: usize| stage.ranks.contains(&rank);
    let has_started = stage.is_asked == Asked::ToStart;
    let unasked = |what: &str| Some(format!("{what}, for which it was not asked"));
    match message {
        FromAgent::Beat | FromAgent::Notice { .. } => None,
        FromAgent::Prepared(_) if stage.is_asked != Asked::ToPrepare => unasked("what it has found on its machine"),
        FromAgent::Prepared(prepared) => misfit_of_prepared(prepared, stage.is_first),
        FromAgent::Reached { .. } if stage.is_asked != Asked::ToReach => unasked("whether it reaches the main process"),
        FromAgent::Reached { problem, .. } => {
            problem.as_ref().filter(|problem| problem.exit_code == 0).map(|_| SUCCESSFUL_PROBLEM.to_owned())
        }
        FromAgent::ReachedBack { .. } if stage.is_asked != Asked::ToReachBack => unasked("whether it reaches others"),
        FromAgent::ReachedBack { .. } => None,
        _ if !has_started => Some("news of ranks that have not started".to_owned()),
        FromAgent::Output { source, .. } | FromAgent::Closed { source } => misfit_of_source(source, &stage.ranks),
        FromAgent::Survivors { survivors } => {
            survivors.is_empty().then(|| "news of processes that live on, and none of them".to_owned())
        }
        FromAgent::RankFailed { rank, ended, .. } => match (is_own(*rank), ended.is_success()) {
            (false, _) => Some(foreign(*rank)),
            (true, true) => Some("a rank that has failed with code 0".to_owned()),
            (true, false) => None,
        },
        FromAgent::Ended(AgentEnd::Succeeded(_) | AgentEnd::Stopped { .. }) if stage.has_failed => {
            Some("an end without a failure after one".to_owned())
        }
        FromAgent::Ended(AgentEnd::Succeeded(ranks)) => {
            let are_all = ranks.iter().map(|rank| rank.rank).eq(stage.ranks.clone());
            let are_good = ranks.iter().all(|rank| rank.ended.is_success());
            (!are_all || !are_good).then(|| "a good end, which is not that of all its ranks".to_owned())
        }
        FromAgent::Ended(AgentEnd::Failed(failure)) => {
            let others = failure.others.iter().map(|other| other.rank);
            let foreigner = others.chain([failure.rank]).find(|rank| !is_own(*rank));
            let is_success = failure.ended.is_success();
            let well = || is_success.then(|| "a rank that has failed with code 0".to_owned());
            let is_long = || {
                let is_long = failure.others.len() > stage.ranks.len() || failure.last_lines.len() > MOST_LAST_LINES;
                is_long.then(|| "an endless story of a failure".to_owned())
            };
            foreigner
                .map(foreign)
                .or_else(well)
                .or_else(is_long)
                .or_else(|| misfit_of_activities(&failure.activities, &stage.ranks))
        }
        FromAgent::Ended(AgentEnd::Problem(problem)) => (problem.exit_code == 0).then(|| SUCCESSFUL_PROBLEM.to_owned()),
        FromAgent::Ended(AgentEnd::Stopped { activities, had_ended, troubles }) => {
            let named = troubles.iter().map(|trouble| trouble.rank).chain(had_ended.iter().copied());
            let longest = troubles.len().max(had_ended.len());
            misfit_of_stop(named, longest, &stage.ranks).or_else(|| misfit_of_activities(activities, &stage.ranks))
        }
    }
}

/// Many more than launchers keep.
const MOST_LAST_LINES: usize = 1000;
const SUCCESSFUL_PROBLEM: &str = "a problem with exit code 0";

fn misfit_of_prepared(prepared: &Prepared, is_first: bool) -> Option<String> {
    let has_problems = !prepared.problems.is_empty();
    match prepared.port {
        _ if prepared.problems.iter().any(|problem| problem.exit_code == 0) => Some(SUCCESSFUL_PROBLEM.to_owned()),
        _ if !prepared.versions.are_plausible() => Some("versions that no program and no libtorch has".to_owned()),
        Some(_) if !is_first => Some("a port, which only the first machine chooses".to_owned()),
        None | Some(0) if is_first && !has_problems => Some("no port for the main process".to_owned()),
        _ => None,
    }
}

/// The ranks that are named with a stop, in lists of which the longest is so long.
fn misfit_of_stop(mut named: impl Iterator<Item = usize>, longest: usize, ranks: &Range<usize>) -> Option<String> {
    let foreigner = named.find(|rank| !ranks.contains(rank));
    let is_long = || (longest > ranks.len()).then(|| "an endless story of a stop".to_owned());
    foreigner.map(foreign).or_else(is_long)
}

/// What ranks were doing, which is shown on every screen.
fn misfit_of_activities(activities: &[RankSummary], ranks: &Range<usize>) -> Option<String> {
    let foreigner = activities.iter().map(|doing| doing.rank).find(|rank| !ranks.contains(rank));
    let repeated = || {
        let mut pairs = activities.iter().zip(activities.iter().skip(1));
        let found = pairs.find(|(one, next)| one.rank >= next.rank);
        found.map(|(_, next)| {
            format!("news of rank {}, of which it had spoken, or behind those of later ranks", next.rank)
        })
    };
    let num_bytes = |call: &CallName| call.op.len() + call.site.as_ref().map_or(0, String::len);
    let longest = activities.iter().filter_map(|doing| match &doing.activity {
        RankActivity::InCall { call, .. } | RankActivity::Computing { after: Some((call, _)) } => Some(num_bytes(call)),
        RankActivity::Unknown | RankActivity::Computing { after: None } => None,
    });
    // Ranks tell of a call in less than a page.
    let is_long = || {
        longest.max().is_some_and(|num_bytes| num_bytes > PAGE_BYTES).then(|| "a call with an endless name".to_owned())
    };
    foreigner.map(foreign).or_else(repeated).or_else(is_long)
}

/// The rank of some output.
pub(super) fn misfit_of_source(source: &Source, ranks: &Range<usize>) -> Option<String> {
    let is_own = ranks.contains(&source.rank) && source.rank.checked_sub(ranks.start) == Some(source.local_rank);
    (!is_own).then(|| foreign(source.rank))
}

fn foreign(rank: usize) -> String {
    format!("news of rank {rank}, which is not one of its own")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{Ended, Failure, MemoryPressure, OtherRank};
    use crate::hosts::message::Problem;
    use crate::hosts::versions::Versions;
    use crate::report::Stream;
    use crate::supervise::RankOutcome;
    use Asked::{Nothing, ToPrepare, ToReach, ToStart};
    use rstest::rstest;
    use std::time::Duration;

    fn prepared(port: Option<u16>, exit_codes: &[u8]) -> FromAgent {
        let problem = |exit_code: &u8| Problem { text: "x".to_owned(), exit_code: *exit_code };
        FromAgent::Prepared(Prepared {
            port,
            problems: exit_codes.iter().map(problem).collect(),
            ..Prepared::default()
        })
    }

    /// With what it says of its libtorch.
    fn prepared_with(version: &str) -> FromAgent {
        let versions = Versions { program: None, libtorch: Some(version.to_owned()) };
        FromAgent::Prepared(Prepared { versions, ..Prepared::default() })
    }

    fn reached(exit_code: Option<u8>) -> FromAgent {
        let problem = exit_code.map(|exit_code| Problem { text: "x".to_owned(), exit_code });
        FromAgent::Reached { problem, shares_folder: None, misses_first: None, meets_at: None }
    }

    fn output(rank: usize, local_rank: usize) -> FromAgent {
        FromAgent::Output { source: Source { rank, local_rank, stream: Stream::Stdout }, num_bytes: 1 }
    }

    fn failed(rank: usize, code: i32) -> FromAgent {
        FromAgent::RankFailed { rank, ended: Ended::Exited(code), num_others: 0 }
    }

    fn succeeded(ranks: &[(usize, i32)]) -> FromAgent {
        let elapsed = Duration::from_secs(1);
        let outcome = |(rank, code): &(usize, i32)| RankOutcome {
            rank: *rank,
            process_id: 7,
            ended: Ended::Exited(*code),
            elapsed,
        };
        FromAgent::Ended(AgentEnd::Succeeded(ranks.iter().map(outcome).collect()))
    }

    fn failure(rank: usize, code: i32, other: usize) -> FromAgent {
        failure_doing(rank, code, other, rank)
    }

    /// In a call of this name.
    fn doing(rank: usize, op: &str) -> RankSummary {
        let call = CallName { op: op.to_owned(), sequence: 1, site: None };
        RankSummary {
            rank,
            activity: RankActivity::InCall { call, elapsed: Duration::from_secs(1) },
            is_stopped: false,
        }
    }

    fn stopped(activities: Vec<RankSummary>) -> FromAgent {
        stopped_after(activities, Vec::new())
    }

    /// After these ranks had ended.
    fn stopped_after(activities: Vec<RankSummary>, had_ended: Vec<usize>) -> FromAgent {
        FromAgent::Ended(AgentEnd::Stopped { activities, had_ended, troubles: Vec::new() })
    }

    /// With what rank `doing` was doing.
    fn failure_doing(rank: usize, code: i32, other: usize, doing: usize) -> FromAgent {
        FromAgent::Ended(AgentEnd::Failed(Box::new(Failure {
            machine: None,
            rank,
            process_id: 7,
            ended: Ended::Exited(code),
            elapsed: Duration::from_secs(1),
            last_lines: Vec::new(),
            memory: MemoryPressure::Unknown,
            address_problem: None,
            activities: vec![RankSummary { rank: doing, activity: RankActivity::Unknown, is_stopped: false }],
            others: vec![OtherRank { rank: other, ended: Ended::Exited(1), was_told_to: true }],
        })))
    }

    fn problem(exit_code: u8) -> FromAgent {
        FromAgent::Ended(AgentEnd::Problem(Problem { text: "x".to_owned(), exit_code }))
    }

    /// Of the second machine, which has ranks 2 and 3.
    #[rstest]
    #[case::beat(FromAgent::Beat, Nothing, None)]
    #[case::prepared(prepared(None, &[]), ToPrepare, None)]
    #[case::prepared_with_problem(prepared(None, &[127]), ToPrepare, None)]
    #[case::prepared_unasked(prepared(None, &[]), Nothing, Some("not asked"))]
    #[case::prepared_twice(prepared(None, &[]), ToReach, Some("not asked"))]
    #[case::problem_of_success(prepared(None, &[1, 0]), ToPrepare, Some("exit code 0"))]
    #[case::port_of_another(prepared(Some(1), &[]), ToPrepare, Some("only the first machine"))]
    #[case::prepared_with_a_version(prepared_with("2.11.0"), ToPrepare, None)]
    #[case::prepared_with_a_poem(prepared_with("2.11.0\nand more"), ToPrepare, Some("no libtorch has"))]
    #[case::reached(reached(None), ToReach, None)]
    #[case::not_reached(reached(Some(1)), ToReach, None)]
    #[case::reached_unasked(reached(None), ToPrepare, Some("not asked"))]
    #[case::reached_late(reached(None), ToStart, Some("not asked"))]
    #[case::reached_with_success(reached(Some(0)), ToReach, Some("exit code 0"))]
    #[case::reached_back(FromAgent::ReachedBack { problems: vec![None] }, Asked::ToReachBack, None)]
    #[case::reached_back_unasked(FromAgent::ReachedBack { problems: vec![] }, ToReach, Some("not asked"))]
    #[case::output(output(3, 1), ToStart, None)]
    #[case::early_output(output(3, 1), ToReach, Some("not started"))]
    #[case::output_of_others(output(1, 1), ToStart, Some("rank 1, which is not one of its own"))]
    #[case::output_of_another_place(output(3, 0), ToStart, Some("rank 3"))]
    #[case::failed(failed(2, 3), ToStart, None)]
    #[case::failed_well(failed(2, 0), ToStart, Some("code 0"))]
    #[case::failed_elsewhere(failed(4, 3), ToStart, Some("rank 4"))]
    #[case::good_end(succeeded(&[(2, 0), (3, 0)]), ToStart, None)]
    #[case::early_end(succeeded(&[(2, 0), (3, 0)]), ToPrepare, Some("not started"))]
    #[case::end_of_one(succeeded(&[(2, 0)]), ToStart, Some("not that of all its ranks"))]
    #[case::end_of_others(succeeded(&[(0, 0), (1, 0)]), ToStart, Some("not that of all its ranks"))]
    #[case::end_that_is_not_good(succeeded(&[(2, 0), (3, 1)]), ToStart, Some("not that of all its ranks"))]
    #[case::failure(failure(2, 3, 3), ToStart, None)]
    #[case::failure_of_success(failure(2, 0, 3), ToStart, Some("code 0"))]
    #[case::failure_elsewhere(failure(0, 3, 3), ToStart, Some("rank 0"))]
    #[case::failure_with_others(failure(2, 3, 9), ToStart, Some("rank 9"))]
    #[case::failure_with_doings_of_others(failure_doing(2, 3, 3, 9), ToStart, Some("rank 9"))]
    #[case::problem(problem(2), ToStart, None)]
    #[case::problem_with_success(problem(0), ToStart, Some("exit code 0"))]
    #[case::early_problem(problem(2), ToReach, Some("not started"))]
    #[case::stopped_before(stopped(vec![]), ToPrepare, Some("not started"))]
    #[case::stopped(stopped(vec![doing(2, "barrier"), doing(3, "barrier")]), ToStart, None)]
    #[case::stopped_after_one_had_ended(stopped_after(vec![], vec![3]), ToStart, None)]
    #[case::stopped_after_one_of_others(stopped_after(vec![], vec![4]), ToStart, Some("rank 4"))]
    #[case::stopped_after_more_than_there_are(stopped_after(vec![], vec![2, 3, 2]), ToStart, Some("endless"))]
    #[case::stopped_with_doings_of_others(stopped(vec![doing(2, "barrier"), doing(4, "barrier")]), ToStart, Some("rank 4"))]
    #[case::stopped_with_doings_twice(stopped(vec![doing(2, "barrier"), doing(2, "barrier")]), ToStart, Some("rank 2"))]
    #[case::stopped_with_doings_in_disorder(stopped(vec![doing(3, "barrier"), doing(2, "barrier")]), ToStart, Some("rank 2"))]
    #[case::stopped_with_a_long_story(stopped(vec![doing(3, &"x".repeat(5000))]), ToStart, Some("an endless name"))]
    fn what_cannot_be_true_is_found(#[case] message: FromAgent, #[case] is_asked: Asked, #[case] words: Option<&str>) {
        let stage = Stage { ranks: 2..4, is_first: false, is_asked, has_failed: false, has_ended: false };
        let found = misfit(&message, &stage);
        assert_eq!(found.is_some(), words.is_some(), "{found:?}");
        assert!(found.unwrap_or_default().contains(words.unwrap_or_default()));
        assert!(misfit(&message, &Stage { has_ended: true, ..stage }).is_some());
    }

    #[rstest]
    #[case::good_end(succeeded(&[(2, 0), (3, 0)]), true)]
    #[case::stopped(stopped(vec![]), true)]
    #[case::failure(failure(2, 3, 3), false)]
    #[case::problem(problem(2), false)]
    fn a_failure_is_not_taken_back(#[case] end: FromAgent, #[case] is_untrue: bool) {
        let stage = Stage { ranks: 2..4, is_first: false, is_asked: ToStart, has_failed: true, has_ended: false };
        assert_eq!(misfit(&end, &stage).is_some(), is_untrue);
    }

    #[test]
    fn the_first_machine_names_the_port() {
        let stage = Stage { ranks: 0..2, is_first: true, is_asked: ToPrepare, has_failed: false, has_ended: false };
        let found = [Some(29_500), None, Some(0)].map(|port| misfit(&prepared(port, &[]), &stage).is_some());
        assert_eq!(found, [false, true, true]);
        assert_eq!(misfit(&prepared(None, &[1]), &stage), None);
    }
}
