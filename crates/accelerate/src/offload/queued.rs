//! A file that the kernel reads and writes beside everything else.

use super::store::{BlockStore, Direction, Place, ScratchFile, Transfer};
use crate::error::Result;
use tch::Tensor;
use torch_ext::file_queue::{FileQueue, Finished};

/// A file and its queue.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) file: ScratchFile,
    pub(super) queue: FileQueue,
}

impl BlockStore for Queued {
    fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
        self.file.buffer(num_bytes)
    }

    fn start(&mut self, Transfer { direction, offset, bytes, number }: Transfer) -> Result<()> {
        let started = match direction {
            Direction::Read => self.queue.start_read(&bytes, offset, number as u64),
            Direction::Write => self.queue.start_write(&bytes, offset, number as u64),
        };
        Ok(started.map_err(|source| self.file.failed(direction, source))?)
    }

    fn finish(&mut self) -> Result<Option<(usize, Result<()>)>> {
        let finished = self.queue.wait().map_err(|source| self.file.failed(Direction::Read, source))?;
        Ok(finished.map(|Finished { tag, is_write, result }| {
            let direction = if is_write { Direction::Write } else { Direction::Read };
            (tag as usize, result.map_err(|source| self.file.failed(direction, source).into()))
        }))
    }
}
