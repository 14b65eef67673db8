//! What can be wrong with a DeepSpeed configuration.

use std::fmt;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DeepSpeedErrorKind {
    #[error(
        "the DeepSpeed configuration is not a JSON object without repeated keys: {source}; comments and trailing commas \
         are not JSON"
    )]
    Json { source: serde_json::Error },
    #[error(
        "the DeepSpeed configuration file {} cannot be read; hf_ds_config is the path of a JSON file, or its content",
        path.display()
    )]
    File { path: PathBuf },
    #[error("the DeepSpeed configuration cannot be honoured as it is:{}", listed(problems))]
    Document { problems: Vec<Problem> },
    #[error(
        "the DeepSpeed configuration says \"auto\" where nothing tells the value; write it instead of \"auto\":{}",
        listed(remaining)
    )]
    RemainingAuto { remaining: Vec<RemainingAuto> },
    #[error(
        "the DeepSpeed configuration and the program say different things; write \"auto\" in the configuration, or make \
         them agree:{}",
        listed(conflicts)
    )]
    Conflicts { conflicts: Vec<Conflict> },
    #[error(
        "train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro}{whose} * gradient_accumulation_steps \
         {accumulation} * {world_size} processes is {product}; write {product} or \"auto\" for train_batch_size, or change \
         one of the others"
    )]
    BatchSize {
        train: usize,
        micro: usize,
        whose: &'static str,
        accumulation: usize,
        world_size: usize,
        product: usize,
    },
    #[error(
        "train_batch_size is {train}, which cannot be divided by {known} * {world_size} processes to give {wanted}; make it \
         a multiple of {}, or write {wanted} instead",
        known_value.saturating_mul(*world_size)
    )]
    BatchDoesNotDivide {
        train: usize,
        known: &'static str,
        known_value: usize,
        world_size: usize,
        wanted: &'static str,
    },
    #[error(
        "an optimizer was passed to prepare, and the DeepSpeed configuration has one too; pass a DummyOptim in its place, or \
         remove \"optimizer\" from the configuration"
    )]
    OptimizerTwice,
    #[error(
        "a DummyOptim was passed to prepare, but the DeepSpeed configuration has no \"optimizer\"; add one to it, or pass an \
         optimizer"
    )]
    NoOptimizer,
    #[error(
        "a learning-rate scheduler was made by the program, and the DeepSpeed configuration has one too; pass a \
         DummyScheduler without a callable in its place, or remove \"scheduler\" from the configuration"
    )]
    SchedulerTwice,
    #[error(
        "a DummyScheduler was passed to prepare, but the DeepSpeed configuration has no \"scheduler\"; add one to it, or \
         give the DummyScheduler a callable that makes the scheduler"
    )]
    NoScheduler,
    #[error(
        "a learning-rate scheduler was passed to prepare together with a DummyOptim, which is no optimizer that it could \
         drive; pass a DummyScheduler, with a callable that makes the scheduler if it is not in the configuration"
    )]
    SchedulerOfDummy,
    #[error(
        "a DeepSpeed configuration describes one optimizer and one schedule, but the {dummy}s that were passed to prepare \
         become two: {first}, and {second}; give them the same numbers, or prepare the second one with an accelerator of its \
         own (AcceleratorBuilder::build_from)"
    )]
    TwoDummies { dummy: &'static str, first: String, second: String },
    #[error(
        "{what} is {before}, as an earlier call of prepare has decided; what is passed to prepare now makes it {now}; pass \
         all of it to one call, call free_memory where the earlier objects are no more, or write the number into the DeepSpeed \
         configuration"
    )]
    Changed { what: &'static str, before: String, now: String },
}

impl DeepSpeedErrorKind {
    /// The settings that take part, by their paths.
    pub(super) fn settings(&self) -> Vec<&str> {
        match self {
            Self::Conflicts { conflicts } => conflicts.iter().filter_map(|conflict| conflict.setting).collect(),
            Self::BatchSize { .. } | Self::BatchDoesNotDivide { .. } => vec!["gradient_accumulation_config.num_steps"],
            _ => Vec::new(),
        }
    }
}

/// One entry of a document that cannot be honoured.
#[derive(Debug)]
pub(crate) enum Problem {
    /// No version of DeepSpeed that is known here has this key.
    Unknown { key: String, nearest: Option<String> },
    /// DeepSpeed's, but not available.
    Refused { key: String, found: String, instead: &'static str },
    /// A parameter of another optimizer or scheduler.
    Foreign { key: String, owner: &'static str },
    /// A name that is not among its choices, which the cause lists.
    Name { key: String, error: crate::Error },
    /// Of the wrong type or out of range.
    Value { key: String, found: String, wanted: &'static str },
    /// Needed, but absent.
    Missing { key: String, why: &'static str },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { key, nearest: Some(nearest) } => {
                write!(f, "{key} is not known; {nearest} is. Correct or remove it")
            }
            Self::Unknown { key, nearest: None } => write!(f, "{key} is not known; remove it"),
            Self::Refused { key, found, instead } => write!(f, "{key} is {found}, which is not available: {instead}"),
            Self::Foreign { key, owner } => write!(f, "{key} is not a parameter of {owner}; remove it"),
            Self::Name { key, error } => write!(f, "{key}: {error}"),
            Self::Value { key, found, wanted } => write!(f, "{key} is {found}, but must be {wanted}"),
            Self::Missing { key, why } => write!(f, "{key} is missing: {why}"),
        }
    }
}

/// One "auto" that nothing fills.
#[derive(Debug)]
pub(crate) struct RemainingAuto {
    pub(crate) key: String,
    pub(crate) why: &'static str,
}

impl fmt::Display for RemainingAuto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.why)
    }
}

/// One value that is given twice, differently.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) key: String,
    /// Where the configuration says it, if that is a file.
    pub(crate) place: Option<String>,
    pub(crate) configured: String,
    pub(crate) source: &'static str,
    /// The path of the setting that gives the other value, if it is one.
    pub(crate) setting: Option<&'static str>,
    pub(crate) given: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, place, configured, source, given, .. } = self;
        let place = place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
        write!(f, "{key} is {configured}{place}, but {source} is {given}")
    }
}

fn listed<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!("\n  - {item}")).collect()
}
