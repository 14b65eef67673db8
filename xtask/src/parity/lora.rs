//! `cargo xtask parity lora`: adapters are trained beside PEFT's, and exchanged with it as files.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::compare::{Parameters, losses_apart, parameters_apart};
use super::grid::Grid;
use crate::paths;

#[derive(Debug, Args)]
pub(super) struct Lora {
    /// Numbers of ranks
    #[arg(long = "world_size", value_delimiter = ',', default_values_t = [1, 2, 3])]
    world_sizes: Vec<usize>,
}

/// One adapter; both programs read it.
#[derive(Clone, Debug, Serialize)]
struct Case {
    /// Of `CASES` in `parity/lora/model.py`.
    name: &'static str,
    sharded: bool,
    checkpointed: bool,
    /// The adapter that both begin with, which PEFT has made and saved.
    initial: PathBuf,
    /// Where each side saves the trained adapter.
    ours: PathBuf,
    theirs: PathBuf,
}

/// What a run saw, and what it has left.
#[derive(Clone, Debug, Deserialize)]
struct Outcome {
    losses: Vec<Vec<f64>>,
    /// The trained adapter, by the names of its file.
    adapter: Parameters,
    /// Outputs with the trained adapter of this side, and of the other one, out of their files.
    outputs: Parameters,
}

const NAMES: [&str; 10] = [
    "list",
    "pattern",
    "embedding",
    "bias_all",
    "bias_lora_only",
    "modules_to_save",
    "rank_pattern",
    "all_linear",
    "lora_bias",
    "random",
];

/// Most that both sides may be apart.
const BOUND: f64 = 1e-6;
/// Of trained numbers, which rounding moves more: AdamW divides by gradients that are nearly zero.
const ADAPTER_BOUND: f64 = 1e-4;

pub(super) fn run(arguments: &Lora) -> Result<()> {
    let mut num_different = 0;
    for &world_size in &arguments.world_sizes {
        let folder = paths::target_folder().join(format!("parity/lora/adapters{world_size}"));
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        let ways = [(false, false), (true, false), (true, true)];
        let of_way = |(sharded, checkpointed): (bool, bool)| {
            let folder = folder.clone();
            NAMES.map(move |name| {
                let folder = folder.join(format!("{name}_{sharded}_{checkpointed}"));
                let [initial, ours, theirs] = ["initial", "ours", "theirs"].map(|side| folder.join(side));
                Case { name, sharded, checkpointed, initial, ours, theirs }
            })
        };
        let cases: Vec<Case> = ways.into_iter().flat_map(of_way).collect();
        let grid = Grid::new("lora", &cases)?;
        let theirs: Vec<Outcome> = grid.theirs(world_size, &[])?;
        let ours: Vec<Outcome> = grid.ours(world_size)?;
        // What PEFT makes of the files of both sides.
        let exchanged: Vec<Outcome> = grid.theirs(world_size, &["--exchanged"])?;
        for (index, case) in cases.iter().enumerate() {
            let (ours, theirs, exchanged) = (&ours[index], &theirs[index], &exchanged[index]);
            let loss = losses_apart(&ours.losses, &theirs.losses)?;
            let adapter = parameters_apart(&ours.adapter, &theirs.adapter)?;
            let files = parameters_apart(&ours.outputs, &exchanged.outputs)?;
            // A difference that is not a number is none that is small enough.
            let is_equal = loss <= BOUND && files <= BOUND && adapter <= ADAPTER_BOUND;
            num_different += usize::from(!is_equal);
            println!(
                "parity=lora case={} sharded={} checkpointed={} world_size={world_size} loss={loss:.1e} adapter={adapter:.1e} \
                 files={files:.1e} {}",
                case.name,
                case.sharded,
                case.checkpointed,
                if is_equal { "equal" } else { "DIFFERENT" }
            );
        }
    }
    if num_different > 0 {
        bail!("{num_different} cases of adapters differ from PEFT");
    }
    Ok(())
}
