//! Configuration files: which one is meant, how it is read, and how it is written without ever being half there.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use accelerate_core::config::{Lookup, default_config_files};
use accelerate_core::files::{ShownPath, other_than_file};
use accelerate_core::settings::{read_file, shortened};

/// The file that a command takes settings from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    /// Nobody has named it: it is there.
    pub(crate) is_default: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigFileError {
    #[error(
        "there is no configuration file {}; name one that exists, or write it with `accelerate config default \
         --config_file FILE`",
        shortened(&path.shown())
    )]
    Missing { path: PathBuf },
    #[error("the configuration file {} cannot be read: {cause}", shortened(&path.shown()))]
    Read { path: PathBuf, cause: io::Error },
    #[error(
        "there is no default configuration file ({places}); name a file, or write the default one with \
         `accelerate config default`"
    )]
    NoDefault { places: String },
    #[error(
        "the default configuration file has no place, because none of HF_HOME, XDG_CACHE_HOME and HOME is set; name a \
         file with --config_file"
    )]
    NoPlace,
    #[error("{} exists already, and stays as it is; {cure}", path.shown())]
    Exists { path: PathBuf, cure: &'static str },
    #[error("{} is {found}, and a configuration is written to a regular file only; name another one", path.shown())]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{} cannot be written: {cause}", path.shown())]
    Write { path: PathBuf, cause: io::Error },
}

/// The value of a variable of this process.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The file that is named, else the default one if it exists.
pub(crate) fn find(named: Option<&Path>, lookup: Lookup<'_>) -> Option<Found> {
    if let Some(path) = named {
        return Some(Found { path: path.to_owned(), is_default: false });
    }
    // A folder that may not be looked into has nothing for this user. A link to nowhere is somebody's mistake, and told.
    let path = default_config_files(lookup)?.into_iter().find(|path| path.symlink_metadata().is_ok())?;
    Some(Found { path, is_default: true })
}

/// The same for a command that cannot do without.
pub(crate) fn find_existing(named: Option<&Path>, lookup: Lookup<'_>) -> Result<Found, ConfigFileError> {
    find(named, lookup).ok_or_else(|| match default_config_files(lookup) {
        Some([first, _]) => ConfigFileError::NoDefault { places: first.shown() },
        None => ConfigFileError::NoPlace,
    })
}

/// Where a file is written that nobody has named.
pub(crate) fn default_path(lookup: Lookup<'_>) -> Result<PathBuf, ConfigFileError> {
    let [path, _] = default_config_files(lookup).ok_or(ConfigFileError::NoPlace)?;
    Ok(path)
}

pub(crate) fn read(path: &Path) -> Result<String, ConfigFileError> {
    read_file(path).map_err(|cause| match cause.kind() {
        // A link that leads nowhere is there.
        io::ErrorKind::NotFound if path.symlink_metadata().is_err() => {
            ConfigFileError::Missing { path: path.to_owned() }
        }
        _ => ConfigFileError::Read { path: path.to_owned(), cause },
    })
}

/// What happens to a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// It gives way.
    Replace,
    /// It stays, and that is an error with this cure.
    Keep(&'static str),
}

/// Writes the whole file or nothing. Folders are made.
pub(crate) fn write(path: &Path, text: &str, existing: Existing) -> Result<(), ConfigFileError> {
    let failed = |cause| ConfigFileError::Write { path: path.to_owned(), cause };
    // Of a link, the file that it leads to is replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let metadata = fs::metadata(&target).ok();
    if let Some(found) = metadata.as_ref().and_then(|metadata| other_than_file(metadata.file_type())) {
        return Err(ConfigFileError::NotAFile { path: path.to_owned(), found });
    }
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder).map_err(failed)?;
    // As others who create files do, it leaves the rest to the umask.
    let permissions = metadata.map_or_else(|| Permissions::from_mode(0o666), |metadata| metadata.permissions());
    let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
    match existing {
        Existing::Replace => file.persist(&target).map(drop).map_err(|error| failed(error.error)),
        Existing::Keep(cure) => file.persist_noclobber(&target).map(drop).map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => ConfigFileError::Exists { path: path.to_owned(), cure },
            _ => failed(error.error),
        }),
    }
}
