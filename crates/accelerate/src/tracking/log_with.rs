//! Which trackers an accelerator has.

use super::{GeneralTracker, JsonLinesTracker, LoggerType, TensorBoardTracker, TrackerHandle};
use crate::error::Result;
use accelerate_core::tracking::{check_logging_dir, check_names, filter_trackers};

/// Names of built-in trackers and trackers of the program's own, in any mixture. It is made from what one would write:
///
/// ```
/// use accelerate::tracking::{LogWith, LoggerType, TensorBoardTracker};
///
/// let one: LogWith = "tensorboard".into();
/// let several: LogWith = ["tensorboard", "jsonl"].into();
/// let typed: LogWith = LoggerType::All.into();
/// let own: LogWith = TensorBoardTracker::default().into();
/// ```
#[derive(Clone, Debug, Default)]
pub struct LogWith(Vec<Entry>);

#[derive(Clone, Debug)]
enum Entry {
    Name(String),
    Own(TrackerHandle),
}

impl From<&str> for LogWith {
    fn from(name: &str) -> Self {
        Self(vec![Entry::Name(name.to_owned())])
    }
}

impl From<String> for LogWith {
    fn from(name: String) -> Self {
        Self(vec![Entry::Name(name)])
    }
}

impl From<LoggerType> for LogWith {
    fn from(name: LoggerType) -> Self {
        name.as_str().into()
    }
}

impl<T: Into<LogWith>> From<Vec<T>> for LogWith {
    fn from(trackers: Vec<T>) -> Self {
        Self(trackers.into_iter().flat_map(|tracker| tracker.into().0).collect())
    }
}

impl<T: Into<LogWith>, const N: usize> From<[T; N]> for LogWith {
    fn from(trackers: [T; N]) -> Self {
        Vec::from(trackers).into()
    }
}

impl<T: Into<LogWith>> From<Option<T>> for LogWith {
    fn from(tracker: Option<T>) -> Self {
        tracker.map_or_else(Self::default, Into::into)
    }
}

impl<T: GeneralTracker> From<T> for LogWith {
    fn from(tracker: T) -> Self {
        Self(vec![Entry::Own(TrackerHandle::new(tracker))])
    }
}

/// A tracker that will be started.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    BuiltIn(LoggerType),
    Own(TrackerHandle),
}

impl Wanted {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::BuiltIn(name) => name.as_str(),
            Self::Own(handle) => handle.name(),
        }
    }

    pub(super) fn is_called(&self, is_main_process: bool) -> bool {
        match self {
            Self::BuiltIn(_) => is_main_process,
            Self::Own(handle) => handle.is_called(is_main_process),
        }
    }

    pub(super) fn handle(&self) -> TrackerHandle {
        match self {
            Self::BuiltIn(LoggerType::Jsonl) => TrackerHandle::new(JsonLinesTracker::default()),
            // The other one of `BUILT_IN`; what is not built in does not become `Wanted`.
            Self::BuiltIn(_) => TrackerHandle::new(TensorBoardTracker::default()),
            Self::Own(handle) => handle.clone(),
        }
    }
}

impl LogWith {
    pub(crate) fn add(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Trackers in the order in which they were given; built-in ones once.
    pub(crate) fn resolve(self, has_logging_dir: bool) -> Result<Vec<Wanted>> {
        let mut wanted: Vec<Wanted> = Vec::new();
        for entry in self.0 {
            match entry {
                Entry::Name(name) => {
                    for name in filter_trackers(&[name.parse()?], has_logging_dir)? {
                        if !wanted.iter().any(|wanted| matches!(wanted, Wanted::BuiltIn(known) if *known == name)) {
                            wanted.push(Wanted::BuiltIn(name));
                        }
                    }
                }
                Entry::Own(handle) => {
                    check_logging_dir(handle.name(), handle.requires_logging_directory(), has_logging_dir)?;
                    wanted.push(Wanted::Own(handle));
                }
            }
        }
        check_names(wanted.iter().map(Wanted::name))?;
        Ok(wanted)
    }
}
