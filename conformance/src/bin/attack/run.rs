//! One launcher with its ranks, watched from outside.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Marks every process of a run.
pub(crate) const MARK: &str = "ATTACK_RUN";
/// A run that has said nothing for so long hangs.
const SILENCE: Duration = Duration::from_secs(60);

/// What connects the ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    OfTheMachine,
    /// A namespace of its own, whose loopback can be taken down.
    OfItsOwn,
}

impl Network {
    /// May this process make networks?
    pub(crate) fn can_be_made() -> bool {
        let mut probe = Command::new("unshare");
        probe.args(["--net", "ip", "link", "set", "lo", "up"]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    }
}

/// A launcher, and every line that it and its ranks have printed so far.
pub(crate) struct Run {
    child: Child,
    mark: String,
    lines: Receiver<String>,
    printed: String,
}

impl Run {
    /// Starts this program as the launcher of `num_processes` ranks of `program`, which run `script` and save to `folder`: on
    /// `network`.
    pub(crate) fn start(
        program: &Path,
        script: &str,
        num_processes: usize,
        folder: &Path,
        environment: &[(&str, String)],
        network: Network,
    ) -> Result<Self> {
        let mut command = match network {
            Network::OfTheMachine => Command::new(std::env::current_exe()?),
            Network::OfItsOwn => {
                let mut command = Command::new("unshare");
                command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""]);
                command.arg(std::env::current_exe()?);
                command
            }
        };
        command.args(["--launch", &num_processes.to_string(), "--script", script, "--program"]).arg(program);
        command.arg("--folder").arg(folder).envs(environment.iter().map(|(name, value)| (*name, value)));
        Self::watch(command, new_mark(folder))
    }

    /// Starts a launcher that is called by `command`. Whatever it starts is known by `mark`.
    pub(crate) fn watch(mut command: Command, mark: String) -> Result<Self> {
        command.env(MARK, &mark).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start a launcher")?;
        let (send, lines) = channel();
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
            child.stderr.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
        ];
        for stream in streams.into_iter().flatten() {
            let send = send.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self { child, mark, lines, printed: String::new() })
    }

    /// The launcher.
    pub(crate) fn launcher(&self) -> i32 {
        self.child.id() as i32
    }

    /// Everything printed so far.
    pub(crate) fn printed(&self) -> &str {
        &self.printed
    }

    /// Waits for the first line that `find` finds something in, as long as there are lines.
    pub(crate) fn wait_for<T>(&mut self, what: &str, find: impl Fn(&str) -> Option<T>) -> Result<T> {
        loop {
            if let Some(found) = find(&self.line(what, SILENCE)?) {
                return Ok(found);
            }
        }
    }

    /// The same until `deadline`.
    pub(crate) fn wait_until<T>(
        &mut self,
        what: &str,
        deadline: Instant,
        find: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        loop {
            if let Some(found) = find(&self.line(what, deadline.saturating_duration_since(Instant::now()))?) {
                return Ok(found);
            }
        }
    }

    fn line(&mut self, what: &str, patience: Duration) -> Result<String> {
        match self.lines.recv_timeout(patience) {
            Ok(line) => {
                self.printed.push_str(&line);
                self.printed.push('\n');
                Ok(line)
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("waited too long for {what}; {:?} live:\n{}", self.living(), self.printed)
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the run ended before {what}:\n{}", self.printed),
        }
    }

    /// The process of a rank that has begun this step.
    pub(crate) fn process_at(&mut self, rank: usize, step: u64) -> Result<Pid> {
        let (begin, end) = (format!("step {step} of process "), format!(" on rank {rank}"));
        self.wait_for(&format!("step {step} of rank {rank}"), |line| {
            let (_, rest) = line.split_once(&begin)?;
            Pid::from_raw(rest.strip_suffix(&end)?.parse().ok()?)
        })
    }

    pub(crate) fn signal_launcher(&self, signal: Signal) -> Result<()> {
        let launcher = Pid::from_raw(self.child.id() as i32).context("a process has a number")?;
        Ok(kill_process(launcher, signal)?)
    }

    /// From now on nothing arrives that a rank sends to another one, and nobody is told.
    pub(crate) fn silence_network(&self) -> Result<()> {
        let launcher = self.child.id().to_string();
        let mut command = Command::new("nsenter");
        let status = command.args(["--target", &launcher, "--net", "ip", "link", "set", "lo", "down"]).status()?;
        if status.success() { Ok(()) } else { bail!("cannot take the loopback down: {status}") }
    }

    /// Waits for the end of the launcher and of everybody who has the mark, and reads what they print until then.
    pub(crate) fn end(&mut self, patience: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        let status = self.end_of_launcher(deadline)?;
        self.expect_nobody(deadline)?;
        Ok(status)
    }

    /// Waits for the end of the launcher alone.
    pub(crate) fn end_of_launcher(&mut self, deadline: Instant) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let living = self.living();
                self.kill_all();
                bail!("the run goes on for too long; {living:?} live:\n{}", self.printed);
            }
            self.read_for(Duration::from_millis(5));
        }
    }

    /// Waits until nobody has the mark any more, and reads the rest of what was printed.
    pub(crate) fn expect_nobody(&mut self, deadline: Instant) -> Result<()> {
        while Instant::now() < deadline && !self.living().is_empty() {
            self.read_for(Duration::from_millis(5));
        }
        let living: Vec<_> = self.living().into_iter().map(described).collect();
        if !living.is_empty() {
            self.kill_all();
            bail!("processes outlive their launcher, {}:\n{}", living.join(", "), self.printed);
        }
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(1)) {
            self.printed.push_str(&line);
            self.printed.push('\n');
        }
        Ok(())
    }

    pub(crate) fn read_for(&mut self, time: Duration) {
        match self.lines.recv_timeout(time) {
            Ok(line) => {
                self.printed.push_str(&line);
                self.printed.push('\n');
            }
            Err(RecvTimeoutError::Disconnected) => thread::park_timeout(time),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }

    /// Processes that have the mark of this run and have not ended.
    pub(crate) fn living(&self) -> Vec<i32> {
        let wanted = format!("{MARK}={}", self.mark);
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        numbers
            .filter(|number| {
                // Of a process that has ended and is not collected yet, this is empty.
                let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
                environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
            })
            .collect()
    }

    fn kill_all(&mut self) {
        for number in self.living() {
            if let Some(process) = Pid::from_raw(number) {
                let _ = kill_process(process, Signal::KILL);
            }
        }
        let _ = self.child.wait();
    }
}

/// A mark that no other run has.
pub(crate) fn new_mark(folder: &Path) -> String {
    format!("{}-{}", std::process::id(), folder.display())
}

/// The words of a process's command line.
pub(crate) fn words_of(process: i32) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

fn described(process: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or_default().trim().to_owned();
    format!("{process} `{}` in state {state}", words_of(process).join(" ").trim_end())
}

impl Drop for Run {
    fn drop(&mut self) {
        self.kill_all();
    }
}
