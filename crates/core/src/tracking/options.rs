//! Options of a built-in tracker, as a program gives them (`init_kwargs`, `log_kwargs`).

use super::Value;
use crate::error::tracking::TrackingErrorKind;
use crate::{Error, Result};

/// Options by name, every one of which is known.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    tracker: &'static str,
    values: &'a [(String, Value)],
}

impl<'a> Options<'a> {
    /// # Errors
    /// A name that is not one of `known`.
    pub fn new(tracker: &'static str, known: &'static [&'static str], values: &'a [(String, Value)]) -> Result<Self> {
        match values.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            Some((name, _)) => {
                let found = name.clone();
                Err(Error::new(TrackingErrorKind::UnknownOption { tracker, found, known }))
            }
            None => Ok(Self { tracker, values }),
        }
    }

    /// Was it given, and is not nothing?
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A number.
    ///
    /// # Errors
    /// Something else.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", |value| value.number().filter(|_| !matches!(value, Value::Bool(_))))
    }

    /// A whole number.
    ///
    /// # Errors
    /// Something else.
    pub fn integer(&self, name: &str) -> Result<Option<i64>> {
        self.read(name, "a whole number", |value| match value {
            Value::Int(value) => Some(*value),
            _ => None,
        })
    }

    /// Yes or no.
    ///
    /// # Errors
    /// Something else.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A part of the name of a file.
    ///
    /// # Errors
    /// Something else, or what would be another folder.
    pub fn part_of_file_name(&self, name: &str) -> Result<Option<&'a str>> {
        self.read(name, "a text without / that can stand in the name of a file", |value| match value {
            Value::Text(value) if !value.contains(['/', '\\', '\0']) => Some(value.as_str()),
            _ => None,
        })
    }

    fn find(&self, name: &str) -> Option<&'a Value> {
        let found = self.values.iter().rev().find(|(known, _)| known == name);
        found.map(|(_, value)| value).filter(|value| **value != Value::None)
    }

    fn read<T>(
        &self,
        name: &str,
        wanted: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.find(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            let (tracker, option, found) = (self.tracker, name.to_owned(), value.kind());
            Error::new(TrackingErrorKind::Option { tracker, option, found, wanted })
        })
    }
}

/// The numbers of a map that is drawn in one chart.
///
/// # Errors
/// A value that is not a number.
pub fn numbers(main_tag: &str, values: &[(String, Value)]) -> Result<Vec<(String, f64)>> {
    let number = |(tag, value): &(String, Value)| match value.number() {
        Some(number) => Ok((tag.clone(), number)),
        None => {
            let (name, found) = (format!("{main_tag}.{tag}"), value.kind());
            Err(Error::new(TrackingErrorKind::NotANumber { name, found }))
        }
    };
    values.iter().map(number).collect()
}
