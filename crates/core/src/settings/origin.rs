//! Where a value came from.

use super::Setting;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

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
    /// A line of a configuration file, counted from 1; 0 where no line is known.
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
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
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
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
