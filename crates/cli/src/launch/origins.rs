//! Where the settings come from that an error is about.

use std::fmt::Write as _;

use accelerate_core::config::{RunConfig, settings};
use accelerate_core::files::in_one_line;
use accelerate_core::settings::Origin;

/// The text of an error, and below it where each setting comes from that it names and nobody has typed.
pub(super) fn with_origins(run: &RunConfig, text: &str) -> String {
    let mut told = text.to_owned();
    for setting in settings().filter(|setting| !setting.is_secret()) {
        let origin = run.origin(setting.path);
        let is_elsewhere = matches!(origin, Origin::Environment(_) | Origin::File { .. });
        let Some(flag) = setting.flag().filter(|flag| is_elsewhere && names(text, flag)) else { continue };
        let origin = origin.to_string();
        if let Some(value) = run.text(setting).filter(|_| !text.contains(&origin)) {
            // Writing to a string cannot fail.
            let _ = write!(told, "\n  {flag} {} comes from {origin}", in_one_line(&value));
        }
    }
    told
}

/// Is the flag, or the setting that is called like it, a word of the text, and not a part of a longer one?
fn names(text: &str, flag: &str) -> bool {
    let is_part = |next: Option<char>| next.is_some_and(|next| next.is_ascii_alphanumeric() || "_-".contains(next));
    text.match_indices(flag).any(|(start, _)| {
        let (before, behind) = (&text[..start], &text[start + flag.len()..]);
        let is_flag = before.strip_suffix("--").is_some_and(|before| !is_part(before.chars().next_back()));
        // Words such as `hosts` mean other things, too.
        let is_setting = flag.contains('_') && !is_part(before.chars().next_back());
        (is_flag || is_setting) && !is_part(behind.chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("2 hosts are", "hosts", false)]
    #[case("---num_machines", "num_machines", false)]
    #[case("min_num_machines", "num_machines", false)]
    #[case("use --num_machines, or", "num_machines", true)]
    #[case("use --num_machines_x", "num_machines", false)]
    #[case("num_machines is 2", "num_machines", true)]
    #[case("--tee", "tee", true)]
    fn flags_are_found_as_words(#[case] text: &str, #[case] flag: &str, #[case] wanted: bool) {
        assert_eq!(names(text, flag), wanted);
    }
}
