//! The last questions: where the file is written, and whether one that is there may give way.

use std::path::{Path, PathBuf};

use accelerate_core::config::{ConfigFile, FileFormat, PartialRunConfig};
use accelerate_core::environment::str_to_bool;

use super::WizardArguments;
use super::prompter::{Attempts, Page, PromptError, Prompter, Reply};
use crate::config_file::{self, ConfigFileError, Existing};

const PLACE: Page<'_> = Page {
    key: "config_file",
    text: "Where shall the file be written?",
    why: "The default place is read by `accelerate launch` by itself, and others by --config_file.",
    details: "YAML, or JSON if the name ends in .json. Folders that do not exist are made.",
};

const REPLACE: Page<'_> = Page {
    key: "overwrite",
    text: "There is such a file already. Shall it be replaced?",
    why: "What it says is lost then.",
    details: "With no, you are asked for another place.",
};

/// How the conversation ended.
#[derive(Debug)]
pub(super) enum Destination {
    /// The file is there.
    Written(PathBuf),
    /// To the question before.
    Back,
}

/// Asks where, until the file is there or somebody goes back.
pub(super) fn write(
    said: &PartialRunConfig,
    arguments: &WizardArguments,
    prompter: &mut dyn Prompter,
) -> Result<Destination, PromptError> {
    let named = arguments.config_file.clone();
    let proposed = named.map_or_else(|| config_file::default_path(&config_file::variable), Ok);
    let shown = proposed.as_ref().ok().map(|path| path.to_string_lossy());
    let mut attempts = Attempts::default();
    loop {
        let path = match (prompter.text(&PLACE, shown.as_deref())?, &proposed) {
            (Reply::Back, _) => return Ok(Destination::Back),
            (Reply::Text(text), Ok(proposed)) if text.is_empty() || shown.as_deref() == Some(text.as_str()) => {
                proposed.clone()
            }
            (Reply::Text(text), Err(error)) if text.is_empty() => {
                attempts.refuse(&PLACE, prompter, &error.to_string())?;
                continue;
            }
            (Reply::Text(text), _) => expanded(&text),
        };
        match write_to(&path, said, arguments.overwrite, prompter)? {
            Ok(true) => return Ok(Destination::Written(path)),
            Ok(false) => {}
            Err(error) => attempts.refuse(&PLACE, prompter, &error.to_string())?,
        }
    }
}

/// Was it written? `false` if the file that is there stays.
fn write_to(
    path: &Path,
    said: &PartialRunConfig,
    may_replace: bool,
    prompter: &mut dyn Prompter,
) -> Result<Result<bool, ConfigFileError>, PromptError> {
    let text = ConfigFile::write(said, FileFormat::of_path(path));
    let existing = if may_replace { Existing::Replace } else { Existing::Keep("choose another place") };
    match config_file::write(path, &text, existing) {
        Err(ConfigFileError::Exists { .. }) => Ok(match replaces(prompter)? {
            true => config_file::write(path, &text, Existing::Replace).map(|()| true),
            false => Ok(false),
        }),
        written => Ok(written.map(|()| true)),
    }
}

/// Going back means no.
fn replaces(prompter: &mut dyn Prompter) -> Result<bool, PromptError> {
    let mut attempts = Attempts::default();
    loop {
        match prompter.confirm(&REPLACE, false)? {
            Reply::Back => return Ok(false),
            Reply::Text(text) if text.is_empty() => return Ok(false),
            Reply::Text(text) => match str_to_bool(&text) {
                Some(answer) => return Ok(answer),
                None => attempts.refuse(&REPLACE, prompter, "the answer must be yes or no")?,
            },
        }
    }
}

/// `~/` is the home folder, as in a shell.
fn expanded(text: &str) -> PathBuf {
    match (text.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => text.into(),
    }
}
