//! Leaving in time: what asks this run to end, agreed over its ranks.

use super::Accelerator;
use crate::error::Result;
use crate::messages;
use crate::state::signal_name;
use accelerate_core::config::ClusterSettings;
use accelerate_core::settings::SettingValue;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

/// What ranks tell each other that go on.
const OP: &str = "should_stop";
/// How what the others say begins, before the reason.
const STOP: &str = "should_stop: ";

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
    #[track_caller]
    pub fn should_stop(&self) -> Result<bool> {
        let _called = crate::status::here();
        if self.0.is_stopping.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let own = own_answer(self.state().stop_signal()?, &self.config().cluster, SystemTime::now());
        let answers = match self.group().disagreement(OP, &own)? {
            None => vec![own],
            Some(answers) => answers,
        };
        match agreed(&answers) {
            Agreed::GoOn => Ok(false),
            Agreed::Stop(rank, reason) => {
                self.0.is_stopping.store(true, Ordering::Relaxed);
                messages::warning!("should_stop is true on all ranks, because rank {rank} {reason}");
                Ok(true)
            }
            Agreed::DifferentCalls => Err(self.group().different_calls(&answers)),
        }
    }
}

/// What this rank tells the others.
fn own_answer(signal: Option<i32>, cluster: &ClusterSettings, now: SystemTime) -> String {
    if let Some(signal) = signal {
        return format!("{STOP}has got {}", signal_name(signal));
    }
    match (cluster.stops_from(), cluster.run_end()) {
        (Some(from), Some(end)) if from <= now => {
            format!(
                "{STOP}says that the run ends at {} and stop_margin is {} s",
                end.write(),
                cluster.stop_margin.write()
            )
        }
        _ => OP.to_owned(),
    }
}

/// What the ranks have told each other.
#[derive(Debug, PartialEq)]
enum Agreed<'a> {
    /// All of them.
    GoOn,
    /// The first rank that has a reason, and the reason.
    Stop(usize, &'a str),
    /// Not all ranks have asked.
    DifferentCalls,
}

fn agreed(answers: &[String]) -> Agreed<'_> {
    let mut agreed = Agreed::GoOn;
    for (rank, answer) in answers.iter().enumerate() {
        match answer.strip_prefix(STOP) {
            Some(reason) if agreed == Agreed::GoOn => agreed = Agreed::Stop(rank, reason),
            None if answer != OP => return Agreed::DifferentCalls,
            _ => {}
        }
    }
    agreed
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;
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
            (run(None, None, 120), 3_000_000_000, OP),
            (run(end, None, 120), 1_999_999_879, OP),
            (
                run(end, None, 120),
                1_999_999_880,
                "should_stop: says that the run ends at 2033-05-18T03:33:20Z and stop_margin is 120 s",
            ),
            (run(end, None, 0), 1_999_999_999, OP),
            (
                run(end, None, 0),
                2_000_000_000,
                "should_stop: says that the run ends at 2033-05-18T03:33:20Z and stop_margin is 0 s",
            ),
            (
                run(None, end, 10),
                1_999_999_990,
                "should_stop: says that the run ends at 2033-05-18T03:33:20Z and stop_margin is 10 s",
            ),
            (run(Some(at(2_000_000_100)), end, 10), 1_999_999_989, OP),
            (
                run(end, Some(at(2_000_000_100)), 10),
                1_999_999_991,
                "should_stop: says that the run ends at 2033-05-18T03:33:20Z and stop_margin is 10 s",
            ),
            // Longer than since 1970.
            (
                run(end, None, u64::MAX),
                1,
                "should_stop: says that the run ends at 2033-05-18T03:33:20Z and stop_margin is 18446744073709552000 s",
            ),
        ] {
            assert_eq!(own_answer(None, &cluster, at(now)), wanted, "{now}");
            assert_eq!(own_answer(Some(15), &cluster, at(now)), "should_stop: has got SIGTERM");
        }
    }

    #[test]
    fn one_rank_with_a_reason_is_enough_and_another_call_is_an_error() {
        let answers = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(agreed(&answers(&[OP, OP])), Agreed::GoOn);
        assert_eq!(agreed(&answers(&[OP, "should_stop: a", "should_stop: b"])), Agreed::Stop(1, "a"));
        assert_eq!(agreed(&answers(&["should_stop: a", "gather of [2] Float"])), Agreed::DifferentCalls);
    }

    /// The ranks would take each other's calls for their own otherwise, and go on out of step.
    #[test]
    fn a_rank_that_saves_in_place_of_asking_is_named_on_all_ranks() {
        for asked_before in [false, true] {
            testing::ranks(2, Accelerator::builder(), |accelerator| {
                if asked_before {
                    assert!(!accelerator.should_stop()?);
                }
                let called = match accelerator.is_main_process() {
                    true => accelerator.should_stop().map(drop),
                    false => accelerator.group().agree_on_success("save_state", Ok(())),
                };
                let error = called.unwrap_err().to_string();
                assert!(error.contains("rank 0: should_stop; rank 1: save_state"), "{error}");
                Ok(())
            })
            .unwrap();
        }
    }
}
