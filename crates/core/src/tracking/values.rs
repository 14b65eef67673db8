//! One value of a run.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// A value that a tracker is given: a loss, a name, a setting.
///
/// ```
/// use accelerate_core::tracking::Value;
/// assert_eq!(Value::from(0.5), Value::Float(0.5));
/// assert_eq!(Value::from(3_usize), Value::Int(3));
/// assert_eq!(Value::from("warm"), Value::Text("warm".to_owned()));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Nothing, such as a setting that is not set.
    None,
    /// Yes or no.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number; it need not be finite.
    Float(f64),
    /// Words.
    Text(String),
    /// Several values under names of their own.
    Map(Vec<(String, Value)>),
    /// Several values in an order.
    List(Vec<Value>),
}

impl Value {
    /// The number that it stands for, as TensorBoard draws it: yes is 1, no is 0.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Bool(value) => Some(f64::from(u8::from(*value))),
            Self::Int(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            Self::None | Self::Text(_) | Self::Map(_) | Self::List(_) => None,
        }
    }

    /// What it is, in words.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Text(_) => "a text",
            Self::Map(_) => "a map",
            Self::List(_) => "a list",
        }
    }
}

macro_rules! from_whole_numbers {
    ($($type:ty),*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                // One that is too large is a float, which has room for it.
                i64::try_from(value).map_or(Self::Float(value as f64), Self::Int)
            }
        }
    )*};
}

from_whole_numbers! { i8, i16, i32, i64, isize, u8, u16, u32, u64, usize }

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Self::Float(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}

impl From<serde_json::Value> for Value {
    fn from(value: serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(value) => Self::Bool(value),
            serde_json::Value::Number(number) => {
                number.as_i64().map_or_else(|| Self::Float(number.as_f64().unwrap_or(f64::NAN)), Self::Int)
            }
            serde_json::Value::String(value) => Self::Text(value),
            serde_json::Value::Array(values) => Self::List(values.into_iter().map(Self::from).collect()),
            serde_json::Value::Object(values) => {
                Self::Map(values.into_iter().map(|(name, value)| (name, value.into())).collect())
            }
        }
    }
}

impl<K: Into<String>, V: Into<Value>> From<Vec<(K, V)>> for Value {
    fn from(values: Vec<(K, V)>) -> Self {
        Self::Map(values.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl<K: Into<String>, V: Into<Value>, const N: usize> From<[(K, V); N]> for Value {
    fn from(values: [(K, V); N]) -> Self {
        Vec::from(values).into()
    }
}

/// JSON has no number for what is not finite, and `null` would hide it: a loss that is no longer a number is `"NaN"`, and one without
/// bound `"Infinity"` or `"-Infinity"`. `float(...)` of Python reads these.
impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_none(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Int(value) => serializer.serialize_i64(*value),
            Self::Float(value) if value.is_nan() => serializer.serialize_str("NaN"),
            Self::Float(f64::INFINITY) => serializer.serialize_str("Infinity"),
            Self::Float(f64::NEG_INFINITY) => serializer.serialize_str("-Infinity"),
            Self::Float(value) => serializer.serialize_f64(*value),
            Self::Text(value) => serializer.serialize_str(value),
            Self::Map(values) => {
                let mut map = serializer.serialize_map(Some(values.len()))?;
                for (name, value) in values {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
            Self::List(values) => serializer.collect_seq(values),
        }
    }
}
