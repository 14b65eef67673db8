//! Files as `torch.save` writes them, of plain data and tensors: `torch.load(weights_only=True)` takes them.

use super::archive::{ELSEWHERE, LARGE_EXTRA};
use super::globals::names_of;
use super::plain::Plain;
use crate::Result;
use crate::error::pytorch::{ContentsProblem, PytorchErrorKind as Kind};
use safetensors::Dtype;
use std::io::{self, Write};

/// A tensor's data begin at a multiple of this many bytes, so that they can be mapped.
const ALIGNMENT: u64 = 64;
/// The same as in the archives of `torch.save`: the checksum follows the content, and names are in UTF-8.
const FLAGS: u16 = 0x0808;
/// An extra field that is there for its length.
const PADDING_EXTRA: u16 = 0x4246;
/// The smallest extra field.
const EXTRA_BYTES: u64 = 4;

/// A value as a pickle, and the tensors that it names, whose data belong into files beside it.
///
/// ```
/// use accelerate_core::weight_files::{Pickled, Plain};
/// use safetensors::Dtype;
///
/// let value = Plain::dict([("step", Plain::Int(3)), ("exp_avg", Plain::Tensor(7))]);
/// let Pickled { bytes, tensors } = Pickled::new(&value, |_| (Dtype::F32, vec![2, 3]))?;
/// assert_eq!((&bytes[..2], bytes.last(), tensors), (&b"\x80\x02"[..], Some(&b'.'), vec![&7]));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Pickled<'a, T> {
    /// The pickle, of protocol 2.
    pub bytes: Vec<u8>,
    /// In the order of the numbers by which the pickle names their data. Each is contiguous.
    pub tensors: Vec<&'a T>,
}

impl<'a, T> Pickled<'a, T> {
    /// Writes a value. `describe` gives a tensor's element type and shape.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): a value that is [`Plain::Other`], or an element type that PyTorch
    /// has not.
    pub fn new(value: &'a Plain<T>, describe: impl Fn(&T) -> (Dtype, Vec<u64>)) -> Result<Self> {
        let mut pickled = Self { bytes: b"\x80\x02".to_vec(), tensors: Vec::new() };
        pickled.value(value, &describe)?;
        pickled.bytes.push(b'.');
        Ok(pickled)
    }

    fn value(&mut self, value: &'a Plain<T>, describe: &impl Fn(&T) -> (Dtype, Vec<u64>)) -> Result<()> {
        match value {
            Plain::None => self.bytes.push(b'N'),
            Plain::Bool(value) => self.bool(*value),
            Plain::Int(value) => self.int(*value),
            Plain::LargeInt(value) => {
                // The byte for the sign.
                self.bytes.extend([0x8a, 9]);
                self.bytes.extend(value.to_le_bytes());
                self.bytes.push(0);
            }
            Plain::Float(value) => {
                self.bytes.push(b'G');
                self.bytes.extend(value.to_be_bytes());
            }
            Plain::Text(text) => self.text(text)?,
            Plain::List(items) => {
                self.bytes.extend(b"](");
                items.iter().try_for_each(|item| self.value(item, describe))?;
                self.bytes.push(b'e');
            }
            Plain::Tuple(items) => {
                self.bytes.push(b'(');
                items.iter().try_for_each(|item| self.value(item, describe))?;
                self.bytes.push(b't');
            }
            Plain::Dict(pairs) => {
                self.bytes.extend(b"}(");
                for (key, value) in pairs {
                    self.value(key, describe)?;
                    self.value(value, describe)?;
                }
                self.bytes.push(b'u');
            }
            Plain::Tensor(tensor) => self.tensor(tensor, describe(tensor))?,
            Plain::Other(found) => return Err(not_written(found.clone())),
        }
        Ok(())
    }

    fn bool(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    fn int(&mut self, value: i64) {
        match i32::try_from(value) {
            Ok(value) => {
                self.bytes.push(b'J');
                self.bytes.extend(value.to_le_bytes());
            }
            Err(_) => {
                self.bytes.extend([0x8a, 8]);
                self.bytes.extend(value.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) -> Result<()> {
        let length = u32::try_from(text.len()).map_err(|_| not_written("a text of 4 GiB".to_owned()))?;
        self.bytes.push(b'X');
        self.bytes.extend(length.to_le_bytes());
        self.bytes.extend(text.as_bytes());
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) {
        self.bytes.extend(format!("c{module}\n{name}\n").bytes());
    }

    /// A call of PyTorch's that makes a tensor of its storage, of the place of its first element, and of its sizes and strides.
    fn tensor(&mut self, tensor: &'a T, (dtype, shape): (Dtype, Vec<u64>)) -> Result<()> {
        let (name, storage) = names_of(dtype).ok_or_else(|| not_written(format!("a tensor of type {dtype}")))?;
        let numel = shape.iter().try_fold(1_u64, |numel, &size| numel.checked_mul(size));
        let num_bytes = numel.and_then(|numel| numel.checked_mul((dtype.bitsize() / 8) as u64));
        let sizes = numel.zip(num_bytes).filter(|&(_, num_bytes)| i64::try_from(num_bytes).is_ok());
        let (numel, num_bytes) = sizes.ok_or_else(|| not_written(format!("a tensor of shape {shape:?}")))?;
        // Element types that came after storages had types stand beside a storage of bytes.
        let (function, class, length) = match storage {
            Some(storage) => ("_rebuild_tensor_v2", ("torch", storage), numel),
            None => ("_rebuild_tensor_v3", ("torch.storage", "UntypedStorage"), num_bytes),
        };
        self.global("torch._utils", function);
        self.bytes.extend(b"((");
        self.text("storage")?;
        self.global(class.0, class.1);
        self.text(&self.tensors.len().to_string())?;
        self.text("cpu")?;
        self.int(length as i64);
        self.bytes.extend(b"tQ");
        self.int(0);
        for numbers in [&shape, &super::strided::contiguous_stride(&shape)] {
            self.bytes.push(b'(');
            numbers.iter().for_each(|&number| self.int(number as i64));
            self.bytes.push(b't');
        }
        self.bool(false);
        self.global("collections", "OrderedDict");
        self.bytes.extend(b")R");
        if storage.is_none() {
            self.global("torch", name);
        }
        self.bytes.extend(b"tR");
        self.tensors.push(tensor);
        Ok(())
    }
}

fn not_written(found: String) -> crate::Error {
    Kind::from(ContentsProblem::NotWritten { found }).into()
}

/// A zip archive that is written from its first byte to its last, as `torch.save` does: nothing is compressed, and all of it is in
/// one folder.
///
/// ```
/// use accelerate_core::weight_files::{Pickled, Plain, TorchArchive};
///
/// let value: Plain<()> = Plain::dict([("scale", Plain::Float(65536.0))]);
/// let mut archive = TorchArchive::new(Vec::new(), "scaler");
/// archive.begin("data.pkl")?;
/// archive.append(&Pickled::new(&value, |()| unreachable!()).unwrap().bytes)?;
/// let file = archive.finish()?;
/// assert_eq!(Plain::read(&mut std::io::Cursor::new(file)).unwrap().get("scale"), Some(&Plain::Float(65536.0)));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct TorchArchive<W> {
    output: W,
    /// How much has been written.
    at: u64,
    folder: String,
    entries: Vec<Entry>,
    open: Option<OpenEntry>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    at: u64,
    num_bytes: u64,
    crc32: u32,
}

#[derive(Debug)]
struct OpenEntry {
    name: String,
    at: u64,
    num_bytes: u64,
    hasher: crc32fast::Hasher,
}

impl<W: Write> TorchArchive<W> {
    /// Begins an archive whose entries are in this folder.
    pub fn new(output: W, folder: &str) -> Self {
        Self { output, at: 0, folder: folder.to_owned(), entries: Vec::new(), open: None }
    }

    /// Begins an entry, which ends where the next one begins.
    ///
    /// # Errors
    /// Those of the output.
    pub fn begin(&mut self, name: &str) -> io::Result<()> {
        self.end_entry()?;
        let name = format!("{}/{name}", self.folder);
        let at = self.at;
        let header_bytes = 30 + name.len() as u64;
        let content_at = at + header_bytes + EXTRA_BYTES;
        let padding = content_at.next_multiple_of(ALIGNMENT) - content_at;
        // Checksum and sizes follow the content.
        let mut header = b"PK\x03\x04".to_vec();
        extend_u16(&mut header, &[20, FLAGS, 0, 0, 0]);
        extend_u32(&mut header, &[0, 0, 0]);
        extend_u16(&mut header, &[name.len() as u16, (EXTRA_BYTES + padding) as u16]);
        header.extend(name.bytes());
        extend_u16(&mut header, &[PADDING_EXTRA, padding as u16]);
        header.extend(std::iter::repeat_n(b'Z', padding as usize));
        self.write(&header)?;
        self.open = Some(OpenEntry { name, at, num_bytes: 0, hasher: crc32fast::Hasher::new() });
        Ok(())
    }

    /// Appends to the entry that was begun last.
    ///
    /// # Errors
    /// Those of the output.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(open) = &mut self.open {
            open.hasher.update(bytes);
            open.num_bytes += bytes.len() as u64;
        }
        self.write(bytes)
    }

    /// Writes the list of entries, and gives the output back.
    ///
    /// # Errors
    /// Those of the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_entry()?;
        let list_at = self.at;
        let list: Vec<u8> = self.entries.iter().flat_map(Entry::listed).collect();
        self.write(&list)?;
        let (large_at, num_entries) = (self.at, self.entries.len() as u64);
        let mut end = Vec::new();
        // What large archives need is right for small ones, too.
        end.extend(b"PK\x06\x06");
        extend_u64(&mut end, &[44]);
        extend_u16(&mut end, &[45, 45]);
        extend_u32(&mut end, &[0, 0]);
        extend_u64(&mut end, &[num_entries, num_entries, list.len() as u64, list_at]);
        end.extend(b"PK\x06\x07");
        extend_u32(&mut end, &[0]);
        extend_u64(&mut end, &[large_at]);
        extend_u32(&mut end, &[1]);
        end.extend(b"PK\x05\x06");
        let short = num_entries.min(u64::from(u16::MAX)) as u16;
        extend_u16(&mut end, &[0, 0, short, short]);
        extend_u32(&mut end, &[list.len().min(ELSEWHERE as usize) as u32, list_at.min(ELSEWHERE) as u32]);
        extend_u16(&mut end, &[0]);
        self.write(&end)?;
        self.output.flush()?;
        Ok(self.output)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.output.write_all(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn end_entry(&mut self) -> io::Result<()> {
        let Some(OpenEntry { name, at, num_bytes, hasher }) = self.open.take() else { return Ok(()) };
        let crc32 = hasher.finalize();
        let mut descriptor = b"PK\x07\x08".to_vec();
        extend_u32(&mut descriptor, &[crc32]);
        match num_bytes < ELSEWHERE {
            true => extend_u32(&mut descriptor, &[num_bytes as u32, num_bytes as u32]),
            false => extend_u64(&mut descriptor, &[num_bytes, num_bytes]),
        }
        self.write(&descriptor)?;
        self.entries.push(Entry { name, at, num_bytes, crc32 });
        Ok(())
    }
}

impl Entry {
    /// The entry as the list has it.
    fn listed(&self) -> Vec<u8> {
        let Self { name, at, num_bytes, crc32 } = self;
        let mut large = Vec::new();
        if *num_bytes >= ELSEWHERE {
            extend_u64(&mut large, &[*num_bytes, *num_bytes]);
        }
        if *at >= ELSEWHERE {
            extend_u64(&mut large, &[*at]);
        }
        let mut extra = Vec::new();
        if !large.is_empty() {
            extend_u16(&mut extra, &[LARGE_EXTRA, large.len() as u16]);
            extra.extend(large);
        }
        let short = (*num_bytes).min(ELSEWHERE) as u32;
        let mut listed = b"PK\x01\x02".to_vec();
        extend_u16(&mut listed, &[45, 45, FLAGS, 0, 0, 0]);
        extend_u32(&mut listed, &[*crc32, short, short]);
        extend_u16(&mut listed, &[name.len() as u16, extra.len() as u16, 0, 0, 0]);
        extend_u32(&mut listed, &[0, (*at).min(ELSEWHERE) as u32]);
        listed.extend(name.bytes());
        listed.extend(extra);
        listed
    }
}

fn extend_u16(bytes: &mut Vec<u8>, numbers: &[u16]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

fn extend_u32(bytes: &mut Vec<u8>, numbers: &[u32]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

fn extend_u64(bytes: &mut Vec<u8>, numbers: &[u64]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}
