//! Whether a schedule of known length can end with the loop that moves it.
//!
//! Nobody says how many passes over the data a loop makes. So a length is only taken for a mistake if no number of whole passes
//! fits it and another way to count does, or once the loop itself has shown it.

use std::fmt;
use std::ops::RangeInclusive;

/// What a whole pass over a data loader is for a prepared schedule.
///
/// ```
/// use accelerate_core::schedule::ScheduledPass;
/// let pass = ScheduledPass {
///     num_batches: 50,
///     gradient_accumulation_steps: 1,
///     num_processes: 2,
///     ticks_per_step: 2,
///     adjust_scheduler: false,
/// };
/// assert_eq!(pass.ticks(), 100);
/// assert!(pass.check_length(300).is_none());
/// // Three passes of 50 optimizer steps, which move the schedule by two each.
/// let text = pass.check_length(150).unwrap().to_string();
/// assert!(text.contains("has 150 steps") && text.contains("ends after 1.5 passes"), "{text}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledPass {
    /// Batches that each process gets.
    pub num_batches: usize,
    /// Batches whose gradients make one step of the optimizer.
    pub gradient_accumulation_steps: usize,
    /// Number of processes that train together.
    pub num_processes: usize,
    /// Steps of the schedule for one step of the optimizer.
    pub ticks_per_step: usize,
    /// That many for each batch of the window instead.
    pub adjust_scheduler: bool,
}

/// What the steps of a schedule may have been counted in by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedIn {
    /// Steps of the optimizer.
    OptimizerSteps,
    /// Batches of one process, which is what the prepared loader counts.
    Batches,
    /// Batches of all processes together, which is what the loader counted before it was prepared.
    BatchesOfAllProcesses,
}

/// A schedule that does not end with the loop. Its text says why, with the numbers and the cure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthMismatch {
    /// It ends within a pass, and its length is that of whole passes if something else is counted.
    CountedOtherwise {
        /// The pass that moves the schedule.
        pass: ScheduledPass,
        /// Steps of the schedule.
        total_steps: usize,
        /// What gives whole passes.
        counted_in: CountedIn,
        /// How many passes that gives.
        num_passes: usize,
    },
    /// It is at its end, and the loop goes on.
    Ended {
        /// The pass that moves the schedule.
        pass: ScheduledPass,
        /// Steps of the schedule.
        total_steps: usize,
    },
    /// The loop is at its end, and the schedule is not: it is as long as the same passes if something else is counted.
    NotReached {
        /// The pass that moves the schedule.
        pass: ScheduledPass,
        /// Steps of the schedule.
        total_steps: usize,
        /// Steps by which it has moved.
        moved: usize,
        /// What gives these passes.
        counted_in: CountedIn,
        /// How many passes there were.
        num_passes: usize,
    },
}

impl ScheduledPass {
    fn optimizer_steps(&self) -> usize {
        self.num_batches.div_ceil(self.gradient_accumulation_steps.max(1))
    }

    /// By how many of its steps a pass moves the schedule.
    pub fn ticks(&self) -> usize {
        let counted = if self.adjust_scheduler { self.num_batches } else { self.optimizer_steps() };
        counted.saturating_mul(self.ticks_per_step)
    }

    /// How many steps a schedule has to have so that it ends with a loop of so many passes. Windows end with a pass, or go on in
    /// the next one; what is left of the last one then makes no step.
    ///
    /// ```
    /// # use accelerate_core::schedule::ScheduledPass;
    /// let pass = ScheduledPass {
    ///     num_batches: 5, gradient_accumulation_steps: 2, num_processes: 4, ticks_per_step: 4, adjust_scheduler: false,
    /// };
    /// assert_eq!(pass.num_training_steps(3, true), 4 * (3 + 3 + 3));
    /// assert_eq!(pass.num_training_steps(3, false), 4 * 7);
    /// ```
    pub fn num_training_steps(&self, num_passes: usize, windows_end_with_passes: bool) -> usize {
        if windows_end_with_passes {
            return self.ticks().saturating_mul(num_passes);
        }
        let window = self.gradient_accumulation_steps.max(1);
        let num_steps = self.num_batches.saturating_mul(num_passes) / window;
        let counted = if self.adjust_scheduler { num_steps.saturating_mul(window) } else { num_steps };
        counted.saturating_mul(self.ticks_per_step)
    }

    /// By how much the ticks of a pass and a program's own count of it may differ, because both round.
    fn rounding(&self) -> usize {
        let windows = if self.adjust_scheduler { self.gradient_accumulation_steps } else { 1 };
        windows.saturating_mul(self.ticks_per_step)
    }

    /// Is there anything to count otherwise? Alone and without accumulation a batch is a step is a tick.
    fn is_plain(&self) -> bool {
        (self.num_processes <= 1 && self.gradient_accumulation_steps <= 1) || self.ticks() == 0
    }

    /// The numbers of whole passes that a program may have counted as so many steps. Empty if there are none.
    fn num_passes(&self, total_steps: usize) -> RangeInclusive<usize> {
        let (ticks, rounding) = (self.ticks(), self.rounding());
        let least = total_steps.div_ceil(ticks.saturating_add(rounding)).max(1);
        // Where rounding is all there is, any number is possible.
        let most = total_steps.checked_div(ticks.saturating_sub(rounding)).unwrap_or(usize::MAX);
        least..=most
    }

    /// Other ways to count a pass. The length of the loader before it was prepared is known up to the last round.
    fn other_counts(&self) -> impl Iterator<Item = (CountedIn, RangeInclusive<usize>)> {
        let (steps, batches) = (self.optimizer_steps(), self.num_batches);
        let last_round = self.num_processes.saturating_sub(1);
        let all = batches.saturating_mul(self.num_processes);
        [
            (CountedIn::OptimizerSteps, steps..=steps),
            (CountedIn::Batches, batches..=batches),
            (CountedIn::BatchesOfAllProcesses, all.saturating_sub(last_round).max(1)..=all),
        ]
        .into_iter()
    }

    /// To be asked before the loop: is a schedule of so many steps made for whole passes that are counted otherwise?
    pub fn check_length(&self, total_steps: usize) -> Option<LengthMismatch> {
        if self.is_plain() || total_steps == 0 || !self.num_passes(total_steps).is_empty() {
            return None;
        }
        let passes = |(counted_in, count): (CountedIn, RangeInclusive<usize>)| {
            let mut numbers = total_steps.div_ceil(*count.end()).max(1)..=total_steps / count.start();
            numbers.find(|number| total_steps.is_multiple_of(*number)).map(|num_passes| (counted_in, num_passes))
        };
        let (counted_in, num_passes) = self.other_counts().find_map(passes)?;
        Some(LengthMismatch::CountedOtherwise { pass: *self, total_steps, counted_in, num_passes })
    }

    /// To be asked in the loop: have there been so many more ticks, `beyond` the end of the schedule, that it is no rounding?
    pub fn check_end(&self, total_steps: usize, beyond: usize) -> Option<LengthMismatch> {
        let num_passes = *self.num_passes(total_steps).end();
        let is_rounding = beyond <= num_passes.max(1).saturating_mul(self.rounding());
        (!self.is_plain() && !is_rounding).then_some(LengthMismatch::Ended { pass: *self, total_steps })
    }

    /// To be asked after the loop: was a schedule that has `moved` so far made for the same passes, counted otherwise?
    pub fn check_moved(&self, total_steps: usize, moved: usize) -> Option<LengthMismatch> {
        if self.is_plain() || moved == 0 || !moved.is_multiple_of(self.ticks()) {
            return None;
        }
        let num_passes = moved / self.ticks();
        let is_short = moved.saturating_add(num_passes.saturating_mul(self.rounding())) < total_steps;
        if !is_short || !total_steps.is_multiple_of(num_passes) {
            return None;
        }
        let of_pass = total_steps / num_passes;
        let (counted_in, _) = self.other_counts().find(|(_, count)| count.contains(&of_pass))?;
        Some(LengthMismatch::NotReached { pass: *self, total_steps, moved, counted_in, num_passes })
    }

    /// How to make a schedule that was counted so end with the loop.
    fn cure(&self, counted_in: CountedIn, num_passes: usize) -> String {
        let length = num_passes.saturating_mul(self.ticks());
        let by_batches = ", or set GradientAccumulationPlugin.adjust_scheduler, which counts batches";
        let setting = match counted_in {
            _ if self.adjust_scheduler => "",
            CountedIn::OptimizerSteps => ", or build with SchedulerUnit::OptimizerStep, which counts optimizer steps",
            CountedIn::Batches if self.ticks_per_step == 1 => by_batches,
            CountedIn::BatchesOfAllProcesses if self.ticks_per_step == self.num_processes => by_batches,
            CountedIn::Batches | CountedIn::BatchesOfAllProcesses => "",
        };
        format!("Make it {length} steps long for {}{setting}", passes(num_passes))
    }
}

fn passes(number: usize) -> String {
    if number == 1 { "1 pass".to_owned() } else { format!("{number} passes") }
}

impl fmt::Display for CountedIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OptimizerSteps => "optimizer steps",
            Self::Batches => "batches of one process",
            Self::BatchesOfAllProcesses => "batches of all processes",
        })
    }
}

impl fmt::Display for LengthMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CountedOtherwise { pass, total_steps, counted_in, num_passes } => {
                let ticks = pass.ticks();
                let end = (*total_steps as f64 / ticks as f64 * 100.0).round() / 100.0;
                write!(
                    f,
                    "the learning-rate schedule has {total_steps} steps, and a pass over the data moves it by {ticks}, so it \
                     ends after {end} passes. {total_steps} steps are {} in {counted_in}. {}",
                    passes(*num_passes),
                    pass.cure(*counted_in, *num_passes)
                )
            }
            Self::Ended { pass, total_steps } => write!(
                f,
                "the learning-rate schedule is at the end of its {total_steps} steps, and training goes on: a pass over the \
                 data moves it by {}. Make it that long for every pass, if its last rate is not meant to hold from here on",
                pass.ticks()
            ),
            Self::NotReached { pass, total_steps, moved, counted_in, num_passes } => write!(
                f,
                "training has ended with the learning-rate schedule at step {moved} of {total_steps}: {total_steps} steps are \
                 {} in {counted_in}, and a pass over the data moves it by {}. {}",
                passes(*num_passes),
                pass.ticks(),
                pass.cure(*counted_in, *num_passes)
            ),
        }
    }
}
