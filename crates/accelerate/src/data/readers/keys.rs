//! Keys that occur twice in a JSON object.
//!
//! The parser hands both to the wanted type. A struct refuses those that are its fields, but a map keeps the last one,
//! and keys that nobody wants are not looked at.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// The first key of one object that has occurred in it already; `None` also for what is no JSON.
pub(super) fn duplicate_key(text: &str) -> Option<String> {
    let mut found = None;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    // An error ends the search: either the text is no JSON, or a key was found.
    let _ended = Unique { found: &mut found }.deserialize(&mut deserializer);
    found
}

/// Goes through a value and ends at the first key that occurs twice.
struct Unique<'a> {
    found: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(Key(key)) = map.next_key()? {
            if keys.contains(&key) {
                *self.found = Some(key.into_owned());
                return Err(A::Error::custom("a key occurs twice"));
            }
            keys.insert(key);
            map.next_value_seed(Unique { found: &mut *self.found })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element_seed(Unique { found: &mut *self.found })?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Borrowed where it stands in the text as it is meant.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_wherever_it_occurs_twice() {
        for (text, wanted) in [
            ("{\"a\": 1, \"b\": 2, \"a\": 1}", Some("a")),
            ("{\"a\": 1, \"\\u0061\": 1}", Some("a")),
            ("{\"\": 1, \"\": 1}", Some("")),
            ("[1, {\"x\": {\"y\": [true, {\"b\": null, \"c\": 0.5, \"b\": {}}]}}]", Some("b")),
            ("{\"a\": 1, \"a\": ", Some("a")),
            ("{\"a\": {\"a\": 1}, \"b\": {\"a\": [{\"a\": 1}, {\"a\": 2}]}}", None),
            ("{\"a\": 1, \"a", None),
            ("7", None),
            ("", None),
        ] {
            assert_eq!(duplicate_key(text).as_deref(), wanted, "{text}");
        }
    }
}
