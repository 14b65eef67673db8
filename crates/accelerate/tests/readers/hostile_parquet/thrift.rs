//! Parquet files from their parts, whatever these say of each other. No writer makes such files.

/// Thrift's compact encoding of a struct, field by field.
#[derive(Clone, Default)]
pub(super) struct Struct {
    bytes: Vec<u8>,
    last: i64,
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while 0x80 <= value {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn zigzag(value: i64) -> Vec<u8> {
    varint(((value << 1) ^ (value >> 63)) as u64)
}

impl Struct {
    fn field(mut self, id: i64, kind: u8, value: &[u8]) -> Self {
        self.bytes.push(((id - self.last) as u8) << 4 | kind);
        self.bytes.extend(value);
        self.last = id;
        self
    }

    pub(super) fn int(self, id: i64, value: i64) -> Self {
        self.field(id, 5, &zigzag(value))
    }

    pub(super) fn long(self, id: i64, value: i64) -> Self {
        self.field(id, 6, &zigzag(value))
    }

    pub(super) fn text(self, id: i64, value: &str) -> Self {
        self.field(id, 8, &[varint(value.len() as u64), value.as_bytes().to_vec()].concat())
    }

    pub(super) fn structure(self, id: i64, value: Self) -> Self {
        self.field(id, 12, &value.done())
    }

    /// A list that says how long it is, whatever it holds.
    pub(super) fn list(self, id: i64, kind: u8, length: u64, elements: &[u8]) -> Self {
        self.field(id, 9, &[vec![0xf0 | kind], varint(length), elements.to_vec()].concat())
    }

    pub(super) fn structs(self, id: i64, elements: Vec<Self>) -> Self {
        let length = elements.len() as u64;
        self.list(id, 12, length, &elements.into_iter().flat_map(Self::done).collect::<Vec<_>>())
    }

    pub(super) fn done(self) -> Vec<u8> {
        [self.bytes, vec![0]].concat()
    }
}

/// A column that holds `BYTE_ARRAY`s of text, each of them there.
pub(super) fn text_column(name: &str) -> Struct {
    Struct::default().int(1, 6).int(3, 0).text(4, name).int(6, 0)
}

/// A column of 64-bit integers that may be absent.
pub(super) fn long_column(name: &str) -> Struct {
    Struct::default().int(1, 2).int(3, 1).text(4, name)
}

/// A group of columns.
pub(super) fn group(name: &str, num_children: i64) -> Struct {
    Struct::default().int(3, 0).text(4, name).int(5, num_children)
}

/// What a row group says of one of its columns.
#[derive(Clone)]
pub(super) struct Chunk {
    pub(super) name: String,
    pub(super) kind: i64,
    pub(super) codec: i64,
    pub(super) num_values: i64,
    pub(super) num_bytes: i64,
    pub(super) stored_bytes: i64,
    pub(super) page_at: i64,
    pub(super) dictionary_at: Option<i64>,
}

impl Chunk {
    fn write(self) -> Struct {
        let name = [varint(self.name.len() as u64), self.name.into_bytes()].concat();
        let mut meta = Struct::default()
            .int(1, self.kind)
            .list(2, 5, 1, &zigzag(0))
            .list(3, 8, 1, &name)
            .int(4, self.codec)
            .long(5, self.num_values)
            .long(6, self.num_bytes)
            .long(7, self.stored_bytes)
            .long(9, self.page_at);
        if let Some(at) = self.dictionary_at {
            meta = meta.long(11, at);
        }
        Struct::default().long(2, 0).structure(3, meta)
    }
}

/// Columns, and how many rows they are said to have.
pub(super) fn row_group(chunks: Vec<Chunk>, num_rows: i64) -> Struct {
    let chunks = chunks.into_iter().map(Chunk::write).collect();
    Struct::default().structs(1, chunks).long(2, 0).long(3, num_rows)
}

/// The header of a data page of the first version.
pub(super) fn data_page(num_bytes: i64, stored_bytes: i64, num_values: i64, encoding: i64) -> Vec<u8> {
    let data = Struct::default().int(1, num_values).int(2, encoding).int(3, 3).int(4, 3);
    Struct::default().int(1, 0).int(2, num_bytes).int(3, stored_bytes).structure(5, data).done()
}

/// The header of a page of a dictionary.
pub(super) fn dictionary_page(num_bytes: i64, num_values: i64) -> Vec<u8> {
    let dictionary = Struct::default().int(1, num_values).int(2, 0);
    Struct::default().int(1, 2).int(2, num_bytes).int(3, num_bytes).structure(7, dictionary).done()
}

/// A whole file: pages from byte 4 on, and the footer.
pub(super) fn file(pages: &[u8], footer: &[u8]) -> Vec<u8> {
    let length = (footer.len() as u32).to_le_bytes();
    [b"PAR1", pages, footer, &length, b"PAR1"].concat()
}

pub(super) fn footer(schema: Vec<Struct>, num_rows: i64, row_groups: Vec<Struct>) -> Vec<u8> {
    Struct::default().int(1, 1).structs(2, schema).long(3, num_rows).structs(4, row_groups).done()
}
