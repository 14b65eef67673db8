//! Examples in help and manual pages stay as they are typed, however narrow the terminal is.

use clap::Command;
use clap::builder::StyledStr;
use clap_mangen::roff::{Roff, roman};

/// Stands for a space at which clap must not break a line. The two are equally wide.
const HARD_SPACE: char = '\u{a0}';

/// The command, with examples that its help does not break; [`as_typed`] then prints them.
pub(crate) fn unwrapped(command: Command) -> Command {
    let hardened = |text: &StyledStr| text.to_string().split('\n').map(hard).collect::<Vec<_>>().join("\n");
    let [short, long] = [command.get_after_help(), command.get_after_long_help()].map(|text| text.map(hardened));
    let command = match short {
        Some(text) => command.after_help(text),
        None => command,
    };
    let command = match long {
        Some(text) => command.after_long_help(text),
        None => command,
    };
    command.mut_subcommands(unwrapped)
}

/// Help as it is printed.
pub(crate) fn as_typed(help: &str) -> String {
    help.replace(HARD_SPACE, " ")
}

fn hard(line: &str) -> String {
    match is_preformatted(line) {
        true => line.replace(' ', &HARD_SPACE.to_string()),
        false => line.to_owned(),
    }
}

/// Is it a command or a row of a table? Both are indented, as is the sentence before a command.
fn is_preformatted(line: &str) -> bool {
    line.starts_with(' ') && !line.ends_with(':')
}

/// The same text as sections of a manual page: titles such as "Examples:", paragraphs, and examples line by line.
pub(crate) fn as_roff(text: &str) -> String {
    let mut page = Roff::new();
    let mut is_as_typed = false;
    if !text.lines().next().is_some_and(is_title) {
        page.control("SH", ["NOTES"]);
    }
    for line in text.lines() {
        if is_as_typed != line.starts_with(' ') {
            is_as_typed = !is_as_typed;
            page.control(if is_as_typed { "nf" } else { "fi" }, []);
        }
        match line.strip_suffix(':') {
            Some(title) if !is_as_typed && title.split(' ').count() <= 2 => {
                page.control("SH", [&*title.to_uppercase()])
            }
            _ if line.is_empty() => page.control("PP", []),
            _ => page.text([roman(line)]),
        };
    }
    if is_as_typed {
        page.control("fi", []);
    }
    page.to_roff()
}

/// "Examples:" and the like.
fn is_title(line: &str) -> bool {
    line.ends_with(':') && !line.starts_with(' ') && line.split(' ').count() <= 2
}
