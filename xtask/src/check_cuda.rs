//! `cargo xtask check-cuda`: type-checks what the `cuda` feature adds, on a machine without CUDA.
//!
//! Only headers are needed for that. They are taken out of the registry's packages and kept in the
//! user's cache folder; the packages themselves, with their libraries, are not kept.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::{libtorch, paths, process};

/// Type-check the `cuda` feature against header packages; needs no CUDA toolkit.
///
/// Downloads NVIDIA's header packages (about 0.2 GB) on first use and keeps their headers in the user's cache folder.
/// Compiles the C++ side and checks the Rust side; links nothing and runs nothing on a GPU.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

/// The packages whose headers `c10d`'s NCCL backend includes, of the CUDA that libtorch 2.11.0 was built with.
const PACKAGES: [&str; 4] =
    ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*", "nvidia-nccl-cu13==2.28.9"];

pub(crate) fn run(_: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let headers = header_folders()?;
    for package in ["torch-ext", "accelerate-rs"] {
        let mut check = process::cargo(&["clippy", "--package", package, "--features", "cuda", "--", "-D", "warnings"]);
        process::run(check.env("ACCELERATE_CUDA_INCLUDE", &headers))?;
    }
    println!("check-cuda: the `cuda` feature compiles");
    Ok(())
}

/// What `ACCELERATE_CUDA_INCLUDE` has to be; the headers are fetched if they are not there.
pub(crate) fn header_folders() -> Result<OsString> {
    include_path(&ensure_headers()?)
}

/// The folder with the headers, filled if it is not there.
fn ensure_headers() -> Result<PathBuf> {
    let cache = paths::cache_folder()?;
    let folder = cache.join("cuda-headers-13.0");
    if folder.is_dir() {
        return Ok(folder);
    }
    let python = libtorch::python()?;
    libtorch::require_pip(&python)?;
    fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
    let _lock = libtorch::lock(&folder.with_added_extension("lock"))?;
    // Another run may have filled it while this one waited.
    if folder.is_dir() {
        return Ok(folder);
    }
    let wheels = folder.with_added_extension("wheels");
    let mut download = Command::new(&python);
    download.args(["-m", "pip", "download", "--no-deps", "--dest"]).arg(&wheels).args(PACKAGES);
    process::run(&mut download)?;
    let fresh = folder.with_added_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    take_headers(&python, &wheels, &fresh)?;
    fs::rename(&fresh, &folder).with_context(|| format!("could not create {}", folder.display()))?;
    fs::remove_dir_all(&wheels).with_context(|| format!("could not remove {}", wheels.display()))?;
    Ok(folder)
}

/// A wheel is a zip archive, which Python reads without further packages.
fn take_headers(python: &Path, wheels: &Path, folder: &Path) -> Result<()> {
    const TAKE: &str = "import pathlib, sys, zipfile\n\
         for wheel in pathlib.Path(sys.argv[1]).glob('*.whl'):\n\
         \x20   with zipfile.ZipFile(wheel) as archive:\n\
         \x20       names = [name for name in archive.namelist() if '/include/' in name]\n\
         \x20       archive.extractall(sys.argv[2], names)\n";
    process::read(Command::new(python).args(["-c", TAKE]).arg(wheels).arg(folder)).map(drop)
}

/// Every folder named `include` below `folder`, and CUDA's own library of C++ headers within.
fn include_path(folder: &Path) -> Result<OsString> {
    let mut folders = Vec::new();
    for place in ["nvidia/cu13/include", "nvidia/cu13/include/cccl", "nvidia/nccl/include"] {
        let include = folder.join(place);
        anyhow::ensure!(
            include.is_dir(),
            "the header packages have no folder `{place}`; delete `{}` and run this again",
            folder.display()
        );
        folders.push(include);
    }
    Ok(std::env::join_paths(folders)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn all_header_folders_are_on_the_path_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for place in ["nvidia/cu13/include/cccl", "nvidia/nccl/include"] {
            fs::create_dir_all(folder.path().join(place)).unwrap();
        }
        assert_eq!(std::env::split_paths(&include_path(folder.path()).unwrap()).count(), 3);
        fs::remove_dir_all(folder.path().join("nvidia/nccl")).unwrap();
        let message = include_path(folder.path()).unwrap_err().to_string();
        assert!(message.contains("nvidia/nccl/include") && message.contains("delete"), "{message}");
    }
}
