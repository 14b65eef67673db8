//! Runs checks one after the other, each in a process of its own: one that fails, crashes or hangs does not end the rest.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use accelerate_launch::{Limits, ask_and_watch, signal_name};
use anyhow::{Context as _, Result};

use crate::check::{Check, Found, Plant};
use crate::checks;
use crate::machine::{self, Machine, Python};
use crate::report::{Outcome, Report, Row};

/// What is to be run, and with what.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) program: PathBuf,
    /// Empty for all.
    pub(crate) only: Vec<String>,
    pub(crate) plants: Vec<(String, Plant)>,
    pub(crate) budget: Duration,
    pub(crate) rehearse: bool,
    pub(crate) python: PathBuf,
    pub(crate) scripts: PathBuf,
    pub(crate) commit: Option<String>,
    /// What makes this another run than that of everything, for the report.
    pub(crate) asked: Vec<String>,
}

/// So many of the last lines that a process printed are kept: errors of libtorch come with some thirty lines of calls.
const LAST_LINES: usize = 40;

/// Prints each row as it comes, and has `keep` write what there is, so that a run which is ended leaves a report.
pub(crate) fn run(settings: &Settings, keep: impl Fn(&Report) -> Result<()>) -> Result<Report> {
    let started = Instant::now();
    let seen = machine::probe_of(&settings.program, &[]);
    let python = Python::ask(&settings.python);
    let machine = Machine::look(&python, settings.commit.clone());
    // Where looking for devices fails, the checks say more of it than the look does.
    let sees_gpu = seen.as_ref().map_or_else(|_| machine.has_gpu(), |seen| seen.num_devices > 0);
    let has_gpu = sees_gpu && !settings.rehearse;
    let misses_gpu = !sees_gpu && !settings.rehearse && machine.has_gpu();
    let mut report = Report {
        is_rehearsal: !has_gpu,
        misses_gpu,
        misses_python: has_gpu && matches!(python, Python::Unusable { .. }),
        has_feature: cfg!(feature = "cuda"),
        is_finished: false,
        asked: settings.asked.clone(),
        seconds: 0.0,
        machine,
        rows: Vec::new(),
    };
    keep(&report)?;
    show(&report.head());
    if let Err(error) = seen {
        let row = Row::new("probe", Outcome::Failed, format!("{error:#}"), started.elapsed().as_secs_f64());
        show(&(row.line() + "\n"));
        report.rows.push(row);
    }
    let folder = tempfile::tempdir().context("no folder for what the checks write")?;
    let wanted = |check: &&Check| settings.only.is_empty() || settings.only.iter().any(|name| name == check.name);
    for check in checks::ALL.iter().filter(wanted) {
        let left = settings.budget.checked_sub(started.elapsed());
        let row = match time_for(check.limit, left) {
            Some(limit) => {
                let process = Process { settings, check, has_gpu, python: python.program(), limit };
                process.run(folder.path())?
            }
            None => Row::new(check.name, Outcome::NoTime, "the time for all checks was used up before it", 0.0),
        };
        show(&(row.line() + "\n"));
        report.rows.push(row);
        report.seconds = started.elapsed().as_secs_f64().round();
        keep(&report)?;
    }
    report.is_finished = true;
    keep(&report)?;
    Ok(report)
}

/// Prints, if anybody reads: the report has it, too.
pub(crate) fn show(text: &str) {
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}

/// How long a check may take: what it may by itself, or what is left for all. Less than a second is no time.
fn time_for(limit: Duration, left: Option<Duration>) -> Option<Duration> {
    let time = limit.min(left?);
    (time >= Duration::from_secs(1)).then_some(time)
}

/// One check that is about to run.
struct Process<'a> {
    settings: &'a Settings,
    check: &'a Check,
    has_gpu: bool,
    python: Option<&'a Path>,
    limit: Duration,
}

impl Process<'_> {
    fn run(&self, folder: &Path) -> Result<Row> {
        let name = self.check.name;
        let own = folder.join(name);
        std::fs::create_dir_all(&own).with_context(|| format!("could not create {}", own.display()))?;
        let answer = own.join("answer.json");
        let started = Instant::now();
        let mut printed = Vec::new();
        let limits = Limits { time: Some(self.limit), ..Limits::default() };
        let outcome = ask_and_watch(&mut self.command(&answer, &own), limits, &mut |piece| printed.extend(piece));
        let seconds = started.elapsed().as_secs_f64();
        let printed = String::from_utf8_lossy(&printed);
        let (outcome, figure) = match outcome {
            Ok(output) => judge(output.status, &answer, &printed),
            Err(error) if error.is_limit_passed() => late(self.limit, self.check.limit),
            Err(error) if error.is_interrupted() => return Err(error.into()),
            Err(error) => (Outcome::Failed, error.to_string()),
        };
        // A check that went well has nothing to explain.
        let is_quiet = matches!(outcome, Outcome::Passed | Outcome::NotHere);
        let last_words = if is_quiet { Vec::new() } else { last_lines(&printed) };
        Ok(Row { last_words, ..Row::new(name, outcome, figure, seconds) })
    }

    /// The same program again. Both its streams come as one: who is ended for its time has its last words on either.
    fn command(&self, answer: &Path, own: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(&self.settings.program);
        command.args(["check", self.check.name, "--answer"]).arg(answer);
        command.arg("--folder").arg(own).arg("--scripts").arg(&self.settings.scripts);
        // What it leaves when it is ended goes with the folder.
        command.env("TMPDIR", own);
        if self.has_gpu {
            command.arg("--cuda");
        }
        if let Some(python) = self.python {
            command.arg("--python").arg(python);
        }
        let how = self.settings.plants.iter().find(|(name, _)| name == self.check.name).map(|(_, how)| how);
        if let Some(value) = how.and_then(clap::ValueEnum::to_possible_value) {
            command.args(["--plant", value.get_name()]);
        }
        command
    }
}

/// What came of a check that was ended after so long. One that had less time than it may take, because of those before, has shown nothing.
fn late(had: Duration, may_take: Duration) -> (Outcome, String) {
    let had_seconds = had.as_secs();
    if had < may_take {
        return (Outcome::NoTime, format!("{had_seconds} s were left for it of the time for all checks, see --budget"));
    }
    (Outcome::TimedOut, format!("did not end within {had_seconds} s"))
}

/// What came of a check whose process has ended by itself.
fn judge(status: ExitStatus, answer: &Path, printed: &str) -> (Outcome, String) {
    let found = std::fs::read_to_string(answer).ok().and_then(|text| serde_json::from_str(&text).ok());
    if let Some(signal) = status.signal() {
        // Libraries that tidy up at the end of a process may end it otherwise, and what was found before counts still for the reader.
        let before = match &found {
            Some(Found::Figure(text) | Found::NotHere(text)) => format!(" after it had said: {text}"),
            None => String::new(),
        };
        return (Outcome::Crashed, format!("ended by {}{before}", signal_name(signal)));
    }
    let last = printed.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
    if !status.success() {
        let error = printed.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or(last);
        return (Outcome::Failed, error.to_owned());
    }
    match found {
        Some(Found::Figure(figure)) => (Outcome::Passed, figure),
        Some(Found::NotHere(reason)) => (Outcome::NotHere, format!("because {reason}")),
        None => (Outcome::Crashed, "ended with code 0, and has not said what it found".to_owned()),
    }
}

fn last_lines(printed: &str) -> Vec<String> {
    let lines: Vec<&str> = printed.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_check_gets_what_is_left_at_most_and_nothing_of_a_moment() {
        let seconds = Duration::from_secs;
        for (limit, left, wanted) in [
            (seconds(60), Some(seconds(480)), Some(seconds(60))),
            (seconds(60), Some(seconds(7)), Some(seconds(7))),
            (seconds(60), Some(Duration::from_millis(900)), None),
            (seconds(60), None, None),
        ] {
            assert_eq!(time_for(limit, left), wanted, "{limit:?} {left:?}");
        }
    }

    #[test]
    fn a_check_that_had_less_time_than_it_may_take_has_not_failed() {
        let seconds = Duration::from_secs;
        assert_eq!(late(seconds(180), seconds(180)).0, Outcome::TimedOut);
        let (outcome, figure) = late(seconds(142), seconds(180));
        assert_eq!((outcome, figure.starts_with("142 s were left")), (Outcome::NoTime, true));
    }

    #[test]
    fn a_process_is_judged_by_its_end_and_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        let (there, missing) = (folder.path().join("there"), folder.path().join("missing"));
        std::fs::write(&there, r#"{"figure":"3 of 3"}"#).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        std::fs::write(&elsewhere, r#"{"not_here":"there is no GPU"}"#).unwrap();
        for (code, answer, printed, outcome, figure) in [
            (0, &there, "", Outcome::Passed, "3 of 3"),
            (0, &elsewhere, "", Outcome::NotHere, "because there is no GPU"),
            (0, &missing, "bye\n", Outcome::Crashed, "ended with code 0, and has not said what it found"),
            (256, &there, "error: found 2, wanted 3\nbye\n", Outcome::Failed, "found 2, wanted 3"),
            (256, &missing, "bye\n\n", Outcome::Failed, "bye"),
            (11, &missing, "", Outcome::Crashed, "ended by SIGSEGV"),
            (11, &there, "", Outcome::Crashed, "ended by SIGSEGV after it had said: 3 of 3"),
        ] {
            let found = judge(ExitStatus::from_raw(code), answer, printed);
            assert_eq!(found, (outcome, figure.to_owned()), "{code} {printed:?}");
        }
    }

    #[test]
    fn the_last_words_are_few() {
        let many: String = (0..90).map(|number| format!("{number}\n\n")).collect();
        let words = last_lines(&many);
        assert_eq!((words.len(), words.first().unwrap().as_str(), words.last().unwrap().as_str()), (40, "50", "89"));
    }
}
