//! Regular expressions of users and of files.

use crate::error::Result;
use crate::error::lora::LoraErrorKind as Kind;
use crate::weight_files::shown;
use fancy_regex::{Regex, RegexBuilder};

/// Longer patterns are an accident or an attack.
const MAX_PATTERN_BYTES: usize = 8 << 10;
/// What a single comparison may cost, so that no pattern takes forever.
const MAX_BACKTRACKS: usize = 100_000;
/// What a pattern may become.
const MAX_COMPILED_BYTES: usize = 4 << 20;

/// A pattern, ready to be compared with paths.
#[derive(Debug)]
pub(super) struct Pattern {
    field: &'static str,
    text: String,
    regex: Regex,
}

impl Pattern {
    /// `whole` is `text` with what has to be around it.
    pub(super) fn new(field: &'static str, text: &str, whole: &str) -> Result<Self> {
        let refused = |reason: String| Kind::Pattern { field, pattern: shown(text), reason };
        if text.len() > MAX_PATTERN_BYTES {
            return Err(
                refused(format!("it has {} bytes, and at most {MAX_PATTERN_BYTES} are read", text.len())).into()
            );
        }
        let mut builder = RegexBuilder::new(whole);
        builder.backtrack_limit(MAX_BACKTRACKS).delegate_size_limit(MAX_COMPILED_BYTES);
        let regex = builder.build().map_err(|error| refused(error.to_string()))?;
        Ok(Self { field, text: text.to_owned(), regex })
    }

    /// As `re.fullmatch`.
    pub(super) fn full(field: &'static str, text: &str) -> Result<Self> {
        Self::new(field, text, &format!(r"\A(?:{text})\z"))
    }

    /// As it was said.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn matches(&self, path: &str) -> Result<bool> {
        self.regex.is_match(path).map_err(|error| self.gave_up(&error))
    }

    /// What the group `idx` of the first match holds.
    pub(super) fn index(&self, path: &str) -> Result<Option<String>> {
        let captures = self.regex.captures(path).map_err(|error| self.gave_up(&error))?;
        Ok(captures.and_then(|captures| Some(captures.name("idx")?.as_str().to_owned())))
    }

    fn gave_up(&self, error: &fancy_regex::Error) -> crate::Error {
        Kind::Pattern { field: self.field, pattern: shown(&self.text), reason: error.to_string() }.into()
    }
}
