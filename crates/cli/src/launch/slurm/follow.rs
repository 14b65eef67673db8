//! Following a job: its states, its output as it comes, and its end.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::slurm::Job;
use accelerate_launch::{StopSignals, exit_code_of_signal, signal_name, write_patiently};
use rustix::process::Signal;

use super::tools;
use crate::launch::SPEAKER;
use crate::output::Unwritten;

/// Between two looks at the output. Nobody tells of it, least of all over a network.
const BETWEEN_READS: Duration = Duration::from_millis(250);
/// Between two questions to Slurm, which has many other users.
const BETWEEN_QUESTIONS: Duration = Duration::from_secs(2);
/// Where the file of the output is on another machine, its end comes after that of the job.
const LATE_OUTPUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
#[error("this process cannot listen for signals")]
struct NoSignals {
    source: io::Error,
}

/// Submits the script, and prints the job's output until it is over. The code is that of the job, or says which signal has stopped
/// the following.
pub(super) fn submit_and_follow(script: &str, is_quiet: bool) -> Result<ExitCode, Box<dyn Error>> {
    // From now on no signal ends this process between the submission and the following.
    let stop = StopSignals::listen().map_err(|source| NoSignals { source })?;
    let job = &tools::submit(script)?;
    let mut follower = Follower { job, is_quiet, shown: String::new(), output: JobOutput::default() };
    follower.say(&format!("submitted as job {job}; Ctrl-C cancels it"));
    let stopped_by = match follower.until_over(Some(&stop))? {
        Ended::Job(job) => return Ok(ExitCode::from(job.exit_code())),
        Ended::Signal(signal) => signal,
    };
    let name = signal_name(stopped_by);
    if stopped_by == Signal::HUP.as_raw() {
        follower.say(&format!("{name}: job {job} goes on; `scancel {job}` ends it"));
    } else {
        follower.say(&format!("{name}: cancelling job {job}"));
        tools::cancel(job)?;
        // What its processes still have to say, for as long as Slurm lets them.
        follower.until_over(None)?;
    }
    Ok(ExitCode::from(exit_code_of_signal(stopped_by)))
}

enum Ended {
    Job(Job),
    Signal(i32),
}

struct Follower<'a> {
    job: &'a str,
    is_quiet: bool,
    /// What was said last of the job's state.
    shown: String,
    output: JobOutput,
}

impl Follower<'_> {
    fn say(&self, text: &str) {
        if !self.is_quiet {
            crate::print_message(&format!("{SPEAKER}: {text}"));
        }
    }

    fn until_over(&mut self, stop: Option<&StopSignals>) -> Result<Ended, Box<dyn Error>> {
        let mut next_question = Instant::now();
        loop {
            if let Some(signal) = stop.and_then(StopSignals::received) {
                return Ok(Ended::Signal(signal));
            }
            if Instant::now() >= next_question {
                match tools::look(self.job) {
                    Ok(Some(job)) => {
                        self.tell(&job);
                        self.output.place = job.output.clone().map(PathBuf::from);
                        if job.is_over() {
                            self.last_output()?;
                            return Ok(Ended::Job(job));
                        }
                    }
                    Ok(None) => {}
                    // The same signal was heard here.
                    Err(error) if error.stopped_by().is_some() => continue,
                    Err(error) => return Err(error.into()),
                }
                next_question = Instant::now() + BETWEEN_QUESTIONS;
            }
            self.output.print_new()?;
            thread::sleep(BETWEEN_READS);
        }
    }

    fn tell(&mut self, job: &Job) {
        let place = job.nodes.as_ref().map(|nodes| format!(" on {nodes}"));
        let why = job.reason.as_ref().map(|reason| format!(" ({reason})"));
        let is_running = job.state == "RUNNING";
        let detail = if is_running { place } else { why }.unwrap_or_default();
        let text = in_one_line(&format!("job {} is {}{detail}", self.job, job.state.to_ascii_lowercase()));
        if !job.state.is_empty() && text != self.shown {
            self.say(&text);
            self.shown = text;
        }
    }

    fn last_output(&mut self) -> Result<(), Box<dyn Error>> {
        let deadline = Instant::now() + LATE_OUTPUT;
        while self.output.place.is_some() && !self.output.is_there() && Instant::now() < deadline {
            thread::sleep(BETWEEN_READS);
        }
        self.output.print_new()?;
        if let Some(place) = self.output.place.as_ref().filter(|_| !self.output.is_there()) {
            self.say(&format!("the output of the job is in {}, which this machine does not see", place.shown()));
        }
        Ok(())
    }
}

/// The file that Slurm writes the output of a job to.
#[derive(Default)]
struct JobOutput {
    place: Option<PathBuf>,
    num_printed: u64,
}

impl JobOutput {
    fn is_there(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.is_file())
    }

    /// Prints what has been added. A file that has become shorter has begun anew.
    fn print_new(&mut self) -> Result<(), Unwritten> {
        let Some(Ok(mut file)) = self.place.as_ref().filter(|_| self.is_there()).map(File::open) else { return Ok(()) };
        let length = file.metadata().map_or(0, |data| data.len());
        if length < self.num_printed {
            self.num_printed = 0;
        }
        if file.seek(SeekFrom::Start(self.num_printed)).is_err() {
            return Ok(());
        }
        let mut piece = vec![0; 64 << 10];
        while let Ok(count @ 1..) = file.read(&mut piece) {
            let mut out = io::stdout().lock();
            write_patiently(&mut out, io::stdout(), &piece[..count])?;
            out.flush()?;
            self.num_printed = self.num_printed.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        }
        Ok(())
    }
}
