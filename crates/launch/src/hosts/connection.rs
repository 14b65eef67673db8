//! The connection to one agent: a process such as `ssh`, with the agent's input and output behind its own.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};

use super::AgentCommand;
use super::message::{Decoder, Nonsense, Said, ToAgent, line};
use crate::config::Helper;
use crate::failure::Ended;
use crate::helper::rank_command;
use crate::report::Stream;
use crate::tail::Tail;

const BUFFER_BYTES: usize = 64 << 10;
/// As much as the largest pipe of an unprivileged user holds.
const DRAIN_ROUNDS: usize = 16;

/// A started process.
#[derive(Debug)]
pub(super) struct Connection {
    child: Child,
    to_agent: ToAgentPipe,
    output: Option<File>,
    /// The connecting program's own words, and those of the remote shell.
    errors: Option<File>,
    words: Words,
    last_words: Tail,
    decoder: Decoder,
    ended: Option<Ended>,
}

impl Connection {
    pub(super) fn start(agent: &AgentCommand, helper: Option<&Helper>) -> io::Result<Self> {
        let mut child = rank_command(helper, &agent.command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Keys at the terminal are the launcher's: it tells the agents.
            .process_group(0)
            .spawn()?;
        let streams = [
            child.stdin.take().map(OwnedFd::from),
            child.stdout.take().map(OwnedFd::from),
            child.stderr.take().map(OwnedFd::from),
        ];
        let [to_agent, output, errors] = streams.map(|stream| stream.map(without_waiting).transpose());
        Ok(Self {
            child,
            to_agent: ToAgentPipe::new(to_agent?, first_line(&std::env::current_exe().unwrap_or_default())),
            output: output?,
            errors: errors?,
            words: Words::default(),
            last_words: Tail::default(),
            decoder: Decoder::default(),
            ended: None,
        })
    }

    pub(super) fn has_greeted(&self) -> bool {
        self.decoder.has_greeted()
    }

    /// How the connecting program ended, once it has.
    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// Will nothing more come from the agent?
    pub(super) fn is_output_over(&self) -> bool {
        self.output.is_none()
    }

    /// What the agent is told by.
    pub(super) fn to_agent(&self) -> &ToAgentPipe {
        &self.to_agent
    }

    pub(super) fn reads_from(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.output, &self.errors].into_iter().flatten().map(AsFd::as_fd)
    }

    /// Reads what there is, once for each stream. Has the agent said something?
    pub(super) fn read(&mut self) -> bool {
        let said = read(&mut self.output);
        if let Some(bytes) = &said {
            self.decoder.push(bytes);
        }
        if let Some(bytes) = read(&mut self.errors) {
            self.last_words.push(Stream::Stderr, &bytes);
            self.words.push(&bytes);
            // Nobody takes lines of it before the agent is there.
            if !self.has_greeted() {
                self.words.forget_first();
            }
        }
        said.is_some()
    }

    /// The next thing that the agent has said.
    pub(super) fn said(&mut self) -> Result<Option<Said>, Nonsense> {
        loop {
            match self.decoder.next()? {
                // It may be why there will be no agent.
                Some(Said::Noise(line)) => self.last_words.push(Stream::Stdout, &line),
                said => return Ok(said),
            }
        }
    }

    /// A whole line of what is not the agent's, or what is too long to be waited for.
    pub(super) fn word(&mut self) -> Option<String> {
        self.words.line()
    }

    pub(super) fn last_words(&self) -> Vec<String> {
        self.last_words.lines()
    }

    /// Collects the end of the connecting program, once. What it has written before is read then.
    pub(super) fn has_just_ended(&mut self) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let ended = match self.child.try_wait() {
            Ok(None) => return false,
            Ok(Some(status)) => match (status.code(), status.signal()) {
                (Some(code), _) => Ended::Exited(code),
                (None, signal) => {
                    Ended::Signalled { signal: signal.unwrap_or_default(), core_dumped: status.core_dumped() }
                }
            },
            Err(_) => Ended::Exited(1),
        };
        self.ended = Some(ended);
        for _ in 0..DRAIN_ROUNDS {
            self.read();
        }
        // A process in the background may hold them, such as ssh's for connections that are shared.
        (self.output, self.errors) = (None, None);
        self.to_agent.close();
        true
    }

    pub(super) fn kill(&mut self) {
        if self.ended.is_none() {
            // That it has ended already is what is hoped for.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }
}

/// What a connecting program says, of which lines are taken. No more is kept than a line that is too long, and one read.
#[derive(Debug, Default)]
struct Words {
    bytes: Vec<u8>,
    /// What comes before has been taken.
    start: usize,
}

impl Words {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.start));
        self.bytes.extend_from_slice(bytes);
    }

    fn forget_first(&mut self) {
        self.start = self.start.max(self.bytes.len().saturating_sub(BUFFER_BYTES));
    }

    fn line(&mut self) -> Option<String> {
        let rest = &self.bytes[self.start..];
        let end = rest.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        let end = end.or((rest.len() > BUFFER_BYTES).then_some(rest.len()))?;
        let line = String::from_utf8_lossy(&rest[..end]).trim_end().to_owned();
        self.start += end;
        Some(line)
    }
}

/// The input of an agent. The thread that says that the launcher lives writes to it, too: the other one may wait for a terminal
/// that takes no output.
#[derive(Clone, Debug)]
pub(super) struct ToAgentPipe(Arc<Mutex<Pipe>>);

#[derive(Debug)]
struct Pipe {
    file: Option<Arc<File>>,
    /// What the agent has not taken yet.
    unsent: Vec<u8>,
    /// Nothing will come for a while, and the agent knows it.
    is_paused: bool,
}

impl ToAgentPipe {
    fn new(file: Option<File>, unsent: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Pipe { file: file.map(Arc::new), unsent, is_paused: true })))
    }

    fn pipe(&self) -> MutexGuard<'_, Pipe> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, message: &ToAgent) {
        let mut pipe = self.pipe();
        pipe.unsent.extend(line(message));
        pipe.is_paused = matches!(message, ToAgent::Pause);
        pipe.send();
    }

    /// Signs of life come again.
    pub(super) fn resume(&self) {
        self.pipe().is_paused = false;
    }

    /// A sign of life, unless there is something else to be sent. Not before the first message, for which the agent waits, and not
    /// after a [`ToAgent::Pause`], which it would end.
    pub(super) fn beat(&self) {
        let mut pipe = self.pipe();
        if pipe.unsent.is_empty() && !pipe.is_paused {
            pipe.unsent.extend(line(&ToAgent::Beat));
        }
        pipe.send();
    }

    pub(super) fn send(&self) {
        self.pipe().send();
    }

    /// Where there will be room, if there is something to write.
    pub(super) fn writes_to(&self) -> Option<Arc<File>> {
        let pipe = self.pipe();
        pipe.file.clone().filter(|_| !pipe.unsent.is_empty())
    }

    /// The agent sees the end of its input, and ends its ranks.
    pub(super) fn close(&self) {
        self.pipe().file = None;
    }
}

impl Pipe {
    /// As much as there is room for. What cannot be sent to an agent that is gone does not matter: its end is noticed.
    fn send(&mut self) {
        while let Some(mut file) = self.file.as_deref().filter(|_| !self.unsent.is_empty()) {
            match file.write(&self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.file = None,
            }
        }
    }
}

/// The path at which `AGENT_SCRIPT` looks for the agent first. What is no line is left empty.
fn first_line(executable: &Path) -> Vec<u8> {
    let bytes = executable.as_os_str().as_bytes();
    let mut line = if bytes.contains(&b'\n') { Vec::new() } else { bytes.to_vec() };
    line.push(b'\n');
    line
}

fn without_waiting(descriptor: OwnedFd) -> io::Result<File> {
    let flags = fcntl_getfl(&descriptor)?;
    fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
    Ok(File::from(descriptor))
}

/// What there is now. At its end the stream is closed.
fn read(stream: &mut Option<File>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; BUFFER_BYTES];
    match stream.as_mut()?.read(&mut bytes) {
        Ok(num_bytes @ 1..) => {
            bytes.truncate(num_bytes);
            Some(bytes)
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
        Ok(0) | Err(_) => {
            *stream = None;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(words: &mut Words) -> Vec<String> {
        std::iter::from_fn(|| words.line()).collect()
    }

    #[test]
    fn words_come_in_lines() {
        let mut words = Words::default();
        words.push(b"a warning\r\n\nhal");
        assert_eq!(lines(&mut words), ["a warning", ""]);
        words.push(b"f\n");
        assert_eq!(lines(&mut words), ["half"]);
        words.push(&vec![b'x'; BUFFER_BYTES]);
        assert_eq!(lines(&mut words), [""; 0]);
        words.push(b"y");
        assert_eq!(lines(&mut words).concat().len(), BUFFER_BYTES + 1);
        words.push(&[vec![b'x'; BUFFER_BYTES], b"the last\n".to_vec()].concat());
        words.forget_first();
        assert_eq!(lines(&mut words).concat().len(), BUFFER_BYTES - 1);
    }

    /// Moving the rest at each line would take hours.
    #[test]
    fn many_lines_take_as_long_as_their_bytes() {
        let mut words = Words::default();
        words.push(&vec![b'\n'; 16 << 20]);
        assert_eq!(lines(&mut words).len(), 16 << 20);
    }
}
