//! `cargo xtask parity fsdp`: losses and final parameters of sharded training, with torch's `fully_shard` and here.

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::BOUND;
use super::compare::{Difference, Parameters, losses_apart, parameters_apart};
use super::grid::Grid;

/// Compare sharded training.
#[derive(Debug, Args)]
pub(super) struct Fsdp {
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2, 4])]
    world_sizes: Vec<usize>,
}

/// One training run; both programs read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Case {
    sharding_strategy: &'static str,
    policy: Policy,
    optimizer: &'static str,
    accumulation: usize,
    clip: bool,
}

/// `MixedPrecisionPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Policy {
    param_dtype: Option<&'static str>,
    reduce_dtype: Option<&'static str>,
}

/// What a run saw.
#[derive(Clone, Debug, Deserialize)]
struct Outcome {
    /// For every micro-batch one loss for every rank.
    losses: Vec<Vec<f64>>,
    /// After the last step, whole.
    parameters: Parameters,
}

impl Outcome {
    fn difference(&self, theirs: &Outcome) -> Result<Difference> {
        Ok(Difference {
            loss: losses_apart(&self.losses, &theirs.losses)?,
            parameter: parameters_apart(&self.parameters, &theirs.parameters)?,
        })
    }
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Equal,
    /// `fully_shard` adds up in bfloat16 what travels in it; here sums are float32. Where it does that, too, both are equal.
    ByDesign,
    Different,
}

pub(super) fn run(arguments: &Fsdp) -> Result<()> {
    let cases = cases();
    let grid = Grid::new("fsdp", &cases)?;
    let mut verdicts = Vec::new();
    for &world_size in &arguments.world_sizes {
        let ours: Vec<Outcome> = grid.ours(world_size)?;
        let (theirs, permuted) = (grid.theirs(world_size, &[])?, grid.theirs(world_size, &["--permuted"])?);
        let exact: Vec<Option<Outcome>> = grid.theirs(world_size, &["--sums_in_float32"])?;
        for (index, case) in cases.iter().enumerate() {
            let exact = exact[index].as_ref();
            let compared = Comparison::of(case, &ours[index], &theirs[index], &permuted[index], exact)?;
            println!("{} world_size={world_size} {compared}", case.name());
            verdicts.push(compared.verdict());
        }
    }
    let count = |wanted: Verdict| verdicts.iter().filter(|verdict| **verdict == wanted).count();
    let num_different = count(Verdict::Different);
    println!(
        "parity=fsdp cases={} equal={} differ_by_design={} different={num_different} {}",
        verdicts.len(),
        count(Verdict::Equal),
        count(Verdict::ByDesign),
        if num_different == 0 { "ok" } else { "FAILED" },
    );
    if num_different > 0 {
        bail!("{num_different} cases differ from Python without a reason");
    }
    Ok(())
}

/// Half of all combinations: what is clipped with one strategy is not with the other.
fn cases() -> Vec<Case> {
    let (float32, bfloat16) = (Some("float32"), Some("bfloat16"));
    let mut cases = Vec::new();
    for sharding_strategy in ["FULL_SHARD", "SHARD_GRAD_OP"] {
        for (param_dtype, reduce_dtype) in [(None, None), (bfloat16, float32), (bfloat16, bfloat16)] {
            for optimizer in ["sgd", "adamw"] {
                for accumulation in [1, 4] {
                    let clip = (accumulation == 4) == (sharding_strategy == "FULL_SHARD");
                    let policy = Policy { param_dtype, reduce_dtype };
                    cases.push(Case { sharding_strategy, policy, optimizer, accumulation, clip });
                }
            }
        }
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let Self { sharding_strategy, policy, optimizer, accumulation, clip } = self;
        let name = |dtype: Option<&'static str>| dtype.unwrap_or("float32");
        let (param, reduce) = (name(policy.param_dtype), name(policy.reduce_dtype));
        format!(
            "{sharding_strategy} param_dtype={param} reduce_dtype={reduce} optimizer={optimizer} \
             accumulation={accumulation} clip={clip}"
        )
    }
}

/// How far both sides are apart.
#[derive(Debug)]
struct Comparison {
    difference: Difference,
    /// How far the losses of two runs of Python are apart that add up in another order.
    spread: f64,
    bound: Difference,
    /// From a Python whose sums are float32, where its own are not.
    exact: Option<Difference>,
}

impl Comparison {
    fn of(
        case: &Case,
        ours: &Outcome,
        theirs: &Outcome,
        permuted: &Outcome,
        exact: Option<&Outcome>,
    ) -> Result<Comparison> {
        let spread = losses_apart(&theirs.losses, &permuted.losses)?;
        // In bfloat16 the losses show what parameters do.
        let is_float32 = case.policy.param_dtype.is_none();
        let bound = if is_float32 { BOUND } else { Difference { loss: spread, parameter: f64::INFINITY } };
        let exact = exact.map(|exact| ours.difference(exact)).transpose()?;
        Ok(Comparison { difference: ours.difference(theirs)?, spread, bound, exact })
    }

    fn verdict(&self) -> Verdict {
        if self.difference.is_within(self.bound) {
            Verdict::Equal
        } else if self.exact.is_some_and(|exact| exact.is_within(BOUND)) {
            Verdict::ByDesign
        } else {
            Verdict::Different
        }
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { difference: Difference { loss, parameter }, spread, bound, exact } = self;
        let bound = bound.loss;
        write!(formatter, "loss={loss:.1e} bound={bound:.1e} python_spread={spread:.1e} parameter={parameter:.1e} ")?;
        if let Some(Difference { loss, parameter }) = exact {
            write!(formatter, "with_float32_sums: loss={loss:.1e} parameter={parameter:.1e} ")?;
        }
        formatter.write_str(match self.verdict() {
            Verdict::Equal => "equal",
            Verdict::ByDesign => "BY DESIGN",
            Verdict::Different => "DIFFERENT",
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn outcome(loss: f64, parameter: f64) -> Outcome {
        Outcome { losses: vec![vec![loss]], parameters: Parameters::from([("a".to_owned(), vec![parameter])]) }
    }

    #[test]
    fn every_difference_counts_and_one_is_excused() {
        let (float32, bfloat16) = (cases()[0].clone(), cases()[8].clone());
        assert_eq!((float32.policy.reduce_dtype, bfloat16.policy.reduce_dtype), (None, Some("bfloat16")));
        let (theirs, permuted) = (outcome(1.0, 1.0), outcome(1.001, 1.0));
        for (case, ours, exact, wanted) in [
            (&float32, outcome(1.0, 1.0), None, Verdict::Equal),
            (&float32, outcome(1.0005, 1.0), None, Verdict::Different),
            (&float32, outcome(1.0, 1.0005), None, Verdict::Different),
            (&bfloat16, outcome(1.0005, 1.5), Some(1.5), Verdict::Equal),
            (&bfloat16, outcome(1.002, 1.0), Some(1.002), Verdict::ByDesign),
            (&bfloat16, outcome(1.002, 1.0), Some(1.0021), Verdict::Different),
            (&bfloat16, outcome(1.002, 1.5), Some(1.002), Verdict::Different),
            (&bfloat16, outcome(1.002, 1.0), None, Verdict::Different),
            (&bfloat16, outcome(f64::NAN, 1.0), Some(f64::NAN), Verdict::Different),
        ] {
            let exact = exact.map(|loss| outcome(loss, 1.0));
            let compared = Comparison::of(case, &ours, &theirs, &permuted, exact.as_ref()).unwrap();
            assert_eq!(compared.verdict(), wanted, "{ours:?} {exact:?}");
        }
    }

    #[test]
    fn no_case_comes_twice() {
        let cases = cases();
        assert_eq!(cases.len(), 24);
        for case in &cases {
            assert_eq!(cases.iter().filter(|other| *other == case).count(), 1, "{case:?}");
        }
    }
}
