//! Which libtorch this project is built against, and where it comes from.
//!
//! In this order: the folder that `LIBTORCH` names, the torch of an active Python, the user's cache folder (filled once,
//! by pip). Whatever is found is linked as `.libtorch` at the root of a project, and the project's `.cargo/config.toml`
//! points cargo there ([`write_cargo_config`]).
//!
//! Nothing here links libtorch: this is what finds it.

mod cargo_config;
mod check;
mod error;
mod install;
mod links;
mod locate;
mod needs;
mod progress;
mod project;

use std::fs::File;
use std::path::{Path, PathBuf};

pub use cargo_config::CargoConfig;
pub use error::Error;
pub use locate::{Libtorch, Origin};
pub use needs::{Needs, needs};
pub use project::project_root;

use error::SetupError;

/// The one libtorch version that tch 0.24 is written for. A tidy test of the workspace holds the two together.
pub const VERSION: &str = "2.11.0";

/// The folder of links at the root of a project.
pub const LINKS: &str = ".libtorch";

/// Result of looking for or installing libtorch.
pub type Result<T> = std::result::Result<T, Error>;

/// Finds or installs libtorch and links it as `.libtorch` in the folder `root`. Does nothing when that is done already.
///
/// # Errors
/// `LIBTORCH` names something else than a libtorch of this version; there is none and it cannot be installed; Python or pip
/// does not answer; a file cannot be written.
pub fn ensure(root: &Path) -> Result<Libtorch> {
    Ok(locate::ensure(root)?)
}

/// Finds or installs libtorch for no project in particular: nothing is linked.
///
/// # Errors
/// As [`ensure`].
pub fn ensure_installed() -> Result<Libtorch> {
    Ok(locate::ensure_installed()?)
}

/// Links `libtorch` as `.libtorch` in the folder `root`.
///
/// # Errors
/// A file cannot be written, or something that is not ours stands in its place.
pub fn link(root: &Path, libtorch: &Libtorch) -> Result<()> {
    Ok(links::write(root, &libtorch.folder)?)
}

/// The libtorch that a build in `folder` would use, or that [`ensure`] would take from the cache. Installs nothing, writes
/// nothing and starts nothing.
///
/// # Errors
/// `LIBTORCH`, or the cargo configuration of the project, names something else than a libtorch of this version; what is
/// in the cache is damaged.
pub fn find(folder: &Path) -> Result<Option<Libtorch>> {
    Ok(locate::find(folder)?)
}

/// Lets cargo find `.libtorch` in every build of the project at `root`; says which file does so, and what was done to it.
///
/// A folder that the file names already is left in force. The line is relative, so the file can be given to others.
///
/// # Errors
/// The file is not TOML, is no regular file, or cannot be read or written.
pub fn write_cargo_config(root: &Path) -> Result<(PathBuf, CargoConfig)> {
    Ok(cargo_config::write(root)?)
}

/// The folder that holds an importable `torch` package of the right version; installed into the
/// cache folder when the libtorch in use has no Python side.
///
/// # Errors
/// As [`ensure`].
pub fn python_package_home(root: &Path) -> Result<PathBuf> {
    Ok(locate::python_package_home(root)?)
}

/// The folder in which this project keeps what it downloads: `$XDG_CACHE_HOME/accelerate-rs`, or
/// `~/.cache/accelerate-rs`.
///
/// # Errors
/// Neither variable nor home folder is known.
pub fn cache_folder() -> Result<PathBuf> {
    Ok(locate::cache_folder()?)
}

/// The first of `python3` and `python` that runs and is Python 3.
///
/// # Errors
/// There is none, or one does not answer.
pub fn python() -> Result<PathBuf> {
    Ok(install::find_python()?.ok_or(SetupError::NoPython)?)
}

/// Fails where `python -m pip` does not work.
///
/// # Errors
/// There is no pip, or it does not answer.
pub fn require_pip(python: &Path) -> Result<()> {
    Ok(install::require_pip(python)?)
}

/// Waits until no other run installs. The lock ends with the process, however it ends.
///
/// # Errors
/// The file cannot be made or locked.
pub fn lock(path: &Path) -> Result<File> {
    Ok(install::lock(path)?)
}
