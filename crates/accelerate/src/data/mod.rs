//! Datasets, samplers, and loaders that hand out batches.
//!
//! A [`Dataset`] has rows, a [`Sampler`] orders them, [`Collate`] makes batches of them, and a [`DataLoader`] puts the
//! three together. Rows of files come from [`readers`]. `Accelerator::prepare` turns a loader into a [`DataLoaderShard`]: each process gets its own
//! batches, on its own device.
//!
//! Names, defaults and orders are those of `torch.utils.data` and of Python Accelerate's `data_loader.py`: with the
//! same seed, the same rows come in the same batches, index by index.

mod agreement;
mod batches;
mod builder;
mod collate;
mod dataset;
mod iterable;
mod loader;
mod operations;
mod position;
mod random;
pub mod readers;
mod sampler;
mod shard;
mod share;
mod source;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use accelerate_core::config::DataLoaderConfiguration;
pub(crate) use agreement::synchronize_rng_states;
pub use batches::Batches;
pub use builder::{Collator, CustomCollate, DataLoaderBuilder, DefaultCollate};
pub use collate::{Collate, default_collate, stack_tensors};
pub use dataset::{Dataset, MapDataset, Subset, TensorDataset, VecDataset, random_split};
pub use iterable::{IterableDataLoaderBuilder, IterableDataset, RowStream, Rows};
pub use loader::{DataLoader, Iterable, MapStyle};
pub use operations::{
    SendToDeviceOptions, concatenate, find_batch_size, pad_input_tensors, send_to_device, slice_tensors,
};
pub use position::DataLoaderState;
pub use sampler::{
    BatchSampler, RandomSampler, Sampler, SeedableRandomSampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler,
};
pub(crate) use shard::LoaderSettings;
pub use shard::{DataLoaderShard, LoaderKind};
pub(crate) use share::Shares;
pub use torch_ext::Generator;

/// A loader that can leave out the first batches of its passes: [`DataLoader`] or [`DataLoaderShard`].
///
/// ```
/// use accelerate::data::{DataLoader, SkipFirstBatches, VecDataset};
///
/// let loader = DataLoader::builder(VecDataset::new(vec![1i64, 2, 3])).build()?;
/// assert_eq!(loader.skipping(2).len(), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait SkipFirstBatches: Sized {
    /// A loader over the same dataset, sampler and epoch that leaves out `num_batches` batches (per process) more at
    /// the start of every pass.
    #[must_use]
    fn skipping(&self, num_batches: usize) -> Self;
}

/// A loader that leaves out the first `num_batches` batches (per process) of every pass: to go on in the middle of
/// an epoch (`skip_first_batches` of the reference, `data_loader.py`).
///
/// With `dispatch_batches`, too, a batch is one of each process, so a loop that has seen `n` batches skips `n`. The reference
/// then leaves out `num_batches` batches of rank 0 alone where rows are counted, so rows come again that a loop has seen.
///
/// Skipped rows are never read, so this costs nothing however many they are. Which rows are fillers is still known,
/// which the reference forgets. Use it for the pass that goes on, and `loader` for the later ones: the two
/// count epochs together, so that the pass after the resumed one has the next epoch.
///
/// ```
/// use accelerate::data::{DataLoader, VecDataset, skip_first_batches};
///
/// let loader = DataLoader::builder(VecDataset::new(vec![10i64, 11, 12, 13, 14])).batch_size(2).build()?;
/// let resumed = skip_first_batches(&loader, 2);
/// let batch = resumed.iter()?.next().unwrap()?;
/// assert_eq!(Vec::<i64>::try_from(&batch)?, [14]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[must_use]
pub fn skip_first_batches<L: SkipFirstBatches>(loader: &L, num_batches: usize) -> L {
    loader.skipping(num_batches)
}
