//! Runs that have to be over before they are done save first, and go on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// What one process prints that trains on little, with these options.
fn run(folder: &Path, output: &str, options: &[&str], stop_at: Option<&str>) -> String {
    let command = |name: &str| folder.join(name).into_os_string();
    let output = Command::new(env!("CARGO_BIN_EXE_nlp_example"))
        .arg("--train_file")
        .arg(command("train.tsv"))
        .arg("--validation_file")
        .arg(command("dev.tsv"))
        .arg("--output_dir")
        .arg(command(output))
        .args(["--cpu", "--batch_size", "8", "--num_epochs", "2", "--gradient_accumulation_steps", "2"])
        .args(options)
        .envs(stop_at.map(|time| ("ACCELERATE_STOP_AT", time)))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The last line of a run, without how fast it was.
fn scores(printed: &str) -> &str {
    printed.lines().last().and_then(|last| last.split(" samples_per_second").next()).unwrap_or_default()
}

#[test]
fn a_run_that_has_no_time_left_saves_after_each_step_and_ends_as_one_that_had_it() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rows) in [("train.tsv", 32), ("dev.tsv", 12)] {
        let table = (0..rows).fold(String::from("sentence\tlabel\n"), |mut text, row| {
            let (word, label) = if row % 2 == 0 { ("good", 1) } else { ("bad", 0) };
            writeln!(text, "a {word} film number {row}\t{label}").unwrap();
            text
        });
        std::fs::write(folder.path().join(name), table).unwrap();
    }
    let undisturbed = run(folder.path(), "undisturbed", &[], None);
    let past = Some("2020-01-31T18:00:00+01:00");
    // Two steps in each of two epochs, of which the second run does the last of the first epoch.
    for batches in [0, 2] {
        let stopped = run(folder.path(), "stopped", &["--resume"], past);
        assert!(stopped.contains("saved; --resume goes on"), "{stopped}");
        let begins = if batches == 0 { "training begins".to_owned() } else { format!("after {batches} batches") };
        assert!(stopped.contains(&begins) && !stopped.contains("accuracy"), "{stopped}");
    }
    let resumed = run(folder.path(), "stopped", &["--resume"], None);
    assert!(resumed.contains("after 4 batches"), "{resumed}");
    assert!(scores(&resumed).contains("accuracy"), "{resumed}");
    assert_eq!(scores(&resumed), scores(&undisturbed));
}
