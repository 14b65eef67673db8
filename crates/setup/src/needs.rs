//! What a package still needs before it can be built on the library: `accelerate setup` says so.

use std::path::{Path, PathBuf};

use accelerate_core::settings::read_file;
use toml_edit::{DocumentMut, Item, TableLike};

use super::project_root;

/// The package of the library, in manifests.
const LIBRARY: &str = "accelerate-rs";
/// The variable by which the library tells build scripts where libtorch is.
const LIBRARY_FOLDER_VARIABLE: &str = "DEP_ACCELERATE_LIBDIR";

/// What the package of a folder still needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// The folder of the package.
    pub package: PathBuf,
    /// Its manifest names no dependency on the library.
    pub dependency: bool,
    /// It has no build script that tells its programs where libtorch is when they run.
    pub build_script: bool,
}

/// What the package that `folder` is in still needs; `None` outside of packages, and where the manifest cannot be read.
pub fn needs(folder: &Path) -> Option<Needs> {
    let folder = std::path::absolute(folder).ok()?;
    let package = folder.ancestors().find(|folder| folder.join("Cargo.toml").is_file())?;
    let manifest = manifest_in(package)?;
    let own = manifest.get("package")?.as_table_like()?;
    let workspace = project_root(package).and_then(|root| manifest_in(&root));
    let dependency = !depends_on_library(&manifest, workspace.as_ref());
    let build_script = !build_scripts(own)
        .iter()
        .any(|script| read_file(&package.join(script)).is_ok_and(|text| text.contains(LIBRARY_FOLDER_VARIABLE)));
    Some(Needs { package: package.to_path_buf(), dependency, build_script })
}

fn manifest_in(folder: &Path) -> Option<DocumentMut> {
    read_file(&folder.join("Cargo.toml")).ok()?.parse().ok()
}

fn depends_on_library(manifest: &DocumentMut, workspace: Option<&DocumentMut>) -> bool {
    let of_workspace = workspace.and_then(|manifest| manifest.get("workspace")?.get("dependencies"));
    let is_library = |(name, entry): (&str, &Item)| {
        let is_inherited = entry.get("workspace").and_then(Item::as_bool).unwrap_or_default();
        let entry = if is_inherited { of_workspace.and_then(|known| known.get(name)) } else { Some(entry) };
        entry.is_some_and(|entry| entry.get("package").and_then(Item::as_str).unwrap_or(name) == LIBRARY)
    };
    let platforms = manifest.get("target").and_then(Item::as_table_like);
    let platforms = platforms.into_iter().flat_map(TableLike::iter).map(|(_, platform)| platform);
    let tables = std::iter::once(manifest.as_item()).chain(platforms);
    let dependencies = tables.flat_map(|table| [table.get("dependencies"), table.get("dev-dependencies")]);
    dependencies.flatten().filter_map(Item::as_table_like).flat_map(TableLike::iter).any(is_library)
}

fn build_scripts(package: &dyn TableLike) -> Vec<String> {
    let build = package.get("build");
    match (build.and_then(Item::as_array), build.and_then(Item::as_str), build.and_then(Item::as_bool)) {
        (Some(several), ..) => several.iter().filter_map(|script| script.as_str().map(str::to_owned)).collect(),
        (_, Some(script), _) => vec![script.to_owned()],
        (.., Some(false)) => Vec::new(),
        _ => vec!["build.rs".to_owned()],
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;
    use std::fs;

    use super::*;

    const SCRIPT: &str = "fn main() { std::env::var(\"DEP_ACCELERATE_LIBDIR\"); }";

    #[rstest]
    #[case::nothing("", "", true)]
    #[case::another("[dependencies]\naccelerate = \"1\"\n", "", true)]
    #[case::by_name("[dependencies]\naccelerate-rs = \"0.1\"\n", "", false)]
    #[case::renamed("[dependencies]\naccelerate = { package = \"accelerate-rs\", path = \"x\" }\n", "", false)]
    #[case::as_a_table("[dependencies.accelerate]\npackage = \"accelerate-rs\"\n", "", false)]
    #[case::of_tests("[dev-dependencies]\naccelerate-rs = \"0.1\"\n", "", false)]
    #[case::of_a_platform("[target.'cfg(unix)'.dependencies]\naccelerate-rs = \"0.1\"\n", "", false)]
    #[case::inherited("[dependencies]\nnn.workspace = true\n", "nn = { package = \"accelerate-rs\" }\n", false)]
    #[case::inherited_another("[dependencies]\nnn.workspace = true\n", "nn = \"1\"\n", true)]
    #[case::not_a_table("dependencies = 3\n", "", true)]
    fn the_dependency_is_found_however_it_is_written(
        #[case] dependencies: &str,
        #[case] of_workspace: &str,
        #[case] is_needed: bool,
    ) {
        let root = tempfile::tempdir().unwrap();
        let package = root.path().join("member");
        fs::create_dir_all(package.join("src")).unwrap();
        let workspace = format!("[workspace]\nmembers = [\"member\"]\n[workspace.dependencies]\n{of_workspace}");
        fs::write(root.path().join("Cargo.toml"), workspace).unwrap();
        let (before, after) = if dependencies.starts_with('[') { ("", dependencies) } else { (dependencies, "") };
        fs::write(package.join("Cargo.toml"), format!("{before}[package]\nname = \"member\"\n{after}")).unwrap();
        let found = needs(&package.join("src")).unwrap();
        assert_eq!(found, Needs { package, dependency: is_needed, build_script: true });
        assert_eq!(needs(root.path()), None);
    }

    #[rstest]
    #[case::usual("", &["build.rs"], false)]
    #[case::named("build = \"make.rs\"\n", &["make.rs"], false)]
    #[case::one_of_several("build = [\"a.rs\", \"b.rs\"]\n", &["b.rs"], false)]
    #[case::none("", &[], true)]
    #[case::not_used("build = \"make.rs\"\n", &["build.rs"], true)]
    #[case::switched_off("build = false\n", &["build.rs"], true)]
    fn a_build_script_counts_if_cargo_runs_it(#[case] key: &str, #[case] files: &[&str], #[case] is_needed: bool) {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("Cargo.toml"), format!("[package]\nname = \"demo\"\n{key}")).unwrap();
        for file in files {
            fs::write(root.path().join(file), SCRIPT).unwrap();
        }
        assert_eq!(needs(root.path()).unwrap().build_script, is_needed);
        for file in files {
            fs::write(root.path().join(file), "fn main() {}").unwrap();
        }
        assert!(needs(root.path()).unwrap().build_script);
    }

    #[rstest]
    #[case::no_toml("[[")]
    #[case::no_package("[workspace]\n")]
    fn nothing_is_said_of_what_is_no_package(#[case] manifest: &str) {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("Cargo.toml"), manifest).unwrap();
        assert_eq!(needs(root.path()), None);
    }
}
