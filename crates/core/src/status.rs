//! What the processes of a run tell of themselves while they run, as anybody of the same user can read it from outside.
//!
//! The launcher keeps a file in memory, which has no name in any folder. Its first page says what the run is ([`RunInfo`]), and
//! each rank that the launcher has started has a page after it ([`RankStatus`]). A rank maps its page and writes with plain
//! stores, so that a call costs nanoseconds; a reader takes copies of the page until two are the same. The kernel frees the file
//! with the last process that has it, so nothing is ever left behind.
//!
//! Numbers are words of 8 bytes in the order of the machine, since the file never leaves it. Nothing that is read is believed: any
//! bytes are read or refused.

mod activity;
mod page;
mod rate;

pub use activity::{
    BACKWARD, CallName, RENDEZVOUS, RankActivity, RankSummary, awaited_ranks, named_ranks, number_ranges, operation,
    sentences,
};
pub use page::{CallEntry, CallRecord, PAGE_WORDS, RankStatus, exit_word, rank_of_word, rank_word, words};
pub use rate::{Progress, samples_per_second};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The variable by which a rank learns where its page is.
pub const VARIABLE: &str = "ACCELERATE_STATUS";

/// The name of the file, which `/proc` shows.
pub const FILE_NAME: &str = "accelerate-status";

/// Bytes of a page: that of the run, and those of the ranks after it.
pub const PAGE_BYTES: usize = 4096;

/// What a descriptor of such a file looks like in `/proc`.
///
/// ```
/// assert_eq!(accelerate_core::status::link_text(), "/memfd:accelerate-status (deleted)");
/// ```
pub fn link_text() -> String {
    format!("/memfd:{FILE_NAME} (deleted)")
}

/// Where the page of a rank is: the value of [`VARIABLE`].
///
/// ```
/// use accelerate_core::status::StatusPlace;
/// let place: StatusPlace = "4711:9:1".parse()?;
/// assert_eq!((place.file(), place.page), ("/proc/4711/fd/9".to_owned(), 1));
/// assert_eq!(place.to_string(), "4711:9:1");
/// assert!("/etc/passwd".parse::<StatusPlace>().is_err());
/// # Ok::<(), accelerate_core::status::NoStatusPlace>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusPlace {
    /// The launcher.
    pub process_id: u32,
    /// The file among those that it has open.
    pub descriptor: u32,
    /// Which page; that of the run is number 0.
    pub page: u32,
}

/// A text that is no [`StatusPlace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoStatusPlace;

impl fmt::Display for NoStatusPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VARIABLE} is not three numbers with colons between them; it is for launchers to set")
    }
}

impl std::error::Error for NoStatusPlace {}

impl StatusPlace {
    /// The file, as a path.
    pub fn file(self) -> String {
        format!("/proc/{}/fd/{}", self.process_id, self.descriptor)
    }

    /// Where the page begins in the file.
    pub fn offset(self) -> u64 {
        u64::from(self.page) * PAGE_BYTES as u64
    }
}

impl fmt::Display for StatusPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.process_id, self.descriptor, self.page)
    }
}

impl FromStr for StatusPlace {
    type Err = NoStatusPlace;

    fn from_str(text: &str) -> Result<Self, NoStatusPlace> {
        let numbers: Option<Vec<u32>> = text.split(':').map(|number| number.parse().ok()).collect();
        match numbers.as_deref() {
            // The first page is that of the run.
            Some(&[process_id, descriptor, page]) if page > 0 => Ok(Self { process_id, descriptor, page }),
            _ => Err(NoStatusPlace),
        }
    }
}

/// What a run is, as far as this machine goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunInfo {
    /// The launcher's version.
    pub version: String,
    /// The launcher, or on several machines its agent on this one.
    pub process_id: u32,
    /// The program with its arguments; shortened where they are very long.
    pub command: Vec<String>,
    /// Count of all ranks.
    pub num_processes: usize,
    /// The first rank on this machine.
    pub first_rank: usize,
    /// Count of the ranks on this machine.
    pub num_local_processes: usize,
    /// When it started, in nanoseconds of the machine's clock (`CLOCK_MONOTONIC`).
    pub started: u64,
    /// How often it was started before, after failures.
    #[serde(default)]
    pub restart_count: usize,
    /// How often it may be started again.
    #[serde(default)]
    pub max_restarts: usize,
    /// What the process that keeps the file has to do with the ranks.
    #[serde(default)]
    pub part: RunPart,
}

/// What the process that keeps a file has to do with the ranks of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunPart {
    /// It has started those of this machine, and no other process has told it to.
    #[default]
    Launcher,
    /// It is the agent of a launcher, for one of several machines, and has started the ranks of that machine.
    Agent {
        /// What the launcher calls the machine.
        machine: String,
        /// Whose agent it is.
        launcher: LauncherName,
    },
    /// It is the launcher of agents, and has no ranks of its own.
    LauncherOfAgents {
        /// See [`LauncherName::id`].
        id: u64,
        /// The machines; of very many, the first.
        machines: Vec<String>,
        /// Count of the machines.
        num_machines: usize,
    },
    /// It is a launcher that waits before it starts the ranks again; none of them lives.
    Pause {
        /// When they are started again, in nanoseconds of the machine's clock.
        until: u64,
        /// What the last attempt died of.
        cause: String,
    },
}

/// A launcher as its agents know it, on whatever machine it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherName {
    /// The name of its machine.
    pub host: String,
    /// Its process there.
    pub process_id: u32,
    /// A random number, the same in the files of the launcher and of its agents: numbers of processes and names of machines may
    /// be those of others, too.
    pub id: u64,
}

/// What stands in front of the description of a run: the format, and the number of its bytes.
const FORMAT: u32 = 1;

impl RunInfo {
    /// The first page.
    ///
    /// ```
    /// use accelerate_core::status::{PAGE_BYTES, RunInfo, RunPart};
    /// let info = RunInfo {
    ///     version: "1.0".to_owned(),
    ///     process_id: 7,
    ///     command: vec!["train".to_owned(), "x".repeat(10_000)],
    ///     num_processes: 4,
    ///     first_rank: 0,
    ///     num_local_processes: 4,
    ///     started: 1,
    ///     restart_count: 0,
    ///     max_restarts: 0,
    ///     part: RunPart::Launcher,
    /// };
    /// let page = info.encode();
    /// assert_eq!(page.len(), PAGE_BYTES);
    /// let read = RunInfo::decode(&page).unwrap();
    /// assert_eq!((read.num_processes, read.command[0].as_str()), (4, "train"));
    /// assert!(RunInfo::decode(&page[1..]).is_none());
    /// ```
    pub fn encode(&self) -> Vec<u8> {
        let mut most = 1024;
        let text = loop {
            // Numbers and texts always have a form in JSON.
            let text = serde_json::to_vec(&self.shortened(most)).unwrap_or_default();
            // Without texts it is always short enough.
            if text.len() + 8 <= PAGE_BYTES || most == 0 {
                break text;
            }
            most /= 2;
        };
        let mut page = [FORMAT.to_ne_bytes(), (text.len() as u32).to_ne_bytes()].concat();
        page.extend(text);
        page.resize(PAGE_BYTES, 0);
        page
    }

    /// What a first page says; `None` for what is no such page, or is one of another version of this format.
    pub fn decode(page: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u32::from_ne_bytes(page.get(at..at + 4)?.try_into().ok()?));
        let num_bytes = (number(0)? == FORMAT).then(|| number(4))??;
        let info: Self = serde_json::from_slice(page.get(8..)?.get(..num_bytes as usize)?).ok()?;
        let after_last = info.first_rank.checked_add(info.num_local_processes)?;
        let starts_ranks = matches!(info.part, RunPart::Launcher | RunPart::Agent { .. });
        (starts_ranks == (0 < info.num_local_processes) && after_last <= info.num_processes).then_some(info)
    }

    /// With at most so many letters of each text, and so many texts of each list.
    fn shortened(&self, most: usize) -> Self {
        let list = |texts: &[String]| texts.iter().take(most).map(|text| cut(text, most)).collect();
        let part = match &self.part {
            RunPart::Launcher => RunPart::Launcher,
            RunPart::Agent { machine, launcher } => RunPart::Agent {
                machine: cut(machine, most),
                launcher: LauncherName { host: cut(&launcher.host, most), ..launcher.clone() },
            },
            RunPart::LauncherOfAgents { id, machines, num_machines } => {
                RunPart::LauncherOfAgents { id: *id, machines: list(machines), num_machines: *num_machines }
            }
            RunPart::Pause { until, cause } => RunPart::Pause { until: *until, cause: cut(cause, most) },
        };
        Self { version: cut(&self.version, most), command: list(&self.command), part, ..self.clone() }
    }
}

/// The beginning of a text.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}
