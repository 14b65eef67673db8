//! The part of `cargo xtask parity ddp` about buffers: a model with batch norm that is evaluated between its steps, in Python
//! and here.

use std::fmt;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::compare::{Parameters, losses_apart, parameters_apart};
use super::grid::Grid;

/// One training run; both programs read it.
#[derive(Clone, Debug, Serialize)]
struct Case {
    accumulation: usize,
    broadcast_buffers: bool,
    /// After each micro-batch.
    evaluations: usize,
    /// The last evaluation after each micro-batch decides on the learning rate.
    plateau: bool,
}

/// What a run saw, and what it has left.
#[derive(Clone, Debug, Deserialize)]
struct Outcome {
    losses: Vec<Vec<f64>>,
    evaluations: Vec<Vec<f64>>,
    lrs: Vec<Vec<f64>>,
    /// Parameters and buffers of all ranks.
    state: Parameters,
}

/// Most that both sides may be apart. A buffer of another rank, or one that is copied a step later, makes a thousand times this.
const BOUND: f64 = 1e-5;

pub(super) fn run(world_sizes: &[usize]) -> Result<()> {
    let cases = cases();
    let grid = Grid::new("batch_norm", &cases)?;
    let mut num_different = 0;
    for &world_size in world_sizes {
        let (ours, theirs): (Vec<Outcome>, Vec<Outcome>) = (grid.ours(world_size)?, grid.theirs(world_size, &[])?);
        for (index, case) in cases.iter().enumerate() {
            let compared = Comparison::of(case, &ours[index], &theirs[index])?;
            num_different += usize::from(!compared.is_equal());
            println!("{} world_size={world_size} {compared}", case.name());
        }
    }
    if num_different > 0 {
        bail!("{num_different} cases with batch norm differ from Python");
    }
    Ok(())
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for accumulation in [1, 2, 3] {
        for broadcast_buffers in [true, false] {
            for (evaluations, plateau) in [(0, false), (1, false), (1, true), (2, true)] {
                cases.push(Case { accumulation, broadcast_buffers, evaluations, plateau });
            }
        }
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let Self { accumulation, broadcast_buffers, evaluations, plateau } = self;
        format!(
            "parity=ddp model=batch_norm accumulation={accumulation} broadcast_buffers={broadcast_buffers} \
             evaluations={evaluations} plateau={plateau}"
        )
    }
}

/// How far both sides are apart.
#[derive(Debug)]
struct Comparison {
    loss: f64,
    /// 0 without evaluations.
    evaluation: f64,
    lr: f64,
    state: f64,
}

impl Comparison {
    fn of(case: &Case, ours: &Outcome, theirs: &Outcome) -> Result<Self> {
        let evaluated = || losses_apart(&ours.evaluations, &theirs.evaluations);
        Ok(Self {
            loss: losses_apart(&ours.losses, &theirs.losses)?,
            evaluation: if case.evaluations == 0 { 0.0 } else { evaluated()? },
            lr: losses_apart(&ours.lrs, &theirs.lrs)?,
            state: parameters_apart(&ours.state, &theirs.state)?,
        })
    }

    /// A difference that is not a number is none that is small enough.
    fn is_equal(&self) -> bool {
        [self.loss, self.evaluation, self.lr, self.state].iter().all(|difference| *difference <= BOUND)
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, evaluation, lr, state } = self;
        let verdict = if self.is_equal() { "equal" } else { "DIFFERENT" };
        write!(formatter, "loss={loss:.1e} evaluation={evaluation:.1e} lr={lr:.1e} state={state:.1e} {verdict}")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn outcome(loss: f64, evaluation: f64, lr: f64, mean: f64) -> Outcome {
        let state = [("norm.running_mean".to_owned(), vec![mean, 1.0])].into();
        Outcome { losses: vec![vec![loss]], evaluations: vec![vec![evaluation]], lrs: vec![vec![lr]], state }
    }

    #[test]
    fn every_difference_counts() {
        let case = Case { accumulation: 1, broadcast_buffers: true, evaluations: 1, plateau: true };
        let theirs = outcome(1.0, 2.0, 0.5, 0.25);
        for (ours, wanted) in [
            (outcome(1.0, 2.0, 0.5, 0.25), true),
            (outcome(1.1, 2.0, 0.5, 0.25), false),
            (outcome(1.0, 2.1, 0.5, 0.25), false),
            (outcome(1.0, 2.0, 0.4, 0.25), false),
            (outcome(1.0, 2.0, 0.5, 0.35), false),
            (outcome(f64::NAN, 2.0, 0.5, 0.25), false),
        ] {
            assert_eq!(Comparison::of(&case, &ours, &theirs).unwrap().is_equal(), wanted, "{ours:?}");
        }
    }
}
