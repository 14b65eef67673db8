//! Decoded Parquet fields as cells of a row.

use super::super::row::{Cell, Cells, Shape};
use parquet::record::Field;
use serde::de::value::Error;
use std::slice;

/// The fields of one row, in the order of its columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'de>(pub(super) &'de [Field]);

impl<'de> Cells<'de> for Fields<'de> {
    type Cell = FieldRef<'de>;

    fn len(self) -> usize {
        self.0.len()
    }

    fn cell(self, position: usize) -> Option<FieldRef<'de>> {
        self.0.get(position).map(FieldRef)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FieldRef<'de>(&'de Field);

/// The fields of a list.
pub(super) struct Elements<'de>(slice::Iter<'de, Field>);

impl<'de> Iterator for Elements<'de> {
    type Item = FieldRef<'de>;

    fn next(&mut self) -> Option<FieldRef<'de>> {
        self.0.next().map(FieldRef)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<'de> Cell<'de> for FieldRef<'de> {
    type Elements = Elements<'de>;

    fn shape(self) -> Result<Shape<'de, Self>, Error> {
        Ok(match self.0 {
            Field::Null => Shape::Null,
            Field::Bool(value) => Shape::Bool(*value),
            Field::Byte(value) => Shape::Signed(i64::from(*value)),
            Field::Short(value) => Shape::Signed(i64::from(*value)),
            Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => Shape::Signed(i64::from(*value)),
            Field::Long(value)
            | Field::TimeMicros(value)
            | Field::TimestampMillis(value)
            | Field::TimestampMicros(value) => Shape::Signed(*value),
            Field::UByte(value) => Shape::Unsigned(u64::from(*value)),
            Field::UShort(value) => Shape::Unsigned(u64::from(*value)),
            Field::UInt(value) => Shape::Unsigned(u64::from(*value)),
            Field::ULong(value) => Shape::Unsigned(*value),
            Field::Float16(value) => Shape::Single(f32::from(*value)),
            Field::Float(value) => Shape::Single(*value),
            Field::Double(value) => Shape::Double(*value),
            Field::Decimal(_) => Shape::Decimal(self.0.to_string()),
            Field::Str(value) => Shape::Text(value),
            Field::Bytes(value) => Shape::Bytes(value.data()),
            Field::Group(row) => {
                Shape::Struct(Box::new(row.get_column_iter().map(|(name, field)| (name.as_str(), FieldRef(field)))))
            }
            Field::ListInternal(list) => Shape::List(Elements(list.elements().iter())),
            Field::MapInternal(map) => {
                Shape::Map(Box::new(map.entries().iter().map(|(key, value)| (FieldRef(key), FieldRef(value)))))
            }
        })
    }
}
