//! The header of a safetensors file: which tensors it has, and where.

mod write;

pub use write::check_saved_name;

use super::json::{Entries, NoValue, Object};
use super::shown::{shortened_reason, shown};
use crate::Result;
use crate::error::weight_files::{HeaderProblem as Problem, WeightFilesErrorKind as Kind};
use safetensors::Dtype;
use serde::de::{self, Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, Read};

const LENGTH_BYTES: u64 = 8;

/// A tensor of a [`Header`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Its name: at most [`Header::MAX_NAME_BYTES`] long, and without control characters.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes, outermost dim first, at most [`Header::MAX_DIMS`]. An `i64` holds each of them, and their product.
    pub shape: Vec<usize>,
    /// Where its data begin, counted from the end of the header.
    pub start: u64,
    /// Where its data end.
    pub end: u64,
}

/// What a safetensors file says of its tensors, checked: their data lie one behind the other from the end of the header to
/// the end of the file, and have the size that shape and element type ask for. No name occurs twice.
///
/// ```
/// use accelerate_core::weight_files::Header;
/// let json = r#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// let file = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 8]].concat();
/// let header = Header::read(&mut &file[..], file.len() as u64)?;
/// assert_eq!(header.get("bias").unwrap().shape, [2]);
/// assert_eq!(header.data_at(), 8 + json.len() as u64);
///
/// let error = Header::read(&mut &file[..70], 70).unwrap_err();
/// assert!(error.to_string().contains("it was cut off"), "{error}");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// In the order of their data.
    entries: Vec<HeaderEntry>,
    /// Positions of `entries` in the order of their names.
    by_name: Vec<usize>,
    data_at: u64,
}

impl Header {
    /// The law of the format: a longer header is an attack, or a damaged file.
    pub const MAX_BYTES: u64 = 100_000_000;
    /// Most tensors that a file may have, which is some times as many as single files of the largest models have.
    pub const MAX_TENSORS: usize = 150_000;
    /// Longest name of a tensor.
    pub const MAX_NAME_BYTES: usize = 1000;
    /// The key of notes about the file, which is the name of no tensor.
    pub const METADATA_KEY: &str = "__metadata__";
    /// Most dims of a tensor, which are libtorch's.
    pub const MAX_DIMS: usize = 64;

    /// Reads the header from the beginning of a file that is `file_bytes` long. No more is read and allocated than
    /// the file has.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): the file cannot be read, or the header is damaged, or does not fit
    /// the length of the file.
    pub fn read(file: &mut impl Read, file_bytes: u64) -> Result<Self> {
        Self::read_as::<CheckedNotes>(file, file_bytes).map(|(header, _)| header)
    }

    /// The same with the notes that the file has about itself, by key.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    ///
    /// ```
    /// use accelerate_core::weight_files::Header;
    /// let json = r#"{"__metadata__":{"format":"pt"}}"#;
    /// let file = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    /// let (header, notes) = Header::read_with_notes(&mut &file[..], file.len() as u64)?;
    /// assert!(header.entries().is_empty());
    /// assert_eq!(notes["format"], "pt");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn read_with_notes(file: &mut impl Read, file_bytes: u64) -> Result<(Self, BTreeMap<String, String>)> {
        Self::read_as::<KeptNotes>(file, file_bytes).map(|(header, KeptNotes(notes))| (header, notes))
    }

    fn read_as<N: DeserializeOwned + Default>(file: &mut impl Read, file_bytes: u64) -> Result<(Self, N)> {
        let json = read_json(file, file_bytes)?;
        let Contents { mut entries, notes } = serde_json::from_slice(&json)
            .map_err(|error| Kind::Header { problem: Problem::Json(shortened_reason(&error.to_string())) })?;
        let data_at = LENGTH_BYTES + json.len() as u64;
        entries.sort_unstable_by_key(|entry| (entry.start, entry.end));
        let data_bytes = check_data(&entries)?;
        let wanted_bytes = data_at.saturating_add(data_bytes);
        if file_bytes != wanted_bytes {
            return Err(Kind::Header { problem: Problem::Length { found_bytes: file_bytes, wanted_bytes } }.into());
        }
        let mut by_name: Vec<usize> = (0..entries.len()).collect();
        by_name.sort_unstable_by(|&one, &other| entries[one].name.cmp(&entries[other].name));
        Ok((Self { entries, by_name, data_at }, notes))
    }

    /// The tensors, in the order of their data.
    pub fn entries(&self) -> &[HeaderEntry] {
        &self.entries
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&HeaderEntry> {
        let found = self.by_name.binary_search_by(|&position| self.entries[position].name.as_str().cmp(name));
        found.ok().map(|place| &self.entries[self.by_name[place]])
    }

    /// Where data begin in the file, in bytes.
    pub fn data_at(&self) -> u64 {
        self.data_at
    }
}

fn read_json(file: &mut impl Read, file_bytes: u64) -> Result<Vec<u8>> {
    let unreadable = |problem| {
        move |cause: std::io::Error| -> crate::Error {
            match cause.kind() {
                ErrorKind::UnexpectedEof => Kind::Header { problem }.into(),
                _ => crate::Error::new(Kind::Unreadable { reason: cause.to_string() }).caused_by(cause),
            }
        }
    };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(unreadable(Problem::Short { found_bytes: file_bytes }))?;
    let claimed_bytes = u64::from_le_bytes(length);
    // Before anything is allocated: the number comes from outside.
    if claimed_bytes > Header::MAX_BYTES {
        return Err(Kind::Header { problem: Problem::LongHeader { claimed_bytes } }.into());
    }
    let beyond = || Problem::HeaderBeyondEnd { claimed_bytes, found_bytes: file_bytes };
    if claimed_bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
        return Err(Kind::Header { problem: beyond() }.into());
    }
    let mut json = vec![0; claimed_bytes as usize];
    file.read_exact(&mut json).map_err(unreadable(beyond()))?;
    Ok(json)
}

/// The number of bytes of all tensors together, which have to lie one behind the other.
fn check_data(entries: &[HeaderEntry]) -> Result<u64> {
    let mut end = 0;
    for entry in entries {
        let name = || shown(&entry.name);
        if entry.start != end || entry.end < entry.start {
            let (found, wanted) = ([entry.start, entry.end], end);
            return Err(Kind::Header { problem: Problem::Offsets { name: name(), found, wanted } }.into());
        }
        let wanted_bytes = num_bytes(entry).ok_or_else(|| {
            let (shape, dtype) = (entry.shape.clone(), entry.dtype.to_string());
            Kind::Header { problem: Problem::Uncountable { name: name(), shape, dtype } }
        })?;
        end = entry.end;
        let found_bytes = entry.end - entry.start;
        if found_bytes != wanted_bytes {
            let (shape, dtype) = (entry.shape.clone(), entry.dtype.to_string());
            let problem = Problem::Size { name: name(), shape, dtype, found_bytes, wanted_bytes };
            return Err(Kind::Header { problem }.into());
        }
    }
    Ok(end)
}

/// Nothing if they are no whole number, or more than any file has.
fn num_bytes(entry: &HeaderEntry) -> Option<u64> {
    let bits = u64::try_from(entry.dtype.bitsize()).ok()?;
    // As if no dim were empty, so that no part of the product is too large for whoever computes strides.
    let numel = entry.shape.iter().try_fold(1_u64, |numel, &size| numel.checked_mul((size as u64).max(1)))?;
    let most = numel.checked_mul(bits).filter(|&bits| bits <= i64::MAX as u64)?;
    let bits = if entry.shape.contains(&0) { 0 } else { most };
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// All tensors, in the order of the text, and the notes.
struct Contents<N> {
    entries: Vec<HeaderEntry>,
    notes: N,
}

impl<'de, N: Deserialize<'de> + Default> Deserialize<'de> for Contents<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(Self { entries: Vec::new(), notes: N::default() }))
    }
}

impl<'de, N: Deserialize<'de> + Default> Entries<'de> for Contents<N> {
    const WANTED: &'static str = "an object that has an entry for each tensor";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        if key == Header::METADATA_KEY {
            self.notes = map.next_value::<Option<N>>()?.unwrap_or_default();
            return Ok(());
        }
        if self.entries.len() == Header::MAX_TENSORS {
            return Err(de::Error::custom(format_args!(
                "there are more than {} tensors, which is the most that is read",
                Header::MAX_TENSORS
            )));
        }
        let Info { dtype, shape: Shape(shape), data_offsets: (start, end) } = map.next_value()?;
        self.entries.push(HeaderEntry { name: key.to_owned(), dtype, shape, start, end });
        Ok(())
    }
}

/// What a message calls the value of [`Header::METADATA_KEY`].
const NOTES: &str = "texts by name as __metadata__";

/// What people wrote about the file, where it is of no use: checked only.
#[derive(Default)]
struct CheckedNotes;

impl<'de> Deserialize<'de> for CheckedNotes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(Self))
    }
}

impl<'de> Entries<'de> for CheckedNotes {
    const WANTED: &'static str = NOTES;

    fn entry<A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        map.next_value::<NoValue>().map(drop)
    }
}

/// The same, kept.
#[derive(Default)]
struct KeptNotes(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for KeptNotes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(Self::default()))
    }
}

impl<'de> Entries<'de> for KeptNotes {
    const WANTED: &'static str = NOTES;

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        let note = map.next_value()?;
        self.0.insert(key.to_owned(), note);
        Ok(())
    }
}

/// What stands under the name of a tensor.
struct Info {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

#[derive(Default)]
struct InfoParts {
    dtype: Option<Dtype>,
    shape: Option<Shape>,
    data_offsets: Option<(u64, u64)>,
}

impl<'de> Deserialize<'de> for Info {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = deserializer.deserialize_map(Object(InfoParts::default()))?;
        let absent = de::Error::missing_field;
        Ok(Self {
            dtype: parts.dtype.ok_or_else(|| absent("dtype"))?,
            shape: parts.shape.ok_or_else(|| absent("shape"))?,
            data_offsets: parts.data_offsets.ok_or_else(|| absent("data_offsets"))?,
        })
    }
}

impl<'de> Entries<'de> for InfoParts {
    const WANTED: &'static str = "an object with dtype, shape and data_offsets";

    fn entry<A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "dtype" => self.dtype = Some(map.next_value()?),
            "shape" => self.shape = Some(map.next_value()?),
            "data_offsets" => self.data_offsets = Some(map.next_value()?),
            _ => return Err(de::Error::unknown_field(&shown(key), &["dtype", "shape", "data_offsets"])),
        }
        Ok(())
    }
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;

        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a list of at most {} sizes", Header::MAX_DIMS)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = list.next_element()? {
                    if sizes.len() == Header::MAX_DIMS {
                        return Err(de::Error::invalid_length(sizes.len() + 1, &self));
                    }
                    sizes.push(size);
                }
                Ok(Shape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
