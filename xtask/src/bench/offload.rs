//! The race of an optimizer with its state on a disk against that disk.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// Steps, each beside a measurement of the disk.
const STEPS: usize = 7;

/// The smallest GPT-2.
const NUM_PARAMETERS: u64 = 124_439_808;

/// A step over a disk against reading and writing as many bytes with nothing to do in between. Values are milliseconds.
pub(super) fn races(rounds: usize, races: &mut Races) -> Result<()> {
    let folder = paths::target_folder().join("bench/offload");
    fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let mut command = ranks::launch(1, &paths::release_binary("offload"));
        // A step is to be compared with a disk, not with one thread.
        command.args(["--", "--steps", &STEPS.to_string(), "--folder"]).arg(&folder);
        let printed = process::read(&mut command)?;
        let report = *ranks::marked(&printed, "report=").first().context("the program reported nothing")?;
        pairs.extend(pairs_of(report)?);
    }
    // At least 85 % of what the disk does.
    races.add(Race { name: "offload_step", unit: "ms", goal: 1.0 / 0.85, pairs });
    Ok(())
}

fn pairs_of(report: &str) -> Result<Vec<Pair>> {
    let value: Value = serde_json::from_str(report).with_context(|| format!("a report is not JSON: {report}"))?;
    ensure!(value["num_parameters"] == NUM_PARAMETERS, "the race is void: it is not over {NUM_PARAMETERS} parameters");
    let times = |name: &str| {
        let times = value[name].as_array().with_context(|| format!("a report without `{name}`: {report}"))?;
        times.iter().map(|time| time.as_f64().context("a time is not a number")).collect::<Result<Vec<_>>>()
    };
    Ok(times("ours")?.into_iter().zip(times("floor")?).map(|(ours, rival)| Pair { ours, rival }).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_paired_with_what_the_disk_did_beside_them() {
        let report = r#"{"ours": [2.0, 3.0], "floor": [1.0, 2.5], "num_parameters": 124439808}"#;
        assert_eq!(pairs_of(report).unwrap(), [Pair { ours: 2.0, rival: 1.0 }, Pair { ours: 3.0, rival: 2.5 }]);
        assert!(pairs_of(r#"{"ours": [2.0], "floor": [1.0], "num_parameters": 7}"#).is_err());
        assert!(pairs_of(r#"{"ours": [2.0], "num_parameters": 124439808}"#).is_err());
    }
}
