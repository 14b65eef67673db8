//! What `torch.distributed.checkpoint` has written into a folder.

use std::collections::HashMap;
use std::path::Path;

use accelerate_core::weight_files::{
    DistributedCheckpoint, DistributedItem, DistributedTensor, MAX_PICKLE_BYTES, Plain, StoredTensor, shown,
};

use super::error::WeightsError;
use super::input::{Data, Files, Piece, Tensor, Weights, is_missing, read_all};

/// The tensors in a folder.
pub(crate) fn open_distributed(folder: &Path) -> Result<Weights, WeightsError> {
    let checkpoint = read_metadata(folder, DistributedCheckpoint::read)?;
    Opened::new(folder, checkpoint)?.weights()
}

/// The tensors in a folder, and what was saved as it was, in which they are numbers.
pub(crate) fn open_nested(folder: &Path) -> Result<(Weights, Plain<usize>), WeightsError> {
    let (checkpoint, state) = read_metadata(folder, DistributedCheckpoint::read_nested)?;
    let mut opened = Opened::new(folder, checkpoint)?;
    let mut value_bytes = 0_u64;
    let state = state.try_map(&mut |item| match item {
        DistributedItem::Tensor(number) => Ok(Plain::Tensor(number)),
        DistributedItem::Value { key, file, range } => {
            value_bytes = value_bytes.saturating_add(range.end.saturating_sub(range.start));
            let read = |file: &mut _| Plain::<StoredTensor>::read_range(file, range.clone());
            let value = opened.read((&key, file, &range), read)?;
            opened.check_bytes(value_bytes)?;
            value.try_map(&mut |stored| Ok(Plain::Tensor(opened.add(file, stored))))
        }
    })?;
    Ok((opened.weights()?, state))
}

fn read_metadata<T>(folder: &Path, read: fn(&[u8]) -> accelerate_core::Result<T>) -> Result<T, WeightsError> {
    let path = folder.join(DistributedCheckpoint::FILE_NAME);
    let metadata = read_all(&path, MAX_PICKLE_BYTES)?;
    read(&metadata).map_err(|source| WeightsError::Damaged { path, source })
}

struct Opened<'a> {
    folder: &'a Path,
    weights: Weights,
    lengths: HashMap<usize, u64>,
}

/// What is stored in a file: its key, the number of the file, and where in it.
type Place<'a> = (&'a str, usize, &'a std::ops::Range<u64>);

impl<'a> Opened<'a> {
    fn new(folder: &'a Path, checkpoint: DistributedCheckpoint) -> Result<Self, WeightsError> {
        let mut files = Files::default();
        for file in &checkpoint.files {
            files.add(folder.join(file));
        }
        let weights = Weights { files, others: checkpoint.others, ..Weights::default() };
        let mut opened = Self { folder, weights, lengths: HashMap::new() };
        for described in &checkpoint.tensors {
            let tensor = opened.tensor(described)?;
            opened.weights.tensors.push(tensor);
        }
        Ok(opened)
    }

    fn tensor(&mut self, described: &DistributedTensor) -> Result<Tensor, WeightsError> {
        let mut pieces = Vec::with_capacity(described.chunks.len());
        for chunk in &described.chunks {
            let stored = self.read((&described.key, chunk.file, &chunk.range), |file| {
                let stored = StoredTensor::read(file, chunk.range.clone())?;
                chunk.check(&stored, described).map(|()| stored)
            })?;
            pieces.push(Piece { file: chunk.file, offsets: chunk.offsets.clone(), stored });
        }
        let (name, shape) = (described.name.clone(), described.shape.clone());
        Ok(Tensor { name, dtype: described.dtype, shape, data: Data::Pieces(pieces) })
    }

    /// Reads what is said to be in a part of a file.
    fn read<T>(
        &mut self,
        (key, file, range): Place<'_>,
        read: impl FnOnce(&mut std::fs::File) -> accelerate_core::Result<T>,
    ) -> Result<T, WeightsError> {
        let path = self.weights.files.path(file).to_owned();
        let (key, start, end) = (shown(key), range.start, range.end);
        if is_missing(&path) {
            return Err(WeightsError::MissingFile { path, key });
        }
        let (open, found_bytes) = self.weights.files.get(file)?;
        if end > found_bytes {
            return Err(WeightsError::BeyondFile { path, key, start, end, found_bytes });
        }
        self.lengths.insert(file, found_bytes);
        read(open).map_err(|source| WeightsError::DamagedPart { path, key, start, end, source })
    }

    /// Takes up a tensor that is in a value, and gives its number.
    fn add(&mut self, file: usize, stored: StoredTensor) -> usize {
        self.weights.tensors.push(Tensor::stored(String::new(), file, stored));
        self.weights.tensors.len() - 1
    }

    /// Each part has a place of its own, or a short file could become a long one.
    fn check_bytes(&self, tensor_bytes: u64) -> Result<(), WeightsError> {
        let file_bytes = self.lengths.values().fold(0_u64, |sum, length| sum.saturating_add(*length));
        if tensor_bytes > file_bytes {
            return Err(WeightsError::Repeated { folder: self.folder.to_owned(), tensor_bytes, file_bytes });
        }
        Ok(())
    }

    fn weights(self) -> Result<Weights, WeightsError> {
        self.check_bytes(self.weights.num_bytes())?;
        Ok(self.weights)
    }
}
