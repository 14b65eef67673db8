//! What can be wrong with the trackers that a program asks for, and with what it gives them.

use crate::names::LoggerType;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackingErrorKind {
    #[error(
        "log_with names \"{name}\", which is a client of a service in Python and is not here; write a GeneralTracker that hands \
         values to it, or use \"tensorboard\" or \"jsonl\""
    )]
    Service { name: LoggerType },
    #[error(
        "logging with \"{name}\" requires a logging_dir, and neither logging_dir nor project_dir is set; give one of them by \
         ProjectConfiguration, or by ACCELERATE_PROJECT_LOGGING_DIR"
    )]
    NoLoggingDir { name: String },
    #[error("two trackers are called \"{name}\"; leave one of them out, or give it another name")]
    TwoOfOneName { name: String },
    #[error(
        "{what} is {found:?}, and a folder below the logging_dir is made of it; it must be relative and go without \"..\""
    )]
    LeadsElsewhere { what: &'static str, found: String },
    #[error(
        "the hyperparameter {name} is {found}, and TensorBoard knows numbers, texts, booleans and nothing; give the parts of it, \
         each with a name of its own"
    )]
    Hyperparameter { name: String, found: &'static str },
    #[error(
        "{name} is {found}, which is not a number; the values of a map are drawn in one chart, so they are numbers"
    )]
    NotANumber { name: String, found: &'static str },
    #[error(
        "the name {name:?} stands for what the tracker itself writes into each line; log the value by another name"
    )]
    ReservedName { name: String },
    #[error("the tracker \"{tracker}\" has no option {found:?}; it has {}", named(known))]
    UnknownOption { tracker: &'static str, found: String, known: &'static [&'static str] },
    #[error("the option {option:?} of the tracker \"{tracker}\" is {found}, but must be {wanted}")]
    Option { tracker: &'static str, option: String, found: &'static str, wanted: &'static str },
}

fn named(known: &[&str]) -> String {
    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
}
