//! `cargo xtask test`: every test there is, and how many passed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use clap::Args;

use crate::{libtorch, paths, process};

/// Run the whole test suite: unit, integration, documentation and multi-process tests.
///
/// Uses cargo-nextest when it is installed and `cargo test` otherwise. Arguments after `--` go to the test runner,
/// for instance a part of a test's name; documentation tests are then left out.
#[derive(Debug, Default, Args)]
pub(crate) struct Arguments {
    /// Arguments of the test runner
    #[arg(last = true)]
    runner: Vec<String>,
}

/// How many tests ran and how many of them failed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let mut failures = Vec::new();
    let tests = if has_nextest() { nextest(&arguments.runner) } else { plain_tests(&arguments.runner) };
    let (succeeded, tests) = tests?;
    if !succeeded {
        failures.push("tests");
    }
    let mut documentation = Counts::default();
    if arguments.runner.is_empty() {
        let (succeeded, printed) =
            process::run_and_read(&mut process::cargo(&["test", "--workspace", "--doc", "--no-fail-fast"]))?;
        documentation = counts_of_cargo_test(&printed);
        if !succeeded {
            failures.push("documentation tests");
        }
    }
    println!(
        "tests={} tests_failed={} documentation_tests={} documentation_tests_failed={}",
        tests.passed, tests.failed, documentation.passed, documentation.failed
    );
    if !failures.is_empty() {
        bail!("failed: {}", failures.join(" and "));
    }
    Ok(())
}

fn has_nextest() -> bool {
    let mut question = Command::new("cargo");
    question.args(["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    question.status().is_ok_and(|status| status.success())
}

/// nextest keeps the terminal; the counts are read from the report that `.config/nextest.toml` asks for.
fn nextest(arguments: &[String]) -> Result<(bool, Counts)> {
    let report = paths::target_folder().join("nextest/default/junit.xml");
    let _ = fs::remove_file(&report);
    let mut command = process::cargo(&["nextest", "run", "--workspace", "--no-fail-fast"]);
    let succeeded = process::run(command.args(arguments));
    if let Err(error) = &succeeded {
        eprintln!("{error}");
    }
    Ok((succeeded.is_ok(), counts_of_report(&report)))
}

fn plain_tests(arguments: &[String]) -> Result<(bool, Counts)> {
    eprintln!(
        "cargo-nextest is not installed: running `cargo test`, one test program after the other. \
         `cargo install --locked cargo-nextest` makes this faster"
    );
    // Tests that start several processes share two cores badly with others of their kind, and those of one program share
    // libtorch's generator.
    let mut command = process::cargo(&["test", "--workspace", "--all-targets", "--no-fail-fast"]);
    command.env("RUST_TEST_THREADS", "1");
    let (succeeded, printed) = process::run_and_read(command.args(arguments))?;
    Ok((succeeded, counts_of_cargo_test(&printed)))
}

/// Sums the `test result:` lines of `cargo test`.
fn counts_of_cargo_test(printed: &str) -> Counts {
    let number_before = |line: &str, word: &str| -> usize {
        let before = line.split(word).next().unwrap_or_default();
        before.split_whitespace().next_back().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    let results = printed.lines().filter(|line| line.starts_with("test result:"));
    results.fold(Counts::default(), |sum, line| Counts {
        passed: sum.passed + number_before(line, " passed"),
        failed: sum.failed + number_before(line, " failed"),
    })
}

/// The counts on the `<testsuites …>` element of a JUnit report; zeros if there is none.
fn counts_of_report(report: &Path) -> Counts {
    let text = fs::read_to_string(report).unwrap_or_default();
    let suites = text.split("<testsuites").nth(1).and_then(|rest| rest.split('>').next()).unwrap_or_default();
    let attribute = |name: &str| -> usize {
        let value = suites.split(&format!(" {name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    let failed = attribute("failures") + attribute("errors");
    Counts { passed: attribute("tests").saturating_sub(failed), failed }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_all_test_programs_are_added() {
        let printed = "running 2 tests\ntest a ... ok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
             test result: FAILED. 31 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n";
        assert_eq!(counts_of_cargo_test(printed), Counts { passed: 33, failed: 4 });
        assert_eq!(counts_of_cargo_test(""), Counts::default());
    }

    #[test]
    fn the_report_gives_passed_and_failed() {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("junit.xml");
        assert_eq!(counts_of_report(&report), Counts::default());
        let text = r#"<?xml version="1.0"?><testsuites name="run" tests="12" failures="2" errors="1" time="1.5">
            <testsuite name="core" tests="3" failures="0"></testsuite></testsuites>"#;
        fs::write(&report, text).unwrap();
        assert_eq!(counts_of_report(&report), Counts { passed: 9, failed: 3 });
    }
}
