//! One rank as a process: its streams, its process group, its way to the end.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use accelerate_core::status::{StatusPlace, VARIABLE};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use signal_hook::consts as names;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpgid, kill_process, kill_process_group, test_kill_process, test_kill_process_group,
    waitpgid,
};

use super::RankOutcome;
use super::leftovers::Wait;
pub(crate) use super::terminal::RankTerminal;
use crate::failure::Ended;
use crate::helper::{MARK_VARIABLE, rank_command};
use crate::plan::{Plan, RankCommand};
use crate::report::{Source, Stream};
use crate::tail::Tail;

const BUFFER_BYTES: usize = 64 << 10;
/// The largest pipe an unprivileged process can make is 1 MiB, in buffers of the size above.
pub(super) const DRAIN_ROUNDS: usize = 16;
/// After `SIGKILL` only the kernel itself can keep a process; this long is waited for it.
pub(super) const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// A started rank.
#[derive(Debug)]
pub(crate) struct RankProcess {
    rank: usize,
    child: Child,
    /// The process id, which is also the group's id unless the rank shares the launcher's group.
    id: Pid,
    has_own_group: bool,
    adopts_descendants: bool,
    streams: [Option<OutputStream>; 2],
    buffer: Vec<u8>,
    tail: Tail,
    started_at: Instant,
    ended: Option<(Ended, Instant)>,
    was_told_to_end: bool,
    was_killed: bool,
    /// Of its group something was still there when the waiting for `SIGKILL` was over.
    has_outlived_kill: bool,
    phase: Phase,
}

/// Where the rank's process group stands. The group can outlive its leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// Asked to end; will be made to at this moment.
    Ending {
        kill_at: Instant,
    },
    /// `SIGKILL` is sent; at this moment we stop waiting for the kernel.
    Killed {
        give_up_at: Instant,
    },
    Gone,
}

#[derive(Debug)]
struct OutputStream {
    source: Source,
    file: File,
}

impl RankProcess {
    pub(crate) fn start(
        plan: &Plan,
        command: &RankCommand,
        marks: &OsStr,
        status: Option<StatusPlace>,
        terminal: Option<&mut RankTerminal>,
    ) -> io::Result<Self> {
        let mut start = command_of(plan, command, marks, status);
        start.stdin(command.stdin.open()?);
        let at_terminal = terminal.as_ref().map_or([false; 2], |terminal| terminal.serves());
        if plan.captured {
            let ends = |is_at_terminal: bool| match &terminal {
                Some(terminal) if is_at_terminal => terminal.far_end(),
                _ => Ok(Stdio::piped()),
            };
            start.stdout(ends(at_terminal[0])?).stderr(ends(at_terminal[1])?);
        }
        if !plan.in_foreground {
            start.process_group(0);
        }
        let started_at = Instant::now();
        let mut child = start.spawn()?;
        let id = Pid::from_child(&child);

        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let mut streams = [None, None];
        for (index, (stream, pipe)) in [Stream::Stdout, Stream::Stderr].into_iter().zip(pipes).enumerate() {
            let source = Source { rank: command.rank, local_rank: command.local_rank, stream };
            let descriptor = match &terminal {
                // Both streams at one terminal arrive as one, in the order in which they were written.
                Some(_) if index == 0 && at_terminal == [true; 2] => None,
                Some(terminal) if at_terminal[index] => Some(terminal.near_end()?),
                _ => pipe,
            };
            streams[index] = descriptor.map(|descriptor| OutputStream::new(source, descriptor)).transpose()?;
        }
        Ok(Self {
            rank: command.rank,
            child,
            id,
            has_own_group: !plan.in_foreground,
            adopts_descendants: plan.dedicated_process,
            streams,
            buffer: vec![0; if plan.captured { BUFFER_BYTES } else { 0 }],
            tail: Tail::default(),
            started_at,
            ended: None,
            was_told_to_end: false,
            was_killed: false,
            has_outlived_kill: false,
            phase: Phase::Running,
        })
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn number(&self) -> usize {
        self.rank
    }

    /// How its leader ended, if it has.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.ended.map(|(ended, _)| ended)
    }

    /// How and when.
    pub(crate) fn end(&self) -> Option<(Ended, Instant)> {
        self.ended
    }

    /// By a fault of its own, or killed by somebody else than the launcher.
    pub(crate) fn has_crashed(&self) -> bool {
        let faults = [names::SIGSEGV, names::SIGBUS, names::SIGILL, names::SIGFPE, names::SIGSYS];
        match self.ended() {
            Some(Ended::Signalled { signal: names::SIGKILL, .. }) => !self.was_killed,
            Some(Ended::Signalled { signal, .. }) => faults.contains(&signal),
            _ => false,
        }
    }

    pub(crate) fn was_told_to_end(&self) -> bool {
        self.was_told_to_end
    }

    /// By the launcher.
    pub(crate) fn was_killed(&self) -> bool {
        self.was_killed
    }

    /// Is it this process or one of its group, of which all were killed, and which have been waited for in vain?
    pub(crate) fn has_given_up(&self, process: Pid) -> bool {
        let is_of_group = || self.has_own_group && getpgid(Some(process)) == Ok(self.id);
        self.has_outlived_kill && (process == self.id || is_of_group())
    }

    /// Its process, if that has not ended.
    pub(crate) fn living(&self) -> Option<Pid> {
        self.ended.is_none().then_some(self.id)
    }

    /// Neither the rank nor anything in its group runs any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    pub(crate) fn last_lines(&self) -> Vec<String> {
        self.tail.lines()
    }

    pub(crate) fn outcome(&self) -> RankOutcome {
        let lives_on = || match test_kill_process(self.id) {
            Err(Errno::PERM) => Ended::Refused,
            _ => Ended::Stuck,
        };
        let (ended, at) = self.ended.unwrap_or_else(|| (lives_on(), Instant::now()));
        RankOutcome {
            rank: self.rank,
            process_id: self.process_id(),
            ended,
            elapsed: at.saturating_duration_since(self.started_at),
        }
    }

    // ---- output ----

    /// The descriptors that may have output, with their stream index.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.streams.iter().enumerate().filter_map(|(index, stream)| Some((index, stream.as_ref()?.file.as_fd())))
    }

    pub(crate) fn is_open(&self, stream: usize) -> bool {
        self.streams[stream].is_some()
    }

    /// Reads once without blocking. `None`: nothing there now. Bytes of `None`: the stream has just ended.
    pub(crate) fn read(&mut self, stream: usize) -> Option<(Source, Option<&[u8]>)> {
        let OutputStream { source, file } = self.streams[stream].as_mut()?;
        let source = *source;
        match file.read(&mut self.buffer) {
            Ok(num_bytes @ 1..) => {
                let bytes = &self.buffer[..num_bytes];
                self.tail.push(source.stream, bytes);
                Some((source, Some(bytes)))
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
            // A terminal reports its far end's closing as an error.
            Ok(0) | Err(_) => {
                self.streams[stream] = None;
                Some((source, None))
            }
        }
    }

    /// Closes what is still open, because a descendant elsewhere holds it.
    pub(crate) fn close_streams(&mut self) -> Vec<Source> {
        self.streams.iter_mut().filter_map(|stream| Some(stream.take()?.source)).collect()
    }

    // ---- the way to the end ----

    /// Asks the group to end, and sets the moment at which it will be made to.
    pub(crate) fn ask_to_end(&mut self, signal: Signal, kill_at: Instant) {
        if self.phase == Phase::Running {
            self.signal_group(signal);
            // A process that is stopped would not get the signal before it goes on.
            self.signal_group(Signal::CONT);
            self.is_asked_to_end(kill_at);
        }
    }

    /// Somebody else has asked it.
    pub(crate) fn is_asked_to_end(&mut self, kill_at: Instant) {
        if self.phase == Phase::Running {
            self.was_told_to_end = self.ended.is_none();
            self.phase = Phase::Ending { kill_at };
        }
    }

    /// Of the group, if it has been asked to end already: it may take until then.
    pub(crate) fn give_time(&mut self, until: Instant) {
        if let Phase::Ending { kill_at } = &mut self.phase {
            *kill_at = until.max(*kill_at);
        }
    }

    pub(crate) fn kill(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Running | Phase::Ending { .. }) {
            self.was_told_to_end |= self.ended.is_none();
            self.was_killed |= self.ended.is_none();
            self.signal_group(Signal::KILL);
            self.phase = Phase::Killed { give_up_at: now + KILL_PATIENCE };
        }
    }

    /// Collects the leader's end. True once, when it has happened.
    pub(crate) fn has_just_ended(&mut self, now: Instant) -> bool {
        if self.ended.is_some() {
            return false;
        }
        // An error means that the host has collected our child; all that is known is that it ended.
        let ended = match self.child.try_wait() {
            Ok(None) => return false,
            Ok(Some(status)) => ended(status),
            Err(_) => Ended::Exited(1),
        };
        self.ended = Some((ended, now));
        true
    }

    /// What a rank leaves behind in its group when it ends has nobody to work for.
    pub(crate) fn end_orphans(&mut self, now: Instant, grace_period: Duration) {
        if self.is_group_empty() {
            return;
        }
        if self.phase == Phase::Running {
            self.signal_group(Signal::TERM);
            self.phase = Phase::Ending { kill_at: now + grace_period };
        }
    }

    /// Moves on when the leader has ended and nobody is left in the group. Where this process does not
    /// adopt descendants, killed ones count as gone: whoever inherits them may be slow to collect them.
    pub(crate) fn forget_empty_group(&mut self) {
        let is_killed = matches!(self.phase, Phase::Killed { .. }) && !self.adopts_descendants;
        if self.ended.is_some() && (is_killed || self.is_group_empty()) {
            self.phase = Phase::Gone;
        }
    }

    /// For processes of its group, which have been asked to end and are there without it; `None` if there are none.
    pub(crate) fn wait_for_orphans(&self) -> Option<Wait> {
        let (_, since) = self.ended?;
        let Phase::Ending { kill_at: until } = self.phase else { return None };
        Some(Wait { since, until })
    }

    /// The group of such processes.
    pub(crate) fn group_of_orphans(&self) -> Option<i32> {
        self.wait_for_orphans().map(|_| self.id.as_raw_nonzero().get())
    }

    /// The next moment at which [`meet_deadline`](Self::meet_deadline) has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running | Phase::Gone => None,
            Phase::Ending { kill_at } => Some(kill_at),
            Phase::Killed { give_up_at } => Some(give_up_at),
        }
    }

    pub(crate) fn meet_deadline(&mut self, now: Instant) {
        match self.phase {
            Phase::Ending { kill_at } if now >= kill_at => {
                self.kill(now);
                self.forget_empty_group();
            }
            Phase::Killed { give_up_at } if now >= give_up_at => {
                self.has_outlived_kill = true;
                self.phase = Phase::Gone;
            }
            _ => {}
        }
    }

    pub(crate) fn signal_group(&self, signal: Signal) {
        // That the group is gone already is what is hoped for.
        let _ = match (self.has_own_group, self.ended) {
            (true, _) if self.phase != Phase::Gone => kill_process_group(self.id, signal),
            (false, None) => kill_process(self.id, signal),
            _ => Ok(()),
        };
    }

    pub(crate) fn signal_leader(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = kill_process(self.id, signal);
        }
    }

    /// Only meaningful once the leader has been collected. Members that this process has adopted are
    /// collected on the way; they would count as living otherwise.
    fn is_group_empty(&self) -> bool {
        if !self.has_own_group {
            return true;
        }
        while let Ok(Some(_)) = waitpgid(self.id, WaitOptions::NOHANG) {}
        test_kill_process_group(self.id).is_err()
    }
}

/// What a rank is started with, but for its output and its place among the processes.
fn command_of(plan: &Plan, command: &RankCommand, marks: &OsStr, status: Option<StatusPlace>) -> Command {
    let mut start = rank_command(plan.helper.as_ref(), &command.command);
    for (name, value) in &command.environment {
        match value {
            Some(value) => start.env(name, value),
            None => start.env_remove(name),
        };
    }
    start.env(MARK_VARIABLE, marks);
    match status {
        Some(place) => start.env(VARIABLE, place.to_string()),
        // That of a launch around this one.
        None => start.env_remove(VARIABLE),
    };
    start
}

impl OutputStream {
    fn new(source: Source, descriptor: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&descriptor)?;
        fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(Self { source, file: File::from(descriptor) })
    }
}

fn ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Exited(code),
        (None, Some(signal)) => Ended::Signalled { signal, core_dumped: status.core_dumped() },
        (None, None) => Ended::Exited(1),
    }
}
