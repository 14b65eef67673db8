//! `cargo xtask soak notebook`: the notebook among the examples, in Rust's kernel for Jupyter.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{libtorch, paths, process};

/// The kernel that the notebook is written for.
const EVCXR: &str = "0.22.0";
/// Runs notebooks without a browser.
const NBCLIENT: &str = "nbclient==0.11.0";

pub(super) fn run() -> Result<()> {
    libtorch::ensure()?;
    let python = libtorch::python()?;
    let (kernel, packages) = (ensure_kernel()?, ensure_client(&python)?);
    let mut test = process::cargo(&["test", "--workspace", "--test", "notebook", "--", "--nocapture"]);
    test.env("ACCELERATE_TEST_EVCXR", kernel).env("ACCELERATE_TEST_NBCLIENT", python).env("PYTHONPATH", packages);
    process::run(&mut test)
}

/// The kernel's program, compiled if it is not there.
fn ensure_kernel() -> Result<PathBuf> {
    let folder = paths::cache_folder()?.join(format!("evcxr-{EVCXR}"));
    let program = folder.join("bin/evcxr_jupyter");
    if !program.is_file() {
        let mut install = process::cargo(&["install", "--locked", "--version", EVCXR, "evcxr_jupyter", "--root"]);
        process::run(install.arg(&folder))?;
    }
    Ok(program)
}

/// The folder with nbclient and what it needs. It gets its name when all of it is there.
fn ensure_client(python: &Path) -> Result<PathBuf> {
    let tag = process::read(Command::new(python).args(["-c", "import sys; print(sys.implementation.cache_tag)"]))?;
    let folder = paths::cache_folder()?.join(format!("{}-{}", tag.trim(), NBCLIENT.replace("==", "-")));
    if !folder.is_dir() {
        libtorch::require_pip(python)?;
        let partial = folder.with_added_extension("new");
        if partial.exists() {
            std::fs::remove_dir_all(&partial).with_context(|| format!("could not remove {}", partial.display()))?;
        }
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "install", "--quiet", "--target"]).arg(&partial).arg(NBCLIENT);
        process::run(&mut pip)?;
        std::fs::rename(&partial, &folder).with_context(|| format!("could not make {}", folder.display()))?;
    }
    Ok(folder)
}
