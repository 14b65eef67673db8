//! Taking what machines say.

use std::net::SocketAddr;
use std::time::{Instant, SystemTime};

use super::{Conductor, Phase};
use crate::hosts::ending::End;
use crate::hosts::fitting::{self, Asked};
use crate::hosts::machine::{note_success, on_screen};
use crate::hosts::message::{AgentEnd, FromAgent, Problem, Said, ToAgent, VERSION};
use crate::hosts::{Preflight, words};
use crate::report::Notice;

impl Conductor<'_> {
    /// Takes everything that has arrived from a machine.
    pub(super) fn listen(&mut self, index: usize) {
        loop {
            match self.machines[index].connection.said() {
                Ok(Some(said)) => self.take(index, said),
                Ok(None) => break,
                Err(nonsense) => {
                    self.break_off(index, Problem { text: nonsense.to_string(), exit_code: 1 });
                    break;
                }
            }
        }
        // Before the agent speaks, these words may be why it never does; then they are part of the error.
        while self.machines[index].connection.has_greeted()
            && let Some(text) = self.machines[index].connection.word()
        {
            self.notice(index, text);
        }
    }

    /// Whatever it has said before, this is how it went there.
    fn break_off(&mut self, index: usize, problem: Problem) {
        let machine = &mut self.machines[index];
        if !machine.is_broken() {
            machine.end = None;
        }
        machine.connection.kill();
        self.fail(index, End::Broken(problem));
    }

    fn take(&mut self, index: usize, said: Said) {
        let machine = &self.machines[index];
        let misfit = match &said {
            _ if machine.is_broken() => return,
            Said::Message(message) => fitting::misfit(message, &machine.stage()),
            Said::Output(source, bytes) => {
                fitting::misfit(&FromAgent::Output { source: *source, num_bytes: bytes.len() }, &machine.stage())
            }
            Said::Noise(_) | Said::Greeting(_) => None,
        };
        if let Some(misfit) = misfit {
            return self.break_off(index, words::untrue(&misfit));
        }
        let result = match said {
            Said::Noise(_) => Ok(()),
            Said::Greeting(version) if version == VERSION => {
                let machine = &mut self.machines[index];
                if let Some(order) = machine.order.take() {
                    machine.is_asked = Asked::ToPrepare;
                    machine.connection.to_agent().tell(&ToAgent::Prepare(order));
                }
                Ok(())
            }
            Said::Greeting(version) => {
                self.fail(index, End::Broken(words::other_version(&version)));
                self.machines[index].connection.to_agent().close();
                Ok(())
            }
            Said::Output(source, bytes) => self.reporter.output(on_screen(index, source), &bytes),
            Said::Message(FromAgent::Closed { source }) => self.reporter.closed(on_screen(index, source)),
            Said::Message(message) => {
                self.take_message(index, message);
                Ok(())
            }
        };
        self.note_output(result);
    }

    /// What the first machine has found where ranks of the others would wait.
    fn take_reached_back(&mut self, index: usize, problems: Vec<Option<String>>) {
        let asked = std::mem::take(&mut self.asked_for);
        if problems.len() != asked.len() {
            return self.break_off(index, words::untrue("an answer to other questions"));
        }
        self.machines[index].is_asked = Asked::Nothing;
        for ((other, address), why) in asked.into_iter().zip(problems) {
            if let Some(why) = why {
                self.note_out_of_reach(other, (index, other), address, &why);
            }
        }
    }

    /// What the other machines have found where ranks of the first one would wait. It is the first one's fault if none reaches it.
    pub(super) fn judge_first(&mut self) {
        let num_others = self.machines.len().saturating_sub(1);
        let Some(address) = self.machines.first().and_then(|first| first.prepared.as_ref()?.meets_at) else { return };
        let others = self.machines.iter_mut().enumerate().skip(1);
        let missing: Vec<_> = others.filter_map(|(index, other)| Some((index, other.misses_first.take()?))).collect();
        let is_first_to_blame = missing.len() == num_others;
        for (index, why) in missing {
            self.note_out_of_reach(if is_first_to_blame { 0 } else { index }, (index, 0), address, &why);
        }
    }

    /// A machine does not reach another one where its ranks would wait. Programs that load libtorch by themselves are those of this
    /// library, which meet there for sure; others may know better, so they are only told.
    fn note_out_of_reach(&mut self, index: usize, (from, to): (usize, usize), address: SocketAddr, why: &str) {
        let name = |index: usize| self.machines[index].agent.machine.as_str();
        let problem = words::out_of_reach(name(from), name(to), address, why);
        let mut prepared = self.machines.iter().filter_map(|machine| machine.prepared.as_ref());
        match prepared.any(|prepared| prepared.versions.libtorch.is_some()) {
            true => self.problems.push((index, problem)),
            false => self.notice(index, problem.text),
        }
    }

    fn take_message(&mut self, index: usize, message: FromAgent) {
        match message {
            FromAgent::Prepared(prepared) => {
                self.problems.extend(prepared.problems.iter().map(|problem| (index, problem.clone())));
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                let clock = words::clock(prepared.clock, now).filter(|_| self.preflight == Preflight::Full);
                for text in prepared.warnings.iter().cloned().chain(clock) {
                    self.notice(index, text);
                }
                self.machines[index].prepared = Some(prepared);
                self.machines[index].is_asked = Asked::Nothing;
            }
            FromAgent::Reached { problem, shares_folder, misses_first, meets_at } => {
                if shares_folder == Some(false) {
                    let first = self.machines.first().map_or("", |machine| &machine.agent.machine);
                    self.notice(index, words::other_folder(first));
                }
                self.problems.extend(problem.map(|problem| (index, problem)));
                self.machines[index].meets_at = meets_at;
                self.machines[index].misses_first = misses_first;
                self.machines[index].has_reached = true;
                self.machines[index].is_asked = Asked::Nothing;
            }
            FromAgent::ReachedBack { problems } => self.take_reached_back(index, problems),
            FromAgent::Notice { text } => self.notice(index, text),
            FromAgent::Survivors { survivors } => {
                self.notice(index, Notice::Survivors { survivors: survivors.clone() }.to_string());
                self.machines[index].survivors = survivors;
            }
            FromAgent::RankFailed { rank, ended, num_others } => {
                self.machines[index].failed_at.get_or_insert_with(Instant::now);
                let elsewhere = self.num_running(|other| other != index);
                let notice = Notice::RankFailed { rank, ended, num_others: num_others.saturating_add(elsewhere) };
                self.notice(index, notice.to_string());
                self.end_all_but(Some(index));
            }
            FromAgent::Ended(AgentEnd::Succeeded(ranks)) => note_success(&mut self.machines, index, ranks),
            FromAgent::Ended(end @ AgentEnd::Stopped { .. }) => {
                if self.phase == Phase::Ending || self.stopped_by.is_some() {
                    self.machines[index].end = Some(End::Told(end));
                } else {
                    // Somebody on that machine has stopped it.
                    self.fail(index, End::Broken(words::stopped_there()));
                }
            }
            FromAgent::Ended(end) => {
                let elsewhere = self.num_running(|other| other != index);
                if let (AgentEnd::Failed(failure), Phase::Running, 1..) = (&end, self.phase, elsewhere) {
                    let (rank, ended) = (failure.rank, failure.ended);
                    self.notice(index, Notice::RankFailed { rank, ended, num_others: elsewhere }.to_string());
                }
                self.fail(index, End::Told(end));
            }
            FromAgent::Beat | FromAgent::Output { .. } | FromAgent::Closed { .. } => {}
        }
    }
}
