//! JSON that somebody else wrote: objects whose keys are told apart, and of which nothing is kept that is not wanted.

use super::Header;
use super::shown::shown;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// Most keys of one object.
const MAX_KEYS: usize = 300_000;

/// Takes up the entries of an object.
pub(super) trait Entries<'de> {
    /// What a message calls the object.
    const WANTED: &'static str;

    /// Takes the value of one key, which has not been there before.
    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads an object entry by entry. A key that is there twice, is too long, or has control characters is an error; so is a
/// list in place of an object, which derived readers take.
pub(super) struct Object<E>(pub(super) E);

impl<'de, E: Entries<'de>> Visitor<'de> for Object<E> {
    type Value = E;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(E::WANTED)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<E, A::Error> {
        let Self(mut entries) = self;
        let mut known = HashSet::new();
        while let Some(Key(key)) = map.next_key()? {
            if known.len() == MAX_KEYS {
                return Err(de::Error::custom(format_args!("an object has more than {MAX_KEYS} keys")));
            }
            if known.contains(&key) {
                return Err(de::Error::custom(format_args!("the key `{}` is there twice", shown(&key))));
            }
            entries.entry(&key, &mut map)?;
            known.insert(key);
        }
        Ok(entries)
    }
}

/// A key that a message and a terminal can show. It is not copied out of the text where that can be avoided.
struct Key<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E: de::Error>(self, key: &'de str) -> Result<Key<'de>, E> {
                check_name(key).map(|()| Key(Cow::Borrowed(key))).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, key: &str) -> Result<Key<'de>, E> {
                check_name(key).map(|()| Key(Cow::Owned(key.to_owned()))).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

pub(super) fn check_name(name: &str) -> Result<(), String> {
    let (bytes, most) = (name.len(), Header::MAX_NAME_BYTES);
    if bytes > most {
        return Err(format!("the name `{}` is {bytes} bytes long, and at most {most} are read", shown(name)));
    }
    if name.chars().any(char::is_control) {
        return Err(format!("the name `{}` has control characters", shown(name)));
    }
    Ok(())
}

/// A text that is checked and not kept.
pub(super) struct NoValue;

impl<'de> Deserialize<'de> for NoValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = NoValue;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E: de::Error>(self, _: &str) -> Result<NoValue, E> {
                Ok(NoValue)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// Reads any value of which all parts together are at most so many.
pub(super) struct AtMost<'a>(pub(super) &'a mut usize);

impl<'de> DeserializeSeed<'de> for AtMost<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.0.checked_sub(1);
        *self.0 = left.ok_or_else(|| de::Error::custom("there is more in it than is read"))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AtMost<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(AtMost(self.0))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = serde_json::Map::new();
        while let Some(Key(key)) = map.next_key()? {
            let value = map.next_value_seed(AtMost(self.0))?;
            if values.insert(key.clone().into_owned(), value).is_some() {
                return Err(de::Error::custom(format_args!("the key `{}` is there twice", shown(&key))));
            }
        }
        Ok(Value::Object(values))
    }
}
