//! The files that the output of ranks is written to beside the terminal, with the names that torchrun gives them.

use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::config::LaunchConfig;
use crate::error::{Error, Result, TEMPORARY};
use crate::report::Stream;

/// The files of one rank. `None`: that stream has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFiles {
    /// Of standard output.
    pub stdout: Option<PathBuf>,
    /// Of standard error.
    pub stderr: Option<PathBuf>,
}

impl LogFiles {
    /// In the launch's own folder, `config.log_dir`.
    pub(crate) fn of_rank(config: &LaunchConfig, local_rank: usize) -> Self {
        let streams = config.tee.of(local_rank);
        let file = |name: &str| Some(rank_folder(config, local_rank)?.join(name));
        Self {
            stdout: file("stdout.log").filter(|_| streams.stdout),
            stderr: file("stderr.log").filter(|_| streams.stderr),
        }
    }
}

/// Where a program that knows torchrun's way of telling errors writes its own.
pub(crate) fn error_file(config: &LaunchConfig, local_rank: usize) -> Option<PathBuf> {
    Some(rank_folder(config, local_rank)?.join("error.json"))
}

/// Each attempt has a folder of its own, as under torchrun.
fn rank_folder(config: &LaunchConfig, local_rank: usize) -> Option<PathBuf> {
    let attempt = format!("attempt_{}", config.restart_count);
    Some(config.log_dir.as_ref()?.join(attempt).join(local_rank.to_string()))
}

/// What the folder of a launch is called where nobody says it. The name is torchrun's: the run's id, which is "none", and something
/// random.
pub(crate) fn new_name() -> String {
    format!("none_{:08x}", RandomState::new().build_hasher().finish() as u32)
}

/// The launch's own folder below that of `config`, made with those of its ranks; `None` if nothing is to be written.
pub(crate) fn make_folder(config: &LaunchConfig) -> Result<Option<PathBuf>> {
    let name = config.log_name.clone().unwrap_or_else(new_name);
    let base = match &config.log_dir {
        Some(folder) => folder.clone(),
        None if config.tee.any() => private_folder(&name)?,
        None => return Ok(None),
    };
    let unwritable = |path: &Path, source| match config.log_dir {
        Some(_) => Error::log_unwritable(path, source),
        None => Error::temporary_unwritable(path, source),
    };
    // Ranks may go to another folder before they write.
    let base = std::path::absolute(&base).map_err(|source| unwritable(&base, source))?;
    let own = base.join(name);
    let own_config = LaunchConfig { log_dir: Some(own.clone()), ..config.clone() };
    for folder in (0..config.num_local_processes()).filter_map(|local_rank| rank_folder(&own_config, local_rank)) {
        fs::create_dir_all(&folder).map_err(|source| unwritable(&folder, source))?;
    }
    Ok(Some(own))
}

/// Where temporary files are: the folder of `TMPDIR`, and `/tmp` where that is not set or empty. (The standard library takes an empty
/// one for the working folder.)
///
/// ```
/// assert!(accelerate_launch::temporary_folder().is_absolute() || std::env::var_os("TMPDIR").is_some());
/// ```
pub fn temporary_folder() -> PathBuf {
    let said = std::env::var_os(TEMPORARY).filter(|folder| !folder.is_empty());
    said.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

/// A folder for temporary files that only this user can read: a new one, or that of an earlier attempt.
fn private_folder(name: &str) -> Result<PathBuf> {
    let folder = temporary_folder().join(format!("accelerate_{name}"));
    let made = match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_private(&folder) => Ok(()),
        made => made,
    };
    made.map_err(|source| Error::temporary_unwritable(&folder, source))?;
    Ok(folder)
}

/// Anybody may have made a folder among temporary files.
fn is_private(folder: &Path) -> bool {
    let is_own = |found: fs::Metadata| {
        found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode().trailing_zeros() >= 6
    };
    fs::symlink_metadata(folder).is_ok_and(is_own)
}

/// A file, or a device, that does not keep its writer waiting, as a pipe would: programs of an earlier attempt may have left anything
/// there.
fn create(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().write(true).create(true).truncate(true).custom_flags(flags.bits() as i32).open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        false => Ok(file),
        true => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe, not a file")),
    }
}

/// The open files of one rank.
#[derive(Debug, Default)]
pub(crate) struct OpenLogs([Option<(PathBuf, File)>; 2]);

impl OpenLogs {
    pub(crate) fn open(files: &LogFiles) -> Result<Self> {
        let open = |path: &Option<PathBuf>| match path {
            Some(path) => match create(path) {
                Ok(file) => Ok(Some((path.clone(), file))),
                Err(source) => Err(Error::log_unwritable(path, source)),
            },
            None => Ok(None),
        };
        Ok(Self([open(&files.stdout)?, open(&files.stderr)?]))
    }

    /// Writes what the rank has written. Says which file could not take it; the next piece is tried again, because a full disk
    /// may be freed.
    pub(crate) fn write(&mut self, stream: Stream, bytes: &[u8]) -> Result<(), (&Path, io::Error)> {
        match &mut self.0[stream as usize] {
            Some((path, file)) => file.write_all(bytes).map_err(|error| (path.as_path(), error)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, mkfifoat};

    #[test]
    fn a_pipe_in_the_place_of_a_log_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stdout.log");
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        // Nobody reads it, or somebody does.
        assert!(OpenLogs::open(&LogFiles { stdout: Some(path.clone()), stderr: None }).is_err());
        let _reader = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&path).unwrap();
        let error = OpenLogs::open(&LogFiles { stdout: Some(path), stderr: None }).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("it is a pipe"), "{source}");
    }
}
