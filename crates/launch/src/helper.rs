//! Three roles that an executable plays for the launcher, so that no rank outlives it however it ends.
//!
//! *Rank role*: between the launcher and a rank's program stands, for under a millisecond, a process that
//! asks the kernel to kill it when its parent dies, keeps itself on its cores if it has some of its own, and then becomes the
//! program. The request survives that
//! step. (Doing it between `fork` and `exec` instead would need unsafe code.)
//!
//! *Guard role*: the request above reaches a rank but not the processes the rank has started: data
//! loading workers, or the real program under a shell script. One process per launch therefore holds the
//! reading end of a pipe whose writing end only the launcher has. The kernel closes it when the launcher
//! is gone, `kill -9` included, and the guard then kills every process that carries the launch's mark: an
//! environment variable, which children inherit wherever they go. (Telling the guard process ids instead
//! would come too late for a child that a rank starts at once.)
//!
//! *Agent role*: on each machine of a run on several, this supervises the ranks there (`hosts`).
//!
//! The command line is its own helper. A program that launches through the library and wants the same
//! safety begins its `main` with [`run_if_asked`] or [`exit_if_asked`] and sets
//! [`LaunchConfig::helper`](crate::LaunchConfig::helper). One that launches itself, and takes long to load, ties its ranks to
//! itself and has the helper guard only.

use std::collections::hash_map::RandomState;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};
use rustix::thread::set_name;

use accelerate_core::environment::{CORES_VARIABLE, LAUNCH_ID_VARIABLE};
use accelerate_core::files::ShownPath;

use crate::config::Helper;
use crate::hosts;
use crate::placement::{bind_this_process, core_list, core_numbers};
use crate::process_stat::ProcessStat;

const RANK_ROLE: &str = "__accelerate_rank";
const GUARD_ROLE: &str = "__accelerate_guard";
/// Also in [`AGENT_SCRIPT`](crate::AGENT_SCRIPT).
const AGENT_ROLE: &str = "__accelerate_agent";
/// So often in a row the guard has to find nobody, with a pause before each look.
const QUIET_LOOKS: usize = 3;
const LOOK_PAUSE: Duration = Duration::from_millis(5);
/// So long the guard looks again because of processes of which it cannot know whether they are marked.
const UNCLEAR_PATIENCE: Duration = Duration::from_secs(10);
/// Marks every process of a launch.
pub(crate) const MARK_VARIABLE: &str = LAUNCH_ID_VARIABLE;

/// Plays the role that the arguments of this process ask for, if they do. The rank role does not return
/// unless it fails; for the guard role the caller exits with the returned code.
///
/// ```
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     if let Some(code) = accelerate_launch::helper::run_if_asked() {
///         return code;
///     }
///     // ... the program itself
///     ExitCode::SUCCESS
/// }
/// ```
pub fn run_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let role = arguments.next()?;
    if role == RANK_ROLE {
        Some(become_rank(arguments))
    } else if role == AGENT_ROLE {
        Some(hosts::run_agent())
    } else if role == GUARD_ROLE {
        Some(guard(io::stdin().lock(), &arguments.next()?))
    } else {
        None
    }
}

/// [`run_if_asked`] for programs whose `main` has not the form for it: where a role was asked for, it does not return.
///
/// ```
/// accelerate_launch::helper::exit_if_asked();
/// // ... the program itself
/// ```
pub fn exit_if_asked() {
    if let Some(code) = run_if_asked() {
        // A code has no number that can be read, and of a role that has failed only the failure counts.
        std::process::exit(i32::from(code != ExitCode::SUCCESS));
    }
}

/// The command that starts `command` through the helper, or directly without one.
pub(crate) fn rank_command(helper: Option<&Helper>, command: &[OsString]) -> Command {
    let (program, arguments) = match command {
        [program, arguments @ ..] => (program.as_os_str(), arguments),
        [] => (OsStr::new(""), &[][..]),
    };
    match helper.filter(|helper| !helper.only_guards) {
        None => {
            let mut direct = Command::new(program);
            direct.args(arguments);
            direct
        }
        Some(helper) => {
            let mut through = Command::new(&helper.executable);
            let launcher = getpid().as_raw_nonzero().to_string();
            through.arg0("accelerate").args([OsStr::new(RANK_ROLE), launcher.as_ref(), program]).args(arguments);
            through
        }
    }
}

fn become_rank(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let launcher = arguments.next().and_then(|text| text.to_str()?.parse::<i32>().ok()).and_then(Pid::from_raw);
    let (Some(launcher), Some(program)) = (launcher, arguments.next()) else {
        return ExitCode::from(2);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        complain(&format!("cannot tie this rank to its launcher: {error}"));
    }
    // The launcher may have died before the request took effect; then nobody is left to run for.
    if getppid() != Some(launcher) {
        return ExitCode::FAILURE;
    }
    if let Some(cores) = std::env::var(CORES_VARIABLE).ok().and_then(|list| core_numbers(&list))
        && let Err(error) = bind_this_process(&cores)
    {
        complain(&format!("this rank cannot be kept on the cores {}, so it runs on any: {error}", core_list(&cores)));
    }
    let error = Command::new(&program).args(arguments).exec();
    let why = match (error.kind(), Path::new(&program).exists()) {
        (io::ErrorKind::NotFound, true) => {
            "the interpreter that it names, in its first line or as a binary, is not there".to_owned()
        }
        _ => error.to_string(),
    };
    complain(&format!("cannot run {}: {why}", program.shown()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// Writes to standard error, which is the rank's and so reaches the user; failing to is no reason to stop.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "accelerate launch: {text}");
}

/// Waits for the end of its input, then kills everything that carries `mark`.
fn guard(mut input: impl Read, mark: &OsStr) -> ExitCode {
    // Whoever kills all processes of the launcher's name (`killall -9 accelerate`) would leave what ranks have started. Under its
    // old name it guards all the same.
    let _ = set_name(c"launch guard");
    let since = ProcessStat::read("self").map(|own| own.started_at).unwrap_or_default();
    // Nothing is ever written: the pipe only ends. Bytes all the same would change nothing.
    let _ = io::copy(&mut input, &mut io::sink());
    // Killing takes time, and what is not dead yet may have children meanwhile, which a list of all processes may miss: until nobody
    // is found several times.
    let mut give_up_at = Instant::now() + UNCLEAR_PATIENCE;
    let mut num_quiet = 0;
    while num_quiet < QUIET_LOOKS {
        match look(mark, since) {
            Look { num_killed: 1.., .. } => (num_quiet, give_up_at) = (0, Instant::now() + UNCLEAR_PATIENCE),
            Look { num_unclear: 1.., .. } if Instant::now() < give_up_at => num_quiet = 0,
            _ => num_quiet += 1,
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    ExitCode::SUCCESS
}

/// One look at all processes.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    num_killed: usize,
    num_unclear: usize,
}

/// What a process is to a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinship {
    Marked,
    Stranger,
    /// It is becoming another program and has no environment at this moment, so it has to be looked at again.
    Unclear,
}

/// Kills what is marked.
fn look(mark: &OsStr, since: u64) -> Look {
    let mut look = Look::default();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return look;
    };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    for process in numbers.filter_map(Pid::from_raw).filter(|process| *process != getpid()) {
        match kill_if_marked(process, mark, since) {
            Some(Kinship::Marked) => look.num_killed += 1,
            Some(Kinship::Unclear) => look.num_unclear += 1,
            Some(Kinship::Stranger) | None => {}
        }
    }
    look
}

/// Through a descriptor, so that a number that has passed on to another process hits nobody. `None` for one that is gone, or out of
/// reach.
fn kill_if_marked(process: Pid, mark: &OsStr, since: u64) -> Option<Kinship> {
    let descriptor = pidfd_open(process, PidfdFlags::empty()).ok()?;
    let number = process.as_raw_nonzero().to_string();
    let environment = std::fs::read(format!("/proc/{number}/environ")).ok()?;
    let kinship = kinship(&environment, mark, since, || ProcessStat::read(&number));
    if kinship == Kinship::Marked {
        pidfd_send_signal(&descriptor, Signal::KILL).ok()?;
    }
    Some(kinship)
}

/// Of a process with this environment, for a guard that has been there `since` then.
fn kinship(environment: &[u8], mark: &OsStr, since: u64, stat: impl Fn() -> Option<ProcessStat>) -> Kinship {
    // What is older than the guard is older than the ranks. What has cleared its environment still has one, of no bytes.
    let is_between_programs = |stat: ProcessStat| {
        !stat.has_ended && !stat.is_kernel_thread && stat.started_at >= since && stat.environment_end == 0
    };
    match environment {
        [] if stat().is_some_and(is_between_programs) => Kinship::Unclear,
        [] => Kinship::Stranger,
        _ if is_marked(environment, mark) => Kinship::Marked,
        _ => Kinship::Stranger,
    }
}

/// The variable lists the launch and those around it: a launch inside a rank belongs to both.
fn is_marked(environment: &[u8], mark: &OsStr) -> bool {
    environment
        .split(|&byte| byte == 0)
        .filter_map(|variable| variable.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="))
        .flat_map(|marks| marks.split(|&byte| byte == b','))
        .any(|other| other == mark.as_bytes())
}

/// So often a guard is started again that somebody has killed.
const MOST_REVIVALS: u32 = 8;

/// The launcher's end of the guard.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    helper: Helper,
    mark: OsString,
    num_revivals: u32,
}

impl Guard {
    pub(crate) fn start(helper: &Helper, mark: &OsStr) -> io::Result<Self> {
        let process = start_guard(helper, mark)?;
        Ok(Self { process, helper: helper.clone(), mark: mark.to_owned(), num_revivals: 0 })
    }

    /// Starts it again if it has ended: somebody has killed it.
    pub(crate) fn revive(&mut self) {
        let has_ended = matches!(self.process.try_wait(), Ok(Some(_)));
        if has_ended && self.num_revivals < MOST_REVIVALS {
            self.num_revivals += 1;
            // Where that fails, the launcher still ends its ranks, as long as it lives.
            if let Ok(process) = start_guard(&self.helper, &self.mark) {
                self.process = process;
            }
        }
    }

    pub(crate) fn process_id(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Everything has ended: there is nothing to guard any more. The pipe stays open until the guard is
    /// gone, so that it never sees its end.
    pub(crate) fn dismiss(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_guard(helper: &Helper, mark: &OsStr) -> io::Result<Child> {
    Command::new(&helper.executable)
        .arg0("accelerate")
        .args([OsStr::new(GUARD_ROLE), mark])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Out of reach of the keys that the user presses at the launcher.
        .process_group(0)
        .spawn()
}

/// A new mark, and the value of [`MARK_VARIABLE`] for its ranks: after the marks of the launches around it.
pub(crate) fn new_mark(inherited: Option<OsString>) -> (OsString, OsString) {
    let random = RandomState::new().build_hasher().finish();
    let mark = OsString::from(format!("{}-{random:016x}", getpid().as_raw_nonzero()));
    let value = match inherited.filter(|marks| !marks.is_empty()) {
        Some(mut marks) => {
            marks.push(",");
            marks.push(&mark);
            marks
        }
        None => mark.clone(),
    };
    (mark, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_stat::tests::stat;
    use rstest::rstest;

    #[rstest]
    #[case("", false)]
    #[case("PATH=/bin\0ACCELERATE_LAUNCH_ID=7-a\0HOME=/\0", true)]
    #[case("ACCELERATE_LAUNCH_ID=3-c,7-a,9-d\0", true)]
    #[case("ACCELERATE_LAUNCH_ID=7-ab\0", false)]
    #[case("ACCELERATE_LAUNCH_ID=17-a\0", false)]
    #[case("MY_ACCELERATE_LAUNCH_ID=7-a\0", false)]
    #[case("X=ACCELERATE_LAUNCH_ID=7-a\0", false)]
    fn only_the_launchs_own_processes_carry_its_mark(#[case] environment: &str, #[case] expected: bool) {
        assert_eq!(is_marked(environment.as_bytes(), "7-a".as_ref()), expected);
    }

    #[rstest]
    #[case::becoming_a_program("", &stat("sh", "R", 0, 50, 0), Kinship::Unclear)]
    #[case::becoming_a_program_as_old_as_the_guard("", &stat("sh", "D", 0, 40, 0), Kinship::Unclear)]
    #[case::older_than_the_guard("", &stat("sh", "R", 0, 39, 0), Kinship::Stranger)]
    #[case::ended("", &stat("sh", "Z", 0, 50, 0), Kinship::Stranger)]
    #[case::of_the_kernel("", &stat("kworker/0:1", "I", 0x0420_8060, 50, 0), Kinship::Stranger)]
    #[case::cleared_environment("", &stat("sh", "S", 0, 50, 4096), Kinship::Stranger)]
    #[case::gone("", "", Kinship::Stranger)]
    #[case::marked("ACCELERATE_LAUNCH_ID=7-a\0", "", Kinship::Marked)]
    #[case::of_another_launch("ACCELERATE_LAUNCH_ID=7-b\0", "", Kinship::Stranger)]
    fn who_becomes_another_program_is_looked_at_again(
        #[case] environment: &str,
        #[case] line: &str,
        #[case] wanted: Kinship,
    ) {
        assert_eq!(kinship(environment.as_bytes(), "7-a".as_ref(), 40, || ProcessStat::parse(line)), wanted);
    }

    #[test]
    fn marks_are_unique_and_pile_up() {
        let (outer, outer_value) = new_mark(None);
        let (inner, inner_value) = new_mark(Some(outer_value.clone()));
        assert!(outer != inner && outer == outer_value);
        let environment = format!("{MARK_VARIABLE}={}", inner_value.display());
        for mark in [outer, inner] {
            assert!(is_marked(environment.as_bytes(), &mark));
        }
    }
}
