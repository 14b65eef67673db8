//! Reading a document key by key, keeping account of what was read.

use super::Auto;
use super::keys::{self, Standing};
use crate::error::deep_speed::Problem;
use serde_json::{Map, Value};

/// A key that a document may have but that changes nothing here, and why.
///
/// ```
/// use accelerate_core::config::DeepSpeedConfig;
/// let config = DeepSpeedConfig::from_json(r#"{"zero_optimization": {"stage": 3, "overlap_comm": true}}"#)?;
/// assert_eq!(config.inert_keys[0].key, "zero_optimization.overlap_comm");
/// assert!(config.inert_keys[0].to_string().starts_with("zero_optimization.overlap_comm has no effect here: "));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InertKey {
    /// The key with its sections before it, or the name of a plugin's field.
    pub key: String,
    /// Why it changes nothing.
    pub why: &'static str,
}

impl std::fmt::Display for InertKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} has no effect here: {}", self.key, self.why)
    }
}

/// How many unknown keys are compared with those that are known.
const MOST_CORRECTED: usize = 32;

/// What was found while a document was read.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) problems: Vec<Problem>,
    pub(super) inert: Vec<InertKey>,
    /// Keys that are "auto" although nothing ever fills them.
    pub(super) stray_autos: Vec<String>,
}

/// One object of a document. Keys are taken out of it; [`Section::finish`] judges those that are left.
pub(super) struct Section<'a> {
    prefix: String,
    entries: Map<String, Value>,
    pub(super) findings: &'a mut Findings,
}

impl<'a> Section<'a> {
    pub(super) fn root(entries: Map<String, Value>, findings: &'a mut Findings) -> Self {
        Self { prefix: String::new(), entries, findings }
    }

    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The object at `key`; another kind of value is a problem.
    pub(super) fn section(&mut self, key: &str) -> Option<Section<'_>> {
        match self.take(key)? {
            Value::Object(entries) => {
                let prefix = format!("{}.", self.path(key));
                Some(Section { prefix, entries, findings: &mut *self.findings })
            }
            other => {
                self.wrong(key, &other, "an object");
                None
            }
        }
    }

    /// The value at `key`, where "auto" can be filled.
    pub(super) fn auto<T>(&mut self, key: &str, kind: &Kind<T>) -> Option<Auto<T>> {
        match self.take(key)? {
            Value::String(word) if word == "auto" => Some(Auto::Auto),
            value => self.judge(key, &value, kind).map(Auto::Value),
        }
    }

    /// The value at `key`, where nothing fills "auto".
    pub(super) fn plain<T>(&mut self, key: &str, kind: &Kind<T>) -> Option<T> {
        match self.take(key)? {
            Value::String(word) if word == "auto" => {
                let path = self.path(key);
                self.findings.stray_autos.push(path);
                None
            }
            value => self.judge(key, &value, kind),
        }
    }

    /// A name, by its own list of choices.
    pub(super) fn name<T: std::str::FromStr<Err = crate::Error>>(&mut self, key: &str) -> Option<T> {
        match self.take(key)? {
            Value::String(name) => match name.parse() {
                Ok(value) => Some(value),
                Err(error) => {
                    let key = self.path(key);
                    self.findings.problems.push(Problem::Name { key, error });
                    None
                }
            },
            other => {
                self.wrong(key, &other, "a name");
                None
            }
        }
    }

    pub(super) fn missing(&mut self, key: &str, why: &'static str) {
        let key = self.path(key);
        self.findings.problems.push(Problem::Missing { key, why });
    }

    /// Judges what nobody has taken. `owner` is whose parameters these are, where others have others.
    pub(super) fn finish(self, owner: Option<&'static str>) {
        let Self { prefix, entries, findings } = self;
        for (name, value) in entries {
            let key = format!("{prefix}{name}");
            match (keys::standing(&key), owner) {
                (Some(Standing::Honoured), Some(owner)) => findings.problems.push(Problem::Foreign { key, owner }),
                (Some(Standing::Inert(_)), _) if value == "auto" => findings.stray_autos.push(key),
                (Some(Standing::Inert(why)), _) => findings.inert.push(InertKey { key, why }),
                (Some(Standing::Refused(off, instead)), _) => {
                    if !off.covers(&value) {
                        findings.problems.push(Problem::Refused { key, found: shown(&value), instead });
                    }
                }
                (Some(Standing::Honoured) | None, _) => {
                    // A message shows no more of them than this.
                    let nearest = match findings.problems.len() < MOST_CORRECTED {
                        true => keys::nearest(&key),
                        false => None,
                    };
                    findings.problems.push(Problem::Unknown { key, nearest });
                }
            }
        }
    }

    /// Is `key` here, other than as `null`?
    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.get(key).is_some_and(|value| !value.is_null())
    }

    /// Passes over `key`, where another problem has been reported already.
    pub(super) fn discard(&mut self, key: &str) {
        self.entries.remove(key);
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.entries.remove(key).filter(|value| !value.is_null())
    }

    fn judge<T>(&mut self, key: &str, value: &Value, kind: &Kind<T>) -> Option<T> {
        let read = (kind.read)(value);
        if read.is_none() {
            self.wrong(key, value, kind.wanted);
        }
        read
    }

    fn wrong(&mut self, key: &str, value: &Value, wanted: &'static str) {
        let (key, found) = (self.path(key), shown(value));
        self.findings.problems.push(Problem::Value { key, found, wanted });
    }
}

/// How a value of some type is read, and what to say when it cannot be.
pub(super) struct Kind<T> {
    wanted: &'static str,
    read: fn(&Value) -> Option<T>,
}

impl<T> Kind<T> {
    pub(super) const fn new(wanted: &'static str, read: fn(&Value) -> Option<T>) -> Self {
        Self { wanted, read }
    }
}

pub(super) const FLAG: Kind<bool> = Kind::new("true or false", Value::as_bool);
pub(super) const TEXT: Kind<String> = Kind::new("text", |value| value.as_str().map(str::to_owned));
pub(super) const COUNT: Kind<u64> = Kind::new("a whole number of at least 0", whole);
pub(super) const POSITIVE: Kind<usize> = Kind::new("a whole number of at least 1", |value| {
    whole(value).and_then(|number| usize::try_from(number).ok()).filter(|&number| number > 0)
});
pub(super) const NOT_NEGATIVE: Kind<f64> =
    Kind::new("a number of at least 0", |value| value.as_f64().filter(|number| number.is_finite() && *number >= 0.0));
pub(super) const RATIO: Kind<f64> =
    Kind::new("a number from 0 to 1", |value| value.as_f64().filter(|number| (0.0..=1.0).contains(number)));

/// A whole number, also one that is written as `5e8`.
fn whole(value: &Value) -> Option<u64> {
    const EXACT_LIMIT: f64 = 9_007_199_254_740_992.0;
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (0.0..=EXACT_LIMIT).contains(&number)).then_some(number as u64)
    })
}

/// A value for a message, long ones shortened.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
