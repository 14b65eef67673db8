//! Two small roles that an executable plays for the launcher, so that no rank outlives it however it ends.
//!
//! *Rank role*: between the launcher and a rank's program stands, for under a millisecond, a process that
//! asks the kernel to kill it when its parent dies and then becomes the program. The request survives that
//! step. (Doing it between `fork` and `exec` instead would need unsafe code.)
//!
//! *Guard role*: the request above reaches a rank but not the processes the rank has started: data
//! loading workers, or the real program under a shell script. One process per launch therefore holds the
//! reading end of a pipe whose writing end only the launcher has. The kernel closes it when the launcher
//! is gone, `kill -9` included, and the guard then kills the process groups it has been told of.
//!
//! The command line is its own helper. A program that launches through the library and wants the same
//! safety begins its `main` with [`run_if_asked`] and sets
//! [`LaunchConfig::helper`](crate::LaunchConfig::helper).

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process_group, set_parent_process_death_signal,
};

use crate::config::Helper;

const RANK_ROLE: &str = "__accelerate_rank";
const GUARD_ROLE: &str = "__accelerate_guard";

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
    } else if role == GUARD_ROLE {
        Some(guard(io::stdin().lock()))
    } else {
        None
    }
}

/// The command that starts `command` through the helper, or directly without one.
pub(crate) fn rank_command(helper: Option<&Helper>, command: &[OsString]) -> Command {
    let (program, arguments) = match command {
        [program, arguments @ ..] => (program.as_os_str(), arguments),
        [] => (OsStr::new(""), &[][..]),
    };
    match helper {
        None => {
            let mut direct = Command::new(program);
            direct.args(arguments);
            direct
        }
        Some(helper) => {
            let mut through = Command::new(&helper.executable);
            let launcher = getpid().as_raw_nonzero().to_string();
            through
                .arg0("accelerate")
                .args([OsStr::new(RANK_ROLE), launcher.as_ref(), program])
                .args(arguments);
            through
        }
    }
}

fn become_rank(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let launcher = arguments
        .next()
        .and_then(|text| text.to_str()?.parse::<i32>().ok())
        .and_then(Pid::from_raw);
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
    let error = Command::new(&program).args(arguments).exec();
    complain(&format!("cannot run {}: {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    })
}

/// Writes to standard error, which is the rank's and so reaches the user; failing to is no reason to stop.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "accelerate: {text}");
}

/// Lines `+7` and `-7` say that process group 7 is in use, or gone. Ends with its input.
fn guard(lines: impl BufRead) -> ExitCode {
    for group in groups_left(lines).into_iter().filter_map(Pid::from_raw) {
        // A group that is gone by now is just what is wanted.
        let _ = kill_process_group(group, Signal::KILL);
    }
    ExitCode::SUCCESS
}

fn groups_left(lines: impl BufRead) -> BTreeSet<i32> {
    let mut groups = BTreeSet::new();
    for line in lines.lines().map_while(io::Result::ok) {
        let number = line.get(1..).and_then(|number| number.parse().ok());
        // "Group 1" would mean every process there is.
        let Some(group) = number.filter(|&number| number > 1) else {
            continue;
        };
        if line.starts_with('+') {
            groups.insert(group);
        } else {
            groups.remove(&group);
        }
    }
    groups
}

/// The launcher's end of the guard.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    pub(crate) fn start(helper: &Helper) -> io::Result<Self> {
        let mut process = Command::new(&helper.executable)
            .arg0("accelerate")
            .arg(GUARD_ROLE)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of the keys that the user presses at the launcher.
            .process_group(0)
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Self { process, pipe })
    }

    pub(crate) fn watch(&mut self, group: Pid) {
        self.tell('+', group);
    }

    pub(crate) fn forget(&mut self, group: Pid) {
        self.tell('-', group);
    }

    fn tell(&mut self, sign: char, group: Pid) {
        if let Some(pipe) = &mut self.pipe {
            // One write, so that a launcher killed at this moment leaves a whole line or none. A guard that
            // somebody has killed leaves the launch less safe, not wrong.
            let line = format!("{sign}{}\n", group.as_raw_nonzero());
            let _ = pipe.write_all(line.as_bytes());
        }
    }
}

impl Drop for Guard {
    /// At a normal end all groups have been forgotten, so the guard ends without a deed.
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", &[])]
    #[case("+7\n+8\n-7\n", &[8])]
    #[case("+7\n-7\n+7\n", &[7])]
    #[case("+7\nnonsense\n+\n\n+-3\n-9\n", &[7])]
    #[case("+12\n+1\n+0\n", &[12])]
    fn the_guard_knows_who_is_left(#[case] lines: &str, #[case] expected: &[i32]) {
        let groups: Vec<_> = groups_left(lines.as_bytes()).into_iter().collect();
        assert_eq!(groups, expected);
    }
}
