//! Rules about documents: links lead somewhere, named files exist, chapters are part of the book and are compiled.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::{TextFile, Tree};
use crate::first_hour;

/// Where the chapters of the book are.
const BOOK: &str = "docs/src";

/// The most lines of the README: what is longer belongs into the book.
const MOST_README_LINES: usize = 150;

/// Folders at the root of the repository. A code span that begins with one of them is the path of a file.
const FOLDERS: [&str; 9] =
    ["bench/", "conformance/", "crates/", "docs/src/", "examples/", "fuzz/", "parity/", "xtask/src/", ".config/"];

pub(super) fn links(tree: &Tree) -> Result<Vec<String>> {
    let mut anchors = BTreeMap::new();
    let mut complaints = Vec::new();
    for file in documents(tree) {
        for (line, link) in links_of(&file.text) {
            if let Some(problem) = problem_with(tree, &mut anchors, file, &link) {
                complaints.push(format!("{}:{line}: {link}: {problem}", file.path));
            }
        }
    }
    Ok(complaints)
}

pub(super) fn named_files(tree: &Tree) -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for file in documents(tree) {
        for (line, code) in code_spans(&file.text) {
            let is_path = FOLDERS.iter().any(|folder| code.starts_with(folder)) && !code.contains(['*', '<', ' ', '{']);
            if is_path && !exists(tree, code.trim_end_matches('/')) {
                complaints.push(format!("{}:{line}: there is no {code}", file.path));
            }
        }
    }
    Ok(complaints)
}

pub(super) fn chapters(tree: &Tree) -> Result<Vec<String>> {
    let summary = format!("{BOOK}/SUMMARY.md");
    let listed = links_of(&tree.file(&summary).with_context(|| format!("{summary} is missing"))?.text);
    let listed: BTreeSet<String> = listed.into_iter().map(|(_, link)| format!("{BOOK}/{link}")).collect();
    let compiled = "crates/accelerate/src/documentation.rs";
    let mut tests = tree.file(compiled).with_context(|| format!("{compiled} is missing"))?.text.clone();
    // A chapter about a crate to the right of the main one is tested there.
    tests.extend(tree.file("crates/models/src/documentation.rs").map(|file| file.text.replace("../../../", "")));
    let mut complaints = Vec::new();
    for chapter in documents(tree).filter(|file| file.is_under(BOOK) && file.path != summary) {
        if !listed.contains(&chapter.path) {
            complaints.push(format!("{}: no line of {summary} leads to it", chapter.path));
        }
        if !tests.contains(&format!("\"{}\"", chapter.path)) {
            complaints.push(format!("{}: its examples are not tested; name it in {compiled}", chapter.path));
        }
    }
    Ok(complaints)
}

pub(super) fn short_readme(tree: &Tree) -> Result<Vec<String>> {
    let lines = tree.file("README.md").map_or(0, |file| file.text.lines().count());
    let is_long = lines > MOST_README_LINES;
    Ok(is_long.then(|| format!("README.md: {lines} lines; move some of them into the book")).into_iter().collect())
}

/// The documents that tell a user how to begin, and the heading below which the lines to type stand.
const FIRST_HOUR: [(&str, &str); 2] =
    [("README.md", "Using it in a project of your own"), ("docs/src/installation.md", "In a project of your own")];

/// The README of each new project, which names the line that starts it.
const PROJECT_README: &str = "crates/cli/templates/common/readme.md";

/// `cargo xtask first-hour` types what these documents tell to type, so that what they tell works.
pub(super) fn first_hour(tree: &Tree) -> Result<Vec<String>> {
    let cure = "change it there, or LINES and LAUNCH in xtask/src/first_hour.rs";
    let mut complaints = Vec::new();
    for (path, heading) in FIRST_HOUR {
        let found = tree.file(path).map_or_else(Vec::new, |file| lines_to_type(&file.text, heading));
        if found != first_hour::LINES {
            complaints.push(format!(
                "{path}: below \"{heading}\" one is told to type {found:?}, `cargo xtask first-hour` types {:?}; {cure}",
                first_hour::LINES
            ));
        }
    }
    let launch = first_hour::LAUNCH.replace("demo", "{{name}}");
    let found = tree.file(PROJECT_README).map_or_else(Vec::new, |file| lines_to_type(&file.text, "{{name}}"));
    if !found.contains(&launch) {
        complaints.push(format!("{PROJECT_README}: one is told to type {found:?}, without `{launch}`; {cure}"));
    }
    Ok(complaints)
}

/// The lines of the first block of code below `heading`, without their comments.
fn lines_to_type(text: &str, heading: &str) -> Vec<String> {
    let below = parsed(text).map(|(event, _)| event);
    let mut below = below.skip_while(|event| !matches!(event, Event::Text(text) if text.as_ref() == heading));
    below.find(|event| matches!(event, Event::Start(Tag::CodeBlock(_))));
    let text = |event| if let Event::Text(text) = event { Some(text.into_string()) } else { None };
    let code: String = below.map_while(text).collect();
    let line = |line: &str| line.split_once(" #").map_or(line, |(line, _)| line).trim().to_owned();
    code.lines().map(line).collect()
}

fn documents(tree: &Tree) -> impl Iterator<Item = &TextFile> {
    tree.files.iter().filter(|file| file.extension() == "md")
}

/// Why a link leads nowhere. `anchors` keeps those of documents that were looked at before.
fn problem_with(
    tree: &Tree,
    anchors: &mut BTreeMap<String, BTreeSet<String>>,
    file: &TextFile,
    link: &str,
) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { file.path.clone() } else { resolved(&file.path, path)? };
    if !exists(tree, &target) {
        return Some(format!("there is no {target}"));
    }
    if file.is_under(BOOK) && !(target.starts_with(BOOK) && target.ends_with(".md")) {
        return Some("pages of the book can only link to pages of the book; name the file instead".to_owned());
    }
    let anchor = anchor?;
    let known =
        anchors.entry(target.clone()).or_insert_with(|| tree.file(&target).map_or_else(BTreeSet::new, anchors_of));
    (!known.contains(anchor)).then(|| format!("{target} has no heading for #{anchor}"))
}

/// `link`, which stands in the file `from`, as a path from the root.
fn resolved(from: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Is this a file of the repository, or a folder with files?
fn exists(tree: &Tree, path: &str) -> bool {
    tree.files.iter().any(|file| file.path == path || file.is_under(path))
}

fn parsed(text: &str) -> impl Iterator<Item = (Event<'_>, usize)> {
    let events = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
    events.map(|(event, range)| (event, text[..range.start].matches('\n').count() + 1))
}

/// The links of a document, each with its line.
fn links_of(text: &str) -> Vec<(usize, String)> {
    let link = |(event, line)| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some((line, dest_url.into_string())),
        _ => None,
    };
    parsed(text).filter_map(link).collect()
}

/// The code that stands within lines, each with its line.
fn code_spans(text: &str) -> Vec<(usize, String)> {
    let code = |(event, line)| match event {
        Event::Code(code) => Some((line, code.into_string())),
        _ => None,
    };
    parsed(text).filter_map(code).collect()
}

/// What links to the headings of a document end with: GitHub's rule, which is also mdbook's.
fn anchors_of(file: &TextFile) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut heading: Option<String> = None;
    for (event, _) in parsed(&file.text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor_of(&heading.take().unwrap_or_default());
                let again = (1..).map(|number| format!("{anchor}-{number}"));
                let free = std::iter::once(anchor.clone()).chain(again).find(|name| !anchors.contains(name));
                anchors.extend(free);
            }
            _ => {}
        }
    }
    anchors
}

fn anchor_of(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|letter| letter.is_alphanumeric() || "-_ ".contains(*letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_a_file_and_a_heading() {
        let rows = [
            ("README.md", "[a](docs/src/a.md)", ""),
            ("README.md", "[a](docs/src/a.md#how-it-is-shared)", ""),
            ("README.md", "[a](docs/src/a.md#how-it-is-shared-1)", ""),
            ("README.md", "[a](docs/src/a.md#how-it-is-shared-2)", "no heading for #how-it-is-shared-2"),
            ("README.md", "[a](docs/src/b.md)", "there is no docs/src/b.md"),
            ("README.md", "[a](docs/src)", ""),
            ("README.md", "[a](doc)", "there is no doc"),
            ("README.md", "[a](https://host/b.md)", ""),
            ("README.md", "`[a](b.md)`\n\n```sh\n[a](b.md)\n```\n", ""),
            ("README.md", "# Here\n\n[a](#here), [b](#there)", "README.md:3: #there: README.md has no heading"),
            ("docs/src/c.md", "[a](a.md), [b](./a.md)", ""),
            ("docs/src/c.md", "[a](../../LICENSE)", "pages of the book can only link"),
        ];
        let chapter = "# A\n\n## How `it` is shared?\n\n## How it is shared\n";
        for (path, text, wanted) in rows {
            let found = links(&Tree::of(&[("docs/src/a.md", chapter), ("LICENSE", ""), (path, text)])).unwrap();
            assert_eq!(found.len(), usize::from(!wanted.is_empty()), "{text}: {found:?}");
            assert!(found.iter().all(|complaint| complaint.contains(wanted)), "{text}: {found:?}");
        }
    }

    #[test]
    fn a_file_that_is_named_exists() {
        let rows = [
            ("see `crates/core/src/lib.rs`", 0),
            ("see `crates/core`", 0),
            ("see `crates/core/`", 0),
            ("see `crates/core/src/gone.rs`", 1),
            ("| `crates/gone` | `crates/*/src` |\n|---|---|\n| `xtask/src/<task>.rs` | `gone/a.rs` |", 1),
        ];
        for (text, want) in rows {
            let found = named_files(&Tree::of(&[("README.md", text), ("crates/core/src/lib.rs", "")])).unwrap();
            assert_eq!(found.len(), want, "{text}: {found:?}");
        }
    }

    #[test]
    fn a_chapter_is_in_the_summary_and_among_the_tests() {
        let tests = ("crates/accelerate/src/documentation.rs", "A: \"docs/src/a.md\";");
        let summary = ("docs/src/SUMMARY.md", "- [A](a.md)\n");
        assert!(chapters(&Tree::of(&[tests, summary, ("docs/src/a.md", "")])).unwrap().is_empty());
        let found = chapters(&Tree::of(&[tests, summary, ("docs/src/b.md", "")])).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("SUMMARY.md") && found[1].contains("documentation.rs"), "{found:?}");
    }

    #[test]
    fn documents_that_tell_other_lines_than_the_first_hour_types_are_found() {
        let block =
            |lines: &str| format!("# {{{{name}}}}\n\n## Using it in a project of your own\n\n```sh\n{lines}```\n");
        let right: String = first_hour::LINES.iter().map(|line| format!("{line}    # why\n")).collect();
        let in_book = block(&right).replace("Using it in", "In");
        let project = block(&(first_hour::LAUNCH.replace("demo", "{{name}}") + "\n"));
        let complaints = |readme: &str, project: &str| {
            let files = [("README.md", readme), ("docs/src/installation.md", &in_book), (PROJECT_README, project)];
            super::first_hour(&Tree::of(&files)).unwrap()
        };
        assert_eq!(complaints(&block(&right), &project), Vec::<String>::new());
        let wrong = [
            ("a flag is missing", block(&right.replace(" --locked", "")), project.clone()),
            ("a line more", block(&format!("{right}cargo bench\n")), project.clone()),
            ("a line less", block(&right.replace("accelerate new demo", "# accelerate new demo")), project.clone()),
            ("no such section", right.clone(), project.clone()),
            ("another launch", block(&right), project.replace("2", "3")),
        ];
        for (case, readme, project) in wrong {
            assert_eq!(complaints(&readme, &project).len(), 1, "{case}");
        }
    }

    #[test]
    fn a_long_readme_is_found() {
        let complaints = |lines: usize| short_readme(&Tree::of(&[("README.md", &"x\n".repeat(lines))])).unwrap();
        assert_eq!((complaints(MOST_README_LINES).len(), complaints(MOST_README_LINES + 1).len()), (0, 1));
    }
}
