//! A value that may turn out to be a text or a label, from formats whose values have types.

use super::shown::quoted;
use super::{Row, RowProblem, checked_row};
use accelerate::data::readers::Place;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// Any value; what is neither text, whole number nor object is kept as words for an error message.
pub(super) enum Cell {
    Text(String),
    Integer(i64),
    Object(BTreeMap<String, Cell>),
    NotUtf8,
    Other(String),
}

impl Cell {
    /// A row, if the values are what their names say.
    pub(super) fn row(text: &Self, label: &Self, place: &Place) -> Result<Row, RowProblem> {
        let text = match text {
            Self::Text(text) => text,
            Self::NotUtf8 => return Err(RowProblem::NotUtf8),
            other => return Err(RowProblem::TextNotString { found: other.to_string() }),
        };
        match label {
            Self::Integer(label) => checked_row(text, *label, place),
            Self::Text(found) => Err(RowProblem::LabelNotInteger { found: quoted(found) }),
            other => Err(RowProblem::LabelNotInteger { found: other.to_string() }),
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(_) => f.write_str("a string"),
            Self::Integer(number) => number.fmt(f),
            Self::Object(_) => f.write_str("an object"),
            Self::NotUtf8 => f.write_str("bytes"),
            Self::Other(words) => f.write_str(words),
        }
    }
}

impl<'de> Deserialize<'de> for Cell {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Cell;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }
    fn visit_bool<E>(self, value: bool) -> Result<Cell, E> {
        Ok(Cell::Other(value.to_string()))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Cell, E> {
        Ok(Cell::Integer(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Cell, E> {
        Ok(i64::try_from(value).map_or_else(|_| Cell::Other(value.to_string()), Cell::Integer))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Cell, E> {
        Ok(Cell::Other(format!("{value:?}")))
    }
    fn visit_str<E>(self, value: &str) -> Result<Cell, E> {
        Ok(Cell::Text(value.to_owned()))
    }
    /// Writers that know no text type leave plain bytes.
    fn visit_bytes<E>(self, value: &[u8]) -> Result<Cell, E> {
        Ok(std::str::from_utf8(value).map_or(Cell::NotUtf8, |text| Cell::Text(text.to_owned())))
    }
    fn visit_unit<E>(self) -> Result<Cell, E> {
        Ok(Cell::Other("null".to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Cell, A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Cell::Other("an array".to_owned()))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> Result<Cell, A::Error> {
        let mut object = BTreeMap::new();
        while let Some((key, value)) = values.next_entry()? {
            object.insert(key, value);
        }
        Ok(Cell::Object(object))
    }
}
