//! What is done when a deadline has come.

use std::time::Instant;

use super::{Conductor, Phase};
use crate::hosts::ending::End;
use crate::hosts::{heart, words};
use crate::supervise::backlog;

impl Conductor<'_> {
    /// From now on, silence counts.
    pub(super) fn listen_anew(&mut self) {
        self.machines.iter_mut().for_each(|machine| machine.silence.broken());
        self.listens_at = Some(Instant::now()).filter(|_| self.phase == Phase::Running);
        self.listens_at = self.listens_at.and_then(|now| now.checked_add(heart::interval(self.timeout)));
    }

    /// Gives up machines that say nothing. What has arrived has been read before this.
    fn look_for_silence(&mut self) {
        // Nobody was listened to.
        if self.phase != Phase::Running || backlog::is_full(self.reporter, self.stopped_by.is_some()) {
            return self.listen_anew();
        }
        let now = Instant::now();
        self.listens_at = now.checked_add(heart::interval(self.timeout));
        for index in 0..self.machines.len() {
            let machine = &mut self.machines[index];
            if machine.end.is_none() && machine.connection.ended().is_none() && machine.silence.goes_on() {
                let problem = words::says_nothing(self.timeout, &machine.ranks());
                let elsewhere = self.num_running(|other| other != index);
                if elsewhere > 0 {
                    self.notice(index, words::ending("it says nothing any more", elsewhere));
                }
                self.fail(index, End::Broken(problem));
                self.machines[index].connection.kill();
            }
        }
    }

    pub(super) fn meet_deadlines(&mut self, now: Instant) {
        if self.listens_at.is_some_and(|at| at <= now) {
            self.look_for_silence();
        }
        if self.reporter.wakes_at().is_some_and(|at| at <= now) {
            let result = self.reporter.wake(now);
            self.note_output(result);
        }
        for machine in self.machines.iter_mut().filter(|machine| machine.lost_at.is_some_and(|at| at <= now)) {
            machine.lost_at = None;
            // Its end is noticed as that of any connection.
            machine.connection.kill();
        }
        if self.give_up_at.is_none_or(|at| at > now) {
            return;
        }
        self.give_up_at = None;
        let phase = self.phase;
        // Nobody is heard then.
        let is_full = backlog::is_full(self.reporter, self.stopped_by.is_some());
        let is_before_start = !self.has_started && phase != Phase::Ending;
        for index in 0..self.machines.len() {
            let machine = &self.machines[index];
            // Machines that have answered wait for those that have not.
            if machine.connection.ended().is_some() || (is_before_start && machine.has_answered(phase)) {
                continue;
            }
            if machine.end.is_none() {
                // Ranks of an agent that is gone end as they do where one is lost in the middle of a run, and a restart waits for that.
                // One that is heard has ranks that do not end.
                let is_gone = !is_full && machine.is_gone_while_ending(now);
                let last_words = machine.connection.last_words();
                let problem = match self.has_started {
                    true => words::end_not_told(&last_words),
                    false => words::silent(super::answer_patience(self.timeout), &last_words),
                };
                self.machines[index].is_unconfirmed = self.has_started && !is_gone;
                self.fail(index, End::Broken(problem));
            }
            self.machines[index].connection.kill();
        }
        if is_before_start {
            self.hang_up();
        }
    }
}
