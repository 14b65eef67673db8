//! Records of settings: one declaration each, from which both forms and the table come.

use super::{Declaration, Standing, ValueKind};

/// One line of the table: everything about a setting but its value.
#[derive(Debug)]
pub struct Setting {
    /// The record that has it, by the name that the reference gives that.
    pub record: &'static str,
    /// The field of the record.
    pub field: &'static str,
    /// The section of a configuration file, and the field: `fsdp_config.sharding_strategy`. At the top level only the field.
    pub path: &'static str,
    /// The section of a configuration file; empty at its top level.
    pub section: &'static str,
    /// What keys in the section may begin with, such as `fsdp_`.
    pub key_prefix: &'static str,
    /// The documentation of the field.
    pub documentation: &'static str,
    /// What its values look like.
    pub kind: ValueKind,
    pub(crate) variable_prefix: &'static str,
    pub(crate) default: fn() -> Option<String>,
    pub(crate) reads: fn(&str) -> bool,
    pub(crate) declaration: Declaration,
}

impl Setting {
    /// The first paragraph of the documentation as one line, for help texts.
    pub fn help(&self) -> String {
        let first = self.documentation.split("\n\n").next().unwrap_or_default();
        plain(first)
    }

    /// The rest of the documentation, with paragraphs as they are.
    pub fn details(&self) -> String {
        self.documentation.split("\n\n").skip(1).map(plain).collect::<Vec<_>>().join("\n\n")
    }

    /// Is this text a value of the setting?
    pub fn is_value(&self, text: &str) -> bool {
        (self.reads)(text) && self.is_in_range(text)
    }

    /// The environment variable that says it; `None` where only code can.
    pub fn variable(&self) -> Option<String> {
        if self.declaration.is_code_only {
            return None;
        }
        let made = || format!("{}{}", self.variable_prefix, self.field.to_ascii_uppercase());
        Some(self.declaration.variable.map_or_else(made, str::to_owned))
    }

    /// The flag of `accelerate launch`, without hyphens in front and spelled with `_`, where there is one.
    pub fn flag(&self) -> Option<&'static str> {
        self.declaration.flag
    }

    /// Other spellings of the flag.
    pub fn flag_aliases(&self) -> &'static [&'static str] {
        self.declaration.flag_aliases
    }

    /// Is it only for the launcher, so that processes are not told of it?
    pub fn is_for_launcher(&self) -> bool {
        self.declaration.is_for_launcher
    }

    /// Does the flag stand for "true" without a value?
    pub fn is_switch(&self) -> bool {
        self.declaration.is_switch
    }

    /// Is there no text for it, so that only a program can say it?
    pub fn is_code_only(&self) -> bool {
        self.declaration.is_code_only
    }

    /// May its values hold passwords, so that they are not to be printed?
    pub fn is_secret(&self) -> bool {
        self.declaration.is_secret
    }

    /// Is this value not to be printed? Of a secret setting, only that there is nothing in it may be known.
    ///
    /// ```
    /// use accelerate_core::config::settings;
    /// let tpu_env = settings().find(|setting| setting.path == "tpu_env").unwrap();
    /// assert!(tpu_env.hides("TOKEN=1") && !tpu_env.hides("[]"));
    /// ```
    pub fn hides(&self, value: &str) -> bool {
        self.is_secret() && !is_nothing(value)
    }

    /// The key under which files are written.
    pub fn key(&self) -> &'static str {
        self.declaration.keys.first().copied().unwrap_or(self.field)
    }

    /// Does a file mean this setting by `key`, in this setting's section? The section's prefix may be there or not.
    pub fn has_key(&self, key: &str) -> bool {
        let is_known = |key: &str| match self.declaration.keys {
            [] => key == self.field,
            keys => keys.contains(&key),
        };
        let with_prefix = || is_known(&format!("{}{key}", self.key_prefix));
        let without_prefix = || key.strip_prefix(self.key_prefix).is_some_and(is_known);
        is_known(key) || (!self.key_prefix.is_empty() && (with_prefix() || without_prefix()))
    }

    /// The default, as text; `None` where nothing is a possible value.
    pub fn default(&self) -> Option<String> {
        (self.default)()
    }

    /// Python Accelerate's default, where it is another one.
    pub fn reference_default(&self) -> Option<&'static str> {
        self.declaration.reference_default
    }

    /// The default that the documented class signature shows, where it is another one.
    pub fn seed_default(&self) -> Option<&'static str> {
        self.declaration.seed_default
    }

    /// What becomes of it when somebody says it.
    pub fn standing(&self) -> Standing {
        self.declaration.standing
    }

    /// Do programs in Python get it where it is refused otherwise?
    pub fn is_for_python(&self) -> bool {
        self.declaration.is_for_python
    }

    /// [`standing`](Self::standing) where a program in Python is told of it, which has engines of its own.
    pub(crate) fn standing_for(&self, is_for_python: bool) -> Standing {
        match self.standing() {
            Standing::WithoutEffect(_) if is_for_python && !self.declaration.is_for_launcher => Standing::Honoured,
            Standing::Refused(_) if is_for_python && self.declaration.is_for_python => Standing::Honoured,
            standing => standing,
        }
    }

    /// Does this value ask for nothing, because it is the default or as good as that?
    pub(crate) fn asks_for_nothing(&self, value: &str) -> bool {
        self.default().as_deref() == Some(value)
            || self.declaration.harmless.iter().any(|harmless| harmless.eq_ignore_ascii_case(value))
    }

    /// What a value must be, to complete "but must be ...".
    pub fn wanted(&self) -> String {
        let wanted = self.kind.wanted_at_least(self.declaration.least.unwrap_or(0));
        if self.declaration.is_object_too { format!("{wanted}, or {}", ValueKind::Object.wanted()) } else { wanted }
    }

    /// May a file give an object for it?
    pub(crate) fn takes_object(&self) -> bool {
        self.declaration.is_object_too || matches!(self.kind, ValueKind::Object | ValueKind::OffloadTarget)
    }

    /// [`wanted`](Self::wanted) in the place of `found`, which is no value: if it is too large, with the largest number that is
    /// possible.
    ///
    /// ```
    /// use accelerate_core::config::settings;
    /// let max_restarts = settings().find(|setting| setting.path == "max_restarts").unwrap();
    /// assert_eq!(max_restarts.wanted_for("-1"), "a whole number of at least 0");
    /// assert_eq!(max_restarts.wanted_for("99999999999999999999"), "a whole number from 0 to 18446744073709551615");
    /// ```
    pub fn wanted_for(&self, found: &str) -> String {
        let (least, most) = (self.declaration.least.unwrap_or(0), self.declaration.most.unwrap_or(u64::MAX));
        self.kind.wanted_instead_of(found, least, most).unwrap_or_else(|| self.wanted())
    }

    /// Is the number that this text writes down neither too small nor too large?
    pub(crate) fn is_in_range(&self, text: &str) -> bool {
        let (least, most) = (self.declaration.least, self.declaration.most);
        text.trim()
            .parse::<u64>()
            .ok()
            .is_none_or(|number| least.is_none_or(|least| number >= least) && most.is_none_or(|most| number <= most))
    }
}

/// A paragraph of documentation as one line of words: of links it keeps what they show, and code loses its marks.
fn plain(paragraph: &str) -> String {
    let line = paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let (mut text, mut rest) = (String::new(), line.trim());
    while let Some((before, link)) = rest.split_once('[') {
        text += before;
        let Some((shown, after)) = link.split_once(']') else {
            rest = link;
            break;
        };
        text += shown;
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        rest = target.map_or(after, |(_, after)| after);
    }
    (text + rest).replace('`', "")
}

/// The form of a record that users write: every field is `None` until somebody says something.
pub trait Record: Clone + Default {
    /// The table of its settings, in the order of the fields.
    fn settings() -> &'static [Setting];

    /// The text of what `setting` says here, if anything. Values that only code can say give their debugging text.
    fn text(&self, setting: &Setting) -> Option<String>;

    /// Says what `text` writes down. `false` if it is no such value.
    fn say(&mut self, setting: &Setting, text: &str) -> bool;

    /// Takes over from `other` what nobody has said here, and returns which settings those were.
    fn fill(&mut self, other: &Self) -> Vec<&'static Setting>;
}

/// Declares a record: `Form that users write => Form that engines read`, its section in files, the prefix of keys in
/// it, the prefix of variables that the reference has no name for, and the settings. A setting with `= value` has that
/// default; one without may stay unsaid in both forms.
macro_rules! record {
    (
        $(#[doc = $record_doc:expr])*
        $record:ident => $settings:ident, section $section:tt, keys $key_prefix:tt, variables $variable_prefix:tt {
            $(
                $(#[doc = $doc:expr])*
                $(#[serde($($serde:tt)*)])?
                $field:ident: $type:ty $(= $default:expr)? => $declaration:expr;
            )+
        }
    ) => {
        $(#[doc = $record_doc])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $record {
            $(
                $(#[doc = $doc])*
                $(#[serde($($serde)*)])?
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $field: Option<$type>,
            )+
        }

        #[doc = concat!("[`", stringify!($record), "`] with a value for every setting that has a default.")]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $settings {
            $(
                $(#[doc = $doc])*
                pub $field: $crate::settings::record::settled_type!($type $(= $default)?),
            )+
        }

        impl Default for $settings {
            fn default() -> Self {
                $record::default().into()
            }
        }

        impl From<$record> for $settings {
            fn from(record: $record) -> Self {
                Self { $( $field: $crate::settings::record::settled!(record.$field $(, $default)?), )+ }
            }
        }

        impl From<$settings> for $record {
            fn from(settings: $settings) -> Self {
                Self { $( $field: $crate::settings::record::said!(settings.$field $(, $default)?), )+ }
            }
        }

        impl $crate::settings::Record for $record {
            fn settings() -> &'static [$crate::settings::Setting] {
                const SETTINGS: &[$crate::settings::Setting] = &[$(
                    $crate::settings::Setting {
                        record: stringify!($record),
                        field: stringify!($field),
                        path: $crate::settings::record::setting_path!($section, $field),
                        section: $section,
                        key_prefix: $key_prefix,
                        documentation: concat!($($doc, "\n"),*),
                        kind: <$type as $crate::settings::SettingValue>::KIND,
                        variable_prefix: $variable_prefix,
                        reads: |text| <$type as $crate::settings::SettingValue>::read(text).is_some(),
                        default: $crate::settings::record::default_text!($type $(= $default)?),
                        declaration: {
                            #[allow(unused_imports)]
                            use $crate::settings::setting;
                            $declaration
                        },
                    },
                )+];
                SETTINGS
            }

            fn text(&self, setting: &$crate::settings::Setting) -> Option<String> {
                match setting.field {
                    $( stringify!($field) => {
                        self.$field.as_ref().map(<$type as $crate::settings::SettingValue>::write)
                    } )+
                    _ => None,
                }
            }

            fn say(&mut self, setting: &$crate::settings::Setting, text: &str) -> bool {
                match setting.field {
                    $( stringify!($field) => {
                        self.$field = <$type as $crate::settings::SettingValue>::read(text);
                        self.$field.is_some()
                    } )+
                    _ => false,
                }
            }

            fn fill(&mut self, other: &Self) -> Vec<&'static $crate::settings::Setting> {
                let mut filled = Vec::new();
                let mut settings = <Self as $crate::settings::Record>::settings().iter();
                $(
                    let setting = settings.next();
                    if self.$field.is_none() && other.$field.is_some() {
                        self.$field = other.$field.clone();
                        filled.extend(setting);
                    }
                )+
                filled
            }
        }
    };
}
pub(crate) use record;

macro_rules! settled_type {
    ($type:ty = $default:expr) => { $type };
    ($type:ty) => { Option<$type> };
}
pub(crate) use settled_type;

macro_rules! settled {
    ($value:expr, $default:expr) => {
        $value.unwrap_or_else(|| $default)
    };
    ($value:expr) => {
        $value
    };
}
pub(crate) use settled;

macro_rules! said {
    ($value:expr, $default:expr) => {
        Some($value)
    };
    ($value:expr) => {
        $value
    };
}
pub(crate) use said;

macro_rules! default_text {
    ($type:ty = $default:expr) => {
        || Some(<$type as $crate::settings::SettingValue>::write(&$default))
    };
    ($type:ty) => {
        || None
    };
}
pub(crate) use default_text;

macro_rules! setting_path {
    ("", $field:ident) => {
        stringify!($field)
    };
    ($section:tt, $field:ident) => {
        concat!($section, ".", stringify!($field))
    };
}
pub(crate) use setting_path;

/// A text without anything in it: an empty word, list or object, or the `null` of a file.
pub(crate) fn is_nothing(value: &str) -> bool {
    matches!(value.trim(), "" | "[]" | "{}" | "null")
}
