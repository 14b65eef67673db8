//! Debian packages that are unpacked into the cache folder and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{paths, process};

/// The folder with these packages in it. It gets its name when all of them are there.
pub(super) fn ensure(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = paths::cache_folder()?.join(name);
    if folder.is_dir() {
        return Ok(folder);
    }
    let partial = folder.with_extension("partial");
    if partial.is_dir() {
        fs::remove_dir_all(&partial).with_context(|| format!("could not remove {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("could not make {}", partial.display()))?;
    let mut download = Command::new("apt-get");
    download.arg("download").args(packages).current_dir(&partial);
    process::run(&mut download).context("the packages are those of Debian 12, which `apt-get download` brings")?;
    for package in downloaded(&partial, packages.len())? {
        process::run(Command::new("dpkg").arg("-x").arg(&package).arg(&partial))?;
        fs::remove_file(&package).with_context(|| format!("could not remove {}", package.display()))?;
    }
    fs::rename(&partial, &folder).with_context(|| format!("could not make {}", folder.display()))?;
    Ok(folder)
}

fn downloaded(folder: &Path, count: usize) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))?;
    let paths: Vec<_> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<_>>()?;
    let found: Vec<_> = paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "deb")).collect();
    match found.len() == count {
        true => Ok(found),
        false => bail!("apt-get has brought {} packages of {count}", found.len()),
    }
}
