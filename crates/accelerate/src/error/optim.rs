//! What can go wrong in `optim`.

use super::shown::{Name, problem_lines};

#[derive(Debug, thiserror::Error)]
pub(crate) enum OptimError {
    #[error("{owner}: {name} is {found}, but it has to be {wanted}")]
    Setting { owner: &'static str, name: &'static str, found: f64, wanted: &'static str },
    #[error(
        "{optimizer} was given no parameters to train. Build the layers before the optimizer, and check \
         that their parameters require gradients (Param::set_requires_grad)"
    )]
    NoParameters { optimizer: &'static str },
    #[error(
        "{optimizer}: the parameter \"{parameter}\" is in parameter group {first} and again in group {second}; \
         every parameter belongs to exactly one group"
    )]
    DuplicateParameter { optimizer: &'static str, parameter: String, first: usize, second: usize },
    #[error(
        "the {what} cannot be taken back, because another thread is just using it through the accelerator, for example in \
         Accelerator::state_dict; wait for that thread first"
    )]
    CannotTakeBack { what: &'static str },
    #[error(
        "Accelerator::{call} needs a prepared {what} that is in use: this call comes out of its own step or another of its \
         calls, or another thread is in one. Make it between training steps"
    )]
    InUse { call: &'static str, what: &'static str },
    #[error("there is no parameter group {group}; the optimizer has {num_groups}, counted from 0")]
    NoSuchGroup { group: usize, num_groups: usize },
    #[error(
        "{scheduler} was given {found} {what}, but the optimizer has {wanted} parameter groups; give one for each group"
    )]
    GroupCount { scheduler: &'static str, what: &'static str, found: usize, wanted: usize },
    #[error(
        "the saved state says that {scheduler} has made {found} steps, which no run takes; load a state that it has saved"
    )]
    TooManySteps { scheduler: &'static str, found: usize },
    #[error(
        "the state was saved by the schedule {}, but {scheduler}, whose learning rates are others, was to load it; nothing was loaded. \
         Load it into the schedule that saved it, and change to another schedule afterwards",
        Name(found)
    )]
    OtherScheduler { scheduler: &'static str, found: String },
    #[error(
        "the saved state{} holds {found} inner schedules, but {scheduler} has {wanted}; load a state that the same kind of \
         scheduler has saved",
        of.as_ref().map(|of| format!(" of the schedule {}", Name(of))).unwrap_or_default()
    )]
    InnerSchedules { scheduler: &'static str, of: Option<String>, found: usize, wanted: usize },
    #[error(
        "OneCycleLr with cycle_momentum changes the optimizer's momentum or first beta, but {optimizer} has neither; \
         set cycle_momentum: false"
    )]
    NoMomentum { optimizer: &'static str },
    #[error(
        "Sgd with nesterov needs a momentum above 0 and no dampening, but momentum is {momentum} and dampening is {dampening}"
    )]
    Nesterov { momentum: f64, dampening: f64 },
    #[error(
        "the saved state does not fit this {optimizer}:\n  {}\nNothing was loaded. Build the same optimizer over the \
         same model and with the same parameter groups as when the state was saved",
        problem_lines(problems)
    )]
    StateMismatch { optimizer: &'static str, problems: Vec<String> },
    #[error(
        "{scheduler} was stepped {steps} times, but its schedule has only {total_steps} steps. The total is \
         the number of batches per epoch times the number of epochs, divided by the gradient accumulation steps"
    )]
    ScheduleFinished { scheduler: &'static str, steps: usize, total_steps: usize },
    #[error(
        "the total norm (order {norm_type}) of the gradients is {norm}, so the gradients cannot be clipped to it. \
         Look for the first step with a loss that is not finite, or allow it (error_if_nonfinite: false)"
    )]
    NonFiniteNorm { norm_type: f64, norm: f64 },
    #[error(
        "GradScaler::{call} needs a loss that was scaled before, and none was since the scaler was made; \
         run the backward pass on GradScaler::scale(&loss), or let Accelerator::backward do it"
    )]
    NothingScaled { call: &'static str },
    #[error(
        "the gradient of \"{parameter}\" is float16, and unscaling it could lose it to rounding. Keep the \
         parameters in float32 and let mixed precision compute in float16"
    )]
    HalfGradient { parameter: String },
    #[error("GradScaler::{call} was called for an optimizer that has already stepped; call GradScaler::update first")]
    AlreadyStepped { call: &'static str },
    #[error("GradScaler::update was called before any optimizer of this step was unscaled or stepped")]
    NothingToUpdate,
    #[error(
        "the scheduler moves with its optimizer, but the {optimizer} that it was made for was not prepared, so nobody \
         knows when it steps. Prepare both: `let (optimizer, scheduler) = accelerator.prepare((optimizer, scheduler))?`"
    )]
    OptimizerNotPrepared { optimizer: &'static str },
    #[error(
        "{optimizer} looks at rows and columns of full parameters, but \"{parameter}\" is sharded; use an optimizer that \
         goes element by element, such as AdamW"
    )]
    NeedsWholeParameters { optimizer: &'static str, parameter: String },
    #[error(
        "\"{key}\" of {optimizer} is state of a shard of its parameter and cannot be put together with that of other shards; \
         load it on as many processes as saved it, or use an optimizer that goes element by element, such as AdamW"
    )]
    StateInBlocks { optimizer: &'static str, key: String },
    #[error("the states do not make up one optimizer:\n  {}\nGive the states of all processes of one run", problems.join("\n  "))]
    StatesMismatch { problems: Vec<String> },
    #[error(
        "this {optimizer} was not prepared, but trains \"{parameter}\" of a prepared model: it would step in the middle of \
         an accumulation window, and on gradients that are still scaled. Prepare it: \
         `let mut optimizer = accelerator.prepare(optimizer)?`"
    )]
    SteppedUnprepared { optimizer: &'static str, parameter: String },
    #[error(
        "this {optimizer} has stepped or loaded state before its model was sharded or a device map moved its parameters, so its state is \
         of tensors that are not there any more. Prepare the model, or dispatch it, before the first step and before \
         Optimizer::load_state_dict, or make a new optimizer"
    )]
    StateFromBeforeSharding { optimizer: &'static str },
    #[error(
        "{call} came after the step of {optimizer}, which has used these gradients already, so it would change nothing. \
         Clip between Accelerator::backward and the step"
    )]
    ClippedAfterStep { call: &'static str, optimizer: &'static str },
}
