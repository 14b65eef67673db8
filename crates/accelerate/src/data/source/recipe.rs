//! How a batch is made from row numbers, here or on a thread in the background.

use crate::data::dataset::Dataset;
use crate::error::{DataError, Error, Result};
use accelerate_core::sampler::Row;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

pub(crate) type CollateFn<T, B> = dyn Fn(Vec<T>) -> Result<B> + Send + Sync;

/// A dataset and what makes batches of its rows.
pub(crate) struct Recipe<D: Dataset, B> {
    pub(crate) dataset: D,
    pub(crate) collate: Box<CollateFn<D::Item, B>>,
    /// A batch from what [`Dataset::get_stacked`] fetches, where batches are made in that way anyhow.
    pub(crate) from_stacked: Option<FromStacked<D::Item, B>>,
}

/// See [`Collate::from_stacked`](crate::data::Collate::from_stacked).
pub(crate) type FromStacked<T, B> = fn(T) -> Option<B>;

impl<D: Dataset, B> Recipe<D, B> {
    /// Fetches the rows and makes the batch.
    pub(crate) fn make(&self, rows: &[Row]) -> Result<B> {
        if let Some(batch) = self.make_at_once(rows) {
            return Ok(batch);
        }
        let fetch = |row: &Row| {
            let item = self.dataset.get(row.index);
            item.map_err(|error| error.context(format!("row {} of the dataset", row.index)))
        };
        let items = rows.iter().map(fetch).collect::<Result<Vec<_>>>()?;
        (self.collate)(items).map_err(|error| batch_context(error, rows))
    }

    /// `None` where that is not possible. A failure is none either: fetched one by one, the row at fault is known.
    fn make_at_once(&self, rows: &[Row]) -> Option<B> {
        let from_stacked = self.from_stacked?;
        let indices: Vec<usize> = rows.iter().map(|row| row.index).collect();
        from_stacked(self.dataset.get_stacked(&indices)?.ok()?)
    }
}

#[cold]
fn batch_context(error: Error, rows: &[Row]) -> Error {
    const SHOWN: usize = 8;
    let shown: Vec<_> = rows.iter().take(SHOWN).map(|row| row.index.to_string()).collect();
    let more = if rows.len() > SHOWN { ", ..." } else { "" };
    error.context(format!("batch of rows {}{more} of the dataset", shown.join(", ")))
}

/// How many threads make batches ahead of time, and how far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerOptions {
    pub(crate) num_workers: usize,
    /// Batches that each of them may have ready.
    pub(crate) prefetch_factor: usize,
}

/// Makes what is wanted in a round; `None` when there is no such round.
pub(crate) type MakeRound<R> = dyn Fn(usize) -> Option<Result<R>> + Send + Sync;

/// What was made, or the panic that its making ended in.
type Outcome<R> = std::thread::Result<Result<R>>;

/// Threads that make rounds ahead of time. Thread `i` of `n` makes every `n`-th round from `i` on, so that
/// they come in order without anybody sorting them.
#[derive(Debug)]
pub(crate) struct Workers<R> {
    first_round: usize,
    receivers: Vec<Receiver<Outcome<R>>>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl<R: Send + 'static> Workers<R> {
    pub(crate) fn start(make: &Arc<MakeRound<R>>, first_round: usize, options: WorkerOptions) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut workers = Self { first_round, receivers: Vec::new(), threads: Vec::new(), stop };
        for worker in 0..options.num_workers {
            let (sender, receiver) = sync_channel(options.prefetch_factor);
            let (make, stop) = (Arc::clone(make), Arc::clone(&workers.stop));
            let rounds = (first_round + worker..).step_by(options.num_workers);
            let thread = std::thread::Builder::new()
                .name(format!("data-{worker}"))
                .spawn(move || work(&*make, rounds, &stop, &sender))
                .map_err(|source| DataError::Spawn { source })?;
            workers.receivers.push(receiver);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// What was made for round `round`; rounds are asked for one after the other. Waits for it if need be, and
    /// goes on with the panic if making it panicked.
    pub(crate) fn receive(&self, round: usize) -> Result<R> {
        let worker = (round - self.first_round) % self.receivers.len();
        match self.receivers[worker].recv() {
            Ok(Ok(made)) => made,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => Err(DataError::WorkerGone { round }.into()),
        }
    }
}

fn work<R>(
    make: &MakeRound<R>,
    rounds: impl Iterator<Item = usize>,
    stop: &AtomicBool,
    sender: &SyncSender<Outcome<R>>,
) {
    for round in rounds {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        // The panic is raised again by `Workers::receive`; what rounds are made of is only shared, never changed.
        let outcome = match std::panic::catch_unwind(AssertUnwindSafe(|| make(round))) {
            Ok(None) => return,
            Ok(Some(made)) => Ok(made),
            Err(panic) => Err(panic),
        };
        let panicked = outcome.is_err();
        if sender.send(outcome).is_err() || panicked {
            return;
        }
    }
}

impl<R> Drop for Workers<R> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A thread that waits for room wakes up when its receiver goes away.
        self.receivers.clear();
        for thread in self.threads.drain(..) {
            // Panics inside were caught and passed on; there is nothing left to report.
            let _ = thread.join();
        }
    }
}
