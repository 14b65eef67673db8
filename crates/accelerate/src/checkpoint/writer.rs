//! One file of weights, written: safetensors, or as `torch.save` does.

use super::atomic::{NewFile, OpenFile, PendingFile, folder_of, io_error, remove_abandoned, sync_folder};
use super::dtype::to_dtype;
use super::elsewhere;
use super::progress::NumWritten;
use super::torch_files::is_torch_file;
use crate::amp::float_kind;
use crate::error::{Result, WeightsError};
use crate::nn::StateDict;
use crate::session::StateReader;
use accelerate_core::config::FloatType;
use accelerate_core::weight_files::{Header, Notes, Pickled, Plain, TorchArchive};
use safetensors::Dtype;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// How much of a tensor is copied at a time on its way to a file: it is still in the processor's cache when it is hashed and
/// written.
const PIECE_BYTES: usize = 128 << 10;
/// The same for a tensor that is on another device, or becomes another type, where each copy takes a while to begin.
const CONVERTED_PIECE_BYTES: usize = 512 << 10;
/// The version of the archives of `torch.save`.
const TORCH_VERSION: &[u8] = b"3\n";

/// Writes named tensors to one safetensors file, whole or not at all: `safetensors.torch.save_file`. A file that is called `.bin`,
/// `.pt`, `.pth` or `.ckpt` is written as `torch.save` does.
///
/// The tensors may live on any device, be views, and share memory; each is written in full. An existing
/// file is replaced.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): the disk is full, the folder missing or not writable, or an element type that the
/// format does not know.
///
/// ```
/// use accelerate::checkpoint::{load_file, save_file};
/// use accelerate::{nn::StateDict, tch::Tensor};
///
/// let path = std::env::temp_dir().join(format!("accelerate-save-file-{}.safetensors", std::process::id()));
/// let state: StateDict = [("x".to_string(), Tensor::from_slice(&[1.5f32, 2.0]))].into_iter().collect();
/// save_file(&state, &path)?;
/// assert_eq!(load_file(&path)?.get("x"), state.get("x"));
/// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn save_file(state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    // What an earlier call left under a temporary name has that of the file in it.
    let stem = path.file_name().unwrap_or_default().to_string_lossy();
    let tensors: Vec<_> = state.iter().collect();
    write_pending(&tensors, None, NewFile::buffered(path, &stem), (&NumWritten::default(), None))?.commit()?;
    sync_folder(folder_of(path))?;
    remove_abandoned(folder_of(path), &stem, &[])
}

/// What a file's header says of a tensor, apart from where it is.
#[derive(Debug)]
pub(super) struct TensorSpec {
    name: String,
    kind: Kind,
    dtype: Dtype,
    shape: Vec<usize>,
    num_bytes: usize,
}

impl TensorSpec {
    /// Of a tensor that is to be written to `path`.
    pub(super) fn new(name: &str, kind: Kind, shape: &[i64], path: &Path) -> Result<Self> {
        let Some(dtype) = to_dtype(kind) else {
            let (path, name) = (path.to_owned(), name.to_owned());
            return Err(WeightsError::KindNotWritable { path, name, kind }.into());
        };
        let shape: Vec<usize> = shape.iter().map(|&size| size.max(0) as usize).collect();
        let num_bytes = shape.iter().product::<usize>() * kind.elt_size_in_bytes();
        Ok(Self { name: name.to_owned(), kind, dtype, shape, num_bytes })
    }

    /// Number of bytes the tensor takes in a file.
    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

/// The element type in which a tensor of type `own` is written where floating-point ones are to have `dtype`.
pub(super) fn written_kind(own: Kind, dtype: Option<FloatType>) -> Kind {
    let is_real = matches!(own, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
    dtype.filter(|_| is_real).map_or(own, float_kind)
}

/// Writes the tensors under a temporary name in the folder of `new`, in the order that every writer of the format uses;
/// floating-point ones as `dtype`, if given. The bytes are counted. `reader` has those tensors that are without memory.
pub(super) fn write_pending(
    tensors: &[(&str, &Tensor)],
    dtype: Option<FloatType>,
    new: NewFile<'_>,
    (written, reader): (&NumWritten, Option<&dyn StateReader>),
) -> Result<PendingFile> {
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let kind = written_kind(tensor.f_kind()?, dtype);
        entries.push((TensorSpec::new(name, kind, &tensor.size(), new.path)?, *tensor));
    }
    // Largest alignment first keeps every tensor aligned without holes.
    entries.sort_by(|(a, _), (b, _)| b.dtype.cmp(&a.dtype).then(a.name.cmp(&b.name)));
    let mut file = TensorFile::create(new, entries.iter().map(|(spec, _)| spec))?;
    file.written = written.clone();
    let mut left = entries.as_slice();
    while let [(spec, tensor), others @ ..] = left {
        let num_together = elsewhere::next_batch(left.iter().map(|(_, tensor)| *tensor));
        let Some(reader) = reader.filter(|_| num_together > 0) else {
            file.append(tensor, spec)?;
            left = others;
            continue;
        };
        let (together, later) = left.split_at(num_together);
        let named: Vec<(&str, &Tensor)> = together.iter().map(|(spec, tensor)| (spec.name.as_str(), *tensor)).collect();
        let read = elsewhere::read(reader, &named)?;
        together.iter().zip(&read).try_for_each(|((spec, _), tensor)| file.append(tensor, spec))?;
        left = later;
    }
    file.finish()
}

/// A file to which tensors are appended in the order in which its beginning lists them.
#[derive(Debug)]
pub(super) struct TensorFile {
    output: Output,
    path: PathBuf,
    num_missing: usize,
    /// One buffer for all tensors.
    bytes: Vec<u8>,
    written: NumWritten,
}

/// In whichever format.
#[derive(Debug)]
enum Output {
    Safetensors(OpenFile),
    /// And the number of the next tensor.
    Torch(TorchArchive<OpenFile>, usize),
}

impl TensorFile {
    /// Begins the file, whose name decides in which format.
    pub(super) fn create<'a>(new: NewFile<'_>, tensors: impl ExactSizeIterator<Item = &'a TensorSpec>) -> Result<Self> {
        let num_missing = tensors.len();
        let output = if is_torch_file(new.path) { begin_torch(new, tensors)? } else { begin(new, tensors)? };
        Ok(Self { output, path: new.path.to_owned(), num_missing, bytes: Vec::new(), written: NumWritten::default() })
    }

    /// Appends the next tensor, a piece at a time: writing, and casting to the type of `spec`, cost no memory but for a piece.
    pub(super) fn append(&mut self, tensor: &Tensor, spec: &TensorSpec) -> Result<()> {
        let element_bytes = spec.kind.elt_size_in_bytes();
        let flat = tensor.f_detach()?.f_reshape([-1])?;
        let Self { output, bytes, path, written, .. } = self;
        if let Output::Torch(archive, number) = output {
            archive.begin(&format!("data/{number}")).map_err(io_error("write", path))?;
            *number += 1;
        }
        let is_as_it_is = flat.device() == Device::Cpu && flat.f_kind()? == spec.kind;
        let piece_bytes = if is_as_it_is { PIECE_BYTES } else { CONVERTED_PIECE_BYTES };
        let mut start = 0;
        while start < flat.numel() {
            let length = (piece_bytes / element_bytes).min(flat.numel() - start);
            bytes.resize(length * element_bytes, 0);
            flat.f_narrow(0, start as i64, length as i64)?.f_to_kind(spec.kind)?.f_copy_data_u8(bytes, length)?;
            match output {
                Output::Safetensors(file) => file.append(bytes)?,
                Output::Torch(archive, _) => archive.append(bytes).map_err(io_error("write", path))?,
            }
            written.add(bytes.len());
            start += length;
        }
        self.num_missing = self.num_missing.saturating_sub(1);
        Ok(())
    }

    /// Have all tensors of the header been appended?
    pub(super) fn is_complete(&self) -> bool {
        self.num_missing == 0
    }

    pub(super) fn finish(self) -> Result<PendingFile> {
        let Self { output, path, .. } = self;
        match output {
            Output::Safetensors(file) => file.finish(),
            Output::Torch(mut archive, _) => {
                let finished = archive.begin("version").and_then(|()| archive.append(TORCH_VERSION));
                finished.and_then(|()| archive.finish()).map_err(io_error("write", &path))?.finish()
            }
        }
    }
}

fn begin<'a>(new: NewFile<'_>, tensors: impl Iterator<Item = &'a TensorSpec>) -> Result<Output> {
    let header = header(tensors, new.path)?;
    let mut file = OpenFile::create(new)?;
    file.append(&header)?;
    Ok(Output::Safetensors(file))
}

/// Begins an archive with the pickle that names its tensors.
fn begin_torch<'a>(new: NewFile<'_>, tensors: impl Iterator<Item = &'a TensorSpec>) -> Result<Output> {
    let path = new.path;
    let named = tensors.map(|spec| (spec.name.as_str(), Plain::Tensor(spec)));
    let value = Plain::dict(named);
    let describe = |spec: &&TensorSpec| (spec.dtype, spec.shape.iter().map(|&size| size as u64).collect());
    let pickled = Pickled::new(&value, describe);
    let pickled = pickled.map_err(|source| WeightsError::NotInTorchFile { path: path.to_owned(), source })?;
    let mut archive = TorchArchive::new(OpenFile::create(new)?, new.stem);
    let mut entry = |name, content: &[u8]| archive.begin(name).and_then(|()| archive.append(content));
    let begun = entry("data.pkl", &pickled.bytes).and_then(|()| entry("byteorder", b"little"));
    begun.map_err(io_error("write", path))?;
    Ok(Output::Torch(archive, 0))
}

/// The length of the header, and the header.
fn header<'a>(tensors: impl Iterator<Item = &'a TensorSpec>, path: &Path) -> Result<Vec<u8>> {
    let entries = tensors.map(|spec| (spec.name.as_str(), spec.dtype, spec.shape.clone()));
    let header = Header::write(entries, &Notes::default().agreed());
    Ok(header.map_err(|source| WeightsError::NotInSafetensors { path: path.to_owned(), source })?)
}
