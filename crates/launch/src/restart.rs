//! Starting a run again after it has failed: one loop for one machine and for several. When to start again is decided in
//! `accelerate_core::restart`.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use accelerate_core::restart::{FailedAttempt, GiveUp, NextStep, next_step};
use accelerate_core::status::number_ranges;
use rustix::event::{PollFd, PollFlags, poll};

use crate::config::LaunchConfig;
use crate::error::{Error, Result};
use crate::failure::{LeftBehind, signal_name};
use crate::logs;
use crate::report::{Backlog, Notice, Reporter, Source};
use crate::status::StatusFile;
use crate::supervise::signals::{Event, Signals, suspend_this_process};
use crate::supervise::{Outcome, listen, timespec};

/// Causes that are listed; of more, the attempts are only named.
const MOST_LISTED: usize = 10;

/// What came before the failure of a run that was restarted. Its `Display` is what there is to say of it beside the failure
/// itself: lines, or nothing.
///
/// ```
/// let error = accelerate_launch::LaunchConfig::new(accelerate_launch::Program::Executable("true".into()), 0).check().unwrap_err();
/// assert_eq!((error.restarts().num_restarts(), error.restarts().to_string()), (0, String::new()));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// What each earlier attempt died of, in a few words.
    causes: Vec<String>,
    /// How many of them were followed by another attempt. All were, unless somebody has stopped the run in the pause.
    num_restarts: usize,
    /// What the last one died of.
    last: String,
    /// The number of the first attempt.
    first: usize,
    given_up: Option<GiveUp>,
}

impl Restarts {
    /// How often the run had been started again.
    pub fn num_restarts(&self) -> usize {
        self.num_restarts
    }

    /// What an error of such a run begins with.
    pub(crate) fn prefix(&self) -> String {
        match self.num_restarts {
            0 => String::new(),
            1 => "after 1 restart: ".to_owned(),
            number => format!("after {number} restarts: "),
        }
    }
}

impl fmt::Display for Restarts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = Vec::new();
        if !self.causes.is_empty() && self.causes.iter().all(|cause| *cause == self.last) {
            lines.push("every attempt failed in the same way".to_owned());
        } else {
            // Ranks that fail at the same time take turns at being the first, so a cause is told once, whichever attempts it ended.
            let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
            for (number, cause) in (self.first..).zip(&self.causes) {
                match groups.iter_mut().find(|(known, _)| known == cause) {
                    Some((_, numbers)) => numbers.push(number),
                    None => groups.push((cause, vec![number])),
                }
            }
            let listed = groups.split_off(groups.len().saturating_sub(MOST_LISTED));
            let mut hidden: Vec<_> = groups.into_iter().flat_map(|(_, numbers)| numbers).collect();
            hidden.sort_unstable();
            if !hidden.is_empty() {
                lines.push(format!("{} had failed, too", attempts(&hidden)));
            }
            lines.extend(
                listed.into_iter().map(|(cause, numbers)| format!("{} had failed: {cause}", attempts(&numbers))),
            );
        }
        // That all restarts have been made, their number says.
        lines.extend(self.given_up.as_ref().filter(|why| **why != GiveUp::NoneLeft).map(GiveUp::to_string));
        f.write_str(&lines.join("\n"))
    }
}

fn attempts(numbers: &[usize]) -> String {
    let plural = if numbers.len() == 1 { "" } else { "s" };
    format!("attempt{plural} {}", number_ranges(numbers))
}

/// Makes attempts until one succeeds, or none is to follow. Each gets the configuration with its number.
pub(crate) fn run(
    config: &LaunchConfig,
    reporter: &mut dyn Reporter,
    mut attempt: impl FnMut(&LaunchConfig, &mut Signals, &mut dyn Reporter) -> Result<Outcome>,
) -> Result<Outcome> {
    // From before the first attempt until after the last: also between two of them somebody may want this process to stop.
    let mut signals = listen()?;
    let mut reporter = OpenSources { inner: reporter, open: BTreeSet::new() };
    let mut config =
        LaunchConfig { log_name: config.log_name.clone().or_else(|| Some(logs::new_name())), ..config.clone() };
    let mut restarts = Restarts { first: config.restart_count, ..Restarts::default() };
    let mut failed = Vec::new();
    loop {
        let began = Instant::now();
        let error = match attempt(&config, &mut signals, &mut reporter) {
            Ok(outcome) => return Ok(Outcome { num_restarts: failed.len(), ..outcome }),
            Err(error) => error.or_stopped(config.shutdown_grace_period),
        };
        let is_over = error.is_interrupted() || !error.is_worth_another_attempt(!failed.is_empty());
        failed.push(FailedAttempt { lived: began.elapsed(), exit_code: error.exit_code() });
        let after = match next_step(&failed, config.max_restarts).unless(obstacle(&error, &signals)) {
            // Attempts never overlap, also on a machine that nobody hears any more.
            NextStep::Restart { after } if !is_over => after.max(error.ranks_may_live()),
            next => {
                restarts.given_up = match next {
                    NextStep::GiveUp(why) if !is_over && config.max_restarts > 0 => Some(why),
                    _ => None,
                };
                restarts.last = error.cause();
                return Err(error.with_restarts(restarts));
            }
        };
        let cause = error.in_a_line();
        let ranks_may_live = !error.ranks_may_live().is_zero();
        let (restart, max_restarts) = (failed.len(), config.max_restarts);
        config.restart_count += 1;
        // For whoever asks before the next attempt tells of itself.
        let _told = StatusFile::of_pause(&config, after, &cause);
        let notice = Notice::Restarting { cause, restart, max_restarts, after, ranks_may_live };
        reporter.close_all().and_then(|()| reporter.notice(&notice)).map_err(Error::output_closed)?;
        restarts.causes.push(error.cause());
        if let Err(error) = pause(after, &mut signals, &mut reporter) {
            // The restart that was announced has not been made.
            restarts.last = error.cause();
            return Err(error.with_restarts(restarts));
        }
        restarts.num_restarts += 1;
    }
}

/// What else than its failure speaks against starting a run again.
fn obstacle(error: &Error, signals: &Signals) -> Option<GiveUp> {
    // A program at the terminal may have gone on after a Ctrl-C; that somebody wants it to run again does not follow.
    let stopped = error.stopped_by().or(signals.stopped_by());
    let stopped = stopped.map(|signal| GiveUp::Stopped { signal: signal_name(signal) });
    stopped.or_else(|| error.left_behind().iter().find_map(LeftBehind::obstacle))
}

/// Waits, also for nothing: a signal to stop that has come meanwhile ends the run.
fn pause(duration: Duration, signals: &mut Signals, reporter: &mut dyn Reporter) -> Result<()> {
    let end = Instant::now() + duration;
    loop {
        for event in signals.pending() {
            match event {
                Event::Stop(signal) | Event::Typed(signal) => return Err(Error::interrupted(signal.as_raw())),
                Event::Suspend => suspend_this_process(),
                // There is nobody to pass it on to.
                Event::User(_) | Event::ChildEnded | Event::WindowChanged => {}
            }
        }
        let now = Instant::now();
        if reporter.wakes_at().is_some_and(|at| at <= now) {
            reporter.wake(now).map_err(Error::output_closed)?;
        }
        if end <= now {
            return Ok(());
        }
        let wakes_at = reporter.wakes_at().map_or(end, |at| at.min(end));
        let timeout = timespec(wakes_at.saturating_duration_since(now));
        // Interrupted by a signal, it finds that signal in the next round.
        let _ = poll(&mut [PollFd::from_borrowed_fd(signals.descriptor(), PollFlags::IN)], Some(&timeout));
    }
}

/// Knows which streams have not ended. Those of a machine that is lost never do, and the next attempt has streams of the same names.
struct OpenSources<'a> {
    inner: &'a mut dyn Reporter,
    open: BTreeSet<Source>,
}

impl OpenSources<'_> {
    fn close_all(&mut self) -> io::Result<()> {
        std::mem::take(&mut self.open).into_iter().try_for_each(|source| self.inner.closed(source))
    }
}

impl Reporter for OpenSources<'_> {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        self.open.insert(source);
        self.inner.output(source, bytes)
    }

    fn closed(&mut self, source: Source) -> io::Result<()> {
        self.open.remove(&source);
        self.inner.closed(source)
    }

    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        self.inner.notice(notice)
    }

    fn wakes_at(&self) -> Option<Instant> {
        self.inner.wakes_at()
    }

    fn wake(&mut self, now: Instant) -> io::Result<()> {
        self.inner.wake(now)
    }

    fn backlog(&self) -> Option<Backlog<'_>> {
        self.inner.backlog()
    }

    fn resume(&mut self) -> io::Result<()> {
        self.inner.resume()
    }

    fn abandon(&mut self) {
        self.inner.abandon();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::failure::{Ended, Failure, MemoryPressure};
    use rstest::rstest;

    #[rstest]
    #[case::no_restart(&[], "a", None, "", "")]
    #[case::no_restart(&[], "a", Some(GiveUp::SameAgain { exit_code: 127 }), "", "not restarted: 127 says that a program is missing or \
        cannot be run, which it could not again")]
    #[case::always_the_same(&["a", "a"], "a", Some(GiveUp::NoneLeft), "after 2 restarts: ", "every attempt failed in the same way")]
    #[case::another(&["b"], "a", Some(GiveUp::NoneLeft), "after 1 restart: ", "attempt 0 had failed: b")]
    #[case::several(
        &["b", "a", "a", "b"], "a", None, "after 4 restarts: ",
        "attempts 0, 3 had failed: b\nattempts 1-2 had failed: a"
    )]
    #[case::by_hand(
        &["b"], "a", Some(GiveUp::ByHand { exit_code: 130 }), "after 1 restart: ",
        "attempt 0 had failed: b\nnot restarted: somebody has interrupted the program"
    )]
    fn what_came_before_is_told_in_few_lines(
        #[case] causes: &[&str],
        #[case] last: &str,
        #[case] given_up: Option<GiveUp>,
        #[case] prefix: &str,
        #[case] text: &str,
    ) {
        let causes: Vec<_> = causes.iter().map(|cause| (*cause).to_owned()).collect();
        let restarts = Restarts { num_restarts: causes.len(), causes, last: last.to_owned(), first: 0, given_up };
        assert_eq!((restarts.prefix().as_str(), restarts.to_string().as_str()), (prefix, text));
    }

    #[test]
    fn an_attempt_that_no_restart_has_followed_is_told() {
        let causes = vec!["a".to_owned(), "b".to_owned()];
        let last = "stopped by SIGTERM".to_owned();
        let restarts = Restarts { causes, num_restarts: 1, last, first: 0, given_up: None };
        assert_eq!(restarts.prefix(), "after 1 restart: ");
        assert_eq!(restarts.to_string(), "attempt 0 had failed: a\nattempt 1 had failed: b");
    }

    #[test]
    fn what_may_live_on_or_has_been_stopped_is_an_obstacle() {
        let signals = listen().unwrap();
        let error = |stopped_by| Error::child_failed(failure(Ended::Exited(3), MemoryPressure::Unknown), stopped_by);
        assert_eq!(obstacle(&error(None), &signals), None);
        let survivors = vec![crate::failure::Survivor { process_id: 8, is_refused: true }];
        let still_there = GiveUp::StillThere { process_id: 8, machine: None };
        assert_eq!(obstacle(&error(None).with_survivors(survivors.clone()), &signals), Some(still_there));
        let silent = LeftBehind { machine: Some("b".to_owned()), survivors: Vec::new(), is_left_out: false };
        let unconfirmed = GiveUp::Unconfirmed { machine: "b".to_owned() };
        assert_eq!(obstacle(&error(None).with_left_behind(vec![silent.clone()]), &signals), Some(unconfirmed));
        let left_out = LeftBehind { is_left_out: true, ..silent };
        assert_eq!(obstacle(&error(None).with_left_behind(vec![left_out]), &signals), None);
        let stopped = GiveUp::Stopped { signal: "SIGINT".to_owned() };
        assert_eq!(obstacle(&error(Some(2)).with_survivors(survivors), &signals), Some(stopped));
    }

    /// Counts how often it is woken, at a time that it names once.
    struct Sleeper {
        wakes_at: Option<Instant>,
        num_woken: usize,
    }

    impl Reporter for Sleeper {
        fn output(&mut self, _: Source, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn notice(&mut self, _: &Notice) -> io::Result<()> {
            Ok(())
        }

        fn wakes_at(&self) -> Option<Instant> {
            self.wakes_at
        }

        fn wake(&mut self, now: Instant) -> io::Result<()> {
            assert!(self.wakes_at.take().is_some_and(|at| at <= now), "woken too early");
            self.num_woken += 1;
            Ok(())
        }
    }

    #[rstest]
    #[case::before_the_end(0, 1)]
    #[case::in_the_middle(5, 1)]
    #[case::later(3_600_000, 0)]
    fn a_pause_wakes_the_reporter_and_takes_its_time(#[case] wakes_in: u64, #[case] num_woken: usize) {
        let duration = Duration::from_millis(20);
        let began = Instant::now();
        let mut sleeper = Sleeper { wakes_at: Some(began + Duration::from_millis(wakes_in)), num_woken: 0 };
        pause(duration, &mut listen().unwrap(), &mut sleeper).unwrap();
        assert!(began.elapsed() >= duration);
        assert_eq!(sleeper.num_woken, num_woken);
    }

    fn failure(ended: Ended, memory: MemoryPressure) -> Failure {
        Failure {
            machine: None,
            rank: 2,
            process_id: 7,
            ended,
            elapsed: Duration::from_secs(5),
            last_lines: Vec::new(),
            memory,
            address_problem: None,
            activities: Vec::new(),
            others: Vec::new(),
        }
    }

    /// Of a rank that was told as the launcher was.
    #[rstest]
    #[case(Ended::Signalled { signal: 15, core_dumped: false }, Some(15), true)]
    #[case::by_a_shell(Ended::Exited(143), Some(15), true)]
    #[case::nobody_told_the_launcher(Ended::Signalled { signal: 15, core_dumped: false }, None, false)]
    #[case::something_else(Ended::Signalled { signal: 9, core_dumped: false }, Some(15), false)]
    #[case::a_failure_before(Ended::Exited(1), Some(15), false)]
    fn an_end_by_the_signal_of_the_launcher_is_no_failure(
        #[case] ended: Ended,
        #[case] stopped_by: Option<i32>,
        #[case] is_stopped: bool,
    ) {
        let error = Error::child_failed(failure(ended, MemoryPressure::Unknown), stopped_by).or_stopped(Duration::ZERO);
        assert_eq!((error.is_interrupted(), error.is_child_failed()), (is_stopped, !is_stopped));
        assert_eq!(error.stopped_by(), stopped_by);
    }

    /// As `run` tells it, of a rank that the kernel has killed for its memory.
    #[rstest]
    #[case(
        MemoryPressure::KillerRan,
        " (out of memory; use a smaller batch, fewer processes or a higher memory limit)",
        " (out of memory)"
    )]
    #[case(MemoryPressure::Unknown, " (possibly out of memory; use a smaller batch,", " (possibly out of memory)")]
    #[case(MemoryPressure::KillerDidNotRun, "", "")]
    fn a_lack_of_memory_is_told_with_the_restart(
        #[case] memory: MemoryPressure,
        #[case] line: &str,
        #[case] cause: &str,
    ) {
        let killed = Ended::Signalled { signal: 9, core_dumped: false };
        let error = Error::child_failed(failure(killed, memory), None);
        let told = error.in_a_line();
        assert!(told.starts_with(&format!("rank 2 (process 7) was ended by SIGKILL (9) after 5.0 s{line}")), "{told}");
        assert_eq!(told.contains("memory"), !line.is_empty(), "{told}");
        assert_eq!(error.cause(), format!("rank 2 was ended by SIGKILL (9){cause}"));
    }

    #[test]
    fn of_many_attempts_the_first_are_counted() {
        let causes: Vec<_> = (0..50).map(|number| format!("cause {}", number / 2)).collect();
        let text = Restarts { num_restarts: 50, causes, last: "x".to_owned(), first: 3, given_up: None }.to_string();
        assert_eq!(text.lines().count(), MOST_LISTED + 1, "{text}");
        assert!(text.starts_with("attempts 3-32 had failed, too\nattempts 33-34 had failed: cause 15\n"), "{text}");
        assert!(text.ends_with("attempts 51-52 had failed: cause 24"), "{text}");
    }
}
