//! Where the events of a launch go: the trait, and the two reporters that come with this crate.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::stdio::{stderr, stdout};

use crate::failure::{Ended, Survivor, signal_name, words_of_survivors};
use crate::line_prefix::LinePrefix;
use crate::mixer::{Mixer, Pieces, Screens};
use crate::outlet::Outlet;
use crate::program::ProgramChoice;
use crate::supervise::timespec;

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::names::counted;
use serde::{Deserialize, Serialize};

/// One of the two output streams of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout = 0,
    /// Standard error.
    Stderr = 1,
}

/// Whose output it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Source {
    /// Rank among all ranks of all machines.
    pub rank: usize,
    /// Rank among those of this machine.
    pub local_rank: usize,
    /// Which of its streams.
    pub stream: Stream,
}

/// Something a person watching the launch wants to know at once; its `Display` is the sentence to show.
///
/// ```
/// use accelerate_launch::{Ended, Notice};
/// let notice = Notice::RankFailed { rank: 1, ended: Ended::Exited(3), num_others: 1 };
/// assert_eq!(notice.to_string(), "rank 1 exited with code 3; ending 1 rank still running");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The first rank has failed; the others are being ended. Not sent when there are no others.
    RankFailed {
        /// The rank.
        rank: usize,
        /// How it ended.
        ended: Ended,
        /// How many ranks are still running.
        num_others: usize,
    },
    /// The run has failed, all of it has ended, and it starts again.
    Restarting {
        /// What it failed of, in a line.
        cause: String,
        /// Which restart this is, counted from 1.
        restart: usize,
        /// How many there may be.
        max_restarts: usize,
        /// How long nothing runs before.
        after: Duration,
        /// It is that long because ranks may live on where nobody is heard.
        ranks_may_live: bool,
    },
    /// The launcher was told to stop and has passed the signal on.
    Stopping {
        /// Number of the signal.
        signal: i32,
        /// How many ranks are still running.
        num_running: usize,
        /// How long they may take.
        grace_period: Duration,
    },
    /// It was told so once more: what still runs is killed.
    StoppingAtOnce {
        /// Number of the signal.
        signal: i32,
        /// How many ranks are killed, and have no time to save anything.
        num_running: usize,
    },
    /// The program was found by its name alone, in one of two places where it may be.
    ProgramChosen(ProgramChoice),
    /// Something that only concerns one of several machines.
    OnMachine {
        /// Its name in the list of hosts.
        machine: String,
        /// What is worth knowing.
        text: String,
    },
    /// Output is written to files as well.
    Logging {
        /// The folder of this launch.
        folder: PathBuf,
    },
    /// A file of output cannot be written. Sent once, whatever fails later.
    LogFailed {
        /// The first such file.
        path: PathBuf,
        /// Why not.
        error: String,
    },
    /// Processes that ranks had started outlive them and have been asked to end, and do not so at once.
    WaitingForLeftovers {
        /// Each of them.
        processes: Vec<Leftover>,
        /// After that they are killed.
        time_left: Duration,
    },
    /// Processes that ranks had started outlived them and have been ended.
    LeftoversEnded {
        /// How many.
        num_processes: usize,
    },
    /// Ranks, or processes that they had started, could not be ended.
    Survivors {
        /// Each of them.
        survivors: Vec<Survivor>,
    },
}

/// A process that a rank had started and that outlives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Its number.
    pub process_id: u32,
    /// What the system calls it: the name of its program, at most 15 bytes of it.
    pub name: String,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankFailed { rank, ended, num_others } => {
                write!(f, "rank {rank} {ended}; ending {} still running", counted(*num_others, "rank"))
            }
            Self::Restarting { cause, restart, max_restarts, after, ranks_may_live } => {
                write!(f, "{}; restart {restart} of {max_restarts} begins ", in_one_line(cause))?;
                if after.is_zero() { f.write_str("now") } else { write!(f, "in {} s", after.as_secs_f64()) }?;
                if *ranks_may_live { f.write_str(", when no rank can be left where nobody is heard") } else { Ok(()) }
            }
            Self::Stopping { signal, num_running, grace_period } => write!(
                f,
                "{} received and passed on to {}, which may take {} s to end; a second one ends everything at once",
                signal_name(*signal),
                counted(*num_running, "rank"),
                grace_period.as_secs_f64()
            ),
            Self::StoppingAtOnce { signal, num_running } => write!(
                f,
                "{} received after another request to end; {} that {} still running {} killed",
                signal_name(*signal),
                counted(*num_running, "rank"),
                if *num_running == 1 { "was" } else { "were" },
                if *num_running == 1 { "is" } else { "are" }
            ),
            Self::ProgramChosen(choice) => write!(f, "{choice}"),
            Self::OnMachine { machine, text } => write!(f, "{machine}: {}", in_one_line(text)),
            Self::Logging { folder } => write!(f, "files of the processes' output are in {}", folder.shown()),
            Self::LogFailed { path, error } => {
                write!(f, "{} cannot be written ({error}); the processes go on without it", path.shown())
            }
            Self::WaitingForLeftovers { processes, time_left } => write!(
                f,
                "waiting for {}, which ranks have started and left behind; {} in {:.0} s, or at once by SIGINT or SIGTERM",
                listed(processes),
                if processes.len() == 1 {
                    "it was asked to end, and is killed"
                } else {
                    "they were asked to end, and are killed"
                },
                time_left.as_secs_f64()
            ),
            Self::LeftoversEnded { num_processes } => {
                write!(f, "ended {} that ranks had started and left behind", counted(*num_processes, "process"))
            }
            Self::Survivors { survivors } => f.write_str(&words_of_survivors(survivors)),
        }
    }
}

/// As many as are listed by their numbers.
const MOST_LEFTOVERS_LISTED: usize = 5;

fn listed(processes: &[Leftover]) -> String {
    let shown = processes.iter().take(MOST_LEFTOVERS_LISTED);
    let shown: Vec<_> = shown.map(|it| format!("{} ({})", it.process_id, in_one_line(&it.name))).collect();
    let more = processes.len().saturating_sub(MOST_LEFTOVERS_LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let word = if processes.len() == 1 { "process" } else { "processes" };
    format!("{word} {}{more}", shown.join(", "))
}

/// Receives what happens during a launch, on the launching thread.
///
/// An error of a method ends the launch with [`Error::is_output_closed`](crate::Error::is_output_closed).
///
/// ```
/// use accelerate_launch::{Capture, LaunchConfig, Program, Reporter, Source, launch};
///
/// /// Counts the bytes of rank 1.
/// struct Count(usize);
///
/// impl Reporter for Count {
///     fn output(&mut self, source: Source, bytes: &[u8]) -> std::io::Result<()> {
///         self.0 += if source.rank == 1 { bytes.len() } else { 0 };
///         Ok(())
///     }
/// }
///
/// let config = LaunchConfig {
///     args: vec!["-c".into(), "echo 12345".into()],
///     ..LaunchConfig::new(Program::Executable("sh".into()), 2)
/// };
/// let mut count = Count(0);
/// launch(&config, &mut count)?;
/// assert_eq!(count.0, 6);
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
pub trait Reporter {
    /// Bytes of a captured stream as they arrived: neither whole lines nor text.
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()>;

    /// A captured stream has ended; nothing more comes from it.
    fn closed(&mut self, source: Source) -> io::Result<()> {
        let _ = source;
        Ok(())
    }

    /// Something worth telling at once.
    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        let _ = notice;
        Ok(())
    }

    /// When to call [`wake`](Self::wake), if nothing else happens before.
    fn wakes_at(&self) -> Option<Instant> {
        None
    }

    /// The time of [`wakes_at`](Self::wakes_at) has come.
    fn wake(&mut self, now: Instant) -> io::Result<()> {
        let _ = now;
        Ok(())
    }

    /// What could not be written yet, because that would have meant to wait. A reporter that waits itself holds up everything:
    /// signals, deadlines, and the end of ranks.
    fn backlog(&self) -> Option<Backlog<'_>> {
        None
    }

    /// There may be room for the [`backlog`](Self::backlog).
    fn resume(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The launch ends without the [`backlog`](Self::backlog): it was told to stop, and nobody takes it.
    fn abandon(&mut self) {}
}

/// Output that waits for room. While there is some, nothing is read from the ranks, so that they wait as well.
#[derive(Clone, Copy, Debug)]
pub struct Backlog<'a> {
    /// What it waits for.
    pub room: BorrowedFd<'a>,
    /// How much there is.
    pub num_bytes: usize,
}

/// Drops everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn output(&mut self, _: Source, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// Prints to the standard streams of this process: whole lines behind `[rank N]`, the progress bar of the
/// local main process below them if there is a terminal.
///
/// A stream that nobody reads any more, or that leads to a full disk, does not end the launch: what cannot be written is
/// dropped, and that is said once on standard error. Hours of training are worth more than their output.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Program, TerminalOptions, TerminalReporter, launch};
/// let mut reporter = TerminalReporter::new(TerminalOptions { has_prefix: true, is_quiet: false });
/// let config = LaunchConfig {
///     args: vec!["hello".into()],
///     ..LaunchConfig::new(Program::Executable("echo".into()), 2)
/// };
/// launch(&config, &mut reporter)?; // [rank 0] hello, [rank 1] hello
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
#[derive(Debug)]
pub struct TerminalReporter {
    mixer: Mixer,
    is_quiet: bool,
    /// By the number of a stream.
    outlets: [Outlet; 2],
    /// Whether they lead to two places, so that one need not wait for the other.
    are_apart: bool,
    /// In the order in which it is to be written; where streams are not apart, whatever the streams.
    unwritten: VecDeque<(Stream, Vec<u8>)>,
    /// How much of the first piece is written.
    num_written: usize,
    /// For each stream, whether something could not be written there.
    has_failed: [bool; 2],
}

impl TerminalReporter {
    /// Looks at the standard streams to choose between terminal and file behaviour. `NO_COLOR` is honoured.
    pub fn new(options: TerminalOptions) -> Self {
        // What this process has printed itself comes first.
        let _ = (io::stdout().flush(), io::stderr().flush());
        Self::writing_to([stdout(), stderr()], options)
    }

    fn writing_to(streams: [BorrowedFd<'static>; 2], options: TerminalOptions) -> Self {
        let [stdout, stderr] = streams.map(|stream| stream.is_terminal());
        let has_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mixer = Mixer::new(Screens { stdout, stderr, has_prefix: options.has_prefix, has_colour });
        Self {
            mixer,
            is_quiet: options.is_quiet,
            outlets: streams.map(Outlet::new),
            are_apart: !(is_same_file(streams) || (stdout && stderr)),
            unwritten: VecDeque::new(),
            num_written: 0,
            has_failed: [false; 2],
        }
    }

    /// Begins each line with `line_prefix` in the place of `[rank N]`, if [`TerminalOptions::has_prefix`] asks for one.
    #[must_use]
    pub fn with_line_prefix(mut self, line_prefix: LinePrefix) -> Self {
        self.mixer.set_line_prefix(line_prefix);
        self
    }
}

/// What a [`TerminalReporter`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalOptions {
    /// Begin each line with `[rank N]`.
    pub has_prefix: bool,
    /// Keep notices of the launcher itself to itself.
    pub is_quiet: bool,
}

impl Reporter for TerminalReporter {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        let pieces = self.mixer.output(source, bytes, Instant::now());
        self.print(pieces);
        Ok(())
    }

    fn closed(&mut self, source: Source) -> io::Result<()> {
        let pieces = self.mixer.closed(source);
        self.print(pieces);
        Ok(())
    }

    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        if !self.is_quiet {
            self.say(&format!("accelerate launch: {notice}"));
        }
        Ok(())
    }

    fn wakes_at(&self) -> Option<Instant> {
        self.mixer.wakes_at().filter(|_| self.unwritten.is_empty())
    }

    fn wake(&mut self, now: Instant) -> io::Result<()> {
        let pieces = self.mixer.wake(now);
        self.print(pieces);
        Ok(())
    }

    fn backlog(&self) -> Option<Backlog<'_>> {
        let (stream, _) = self.unwritten.front()?;
        let num_bytes = self.unwritten.iter().map(|(_, piece)| piece.len()).sum::<usize>();
        let room = self.outlets[*stream as usize].stream();
        Some(Backlog { room, num_bytes: num_bytes.saturating_sub(self.num_written) })
    }

    fn resume(&mut self) -> io::Result<()> {
        self.print(Vec::new());
        self.mixer.wait_anew(Instant::now());
        Ok(())
    }

    fn abandon(&mut self) {
        let Some(Backlog { num_bytes, .. }) = self.backlog() else { return };
        self.unwritten.clear();
        self.num_written = 0;
        let text = format!("accelerate launch: nobody takes the output, of which {num_bytes} bytes are left out\n");
        // It may be the other stream that nobody takes.
        let _ = self.outlets[Stream::Stderr as usize].write(text.as_bytes());
    }
}

impl TerminalReporter {
    fn say(&mut self, message: &str) {
        let pieces = self.mixer.message(message);
        self.print(pieces);
    }

    /// Writes what there is room for.
    fn print(&mut self, pieces: Pieces) {
        self.unwritten.extend(pieces);
        while let Some((stream, piece)) = self.unwritten.front() {
            let (stream, rest) = (*stream, &piece[self.num_written..]);
            match self.outlets[stream as usize].write(rest) {
                Ok(written) if written < rest.len() => {
                    self.num_written += written;
                    return self.overtake(stream);
                }
                Ok(_) => {}
                Err(error) => self.note_failure(stream, &error),
            }
            self.unwritten.pop_front();
            self.num_written = 0;
        }
    }

    /// Nobody takes anything from one stream: what the other has room for goes there, such as word of a rank that has failed.
    fn overtake(&mut self, held_up: Stream) {
        let mut at = 1;
        while self.are_apart && at < self.unwritten.len() {
            let (stream, piece) = &mut self.unwritten[at];
            let stream = *stream;
            if stream == held_up {
                at += 1;
                continue;
            }
            match self.outlets[stream as usize].write(piece) {
                Ok(written) if written < piece.len() => {
                    piece.drain(..written);
                    return;
                }
                Ok(_) => {}
                Err(error) => self.note_failure(stream, &error),
            }
            self.unwritten.remove(at);
        }
    }

    /// Later pieces are tried again: a full disk may be freed.
    fn note_failure(&mut self, stream: Stream, error: &io::Error) {
        let is_first = !std::mem::replace(&mut self.has_failed[stream as usize], true);
        if is_first && stream == Stream::Stdout {
            let text = format!(
                "accelerate launch: standard output cannot be written ({error}); the processes go on without it"
            );
            self.unwritten.extend(self.mixer.message(&text));
        }
    }
}

/// Do both lead to one file, pipe or terminal? Also where they cannot be asked.
fn is_same_file(streams: [BorrowedFd<'static>; 2]) -> bool {
    let [stdout, stderr] = streams.map(|stream| fstat(stream).map(|found| (found.st_dev, found.st_ino)));
    stdout.is_err() || stdout == stderr
}

/// Writes all of it, unless nothing is taken for as long as `patience`. For what has to be said before an end that shall not wait.
///
/// # Errors
///
/// Whatever the stream reports, and [`TimedOut`](io::ErrorKind::TimedOut).
///
/// ```
/// use accelerate_launch::write_within;
/// use std::time::Duration;
/// write_within(Duration::from_secs(1), rustix::stdio::stderr(), b"stopped\n")?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_within(patience: Duration, stream: BorrowedFd<'static>, mut bytes: &[u8]) -> io::Result<()> {
    let outlet = Outlet::new(stream);
    while !bytes.is_empty() {
        match outlet.write(bytes)? {
            0 if !outlet.has_room(&timespec(patience))? => return Err(io::ErrorKind::TimedOut.into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

/// `write_all` and `flush` for a stream that another process may have made non-blocking, because it has it, too: where there is
/// no room, it waits for some. `descriptor` is where the stream writes to.
///
/// # Errors
///
/// Whatever the stream reports otherwise.
///
/// ```
/// use accelerate_launch::write_patiently;
/// write_patiently(&mut std::io::stdout().lock(), std::io::stdout(), b"a result\n")?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_patiently(stream: &mut dyn Write, descriptor: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    let wait = || poll(&mut [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::OUT)], None).map(drop);
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait()?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    loop {
        match stream.flush() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait()?,
            result => return result,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::io::read;
    use rustix::pipe::pipe;
    use std::os::fd::OwnedFd;

    /// A pipe that holds nothing yet: the end that is read, and the one that is written.
    fn new_pipe() -> (OwnedFd, BorrowedFd<'static>) {
        let (reader, writer) = pipe().unwrap();
        let writer: &'static OwnedFd = Box::leak(Box::new(writer));
        (reader, writer.as_fd())
    }

    fn reporter(streams: [BorrowedFd<'static>; 2]) -> TerminalReporter {
        TerminalReporter::writing_to(streams, TerminalOptions { has_prefix: true, is_quiet: false })
    }

    fn taken(reader: &OwnedFd, most: usize) -> String {
        let mut bytes = vec![0; most];
        let num_bytes = read(reader, &mut bytes).unwrap();
        String::from_utf8(bytes[..num_bytes].to_vec()).unwrap()
    }

    const PRINTED: Source = Source { rank: 0, local_rank: 0, stream: Stream::Stdout };

    #[test]
    fn a_notice_does_not_wait_for_a_reader_of_the_other_stream() {
        let ((output, stdout), (errors, stderr)) = (new_pipe(), new_pipe());
        let mut reporter = reporter([stdout, stderr]);
        let much = "x".repeat(300_000) + "\nlast\n";
        reporter.output(PRINTED, much.as_bytes()).unwrap();
        reporter.notice(&Notice::LeftoversEnded { num_processes: 3 }).unwrap();
        assert!(reporter.backlog().is_some(), "a pipe holds less than that");
        assert!(taken(&errors, 4096).contains("ended 3 processes"));
        let mut all = String::new();
        while reporter.backlog().is_some() {
            all += &taken(&output, 1 << 20);
            reporter.resume().unwrap();
        }
        all += &taken(&output, 1 << 20);
        assert_eq!(all, format!("[rank 0] {}\n[rank 0] last\n", "x".repeat(300_000)));
    }

    /// As after `2>&1`: what was printed first comes first.
    #[test]
    fn one_pipe_for_both_streams_keeps_their_order() {
        let (output, both) = new_pipe();
        let mut reporter = reporter([both, both]);
        reporter.output(PRINTED, ("x".repeat(300_000) + "\n").as_bytes()).unwrap();
        reporter.notice(&Notice::LeftoversEnded { num_processes: 3 }).unwrap();
        let mut all = String::new();
        while reporter.backlog().is_some() {
            all += &taken(&output, 1 << 20);
            reporter.resume().unwrap();
        }
        all += &taken(&output, 1 << 20);
        assert!(
            all.starts_with("[rank 0] xxx")
                && all.trim_end().ends_with("ended 3 processes that ranks had started and left behind")
        );
    }
}
