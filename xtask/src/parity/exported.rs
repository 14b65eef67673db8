//! `cargo xtask parity exported`: models that are compiled by `accelerate export-model` learn what they learn in Python as
//! they are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::compare::{Parameters, losses_apart, parameters_apart};
use super::grid::Grid;
use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

#[derive(Debug, Args)]
pub(super) struct Exported {
    /// Numbers of ranks
    #[arg(long = "world_size", value_delimiter = ',', default_values_t = [1, 2])]
    world_sizes: Vec<usize>,
}

/// One training run; both programs read it.
#[derive(Clone, Debug, Serialize)]
struct Case {
    model: &'static str,
    package: PathBuf,
    accumulation: usize,
    /// Parameters are sharded here, which changes nothing that is compared.
    sharded: bool,
}

/// What a run saw, and what it has left.
#[derive(Clone, Debug, Deserialize)]
struct Outcome {
    losses: Vec<Vec<f64>>,
    evaluations: Vec<Vec<f64>>,
    /// Parameters and buffers of all ranks.
    state: Parameters,
}

/// The functions of `parity/exported.py`. Rows may be of any number, except where the gradient has their shape.
const MODELS: [(&str, &str); 4] = [("mlp", "batch"), ("tied", "batch"), ("direct", "8"), ("attention", "batch")];

/// Most that both sides may be apart; losses as a part of the largest, where that is more than 1.
const BOUND: f64 = 1e-6;

pub(super) fn run(arguments: &Exported) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    let folder = paths::target_folder().join("parity/exported/packages");
    fs::create_dir_all(&folder)?;
    let mut cases = Vec::new();
    for (model, rows) in MODELS {
        let package = folder.join(format!("{model}.pt2"));
        let inputs = [format!("float32[{rows},12]"), format!("int64[{rows}]")];
        export(
            &environment,
            &paths::repository_root().join("parity"),
            &format!("exported:{model}"),
            &inputs,
            &package,
        )?;
        let case = |(accumulation, sharded)| Case { model, package: package.clone(), accumulation, sharded };
        cases.extend([(1, false), (3, false)].map(case));
        // Buffers of sharded models are not copied from rank 0, there as here, so they would be others than in Python's replicas.
        cases.extend((model != "tied").then(|| case((1, true))));
    }
    let grid = Grid::new("exported", &cases)?;
    let mut num_different = 0;
    for &world_size in &arguments.world_sizes {
        let (ours, theirs): (Vec<Outcome>, Vec<Outcome>) = (grid.ours(world_size)?, grid.theirs(world_size, &[])?);
        for (index, case) in cases.iter().enumerate() {
            let scale = theirs[index].losses.iter().flatten().fold(1.0, |most: f64, loss| most.max(loss.abs()));
            let loss = losses_apart(&ours[index].losses, &theirs[index].losses)? / scale;
            let evaluation = losses_apart(&ours[index].evaluations, &theirs[index].evaluations)? / scale;
            let state = parameters_apart(&ours[index].state, &theirs[index].state)?;
            // A difference that is not a number is none that is small enough.
            let is_equal = [loss, evaluation, state].iter().all(|difference| *difference <= BOUND);
            num_different += usize::from(!is_equal);
            println!(
                "parity=exported model={} accumulation={} sharded={} world_size={world_size} loss={loss:.1e} evaluation={evaluation:.1e} \
                 state={state:.1e} {}",
                case.model,
                case.accumulation,
                case.sharded,
                if is_equal { "equal" } else { "DIFFERENT" }
            );
        }
    }
    if num_different > 0 {
        bail!("{num_different} cases of exported models differ from Python");
    }
    Ok(())
}

/// `accelerate export-model` with the Python of comparisons, in the folder of the module.
pub(crate) fn export(
    environment: &Environment,
    folder: &Path,
    function: &str,
    inputs: &[String],
    package: &Path,
) -> Result<()> {
    let mut command = environment.with_modules(paths::release_binary("accelerate"));
    command.args(["export-model", function, "--overwrite", "--inputs"]).args(inputs).arg("--output").arg(package);
    // Of machines whose compiler cannot link libtorch's stand-ins, Inductor would think that they have no vectors.
    command.arg("--python").arg(environment.python()).env("TORCHINDUCTOR_VEC_ISA_OK", "1");
    process::run(command.current_dir(folder))
}
