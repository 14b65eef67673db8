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

use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};
use rustix::thread::set_name;

use accelerate_core::environment::{CORES_VARIABLE, LAUNCH_ID_VARIABLE};
use accelerate_core::files::ShownPath;

use crate::config::Helper;
use crate::hosts;
use crate::placement::{bind_this_process, core_list, core_numbers};

const RANK_ROLE: &str = "__accelerate_rank";
const GUARD_ROLE: &str = "__accelerate_guard";
/// Also in [`AGENT_SCRIPT`](crate::AGENT_SCRIPT).
const AGENT_ROLE: &str = "__accelerate_agent";
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
    // Nothing is ever written: the pipe only ends. Bytes all the same would change nothing.
    let _ = io::copy(&mut input, &mut io::sink());
    // Killing takes time, and what is not dead yet may have children meanwhile: until nobody is found.
    while kill_marked(mark) > 0 {
        std::thread::yield_now();
    }
    ExitCode::SUCCESS
}

fn kill_marked(mark: &OsStr) -> usize {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return 0;
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|number| Pid::from_raw(*number) != Some(getpid()))
        .filter(|number| kill_if_marked(*number, mark).is_some())
        .count()
}

/// Through a descriptor, so that a number that has passed on to another process hits nobody.
fn kill_if_marked(number: i32, mark: &OsStr) -> Option<()> {
    let process = pidfd_open(Pid::from_raw(number)?, PidfdFlags::empty()).ok()?;
    // Empty for a process that has ended but has not been collected.
    let environment = std::fs::read(format!("/proc/{number}/environ")).ok()?;
    if !is_marked(&environment, mark) {
        return None;
    }
    pidfd_send_signal(&process, Signal::KILL).ok()
}

/// The variable lists the launch and those around it: a launch inside a rank belongs to both.
fn is_marked(environment: &[u8], mark: &OsStr) -> bool {
    environment
        .split(|&byte| byte == 0)
        .filter_map(|variable| variable.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="))
        .flat_map(|marks| marks.split(|&byte| byte == b','))
        .any(|other| other == mark.as_bytes())
}

/// The launcher's end of the guard.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
}

impl Guard {
    pub(crate) fn start(helper: &Helper, mark: &OsStr) -> io::Result<Self> {
        let process = Command::new(&helper.executable)
            .arg0("accelerate")
            .args([OsStr::new(GUARD_ROLE), mark])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of the keys that the user presses at the launcher.
            .process_group(0)
            .spawn()?;
        Ok(Self { process })
    }

    /// Everything has ended: there is nothing to guard any more. The pipe stays open until the guard is
    /// gone, so that it never sees its end.
    pub(crate) fn dismiss(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
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
