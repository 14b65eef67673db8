//! The agent: what runs on each machine of a run. It looks whether its ranks can be started, starts and watches them as a launch
//! on one machine does, and sends everything to the launcher.
//!
//! Its standard input is the connection. When that ends or is silent for too long, the launcher or the network is gone, and the
//! ranks are ended.

use std::ffi::OsStr;
use std::io::{self, BufRead, Read, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use accelerate_core::status::RunPart;
use rustix::process::{Signal, getpid, kill_process};
use rustix::stdio::stdout;

use super::checks::{self, Beacon, MainPort, MeetingPlace};
use super::heart::{self, Silence};
use super::message::{
    AgentEnd, FromAgent, GREETING, LINE_LIMIT_BYTES, Order, Prepared, Problem, ToAgent, VERSION, line,
};
use super::{versions, words};
use crate::config::{Capture, Helper, LaunchConfig};
use crate::error::Error;
use crate::outlet::Outlet;
use crate::report::{Backlog, Notice, Reporter, Source};
use crate::status::FirstEnded;
use crate::supervise::{self, Part};

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
    let voice = Arc::new(Voice::new());
    voice.say_and_wait(format!("{GREETING}{VERSION}\n").as_bytes())?;
    let Some(ToAgent::Prepare(order)) = heard()? else { return Ok(ExitCode::FAILURE) };
    let Order { config, folder, has_preflight, machine, launcher } = *order;
    let mut config = LaunchConfig {
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        // The connection is no input of a program.
        hands_on_input: false,
        dedicated_process: true,
        ..config
    };
    let Some((number, port)) = prepare(&config, &folder, has_preflight, &voice)? else { return Ok(ExitCode::FAILURE) };
    config.main_process_port = Some(number);
    let _kept_from_other_launches = port.map(MainPort::opened_by_rank_0);
    // Before anybody hears the launcher, whose words come to this process as signals.
    let mut signals = supervise::listen().map_err(io::Error::other)?;
    let (told, messages) = channel();
    thread::Builder::new().name("connection".to_owned()).spawn(move || hear(&told))?;
    let (grace_period, timeout) = (config.grace_period, config.connection_timeout);
    let was_silent = Arc::new(AtomicBool::new(false));
    let is_silent = Arc::clone(&was_silent);
    let first_ended = FirstEnded::default();
    let told = first_ended.clone();
    let lives = Arc::clone(&voice);
    let obey = move || obey(&messages, grace_period, timeout, &is_silent, &told, &lives);
    thread::Builder::new().name("launcher".to_owned()).spawn(obey)?;
    let lives = Arc::clone(&voice);
    let _heart = heart::start(timeout, move || lives.beat())?;
    let part = Part { told: RunPart::Agent { machine, launcher }, first_ended };
    let end = match crate::attempt(&config, part, &mut signals, &mut ToLauncher { voice: Arc::clone(&voice) }) {
        Ok(outcome) => AgentEnd::Succeeded(outcome.ranks),
        Err(error) if error.is_interrupted() && was_silent.load(Ordering::SeqCst) => {
            AgentEnd::Problem(words::heard_nothing(timeout))
        }
        Err(error) => end_of(&error),
    };
    voice.say_last(&line(&FromAgent::Ended(end)))?;
    Ok(ExitCode::SUCCESS)
}

/// Looks around and answers the launcher until ranks are to start: the port of the main process then, with what holds it on machine 0.
/// `None` where nothing is to start.
fn prepare(
    config: &LaunchConfig,
    folder: &OsStr,
    has_preflight: bool,
    voice: &Voice,
) -> io::Result<Option<(u16, Option<MainPort>)>> {
    let is_first = config.machine_rank == 0;
    let beacon = (has_preflight && is_first && config.num_machines > 1).then(|| Beacon::light(folder)).flatten();
    let (mut found, held) = prepared(config, folder, has_preflight);
    found.beacon = beacon.as_ref().map(|beacon| beacon.name().to_owned());
    // The others look for the first one before it looks for them.
    let mut place = (has_preflight && is_first).then(|| MeetingPlace::open(config)).flatten();
    found.meets_at = place.as_ref().map(MeetingPlace::address);
    voice.say_and_wait(&line(&FromAgent::Prepared(found)))?;
    loop {
        match heard()? {
            Some(ToAgent::Reach { port, beacon, meets_at }) => {
                let problem = checks::main_process(config, port).map(|text| Problem { text, exit_code: 1 });
                let shares_folder = beacon.and_then(|name| Beacon::is_seen(&name, folder));
                let misses_first = meets_at.and_then(|address| checks::out_of_reach(&[address]).pop().flatten());
                place = if is_first { place } else { MeetingPlace::open(config) };
                let meets_at = place.as_ref().map(MeetingPlace::address).filter(|_| !is_first);
                voice.say_and_wait(&line(&FromAgent::Reached { problem, shares_folder, misses_first, meets_at }))?;
            }
            Some(ToAgent::ReachBack { addresses }) => {
                let problems = checks::out_of_reach(&addresses);
                voice.say_and_wait(&line(&FromAgent::ReachedBack { problems }))?;
            }
            Some(ToAgent::Start { port }) => return Ok(Some((port, held))),
            Some(ToAgent::Beat | ToAgent::Pause) => {}
            _ => return Ok(None),
        }
    }
}

fn prepared(config: &LaunchConfig, folder: &OsStr, has_preflight: bool) -> (Prepared, Option<MainPort>) {
    let mut found = Prepared::default();
    // Programs and files of this launch are named relative to it.
    if let Err(error) = std::env::set_current_dir(folder) {
        found.problems.push(checks::no_folder(folder, &error));
        return (found, None);
    }
    if has_preflight {
        match checks::program(config) {
            Ok(command) => {
                let (versions, unknown) = versions::find(config, &command);
                found.versions = versions;
                found.warnings.extend(unknown);
            }
            Err(problem) => found.problems.push(problem),
        }
        found.warnings.extend(checks::free_space(folder));
        found.num_gpus = checks::num_gpus(config);
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
        None if error.is_interrupted() => AgentEnd::Stopped {
            activities: error.activities().to_vec(),
            had_ended: error.had_ended().to_vec(),
            troubles: error.troubles().to_vec(),
        },
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
fn obey(
    messages: &Receiver<ToAgent>,
    grace_period: Duration,
    timeout: Duration,
    is_silent: &AtomicBool,
    first_ended: &FirstEnded,
    voice: &Voice,
) {
    let tell = |signal| {
        // This process is there.
        let _ = kill_process(getpid(), signal);
    };
    let mut patience = heart::interval(timeout);
    let mut silence = Silence::default();
    loop {
        let message = match messages.recv_timeout(patience) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) if silence.goes_on() => {
                is_silent.store(true, Ordering::SeqCst);
                break;
            }
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        silence.broken();
        patience = heart::interval(timeout);
        match message {
            ToAgent::Signal { signal } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    tell(signal);
                }
            }
            ToAgent::RankEnded { rank } => first_ended.note(rank),
            ToAgent::Pause => patience = Duration::MAX,
            ToAgent::End => break,
            ToAgent::Beat
            | ToAgent::Prepare(_)
            | ToAgent::Reach { .. }
            | ToAgent::ReachBack { .. }
            | ToAgent::Start { .. } => {}
        }
    }
    tell(Signal::TERM);
    beat_for(grace_period, voice);
    // The second one does not wait.
    tell(Signal::TERM);
    beat_for(LAST_PATIENCE, voice);
    // Where even that is not heard, because nobody takes what this process writes, its end is: the guard ends the ranks.
    std::process::exit(1);
}

/// Lets time pass, and says that this process lives more often than while ranks run: a launcher that waits for the end of ranks tells
/// an agent that takes long from one that is gone.
fn beat_for(duration: Duration, voice: &Voice) {
    let mut rest = duration;
    while !rest.is_zero() {
        let pause = rest.min(heart::INTERVAL_OF_ENDING);
        thread::sleep(pause);
        rest -= pause;
        voice.beat();
    }
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

/// The way to the launcher. One thread sends what happens, and another one that this process lives. Neither waits for room while
/// ranks run: nobody may take anything for a while.
struct Voice {
    outlet: Outlet,
    unsent: Mutex<Unsent>,
}

/// What the launcher has not taken yet.
#[derive(Default)]
struct Unsent {
    bytes: Vec<u8>,
    /// With them everything is said: a sign of life after the end would be a message of nobody.
    is_complete: bool,
}

impl Voice {
    fn new() -> Self {
        Self { outlet: Outlet::new(stdout()), unsent: Mutex::default() }
    }

    fn unsent(&self) -> MutexGuard<'_, Unsent> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends as much as there is room for.
    fn send(&self, unsent: &mut Unsent) -> io::Result<()> {
        let num_sent = self.outlet.write(&unsent.bytes)?;
        unsent.bytes.drain(..num_sent);
        Ok(())
    }

    fn say(&self, bytes: &[u8]) -> io::Result<()> {
        let mut unsent = self.unsent();
        unsent.bytes.extend_from_slice(bytes);
        self.send(&mut unsent)
    }

    fn say_and_wait(&self, bytes: &[u8]) -> io::Result<()> {
        self.say(bytes)?;
        while !self.unsent().bytes.is_empty() {
            self.outlet.wait_for_room()?;
            self.say(&[])?;
        }
        Ok(())
    }

    /// Nothing comes after it.
    fn say_last(&self, bytes: &[u8]) -> io::Result<()> {
        {
            let mut unsent = self.unsent();
            unsent.bytes.extend_from_slice(bytes);
            unsent.is_complete = true;
        }
        self.say_and_wait(&[])
    }

    /// A sign of life, unless there is something else to be sent.
    fn beat(&self) {
        let mut unsent = self.unsent();
        if unsent.bytes.is_empty() && !unsent.is_complete {
            unsent.bytes = line(&FromAgent::Beat);
        }
        // That nobody is there any more, the end of the input tells.
        let _ = self.send(&mut unsent);
    }
}

/// Sends what happens to the launcher. When nobody is there any more, the launch ends.
struct ToLauncher {
    voice: Arc<Voice>,
}

impl ToLauncher {
    fn say(&self, message: &FromAgent) -> io::Result<()> {
        self.voice.say(&line(message))
    }
}

impl Reporter for ToLauncher {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        let mut message = line(&FromAgent::Output { source, num_bytes: bytes.len() });
        message.extend_from_slice(bytes);
        self.voice.say(&message)
    }

    fn closed(&mut self, source: Source) -> io::Result<()> {
        self.say(&FromAgent::Closed { source })
    }

    fn backlog(&self) -> Option<Backlog<'_>> {
        let num_bytes = self.voice.unsent().bytes.len();
        (num_bytes > 0).then(|| Backlog { room: self.voice.outlet.stream(), num_bytes })
    }

    fn resume(&mut self) -> io::Result<()> {
        self.voice.say(&[])
    }

    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        match notice {
            Notice::RankFailed { rank, ended, num_others } => {
                self.say(&FromAgent::RankFailed { rank: *rank, ended: *ended, num_others: *num_others })
            }
            // The launcher has told it to stop, and says so itself.
            Notice::Stopping { .. } | Notice::StoppingAtOnce { .. } => Ok(()),
            Notice::Survivors { survivors } => self.say(&FromAgent::Survivors { survivors: survivors.clone() }),
            other => self.say(&FromAgent::Notice { text: other.to_string() }),
        }
    }
}
