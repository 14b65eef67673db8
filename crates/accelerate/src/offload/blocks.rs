//! Blocks that are read ahead, changed one at a time, and written behind.

use super::BlockStore;
use crate::error::{OffloadError, Result};
use accelerate_core::offload::{Block, BlockLayout, MAX_BLOCK_BYTES};
use accelerate_core::plan::NVME_BLOCKS_BYTES;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use tch::{Device, Kind, Tensor};

/// Blocks in memory at once: for each thread one that travels, one that is changed, and some that wait.
const NUM_BUFFERS: usize = NVME_BLOCKS_BYTES / MAX_BLOCK_BYTES;

/// Threads that read, and as many that write: a disk is idle between two blocks of one thread.
const NUM_THREADS: usize = 4;

/// All blocks of some state, and the memory that they come to.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) layout: BlockLayout,
    store: Arc<dyn BlockStore>,
    /// Kept from step to step, and used by one pass at a time: there are never more.
    buffers: Mutex<Vec<Tensor>>,
}

/// What happens to a block besides being looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// It is read, and stays as it is.
    Read,
    /// It is written, whatever was there.
    Write,
    /// It is read, changed and written.
    Update,
}

impl Blocks {
    pub(crate) fn new(layout: BlockLayout, store: Arc<dyn BlockStore>) -> Self {
        Self { layout, store, buffers: Mutex::default() }
    }

    /// Brings each block that is `wanted` into memory and shows it to `visit`, in any order: its planes, each
    /// `[num_elements]` of the type and on the device that `options` gives the block. Waits for a pass of another thread.
    ///
    /// # Errors
    /// Those of `visit` and of the store; then some blocks have been changed and others not.
    pub(crate) fn run(
        &self,
        pass: Pass,
        wanted: impl Fn(&Block) -> bool,
        options: impl Fn(&Block) -> (Kind, Device),
        mut visit: impl FnMut(&Block, &[Tensor]) -> Result<()>,
    ) -> Result<()> {
        let Self { layout, store, buffers } = self;
        let (store, num_planes) = (&**store, layout.num_planes);
        let mut memory = lock(buffers);
        let blocks: Vec<&Block> = layout.blocks.iter().filter(|block| wanted(block)).collect();
        let largest = layout.blocks.iter().map(|block| block.num_bytes).max().unwrap_or(0);
        while memory.len() < NUM_BUFFERS.min(blocks.len()) {
            memory.push(store.buffer(largest)?);
        }
        let todo = filled(blocks.iter().copied()).1;
        let (free_sender, free) = filled(memory.drain(..));
        let (ready_sender, ready) = unbounded();
        let (changed_sender, changed) = unbounded();
        let result = thread::scope(|scope| {
            for _ in 0..NUM_THREADS {
                let (todo, free, ready) = (todo.clone(), free.clone(), ready_sender.clone());
                spawn(scope, move || read_ahead(store, pass, &todo, &free, &ready))?;
                let (changed, free, ready) = (changed.clone(), free_sender.clone(), ready_sender.clone());
                spawn(scope, move || write_behind(store, pass, &changed, &free, &ready))?;
            }
            // A thread ends when nobody is left who could send it anything.
            drop((ready_sender, free_sender));
            for _ in 0..blocks.len() {
                let (block, buffer) = ready.recv().map_err(|_| OffloadError::ThreadGone)?;
                let buffer: Tensor = buffer?;
                let (kind, device) = options(block);
                let bytes = buffer.f_to_device(device)?;
                let planes = planes(&bytes, block, num_planes, kind)?;
                visit(block, &planes)?;
                if device != buffer.device() && pass != Pass::Read {
                    buffer.shallow_clone().f_copy_(&bytes)?;
                }
                changed_sender.send((block, buffer)).map_err(|_| OffloadError::ThreadGone)?;
            }
            drop(changed_sender);
            // What writing has to say that nobody has heard yet.
            ready.iter().try_for_each(|(_, failed)| failed.map(drop))
        });
        memory.extend(free.try_iter());
        result
    }
}

fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, work: impl FnOnce() + Send + 'scope) -> Result<()> {
    let builder = thread::Builder::new().name("offload".to_owned());
    builder.spawn_scoped(scope, work).map_err(|source| OffloadError::Spawn { source })?;
    Ok(())
}

fn lock(buffers: &Mutex<Vec<Tensor>>) -> MutexGuard<'_, Vec<Tensor>> {
    // A list of memory is always whole.
    buffers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A channel with something in it.
fn filled<T>(items: impl IntoIterator<Item = T>) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = unbounded();
    // The receiver is here.
    items.into_iter().for_each(|item| drop(sender.send(item)));
    (sender, receiver)
}

/// A block, and its memory or why there is nothing in it.
type Ready<'a> = (&'a Block, Result<Tensor>);

fn read_ahead<'a>(
    store: &dyn BlockStore,
    pass: Pass,
    todo: &Receiver<&'a Block>,
    free: &Receiver<Tensor>,
    ready: &Sender<Ready<'a>>,
) {
    for block in todo {
        let Ok(buffer) = free.recv() else { return };
        let read = match pass {
            Pass::Write => Ok(()),
            Pass::Read | Pass::Update => part(&buffer, block).and_then(|bytes| store.read(block.file_offset, &bytes)),
        };
        if ready.send((block, read.map(|()| buffer))).is_err() {
            return;
        }
    }
}

fn write_behind<'a>(
    store: &dyn BlockStore,
    pass: Pass,
    changed: &Receiver<(&'a Block, Tensor)>,
    free: &Sender<Tensor>,
    ready: &Sender<Ready<'a>>,
) {
    for (block, buffer) in changed {
        let written = match pass {
            Pass::Read => Ok(()),
            Pass::Write | Pass::Update => part(&buffer, block).and_then(|bytes| store.write(block.file_offset, &bytes)),
        };
        let told = written.map_or_else(|error| ready.send((block, Err(error))).is_ok(), |()| true);
        // Nobody waits for memory once all blocks have been read.
        let _ = free.send(buffer);
        if !told {
            return;
        }
    }
}

/// What a block takes of a buffer.
fn part(buffer: &Tensor, block: &Block) -> Result<Tensor> {
    Ok(buffer.f_narrow(0, 0, block.num_bytes as i64)?)
}

fn planes(bytes: &Tensor, block: &Block, num_planes: usize, kind: Kind) -> Result<Vec<Tensor>> {
    let size = (block.num_elements * block.element_bytes) as i64;
    (0..num_planes as i64).map(|plane| Ok(bytes.f_narrow(0, plane * size, size)?.f_view_dtype(kind)?)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::offload::open;
    use accelerate_core::config::OffloadTarget;
    use accelerate_core::offload::Member;
    use std::collections::BTreeSet;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn layout() -> BlockLayout {
        let member = |num_elements, unit| Member { num_elements, element_bytes: 4, unit };
        // More blocks than buffers.
        BlockLayout::new(&[member(2_500_000, 0), member(3, 0), member(12_000_000, 1), member(7, 2)], 2)
    }

    fn stores(layout: &BlockLayout) -> (tempfile::TempDir, Vec<Arc<dyn BlockStore>>) {
        let folder = tempfile::tempdir().unwrap();
        let targets = [OffloadTarget::Nvme(folder.path().to_owned()), OffloadTarget::Cpu];
        let stores = targets.iter().map(|target| open(target, layout.num_bytes, Device::Cpu).unwrap()).collect();
        (folder, stores)
    }

    fn visited(blocks: &Blocks, pass: Pass, mut visit: impl FnMut(f64, &[Tensor])) -> BTreeSet<u64> {
        let mut seen = BTreeSet::new();
        let of_block = |block: &Block, planes: &[Tensor]| {
            assert!(planes.iter().all(|plane| plane.numel() == block.num_elements && plane.kind() == Kind::Float));
            assert!(seen.insert(block.file_offset), "a block is visited once");
            visit(block.file_offset as f64, planes);
            Ok(())
        };
        blocks.run(pass, |_| true, |_| FLOAT, of_block).unwrap();
        seen
    }

    #[test]
    fn every_block_comes_once_and_goes_back_where_it_was() {
        let layout = layout();
        let (_folder, stores) = stores(&layout);
        for store in stores {
            let all: BTreeSet<u64> = layout.blocks.iter().map(|block| block.file_offset).collect();
            assert!(all.len() > NUM_BUFFERS);
            let blocks = Blocks::new(layout.clone(), store);
            let fill = |number: f64, planes: &[Tensor]| {
                let _ = (planes[0].shallow_clone().fill_(number), planes[1].shallow_clone().fill_(-number));
            };
            assert_eq!(visited(&blocks, Pass::Write, fill), all);
            let double = |_: f64, planes: &[Tensor]| {
                planes.iter().for_each(|plane| drop(plane.shallow_clone().g_mul_scalar_(2.0)))
            };
            assert_eq!(visited(&blocks, Pass::Update, double), all);
            for _ in 0..2 {
                let check = |number: f64, planes: &[Tensor]| {
                    for (plane, sign) in planes.iter().zip([2.0, -2.0]) {
                        let (low, high) = plane.aminmax(None, false);
                        let wanted = f64::from((sign * number) as f32);
                        assert_eq!((low.double_value(&[]), high.double_value(&[])), (wanted, wanted));
                        // What is read only does not stay.
                        let _ = plane.shallow_clone().zero_();
                    }
                };
                assert_eq!(visited(&blocks, Pass::Read, check), all);
            }
            assert_eq!(lock(&blocks.buffers).len(), NUM_BUFFERS, "memory is kept");
        }
    }

    #[test]
    fn only_what_is_wanted_moves() {
        let layout = layout();
        let (_folder, stores) = stores(&layout);
        for store in stores {
            let blocks = Blocks::new(layout.clone(), store);
            let mut units = Vec::new();
            let of_block = |block: &Block, _: &[Tensor]| {
                units.push(block.unit);
                Ok(())
            };
            blocks.run(Pass::Update, |block| block.unit == 2, |_| FLOAT, of_block).unwrap();
            assert_eq!(units, [2]);
            blocks.run(Pass::Update, |_| false, |_| FLOAT, |_, _| Err(Error::other("nothing was asked for"))).unwrap();
        }
    }

    /// Fails to read or write one block.
    #[derive(Debug)]
    struct Failing(Arc<dyn BlockStore>, Pass, u64);

    impl BlockStore for Failing {
        fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
            self.0.buffer(num_bytes)
        }
        fn read(&self, offset: u64, bytes: &Tensor) -> Result<()> {
            if self.1 == Pass::Read && offset == self.2 {
                Err(Error::other("no read"))
            } else {
                self.0.read(offset, bytes)
            }
        }
        fn write(&self, offset: u64, bytes: &Tensor) -> Result<()> {
            if self.1 == Pass::Write && offset == self.2 {
                Err(Error::other("no write"))
            } else {
                self.0.write(offset, bytes)
            }
        }
    }

    #[test]
    fn a_failure_at_any_block_ends_the_pass_with_its_error() {
        let layout = layout();
        let (_folder, stores) = stores(&layout);
        for offset in layout.blocks.iter().map(|block| block.file_offset) {
            for (fails, text) in [(Pass::Read, "no read"), (Pass::Write, "no write")] {
                let store = Arc::new(Failing(Arc::clone(&stores[1]), fails, offset));
                let blocks = Blocks::new(layout.clone(), store);
                let error = blocks.run(Pass::Update, |_| true, |_| FLOAT, |_, _| Ok(())).unwrap_err();
                assert_eq!(error.to_string(), text);
            }
            let blocks = Blocks::new(layout.clone(), Arc::clone(&stores[0]));
            let visit = |block: &Block, _: &[Tensor]| match block.file_offset == offset {
                true => Err(Error::other("no visit")),
                false => Ok(()),
            };
            assert_eq!(blocks.run(Pass::Update, |_| true, |_| FLOAT, visit).unwrap_err().to_string(), "no visit");
            // The next pass finds everything in order again.
            assert_eq!(visited(&blocks, Pass::Read, |_, _| {}).len(), layout.blocks.len());
        }
    }
}
