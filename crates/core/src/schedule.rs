//! Learning-rate schedules as pure functions of the step, and how many of their ticks an optimizer step is.
//!
//! Every schedule gives a multiplier of the optimizer's initial learning rate. Steps count from 0: the
//! multiplier for step 0 is in force before the first optimizer step. Formulas are those of
//! `transformers/optimization.py` for the warmup family and of `torch/optim/lr_scheduler.py` for the rest.

mod length;
mod multipliers;
mod one_cycle;
mod plateau;
mod ticks;

pub use length::{CountedIn, LengthMismatch, ScheduledPass};
pub use multipliers::{
    constant, constant_with_warmup, cosine_annealing, cosine_with_hard_restarts_with_warmup, cosine_with_warmup,
    exponential, inverse_sqrt_with_warmup, linear_with_warmup, multi_step, polynomial_with_warmup, step_decay,
};
pub use one_cycle::{AnnealStrategy, OneCycle, OneCyclePoint};
pub use plateau::{Plateau, PlateauMode, PlateauState, ThresholdMode};
pub use ticks::{SchedulerRule, SchedulerUnit, capped_ticks, ticks_per_step};
