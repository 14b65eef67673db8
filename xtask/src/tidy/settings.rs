//! Settings: what is declared as honoured is read by somebody, and the page that lists them is that of the table.

use accelerate_core::config::settings;
use accelerate_core::settings::{Setting, Standing};
use anyhow::Result;

use super::Tree;
use crate::settings::{PAGE, page};

/// Where settings are read. The table itself and tests do not count.
const READERS: [&str; 4] = ["crates/core/src", "crates/launch/src", "crates/cli/src", "crates/accelerate/src"];

pub(super) fn honoured_are_read(tree: &Tree) -> Result<Vec<String>> {
    let code: Vec<String> = tree
        .files
        .iter()
        .filter(|file| file.extension() == "rs" && READERS.iter().any(|folder| file.is_under(folder)))
        .filter(|file| !file.path.contains("/tests") && !file.is_under("crates/core/src/settings"))
        .map(|file| without_comments(&file.text))
        .collect();
    let unread = settings().filter(|setting| setting.standing() == Standing::Honoured && !is_read(setting, &code));
    let complaint = |setting: &Setting| {
        format!(
            "{}: nobody reads `.{}`; give it its effect, or declare it `without_effect` or `refused` with the reason",
            setting.path, setting.field
        )
    };
    Ok(unread.map(complaint).collect())
}

pub(super) fn page_is_current(tree: &Tree) -> Result<Vec<String>> {
    let is_current = tree.file(PAGE).is_some_and(|file| file.text == page());
    Ok(if is_current {
        Vec::new()
    } else {
        vec![format!("{PAGE} is not that of the table; run `cargo xtask settings`")]
    })
}

fn is_read(setting: &Setting, code: &[String]) -> bool {
    let access = format!(".{}", setting.field);
    let ends = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '_' || next == '(');
    code.iter().any(|text| text.match_indices(&access).any(|(place, _)| ends(&text[place + access.len()..])))
}

fn without_comments(text: &str) -> String {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    code.lines().filter(is_code).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::TextFile;
    use super::*;

    /// Takes out every line that reads one setting, and is told.
    #[test]
    fn a_setting_that_nobody_reads_is_found() {
        let mut tree = Tree::of_repository().unwrap();
        assert_eq!(honoured_are_read(&tree).unwrap(), Vec::<String>::new());
        for file in &mut tree.files {
            file.text = file.text.replace(".adjust_scheduler", ".num_steps");
        }
        let complaints = honoured_are_read(&tree).unwrap();
        assert!(complaints.len() == 1 && complaints[0].contains("adjust_scheduler"), "{complaints:?}");
    }

    #[test]
    fn a_page_of_another_table_is_found() {
        let file = TextFile { path: PAGE.to_owned(), text: page() };
        assert!(page_is_current(&Tree { files: vec![file] }).unwrap().is_empty());
        let file = TextFile { path: PAGE.to_owned(), text: page().replace("bf16", "bf17") };
        assert_eq!(page_is_current(&Tree { files: vec![file] }).unwrap().len(), 1);
    }
}
