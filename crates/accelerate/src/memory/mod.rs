//! Memory that runs out (`utils/memory.py` of the reference).

mod agreement;

use crate::accelerator::Accelerator;
use crate::error::{Error, MemoryError, Result, panic_text, says_out_of_memory};
use crate::messages;
use agreement::{Decision, Meeting, Verdict};
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const STARTING_BATCH_SIZE: usize = 128;

/// Gives memory that libtorch keeps for later, and no tensor uses, back to the device. Nothing on the CPU.
///
/// ```
/// accelerate::clear_device_cache()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn clear_device_cache() -> Result<()> {
    Ok(torch_ext::storage::empty_cache()?)
}

/// Looks for a batch size that fits into memory: runs a closure with 128, and as long as it fails for lack of memory,
/// with 0.9 of the size before (`find_executable_batch_size` of the reference, `utils/memory.py`).
///
/// The result keeps the size that worked: its next run begins there. The closure has to begin anew each time, from
/// building the model on; what it has made is dropped before the next try. With [`run`](ExecutableBatchSize::run) an
/// accelerator that the closure has captured goes on counting micro-batches where the failed try ended: let the closure begin
/// with [`Accelerator::free_memory`]. [`run_on`](ExecutableBatchSize::run_on) gives each try an accelerator of its own.
///
/// Lack of memory is what [`Error::is_out_of_memory`] says, or a panic with such a text, because the operators and
/// unchecked methods of `tch` panic. All other errors and panics pass through.
///
/// ```
/// use accelerate::{Error, find_executable_batch_size};
///
/// let mut executable = find_executable_batch_size().starting_batch_size(64);
/// let mut tried = Vec::new();
/// let rows = executable.run(|batch_size| {
///     tried.push(batch_size);
///     if batch_size > 50 { Err(Error::other("CUDA out of memory.")) } else { Ok(batch_size) }
/// })?;
/// assert_eq!((rows, tried), (45, vec![64, 57, 51, 45]));
/// assert_eq!(executable.batch_size(), 45);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn find_executable_batch_size() -> ExecutableBatchSize {
    let reduce = |batch_size: usize| (batch_size as f64 * 0.9) as usize;
    ExecutableBatchSize { batch_size: STARTING_BATCH_SIZE, reduce_batch_size_fn: Box::new(reduce) }
}

/// The search for a batch size, from [`find_executable_batch_size`].
#[must_use = "nothing runs before `run` or `run_on`"]
pub struct ExecutableBatchSize {
    batch_size: usize,
    reduce_batch_size_fn: Box<dyn FnMut(usize) -> usize + Send>,
}

impl ExecutableBatchSize {
    /// The first size to try. Default 128.
    pub fn starting_batch_size(self, starting_batch_size: usize) -> Self {
        Self { batch_size: starting_batch_size, ..self }
    }

    /// Makes the next size of one that did not fit; 0 ends the search. Default: 0.9 of it, rounded down.
    ///
    /// ```
    /// use accelerate::{Error, find_executable_batch_size};
    ///
    /// let mut executable = find_executable_batch_size().reduce_batch_size_fn(|batch_size| batch_size / 2);
    /// let fits = |batch_size| if batch_size > 40 { Err(Error::other("CUDA out of memory.")) } else { Ok(batch_size) };
    /// assert_eq!(executable.run(fits)?, 32);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn reduce_batch_size_fn(self, reduce: impl FnMut(usize) -> usize + Send + 'static) -> Self {
        Self { reduce_batch_size_fn: Box::new(reduce), ..self }
    }

    /// The size of the next try: after a run that succeeded, the one that worked.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Runs `body` with smaller and smaller sizes until one fits. For one process, or where ranks need not have the
    /// same size.
    ///
    /// # Errors
    /// Those of `body`, but for lack of memory; that no size fits.
    pub fn run<T>(&mut self, mut body: impl FnMut(usize) -> Result<T>) -> Result<T> {
        loop {
            let batch_size = self.begin_try()?;
            match attempt(|| body(batch_size)) {
                Outcome::Done(value) => return Ok(value),
                Outcome::OutOfMemory(text) => self.reduce(text)?,
                Outcome::Failed(error) => return Err(error),
                Outcome::Panicked(panic) => resume_unwind(panic),
            }
        }
    }

    /// As [`ExecutableBatchSize::run`], with one size for all ranks: if one of them runs out of memory, all try the
    /// next size. Collective.
    ///
    /// Every try has an accelerator of its own, with the settings of `accelerator`, nothing prepared, and connections
    /// of its own between the ranks. **Prepare and compute with that one.** A rank that runs out of memory in
    /// the middle of a step leaves others inside a collective of that step; it drops its connections, which ends
    /// the others' collective at once, and all agree through the rendezvous store on what to do. With
    /// `accelerator` itself they would wait for their deadline, and it could not be used afterwards.
    ///
    /// # Limits
    /// - What was made of the try's accelerator must not outlive a `body` that failed: while a prepared model is kept
    ///   somewhere outside, connections stay open, and the others are released by their deadline only.
    /// - Ranks wait for each other at the end of every try, for twice the deadline of collectives.
    /// - `body` is not called in a try that another rank has already left while this one was connecting.
    ///
    /// # Errors
    /// Those of `body` other than lack of memory, on every rank: the rank that failed gets its own, the others one that
    /// names it. Ranks with different sizes; ranks that are gone; that no size fits.
    ///
    /// ```
    /// use accelerate::{Error, ReduceOp, find_executable_batch_size, tch::Tensor, testing};
    ///
    /// let sizes = testing::ranks(2, Default::default(), |accelerator| {
    ///     let mut executable = find_executable_batch_size().starting_batch_size(10);
    ///     executable.run_on(&accelerator, |accelerator, batch_size| {
    ///         if accelerator.process_index() == 1 && batch_size > 8 {
    ///             return Err(Error::other("CUDA out of memory.")); // rank 0 waits for rank 1 below
    ///         }
    ///         accelerator.reduce(&Tensor::from(batch_size as i64), ReduceOp::Max)?;
    ///         Ok(batch_size)
    ///     })
    /// })?;
    /// assert_eq!(sizes, [8, 8]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn run_on<T>(
        &mut self,
        accelerator: &Accelerator,
        mut body: impl FnMut(&Accelerator, usize) -> Result<T>,
    ) -> Result<T> {
        loop {
            let batch_size = self.begin_try()?;
            let group = accelerator.group();
            let found = batch_size.to_string();
            if let Some(sizes) = group.disagreement("find_executable_batch_size", &found)? {
                return Err(MemoryError::DifferentBatchSizes { sizes: sizes.join(", ") }.into());
            }
            let meeting = Meeting::new(group)?;
            let fork = accelerator.fork();
            // Where a rank is gone, the body's own collectives say so.
            let _ = meeting.connected();
            let (fork, outcome) = match fork {
                Ok(fork) => {
                    let outcome = attempt(|| body(&fork, batch_size));
                    (Some(fork), outcome)
                }
                Err(error) => (None, Outcome::Failed(error)),
            };
            if let (Some(fork), Verdict::OutOfMemory(text) | Verdict::Failed(text)) = (&fork, outcome.verdict()) {
                // Before the connections go, so that nobody has to ask around who is missing. Where the store is gone,
                // the verdict fails as well, and that is reported.
                let _ = fork.group().leave(&text);
                // What was prepared may hold the fork itself, for example in a schedule's closure.
                fork.session().clear();
            }
            // A try that went well keeps its connections until all ranks are done with theirs.
            let kept = fork.filter(|_| matches!(outcome, Outcome::Done(_)));
            let decision = meeting.decide(&outcome.verdict());
            drop(kept);
            match (decision, outcome) {
                (Ok(Decision::Accept), Outcome::Done(value)) => return Ok(value),
                (Ok(Decision::Retry { text, .. }), _) => self.reduce(text)?,
                (_, Outcome::Panicked(panic)) => resume_unwind(panic),
                (_, Outcome::Failed(error)) if !is_release(&error) => return Err(error),
                (Ok(Decision::Failed { rank, .. }), Outcome::Failed(error)) if rank == group.rank() => {
                    return Err(error);
                }
                (Ok(Decision::Failed { rank, text }), _) => {
                    return Err(MemoryError::RankFailed { rank, batch_size, text }.into());
                }
                (Ok(Decision::Silent { ranks }), _) => return Err(meeting.silent(&ranks).into()),
                (Ok(Decision::Accept), Outcome::Failed(error)) | (Err(_), Outcome::Failed(error)) => return Err(error),
                (Ok(Decision::Accept), Outcome::OutOfMemory(text)) => self.reduce(text)?,
                (Err(error), _) => return Err(error),
            }
        }
    }

    fn begin_try(&self) -> Result<usize> {
        if self.batch_size == 0 {
            return Err(MemoryError::NothingFits { last: String::new() }.into());
        }
        clear_device_cache()?;
        Ok(self.batch_size)
    }

    fn reduce(&mut self, text: String) -> Result<()> {
        let found = self.batch_size;
        let next = (self.reduce_batch_size_fn)(found);
        if next >= found {
            return Err(MemoryError::NotSmaller { found, next }.into());
        }
        messages::info!("batch size {found} is out of memory, trying {next}: {text}");
        self.batch_size = next;
        if next == 0 { Err(MemoryError::NothingFits { last: text }.into()) } else { Ok(()) }
    }
}

impl fmt::Debug for ExecutableBatchSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutableBatchSize").field("batch_size", &self.batch_size).finish_non_exhaustive()
    }
}

/// How one try ended on this rank.
enum Outcome<T> {
    Done(T),
    OutOfMemory(String),
    Failed(Error),
    Panicked(Box<dyn Any + Send>),
}

impl<T> Outcome<T> {
    fn verdict(&self) -> Verdict {
        match self {
            Self::Done(_) => Verdict::Done,
            Self::OutOfMemory(text) => Verdict::OutOfMemory(text.clone()),
            Self::Failed(error) if is_release(error) => Verdict::Released(error.to_string()),
            Self::Failed(error) => Verdict::Failed(error.to_string()),
            Self::Panicked(panic) => Verdict::Failed(format!("panicked: {}", panic_text(&**panic))),
        }
    }
}

/// A collective that ended because another rank went away or did not come: perhaps for lack of memory.
fn is_release(error: &Error) -> bool {
    error.is_peer_failure() || error.is_timeout()
}

fn attempt<T>(body: impl FnOnce() -> Result<T>) -> Outcome<T> {
    // What the body has captured and changed is its own concern: it is made to be run again.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Outcome::Done(value),
        Ok(Err(error)) if error.is_out_of_memory() => Outcome::OutOfMemory(error.to_string()),
        Ok(Err(error)) => Outcome::Failed(error),
        Err(panic) if says_out_of_memory(panic_text(&*panic)) => Outcome::OutOfMemory(panic_text(&*panic).to_owned()),
        Err(panic) => Outcome::Panicked(panic),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn oom() -> Error {
        Error::other("CUDA out of memory. Tried to allocate 20.00 MiB").context("layer 3")
    }

    #[test]
    fn sizes_shrink_as_the_references() {
        let mut tried = Vec::new();
        let error = find_executable_batch_size()
            .run(|batch_size| -> Result<()> {
                tried.push(batch_size);
                Err(oom())
            })
            .unwrap_err();
        // The sizes of the reference's tests/test_memory_utils.py.
        let head = [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19, 17, 15, 13];
        assert_eq!((&tried[..20], &tried[20..]), (&head[..], &[11, 9, 8, 7, 6, 5, 4, 3, 2, 1][..]));
        assert!(error.to_string().contains("no batch size") && error.is_out_of_memory(), "{error}");
    }

    #[test]
    fn lack_of_memory_is_found_in_real_errors_and_panics() {
        // More than any machine has; overcommitted memory would be granted.
        let wanted = [1i64 << 58];
        let options = (tch::Kind::Uint8, tch::Device::Cpu);
        let error = Error::from(tch::Tensor::f_empty(wanted, options).unwrap_err()).context("making room");
        assert!(error.is_out_of_memory(), "{error}");
        let mut executable = find_executable_batch_size().starting_batch_size(2);
        let fits = executable.run(|batch_size| {
            if batch_size == 2 {
                let _ = tch::Tensor::empty(wanted, options);
            }
            Ok(batch_size)
        });
        assert_eq!(fits.unwrap(), 1);
    }

    #[test]
    fn other_errors_and_panics_pass() {
        let mut executable = find_executable_batch_size();
        let error = executable.run(|_| -> Result<()> { Err(Error::other("the file is gone")) }).unwrap_err();
        assert_eq!((error.to_string().as_str(), executable.batch_size()), ("the file is gone", 128));
        let panic =
            catch_unwind(AssertUnwindSafe(|| executable.run(|_| -> Result<()> { panic!("a bug") }))).unwrap_err();
        assert_eq!(panic_text(&*panic), "a bug");
    }

    #[test]
    fn the_size_that_worked_stays() {
        let mut executable = find_executable_batch_size();
        let fits = |batch_size| if batch_size > 100 { Err(oom()) } else { Ok(batch_size) };
        assert_eq!(executable.run(fits).unwrap(), 92);
        let mut tried = 0;
        executable
            .run(|batch_size| {
                tried += 1;
                fits(batch_size)
            })
            .unwrap();
        assert_eq!((tried, executable.batch_size()), (1, 92));
    }

    #[test]
    fn a_size_that_does_not_shrink_is_refused() {
        let mut executable = find_executable_batch_size().reduce_batch_size_fn(|batch_size| batch_size);
        let error = executable.run(|_| -> Result<()> { Err(oom()) }).unwrap_err();
        assert!(error.to_string().contains("reduce_batch_size_fn made 128 of 128"), "{error}");
    }
}
