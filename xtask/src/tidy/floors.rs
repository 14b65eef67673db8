//! Floors of the main crate: a folder of its sources uses only folders below it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::{TextFile, Tree};

const SOURCE: &str = "crates/accelerate/src";

/// From the roof down to the ground. Folders of one floor do not use each other. The table is the architecture: a new
/// folder is put on a floor here and in `ARCHITECTURE.md`.
const FLOORS: [&[&str]; 7] = [
    &["documentation", "inference", "launchers", "local_sgd", "memory", "metrics", "testing"],
    &["accelerator", "quantized_model"],
    &["checkpoint", "data", "engine", "fp8", "optim", "profile", "quant"],
    &["amp", "big_model", "logging", "lora", "session", "tracking"],
    &["nn", "state"],
    &["group", "offload", "tensor_tree"],
    &["error", "messages", "status"],
];

pub(super) fn direction(tree: &Tree) -> Result<Vec<String>> {
    let exported = exports(&tree.file(&format!("{SOURCE}/lib.rs")).context("the main crate has no lib.rs")?.text);
    let mut complaints = Vec::new();
    for file in tree.files.iter().filter(|file| file.extension() == "rs" && !is_test(&file.path)) {
        let Some(place) = Place::of(file).filter(|place| place.folder != "lib") else { continue };
        let Some(own) = floor(place.folder) else {
            complaints.push(format!("{}: {} is on no floor; put it on one", file.path, place.folder));
            continue;
        };
        for (line, name) in names_at_root(&code_of(&file.text), place.depth) {
            let used = exported.get(&name).map_or(name.as_str(), String::as_str);
            let is_below = floor(used).is_none_or(|floor| own < floor);
            if used != place.folder && !is_below {
                complaints.push(format!(
                    "{}:{line}: {} uses {used} ({name}), which is not below it; give it what it needs as an argument, \
                     or move the code to the floor where it belongs",
                    file.path, place.folder
                ));
            }
        }
    }
    Ok(complaints)
}

/// Counted from the roof; nothing for a name that is no folder.
fn floor(folder: &str) -> Option<usize> {
    FLOORS.iter().position(|folders| folders.contains(&folder))
}

/// Where a file of the main crate stands.
struct Place<'a> {
    /// The folder below the sources, or the file where there is none.
    folder: &'a str,
    /// Number of modules above its items, without the crate.
    depth: usize,
}

impl<'a> Place<'a> {
    fn of(file: &'a TextFile) -> Option<Self> {
        let path = file.path.strip_prefix(SOURCE)?.strip_prefix('/')?.strip_suffix(".rs")?;
        let path = path.strip_suffix("/mod").unwrap_or(path);
        Some(Self { folder: path.split('/').next()?, depth: path.split('/').count() })
    }
}

/// Tests use the whole house.
fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

/// The code of a file with as many lines: comments, texts and test modules are left out.
fn code_of(text: &str) -> String {
    let text = without_tests(text);
    let mut code = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    let (mut in_text, mut in_comment) = (false, false);
    while let Some(letter) = letters.next() {
        match letter {
            '\n' => in_comment = false,
            _ if in_comment => continue,
            '\\' if in_text => drop(letters.next_if(|next| *next != '\n')),
            // A quotation mark that is a letter, as in `'"'`.
            '"' if !in_text && code.ends_with('\'') && letters.peek() == Some(&'\'') => {}
            '"' => in_text = !in_text,
            '/' if !in_text && letters.peek() == Some(&'/') => in_comment = true,
            _ => {}
        }
        if letter == '\n' || !(in_text || in_comment) {
            code.push(letter);
        }
    }
    code
}

/// The text with test modules blank, line by line. Formatted code is assumed.
fn without_tests(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let (mut is_announced, mut is_inside) = (false, false);
    for line in text.lines() {
        is_inside |= is_announced && line.starts_with("mod ") && line.ends_with('{');
        if line.starts_with("#[cfg(test)]") {
            is_announced = true;
        } else if !line.starts_with("#[") {
            is_announced = false;
        }
        if !is_inside {
            kept.push_str(line);
        }
        kept.push('\n');
        is_inside &= line != "}";
    }
    kept
}

/// What the crate hands on at its root: name -> folder.
fn exports(root: &str) -> BTreeMap<String, String> {
    let text = code_of(root);
    let mut found = BTreeMap::new();
    for statement in text.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next()) {
        let Some((folder, names)) = statement.split_once("::") else { continue };
        for name in first_names(names).filter(|_| floor(folder).is_some()) {
            found.insert(name.to_owned(), folder.to_owned());
        }
    }
    found
}

/// Line number and first name of every path that begins at the root of the crate, in a module of this depth.
fn names_at_root(text: &str, depth: usize) -> Vec<(usize, String)> {
    let to_root = "super::".repeat(depth);
    let mut found = Vec::new();
    for start in ["crate::", "accelerate::", to_root.as_str()] {
        for (at, _) in text.match_indices(start) {
            let (before, after) = (&text[..at], &text[at + start.len()..]);
            let is_within = before.ends_with(|letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':');
            if is_within || after.starts_with("super::") {
                continue;
            }
            let line = before.lines().count().max(1);
            found.extend(first_names(after).map(|name| (line, name.to_owned())));
        }
    }
    found
}

/// The first name of a path, or those of all paths of a group in braces.
fn first_names(path: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let is_end = move |letter: char| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        depth == 0
    };
    let group = path.strip_prefix('{').map(|_| &path[1..path.find(is_end).unwrap_or(path.len())]);
    let mut depth = 0;
    let is_comma = move |letter: char| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        letter == ',' && depth == 0
    };
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    group.unwrap_or(path.split(|letter: char| !is_name(letter)).next().unwrap_or_default()).split(is_comma).filter_map(
        move |path| {
            path.trim_start().split(move |letter: char| !is_name(letter)).next().filter(|name| !name.is_empty())
        },
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ROOT: &str =
        "mod error;\npub use error::{Error, Result};\npub use optim::Sgd;\npub use accelerate_core::x::Y;\n";

    fn complaints(path: &str, text: &str) -> Vec<String> {
        direction(&Tree::of(&[("crates/accelerate/src/lib.rs", ROOT), (path, text)])).unwrap()
    }

    #[test]
    fn only_folders_below_may_be_used() {
        let rows = [
            ("nn/param.rs", "use crate::error::Result;", 0),
            ("nn/param.rs", "use crate::optim::Sgd;", 1),
            ("nn/param.rs", "use crate::Sgd;", 1),
            ("nn/param.rs", "use crate::Error;", 0),
            ("nn/param.rs", "use crate::{\n    Error,\n    session::{Engine, Join},\n    Sgd,\n};", 2),
            ("nn/param.rs", "fn f() { crate::accelerator::prepare() }", 1),
            ("nn/param.rs", "use super::optim;", 0),
            ("nn/param.rs", "use super::super::optim::Sgd;", 1),
            ("nn/mod.rs", "use super::optim::Sgd;", 1),
            ("nn/mod.rs", "pub use accelerate::optim;", 1),
            ("nn/param.rs", "// use crate::optim::Sgd;\n/// [`Sgd`](crate::optim::Sgd)", 0),
            ("nn/param.rs", "#[cfg(test)]\nmod tests {\n    use crate::testing;\n}\n", 0),
            ("nn/param.rs", "#[cfg(test)]\nmod tests {\n}\nuse crate::testing;\n", 1),
            ("nn/param.rs", "#[error(\n    \"use \\\"crate::optim::Sgd\\\", \\\n     accelerate::optim\"\n)]", 0),
            ("nn/param.rs", "const QUOTE: char = '\"';\nuse crate::optim::Sgd;", 1),
            ("nn/tests.rs", "use crate::testing;", 0),
            ("data/shard.rs", "use crate::optim::Sgd;", 1),
            ("data/shard.rs", "use crate::data::Batches;\nuse crate::session::Session;", 0),
            ("testing.rs", "use crate::accelerator::Accelerator;", 0),
            ("new/mod.rs", "", 1),
        ];
        for (path, text, want) in rows {
            let found = complaints(&format!("{SOURCE}/{path}"), text);
            assert_eq!(found.len(), want, "{path}: {text}: {found:?}");
        }
    }

    #[test]
    fn a_complaint_names_place_and_folder() {
        let found = complaints("crates/accelerate/src/nn/param.rs", "\nuse crate::{Error, Sgd};");
        assert!(found[0].starts_with("crates/accelerate/src/nn/param.rs:2: nn uses optim (Sgd)"), "{found:?}");
    }

    #[test]
    fn an_import_that_is_turned_round_is_found() {
        let mut tree = Tree::of_repository().unwrap();
        assert_eq!(direction(&tree).unwrap(), [""; 0]);
        let optim = tree.file("crates/accelerate/src/optim/prepared.rs").unwrap();
        assert!(optim.text.contains("use crate::session::"), "optim stands above session");
        let session = tree.files.iter_mut().find(|file| file.path == "crates/accelerate/src/session/mod.rs").unwrap();
        session.text = session.text.replacen("\nuse ", "\nuse crate::optim::AcceleratedOptimizer;\nuse ", 1);
        let found = direction(&tree).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("session uses optim"), "{found:?}");
    }
}
