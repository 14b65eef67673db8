//! Settings, each declared once: its field, default, key in files, variable, flag, help and standing.
//!
//! A *record* is a group of settings under the name that the reference gives it, such as
//! [`DataLoaderConfiguration`](crate::config::DataLoaderConfiguration). It is declared with [`record!`](record) and has
//! two forms. The form that users write has optional fields: `None` means that nobody has said anything. The form that
//! engines read is named `...Settings` and has a value for every field that has a default.
//!
//! The same declaration gives the reading and writing of every source of values: code, flags, the environment and
//! files ([`Document`]). [`RunConfig::resolve`](crate::config::RunConfig::resolve) puts the sources together, and
//! knows of every value where it came from ([`Origin`]).

mod document;
mod environment;
mod file;
mod origin;
pub(crate) mod record;
mod value;

pub(crate) use document::MAX_BYTES;
pub use document::{Document, Node, NodeValue, shortened, shortened_line};
pub use environment::{DEFAULTS_VARIABLE, ORIGINS_VARIABLE};
pub(crate) use environment::{read as read_environment, says_something};
pub use file::read_file;
pub use origin::{Origin, Origins, Position};
pub(crate) use record::is_nothing;
pub use record::{Record, Setting};
pub use value::{LONGEST_DURATION, SettingValue, ValueKind};
pub(crate) use value::{object_value, text_of_setting};

/// What becomes of a setting that somebody says.
///
/// A value that equals the setting's default, or is listed as harmless, asks for nothing and is accepted in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has the effect that its documentation describes.
    Honoured,
    /// It is accepted and changes nothing, for this reason. Whoever says it is told.
    WithoutEffect(&'static str),
    /// It is an error, for this reason.
    Refused(&'static str),
}

/// What a setting has besides field, type and default. Made by [`setting`] and its methods.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    pub(crate) keys: &'static [&'static str],
    pub(crate) variable: Option<&'static str>,
    pub(crate) flag: Option<&'static str>,
    pub(crate) flag_aliases: &'static [&'static str],
    pub(crate) is_switch: bool,
    pub(crate) is_code_only: bool,
    pub(crate) is_for_launcher: bool,
    pub(crate) is_secret: bool,
    pub(crate) is_object_too: bool,
    pub(crate) is_own_key: bool,
    pub(crate) is_for_python: bool,
    pub(crate) least: Option<u64>,
    pub(crate) most: Option<u64>,
    pub(crate) standing: Standing,
    pub(crate) harmless: &'static [&'static str],
    pub(crate) silent: &'static [&'static str],
    pub(crate) reference_default: Option<&'static str>,
    pub(crate) seed_default: Option<&'static str>,
}

/// A setting with nothing but a field: files know it by the field's name, and its variable is made of the record's
/// prefix and that name.
pub(crate) const fn setting() -> Declaration {
    Declaration {
        keys: &[],
        variable: None,
        flag: None,
        flag_aliases: &[],
        is_switch: false,
        is_code_only: false,
        is_for_launcher: false,
        is_secret: false,
        is_object_too: false,
        is_own_key: false,
        is_for_python: false,
        least: None,
        most: None,
        standing: Standing::Honoured,
        harmless: &[],
        silent: &[],
        reference_default: None,
        seed_default: None,
    }
}

impl Declaration {
    /// The keys under which files have it; the first one is written. Without this: the field's name.
    pub(crate) const fn keys(mut self, keys: &'static [&'static str]) -> Self {
        self.keys = keys;
        self
    }

    /// The environment variable, where the reference has one.
    pub(crate) const fn variable(mut self, name: &'static str) -> Self {
        self.variable = Some(name);
        self
    }

    /// The flag of `accelerate launch`, without its two hyphens and spelled with `_`.
    pub(crate) const fn flag(mut self, name: &'static str) -> Self {
        self.flag = Some(name);
        self
    }

    /// Other spellings of the flag.
    pub(crate) const fn flag_aliases(mut self, names: &'static [&'static str]) -> Self {
        self.flag_aliases = names;
        self
    }

    /// The flag stands for "true" and takes no value.
    pub(crate) const fn switch(mut self) -> Self {
        self.is_switch = true;
        self
    }

    /// Only code can say it: there is no text for it.
    pub(crate) const fn code_only(mut self) -> Self {
        self.is_code_only = true;
        self
    }

    /// It is for the launcher alone: the processes that it starts are not told.
    pub(crate) const fn launcher(mut self) -> Self {
        self.is_for_launcher = true;
        self
    }

    /// Its values may hold passwords, so that nobody prints them.
    pub(crate) const fn secret(mut self) -> Self {
        self.is_secret = true;
        self
    }

    /// Programs in Python can have it, so that a launcher hands it on to them where it is refused otherwise.
    pub(crate) const fn for_python(mut self) -> Self {
        self.is_for_python = true;
        self
    }

    /// Beside what its kind says, a value may be an object.
    pub(crate) const fn or_object(mut self) -> Self {
        self.is_object_too = true;
        self
    }

    /// Files of Python Accelerate have no key for it at their top level.
    pub(crate) const fn own_key(mut self) -> Self {
        self.is_own_key = true;
        self
    }

    /// The least number that is possible.
    pub(crate) const fn at_least(mut self, least: u64) -> Self {
        self.least = Some(least);
        self
    }

    /// The largest number that is possible, where the type of the setting would hold a larger one.
    pub(crate) const fn at_most(mut self, most: u64) -> Self {
        self.most = Some(most);
        self
    }

    /// It changes nothing, because ...
    pub(crate) const fn without_effect(mut self, why: &'static str) -> Self {
        self.standing = Standing::WithoutEffect(why);
        self
    }

    /// It cannot be had, because ...
    pub(crate) const fn refused(mut self, why: &'static str) -> Self {
        self.standing = Standing::Refused(why);
        self
    }

    /// Values beside the default that ask for nothing.
    pub(crate) const fn harmless(mut self, values: &'static [&'static str]) -> Self {
        self.harmless = values;
        self
    }

    /// Words that say nothing.
    pub(crate) const fn silent(mut self, words: &'static [&'static str]) -> Self {
        self.silent = words;
        self
    }

    /// The default of Python Accelerate, where it is another one.
    pub(crate) const fn reference_default(mut self, value: &'static str) -> Self {
        self.reference_default = Some(value);
        self
    }

    /// The default that the documented class signature shows, where it is another one.
    pub(crate) const fn seed_default(mut self, value: &'static str) -> Self {
        self.seed_default = Some(value);
        self
    }
}
