//! How a rank ended, and the story told about the one that failed first.

use std::fmt;
use std::time::Duration;

use accelerate_core::files::in_one_line;
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
}

impl Ended {
    /// With code 0.
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
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
            Self::Stuck => 1,
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
        }
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
    /// The out-of-memory killer has ended processes since the launch began.
    KillerRan,
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
            (Ended::Signalled { signal: signal_hook::consts::SIGKILL, .. }, MemoryPressure::Unknown) => {
                Some("possibly out of memory")
            }
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
                MemoryPressure::KillerDidNotRun => {
                    "the launcher did not send it, and the kernel's out-of-memory killer has not run: someone else \
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
        let told: Vec<_> = self.others.iter().filter(|other| other.was_told_to).map(|other| other.rank).collect();
        for other in self.others.iter().filter(|other| !other.was_told_to && !other.ended.is_success()) {
            write!(f, "\n  rank {} {} on its own too", other.rank, other.ended)?;
        }
        // A rank that ends early leaves the others alone in their calls.
        for other in self.others.iter().filter(|other| !other.was_told_to && other.ended.is_success()) {
            write!(f, "\n  rank {} had ended before, with code 0", other.rank)?;
        }
        for other in self.others.iter().filter(|other| other.ended == Ended::Stuck) {
            write!(f, "\n  rank {} {}", other.rank, other.ended)?;
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
        let mut activities: Vec<_> = [0, 1, 2, 3, 5].map(|rank| RankSummary { rank, activity: waiting.clone() }).into();
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
        ];
        assert_eq!(
            failure.to_string(),
            "rank 1 (process 4711) exited with code 3 after 12.3 s\n  \
               rank 2 exited with code 1 on its own too\n  \
               rank 0 had ended before, with code 0\n  \
               rank 3 was running and has been ended by the launcher"
        );
    }

    #[rstest]
    #[case(MemoryPressure::KillerRan, "out-of-memory killer has run")]
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
