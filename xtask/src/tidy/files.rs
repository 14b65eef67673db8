//! Rules about single files: what may be in them, how long they are, how they begin.

use anyhow::Result;

use super::{TextFile, Tree};

/// A file longer than this needs a reason; the longest file of a project is its worst.
const MOST_LINES: usize = 600;

/// What a reason begins with, in a comment near the top of a file or above a function.
pub(super) const REASON: &str = "Long because";

pub(super) fn raw_memory(tree: &Tree) -> Result<Vec<String>> {
    // Written in pieces so that this file does not contain what it looks for.
    let marks = [concat!("uns", "afe"), concat!("extern ", "\"C\""), concat!("*", "mut "), concat!("*", "const ")];
    let outside = tree.files.iter().filter(|file| file.extension() == "rs" && !file.is_under("crates/torch-ext"));
    Ok(outside
        .flat_map(|file| lines_with(file, |line| marks.iter().any(|mark| has_word(code_of(line), mark))))
        .collect())
}

pub(super) fn machine_paths(tree: &Tree) -> Result<Vec<String>> {
    let marks = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/tm", "p/"),
        concat!("C:", "\\"),
    ];
    let is_path = |line: &str| marks.iter().any(|mark| starts_a_path(line, mark));
    Ok(tree.files.iter().filter(|file| file.path != "Cargo.lock").flat_map(|file| lines_with(file, is_path)).collect())
}

/// Whether `mark` occurs where a path begins: inside a longer path or an address it is no machine path.
fn starts_a_path(line: &str, mark: &str) -> bool {
    let continues_a_path = |before: char| before.is_alphanumeric() || "._~-}/<>)".contains(before);
    line.match_indices(mark).any(|(at, _)| !line[..at].ends_with(continues_a_path))
}

pub(super) fn module_headers(tree: &Tree) -> Result<Vec<String>> {
    let rust = tree.files.iter().filter(|file| file.extension() == "rs");
    let silent = rust.filter(|file| !begins_with_documentation(&file.text));
    Ok(silent.map(|file| format!("{}: begin it with a `//!` line that says what it is", file.path)).collect())
}

/// Attributes, plain comments and a program line may stand above the documentation.
fn begins_with_documentation(text: &str) -> bool {
    let mut in_attribute = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("//!") {
            return line.trim_start_matches("//!").trim().len() > 2;
        }
        if line.starts_with("#![doc = include_str!(") {
            return true;
        }
        let opens = line.starts_with("#![") || line.starts_with("#!/");
        if !(opens || in_attribute || line.is_empty() || line.starts_with("//")) {
            return false;
        }
        in_attribute = (opens || in_attribute) && line.starts_with("#![") && !line.ends_with(']')
            || in_attribute && !line.ends_with(']');
    }
    false
}

pub(super) fn lengths(tree: &Tree) -> Result<Vec<String>> {
    let code = tree.files.iter().filter(|file| ["rs", "cpp", "h", "py"].contains(&file.extension()));
    let long = code.filter(|file| file.text.lines().count() > MOST_LINES && !gives_reason(file));
    Ok(long
        .map(|file| {
            let lines = file.text.lines().count();
            format!("{}: {lines} lines; split it, or say `{REASON} …` in its header", file.path)
        })
        .collect())
}

fn gives_reason(file: &TextFile) -> bool {
    file.text.lines().take(40).any(|line| line.contains(REASON))
}

pub(super) fn readmes(tree: &Tree) -> Result<Vec<String>> {
    let without = tree.crate_manifests().filter(|(folder, _)| tree.file(&format!("{folder}/README.md")).is_none());
    Ok(without
        .map(|(folder, _)| format!("{folder}: add README.md: its purpose, its invariants, what it must never import"))
        .collect())
}

pub(super) fn unfinished(tree: &Tree) -> Result<Vec<String>> {
    let marks = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("#[ign", "ore"),
        concat!("#[should", "_panic"),
        concat!("@pytest.mark.", "skip"),
    ];
    let code = tree.files.iter().filter(|file| ["rs", "py"].contains(&file.extension()));
    Ok(code.flat_map(|file| lines_with(file, |line| marks.iter().any(|mark| code_of(line).contains(mark)))).collect())
}

/// `path:line: text` of each line that `is_wrong`.
fn lines_with(file: &TextFile, is_wrong: impl Fn(&str) -> bool) -> Vec<String> {
    let wrong = file.text.lines().enumerate().filter(|(_, line)| is_wrong(line));
    wrong.map(|(number, line)| format!("{}:{}: {}", file.path, number + 1, line.trim())).collect()
}

/// The line without its comment.
fn code_of(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Whether `mark` occurs and is not a part of a longer name.
fn has_word(line: &str, mark: &str) -> bool {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    line.match_indices(mark).any(|(at, _)| {
        !line[..at].ends_with(is_name) && (mark.ends_with(' ') || !line[at + mark.len()..].starts_with(is_name))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn complaints(rule: fn(&Tree) -> Result<Vec<String>>, path: &str, text: &str) -> usize {
        rule(&Tree::of(&[(path, text)])).unwrap().len()
    }

    #[test]
    fn code_that_could_break_memory_is_found_outside_torch_ext() {
        let word = concat!("uns", "afe");
        let rows = [
            ("crates/core/src/lib.rs", format!("fn f() {{ {word} {{}} }}"), 1),
            ("crates/core/src/lib.rs", format!("#![deny({word}_code)]"), 0),
            ("crates/core/src/lib.rs", format!("// nothing {word} here"), 0),
            ("crates/torch-ext/src/lib.rs", format!("{word} fn f() {{}}"), 0),
            ("crates/torch-extra/src/lib.rs", format!("{word} fn f() {{}}"), 1),
            ("xtask/src/main.rs", format!("fn f(x: *{}u8) {{}}", "mut "), 1),
            ("crates/core/README.md", word.to_owned(), 0),
        ];
        for (path, text, want) in rows {
            assert_eq!(complaints(raw_memory, path, &text), want, "{path}: {text}");
        }
    }

    #[test]
    fn machine_paths_are_found_where_a_path_begins() {
        let home = concat!("/ho", "me/");
        let rows = [
            (format!("let x = \"{home}me\";"), 1),
            (format!("cd {home}me"), 1),
            (format!("see https://host{home}page"), 0),
            (format!("src{home}x"), 0),
            (format!("a\nb {home}x\nc {home}y"), 2),
            ("/usr/lib".to_owned(), 0),
        ];
        for (text, want) in rows {
            assert_eq!(complaints(machine_paths, "README.md", &text), want, "{text}");
        }
    }

    #[test]
    fn a_rust_file_begins_with_documentation() {
        let rows = [
            ("//! What it is.\nfn f() {}", 0),
            ("#![allow(clippy::unwrap_used)]\n//! What it is.\n", 0),
            ("#![allow(\n    clippy::unwrap_used,\n    clippy::panic\n)]\n\n//! What it is.\n", 0),
            ("// Licence.\n//! What it is.\n", 0),
            ("#![doc = include_str!(\"../README.md\")]\n", 0),
            ("use std::fs;\n//! Too late.\n", 1),
            ("//! .\nfn main() {}", 1),
            ("", 1),
        ];
        for (text, want) in rows {
            assert_eq!(complaints(module_headers, "src/a.rs", text), want, "{text:?}");
        }
    }

    #[test]
    fn a_long_file_needs_a_reason() {
        let long = "x\n".repeat(MOST_LINES + 1);
        assert_eq!(complaints(lengths, "a.rs", &long), 1);
        assert_eq!(complaints(lengths, "a.rs", &"x\n".repeat(MOST_LINES)), 0);
        assert_eq!(complaints(lengths, "a.rs", &format!("//! {REASON} it is a table.\n{long}")), 0);
        assert_eq!(complaints(lengths, "a.rs", &format!("{long}//! {REASON} it is a table.\n")), 1);
        assert_eq!(complaints(lengths, "data.json", &long), 0);
    }

    #[test]
    fn a_crate_without_a_readme_is_found() {
        let manifest = ("crates/core/Cargo.toml", "");
        assert_eq!(readmes(&Tree::of(&[manifest])).unwrap().len(), 1);
        assert!(readmes(&Tree::of(&[manifest, ("crates/core/README.md", "")])).unwrap().is_empty());
    }

    #[test]
    fn unfinished_code_and_switched_off_tests_are_found() {
        let rows = [
            (concat!("to", "do!()"), 1),
            (concat!("#[ign", "ore]"), 1),
            (concat!("#[should", "_panic(expected = \"x\")]"), 1),
            (concat!("// to", "do!() in a comment"), 0),
            ("clippy::todo", 0),
        ];
        for (text, want) in rows {
            assert_eq!(complaints(unfinished, "a.rs", text), want, "{text}");
        }
    }
}
