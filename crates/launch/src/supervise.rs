//! Carrying out a plan: start the ranks, wait for events, end what must end.
//!
//! One thread, one `poll` over the ranks' output, the signals of this process, the room for output and the next deadline; a
//! rank's end arrives as `SIGCHLD`. Nothing is looked at in intervals.

pub(crate) mod backlog;
mod leftovers;
mod memory;
mod rank;
pub(crate) mod signals;
mod terminal;

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerate_core::status::{RankSummary, RunPart};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getpid, set_child_subreaper};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, exit_code_of_signal};
use crate::failure::{Ended, Failure, OtherRank, StopTrouble, Survivor};
use crate::helper::{Guard, MARK_VARIABLE, new_mark};
use crate::logs::OpenLogs;
use crate::plan::Plan;
use crate::report::{Notice, Reporter};
use crate::status::{FirstEnded, StatusFile};
use leftovers::{Leftovers, Wait, Waiting, survivor};
use memory::KillCounter;
use rank::{RankProcess, RankTerminal};
pub use signals::StopSignals;
use signals::{Event, Signals};

/// Crashes this soon after the first failure are taken for its cause.
pub(crate) const CRASH_WINDOW: Duration = Duration::from_millis(250);

/// Longer than any launch, and still a moment that can be waited for.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A launch in which every rank ended with code 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The ranks of this machine in order.
    pub ranks: Vec<RankOutcome>,
    /// From the start of the first rank to the end of the last.
    pub elapsed: Duration,
    /// How often the ranks had been started before. The rest is of the last attempt.
    pub num_restarts: usize,
}

/// How one rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankOutcome {
    /// Rank among all ranks.
    pub rank: usize,
    /// Process id it had.
    pub process_id: u32,
    /// How it ended.
    pub ended: Ended,
    /// From its start to its end.
    pub elapsed: Duration,
}

/// Carries out `plan` and returns when every rank, and everything in its process group, has ended.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Machine, Program, Silent, plan, supervise};
/// let config = LaunchConfig::new(Program::Executable("true".into()), 2);
/// let plan = plan(&config, &["true".into()], 29500, &Machine::probe());
/// assert_eq!(supervise(&plan, &mut Silent)?.ranks.len(), 2);
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
///
/// # Errors
///
/// As [`launch`](crate::launch), apart from the checks that come before a plan.
pub fn supervise(plan: &Plan, reporter: &mut dyn Reporter) -> Result<Outcome> {
    supervise_with(plan, Part::of_launcher(), &mut listen()?, reporter)
}

/// What this process has to do with the run beside its ranks.
#[derive(Debug)]
pub(crate) struct Part {
    /// As it is told.
    pub(crate) told: RunPart,
    /// For what is heard of ranks of other machines.
    pub(crate) first_ended: FirstEnded,
}

impl Part {
    /// There is nobody to hear of anything.
    pub(crate) fn of_launcher() -> Self {
        Self { told: RunPart::Launcher, first_ended: FirstEnded::default() }
    }
}

pub(crate) fn listen() -> Result<Signals> {
    Signals::listen().map_err(|error| Error::system("listening to signals", error))
}

/// The same for one who listens already, and goes on with that.
pub(crate) fn supervise_with(
    plan: &Plan,
    part: Part,
    signals: &mut Signals,
    reporter: &mut dyn Reporter,
) -> Result<Outcome> {
    signals.set_foreground(plan.in_foreground);
    let outcome = supervise_listening(plan, part, signals, reporter);
    signals.set_foreground(false);
    outcome
}

fn supervise_listening(plan: &Plan, part: Part, signals: &mut Signals, reporter: &mut dyn Reporter) -> Result<Outcome> {
    let logs = plan.ranks.iter().map(|rank| OpenLogs::open(&rank.log_files)).collect::<Result<Vec<_>>>()?;
    if plan.dedicated_process {
        // Descendants whose parents have died become children of this process instead of strangers.
        set_child_subreaper(Some(getpid())).map_err(|error| Error::system("adopting descendants", error))?;
    }
    let (mark, marks) = new_mark(std::env::var_os(MARK_VARIABLE));
    let guard = match &plan.helper {
        Some(helper) => {
            Some(Guard::start(helper, &mark).map_err(|error| Error::system("starting the guard process", error))?)
        }
        None => None,
    };
    let Part { told, first_ended } = part;
    let status = StatusFile::of_plan(plan, told).map(Arc::new);
    if let Some(status) = &status {
        first_ended.tell_in(status);
    }
    let mut supervisor = Supervisor {
        plan,
        reporter,
        signals,
        guard,
        ranks: Vec::with_capacity(plan.ranks.len()),
        logs,
        log_has_failed: false,
        terminal: None,
        memory: KillCounter::read(),
        status,
        first_ended,
        started_at: Instant::now(),
        first_failure: None,
        activities: Vec::new(),
        stopping: None,
        is_forced: false,
        output_error: None,
        waiting: Waiting::default(),
        survivors: Vec::new(),
    };
    let started = supervisor.start_ranks(&marks);
    if started.is_err() {
        supervisor.kill_all();
    }
    supervisor.run();
    supervisor.end_leftovers();
    supervisor.tell_survivors();
    supervisor.hand_over();
    let survivors = std::mem::take(&mut supervisor.survivors);
    started.and_then(|()| supervisor.outcome()).map_err(|error| error.with_survivors(survivors))
}

/// What can be done now.
struct Events {
    /// Numbers of ranks, and of their streams.
    readable: Vec<(usize, usize)>,
    has_signal: bool,
    /// For output that waits.
    has_room: bool,
}

struct Supervisor<'a> {
    plan: &'a Plan,
    reporter: &'a mut dyn Reporter,
    signals: &'a mut Signals,
    guard: Option<Guard>,
    ranks: Vec<RankProcess>,
    /// As many as there are ranks.
    logs: Vec<OpenLogs>,
    log_has_failed: bool,
    terminal: Option<RankTerminal>,
    memory: KillCounter,
    /// What the ranks tell of themselves.
    status: Option<Arc<StatusFile>>,
    first_ended: FirstEnded,
    started_at: Instant,
    /// Index into `ranks`.
    first_failure: Option<usize>,
    /// What the ranks were doing at that moment, or when this process was told to stop.
    activities: Vec<RankSummary>,
    /// The signal that told this process to stop.
    stopping: Option<i32>,
    /// It was told so a second time, so that nobody had any more time.
    is_forced: bool,
    output_error: Option<std::io::Error>,
    waiting: Waiting,
    survivors: Vec<Survivor>,
}

impl Supervisor<'_> {
    fn start_ranks(&mut self, marks: &OsStr) -> Result<()> {
        // A container without pseudo terminals gets pipes instead: less comfort, same output.
        self.terminal = self.plan.terminal.and_then(|wanted| RankTerminal::open(wanted).ok());
        for command in &self.plan.ranks {
            let terminal = self.terminal.as_mut().filter(|_| command.local_rank == 0);
            let index = self.ranks.len();
            let place = self.status.as_ref().and_then(|status| status.place(index));
            let rank = RankProcess::start(self.plan, command, marks, place, terminal)
                .map_err(|error| Error::spawn(command.rank, &command.command[0], error))?;
            if let Some(status) = &self.status {
                status.rank_started(index, rank.process_id());
            }
            self.ranks.push(rank);
        }
        // From here on the ranks' side of the terminal is open in the ranks only.
        if let Some(terminal) = &mut self.terminal {
            terminal.close_far_end();
        }
        Ok(())
    }

    fn run(&mut self) {
        while self.ranks.iter().any(|rank| !rank.is_gone()) {
            let Events { readable, has_signal, has_room } = self.wait_for_events();
            if has_room {
                let result = self.reporter.resume();
                self.note_output(result);
            }
            for (index, stream) in readable {
                self.forward_output(index, stream);
            }
            if has_signal {
                self.handle_signals();
            }
            self.meet_deadlines(Instant::now());
        }
        for index in 0..self.ranks.len() {
            self.drain(index);
            for source in self.ranks[index].close_streams() {
                let result = self.reporter.closed(source);
                self.note_output(result);
            }
        }
    }

    /// Blocks until something can be done. Nothing is read from ranks while nobody takes what they have printed.
    fn wait_for_events(&mut self) -> Events {
        let now = Instant::now();
        let deadlines = self.ranks.iter().filter_map(RankProcess::deadline).chain(self.reporter.wakes_at());
        let deadline = deadlines.chain(self.waiting.tells_at(self.wait_for_orphans())).min();
        let timeout = deadline.map(|at| timespec(at.saturating_duration_since(now)));
        let is_full = backlog::is_full(self.reporter, self.stopping.is_some());
        let room = self.reporter.backlog().map(|backlog| PollFd::from_borrowed_fd(backlog.room, PollFlags::OUT));
        let mut descriptors = vec![PollFd::from_borrowed_fd(self.signals.descriptor(), PollFlags::IN)];
        let mut sources = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate().filter(|_| !is_full) {
            for (stream, descriptor) in rank.descriptors() {
                sources.push((index, stream));
                descriptors.push(PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
            }
        }
        let waits_for_room = room.is_some();
        descriptors.extend(room);
        if poll(&mut descriptors, timeout.as_ref()).is_err() {
            // Interrupted by a signal: it has left its mark in the pipe, so the next round sees it.
            return Events { readable: Vec::new(), has_signal: true, has_room: false };
        }
        let is_ready = |descriptor: &PollFd<'_>| !descriptor.revents().is_empty();
        let readable = sources.into_iter().zip(&descriptors[1..]).filter(|(_, found)| is_ready(found));
        Events {
            readable: readable.map(|(source, _)| source).collect(),
            has_signal: is_ready(&descriptors[0]),
            has_room: waits_for_room && descriptors.last().is_some_and(is_ready),
        }
    }

    /// One buffer of output of one stream. Returns whether there may be more.
    fn forward_output(&mut self, index: usize, stream: usize) -> bool {
        let rank = &mut self.ranks[index];
        let Some((source, bytes)) = rank.read(stream) else {
            return false;
        };
        let logged = bytes.map_or(Ok(()), |bytes| self.logs[index].write(source.stream, bytes));
        let failed =
            logged.err().map(|(path, error)| Notice::LogFailed { path: path.to_owned(), error: error.to_string() });
        let result = match bytes {
            Some(bytes) => self.reporter.output(source, bytes),
            None => self.reporter.closed(source),
        };
        self.note_output(result);
        if let Some(notice) = failed.filter(|_| !std::mem::replace(&mut self.log_has_failed, true)) {
            self.notice(&notice);
        }
        self.ranks[index].is_open(stream)
    }

    /// What an ended rank had written before its end is in the pipe already; a descendant that holds the
    /// pipe might go on writing for ever, hence the bound.
    fn drain(&mut self, index: usize) {
        for stream in 0..2 {
            let mut rounds = 0;
            while rounds < rank::DRAIN_ROUNDS && self.forward_output(index, stream) {
                rounds += 1;
            }
        }
    }

    fn note_output(&mut self, result: std::io::Result<()>) {
        if let Err(error) = result
            && self.output_error.is_none()
        {
            self.output_error = Some(error);
            self.end_all(Signal::TERM, self.plan.grace_period);
        }
    }

    fn notice(&mut self, notice: &Notice) {
        let result = self.reporter.notice(notice);
        self.note_output(result);
    }

    fn handle_signals(&mut self) {
        for event in self.signals.pending() {
            match event {
                Event::ChildEnded => {}
                Event::Stop(signal) => self.stop(signal, false),
                Event::Typed(signal) => self.stop(signal, true),
                // Meant for the program itself; its helpers need not survive it.
                Event::User(signal) => self.ranks.iter().for_each(|rank| rank.signal_leader(signal)),
                Event::Suspend => {
                    self.signal_groups(Signal::TSTP);
                    signals::suspend_this_process();
                    self.signal_groups(Signal::CONT);
                }
                Event::WindowChanged => {
                    if let Some(terminal) = &self.terminal {
                        terminal.follow_size();
                    }
                }
            }
        }
        self.reap(Instant::now());
        self.guard.iter_mut().for_each(Guard::revive);
    }

    /// `is_typed`: the key has told the rank as well, which must not get the signal twice.
    fn stop(&mut self, signal: Signal, is_typed: bool) {
        // Whoever stops a run may tell its ranks as well, and one of them may end before this process hears of it. The others have
        // been told by then, but for a failure, which leaves them less time.
        let is_same_request = self.stopping.is_none() && self.has_failed_by(signal.as_raw());
        // Where no rank runs any more, those that are left have been asked to end already.
        let have_been_asked = self.stopping.is_some() || self.first_failure.is_some() || self.num_running() == 0;
        let num_running = self.num_running();
        if !is_same_request && have_been_asked {
            self.kill_all();
            self.is_forced = true;
            self.stopping.get_or_insert(signal.as_raw());
            return self.notice(&Notice::StoppingAtOnce { signal: signal.as_raw(), num_running });
        }
        self.stopping = Some(signal.as_raw());
        let grace_period = self.plan.shutdown_grace_period;
        if is_same_request {
            let kill_at = moment_after(grace_period);
            self.ranks.iter_mut().for_each(|rank| rank.give_time(kill_at));
        } else if is_typed {
            let kill_at = moment_after(grace_period);
            self.ranks.iter_mut().for_each(|rank| rank.is_asked_to_end(kill_at));
        } else {
            // Where another machine has failed, this is a part of its story.
            self.activities = self.activities();
            self.end_all(signal, grace_period);
        }
        self.notice(&Notice::Stopping { signal: signal.as_raw(), num_running, grace_period });
    }

    /// Has the rank that failed first ended by this signal, or with the code that shells report for it?
    fn has_failed_by(&self, signal: i32) -> bool {
        let ended = self.first_failure.and_then(|first| self.ranks[first].ended());
        ended.is_some_and(|ended| ended.exit_code() == exit_code_of_signal(signal))
    }

    fn reap(&mut self, now: Instant) {
        let mut ended_now = Vec::new();
        for index in 0..self.ranks.len() {
            if self.ranks[index].has_just_ended(now) {
                self.tell_end(index);
                self.drain(index);
                self.ranks[index].end_orphans(now, self.plan.grace_period);
                ended_now.push(index);
            }
        }
        if self.first_failure.is_none() && self.stopping.is_none() && self.output_error.is_none() {
            self.note_first_failure(&ended_now);
        }
        for rank in &mut self.ranks {
            rank.forget_empty_group();
        }
    }

    fn tell_end(&self, index: usize) {
        let rank = &self.ranks[index];
        if let (Some(status), Some(ended)) = (&self.status, rank.ended()) {
            status.rank_ended(index, ended);
        }
        if rank.ended().is_some_and(Ended::is_success) {
            self.first_ended.note(rank.number());
        }
    }

    fn note_first_failure(&mut self, ended_now: &[usize]) {
        // Those that were told to end, because another one could not be started, have not failed.
        let is_failure = |index: &&usize| {
            let rank = &self.ranks[**index];
            !rank.was_told_to_end() && rank.ended().is_some_and(|ended| !ended.is_success())
        };
        let Some(&first) = ended_now.iter().find(is_failure) else {
            return;
        };
        self.first_failure = Some(first);
        // Before they are told to end, and leave what they are in.
        self.activities = self.activities();
        self.end_all(Signal::TERM, self.plan.grace_period);
        let num_others = self.num_running();
        if let (Some(ended), true) = (self.ranks[first].ended(), num_others > 0) {
            let rank = self.ranks[first].number();
            self.notice(&Notice::RankFailed { rank, ended, num_others });
        }
    }

    /// Of those that have not ended well.
    fn activities(&self) -> Vec<RankSummary> {
        let Some(status) = &self.status else { return Vec::new() };
        let has_failed_or_runs = |rank: &RankProcess| rank.ended().is_none_or(|ended| !ended.is_success());
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| has_failed_or_runs(rank));
        status.activities(ranks.map(|(index, _)| index))
    }

    /// A process that crashes closes its connections a moment before its end can be noticed, and a peer
    /// that exits because of that may be noticed first. So a crash just after the first failure is the
    /// cause of it. An abort is not taken for one: libraries abort when they lose a peer.
    fn cause(&self, first: usize) -> usize {
        let Some((Ended::Exited(_), at)) = self.ranks[first].end() else {
            return first;
        };
        let crash = self.ranks.iter().position(|rank| {
            rank.end().is_some_and(|(_, end)| end.saturating_duration_since(at) < CRASH_WINDOW) && rank.has_crashed()
        });
        crash.unwrap_or(first)
    }

    fn meet_deadlines(&mut self, now: Instant) {
        for rank in &mut self.ranks {
            rank.meet_deadline(now);
        }
        if self.reporter.wakes_at().is_some_and(|at| at <= now) {
            let result = self.reporter.wake(now);
            self.note_output(result);
        }
        let groups: Vec<_> = self.ranks.iter().filter_map(RankProcess::group_of_orphans).collect();
        let told = self.waiting.told(self.wait_for_orphans(), now, |_, stat| groups.contains(&stat.group));
        told.iter().for_each(|notice| self.notice(notice));
    }

    /// For processes in the group of the rank that has ended first of those that have left any.
    fn wait_for_orphans(&self) -> Option<Wait> {
        self.ranks.iter().filter_map(RankProcess::wait_for_orphans).min_by_key(|wait| wait.since)
    }

    fn num_running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.ended().is_none()).count()
    }

    fn end_all(&mut self, signal: Signal, grace_period: Duration) {
        let kill_at = moment_after(grace_period);
        self.ranks.iter_mut().for_each(|rank| rank.ask_to_end(signal, kill_at));
    }

    fn kill_all(&mut self) {
        let now = Instant::now();
        self.ranks.iter_mut().for_each(|rank| rank.kill(now));
    }

    fn signal_groups(&self, signal: Signal) {
        self.ranks.iter().for_each(|rank| rank.signal_group(signal));
    }

    /// In a process of our own, whatever is still a child of it now had left its rank's process group.
    fn end_leftovers(&mut self) {
        let guard = self.guard.take();
        if !self.plan.dedicated_process {
            guard.into_iter().for_each(Guard::dismiss);
            return;
        }
        let given_up = |process| self.ranks.iter().any(|rank| rank.has_given_up(process));
        let mut told = Ok(());
        let tell = |notice: &Notice| told = self.reporter.notice(notice);
        let Leftovers { num_ended, survivors, stopped_by } =
            leftovers::end(self.signals, self.plan.grace_period, &mut self.waiting, guard, given_up, tell);
        self.note_output(told);
        self.stopping = self.stopping.or(stopped_by);
        self.survivors = survivors;
        if num_ended > 0 {
            self.notice(&Notice::LeftoversEnded { num_processes: num_ended });
        }
    }

    fn tell_survivors(&mut self) {
        if !self.plan.dedicated_process {
            self.survivors = self.ranks.iter().filter_map(RankProcess::living).filter_map(survivor).collect();
        }
        if !self.survivors.is_empty() {
            self.notice(&Notice::Survivors { survivors: self.survivors.clone() });
        }
    }

    fn hand_over(&mut self) {
        match backlog::hand_over(self.reporter, self.signals, self.stopping) {
            Ok(stopped_by) => self.stopping = stopped_by,
            Err(error) => self.note_output(Err(error)),
        }
    }

    fn outcome(mut self) -> Result<Outcome> {
        // What came after the last rank had ended would be lost with this listener.
        self.stopping = self.stopping.or_else(|| self.signals.pending().into_iter().find_map(Event::stop));
        if let Some(error) = self.output_error {
            return Err(Error::output_closed(error));
        }
        if let Some(first) = self.first_failure {
            return Err(Error::child_failed(self.failure(self.cause(first)), self.stopping));
        }
        if let Some(signal) = self.stopping {
            let troubles = self.troubles(signal);
            let had_ended = self.ranks.iter().filter(|rank| !rank.was_told_to_end());
            let had_ended = had_ended.filter(|rank| rank.ended().is_some_and(Ended::is_success));
            let had_ended = had_ended.map(RankProcess::number).collect();
            let error = Error::interrupted(signal).with_activities(self.activities);
            let error = error.with_ranks_that_had_ended(had_ended);
            return Err(error.with_troubles(troubles, self.plan.shutdown_grace_period));
        }
        let ranks = self.ranks.iter().map(RankProcess::outcome).collect();
        Ok(Outcome { ranks, elapsed: self.started_at.elapsed(), num_restarts: 0 })
    }

    /// Of ranks that were told to stop. That they were killed by a second signal, its sender knows.
    fn troubles(&self, signal: i32) -> Vec<StopTrouble> {
        let told = self.ranks.iter().filter(|rank| !(self.is_forced && rank.was_killed()));
        told.filter_map(|rank| {
            let RankOutcome { rank: number, ended, .. } = rank.outcome();
            StopTrouble::of(number, ended, rank.was_killed() && !ended.lives_on(), signal)
        })
        .collect()
    }

    fn failure(&self, cause: usize) -> Failure {
        let RankOutcome { rank, process_id, ended, elapsed } = self.ranks[cause].outcome();
        Failure {
            machine: None,
            rank,
            process_id,
            ended,
            elapsed,
            last_lines: self.ranks[cause].last_lines(),
            memory: self.memory.since(),
            address_problem: None,
            activities: self.activities.clone(),
            others: self
                .ranks
                .iter()
                .filter(|other| other.number() != rank)
                .map(|other| OtherRank {
                    rank: other.number(),
                    ended: other.outcome().ended,
                    was_told_to: other.was_told_to_end(),
                })
                .collect(),
        }
    }
}

/// Of all lengths of time that can be said, some end after the last moment there is.
fn moment_after(grace_period: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(grace_period).unwrap_or(now + LONGEST_GRACE)
}

pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX), tv_nsec: duration.subsec_nanos().into() }
}
