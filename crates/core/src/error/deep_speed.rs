//! What can be wrong with a DeepSpeed configuration.

use crate::config::DeepSpeedFile;
use crate::files::ShownPath;
use crate::settings::{Position, shortened, shortened_line};
use std::fmt;
use std::path::PathBuf;

/// The most bytes of the entries that one error lists: who has to mend more begins with these.
const MOST_LISTED_BYTES: usize = 1400;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DeepSpeedErrorKind {
    #[error(
        "the DeepSpeed configuration is not a JSON object without repeated keys: {source}; comments and trailing commas \
         are not JSON"
    )]
    Json { source: serde_json::Error },
    #[error("the DeepSpeed configuration has {bytes} bytes, but may have at most {most}")]
    TooLarge { bytes: usize, most: usize },
    #[error(
        "the DeepSpeed configuration file {} cannot be read; deepspeed_config_file is the path of a JSON file, or its content",
        shortened(&path.shown())
    )]
    File { path: PathBuf },
    #[error("{}: {}", shortened(&file.path.shown()), problem.text(Some(file)))]
    InFile { file: DeepSpeedFile, problem: Box<Self> },
    #[error("the DeepSpeed configuration cannot be honoured as it is:{}", listed(problems, None))]
    Document { problems: Vec<Problem> },
    #[error("{path} is missing: {device} is \"nvme\", which needs a folder on that disk")]
    NoFolder { device: &'static str, path: &'static str },
    #[error(
        "fp16.enabled and bf16.enabled contradict each other: layers compute in one of them; enable one, or write \"auto\" \
         for both"
    )]
    TwoPrecisions,
    #[error(
        "the DeepSpeed configuration says \"auto\" where nothing tells the value; write it instead of \"auto\":{}",
        listed(remaining, None)
    )]
    RemainingAuto { remaining: Vec<RemainingAuto> },
    #[error(
        "the DeepSpeed configuration and the program say different things; write \"auto\" in the configuration, or make \
         them agree:{}",
        listed(conflicts, None)
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
            Self::NoFolder { device, .. } => vec![device],
            Self::InFile { problem, .. } => problem.settings(),
            // Without a file, the configuration is where this setting was said.
            Self::Json { .. } | Self::Document { .. } | Self::RemainingAuto { .. } | Self::File { .. } => {
                vec!["deepspeed_config.hf_ds_config"]
            }
            _ => Vec::new(),
        }
    }

    /// The keys of the document that it is about, where it does not list them one by one.
    fn keys(&self) -> &'static [&'static str] {
        match self {
            Self::BatchSize { .. } | Self::BatchDoesNotDivide { .. } => {
                &["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
            }
            Self::TwoPrecisions => &["fp16.enabled", "bf16.enabled", "bfloat16.enabled"],
            Self::OptimizerTwice => &["optimizer"],
            Self::SchedulerTwice => &["scheduler"],
            _ => &[],
        }
    }

    /// The text, with the places of what it is about where the configuration is a file.
    fn text(&self, file: Option<&DeepSpeedFile>) -> String {
        let Some(file) = file else { return self.to_string() };
        let (listed_alone, listed) = match self {
            Self::Document { problems } => (listed(problems, None), listed(problems, Some(file))),
            Self::RemainingAuto { remaining } => (listed(remaining, None), listed(remaining, Some(file))),
            _ => {
                let places: Vec<_> = self.keys().iter().filter_map(|key| Some((file.position(key)?, key))).collect();
                let places: Vec<_> = places.iter().map(|(place, key)| format!("{key}: {}", in_words(*place))).collect();
                return if places.is_empty() { self.to_string() } else { format!("{self} ({})", places.join(", ")) };
            }
        };
        self.to_string().replace(&listed_alone, &listed)
    }
}

/// One entry of a document that an error lists.
trait Entry: fmt::Display {
    /// Its key, where the text does not name the line already.
    fn key(&self) -> Option<&str>;
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

impl Entry for Problem {
    fn key(&self) -> Option<&str> {
        match self {
            Self::Unknown { key, .. }
            | Self::Refused { key, .. }
            | Self::Foreign { key, .. }
            | Self::Name { key, .. }
            | Self::Value { key, .. }
            | Self::Missing { key, .. } => Some(key),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = shortened_line(self.key().unwrap_or_default());
        match self {
            Self::Unknown { nearest: Some(nearest), .. } => {
                write!(f, "{key} is not known; {nearest} is. Correct or remove it")
            }
            Self::Unknown { nearest: None, .. } => write!(f, "{key} is not known; remove it"),
            Self::Refused { found, instead, .. } => write!(f, "{key} is {found}, which is not available: {instead}"),
            Self::Foreign { owner, .. } => write!(f, "{key} is not a setting of {owner}; remove it"),
            Self::Name { error, .. } => write!(f, "{key}: {error}"),
            Self::Value { found, wanted, .. } => write!(f, "{key} is {found}, but must be {wanted}"),
            Self::Missing { why, .. } => write!(f, "{key} is missing: {why}"),
        }
    }
}

/// One "auto" that nothing fills.
#[derive(Debug)]
pub(crate) struct RemainingAuto {
    pub(crate) key: String,
    pub(crate) why: &'static str,
}

impl Entry for RemainingAuto {
    fn key(&self) -> Option<&str> {
        Some(&self.key)
    }
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

impl Entry for Conflict {
    fn key(&self) -> Option<&str> {
        None
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, place, configured, source, given, .. } = self;
        let place = place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
        write!(f, "{key} is {configured}{place}, but {source} is {given}")
    }
}

/// As the reader of JSON says it, whose errors stand beside these.
fn in_words(Position { line, column }: Position) -> String {
    format!("line {line} column {column}")
}

/// A line for each item, with its place in `file`, as far as a reader's patience reaches.
fn listed<T: Entry>(items: &[T], file: Option<&DeepSpeedFile>) -> String {
    let mut lines = String::new();
    for (index, item) in items.iter().enumerate() {
        let place = item.key().and_then(|key| file?.position(key)).map(|place| format!(" ({})", in_words(place)));
        let line = format!("\n  - {item}{}", place.unwrap_or_default());
        if lines.len() + line.len() > MOST_LISTED_BYTES && index > 0 {
            return format!("{lines}\n  - and {} more", items.len() - index);
        }
        lines += &line;
    }
    lines
}
