//! libtorch for this repository: found or installed by `accelerate-setup`, and linked at its root.

use std::path::PathBuf;

use accelerate_setup::{Libtorch, Result};

use crate::paths;

pub(crate) use accelerate_setup::{VERSION, lock, python, require_pip};

/// Finds or installs libtorch and links it as `.libtorch`. Does nothing when that is done already.
pub(crate) fn ensure() -> Result<Libtorch> {
    accelerate_setup::ensure(&paths::repository_root())
}

/// The folder that holds an importable `torch` package of the right version.
pub(crate) fn python_package_home() -> Result<PathBuf> {
    accelerate_setup::python_package_home(&paths::repository_root())
}
