//! The file in memory in which the ranks of a run tell of themselves, as the launcher keeps it, and finding those of others.
//!
//! It is a file without a name, which the kernel frees with the last process that has it: nothing is left behind, however
//! launchers and ranks end, and there is no folder in which somebody else could put something. It can neither shrink nor grow, so
//! that a rank which has mapped its page never touches memory that is gone. Only processes of the same user get at it, by the
//! descriptors that `/proc` shows of the launcher.
//!
//! A launcher that has no ranks tells of itself by such a file, too, which has no pages of ranks then: while its agents on several
//! machines have them, and while it waits before it starts them again. What a file says of the run never changes, so nobody ever
//! reads half of it; what is new is in another file.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use accelerate_core::status::{
    FILE_NAME, LauncherName, PAGE_BYTES, RankStatus, RankSummary, RunInfo, RunPart, StatusPlace, exit_word, link_text,
    rank_word, words,
};
use rustix::fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::geteuid;
use rustix::system::uname;
use rustix::time::{ClockId, clock_gettime};

use crate::config::{LaunchConfig, MAX_LOCAL_PROCESSES};
use crate::failure::Ended;
use crate::plan::Plan;

/// The path by which a program starts itself, even if its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// How often a page is read until nothing in it was just being written. A rank that is stopped may have been writing.
const MOST_READINGS: usize = 100;

/// The clock of this machine by which pages tell when something was, in nanoseconds.
///
/// ```
/// let before = accelerate_launch::status::now();
/// assert!(before <= accelerate_launch::status::now());
/// ```
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// This process, as a new launcher of agents.
pub(crate) fn new_launcher_name() -> LauncherName {
    LauncherName {
        host: uname().nodename().to_string_lossy().into_owned(),
        process_id: std::process::id(),
        id: RandomState::new().build_hasher().finish(),
    }
}

/// The words of a command, with the path of the program where it starts itself.
fn shown_command<'a>(words: impl Iterator<Item = &'a OsStr>) -> Vec<String> {
    let name = |word: &OsStr| match std::env::current_exe().ok().filter(|_| word == OWN_PROGRAM) {
        Some(own) => own.to_string_lossy().into_owned(),
        None => word.to_string_lossy().into_owned(),
    };
    words.map(name).collect()
}

/// The file of a run of this process.
#[derive(Debug)]
pub(crate) struct StatusFile {
    file: File,
    first_rank: usize,
    num_local_processes: usize,
}

impl StatusFile {
    /// A run is no worse without it: where the kernel does not make such files, there is none.
    pub(crate) fn of_plan(plan: &Plan, part: RunPart) -> Option<Self> {
        let first = plan.ranks.first()?;
        let variable =
            |name: &str| first.environment.iter().find(|(other, _)| other == name)?.1.as_ref()?.to_str()?.parse().ok();
        let info = RunInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process_id: std::process::id(),
            command: shown_command(first.command.iter().map(OsString::as_os_str)),
            num_processes: plan.world_size,
            first_rank: first.rank,
            num_local_processes: plan.ranks.len(),
            started: now(),
            restart_count: variable("TORCHELASTIC_RESTART_COUNT").unwrap_or(0),
            max_restarts: variable("TORCHELASTIC_MAX_RESTARTS").unwrap_or(0),
            part,
        };
        Self::create(&info).ok()
    }

    /// Of a launcher that has no ranks, because agents have them or none lives now. It tells so as long as this value is there.
    pub(crate) fn without_ranks(config: &LaunchConfig, part: RunPart) -> Option<Self> {
        let words = std::iter::once(config.program.name()).chain(config.args.iter().map(|word| word.as_os_str()));
        let info = RunInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process_id: std::process::id(),
            command: shown_command(words),
            num_processes: config.num_processes,
            first_rank: 0,
            num_local_processes: 0,
            started: now(),
            restart_count: config.restart_count,
            max_restarts: config.max_restarts,
            part,
        };
        Self::create(&info).ok()
    }

    /// Of a launcher that starts its ranks again after a while.
    pub(crate) fn of_pause(config: &LaunchConfig, after: Duration, cause: &str) -> Option<Self> {
        let until = now().saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX));
        Self::without_ranks(config, RunPart::Pause { until, cause: cause.to_owned() })
    }

    fn create(info: &RunInfo) -> io::Result<Self> {
        let file = File::from(memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(((1 + info.num_local_processes) * PAGE_BYTES) as u64)?;
        file.write_all_at(&info.encode(), 0)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, first_rank: info.first_rank, num_local_processes: info.num_local_processes })
    }

    /// Where the page of a rank is, by its place among those of this machine.
    pub(crate) fn place(&self, index: usize) -> Option<StatusPlace> {
        let page = u32::try_from(index + 1).ok()?;
        let descriptor = u32::try_from(self.file.as_raw_fd()).ok()?;
        Some(StatusPlace { process_id: std::process::id(), descriptor, page })
    }

    pub(crate) fn rank_started(&self, index: usize, process_id: u32) {
        self.write(index, words::STARTED, u64::from(process_id));
    }

    pub(crate) fn rank_ended(&self, index: usize, ended: Ended) {
        match ended {
            Ended::Exited(code) => self.write(index, words::ENDED, exit_word(Ok(code))),
            Ended::Signalled { signal, .. } => self.write(index, words::ENDED, exit_word(Err(signal))),
            Ended::Stuck | Ended::Refused => {}
        }
    }

    /// Tells the ranks of this machine which rank of the run was the first to end with code 0.
    fn first_ended(&self, rank: usize) {
        (0..self.num_local_processes).for_each(|index| self.write(index, words::FIRST_ENDED, rank_word(rank)));
    }

    fn write(&self, index: usize, word: usize, value: u64) {
        // The file has this page, and lies in memory.
        let _ = self.file.write_all_at(&value.to_ne_bytes(), ((1 + index) * PAGE_BYTES + 8 * word) as u64);
    }

    /// What ranks are doing now.
    pub(crate) fn activities(&self, indexes: impl Iterator<Item = usize>) -> Vec<RankSummary> {
        let now = now();
        let summary = |index| {
            let status = read(&self.file, index);
            let process = status.owner.or(status.started).filter(|_| status.ended.is_none());
            let is_stopped = process.and_then(process_state) == Some('T');
            RankSummary { rank: self.first_rank + index, activity: status.activity(now), is_stopped }
        };
        indexes.map(summary).collect()
    }
}

/// The first rank of the run that has ended with code 0, on whatever machine. The ranks of this one are told of it, since those
/// that have not met it by then never will; they look for it while they wait for the others. Whoever hears of the end first says
/// so, be it before there is a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct FirstEnded(Arc<Mutex<Told>>);

#[derive(Debug, Default)]
struct Told {
    rank: Option<usize>,
    file: Option<Arc<StatusFile>>,
}

impl FirstEnded {
    /// A rank has ended with code 0.
    pub(crate) fn note(&self, rank: usize) {
        self.change(|told| {
            // Once is enough, and for thousands of ranks it is a lot less.
            if told.rank.is_none() {
                told.rank = Some(rank);
                told.tell();
            }
        });
    }

    /// From now on it is told in this file.
    pub(crate) fn tell_in(&self, file: &Arc<StatusFile>) {
        self.change(|told| {
            told.file = Some(Arc::clone(file));
            told.tell();
        });
    }

    fn change(&self, change: impl FnOnce(&mut Told)) {
        // Whole after every statement.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Told {
    fn tell(&self) {
        if let (Some(rank), Some(file)) = (self.rank, &self.file) {
            file.first_ended(rank);
        }
    }
}

/// What the kernel says of a process by a letter, as `ps` shows it: `R` runs, `S` and `D` wait, `T` is stopped by a signal, `t` by a
/// debugger, `Z` has ended. `None` where there is no such process.
///
/// ```
/// use accelerate_launch::status::process_state;
/// assert!(process_state(std::process::id()).is_some());
/// ```
pub fn process_state(process_id: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process_id}/stat")).ok()?;
    // The name before it, in parentheses, may have anything in it.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// What a rank tells of itself.
fn read(file: &File, index: usize) -> RankStatus {
    let page = || {
        let mut page = vec![0; PAGE_BYTES];
        // What cannot be read says nothing.
        file.read_exact_at(&mut page, ((1 + index) * PAGE_BYTES) as u64).map_or_else(|_| Vec::new(), |()| page)
    };
    let mut before = page();
    let mut status = RankStatus::default();
    for _ in 0..MOST_READINGS {
        let after = page();
        let (read, is_whole) = RankStatus::decode(&before, &after);
        status = read;
        if is_whole {
            break;
        }
        before = after;
        thread::yield_now();
    }
    status
}

/// A run that is going on, or the part of it on this machine.
#[derive(Debug)]
pub struct Run {
    /// What it is.
    pub info: RunInfo,
    file: File,
}

impl Run {
    /// What its ranks on this machine tell of themselves, in order.
    pub fn ranks(&self) -> Vec<RankStatus> {
        (0..self.info.num_local_processes).map(|index| read(&self.file, index)).collect()
    }
}

/// What launchers and agents of this user on this machine tell of their runs, in the order in which they began. Those in containers
/// are seen from in there. A run on several machines is there once for its launcher, and once for each agent that is here.
///
/// # Errors
///
/// `/proc` cannot be read.
///
/// ```
/// use accelerate_launch::status::runs;
/// assert!(runs()?.iter().all(|run| run.ranks().len() == run.info.num_local_processes));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn runs() -> io::Result<Vec<Run>> {
    let own = geteuid().as_raw();
    let mut runs = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
        let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if process.metadata().is_ok_and(|process| process.uid() == own) {
            runs.extend(runs_of(id));
        }
    }
    runs.sort_by_key(|run: &Run| (run.info.started, run.info.process_id));
    Ok(runs)
}

/// Has a process a file like that of a launcher in which nobody can read of a run? Then its launcher is of another version, or a
/// rank has written over what it said.
///
/// ```
/// assert!(!accelerate_launch::status::is_unreadable(std::process::id()));
/// ```
pub fn is_unreadable(process_id: u32) -> bool {
    let is_run = |file: &File| info_in(file).is_some();
    files_of(process_id).iter().any(|file| own_metadata(file).is_some() && !is_run(file))
}

/// The runs that a process is the launcher of. It may end at any moment, and what it has may be anything.
fn runs_of(process_id: u32) -> Vec<Run> {
    let mut seen = BTreeSet::new();
    let runs = files_of(process_id).into_iter().filter_map(|file| run_in(file, process_id));
    // A descriptor may be there twice.
    runs.filter(|(_, number)| seen.insert(*number)).map(|(run, _)| run).collect()
}

/// What a process has open under the name of such a file.
fn files_of(process_id: u32) -> Vec<File> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process_id}/fd")) else { return Vec::new() };
    let wanted = link_text();
    descriptors
        .flatten()
        .filter(|descriptor| fs::read_link(descriptor.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str()))
        .filter_map(|descriptor| open(&descriptor.path()).ok())
        .collect()
}

/// Never waits for anybody: in a container the same name may be that of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    File::options().read(true).custom_flags(flags.bits() as i32).open(path)
}

/// The run of a file and the file's number, if it is what the launcher `process_id` has made.
fn run_in(file: File, process_id: u32) -> Option<(Run, u64)> {
    let metadata = own_metadata(&file)?;
    let info = info_in(&file)?;
    // In another container its number is another one, and those of its ranks are.
    let is_of_launcher = info.process_id == process_id && info.num_local_processes <= MAX_LOCAL_PROCESSES;
    let num_bytes = (1 + info.num_local_processes) as u64 * PAGE_BYTES as u64;
    (is_of_launcher && metadata.len() == num_bytes).then(|| (Run { info, file }, metadata.ino()))
}

/// Of a file that is one, and of this user.
fn own_metadata(file: &File) -> Option<Metadata> {
    file.metadata().ok().filter(|metadata| metadata.is_file() && metadata.uid() == geteuid().as_raw())
}

fn info_in(file: &File) -> Option<RunInfo> {
    let mut page = vec![0; PAGE_BYTES];
    file.read_exact_at(&mut page, 0).ok()?;
    RunInfo::decode(&page)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use accelerate_core::status::{CallEntry, RankActivity};
    use rstest::rstest;

    fn info() -> RunInfo {
        RunInfo {
            version: "1".to_owned(),
            process_id: std::process::id(),
            command: vec!["train".to_owned()],
            num_processes: 5,
            first_rank: 3,
            num_local_processes: 2,
            started: now(),
            restart_count: 0,
            max_restarts: 0,
            part: RunPart::Launcher,
        }
    }

    /// Those of other tests in this process aside.
    fn own_runs(started: u64) -> Vec<Run> {
        runs().unwrap().into_iter().filter(|run| run.info.started == started).collect()
    }

    #[test]
    fn a_run_is_found_once_with_what_its_ranks_tell_until_it_is_over() {
        let info = info();
        let status = StatusFile::create(&info).unwrap();
        let _another_descriptor = status.file.try_clone().unwrap();
        status.rank_started(1, 77);
        status.rank_ended(0, Ended::Signalled { signal: 9, core_dumped: false });
        let runs = own_runs(info.started);
        assert_eq!(runs.iter().map(|run| &run.info).collect::<Vec<_>>(), [&info]);
        let ranks = runs[0].ranks();
        assert_eq!(
            ranks.iter().map(|rank| (rank.started, rank.ended)).collect::<Vec<_>>(),
            [(None, Some(Err(9))), (Some(77), None)]
        );
        drop((status, _another_descriptor, runs));
        assert!(own_runs(info.started).is_empty());
    }

    /// Of one that waits, and of one whose ranks are on other machines.
    #[test]
    fn a_launcher_without_ranks_is_found_as_long_as_it_tells() {
        let config = LaunchConfig {
            args: vec!["--epochs".into()],
            restart_count: 2,
            max_restarts: 3,
            ..LaunchConfig::new(crate::Program::Executable("train".into()), 4)
        };
        let before = now();
        let status = StatusFile::of_pause(&config, Duration::from_secs(5), "rank 1 failed").unwrap();
        let started = run_in(status.file.try_clone().unwrap(), std::process::id()).unwrap().0.info.started;
        let runs = own_runs(started);
        assert_eq!(runs.len(), 1);
        let found = &runs[0];
        assert_eq!((found.info.num_processes, found.info.restart_count, found.info.max_restarts), (4, 2, 3));
        assert_eq!((found.info.command.join(" ").as_str(), found.ranks().len()), ("train --epochs", 0));
        match &found.info.part {
            RunPart::Pause { until, cause } => {
                assert!((before..=now()).contains(&(until - 5_000_000_000)) && cause == "rank 1 failed", "{found:?}");
            }
            other => unreachable!("{other:?}"),
        }
        assert!(StatusFile::of_pause(&config, Duration::MAX, "").is_some(), "no time is too long");
        drop((status, runs));
        assert!(own_runs(started).is_empty());
    }

    #[test]
    fn a_page_is_read_where_a_rank_has_written_it() {
        let status = StatusFile::create(&info()).unwrap();
        let call =
            CallEntry { group: "", num_members: 5, op: "barrier", sequence: 3, began: now(), ..Default::default() };
        let mut place = status.place(1).unwrap().offset() + 8 * words::CALLS as u64 + 8;
        for word in call.encode() {
            status.file.write_all_at(&word.to_ne_bytes(), place).unwrap();
            place += 8;
        }
        assert_eq!(status.activities([1].into_iter())[0].activity, RankActivity::Unknown, "nobody owns the page");
        status.write(1, words::OWNER, 7);
        let activities = status.activities(0..2);
        assert_eq!(activities.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(activities[0].activity, RankActivity::Unknown);
        match &activities[1].activity {
            RankActivity::InCall { call, .. } => assert_eq!(call.to_string(), "barrier (collective 3)"),
            other => unreachable!("{other:?}"),
        }
    }

    fn told_in(status: &StatusFile) -> Vec<u64> {
        let word = |index: u64| {
            let mut word = [0; 8];
            let place = (1 + index) * PAGE_BYTES as u64 + 8 * words::FIRST_ENDED as u64;
            status.file.read_exact_at(&mut word, place).unwrap();
            u64::from_ne_bytes(word)
        };
        (0..2).map(word).collect()
    }

    /// The rank may be of another machine, and this one may have started none yet.
    #[rstest]
    #[case::after_the_start(true)]
    #[case::before_it(false)]
    fn all_ranks_are_told_of_the_first_that_has_ended_and_of_no_other(#[case] has_started: bool) {
        let status = Arc::new(StatusFile::create(&info()).unwrap());
        let first_ended = FirstEnded::default();
        if has_started {
            first_ended.tell_in(&status);
            assert_eq!(told_in(&status), [0, 0]);
        }
        // By a thread that has a handle of its own.
        first_ended.clone().note(0);
        first_ended.note(4);
        first_ended.tell_in(&status);
        assert_eq!(told_in(&status), [rank_word(0); 2]);
    }

    #[test]
    fn a_pipe_that_nobody_writes_is_no_run_and_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        assert!(run_in(open(&path).unwrap(), std::process::id()).is_none());
    }

    /// A rank has the right to write everywhere in the file.
    #[test]
    fn what_a_rank_writes_over_the_launchers_words_hides_the_run_and_not_what_the_launcher_knows() {
        let info = info();
        let status = StatusFile::create(&info).unwrap();
        status.write(1, words::OWNER, 7);
        status.file.write_all_at(&[0xff; PAGE_BYTES], 0).unwrap();
        assert!(own_runs(info.started).is_empty());
        assert!(is_unreadable(std::process::id()));
        let activities = status.activities(0..2);
        assert_eq!(activities.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(activities[1].activity, RankActivity::Computing { after: None });
        status.file.write_all_at(&info.encode(), 0).unwrap();
        assert_eq!(own_runs(info.started).len(), 1, "it is there again");
    }

    #[test]
    fn the_file_keeps_its_size() {
        let status = StatusFile::create(&info()).unwrap();
        assert!(status.file.set_len(1).is_err() && status.file.set_len(1 << 20).is_err());
        assert!(fcntl_add_seals(&status.file, SealFlags::WRITE).is_err());
    }

    /// A process of the same user can have a file of the same name with anything in it.
    #[rstest]
    #[case::empty(&[], 0)]
    #[case::zeros(&[0; 3 * PAGE_BYTES], 3 * PAGE_BYTES)]
    #[case::garbage(&[0xff; PAGE_BYTES], PAGE_BYTES)]
    #[case::shorter_than_it_says(&info().encode(), 2 * PAGE_BYTES)]
    #[case::longer_than_it_says(&info().encode(), 4 * PAGE_BYTES)]
    #[case::no_ranks_at_all(&RunInfo { num_local_processes: 0, ..info() }.encode(), PAGE_BYTES)]
    #[case::deep(&[&1_u32.to_ne_bytes()[..], &4000_u32.to_ne_bytes(), &[b'['; 4088]].concat(), 3 * PAGE_BYTES)]
    #[case::of_another_launcher(&RunInfo { process_id: 1, ..info() }.encode(), 3 * PAGE_BYTES)]
    #[case::far_too_many(&RunInfo { num_local_processes: 1 << 40, num_processes: 1 << 41, ..info() }.encode(), 3 * PAGE_BYTES)]
    fn what_is_no_launchers_file_is_passed_over(#[case] bytes: &[u8], #[case] num_bytes: usize) {
        let file = File::from(memfd_create(FILE_NAME, MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(num_bytes as u64).unwrap();
        assert!(run_in(file.try_clone().unwrap(), std::process::id()).is_none());
        assert!(runs().is_ok());
    }
}
