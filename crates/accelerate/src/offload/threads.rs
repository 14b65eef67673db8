//! Threads that read and write for somebody who does not wait.

use super::store::{BlockStore, Direction, Place, Transfer};
use crate::error::{OffloadError, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use tch::Tensor;

/// A thread for each transfer that may be on its way.
#[derive(Debug)]
pub(super) struct Threads<P: Place> {
    place: Arc<P>,
    /// `None` once the threads are to end.
    requests: Option<Sender<Transfer>>,
    ended: Receiver<Ended>,
    in_flight: usize,
    threads: Vec<JoinHandle<()>>,
}

/// The number of a transfer, and its end.
type Ended = (usize, Result<()>);

impl<P: Place + 'static> Threads<P> {
    pub(super) fn new(place: P, most_transfers: usize) -> Result<Self> {
        let (place, (requests, todo), (sender, ended)) = (Arc::new(place), unbounded(), unbounded());
        let spawn = |_| {
            let (place, todo, ended) = (Arc::clone(&place), todo.clone(), sender.clone());
            let builder = thread::Builder::new().name("offload".to_owned());
            builder.spawn(move || work(&*place, &todo, &ended)).map_err(|source| OffloadError::Spawn { source }.into())
        };
        let threads = (0..most_transfers).map(spawn).collect::<Result<_>>()?;
        Ok(Self { place, requests: Some(requests), ended, in_flight: 0, threads })
    }
}

fn work(place: &impl Place, todo: &Receiver<Transfer>, ended: &Sender<Ended>) {
    for Transfer { direction, offset, bytes, number } in todo {
        let transfer = || match direction {
            Direction::Read => place.read(offset, &bytes),
            Direction::Write => place.write(offset, &bytes),
        };
        // Whoever waits for it, is told of it.
        let result = catch_unwind(AssertUnwindSafe(transfer)).unwrap_or_else(|_| Err(OffloadError::ThreadGone.into()));
        drop(bytes);
        if ended.send((number, result)).is_err() {
            return;
        }
    }
}

impl<P: Place> BlockStore for Threads<P> {
    fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
        self.place.buffer(num_bytes)
    }

    fn start(&mut self, transfer: Transfer) -> Result<()> {
        let requests = self.requests.as_ref().ok_or(OffloadError::ThreadGone)?;
        requests.send(transfer).map_err(|_| OffloadError::ThreadGone)?;
        self.in_flight += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<Ended>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        let ended = self.ended.recv().map_err(|_| OffloadError::ThreadGone)?;
        self.in_flight -= 1;
        Ok(Some(ended))
    }
}

impl<P: Place> Drop for Threads<P> {
    fn drop(&mut self) {
        self.requests = None;
        for thread in self.threads.drain(..) {
            // Panics were caught.
            let _ = thread.join();
        }
    }
}
