//! What other programs say of their versions.

use std::ffi::OsStr;
use std::process::Command;

use accelerate_core::settings::shortened;
use accelerate_launch::{Limits, ask};

/// The first line of `program --version`; nothing if there is no such program or it does not say one. An error if it does not
/// come to an end.
pub(crate) fn version(program: impl AsRef<OsStr>) -> Result<Option<String>, String> {
    match ask(Command::new(program).arg("--version"), Limits::default()) {
        Ok(answer) if answer.status.success() => Ok(Some(first_line(&String::from_utf8_lossy(&answer.stdout)))),
        Err(error) if error.is_limit_passed() => Err(error.to_string()),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// As it can be shown: whatever a program prints, it is one short line.
fn first_line(text: &str) -> String {
    shortened(&text.lines().next().unwrap_or_default().replace(|letter: char| letter.is_control(), " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_has_no_version() {
        assert_eq!(version("no-such-program-anywhere"), Ok(None));
        assert!(version("cargo").is_ok_and(|text| text.is_some_and(|text| text.starts_with("cargo "))));
    }

    #[test]
    fn what_a_program_says_is_shown_as_one_short_line() {
        assert_eq!(first_line("g++ 12.2.0\nCopyright"), "g++ 12.2.0");
        assert_eq!(first_line("\u{1b}[31mred\u{7}"), " [31mred ");
        assert!(first_line(&"x".repeat(1 << 20)).len() < 100);
        assert_eq!(first_line(""), "");
    }
}
