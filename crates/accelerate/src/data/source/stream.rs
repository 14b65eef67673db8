//! Batches of a stream: rounds are read one after the other, and cut into one part for each rank.

use super::recipe::{CollateFn, WorkerOptions};
use super::schedule::Sharding;
use super::{Begun, Finish, Pass, PassPlan, Round, Source};
use crate::data::iterable::{IterableDataset, RowStream};
use crate::data::position::{DataLoaderState, DefaultGeneratorGuard, LookAhead, PassStart, RandomStates, noting_draws};
use crate::data::random;
use crate::error::{DataError, Result};
use crate::messages;
use crate::session::LoaderPosition;
use accelerate_core::config::DataLoaderSettings;
use accelerate_core::sampler::{IterableDatasetShard, Slot, SlotSource, dispatch_slots};
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

/// A stream, and how batches are made of its rows.
pub(crate) struct StreamSource<D: IterableDataset, B> {
    pub(crate) dataset: D,
    pub(crate) collate: Arc<CollateFn<D::Item, B>>,
    pub(crate) batch_size: usize,
    pub(crate) drop_last: bool,
    pub(crate) workers: WorkerOptions,
}

impl<D: IterableDataset, B: Send + 'static> Source<B> for StreamSource<D, B> {
    fn begin(&self, plan: PassPlan<'_, B>) -> Result<Begun<B>> {
        self.dataset.set_epoch(plan.epoch);
        plan.draw_seed_of_workers()?;
        let cut = Cut { sharding: plan.sharding, batch_size: self.batch_size, drop_last: self.drop_last };
        let Opened { stream, first_chunk, delivered, start } = self.open(&cut, &plan)?;
        let mut reader = ChunkReader {
            stream,
            chunk_rows: cut.chunk_rows(),
            rows_read: delivered,
            shares_thread_with_loop: self.workers.num_workers == 0,
            next: None,
            over: false,
        };
        if let Some(read) = plan.look_ahead().and_then(|look_ahead| look_ahead.read.as_deref()) {
            let _as_before = DefaultGeneratorGuard::enter(Some(read))?;
            reader.look_ahead()?;
        }
        let pass = StreamPass {
            reader,
            first_chunk,
            collate: Arc::clone(&self.collate),
            finish: plan.finish,
            ranks: plan.ranks,
            cut,
            delivered,
        };
        let pass: Box<dyn Pass<B>> = match self.workers.num_workers {
            0 => Box::new(pass),
            num_workers => Box::new(Ahead::start(pass, num_workers.saturating_mul(self.workers.prefetch_factor))?),
        };
        Ok(Begun { pass, start: Arc::new(start) })
    }

    fn num_batches(&self, sharding: &Sharding) -> Option<usize> {
        let sharding = Sharding { even_batches: sharding.even_batches || sharding.dispatch, ..*sharding };
        Some(sharding.num_rounds_of_rows(self.batch_size, self.drop_last, self.dataset.num_rows()?))
    }

    fn batch_size(&self) -> Option<usize> {
        Some(self.batch_size)
    }

    fn num_rows(&self) -> Option<usize> {
        self.dataset.num_rows()
    }

    fn idle_state(&self) -> Result<DataLoaderState> {
        Ok(DataLoaderState::default())
    }

    fn for_ranks(&self, _: &Sharding, _: &DataLoaderSettings) -> Result<Option<Arc<dyn Source<B>>>> {
        Ok(None)
    }
}

impl<D: IterableDataset, B> StreamSource<D, B> {
    /// The stream where the pass begins. One that is resumed is opened with the random numbers of the saved run, since it may draw its
    /// order from the default generator. Afterwards this generator is where the checkpoint of the whole run has put it.
    fn open(&self, cut: &Cut, plan: &PassPlan<'_, B>) -> Result<Opened<D::Item>> {
        let resumed = plan.resume.filter(|state| state.is_within_pass());
        let saved = resumed.and_then(|state| state.random.as_ref()?.default.as_deref());
        let _as_before = resumed.map(|_| DefaultGeneratorGuard::enter(saved)).transpose()?;
        let random = RandomStates { default: Some(random::default_state()?), sampler: None };
        let mut stream = self.dataset.iter()?;
        let when_opened = resumed.map(|_| random::default_state()).transpose()?;
        let (first_chunk, delivered) = self.go_to_start(&mut *stream, cut, plan)?;
        if let Some(when_opened) = when_opened
            && plan.sharding.rank == 0
            && random::default_state()? != when_opened
        {
            messages::warning!(
                "the stream draws random numbers from the default generator while it is read. If its order depends on them, rows may come \
                 twice or not at all after loading, because the training loop draws from the same generator. Draw from a generator of the \
                 stream's own, seeded by the epoch, or implement RowStream::state and seek"
            );
        }
        Ok(Opened { stream, first_chunk, delivered, start: PassStart { random: Some(random), ..Default::default() } })
    }

    /// Takes the stream where the pass begins; the rows that may have to fill up its end, and the number of rows before
    /// that place.
    fn go_to_start(
        &self,
        stream: &mut dyn RowStream<D::Item>,
        cut: &Cut,
        plan: &PassPlan<'_, B>,
    ) -> Result<(Vec<D::Item>, u64)> {
        let resumed = plan.resume.map_or(0, |state| state.rows_delivered);
        let skipped = (plan.skip_batches as u64).saturating_mul(cut.chunk_rows() as u64);
        let start = resumed.saturating_add(skipped);
        let mut first_chunk = Vec::new();
        if start == 0 {
            return Ok((first_chunk, 0));
        }
        if cut.fills_up() {
            let wanted = usize::try_from(start).unwrap_or(usize::MAX).min(cut.chunk_rows());
            while first_chunk.len() < wanted
                && let Some(row) = stream.next()
            {
                first_chunk.push(row?);
            }
        }
        let mut at = first_chunk.len() as u64;
        if let Some(state) = plan.resume.and_then(|state| state.stream.as_deref()) {
            if !stream.seek(state)? {
                return Err(DataError::CannotSeek.into());
            }
            at = resumed;
        }
        at = at.saturating_add(stream.skip_rows(start.saturating_sub(at))?);
        if at < resumed {
            return Err(DataError::StreamTooShort { found: at, wanted: resumed }.into());
        }
        Ok((first_chunk, at))
    }
}

/// A stream that stands where its pass begins.
struct Opened<T> {
    stream: Box<dyn RowStream<T>>,
    first_chunk: Vec<T>,
    delivered: u64,
    start: PassStart,
}

/// How rounds are cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    sharding: Sharding,
    batch_size: usize,
    drop_last: bool,
}

impl Cut {
    fn shard(&self) -> IterableDatasetShard {
        IterableDatasetShard {
            num_processes: self.sharding.num_processes,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            split_batches: self.sharding.split_batches,
        }
    }

    /// Rows of a whole round.
    fn chunk_rows(&self) -> usize {
        self.shard().chunk_rows()
    }

    /// May the end of the stream have to be filled up from its beginning?
    fn fills_up(&self) -> bool {
        let even = self.sharding.even_batches || self.sharding.dispatch;
        self.sharding.num_processes > 1 && even && !self.drop_last
    }

    /// The slots of every rank, in a round of `rows` rows; `None` when the round is dropped.
    fn slots(&self, rows: usize, first_rows: usize) -> Option<Vec<Vec<Slot>>> {
        if self.drop_last && rows < self.chunk_rows() {
            return None;
        }
        let (shard, num_processes) = (self.shard(), self.sharding.num_processes);
        if self.sharding.dispatch {
            return Some(dispatch_slots(rows, first_rows, num_processes));
        }
        let all = (0..num_processes).map(|rank| shard.slots(rows, first_rows, rank));
        let mut all = all.collect::<Option<Vec<_>>>()?;
        if !self.fills_up() {
            // Rows are handed out as far as they go.
            all.iter_mut().for_each(|slots| slots.retain(|slot| !slot.filler));
        }
        Some(all)
    }
}

/// The rows of a round, and what is known once they have been read.
struct Chunk<T> {
    rows: Vec<T>,
    stream: Option<Vec<u8>>,
}

/// The round after the one that is handed out.
struct Next {
    is_none: bool,
    /// The random numbers with which reading it has begun, if it has drawn any.
    drawn_from: Option<Vec<u8>>,
}

/// Reads one round ahead, because a loop has to know that a batch is the last one while it has it.
struct ChunkReader<T> {
    stream: Box<dyn RowStream<T>>,
    chunk_rows: usize,
    rows_read: u64,
    /// Rows that are read on another thread draw in no order, so what they draw is not noted.
    shares_thread_with_loop: bool,
    next: Option<Result<Chunk<T>>>,
    over: bool,
}

impl<T> ChunkReader<T> {
    fn read(&mut self) -> Option<Result<Chunk<T>>> {
        let mut rows = Vec::with_capacity(self.chunk_rows.min(1 << 16));
        while !self.over && rows.len() < self.chunk_rows {
            match self.stream.next() {
                Some(Ok(row)) => rows.push(row),
                Some(Err(error)) => {
                    self.over = true;
                    let number = self.rows_read.saturating_add(rows.len() as u64);
                    return Some(Err(error.context(format!("row {number} of the stream"))));
                }
                None => self.over = true,
            }
        }
        self.rows_read = self.rows_read.saturating_add(rows.len() as u64);
        (!rows.is_empty()).then(|| Ok(Chunk { rows, stream: self.stream.state() }))
    }

    /// Reads the next round. Returns the random numbers that it began with, if it has drawn any.
    fn look_ahead(&mut self) -> Result<Option<Vec<u8>>> {
        if !self.shares_thread_with_loop {
            self.next = self.read();
            return Ok(None);
        }
        let (next, drawn_from) = noting_draws(|| self.read())?;
        self.next = next;
        Ok(drawn_from)
    }

    /// The next round, and what is known of the one after it.
    fn advance(&mut self) -> Option<Result<(Chunk<T>, Next)>> {
        let chunk = match self.next.take() {
            Some(chunk) => chunk,
            None => self.read()?,
        };
        Some(chunk.and_then(|chunk| {
            let drawn_from = self.look_ahead()?;
            Ok((chunk, Next { is_none: self.next.is_none(), drawn_from }))
        }))
    }

    /// Will the round that was read ahead be dropped?
    fn ends_with_part(&self) -> bool {
        matches!(&self.next, Some(Ok(chunk)) if chunk.rows.len() < self.chunk_rows)
    }
}

struct StreamPass<T, B> {
    reader: ChunkReader<T>,
    /// Filled by the first round, where a last round may need it.
    first_chunk: Vec<T>,
    collate: Arc<CollateFn<T, B>>,
    finish: Option<Finish<B>>,
    ranks: Range<usize>,
    cut: Cut,
    delivered: u64,
}

impl<T: Clone + Send + 'static, B: Send + 'static> Pass<B> for StreamPass<T, B> {
    fn next_round(&mut self) -> Option<Result<Round<B>>> {
        let (chunk, next) = match self.reader.advance()? {
            Ok(read) => read,
            Err(error) => return Some(Err(error)),
        };
        if self.first_chunk.is_empty() && self.cut.fills_up() {
            self.first_chunk.clone_from(&chunk.rows);
        }
        let first_rows = self.first_chunk.len().max(1);
        let slots = self.cut.slots(chunk.rows.len(), first_rows)?;
        let is_last = next.is_none || (self.cut.drop_last && self.reader.ends_with_part());
        self.delivered = self.delivered.saturating_add(chunk.rows.len() as u64);
        let look_ahead = LookAhead { read: next.drawn_from, made: None };
        Some(self.cut_up(chunk, &slots, is_last).map(|round| Round { look_ahead, ..round }))
    }

    fn num_left(&self) -> Option<usize> {
        None
    }
}

impl<T: Clone, B> StreamPass<T, B> {
    fn cut_up(&self, chunk: Chunk<T>, slots: &[Vec<Slot>], is_last: bool) -> Result<Round<B>> {
        let start = self.delivered.saturating_sub(chunk.rows.len() as u64);
        let mut rows: Vec<Option<T>> = chunk.rows.into_iter().map(Some).collect();
        let mut take = |slot: &Slot| match slot.source {
            // Each row is in one slot.
            SlotSource::Current(position) => rows[position].take(),
            SlotSource::First(position) => self.first_chunk.get(position).cloned(),
        };
        let batches = self.ranks.clone().map(|rank| {
            let items: Vec<T> = slots[rank].iter().filter_map(&mut take).collect();
            if items.is_empty() {
                return Ok(None);
            }
            let batch = (self.collate)(items).map_err(|error| {
                error.context(format!("batch of a round that begins with row {start} of the stream"))
            })?;
            match &self.finish {
                Some(finish) => finish(batch).map(Some),
                None => Ok(Some(batch)),
            }
        });
        Ok(Round {
            batches: batches.collect::<Result<_>>()?,
            position: LoaderPosition {
                end_of_dataloader: is_last,
                counted_rows: slots.iter().map(|slots| slots.iter().map(|slot| !slot.filler).collect()).collect(),
            },
            delivered: self.delivered,
            stream: chunk.stream,
            look_ahead: LookAhead::default(),
        })
    }
}

/// What a thread has made: a round or the end, or the panic that making it ended in.
type Made<B> = std::thread::Result<Option<Result<Round<B>>>>;

/// A pass on a thread of its own, some rounds ahead.
struct Ahead<B> {
    /// `None` when the pass is dropped: a thread that waits for room wakes up.
    made: Option<Receiver<Made<B>>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Send + 'static> Ahead<B> {
    fn start(mut pass: impl Pass<B> + 'static, num_rounds: usize) -> Result<Self> {
        let (sender, made) = sync_channel(num_rounds);
        let work = move || {
            loop {
                // The panic is raised again by the thread that asks for the round; the pass is not used after it.
                let round = std::panic::catch_unwind(AssertUnwindSafe(|| pass.next_round()));
                let over = matches!(round, Ok(None) | Err(_));
                if sender.send(round).is_err() || over {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("data-stream".to_owned())
            .spawn(work)
            .map_err(|source| DataError::Spawn { source })?;
        Ok(Self { made: Some(made), thread: Some(thread) })
    }
}

impl<B: Send + 'static> Pass<B> for Ahead<B> {
    fn next_round(&mut self) -> Option<Result<Round<B>>> {
        match self.made.as_ref()?.recv() {
            Ok(Ok(round)) => round,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => None,
        }
    }

    fn num_left(&self) -> Option<usize> {
        None
    }
}

impl<B> Drop for Ahead<B> {
    fn drop(&mut self) {
        self.made = None;
        if let Some(thread) = self.thread.take() {
            // Its panics were caught and passed on.
            let _ = thread.join();
        }
    }
}
