//! Where libtorch comes from: `LIBTORCH`, a Python, the cache folder.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::{Result, SetupError};
use super::{LINKS, VERSION, cargo_config, check, install, links, project_root};

/// Who provides a libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment variable `LIBTORCH`.
    Variable,
    /// The `.cargo/config.toml` of the project, whose author chose a folder.
    CargoConfig,
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
            Origin::CargoConfig => "from the project's cargo configuration",
            Origin::ActivePython => "from the active Python",
            Origin::Cache => "from the user's cache folder",
            Origin::Linked => "linked already",
        })
    }
}

/// A libtorch of the right version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libtorch {
    /// The folder with `include` and `lib`.
    pub folder: PathBuf,
    /// Who provides it.
    pub origin: Origin,
}

/// Finds or installs libtorch and links it as `.libtorch` in the folder `root`. Does nothing when that is done already.
pub(crate) fn ensure(root: &Path) -> Result<Libtorch> {
    let asked_for = variable(root);
    if asked_for.is_none()
        && let Some(folder) = links::current_target(root)
    {
        return Ok(Libtorch { folder, origin: Origin::Linked });
    }
    let found = find_or_install(asked_for.as_deref())?;
    links::write(root, &found.folder)?;
    Ok(found)
}

/// Finds or installs libtorch for no project in particular.
pub(crate) fn ensure_installed() -> Result<Libtorch> {
    find_or_install(variable(Path::new("")).as_deref())
}

/// The libtorch that a build in `folder` would use, or that [`ensure`] would take from the cache. Installs nothing, writes
/// nothing and starts nothing.
pub(crate) fn find(folder: &Path) -> Result<Option<Libtorch>> {
    let root = project_root(folder);
    let variable = variable(root.as_deref().unwrap_or(folder));
    let from_variable = |folder: &Path| from_folder(folder, "LIBTORCH points at", Origin::Variable).map(Some);
    let named = root.as_deref().map_or(Ok(None), cargo_config::named)?;
    match &variable {
        Some(folder) if !named.as_ref().is_some_and(|named| named.is_forced) => return from_variable(folder),
        _ => {}
    }
    if let Some(root) = root {
        if let Some(named) = named.filter(|named| named.folder != root.join(LINKS)) {
            return from_folder(&named.folder, cargo_config::WHO, Origin::CargoConfig).map(Some);
        }
        if links::current_target(&root).is_some() {
            return Ok(Some(Libtorch { folder: root.join(LINKS), origin: Origin::Linked }));
        }
    }
    // Nothing is linked yet, and the variable is what would be.
    if let Some(folder) = &variable {
        return from_variable(folder);
    }
    let home = cache_home()?;
    let installed = if home.exists() { Some(from_cache()?) } else { None };
    Ok(installed)
}

fn find_or_install(asked_for: Option<&Path>) -> Result<Libtorch> {
    match asked_for {
        Some(folder) => from_folder(folder, "LIBTORCH points at", Origin::Variable),
        None => match from_active_python()? {
            Some(found) => Ok(found),
            None => from_cache(),
        },
    }
}

/// The folder that holds an importable `torch` package of the right version; installed into the
/// cache folder when the libtorch in use has no Python side.
pub(crate) fn python_package_home(root: &Path) -> Result<PathBuf> {
    let found = ensure(root)?;
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
    let is_ours = folder == root.join(LINKS) || folder == Path::new(LINKS);
    (!is_ours).then_some(folder)
}

fn from_folder(folder: &Path, who: &'static str, origin: Origin) -> Result<Libtorch> {
    check::check(folder, who)?;
    let folder = fs::canonicalize(folder).map_err(|source| SetupError::io("resolve", folder, source))?;
    Ok(Libtorch { folder, origin })
}

/// The torch of the Python on the search path, found by its metadata: importing it takes seconds.
fn from_active_python() -> Result<Option<Libtorch>> {
    const QUESTION: &str = "import importlib.util as u, importlib.metadata as m\n\
         s = u.find_spec('torch')\n\
         print(m.version('torch') + '\\n' + s.submodule_search_locations[0] if s else '')";
    let Some(python) = install::find_python()? else {
        return Ok(None);
    };
    let answer = install::answer_of(Command::new(python).args(["-c", QUESTION]))?.unwrap_or_default();
    let mut lines = answer.lines();
    match (lines.next(), lines.next()) {
        (Some(version), Some(folder)) if check::base_version(version) == VERSION => {
            let folder = PathBuf::from(folder);
            // A torch without its headers cannot be built against; the cache can.
            Ok(check::check(&folder, "the active Python's torch is")
                .is_ok()
                .then_some(Libtorch { folder, origin: Origin::ActivePython }))
        }
        _ => Ok(None),
    }
}

fn from_cache() -> Result<Libtorch> {
    let folder = install::ensure(&cache_home()?)?;
    check::check(&folder, "the cache folder holds")?;
    Ok(Libtorch { folder, origin: Origin::Cache })
}

/// The folder in which this project keeps what it downloads: `$XDG_CACHE_HOME/accelerate-rs`, or
/// `~/.cache/accelerate-rs`.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => env::home_dir().ok_or(SetupError::NoCacheFolder)?.join(".cache"),
    };
    Ok(base.join("accelerate-rs"))
}

fn cache_home() -> Result<PathBuf> {
    Ok(cache_folder()?.join(format!("libtorch-{VERSION}")))
}
