//! `cargo xtask tidy`: the rules of the workspace. Each is a test as well, so `cargo test` runs them.

mod dependencies;
mod documents;
mod files;
mod floors;
mod functions;
mod numbers;
mod settings;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;

use crate::{paths, process};

/// Check the rules of the workspace: directions of dependencies, raw memory, sizes, headers.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

/// A rule: what it is called, and what breaks it (one sentence per place, with the cure).
type Rule = (&'static str, fn(&Tree) -> Result<Vec<String>>);

/// All rules, in the order in which they are reported.
const RULES: [Rule; 20] = [
    ("crates depend only on crates to their left", dependencies::direction),
    ("folders of the main crate use only folders below them", floors::direction),
    ("libtorch stays out of the crates that must start fast", dependencies::libtorch_closure),
    ("tch and libtorch are pinned together", dependencies::pins),
    ("every dependency is used", dependencies::used),
    ("raw memory is touched in torch-ext only", files::raw_memory),
    ("numbers go to libtorch through torch-ext", numbers::panicking_calls),
    ("no machine paths", files::machine_paths),
    ("every Rust file says what it is", files::module_headers),
    ("long files give a reason", files::lengths),
    ("long functions give a reason", functions::lengths),
    ("every crate has a README", files::readmes),
    ("nothing is left unfinished or switched off", files::unfinished),
    ("links in documents lead somewhere", documents::links),
    ("files that documents name exist", documents::named_files),
    ("every chapter is in the book and is tested", documents::chapters),
    ("settings that are honoured are read", settings::honoured_are_read),
    ("the page of settings is that of the table", settings::page_is_current),
    ("the README is short", documents::short_readme),
    ("a user's first hour is what documents tell", documents::first_hour),
];

pub(crate) fn run(_: &Arguments) -> Result<()> {
    let tree = Tree::of_repository()?;
    let mut broken = 0;
    for (name, rule) in RULES {
        let complaints = rule(&tree)?;
        println!("{} {name}", if complaints.is_empty() { "ok    " } else { "BROKEN" });
        for complaint in &complaints {
            println!("         {complaint}");
        }
        broken += complaints.len();
    }
    if broken > 0 {
        bail!("{broken} places break the rules of the workspace");
    }
    Ok(())
}

/// One text file of the repository.
#[derive(Debug)]
pub(crate) struct TextFile {
    /// Relative to the root, with `/` between parts.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl TextFile {
    pub(crate) fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    pub(crate) fn is_under(&self, folder: &str) -> bool {
        self.path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    }
}

/// The text files of the repository, as git knows them.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) files: Vec<TextFile>,
}

impl Tree {
    /// What git tracks, and what it would track at the next `git add`.
    pub(crate) fn of_repository() -> Result<Tree> {
        let root = paths::repository_root();
        let mut list = Command::new("git");
        list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&root);
        let names = process::read(&mut list)?;
        let files = names.split('\0').filter_map(|name| text_file(&root, name)).collect();
        Ok(Tree { files })
    }

    /// The file at `path`, if it is there.
    pub(crate) fn file(&self, path: &str) -> Option<&TextFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The manifests of the crates, by the folder they are in.
    pub(crate) fn crate_manifests(&self) -> impl Iterator<Item = (&str, &TextFile)> {
        self.files.iter().filter_map(|file| Some((file.path.strip_suffix("/Cargo.toml")?, file)))
    }

    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        let file = |(path, text): &(&str, &str)| TextFile { path: (*path).to_owned(), text: (*text).to_owned() };
        Tree { files: files.iter().map(file).collect() }
    }
}

/// Nothing for binary files, and for files that git lists but that were deleted.
fn text_file(root: &Path, name: &str) -> Option<TextFile> {
    if name.is_empty() {
        return None;
    }
    let text = String::from_utf8(fs::read(root.join(name)).ok()?).ok()?;
    Some(TextFile { path: name.to_owned(), text })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check(name: &str) {
        let tree = Tree::of_repository().unwrap();
        let (_, rule) = RULES.into_iter().find(|(rule, _)| *rule == name).unwrap();
        let complaints = rule(&tree).unwrap();
        assert!(complaints.is_empty(), "{name}:\n{}", complaints.join("\n"));
    }

    macro_rules! tidy_tests {
        ($($test:ident: $rule:literal;)*) => {
            $(#[test] fn $test() { check($rule); })*

            #[test]
            fn every_rule_has_a_test() {
                assert_eq!([$($rule),*], RULES.map(|(name, _)| name));
            }
        };
    }

    tidy_tests! {
        crates_depend_only_on_crates_to_their_left: "crates depend only on crates to their left";
        folders_of_the_main_crate_use_only_folders_below_them:
            "folders of the main crate use only folders below them";
        libtorch_stays_out_of_fast_crates: "libtorch stays out of the crates that must start fast";
        tch_and_libtorch_are_pinned_together: "tch and libtorch are pinned together";
        every_dependency_is_used: "every dependency is used";
        raw_memory_is_touched_in_torch_ext_only: "raw memory is touched in torch-ext only";
        numbers_go_to_libtorch_through_torch_ext: "numbers go to libtorch through torch-ext";
        there_are_no_machine_paths: "no machine paths";
        every_rust_file_says_what_it_is: "every Rust file says what it is";
        long_files_give_a_reason: "long files give a reason";
        long_functions_give_a_reason: "long functions give a reason";
        every_crate_has_a_readme: "every crate has a README";
        nothing_is_unfinished_or_switched_off: "nothing is left unfinished or switched off";
        links_in_documents_lead_somewhere: "links in documents lead somewhere";
        files_that_documents_name_exist: "files that documents name exist";
        every_chapter_is_in_the_book_and_is_tested: "every chapter is in the book and is tested";
        settings_that_are_honoured_are_read: "settings that are honoured are read";
        the_page_of_settings_is_that_of_the_table: "the page of settings is that of the table";
        the_readme_is_short: "the README is short";
        a_users_first_hour_is_what_documents_tell: "a user's first hour is what documents tell";
    }
}
