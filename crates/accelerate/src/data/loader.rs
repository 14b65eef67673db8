//! The loader a user builds.

use super::batches::Batches;
use super::builder::{DataLoaderBuilder, DefaultCollate};
use super::dataset::Dataset;
use super::iterable::{IterableDataLoaderBuilder, IterableDataset};
use super::position::{DataLoaderState, Progress};
use super::source::schedule::Sharding;
use super::source::{Begun, Finish, PassPlan, Source};
use crate::error::{Error, Result};
use crate::session::{ObjectState, Stateful};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// Marks loaders over a [`Dataset`]: their rows are counted, and any of them can be fetched.
///
/// ```
/// use accelerate::data::{DataLoader, MapStyle, VecDataset};
/// use accelerate::tch::Tensor;
///
/// // The same type as DataLoader<Tensor>.
/// let loader: DataLoader<Tensor, MapStyle> = DataLoader::builder(VecDataset::new(vec![1i64, 2])).build()?;
/// assert_eq!(loader.len(), 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum MapStyle {}

/// Marks loaders over an [`IterableDataset`]: their rows come one after the other.
///
/// ```
/// use accelerate::data::{DataLoader, Iterable, IterableDataset, RowStream, Rows};
/// use accelerate::tch::Tensor;
///
/// struct Numbers;
/// impl IterableDataset for Numbers {
///     type Item = i64;
///     fn iter(&self) -> accelerate::Result<Box<dyn RowStream<i64>>> {
///         Ok(Box::new(Rows((0..3).map(Ok))))
///     }
/// }
/// let loader: DataLoader<Tensor, Iterable> = DataLoader::iterable(Numbers).build()?;
/// assert_eq!(loader.iter()?.count(), 3);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Iterable {}

/// What loaders are made of. Clones share the source and the progress.
pub(crate) struct Parts<B> {
    pub(crate) source: Arc<dyn Source<B>>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) skip_batches: usize,
}

// Not derived: that would ask `B` to be `Clone`.
impl<B> Clone for Parts<B> {
    fn clone(&self) -> Self {
        let (source, progress) = (Arc::clone(&self.source), Arc::clone(&self.progress));
        Self { source, progress, skip_batches: self.skip_batches }
    }
}

impl<B> Parts<B> {
    pub(crate) fn new(source: Arc<dyn Source<B>>) -> Self {
        Self { source, progress: Arc::default(), skip_batches: 0 }
    }

    /// A pass from here on, and what was resumed by it.
    pub(crate) fn plan<'a>(
        &self,
        sharding: Sharding,
        resume: Option<&'a DataLoaderState>,
        finish: Option<Finish<B>>,
    ) -> PassPlan<'a, B> {
        PassPlan {
            sharding,
            ranks: sharding.rank..sharding.rank + 1,
            exchange: None,
            epoch: self.progress.epoch(),
            seed: self.progress.seed(),
            resume,
            skip_batches: self.skip_batches,
            finish,
        }
    }

    /// Batches of a whole pass for this rank, without the skipped ones.
    pub(crate) fn num_batches(&self, sharding: &Sharding) -> Option<usize> {
        Some(self.source.num_batches(sharding)?.saturating_sub(self.skip_batches))
    }

    pub(crate) fn skipping(&self, num_batches: usize) -> Self {
        Self { skip_batches: self.skip_batches + num_batches, ..self.clone() }
    }

    /// Where the next pass has to go on, if anywhere. Generators stand as in the saved run afterwards, also where the user has set
    /// another epoch than that of the state that was loaded.
    pub(crate) fn resume(&self) -> Result<Option<DataLoaderState>> {
        if let Some(state) = self.progress.take_passed_over() {
            self.source.pass_over(&state)?;
        }
        Ok(self.progress.resume())
    }

    pub(crate) fn state(&self) -> Result<DataLoaderState> {
        if let Some(state) = self.resume()? {
            return Ok(state);
        }
        Ok(self.progress.state(self.source.idle_state()?))
    }

    pub(crate) fn debug(&self, debug: &mut fmt::DebugStruct<'_, '_>) -> fmt::Result {
        debug
            .field("num_rows", &self.source.num_rows())
            .field("batch_size", &self.source.batch_size())
            .field("epoch", &self.progress.epoch())
            .field("skip_batches", &self.skip_batches)
            .finish_non_exhaustive()
    }
}

/// What a session registers of a prepared loader.
impl<B: Send + 'static> Stateful for Parts<B> {
    fn state_dict(&self) -> Result<ObjectState> {
        let values = serde_json::to_value(self.state()?).map_err(Error::other)?;
        Ok(ObjectState { values, ..Default::default() })
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        let state: DataLoaderState = serde_json::from_value(state.values.clone()).map_err(Error::other)?;
        state.check()?;
        self.progress.load(state);
        Ok(())
    }
}

/// Batches of a dataset, pass after pass (`torch.utils.data.DataLoader`).
///
/// `B` is what a batch is; `K` says whether rows are counted ([`MapStyle`]) or a stream ([`Iterable`]).
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
pub struct DataLoader<B, K = MapStyle> {
    parts: Parts<B>,
    kind: PhantomData<fn() -> K>,
}

impl DataLoader<()> {
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
    pub fn builder<D: Dataset + 'static>(dataset: D) -> DataLoaderBuilder<D, DefaultCollate> {
        DataLoaderBuilder::new(dataset)
    }

    /// Starts a loader over a stream: batches of one row, built as [`Collate`](crate::data::Collate) says.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, IterableDataset, RowStream, Rows};
    ///
    /// struct Countdown;
    /// impl IterableDataset for Countdown {
    ///     type Item = i64;
    ///     fn iter(&self) -> accelerate::Result<Box<dyn RowStream<i64>>> {
    ///         Ok(Box::new(Rows((0..5).rev().map(Ok))))
    ///     }
    /// }
    /// let loader = DataLoader::iterable(Countdown).batch_size(2).build()?;
    /// let batches = loader.iter()?.map(|batch| Vec::<i64>::try_from(&batch.unwrap()).unwrap());
    /// assert_eq!(batches.collect::<Vec<_>>(), [vec![4, 3], vec![2, 1], vec![0]]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn iterable<D: IterableDataset + 'static>(dataset: D) -> IterableDataLoaderBuilder<D, DefaultCollate> {
        IterableDataLoaderBuilder::new(dataset)
    }
}

impl<B: Send + 'static, K> DataLoader<B, K> {
    pub(crate) fn from_parts(parts: Parts<B>) -> Self {
        Self { parts, kind: PhantomData }
    }

    pub(crate) fn into_parts(self) -> Parts<B> {
        self.parts
    }

    /// Begins a pass: draws its order. Rows are read as batches are asked for.
    ///
    /// # Errors
    ///
    /// When the sampler fails, threads cannot be started, or the order is another than that of the run that is
    /// resumed.
    pub fn iter(&self) -> Result<Batches<B, K>> {
        let (resume, epoch) = (self.parts.resume()?, self.parts.progress.epoch());
        let Begun { pass, start } =
            self.parts.source.begin(self.parts.plan(Sharding::whole(), resume.as_ref(), None))?;
        self.parts.progress.begin(epoch, start, resume);
        Ok(Batches::new(pass, &self.parts, epoch, None))
    }

    /// Rows per batch; `None` for a batch sampler whose batches vary in size.
    pub fn batch_size(&self) -> Option<usize> {
        self.parts.source.batch_size()
    }

    /// Sets the epoch of the next pass, which samplers and datasets may depend on. Without it, epochs count
    /// completed passes from 0.
    pub fn set_epoch(&self, epoch: usize) {
        self.parts.progress.set_epoch(epoch);
    }

    /// The epoch of the next pass.
    pub fn epoch(&self) -> usize {
        self.parts.progress.epoch()
    }

    /// Where the loader stands: inside of a loop, after the batch that was handed out last.
    ///
    /// # Errors
    ///
    /// When a generator's state cannot be read.
    pub fn state_dict(&self) -> Result<DataLoaderState> {
        self.parts.state()
    }

    /// Lets the next pass go on where the state was saved, and the passes after it as in that run.
    ///
    /// The pass fails at its beginning if the order of its rows is not that of the saved run: another dataset,
    /// sampler or batch sampler.
    pub fn load_state_dict(&self, state: DataLoaderState) {
        self.parts.progress.load(state);
    }
}

impl<B: Send + 'static> DataLoader<B> {
    /// Number of batches of a pass.
    pub fn len(&self) -> usize {
        self.num_batches(&Sharding::whole())
    }

    pub(super) fn num_batches(&self, sharding: &Sharding) -> usize {
        self.parts.num_batches(sharding).unwrap_or(0)
    }

    /// Does a pass have no batches?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows of the dataset.
    pub fn total_dataset_length(&self) -> usize {
        self.parts.source.num_rows().unwrap_or(0)
    }
}

impl<B: Send + 'static, K> super::SkipFirstBatches for DataLoader<B, K> {
    fn skipping(&self, num_batches: usize) -> Self {
        Self::from_parts(self.parts.skipping(num_batches))
    }
}

impl<B, K> fmt::Debug for DataLoader<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.debug(&mut f.debug_struct("DataLoader"))
    }
}
