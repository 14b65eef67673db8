//! The one error of this crate.

mod limit;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::failure::{Failure, LeftBehind, StopTrouble, Survivor, signal_name};
use crate::hosts::Problem;
use crate::restart::Restarts;
pub(crate) use limit::TEMPORARY;
use limit::{LOG_DIR, Limit, log_cure, temporary_place};

use accelerate_core::files::ShownPath;
use accelerate_core::status::{RankSummary, sentences};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a launch did not succeed.
///
/// Opaque and one word wide. Ask it with the predicates; [`exit_code`](Self::exit_code) is what a command
/// line should exit with, by the conventions of shells.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Program};
/// let error = LaunchConfig::new(Program::Executable("true".into()), 0).check().unwrap_err();
/// assert!(error.is_invalid_configuration());
/// assert_eq!(error.exit_code(), 2);
/// ```
pub struct Error(Box<Told>);

#[derive(Debug)]
struct Told {
    kind: Kind,
    /// What came before, in a run that was restarted.
    restarts: Restarts,
    /// How long ranks may live on, on machines that are lost.
    ranks_may_live: Duration,
    /// What could not be ended.
    left_behind: Vec<LeftBehind>,
}

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("{problem}")]
    InvalidConfiguration { problem: String },
    #[error(
        "port {port} of --main_process_port is already in use on this machine; choose another one, or \
         --main_process_port 0 for any free port"
    )]
    PortTaken { port: u16, source: io::Error },
    #[error(
        "port {port} of --main_process_port cannot be opened on this machine; choose one above 1023, or 0 for any free port"
    )]
    PortUnusable { port: u16, source: io::Error },
    #[error("the program {} was not found{searched}", program.shown())]
    ProgramNotFound { program: PathBuf, searched: String },
    #[error("{} cannot be run: {reason}", program.shown())]
    ProgramNotExecutable { program: PathBuf, reason: String },
    #[error("rank {rank} could not be started as {}", program.shown())]
    Spawn { rank: usize, program: PathBuf, source: io::Error },
    #[error(
        "{failed}, because this user may have no more {}; start fewer processes, or raise the limit ({})", limit.what(), limit.command()
    )]
    NoRoom { failed: String, rank: Option<usize>, limit: Limit, source: io::Error },
    #[error("{} cannot be written, where --tee and --log_dir keep the output; {}", path.shown(), log_cure(source, LOG_DIR))]
    LogUnwritable { path: PathBuf, source: io::Error },
    #[error(
        "{} cannot be written, where --tee keeps the output without --log_dir, {place}; {}",
        path.shown(), log_cure(source, TEMPORARY)
    )]
    TemporaryUnwritable { path: PathBuf, place: String, source: io::Error },
    #[error("{}", failure.headline())]
    ChildFailed { failure: Failure, stopped_by: Option<i32> },
    #[error("stopped by {}{}", signal_name(*signal), without_confirmation(unconfirmed))]
    Interrupted {
        signal: i32,
        /// The machines of which nobody knows whether ranks are left there.
        unconfirmed: Vec<String>,
        /// What the ranks were doing then.
        activities: Vec<RankSummary>,
        /// The ranks that had ended with code 0 before.
        had_ended: Vec<usize>,
        /// What went otherwise than it should.
        troubles: Vec<StopTrouble>,
        /// How long the ranks had.
        grace_period: Duration,
    },
    #[error("{}", listed(problems))]
    Preflight { problems: Vec<(String, Problem)> },
    #[error("{machine}: {}", problem.text)]
    OnMachine {
        machine: String,
        problem: Problem,
        /// What the ranks of the other machines were doing.
        activities: Vec<RankSummary>,
    },
    #[error(
        "the command {} cannot be run here, by which {} would be reached; {cure}",
        program.shown(), machines.join(", ")
    )]
    NotConnected { machines: Vec<String>, program: PathBuf, cure: String, source: io::Error },
    #[error("nobody reads the output of the ranks any more")]
    OutputClosed { source: io::Error },
    #[error(
        "`{command}` did not end within {} s, so it was ended; run it in a shell to see what it waits for: a pipe in \
         place of a file, a lock, a network",
        limit.as_secs_f32()
    )]
    TooSlow { command: String, limit: Duration },
    #[error(
        "`{command}` printed more than {limit_bytes} bytes, so it was ended; run it in a shell to see whether it is the \
         program that is meant"
    )]
    TooTalkative { command: String, limit_bytes: usize },
    #[error("`{command}` could not be started")]
    NotStarted { command: String, source: io::Error },
    #[error("{action} failed")]
    System { action: &'static str, source: io::Error },
}

impl Error {
    /// Counts or values of the configuration that contradict each other.
    pub fn is_invalid_configuration(&self) -> bool {
        matches!(self.0.kind, Kind::InvalidConfiguration { .. })
    }

    /// The port asked for is in use, or may not be opened by this user.
    pub fn is_port_taken(&self) -> bool {
        matches!(self.0.kind, Kind::PortTaken { .. } | Kind::PortUnusable { .. })
    }

    /// The program, script or Python interpreter does not exist.
    pub fn is_program_not_found(&self) -> bool {
        matches!(self.0.kind, Kind::ProgramNotFound { .. })
    }

    /// The program exists but cannot be run: no permission, a folder, or not a program.
    pub fn is_program_not_executable(&self) -> bool {
        matches!(self.0.kind, Kind::ProgramNotExecutable { .. })
    }

    /// The folder or a file for the output of the ranks cannot be made.
    pub fn is_log_unwritable(&self) -> bool {
        matches!(self.0.kind, Kind::LogUnwritable { .. } | Kind::TemporaryUnwritable { .. })
    }

    /// A rank ended other than with code 0. [`failure`](Self::failure) has the details.
    pub fn is_child_failed(&self) -> bool {
        matches!(self.0.kind, Kind::ChildFailed { .. })
    }

    /// The launcher was told to stop by a signal and has ended all ranks.
    pub fn is_interrupted(&self) -> bool {
        matches!(self.0.kind, Kind::Interrupted { .. })
    }

    /// The signal by which somebody told the launcher to stop, if somebody did: also one that came while a failed launch was
    /// being ended, where the failure is the error.
    pub fn stopped_by(&self) -> Option<i32> {
        match self.0.kind {
            Kind::Interrupted { signal, .. } => Some(signal),
            Kind::ChildFailed { stopped_by, .. } => stopped_by,
            _ => None,
        }
    }

    /// One of several machines could not take part, or was lost.
    pub fn is_machine(&self) -> bool {
        matches!(self.0.kind, Kind::Preflight { .. } | Kind::OnMachine { .. } | Kind::NotConnected { .. })
    }

    /// The reader of the launcher's output went away, and the ranks were ended for it.
    pub fn is_output_closed(&self) -> bool {
        matches!(self.0.kind, Kind::OutputClosed { .. })
    }

    /// A program that was [asked](crate::ask()) something was ended, because it passed a limit.
    pub fn is_limit_passed(&self) -> bool {
        matches!(self.0.kind, Kind::TooSlow { .. } | Kind::TooTalkative { .. })
    }

    /// The rank this error is about: the first that failed, or the one that could not be started.
    pub fn rank(&self) -> Option<usize> {
        match &self.0.kind {
            Kind::ChildFailed { failure, .. } => Some(failure.rank),
            Kind::Spawn { rank, .. } => Some(*rank),
            Kind::NoRoom { rank, .. } => *rank,
            _ => None,
        }
    }

    /// What the launcher should exit with: the failed rank's own code, 128 + n after signal n, 127 for a
    /// program that is not there, 126 for one that cannot run, 2 for a wrong configuration, else 1.
    pub fn exit_code(&self) -> u8 {
        match &self.0.kind {
            Kind::InvalidConfiguration { .. } => 2,
            Kind::ProgramNotFound { .. } => 127,
            Kind::NotConnected { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => 127,
                io::ErrorKind::PermissionDenied => 126,
                _ => 1,
            },
            Kind::ProgramNotExecutable { .. } | Kind::Spawn { .. } => 126,
            Kind::ChildFailed { failure, .. } => failure.ended.exit_code(),
            Kind::Interrupted { signal, .. } => exit_code_of_signal(*signal),
            Kind::Preflight { problems } => problems.first().map_or(1, |(_, problem)| problem.exit_code),
            Kind::OnMachine { problem, .. } => problem.exit_code,
            // What a shell reports for a program that wrote into a closed pipe.
            Kind::OutputClosed { .. } => exit_code_of_signal(signal_hook::consts::SIGPIPE),
            Kind::PortTaken { .. }
            | Kind::PortUnusable { .. }
            | Kind::NoRoom { .. }
            | Kind::LogUnwritable { .. }
            | Kind::TemporaryUnwritable { .. }
            | Kind::TooSlow { .. }
            | Kind::TooTalkative { .. }
            | Kind::NotStarted { .. }
            | Kind::System { .. } => 1,
        }
    }

    /// The whole story of a failed rank.
    pub fn failure(&self) -> Option<&Failure> {
        match &self.0.kind {
            Kind::ChildFailed { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// How often the run had been restarted before this, what its attempts died of, and why it was not restarted once more.
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, Program, Silent, launch};
    /// let config = LaunchConfig { max_restarts: 1, ..LaunchConfig::new(Program::Executable("false".into()), 1) };
    /// let error = launch(&config, &mut Silent).unwrap_err();
    /// assert_eq!(error.restarts().num_restarts(), 1);
    /// assert!(error.to_string().starts_with("after 1 restart: rank 0 "));
    /// ```
    pub fn restarts(&self) -> &Restarts {
        &self.0.restarts
    }

    /// All that there is to say: this, the last lines of a rank that failed, what ranks were doing, and what came before where the
    /// run had been restarted.
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, Program, Silent, launch};
    /// let args = vec!["-c".into(), "echo no data; exit 3".into()];
    /// let config = LaunchConfig { max_restarts: 1, args, ..LaunchConfig::new(Program::Executable("sh".into()), 1) };
    /// let config = LaunchConfig { capture: accelerate_launch::Capture::Always, ..config };
    /// let story = launch(&config, &mut Silent).unwrap_err().story();
    /// let ending = "\n  last lines of rank 0:\n    no data\n  every attempt failed in the same way";
    /// assert!(story.starts_with("after 1 restart: rank 0 ") && story.ends_with(ending), "{story}");
    /// ```
    pub fn story(&self) -> String {
        let mut text = self.to_string();
        match &self.0.kind {
            Kind::ChildFailed { failure, .. } => {
                let whole = failure.to_string();
                text.push_str(whole.strip_prefix(&failure.headline()).unwrap_or(&whole));
            }
            Kind::OnMachine { activities, .. } => {
                text = sentences(activities).into_iter().fold(text, |text, line| format!("{text}\n  {line}"));
            }
            Kind::Interrupted { troubles, grace_period, .. } => {
                let told = StopTrouble::sentences(troubles, *grace_period);
                text = told.into_iter().fold(text, |text, line| format!("{text}\n  {line}"));
            }
            _ => {}
        }
        let left = self.0.left_behind.iter().filter_map(LeftBehind::sentence);
        let text = left.fold(text, |text, line| format!("{text}\n  {line}"));
        self.restarts().to_string().lines().fold(text, |text, line| format!("{text}\n  {line}"))
    }

    /// Might it go better the next time? `has_run`: an attempt before this one has.
    pub(crate) fn is_worth_another_attempt(&self, has_run: bool) -> bool {
        match &self.0.kind {
            Kind::ChildFailed { .. } | Kind::OnMachine { .. } => true,
            // What stood in the way of the first start stays until somebody mends it.
            Kind::Preflight { .. } | Kind::NotConnected { .. } | Kind::PortTaken { .. } | Kind::NoRoom { .. } => {
                has_run
            }
            _ => false,
        }
    }

    /// In a few words: what two attempts that died of the same have in common.
    pub(crate) fn cause(&self) -> String {
        match &self.0.kind {
            Kind::ChildFailed { failure, .. } => {
                let on = failure.machine.as_ref().map(|machine| format!(" on {machine}")).unwrap_or_default();
                let memory = failure.lack_of_memory().map(|why| format!(" ({why})")).unwrap_or_default();
                format!("rank {}{on} {}{memory}", failure.rank, failure.ended)
            }
            kind => kind.to_string().lines().next().unwrap_or_default().to_owned(),
        }
    }

    /// For the line that tells of a restart: the first line of the error, and what to change where the next attempt would die of the
    /// same. The hint of the whole story is not told before the last attempt.
    pub(crate) fn in_a_line(&self) -> String {
        let text = self.to_string();
        let line = text.lines().next().unwrap_or_default();
        match self.failure().and_then(Failure::lack_of_memory) {
            Some(why) => format!("{line} ({why}; use a smaller batch, fewer processes or a higher memory limit)"),
            None => line.to_owned(),
        }
    }

    /// Machines that could not take part, each with the reason; of an error that is about something else, none.
    pub(crate) fn machines_out(&self) -> &[(String, Problem)] {
        match &self.0.kind {
            Kind::Preflight { problems } => problems,
            _ => &[],
        }
    }

    /// What the ranks were doing when this process was told to stop.
    pub(crate) fn activities(&self) -> &[RankSummary] {
        match &self.0.kind {
            Kind::Interrupted { activities, .. } => activities,
            _ => &[],
        }
    }

    /// What ranks were doing when this process was told to stop, or when a machine was lost.
    pub(crate) fn with_activities(mut self, found: Vec<RankSummary>) -> Self {
        if let Kind::Interrupted { activities, .. } | Kind::OnMachine { activities, .. } = &mut self.0.kind {
            *activities = found;
        }
        self
    }

    /// The same, unless it is about a rank that was told to end as the launcher was: then the run was stopped.
    pub(crate) fn or_stopped(self, grace_period: Duration) -> Self {
        let left_behind = self.0.left_behind.clone();
        match &self.0.kind {
            Kind::ChildFailed { failure, stopped_by: Some(signal) }
                if failure.ended.exit_code() == exit_code_of_signal(*signal) =>
            {
                let troubles =
                    failure.others.iter().filter_map(|other| StopTrouble::of_other(other, *signal)).collect();
                Self::interrupted(*signal)
                    .with_activities(failure.activities.clone())
                    .with_troubles(troubles, grace_period)
                    .with_left_behind(left_behind)
            }
            _ => self,
        }
    }

    /// How ranks ended that were told to stop, where that is worth a word, and how long they had.
    pub(crate) fn with_troubles(mut self, found: Vec<StopTrouble>, had: Duration) -> Self {
        if let Kind::Interrupted { troubles, grace_period, .. } = &mut self.0.kind {
            (*troubles, *grace_period) = (found, had);
        }
        self
    }

    /// The ranks that had ended with code 0 before this process was told to stop.
    pub(crate) fn with_ranks_that_had_ended(mut self, ranks: Vec<usize>) -> Self {
        if let Kind::Interrupted { had_ended, .. } = &mut self.0.kind {
            *had_ended = ranks;
        }
        self
    }

    pub(crate) fn had_ended(&self) -> &[usize] {
        match &self.0.kind {
            Kind::Interrupted { had_ended, .. } => had_ended,
            _ => &[],
        }
    }

    pub(crate) fn troubles(&self) -> &[StopTrouble] {
        match &self.0.kind {
            Kind::Interrupted { troubles, .. } => troubles,
            _ => &[],
        }
    }

    /// Processes of this machine that could not be ended.
    pub(crate) fn with_survivors(self, survivors: Vec<Survivor>) -> Self {
        match survivors.is_empty() {
            true => self,
            false => self.with_left_behind(vec![LeftBehind { machine: None, survivors, is_left_out: false }]),
        }
    }

    pub(crate) fn with_left_behind(mut self, left_behind: Vec<LeftBehind>) -> Self {
        self.0.left_behind = left_behind;
        self
    }

    /// What speaks against starting again.
    pub(crate) fn left_behind(&self) -> &[LeftBehind] {
        &self.0.left_behind
    }

    /// How long ranks may live on, on machines that are lost.
    pub(crate) fn ranks_may_live(&self) -> Duration {
        self.0.ranks_may_live
    }

    pub(crate) fn with_ranks_that_may_live(mut self, longest: Duration) -> Self {
        self.0.ranks_may_live = longest;
        self
    }

    pub(crate) fn with_restarts(mut self, restarts: Restarts) -> Self {
        self.0.restarts = restarts;
        self
    }

    /// A failed rank may not have found the main process.
    pub(crate) fn with_address_problem(mut self, problem: Option<String>) -> Self {
        if let Kind::ChildFailed { failure, .. } = &mut self.0.kind {
            failure.address_problem = problem;
        }
        self
    }

    #[cold]
    fn new(kind: Kind) -> Self {
        Self(Box::new(Told {
            kind,
            restarts: Restarts::default(),
            ranks_may_live: Duration::ZERO,
            left_behind: Vec::new(),
        }))
    }

    pub(crate) fn invalid_configuration(problem: String) -> Self {
        Self::new(Kind::InvalidConfiguration { problem })
    }

    pub(crate) fn port(port: u16, source: io::Error) -> Self {
        match (source.kind(), Limit::of(&source)) {
            (io::ErrorKind::AddrInUse, _) => Self::new(Kind::PortTaken { port, source }),
            (_, Some(_)) => Self::system("looking whether the port is free", source),
            (_, None) => Self::new(Kind::PortUnusable { port, source }),
        }
    }

    pub(crate) fn program_not_found(program: impl Into<PathBuf>, searched: impl Into<String>) -> Self {
        Self::new(Kind::ProgramNotFound { program: program.into(), searched: searched.into() })
    }

    pub(crate) fn program_not_executable(program: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::new(Kind::ProgramNotExecutable { program: program.into(), reason: reason.into() })
    }

    pub(crate) fn spawn(rank: usize, program: impl Into<PathBuf>, source: io::Error) -> Self {
        // A limit is no fault of the program.
        match Limit::of(&source) {
            Some(limit) => {
                let failed = format!("rank {rank} could not be started");
                Self::new(Kind::NoRoom { failed, rank: Some(rank), limit, source })
            }
            None => Self::new(Kind::Spawn { rank, program: program.into(), source }),
        }
    }

    pub(crate) fn log_unwritable(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::new(Kind::LogUnwritable { path: path.into(), source })
    }

    /// Where nobody has named the folder for the output.
    pub(crate) fn temporary_unwritable(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let place = temporary_place(std::env::var_os(TEMPORARY).filter(|folder| !folder.is_empty()).as_deref());
        Self::new(Kind::TemporaryUnwritable { path: path.into(), place, source })
    }

    pub(crate) fn too_slow(command: String, limit: Duration) -> Self {
        Self::new(Kind::TooSlow { command, limit })
    }

    pub(crate) fn too_talkative(command: String, limit_bytes: usize) -> Self {
        Self::new(Kind::TooTalkative { command, limit_bytes })
    }

    pub(crate) fn not_started(command: String, source: io::Error) -> Self {
        Self::new(Kind::NotStarted { command, source })
    }

    pub(crate) fn child_failed(failure: Failure, stopped_by: Option<i32>) -> Self {
        Self::new(Kind::ChildFailed { failure, stopped_by })
    }

    pub(crate) fn preflight(problems: Vec<(String, Problem)>) -> Self {
        Self::new(Kind::Preflight { problems })
    }

    pub(crate) fn on_machine(machine: String, problem: Problem) -> Self {
        Self::new(Kind::OnMachine { machine, problem, activities: Vec::new() })
    }

    pub(crate) fn not_connected(
        machines: Vec<String>,
        program: impl Into<PathBuf>,
        cure: String,
        source: io::Error,
    ) -> Self {
        match Limit::of(&source) {
            Some(limit) => {
                let failed = format!("{} could not be connected to", machines.join(", "));
                Self::new(Kind::NoRoom { failed, rank: None, limit, source })
            }
            None => Self::new(Kind::NotConnected { machines, program: program.into(), cure, source }),
        }
    }

    pub(crate) fn interrupted(signal: i32) -> Self {
        Self::interrupted_on(signal, Vec::new())
    }

    pub(crate) fn interrupted_on(signal: i32, unconfirmed: Vec<String>) -> Self {
        let (activities, had_ended, troubles) = (Vec::new(), Vec::new(), Vec::new());
        let grace_period = Duration::ZERO;
        Self::new(Kind::Interrupted { signal, unconfirmed, activities, had_ended, troubles, grace_period })
    }

    pub(crate) fn output_closed(source: io::Error) -> Self {
        Self::new(Kind::OutputClosed { source })
    }

    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        match Limit::of(&source) {
            Some(limit) => Self::new(Kind::NoRoom { failed: format!("{action} failed"), rank: None, limit, source }),
            None => Self::new(Kind::System { action, source }),
        }
    }
}

/// All that stands in the way of a launch on several machines: on one line if it is one thing.
fn listed(problems: &[(String, Problem)]) -> String {
    let mut by_text: Vec<(&str, Vec<&str>)> = Vec::new();
    for (machine, problem) in problems {
        match by_text.iter_mut().find(|(text, _)| *text == problem.text) {
            Some((_, machines)) => machines.push(machine),
            None => by_text.push((&problem.text, vec![machine])),
        }
    }
    // Where a text has several lines, none of them looks like another message.
    let one = |(text, machines): &(&str, Vec<&str>)| {
        let lines: Vec<_> = text.lines().map(str::trim_start).collect();
        format!("{}: {}", machines.join(", "), lines.join("\n    "))
    };
    match by_text.as_slice() {
        [only] => format!("nothing was started: {}", one(only)),
        all => all.iter().fold("nothing was started:".to_owned(), |text, found| format!("{text}\n  {}", one(found))),
    }
}

fn without_confirmation(machines: &[String]) -> String {
    match machines {
        [] => String::new(),
        [one] => format!("; {one} did not confirm the end of its ranks, so look whether some are left there"),
        several => format!(
            "; {} did not confirm the end of their ranks, so look whether some are left there",
            several.join(", ")
        ),
    }
}

/// 128 + n, the convention of shells; saturating because a code is one byte.
///
/// ```
/// assert_eq!(accelerate_launch::exit_code_of_signal(2), 130);
/// ```
pub fn exit_code_of_signal(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(u8::MAX).saturating_add(128)
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.0.restarts.prefix(), self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0.kind)
    }
}
