//! Processes that the launcher may not end. Only root can make some that are not the launcher's, and the tests of others do nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::hosts::{CONNECTS, Ssh};
use crate::support::{Finished, finished, launch_script};

/// Somebody who is neither root nor anybody else.
const NOBODY: &str = "65533";

/// A folder with a program by which anybody becomes root, and where root may leave a number.
struct Door {
    folder: tempfile::TempDir,
}

impl Door {
    /// `None` where it cannot be made.
    fn open() -> Option<Self> {
        let setpriv = Path::new("/usr/bin/setpriv");
        if !geteuid().is_root() || !setpriv.is_file() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("setpriv");
        fs::copy(setpriv, &copy).unwrap();
        fs::set_permissions(&copy, PermissionsExt::from_mode(0o4755)).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        // A file system may say that nobody changes by its files.
        let becomes = as_nobody(Command::new(&copy).args(["--reuid", "0", "true"]));
        let door = Self { folder };
        becomes.is_some_and(|ended| ended.code == Some(0)).then_some(door)
    }

    /// In the first attempt rank 0 becomes root's, and rank 1 fails once it has.
    fn script(&self) -> String {
        let folder = self.folder.path().display();
        format!(
            "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
             [ $RANK = 0 ] && exec {folder}/setpriv --reuid 0 sh -c 'echo $$ >{folder}/new; mv {folder}/new {folder}/id; exec sleep 600'
             until [ -e {folder}/id ]; do sleep 0.01; done; exit 3"
        )
    }

    /// The process of rank 0, which is ended.
    fn survivor(&self) -> String {
        let id = fs::read_to_string(self.folder.path().join("id")).unwrap().trim().to_owned();
        kill_process(Pid::from_raw(id.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        id
    }
}

/// `None` where nobody can be that, as in a container that knows few users, or may run this.
fn as_nobody(command: &Command) -> Option<Finished> {
    let mut whole = Command::new("setpriv");
    whole.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
    whole.arg(command.get_program()).args(command.get_args()).env("HF_HOME", "none").current_dir("/");
    let ended = Finished::from(whole.output().ok()?);
    (ended.code != Some(127) && ended.code != Some(126)).then_some(ended)
}

#[test]
fn a_run_is_not_restarted_over_a_process_that_cannot_be_ended() {
    let Some(door) = Door::open() else { return };
    let flags = ["--max_restarts", "1", "--grace_period", "0.1"];
    let Some(ended) = as_nobody(&launch_script(2, &flags, &door.script())) else { return };
    let id = door.survivor();
    let told = [
        &format!("accelerate launch: process {id} could not be ended: signals are refused"),
        "error: rank 1 (process ",
        "\n  rank 0 could not be ended: it runs as another user",
        &format!("\n  process {id} could not be ended"),
        &format!("\n  not restarted: process {id} of this attempt is still there\n"),
    ];
    ended.expect(3, &told);
    assert!(!ended.stderr.contains("have been ended") && !ended.stderr.contains("has been ended"), "{ended:?}");
}

/// It stays out, if the others are enough.
#[test]
fn a_machine_with_a_process_that_cannot_be_ended_takes_part_no_more() {
    for (flags, code) in [(&[][..], 3), (&["--nnodes", "1:2"], 0)] {
        let Some(door) = Door::open() else { return };
        let ssh = Ssh::new(CONNECTS);
        fs::set_permissions(ssh.path(""), PermissionsExt::from_mode(0o755)).unwrap();
        let flags = [&["--max_restarts", "1", "--grace_period", "0.1"], flags].concat();
        let Some(ended) = as_nobody(&ssh.launch_script("a:1,b:1", &flags, &door.script())) else { return };
        let id = door.survivor();
        ended.expect(code, &[&format!("accelerate launch: a: process {id} could not be ended: signals are refused")]);
        let refused = format!("\n  not restarted: process {id} of this attempt is still there, on a\n");
        let left_out = format!(
            "accelerate launch: a: left out, so 1 machine starts 1 process without it, because process {id} of an earlier attempt is \
             still there\n"
        );
        assert_eq!(ended.stderr.contains(&refused), code == 3, "{ended:?}");
        assert_eq!(ended.stderr.contains(&left_out), code == 0, "{ended:?}");
    }
}

/// Where nothing can be made that lives on, at least nothing is said of it.
#[test]
fn nothing_is_said_of_processes_that_have_ended() {
    let ended =
        finished(launch_script(2, &["--grace_period", "0.1"], "[ $RANK = 0 ] && exit 3; trap '' TERM; sleep 600"));
    ended.expect(3, &["rank 1 was running and has been ended by the launcher"]);
    assert!(!ended.stderr.contains("could not be ended"), "{ended:?}");
}
