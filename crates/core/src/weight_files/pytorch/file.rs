//! Files of `torch.save` that hold tensors by name, such as `pytorch_model.bin`.

use super::archive::Archive;
use super::contents::tensor;
use super::pickle::{Data, MAX_PICKLE_BYTES, Pickle};
use super::strided::StoredTensor;
use crate::Result;
use crate::error::pytorch::{ArchiveProblem, ContentsProblem as Problem, PickleProblem, PytorchErrorKind as Kind};
use crate::weight_files::json::check_name;
use crate::weight_files::{Header, shown};
use std::collections::HashSet;
use std::io::{Read, Seek};
use std::ops::Range;

/// How much more all tensors of a file of this length may take than the file itself. Tied weights and views of one storage do, some
/// times the file; a tensor that was expanded, as a mask is, takes as much as one of a few thousand rows and columns. A short file
/// that repeats one element for ever would fill a disk.
pub(super) fn most_repeated_bytes(length: u64) -> u64 {
    const EXPANDED_BYTES: u64 = 64 << 20;
    const TIMES: u64 = 16;
    const MOST_BYTES: u64 = 1 << 30;
    length.saturating_mul(TIMES).saturating_add(EXPANDED_BYTES).min(MOST_BYTES)
}

/// A tensor of a [`TorchFile`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchTensor {
    /// Its name: at most [`Header::MAX_NAME_BYTES`] long, and without control characters.
    pub name: String,
    /// Where its elements are.
    pub stored: StoredTensor,
}

/// What a file of `torch.save` holds: `pytorch_model.bin`, or a shard of it. Nothing in the file is executed, and of its data
/// nothing is read.
///
/// ```
/// use accelerate_core::weight_files::TorchFile;
/// let error = TorchFile::read(&mut std::io::Cursor::new(b"\x80\x02cos\nsystem\n")).unwrap_err();
/// assert!(error.to_string().contains("it is no archive of torch.save"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchFile {
    /// Its tensors, in the order of the file. Names that are tied have the same [`StoredTensor`].
    pub tensors: Vec<TorchTensor>,
    /// The names of what is no tensor.
    pub others: Vec<String>,
}

impl TorchFile {
    /// Reads all of a file but the data of its tensors.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): the file cannot be read, is damaged, names other functions or
    /// classes than tensors need, or holds a tensor that safetensors cannot.
    pub fn read(file: &mut (impl Read + Seek)) -> Result<Self> {
        let length = length_of(file)?;
        let Opened { archive, root, pickle } = Opened::read(file, 0..length)?;
        let pickle = Pickle::read(&pickle)?;
        let Data::Dict(pairs) = pickle.root().data() else {
            let (found, wanted) = (pickle.root().kind(), "a dictionary of tensors by name");
            return Err(Kind::from(Problem::Kind { found, wanted }).into());
        };
        let (mut tensors, mut others, mut names) = (Vec::new(), Vec::new(), HashSet::new());
        let mut data_bytes = 0_u64;
        for (key, value) in pairs.iter() {
            let Data::Text(name) = key.data() else {
                let (found, wanted) = (key.kind(), "the name of a tensor");
                return Err(Kind::from(Problem::Kind { found, wanted }).into());
            };
            check_tensor_name(name)?;
            if !names.insert(name) {
                return Err(Kind::from(Problem::Twice { name: shown(name) }).into());
            }
            let found = tensor(value, &archive, &root);
            match found.map_err(|problem| Kind::from(Problem::Tensor { name: shown(name), problem }))? {
                None => others.push(name.to_owned()),
                Some(stored) => {
                    data_bytes = data_bytes.saturating_add(stored.num_bytes());
                    tensors.push(TorchTensor { name: name.to_owned(), stored });
                }
            }
            check_number(tensors.len() + others.len())?;
        }
        let (bytes, most) = (data_bytes.saturating_sub(length), most_repeated_bytes(length));
        if bytes > most {
            return Err(Kind::from(Problem::Repeated { bytes, most }).into());
        }
        Ok(Self { tensors, others })
    }
}

impl StoredTensor {
    /// Reads where the elements of a tensor are that `torch.save` has written alone into this range of a file.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): as for [`TorchFile::read`], or there is something else.
    pub fn read(file: &mut (impl Read + Seek), range: Range<u64>) -> Result<Self> {
        let Opened { archive, root, pickle } = Opened::read(file, range)?;
        let pickle = Pickle::read(&pickle)?;
        let found = tensor(pickle.root(), &archive, &root);
        found.map_err(|problem| Kind::from(Problem::OnlyTensor(problem)))?.ok_or_else(|| {
            let (found, wanted) = (pickle.root().kind(), "one tensor");
            Kind::from(Problem::Kind { found, wanted }).into()
        })
    }
}

pub(super) fn length_of(file: &mut impl Seek) -> Result<u64> {
    file.seek(std::io::SeekFrom::End(0)).map_err(|cause| {
        let reason = cause.to_string();
        crate::Error::new(Kind::Unreadable { reason }).caused_by(cause)
    })
}

/// Whether a tensor of this name can be read from weight files.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): it is too long, or has control characters.
///
/// ```
/// use accelerate_core::weight_files::check_tensor_name;
/// assert!(check_tensor_name("head.weight").is_ok());
/// let error = check_tensor_name(&"x".repeat(1200)).unwrap_err();
/// assert!(error.to_string().contains("is 1200 bytes long"), "{error}");
/// ```
pub fn check_tensor_name(name: &str) -> Result<()> {
    check_name(name).map_err(|reason| Kind::from(Problem::Name { reason }).into())
}

pub(super) fn check_number(number: usize) -> Result<()> {
    if number > Header::MAX_TENSORS {
        return Err(Kind::from(Problem::Many { most: Header::MAX_TENSORS }).into());
    }
    Ok(())
}

/// An archive, the folder in it that everything is in, and its pickle.
pub(super) struct Opened {
    pub(super) archive: Archive,
    pub(super) root: String,
    pub(super) pickle: Vec<u8>,
}

impl Opened {
    /// Of this range of a file.
    pub(super) fn read(file: &mut (impl Read + Seek), range: Range<u64>) -> Result<Self> {
        let archive = Archive::read(file, range)?;
        let root = archive.names().find_map(|name| name.strip_suffix("/data.pkl").filter(|root| !root.contains('/')));
        let absent = || Kind::from(ArchiveProblem::Absent { name: "data.pkl".to_owned() });
        let root = root.ok_or_else(absent)?.to_owned();
        let name = format!("{root}/data.pkl");
        let found_bytes = archive.find(&name).map_or(0, |stored| stored.len());
        if found_bytes > MAX_PICKLE_BYTES {
            return Err(Kind::from(PickleProblem::Long { found_bytes }).into());
        }
        let pickle = archive.content(file, &name)?;
        // Files of earlier versions do not say.
        let order = format!("{root}/byteorder");
        let is_short = archive.find(&order).is_some_and(|stored| stored.len() <= 16);
        if archive.find(&order).is_some() && !(is_short && archive.content(file, &order)? == b"little") {
            return Err(Kind::from(ArchiveProblem::ByteOrder).into());
        }
        Ok(Self { archive, root, pickle })
    }
}
