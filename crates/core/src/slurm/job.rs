//! What `scontrol show job` says of a job.

/// A job as Slurm describes it.
///
/// ```
/// use accelerate_core::slurm::Job;
/// let job = Job::parse("JobId=7 JobName=train\n   JobState=FAILED Reason=NonZeroExitCode\n   ExitCode=3:0\n   StdOut=/x/a b.out\n");
/// assert!(job.is_over());
/// assert_eq!((job.exit_code(), job.output.as_deref()), (3, Some("/x/a b.out")));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// `PENDING`, `RUNNING`, `COMPLETED` and so on; empty if the text does not say it.
    pub state: String,
    /// Why it is in that state.
    pub reason: Option<String>,
    /// The machines that it runs on, as a host list.
    pub nodes: Option<String>,
    /// The file that its output goes to.
    pub output: Option<String>,
    /// The code of the batch script, and the signal that ended it.
    exit: Option<(u8, u8)>,
}

/// The states that a job does not leave again.
const OVER: [&str; 10] = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
];

impl Job {
    /// Reads the text of `scontrol show job`. What it does not say stays empty.
    pub fn parse(text: &str) -> Self {
        let word = |key: &str| {
            let said = text.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            said.filter(|value| !value.is_empty() && *value != "(null)" && *value != "None").map(str::to_owned)
        };
        let line = |key: &str| text.lines().find_map(|line| line.trim_start().strip_prefix(key)).map(str::to_owned);
        let exit = word("ExitCode").and_then(|exit| {
            let (code, signal) = exit.split_once(':')?;
            Some((code.parse().ok()?, signal.parse().ok()?))
        });
        Self {
            state: word("JobState").unwrap_or_default(),
            reason: word("Reason"),
            nodes: word("NodeList"),
            output: line("StdOut="),
            exit,
        }
    }

    /// It has ended, and will not be queued again.
    pub fn is_over(&self) -> bool {
        OVER.contains(&self.state.as_str())
    }

    /// The exit code that stands for how it has ended: 0 only for a job that is completed.
    pub fn exit_code(&self) -> u8 {
        match (self.state.as_str(), self.exit) {
            ("COMPLETED", _) => 0,
            (_, Some((0, signal @ 1..128))) => 128 + signal,
            (_, Some((code @ 1.., _))) => code,
            _ => 1,
        }
    }
}
