//! Where the settings come from that an error calls by their flags.

use std::fmt::Write as _;

use accelerate_core::config::{RunConfig, settings};
use accelerate_core::files::in_one_line;
use accelerate_core::settings::Origin;

/// The text of an error, and below it each flag that it names and nobody has typed, because a file or a variable says it.
pub(super) fn with_origins(run: &RunConfig, text: &str) -> String {
    let mut told = text.to_owned();
    for setting in settings().filter(|setting| !setting.is_secret()) {
        let origin = run.origin(setting.path);
        let is_elsewhere = matches!(origin, Origin::Environment(_) | Origin::File { .. });
        let Some(flag) = setting.flag().filter(|flag| is_elsewhere && names(text, flag)) else { continue };
        let origin = origin.to_string();
        if let Some(value) = run.text(setting).filter(|_| !text.contains(&origin)) {
            // Writing to a string cannot fail.
            let _ = write!(told, "\n  {flag} {} is said by {origin}", in_one_line(&value));
        }
    }
    told
}

/// Is `--flag` a word of the text, and not the beginning of a longer one?
fn names(text: &str, flag: &str) -> bool {
    let word = format!("--{flag}");
    text.match_indices(&word).any(|(start, _)| {
        let next = text[start + word.len()..].chars().next();
        !next.is_some_and(|next| next.is_ascii_alphanumeric() || next == '_' || next == '-')
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("--nnodes 1:3 needs", "nnodes", true)]
    #[case("use --num_machines, or", "num_machines", true)]
    #[case("use --num_machines_x", "num_machines", false)]
    #[case("num_machines is 2", "num_machines", false)]
    #[case("--tee", "tee", true)]
    fn flags_are_found_as_words(#[case] text: &str, #[case] flag: &str, #[case] wanted: bool) {
        assert_eq!(names(text, flag), wanted);
    }
}
