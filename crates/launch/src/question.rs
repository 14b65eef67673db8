//! Asking another program something: it runs, what it prints is read, and nothing of it is left behind.
//!
//! A program that is asked may hang for ever or print without end, because of a file that it reads or because it is not the
//! one that is meant. So there is a limit of time and one of output, and the whole process group ends with its leader.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use accelerate_core::settings::shortened;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::error::{Error, Result};
use crate::supervise::signals::{Event, Signals, suspend_this_process};

/// After being told to end, a program has this long to tidy up.
const GRACE_PERIOD: Duration = Duration::from_secs(1);
/// After `SIGKILL` only the kernel itself can keep a process; this long is waited for it.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
const BUFFER_BYTES: usize = 64 << 10;

/// How long a program may take to answer, and how much it may print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From its start to its end. `None` is for programs that take long and whose progress is shown: the user ends them.
    pub time: Option<Duration>,
    /// Both streams together.
    pub output_bytes: usize,
}

impl Default for Limits {
    /// What is ample for a version or a list: 20 s and 16 MiB.
    fn default() -> Self {
        Self { time: Some(Duration::from_secs(20)), output_bytes: 16 << 20 }
    }
}

/// Runs `command` to its end and returns what it printed. It has no input, and a process group of its own.
///
/// When a limit is passed, it and its group are ended. What it leaves in its group when it ends by itself is ended as well. A
/// signal that tells this process to stop is passed on to the group first, and then does what it always does here.
///
/// # Errors
///
/// - [`Error::is_limit_passed`]: it was ended; the text names the command, the limit and the cure;
/// - [`Error::is_program_not_found`], or another reason for which it cannot be started;
/// - [`Error::is_interrupted`]: this process was told to stop, and handles that itself.
///
/// ```
/// use std::process::Command;
/// use accelerate_launch::{Limits, ask};
///
/// let answer = ask(Command::new("echo").arg("yes"), Limits::default())?;
/// assert_eq!((answer.status.success(), answer.stdout), (true, b"yes\n".to_vec()));
///
/// let little = Limits { output_bytes: 1 << 10, ..Limits::default() };
/// assert!(ask(&mut Command::new("yes"), little).unwrap_err().is_limit_passed());
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
pub fn ask(command: &mut Command, limits: Limits) -> Result<Output> {
    ask_and_watch(command, limits, &mut |_| {})
}

/// As [`ask`], and shows `heard` each piece of what arrives on standard output.
///
/// # Errors
///
/// As [`ask`].
pub fn ask_and_watch(command: &mut Command, limits: Limits, heard: &mut dyn FnMut(&[u8])) -> Result<Output> {
    let mut asked = Asked::start(command, limits)?;
    match asked.listen(heard) {
        Ok(()) => asked.output(),
        Err(reason) => {
            asked.end(if let Reason::Signal(signal) = reason { signal } else { Signal::TERM });
            Err(match reason {
                Reason::Time(limit) => Error::too_slow(described(command), limit),
                Reason::Output => Error::too_talkative(described(command), limits.output_bytes),
                Reason::Signal(signal) => {
                    asked.signals.let_happen(signal);
                    Error::interrupted(signal.as_raw())
                }
                Reason::System(source) => Error::system("waiting for a program", source),
            })
        }
    }
}

/// The command in one short line.
fn described(command: &Command) -> String {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_string_lossy()).collect();
    shortened(&words.join(" ").replace(|letter: char| letter.is_control(), " "))
}

/// Why nobody listens any longer.
enum Reason {
    Time(Duration),
    Output,
    Signal(Signal),
    System(io::Error),
}

struct Asked {
    child: Child,
    /// Of the process, and of its group.
    id: Pid,
    streams: [Option<File>; 2],
    printed: [Vec<u8>; 2],
    limits: Limits,
    started_at: Instant,
    signals: Signals,
}

impl Asked {
    fn start(command: &mut Command, limits: Limits) -> Result<Self> {
        // Before the program, whose end is one of the signals.
        let signals = Signals::listen().map_err(|error| Error::system("listening to signals", error))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::program_not_found(command.get_program(), ""),
            _ => Error::not_started(described(command), source),
        })?;
        let id = Pid::from_child(&child);
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let mut asked = Self {
            child,
            id,
            streams: [None, None],
            printed: Default::default(),
            limits,
            started_at: Instant::now(),
            signals,
        };
        for (stream, pipe) in asked.streams.iter_mut().zip(pipes) {
            *stream =
                pipe.map(unblocked).transpose().map_err(|error| Error::system("reading from a program", error))?;
        }
        Ok(asked)
    }

    fn listen(&mut self, heard: &mut dyn FnMut(&[u8])) -> std::result::Result<(), Reason> {
        while !self.has_ended() {
            let left = match self.limits.time {
                Some(limit) => Some(limit.checked_sub(self.started_at.elapsed()).ok_or(Reason::Time(limit))?),
                None => None,
            };
            self.wait(left).map_err(Reason::System)?;
            self.read(heard)?;
            self.handle_signals()?;
        }
        // The ended leader has not been collected, so no stranger can have the number of its group by now.
        self.signal_group(Signal::KILL);
        self.read(heard)
    }

    /// Blocks until there is output or a signal, `left` at most.
    fn wait(&self, left: Option<Duration>) -> io::Result<()> {
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let signals = PollFd::from_borrowed_fd(self.signals.descriptor(), PollFlags::IN);
        let streams = self.streams.iter().flatten().map(|stream| PollFd::new(stream, PollFlags::IN));
        let mut descriptors: Vec<_> = std::iter::once(signals).chain(streams).collect();
        match poll(&mut descriptors, timeout.as_ref()) {
            // The signal has left its mark in the pipe.
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// All that is there now.
    fn read(&mut self, heard: &mut dyn FnMut(&[u8])) -> std::result::Result<(), Reason> {
        let mut buffer = vec![0; BUFFER_BYTES];
        for index in 0..self.streams.len() {
            while let Some(stream) = &mut self.streams[index] {
                match stream.read(&mut buffer) {
                    Ok(num_bytes @ 1..) => {
                        let bytes = &buffer[..num_bytes];
                        self.printed[index].extend_from_slice(bytes);
                        if index == 0 {
                            heard(bytes);
                        }
                        if self.printed.iter().map(Vec::len).sum::<usize>() > self.limits.output_bytes {
                            return Err(Reason::Output);
                        }
                        // A program that never stops printing must not keep the clock from being looked at.
                        if self.limits.time.is_some_and(|limit| self.started_at.elapsed() > limit) {
                            break;
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => self.streams[index] = None,
                }
            }
        }
        Ok(())
    }

    fn handle_signals(&mut self) -> std::result::Result<(), Reason> {
        for event in self.signals.pending() {
            match event {
                Event::Stop(signal) | Event::Typed(signal) => return Err(Reason::Signal(signal)),
                Event::Suspend => {
                    let stopped_at = Instant::now();
                    self.signal_group(Signal::TSTP);
                    suspend_this_process();
                    self.signal_group(Signal::CONT);
                    self.started_at += stopped_at.elapsed();
                }
                Event::ChildEnded | Event::User(_) | Event::WindowChanged => {}
            }
        }
        Ok(())
    }

    /// Without collecting it: until then its number, and that of its group, is nobody else's.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        // An error means that the host has collected it.
        !matches!(waitid(WaitId::Pid(self.id), options), Ok(None))
    }

    /// Tells the group to end, and makes it.
    fn end(&mut self, signal: Signal) {
        for (signal, patience) in [(signal, GRACE_PERIOD), (Signal::KILL, KILL_PATIENCE)] {
            self.signal_group(signal);
            // A process that is stopped would not get the signal before it goes on.
            self.signal_group(Signal::CONT);
            self.streams = [None, None];
            let told_at = Instant::now();
            while !self.has_ended()
                && let Some(left) = patience.checked_sub(told_at.elapsed())
                && self.wait(Some(left)).is_ok()
            {
                self.signals.pending();
            }
        }
        if self.has_ended() {
            let _ = self.child.wait();
        }
    }

    fn signal_group(&self, signal: Signal) {
        // That the group is gone already is what is hoped for.
        let _ = kill_process_group(self.id, signal);
    }

    fn output(mut self) -> Result<Output> {
        let status = self.child.wait().map_err(|error| Error::system("waiting for a program", error))?;
        let [stdout, stderr] = self.printed;
        Ok(Output { status, stdout, stderr })
    }
}

fn unblocked(descriptor: OwnedFd) -> io::Result<File> {
    let flags = fcntl_getfl(&descriptor)?;
    fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
    Ok(File::from(descriptor))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::BufRead;

    use rstest::rstest;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const SHORT: Limits = Limits { time: Some(Duration::from_millis(200)), output_bytes: 100_000 };

    #[test]
    fn what_was_printed_comes_whole_with_the_status() {
        let mut heard = Vec::new();
        let script = "head -c 300000 /dev/zero; echo words >&2; exit 3";
        let answer =
            ask_and_watch(&mut sh(script), Limits::default(), &mut |bytes| heard.extend_from_slice(bytes)).unwrap();
        assert_eq!((answer.status.code(), answer.stdout.len(), &*answer.stderr), (Some(3), 300_000, &b"words\n"[..]));
        assert_eq!(heard, answer.stdout);
    }

    /// Each is ended, with everything that it has started: the pipe that all of them hold ends.
    #[rstest]
    #[case::hangs("exec sleep 600", "did not end within 0.2 s")]
    #[case::hangs_without_output("exec >&- 2>&-; sleep 600", "did not end within 0.2 s")]
    #[case::hangs_in_a_child("sleep 600 & sleep 600; wait", "did not end within 0.2 s")]
    #[case::does_not_obey("trap '' TERM; while :; do sleep 600; done", "did not end within 0.2 s")]
    #[case::drips("while :; do echo x; sleep 0.01; done", "did not end within 0.2 s")]
    #[case::floods("exec yes", "printed more than 100000 bytes")]
    #[case::floods_errors("exec yes >&2", "printed more than 100000 bytes")]
    #[case::floods_and_ends("yes | head -c 200000", "printed more than 100000 bytes")]
    fn a_program_that_passes_a_limit_is_ended_with_its_group(#[case] script: &str, #[case] words: &str) {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::io::BufReader::new(File::open(pipe).unwrap()).lines().count()
        });
        let script = format!("exec 9>'{}'; {script}", pipe.display());
        let error = ask(&mut sh(&script), SHORT).unwrap_err();
        assert!(error.is_limit_passed(), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("`sh -c exec 9>") && text.contains(words) && text.contains("shell to see"), "{text}");
        assert_eq!(reader.join().unwrap(), 0);
    }

    /// Whoever holds the streams after the end is not waited for.
    #[test]
    fn what_a_program_leaves_behind_is_ended_and_not_waited_for() {
        let answer = ask(&mut sh("sleep 600 & echo done"), Limits::default()).unwrap();
        assert_eq!(answer.stdout, b"done\n");
        let answer = ask(&mut sh("setsid sleep 2 & echo done"), Limits::default()).unwrap();
        assert_eq!(answer.stdout, b"done\n");
    }

    #[rstest]
    #[case("no-such-program-anywhere", true)]
    #[case("/", false)]
    fn a_program_that_cannot_be_started_is_an_error(#[case] program: &str, #[case] is_not_found: bool) {
        let error = ask(&mut Command::new(program), SHORT).unwrap_err();
        assert_eq!(error.is_program_not_found(), is_not_found, "{error}");
        assert!(error.to_string().contains(program) && !error.is_limit_passed(), "{error}");
    }
}
