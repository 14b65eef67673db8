//! Batches that rank 0 reads for all: each rank is sent its own, one round ahead of the loop.
//!
//! `DataLoaderDispatcher` of the reference (`data_loader.py`), which sends everything to everyone.

use super::{Begun, Pass, PassPlan, Round, Source};
use crate::data::position::{DefaultGeneratorGuard, LookAhead, noting_draws};
use crate::data::share::Shares;
use crate::error::{CollectiveError, DataError, Error, Result};
use crate::group::Group;
use crate::session::LoaderPosition;
use crate::tensor_tree::{Parcel, TensorTree};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use tch::Tensor;

/// The connections between the ranks of one loader.
#[derive(Debug)]
pub(crate) struct DispatchLink {
    group: Group,
    shares: Shares,
    num_passes: AtomicU64,
}

impl DispatchLink {
    pub(crate) fn new(group: Group, shares: Shares) -> Self {
        Self { group, shares, num_passes: AtomicU64::new(0) }
    }
}

/// Begins a pass. Every rank must call it; only rank 0 asks the source.
pub(crate) fn begin<B: TensorTree + Send + 'static>(
    link: &Arc<DispatchLink>,
    source: &dyn Source<B>,
    plan: PassPlan<'_, B>,
) -> Result<Begun<B>> {
    let pass = link.num_passes.fetch_add(1, Ordering::Relaxed);
    let num_left = source.num_batches(&plan.sharding).map(|batches| batches.saturating_sub(plan.skip_batches));
    let first_draws_from = plan.look_ahead().and_then(|look_ahead| look_ahead.made.clone());
    let mut start = Arc::default();
    let reader = if link.group.rank() == 0 {
        let ranks = 0..link.shares.len();
        // The other ranks wait for a first message, so a failure is told to them before it is told here.
        Some(source.begin(PassPlan { ranks, finish: None, ..plan }).map(|begun| {
            start = begun.start;
            begun.pass
        }))
    } else {
        plan.draw_seed_of_workers()?;
        None
    };
    // What a resumed pass still has is known to the one that reads.
    let num_left = match &reader {
        Some(Ok(pass)) => pass.num_left(),
        _ => num_left,
    };
    let (requests, inbox) = channel();
    let (outbox, results) = channel();
    let courier = Courier { link: Arc::clone(link), pass, round: 0 };
    let thread = std::thread::Builder::new()
        .name("data-dispatch".to_owned())
        .spawn(move || courier.run(&inbox, &outbox))
        .map_err(|source| DataError::Spawn { source })?;
    let pass = DispatchPass {
        reader,
        first_draws_from,
        drawn_from: None,
        requests: Some(requests),
        results,
        thread: Some(thread),
        num_left,
        asked: false,
    };
    Ok(Begun { pass: Box::new(pass), start })
}

/// What a round comes to: `None` at the end of the pass.
type Delivery<B> = Option<Result<Round<B>>>;

/// What rank 0 has made and sends: a round, the end, or a failure; or the panic that making it ended in.
type Made<B> = std::thread::Result<Option<Result<Round<B>>>>;

struct DispatchPass<B> {
    /// On rank 0 only.
    reader: Option<Result<Box<dyn Pass<B>>>>,
    /// The random numbers with which the run that is resumed has made the first round.
    first_draws_from: Option<Vec<u8>>,
    /// The random numbers with which the round that is under way was made, if it has drawn any.
    drawn_from: Option<Vec<u8>>,
    /// `None` once the pass is over. Rank 0 says what is to be sent.
    requests: Option<Sender<Option<Made<B>>>>,
    results: Receiver<std::thread::Result<Delivery<B>>>,
    thread: Option<JoinHandle<()>>,
    num_left: Option<usize>,
    /// Is a round under way?
    asked: bool,
}

impl<B> DispatchPass<B> {
    fn ask(&mut self) {
        let made = self.make();
        self.asked = match &self.requests {
            Some(requests) => requests.send(made).is_ok(),
            None => false,
        };
    }

    /// The next round, on rank 0. It is made here and not by the thread that sends it, so that rows which draw from the default generator
    /// take turns with the loop, in the same order in each run.
    fn make(&mut self) -> Option<Made<B>> {
        let mut reader = match self.reader.take()? {
            Ok(reader) => reader,
            Err(error) => return Some(Ok(Some(Err(error)))),
        };
        let made = self.with_random_numbers(|| std::panic::catch_unwind(AssertUnwindSafe(|| reader.next_round())));
        self.reader = Some(Ok(reader));
        Some(made.unwrap_or_else(|error| Ok(Some(Err(error)))))
    }

    /// Does the work with the random numbers that the run which is resumed has done it with, and notes with which it was done.
    fn with_random_numbers<T>(&mut self, work: impl FnOnce() -> T) -> Result<T> {
        let first = self.first_draws_from.take();
        let _as_before = first.map(|state| DefaultGeneratorGuard::enter(Some(&state))).transpose()?;
        let (done, drawn_from) = noting_draws(work)?;
        self.drawn_from = drawn_from;
        Ok(done)
    }

    fn end(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // Its panics were caught and passed on.
            let _ = thread.join();
        }
    }
}

impl<B: Send + 'static> Pass<B> for DispatchPass<B> {
    fn next_round(&mut self) -> Option<Result<Round<B>>> {
        if !self.asked {
            self.ask();
        }
        if !self.asked {
            return None;
        }
        let mut delivery = match self.results.recv() {
            Ok(Ok(delivery)) => delivery,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => None,
        };
        match &mut delivery {
            Some(Ok(round)) => {
                self.num_left = self.num_left.map(|left| left.saturating_sub(1));
                // All ranks ask for the next round at the same place of their loops, so that it is under way while
                // this one is used, and no rank waits longer for another than it would in any collective.
                self.ask();
                round.look_ahead.made = self.drawn_from.take();
            }
            // After a failure the pass goes on if it is asked to.
            Some(Err(_)) => self.asked = false,
            None => self.end(),
        }
        delivery
    }

    fn num_left(&self) -> Option<usize> {
        self.num_left
    }
}

impl<B> Drop for DispatchPass<B> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends rounds on rank 0, receives them elsewhere.
struct Courier {
    link: Arc<DispatchLink>,
    pass: u64,
    round: u64,
}

/// What stands in front of every batch.
type Label = (u64, u64, Content);

#[derive(serde::Serialize, serde::Deserialize)]
enum Content {
    Batch { position: LoaderPosition, delivered: u64, stream: Option<Vec<u8>> },
    Failed { message: String },
    End,
}

impl Courier {
    fn run<B: TensorTree + Send>(
        mut self,
        inbox: &Receiver<Option<Made<B>>>,
        outbox: &Sender<std::thread::Result<Delivery<B>>>,
    ) {
        while let Ok(request) = inbox.recv() {
            let made = std::panic::catch_unwind(AssertUnwindSafe(|| self.next(request)));
            if made.is_err() {
                // The other ranks wait for this round.
                let _ = self.tell(&Content::Failed { message: "the code that makes batches panicked".to_owned() });
            }
            let over = matches!(made, Ok(None) | Err(_));
            if outbox.send(made).is_err() || over {
                return;
            }
        }
    }

    fn next<B: TensorTree + Send>(&mut self, request: Option<Made<B>>) -> Delivery<B> {
        let delivery = match request {
            Some(Ok(made)) => self.send(made),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => self.receive().transpose(),
        };
        self.round += 1;
        delivery
    }

    /// Tells all other ranks the same.
    fn tell(&self, content: &Content) -> Result<()> {
        if self.link.group.rank() != 0 {
            return Ok(());
        }
        let mut parcel = Parcel::default();
        parcel.put(&(self.pass, self.round, content))?;
        let bytes = parcel.to_bytes()?;
        let parts: Vec<Tensor> = (0..self.link.group.world_size()).map(|_| bytes.shallow_clone()).collect();
        self.link.group.scatter_bytes(Some(&parts), 0).map(|_| ())
    }

    fn send<B: TensorTree + Send>(&mut self, made: Option<Result<Round<B>>>) -> Delivery<B> {
        match made {
            None => self.tell(&Content::End).err().map(Err),
            Some(made) => Some(made.and_then(|round| Ok((self.parts_of(&round)?, round))).map_or_else(
                |error| Err(self.tell_failure(error)),
                |(parts, round)| self.link.group.scatter_bytes(Some(&parts), 0).map(|_| self.keep_own(round)),
            )),
        }
    }

    /// The error itself, once the other ranks know of it; what kept them from knowing otherwise.
    fn tell_failure(&self, error: Error) -> Error {
        let content = Content::Failed { message: error_chain(&error) };
        self.tell(&content).err().unwrap_or(error)
    }

    /// The round with the batch of this rank only.
    fn keep_own<B: TensorTree + Send>(&self, mut round: Round<B>) -> Round<B> {
        let own = self.link.shares.of_rank(self.link.group.rank());
        let batch = round.batches.get_mut(own).and_then(Option::take);
        Round { batches: vec![batch], ..round }
    }

    /// For each rank the round's label and its batch; nothing for rank 0, which has its batch.
    fn parts_of<B: TensorTree + Send>(&self, round: &Round<B>) -> Result<Vec<Tensor>> {
        let Round { batches, position, delivered, stream, look_ahead: _ } = round;
        let part = |rank| {
            if rank == 0 {
                return Ok(Tensor::new());
            }
            let batch = batches.get(self.link.shares.of_rank(rank)).and_then(Option::as_ref);
            let content = Content::Batch { position: position.clone(), delivered: *delivered, stream: stream.clone() };
            let mut parcel = Parcel::default();
            parcel.put(&(self.pass, self.round, content))?;
            parcel.put(&batch.is_some())?;
            batch.iter().try_for_each(|batch| batch.pack(&mut parcel))?;
            parcel.to_bytes()
        };
        (0..self.link.group.world_size()).map(part).collect()
    }

    fn receive<B: TensorTree + Send>(&mut self) -> Result<Option<Round<B>>> {
        let bytes = self.link.group.scatter_bytes(None, 0)?;
        let mut parcel = Parcel::from_bytes(&bytes)?;
        let (pass, round, content): Label = parcel.take()?;
        let (wanted, found) = ((self.pass, self.round), (pass, round));
        if wanted != found {
            return Err(CollectiveError::OtherRound { rank: self.link.group.rank(), wanted, found }.into());
        }
        match content {
            Content::End => Ok(None),
            Content::Failed { message } => Err(CollectiveError::DispatchFailed { message }.into()),
            Content::Batch { position, delivered, stream } => {
                let batch = if parcel.take()? { Some(B::unpack(&mut parcel)?) } else { None };
                Ok(Some(Round { batches: vec![batch], position, delivered, stream, look_ahead: LookAhead::default() }))
            }
        }
    }
}

/// An error with its causes, in one line.
fn error_chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
