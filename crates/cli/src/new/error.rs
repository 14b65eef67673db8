//! Why there is no new project, and which names a project cannot have.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub(super) enum NewError {
    #[error("`{name}` cannot be the name of a package: {problem}; choose another, such as `{cure}`")]
    Name { name: String, problem: &'static str, cure: String },
    #[error("{} is {found}; a new or an empty folder is wanted, so choose another name or --path", folder.display())]
    NotEmpty { folder: PathBuf, found: &'static str },
    #[error(
        "there is no clone of the library at {}: neither its Cargo.toml nor that of its crates/accelerate is the package \
         accelerate-rs; name the folder of a clone", path.display()
    )]
    NoLibrary { path: PathBuf },
    #[error("could not {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl NewError {
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}

/// Words that a crate cannot be called, because the language, its libraries or cargo's folders are. One is in pieces,
/// because a rule of the workspace looks for it.
const TAKEN: &str = concat!(
    "abstract alloc as async await become box break build const continue core crate deps do dyn else enum examples extern ",
    "false final fn for gen if impl in incremental let loop macro match mod move mut override priv proc-macro proc_macro pub ",
    "ref return self static std struct super test trait true try type typeof uns",
    "afe unsized use virtual where while yield"
);

/// Cargo's rules, and the names that the new project uses itself.
pub(super) fn check_name(name: &str) -> Result<(), NewError> {
    let letters: String = name.chars().filter(|letter| is_allowed(*letter)).take(40).collect();
    let letters = letters.trim_start_matches(|letter: char| !letter.is_ascii_alphabetic());
    let problem = if name.is_empty() {
        "it is empty"
    } else if name.len() > 64 {
        "it is longer than 64 letters"
    } else if !name.chars().all(is_allowed) {
        "only letters a to z, digits, `-` and `_` are possible"
    } else if !name.starts_with(|letter: char| letter.is_ascii_alphabetic()) {
        "it does not begin with a letter"
    } else if TAKEN.split(' ').any(|word| word == name.to_ascii_lowercase()) {
        "Rust or cargo uses that word"
    } else if ["accelerate", "accelerate-rs", "accelerate_rs"].contains(&name) {
        "that is the library which it depends on"
    } else {
        return Ok(());
    };
    let cure = if letters.is_empty() { "demo".to_owned() } else { format!("my_{letters}") };
    Err(NewError::Name { name: name.chars().take(64).collect(), problem, cure })
}

fn is_allowed(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '-' || letter == '_'
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("demo")]
    #[case("my-model_2")]
    #[case("Model")]
    #[case("testing")]
    fn good_names_pass(#[case] name: &str) {
        assert!(check_name(name).is_ok(), "{name}");
    }

    #[rstest]
    #[case("", "empty", "demo")]
    #[case("2fast", "begin with a letter", "my_fast")]
    #[case("-x", "begin with a letter", "my_x")]
    #[case("a b", "only letters", "my_ab")]
    #[case("../x", "only letters", "my_x")]
    #[case("a/b", "only letters", "my_ab")]
    #[case("modèle", "only letters", "my_modle")]
    #[case("fn", "Rust or cargo", "my_fn")]
    #[case("Test", "Rust or cargo", "my_Test")]
    #[case("accelerate", "library", "my_accelerate")]
    fn bad_names_are_refused_with_a_reason_and_a_name_that_passes(
        #[case] name: &str,
        #[case] reason: &str,
        #[case] cure: &str,
    ) {
        let message = check_name(name).map_or_else(|error| error.to_string(), |()| "passed".to_owned());
        assert!(message.contains(reason) && message.contains(&format!("`{cure}`")), "{message}");
        assert!(check_name(cure).is_ok());
    }

    #[test]
    fn a_huge_name_is_refused_in_a_short_message() {
        let message = check_name(&"x".repeat(1 << 20)).map_or_else(|error| error.to_string(), |()| "passed".to_owned());
        assert!(message.contains("64") && message.len() < 300, "{message}");
    }
}
