//! The data of a tensor, whatever pieces it is in, one block after the other.

use std::collections::HashSet;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use accelerate_core::layout::{Copied, Layout};
use accelerate_core::weight_files::{Run, StoredBytes, shown};

use super::error::WeightsError;
use super::input::{Data, Files, Part, Piece, Tensor, unreadable};
use crate::progress::Progress;

/// How much is copied at a time.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;
/// Shorter runs than this are not read one by one, but with all that lies in between.
const SHORT_RUN_BYTES: u64 = 256;
/// But not where so many times the bytes of a tensor lie in between.
const SPARSE: u64 = 16;

/// A file that is being written.
pub(crate) struct Sink<'a> {
    pub(crate) output: &'a mut dyn Write,
    /// For errors.
    pub(crate) path: &'a Path,
}

impl Sink<'_> {
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        let failed = |source| WeightsError::Write { path: self.path.to_owned(), source };
        self.output.write_all(bytes).map_err(failed)
    }
}

/// Copies data of tensors, and compares them with their checksums.
pub(crate) struct Copier<'a> {
    files: &'a mut Files,
    bar: Progress,
    /// Several tensors may be views of one storage, which is checked once.
    checked: HashSet<(usize, StoredBytes)>,
}

impl<'a> Copier<'a> {
    pub(crate) fn new(files: &'a mut Files, bar: Progress) -> Self {
        Self { files, bar, checked: HashSet::new() }
    }

    /// Appends all elements of a tensor in row-major order.
    pub(crate) fn copy(&mut self, tensor: &Tensor, output: &mut Sink<'_>) -> Result<(), WeightsError> {
        match &tensor.data {
            Data::Pieces(pieces) => self.copy_pieces(pieces, tensor, output),
            Data::Parts(parts) => self.copy_parts(parts, tensor, output),
            Data::Bytes(bytes) => output.append(bytes),
        }
    }

    /// Each element is in one part, which was checked when they were found.
    fn copy_parts(&mut self, parts: &[Part], tensor: &Tensor, output: &mut Sink<'_>) -> Result<(), WeightsError> {
        let full = Layout::full(tensor.shape.iter().map(|&size| size as usize).collect::<Vec<_>>());
        let copies = full.copies_from(parts.iter().map(|part| &part.layout)).map_err(|missing| {
            let (key, start, end) = (shown(&tensor.name), missing.start as u64, missing.end as u64);
            WeightsError::Incomplete { key, start, end }
        })?;
        let element_bytes = (tensor.dtype.bitsize() / 8) as u64;
        for Copied { source, from, .. } in copies {
            let Some(part) = parts.get(source) else { continue };
            let (start, bytes) = (from.start as u64 * element_bytes, from.len() as u64 * element_bytes);
            self.stream(part.file, Run { from: part.at + start, to: 0, bytes }, output)?;
        }
        Ok(())
    }

    fn copy_pieces(&mut self, pieces: &[Piece], tensor: &Tensor, output: &mut Sink<'_>) -> Result<(), WeightsError> {
        let mut pieces: Vec<&Piece> = pieces.iter().collect();
        pieces.sort_by(|one, other| one.offsets.cmp(&other.offsets));
        pieces.iter().try_for_each(|piece| self.check(piece, &tensor.name))?;
        // Pieces that lie in the tensor one behind the other can follow each other in the file.
        if pieces.iter().all(|piece| one_run(piece, tensor).is_some()) {
            for (piece, run) in pieces.iter().filter_map(|piece| Some((piece, one_run(piece, tensor)?))) {
                self.stream(piece.file, run, output)?;
            }
            return Ok(());
        }
        let too_large = || WeightsError::Memory { key: shown(&tensor.name), num_bytes: tensor.num_bytes() };
        let mut data = Vec::new();
        let num_bytes = usize::try_from(tensor.num_bytes()).map_err(|_| too_large())?;
        data.try_reserve_exact(num_bytes).map_err(|_| too_large())?;
        data.resize(num_bytes, 0);
        pieces.iter().try_for_each(|piece| self.gather(piece, tensor, &mut data))?;
        output.append(&data)
    }

    /// Compares the storage of a piece with its checksum.
    fn check(&mut self, piece: &Piece, name: &str) -> Result<(), WeightsError> {
        let storage = piece.stored.storage();
        let Some(wanted) = storage.crc32 else { return Ok(()) };
        if !self.checked.insert((piece.file, storage.clone())) {
            return Ok(());
        }
        let mut hasher = crc32fast::Hasher::new();
        self.blocks(piece.file, storage.range.start, storage.len(), |block| {
            hasher.update(block);
            Ok(())
        })?;
        if hasher.finalize() != wanted {
            let path = self.files.path(piece.file).to_owned();
            return Err(WeightsError::Checksum { path, key: shown(name) });
        }
        Ok(())
    }

    fn stream(&mut self, file: usize, run: Run, output: &mut Sink<'_>) -> Result<(), WeightsError> {
        let bar = self.bar.clone();
        self.blocks(file, run.from, run.bytes, |block| {
            bar.inc(block.len() as u64);
            output.append(block)
        })
    }

    /// Shows a range of a file, a block at a time.
    fn blocks(
        &mut self,
        number: usize,
        mut at: u64,
        length: u64,
        mut show: impl FnMut(&[u8]) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let path = self.files.path(number).to_owned();
        let (file, _) = self.files.get(number)?;
        let mut block = vec![0; BLOCK_BYTES.min(usize::try_from(length).unwrap_or(BLOCK_BYTES))];
        let end = at + length;
        while at < end {
            let part = block.len().min(usize::try_from(end - at).unwrap_or(block.len()));
            let part = &mut block[..part];
            file.read_exact_at(part, at).map_err(unreadable(&path))?;
            show(part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Puts a piece in its places among the data of a tensor.
    fn gather(&mut self, piece: &Piece, tensor: &Tensor, data: &mut [u8]) -> Result<(), WeightsError> {
        self.bar.inc(piece.stored.num_bytes());
        let path = self.files.path(piece.file).to_owned();
        let (file, _) = self.files.get(piece.file)?;
        let span = piece.stored.span();
        let is_dense = (span.end - span.start) / SPARSE <= piece.stored.num_bytes();
        let mut runs = piece.stored.runs_within(&tensor.shape, &piece.offsets).peekable();
        let is_short = is_dense && runs.peek().is_some_and(|run| run.bytes < SHORT_RUN_BYTES);
        let mut all = vec![0; if is_short { (span.end - span.start) as usize } else { 0 }];
        file.read_exact_at(&mut all, span.start).map_err(unreadable(&path))?;
        for run in runs {
            let beyond = || unreadable(&path)(io::ErrorKind::UnexpectedEof.into());
            let target = data.get_mut(run.to as usize..(run.to + run.bytes) as usize).ok_or_else(beyond)?;
            if is_short {
                let from = (run.from - span.start) as usize;
                target.copy_from_slice(all.get(from..from + target.len()).ok_or_else(beyond)?);
            } else {
                file.read_exact_at(target, run.from).map_err(unreadable(&path))?;
            }
        }
        Ok(())
    }
}

/// The run that a piece is, if it is one.
fn one_run(piece: &Piece, tensor: &Tensor) -> Option<Run> {
    let mut runs = piece.stored.runs_within(&tensor.shape, &piece.offsets);
    let first = runs.next();
    match runs.next() {
        Some(_) => None,
        // A piece without elements is one of no length.
        None => Some(first.unwrap_or(Run { from: piece.stored.storage().range.start, to: 0, bytes: 0 })),
    }
}
