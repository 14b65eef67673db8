//! `cargo xtask parity precision`: losses, learning rates and skipped steps in every precision, in Python and here.

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::BOUND;
use super::compare::{largest_difference, losses_apart};
use super::grid::Grid;

/// Compare training in every precision.
#[derive(Debug, Args)]
pub(super) struct Precision {
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2])]
    world_sizes: Vec<usize>,
}

/// One training run; both programs read it.
#[derive(Clone, Debug, Serialize)]
struct Case {
    /// `attention` has dropout, too.
    model: &'static str,
    precision: &'static str,
    accumulation: usize,
    optimizer: &'static str,
    clip: bool,
    /// Micro-batches whose loss is infinite.
    planted: Vec<usize>,
}

/// What a run saw, micro-batch by micro-batch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Outcome {
    /// One loss for every rank.
    losses: Vec<Vec<f64>>,
    lrs: Vec<f64>,
    skipped: Vec<bool>,
}

/// Largest difference of a learning rate.
const LR_BOUND: f64 = 1e-5;

pub(super) fn run(arguments: &Precision) -> Result<()> {
    let cases = cases();
    let grid = Grid::new("precision", &cases)?;
    let mut num_different = 0;
    for &world_size in &arguments.world_sizes {
        let ours: Vec<Outcome> = grid.ours(world_size)?;
        let (theirs, permuted) = (grid.theirs(world_size, &[])?, grid.theirs(world_size, &["--permuted"])?);
        for (index, case) in cases.iter().enumerate() {
            let compared = Comparison::of(case, &ours[index], &theirs[index], &permuted[index])?;
            num_different += usize::from(!compared.is_equal());
            println!("{} world_size={world_size} {compared}", case.name());
        }
    }
    if num_different > 0 {
        bail!("{num_different} cases differ from Python");
    }
    Ok(())
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for precision in ["no", "bf16", "fp16"] {
        for accumulation in [1, 2, 4] {
            for optimizer in ["sgd", "adamw"] {
                for clip in [false, true] {
                    // Without loss scaling an infinite loss ends the training, in Python as here.
                    let planted = if precision == "fp16" { vec![3, 4, 21, 50, 51, 52, 53, 54, 55, 90] } else { vec![] };
                    cases.push(Case { model: "mlp", precision, accumulation, optimizer, clip, planted });
                }
            }
        }
    }
    for precision in ["no", "bf16", "fp16"] {
        for accumulation in [1, 4] {
            let (optimizer, clip, planted) = ("adamw", false, Vec::new());
            cases.push(Case { model: "attention", precision, accumulation, optimizer, clip, planted });
        }
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let Self { model, precision, accumulation, optimizer, clip, .. } = self;
        format!("model={model} precision={precision} accumulation={accumulation} optimizer={optimizer} clip={clip}")
    }
}

/// How far both sides are apart.
#[derive(Debug)]
struct Comparison {
    loss: f64,
    /// How far two runs of Python are apart that add up in another order.
    spread: f64,
    lr: f64,
    bound: f64,
    num_skipped: usize,
    same_skipped: bool,
}

impl Comparison {
    fn of(case: &Case, ours: &Outcome, theirs: &Outcome, permuted: &Outcome) -> Result<Comparison> {
        let spread = losses_apart(&theirs.losses, &permuted.losses)?;
        Ok(Comparison {
            loss: losses_apart(&ours.losses, &theirs.losses)?,
            spread,
            lr: largest_difference(&ours.lrs, &theirs.lrs),
            // In another order of the rows dropout leaves out other elements, so that says nothing about rounding.
            bound: if case.precision == "no" || case.model == "attention" { BOUND.loss } else { spread },
            num_skipped: theirs.skipped.iter().filter(|skipped| **skipped).count(),
            same_skipped: ours.skipped == theirs.skipped,
        })
    }

    /// A difference that is not a number is none that is small enough.
    fn is_equal(&self) -> bool {
        self.loss <= self.bound && self.lr <= LR_BOUND && self.same_skipped
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { loss, spread, lr, bound, num_skipped, same_skipped } = self;
        let skipped = if *same_skipped { "the same" } else { "OTHER" };
        let verdict = if self.is_equal() { "equal" } else { "DIFFERENT" };
        write!(
            formatter,
            "loss={loss:.1e} bound={bound:.1e} python_spread={spread:.1e} lr={lr:.1e} skipped={num_skipped} ({skipped}) {verdict}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(loss: f64, lr: f64, skipped: bool) -> Outcome {
        Outcome { losses: vec![vec![loss]], lrs: vec![lr], skipped: vec![skipped] }
    }

    #[test]
    fn every_difference_counts() {
        let case = |precision| Case {
            model: "mlp",
            precision,
            accumulation: 1,
            optimizer: "sgd",
            clip: false,
            planted: Vec::new(),
        };
        let (theirs, permuted) = (outcome(1.0, 0.5, false), outcome(1.001, 0.5, false));
        for (precision, ours, wanted) in [
            ("no", outcome(1.0, 0.5, false), true),
            ("no", outcome(1.0005, 0.5, false), false),
            ("bf16", outcome(1.0005, 0.5, false), true),
            ("bf16", outcome(1.002, 0.5, false), false),
            ("bf16", outcome(f64::NAN, 0.5, false), false),
            ("no", outcome(1.0, 0.6, false), false),
            ("no", outcome(1.0, 0.5, true), false),
            ("no", Outcome { losses: vec![], ..outcome(1.0, 0.5, false) }, false),
        ] {
            let compared = Comparison::of(&case(precision), &ours, &theirs, &permuted);
            assert_eq!(compared.is_ok_and(|compared| compared.is_equal()), wanted, "{precision}: {ours:?}");
        }
    }
}
