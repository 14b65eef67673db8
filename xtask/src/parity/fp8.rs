//! `cargo xtask parity fp8`: training in FP8 beside torchao, and beside TransformerEngine's definition of delayed scaling.

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::compare::{Parameters, losses_apart};
use super::grid::Grid;
use crate::python::Environment;

/// Compare training in FP8.
#[derive(Debug, Args)]
pub(super) struct Fp8 {
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2])]
    world_sizes: Vec<usize>,
}

/// One training run; both programs read it.
#[derive(Clone, Debug, Serialize)]
struct Case {
    recipe: Option<&'static str>,
    delayed: Option<Delayed>,
    autocast: bool,
    optimizer: &'static str,
}

/// Settings of TransformerEngine's recipe.
#[derive(Clone, Copy, Debug, Serialize)]
struct Delayed {
    margin: usize,
    interval: usize,
    fp8_format: &'static str,
    amax_history_len: usize,
    amax_compute_algo: &'static str,
}

/// What a run saw.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Outcome {
    losses: Vec<Vec<f64>>,
    /// By number of the layer and tensor: the largest values, and the scales.
    scales: Parameters,
}

pub(super) fn run(arguments: &Fp8) -> Result<()> {
    let cases = cases();
    let grid = Grid::in_environment("fp8", Environment::with_torchao()?, &cases)?;
    let mut num_different = 0;
    for &world_size in &arguments.world_sizes {
        let ours: Vec<Outcome> = grid.ours(world_size)?;
        let (theirs, permuted) = (grid.theirs(world_size, &[])?, grid.theirs(world_size, &["--permuted"])?);
        for (index, case) in cases.iter().enumerate() {
            let compared = Comparison::of(&ours[index], &theirs[index], &permuted[index])?;
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
    const DELAYED: Delayed = Delayed {
        margin: 0,
        interval: 1,
        fp8_format: "HYBRID",
        amax_history_len: 16,
        amax_compute_algo: "most_recent",
    };
    let recipes = ["tensorwise", "rowwise", "rowwise_with_gw_hp"].map(|recipe| (Some(recipe), None));
    let delayed = [
        DELAYED,
        Delayed { amax_compute_algo: "max", ..DELAYED },
        Delayed { fp8_format: "E4M3", amax_history_len: 1, ..DELAYED },
        Delayed { margin: 2, interval: 3, amax_compute_algo: "max", ..DELAYED },
    ];
    let delayed = delayed.map(|delayed| (None, Some(delayed)));
    let mut cases = Vec::new();
    for (recipe, delayed) in recipes.into_iter().chain(delayed) {
        for autocast in [false, true] {
            for optimizer in ["sgd", "adamw"] {
                cases.push(Case { recipe, delayed, autocast, optimizer });
            }
        }
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let Self { recipe, delayed, autocast, optimizer } = self;
        let recipe = match (recipe, delayed) {
            (_, Some(Delayed { margin, interval, fp8_format, amax_history_len, amax_compute_algo })) => format!(
                "delayed margin={margin} interval={interval} format={fp8_format} history={amax_history_len} {amax_compute_algo}"
            ),
            (recipe, None) => recipe.unwrap_or_default().to_owned(),
        };
        format!("{recipe} autocast={autocast} optimizer={optimizer}")
    }
}

/// How far both sides are apart.
#[derive(Debug)]
struct Comparison {
    loss: f64,
    /// How far two runs of Python are apart that add up in another order.
    spread: f64,
    /// Are largest values and scales the same numbers?
    same_scales: bool,
}

impl Comparison {
    fn of(ours: &Outcome, theirs: &Outcome, permuted: &Outcome) -> Result<Comparison> {
        Ok(Comparison {
            loss: losses_apart(&ours.losses, &theirs.losses)?,
            spread: losses_apart(&theirs.losses, &permuted.losses)?,
            same_scales: !theirs.scales.is_empty() && ours.scales == theirs.scales,
        })
    }

    /// A difference that is not a number is none that is small enough.
    fn is_equal(&self) -> bool {
        self.loss <= self.spread && self.same_scales
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { loss, spread, same_scales } = self;
        let scales = if *same_scales { "the same" } else { "OTHER" };
        let verdict = if self.is_equal() { "equal" } else { "DIFFERENT" };
        write!(formatter, "loss={loss:.1e} python_spread={spread:.1e} scales={scales} {verdict}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(loss: f64, scale: f64) -> Outcome {
        Outcome { losses: vec![vec![loss]], scales: [("1.weight".to_owned(), vec![scale])].into() }
    }

    #[test]
    fn every_difference_counts() {
        let (theirs, permuted) = (outcome(1.0, 0.5), outcome(1.001, 0.5));
        for (ours, wanted) in [
            (outcome(1.0, 0.5), true),
            (outcome(1.0005, 0.5), true),
            (outcome(1.002, 0.5), false),
            (outcome(f64::NAN, 0.5), false),
            (outcome(1.0, 0.500_000_1), false),
            (Outcome { scales: Parameters::new(), ..outcome(1.0, 0.5) }, false),
        ] {
            let compared = Comparison::of(&ours, &theirs, &permuted);
            assert_eq!(compared.is_ok_and(|compared| compared.is_equal()), wanted, "{ours:?}");
        }
    }
}
