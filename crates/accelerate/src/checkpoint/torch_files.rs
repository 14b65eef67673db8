//! Weights that PyTorch has saved: files of `torch.save`, and folders of `torch.distributed.checkpoint`. They are read as plain
//! data: nothing in them is executed.

use super::atomic::io_error;
use super::dtype::to_kind;
use super::reader::{WeightReader, open_file};
use crate::error::{Result, WeightsError};
use crate::messages;
use crate::nn::flat_elements;
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{
    DistributedCheckpoint, DistributedTensor, MAX_PICKLE_BYTES, StoredTensor, TorchFile, listed, shown,
};
use safetensors::Dtype;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use torch_ext::file::read_at;

/// How much is compared with a checksum at once.
const CHECKSUM_BLOCK_BYTES: usize = 128 << 10;
/// What a message has room for of a list of names.
const LIST_BYTES: usize = 200;

/// What files of `torch.save` are called.
const EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// Is a file of this name one of `torch.save`?
pub(super) fn is_torch_file(path: &Path) -> bool {
    path.extension().is_some_and(|found| EXTENSIONS.iter().any(|extension| found == *extension))
}

/// Tensors by name, each in one piece or in several. Of their data nothing has been read.
#[derive(Debug)]
pub(super) struct TorchWeights {
    /// The file, or the metadata of the folder.
    path: PathBuf,
    tensors: Vec<TorchTensor>,
    positions: HashMap<String, usize>,
    num_bytes_read: u64,
}

#[derive(Debug)]
struct TorchTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    pieces: Vec<Piece>,
}

/// A part of a tensor in a file. A checkpoint may have more files than a process may open, so they are opened when they are read.
#[derive(Debug)]
struct Piece {
    path: PathBuf,
    /// Where it begins in the tensor.
    offsets: Vec<u64>,
    stored: StoredTensor,
}

impl TorchWeights {
    /// A file such as `pytorch_model.bin`, or a shard of it.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (mut file, _) = open_file(path)?;
        let damaged = |source| WeightsError::TorchFile { path: path.to_owned(), source };
        let TorchFile { tensors, others } = TorchFile::read(&mut file).map_err(damaged)?;
        let tensors = tensors.into_iter().map(|tensor| {
            let (dtype, shape) = (tensor.stored.dtype(), sizes(tensor.stored.shape()));
            let piece = Piece { path: path.to_owned(), offsets: vec![0; shape.len()], stored: tensor.stored };
            TorchTensor { name: tensor.name, dtype, shape, pieces: vec![piece] }
        });
        Ok(Self::new(path.to_owned(), tensors.collect(), &others))
    }

    /// A folder that `torch.distributed.checkpoint` has written, such as Python Accelerate's `pytorch_model_fsdp_0`.
    pub(super) fn open_distributed(folder: &Path) -> Result<Self> {
        let path = folder.join(DistributedCheckpoint::FILE_NAME);
        let (file, found_bytes) = open_file(&path)?;
        if found_bytes > MAX_PICKLE_BYTES {
            let most_bytes = MAX_PICKLE_BYTES;
            return Err(WeightsError::NotASmallFile { path, found_bytes, most_bytes }.into());
        }
        let mut metadata = Vec::new();
        // The file may have grown since.
        file.take(MAX_PICKLE_BYTES).read_to_end(&mut metadata).map_err(io_error("read", &path))?;
        let damaged = |source| WeightsError::TorchFile { path: path.clone(), source };
        let checkpoint = DistributedCheckpoint::read(&metadata).map_err(damaged)?;
        let mut tensors = Vec::with_capacity(checkpoint.tensors.len());
        for described in &checkpoint.tensors {
            let pieces = pieces(folder, &checkpoint, described)?;
            let (name, shape) = (described.name.clone(), sizes(&described.shape));
            tensors.push(TorchTensor { name, dtype: described.dtype, shape, pieces });
        }
        Ok(Self::new(path, tensors, &checkpoint.others))
    }

    fn new(path: PathBuf, tensors: Vec<TorchTensor>, others: &[String]) -> Self {
        if !others.is_empty() {
            let names = listed(others, LIST_BYTES);
            messages::warning_here!("{} also holds what is no tensor, and is not read: {names}", path.display());
        }
        let positions = tensors.iter().enumerate().map(|(position, tensor)| (tensor.name.clone(), position)).collect();
        Self { path, tensors, positions, num_bytes_read: 0 }
    }

    fn tensor(&self, name: &str) -> Option<&TorchTensor> {
        self.tensors.get(*self.positions.get(name)?)
    }
}

/// Where the parts of a tensor are, each compared with what the metadata say of it.
fn pieces(folder: &Path, checkpoint: &DistributedCheckpoint, described: &DistributedTensor) -> Result<Vec<Piece>> {
    let piece = |chunk: &accelerate_core::weight_files::Chunk| {
        let file = checkpoint.files.get(chunk.file).map_or("", String::as_str);
        let path = folder.join(file);
        let (mut file, found_bytes) = open_file(&path)?;
        let (name, Range { start, end }) = (shown(&described.key), chunk.range.clone());
        if end > found_bytes {
            return Err(WeightsError::BeyondFile { path, name, start, end, found_bytes }.into());
        }
        let stored = StoredTensor::read(&mut file, chunk.range.clone())
            .and_then(|stored| chunk.check(&stored, described).map(|()| stored))
            .map_err(|source| WeightsError::TorchPart { path: path.clone(), name, source })?;
        Ok(Piece { path, offsets: chunk.offsets.clone(), stored })
    };
    described.chunks.iter().map(piece).collect()
}

/// The shape has been checked: each size is one that memory could have.
fn sizes(shape: &[u64]) -> Vec<usize> {
    shape.iter().map(|&size| size as usize).collect()
}

fn signed(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}

impl WeightReader for TorchWeights {
    fn path(&self) -> &Path {
        &self.path
    }

    fn shape(&self, name: &str) -> Option<Vec<i64>> {
        Some(signed(&self.tensor(name)?.shape))
    }

    fn shapes(&self) -> Vec<(&str, Vec<i64>)> {
        self.tensors.iter().map(|tensor| (tensor.name.as_str(), signed(&tensor.shape))).collect()
    }

    fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read
    }

    fn read_elements(&mut self, name: &str, layout: &Layout) -> Result<Tensor> {
        let tensor = self.tensor(name).ok_or_else(|| WeightsError::Header {
            path: self.path.clone(),
            reason: format!("there is no tensor `{}` in it", shown(name)),
        })?;
        let (elements, num_bytes_read) = tensor.read_elements(layout, &self.path)?;
        self.num_bytes_read += num_bytes_read;
        Ok(elements)
    }
}

impl TorchTensor {
    /// The elements of a layout, flat, and how many bytes have been read for them: of each piece that has any, as much as lies
    /// between its first element and its last.
    fn read_elements(&self, layout: &Layout, path: &Path) -> Result<(Tensor, u64)> {
        let name = || shown(&self.name);
        let Some(kind) = to_kind(self.dtype) else {
            let (path, dtype) = (path.to_owned(), self.dtype.to_string());
            return Err(WeightsError::UnknownDtype { path, name: name(), dtype }.into());
        };
        let num_elements: usize = self.shape.iter().product();
        if layout.full_numel() != num_elements {
            let reason = format!("`{}` has {num_elements} elements, and {layout} was asked for", name());
            return Err(WeightsError::Header { path: path.to_owned(), reason }.into());
        }
        // Whoever takes a part of a tensor reads no more than that part.
        if layout.numel() == num_elements {
            self.pieces.iter().try_for_each(Piece::check_storage)?;
        }
        let no_memory = |num_bytes| WeightsError::NoMemory { path: path.to_owned(), name: name(), num_bytes };
        if num_elements == 0 {
            return Ok((new_tensor(0, kind, &no_memory)?, 0));
        }
        if let [piece] = self.pieces.as_slice()
            && let Some(start) = piece.start_if_contiguous(num_elements)
        {
            return piece.read_runs(start, layout, kind, &no_memory);
        }
        // The system gives memory where it is written to: only those parts of it are used.
        let full = new_tensor(num_elements, kind, &no_memory)?;
        let in_shape = full.f_view(signed(&self.shape).as_slice())?;
        let mut num_bytes_read = 0;
        for piece in self.pieces.iter().filter(|piece| piece.has_any_of(layout, &self.shape)) {
            let (part, num_bytes) = piece.read(kind, &no_memory)?;
            let mut place = in_shape.shallow_clone();
            for (dim, (&offset, size)) in piece.offsets.iter().zip(part.size()).enumerate() {
                place = place.f_narrow(dim as i64, offset as i64, size)?;
            }
            place.f_copy_(&part)?;
            num_bytes_read += num_bytes;
        }
        Ok((flat_elements(&full, layout)?.f_detach_copy()?, num_bytes_read))
    }
}

impl Piece {
    /// Compares the storage with its checksum, if the file has one.
    fn check_storage(&self) -> Result<()> {
        let storage = self.stored.storage();
        let Some(wanted) = storage.crc32 else { return Ok(()) };
        let (file, _) = open_file(&self.path)?;
        let (mut checksum, mut block) = (crc32fast::Hasher::new(), vec![0; CHECKSUM_BLOCK_BYTES]);
        let Range { start, end } = storage.range;
        for at in (start..end).step_by(CHECKSUM_BLOCK_BYTES) {
            let block = &mut block[..(end - at).min(CHECKSUM_BLOCK_BYTES as u64) as usize];
            file.read_exact_at(block, at).map_err(io_error("read", &self.path))?;
            checksum.update(block);
        }
        match checksum.finalize() == wanted {
            true => Ok(()),
            false => Err(WeightsError::StorageChecksum { path: self.path.clone(), start, end }.into()),
        }
    }

    /// Where in the file the elements of a whole tensor begin, if they lie one behind the other.
    fn start_if_contiguous(&self, num_elements: usize) -> Option<u64> {
        let mut runs = self.stored.runs();
        let first = runs.next()?;
        let is_one = runs.next().is_none() && first.bytes == self.stored.num_bytes();
        (is_one && num_elements as u64 == self.stored.shape().iter().product::<u64>()).then_some(first.from)
    }

    /// The elements of a layout where all lie one behind the other. Nothing else is read.
    fn read_runs(
        &self,
        start: u64,
        layout: &Layout,
        kind: Kind,
        no_memory: &dyn Fn(u64) -> WeightsError,
    ) -> Result<(Tensor, u64)> {
        let (file, _) = open_file(&self.path)?;
        let element_bytes = kind.elt_size_in_bytes() as u64;
        let tensor = new_tensor(layout.numel(), kind, no_memory)?;
        let mut filled = 0;
        for run in layout.runs() {
            let place = tensor.f_narrow(0, filled, run.len() as i64)?;
            read_at(&file, &place, start + run.start as u64 * element_bytes).map_err(io_error("read", &self.path))?;
            filled += run.len() as i64;
        }
        Ok((tensor, filled as u64 * element_bytes))
    }

    /// All of the piece in its shape.
    fn read(&self, kind: Kind, no_memory: &dyn Fn(u64) -> WeightsError) -> Result<(Tensor, u64)> {
        let (file, _) = open_file(&self.path)?;
        let span = self.stored.span();
        let num_bytes = span.end - span.start;
        let flat = new_tensor((num_bytes / kind.elt_size_in_bytes() as u64) as usize, kind, no_memory)?;
        read_at(&file, &flat, span.start).map_err(io_error("read", &self.path))?;
        let signed = |numbers: &[u64]| numbers.iter().map(|&number| number as i64).collect::<Vec<_>>();
        let (shape, stride) = (signed(self.stored.shape()), signed(self.stored.stride()));
        Ok((flat.f_as_strided(shape.as_slice(), stride.as_slice(), 0)?, num_bytes))
    }

    /// May elements of the layout be in it? Of its block of the tensor of this shape the first and the last are compared.
    fn has_any_of(&self, layout: &Layout, shape: &[usize]) -> bool {
        let flat = |places: &mut dyn Iterator<Item = u64>| {
            places.zip(shape).fold(0, |flat: usize, (place, &size)| flat * size + place as usize)
        };
        let first = flat(&mut self.offsets.iter().copied());
        let last = flat(&mut self.offsets.iter().zip(self.stored.shape()).map(|(offset, size)| offset + size - 1));
        layout.runs().any(|run| run.start <= last && first < run.end)
    }
}

fn new_tensor(numel: usize, kind: Kind, no_memory: &dyn Fn(u64) -> WeightsError) -> Result<Tensor> {
    let num_bytes = numel as u64 * kind.elt_size_in_bytes() as u64;
    Ok(Tensor::f_empty([numel as i64], (kind, Device::Cpu)).map_err(|_| no_memory(num_bytes))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/weights").join(name)
    }

    /// The rows that a rank keeps are in the files of one or two ranks.
    #[test]
    fn a_flipped_bit_in_a_storage_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.bin");
        let mut bytes = std::fs::read(fixture("model.bin")).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let mut weights = TorchWeights::open(&path).unwrap();
        let tensor = weights.tensors.iter().find(|tensor| tensor.pieces[0].stored.storage().crc32.is_some()).unwrap();
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        let at = tensor.pieces[0].stored.storage().range.start as usize;
        let _ = weights.read_elements(&name, &Layout::full(shape.clone())).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = weights.read_elements(&name, &Layout::full(shape)).unwrap_err();
        assert!(error.is_weights() && error.to_string().contains("weights.bin"), "{error}");
    }

    #[test]
    fn parts_that_have_nothing_of_a_shard_are_not_read() {
        let mut weights = TorchWeights::open_distributed(&fixture("dcp_fsdp_3")).unwrap();
        let layout = Layout::full([7, 3]);
        let whole = weights.read_elements("embedding.weight", &layout).unwrap();
        assert_eq!((whole.numel(), weights.num_bytes_read()), (21, 84));
        let first_row = weights.read_elements("embedding.weight", &layout.clone().flat(0..3).unwrap()).unwrap();
        assert_eq!(first_row, whole.narrow(0, 0, 3));
        // Of seven rows, the first of three ranks has three.
        assert_eq!(weights.num_bytes_read(), 84 + 36);
    }

    #[test]
    fn of_a_file_only_the_elements_of_a_shard_are_read() {
        let mut weights = TorchWeights::open(&fixture("model.bin")).unwrap();
        let layout = Layout::full([7, 3]);
        let whole = weights.read_elements("embedding.weight", &layout).unwrap();
        let columns = layout.clone().slice(1, 1..3).unwrap();
        let found = weights.read_elements("embedding.weight", &columns).unwrap();
        assert_eq!(found, whole.view([7, 3]).narrow(1, 1, 2).reshape(-1));
        assert_eq!(weights.num_bytes_read(), 84 + 56);
        let error = weights.read_elements("embedding.weight", &Layout::full([8, 3])).unwrap_err();
        assert!(error.to_string().contains("has 21 elements"), "{error}");
    }
}
