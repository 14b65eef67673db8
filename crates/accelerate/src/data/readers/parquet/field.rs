//! From decoded Parquet fields to values of the user's type.

use parquet::record::{Field, Row};
use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

/// One row: a map from names of columns to fields, or the fields in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowFields<'de> {
    pub(super) names: &'de [String],
    pub(super) fields: &'de [Field],
}

/// A column's name in front of what is wrong with its field.
fn in_column(name: &str) -> impl FnOnce(Error) -> Error {
    move |error| Error::custom(format!("column {name:?}: {error}"))
}

impl<'de> RowFields<'de> {
    /// The only field, for rows that become a number or a text.
    fn only(self) -> Result<FieldRef<'de>, Error> {
        match self.fields {
            [field] => Ok(FieldRef(field)),
            _ => Err(Error::custom("a row of several columns becomes a struct, a map, a tuple or a list")),
        }
    }
}

macro_rules! only_field {
    ($($method:ident),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.only()?.$method(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for RowFields<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Entries { row: self, position: 0 })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Entries { row: self, position: 0 })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        if length != self.fields.len() {
            let message = format!("{} columns found, but {length} wanted by the tuple", self.fields.len());
            return Err(Error::custom(message));
        }
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(length, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.only() {
            Ok(field) => field.deserialize_option(visitor),
            Err(_) => visitor.visit_some(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.only()?.deserialize_enum(name, variants, visitor)
    }

    only_field!(
        deserialize_bool,
        deserialize_i8,
        deserialize_i16,
        deserialize_i32,
        deserialize_i64,
        deserialize_u8,
        deserialize_u16,
        deserialize_u32,
        deserialize_u64,
        deserialize_f32,
        deserialize_f64,
        deserialize_char,
        deserialize_str,
        deserialize_string,
        deserialize_bytes,
        deserialize_byte_buf
    );

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! { i128 u128 unit unit_struct map identifier ignored_any }
}

struct Entries<'de> {
    row: RowFields<'de>,
    position: usize,
}

impl<'de> Entries<'de> {
    fn next(&mut self) -> Option<(&'de str, FieldRef<'de>)> {
        let entry = (self.row.names.get(self.position)?.as_str(), FieldRef(self.row.fields.get(self.position)?));
        self.position += 1;
        Some(entry)
    }
}

impl<'de> de::MapAccess<'de> for Entries<'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let name = self.row.names.get(self.position);
        name.map(|name| seed.deserialize(de::value::BorrowedStrDeserializer::new(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let (name, field) = self.next().ok_or_else(|| Error::custom("a column has no value"))?;
        seed.deserialize(field).map_err(in_column(name))
    }
}

impl<'de> de::SeqAccess<'de> for Entries<'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        self.next().map(|(name, field)| seed.deserialize(field).map_err(in_column(name))).transpose()
    }
}

/// One field, perhaps nested.
#[derive(Clone, Copy, Debug)]
struct FieldRef<'de>(&'de Field);

impl<'de> IntoDeserializer<'de> for FieldRef<'de> {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

fn visit_group<'de, V: Visitor<'de>>(row: &'de Row, visitor: V) -> Result<V::Value, Error> {
    visitor.visit_map(MapDeserializer::new(row.get_column_iter().map(|(name, field)| (name.as_str(), FieldRef(field)))))
}

impl<'de> Deserializer<'de> for FieldRef<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Field::Null => visitor.visit_unit(),
            Field::Bool(value) => visitor.visit_bool(*value),
            Field::Byte(value) => visitor.visit_i8(*value),
            Field::Short(value) => visitor.visit_i16(*value),
            Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => visitor.visit_i32(*value),
            Field::Long(value)
            | Field::TimeMicros(value)
            | Field::TimestampMillis(value)
            | Field::TimestampMicros(value) => visitor.visit_i64(*value),
            Field::UByte(value) => visitor.visit_u8(*value),
            Field::UShort(value) => visitor.visit_u16(*value),
            Field::UInt(value) => visitor.visit_u32(*value),
            Field::ULong(value) => visitor.visit_u64(*value),
            Field::Float16(value) => visitor.visit_f32(f32::from(*value)),
            Field::Float(value) => visitor.visit_f32(*value),
            Field::Double(value) => visitor.visit_f64(*value),
            Field::Decimal(_) => visitor.visit_string(self.0.to_string()),
            Field::Str(value) => visitor.visit_borrowed_str(value),
            Field::Bytes(value) => visitor.visit_borrowed_bytes(value.data()),
            Field::Group(row) => visit_group(row, visitor),
            Field::ListInternal(list) => visitor.visit_seq(SeqDeserializer::new(list.elements().iter().map(FieldRef))),
            Field::MapInternal(map) => {
                let entries = map.entries().iter().map(|(key, value)| (FieldRef(key), FieldRef(value)));
                visitor.visit_map(MapDeserializer::new(entries))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Field::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    /// Writers that know no text type leave plain bytes.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Field::Bytes(value) => match std::str::from_utf8(value.data()) {
                Ok(text) => visitor.visit_borrowed_str(text),
                Err(_) => Err(Error::custom("the bytes are not UTF-8 text")),
            },
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Field::Bytes(value) => visitor.visit_seq(SeqDeserializer::new(value.data().iter().copied())),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Field::Decimal(_) => visitor.visit_f64(self.0.to_string().parse().map_err(Error::custom)?),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Field::Str(name) => visitor.visit_enum(name.as_str().into_deserializer()),
            _ => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char bytes byte_buf unit unit_struct tuple tuple_struct map
        struct identifier ignored_any
    }
}
