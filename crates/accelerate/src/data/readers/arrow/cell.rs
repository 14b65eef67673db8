//! Values of Arrow arrays as cells of a row.

use super::super::row::{Cell, Cells, Shape};
use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, ArrayRef, ArrowPrimitiveType, OffsetSizeTrait};
use arrow_schema::{DataType, TimeUnit};
use serde::de::Error as _;
use serde::de::value::Error;
use std::ops::Range;

/// One row of a record batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchRow<'de> {
    pub(super) columns: &'de [ArrayRef],
    pub(super) row: usize,
}

impl<'de> Cells<'de> for BatchRow<'de> {
    type Cell = Element<'de>;

    fn len(self) -> usize {
        self.columns.len()
    }

    fn cell(self, position: usize) -> Option<Element<'de>> {
        self.columns.get(position).map(|array| Element { array: array.as_ref(), row: self.row })
    }
}

/// One value of an array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element<'de> {
    array: &'de dyn Array,
    row: usize,
}

/// Values that stand one behind the other.
#[derive(Debug)]
pub(super) struct Elements<'de> {
    array: &'de dyn Array,
    rows: Range<usize>,
}

impl<'de> Iterator for Elements<'de> {
    type Item = Element<'de>;

    fn next(&mut self) -> Option<Element<'de>> {
        self.rows.next().map(|row| Element { array: self.array, row })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rows.size_hint()
    }
}

impl<'de> Cell<'de> for Element<'de> {
    type Elements = Elements<'de>;

    fn shape(self) -> Result<Shape<'de, Self>, Error> {
        // Arrays have been checked when they were decoded; the library panics on what it does not expect.
        if self.array.len() <= self.row {
            return Err(Error::custom("it refers to a value that is not there"));
        }
        if self.array.is_null(self.row) {
            return Ok(Shape::Null);
        }
        let shape = self.scalar().or_else(|| self.temporal()).or_else(|| self.nested());
        match (shape, self.array.data_type()) {
            (Some(shape), _) => Ok(shape),
            (None, DataType::Dictionary(..)) => self.in_dictionary()?.shape(),
            (None, other) => Err(Error::custom(format!("the type {other} is not known"))),
        }
    }
}

impl<'de> Element<'de> {
    fn primitive<T: ArrowPrimitiveType>(self) -> Option<T::Native> {
        self.array.as_primitive_opt::<T>().map(|array| array.value(self.row))
    }

    fn signed<T: ArrowPrimitiveType<Native: Into<i64>>>(self) -> Option<Shape<'de, Self>> {
        self.primitive::<T>().map(|value| Shape::Signed(value.into()))
    }

    fn unsigned<T: ArrowPrimitiveType<Native: Into<u64>>>(self) -> Option<Shape<'de, Self>> {
        self.primitive::<T>().map(|value| Shape::Unsigned(value.into()))
    }

    fn decimal<T: DecimalType>(self) -> Option<Shape<'de, Self>> {
        self.array.as_primitive_opt::<T>().map(|array| Shape::Decimal(array.value_as_string(self.row)))
    }

    fn scalar(self) -> Option<Shape<'de, Self>> {
        let Self { array, row } = self;
        match array.data_type() {
            DataType::Null => Some(Shape::Null),
            DataType::Boolean => Some(Shape::Bool(array.as_boolean_opt()?.value(row))),
            DataType::Int8 => self.signed::<Int8Type>(),
            DataType::Int16 => self.signed::<Int16Type>(),
            DataType::Int32 => self.signed::<Int32Type>(),
            DataType::Int64 => self.signed::<Int64Type>(),
            DataType::UInt8 => self.unsigned::<UInt8Type>(),
            DataType::UInt16 => self.unsigned::<UInt16Type>(),
            DataType::UInt32 => self.unsigned::<UInt32Type>(),
            DataType::UInt64 => self.unsigned::<UInt64Type>(),
            DataType::Float16 => Some(Shape::Single(self.primitive::<Float16Type>()?.into())),
            DataType::Float32 => Some(Shape::Single(self.primitive::<Float32Type>()?)),
            DataType::Float64 => Some(Shape::Double(self.primitive::<Float64Type>()?)),
            DataType::Decimal32(..) => self.decimal::<Decimal32Type>(),
            DataType::Decimal64(..) => self.decimal::<Decimal64Type>(),
            DataType::Decimal128(..) => self.decimal::<Decimal128Type>(),
            DataType::Decimal256(..) => self.decimal::<Decimal256Type>(),
            DataType::Utf8 => Some(Shape::Text(array.as_string_opt::<i32>()?.value(row))),
            DataType::LargeUtf8 => Some(Shape::Text(array.as_string_opt::<i64>()?.value(row))),
            DataType::Utf8View => Some(Shape::Text(array.as_string_view_opt()?.value(row))),
            DataType::Binary => Some(Shape::Bytes(array.as_binary_opt::<i32>()?.value(row))),
            DataType::LargeBinary => Some(Shape::Bytes(array.as_binary_opt::<i64>()?.value(row))),
            DataType::BinaryView => Some(Shape::Bytes(array.as_binary_view_opt()?.value(row))),
            DataType::FixedSizeBinary(_) => Some(Shape::Bytes(array.as_fixed_size_binary_opt()?.value(row))),
            _ => None,
        }
    }

    fn temporal(self) -> Option<Shape<'de, Self>> {
        match self.array.data_type() {
            DataType::Date32 => self.signed::<Date32Type>(),
            DataType::Date64 => self.signed::<Date64Type>(),
            DataType::Time32(TimeUnit::Second) => self.signed::<Time32SecondType>(),
            DataType::Time32(_) => self.signed::<Time32MillisecondType>(),
            DataType::Time64(TimeUnit::Microsecond) => self.signed::<Time64MicrosecondType>(),
            DataType::Time64(_) => self.signed::<Time64NanosecondType>(),
            DataType::Timestamp(TimeUnit::Second, _) => self.signed::<TimestampSecondType>(),
            DataType::Timestamp(TimeUnit::Millisecond, _) => self.signed::<TimestampMillisecondType>(),
            DataType::Timestamp(TimeUnit::Microsecond, _) => self.signed::<TimestampMicrosecondType>(),
            DataType::Timestamp(TimeUnit::Nanosecond, _) => self.signed::<TimestampNanosecondType>(),
            DataType::Duration(TimeUnit::Second) => self.signed::<DurationSecondType>(),
            DataType::Duration(TimeUnit::Millisecond) => self.signed::<DurationMillisecondType>(),
            DataType::Duration(TimeUnit::Microsecond) => self.signed::<DurationMicrosecondType>(),
            DataType::Duration(TimeUnit::Nanosecond) => self.signed::<DurationNanosecondType>(),
            _ => None,
        }
    }

    fn nested(self) -> Option<Shape<'de, Self>> {
        let Self { array, row } = self;
        match array.data_type() {
            DataType::List(_) => self.list::<i32>(),
            DataType::LargeList(_) => self.list::<i64>(),
            DataType::FixedSizeList(_, length) => {
                let length = usize::try_from(*length).ok()?;
                let start = row.checked_mul(length)?;
                let values = array.as_fixed_size_list_opt()?.values();
                Some(Shape::List(Elements { array: values.as_ref(), rows: start..start.checked_add(length)? }))
            }
            DataType::Struct(fields) => {
                let columns = array.as_struct_opt()?.columns();
                let element = move |(name, array): (_, &'de ArrayRef)| (name, Element { array: array.as_ref(), row });
                Some(Shape::Struct(Box::new(
                    fields.iter().map(|field| field.name().as_str()).zip(columns).map(element),
                )))
            }
            DataType::Map(..) => {
                let map = array.as_map_opt()?;
                let rows = range(map.offsets(), row)?;
                let keys = Elements { array: map.keys().as_ref(), rows: rows.clone() };
                Some(Shape::Map(Box::new(keys.zip(Elements { array: map.values().as_ref(), rows }))))
            }
            _ => None,
        }
    }

    fn list<O: OffsetSizeTrait>(self) -> Option<Shape<'de, Self>> {
        let list = self.array.as_list_opt::<O>()?;
        Some(Shape::List(Elements { array: list.values().as_ref(), rows: range(list.offsets(), self.row)? }))
    }

    fn in_dictionary(self) -> Result<Self, Error> {
        let dictionary = self.array.as_any_dictionary_opt();
        let dictionary = dictionary.ok_or_else(|| Error::custom("its dictionary is not there"))?;
        let row = match (Element { array: dictionary.keys(), row: self.row }).shape()? {
            Shape::Signed(key) => usize::try_from(key).ok(),
            Shape::Unsigned(key) => usize::try_from(key).ok(),
            _ => None,
        };
        let row = row.ok_or_else(|| Error::custom("it refers to a value that is not in the dictionary"))?;
        Ok(Self { array: dictionary.values().as_ref(), row })
    }
}

/// The values of list `row`.
fn range<O: OffsetSizeTrait>(offsets: &[O], row: usize) -> Option<Range<usize>> {
    Some(offsets.get(row)?.as_usize()..offsets.get(row + 1)?.as_usize())
}

/// What of a type is not known here, if anything.
pub(super) fn unknown(data_type: &DataType) -> Option<&DataType> {
    match data_type {
        DataType::List(field) | DataType::LargeList(field) | DataType::FixedSizeList(field, _) => {
            unknown(field.data_type())
        }
        DataType::Map(field, _) => unknown(field.data_type()),
        DataType::Struct(fields) => fields.iter().find_map(|field| unknown(field.data_type())),
        DataType::Dictionary(_, values) => unknown(values),
        DataType::Decimal32(digits, scale)
        | DataType::Decimal64(digits, scale)
        | DataType::Decimal128(digits, scale)
        | DataType::Decimal256(digits, scale) => {
            (*scale < 0 || i16::from(*digits) < i16::from(*scale)).then_some(data_type)
        }
        DataType::Interval(_)
        | DataType::Union(..)
        | DataType::RunEndEncoded(..)
        | DataType::ListView(_)
        | DataType::LargeListView(_) => Some(data_type),
        _ => None,
    }
}
