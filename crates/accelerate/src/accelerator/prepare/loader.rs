//! How a data loader is prepared: which rows this process gets.

use super::Prepare;
use crate::accelerator::Accelerator;
use crate::data::{DataLoader, DataLoaderShard, LoaderKind};
use crate::error::Result;
use accelerate_core::config::PreparedFacts;

/// Which rows [`Accelerator::prepare_data_loader`] gives this process (`num_processes` and `process_index` of the
/// reference's `prepare_data_loader`, `data_loader.py`).
///
/// ```
/// let options = accelerate::PrepareDataLoaderOptions::default();
/// assert_eq!((options.num_processes, options.process_index), (None, None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrepareDataLoaderOptions {
    /// Into how many shares the rows are dealt. Default `None`: one for each process.
    pub num_processes: Option<usize>,
    /// Which share this process gets, from 0. Default `None`: the one of its own number.
    pub process_index: Option<usize>,
}

impl Accelerator {
    /// Prepares one data loader (`prepare_data_loader` of the reference).
    ///
    /// Options are for processes that each hold a part of one model, and so need the same batches: the rows are dealt to
    /// `num_processes` shares, and this process gets share `process_index`. With a mesh in which groups of `k` consecutive
    /// ranks hold one model, that is `world_size / k` shares, and share `rank / k`. (The reference derives both from the
    /// device mesh.) Rows that several processes have count once in `gather_for_metrics`. Averaging gradients over all
    /// processes stays right, because every share is held by equally many.
    ///
    /// Collective where an option is given, and where batches are dispatched.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, VecDataset};
    /// use accelerate::{PrepareDataLoaderOptions, testing};
    ///
    /// let batches = testing::ranks(4, Default::default(), |accelerator| {
    ///     let loader = DataLoader::builder(VecDataset::new(vec![10i64, 11, 12, 13])).batch_size(2).build()?;
    ///     let shares = PrepareDataLoaderOptions {
    ///         num_processes: Some(2),
    ///         process_index: Some(accelerator.process_index() / 2),
    ///     };
    ///     let loader = accelerator.prepare_data_loader(loader, shares)?;
    ///     let batch = loader.iter()?.next().unwrap()?;
    ///     Ok(Vec::<i64>::try_from(&batch)?)
    /// })?;
    /// assert_eq!(batches, [[10, 11], [10, 11], [12, 13], [12, 13]]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`is_data`](crate::Error::is_data): the processes name different numbers of shares, a share that does not exist, or
    /// some shares more often than others; a configuration that does not fit the loader.
    #[track_caller]
    pub fn prepare_data_loader<B: Send + 'static, K: LoaderKind>(
        &self,
        loader: DataLoader<B, K>,
        options: PrepareDataLoaderOptions,
    ) -> Result<DataLoaderShard<B, K>> {
        let _called = crate::status::here();
        let mut facts = PreparedFacts::default();
        loader.describe(&mut facts);
        self.prepare_by(&facts, false, |preparation| preparation.data_loader(loader, options))
    }
}
