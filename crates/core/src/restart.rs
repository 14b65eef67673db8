//! Whether a run starts again after it has failed, and when.

use std::time::Duration;

/// An attempt that lives for this long has trained, so what ended it is no reason to wait.
pub const LONG_LIFE: Duration = Duration::from_secs(60);
/// What lies between the second restart in a row and the failure before it; each further pause is twice as long.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// No pause is longer.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How one attempt of a run failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    /// From its start to its end.
    pub lived: Duration,
    /// What the run would exit with: the code of the process that failed first, or 128 + n after signal n.
    pub exit_code: u8,
}

/// What follows a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// All processes start again.
    Restart {
        /// How long nothing runs before.
        after: Duration,
    },
    /// The run is over.
    GiveUp(GiveUp),
}

impl NextStep {
    /// The same, unless something else than the failures speaks against another attempt. What they say themselves comes first.
    ///
    /// ```
    /// use accelerate_core::restart::{GiveUp, NextStep};
    /// let step = NextStep::Restart { after: std::time::Duration::ZERO };
    /// let why = GiveUp::StillThere { process_id: 812, machine: None };
    /// assert_eq!(why.to_string(), "not restarted: process 812 of this attempt is still there");
    /// assert_eq!(step.clone().unless(Some(why.clone())), NextStep::GiveUp(why.clone()));
    /// assert_eq!(step.clone().unless(None), step);
    /// assert_eq!(NextStep::GiveUp(GiveUp::NoneLeft).unless(Some(why)), NextStep::GiveUp(GiveUp::NoneLeft));
    /// ```
    #[must_use]
    pub fn unless(self, obstacle: Option<GiveUp>) -> Self {
        match (self, obstacle) {
            (Self::Restart { .. }, Some(why)) => Self::GiveUp(why),
            (step, _) => step,
        }
    }
}

/// Why a run that has failed does not start again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// All restarts that were asked for have been made.
    NoneLeft,
    /// The code says that arguments are wrong (2), or that a program cannot be run or is missing (126, 127). It would be the same
    /// the next time.
    SameAgain {
        /// The code.
        exit_code: u8,
    },
    /// Somebody has pressed Ctrl-C or Ctrl-\ at the terminal of the program (130, 131).
    ByHand {
        /// The code.
        exit_code: u8,
    },
    /// A process of the attempt could not be ended, and the next one would run beside it.
    StillThere {
        /// Its number.
        process_id: u32,
        /// Where it is, in a run on several machines.
        machine: Option<String>,
    },
    /// A machine has not said that its ranks have ended.
    Unconfirmed {
        /// Its name.
        machine: String,
    },
    /// The launcher was told to stop, or the program at its terminal was.
    Stopped {
        /// The name of the signal.
        signal: String,
    },
}

impl std::fmt::Display for GiveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoneLeft => f.write_str("all restarts of --max_restarts have been made"),
            Self::SameAgain { exit_code: 2 } => f.write_str(
                "not restarted: programs exit with 2 when their arguments are wrong, which they would be again",
            ),
            Self::SameAgain { exit_code } => {
                write!(
                    f,
                    "not restarted: {exit_code} says that a program is missing or cannot be run, which it could not again"
                )
            }
            Self::ByHand { .. } => f.write_str("not restarted: somebody has interrupted the program"),
            Self::StillThere { process_id, machine } => {
                write!(f, "not restarted: process {process_id} of this attempt is still there")?;
                machine.as_ref().map_or(Ok(()), |machine| write!(f, ", on {machine}"))
            }
            Self::Unconfirmed { machine } => write!(
                f,
                "not restarted: {machine} did not say that its ranks have ended, and others would have run beside them"
            ),
            Self::Stopped { signal } => write!(f, "not restarted: {signal} had come"),
        }
    }
}

/// What follows after all of these attempts have failed, of which the last has just done so.
///
/// The first restart comes at once. Attempts that die soon after one another are started after pauses of 1, 2, 4, 8, 16 and from then
/// on 30 seconds; one that lives for [`LONG_LIFE`] begins this anew. All restarts count, whatever lies between them.
///
/// ```
/// use accelerate_core::restart::{FailedAttempt, GiveUp, NextStep, next_step};
/// use std::time::Duration;
/// let died_soon = FailedAttempt { lived: Duration::from_secs(2), exit_code: 1 };
/// assert_eq!(next_step(&[died_soon], 2), NextStep::Restart { after: Duration::ZERO });
/// assert_eq!(next_step(&[died_soon; 2], 2), NextStep::Restart { after: Duration::from_secs(1) });
/// assert_eq!(next_step(&[died_soon; 3], 2), NextStep::GiveUp(GiveUp::NoneLeft));
/// ```
pub fn next_step(failed: &[FailedAttempt], max_restarts: usize) -> NextStep {
    match failed.last().map_or(1, |attempt| attempt.exit_code) {
        exit_code @ (2 | 126 | 127) => return NextStep::GiveUp(GiveUp::SameAgain { exit_code }),
        exit_code @ (130 | 131) => return NextStep::GiveUp(GiveUp::ByHand { exit_code }),
        _ => {}
    }
    if failed.len() > max_restarts {
        return NextStep::GiveUp(GiveUp::NoneLeft);
    }
    let num_soon = failed.iter().rev().take_while(|attempt| attempt.lived < LONG_LIFE).count();
    let doublings = num_soon.checked_sub(2).map(|doublings| u32::try_from(doublings).unwrap_or(u32::MAX));
    let pause = |doublings| FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST_PAUSE);
    NextStep::Restart { after: doublings.map_or(Duration::ZERO, pause) }
}
