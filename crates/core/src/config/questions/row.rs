//! What the table says of one question.

use super::Known;
use crate::config::settings;
use crate::settings::{Setting, ValueKind};

/// One line of the table of questions.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) subject: Subject,
    /// What is asked.
    pub(super) text: &'static str,
    /// Why somebody should care, in a sentence.
    pub(super) why: &'static str,
    /// Does it come up after the answers so far?
    pub(super) asked: fn(&Known) -> bool,
    /// Is it asked although only one answer is taken, so that the others can be refused by name?
    pub(super) is_always_asked: bool,
    /// An answer where there is no default; empty otherwise.
    pub(super) example: &'static str,
    /// Why a value that exists cannot be had after these answers, and what to do instead.
    pub(super) refuses: fn(&Known, &str) -> Option<&'static str>,
    /// What else a value must be, to complete "but must be ...".
    pub(super) check: fn(&Known, &str) -> Result<(), String>,
    default: Option<fn(&Known) -> String>,
    words: Option<fn(&Known) -> Words>,
}

/// Words to choose from, with what each means where that is worth saying.
pub(super) type Words = Vec<(&'static str, &'static str)>;

/// What a question is about.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject {
    /// The setting with this path.
    Setting(&'static str),
    /// Something that only decides which questions follow, by this name.
    Own(&'static str),
}

const YES_OR_NO: [(&str, &str); 2] = [("true", ""), ("false", "")];

/// A question about the setting with this path.
pub(super) const fn setting(path: &'static str, text: &'static str, why: &'static str) -> Row {
    Row {
        subject: Subject::Setting(path),
        text,
        why,
        asked: |_| true,
        is_always_asked: false,
        example: "",
        refuses: |_, _| None,
        check: |_, _| Ok(()),
        default: None,
        words: None,
    }
}

/// A question that no setting stands for.
pub(super) const fn own(name: &'static str, text: &'static str, why: &'static str) -> Row {
    Row { subject: Subject::Own(name), ..setting("", text, why) }
}

impl Row {
    pub(super) const fn when(mut self, asked: fn(&Known) -> bool) -> Self {
        self.asked = asked;
        self
    }

    pub(super) const fn always_asked(mut self) -> Self {
        self.is_always_asked = true;
        self
    }

    pub(super) const fn default(mut self, default: fn(&Known) -> String) -> Self {
        self.default = Some(default);
        self
    }

    /// There is no default, so an answer is needed, such as this one.
    pub(super) const fn needed(mut self, example: &'static str) -> Self {
        self.example = example;
        self
    }

    pub(super) const fn words(mut self, words: fn(&Known) -> Words) -> Self {
        self.words = Some(words);
        self
    }

    pub(super) const fn confirm(self) -> Self {
        self.words(|_| YES_OR_NO.to_vec())
    }

    pub(super) const fn refuses(mut self, refuses: fn(&Known, &str) -> Option<&'static str>) -> Self {
        self.refuses = refuses;
        self
    }

    pub(super) const fn check(mut self, check: fn(&Known, &str) -> Result<(), String>) -> Self {
        self.check = check;
        self
    }

    pub(super) const fn name(&self) -> &'static str {
        match self.subject {
            Subject::Setting(path) => path,
            Subject::Own(name) => name,
        }
    }

    pub(super) fn setting(&self) -> Option<&'static Setting> {
        match self.subject {
            Subject::Setting(path) => setting_at(path),
            Subject::Own(_) => None,
        }
    }

    /// What a file calls the setting, with its section.
    pub(super) fn key(&self) -> String {
        self.setting().map_or_else(|| self.name().to_owned(), Setting::file_key)
    }

    /// The answer of whoever just goes on; `None` where one is needed.
    pub(super) fn default_text(&self, known: &Known) -> Option<String> {
        match self.default {
            Some(default) => Some(default(known)),
            None if !self.example.is_empty() => None,
            None => Some(self.setting().and_then(Setting::default).unwrap_or_default()),
        }
    }

    /// The words to choose from; none where any text may be an answer.
    pub(super) fn words_now(&self, known: &Known) -> Words {
        match (self.words, self.setting().map(|setting| setting.kind)) {
            (Some(words), _) => words(known),
            (None, Some(ValueKind::Choice(names))) => names.iter().map(|name| (*name, "")).collect(),
            (None, Some(ValueKind::Bool)) => YES_OR_NO.to_vec(),
            _ => Words::new(),
        }
    }
}

/// The setting with this path; `None` for a question's own name.
pub(super) fn setting_at(path: &str) -> Option<&'static Setting> {
    settings().find(|setting| setting.path == path)
}
