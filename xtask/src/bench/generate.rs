//! The race of texts that are continued token by token.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// Tokens that are added to a text, and how often.
const SETTINGS: [&str; 4] = ["--new_tokens", "64", "--rounds", "3"];

/// The median ratio that counts as won.
const GOAL: f64 = 0.6;

/// What a side reports.
#[derive(Debug, Deserialize)]
struct Report {
    /// Of a token.
    micros: f64,
    tokens: Vec<i64>,
}

impl Report {
    fn of(command: &mut Command) -> Result<Report> {
        let printed = process::read(command)?;
        let text = *ranks::marked(&printed, "report=").first().context("the program reported nothing")?;
        serde_json::from_str(text).with_context(|| format!("not a report: {text}"))
    }
}

/// Microseconds of a token of GPT-2 with 124 million parameters in bfloat16, one text, one thread, beside Transformers on the same
/// weights.
pub(super) fn races(rounds: usize, races: &mut Races) -> Result<()> {
    let environment = Environment::with_transformers()?;
    let script = paths::repository_root().join("bench/rival/generate.py");
    let folder = paths::target_folder().join("bench/gpt2-124m");
    if !folder.join("model.safetensors").exists() {
        process::read(environment.command().arg(&script).arg("--make").arg(&folder))?;
    }
    let mut pairs = Vec::new();
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let mut command = Command::new(paths::release_binary("generate"));
        let ours = Report::of(command.arg("--folder").arg(&folder).args(SETTINGS).env("OMP_NUM_THREADS", "1"))?;
        let rival = Report::of(environment.command().arg(&script).arg("--folder").arg(&folder).args(SETTINGS))?;
        check_tokens(&ours.tokens, &rival.tokens)?;
        if round > 0 {
            pairs.push(Pair { ours: ours.micros, rival: rival.micros });
        }
    }
    races.add(Race { name: "generate_tokens", unit: "us", goal: GOAL, pairs });
    Ok(())
}

/// A side that says something else has computed something else.
fn check_tokens(ours: &[i64], rival: &[i64]) -> Result<()> {
    ensure!(!ours.is_empty(), "the race generate_tokens is void: no tokens");
    let first = ours.iter().zip(rival).position(|(ours, rival)| ours != rival);
    ensure!(
        ours == rival,
        "the race generate_tokens is void: token {} differs; {ours:?} here and {rival:?} there",
        first.unwrap_or(ours.len().min(rival.len()))
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn other_tokens_void_the_race() {
        check_tokens(&[1, 2], &[1, 2]).unwrap();
        let message = check_tokens(&[1, 2], &[1, 3]).unwrap_err().to_string();
        assert!(message.contains("token 1 differs"), "{message}");
        assert!(check_tokens(&[1], &[1, 3]).is_err() && check_tokens(&[], &[]).is_err());
    }
}
