//! The beginning of a safetensors file that is to be written.

use super::{Header, HeaderEntry, LENGTH_BYTES, num_bytes};
use crate::Result;
use crate::error::weight_files::{HeaderProblem as Problem, WeightFilesErrorKind as Kind};
use crate::weight_files::shown;
use safetensors::Dtype;
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::{BTreeMap, HashSet};

impl Header {
    /// The bytes with which a safetensors file begins that has these tensors: name, element type and sizes of each. Their data follow
    /// one behind the other in the same order, the first of them at a multiple of 8 bytes. What
    /// is written is what [`read`](Self::read) takes.
    ///
    /// ```
    /// use accelerate_core::weight_files::Header;
    /// use safetensors::Dtype;
    ///
    /// let notes = [("format".to_owned(), "pt".to_owned())].into();
    /// let mut file = Header::write([("bias", Dtype::F32, vec![2])], &notes)?;
    /// file.extend([0; 8]);
    /// assert_eq!(Header::read(&mut &file[..], file.len() as u64)?.get("bias").unwrap().shape, [2]);
    ///
    /// let error = Header::write([("__metadata__", Dtype::F32, vec![2])], &notes).unwrap_err();
    /// assert!(error.to_string().contains("rename"), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): a tensor that is called [`METADATA_KEY`](Self::METADATA_KEY), two with one
    /// name, one that does not take a whole number of bytes, or more of them, or a longer header, than are read.
    pub fn write<'a>(
        tensors: impl IntoIterator<Item = (&'a str, Dtype, Vec<usize>)>,
        notes: &BTreeMap<String, String>,
    ) -> Result<Vec<u8>> {
        let wrong = |problem| Kind::Header { problem };
        let (mut entries, mut names, mut end) = (Vec::new(), HashSet::new(), 0_u64);
        for (name, dtype, shape) in tensors {
            check_saved_name(name)?;
            if !names.insert(name) {
                return Err(wrong(Problem::Twice { name: shown(name) }).into());
            }
            let mut entry = HeaderEntry { name: name.to_owned(), dtype, shape, start: end, end };
            entry.end = num_bytes(&entry).and_then(|bytes| end.checked_add(bytes)).ok_or_else(|| {
                let (shape, dtype) = (entry.shape.clone(), dtype.to_string());
                wrong(Problem::Uncountable { name: shown(name), shape, dtype })
            })?;
            end = entry.end;
            entries.push(entry);
        }
        if entries.len() > Self::MAX_TENSORS {
            return Err(wrong(Problem::Many { found: entries.len() }).into());
        }
        let json = serde_json::to_vec(&Text { notes, entries: &entries });
        let mut json = json.map_err(|cause| wrong(Problem::Json(cause.to_string())))?;
        json.resize(json.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
        let num_bytes = json.len() as u64;
        if num_bytes > Self::MAX_BYTES {
            return Err(wrong(Problem::Long { num_bytes }).into());
        }
        Ok([&num_bytes.to_le_bytes()[..], &json].concat())
    }
}

/// Whether a safetensors file can have a tensor of this name: all but one, which readers take for notes about the file.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): it is [`Header::METADATA_KEY`].
///
/// ```
/// use accelerate_core::weight_files::check_saved_name;
/// assert!(check_saved_name("metadata").is_ok());
/// assert!(check_saved_name("__metadata__").unwrap_err().is_weight_files());
/// ```
pub fn check_saved_name(name: &str) -> Result<()> {
    match name == Header::METADATA_KEY {
        true => Err(Kind::Header { problem: Problem::Reserved }.into()),
        false => Ok(()),
    }
}

/// The JSON of a header, in the order of the data.
struct Text<'a> {
    notes: &'a BTreeMap<String, String>,
    entries: &'a [HeaderEntry],
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Info<'a> {
            dtype: Dtype,
            shape: &'a [usize],
            data_offsets: (u64, u64),
        }
        let mut map = serializer.serialize_map(None)?;
        if !self.notes.is_empty() {
            map.serialize_entry(Header::METADATA_KEY, self.notes)?;
        }
        for HeaderEntry { name, dtype, shape, start, end } in self.entries {
            map.serialize_entry(name, &Info { dtype: *dtype, shape, data_offsets: (*start, *end) })?;
        }
        map.end()
    }
}
