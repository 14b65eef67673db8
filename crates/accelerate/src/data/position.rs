//! Where a loader stands, as a value that can be saved, and how a pass is begun again from it.

use super::random;
use crate::error::{DataError, Result};
use accelerate_core::checkpoint::MOST_STEPS;
use accelerate_core::sampler::RowOrder;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::Generator;
use torch_ext::generator::check_cpu_state;

/// No run hands out more rows in a pass.
const MOST_ROWS: u64 = 1 << 60;

/// Where a loader stands in its data, from `state_dict` of a loader.
///
/// It holds no more than the epoch, what has been handed out in it to all processes together, and what is
/// needed to draw the same order again. So it is the same for every number of processes: a run resumed on another
/// number goes on with exactly the rows that this epoch has not seen. It counts batches that the loop has
/// received, not those that threads have made ahead of time.
///
/// ```
/// use accelerate::data::{DataLoader, DataLoaderState, VecDataset};
///
/// let loader = || DataLoader::builder(VecDataset::new((0..10i64).collect())).batch_size(2).shuffle(true).build();
/// let (first, second) = (loader()?, loader()?);
/// let mut batches = first.iter()?;
/// batches.next();
/// let saved = serde_json::to_string(&first.state_dict()?).unwrap();
///
/// let state: DataLoaderState = serde_json::from_str(&saved).unwrap();
/// assert_eq!((state.epoch, state.rows_delivered), (0, 2));
/// second.load_state_dict(state);
/// let rest = |batches: &mut dyn Iterator<Item = accelerate::Result<accelerate::tch::Tensor>>| {
///     batches.map(|batch| Vec::<i64>::try_from(&batch.unwrap()).unwrap()).collect::<Vec<_>>()
/// };
/// assert_eq!(rest(&mut second.iter()?), rest(&mut batches));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataLoaderState {
    /// The epoch of the pass, from 0.
    pub epoch: usize,
    /// Rows handed out in this pass to all processes together, fillers not counted. For a batch sampler that decides
    /// batch sizes itself: batches.
    pub rows_delivered: u64,
    /// Seed of a [`SeedableRandomSampler`](crate::data::SeedableRandomSampler), without the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shuffle_seed: Option<u64>,
    /// The random numbers from which the order was drawn, where it is not the seed's alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) random: Option<RandomStates>,
    /// Length and checksum of the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) order: Option<(u64, u32)>,
    /// What the stream says about its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stream: Option<Vec<u8>>,
    /// The random numbers of rows that were read ahead of the loop.
    #[serde(default, skip_serializing_if = "LookAhead::is_empty")]
    pub(crate) look_ahead: LookAhead,
}

impl DataLoaderState {
    /// A place that is known from elsewhere. What the order was drawn from is not known then, so it is not checked.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, DataLoaderState, VecDataset};
    ///
    /// let loader = DataLoader::builder(VecDataset::new(vec![10i64, 11, 12])).build()?;
    /// loader.load_state_dict(DataLoaderState::new(0, 2));
    /// assert_eq!(Vec::<i64>::try_from(&loader.iter()?.next().unwrap()?)?, [12]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn new(epoch: usize, rows_delivered: u64) -> Self {
        Self { epoch, rows_delivered, ..Self::default() }
    }

    /// Can a run have come to it? For states out of files, before anything is changed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.epoch > MOST_STEPS {
            return Err(DataError::NoSuchEpoch { epoch: self.epoch }.into());
        }
        if self.rows_delivered > MOST_ROWS {
            return Err(DataError::NoSuchPlace { rows_delivered: self.rows_delivered }.into());
        }
        let of_orders = self.random.iter().flat_map(|random| [&random.default, &random.sampler]);
        let mut states = of_orders.chain([&self.look_ahead.read, &self.look_ahead.made]).flatten();
        states.try_for_each(|state| Ok(check_cpu_state(state)?))
    }

    /// Was it saved in the middle of a pass, or after its last batch?
    pub(crate) fn is_within_pass(&self) -> bool {
        self.order.is_some() || self.stream.is_some() || 0 < self.rows_delivered
    }

    /// An order other than the saved run's would hand out rows twice and leave others out.
    pub(crate) fn check_order(&self, found: Option<&OrderDigest>) -> Result<()> {
        match (self.order, found.map(OrderDigest::value)) {
            (Some(wanted), Some(found)) if wanted != found => {
                Err(DataError::OtherOrder { found: found.0, wanted: wanted.0 }.into())
            }
            _ => Ok(()),
        }
    }
}

/// States of the generators that an order is drawn from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RandomStates {
    /// For samplers that draw from the default generator whenever they like.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) default: Option<Vec<u8>>,
    /// For samplers that have a generator of their own, or could have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sampler: Option<Vec<u8>>,
}

/// States of the default generator from which the next round was begun before the loop was done with the one in hand. `None` where
/// nothing was drawn. A resumed pass does the same work again with the same random numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LookAhead {
    /// Before its rows were read from a stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) read: Option<Vec<u8>>,
    /// Before rank 0 made it for all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made: Option<Vec<u8>>,
}

impl LookAhead {
    pub(crate) fn is_empty(&self) -> bool {
        self.read.is_none() && self.made.is_none()
    }
}

/// Does the work, and returns the state of the default generator before it if the work has drawn from it.
pub(crate) fn noting_draws<T>(work: impl FnOnce() -> T) -> Result<(T, Option<Vec<u8>>)> {
    let before = random::default_state()?;
    let done = work();
    let has_drawn = random::default_state()? != before;
    Ok((done, has_drawn.then_some(before)))
}

/// Takes the default generator back to where it was.
#[derive(Debug)]
pub(crate) struct DefaultGeneratorGuard(Tensor);

impl DefaultGeneratorGuard {
    /// From here on the default generator is in the given state, if one is given.
    pub(crate) fn enter(state: Option<&[u8]>) -> Result<Self> {
        let guard = Self(Generator::default_cpu()?.state()?);
        if let Some(state) = state {
            Generator::default_cpu()?.set_state(&Tensor::f_from_slice(state)?)?;
        }
        Ok(guard)
    }
}

impl Drop for DefaultGeneratorGuard {
    fn drop(&mut self) {
        // The state came from this generator, so it fits; a drop has nobody to tell anyway.
        if let Ok(generator) = Generator::default_cpu() {
            let _ = generator.set_state(&self.0);
        }
    }
}

/// What identifies the order of a pass. The checksum is only taken when a state is saved.
#[derive(Debug)]
pub(crate) enum OrderDigest {
    Rows(RowOrder),
    Known(u64, u32),
}

impl OrderDigest {
    pub(crate) fn of_rows(order: RowOrder) -> Self {
        Self::Rows(order)
    }

    pub(crate) fn of_batches(batches: &[Vec<usize>]) -> Self {
        let numbers = batches.iter().flat_map(|batch| std::iter::once(batch.len()).chain(batch.iter().copied()));
        Self::Known(batches.len() as u64, checksum(numbers))
    }

    fn value(&self) -> (u64, u32) {
        match self {
            Self::Rows(order) => (order.len() as u64, checksum(order.iter())),
            Self::Known(length, checksum) => (*length, *checksum),
        }
    }
}

/// Equal for equal numbers on every machine and in every version.
fn checksum(numbers: impl Iterator<Item = usize>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    numbers.for_each(|number| hasher.update(&(number as u64).to_le_bytes()));
    hasher.finalize()
}

/// How a pass began.
#[derive(Debug, Default)]
pub(crate) struct PassStart {
    pub(crate) random: Option<RandomStates>,
    pub(crate) seed: Option<u64>,
    pub(crate) digest: Option<OrderDigest>,
}

/// The progress of a loader, shared by its clones and the pass that is under way.
#[derive(Debug, Default)]
pub(crate) struct Progress(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    epoch: usize,
    /// The pass that began last and is not over.
    pass: Option<UnderWay>,
    /// Where the next pass has to go on.
    resume: Option<DataLoaderState>,
    /// What was to be resumed before the user set another epoch.
    passed_over: Option<DataLoaderState>,
    /// The seed of the run that is resumed, for all its passes.
    seed: Option<u64>,
    /// How often the loader was put elsewhere.
    num_loads: u64,
}

#[derive(Debug)]
struct UnderWay {
    epoch: usize,
    start: Arc<PassStart>,
    delivered: u64,
    stream: Option<Vec<u8>>,
    look_ahead: LookAhead,
}

impl Progress {
    // Every change is one assignment, so a panic elsewhere leaves nothing half-done.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn epoch(&self) -> usize {
        let inner = self.lock();
        inner.resume.as_ref().map_or(inner.epoch, |state| state.epoch)
    }

    /// The user's word: a pass of another epoch is not resumed.
    pub(crate) fn set_epoch(&self, epoch: usize) {
        let mut inner = self.lock();
        if inner.resume.as_ref().is_some_and(|state| state.epoch != epoch) {
            inner.passed_over = inner.resume.take();
        }
        inner.epoch = epoch;
    }

    /// The state that was loaded but whose epoch is not resumed, once.
    pub(crate) fn take_passed_over(&self) -> Option<DataLoaderState> {
        self.lock().passed_over.take()
    }

    pub(crate) fn load(&self, state: DataLoaderState) {
        let mut inner = self.lock();
        inner.epoch = state.epoch;
        inner.seed = state.shuffle_seed;
        inner.pass = None;
        inner.passed_over = None;
        inner.resume = Some(state);
        inner.num_loads += 1;
    }

    /// Changes when a state is loaded: a pass that began before goes on with rows of another place.
    pub(crate) fn num_loads(&self) -> u64 {
        self.lock().num_loads
    }

    pub(crate) fn seed(&self) -> Option<u64> {
        self.lock().seed
    }

    /// What the pass that begins has to resume, if anything.
    pub(crate) fn resume(&self) -> Option<DataLoaderState> {
        self.lock().resume.clone()
    }

    pub(crate) fn begin(&self, epoch: usize, start: Arc<PassStart>, resumed: Option<DataLoaderState>) {
        let mut inner = self.lock();
        let DataLoaderState { rows_delivered: delivered, stream, look_ahead, .. } = resumed.unwrap_or_default();
        inner.resume = None;
        inner.pass = Some(UnderWay { epoch, start, delivered, stream, look_ahead });
    }

    /// Returns by how much.
    pub(crate) fn moved(&self, delivered: u64, stream: Option<Vec<u8>>, look_ahead: LookAhead) -> u64 {
        let mut inner = self.lock();
        let Some(pass) = &mut inner.pass else { return 0 };
        let before = std::mem::replace(&mut pass.delivered, delivered);
        pass.stream = stream;
        pass.look_ahead = look_ahead;
        delivered.saturating_sub(before)
    }

    /// Goes on to the next epoch, unless somebody has set another one during the pass.
    pub(crate) fn finish_epoch(&self, epoch: usize) {
        let mut inner = self.lock();
        if inner.epoch == epoch {
            inner.epoch = epoch.saturating_add(1);
        }
        inner.pass = None;
    }

    /// `idle` is where the loader stands between passes.
    pub(crate) fn state(&self, idle: DataLoaderState) -> DataLoaderState {
        let inner = self.lock();
        match &inner.pass {
            Some(pass) => DataLoaderState {
                epoch: pass.epoch,
                rows_delivered: pass.delivered,
                shuffle_seed: pass.start.seed,
                random: pass.start.random.clone(),
                order: pass.start.digest.as_ref().map(OrderDigest::value),
                stream: pass.stream.clone(),
                look_ahead: pass.look_ahead.clone(),
            },
            None => DataLoaderState { epoch: inner.epoch, shuffle_seed: inner.seed.or(idle.shuffle_seed), ..idle },
        }
    }
}
