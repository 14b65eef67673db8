//! Where a value came from.

use super::Setting;
use crate::files::ShownPath;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A place in a file, shown as `line:column`, which editors and terminals make a link of.
///
/// ```
/// use accelerate_core::settings::Position;
/// assert_eq!(Position { line: 3, column: 5 }.to_string(), "3:5");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The line, counted from 1.
    pub line: usize,
    /// The character in the line, counted from 1.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// Where the value of a setting came from; what goes before what is the order of the variants.
///
/// ```
/// use accelerate_core::settings::Origin;
/// assert!(Origin::Code < Origin::Flag("--debug".into()));
/// assert_eq!(Origin::Environment("FSDP_VERSION".into()).to_string(), "environment variable FSDP_VERSION");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The program says it.
    Code,
    /// A flag of the launcher, as it is spelled in help texts.
    Flag(String),
    /// A variable of this name.
    Environment(String),
    /// A key of a configuration file.
    File {
        /// The file.
        path: PathBuf,
        /// Where the key begins; `None` where that is not known.
        position: Option<Position>,
    },
    /// Another setting decided it, such as a DeepSpeed configuration.
    Derived(&'static str),
    /// Nobody said anything.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code => f.write_str("code"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::File { path, position: None } => write!(f, "{}", path.shown()),
            Self::File { path, position: Some(position) } => write!(f, "{}:{position}", path.shown()),
            Self::Derived(from) => f.write_str(from),
            Self::Default => f.write_str("default"),
        }
    }
}

/// The origins of a run's values, by [`Setting::path`]. What is not in it has its default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<&'static str, Origin>);

impl Origins {
    /// Where the value of the setting with this path came from.
    pub fn get(&self, path: &str) -> &Origin {
        self.0.get(path).unwrap_or(&Origin::Default)
    }

    /// Notes where the value of `setting` came from.
    pub(crate) fn set(&mut self, setting: &Setting, origin: Origin) {
        self.0.insert(setting.path, origin);
    }

    /// What is said of `setting` does not count, so its default holds.
    pub(crate) fn forget(&mut self, setting: &Setting) {
        self.forget_path(setting.path);
    }

    /// The same by path.
    pub(crate) fn forget_path(&mut self, path: &'static str) {
        self.0.remove(path);
    }

    /// The same as [`set`](Self::set), by path.
    pub(crate) fn set_path(&mut self, path: &'static str, origin: Origin) {
        self.0.insert(path, origin);
    }
}
