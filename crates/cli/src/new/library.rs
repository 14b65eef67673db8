//! Where a project gets the library from: a clone, because it is not on crates.io yet.

use std::fmt;
use std::fs;
use std::path::Path;

use accelerate_core::settings::read_file;

use super::error::NewError;

/// Tells programs and tests where libtorch is at run time.
pub(crate) const BUILD_SCRIPT: &str = include_str!("../../templates/common/build.rs");

/// The clone that a project depends on by its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// The user named it.
    Named { path: String },
    /// This command was built from it.
    BuiltFrom { path: String },
}

impl Source {
    /// As it stands in a manifest. TOML writes strings as JSON does.
    pub(super) fn in_manifest(&self) -> String {
        let (Source::Named { path } | Source::BuiltFrom { path }) = self;
        format!("path = {}", serde_json::json!(path))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Named { path } => write!(formatter, "by the path that you named, {path}"),
            Source::BuiltFrom { path } => {
                write!(formatter, "by the path of the clone that this command was built from, {path}")
            }
        }
    }
}

/// The clone that is named, else the one that this command was built from.
pub(super) fn find(named: Option<&Path>) -> Result<Source, NewError> {
    match named {
        Some(named) => named_clone(named),
        None => built_from(clone_of_this_command()),
    }
}

/// The folder of the library in the clone that this command was built from, if it is still there.
pub(crate) fn beside_this_command() -> Option<String> {
    library_in(&clone_of_this_command().join("crates/accelerate"))
}

fn clone_of_this_command() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own)
}

fn named_clone(named: &Path) -> Result<Source, NewError> {
    let path = library_in(named).or_else(|| library_in(&named.join("crates/accelerate")));
    path.map(|path| Source::Named { path }).ok_or_else(|| NewError::NoLibrary { path: named.to_path_buf() })
}

fn built_from(clone: &Path) -> Result<Source, NewError> {
    let path = library_in(&clone.join("crates/accelerate"));
    path.map(|path| Source::BuiltFrom { path }).ok_or_else(|| NewError::NoClone { built_from: clone.to_path_buf() })
}

/// The folder, if the package of the library is in it and its path can be written into a manifest.
fn library_in(folder: &Path) -> Option<String> {
    let manifest = read_file(&folder.join("Cargo.toml")).ok()?;
    let is_library = manifest.lines().any(|line| line.trim() == "name = \"accelerate-rs\"");
    let path = fs::canonicalize(folder).ok()?;
    if is_library { path.to_str().map(str::to_owned) } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A dependency by version could not be built: nothing is on crates.io.
    #[test]
    fn without_a_clone_the_cure_is_to_name_one() {
        let empty = tempfile::tempdir().unwrap();
        let message = built_from(empty.path()).unwrap_err().to_string();
        assert!(message.contains("not on crates.io") && message.contains("--accelerate PATH"), "{message}");
        assert!(message.contains(&empty.path().display().to_string()), "{message}");
        assert!(beside_this_command().is_some_and(|path| path.ends_with("crates/accelerate")));
    }
}
