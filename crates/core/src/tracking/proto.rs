//! The few lines of protocol buffers that event files need: fields are written in the order of their numbers, as Python does.

/// A message that is being written.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

/// How the payload of a field is written.
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

impl Message {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: Wire) {
        self.varint(u64::from(field) << 3 | wire as u64);
    }

    /// A negative number takes ten bytes, as its two's complement.
    pub(super) fn int(mut self, field: u32, value: i64) -> Self {
        self.key(field, Wire::Varint);
        self.varint(value as u64);
        self
    }

    pub(super) fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, Wire::Fixed64);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, Wire::Fixed32);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.key(field, Wire::Bytes);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub(super) fn message(self, field: u32, value: Message) -> Self {
        self.bytes(field, &value.0)
    }
}
