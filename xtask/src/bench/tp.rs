//! The races of a GPT-2 whose layers two ranks compute together, beside torch's DTensor: one training step on two ranks, on two that divide
//! the tokens between the layers, too, and on four of which pairs shard the model.

use anyhow::Result;

use super::ddp::step_race;
use crate::python::Environment;
use crate::race::Races;
use crate::{paths, ranks};

/// The median ratio that counts as won.
const GOAL: f64 = 0.6;

/// Texts per step, how many ranks compute a layer, and how long each side trains.
const SETTINGS: [&str; 8] = ["--batch_size", "4", "--tensor_parallel_degree", "2", "--steps", "12", "--warmup", "3"];

/// Name, number of ranks, and what else both sides are told.
const CONTESTS: [(&str, usize, &[&str]); 3] =
    [("tp_step", 2, &[]), ("tp_sequence_step", 2, &["--sequence_parallel"]), ("fsdp_tp_step", 4, &["--fsdp"])];

/// Runs both sides for `rounds` rounds. Values are milliseconds per step.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    for (name, num_processes, settings) in CONTESTS {
        let ours = || {
            let mut command = ranks::launch(num_processes, &paths::release_binary("tp_step"));
            command.arg("--").args(SETTINGS).args(settings);
            command
        };
        let rival = || {
            let mut command = environment.torchrun(num_processes)?;
            command.arg(paths::repository_root().join("bench/rival/tp_step.py")).args(SETTINGS).args(settings);
            Ok(command)
        };
        races.add(step_race((name, GOAL), (num_processes, rounds), ours, rival)?);
    }
    Ok(())
}
