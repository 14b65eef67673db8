//! How a batch is made from row numbers, here or on a thread in the background.

use super::dataset::Dataset;
use super::schedule::Schedule;
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
}

impl<D: Dataset, B> Recipe<D, B> {
    /// Fetches the rows and makes the batch.
    pub(crate) fn make(&self, rows: &[Row]) -> Result<B> {
        let fetch = |row: &Row| {
            let item = self.dataset.get(row.index);
            item.map_err(|error| error.context(format!("row {} of the dataset", row.index)))
        };
        let items = rows.iter().map(fetch).collect::<Result<Vec<_>>>()?;
        (self.collate)(items).map_err(|error| batch_context(error, rows))
    }
}

#[cold]
fn batch_context(error: Error, rows: &[Row]) -> Error {
    const SHOWN: usize = 8;
    let shown: Vec<_> = rows.iter().take(SHOWN).map(|row| row.index.to_string()).collect();
    let more = if rows.len() > SHOWN { ", ..." } else { "" };
    error.context(format!("batch of rows {}{more} of the dataset", shown.join(", ")))
}

/// A batch, or the panic that its making ended in.
type Outcome<B> = std::thread::Result<Result<B>>;

/// Threads that make batches ahead of time. Thread `i` of `n` makes every `n`-th batch from `i` on, so that
/// batches come in order without anybody sorting them.
#[derive(Debug)]
pub(crate) struct Workers<B> {
    first_round: usize,
    /// `None` once a thread's panic has been passed on.
    receivers: Vec<Receiver<Outcome<B>>>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

/// What a pass asks of its [`Workers`].
#[derive(Clone, Debug)]
pub(crate) struct Errand {
    pub(crate) schedule: Schedule,
    pub(crate) rank: usize,
    pub(crate) first_round: usize,
    pub(crate) num_workers: usize,
    pub(crate) prefetch_factor: usize,
}

impl<B: Send + 'static> Workers<B> {
    pub(crate) fn start<D>(recipe: &Arc<Recipe<D, B>>, errand: &Errand) -> Result<Self>
    where
        D: Dataset + 'static,
    {
        let mut workers = Self {
            first_round: errand.first_round,
            receivers: Vec::new(),
            threads: Vec::new(),
            stop: Arc::new(AtomicBool::new(false)),
        };
        for worker in 0..errand.num_workers {
            let (sender, receiver) = sync_channel(errand.prefetch_factor);
            let (recipe, errand) = (Arc::clone(recipe), errand.clone());
            let stop = Arc::clone(&workers.stop);
            let thread = std::thread::Builder::new()
                .name(format!("data-{worker}"))
                .spawn(move || work(&recipe, &errand, worker, &stop, &sender))
                .map_err(|source| DataError::Spawn { source })?;
            workers.receivers.push(receiver);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// The batch of round `round`; rounds are asked for one after the other. Waits for it if need be, and
    /// goes on with the panic if making it panicked.
    pub(crate) fn receive(&self, round: usize) -> Result<B> {
        let worker = (round - self.first_round) % self.receivers.len();
        match self.receivers[worker].recv() {
            Ok(Ok(batch)) => batch,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => Err(DataError::WorkerGone { round }.into()),
        }
    }
}

fn work<D: Dataset, B>(
    recipe: &Recipe<D, B>,
    errand: &Errand,
    worker: usize,
    stop: &AtomicBool,
    sender: &SyncSender<Outcome<B>>,
) {
    let first_round = errand.first_round + worker;
    for round in (first_round..).step_by(errand.num_workers) {
        let Some(rows) = errand.schedule.batch(round, errand.rank) else {
            return;
        };
        if stop.load(Ordering::Relaxed) {
            return;
        }
        // The panic is raised again by `Workers::receive`; the recipe is only shared, never changed.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| recipe.make(&rows)));
        let panicked = outcome.is_err();
        if sender.send(outcome).is_err() || panicked {
            return;
        }
    }
}

impl<B> Drop for Workers<B> {
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
