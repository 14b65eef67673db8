//! The race of texts that are continued token by token.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// Tokens that are added to a text, and how often.
const SETTINGS: [&str; 4] = ["--new_tokens", "64", "--rounds", "3"];

/// The median ratio that counts as won.
const GOAL: f64 = 0.6;

/// Most that the logit of one of our tokens may be below the largest, as a part of that, by the rival's model in float32. Rounding to
/// bfloat16 makes 0.004; the second best of all tokens is 0.05 below the best on average, and any other token about 1.
const MOST_SHORTFALL: f64 = 0.02;

/// What our side reports.
#[derive(Debug, Deserialize)]
struct Ours {
    /// Of a token.
    micros: f64,
    tokens: Vec<i64>,
}

/// What the rival reports, which judges our tokens besides.
#[derive(Debug, Deserialize)]
struct Rival {
    micros: f64,
    num_tokens: usize,
    shortfall: f64,
}

fn report<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    let printed = process::read(command)?;
    let text = *ranks::marked(&printed, "report=").first().context("the program reported nothing")?;
    serde_json::from_str(text).with_context(|| format!("not a report: {text}"))
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
        let ours: Ours = report(command.arg("--folder").arg(&folder).args(SETTINGS).env("OMP_NUM_THREADS", "1"))?;
        let tokens = ours.tokens.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        let mut command = environment.command();
        command.arg(&script).arg("--folder").arg(&folder).args(SETTINGS).args(["--tokens", &tokens]);
        let rival: Rival = report(&mut command)?;
        check_tokens(&ours, &rival)?;
        if round > 0 {
            pairs.push(Pair { ours: ours.micros, rival: rival.micros });
        }
    }
    races.add(Race { name: "generate_tokens", unit: "us", goal: GOAL, pairs });
    Ok(())
}

/// A side that says something else has computed something else.
fn check_tokens(ours: &Ours, rival: &Rival) -> Result<()> {
    let (found, wanted) = (ours.tokens.len(), rival.num_tokens);
    ensure!(found > 0 && found == wanted, "the race generate_tokens is void: {found} tokens here and {wanted} there");
    // What is not a number is no small shortfall.
    ensure!(
        rival.shortfall <= MOST_SHORTFALL,
        "the race generate_tokens is void: by the rival's model, a token of ours is {} of the largest logit below it, and {MOST_SHORTFALL} \
         may be rounding; {:?}",
        rival.shortfall,
        ours.tokens
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn worse_tokens_void_the_race() {
        let check = |tokens: &[i64], num_tokens, shortfall| {
            let ours = Ours { micros: 1.0, tokens: tokens.to_vec() };
            check_tokens(&ours, &Rival { micros: 1.0, num_tokens, shortfall })
        };
        check(&[1, 2], 2, 0.01).unwrap();
        let message = check(&[1, 2], 2, 0.05).unwrap_err().to_string();
        assert!(message.contains("0.05 of the largest logit") && message.contains("[1, 2]"), "{message}");
        assert!(check(&[1, 2], 2, f64::NAN).is_err() && check(&[1], 2, 0.0).is_err() && check(&[], 0, 0.0).is_err());
    }
}
