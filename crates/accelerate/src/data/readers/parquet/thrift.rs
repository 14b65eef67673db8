//! Thrift's compact encoding, in which Parquet describes itself: only the numbers that are asked for are taken out.

use super::super::limits::MAX_NESTED_TYPES;

/// What a description is made of.
pub(super) enum Shape {
    /// A value of the type with this number.
    Value(u8),
    /// A field that is a boolean, whose type is its value.
    Bool,
    List(&'static Shape),
    /// Fields by their numbers. Others may be anything.
    Struct(&'static [(i64, Shape)]),
}

impl Shape {
    fn is_marked(&self, kind: u8) -> bool {
        match self {
            Self::Value(wanted) => *wanted == kind,
            Self::Bool => matches!(kind, 1 | 2),
            Self::List(_) => kind == 9,
            Self::Struct(_) => kind == 12,
        }
    }
}

/// Values one behind the other. Whatever ends too early or cannot be is `None`.
pub(super) struct Compact<'a> {
    pub(super) rest: &'a [u8],
}

impl Compact<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn pass(&mut self, num_bytes: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(num_bytes).ok()?..)?;
        Some(())
    }

    /// Seven bits in each byte, the lowest first.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    pub(super) fn integer(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// Number of elements, and how they are marked.
    pub(super) fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let length = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Some((length, head & 15))
    }

    /// The fields of a struct: `on_field` takes the value that follows, or says `None` to have it passed over.
    pub(super) fn fields(&mut self, mut on_field: impl FnMut(i64, u8, &mut Self) -> Option<Option<()>>) -> Option<()> {
        let mut id = 0;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            id = if head >> 4 == 0 { self.integer()? } else { id + i64::from(head >> 4) };
            match on_field(id, head & 15, self) {
                Some(taken) => taken?,
                None => self.skip(head & 15, false, 0)?,
            }
        }
    }

    /// Passes over a value; `None` if a field that its shape knows has another type.
    pub(super) fn conform(&mut self, shape: &Shape) -> Option<()> {
        match shape {
            Shape::Value(kind) => self.skip(*kind, false, 0),
            Shape::Bool => Some(()),
            Shape::List(element) => {
                let (length, kind) = self.list()?;
                (length == 0 || element.is_marked(kind)).then_some(())?;
                (0..length).try_for_each(|_| self.conform(element))
            }
            Shape::Struct(known) => self.fields(|id, kind, value| {
                let (_, shape) = known.iter().find(|(known, _)| *known == id)?;
                Some(if shape.is_marked(kind) { value.conform(shape) } else { None })
            }),
        }
    }

    /// Passes over a value. Each takes a byte at least, apart from booleans in a struct.
    fn skip(&mut self, kind: u8, is_element: bool, depth: usize) -> Option<()> {
        if MAX_NESTED_TYPES < depth {
            return None;
        }
        match kind {
            // Libraries differ on how many bytes a list of booleans takes, and Parquet describes nothing by one.
            1 | 2 if is_element => None,
            1 | 2 => Some(()),
            3 => self.pass(1),
            4..=6 => self.varint().map(|_| ()),
            7 => self.pass(8),
            8 => self.varint().and_then(|length| self.pass(length)),
            9 | 10 => {
                let (length, kind) = self.list()?;
                (0..length).try_for_each(|_| self.skip(kind, true, depth + 1))
            }
            11 => {
                let length = self.varint()?;
                if length == 0 {
                    return Some(());
                }
                let kinds = self.byte()?;
                (0..length).try_for_each(|_| {
                    self.skip(kinds >> 4, true, depth + 1)?;
                    self.skip(kinds & 15, true, depth + 1)
                })
            }
            12 => loop {
                let head = self.byte()?;
                if head == 0 {
                    return Some(());
                }
                if head >> 4 == 0 {
                    self.varint()?;
                }
                self.skip(head & 15, false, depth + 1)?;
            },
            13 => self.pass(16),
            _ => None,
        }
    }
}
