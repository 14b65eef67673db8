//! JSON in which no key is written twice.

use crate::Result;
use crate::error::deep_speed::DeepSpeedErrorKind;
use crate::settings::{MAX_BYTES, shortened};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Reads a JSON object. A key that is written twice is an error: `serde_json` alone would keep one and drop the other.
pub(super) fn read_object(text: &str) -> Result<Map<String, Value>> {
    if text.len() > MAX_BYTES {
        return Err(DeepSpeedErrorKind::TooLarge { bytes: text.len(), most: MAX_BYTES }.into());
    }
    Ok(object(text).map_err(|source| DeepSpeedErrorKind::Json { source })?)
}

fn object(text: &str) -> Result<Map<String, Value>, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Strict.deserialize(&mut deserializer)?;
    deserializer.end()?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(Error::custom(format_args!("it is {}, not an object", super::reader::shown(&other)))),
    }
}

struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = access.next_element_seed(Strict)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(Strict)?;
            if map.contains_key(&key) {
                return Err(Error::custom(format_args!("the key {:?} is written twice", shortened(&key))));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
