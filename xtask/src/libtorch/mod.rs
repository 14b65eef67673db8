//! Which libtorch this project is built against, and where it comes from.
//!
//! In this order: the folder that `LIBTORCH` names, the torch of an active Python, the user's cache
//! folder (filled once, by pip). Whatever is found is linked as `.libtorch` at the root of the
//! repository, and `.cargo/config.toml` points cargo there.

mod error;
mod install;
mod links;
mod progress;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use error::{Result, SetupError};
pub(crate) use install::{find_python, has_pip, lock};

use crate::paths;

/// The one libtorch version that tch 0.24 is written for. A tidy test holds the two together.
pub(crate) const VERSION: &str = "2.11.0";

/// Who provides a libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The environment variable `LIBTORCH`.
    Variable,
    /// The torch package of the Python on the search path.
    ActivePython,
    /// The user's cache folder, filled by this program.
    Cache,
    /// An earlier run: `.libtorch` is complete.
    Linked,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Origin::Variable => "from LIBTORCH",
            Origin::ActivePython => "from the active Python",
            Origin::Cache => "from the user's cache folder",
            Origin::Linked => "linked already",
        })
    }
}

/// A libtorch of the right version.
#[derive(Debug)]
pub(crate) struct Libtorch {
    /// The folder with `include` and `lib`.
    pub(crate) folder: PathBuf,
    /// Who provides it.
    pub(crate) origin: Origin,
}

/// Finds or installs libtorch and links it as `.libtorch`. Does nothing when that is done already.
pub(crate) fn ensure() -> Result<Libtorch> {
    let root = paths::repository_root();
    let asked_for = variable(&root);
    if asked_for.is_none()
        && let Some(folder) = links::current_target(&root)
    {
        return Ok(Libtorch { folder, origin: Origin::Linked });
    }
    let found = match asked_for {
        Some(folder) => from_variable(&folder)?,
        None => match from_active_python()? {
            Some(found) => found,
            None => from_cache()?,
        },
    };
    links::write(&root, &found.folder)?;
    Ok(found)
}

/// The folder that holds an importable `torch` package of the right version; installed into the
/// cache folder when the libtorch in use has no Python side.
pub(crate) fn python_package_home() -> Result<PathBuf> {
    let found = ensure()?;
    let home = |folder: &Path| {
        let whole = folder.join("__init__.py").is_file();
        if whole { folder.parent().map(Path::to_path_buf) } else { None }
    };
    match home(&found.folder) {
        Some(home) => Ok(home),
        None => Ok(install::ensure(&cache_home()?)?.parent().map(Path::to_path_buf).unwrap_or_default()),
    }
}

/// `LIBTORCH`, unless it is the folder that `.cargo/config.toml` sets when the user set nothing.
fn variable(root: &Path) -> Option<PathBuf> {
    let folder = PathBuf::from(env::var_os("LIBTORCH").filter(|value| !value.is_empty())?);
    let is_ours = folder == root.join(".libtorch") || folder == Path::new(".libtorch");
    (!is_ours).then_some(folder)
}

fn from_variable(folder: &Path) -> Result<Libtorch> {
    check(folder, "LIBTORCH points at")?;
    let folder = fs::canonicalize(folder).map_err(|source| SetupError::io("resolve", folder, source))?;
    Ok(Libtorch { folder, origin: Origin::Variable })
}

/// The torch of the Python on the search path, found by its metadata: importing it takes seconds.
fn from_active_python() -> Result<Option<Libtorch>> {
    const QUESTION: &str = "import importlib.util as u, importlib.metadata as m\n\
         s = u.find_spec('torch')\n\
         print(m.version('torch') + '\\n' + s.submodule_search_locations[0] if s else '')";
    let Some(python) = find_python() else {
        return Ok(None);
    };
    let Ok(output) = Command::new(python).args(["-c", QUESTION]).output() else {
        return Ok(None);
    };
    let answer = String::from_utf8_lossy(&output.stdout);
    let mut lines = answer.lines();
    match (lines.next(), lines.next()) {
        (Some(version), Some(folder)) if base_version(version) == VERSION => {
            let folder = PathBuf::from(folder);
            // A torch without its headers cannot be built against; the cache can.
            Ok(check(&folder, "the active Python's torch is")
                .is_ok()
                .then_some(Libtorch { folder, origin: Origin::ActivePython }))
        }
        _ => Ok(None),
    }
}

fn from_cache() -> Result<Libtorch> {
    let folder = install::ensure(&cache_home()?)?;
    check(&folder, "the cache folder holds")?;
    Ok(Libtorch { folder, origin: Origin::Cache })
}

fn cache_home() -> Result<PathBuf> {
    let cache = paths::cache_folder().map_err(|source| SetupError::NoCacheFolder { reason: source.to_string() })?;
    Ok(cache.join(format!("libtorch-{VERSION}")))
}

/// Fails unless `folder` is a libtorch of the right version with headers and libraries.
fn check(folder: &Path, who: &'static str) -> Result<()> {
    let missing = ["include/torch/csrc/api/include/torch/torch.h", "lib"]
        .into_iter()
        .chain(links::REQUIRED_LIBRARIES.iter().copied())
        .find(|part| !folder.join(part).exists());
    if let Some(part) = missing {
        return Err(SetupError::NotLibtorch { who, folder: folder.to_path_buf(), missing: part.to_owned() });
    }
    match version_of(folder) {
        Some(found) if base_version(&found) == VERSION => Ok(()),
        found => Err(SetupError::WrongVersion {
            who,
            folder: folder.to_path_buf(),
            found: found.unwrap_or_else(|| "of unknown version".to_owned()),
        }),
    }
}

/// The version a libtorch folder says it has: by its headers, or by the file `build-version`.
fn version_of(folder: &Path) -> Option<String> {
    let places = ["include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h"];
    let header = places.iter().filter_map(|place| fs::read_to_string(folder.join(place)).ok());
    header
        .filter_map(|text| version_in_header(&text))
        .next()
        .or_else(|| fs::read_to_string(folder.join("build-version")).ok().map(|text| text.trim().to_owned()))
}

fn version_in_header(text: &str) -> Option<String> {
    let number = |name: &str| {
        text.lines().find_map(|line| {
            let value = line.strip_prefix("#define TORCH_VERSION_")?.strip_prefix(name)?;
            value.trim().parse::<u32>().ok()
        })
    };
    Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
}

/// `2.11.0+cu130` is version `2.11.0`.
fn base_version(version: &str) -> &str {
    version.trim().split('+').next().unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn folder_with(version: Option<&str>, libraries: bool) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("include/torch/csrc/api/include/torch")).unwrap();
        fs::write(folder.path().join("include/torch/csrc/api/include/torch/torch.h"), "").unwrap();
        fs::create_dir(folder.path().join("lib")).unwrap();
        if let Some(version) = version {
            fs::write(folder.path().join("build-version"), version).unwrap();
        }
        if libraries {
            for library in links::REQUIRED_LIBRARIES {
                fs::write(folder.path().join(library), "").unwrap();
            }
        }
        folder
    }

    #[test]
    fn a_libtorch_of_the_right_version_is_taken() {
        for version in ["2.11.0", "2.11.0+cpu", "2.11.0+cu130\n"] {
            check(folder_with(Some(version), true).path(), "LIBTORCH points at").unwrap();
        }
    }

    #[test]
    fn another_version_is_refused_by_found_and_wanted_version() {
        for version in ["2.10.1", "2.11.1+cpu", "12.11.0"] {
            let folder = folder_with(Some(version), true);
            let message = check(folder.path(), "LIBTORCH points at").unwrap_err().to_string();
            assert!(message.contains(version) && message.contains(VERSION), "{message}");
            assert!(message.contains("unset LIBTORCH"), "{message}");
        }
    }

    #[test]
    fn a_folder_without_headers_or_libraries_is_refused_by_what_is_missing() {
        let empty = tempfile::tempdir().unwrap();
        let message = check(empty.path(), "LIBTORCH points at").unwrap_err().to_string();
        assert!(message.contains("torch.h"), "{message}");
        let message = check(folder_with(Some(VERSION), false).path(), "x").unwrap_err().to_string();
        assert!(message.contains(links::REQUIRED_LIBRARIES[0]), "{message}");
    }

    #[test]
    fn the_header_decides_the_version() {
        let header = "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 1\n";
        assert_eq!(version_in_header(header).as_deref(), Some("2.9.1"));
        assert_eq!(version_in_header("#define TORCH_VERSION_MAJOR 2\n"), None);
        let folder = folder_with(Some(VERSION), true);
        fs::create_dir_all(folder.path().join("include/torch/headeronly")).unwrap();
        fs::write(folder.path().join("include/torch/headeronly/version.h"), header).unwrap();
        assert!(check(folder.path(), "x").unwrap_err().to_string().contains("2.9.1"));
    }
}
