//! What came of the checks, as a table for people and as JSON for programs.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::machine::Machine;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Crashed,
    TimedOut,
    /// It makes no sense on this machine.
    NotHere,
    /// The time for all checks was used up before it.
    NoTime,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Crashed => "CRASHED",
            Self::TimedOut => "TIMED OUT",
            Self::NotHere => "not here",
            Self::NoTime => "NO TIME",
        }
    }

    fn is_good(self) -> bool {
        matches!(self, Self::Passed | Self::NotHere)
    }
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) check: &'static str,
    pub(crate) result: Outcome,
    pub(crate) figure: String,
    pub(crate) seconds: f64,
    /// The last lines that its process printed, where it did not go well.
    pub(crate) last_words: Vec<String>,
}

impl Row {
    pub(crate) fn new(check: &'static str, result: Outcome, figure: impl Into<String>, seconds: f64) -> Self {
        let seconds = (seconds * 10.0).round() / 10.0;
        Self { check, result, figure: figure.into(), seconds, last_words: Vec::new() }
    }

    pub(crate) fn line(&self) -> String {
        format!("{:18} {:9} {:>6.1}  {}", self.check, self.result.text(), self.seconds, self.figure)
    }
}

/// Everything.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// No GPU took part.
    pub(crate) is_rehearsal: bool,
    /// Although the machine has one.
    pub(crate) misses_gpu: bool,
    /// Nothing could be compared with Python, although that was not asked for.
    pub(crate) misses_python: bool,
    /// Whether the program was built with the feature `cuda`.
    pub(crate) has_feature: bool,
    /// Not of a run that is still going on, or was ended in the middle.
    pub(crate) is_finished: bool,
    /// What makes this another run than that of everything: checks that were chosen, or made to go wrong, and another time for all.
    pub(crate) asked: Vec<String>,
    /// Since the start.
    pub(crate) seconds: f64,
    pub(crate) machine: Machine,
    pub(crate) rows: Vec<Row>,
}

const MISSED: &str = "libtorch does not see the GPU of this machine, which is a failure: is the bundle built with the feature cuda, does \
                      the driver fit CUDA 13, and is CUDA_VISIBLE_DEVICES empty?\n";
const NO_COMPARISONS: &str = "Nothing is compared with Python, which is a failure: --python or PYTHON names a Python with torch 2.11 and \
                              accelerate, and `--python none` says that none is wanted.\n";
const REHEARSAL: &str = "REHEARSAL: these checks ran on the CPU over Gloo. They prove nothing about a GPU.\n";

impl Report {
    /// What stands above the table.
    pub(crate) fn head(&self) -> String {
        let Machine { system, processor, gpu, driver, libtorch, python, commit, date } = &self.machine;
        let feature = if self.has_feature { "with" } else { "without" };
        let mut head = format!("gpu-checks of {commit}, built {feature} the feature cuda\n{date}\n");
        for (name, value) in [
            ("system", system),
            ("processor", processor),
            ("GPU", gpu),
            ("driver", driver),
            ("libtorch", libtorch),
            ("Python", python),
        ] {
            let _ = writeln!(head, "{name:9} {value}");
        }
        if self.is_rehearsal {
            head.push_str(REHEARSAL);
        }
        if self.misses_gpu {
            head.push_str(MISSED);
        }
        if self.misses_python {
            head.push_str(NO_COMPARISONS);
        }
        if !self.asked.is_empty() {
            let _ = writeln!(head, "NOT EVERYTHING: this run was asked for with {}.", self.asked.join(" "));
        }
        let _ = writeln!(head, "\n{:18} {:9} {:>6}  figure", "check", "result", "s");
        head
    }

    pub(crate) fn text(&self) -> String {
        let mut text = self.head();
        for row in &self.rows {
            let _ = writeln!(text, "{}", row.line());
        }
        text + &self.tail()
    }

    /// What stands below the table.
    pub(crate) fn tail(&self) -> String {
        let unfinished = if self.is_finished {
            ""
        } else {
            "UNFINISHED: this run goes on, or was ended before all checks had run.\n"
        };
        let mut text = format!("\n{unfinished}{}, in {} s\n", self.summary(), self.seconds);
        for row in self.rows.iter().filter(|row| !row.last_words.is_empty()) {
            let _ = writeln!(text, "\nlast words of {}:", row.check);
            for line in &row.last_words {
                let _ = writeln!(text, "  {line}");
            }
        }
        text
    }

    fn summary(&self) -> String {
        let count = |wanted: &[Outcome]| self.rows.iter().filter(|row| wanted.contains(&row.result)).count();
        format!(
            "{} passed, {} failed, {} crashed, {} timed out, {} not here, {} without time",
            count(&[Outcome::Passed]),
            count(&[Outcome::Failed]),
            count(&[Outcome::Crashed]),
            count(&[Outcome::TimedOut]),
            count(&[Outcome::NotHere]),
            count(&[Outcome::NoTime]),
        )
    }

    /// Has every check been run, as far as it makes sense here, and gone well?
    pub(crate) fn is_good(&self) -> bool {
        !self.misses_gpu && !self.misses_python && self.rows.iter().all(|row| row.result.is_good())
    }

    /// Writes `report.txt` and `report.json`.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| format!("could not write {}", path.display()))
        };
        write("report.txt", self.text())?;
        write("report.json", serde_json::to_string_pretty(self)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(results: &[Outcome], is_rehearsal: bool) -> Report {
        let word = || "x".to_owned();
        let machine = Machine {
            system: word(),
            processor: word(),
            gpu: word(),
            driver: word(),
            libtorch: word(),
            python: word(),
            commit: word(),
            date: word(),
        };
        let rows = results.iter().map(|result| Row {
            last_words: if result.is_good() { Vec::new() } else { vec!["alas".to_owned()] },
            ..Row::new("dropout", *result, "half of them", 1.26)
        });
        Report {
            is_rehearsal,
            misses_gpu: false,
            misses_python: false,
            has_feature: true,
            is_finished: true,
            asked: Vec::new(),
            seconds: 1.0,
            machine,
            rows: rows.collect(),
        }
    }

    #[test]
    fn only_what_passed_or_makes_no_sense_here_is_good() {
        for (result, wanted) in [
            (Outcome::Passed, true),
            (Outcome::NotHere, true),
            (Outcome::Failed, false),
            (Outcome::Crashed, false),
            (Outcome::TimedOut, false),
            (Outcome::NoTime, false),
        ] {
            assert_eq!(report(&[Outcome::Passed, result], false).is_good(), wanted, "{result:?}");
        }
    }

    #[test]
    fn a_rehearsal_says_so_and_bad_ends_have_their_last_words() {
        let text = report(&[Outcome::Passed, Outcome::Crashed], true).text();
        assert!(text.contains("prove nothing about a GPU"), "{text}");
        assert!(text.contains("1 passed, 0 failed, 1 crashed") && text.contains("  alas"), "{text}");
        let text = report(&[Outcome::Passed], false).text();
        assert!(!text.contains("REHEARSAL") && !text.contains("alas"), "{text}");
    }

    #[test]
    fn a_gpu_that_is_not_seen_is_a_failure() {
        let report = Report { misses_gpu: true, ..report(&[Outcome::Passed], true) };
        assert!(!report.is_good() && report.head().contains("does not see the GPU"), "{}", report.head());
    }

    #[test]
    fn a_python_that_cannot_be_used_is_a_failure() {
        let report = Report { misses_python: true, ..report(&[Outcome::Passed], false) };
        assert!(!report.is_good() && report.head().contains("Nothing is compared"), "{}", report.head());
    }

    #[test]
    fn a_part_of_the_checks_is_not_taken_for_all() {
        let report = Report { asked: vec!["--only dropout".to_owned()], ..report(&[Outcome::Passed], false) };
        assert!(
            report.text().contains("NOT EVERYTHING: this run was asked for with --only dropout"),
            "{}",
            report.text()
        );
    }

    #[test]
    fn a_report_of_a_run_in_the_middle_says_so() {
        let report = Report { is_finished: false, ..report(&[Outcome::Passed], false) };
        assert!(report.text().contains("UNFINISHED"), "{}", report.text());
    }

    #[test]
    fn seconds_are_rounded_and_columns_are_in_line() {
        let row = Row::new("dropout", Outcome::Passed, "half of them", 1.26);
        assert_eq!(row.line(), "dropout            passed       1.3  half of them");
    }
}
