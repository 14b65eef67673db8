//! What can be wrong with settings: in files, variables, flags, and with one another.

use crate::files::ShownPath;
use crate::settings::Position;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsErrorKind {
    #[error("{}: the file has {bytes} bytes, but a configuration may have at most {most}", path.shown())]
    TooLarge { path: PathBuf, bytes: usize, most: usize },
    #[error("{}:{position}: {problem}", path.shown())]
    Syntax { path: PathBuf, position: Position, problem: String },
    #[error("{}:{position}: the key {key:?} is there twice; keep one of the two", path.shown())]
    DuplicateKey { path: PathBuf, position: Position, key: String },
    #[error("{}:{position}: {what} must be a mapping of keys to values", path.shown())]
    NotAMapping { path: PathBuf, position: Position, what: String },
    #[error("{}:{position}: there is no key {key:?} {place}{hint}", path.shown())]
    UnknownKey { path: PathBuf, position: Position, key: String, place: String, hint: String },
    #[error("{}:{position}: {key} is {found}, but must be {wanted}", path.shown())]
    Shape { path: PathBuf, position: Position, key: String, found: String, wanted: String },
    #[error("{}:{position}: {key} is {found:?}, but must be {wanted}", path.shown())]
    FileValue { path: PathBuf, position: Position, key: String, found: String, wanted: String },
    #[error("the environment variable {name} is {found:?}, but must be {wanted}")]
    Variable { name: String, found: String, wanted: String },
    #[error("the flag --{flag} is {found:?}, but must be {wanted}")]
    Flag { flag: String, found: String, wanted: String },
    #[error("{key} is {found:?}, but must be {wanted}")]
    Answer { key: String, found: String, wanted: String },
    #[error("{name} is {found} ({origin}), which is refused: {why}")]
    Refused { name: String, found: String, origin: String, why: &'static str },
    #[error("{flag} has no effect without {switch}; add {switch}, or leave the flag out")]
    MissingSwitch { flag: String, switch: &'static str },
    #[error("{problem} ({places})")]
    Places { problem: String, places: String },
    #[error("{first} ({first_origin}) and {second} ({second_origin}) contradict each other: {why}")]
    Contradiction { first: String, first_origin: String, second: String, second_origin: String, why: &'static str },
}
