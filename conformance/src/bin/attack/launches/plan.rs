//! What is done to a run, to whom, and when: all of it drawn from one number.

use std::time::Duration;

use clap::ValueEnum;

use super::network::{Fault, Rate};
use crate::attempt::numbers;

/// What can be done to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    KillRank,
    StopRank,
    TerminateRank,
    KillLauncher,
    StopLauncher,
    TerminateLauncher,
    KillMachine,
    StopMachine,
    TerminateMachine,
    KillAgent,
    StopAgent,
    TerminateAgent,
    KillLogin,
    CutLink,
    InterruptLink,
    SlowLink,
    SlowLinkThroughout,
    ChokeLink,
    LoseMachine,
    Strangers,
}

impl Kind {
    pub(super) const ALL: [Self; 20] = [
        Self::KillRank,
        Self::StopRank,
        Self::TerminateRank,
        Self::KillLauncher,
        Self::StopLauncher,
        Self::TerminateLauncher,
        Self::KillMachine,
        Self::StopMachine,
        Self::TerminateMachine,
        Self::KillAgent,
        Self::StopAgent,
        Self::TerminateAgent,
        Self::KillLogin,
        Self::CutLink,
        Self::InterruptLink,
        Self::SlowLink,
        Self::SlowLinkThroughout,
        Self::ChokeLink,
        Self::LoseMachine,
        Self::Strangers,
    ];
    /// What can be done to a run on one machine.
    const ON_ONE_MACHINE: usize = 7;

    pub(super) fn shown(self) -> &'static str {
        match self {
            Self::KillRank => "SIGKILL to a rank",
            Self::StopRank => "SIGSTOP to a rank",
            Self::TerminateRank => "SIGTERM to a rank",
            Self::KillLauncher => "SIGKILL to the launcher",
            Self::StopLauncher => "SIGSTOP to the launcher",
            Self::TerminateLauncher => "SIGTERM to the launcher",
            Self::KillMachine => "SIGKILL to all of a machine",
            Self::StopMachine => "SIGSTOP to all of a machine",
            Self::TerminateMachine => "SIGTERM to all of a machine",
            Self::KillAgent => "SIGKILL to an agent",
            Self::StopAgent => "SIGSTOP to an agent",
            Self::TerminateAgent => "SIGTERM to an agent",
            Self::KillLogin => "SIGKILL to a login",
            Self::CutLink => "a link is cut",
            Self::InterruptLink => "a link is away for a moment",
            Self::SlowLink => "a link is slow for a moment",
            Self::SlowLinkThroughout => "a link is slow throughout",
            Self::ChokeLink => "a link is too slow",
            Self::LoseMachine => "a machine is lost for good",
            Self::Strangers => "strangers connect",
        }
    }

    /// Is it there before the run begins?
    pub(super) fn precedes_the_run(self) -> bool {
        matches!(self, Self::SlowLinkThroughout | Self::Strangers)
    }

    fn takes_slow_links(self) -> bool {
        matches!(self, Self::SlowLink | Self::SlowLinkThroughout | Self::ChokeLink)
    }

    /// Takes it several machines?
    pub(super) fn is_on_machines_only(self) -> bool {
        Self::ALL[Self::ON_ONE_MACHINE..].contains(&self)
    }
}

/// Where trials can take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// Namespaces can be made.
    pub(super) has_machines: bool,
    /// Links between them can be made slow.
    pub(super) has_slow_links: bool,
}

/// One trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    /// Ranks of each machine; of one machine that is started on directly, one number.
    pub(super) ranks: Vec<usize>,
    pub(super) rank: usize,
    pub(super) machine: usize,
    pub(super) step: u64,
    /// Between the step and the event.
    pub(super) after: Duration,
    /// Ranks save and leave together when one of them is asked to end.
    pub(super) asks: bool,
    pub(super) fault: Fault,
    /// How long a link is away or slow.
    pub(super) time: Duration,
    /// Of a slow link.
    pub(super) rate: Rate,
    /// What was stopped goes on only after the run has come to its end.
    pub(super) thaws_late: bool,
}

impl Plan {
    /// All of it but the kind, if that is given.
    pub(super) fn draw(seed: u64, places: Places, given: Option<Kind>) -> Self {
        let mut below = numbers(seed);
        let mut number = |from: usize, to: usize| from + below((to - from) as u64) as usize;
        let needs_machines = given.is_some_and(Kind::is_on_machines_only);
        let is_on_one = !places.has_machines || number(0, 3) == 0 && !needs_machines;
        let drawn = match is_on_one {
            true => Kind::ALL[number(0, Kind::ON_ONE_MACHINE)],
            false => Kind::ALL[number(0, Kind::ALL.len())],
        };
        let kind = given.unwrap_or(drawn);
        let kind = if kind.takes_slow_links() && !places.has_slow_links { Kind::InterruptLink } else { kind };
        let ranks = match (is_on_one, number(0, 4)) {
            (true, size) => vec![2 + size % 2],
            (false, 0) => vec![1, 1],
            (false, 1) => vec![2, 1],
            (false, 2) => vec![1, 2],
            (false, _) => vec![1, 1, 1],
        };
        // Silence takes longer than a few steps.
        let last_step = if matches!(kind, Kind::StopLauncher | Kind::StopAgent) { 2 } else { 7 };
        let step = 1 + number(0, last_step) as u64;
        Self {
            kind,
            rank: number(0, ranks.iter().sum()),
            machine: number(0, ranks.len()),
            ranks,
            step,
            after: Duration::from_micros(number(0, 12_000) as u64),
            // In the first step nobody has asked before, and so nobody listens.
            asks: number(0, 2) == 0 && step > 1,
            fault: if number(0, 2) == 0 { Fault::Down } else { Fault::Silent },
            time: Duration::from_millis(number(50, 700) as u64),
            thaws_late: number(0, 2) == 0,
            rate: Rate { bits_per_second: rate_of(kind, &mut number) },
        }
    }

    pub(super) fn world_size(&self) -> usize {
        self.ranks.iter().sum()
    }

    pub(super) fn is_on_machines(&self) -> bool {
        self.ranks.len() > 1
    }

    /// The ranks of the machine that is struck.
    pub(super) fn ranks_of_machine(&self) -> std::ops::Range<usize> {
        let first = self.ranks[..self.machine].iter().sum();
        first..first + self.ranks[self.machine]
    }
}

/// A few kB/s for a moment; throughout, what lets a step take a fraction of a second; and so little that a packet takes seconds.
fn rate_of(kind: Kind, number: &mut impl FnMut(usize, usize) -> usize) -> u64 {
    let (from, to) = match kind {
        Kind::SlowLink => (8_000, 64_000),
        Kind::ChokeLink => (100, 101),
        _ => (200_000, 2_000_000),
    };
    number(from, to) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERYWHERE: Places = Places { has_machines: true, has_slow_links: true };

    #[test]
    fn three_hundred_trials_have_all_kinds_on_all_places() {
        let plans: Vec<_> = (0..300).map(|seed| Plan::draw(seed, EVERYWHERE, None)).collect();
        for kind in Kind::ALL {
            assert!(plans.iter().any(|plan| plan.kind == kind && plan.is_on_machines()), "{kind:?}");
        }
        let on_one = plans.iter().filter(|plan| !plan.is_on_machines());
        assert!((80..120).contains(&on_one.count()));
    }

    #[test]
    fn a_trial_is_the_same_each_time_and_strikes_whom_there_is() {
        for seed in 0..300 {
            let plan = Plan::draw(seed, EVERYWHERE, None);
            assert_eq!(plan, Plan::draw(seed, EVERYWHERE, None));
            assert!(plan.rank < plan.world_size() && plan.ranks_of_machine().end <= plan.world_size(), "{plan:?}");
        }
    }

    #[test]
    fn without_machines_nothing_is_done_to_them() {
        for seed in 0..300 {
            let plan = Plan::draw(seed, Places { has_machines: false, has_slow_links: false }, None);
            let place = Kind::ALL.iter().position(|kind| *kind == plan.kind);
            assert!(!plan.is_on_machines() && place < Some(Kind::ON_ONE_MACHINE), "{plan:?}");
        }
    }

    #[test]
    fn a_kind_that_is_given_is_that_of_all_trials_on_machines_if_it_needs_them() {
        for (seed, kind) in (0..100).flat_map(|seed| Kind::ALL.map(|kind| (seed, kind))) {
            let plan = Plan::draw(seed, EVERYWHERE, Some(kind));
            assert!(plan.kind == kind && (plan.is_on_machines() || !kind.is_on_machines_only()), "{plan:?}");
        }
    }

    #[test]
    fn where_no_link_can_be_slow_it_is_away_for_a_moment() {
        let places = Places { has_slow_links: false, ..EVERYWHERE };
        for kind in [Kind::SlowLink, Kind::SlowLinkThroughout, Kind::ChokeLink] {
            assert_eq!(Plan::draw(7, places, Some(kind)).kind, Kind::InterruptLink);
        }
    }
}
