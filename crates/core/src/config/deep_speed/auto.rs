//! The word `"auto"` in place of a value.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// A value, or the wish that it be derived from the program (`"auto"` in configurations for DeepSpeed; the reference's
/// `utils/dataclasses.py`, `DeepSpeedPlugin.fill_match`).
///
/// ```
/// use accelerate_core::config::Auto;
/// let steps: Vec<Auto<usize>> = serde_json::from_str(r#"["auto", 4]"#).unwrap();
/// assert_eq!(steps, [Auto::Auto, Auto::Value(4)]);
/// assert_eq!(serde_json::to_string(&steps).unwrap(), r#"["auto",4]"#);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    /// To be derived. The default.
    #[default]
    Auto,
    /// As written.
    Value(T),
}

impl<T> Auto<T> {
    /// Is it still to be derived?
    ///
    /// ```
    /// use accelerate_core::config::Auto;
    /// assert!(Auto::<f64>::Auto.is_auto() && !Auto::Value(1.0).is_auto());
    /// ```
    pub const fn is_auto(&self) -> bool {
        matches!(self, Self::Auto)
    }

    /// What is written, if anything.
    ///
    /// ```
    /// use accelerate_core::config::Auto;
    /// assert_eq!((Auto::Value(1.0).value(), Auto::<f64>::Auto.value()), (Some(1.0), None));
    /// ```
    pub fn value(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Value(value) => Some(value),
        }
    }
}

impl<T> From<T> for Auto<T> {
    fn from(value: T) -> Self {
        Self::Value(value)
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Value(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(word) if word == "auto" => Ok(Self::Auto),
            value => T::deserialize(value).map(Self::Value).map_err(D::Error::custom),
        }
    }
}
