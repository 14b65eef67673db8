//! Samplers: in which order a pass visits the rows.

use super::random::{self, SharedGenerator};
use crate::error::{DataError, Result};
use accelerate_core::sampler::RowOrder;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::Generator;

/// The order in which a pass visits the rows (`torch.utils.data.Sampler`).
///
/// With several processes, a prepared loader sees to it that every rank works with the same order: that of
/// rank 0. A sampler need not do anything for that.
///
/// ```
/// use accelerate::data::{DataLoader, Sampler, VecDataset};
///
/// struct Backwards(usize);
/// impl Sampler for Backwards {
///     fn len(&self) -> usize {
///         self.0
///     }
///     fn indices(&self, _epoch: usize) -> accelerate::Result<Vec<usize>> {
///         Ok((0..self.0).rev().collect())
///     }
/// }
/// let loader = DataLoader::builder(VecDataset::new(vec![10i64, 11, 12])).batch_size(2).sampler(Backwards(3)).build()?;
/// let first = loader.iter()?.next().unwrap()?;
/// assert_eq!(Vec::<i64>::try_from(&first)?, [12, 11]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait Sampler: Any + Send + Sync {
    /// Number of rows that a pass visits.
    fn len(&self) -> usize;

    /// The rows of one pass, in order. `epoch` counts passes from 0; see
    /// [`DataLoaderShard::set_epoch`](crate::data::DataLoaderShard::set_epoch).
    ///
    /// # Errors
    ///
    /// When the order cannot be made.
    fn indices(&self, epoch: usize) -> Result<Vec<usize>>;

    /// Does a pass visit no rows?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Called when a pass has come to its end, and not when it was broken off.
    ///
    /// # Errors
    ///
    /// An error ends the pass as an error.
    fn pass_completed(&self) -> Result<()> {
        Ok(())
    }
}

/// The generator of a sampler, which preparing for several processes may have to provide.
#[derive(Debug, Default)]
pub(crate) struct GeneratorSlot(Mutex<Option<SharedGenerator>>);

impl GeneratorSlot {
    fn holding(generator: SharedGenerator) -> Self {
        Self(Mutex::new(Some(generator)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<SharedGenerator>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> Option<SharedGenerator> {
        self.lock().clone()
    }

    /// Puts a generator in if there is none, seeded by a draw from the default one.
    pub(crate) fn fill(&self) -> Result<()> {
        let mut slot = self.lock();
        if slot.is_none() {
            *slot = Some(SharedGenerator::seeded(random::draw_seed(None)? as u64)?);
        }
        Ok(())
    }
}

/// Visits rows from the first to the last (`torch.utils.data.SequentialSampler`).
///
/// ```
/// use accelerate::data::{Sampler, SequentialSampler};
///
/// assert_eq!(SequentialSampler::new(3).indices(0)?, [0, 1, 2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SequentialSampler {
    num_rows: usize,
}

impl SequentialSampler {
    /// All rows of a dataset of `num_rows` rows.
    pub fn new(num_rows: usize) -> Self {
        Self { num_rows }
    }
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.num_rows
    }
    fn indices(&self, _: usize) -> Result<Vec<usize>> {
        Ok((0..self.num_rows).collect())
    }
}

/// Visits rows in random order without replacement (`torch.utils.data.RandomSampler`), the same order as
/// PyTorch with the same seed.
///
/// Without a generator, every pass draws a seed from the default generator (the one `tch::manual_seed`
/// seeds), and shuffles with a generator seeded by it. With a generator, passes draw their permutations
/// from it one after the other; as in PyTorch, a completed pass draws one permutation more than it uses.
///
/// When a loader with this sampler is prepared for several processes, the sampler gets a generator of its
/// own, seeded from the default generator, whose state is set to that of rank 0 before every pass
/// (reference: `data_loader.py`, `prepare_data_loader`).
///
/// ```
/// use accelerate::data::{RandomSampler, Sampler};
///
/// accelerate::tch::manual_seed(0);
/// let mut order = RandomSampler::new(5).indices(0)?;
/// order.sort();
/// assert_eq!(order, [0, 1, 2, 3, 4]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct RandomSampler {
    num_rows: usize,
    num_samples: usize,
    generator: GeneratorSlot,
}

impl RandomSampler {
    /// All rows of a dataset of `num_rows` rows.
    pub fn new(num_rows: usize) -> Self {
        Self { num_rows, num_samples: num_rows, generator: GeneratorSlot::default() }
    }

    /// Visits this many rows in a pass, in as many permutations as that takes.
    #[must_use]
    pub fn num_samples(self, num_samples: usize) -> Self {
        Self { num_samples, ..self }
    }

    /// Draws from this generator instead of the default one.
    #[must_use]
    pub fn generator(self, generator: Generator) -> Self {
        self.shared_generator(SharedGenerator::new(generator))
    }

    pub(crate) fn shared_generator(self, generator: SharedGenerator) -> Self {
        Self { generator: GeneratorSlot::holding(generator), ..self }
    }

    /// The sampler with the same rows whose order depends on nothing but the seed and the epoch.
    pub(crate) fn to_seedable(&self, seed: u64) -> SeedableRandomSampler {
        SeedableRandomSampler::new(self.num_rows, seed).num_samples(self.num_samples)
    }
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        if self.num_rows == 0 { 0 } else { self.num_samples }
    }

    fn indices(&self, _: usize) -> Result<Vec<usize>> {
        let generator = match self.generator.get() {
            Some(generator) => generator,
            None => SharedGenerator::seeded(random::draw_seed(None)? as u64)?,
        };
        draw_samples(&generator, self.num_rows, self.len())
    }

    fn pass_completed(&self) -> Result<()> {
        // PyTorch ends every pass with `randperm(n)[:num_samples % n]`, of which nothing is left when
        // the passes are whole; the generator has moved on all the same.
        match self.generator.get() {
            Some(generator) if 0 < self.num_rows && self.num_samples.is_multiple_of(self.num_rows) => {
                random::permutation(Some(generator.get()), self.num_rows).map(|_| ())
            }
            _ => Ok(()),
        }
    }
}

fn draw_samples(generator: &SharedGenerator, num_rows: usize, num_samples: usize) -> Result<Vec<usize>> {
    let mut order = Vec::with_capacity(num_samples);
    while order.len() < num_samples {
        let mut permutation = random::permutation(Some(generator.get()), num_rows)?;
        permutation.truncate(num_samples - order.len());
        order.append(&mut permutation);
    }
    Ok(order)
}

/// Visits rows in a random order that depends on nothing but a seed and the epoch, whatever else the
/// program draws (`SeedableRandomSampler` of the reference, `data_loader.py`).
///
/// Pass `epoch` shuffles with a CPU generator seeded with `seed + epoch`. `prepare` puts it in the place of
/// a [`RandomSampler`] when `DataLoaderConfiguration.use_seedable_sampler` is set, with
/// `DataLoaderConfiguration.data_seed` or else the seed of the default generator.
///
/// ```
/// use accelerate::data::{Sampler, SeedableRandomSampler};
///
/// let sampler = SeedableRandomSampler::new(100, 42);
/// assert_eq!(sampler.indices(3)?, sampler.indices(3)?);
/// assert_ne!(sampler.indices(3)?, sampler.indices(4)?);
/// assert_eq!(sampler.indices(3)?, SeedableRandomSampler::new(100, 45).indices(0)?);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SeedableRandomSampler {
    num_rows: usize,
    num_samples: usize,
    seed: u64,
}

impl SeedableRandomSampler {
    /// All rows of a dataset of `num_rows` rows.
    pub fn new(num_rows: usize, seed: u64) -> Self {
        Self { num_rows, num_samples: num_rows, seed }
    }

    /// Visits this many rows in a pass, in as many permutations as that takes.
    #[must_use]
    pub fn num_samples(self, num_samples: usize) -> Self {
        Self { num_samples, ..self }
    }

    /// The seed of epoch 0.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn with_seed(&self, seed: u64) -> Self {
        Self { seed, ..self.clone() }
    }
}

impl Sampler for SeedableRandomSampler {
    fn len(&self) -> usize {
        if self.num_rows == 0 { 0 } else { self.num_samples }
    }
    fn indices(&self, epoch: usize) -> Result<Vec<usize>> {
        let generator = SharedGenerator::seeded(self.seed.wrapping_add(epoch as u64))?;
        draw_samples(&generator, self.num_rows, self.len())
    }
}

/// Visits given rows in random order (`torch.utils.data.SubsetRandomSampler`).
///
/// Unlike [`RandomSampler`], it shuffles with the default generator itself when it has none of its own,
/// as PyTorch does. Preparing for several processes gives it one, as it does for `RandomSampler`.
///
/// ```
/// use accelerate::data::{Sampler, SubsetRandomSampler};
///
/// let mut order = SubsetRandomSampler::new(vec![2, 5, 7]).indices(0)?;
/// order.sort();
/// assert_eq!(order, [2, 5, 7]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct SubsetRandomSampler {
    indices: Vec<usize>,
    generator: GeneratorSlot,
}

impl SubsetRandomSampler {
    /// The rows to visit.
    pub fn new(indices: Vec<usize>) -> Self {
        Self { indices, generator: GeneratorSlot::default() }
    }

    /// Draws from this generator instead of the default one.
    #[must_use]
    pub fn generator(self, generator: Generator) -> Self {
        Self { generator: GeneratorSlot::holding(SharedGenerator::new(generator)), ..self }
    }
}

impl Sampler for SubsetRandomSampler {
    fn len(&self) -> usize {
        self.indices.len()
    }
    fn indices(&self, _: usize) -> Result<Vec<usize>> {
        let generator = self.generator.get();
        let order = random::permutation(generator.as_ref().map(SharedGenerator::get), self.indices.len())?;
        Ok(order.into_iter().map(|position| self.indices[position]).collect())
    }
}

/// Visits rows with given probabilities, with replacement (`torch.utils.data.WeightedRandomSampler`): the
/// usual cure for classes of very different sizes.
///
/// Draws by `torch.multinomial`, from the default generator when it has none of its own. Preparing for several processes
/// gives it one, as it does for [`RandomSampler`], unless the run uses seedable samplers or rank 0 reads for all.
///
/// ```
/// use accelerate::data::{Sampler, WeightedRandomSampler};
///
/// let order = WeightedRandomSampler::new(vec![0.0, 1.0, 3.0], 20)?.indices(0)?;
/// assert_eq!(order.len(), 20);
/// assert!(!order.contains(&0));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightedRandomSampler {
    weights: Vec<f64>,
    num_samples: usize,
    generator: GeneratorSlot,
}

impl WeightedRandomSampler {
    /// Draws `num_samples` rows per pass; row `i` with a probability proportional to `weights[i]`.
    ///
    /// # Errors
    ///
    /// When a weight is negative or not finite, or all are 0.
    pub fn new(weights: Vec<f64>, num_samples: usize) -> Result<Self> {
        let bad = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0);
        let all_zero = weights.iter().all(|&weight| weight == 0.0);
        match bad.or((all_zero && !weights.is_empty()).then_some(0)) {
            Some(position) => Err(DataError::BadWeight { position, found: weights[position] }.into()),
            None => Ok(Self { weights, num_samples, generator: GeneratorSlot::default() }),
        }
    }

    /// Draws from this generator instead of the default one.
    #[must_use]
    pub fn generator(self, generator: Generator) -> Self {
        Self { generator: GeneratorSlot::holding(SharedGenerator::new(generator)), ..self }
    }
}

impl Sampler for WeightedRandomSampler {
    fn len(&self) -> usize {
        if self.weights.is_empty() { 0 } else { self.num_samples }
    }
    fn indices(&self, _: usize) -> Result<Vec<usize>> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let weights = Tensor::f_from_slice(&self.weights)?;
        let num_samples = self.num_samples as i64;
        random::indices(&match self.generator.get() {
            Some(generator) => generator.get().multinomial(&weights, num_samples)?,
            None => weights.f_multinomial(num_samples, true)?,
        })
    }
}

/// A sampler that already knows which rows go together (`torch.utils.data.BatchSampler` and its kin).
///
/// ```
/// use accelerate::data::{BatchSampler, DataLoader, VecDataset};
///
/// /// Short rows with short rows, long ones with long ones.
/// struct ByLength;
/// impl BatchSampler for ByLength {
///     fn len(&self) -> usize {
///         2
///     }
///     fn batches(&self, _epoch: usize) -> accelerate::Result<Vec<Vec<usize>>> {
///         Ok(vec![vec![0, 3], vec![1, 2, 4]])
///     }
/// }
/// let loader = DataLoader::builder(VecDataset::new(vec![1i64, 9, 8, 2, 7])).batch_sampler(ByLength).build()?;
/// let sizes: Vec<_> = loader.iter()?.map(|batch| Ok(batch?.size())).collect::<accelerate::Result<_>>()?;
/// assert_eq!(sizes, [[2], [3]]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait BatchSampler: Send + Sync + 'static {
    /// Number of batches of a pass.
    fn len(&self) -> usize;

    /// The rows of every batch of one pass. `epoch` counts passes from 0. With several processes every rank
    /// must return the same; a prepared loader goes by the batches of rank 0.
    ///
    /// # Errors
    ///
    /// When the batches cannot be made.
    fn batches(&self, epoch: usize) -> Result<Vec<Vec<usize>>>;

    /// Are there no batches?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of rows of every batch except perhaps the last, or `None` when sizes vary: several
    /// processes are then kept even with whole batches instead of rows, and `split_batches` is not possible.
    fn batch_size(&self) -> Option<usize> {
        None
    }

    /// Leave out the batches at the end that do not make a full round for all processes?
    fn drop_last(&self) -> bool {
        false
    }

    /// Called when a pass has come to its end, and not when it was broken off.
    ///
    /// # Errors
    ///
    /// An error ends the pass as an error.
    fn pass_completed(&self) -> Result<()> {
        Ok(())
    }
}

/// Where a loader's order comes from.
#[derive(Clone)]
pub(crate) enum Order {
    Rows { sampler: Arc<dyn Sampler>, batch_size: usize, drop_last: bool },
    Batches(Arc<dyn BatchSampler>),
}

impl Order {
    /// Rows, or batches of a batch sampler, in a pass.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Rows { sampler, .. } => sampler.len(),
            Self::Batches(sampler) => sampler.len(),
        }
    }

    /// The generator behind the order, for orders that have one.
    pub(crate) fn generator(&self) -> Option<&GeneratorSlot> {
        match self {
            Self::Rows { sampler, .. } => generator_of(&**sampler),
            Self::Batches(_) => None,
        }
    }

    pub(crate) fn random_sampler(&self) -> Option<&RandomSampler> {
        match self {
            Self::Rows { sampler, .. } => downcast(&**sampler),
            Self::Batches(_) => None,
        }
    }

    /// Prepares the drawing of an order, from the generator's state in another run if there is one. Holds until the
    /// result is dropped.
    pub(crate) fn begin_drawing(&self, resumed: Option<&[u8]>) -> Result<Drawing<'_>> {
        let Some(slot) = self.generator() else { return Ok(Drawing { state: None, lent_to: None }) };
        if let Some(generator) = slot.get() {
            if let Some(state) = resumed {
                generator.set_state(&Tensor::f_from_slice(state)?)?;
            }
            return Ok(Drawing { state: Some(generator.state_bytes()?), lent_to: None });
        }
        let lent = match resumed {
            Some(state) => SharedGenerator::with_state(state)?,
            // What the sampler would make for itself.
            None if self.random_sampler().is_some() => SharedGenerator::seeded(random::draw_seed(None)? as u64)?,
            // It draws from the default generator directly.
            None => return Ok(Drawing { state: Some(random::default_state()?), lent_to: None }),
        };
        let state = Some(lent.state_bytes()?);
        *slot.lock() = Some(lent);
        Ok(Drawing { state, lent_to: Some(slot) })
    }

    pub(crate) fn seedable_sampler(&self) -> Option<&SeedableRandomSampler> {
        match self {
            Self::Rows { sampler, .. } => downcast(&**sampler),
            Self::Batches(_) => None,
        }
    }

    /// Is the order of an epoch known without any random number?
    pub(crate) fn is_settled(&self) -> bool {
        match self {
            Self::Rows { sampler, .. } => {
                downcast::<SequentialSampler>(&**sampler).is_some() || self.seedable_sampler().is_some()
            }
            Self::Batches(_) => false,
        }
    }

    pub(crate) fn pass_completed(&self) -> Result<()> {
        match self {
            Self::Rows { sampler, .. } => sampler.pass_completed(),
            Self::Batches(sampler) => sampler.pass_completed(),
        }
    }
}

/// The drawing of one order.
#[derive(Debug)]
pub(crate) struct Drawing<'a> {
    /// The state of the generator that it is drawn from, where the sampler has one of its own or could have.
    pub(crate) state: Option<Vec<u8>>,
    /// Has a generator for this drawing only.
    lent_to: Option<&'a GeneratorSlot>,
}

impl Drop for Drawing<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.lent_to {
            *slot.lock() = None;
        }
    }
}

/// The generator of a sampler that has a place for one.
pub(crate) fn generator_of(sampler: &dyn Sampler) -> Option<&GeneratorSlot> {
    let random = downcast::<RandomSampler>(sampler).map(|sampler| &sampler.generator);
    let subset = || downcast::<SubsetRandomSampler>(sampler).map(|sampler| &sampler.generator);
    let weighted = || downcast::<WeightedRandomSampler>(sampler).map(|sampler| &sampler.generator);
    random.or_else(subset).or_else(weighted)
}

/// The rows of one pass.
pub(crate) fn order_of(sampler: &dyn Sampler, epoch: usize) -> Result<RowOrder> {
    match downcast::<SequentialSampler>(sampler) {
        Some(sequential) => Ok(RowOrder::Sequential(sequential.num_rows)),
        None => sampler.indices(epoch).map(RowOrder::from),
    }
}

/// The seed that alone decides the sampler's orders.
pub(crate) fn seed_of(sampler: &dyn Sampler) -> Option<u64> {
    downcast::<SeedableRandomSampler>(sampler).map(SeedableRandomSampler::seed)
}

/// The sampler itself, if it is of type `S`.
pub(crate) fn downcast<S: Sampler>(sampler: &dyn Sampler) -> Option<&S> {
    let sampler: &dyn Any = sampler;
    sampler.downcast_ref()
}
