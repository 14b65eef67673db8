//! The agent: what runs on each machine of a run. It looks whether its ranks can be started, starts and watches them as a launch
//! on one machine does, and sends everything to the launcher.
//!
//! Its standard input is the connection. When that ends or is silent for too long, the launcher or the network is gone, and the
//! ranks are ended.

use std::io::{self, BufRead, Read, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::process::{Signal, getpid, kill_process};

use super::checks::{self, MainPort};
use super::message::{
    AgentEnd, FromAgent, GREETING, LINE_LIMIT_BYTES, Order, Prepared, Problem, ToAgent, VERSION, line,
};
use super::words;
use crate::config::{Capture, Helper, LaunchConfig};
use crate::error::Error;
use crate::report::{Notice, Reporter, Source};

/// What a launch may take to end its ranks once it has been told twice.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// Plays the agent until its ranks have ended.
pub(crate) fn run() -> ExitCode {
    match converse() {
        Ok(code) => code,
        // Whoever would read why has gone; or is told by this, where what came was no message.
        Err(error) => {
            let _ = writeln!(io::stderr(), "accelerate agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn converse() -> io::Result<ExitCode> {
    send(format!("{GREETING}{VERSION}\n").as_bytes())?;
    let Some(ToAgent::Prepare(order)) = heard()? else { return Ok(ExitCode::FAILURE) };
    let Order { config, folder, has_preflight } = *order;
    let mut config = LaunchConfig {
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        // The connection is no input of a program.
        hands_on_input: false,
        dedicated_process: true,
        ..config
    };
    let (found, port) = prepared(&config, &folder, has_preflight);
    say(&FromAgent::Prepared(found))?;
    let number = loop {
        match heard()? {
            Some(ToAgent::Reach { port }) => {
                let problem = checks::main_process(&config, port).map(|text| Problem { text, exit_code: 1 });
                say(&FromAgent::Reached { problem })?;
            }
            Some(ToAgent::Start { port }) => break port,
            Some(ToAgent::Beat | ToAgent::Pause) => {}
            _ => return Ok(ExitCode::FAILURE),
        }
    };
    config.main_process_port = Some(number);
    let _kept_from_other_launches = port.map(MainPort::opened_by_rank_0);
    let (told, messages) = channel();
    thread::Builder::new().name("connection".to_owned()).spawn(move || hear(&told))?;
    let (grace_period, timeout) = (config.grace_period, config.connection_timeout);
    let was_silent = Arc::new(AtomicBool::new(false));
    let is_silent = Arc::clone(&was_silent);
    let obey = move || obey(&messages, grace_period, timeout, &is_silent);
    thread::Builder::new().name("launcher".to_owned()).spawn(obey)?;
    let end = match crate::launch(&config, &mut ToLauncher) {
        Ok(outcome) => AgentEnd::Succeeded(outcome.ranks),
        Err(error) if error.is_interrupted() && was_silent.load(Ordering::SeqCst) => {
            AgentEnd::Problem(words::heard_nothing(timeout))
        }
        Err(error) => end_of(&error),
    };
    say(&FromAgent::Ended(end))?;
    Ok(ExitCode::SUCCESS)
}

fn prepared(config: &LaunchConfig, folder: &std::ffi::OsStr, has_preflight: bool) -> (Prepared, Option<MainPort>) {
    let mut found = Prepared::default();
    // Programs and files of this launch are named relative to it.
    if let Err(error) = std::env::set_current_dir(folder) {
        found.problems.push(checks::no_folder(folder, &error));
        return (found, None);
    }
    if has_preflight {
        found.problems.extend(checks::program(config));
        found.warnings.extend(checks::free_space(folder));
    }
    let port = (config.machine_rank == 0).then(|| MainPort::choose(config, has_preflight)).transpose();
    let port = port.unwrap_or_else(|error| {
        found.problems.push(Problem::of(&error));
        None
    });
    found.port = port.as_ref().map(MainPort::number);
    found.clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (found, port)
}

fn end_of(error: &Error) -> AgentEnd {
    match error.failure() {
        Some(failure) => AgentEnd::Failed(Box::new(failure.clone())),
        None if error.is_interrupted() => AgentEnd::Stopped,
        None => AgentEnd::Problem(Problem::of(error)),
    }
}

/// Hands on what the launcher says, until the connection ends.
fn hear(told: &Sender<ToAgent>) {
    while let Ok(Some(message)) = heard() {
        if told.send(message).is_err() {
            return;
        }
    }
}

/// Does what the launcher says while ranks run. The launch in this process listens to signals, and so they are the way to tell it.
fn obey(messages: &Receiver<ToAgent>, grace_period: Duration, timeout: Duration, is_silent: &AtomicBool) {
    let tell = |signal| {
        // This process is there.
        let _ = kill_process(getpid(), signal);
    };
    let mut patience = timeout;
    loop {
        let message = messages.recv_timeout(patience);
        patience = timeout;
        let Ok(message) = message else {
            is_silent.store(matches!(message, Err(RecvTimeoutError::Timeout)), Ordering::SeqCst);
            break;
        };
        match message {
            ToAgent::Signal { signal } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    tell(signal);
                }
            }
            ToAgent::Pause => patience = Duration::MAX,
            ToAgent::End => break,
            ToAgent::Beat | ToAgent::Prepare(_) | ToAgent::Reach { .. } | ToAgent::Start { .. } => {}
        }
    }
    tell(Signal::TERM);
    thread::sleep(grace_period);
    // The second one does not wait.
    tell(Signal::TERM);
    thread::sleep(LAST_PATIENCE);
    // Where even that is not heard, because nobody takes what this process writes, its end is: the guard ends the ranks.
    std::process::exit(1);
}

/// The next message; `None` when the connection has ended.
fn heard() -> io::Result<Option<ToAgent>> {
    let mut text = Vec::new();
    let most = LINE_LIMIT_BYTES as u64;
    io::stdin().lock().take(most).read_until(b'\n', &mut text)?;
    if text.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        io::Error::other(format!("what came is no message of a launcher in version {VERSION} ({error})"))
    })
}

fn say(message: &FromAgent) -> io::Result<()> {
    send(&line(message))
}

fn send(bytes: &[u8]) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(bytes)?;
    output.flush()
}

/// Sends what happens to the launcher. When nobody takes it, the launch ends.
struct ToLauncher;

impl Reporter for ToLauncher {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        let mut message = line(&FromAgent::Output { source, num_bytes: bytes.len() });
        message.extend_from_slice(bytes);
        send(&message)
    }

    fn closed(&mut self, source: Source) -> io::Result<()> {
        say(&FromAgent::Closed { source })
    }

    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        match notice {
            Notice::RankFailed { rank, ended, num_others } => {
                say(&FromAgent::RankFailed { rank: *rank, ended: *ended, num_others: *num_others })
            }
            // The launcher has told it to stop, and says so itself.
            Notice::Stopping { .. } => Ok(()),
            other => say(&FromAgent::Notice { text: other.to_string() }),
        }
    }
}
