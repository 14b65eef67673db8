//! Where the project is that somebody works in.

use std::path::{Path, PathBuf};

use accelerate_core::settings::read_file;
use toml_edit::DocumentMut;

/// The folder of the workspace that `folder` is in, or of the package where there is no workspace. `None` outside of any.
///
/// Cargo reads configurations of all folders above the current one, so what is written there is in force here.
pub fn project_root(folder: &Path) -> Option<PathBuf> {
    let folder = std::path::absolute(folder).ok()?;
    let mut with_manifest = folder.ancestors().filter(|folder| folder.join("Cargo.toml").is_file());
    let nearest = with_manifest.clone().next()?;
    Some(with_manifest.find(|folder| is_workspace(folder)).unwrap_or(nearest).to_path_buf())
}

fn is_workspace(folder: &Path) -> bool {
    let text = read_file(&folder.join("Cargo.toml")).unwrap_or_default();
    text.parse::<DocumentMut>().is_ok_and(|manifest| manifest.contains_key("workspace"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_workspace_is_found_from_anywhere_in_it_and_a_package_by_itself() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for (path, text) in [
            ("space/Cargo.toml", "[workspace]\n"),
            ("space/inner/Cargo.toml", "[package]\n"),
            ("alone/Cargo.toml", "[package]\n"),
            ("broken/Cargo.toml", "[["),
        ] {
            let file = root.join(path);
            fs::create_dir_all(file.parent().unwrap().join("src")).unwrap();
            fs::write(file, text).unwrap();
        }
        for (from, want) in [
            ("space/inner/src", Some("space")),
            ("space", Some("space")),
            ("alone/src", Some("alone")),
            ("broken", Some("broken")),
            ("absent", None),
        ] {
            assert_eq!(project_root(&root.join(from)), want.map(|name| root.join(name)), "{from}");
        }
    }
}
