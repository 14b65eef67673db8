//! Values of settings as text: what a variable, a flag or a scalar of a file holds.

use crate::config::{Auto, OffloadTarget};
use crate::environment::str_to_bool;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// What kind of text a value is, for help, completions and error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Yes or no, in any of the spellings of [`str_to_bool`].
    Bool,
    /// A whole number of at least 0.
    Integer {
        /// The largest that the setting's type holds.
        most: u64,
    },
    /// A number.
    Number,
    /// Seconds, fractions allowed.
    Seconds,
    /// A moment: RFC 3339, or seconds since 1970.
    Time,
    /// Any text.
    Text,
    /// A path in the file system.
    Path,
    /// Words separated by commas.
    List,
    /// One of these names.
    Choice(&'static [&'static str]),
    /// An object in JSON; in a file also a mapping.
    Object,
    /// `cpu`, or an object such as `{"nvme": "/local_nvme"}`.
    OffloadTarget,
    /// Output streams as torchrun numbers them, for all processes or by local rank.
    Streams,
    /// Options of the meeting of all processes, as torchrun writes them.
    RendezvousOptions,
    /// The word `auto`, or one of the kind.
    Auto(&'static ValueKind),
}

impl ValueKind {
    /// What a value of this kind must be, to complete "but must be ...".
    ///
    /// ```
    /// use accelerate_core::settings::ValueKind;
    /// assert_eq!(ValueKind::Choice(&["a", "b"]).wanted(), "one of a, b");
    /// ```
    pub fn wanted(self) -> String {
        match self {
            Self::Bool => "one of y, yes, t, true, on, 1 or n, no, f, false, off, 0".to_owned(),
            Self::Integer { most } => whole_number(0, most),
            Self::Number => "a number".to_owned(),
            Self::Seconds => "a number of seconds of at least 0".to_owned(),
            Self::Time => {
                "a time with its offset such as 2030-01-31T18:00:00+01:00, or whole seconds since 1970 as date +%s \
                 prints them"
                    .to_owned()
            }
            Self::Text => "text".to_owned(),
            Self::Path => "a path".to_owned(),
            Self::List => "words separated by commas".to_owned(),
            Self::Choice(names) => format!("one of {}", names.join(", ")),
            Self::Object => "an object, such as {\"key\": 1}".to_owned(),
            Self::OffloadTarget => "cpu, or an object with a folder such as {\"nvme\": \"/local_nvme\"}".to_owned(),
            Self::Streams => {
                "0 (none), 1 (standard output), 2 (standard error), 3 (both), or a list with each local rank once, such as 0:1,1:3"
                    .to_owned()
            }
            Self::RendezvousOptions => {
                "join_timeout=SECONDS or timeout=SECONDS, how long the processes may take to meet; torchrun's other options are \
                 for agents, which are not here"
                    .to_owned()
            }
            Self::Auto(kind) => format!("auto, or {}", kind.wanted()),
        }
    }

    /// The same, where a number is at least `least`.
    pub(crate) fn wanted_at_least(self, least: u64) -> String {
        match self {
            Self::Integer { most } => whole_number(least, most),
            Self::Auto(kind) => format!("auto, or {}", kind.wanted_at_least(least)),
            kind => kind.wanted(),
        }
    }

    /// The same in the place of a number that is larger than all that are possible; `None` of any other text.
    pub(crate) fn wanted_instead_of(self, found: &str, least: u64, most: u64) -> Option<String> {
        let found = found.trim();
        match self {
            Self::Integer { most: of_type } => {
                let most = most.min(of_type);
                let digits = found.strip_prefix('+').unwrap_or(found);
                let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                let is_too_large = digits.parse::<u64>().ok().is_none_or(|number| number > most);
                (is_number && is_too_large).then(|| format!("a whole number from {least} to {most}"))
            }
            Self::Seconds => {
                let is_too_large = found.parse::<f64>().is_ok_and(|seconds| seconds > LONGEST_DURATION.as_secs_f64());
                is_too_large
                    .then(|| format!("a number of seconds from 0 to {}, which is a year", LONGEST_DURATION.as_secs()))
            }
            Self::Auto(kind) => Some(format!("auto, or {}", kind.wanted_instead_of(found, least, most)?)),
            _ => None,
        }
    }

    /// The word that stands for a value in help texts.
    pub const fn placeholder(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Integer { .. } => "N",
            Self::Number => "NUMBER",
            Self::Seconds => "SECONDS",
            Self::Time => "TIME",
            Self::Text | Self::Choice(_) => "NAME",
            Self::Path => "PATH",
            Self::List => "NAMES",
            Self::Object => "JSON",
            Self::OffloadTarget => "PLACE",
            Self::Streams => "STREAMS",
            Self::RendezvousOptions => "OPTIONS",
            Self::Auto(kind) => kind.placeholder(),
        }
    }

    /// Do the words "none" and "null" say nothing, rather than being a value?
    pub(crate) const fn has_none(self) -> bool {
        !matches!(self, Self::Choice(_) | Self::Bool)
    }
}

/// Nobody means more than 64 bits hold, so that limit is not worth a word.
fn whole_number(least: u64, most: u64) -> String {
    match most {
        u64::MAX => format!("a whole number of at least {least}"),
        most => format!("a whole number from {least} to {most}"),
    }
}

/// A type that settings have.
pub trait SettingValue: Sized {
    /// What its text looks like.
    const KIND: ValueKind;

    /// The value that `text` writes down; `None` if it is none.
    fn read(text: &str) -> Option<Self>;

    /// The text that [`read`](Self::read) gives this value for.
    fn write(&self) -> String;
}

macro_rules! by_display {
    ($($type:ty: $kind:expr),* $(,)?) => {$(
        impl SettingValue for $type {
            const KIND: ValueKind = $kind;

            fn read(text: &str) -> Option<Self> {
                text.trim().parse().ok()
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

by_display! {
    u16: ValueKind::Integer { most: u16::MAX as u64 },
    u32: ValueKind::Integer { most: u32::MAX as u64 },
    u64: ValueKind::Integer { most: u64::MAX },
    usize: ValueKind::Integer { most: usize::MAX as u64 },
    i64: ValueKind::Number,
    f64: ValueKind::Number,
}

impl SettingValue for bool {
    const KIND: ValueKind = ValueKind::Bool;

    fn read(text: &str) -> Option<Self> {
        str_to_bool(text)
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl SettingValue for String {
    const KIND: ValueKind = ValueKind::Text;

    fn read(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }

    fn write(&self) -> String {
        self.clone()
    }
}

impl SettingValue for PathBuf {
    const KIND: ValueKind = ValueKind::Path;

    fn read(text: &str) -> Option<Self> {
        Some(text.into())
    }

    fn write(&self) -> String {
        self.to_string_lossy().into_owned()
    }
}

/// The longest that a setting or a flag may say: a year, which can be waited for on every clock.
pub const LONGEST_DURATION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl SettingValue for Duration {
    const KIND: ValueKind = ValueKind::Seconds;

    fn read(text: &str) -> Option<Self> {
        let duration = Self::try_from_secs_f64(text.trim().parse().ok()?).ok()?;
        Some(duration).filter(|duration| *duration <= LONGEST_DURATION)
    }

    fn write(&self) -> String {
        self.as_secs_f64().to_string()
    }
}

/// Smaller numbers of seconds since 1970, up to the year 2001, are taken for durations that somebody has given by mistake.
const FIRST_SECOND: u64 = 1_000_000_000;

impl SettingValue for SystemTime {
    const KIND: ValueKind = ValueKind::Time;

    fn read(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number {
            return text.parse::<jiff::Timestamp>().ok().map(Self::from);
        }
        let seconds = text.parse().ok().filter(|seconds| FIRST_SECOND <= *seconds)?;
        let time = Self::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
        // One that can be written as a date: milliseconds cannot.
        jiff::Timestamp::try_from(time).ok().map(Self::from)
    }

    fn write(&self) -> String {
        let of_epoch = || self.duration_since(Self::UNIX_EPOCH).unwrap_or_default().as_secs().to_string();
        jiff::Timestamp::try_from(*self).map_or_else(|_| of_epoch(), |time| time.to_string())
    }
}

impl<T: SettingValue> SettingValue for Vec<T> {
    const KIND: ValueKind = ValueKind::List;

    fn read(text: &str) -> Option<Self> {
        if text.trim().is_empty() {
            return Some(Self::new());
        }
        text.split(',').map(|word| T::read(word.trim())).collect()
    }

    fn write(&self) -> String {
        self.iter().map(T::write).collect::<Vec<_>>().join(",")
    }
}

impl SettingValue for Map<String, Value> {
    const KIND: ValueKind = ValueKind::Object;

    fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    fn write(&self) -> String {
        Value::Object(self.clone()).to_string()
    }
}

impl SettingValue for BTreeMap<String, Value> {
    const KIND: ValueKind = ValueKind::Object;

    fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    fn write(&self) -> String {
        Value::Object(self.clone().into_iter().collect()).to_string()
    }
}

impl SettingValue for OffloadTarget {
    const KIND: ValueKind = ValueKind::OffloadTarget;

    fn read(text: &str) -> Option<Self> {
        match text.trim() {
            text if text.eq_ignore_ascii_case("cpu") => Some(Self::Cpu),
            text => serde_json::from_str(text).ok(),
        }
    }

    fn write(&self) -> String {
        match self {
            Self::Cpu => "cpu".to_owned(),
            Self::Nvme(path) => serde_json::json!({"nvme": path.to_string_lossy()}).to_string(),
        }
    }
}

impl<T: SettingValue> SettingValue for Auto<T> {
    const KIND: ValueKind = ValueKind::Auto(&T::KIND);

    fn read(text: &str) -> Option<Self> {
        match text.trim() {
            text if text.eq_ignore_ascii_case("auto") => Some(Self::Auto),
            text => T::read(text).map(Self::Value),
        }
    }

    fn write(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Value(value) => value.write(),
        }
    }
}

/// Types that are objects in JSON.
macro_rules! object_value {
    ($type:ty) => {
        impl $crate::settings::SettingValue for $type {
            const KIND: $crate::settings::ValueKind = $crate::settings::ValueKind::Object;

            fn read(text: &str) -> Option<Self> {
                serde_json::from_str(text).ok()
            }

            fn write(&self) -> String {
                serde_json::to_string(self).unwrap_or_default()
            }
        }
    };
}
pub(crate) use object_value;
/// A value that files and variables write as one text becomes a `String` for serde, and is made from one.
macro_rules! text_of_setting {
    ($value:ty) => {
        impl From<$value> for String {
            fn from(value: $value) -> Self {
                $crate::settings::SettingValue::write(&value)
            }
        }

        impl TryFrom<String> for $value {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                use $crate::settings::SettingValue;
                Self::read(&text).ok_or_else(|| format!("{text:?} must be {}", Self::KIND.wanted()))
            }
        }
    };
}

pub(crate) use text_of_setting;
