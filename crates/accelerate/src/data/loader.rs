//! The loader a user builds.

use super::agreement::{self, Exchange};
use super::batches::Batches;
use super::dataset::Dataset;
use super::random::{self, SharedGenerator};
use super::recipe::Recipe;
use super::sampler::{BatchSampler, GeneratorSlot, Order};
use super::schedule::{Schedule, Sharding, flatten};
use super::{DataLoaderBuilder, DefaultCollate};
use crate::error::{DataError, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What loaders are made of. Clones share the dataset, the sampler and the epoch.
pub(crate) struct Parts<D: Dataset, B> {
    pub(crate) recipe: Arc<Recipe<D, B>>,
    pub(crate) order: Order,
    /// Draws the seed that PyTorch draws for its workers at the start of every pass.
    pub(crate) generator: Option<SharedGenerator>,
    pub(crate) epoch: Arc<AtomicUsize>,
    pub(crate) skip_batches: usize,
    pub(crate) num_workers: usize,
    pub(crate) prefetch_factor: usize,
}

// Not derived: that would ask `D` and `B` to be `Clone`.
impl<D: Dataset, B> Clone for Parts<D, B> {
    fn clone(&self) -> Self {
        Self {
            recipe: Arc::clone(&self.recipe),
            order: self.order.clone(),
            generator: self.generator.clone(),
            epoch: Arc::clone(&self.epoch),
            ..*self
        }
    }
}

impl<D: Dataset, B> Parts<D, B> {
    /// The batches of the pass that begins now. Collective when there is an exchange.
    ///
    /// Draws from generators in the order of the reference: the state of rank 0 arrives, the loader draws
    /// its seed for workers (`_BaseDataLoaderIter.__init__` of PyTorch, whether it has workers or not), and
    /// then the sampler draws. So the default generator stays in step with that of a Python program.
    pub(crate) fn schedule(
        &self,
        sharding: &Sharding,
        exchange: Option<&dyn Exchange>,
        epoch: usize,
    ) -> Result<Schedule> {
        self.recipe.dataset.set_epoch(epoch);
        let generator = self.order.generator().and_then(GeneratorSlot::get);
        if let (Some(exchange), Some(generator)) = (exchange, &generator) {
            agreement::agree_on_generator(exchange, generator, self.order.len(), sharding.rank)?;
        }
        random::draw_seed(self.generator.as_ref())?;
        match &self.order {
            Order::Rows { sampler, batch_size, drop_last } => {
                let order = match exchange {
                    Some(exchange) => agreement::agreed_indices(exchange, &**sampler, epoch, sharding.rank)?,
                    None => sampler.indices(epoch)?,
                };
                let shard = sharding.by_rows(*batch_size, *drop_last);
                Ok(Schedule::Rows { shard, order: order.into() })
            }
            Order::Batches(sampler) => {
                let mut batches = sampler.batches(epoch)?;
                if let Some(exchange) = exchange {
                    batches = agreement::agreed_batches(exchange, batches)?;
                }
                schedule_of_batches(&**sampler, batches, sharding)
            }
        }
    }

    /// Batches of a whole pass for this rank, without the skipped ones.
    pub(crate) fn len(&self, sharding: &Sharding) -> usize {
        let whole = match &self.order {
            Order::Rows { sampler, batch_size, drop_last } => {
                sharding.by_rows(*batch_size, *drop_last).num_rounds(sampler.len(), sharding.rank)
            }
            Order::Batches(sampler) if sharding.split_batches => sampler.len(),
            Order::Batches(sampler) => {
                sharding.by_batches(sampler.drop_last()).num_rounds(sampler.len(), sharding.rank)
            }
        };
        whole.saturating_sub(self.skip_batches)
    }

    pub(crate) fn batch_size(&self) -> Option<usize> {
        match &self.order {
            Order::Rows { batch_size, .. } => Some(*batch_size),
            Order::Batches(sampler) => sampler.batch_size(),
        }
    }

    pub(crate) fn epoch(&self) -> usize {
        self.epoch.load(Ordering::Relaxed)
    }

    pub(crate) fn set_epoch(&self, epoch: usize) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Goes on to the next epoch, unless somebody has set another one during the pass.
    pub(crate) fn finish_epoch(&self, epoch: usize) {
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.epoch.compare_exchange(epoch, epoch + 1, success, failure);
    }

    pub(crate) fn skipping(&self, num_batches: usize) -> Self {
        Self { skip_batches: self.skip_batches + num_batches, ..self.clone() }
    }
}

fn schedule_of_batches(sampler: &dyn BatchSampler, batches: Vec<Vec<usize>>, sharding: &Sharding) -> Result<Schedule> {
    if let Some(position) = batches.iter().position(Vec::is_empty) {
        return Err(DataError::EmptySamplerBatch { position }.into());
    }
    match sampler.batch_size() {
        Some(batch_size) => {
            let shard = sharding.by_rows(batch_size, sampler.drop_last());
            Ok(Schedule::Rows { shard, order: flatten(batches, batch_size)?.into() })
        }
        None => {
            let shard = sharding.by_batches(sampler.drop_last());
            Ok(Schedule::Batches { shard, batches: batches.into() })
        }
    }
}

/// Batches of a dataset, pass after pass (`torch.utils.data.DataLoader`).
///
/// Usable as it is, on one process and on the device where its rows are. `Accelerator::prepare` turns it
/// into a [`DataLoaderShard`](crate::data::DataLoaderShard), which hands each process its share, on its
/// device.
///
/// ```
/// use accelerate::data::{DataLoader, TensorDataset};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let x = Tensor::randn([100, 3], (Kind::Float, Device::Cpu));
/// let y = Tensor::randint(2, [100], (Kind::Int64, Device::Cpu));
/// let loader = DataLoader::builder(TensorDataset::new((x, y))?).batch_size(8).shuffle(true).build()?;
/// assert_eq!(loader.len(), 13);
/// for batch in loader.iter()? {
///     let (inputs, labels) = batch?;
///     assert_eq!(inputs.size()[0], labels.size()[0]);
/// }
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct DataLoader<D: Dataset, B> {
    parts: Parts<D, B>,
}

impl<D: Dataset + 'static> DataLoader<D, ()> {
    /// Starts a loader: batches of one row, in order, on this thread, built as
    /// [`Collate`](crate::data::Collate) says.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, VecDataset};
    ///
    /// let loader = DataLoader::builder(VecDataset::new(vec![1i64, 2, 3])).batch_size(3).build()?;
    /// assert_eq!(loader.len(), 1);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn builder(dataset: D) -> DataLoaderBuilder<D, DefaultCollate> {
        DataLoaderBuilder::new(dataset)
    }
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoader<D, B> {
    pub(crate) fn from_parts(parts: Parts<D, B>) -> Self {
        Self { parts }
    }

    pub(crate) fn into_parts(self) -> Parts<D, B> {
        self.parts
    }

    /// Begins a pass: draws its order. Rows are read as batches are asked for.
    ///
    /// # Errors
    ///
    /// When the sampler fails, or threads cannot be started.
    pub fn iter(&self) -> Result<Batches<D, B>> {
        let sharding = Sharding::whole();
        let epoch = self.parts.epoch();
        let schedule = self.parts.schedule(&sharding, None, epoch)?;
        Batches::start(self.parts.clone(), sharding, schedule, epoch, None)
    }

    /// Number of batches of a pass.
    pub fn len(&self) -> usize {
        self.parts.len(&Sharding::whole())
    }

    /// Does a pass have no batches?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows per batch; `None` for a batch sampler whose batches vary in size.
    pub fn batch_size(&self) -> Option<usize> {
        self.parts.batch_size()
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.parts.recipe.dataset
    }

    /// Sets the epoch of the next pass, which samplers and datasets may depend on. Without it, epochs count
    /// completed passes from 0.
    pub fn set_epoch(&self, epoch: usize) {
        self.parts.set_epoch(epoch);
    }

    /// The epoch of the next pass.
    pub fn epoch(&self) -> usize {
        self.parts.epoch()
    }
}

impl<D: Dataset + 'static, B: Send + 'static> super::SkipFirstBatches for DataLoader<D, B> {
    fn skipping(&self, num_batches: usize) -> Self {
        Self { parts: self.parts.skipping(num_batches) }
    }
}

impl<D: Dataset, B> fmt::Debug for DataLoader<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.debug(&mut f.debug_struct("DataLoader"))
    }
}

impl<D: Dataset, B> Parts<D, B> {
    pub(crate) fn debug(&self, debug: &mut fmt::DebugStruct<'_, '_>) -> fmt::Result {
        debug
            .field("num_rows", &self.recipe.dataset.len())
            .field("batch_size", &self.batch_size())
            .field("epoch", &self.epoch())
            .field("skip_batches", &self.skip_batches)
            .field("num_workers", &self.num_workers)
            .finish_non_exhaustive()
    }
}
