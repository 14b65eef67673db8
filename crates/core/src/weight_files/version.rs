//! Formats that say their version: what a newer version of this library has written is not damaged.

use super::shown::shown;
use crate::Error;
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use serde::Deserialize;

/// What every version of a format says, whatever else it has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

/// The error of a text that is in a later version of a format than this one. `None` where it is not: what is wrong with it is
/// something else.
pub(crate) fn newer_version(json: &str, format: &'static str, known: u32) -> Option<Error> {
    let head: Head = serde_json::from_str(json).ok()?;
    let is_newer = head.format == format && head.version > u64::from(known);
    is_newer.then(|| Kind::NewerVersion { format, found: head.version, known }.into())
}

/// What is wrong with the format that a text says, if anything.
pub(crate) fn other_format(found: (&str, u32), known: (&str, u32)) -> Option<String> {
    let ((format, version), (known_format, known_version)) = (found, known);
    let is_other = format != known_format || version != known_version;
    is_other.then(|| {
        let format = shown(format);
        format!("it has format `{format}`, version {version}; `{known_format}`, version {known_version} is known")
    })
}
