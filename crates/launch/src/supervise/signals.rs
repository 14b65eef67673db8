//! Signals of this process as events of a descriptor that can be polled.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use accelerate_core::signals::Dispositions;
use rustix::process::{Signal, getpid};
use signal_hook::consts as names;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Origin;

/// What a signal means for a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    ChildEnded,
    /// End, with this signal for the ranks.
    Stop(Signal),
    /// The same by a key of the terminal, which has told the rank in the foreground as well.
    Typed(Signal),
    /// To be passed on as it is.
    User(Signal),
    Suspend,
    WindowChanged,
}

impl Event {
    /// The number of the signal, if it is one that tells this process to stop.
    pub(crate) fn stop(self) -> Option<i32> {
        match self {
            Self::Stop(signal) | Self::Typed(signal) => Some(signal.as_raw()),
            _ => None,
        }
    }
}

/// What other processes send so soon after their first request to stop is the same request: `timeout` signals its child and then the
/// child's group, and a session that ends sends `SIGTERM` and `SIGHUP`. A key of the terminal is never sent twice.
const ONE_REQUEST: Duration = Duration::from_millis(200);

const STOPPING: [i32; 4] = [names::SIGINT, names::SIGTERM, names::SIGHUP, names::SIGQUIT];
const OTHERS: [i32; 6] =
    [names::SIGCHLD, names::SIGTSTP, names::SIGUSR1, names::SIGUSR2, names::SIGWINCH, names::SIGXFSZ];

/// Remembers a signal by which this process is told to stop, for one that launches several things one after another: between two
/// launches nobody would hear it. It listens until the process ends.
///
/// ```
/// let stop = accelerate_launch::StopSignals::listen()?;
/// assert_eq!(stop.received(), None);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StopSignals(Vec<(i32, Arc<AtomicBool>)>);

impl StopSignals {
    /// From now on such signals do not end this process, apart from those that it ignores anyway.
    ///
    /// # Errors
    ///
    /// The kernel takes no handler.
    pub fn listen() -> io::Result<Self> {
        let dispositions = dispositions();
        let wanted = STOPPING.into_iter().filter(|&signal| !dispositions.is_ignored(signal));
        let listening = wanted.map(|signal| {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
            Ok((signal, flag))
        });
        listening.collect::<io::Result<_>>().map(Self)
    }

    /// The number of one that has come.
    pub fn received(&self) -> Option<i32> {
        self.0.iter().find(|(_, flag)| flag.load(Ordering::SeqCst)).map(|(signal, _)| *signal)
    }
}

/// Listens from creation to drop; afterwards signals do again what they did before.
pub(crate) struct Signals {
    delivery: SignalDelivery<UnixStream, WithOrigin>,
    is_foreground: bool,
    requests: Requests,
    stopped_by: Option<i32>,
    default_again: Vec<(i32, Arc<AtomicBool>)>,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        Self::listen_with(|_| {})
    }

    /// The same, with something to be done as soon as a signal no longer does what it does by default.
    fn listen_with(mut is_taken: impl FnMut(i32)) -> io::Result<Self> {
        let dispositions = dispositions();
        // What was ignored stays ignored: `nohup` must go on protecting the launch. But ignoring the end of
        // children would mean never to learn how they ended.
        let wanted: Vec<_> = STOPPING
            .into_iter()
            .chain(OTHERS)
            .filter(|&signal| signal == names::SIGCHLD || !dispositions.is_ignored(signal))
            .collect();
        // At each moment a signal is delivered, or does what it does by default, or both: none is lost. So the delivery comes first,
        // and what signals did before ends after that.
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, WithOrigin::default(), &wanted)?;
        let mut default_again = Vec::new();
        for &signal in &wanted {
            if let Some(flag) = default_switch(signal, &dispositions)? {
                flag.store(false, Ordering::SeqCst);
                default_again.push((signal, flag));
                is_taken(signal);
            }
        }
        Ok(Self { delivery, is_foreground: false, requests: Requests::default(), stopped_by: None, default_again })
    }

    /// From now on the rank shares this process's group, so that the keys of the terminal reach it anyway; or no longer.
    pub(crate) fn set_foreground(&mut self, is_foreground: bool) {
        self.is_foreground = is_foreground;
    }

    /// The first signal to stop of all that were looked for by [`pending`](Self::pending).
    pub(crate) fn stopped_by(&self) -> Option<i32> {
        self.stopped_by
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.delivery.get_read().as_fd()
    }

    pub(crate) fn pending(&mut self) -> Vec<Event> {
        let Self { delivery, is_foreground, requests, stopped_by, .. } = self;
        let now = Instant::now();
        let is_new = |origin: &Origin| !requests.is_known(origin.signal, sender(origin), now);
        let new = delivery.pending().filter(is_new);
        // Keys are signals of the kernel, not of a process, and reach every process in the foreground.
        let new = new.map(|origin| (origin.signal, *is_foreground && origin.process.is_none()));
        let new: Vec<(i32, bool)> = new.collect();
        let mut signals = new.iter().map(|(signal, _)| *signal);
        *stopped_by = stopped_by.or_else(|| signals.find(|signal| STOPPING.contains(signal)));
        new.into_iter().filter_map(|(signal, is_shared)| event(signal, is_shared)).collect()
    }

    /// Stops listening and lets `signal` do what it would have done: end this process, unless the host handles it.
    pub(crate) fn let_happen(self, signal: Signal) {
        let does_default = self.default_again.iter().any(|(number, _)| *number == signal.as_raw());
        drop(self);
        if does_default {
            let _ = signal_hook::low_level::emulate_default_handler(signal.as_raw());
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // In this order no signal is lost, as when the listening began.
        for (_, flag) in &self.default_again {
            flag.store(true, Ordering::SeqCst);
        }
        // One that has come since somebody looked does what it would do from now on.
        for signal in self.pending().into_iter().filter_map(Event::stop) {
            if self.default_again.iter().any(|(number, _)| *number == signal) {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
        self.delivery.handle().close();
    }
}

/// Who has sent a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sender {
    /// This process, as an agent does for its launcher.
    Own,
    Other,
    /// The kernel, for a key.
    Kernel,
}

fn sender(origin: &Origin) -> Sender {
    match &origin.process {
        Some(sender) if sender.pid == getpid().as_raw_nonzero().get() => Sender::Own,
        Some(_) => Sender::Other,
        None => Sender::Kernel,
    }
}

/// The requests to stop that have come, with whether this process has sent them to itself.
///
/// Slurm sends its signal to every process of a job, so it reaches an agent twice: directly, and through the launcher. That is one
/// request, and no second one that would end everything at once.
#[derive(Debug, Default)]
struct Requests {
    came: Vec<(i32, bool)>,
    /// When another process has asked first.
    first_of_others: Option<Instant>,
}

impl Requests {
    /// Is it the same request as one that has come before?
    fn is_known(&mut self, signal: i32, sender: Sender, now: Instant) -> bool {
        if !STOPPING.contains(&signal) {
            return false;
        }
        if sender == Sender::Other {
            if self.first_of_others.is_some_and(|at| now.saturating_duration_since(at) < ONE_REQUEST) {
                return true;
            }
            self.first_of_others.get_or_insert(now);
        }
        let is_own = sender == Sender::Own;
        if self.came.contains(&(signal, is_own)) {
            return false;
        }
        self.came.push((signal, is_own));
        self.came.contains(&(signal, !is_own))
    }
}

/// `is_shared`: a rank in the foreground has got it as well, if it came from a key.
fn event(signal: i32, is_shared: bool) -> Option<Event> {
    match signal {
        names::SIGCHLD => Some(Event::ChildEnded),
        names::SIGTSTP => Some(Event::Suspend),
        names::SIGWINCH => Some(Event::WindowChanged),
        // A file of output is as large as this user's files may be. Writing to it fails, which is told.
        names::SIGXFSZ => None,
        names::SIGINT | names::SIGQUIT if is_shared => Signal::from_named_raw(signal).map(Event::Typed),
        _ => {
            let signal = Signal::from_named_raw(signal)?;
            Some(if STOPPING.contains(&signal.as_raw()) { Event::Stop(signal) } else { Event::User(signal) })
        }
    }
}

/// Of this process. Where the kernel does not say, it ignores and catches nothing.
fn dispositions() -> Dispositions {
    std::fs::read_to_string("/proc/self/status").map(|text| Dispositions::parse(&text)).unwrap_or_default()
}

/// Stops this process as `SIGTSTP` would have, and returns when it continues.
pub(crate) fn suspend_this_process() {
    let _ = signal_hook::low_level::emulate_default_handler(names::SIGTSTP);
}

/// The signal library never takes its handler away again, so a host would become deaf to `SIGINT` after
/// its first launch. The returned switch, once true, makes the signal do what it does by default. `None`
/// for a signal that does nothing by default, or for which the host has a handler of its own.
fn default_switch(signal: i32, dispositions: &Dispositions) -> io::Result<Option<Arc<AtomicBool>>> {
    static SWITCHES: Mutex<BTreeMap<i32, Arc<AtomicBool>>> = Mutex::new(BTreeMap::new());
    if matches!(signal, names::SIGCHLD | names::SIGWINCH) {
        return Ok(None);
    }
    let mut switches = SWITCHES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(flag) = switches.get(&signal) {
        return Ok(Some(Arc::clone(flag)));
    }
    if dispositions.is_caught(signal) {
        return Ok(None);
    }
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))?;
    switches.insert(signal, Arc::clone(&flag));
    Ok(Some(flag))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Signals concern a whole process, so this test is one of its own: what it does there, which is another thing where the variable
    /// is set, is told by how it ends.
    const CHILD_VARIABLE: &str = "ACCELERATE_TEST_SIGNALS";

    fn raise(signal: i32) {
        signal_hook::low_level::raise(signal).unwrap();
    }

    /// The signal that ended this test in a process of its own, or 0.
    fn end_of_test(name: &str) -> i32 {
        let module = module_path!().split_once("::").unwrap().1;
        let name = format!("{module}::{name}");
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let ended = command.args(["--exact", &name]).env(CHILD_VARIABLE, "1").output().unwrap();
        std::os::unix::process::ExitStatusExt::signal(&ended.status).unwrap_or_else(|| {
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
            0
        })
    }

    #[test]
    fn a_signal_that_comes_as_listening_begins_is_heard() {
        if std::env::var_os(CHILD_VARIABLE).is_none() {
            return assert_eq!(end_of_test("a_signal_that_comes_as_listening_begins_is_heard"), 0);
        }
        // The second time all that is done once in a process has been done.
        for _ in 0..2 {
            let mut signals = Signals::listen_with(raise).unwrap();
            let mut heard: Vec<_> = signals.pending().into_iter().filter_map(Event::stop).collect();
            heard.sort_unstable();
            assert_eq!(heard, [names::SIGHUP, names::SIGINT, names::SIGQUIT, names::SIGTERM]);
        }
    }

    #[test]
    fn a_signal_that_nobody_has_looked_at_does_what_it_does_by_default() {
        if std::env::var_os(CHILD_VARIABLE).is_none() {
            let name = "a_signal_that_nobody_has_looked_at_does_what_it_does_by_default";
            return assert_eq!(end_of_test(name), names::SIGTERM);
        }
        let signals = Signals::listen().unwrap();
        raise(names::SIGTERM);
        drop(signals);
    }

    #[test]
    fn between_two_listeners_signals_do_what_they_do_by_default() {
        if std::env::var_os(CHILD_VARIABLE).is_none() {
            let name = "between_two_listeners_signals_do_what_they_do_by_default";
            return assert_eq!(end_of_test(name), names::SIGTERM);
        }
        drop(Signals::listen().unwrap());
        raise(names::SIGTERM);
        drop(Signals::listen().unwrap());
    }

    #[test]
    fn a_request_that_comes_both_ways_is_one() {
        use Sender::{Other, Own};
        let mut requests = Requests::default();
        let (first, later) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        assert!(!requests.is_known(names::SIGTERM, Other, first));
        assert!(requests.is_known(names::SIGTERM, Own, later));
        // From here on there is nothing that it could be the same as.
        assert!(!requests.is_known(names::SIGTERM, Own, later) && !requests.is_known(names::SIGTERM, Other, later));
        assert!(!requests.is_known(names::SIGINT, Own, later) && !requests.is_known(names::SIGINT, Own, later));
        assert!(!requests.is_known(names::SIGUSR1, Own, later) && !requests.is_known(names::SIGUSR1, Other, later));
    }

    #[test]
    fn what_comes_in_a_moment_is_one_request_unless_a_key_was_pressed() {
        let first = Instant::now();
        let after = |milliseconds| first + Duration::from_millis(milliseconds);
        let mut requests = Requests::default();
        let found = [
            (names::SIGTERM, Sender::Other, 0),
            (names::SIGTERM, Sender::Other, 0),
            (names::SIGHUP, Sender::Other, 199),
            (names::SIGINT, Sender::Kernel, 199),
            (names::SIGUSR1, Sender::Other, 199),
            (names::SIGTERM, Sender::Other, 200),
            (names::SIGTERM, Sender::Other, 201),
        ]
        .map(|(signal, sender, at)| requests.is_known(signal, sender, after(at)));
        assert_eq!(found, [false, true, true, false, false, false, false]);
    }

    #[test]
    fn keys_of_the_terminal_are_told_from_other_requests() {
        assert_eq!(event(names::SIGINT, true), Some(Event::Typed(Signal::INT)));
        assert_eq!(event(names::SIGINT, false), Some(Event::Stop(Signal::INT)));
        assert_eq!(event(names::SIGTERM, true), Some(Event::Stop(Signal::TERM)));
        assert_eq!(event(names::SIGUSR1, false), Some(Event::User(Signal::USR1)));
        assert_eq!(event(names::SIGXFSZ, false), None);
    }
}
