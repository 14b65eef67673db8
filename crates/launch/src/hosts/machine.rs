//! One machine of a run, as the launcher sees it.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::AgentCommand;
use super::connection::Connection;
use super::ending::End;
use super::fitting::{Asked, Stage};
use super::heart::{LONGEST_SILENCE_OF_ENDING, Silence};
use super::message::{AgentEnd, Order, Prepared, ToAgent};
use super::versions::Found;
use crate::config::LaunchConfig;
use crate::failure::{LeftBehind, Survivor};
use crate::report::Source;
use crate::supervise::RankOutcome;

/// What a connection may take to end after its agent.
pub(super) const HANG_UP_PATIENCE: Duration = Duration::from_secs(2);

/// Where the run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Each agent looks at its machine.
    Preparing,
    /// Each agent looks for the main process's port.
    Reaching {
        port: u16,
    },
    /// The first agent looks for the others.
    ReachingBack {
        port: u16,
    },
    Running,
    /// Nothing is to go on.
    Ending,
}

/// One machine of the run.
pub(super) struct Machine<'a> {
    pub(super) agent: &'a AgentCommand,
    pub(super) config: &'a LaunchConfig,
    pub(super) connection: Connection,
    /// What the agent is told once it has greeted: until then, whatever is there could repeat it.
    pub(super) order: Option<Box<Order>>,
    /// What the agent has still to answer.
    pub(super) is_asked: Asked,
    pub(super) prepared: Option<Prepared>,
    pub(super) has_reached: bool,
    /// Where its ranks would wait for those of others.
    pub(super) meets_at: Option<SocketAddr>,
    pub(super) end: Option<End>,
    pub(super) failed_at: Option<Instant>,
    /// When a connection is ended from which nothing more comes, although the agent has not said how it went.
    pub(super) lost_at: Option<Instant>,
    pub(super) silence: Silence,
    /// Why it does not reach the place where ranks of the first machine would wait, if so.
    pub(super) misses_first: Option<String>,
    /// When something last came from it.
    pub(super) heard_at: Instant,
    /// What it could not end.
    pub(super) survivors: Vec<Survivor>,
    /// It was told to end its ranks, and is heard, and has not said that it has.
    pub(super) is_unconfirmed: bool,
}

impl<'a> Machine<'a> {
    pub(super) fn new(
        agent: &'a AgentCommand,
        config: &'a LaunchConfig,
        connection: Connection,
        order: Box<Order>,
    ) -> Self {
        Self {
            agent,
            config,
            connection,
            order: Some(order),
            is_asked: Asked::Nothing,
            prepared: None,
            has_reached: false,
            meets_at: None,
            misses_first: None,
            end: None,
            failed_at: None,
            lost_at: None,
            silence: Silence::default(),
            heard_at: Instant::now(),
            survivors: Vec::new(),
            is_unconfirmed: false,
        }
    }

    pub(super) fn ranks(&self) -> Range<usize> {
        let first = self.config.first_rank();
        first..first.saturating_add(self.config.num_local_processes())
    }

    /// What its agent may speak of now.
    pub(super) fn stage(&self) -> Stage {
        Stage {
            ranks: self.ranks(),
            is_first: self.config.machine_rank == 0,
            is_asked: self.is_asked,
            has_failed: self.failed_at.is_some(),
            has_ended: self.end.is_some(),
        }
    }

    /// What is compared with the other machines.
    pub(super) fn found(&self) -> Found<'_> {
        let versions = self.prepared.as_ref().map(|prepared| &prepared.versions);
        Found { machine: &self.agent.machine, config: self.config, versions }
    }

    /// Something has come from it.
    pub(super) fn note_heard(&mut self) {
        self.silence.broken();
        self.heard_at = Instant::now();
    }

    /// Told to end its ranks, it would have been heard by now if its agent were there.
    pub(super) fn is_gone_while_ending(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard_at) >= LONGEST_SILENCE_OF_ENDING
    }

    /// Nothing that it says counts any more.
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.end, Some(End::Broken(_)))
    }

    /// What of this attempt may go on there, however long others wait.
    pub(super) fn left_behind(&self) -> Option<LeftBehind> {
        let is_left = self.is_unconfirmed || !self.survivors.is_empty();
        let (machine, survivors) = (Some(self.agent.machine.clone()), self.survivors.clone());
        is_left.then_some(LeftBehind { machine, survivors, is_left_out: false })
    }

    /// A connection that ends has a moment to say why. One that stays, without an agent, is of no use.
    pub(super) fn note_end_of_output(&mut self) {
        if self.lost_at.is_none() && self.end.is_none() && self.connection.is_output_over() {
            self.lost_at = Instant::now().checked_add(HANG_UP_PATIENCE);
        }
    }

    pub(super) fn has_answered(&self, phase: Phase) -> bool {
        let has_answered = match phase {
            Phase::Preparing => self.prepared.is_some(),
            Phase::Reaching { .. } => self.has_reached,
            Phase::ReachingBack { .. } => self.is_asked != Asked::ToReachBack,
            Phase::Running | Phase::Ending => true,
        };
        has_answered || self.end.is_some()
    }
}

/// The ranks of a machine have ended with code 0. Once that is so of one machine, ranks of the others that have not met them never
/// will, and are told so; those on the same machine know.
pub(super) fn note_success(machines: &mut [Machine<'_>], index: usize, ranks: Vec<RankOutcome>) {
    let is_first = machines.iter().all(|machine| machine.end.is_none());
    if let (true, Some(rank)) = (is_first, ranks.first().map(|ended| ended.rank)) {
        let others = machines.iter().enumerate().filter(|(other, _)| *other != index);
        others.for_each(|(_, machine)| machine.connection.to_agent().tell(&ToAgent::RankEnded { rank }));
    }
    machines[index].end = Some(End::Told(AgentEnd::Succeeded(ranks)));
}

/// One rank has the last line of the screen: the first of the first machine. On its own machine another one would have it, too.
pub(super) fn on_screen(machine: usize, source: Source) -> Source {
    Source { local_rank: if machine == 0 { source.local_rank } else { source.rank }, ..source }
}
