//! What can go wrong while libtorch is looked for, installed and made known to a project. Each text ends with the cure.

use std::io;
use std::path::{Path, PathBuf};

use accelerate_core::files::ShownPath;

use super::VERSION;

/// The command that installs libtorch, as users know it.
const SETUP: &str = "`accelerate setup` (in a clone of the project `cargo xtask setup`)";

/// Why there is no usable libtorch, or why a project could not be told of it. The text ends with the cure.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(#[from] SetupError);

/// Result within this crate.
pub(crate) type Result<T> = std::result::Result<T, SetupError>;

/// The kinds of [`Error`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    #[error(
        "{who} `{}`, which is libtorch {found}; this project is built for exactly libtorch {VERSION}. \
         Set LIBTORCH to a libtorch {VERSION}, or unset LIBTORCH and run {SETUP}, which installs it",
        folder.shown()
    )]
    WrongVersion { who: &'static str, folder: PathBuf, found: String },

    #[error(
        "{who} `{}`, where there is {found}. \
         Set LIBTORCH to the folder of libtorch {VERSION} that holds `include` and `lib`, \
         or unset LIBTORCH and run {SETUP}, which installs it",
        folder.shown()
    )]
    NoFolder { who: &'static str, folder: PathBuf, found: &'static str },

    #[error(
        "{who} `{}`, which is not a libtorch: it has no `{missing}`. \
         Set LIBTORCH to the folder of libtorch {VERSION} that holds `include` and `lib`, \
         or unset LIBTORCH and run {SETUP}, which installs it",
        folder.shown()
    )]
    NotLibtorch { who: &'static str, folder: PathBuf, missing: String },

    #[error(
        "`{}` is a link or a file, which `accelerate setup` has not made. Remove it, or let LIBTORCH name your libtorch",
        path.shown()
    )]
    NotOurs { path: PathBuf },

    #[error(
        "libtorch {VERSION} is not installed, and no Python was found to install it with \
         (looked for `python3` and `python`). Install Python 3 with pip, or set LIBTORCH to the folder of \
         libtorch {VERSION}"
    )]
    NoPython,

    #[error(
        "libtorch {VERSION} is not installed, and `{}` has no pip to install it with. \
         Run `{} -m ensurepip --user` or install your system's package for pip, or set LIBTORCH to the folder of \
         libtorch {VERSION}",
        python.shown(), python.shown()
    )]
    NoPip { python: PathBuf },

    #[error(
        "libtorch {VERSION} can be installed by this command on Linux x86-64 only, and this is {system}. \
         Install torch {VERSION} into the active Python (`pip install torch=={VERSION}`), or set LIBTORCH to the \
         folder of libtorch {VERSION}, then run {SETUP} again"
    )]
    UnsupportedSystem { system: String },

    #[error(
        "pip could not {action} ({status}). What it said last:\n{last_lines}\n\
         Run {SETUP} again: what was downloaded is kept. Or set LIBTORCH to the folder of libtorch {VERSION}"
    )]
    Pip { action: String, status: String, last_lines: String },

    #[error(
        "the installed libtorch is damaged: `{}` {problem}. \
         Delete the folder `{}` and run {SETUP} again",
        file.shown(), home.shown()
    )]
    Damaged { home: PathBuf, file: PathBuf, problem: String },

    #[error(
        "no folder to install libtorch into: no home folder is known; set HOME or XDG_CACHE_HOME to a folder that you can \
         write to"
    )]
    NoCacheFolder,

    #[error(
        "the project's cargo configuration `{}` cannot be read as one: {problem}. Mend it, or move it away, and run \
         `accelerate setup` again",
        path.shown()
    )]
    CargoConfig { path: PathBuf, problem: String },

    /// A program did not answer: its error says which, why, and the cure.
    #[error(transparent)]
    Question(#[from] accelerate_launch::Error),

    #[error("could not {action} `{}`", path.shown())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl SetupError {
    /// A file operation that failed.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> SetupError {
        SetupError::Io { action, path: path.to_path_buf(), source }
    }
}
