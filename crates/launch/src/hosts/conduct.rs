//! Carrying out a run on several machines, in one thread.

mod hear;
mod patience;
mod wait;

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use accelerate_core::status::LauncherName;
use wait::Events;

use super::connection::{Connection, ToAgentPipe};
use super::ending::{End, MachineEnd, outcome};
use super::fitting::Asked;
use super::machine::{HANG_UP_PATIENCE, Machine, Phase};
use super::message::{Order, Problem, ToAgent};
use super::{AgentCommand, Preflight, heart, versions, words};
use crate::config::{Helper, LaunchConfig};
use crate::error::{Error, Result};
use crate::failure::Ended;
use crate::report::{Notice, Reporter};
use crate::supervise::signals::{self, Event, Signals};
use crate::supervise::{Outcome, backlog};

/// At least so long a machine has to be logged in to, to look around and to answer, however soon it is given up while ranks run.
const SHORTEST_ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// What agents may take to end beyond the time that ranks have.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Tells agents that this process is there.
fn heart(machines: &[Machine<'_>], timeout: Duration) -> Result<Sender<()>> {
    let pipes: Vec<ToAgentPipe> = machines.iter().map(|machine| machine.connection.to_agent().clone()).collect();
    heart::start(timeout, move || pipes.iter().for_each(ToAgentPipe::beat))
        .map_err(|error| Error::system("starting a thread", error))
}

/// How long a machine may say nothing before its ranks run.
fn answer_patience(connection_timeout: Duration) -> Duration {
    connection_timeout.max(SHORTEST_ANSWER_PATIENCE)
}

/// A run under way.
pub(super) struct Conductor<'a> {
    machines: Vec<Machine<'a>>,
    reporter: &'a mut dyn Reporter,
    signals: &'a mut Signals,
    phase: Phase,
    preflight: Preflight,
    /// Why nothing is to start, with the number of the machine.
    problems: Vec<(usize, Problem)>,
    /// Whom the first machine looks for, with their numbers.
    asked_for: Vec<(usize, SocketAddr)>,
    has_started: bool,
    stopped_by: Option<(i32, Instant)>,
    output_error: Option<io::Error>,
    /// While it is there, agents are told that the launcher lives.
    _heart: Sender<()>,
    /// When connections that are still there are ended.
    give_up_at: Option<Instant>,
    /// After it, a machine that says nothing is lost.
    timeout: Duration,
    /// While ranks run: the next look at who has said something.
    listens_at: Option<Instant>,
    started_at: Instant,
}

impl<'a> Conductor<'a> {
    pub(super) fn connect(
        agents: &'a [AgentCommand],
        configs: &'a [LaunchConfig],
        launcher: &LauncherName,
        (preflight, helper): (Preflight, Option<&Helper>),
        signals: &'a mut Signals,
        reporter: &'a mut dyn Reporter,
    ) -> Result<Self> {
        let folder = std::env::current_dir().map_err(|error| Error::system("looking for the working folder", error))?;
        let started_at = Instant::now();
        let mut machines = Vec::with_capacity(agents.len());
        for (agent, config) in agents.iter().zip(configs) {
            let connection = Connection::start(agent, helper).map_err(|source| {
                let program = agent.command.first().cloned().unwrap_or_default();
                let cure = words::without_command(&program, agents);
                Error::not_connected(vec![agent.machine.clone()], program, cure, source)
            })?;
            let has_preflight = preflight == Preflight::Full;
            let (machine, launcher) = (agent.machine.clone(), launcher.clone());
            let order =
                Order { config: config.clone(), folder: folder.clone().into(), has_preflight, machine, launcher };
            machines.push(Machine::new(agent, config, connection, Box::new(order)));
        }
        let timeout = configs.first().map_or(Duration::MAX, |config| config.connection_timeout);
        let heart = heart(&machines, timeout)?;
        Ok(Self {
            machines,
            _heart: heart,
            reporter,
            signals,
            phase: Phase::Preparing,
            preflight,
            problems: Vec::new(),
            asked_for: Vec::new(),
            has_started: false,
            stopped_by: None,
            output_error: None,
            give_up_at: started_at.checked_add(answer_patience(timeout)),
            timeout,
            listens_at: None,
            started_at,
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome> {
        while self.machines.iter().any(|machine| machine.connection.ended().is_none()) {
            let Events { readable, writable, has_signal, has_room } = self.wait();
            if has_room {
                let result = self.reporter.resume();
                self.note_output(result);
            }
            writable.into_iter().for_each(|index| self.machines[index].connection.to_agent().send());
            for index in readable {
                if self.machines[index].connection.read() {
                    self.machines[index].note_heard();
                }
                self.listen(index);
                self.machines[index].note_end_of_output();
            }
            if has_signal {
                self.handle_signals();
            }
            self.go_on();
            self.meet_deadlines(Instant::now());
        }
        self.hand_over();
        self.outcome()
    }

    /// The first failure ends all others.
    fn fail(&mut self, index: usize, end: End) {
        let machine = &mut self.machines[index];
        // What ends after the others have been hung up on is no reason for that.
        let stands_in_the_way = !self.has_started && self.phase != Phase::Ending && machine.end.is_none();
        if let (End::Broken(problem), true) = (&end, stands_in_the_way) {
            self.problems.push((index, problem.clone()));
        }
        machine.failed_at.get_or_insert_with(Instant::now);
        let is_later = self.has_started && self.phase == Phase::Ending && machine.end.is_none();
        let unconfirmed = match &end {
            End::Broken(problem) if is_later => Some(problem.text.clone()),
            _ => None,
        };
        machine.end.get_or_insert(end);
        // The error of the run is about the first failure.
        if let Some(text) = unconfirmed {
            self.notice(index, text);
        }
        if self.phase == Phase::Running {
            self.end_all_but(Some(index));
        }
    }

    fn end_all_but(&mut self, failed: Option<usize>) {
        if self.phase == Phase::Ending {
            return;
        }
        self.phase = Phase::Ending;
        let mut grace_period = Duration::ZERO;
        for (_, machine) in self.machines.iter_mut().enumerate().filter(|(index, _)| Some(*index) != failed) {
            machine.connection.to_agent().tell(&ToAgent::End);
            grace_period = machine.config.grace_period;
        }
        self.give_up_after(grace_period.saturating_add(END_PATIENCE));
    }

    /// All connections are closed; agents end by themselves then.
    fn hang_up(&mut self) {
        self.phase = Phase::Ending;
        self.machines.iter().for_each(|machine| machine.connection.to_agent().close());
        self.give_up_after(HANG_UP_PATIENCE);
    }

    fn give_up_after(&mut self, patience: Duration) {
        self.give_up_at = Instant::now().checked_add(patience);
    }

    fn handle_signals(&mut self) {
        for event in self.signals.pending() {
            match event {
                Event::Stop(signal) | Event::Typed(signal) => self.stop(signal.as_raw()),
                Event::User(signal) => self.tell_all(&ToAgent::Signal { signal: signal.as_raw() }),
                Event::Suspend => {
                    self.tell_all(&ToAgent::Pause);
                    signals::suspend_this_process();
                    self.machines.iter().for_each(|machine| machine.connection.to_agent().resume());
                    self.listen_anew();
                }
                Event::ChildEnded | Event::WindowChanged => {}
            }
        }
        for index in 0..self.machines.len() {
            if self.machines[index].connection.has_just_ended() {
                self.listen(index);
                self.note_broken(index);
            }
        }
    }

    /// A connection that ends before its agent has said how it went.
    fn note_broken(&mut self, index: usize) {
        let machine = &self.machines[index];
        if machine.end.is_some() {
            return;
        }
        let ended = machine.connection.ended().unwrap_or(Ended::Stuck);
        // Told to end, the agent may die of its own signal before it listens to it.
        let is_sigterm = match ended {
            Ended::Exited(code) => code == 128 + signal_hook::consts::SIGTERM,
            Ended::Signalled { signal, .. } => signal == signal_hook::consts::SIGTERM,
            Ended::Stuck | Ended::Refused => false,
        };
        if self.phase == Phase::Ending && is_sigterm {
            self.machines[index].end = Some(End::stopped());
            return;
        }
        let ranks = self.has_started.then(|| machine.ranks());
        let program = machine.agent.command.first().map(OsString::as_os_str).unwrap_or_default();
        let problem =
            words::broken(program, ended, machine.connection.has_greeted(), ranks, &machine.connection.last_words());
        let elsewhere = self.num_running(|other| other != index);
        if self.phase == Phase::Running && elsewhere > 0 {
            self.notice(index, words::ending("the connection has ended", elsewhere));
        }
        self.fail(index, End::Broken(problem));
    }

    fn stop(&mut self, signal: i32) {
        let is_second = self.stopped_by.is_some() || self.phase == Phase::Ending;
        self.stopped_by.get_or_insert((signal, Instant::now()));
        if self.phase != Phase::Running && !is_second {
            return self.hang_up();
        }
        self.tell_all(&ToAgent::Signal { signal });
        let num_running = self.num_running(|_| true);
        if is_second {
            self.give_up_after(END_PATIENCE);
            let result = self.reporter.notice(&Notice::StoppingAtOnce { signal, num_running });
            return self.note_output(result);
        }
        let grace_period = self.machines.first().map_or(Duration::ZERO, |machine| machine.config.shutdown_grace_period);
        self.give_up_after(grace_period.saturating_add(END_PATIENCE));
        let notice = Notice::Stopping { signal, num_running, grace_period };
        let result = self.reporter.notice(&notice);
        self.note_output(result);
    }

    fn tell_all(&self, message: &ToAgent) {
        self.machines.iter().for_each(|machine| machine.connection.to_agent().tell(message));
    }

    /// To the next phase, once all machines have answered.
    fn go_on(&mut self) {
        if !self.machines.iter().all(|machine| machine.has_answered(self.phase)) {
            return;
        }
        if self.phase == Phase::Preparing {
            self.problems.extend(versions::differences(&self.machines.iter().map(Machine::found).collect::<Vec<_>>()));
        }
        if matches!(self.phase, Phase::Reaching { .. }) {
            self.judge_first();
        }
        let is_over = self.machines.iter().all(|machine| machine.end.is_some());
        let phase = self.phase;
        match phase {
            Phase::Preparing | Phase::Reaching { .. } | Phase::ReachingBack { .. }
                if !self.problems.is_empty() || is_over =>
            {
                self.hang_up();
            }
            Phase::Preparing => {
                let port = self.machines.iter().find_map(|machine| machine.prepared.as_ref()?.port).unwrap_or_default();
                self.phase = Phase::Reaching { port };
                if self.preflight == Preflight::Full {
                    self.give_up_after(answer_patience(self.timeout));
                    self.compare_gpus();
                    self.machines.iter_mut().for_each(|machine| machine.is_asked = Asked::ToReach);
                    let first = self.machines.first().and_then(|machine| machine.prepared.as_ref());
                    let beacon = first.and_then(|prepared| prepared.beacon.clone());
                    let meets_at = first.and_then(|prepared| prepared.meets_at);
                    self.tell_all(&ToAgent::Reach { port, beacon, meets_at });
                } else {
                    self.machines.iter_mut().for_each(|machine| machine.has_reached = true);
                    self.go_on();
                }
            }
            Phase::Reaching { port } if self.ask_back(port) => {}
            Phase::Reaching { port } | Phase::ReachingBack { port } => {
                self.phase = Phase::Running;
                self.has_started = true;
                self.give_up_at = None;
                self.machines.iter_mut().for_each(|machine| machine.is_asked = Asked::ToStart);
                self.tell_all(&ToAgent::Start { port });
                self.listen_anew();
            }
            Phase::Running if is_over => self.hang_up(),
            Phase::Running | Phase::Ending => {}
        }
    }

    /// The way back: can ranks of the first machine reach those of the others? Is there something to be asked?
    fn ask_back(&mut self, port: u16) -> bool {
        let others = self.machines.iter().enumerate().skip(1);
        self.asked_for = others.filter_map(|(index, machine)| Some((index, machine.meets_at?))).collect();
        let Some(first) = self.machines.first_mut().filter(|_| !self.asked_for.is_empty()) else { return false };
        first.is_asked = Asked::ToReachBack;
        let addresses = self.asked_for.iter().map(|(_, address)| *address).collect();
        first.connection.to_agent().tell(&ToAgent::ReachBack { addresses });
        self.phase = Phase::ReachingBack { port };
        self.give_up_after(answer_patience(self.timeout));
        true
    }

    fn compare_gpus(&mut self) {
        let num_gpus = |machine: &Machine<'_>| machine.prepared.as_ref().map_or(0, |prepared| prepared.num_gpus);
        let most = self.machines.iter().map(num_gpus).max().unwrap_or(0);
        for index in 0..self.machines.len() {
            let machine = &self.machines[index];
            let found = words::gpus(num_gpus(machine), machine.config.num_local_processes(), most);
            if let Some(text) = found.filter(|_| !machine.config.use_cpu) {
                self.notice(index, text);
            }
        }
    }

    fn num_running(&self, counts: impl Fn(usize) -> bool) -> usize {
        let running =
            self.machines.iter().enumerate().filter(|(index, machine)| counts(*index) && machine.end.is_none());
        running.map(|(_, machine)| machine.config.num_local_processes()).sum()
    }

    fn notice(&mut self, index: usize, text: String) {
        let machine = self.machines[index].agent.machine.clone();
        let result = self.reporter.notice(&Notice::OnMachine { machine, text });
        self.note_output(result);
    }

    fn note_output(&mut self, result: io::Result<()>) {
        if let Err(error) = result
            && self.output_error.is_none()
        {
            self.output_error = Some(error);
            self.end_all_but(None);
        }
    }

    fn hand_over(&mut self) {
        let stopped_by = self.stopped_by.map(|(signal, _)| signal);
        match backlog::hand_over(self.reporter, self.signals, stopped_by) {
            Ok(Some(signal)) => drop(self.stopped_by.get_or_insert((signal, Instant::now()))),
            Ok(None) => {}
            Err(error) => self.note_output(Err(error)),
        }
    }

    fn outcome(mut self) -> Result<Outcome> {
        let later = self.signals.pending().into_iter().find_map(Event::stop).map(|signal| (signal, Instant::now()));
        let stopped_by = self.stopped_by.or(later);
        if let Some(error) = self.output_error {
            return Err(Error::output_closed(error));
        }
        if let (false, Some((signal, _))) = (self.has_started, stopped_by) {
            return Err(Error::interrupted(signal));
        }
        if !self.has_started {
            // In the order of the machines, whichever answered first.
            self.problems.sort_by_key(|(index, _)| *index);
            let named =
                self.problems.into_iter().map(|(index, problem)| (self.machines[index].agent.machine.clone(), problem));
            return Err(Error::preflight(named.collect()));
        }
        let is_lost = self.machines.iter().any(Machine::is_broken);
        let ranks_may_live = if is_lost { self.longest_life() } else { Duration::ZERO };
        let left_behind: Vec<_> = self.machines.iter().filter_map(Machine::left_behind).collect();
        let grace_period = self.machines.first().map_or(Duration::ZERO, |machine| machine.config.shutdown_grace_period);
        let elapsed = self.started_at.elapsed();
        let ends = self.machines.into_iter().map(|machine| {
            let ranks = machine.ranks();
            let end = machine.end.unwrap_or_else(End::stopped);
            MachineEnd { machine: machine.agent.machine.clone(), ranks, end, failed_at: machine.failed_at }
        });
        let ended =
            outcome(ends.collect(), stopped_by, grace_period).map(|ranks| Outcome { ranks, elapsed, num_restarts: 0 });
        ended.map_err(|error| error.with_ranks_that_may_live(ranks_may_live).with_left_behind(left_behind))
    }

    /// From now on, of ranks whose agent hears this process no more: until the agent notices that, and then until it makes them end.
    fn longest_life(&self) -> Duration {
        let grace_period = self.machines.iter().map(|machine| machine.config.grace_period).max().unwrap_or_default();
        self.timeout.saturating_add(heart::interval(self.timeout)).saturating_add(grace_period)
    }
}
