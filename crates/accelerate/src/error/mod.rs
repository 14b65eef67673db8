//! The one error of this crate: opaque, one word wide, with questions instead of variants.
//!
//! Each concern has its own enum in a file beside this one; texts live there, not at call sites.

mod big_model;
mod checkpoint;
mod collective;
mod data;
mod failure;
mod fp8;
mod launcher;
mod lora;
mod memory;
mod mismatch;
mod nn;
mod offload;
mod optim;
mod profile;
mod reader;
mod shown;
mod state;
mod tracking;
mod weights;

pub(crate) use big_model::BigModelError;
pub(crate) use checkpoint::CheckpointError;
pub(crate) use collective::{CollectiveError, ElsewhereKind};
pub(crate) use data::DataError;
pub(crate) use failure::{CollectiveCall, Failure, Findings, StoreState, listed_ranks};
pub(crate) use fp8::Fp8Error;
pub(crate) use launcher::LauncherError;
pub(crate) use lora::LoraError;
pub(crate) use memory::{MemoryError, says_out_of_memory};
pub(crate) use mismatch::{Mismatch, Misshaped};
pub(crate) use nn::NnError;
pub(crate) use offload::OffloadError;
pub(crate) use optim::OptimError;
pub(crate) use profile::ProfileError;
pub use reader::{Place, Position};
pub(crate) use reader::{ReaderError, RowProblem};
pub(crate) use shown::shortened_to;
#[cfg(any(feature = "arrow", feature = "parquet"))]
pub(crate) use shown::{Name, shortened};
pub(crate) use state::StateError;
pub(crate) use tracking::TrackingError;
pub(crate) use weights::WeightsError;

use std::any::Any;
use std::fmt;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong: what was found, what was wanted, where, and the cure.
///
/// The kinds are not public, so that they can grow; ask with the `is_*` methods instead.
///
/// ```
/// use accelerate::Error;
///
/// fn parse(text: &str) -> accelerate::Result<f64> {
///     text.parse().map_err(Error::other)
/// }
/// let error = parse("one").unwrap_err().context("row 3 of train.csv");
/// assert_eq!(error.to_string(), "row 3 of train.csv: invalid float literal");
/// ```
pub struct Error(Box<Kind>);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error(transparent)]
    Core(accelerate_core::Error),
    #[error(transparent)]
    Torch(torch_ext::Error),
    #[error(transparent)]
    Tensor(tch::TchError),
    #[error(transparent)]
    BigModel(BigModelError),
    #[error(transparent)]
    Checkpoint(CheckpointError),
    #[error(transparent)]
    Collective(CollectiveError),
    #[error(transparent)]
    Data(DataError),
    #[error(transparent)]
    Fp8(Fp8Error),
    #[error(transparent)]
    Launcher(LauncherError),
    #[error(transparent)]
    Lora(LoraError),
    #[error(transparent)]
    Memory(MemoryError),
    #[error(transparent)]
    Nn(NnError),
    #[error(transparent)]
    Offload(OffloadError),
    #[error(transparent)]
    Optim(OptimError),
    #[error(transparent)]
    Profile(ProfileError),
    #[error(transparent)]
    Reader(ReaderError),
    #[error(transparent)]
    State(StateError),
    #[error(transparent)]
    Tracking(TrackingError),
    #[error(transparent)]
    Weights(WeightsError),
    #[error("{context}: {source}")]
    Context { context: String, source: Error },
    #[error("{0}")]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps an error of the user's own, for use inside datasets, models and hooks.
    ///
    /// ```
    /// let error = accelerate::Error::other("the label column is empty");
    /// assert_eq!(error.to_string(), "the label column is empty");
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Box::new(Kind::Other(error.into())))
    }

    /// Says what was being done when the error arose; shown in front of it.
    #[must_use]
    pub fn context(self, context: impl Into<String>) -> Self {
        Self(Box::new(Kind::Context { context: context.into(), source: self }))
    }

    pub(crate) fn kind(&self) -> &Kind {
        match &*self.0 {
            Kind::Context { source, .. } => source.kind(),
            // What failed inside of a backward pass comes back through libtorch.
            Kind::Torch(error) if error.is_callback() => own_cause(error).map_or(&self.0, Self::kind),
            kind => kind,
        }
    }

    /// A deadline passed: a peer is missing, stuck, or slower than the timeout allows.
    pub fn is_timeout(&self) -> bool {
        match self.kind() {
            Kind::Torch(error) => error.is_timeout(),
            Kind::Collective(error) => error.is_timeout(),
            Kind::State(error) => error.is_timeout(),
            _ => false,
        }
    }

    /// Another process of the job died or went away.
    pub fn is_peer_failure(&self) -> bool {
        match self.kind() {
            Kind::Torch(error) => error.is_connection(),
            Kind::Collective(error) => error.is_peer_failure(),
            Kind::State(error) => error.is_peer_failure(),
            _ => false,
        }
    }

    /// Memory ran out, on the device or on the CPU: libtorch's words for it stand somewhere in the chain of causes
    /// (`should_reduce_batch_size` of the reference, `utils/memory.py`).
    ///
    /// ```
    /// let error = accelerate::Error::other("CUDA out of memory. Tried to allocate 20.00 MiB");
    /// assert!(error.context("layer 3").is_out_of_memory());
    /// ```
    pub fn is_out_of_memory(&self) -> bool {
        let mut cause: Option<&dyn std::error::Error> = Some(self);
        while let Some(error) = cause {
            if says_out_of_memory(&error.to_string()) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// Settings contradict each other or cannot be honoured.
    pub fn is_config(&self) -> bool {
        match self.kind() {
            Kind::Core(_) | Kind::State(_) => true,
            Kind::Fp8(error) => error.is_config(),
            Kind::Lora(error) => error.is_config(),
            Kind::Profile(error) => error.is_config(),
            Kind::Collective(CollectiveError::SharedGpu { .. }) => true,
            Kind::Collective(error) => error.is_elsewhere(ElsewhereKind::Config),
            _ => false,
        }
    }

    /// A function could not be launched in processes of its own, or failed in one.
    pub fn is_launcher(&self) -> bool {
        matches!(self.kind(), Kind::Launcher(_))
    }

    /// The rank of the process that failed first, among those that [`notebook_launcher`](crate::notebook_launcher) or
    /// [`debug_launcher`](crate::debug_launcher) had started.
    pub fn failed_rank(&self) -> Option<usize> {
        match self.kind() {
            Kind::Launcher(error) => error.failed_rank(),
            _ => None,
        }
    }

    /// Data could not be read or does not have the promised form.
    pub fn is_data(&self) -> bool {
        match self.kind() {
            Kind::Core(error) => error.is_data(),
            Kind::Collective(error) => error.is_elsewhere(ElsewhereKind::Data),
            kind => matches!(kind, Kind::Data(_) | Kind::Reader(_)),
        }
    }

    /// The state of a run cannot be saved, or there is none to go on from.
    pub fn is_checkpoint(&self) -> bool {
        match self.kind() {
            Kind::Checkpoint(_) => true,
            Kind::Collective(error) => error.is_elsewhere(ElsewhereKind::Checkpoint),
            _ => false,
        }
    }

    /// A model cannot be spread over devices and a disk as its map says, or what it keeps there cannot be used.
    pub fn is_big_model(&self) -> bool {
        matches!(self.kind(), Kind::BigModel(_))
    }

    /// A tracker cannot be used as it was asked to be, or cannot write what it was given. What was logged before is not touched by it.
    pub fn is_tracking(&self) -> bool {
        matches!(self.kind(), Kind::Tracking(_))
    }

    /// Weights on disk are missing, damaged, or do not fit the model.
    pub fn is_weights(&self) -> bool {
        match self.kind() {
            Kind::Weights(_) => true,
            Kind::Lora(error) => error.is_weights(),
            Kind::Collective(error) => error.is_elsewhere(ElsewhereKind::Weights),
            _ => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The message and its causes in sentences, because that is what a `main` that returns this error shows, and `unwrap`. The
/// alternate form, `{:#?}`, shows the parts.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return fmt::Debug::fmt(&self.0, f);
        }
        let mut shown = self.to_string();
        f.write_str(&shown)?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let text = error.to_string();
            // Many messages end with their cause.
            if !shown.contains(&text) {
                write!(f, "\n  caused by: {text}")?;
            }
            shown = text;
            cause = error.source();
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            // `Context` and `Other` print their cause themselves; what follows is the cause's own cause.
            Kind::Context { source, .. } => source.source(),
            Kind::Other(error) => error.source(),
            kind => std::error::Error::source(kind),
        }
    }
}

macro_rules! from_kind {
    ($($variant:ident($type:ty)),* $(,)?) => {$(
        impl From<$type> for Error {
            #[cold]
            fn from(error: $type) -> Self {
                Self(Box::new(Kind::$variant(error)))
            }
        }
    )*};
}

from_kind! {
    Core(accelerate_core::Error),
    Torch(torch_ext::Error),
    BigModel(BigModelError),
    Checkpoint(CheckpointError),
    Collective(CollectiveError),
    Data(DataError),
    Fp8(Fp8Error),
    Launcher(LauncherError),
    Lora(LoraError),
    Memory(MemoryError),
    Nn(NnError),
    Offload(OffloadError),
    Optim(OptimError),
    Profile(ProfileError),
    Reader(ReaderError),
    State(StateError),
    Tracking(TrackingError),
    Weights(WeightsError),
}

impl From<tch::TchError> for Error {
    #[cold]
    fn from(error: tch::TchError) -> Self {
        Self(Box::new(Kind::Tensor(without_frames(error))))
    }
}

/// libtorch's message up to the list of its own functions on the stack, which would hide what it says.
pub(crate) fn without_frames(error: tch::TchError) -> tch::TchError {
    match error {
        tch::TchError::Torch(text) => {
            let message = text.split("\nException raised from ").next().unwrap_or(&text);
            tch::TchError::Torch(message.trim_end().to_owned())
        }
        other => other,
    }
}

/// The first of this crate's own errors among the causes.
fn own_cause(error: &torch_ext::Error) -> Option<&Error> {
    let mut cause = std::error::Error::source(error);
    while let Some(found) = cause {
        if let Some(own) = found.downcast_ref::<Error>() {
            return Some(own);
        }
        cause = found.source();
    }
    None
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a message")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_an_error_shows_sentences() {
        let shown = format!("{:?}", Error::from(DataError::MustBePositive { setting: "batch_size", found: 0 }));
        assert_eq!(shown, "batch_size is 0, but must be at least 1");
        let cause = || std::io::Error::other("the disk is full");
        let error = WeightsError::Io { action: "write", path: "weights".into(), source: cause() };
        assert_eq!(format!("{:?}", Error::from(error)).matches("the disk is full").count(), 1);
        let refused = accelerate_rendezvous::Error::Connection { server: "node0:1".into(), source: cause() };
        let shown = format!("{:?}", Error::from(StateError::Rendezvous { source: refused }));
        assert!(shown.starts_with("the ranks cannot meet\n  caused by: the connection to node0:1"), "{shown}");
        assert!(shown.ends_with("\n  caused by: the disk is full"), "{shown}");
        assert!(format!("{:#?}", Error::from(StateError::NestedJoin)).contains("NestedJoin"));
    }

    #[test]
    fn messages_of_libtorch_end_before_its_stack() {
        let error = tch::Tensor::from(1f32).f_matmul(&tch::Tensor::from(1f32)).unwrap_err();
        assert!(error.to_string().contains("frame #"), "{error}");
        let text = Error::from(error).to_string();
        assert!(text.contains("at least 1D") && text.lines().count() == 1, "{text}");
    }
}
