//! Which crate may depend on which, read from the manifests and the lock file.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use toml::{Table, Value};

use super::Tree;
use crate::libtorch;

/// What each crate may depend on, of the crates of this workspace. The table is the architecture:
/// a new edge is a decision, so it is made here as well.
const ALLOWED: [(&str, &[&str]); 17] = [
    ("accelerate-core", &[]),
    ("accelerate-launch", &["accelerate-core", "accelerate-rendezvous"]),
    // How a program is asked something, within limits, is the launcher's.
    ("accelerate-setup", &["accelerate-core", "accelerate-launch"]),
    ("accelerate-cli", &["accelerate-core", "accelerate-launch", "accelerate-setup"]),
    ("torch-ext", &[]),
    ("accelerate-derive", &[]),
    ("accelerate-rendezvous", &[]),
    (
        "accelerate-rs",
        &["accelerate-core", "accelerate-launch", "accelerate-rendezvous", "torch-ext", "accelerate-derive"],
    ),
    // Numbers go to libtorch through torch-ext.
    ("accelerate-models", &["accelerate-rs", "torch-ext"]),
    // Examples see what users see; torch-ext is named for the folder of libtorch that it hands on.
    ("nlp_example", &["accelerate-launch", "accelerate-models", "accelerate-rs", "torch-ext"]),
    ("causal_lm", &["accelerate-launch", "accelerate-models", "accelerate-rs", "torch-ext"]),
    ("cv_example", &["accelerate-launch", "accelerate-models", "accelerate-rs", "torch-ext"]),
    ("conformance", &["accelerate-core", "accelerate-launch", "accelerate-rendezvous", "accelerate-rs", "torch-ext"]),
    ("bench", &["accelerate-core", "accelerate-launch", "accelerate-models", "accelerate-rs", "torch-ext"]),
    // Its checks run in processes that are asked within limits of time.
    ("gpu-checks", &["accelerate-launch", "accelerate-models", "accelerate-rs", "torch-ext"]),
    ("xtask", &["accelerate-core", "accelerate-setup"]),
    // The readers of what comes from outside.
    ("accelerate-fuzz", &["accelerate-core", "accelerate-models", "accelerate-rs", "torch-ext"]),
];

/// Only for tests and examples in the documentation.
const ALLOWED_IN_TESTS: [(&str, &[&str]); 2] =
    [("accelerate-derive", &["accelerate-rs"]), ("nlp_example", &["accelerate-cli"])];

/// Crates that must not link libtorch, directly or through others.
const WITHOUT_LIBTORCH: [&str; 7] = [
    "accelerate-core",
    "accelerate-rendezvous",
    "accelerate-launch",
    "accelerate-setup",
    "accelerate-cli",
    "accelerate-derive",
    "xtask",
];

pub(super) fn direction(tree: &Tree) -> Result<Vec<String>> {
    let crates = manifests(tree)?;
    let ours: BTreeSet<&str> = crates.keys().map(String::as_str).collect();
    let names = workspace_names(tree)?;
    let mut complaints = Vec::new();
    for (name, (_, manifest)) in &crates {
        let Some(allowed) = lookup(&ALLOWED, name) else {
            complaints.push(format!(
                "{name}: not in the table of allowed dependencies; add it to xtask/src/tidy/dependencies.rs"
            ));
            continue;
        };
        for (dependency, in_tests) in dependencies_of(manifest) {
            let dependency = names.get(&dependency).cloned().unwrap_or(dependency);
            let extra = if in_tests { lookup(&ALLOWED_IN_TESTS, name).unwrap_or_default() } else { &[] };
            let is_allowed = allowed.iter().chain(extra).any(|other| *other == dependency);
            if ours.contains(dependency.as_str()) && !is_allowed {
                complaints.push(format!("{name} depends on {dependency}; it may depend on: {}", allowed.join(", ")));
            }
        }
    }
    Ok(complaints)
}

fn lookup<'a>(table: &[(&str, &'a [&'a str])], name: &str) -> Option<&'a [&'a str]> {
    table.iter().find(|(other, _)| *other == name).map(|(_, allowed)| *allowed)
}

/// Every manifest of a crate and the folder that it is in, by the name of its package.
fn manifests(tree: &Tree) -> Result<BTreeMap<String, (&str, Table)>> {
    let mut found = BTreeMap::new();
    for (folder, file) in tree.crate_manifests() {
        let manifest: Table = file.text.parse().with_context(|| format!("{}/Cargo.toml is not TOML", folder))?;
        let name = manifest.get("package").and_then(|package| package.get("name")).and_then(Value::as_str);
        let name = name.with_context(|| format!("{folder}/Cargo.toml has no package name"))?.to_owned();
        found.insert(name, (folder, manifest));
    }
    Ok(found)
}

/// A workspace dependency may be known under another name than its package's.
fn workspace_names(tree: &Tree) -> Result<BTreeMap<String, String>> {
    let root: Table = tree.file("Cargo.toml").context("no Cargo.toml at the root")?.text.parse()?;
    let table = root.get("workspace").and_then(|workspace| workspace.get("dependencies")).and_then(Value::as_table);
    let package = |(name, value): (&String, &Value)| Some((name.clone(), value.get("package")?.as_str()?.to_owned()));
    Ok(table.into_iter().flatten().filter_map(package).collect())
}

/// Names of direct dependencies, and whether they are for tests only.
fn dependencies_of(manifest: &Table) -> Vec<(String, bool)> {
    let mut tables = vec![manifest];
    let targets = manifest.get("target").and_then(Value::as_table);
    tables.extend(targets.into_iter().flat_map(|targets| targets.values().filter_map(Value::as_table)));
    let mut found = Vec::new();
    for table in tables {
        for (kind, in_tests) in [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)] {
            let names = table.get(kind).and_then(Value::as_table).into_iter().flatten();
            found.extend(names.map(|(name, _)| (name.clone(), in_tests)));
        }
    }
    found
}

/// The lock file joins dependencies of programs and of tests, which is stricter than needed and right:
/// the tests of these crates must be fast to build, too.
pub(super) fn libtorch_closure(tree: &Tree) -> Result<Vec<String>> {
    let lock: Table = tree.file("Cargo.lock").context("no Cargo.lock at the root")?.text.parse()?;
    let mut edges: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in lock.get("package").and_then(Value::as_array).into_iter().flatten() {
        let Some(name) = package.get("name").and_then(Value::as_str) else {
            continue;
        };
        let listed = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
        let names = listed.filter_map(Value::as_str).filter_map(|text| text.split(' ').next());
        edges.entry(name).or_default().extend(names);
    }
    let mut complaints = Vec::new();
    for name in WITHOUT_LIBTORCH {
        if let Some(path) = path_to_libtorch(&edges, name) {
            complaints.push(format!("{name} reaches libtorch: {}", path.join(" -> ")));
        }
    }
    Ok(complaints)
}

fn path_to_libtorch<'a>(edges: &BTreeMap<&'a str, Vec<&'a str>>, from: &'a str) -> Option<Vec<&'a str>> {
    // The derive crate's documentation examples use the main crate; nobody who depends on derive does.
    let skip = |crate_name: &str, dependency: &str| {
        lookup(&ALLOWED_IN_TESTS, crate_name).is_some_and(|allowed| allowed.contains(&dependency))
    };
    let mut seen = BTreeSet::from([from]);
    let mut open = vec![vec![from]];
    while let Some(path) = open.pop() {
        let last = *path.last()?;
        if ["tch", "torch-sys", "torch-ext"].contains(&last) {
            return Some(path);
        }
        for next in edges.get(last).into_iter().flatten() {
            if !skip(last, next) && seen.insert(next) {
                open.push(path.iter().copied().chain([*next]).collect());
            }
        }
    }
    None
}

/// Named for another reason than code that uses them, which their manifest says.
const USED_WITHOUT_A_NAME: [(&str, &[&str]); 5] = [
    ("torch-ext", &["torch-sys"]),
    ("nlp_example", &["torch-ext"]),
    ("causal_lm", &["torch-ext"]),
    ("cv_example", &["torch-ext"]),
    // thiserror is for the files of accelerate-rendezvous that a target compiles.
    ("accelerate-fuzz", &["thiserror", "torch-ext"]),
];

/// Every dependency costs everybody who builds the crate, so one that no file of the crate names has to go.
pub(super) fn used(tree: &Tree) -> Result<Vec<String>> {
    let crates = manifests(tree)?;
    let mut complaints = Vec::new();
    for (name, (folder, manifest)) in &crates {
        let words: BTreeSet<&str> = tree
            .files
            .iter()
            .filter(|file| file.extension() == "rs" && file.is_under(folder))
            .flat_map(|file| file.text.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')))
            .collect();
        let exempt = lookup(&USED_WITHOUT_A_NAME, name).unwrap_or_default();
        for (dependency, _) in dependencies_of(manifest) {
            let word = library_name(crates.get(&dependency).map(|(_, manifest)| manifest), &dependency);
            if !words.contains(word.as_str()) && !exempt.contains(&dependency.as_str()) {
                complaints.push(format!("{name}: no file uses {dependency}; remove it from {folder}/Cargo.toml"));
            }
        }
    }
    Ok(complaints)
}

/// What code calls a dependency.
fn library_name(manifest: Option<&Table>, dependency: &str) -> String {
    let own = manifest.and_then(|manifest| manifest.get("lib")?.get("name")?.as_str());
    own.map_or_else(|| dependency.replace('-', "_"), str::to_owned)
}

/// tch checks the version of the libtorch it is built against: moving one alone cannot work.
pub(super) fn pins(tree: &Tree) -> Result<Vec<String>> {
    let root: Table = tree.file("Cargo.toml").context("no Cargo.toml at the root")?.text.parse()?;
    let tch = root.get("workspace").and_then(|value| value.get("dependencies")).and_then(|value| value.get("tch"));
    let pin = tch.and_then(|tch| tch.get("version").and_then(Value::as_str).or_else(|| tch.as_str()));
    let mut complaints = Vec::new();
    if pin != Some("=0.24.0") || libtorch::VERSION != "2.11.0" {
        complaints.push(format!(
            "Cargo.toml pins tch {pin:?} and xtask pins libtorch {}; they belong together as =0.24.0 and 2.11.0",
            libtorch::VERSION
        ));
    }
    Ok(complaints)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ROOT: (&str, &str) = (
        "Cargo.toml",
        "[workspace.dependencies]\naccelerate = { path = 'crates/accelerate', package = 'accelerate-rs' }\ntch = '=0.24.0'\n",
    );

    fn complaints_of(manifests: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<(&str, &str)> = std::iter::once(ROOT).chain(manifests.iter().copied()).collect();
        direction(&Tree::of(&files)).unwrap()
    }

    #[test]
    fn an_edge_to_the_right_is_reported() {
        let core =
            ("crates/core/Cargo.toml", "[package]\nname='accelerate-core'\n[dependencies]\naccelerate-launch={}\n");
        let launch =
            ("crates/launch/Cargo.toml", "[package]\nname='accelerate-launch'\n[dependencies]\naccelerate-core={}\n");
        let found = complaints_of(&[core, launch]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("accelerate-core depends on accelerate-launch"), "{found:?}");
    }

    #[test]
    fn renamed_build_test_and_platform_dependencies_are_seen() {
        let main = ("crates/accelerate/Cargo.toml", "[package]\nname='accelerate-rs'\n");
        for section in ["dependencies", "build-dependencies", "dev-dependencies", "target.'cfg(unix)'.dependencies"] {
            let text = format!("[package]\nname='accelerate-core'\n[{section}]\naccelerate={{}}\n");
            assert_eq!(complaints_of(&[main, ("crates/core/Cargo.toml", &text)]).len(), 1, "{section}");
        }
    }

    #[test]
    fn an_unknown_crate_must_be_added_to_the_table() {
        let found = complaints_of(&[("crates/new/Cargo.toml", "[package]\nname='new'\n")]);
        assert!(found[0].contains("new: not in the table"), "{found:?}");
    }

    #[test]
    fn a_path_to_libtorch_is_shown() {
        let lock = "[[package]]\nname='accelerate-cli'\ndependencies=['x 1.0']\n\
             [[package]]\nname='x'\ndependencies=['tch']\n[[package]]\nname='tch'\n";
        let found = libtorch_closure(&Tree::of(&[("Cargo.lock", lock)])).unwrap();
        assert_eq!(found, ["accelerate-cli reaches libtorch: accelerate-cli -> x -> tch"]);
    }

    #[test]
    fn a_dependency_that_no_file_names_is_reported() {
        let manifest = "[package]\nname='new'\n[dependencies]\nsome-crate='1'\nother='1'\naccelerate-rs={}\n";
        let main = ("crates/main/Cargo.toml", "[package]\nname='accelerate-rs'\n[lib]\nname='accelerate'\n");
        let complaints = |code: &str| {
            let files =
                [main, ("new/Cargo.toml", manifest), ("new/src/lib.rs", code), ("else/lib.rs", "use other::X;")];
            used(&Tree::of(&files)).unwrap()
        };
        assert!(complaints("use some_crate::{X}; fn f(_: other::Y, _: accelerate::Z) {}").is_empty());
        let found = complaints("use some_crate::X; // another\nuse accelerate::Z;");
        assert_eq!(found, ["new: no file uses other; remove it from new/Cargo.toml"]);
    }

    #[test]
    fn a_moved_pin_is_reported() {
        assert!(pins(&Tree::of(&[ROOT])).unwrap().is_empty());
        let moved = ("Cargo.toml", "[workspace.dependencies]\ntch = { version = '=0.25.0' }\n");
        assert_eq!(pins(&Tree::of(&[moved])).unwrap().len(), 1);
    }
}
