//! The race of a whole job: from the launch command to the printed accuracy.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Deserialize;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

const NUM_PROCESSES: usize = 2;

/// Texts of a step, in each process.
const BATCH_SIZE: &str = "16";

/// Longest text in tokens.
const MAX_LENGTH: &str = "128";

/// The median ratio that counts as won.
const GOAL: f64 = 0.65;

/// How far apart accuracies may be: dropout and the order of rows differ, and from random weights one epoch is not enough to learn
/// much, so either class may be the one that a model prefers.
const MOST_ACCURACY_APART: f64 = 0.06;

/// How far apart mean losses of the epoch may be.
const MOST_LOSS_APART: f64 = 0.03;

/// Texts and labels, separated by tabs, without a line of names. Only `bench train` needs them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(super) struct Settings {
    /// Texts to learn from: each line a text, a tab and 0 or 1
    #[arg(long = "train_file", value_name = "TSV")]
    train_file: PathBuf,
    /// Texts to judge by
    #[arg(long = "validation_file", value_name = "TSV")]
    validation_file: PathBuf,
}

/// What the rival reports.
#[derive(Debug, Deserialize)]
struct Report {
    accuracy: f64,
    loss: f64,
    num_rows: usize,
    steps: usize,
}

/// Seconds of `nlp_example` for one epoch, two ranks, beside the article's script with Transformers and Accelerate on the same weights
/// and data: as the article has it, which fills up all texts to the longest that is allowed, and with texts filled up to the longest of
/// their batch, as ours are. Ours besides saves the model, reads it back and judges it once more.
pub(super) fn races(rounds: usize, settings: &Settings, races: &mut Races) -> Result<()> {
    let environment = Environment::with_transformers()?;
    process::run(&mut process::cargo(&["build", "--release", "--package", "nlp_example"]))?;
    let script = paths::repository_root().join("bench/rival/train_end_to_end.py");
    let folder = paths::target_folder().join("bench/train_end_to_end");
    let files = |command: &mut Command| {
        command.arg("--train_file").arg(&settings.train_file);
    };
    if !folder.join("model.safetensors").exists() {
        let mut command = environment.command();
        files(command.arg(&script).arg("--make").arg(&folder));
        process::read(&mut command)?;
    }
    let [num_rows, num_judged] = [&settings.train_file, &settings.validation_file].map(|path| lines(path));
    let (num_rows, num_judged) = (num_rows?, num_judged?);
    let output = paths::target_folder().join("bench/train_end_to_end_output");
    let kinds = [("train_end_to_end", "max_length"), ("train_end_to_end_longest", "longest")];
    for (name, padding) in kinds {
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("nlp_example"));
            command.arg("--").arg("--model_name_or_path").arg(&folder).arg("--output_dir").arg(&output);
            command.args(["--num_epochs", "1", "--learning_rate", "0.001", "--batch_size", BATCH_SIZE]);
            command.args(["--max_length", MAX_LENGTH]).arg("--validation_file").arg(&settings.validation_file);
            files(&mut command);
            let (ours, printed) = timed(&mut command)?;
            let answer = (last(&printed, "accuracy=")?, last(&printed, "loss=")?);

            let mut command = environment.torchrun(NUM_PROCESSES)?;
            command.arg(&script).arg("--folder").arg(&folder).args(["--batch_size", BATCH_SIZE, "--padding", padding]);
            command.arg("--validation_file").arg(&settings.validation_file);
            command
                .env("OMP_NUM_THREADS", "1")
                .env("ACCELERATE_USE_CPU", "true")
                .env("TOKENIZERS_PARALLELISM", "false");
            files(&mut command);
            let (rival, printed) = timed(&mut command)?;
            let text = *ranks::marked(&printed, "report=").first().context("the rival reported nothing")?;
            let report = serde_json::from_str(text).with_context(|| format!("not a report: {text}"))?;
            check(name, answer, &report, num_rows, num_judged)?;
            if round > 0 {
                pairs.push(Pair { ours, rival });
            }
        }
        races.add(Race { name, unit: "s", goal: GOAL, pairs });
    }
    Ok(())
}

fn lines(path: &Path) -> Result<usize> {
    let text = std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
    Ok(text.lines().count())
}

fn timed(command: &mut Command) -> Result<(f64, String)> {
    let started = Instant::now();
    let printed = process::read(command)?;
    Ok((started.elapsed().as_secs_f64(), printed))
}

/// The last number that ours prints behind `mark`.
fn last(printed: &str, mark: &str) -> Result<f64> {
    let values = ranks::marked(printed, mark);
    let value = values.last().and_then(|rest| rest.split_whitespace().next());
    let value = value.with_context(|| format!("ours printed no {mark}"))?;
    value.parse().with_context(|| format!("not a number: {mark}{value}"))
}

/// Sides that have learned other things have done other work.
fn check(name: &str, (ours, our_loss): (f64, f64), rival: &Report, num_rows: usize, num_judged: usize) -> Result<()> {
    let Report { accuracy, loss, num_rows: judged, steps } = *rival;
    let batch: usize = BATCH_SIZE.parse()?;
    let wanted = num_rows.div_ceil(batch).div_ceil(NUM_PROCESSES);
    ensure!(steps == wanted, "the race {name} is void: the rival made {steps} steps of {wanted}");
    ensure!(judged == num_judged, "the race {name} is void: the rival judged {judged} texts of {num_judged}");
    let is_near = (ours - accuracy).abs() <= MOST_ACCURACY_APART && (our_loss - loss).abs() <= MOST_LOSS_APART;
    ensure!(
        is_near,
        "the race {name} is void: a loss of {our_loss} and an accuracy of {ours} here, {loss} and {accuracy} there; at most \
         {MOST_LOSS_APART} and {MOST_ACCURACY_APART} apart are wanted"
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn other_work_voids_the_race() {
        let check = |ours, accuracy, num_rows, steps| {
            let rival = Report { accuracy, loss: 0.69, num_rows, steps };
            check("x", (ours, 0.7), &rival, 100, 9).map_err(|error| error.to_string())
        };
        // 7 batches of 16 for two ranks.
        check(0.80, 0.82, 9, 4).unwrap();
        assert!(check(0.80, 0.82, 9, 3).unwrap_err().contains("3 steps of 4"));
        assert!(check(0.80, 0.82, 8, 4).unwrap_err().contains("8 texts of 9"));
        assert!(check(0.80, 0.88, 9, 4).unwrap_err().contains("0.88 there"));
        assert!(check(f64::NAN, 0.8, 9, 4).is_err());
        let rival = Report { accuracy: 0.8, loss: 0.6, num_rows: 9, steps: 4 };
        assert!(super::check("x", (0.8, 0.7), &rival, 100, 9).is_err());
    }

    #[test]
    fn numbers_are_those_of_the_last_line() {
        let printed = "epoch 1 accuracy=0.5 f1=0.4\n[rank 0] accuracy=0.8100 f1=0.8 world_size=2\n";
        assert_eq!(last(printed, "accuracy=").unwrap(), 0.81);
        assert!(last("nothing", "accuracy=").is_err());
    }
}
