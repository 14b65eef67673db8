//! Starting the command, and a witness of which of its descendants still live.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Output, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};

/// A folder that does not exist, in the place of the developer's own default configuration file.
const NO_HF_HOME: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/no_hf_home");

/// The command without subcommand, in an environment that says nothing about ranks or settings. Signals do what they
/// do by default, even if the tests run in the background of a shell.
pub(crate) fn accelerate() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,TERM,HUP", env!("CARGO_BIN_EXE_accelerate")]);
    for name in ["RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "NO_COLOR"]
    {
        command.env_remove(name);
    }
    command.env("HF_HOME", NO_HF_HOME).stdin(Stdio::null());
    command
}

/// `accelerate launch --num_processes N [flags]`, to be followed by a program.
pub(crate) fn launch(num_processes: usize, flags: &[&str]) -> Command {
    let mut command = accelerate();
    command.args(["launch", "--num_processes", &num_processes.to_string()]).args(flags);
    command
}

/// A launch of a shell script.
pub(crate) fn launch_script(num_processes: usize, flags: &[&str], script: &str) -> Command {
    let mut command = launch(num_processes, flags);
    command.args(["sh", "-c", script]);
    command
}

pub(crate) fn finished(mut command: Command) -> Finished {
    command.output().unwrap().into()
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Finished {
    pub(crate) fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    #[track_caller]
    pub(crate) fn expect(&self, code: i32, words_of_stderr: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for words in words_of_stderr {
            assert!(self.stderr.contains(words), "{words:?} is missing in\n{}", self.stderr);
        }
    }
}

/// A pipe whose writing end every descendant of a launch inherits: its end of file is the moment at which
/// the last of them has gone. Scripts write into it with `>/dev/fd/$WITNESS`, and those that should be
/// ended write `survived` if they are not.
pub(crate) struct Witness {
    reader: BufReader<File>,
    writer: Option<OwnedFd>,
}

/// Lives for longer than any launch takes, then tells on itself. The naps are short because a shell runs
/// its traps only between commands.
pub(crate) const LIVE_ON: &str =
    "i=0; while [ $i -lt 600 ]; do sleep 0.05; i=$((i+1)); done; echo survived >/dev/fd/$WITNESS";

/// A shell command that becomes a process which, on `SIG{signal}`, prints `words` and ends well. It writes
/// `ready` into the file `tells` when it is prepared. (Shells lose signals that arrive while they start a
/// command; Python does not.)
pub(crate) fn obey(signal: &str, words: &str, tells: &str) -> String {
    format!(
        "exec python3 -c \"import os, signal, time\n\
         signal.signal(signal.SIG{signal}, lambda *_: (print('{words}', flush=True), os._exit(0)))\n\
         open('{tells}', 'w').write('ready\\n')\n\
         for _ in range(600): time.sleep(0.05)\n\
         open('/dev/fd/$WITNESS', 'w').write('survived\\n')\""
    )
}

/// The file that a [`Witness`] reads.
pub(crate) const WITNESS_FILE: &str = "/dev/fd/$WITNESS";

/// A named pipe with which ranks wait for each other: `read` from it, `echo` into it.
pub(crate) fn named_pipe() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let path = path.to_str().unwrap().to_string();
    (folder, path)
}

impl Witness {
    pub(crate) fn new() -> Self {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        Self { reader: BufReader::new(File::from(reader)), writer: Some(writer) }
    }

    /// Starts the command as an ancestor of everything that will hold the pipe.
    pub(crate) fn start(&mut self, mut command: Command) -> Child {
        let writer = self.writer.take().unwrap();
        fcntl_setfd(&writer, FdFlags::empty()).unwrap();
        let child = command.env("WITNESS", writer.as_raw_fd().to_string()).spawn().unwrap();
        drop(writer);
        child
    }

    /// Waits until `word` has been written this many times.
    pub(crate) fn wait_for(&mut self, word: &str, times: usize) {
        for _ in 0..times {
            let mut line = String::new();
            self.reader.read_line(&mut line).unwrap();
            assert_eq!(line.trim_end(), word);
        }
    }

    /// Waits until every descendant has gone.
    #[track_caller]
    pub(crate) fn expect_nobody_survives(mut self) {
        let mut rest = String::new();
        self.reader.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("survived"), "a process outlived its launch");
    }
}

pub(crate) fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Sends it until the process has ended: what comes soon after the first one counts as the same request.
pub(crate) fn insist(child: &mut Child, signal: Signal) {
    while child.try_wait().unwrap().is_none() {
        send(child, signal);
        std::thread::yield_now();
    }
}
