//! Building a loader: every option has its place, contradictions are refused by name.

use super::collate::Collate;
use super::dataset::Dataset;
use super::loader::{DataLoader, Parts};
use super::random::SharedGenerator;
use super::sampler::{BatchSampler, Order, RandomSampler, Sampler, SequentialSampler};
use super::source::recipe::{CollateFn, FromStacked, Recipe, WorkerOptions};
use super::source::rows::RowSource;
use crate::error::{DataError, Result};
use std::fmt;
use std::sync::Arc;
use torch_ext::Generator;

/// How many batches each background thread makes ahead of time unless told otherwise (PyTorch's default).
pub(super) const PREFETCH_FACTOR: usize = 2;

/// What makes batches of rows of type `T`: [`DefaultCollate`], or [`CustomCollate`] after
/// [`DataLoaderBuilder::collate_fn`].
///
/// Named where a function takes a builder of any kind:
///
/// ```
/// use accelerate::data::{Collator, DataLoader, DataLoaderBuilder, Dataset, VecDataset};
///
/// fn small<D: Dataset + 'static, C: Collator<D::Item>>(
///     builder: DataLoaderBuilder<D, C>,
/// ) -> accelerate::Result<DataLoader<C::Batch>>
/// where
///     C::Batch: Send + 'static,
/// {
///     builder.batch_size(2).build()
/// }
/// assert_eq!(small(DataLoader::builder(VecDataset::new(vec![1i64, 2, 3])))?.len(), 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait Collator<T> {
    /// What the rows become.
    type Batch;

    #[doc(hidden)]
    fn into_function(self) -> Box<dyn Fn(Vec<T>) -> Result<Self::Batch> + Send + Sync>;

    /// [`Collate::from_stacked`], where the function does the same as [`Collate`].
    #[doc(hidden)]
    fn from_stacked() -> Option<FromStacked<T, Self::Batch>> {
        None
    }
}

/// Batches are made as [`Collate`] says.
///
/// ```
/// use accelerate::data::{DataLoader, DataLoaderBuilder, DefaultCollate, VecDataset};
///
/// let builder: DataLoaderBuilder<_, DefaultCollate> = DataLoader::builder(VecDataset::new(vec![1i64]));
/// assert_eq!(builder.build()?.len(), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DefaultCollate;

impl<T: Collate + 'static> Collator<T> for DefaultCollate {
    type Batch = T::Batch;
    fn into_function(self) -> Box<dyn Fn(Vec<T>) -> Result<T::Batch> + Send + Sync> {
        Box::new(T::collate)
    }
    fn from_stacked() -> Option<FromStacked<T, T::Batch>> {
        Some(T::from_stacked)
    }
}

/// Batches are made by the user's function.
///
/// ```
/// use accelerate::data::{CustomCollate, DataLoader, DataLoaderBuilder, VecDataset};
///
/// let builder = DataLoader::builder(VecDataset::new(vec![1i64, 2])).batch_size(2);
/// let builder: DataLoaderBuilder<_, CustomCollate<i64, i64>> = builder.collate_fn(|rows| Ok(rows.iter().sum()));
/// assert_eq!(builder.build()?.iter()?.next().unwrap()?, 3);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct CustomCollate<T, B>(Box<CollateFn<T, B>>);

impl<T, B> CustomCollate<T, B> {
    pub(super) fn new(function: impl Fn(Vec<T>) -> Result<B> + Send + Sync + 'static) -> Self {
        Self(Box::new(function))
    }
}

impl<T, B> Collator<T> for CustomCollate<T, B> {
    type Batch = B;
    fn into_function(self) -> Box<dyn Fn(Vec<T>) -> Result<B> + Send + Sync> {
        self.0
    }
}

impl<T, B> fmt::Debug for CustomCollate<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CustomCollate")
    }
}

/// The options of a [`DataLoader`], from [`DataLoader::builder`]. Names and defaults are PyTorch's.
///
/// ```
/// use accelerate::data::{DataLoader, VecDataset};
/// use accelerate::tch::Tensor;
///
/// // Sentences of different lengths, padded to the longest of their batch.
/// let sentences = vec![vec![5i64, 6, 7], vec![8], vec![9, 10]];
/// let loader = DataLoader::builder(VecDataset::new(sentences))
///     .batch_size(2)
///     .drop_last(true)
///     .collate_fn(|mut rows| {
///         let longest = rows.iter().map(Vec::len).max().unwrap_or_default();
///         rows.iter_mut().for_each(|row| row.resize(longest, 0));
///         accelerate::data::default_collate(rows)
///     })
///     .build()?;
/// assert_eq!(loader.len(), 1);
/// assert_eq!(loader.iter()?.next().unwrap()?, Tensor::from_slice2(&[[5i64, 6, 7], [8, 0, 0]]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[must_use = "a builder makes a loader when build() is called"]
pub struct DataLoaderBuilder<D, C> {
    dataset: D,
    collator: C,
    batch_size: Option<usize>,
    shuffle: Option<bool>,
    drop_last: Option<bool>,
    sampler: Option<Arc<dyn Sampler>>,
    batch_sampler: Option<Arc<dyn BatchSampler>>,
    generator: Option<Generator>,
    num_workers: usize,
    prefetch_factor: Option<usize>,
}

impl<D: Dataset> DataLoaderBuilder<D, DefaultCollate> {
    pub(crate) fn new(dataset: D) -> Self {
        Self {
            dataset,
            collator: DefaultCollate,
            batch_size: None,
            shuffle: None,
            drop_last: None,
            sampler: None,
            batch_sampler: None,
            generator: None,
            num_workers: 0,
            prefetch_factor: None,
        }
    }
}

impl<D: Dataset, C> DataLoaderBuilder<D, C> {
    /// Rows per batch; 1 by default. When the loader is prepared for several processes, this is the batch of
    /// one process, or of all together with `DataLoaderConfiguration.split_batches`.
    pub fn batch_size(self, batch_size: usize) -> Self {
        Self { batch_size: Some(batch_size), ..self }
    }

    /// Visits the rows in a new random order in every pass, by a [`RandomSampler`]; off by default.
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle: Some(shuffle), ..self }
    }

    /// Leaves out the last rows when they do not fill a batch; off by default. With several processes, when
    /// they do not fill a batch for each.
    pub fn drop_last(self, drop_last: bool) -> Self {
        Self { drop_last: Some(drop_last), ..self }
    }

    /// Visits the rows in this sampler's order.
    pub fn sampler(self, sampler: impl Sampler) -> Self {
        Self { sampler: Some(Arc::new(sampler)), ..self }
    }

    /// Makes exactly these batches. Excludes `batch_size`, `shuffle`, `sampler` and `drop_last`.
    pub fn batch_sampler(self, batch_sampler: impl BatchSampler) -> Self {
        Self { batch_sampler: Some(Arc::new(batch_sampler)), ..self }
    }

    /// Shuffles with this generator instead of the default one.
    ///
    /// Every pass first draws a seed for workers from it, as in PyTorch. With `DataLoaderConfiguration.dispatch_batches` that
    /// seed comes from the default generator, as in the reference, and the generator is left to the order of the rows.
    pub fn generator(self, generator: Generator) -> Self {
        Self { generator: Some(generator), ..self }
    }

    /// Makes batches ahead of time on this many threads; 0, the default, makes them on the thread that asks
    /// for them, or where batches are dispatched to several processes, on a thread of rank 0. Order and contents are the same either
    /// way, except for random numbers that the dataset draws from the default generator: threads share it.
    pub fn num_workers(self, num_workers: usize) -> Self {
        Self { num_workers, ..self }
    }

    /// How many batches each thread makes ahead of time; 2 by default. Needs `num_workers`.
    pub fn prefetch_factor(self, prefetch_factor: usize) -> Self {
        Self { prefetch_factor: Some(prefetch_factor), ..self }
    }

    /// Makes batches of rows with this function instead of by [`Collate`].
    pub fn collate_fn<B, F>(self, collate_fn: F) -> DataLoaderBuilder<D, CustomCollate<D::Item, B>>
    where
        F: Fn(Vec<D::Item>) -> Result<B> + Send + Sync + 'static,
    {
        DataLoaderBuilder {
            collator: CustomCollate::new(collate_fn),
            dataset: self.dataset,
            batch_size: self.batch_size,
            shuffle: self.shuffle,
            drop_last: self.drop_last,
            sampler: self.sampler,
            batch_sampler: self.batch_sampler,
            generator: self.generator,
            num_workers: self.num_workers,
            prefetch_factor: self.prefetch_factor,
        }
    }
}

impl<D: Dataset + 'static, C> DataLoaderBuilder<D, C> {
    /// Makes the loader.
    ///
    /// # Errors
    ///
    /// When options exclude each other or a size is 0; when a data set without rows is to be shuffled, as in PyTorch.
    pub fn build<B: Send + 'static>(self) -> Result<DataLoader<B>>
    where
        C: Collator<D::Item, Batch = B>,
    {
        self.check()?;
        let generator = self.generator.map(SharedGenerator::new);
        let order = match self.batch_sampler {
            Some(batch_sampler) => Order::Batches(batch_sampler),
            None => Order::Rows {
                sampler: match self.sampler {
                    Some(sampler) => sampler,
                    None => sampler_of(&self.dataset, self.shuffle == Some(true), generator.as_ref()),
                },
                batch_size: self.batch_size.unwrap_or(1),
                drop_last: self.drop_last.unwrap_or(false),
            },
        };
        let prefetch_factor = self.prefetch_factor.unwrap_or(PREFETCH_FACTOR);
        Ok(DataLoader::from_parts(Parts::new(Arc::new(RowSource {
            recipe: Arc::new(Recipe {
                dataset: self.dataset,
                collate: self.collator.into_function(),
                from_stacked: C::from_stacked(),
            }),
            order,
            generator,
            workers: WorkerOptions { num_workers: self.num_workers, prefetch_factor },
        }))))
    }

    fn check(&self) -> Result<()> {
        let batch_sampler_excludes = [
            ("batch_size", self.batch_size.is_some()),
            ("shuffle", self.shuffle.is_some()),
            ("sampler", self.sampler.is_some()),
            ("drop_last", self.drop_last.is_some()),
        ];
        let both = batch_sampler_excludes.into_iter().find(|(_, is_given)| *is_given);
        if let (Some(_), Some((second, _))) = (&self.batch_sampler, both) {
            let why = "a batch sampler alone decides which rows make up which batch";
            return Err(DataError::Exclusive { first: "batch_sampler", second, why }.into());
        }
        if self.sampler.is_some() && self.shuffle == Some(true) {
            let why = "a sampler alone decides the order of the rows";
            return Err(DataError::Exclusive { first: "sampler", second: "shuffle", why }.into());
        }
        if self.prefetch_factor.is_some() && self.num_workers == 0 {
            return Err(DataError::NothingToPrefetch.into());
        }
        if self.shuffle == Some(true) && self.dataset.is_empty() {
            return Err(DataError::NothingToShuffle.into());
        }
        for (setting, value) in [("batch_size", self.batch_size), ("prefetch_factor", self.prefetch_factor)] {
            if value == Some(0) {
                return Err(DataError::MustBePositive { setting, found: 0 }.into());
            }
        }
        Ok(())
    }
}

fn sampler_of(dataset: &impl Dataset, shuffle: bool, generator: Option<&SharedGenerator>) -> Arc<dyn Sampler> {
    if !shuffle {
        return Arc::new(SequentialSampler::new(dataset.len()));
    }
    let sampler = RandomSampler::new(dataset.len());
    match generator {
        Some(generator) => Arc::new(sampler.shared_generator(generator.clone())),
        None => Arc::new(sampler),
    }
}

impl<D: Dataset, C: fmt::Debug> fmt::Debug for DataLoaderBuilder<D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoaderBuilder")
            .field("num_rows", &self.dataset.len())
            .field("collator", &self.collator)
            .field("batch_size", &self.batch_size)
            .field("shuffle", &self.shuffle)
            .field("drop_last", &self.drop_last)
            .field("num_workers", &self.num_workers)
            .field("prefetch_factor", &self.prefetch_factor)
            .finish_non_exhaustive()
    }
}
