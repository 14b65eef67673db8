//! The thread that brings weights from a disk while others are computed with.
//!
//! To map weights page by page, where each is looked at first, takes longer than to multiply one row with them, also if the system has the
//! file. So a thread maps a part of a block while the other is computed with, and has the next one read. To let the block before go
//! takes time as well, so the two threads do it together; nothing is mapped before that is done, so that more than one block is never
//! in memory.

use rustix::fs::OFlags;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::thread::{self, JoinHandle};
use tch::Tensor;
use torch_ext::storage::{are_pages_cached, populate_pages, read_pages_ahead, release_pages};

/// A page of memory, of the largest size that is usual.
const PAGE_BYTES: usize = 64 << 10;

/// The thread maps what is behind this part of a tensor. To map the part where it is looked at, and to compute with all, takes as long.
const LATER_PART: [usize; 2] = [3, 8];

/// A file that the system does not have is read in pieces of this size: while one is copied, the system reads the next ones, and the faster
/// the smaller they are.
const PIECE_BYTES: usize = 128 << 10;

/// What comes when a block comes into use.
#[derive(Debug, Default)]
pub(super) struct Fetch {
    /// Goes out of memory before anything comes.
    pub(super) before: Vec<Tensor>,
    /// Comes into memory.
    pub(super) current: Vec<MappedFile>,
    /// Is read by the system.
    pub(super) next: Vec<MappedFile>,
}

/// A file, and the tensor that it is mapped as.
#[derive(Debug)]
pub(super) struct MappedFile {
    pub(super) path: PathBuf,
    pub(super) tensor: Tensor,
}

impl Fetch {
    /// What does not succeed here is read where it is used.
    fn run(&self) {
        self.current.iter().chain(&self.next).for_each(MappedFile::read_ahead);
        for MappedFile { tensor, .. } in &self.current {
            let _is_read = populate_pages(&parts(tensor, LATER_PART).1);
        }
    }
}

impl MappedFile {
    /// Has the system read what it does not have. It reads a file that is read in order much faster than one of which parts are asked for.
    fn read_ahead(&self) {
        if are_pages_cached(&self.tensor) {
            // That cannot be told of every file.
            return read_pages_ahead(&self.tensor);
        }
        // Whatever stands there by now, nothing waits for it: it is told of when it is used.
        let is_file = fs::metadata(&self.path).is_ok_and(|found| found.is_file());
        let without_waiting = OFlags::NONBLOCK.bits().cast_signed();
        let opened = || File::options().read(true).custom_flags(without_waiting).open(&self.path).ok();
        let Some(file) = is_file.then(opened).flatten() else { return };
        let mut file = file.take((self.tensor.numel() * self.tensor.kind().elt_size_in_bytes()) as u64);
        let mut piece = vec![0; PIECE_BYTES];
        while file.read(&mut piece).is_ok_and(|num_bytes| 0 < num_bytes) {}
    }
}

/// What is before a place, which is given as a fraction of the tensor, and the rest. Each page belongs to one of them.
fn parts(tensor: &Tensor, [numerator, denominator]: [usize; 2]) -> (Tensor, Tensor) {
    let elements_per_page = PAGE_BYTES / tensor.kind().elt_size_in_bytes();
    let num_elements = tensor.numel();
    let place = (num_elements / denominator * numerator).next_multiple_of(elements_per_page).min(num_elements);
    let narrow = |start: usize, end: usize| tensor.f_view([-1])?.f_narrow(0, start as i64, (end - start) as i64);
    match (narrow(0, place), narrow(place, num_elements)) {
        (Ok(first), Ok(rest)) => (first, rest),
        // Files are mapped in one piece, so that it does not come to this.
        _ => (tensor.shallow_clone(), Tensor::new()),
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
    /// The block before is gone.
    released: Receiver<()>,
    finished: Receiver<()>,
    thread: JoinHandle<()>,
}

impl FetchThread {
    /// Begins a fetch. [`wait`](Self::wait) has returned since the last one.
    pub(super) fn start(&mut self, fetch: Fetch) {
        let Fetch { before, current, next } = &fetch;
        if before.is_empty() && current.is_empty() && next.is_empty() {
            return;
        }
        if self.worker.is_none() {
            self.worker = Worker::new();
        }
        let (own, others): (Vec<Tensor>, Vec<Tensor>) = before.iter().map(|tensor| parts(tensor, [1, 2])).unzip();
        let fetch = Fetch { before: others, ..fetch };
        // Without a thread, what is needed is read where it is used.
        let left = match &self.worker {
            Some(worker) => worker.fetches.send(fetch).err().map(|SendError(fetch)| fetch),
            None => Some(fetch),
        };
        self.is_running = left.is_none();
        left.iter().flat_map(|fetch| &fetch.before).chain(&own).for_each(release_pages);
        if let Some(worker) = self.worker.as_ref().filter(|_| self.is_running) {
            // A thread that is gone has nothing more to do.
            let _gone = worker.released.recv();
        }
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
        let (release, released) = channel();
        let (finish, finished) = channel();
        let work = move || {
            for fetch in received {
                fetch.before.iter().for_each(release_pages);
                if release.send(()).is_err() {
                    return;
                }
                fetch.run();
                if finish.send(()).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("offload-fetch".to_owned()).spawn(work).ok()?;
        Some(Self { fetches, released, finished, thread })
    }
}

impl Drop for FetchThread {
    // The thread holds tensors, which must be gone before libtorch is.
    fn drop(&mut self) {
        if let Some(Worker { fetches, released, finished, thread }) = self.worker.take() {
            drop((fetches, released, finished));
            let _panicked = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Fetch, FetchThread, MappedFile};
    use rustix::fs::{Advice, FileType, Mode};
    use std::io::Write;
    use tch::{Device, Kind, Tensor};
    use torch_ext::storage::are_pages_cached;

    #[test]
    fn fetches_change_no_number() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 1 << 16]).unwrap();
        let path = file.path().to_str().unwrap();
        let bytes = Tensor::f_from_file(path, false, 1 << 16, (Kind::Uint8, Device::Cpu)).unwrap();
        let before = || vec![bytes.shallow_clone()];
        let files = || vec![MappedFile { path: path.into(), tensor: bytes.shallow_clone() }];
        let mut fetch_thread = FetchThread::default();
        fetch_thread.wait();
        for _ in 0..3 {
            fetch_thread.start(Fetch { before: before(), current: files(), next: files() });
            fetch_thread.wait();
            assert_eq!(bytes.to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]), 7 << 16);
        }
        // A file that has become shorter is no signal in the thread, which goes on.
        file.as_file().set_len(0).unwrap();
        for _ in 0..2 {
            fetch_thread.start(Fetch { before: before(), current: files(), next: files() });
            fetch_thread.wait();
        }
        assert!(fetch_thread.worker.as_ref().is_some_and(|worker| !worker.thread.is_finished()));
    }

    #[test]
    fn what_the_system_does_not_have_is_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        let path = file.path().to_str().unwrap();
        let tensor = Tensor::f_from_file(path, false, 1 << 20, (Kind::Uint8, Device::Cpu)).unwrap();
        rustix::fs::fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
        // A file system in memory has nothing else to keep it in.
        let was_cached = are_pages_cached(&tensor);
        let file = MappedFile { path: path.into(), tensor };
        file.read_ahead();
        assert!(are_pages_cached(&file.tensor));
        eprintln!("was there before: {was_cached}");
    }

    /// Such as a pipe, whose writer never comes.
    #[test]
    fn nothing_waits_for_what_has_taken_the_place_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weight.dat");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.sync_all().unwrap();
        let tensor = Tensor::f_from_file(path.to_str().unwrap(), false, 1 << 20, (Kind::Uint8, Device::Cpu)).unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let file = MappedFile { path, tensor };
        file.read_ahead();
    }
}
