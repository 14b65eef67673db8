//! The one error of this crate.
//!
//! [`Error`] is opaque and one word wide, so that `Result`s stay small; callers ask it questions with the
//! `is_*` predicates instead of matching on an enum that could then never grow. What can go wrong is
//! listed per module in the private enums below this file, and their texts live there too, not where the
//! error is raised.

use crate::config::DeepSpeedFile;
use std::fmt;

pub(crate) mod config;
pub(crate) mod data;
pub(crate) mod deep_speed;
pub(crate) mod device_map;
pub(crate) mod environment;
pub(crate) mod exported_model;
pub(crate) mod hosts;
pub(crate) mod layout;
pub(crate) mod lora;
pub(crate) mod plan;
pub(crate) mod python;
pub(crate) mod pytorch;
pub(crate) mod quantization;
pub(crate) mod sequence_parallel;
pub(crate) mod settings;
pub(crate) mod tensor_parallel;
pub(crate) mod tracking;
pub(crate) mod weight_files;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A decision that could not be made, and why.
///
/// The message says what was found, what was wanted and how to put it right.
///
/// ```
/// use accelerate_core::config::MixedPrecision;
/// let error = "half".parse::<MixedPrecision>().unwrap_err();
/// assert!(error.is_config());
/// assert_eq!(
///     error.to_string(),
///     "\"half\" is not a mixed precision; the choices are \"no\", \"fp16\", \"bf16\", \"fp8\"",
/// );
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ErrorKind {
    #[error(transparent)]
    Config(#[from] config::ConfigErrorKind),
    #[error(transparent)]
    Data(#[from] data::DataErrorKind),
    #[error(transparent)]
    DeviceMap(#[from] device_map::DeviceMapErrorKind),
    #[error(transparent)]
    Environment(#[from] environment::EnvironmentErrorKind),
    #[error(transparent)]
    ExportedModel(#[from] exported_model::ExportedModelErrorKind),
    #[error(transparent)]
    Hosts(#[from] hosts::HostsErrorKind),
    #[error(transparent)]
    Layout(#[from] layout::LayoutErrorKind),
    #[error(transparent)]
    Lora(#[from] lora::LoraErrorKind),
    #[error(transparent)]
    Plan(#[from] plan::PlanErrorKind),
    #[error(transparent)]
    Pytorch(#[from] pytorch::PytorchErrorKind),
    #[error(transparent)]
    Python(#[from] python::PythonErrorKind),
    #[error(transparent)]
    Quantization(#[from] quantization::QuantizationErrorKind),
    #[error(transparent)]
    SequenceParallel(#[from] sequence_parallel::SequenceParallelErrorKind),
    #[error(transparent)]
    Settings(#[from] settings::SettingsErrorKind),
    #[error(transparent)]
    TensorParallel(#[from] tensor_parallel::TensorParallelErrorKind),
    #[error(transparent)]
    Tracking(#[from] tracking::TrackingErrorKind),
    #[error(transparent)]
    WeightFiles(#[from] weight_files::WeightFilesErrorKind),
}

impl From<deep_speed::DeepSpeedErrorKind> for ErrorKind {
    fn from(kind: deep_speed::DeepSpeedErrorKind) -> Self {
        Self::Config(kind.into())
    }
}

impl Error {
    #[cold]
    pub(crate) fn new(kind: impl Into<ErrorKind>) -> Self {
        Self(Box::new(Inner { kind: kind.into(), source: None }))
    }

    /// Attaches the error that caused this one; [`std::error::Error::source`] returns it.
    #[cold]
    pub(crate) fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Says that the DeepSpeed configuration that this is about is `file`.
    #[cold]
    pub(crate) fn in_deepspeed_file(self, file: &DeepSpeedFile) -> Self {
        use config::ConfigErrorKind::DeepSpeed;
        use deep_speed::DeepSpeedErrorKind::{File, InFile};
        let Inner { kind, source } = *self.0;
        let kind = match kind {
            ErrorKind::Config(DeepSpeed(problem)) if !matches!(problem, InFile { .. } | File { .. }) => {
                InFile { file: file.clone(), problem: Box::new(problem) }.into()
            }
            kind => kind,
        };
        Self(Box::new(Inner { kind, source }))
    }

    /// Names the places of the settings that it is about, and says what is wrong in these words.
    #[cold]
    pub(crate) fn with_places(self, problem: String, places: String) -> Self {
        let Inner { source, .. } = *self.0;
        let kind = settings::SettingsErrorKind::Places { problem, places }.into();
        Self(Box::new(Inner { kind, source }))
    }

    /// What the text calls the settings that it is about, for whoever knows where they were said.
    pub(crate) fn settings(&self) -> Vec<&str> {
        match &self.0.kind {
            ErrorKind::Config(kind) => kind.settings(),
            _ => Vec::new(),
        }
    }

    /// The reason alone where something is refused, else the whole text.
    pub(crate) fn why(&self) -> String {
        match &self.0.kind {
            ErrorKind::Settings(settings::SettingsErrorKind::Refused { why, .. }) => (*why).to_owned(),
            kind => kind.to_string(),
        }
    }

    /// A configuration value is outside its range, unknown, or contradicts another one.
    pub fn is_config(&self) -> bool {
        match &self.0.kind {
            ErrorKind::Settings(kind) => !matches!(kind, settings::SettingsErrorKind::Variable { .. }),
            ErrorKind::TensorParallel(kind) => kind.is_config(),
            kind => {
                matches!(kind, ErrorKind::Config(_) | ErrorKind::Hosts(_) | ErrorKind::Lora(_) | ErrorKind::Tracking(_))
            }
        }
    }

    /// The environment variables of a launcher are missing, malformed or contradict each other.
    pub fn is_environment(&self) -> bool {
        use settings::SettingsErrorKind::Variable;
        matches!(self.0.kind, ErrorKind::Environment(_) | ErrorKind::Settings(Variable { .. }))
    }

    /// A plan cannot be carried out, because it takes more memory than there is or a tensor has no such shard; or what it
    /// takes cannot be estimated from what was said. A device map names what is no device, or leaves tensors out.
    pub fn is_plan(&self) -> bool {
        match &self.0.kind {
            ErrorKind::TensorParallel(kind) => !kind.is_config(),
            kind => matches!(kind, ErrorKind::Plan(_) | ErrorKind::Layout(_) | ErrorKind::DeviceMap(_)),
        }
    }

    /// Rows, batches, sequences or splits of data do not fit what was asked for.
    pub fn is_data(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Data(_) | ErrorKind::SequenceParallel(_))
    }

    /// A pickle has other things in it than plain data and tensors, such as objects of a program's own, or more than is read of any.
    /// It may be whole all the same; [`is_weight_files`](Self::is_weight_files) is true, too.
    pub fn is_foreign_pickle(&self) -> bool {
        use pytorch::{ContentsProblem, PickleProblem, PytorchErrorKind};
        let ErrorKind::Pytorch(kind) = &self.0.kind else { return false };
        match kind {
            PytorchErrorKind::Pickle(problem) => matches!(
                problem,
                PickleProblem::Global { .. } | PickleProblem::Use { .. } | PickleProblem::Instruction { .. }
            ),
            PytorchErrorKind::Contents(problem) => matches!(
                problem,
                ContentsProblem::Deep { .. }
                    | ContentsProblem::ManyValues { .. }
                    | ContentsProblem::ManySizes { .. }
                    | ContentsProblem::LongTexts { .. }
            ),
            _ => false,
        }
    }

    /// A newer version of this library has written it, which this one does not read. It may be whole;
    /// [`is_weight_files`](Self::is_weight_files) is true, too.
    pub fn is_newer_version(&self) -> bool {
        matches!(self.0.kind, ErrorKind::WeightFiles(weight_files::WeightFilesErrorKind::NewerVersion { .. }))
    }

    /// A weight file, its size, name or index, or an exported model cannot be understood.
    pub fn is_weight_files(&self) -> bool {
        use ErrorKind::{ExportedModel, Python, Pytorch, Quantization, WeightFiles};
        matches!(self.0.kind, WeightFiles(_) | Pytorch(_) | Python(_) | ExportedModel(_) | Quantization(_))
    }
}

impl<K: Into<ErrorKind>> From<K> for Error {
    #[cold]
    #[inline(never)]
    fn from(kind: K) -> Self {
        Self::new(kind)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.kind.fmt(f)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &self.0.kind);
        if let Some(source) = &self.0.source {
            debug.field("source", source);
        }
        debug.finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_word_wide() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn an_error_crosses_threads() {
        fn crosses_threads<T: Send + Sync + 'static>() {}
        crosses_threads::<Error>();
    }

    #[test]
    fn the_cause_is_kept() {
        let cause = "x".parse::<u32>().unwrap_err();
        let error = Error::new(data::DataErrorKind::ZeroBatchSize).caused_by(cause.clone());
        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), cause.to_string());
        assert!(format!("{error:?}").contains("source"));
    }

    #[test]
    fn each_kind_answers_to_exactly_one_predicate() {
        let answers = |error: Error| {
            [error.is_config(), error.is_data(), error.is_environment(), error.is_plan(), error.is_weight_files()]
        };
        let zero = config::ConfigErrorKind::MustBePositive { name: "num_steps" };
        assert_eq!(answers(Error::new(zero)), [true, false, false, false, false]);
        assert_eq!(answers(Error::new(data::DataErrorKind::ZeroBatchSize)), [false, true, false, false, false]);
        let missing = environment::EnvironmentErrorKind::WorldSizeWithoutRank { world_size: 2 };
        assert_eq!(answers(Error::new(missing)), [false, false, true, false, false]);
        let weight = crate::plan::ParameterEntry::new("weight", &[1], "float32", 4);
        let inventory = crate::plan::Inventory { parameters: vec![weight] };
        let plan = crate::plan::plan_data_parallel(&inventory, &Default::default(), 1);
        assert_eq!(answers(plan.check_fits(0).unwrap_err()), [false, false, false, true, false]);
        let size = weight_files::WeightFilesErrorKind::Size { found: "x".to_owned() };
        assert_eq!(answers(Error::new(size)), [false, false, false, false, true]);
    }
}
