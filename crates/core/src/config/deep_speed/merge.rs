//! Putting values that the program gives into a configuration, and keeping those that it contradicts.

use super::Auto;
use crate::error::deep_speed::Conflict;
use crate::settings::shortened;
use serde::Serialize;

/// Who gives a value.
#[derive(Clone, Copy)]
pub(super) struct Source {
    words: &'static str,
    setting: Option<&'static str>,
}

impl Source {
    /// The setting with this path, and what messages call it.
    pub(super) const fn setting(words: &'static str, path: &'static str) -> Self {
        Self { words, setting: Some(path) }
    }

    /// An object that was passed to `prepare`.
    pub(super) const fn object(words: &'static str) -> Self {
        Self { words, setting: None }
    }

    pub(super) fn conflict(self, key: &str, configured: String, given: String) -> Conflict {
        let Self { words: source, setting } = self;
        Conflict { key: key.to_owned(), place: None, configured, source, setting, given }
    }
}

/// The values that were contradicted so far.
#[derive(Default)]
pub(super) struct Merge {
    pub(super) conflicts: Vec<Conflict>,
}

impl Merge {
    pub(super) fn put<T: PartialEq + Serialize>(
        &mut self,
        key: &str,
        source: Source,
        slot: &mut Option<Auto<T>>,
        given: Option<T>,
    ) {
        let Some(given) = given else { return };
        match slot {
            Some(Auto::Value(configured)) => self.compare(key, configured, source, &given),
            slot => *slot = Some(Auto::Value(given)),
        }
    }

    pub(super) fn compare<T: PartialEq + Serialize>(&mut self, key: &str, configured: &T, source: Source, given: &T) {
        if configured != given {
            let shown = |value: &T| shortened(&serde_json::to_string(value).unwrap_or_default());
            self.conflicts.push(source.conflict(key, shown(configured), shown(given)));
        }
    }
}
