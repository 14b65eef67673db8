//! How a rank ended, and the story told about the one that failed first.

use std::fmt;
use std::time::Duration;

use accelerate_core::files::in_one_line;
use accelerate_core::restart::GiveUp;
use accelerate_core::status::{RankSummary, number_ranges, sentences};
use serde::{Deserialize, Serialize};

use crate::error::exit_code_of_signal;

/// How a process ended.
///
/// ```
/// use accelerate_launch::Ended;
/// let ended = Ended::Signalled { signal: 11, core_dumped: false };
/// assert_eq!(ended.to_string(), "was ended by SIGSEGV (11)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// By itself, with this code.
    Exited(i32),
    /// By a signal.
    Signalled {
        /// Number of the signal.
        signal: i32,
        /// The kernel wrote a core dump.
        core_dumped: bool,
    },
    /// Not at all: it is stuck in the kernel and outlived `SIGKILL`.
    Stuck,
    /// Not at all: it has become another user's, and the system refuses this one to signal it.
    Refused,
}

impl Ended {
    /// With code 0.
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }

    /// Has it not ended at all?
    pub(crate) fn lives_on(self) -> bool {
        matches!(self, Self::Stuck | Self::Refused)
    }

    /// Has it ended with a code that no signal of the launcher explains? Shells report signal n as 128 + n.
    fn has_own_code(self) -> bool {
        use signal_hook::consts::{SIGKILL, SIGTERM};
        let is_of_signal = |code: i32| [SIGTERM, SIGKILL].iter().any(|signal| code == 128 + signal);
        matches!(self, Self::Exited(code) if code != 0 && !is_of_signal(code))
    }

    /// What a shell reports for it: the code, or 128 + n after signal n.
    ///
    /// ```
    /// use accelerate_launch::Ended;
    /// assert_eq!(Ended::Exited(3).exit_code(), 3);
    /// assert_eq!(Ended::Signalled { signal: 9, core_dumped: false }.exit_code(), 137);
    /// ```
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Exited(code) => u8::try_from(code).unwrap_or(1),
            Self::Signalled { signal, .. } => exit_code_of_signal(signal),
            Self::Stuck | Self::Refused => 1,
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Signalled { signal, core_dumped } => {
                write!(f, "was ended by {} ({signal})", signal_name(*signal))?;
                f.write_str(if *core_dumped { " and left a core dump" } else { "" })
            }
            Self::Stuck => f.write_str("did not even end after SIGKILL: it is stuck in the kernel"),
            Self::Refused => f.write_str("could not be ended: it runs as another user, and signals to it are refused"),
        }
    }
}

/// A process of a launch that could not be ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// Its number.
    pub process_id: u32,
    /// The system refuses this user to signal it. Else it outlives `SIGKILL`, as a process does that is stuck in the kernel.
    pub is_refused: bool,
}

/// As many as are listed by their numbers.
const MOST_SURVIVORS_LISTED: usize = 5;

/// What there is to say of processes that could not be ended.
pub(crate) fn words_of_survivors(survivors: &[Survivor]) -> String {
    let group = |is_refused: bool, why: &str| {
        let numbers: Vec<_> =
            survivors.iter().filter(|it| it.is_refused == is_refused).map(|it| it.process_id.to_string()).collect();
        let listed = numbers.iter().take(MOST_SURVIVORS_LISTED).cloned().collect::<Vec<_>>().join(", ");
        let more = numbers.len().saturating_sub(MOST_SURVIVORS_LISTED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let plural = if numbers.len() == 1 { "" } else { "es" };
        (!numbers.is_empty()).then(|| format!("process{plural} {listed}{more} could not be ended: {why}"))
    };
    let refused = "signals are refused where a program has become another user's; end it as that user";
    let stuck =
        "SIGKILL has no effect while the kernel holds a process; look at its log, or whether a cgroup is frozen";
    [group(true, refused), group(false, stuck)].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// What of an attempt may go on where a restart would run beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeftBehind {
    /// In a run on several.
    pub(crate) machine: Option<String>,
    /// None where the machine has not said that its ranks have ended.
    pub(crate) survivors: Vec<Survivor>,
    /// The next attempt will not have this machine.
    pub(crate) is_left_out: bool,
}

impl LeftBehind {
    /// Why nothing is to start beside it.
    pub(crate) fn obstacle(&self) -> Option<GiveUp> {
        let machine = self.machine.clone();
        let why = match self.survivors.first() {
            Some(Survivor { process_id, .. }) => GiveUp::StillThere { process_id: *process_id, machine },
            None => GiveUp::Unconfirmed { machine: machine.unwrap_or_default() },
        };
        (!self.is_left_out).then_some(why)
    }

    /// For the end of the story, in which a machine that has said nothing is told otherwise.
    pub(crate) fn sentence(&self) -> Option<String> {
        let on = self.machine.as_ref().map(|machine| format!("{machine}: ")).unwrap_or_default();
        (!self.survivors.is_empty()).then(|| format!("{on}{}", words_of_survivors(&self.survivors)))
    }
}

/// How a rank ended that was told to stop, where that is worth a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StopTrouble {
    pub(crate) rank: usize,
    pub(crate) ended: Ended,
    /// By the launcher, after the time that it had.
    pub(crate) was_killed: bool,
}

impl StopTrouble {
    /// `None` for a rank that ended well, or as the signal ends programs.
    pub(crate) fn of(rank: usize, ended: Ended, was_killed: bool, signal: i32) -> Option<Self> {
        let is_expected = ended.is_success() || ended.exit_code() == exit_code_of_signal(signal);
        (was_killed || !is_expected).then_some(Self { rank, ended, was_killed })
    }

    /// Of one that was told after another had ended by the signal.
    pub(crate) fn of_other(other: &OtherRank, signal: i32) -> Option<Self> {
        let is_kill = matches!(other.ended, Ended::Signalled { signal: signal_hook::consts::SIGKILL, .. });
        Self::of(other.rank, other.ended, is_kill && other.was_told_to, signal)
    }

    /// A line for each way to end.
    pub(crate) fn sentences(troubles: &[Self], grace_period: Duration) -> Vec<String> {
        let ranks = |numbers: &[usize]| {
            let plural = if numbers.len() == 1 { "" } else { "s" };
            format!("rank{plural} {}", number_ranges(numbers))
        };
        let mut numbers: Vec<_> = troubles.iter().filter(|it| it.was_killed).map(|it| it.rank).collect();
        numbers.sort_unstable();
        let killed = (!numbers.is_empty()).then(|| {
            let verb = if numbers.len() == 1 { "was" } else { "were" };
            let (who, seconds) = (ranks(&numbers), grace_period.as_secs_f64());
            format!(
                "{who} did not end within {seconds} s and {verb} killed; raise --shutdown_grace_period if that is too short"
            )
        });
        let mut groups: Vec<(Ended, Vec<usize>)> = Vec::new();
        for trouble in troubles.iter().filter(|it| !it.was_killed) {
            match groups.iter_mut().find(|(ended, _)| *ended == trouble.ended) {
                Some((_, numbers)) => numbers.push(trouble.rank),
                None => groups.push((trouble.ended, vec![trouble.rank])),
            }
        }
        let others = groups.into_iter().map(|(ended, mut numbers)| {
            numbers.sort_unstable();
            let ended = match (ended, numbers.len()) {
                (Ended::Signalled { .. }, 2..) => ended.to_string().replacen("was", "were", 1),
                _ => ended.to_string(),
            };
            format!("told to stop, {} {ended}", ranks(&numbers))
        });
        killed.into_iter().chain(others).collect()
    }
}

/// Name of a signal as in `kill -l`, with `SIG` in front.
///
/// ```
/// assert_eq!(accelerate_launch::signal_name(2), "SIGINT");
/// ```
pub fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}

/// What the kernel's counters say about memory at the time of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryPressure {
    /// The out-of-memory killer has ended processes of the launcher's cgroup since the launch began.
    KillerRan,
    /// It has ended processes of this machine, which may be others'.
    KillerRanOnMachine,
    /// It has not.
    KillerDidNotRun,
    /// This system does not tell.
    Unknown,
}

/// Another rank at the end of a failed launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherRank {
    /// Its rank.
    pub rank: usize,
    /// How it ended.
    pub ended: Ended,
    /// The launcher had already asked it to.
    pub was_told_to: bool,
}

/// The rank that failed first, with everything known about why.
///
/// Its `Display` is the whole report over several lines; [`headline`](Self::headline) is the first of them.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Program, Silent, launch};
/// let config = LaunchConfig {
///     args: vec!["-c".into(), "kill -ILL $$".into()],
///     ..LaunchConfig::new(Program::Executable("sh".into()), 1)
/// };
/// let error = launch(&config, &mut Silent).unwrap_err();
/// let failure = error.failure().unwrap();
/// assert_eq!((failure.rank, failure.ended.exit_code()), (0, 132));
/// assert!(failure.hint().unwrap().contains("newer processor"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The machine of the rank, in a run on several.
    pub machine: Option<String>,
    /// Rank among all ranks.
    pub rank: usize,
    /// Process id it had.
    pub process_id: u32,
    /// How it ended.
    pub ended: Ended,
    /// From its start to its end.
    pub elapsed: Duration,
    /// The last lines it printed to either stream, oldest first; empty when its output was not captured.
    pub last_lines: Vec<String>,
    /// Whether memory ran out.
    pub memory: MemoryPressure,
    /// What is wrong with the name of the main process's machine, where this one does not know it.
    pub address_problem: Option<String>,
    /// What the ranks were doing when it failed, or when their machine heard of that, this one among them: in which call to other
    /// ranks they were, and since when. Programs that do not use the library tell nothing, and machines that are lost neither.
    pub activities: Vec<RankSummary>,
    /// All other ranks that are known of, in order.
    pub others: Vec<OtherRank>,
}

impl Failure {
    /// Who, how and when, in one line.
    pub fn headline(&self) -> String {
        let on = self.machine.as_ref().map(|machine| format!(" on {machine}")).unwrap_or_default();
        format!("rank {}{on} (process {}) {} after {}", self.rank, self.process_id, self.ended, seconds(self.elapsed))
    }

    /// Whether memory ran out, in a few words; `None` where nothing speaks for it.
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, Program, Silent, launch};
    /// let config = LaunchConfig::new(Program::Executable("false".into()), 1);
    /// assert_eq!(launch(&config, &mut Silent).unwrap_err().failure().unwrap().lack_of_memory(), None);
    /// ```
    pub fn lack_of_memory(&self) -> Option<&'static str> {
        match (self.ended, self.memory) {
            (Ended::Signalled { signal: signal_hook::consts::SIGKILL, .. }, MemoryPressure::KillerRan) => {
                Some("out of memory")
            }
            (
                Ended::Signalled { signal: signal_hook::consts::SIGKILL, .. },
                MemoryPressure::KillerRanOnMachine | MemoryPressure::Unknown,
            ) => Some("possibly out of memory"),
            _ => None,
        }
    }

    /// A likely cause and what to do about it, where the way of ending suggests one.
    pub fn hint(&self) -> Option<&'static str> {
        match self.ended {
            Ended::Exited(code) => match code {
                126 => Some("126 is what shells report for a file that is not a program for this machine"),
                127 => Some("127 is what shells report for a program, or a shared library of it, that is missing"),
                _ => None,
            },
            Ended::Signalled { signal, .. } => self.signal_hint(signal),
            Ended::Stuck => Some("a driver or a network file system does not answer; look at the kernel's log"),
            Ended::Refused => Some("end it as the user that it runs as; the launcher's user may not"),
        }
    }

    fn signal_hint(&self, signal: i32) -> Option<&'static str> {
        use signal_hook::consts as names;
        match signal {
            names::SIGKILL => Some(match self.memory {
                MemoryPressure::KillerRan => {
                    "the machine or its container ran out of memory: the kernel's out-of-memory killer has run during \
                     this launch; use a smaller batch, fewer processes or a higher memory limit"
                }
                MemoryPressure::KillerRanOnMachine => {
                    "the launcher did not send it: possibly out of memory, as the kernel's out-of-memory killer has run on this machine; \
                     whose processes it has ended is not known here"
                }
                MemoryPressure::KillerDidNotRun => {
                    "the launcher did not send it, and the kernel's out-of-memory killer has not run here: someone else \
                     ended the process, a batch system for example"
                }
                MemoryPressure::Unknown => {
                    "the launcher did not send it: possibly out of memory; compare the memory the ranks need with \
                     what the machine or its container has"
                }
            }),
            names::SIGSEGV => Some("it touched memory that is not its own: a fault in native code"),
            names::SIGBUS => Some(
                "often a full /dev/shm, or a file that became shorter while it was mapped into memory; in a container, \
                 raise the shared memory size",
            ),
            names::SIGILL => Some("the program, or a library of it, was built for a newer processor than this one"),
            names::SIGABRT => {
                Some("it gave up by itself, for the reason in its last lines, or somebody has sent it this signal")
            }
            names::SIGTERM | names::SIGHUP => Some(
                "the launcher did not send it: somebody else has told this process to end, a batch system for example",
            ),
            names::SIGXCPU => Some("it used up its limit of processor time (ulimit -t)"),
            names::SIGXFSZ => Some("it wrote a file larger than its limit (ulimit -f)"),
            _ => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        for hint in self.hint().into_iter().chain(self.address_problem.as_deref()) {
            write!(f, "\n  {}", in_one_line(hint))?;
        }
        if !self.last_lines.is_empty() {
            write!(f, "\n  last lines of rank {}:", self.rank)?;
            // An agent may send anything as a line.
            for line in self.last_lines.iter().flat_map(|line| line.lines()) {
                write!(f, "\n    {line}")?;
            }
        }
        for sentence in sentences(&self.activities) {
            write!(f, "\n  {sentence}")?;
        }
        let told = self.others.iter().filter(|other| other.was_told_to && !other.ended.lives_on());
        let (by_themselves, told): (Vec<_>, Vec<&OtherRank>) = told.partition(|other| other.ended.has_own_code());
        let told: Vec<_> = told.into_iter().map(|other| other.rank).collect();
        for other in self.others.iter().filter(|other| !other.was_told_to && !other.ended.is_success()) {
            write!(f, "\n  rank {} {} on its own too", other.rank, other.ended)?;
        }
        // A rank that ends early leaves the others alone in their calls.
        for other in self.others.iter().filter(|other| !other.was_told_to && other.ended.is_success()) {
            write!(f, "\n  rank {} had ended before, with code 0", other.rank)?;
        }
        for other in self.others.iter().filter(|other| other.was_told_to && other.ended.lives_on()) {
            write!(f, "\n  rank {} {}", other.rank, other.ended)?;
        }
        // They may have failed before they were told to end.
        for alike in by_themselves.chunk_by(|one, next| one.ended == next.ended) {
            let ranks: Vec<_> = alike.iter().map(|other| other.rank).collect();
            let (ended, numbers) = (&alike[0].ended, number_ranges(&ranks));
            let subject = if ranks.len() == 1 { "rank" } else { "ranks" };
            write!(f, "\n  {subject} {numbers} had been told to end, and {ended}")?;
        }
        match told[..] {
            [] => Ok(()),
            [one] => write!(f, "\n  rank {one} was running and has been ended by the launcher"),
            _ => write!(f, "\n  ranks {} were running and have been ended by the launcher", number_ranges(&told)),
        }
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use accelerate_core::status::{CallName, RankActivity};
    use rstest::rstest;

    fn failure(ended: Ended) -> Failure {
        Failure {
            machine: None,
            rank: 1,
            process_id: 4711,
            ended,
            elapsed: Duration::from_millis(12_340),
            last_lines: vec!["Traceback:".into(), "  ValueError: x".into()],
            memory: MemoryPressure::Unknown,
            address_problem: None,
            activities: Vec::new(),
            others: [0, 2, 3, 5]
                .map(|rank| OtherRank {
                    rank,
                    ended: Ended::Signalled { signal: 15, core_dumped: false },
                    was_told_to: true,
                })
                .into(),
        }
    }

    #[test]
    fn the_report_tells_the_whole_story() {
        assert_eq!(
            failure(Ended::Exited(3)).to_string(),
            "rank 1 (process 4711) exited with code 3 after 12.3 s\n  \
               last lines of rank 1:\n    \
                 Traceback:\n      \
                   ValueError: x\n  \
               ranks 0, 2-3, 5 were running and have been ended by the launcher"
        );
    }

    #[test]
    fn what_ranks_were_doing_comes_before_how_they_ended() {
        let call = CallName { op: "all_reduce".to_owned(), sequence: 17, site: Some("src/main.rs:40".to_owned()) };
        let waiting = RankActivity::InCall { call, elapsed: Duration::from_millis(2100) };
        let mut activities: Vec<_> =
            [0, 1, 2, 3, 5].map(|rank| RankSummary { rank, activity: waiting.clone(), is_stopped: false }).into();
        activities[1].activity = RankActivity::Computing { after: None };
        let text = Failure { last_lines: Vec::new(), activities, ..failure(Ended::Exited(3)) }.to_string();
        let wanted = "rank 1 (process 4711) exited with code 3 after 12.3 s\n  \
             ranks 0, 2-3, 5 were in all_reduce (collective 17) at src/main.rs:40 for 2.1 s\n  \
             rank 1 was computing and had made no call to other ranks\n  \
             ranks 0, 2-3, 5 were running and have been ended by the launcher";
        assert_eq!(text, wanted);
    }

    #[test]
    fn a_main_process_that_cannot_be_found_is_told_with_the_failure() {
        let problem = Some("the name node0 has no address".to_owned());
        let text = Failure { address_problem: problem, ..failure(Ended::Exited(3)) }.to_string();
        assert!(text.contains("after 12.3 s\n  the name node0 has no address\n  last lines"), "{text}");
    }

    #[test]
    fn ranks_that_failed_by_themselves_are_told_apart() {
        let mut failure = failure(Ended::Exited(3));
        failure.last_lines.clear();
        failure.others = vec![
            OtherRank { rank: 0, ended: Ended::Exited(0), was_told_to: false },
            OtherRank { rank: 2, ended: Ended::Exited(1), was_told_to: false },
            OtherRank { rank: 3, ended: Ended::Exited(0), was_told_to: true },
            OtherRank { rank: 4, ended: Ended::Exited(6), was_told_to: true },
            OtherRank { rank: 5, ended: Ended::Exited(6), was_told_to: true },
            OtherRank { rank: 6, ended: Ended::Exited(143), was_told_to: true },
        ];
        assert_eq!(
            failure.to_string(),
            "rank 1 (process 4711) exited with code 3 after 12.3 s\n  \
               rank 2 exited with code 1 on its own too\n  \
               rank 0 had ended before, with code 0\n  \
               ranks 4-5 had been told to end, and exited with code 6\n  \
               ranks 3, 6 were running and have been ended by the launcher"
        );
    }

    #[test]
    fn what_lives_on_has_not_been_ended() {
        let mut failure = Failure { last_lines: Vec::new(), ..failure(Ended::Exited(3)) };
        failure.others[1].ended = Ended::Refused;
        let wanted = "rank 1 (process 4711) exited with code 3 after 12.3 s\n  \
             rank 2 could not be ended: it runs as another user, and signals to it are refused\n  \
             ranks 0, 3, 5 were running and have been ended by the launcher";
        assert_eq!(failure.to_string(), wanted);
    }

    #[test]
    fn survivors_are_told_with_the_reason() {
        let survivor = |process_id, is_refused| Survivor { process_id, is_refused };
        let text = words_of_survivors(&[survivor(7, true), survivor(8, false), survivor(9, true)]);
        assert!(text.starts_with("processes 7, 9 could not be ended: signals are refused"), "{text}");
        assert!(text.contains("; process 8 could not be ended: SIGKILL has no effect"), "{text}");
        let many: Vec<_> = (1..=8).map(|number| survivor(number, false)).collect();
        assert!(words_of_survivors(&many).starts_with("processes 1, 2, 3, 4, 5 and 3 more could not"));
    }

    #[rstest]
    #[case::well(Ended::Exited(0), false, None)]
    #[case::by_the_signal(Ended::Signalled { signal: 15, core_dumped: false }, false, None)]
    #[case::by_a_shell(Ended::Exited(143), false, None)]
    #[case::another_code(Ended::Exited(4), false, Some("told to stop, ranks 0-1 exited with code 4"))]
    #[case::a_fault(
        Ended::Signalled { signal: 11, core_dumped: false }, false, Some("told to stop, ranks 0-1 were ended by SIGSEGV (11)")
    )]
    #[case::too_late(
        Ended::Signalled { signal: 9, core_dumped: false }, true,
        Some("ranks 0-1 did not end within 1 s and were killed; raise --shutdown_grace_period if that is too short")
    )]
    fn ranks_that_do_not_stop_as_they_are_told_are_named(
        #[case] ended: Ended,
        #[case] was_killed: bool,
        #[case] words: Option<&str>,
    ) {
        let troubles: Vec<_> = [1, 0].iter().filter_map(|rank| StopTrouble::of(*rank, ended, was_killed, 15)).collect();
        assert_eq!(StopTrouble::sentences(&troubles, Duration::from_secs(1)), Vec::from_iter(words));
    }

    #[rstest]
    #[case(MemoryPressure::KillerRan, "out-of-memory killer has run")]
    #[case(MemoryPressure::KillerRanOnMachine, "possibly out of memory")]
    #[case(MemoryPressure::KillerDidNotRun, "has not run")]
    #[case(MemoryPressure::Unknown, "possibly out of memory")]
    fn a_kill_is_explained_by_the_memory_counters(#[case] memory: MemoryPressure, #[case] words: &str) {
        let text = Failure { memory, ..failure(Ended::Signalled { signal: 9, core_dumped: false }) }.to_string();
        assert!(text.contains("by SIGKILL (9)") && text.contains(words), "{text}");
    }

    #[rstest]
    #[case(9, MemoryPressure::KillerRan, Some("out of memory"))]
    #[case(9, MemoryPressure::Unknown, Some("possibly out of memory"))]
    #[case(9, MemoryPressure::KillerDidNotRun, None)]
    #[case::of_somebody_else(11, MemoryPressure::KillerRan, None)]
    fn only_a_kill_speaks_for_a_lack_of_memory(
        #[case] signal: i32,
        #[case] memory: MemoryPressure,
        #[case] words: Option<&str>,
    ) {
        let failure = Failure { memory, ..failure(Ended::Signalled { signal, core_dumped: false }) };
        assert_eq!(failure.lack_of_memory(), words);
    }

    #[rstest]
    #[case(11, true, "SIGSEGV (11) and left a core dump")]
    #[case(7, false, "/dev/shm")]
    #[case(4, false, "newer processor")]
    #[case(15, false, "the launcher did not send it: somebody else")]
    #[case(40, false, "by signal 40 (40)")]
    fn signals_have_names_and_hints(#[case] signal: i32, #[case] core_dumped: bool, #[case] words: &str) {
        let text = failure(Ended::Signalled { signal, core_dumped }).to_string();
        assert!(text.contains(words), "{text}");
    }
}
