//! The race `tp_step`: one training step of a GPT-2 whose layers two ranks compute together, beside torch's DTensor.

use anyhow::Result;

use super::ddp::{NUM_PROCESSES, step_race};
use crate::python::Environment;
use crate::race::Races;
use crate::{paths, ranks};

/// The median ratio that counts as won.
const GOAL: f64 = 0.6;

/// Texts per step, and how long each side trains.
const SETTINGS: [&str; 6] = ["--batch_size", "4", "--steps", "12", "--warmup", "3"];

/// Runs both sides for `rounds` rounds. Values are milliseconds per step.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let ours = || {
        let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("tp_step"));
        command.args(["--", "--tensor_parallel_degree", &NUM_PROCESSES.to_string()]).args(SETTINGS);
        command
    };
    let rival = || {
        let mut command = environment.torchrun(NUM_PROCESSES)?;
        command.arg(paths::repository_root().join("bench/rival/tp_step.py")).args(SETTINGS);
        Ok(command)
    };
    races.add(step_race(("tp_step", GOAL), rounds, ours, rival)?);
    Ok(())
}
