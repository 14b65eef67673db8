//! What of the weights on a disk is in memory.
//!
//! Files are mapped, so weights that the system still has from the last pass are used without a copy, and the system may take their
//! memory whenever others need it. A block is what one layer has on the disk. The block in use is in memory; the one before is let
//! go, unless the budget has room for it; the one that came next in the last pass is read by the system meanwhile.

use super::fetch::{Fetch, FetchThread, MappedFile};
use super::folder::DatFile;
use crate::error::{BigModelError, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::autograd::version;

/// The blocks of one model.
#[derive(Debug)]
pub(super) struct Window(Mutex<State>);

/// A tensor of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) block: usize,
    pub(super) member: usize,
}

#[derive(Debug)]
struct State {
    blocks: Vec<Block>,
    /// Bytes that may stay in memory besides the block in use.
    room: u64,
    /// Bytes of blocks that do.
    kept: u64,
    /// The block in use.
    current: Option<usize>,
    fetch_thread: FetchThread,
}

#[derive(Debug, Default)]
struct Block {
    tensors: Vec<Mapped>,
    num_bytes: u64,
    /// Does it stay in memory?
    is_kept: bool,
    /// The block that was used after it.
    next: Option<usize>,
}

#[derive(Debug)]
struct Mapped {
    file: DatFile,
    tensor: Option<Tensor>,
}

impl Window {
    /// Blocks in the order in which they will probably be used. `room` bytes of them may stay in memory.
    pub(super) fn new(blocks: Vec<Vec<DatFile>>, room: u64) -> Self {
        let num_blocks = blocks.len();
        let block = |(number, files): (usize, Vec<DatFile>)| Block {
            num_bytes: files.iter().map(DatFile::num_bytes).sum(),
            tensors: files.into_iter().map(|file| Mapped { file, tensor: None }).collect(),
            is_kept: false,
            next: Some((number + 1) % num_blocks),
        };
        let blocks = blocks.into_iter().enumerate().map(block).collect();
        Self(Mutex::new(State { blocks, room, kept: 0, current: None, fetch_thread: FetchThread::default() }))
    }

    // Every change leaves the state whole, so a panic elsewhere does not spoil it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tensor to compute with. Another block than that of the call before is let go.
    ///
    /// # Errors
    /// The file is not what it was.
    pub(super) fn tensor(&self, place: Place) -> Result<Tensor> {
        let mut state = self.state();
        match state.current == Some(place.block) {
            true => state.blocks[place.block].tensors[place.member].file.check()?,
            false => state.enter(place.block)?,
        }
        state.blocks[place.block].tensors[place.member].tensor()
    }

    /// A tensor for who looks at all of them: nothing is let go for it, or noted.
    pub(super) fn look_at(&self, place: Place) -> Result<Tensor> {
        let mut state = self.state();
        let mapped = &mut state.blocks[place.block].tensors[place.member];
        mapped.file.check()?;
        mapped.tensor()
    }
}

impl State {
    fn enter(&mut self, number: usize) -> Result<()> {
        self.blocks[number].tensors.iter().try_for_each(|mapped| mapped.file.check())?;
        // Nothing of the block before may come after it has been let go.
        self.fetch_thread.wait();
        let mut fetch = Fetch::default();
        if let Some(before) = self.current.replace(number) {
            let block = &mut self.blocks[before];
            block.next = Some(number);
            if !block.is_kept {
                fetch.before.extend(block.tensors.iter_mut().filter_map(Mapped::let_go));
            }
        }
        let block = &mut self.blocks[number];
        if !block.is_kept {
            // A file that is not there is told of when it is used.
            fetch.current.extend(block.tensors.iter_mut().filter_map(Mapped::mapped_file));
            if self.kept + block.num_bytes <= self.room {
                block.is_kept = true;
                self.kept += block.num_bytes;
            }
        }
        if let Some(next) = block.next.filter(|&next| next != number && !self.blocks[next].is_kept) {
            fetch.next.extend(self.blocks[next].tensors.iter_mut().filter_map(Mapped::mapped_file));
        }
        self.fetch_thread.start(fetch);
        Ok(())
    }
}

impl Mapped {
    /// A mapping whose pages may go: they come back out of the file. What has been read instead would be lost, and is read again.
    fn let_go(&mut self) -> Option<Tensor> {
        match self.file.can_be_mapped() {
            true => self.tensor.as_ref().map(Tensor::shallow_clone),
            false => self.tensor.take().and(None),
        }
    }

    /// What the system can read ahead. Nothing of it takes memory before it is used.
    fn mapped_file(&mut self) -> Option<MappedFile> {
        if !self.file.can_be_mapped() {
            return None;
        }
        Some(MappedFile { path: self.file.path.clone(), tensor: self.tensor().ok()? })
    }

    fn tensor(&mut self) -> Result<Tensor> {
        let tensor = match self.tensor.take() {
            Some(tensor) if version(&tensor)? != 0 => {
                let path = self.file.path.clone();
                self.tensor = Some(tensor);
                return Err(BigModelError::WrittenTo { path }.into());
            }
            Some(tensor) => tensor,
            None => self.file.map()?,
        };
        Ok(self.tensor.insert(tensor).shallow_clone())
    }
}
