//! Datasets whose rows come one after the other: logs, sockets, generators, files too large to index.

use super::builder::{Collator, CustomCollate, DefaultCollate, PREFETCH_FACTOR};
use super::loader::{DataLoader, Iterable, Parts};
use super::source::recipe::WorkerOptions;
use super::source::stream::StreamSource;
use crate::error::{DataError, Result};
use std::fmt;
use std::sync::Arc;

/// A dataset that is read from its beginning (`torch.utils.data.IterableDataset`).
///
/// Every process reads the whole stream and keeps its own rows, unless batches are dispatched
/// ([`DataLoaderConfiguration::dispatch_batches`](crate::DataLoaderConfiguration)), which is what `prepare` chooses by
/// itself. So the streams of all processes must be the same.
///
/// ```
/// use accelerate::data::{IterableDataset, RowStream, Rows};
///
/// struct Squares(i64);
/// impl IterableDataset for Squares {
///     type Item = i64;
///     fn iter(&self) -> accelerate::Result<Box<dyn RowStream<i64>>> {
///         Ok(Box::new(Rows((0..self.0).map(|number| Ok(number * number)))))
///     }
/// }
/// assert_eq!(Squares(4).iter()?.last().unwrap()?, 9);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a dataset that is read from its beginning",
    label = "has no `IterableDataset`",
    note = "a dataset whose rows have numbers goes into `DataLoader::builder`; for a stream of rows implement \
            `accelerate::data::IterableDataset`"
)]
pub trait IterableDataset: Send + Sync {
    /// What a row is. It is cloned where the first rows of a stream fill up its last round.
    type Item: Clone + Send + 'static;

    /// Begins a pass.
    ///
    /// # Errors
    ///
    /// Whatever keeps the stream from being opened.
    fn iter(&self) -> Result<Box<dyn RowStream<Self::Item>>>;

    /// Hears of the epoch before each pass, counted from 0.
    fn set_epoch(&self, epoch: usize) {
        let _ = epoch;
    }

    /// Rows of a pass, where that is known.
    fn num_rows(&self) -> Option<usize> {
        None
    }
}

/// A pass over the rows of an [`IterableDataset`].
///
/// A stream that can say where it stands, and go there without reading what lies before, implements `state` and
/// `seek`; others are read up to a saved place. [`Rows`] makes one of any iterator.
///
/// ```
/// use accelerate::data::RowStream;
///
/// struct Count(u64);
/// impl Iterator for Count {
///     type Item = accelerate::Result<u64>;
///     fn next(&mut self) -> Option<Self::Item> {
///         self.0 += 1;
///         Some(Ok(self.0))
///     }
/// }
/// impl RowStream<u64> for Count {
///     fn state(&self) -> Option<Vec<u8>> {
///         Some(self.0.to_le_bytes().to_vec())
///     }
///     fn seek(&mut self, state: &[u8]) -> accelerate::Result<bool> {
///         self.0 = u64::from_le_bytes(state.try_into().map_err(accelerate::Error::other)?);
///         Ok(true)
///     }
/// }
/// let mut stream = Count(0);
/// stream.next();
/// let state = stream.state().unwrap();
/// let mut other = Count(0);
/// assert!(other.seek(&state)?);
/// assert_eq!(other.next().unwrap()?, 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait RowStream<T>: Iterator<Item = Result<T>> + Send {
    /// Where the stream stands, in bytes of its own choice. `None`: it cannot say.
    fn state(&self) -> Option<Vec<u8>> {
        None
    }

    /// Goes where another pass said it stood. `false`: it cannot.
    ///
    /// # Errors
    ///
    /// When the state is not one of this stream's.
    fn seek(&mut self, state: &[u8]) -> Result<bool> {
        let _ = state;
        Ok(false)
    }

    /// Leaves out `num_rows` rows; the number of those there were. Reads them, unless a stream knows better.
    ///
    /// # Errors
    ///
    /// That of the first row that cannot be read.
    fn skip_rows(&mut self, num_rows: u64) -> Result<u64> {
        for skipped in 0..num_rows {
            match self.next() {
                Some(row) => drop(row?),
                None => return Ok(skipped),
            }
        }
        Ok(num_rows)
    }
}

/// A stream of any iterator's rows; it cannot seek.
///
/// ```
/// use accelerate::data::{RowStream, Rows};
///
/// let mut stream = Rows(["a", "b", "c"].into_iter().map(Ok));
/// assert_eq!(stream.skip_rows(2)?, 2);
/// assert_eq!(stream.next().unwrap()?, "c");
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Rows<I>(pub I);

impl<I: Iterator> Iterator for Rows<I> {
    type Item = I::Item;
    fn next(&mut self) -> Option<I::Item> {
        self.0.next()
    }
}

impl<T, I: Iterator<Item = Result<T>> + Send> RowStream<T> for Rows<I> {}

/// The options of a [`DataLoader`] over a stream, from [`DataLoader::iterable`]. Names and defaults are PyTorch's.
///
/// ```
/// use accelerate::data::{DataLoader, IterableDataset, RowStream, Rows};
///
/// struct Letters;
/// impl IterableDataset for Letters {
///     type Item = char;
///     fn iter(&self) -> accelerate::Result<Box<dyn RowStream<char>>> {
///         Ok(Box::new(Rows(('a'..='e').map(Ok))))
///     }
/// }
/// let join = |letters: Vec<char>| Ok(letters.into_iter().collect::<String>());
/// let loader = DataLoader::iterable(Letters).batch_size(2).drop_last(true).collate_fn(join).build()?;
/// assert_eq!(loader.iter()?.collect::<accelerate::Result<Vec<_>>>()?, ["ab", "cd"]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[must_use = "a builder makes a loader when build() is called"]
pub struct IterableDataLoaderBuilder<D, C> {
    dataset: D,
    collator: C,
    batch_size: usize,
    drop_last: bool,
    num_workers: usize,
    prefetch_factor: Option<usize>,
}

impl<D: IterableDataset> IterableDataLoaderBuilder<D, DefaultCollate> {
    pub(crate) fn new(dataset: D) -> Self {
        let collator = DefaultCollate;
        Self { dataset, collator, batch_size: 1, drop_last: false, num_workers: 0, prefetch_factor: None }
    }
}

impl<D: IterableDataset, C> IterableDataLoaderBuilder<D, C> {
    /// Rows per batch. Default 1.
    pub fn batch_size(self, batch_size: usize) -> Self {
        Self { batch_size, ..self }
    }

    /// Leaves out the rows at the end that do not make a whole batch, or on several processes a whole round. Default
    /// false.
    pub fn drop_last(self, drop_last: bool) -> Self {
        Self { drop_last, ..self }
    }

    /// With 1 or more, a thread reads the stream and makes batches ahead of time: `num_workers * prefetch_factor` of
    /// them. A stream has one reader, so more of them read further ahead, not faster. Default 0: on this thread.
    pub fn num_workers(self, num_workers: usize) -> Self {
        Self { num_workers, ..self }
    }

    /// Batches that each worker may have ready. Default 2.
    pub fn prefetch_factor(self, prefetch_factor: usize) -> Self {
        Self { prefetch_factor: Some(prefetch_factor), ..self }
    }

    /// Makes batches of rows by a function of your own.
    pub fn collate_fn<B, F>(self, collate_fn: F) -> IterableDataLoaderBuilder<D, CustomCollate<D::Item, B>>
    where
        F: Fn(Vec<D::Item>) -> Result<B> + Send + Sync + 'static,
    {
        IterableDataLoaderBuilder {
            collator: CustomCollate::new(collate_fn),
            dataset: self.dataset,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            num_workers: self.num_workers,
            prefetch_factor: self.prefetch_factor,
        }
    }
}

impl<D: IterableDataset + 'static, C> IterableDataLoaderBuilder<D, C> {
    /// Makes the loader.
    ///
    /// # Errors
    ///
    /// When a number is 0 that must not be, or something is asked of threads that there are not.
    pub fn build<B: Send + 'static>(self) -> Result<DataLoader<B, Iterable>>
    where
        C: Collator<D::Item, Batch = B>,
    {
        if self.prefetch_factor.is_some() && self.num_workers == 0 {
            return Err(DataError::NothingToPrefetch.into());
        }
        for (setting, value) in [("batch_size", Some(self.batch_size)), ("prefetch_factor", self.prefetch_factor)] {
            if value == Some(0) {
                return Err(DataError::MustBePositive { setting, found: 0 }.into());
            }
        }
        let prefetch_factor = self.prefetch_factor.unwrap_or(PREFETCH_FACTOR);
        Ok(DataLoader::from_parts(Parts::new(Arc::new(StreamSource {
            dataset: self.dataset,
            collate: self.collator.into_function().into(),
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            workers: WorkerOptions { num_workers: self.num_workers, prefetch_factor },
        }))))
    }
}

impl<D, C> fmt::Debug for IterableDataLoaderBuilder<D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IterableDataLoaderBuilder")
            .field("batch_size", &self.batch_size)
            .field("drop_last", &self.drop_last)
            .field("num_workers", &self.num_workers)
            .finish_non_exhaustive()
    }
}
