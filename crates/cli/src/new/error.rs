//! Why there is no new project, and which names a project cannot have.

use std::io;
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, in_one_line};

#[derive(Debug, thiserror::Error)]
pub(super) enum NewError {
    #[error("`{}` cannot be the name of a package: {problem}; choose another, such as `{cure}`", in_one_line(name))]
    Name { name: String, problem: &'static str, cure: String },
    #[error("{} is {found}; a new or an empty folder is wanted, so choose another name or --path", folder.shown())]
    NotEmpty { folder: PathBuf, found: &'static str },
    #[error(
        "there is no clone of the library at {}: neither its Cargo.toml nor that of its crates/accelerate is the package \
         accelerate-rs; name the folder of a clone", path.shown()
    )]
    NoLibrary { path: PathBuf },
    #[error(
        "{} goes up again out of a folder that is not there; name the folder of the project without `..`", folder.shown()
    )]
    GoesUp { folder: PathBuf },
    #[error(
        "the library is not on crates.io yet, and the clone that this command was built from is not at {} any more; name \
         a clone by --accelerate PATH", built_from.shown()
    )]
    NoClone { built_from: PathBuf },
    #[error("could not {action} {}", path.shown())]
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
    let problem = if name.is_empty() {
        "it is empty"
    } else if name.len() > 64 {
        "it is longer than 64 letters"
    } else if !name.chars().all(is_allowed) {
        "only letters a to z, digits, `-` and `_` are possible"
    } else if !name.starts_with(|letter: char| letter.is_ascii_alphabetic()) {
        "it does not begin with a letter"
    } else if name.contains(|letter: char| letter.is_ascii_uppercase()) {
        "it has capitals, of which the compiler warns in every build"
    } else if is_taken(name) {
        "Rust or cargo uses that word"
    } else if is_library(name) {
        "that is the library which it depends on"
    } else {
        return Ok(());
    };
    Err(NewError::Name { name: name.chars().take(64).collect(), problem, cure: good_name(name) })
}

/// The nearest name that passes: `MyModel 2` is `my_model2`.
fn good_name(name: &str) -> String {
    let mut cure = String::new();
    let mut is_after_small = false;
    for letter in name.chars().filter(|letter| is_allowed(*letter)).take(40) {
        if letter.is_ascii_uppercase() && is_after_small {
            cure.push('_');
        }
        is_after_small = letter.is_ascii_lowercase() || letter.is_ascii_digit();
        cure.push(letter.to_ascii_lowercase());
    }
    let has_start = cure.starts_with(|letter: char| letter.is_ascii_alphabetic());
    let cure = cure.trim_start_matches(|letter: char| !letter.is_ascii_alphabetic());
    match cure {
        "" => "demo".to_owned(),
        _ if !has_start || is_taken(cure) || is_library(cure) => format!("my_{cure}"),
        _ => cure.to_owned(),
    }
}

fn is_taken(name: &str) -> bool {
    TAKEN.split(' ').any(|word| word == name)
}

fn is_library(name: &str) -> bool {
    ["accelerate", "accelerate-rs", "accelerate_rs"].contains(&name)
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
    #[case("testing")]
    fn good_names_pass(#[case] name: &str) {
        assert!(check_name(name).is_ok(), "{name}");
    }

    #[rstest]
    #[case("", "empty", "demo")]
    #[case("2fast", "begin with a letter", "my_fast")]
    #[case("-x", "begin with a letter", "my_x")]
    #[case("a b", "only letters", "ab")]
    #[case("../x", "only letters", "x")]
    #[case("a/b", "only letters", "ab")]
    #[case("modèle", "only letters", "modle")]
    #[case("é", "only letters", "demo")]
    #[case("fn", "Rust or cargo", "my_fn")]
    #[case("Demo", "capitals", "demo")]
    #[case("MyModel2B", "capitals", "my_model2_b")]
    #[case("BERT", "capitals", "bert")]
    #[case("Test", "capitals", "my_test")]
    #[case("Accelerate-RS", "capitals", "my_accelerate-rs")]
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
