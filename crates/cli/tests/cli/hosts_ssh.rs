//! Launches on several machines through OpenSSH itself. Its server runs behind `ProxyCommand`, so nothing listens anywhere, and
//! both machines are this one. Where there is no server, or it lets nobody in, tests say that they are skipped.

use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::support::{Finished, accelerate, finished, named_pipe, send};

struct Ssh {
    folder: tempfile::TempDir,
}

impl Ssh {
    /// A client and a server that know each other; `None`, with the reason on standard error, where there are none.
    fn new() -> Option<Self> {
        let because = match Self::prepared() {
            Ok(ssh) => return Some(ssh),
            Err(because) => because,
        };
        eprintln!("skipped, because {because}");
        None
    }

    fn prepared() -> Result<Self, String> {
        let sshd = program("sshd").ok_or("there is no sshd")?;
        let keygen = program("ssh-keygen").ok_or("there is no ssh-keygen")?;
        let ssh = Self { folder: tempfile::tempdir().unwrap() };
        for key in ["host", "user"] {
            let made = Command::new(&keygen).args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(ssh.path(key)).status();
            assert!(made.unwrap().success());
        }
        let path = |name: &str| ssh.path(name).display().to_string();
        let [host, authorized] = [path("host"), path("user.pub")];
        let lines = format!(
            "HostKey {host}\nAuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
        );
        fs::write(ssh.path("sshd_config"), lines).unwrap();
        let server = format!("{} -i -f {}", sshd.display(), path("sshd_config"));
        let [user, known] = [path("user"), path("known")];
        let lines = format!(
            "Host *\n  ProxyCommand {server}\n  IdentityFile {user}\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking no\n  \
             BatchMode yes\n  LogLevel ERROR\n"
        );
        fs::write(ssh.path("ssh_config"), lines).unwrap();
        let mut command = Command::new("ssh");
        let tried =
            Finished::from(command.arg("-F").arg(ssh.path("ssh_config")).args(["node1", "true"]).output().unwrap());
        match tried.code {
            Some(0) => Ok(ssh),
            _ => Err(format!("sshd lets nobody in: {}", tried.stderr.trim())),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn launch(&self, hosts: &str) -> Command {
        let mut command = accelerate();
        command.args(["launch", "--main_process_ip", "127.0.0.1", "--hosts", hosts, "--ssh_command"]);
        command.arg(format!("ssh -F {}", self.path("ssh_config").display()));
        command
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Not every user has those of administrators in PATH.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    folders.map(|folder| folder.join(name)).find(|found| found.is_file())
}

#[test]
fn ranks_arguments_and_secret_arrive_through_ssh() {
    let Some(ssh) = Ssh::new() else { return };
    let word: Vec<u8> = (1..=255).collect();
    let mut command = ssh.launch("node1:2,node2:1");
    let script =
        "printf '%s' \"$1\" >$2/$RANK; echo $LOCAL_RANK/$LOCAL_WORLD_SIZE $WORLD_SIZE ${#ACCELERATE_RUN_SECRET}";
    command.args(["sh", "-c", script, "sh"]).arg(OsString::from_vec(word.clone())).arg(ssh.folder.path());
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] 0/2 3 64", "[rank 1] 1/2 3 64", "[rank 2] 0/1 3 64"]);
    for rank in ["0", "1", "2"] {
        assert_eq!(fs::read(ssh.path(rank)).unwrap(), word);
    }
}

/// Ranks hold the pipe open; its end is theirs.
#[test]
fn nothing_is_left_behind_ssh_when_the_launcher_is_killed() {
    let Some(ssh) = Ssh::new() else { return };
    let (_folder, pipe) = named_pipe();
    let mut command = ssh.launch("node1:1,node2:2");
    command.args(["sh", "-c", &format!("trap '' TERM HUP INT; exec 9>{pipe}; echo ready >&9; sleep 60 & sleep 60")]);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let mut ranks = fs::File::open(&pipe).unwrap();
    ranks.read_exact(&mut [0; 3 * "ready\n".len()]).unwrap();
    send(&child, Signal::KILL);
    child.wait().unwrap();
    ranks.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_rank_that_fails_behind_ssh_is_named_with_its_machine() {
    let Some(ssh) = Ssh::new() else { return };
    let mut command = ssh.launch("node1:1,node2:1");
    command.args(["sh", "-c", "[ $RANK = 1 ] && { echo the reason >&2; exit 7; }; sleep 60"]);
    let words = ["error: rank 1 on node2 (process ", "exited with code 7", "rank 0 was running and has been ended"];
    finished(command).expect(7, &words);
}

#[test]
fn what_ssh_says_of_a_machine_that_refuses_is_told() {
    let Some(ssh) = Ssh::new() else { return };
    let mut command = ssh.launch("no_such_user@node1:1,node2:1");
    command.arg("true");
    finished(command)
        .expect(1, &["nothing was started: no_such_user@node1: it could not be connected to", "Permission denied"]);
}
