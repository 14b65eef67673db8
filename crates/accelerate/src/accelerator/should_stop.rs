//! Leaving in time: what asks this run to end, agreed over its ranks.

use super::Accelerator;
use crate::error::{CollectiveError, Result};
use crate::messages;
use crate::state::signal_name;
use accelerate_core::config::ClusterSettings;
use accelerate_core::settings::SettingValue;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

const OP: &str = "should_stop";
const GO_ON: &str = "go on";
const STOP: &str = "stop: ";

impl Accelerator {
    /// Is it time to save and to end, because a rank was asked to, or because the run has to be over soon? The same answer on all
    /// ranks at the same call, so that all of them leave their loops after the same step. Once true, it stays true. Collective.
    ///
    /// What asks a run to end:
    ///
    /// - a signal to any rank: `SIGTERM`, `SIGINT`, `SIGUSR1` or `SIGUSR2`. `accelerate launch` passes on what it gets itself.
    ///   The handlers are there from the first call of this on; before, and in programs that never call it, these signals
    ///   end the process as always. The same signal a second time ends it at once.
    /// - the clock of any rank, [`stop_margin`](super::AcceleratorBuilder::stop_margin) before
    ///   [`stop_at`](super::AcceleratorBuilder::stop_at) (`ACCELERATE_STOP_AT`) or before the end of the Slurm allocation
    ///   (`SLURM_JOB_END_TIME`), whichever is earlier.
    ///
    /// After `SIGTERM` or `SIGINT` the launcher waits for `--shutdown_grace_period`, 10 s by default, before it kills. That has to be
    /// enough for a step and a save.
    ///
    /// It costs one exchange of 8 bytes a call, through the memory of the host, so no GPU is waited for. In a run of one process
    /// it costs nothing. [`save_state`](Self::save_state) is for moments between steps, so ask there, as below.
    ///
    /// ```
    /// use accelerate::testing;
    /// use std::time::SystemTime;
    ///
    /// testing::ranks(2, accelerate::Accelerator::builder().stop_at(SystemTime::now()), |accelerator| {
    ///     for step in 0.. {
    ///         // ... forward, backward, optimizer.step() ...
    ///         if accelerator.sync_gradients() && accelerator.should_stop()? {
    ///             // accelerator.save_state(None)?;
    ///             assert_eq!(step, 0);
    ///             break;
    ///         }
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Ranks that make another call, or none; inside [`join_uneven_inputs`](Self::join_uneven_inputs) that is any rank that is out
    /// of batches. A kernel that takes no handlers, on any rank.
    pub fn should_stop(&self) -> Result<bool> {
        if self.0.is_stopping.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let own = own_answer(self.state().stop_signal()?, &self.config().cluster, SystemTime::now());
        let answers = match self.group().disagreement(OP, &own)? {
            None => vec![own],
            Some(answers) => answers,
        };
        let Some((rank, reason)) = first_reason(&answers)? else { return Ok(false) };
        self.0.is_stopping.store(true, Ordering::Relaxed);
        messages::warning!("should_stop is true on all ranks, because {reason} (rank {rank})");
        Ok(true)
    }
}

/// What this rank tells the others.
fn own_answer(signal: Option<i32>, cluster: &ClusterSettings, now: SystemTime) -> String {
    if let Some(signal) = signal {
        return format!("{STOP}it has got {}", signal_name(signal));
    }
    match (cluster.stops_from(), cluster.run_end()) {
        (Some(from), Some(end)) if from <= now => {
            format!("{STOP}the run ends at {}, and stop_margin is {} s", end.write(), cluster.stop_margin.write())
        }
        _ => GO_ON.to_owned(),
    }
}

/// The first rank that has a reason, and the reason; `None` if all go on.
fn first_reason(answers: &[String]) -> Result<Option<(usize, &str)>> {
    let mut first = None;
    for (rank, answer) in answers.iter().enumerate() {
        match answer.strip_prefix(STOP) {
            Some(reason) => first = first.or(Some((rank, reason))),
            None if answer == GO_ON => {}
            // Of another call, which is compared in the same way.
            None => {
                let shown = |(rank, answer): (usize, &String)| match answer == GO_ON || answer.starts_with(STOP) {
                    true => format!("rank {rank}: {OP}"),
                    false => format!("rank {rank}: {}", answer.lines().next().unwrap_or_default()),
                };
                let per_rank = answers.iter().enumerate().map(shown).collect::<Vec<_>>().join("; ");
                return Err(CollectiveError::DifferentCalls { per_rank }.into());
            }
        }
    }
    Ok(first)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_rank_stops_for_a_signal_or_when_the_margin_begins() {
        let run = |stop_at, allocation_end, margin| ClusterSettings {
            stop_at,
            allocation_end,
            stop_margin: Duration::from_secs(margin),
            ..Default::default()
        };
        let end = Some(at(2_000_000_000));
        for (cluster, now, wanted) in [
            (run(None, None, 120), 3_000_000_000, GO_ON),
            (run(end, None, 120), 1_999_999_879, GO_ON),
            (
                run(end, None, 120),
                1_999_999_880,
                "stop: the run ends at 2033-05-18T03:33:20Z, and stop_margin is 120 s",
            ),
            (run(end, None, 0), 1_999_999_999, GO_ON),
            (run(end, None, 0), 2_000_000_000, "stop: the run ends at 2033-05-18T03:33:20Z, and stop_margin is 0 s"),
            (run(None, end, 10), 1_999_999_990, "stop: the run ends at 2033-05-18T03:33:20Z, and stop_margin is 10 s"),
            (run(Some(at(2_000_000_100)), end, 10), 1_999_999_989, GO_ON),
            (
                run(end, Some(at(2_000_000_100)), 10),
                1_999_999_991,
                "stop: the run ends at 2033-05-18T03:33:20Z, and stop_margin is 10 s",
            ),
            // Longer than since 1970.
            (
                run(end, None, u64::MAX),
                1,
                "stop: the run ends at 2033-05-18T03:33:20Z, and stop_margin is 18446744073709552000 s",
            ),
        ] {
            assert_eq!(own_answer(None, &cluster, at(now)), wanted, "{now}");
            assert_eq!(own_answer(Some(15), &cluster, at(now)), "stop: it has got SIGTERM");
        }
    }

    #[test]
    fn one_rank_with_a_reason_is_enough_and_another_call_is_an_error() {
        let answers = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(first_reason(&answers(&[GO_ON, GO_ON])).unwrap(), None);
        assert_eq!(first_reason(&answers(&[GO_ON, "stop: a", "stop: b"])).unwrap(), Some((1, "a")));
        let error = first_reason(&answers(&["stop: a", "gather of [2] Float"])).unwrap_err().to_string();
        assert!(error.contains("rank 0: should_stop; rank 1: gather of [2] Float"), "{error}");
    }
}
