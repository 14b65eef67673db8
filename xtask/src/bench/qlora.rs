//! The race of a large model against a small machine: peak memory of two ranks that fine-tune it in 4 bits.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

const NUM_RANKS: usize = 2;

/// What a rank may take.
const LIMIT_MIB: f64 = 3.0 * 1024.0;

/// How far apart losses may be: hidden states are bfloat16, and both ways add up the same gradients in other orders.
const TOLERANCE: f64 = 1e-3;

/// Each rank has the whole model in codes, or shares it. Values are MiB of the larger rank, from its start to its end. Losses of
/// the two ways have to agree, and to fall.
pub(super) fn memory(rounds: usize, races: &mut Races) -> Result<()> {
    let (mut replicated, mut sharded) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let whole = run(&[])?;
        let parts = run(&["--use_fsdp"])?;
        whole.check_same(&parts)?;
        replicated.push(Pair { ours: whole.mib, rival: LIMIT_MIB });
        sharded.push(Pair { ours: parts.mib, rival: LIMIT_MIB });
    }
    let race = |name: &'static str, pairs: Vec<Pair>| Race { name, unit: "MiB", goal: 1.0, pairs };
    races.extend([race("qlora_memory_ddp", replicated), race("qlora_memory_fsdp", sharded)]);
    Ok(())
}

/// What the ranks of a run said.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    /// Of the larger rank.
    mib: f64,
    /// By rank, then by step.
    losses: Vec<Vec<f64>>,
}

fn run(flags: &[&str]) -> Result<Outcome> {
    let mut command = ranks::launch(NUM_RANKS, &paths::release_binary("qlora_memory"));
    command.arg("--").args(flags);
    Outcome::of(&ranks::marked(&process::read(&mut command)?, "report="))
}

impl Outcome {
    fn of(reports: &[&str]) -> Result<Self> {
        ensure!(reports.len() == NUM_RANKS, "the race is void: {} ranks of {NUM_RANKS} reported", reports.len());
        let mut outcome = Self { mib: 0.0, losses: vec![Vec::new(); NUM_RANKS] };
        for report in reports {
            let value: Value =
                serde_json::from_str(report).with_context(|| format!("a report is not JSON: {report}"))?;
            let number =
                |name: &str| value[name].as_f64().with_context(|| format!("a report without `{name}`: {report}"));
            ensure!(number("world_size")? == NUM_RANKS as f64, "the race is void: a rank trained alone");
            outcome.mib = outcome.mib.max(number("peak_resident_bytes")? / f64::from(1 << 20));
            let own = outcome.losses.get_mut(number("rank")? as usize);
            let own = own.with_context(|| format!("a report of a rank that there is not: {report}"))?;
            let losses = value["losses"].as_array().map(Vec::as_slice).unwrap_or_default();
            *own = losses.iter().filter_map(Value::as_f64).collect();
            let falls = own.first().zip(own.last()).is_some_and(|(first, last)| last < first);
            ensure!(falls, "the race is void: losses do not fall: {report}");
        }
        Ok(outcome)
    }

    fn check_same(&self, other: &Self) -> Result<()> {
        let of = |outcome: &Self| outcome.losses.concat();
        let (ours, theirs) = (of(self), of(other));
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
        let is_same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(near);
        ensure!(is_same, "the race is void: losses are {ours:?} replicated and {theirs:?} sharded");
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(rank: usize, mib: u64, losses: &str) -> String {
        format!(r#"{{"rank": {rank}, "world_size": 2, "peak_resident_bytes": {}, "losses": {losses}}}"#, mib << 20)
    }

    #[test]
    fn the_larger_rank_counts_and_losses_are_compared() {
        let (first, second) = (report(0, 700, "[3.0, 2.0]"), report(1, 900, "[3.5, 2.5]"));
        let outcome = Outcome::of(&[&second, &first]).unwrap();
        assert_eq!(outcome, Outcome { mib: 900.0, losses: vec![vec![3.0, 2.0], vec![3.5, 2.5]] });
        outcome.check_same(&outcome).unwrap();
        let other = Outcome::of(&[&first, &report(1, 900, "[3.5, 2.6]")]).unwrap();
        assert!(outcome.check_same(&other).is_err());
        for void in [report(1, 900, "[2.5, 3.5]"), report(1, 900, "[]"), report(7, 900, "[3.5, 2.5]"), "{".to_owned()] {
            assert!(Outcome::of(&[&first, &void]).is_err(), "{void}");
        }
        assert!(Outcome::of(&[&first]).is_err());
    }
}
