//! The thread that brings weights from a disk while others are computed with.
//!
//! To map weights page by page, where each is looked at first, takes longer than to multiply one row with them, also if the system has the
//! file. So a thread maps one half of a block while the other is computed, and has the next one read. More than one block is never in
//! memory for it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use tch::Tensor;
use torch_ext::storage::{populate_pages, read_pages_ahead};

/// What comes when a block comes into use. All tensors are mapped files.
#[derive(Debug, Default)]
pub(super) struct Fetch {
    /// Comes into memory.
    pub(super) current: Vec<Tensor>,
    /// Is read by the system.
    pub(super) next: Vec<Tensor>,
}

impl Fetch {
    /// What does not succeed here is read where it is used.
    fn run(self) {
        self.next.iter().for_each(read_pages_ahead);
        for tensor in &self.current {
            let num_elements = tensor.numel() as i64;
            let middle = num_elements / 2;
            let half = tensor.f_view([-1]).and_then(|flat| flat.f_narrow(0, middle, num_elements - middle));
            let _is_read = half.is_ok_and(|half| populate_pages(&half));
        }
    }
}

/// A thread that carries out one fetch at a time. It begins with the first one, and ends when this is dropped.
#[derive(Debug, Default)]
pub(super) struct FetchThread {
    worker: Option<Worker>,
    is_running: bool,
}

#[derive(Debug)]
struct Worker {
    fetches: Sender<Fetch>,
    finished: Receiver<()>,
    thread: JoinHandle<()>,
}

impl FetchThread {
    /// Begins a fetch. [`wait`](Self::wait) has returned since the last one.
    pub(super) fn start(&mut self, fetch: Fetch) {
        if fetch.current.is_empty() && fetch.next.is_empty() {
            return;
        }
        if self.worker.is_none() {
            self.worker = Worker::new();
        }
        // Without a thread, what is needed is read where it is used.
        self.is_running = self.worker.as_ref().is_some_and(|worker| worker.fetches.send(fetch).is_ok());
    }

    /// Returns when the last fetch is complete.
    pub(super) fn wait(&mut self) {
        if std::mem::take(&mut self.is_running) {
            // A thread that is gone has nothing more to do.
            let _gone = self.worker.as_ref().map(|worker| worker.finished.recv());
        }
    }
}

impl Worker {
    /// `None` where the system gives no thread.
    fn new() -> Option<Self> {
        let (fetches, received) = channel::<Fetch>();
        let (finish, finished) = channel();
        let work = move || {
            for fetch in received {
                fetch.run();
                if finish.send(()).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("offload-fetch".to_owned()).spawn(work).ok()?;
        Some(Self { fetches, finished, thread })
    }
}

impl Drop for FetchThread {
    // The thread holds tensors, which must be gone before libtorch is.
    fn drop(&mut self) {
        if let Some(Worker { fetches, finished, thread }) = self.worker.take() {
            drop((fetches, finished));
            let _panicked = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Fetch, FetchThread};
    use std::io::Write;
    use tch::{Device, Kind, Tensor};
    use torch_ext::storage::release_pages;

    #[test]
    fn fetches_change_no_number() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 1 << 16]).unwrap();
        let path = file.path().to_str().unwrap();
        let bytes = Tensor::f_from_file(path, false, 1 << 16, (Kind::Uint8, Device::Cpu)).unwrap();
        let tensors = || vec![bytes.shallow_clone()];
        let mut fetch_thread = FetchThread::default();
        fetch_thread.wait();
        for _ in 0..3 {
            release_pages(&bytes);
            fetch_thread.start(Fetch { current: tensors(), next: tensors() });
            fetch_thread.wait();
            assert_eq!(bytes.to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]), 7 << 16);
        }
        // A file that has become shorter is no signal in the thread, which goes on.
        file.as_file().set_len(0).unwrap();
        for _ in 0..2 {
            fetch_thread.start(Fetch { current: tensors(), next: tensors() });
            fetch_thread.wait();
        }
        assert!(fetch_thread.worker.as_ref().is_some_and(|worker| !worker.thread.is_finished()));
    }
}
