//! From one decoded row of columns to a value of the user's type.

use crate::error::{Name, RowProblem};
use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

/// What stands in one column of one row, perhaps nested; as the library that decoded it has it.
pub(super) trait Cell<'de>: Copy + 'de {
    /// The elements of a list.
    type Elements: Iterator<Item = Self>;

    /// What it is.
    ///
    /// # Errors
    ///
    /// When the library's value is of a type that has no place here.
    fn shape(self) -> Result<Shape<'de, Self>, Error>;
}

/// What a cell is, whatever library decoded it.
pub(super) enum Shape<'de, C: Cell<'de>> {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Single(f32),
    Double(f64),
    /// A decimal number with all its digits.
    Decimal(String),
    Text(&'de str),
    Bytes(&'de [u8]),
    List(C::Elements),
    Struct(Box<dyn Iterator<Item = (&'de str, C)> + 'de>),
    Map(Box<dyn Iterator<Item = (C, C)> + 'de>),
}

/// The cells of one row, by position.
pub(super) trait Cells<'de>: Copy {
    type Cell: Cell<'de>;

    fn len(self) -> usize;

    fn cell(self, position: usize) -> Option<Self::Cell>;
}

/// How many bytes of memory a row may still become.
///
/// What a file has once, a row may refer to any number of times: values of dictionaries, and values that are absent.
#[derive(Debug)]
pub(super) struct Budget(std::cell::Cell<Option<u64>>);

/// About what a value takes, whatever it is.
const VALUE_BYTES: u64 = 32;

impl Budget {
    pub(super) fn new(num_bytes: u64) -> Self {
        Self(std::cell::Cell::new(Some(num_bytes)))
    }

    /// Did the row become too large?
    pub(super) fn is_spent(&self) -> bool {
        self.0.get().is_none()
    }

    fn take(&self, num_bytes: usize) -> Result<(), Error> {
        let left = self.0.get().and_then(|left| left.checked_sub(VALUE_BYTES)?.checked_sub(num_bytes as u64));
        self.0.set(left);
        left.map(|_| ()).ok_or_else(|| Error::custom("the row becomes too large"))
    }
}

/// One row: a map from names of columns to cells, or the cells in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'de, 'b, R> {
    pub(super) names: &'de [String],
    pub(super) cells: R,
    pub(super) budget: &'b Budget,
}

/// A column's name in front of what is wrong with its cell.
fn in_column(name: &str) -> impl FnOnce(Error) -> Error {
    move |error| Error::custom(format!("column {}: {error}", Name(name)))
}

impl<'de, 'b, R: Cells<'de>> Row<'de, 'b, R> {
    /// The row as a value.
    pub(super) fn to_value<T: Deserialize<'de>>(self) -> Result<T, RowProblem> {
        T::deserialize(self).map_err(|error| {
            let message = error.to_string();
            // A message that names its column needs no list of them.
            let columns = if message.starts_with("column ") { Vec::new() } else { self.names.to_vec() };
            RowProblem::Form { message, columns }
        })
    }

    /// The only cell, for rows that become a number or a text.
    fn only(self) -> Result<Value<'b, R::Cell>, Error> {
        let only = if self.cells.len() == 1 { self.cells.cell(0) } else { None };
        only.map(|cell| Value { cell, budget: self.budget })
            .ok_or_else(|| Error::custom("a row of several columns becomes a struct, a map, a tuple or a list"))
    }
}

macro_rules! only_cell {
    ($($method:ident),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.only()?.$method(visitor)
        }
    )*};
}

impl<'de, R: Cells<'de>> Deserializer<'de> for Row<'de, '_, R> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Entries { row: self, position: 0 })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Entries { row: self, position: 0 })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        if length != self.cells.len() {
            let message = format!("{} columns found, but {length} wanted by the tuple", self.cells.len());
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
            Ok(cell) => cell.deserialize_option(visitor),
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

    only_cell!(
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

struct Entries<'de, 'b, R> {
    row: Row<'de, 'b, R>,
    position: usize,
}

impl<'de, 'b, R: Cells<'de>> Entries<'de, 'b, R> {
    fn next(&mut self) -> Option<(&'de str, Value<'b, R::Cell>)> {
        let name = self.row.names.get(self.position)?.as_str();
        let cell = self.row.cells.cell(self.position)?;
        self.position += 1;
        Some((name, Value { cell, budget: self.row.budget }))
    }
}

impl<'de, R: Cells<'de>> de::MapAccess<'de> for Entries<'de, '_, R> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let name = self.row.names.get(self.position);
        name.map(|name| seed.deserialize(de::value::BorrowedStrDeserializer::new(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let (name, cell) = self.next().ok_or_else(|| Error::custom("a column has no value"))?;
        seed.deserialize(cell).map_err(in_column(name))
    }
}

impl<'de, R: Cells<'de>> de::SeqAccess<'de> for Entries<'de, '_, R> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        self.next().map(|(name, cell)| seed.deserialize(cell).map_err(in_column(name))).transpose()
    }
}

/// One cell as a value.
#[derive(Clone, Copy, Debug)]
struct Value<'b, C> {
    cell: C,
    budget: &'b Budget,
}

impl<'de, C: Cell<'de>> IntoDeserializer<'de> for Value<'_, C> {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de, C: Cell<'de>> Value<'_, C> {
    /// What the cell is; the budget pays for it.
    fn shape(self) -> Result<Shape<'de, C>, Error> {
        let shape = self.cell.shape()?;
        self.budget.take(match &shape {
            Shape::Text(text) => text.len(),
            Shape::Bytes(bytes) => bytes.len(),
            _ => 0,
        })?;
        Ok(shape)
    }

    fn visit<V: Visitor<'de>>(self, shape: Shape<'de, C>, visitor: V) -> Result<V::Value, Error> {
        let value = |cell| Value { cell, budget: self.budget };
        match shape {
            Shape::Null => visitor.visit_unit(),
            Shape::Bool(value) => visitor.visit_bool(value),
            Shape::Signed(value) => visitor.visit_i64(value),
            Shape::Unsigned(value) => visitor.visit_u64(value),
            Shape::Single(value) => visitor.visit_f32(value),
            Shape::Double(value) => visitor.visit_f64(value),
            Shape::Decimal(digits) => visitor.visit_string(digits),
            Shape::Text(value) => visitor.visit_borrowed_str(value),
            Shape::Bytes(value) => visitor.visit_borrowed_bytes(value),
            Shape::List(elements) => visitor.visit_seq(SeqDeserializer::new(elements.map(value))),
            Shape::Struct(fields) => {
                visitor.visit_map(MapDeserializer::new(fields.map(|(name, cell)| (name, value(cell)))))
            }
            Shape::Map(entries) => {
                visitor.visit_map(MapDeserializer::new(entries.map(|(key, cell)| (value(key), value(cell)))))
            }
        }
    }
}

impl<'de, C: Cell<'de>> Deserializer<'de> for Value<'_, C> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.visit(self.shape()?, visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        // What is there is paid for when it is visited.
        match self.cell.shape()? {
            Shape::Null => {
                self.budget.take(0)?;
                visitor.visit_none()
            }
            _ => visitor.visit_some(self),
        }
    }

    /// Writers that know no text type leave plain bytes.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.shape()? {
            Shape::Bytes(value) => match std::str::from_utf8(value) {
                Ok(text) => visitor.visit_borrowed_str(text),
                Err(_) => Err(Error::custom("the bytes are not UTF-8 text")),
            },
            shape => self.visit(shape, visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.shape()? {
            Shape::Bytes(value) => visitor.visit_seq(SeqDeserializer::new(value.iter().copied())),
            shape => self.visit(shape, visitor),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.shape()? {
            Shape::Decimal(digits) => visitor.visit_f64(digits.parse().map_err(Error::custom)?),
            shape => self.visit(shape, visitor),
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
        match self.shape()? {
            Shape::Text(name) => visitor.visit_enum(name.into_deserializer()),
            shape => self.visit(shape, visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char bytes byte_buf unit unit_struct tuple tuple_struct map
        struct identifier ignored_any
    }
}
