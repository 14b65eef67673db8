//! How data loaders are shared between ranks.

use super::GradientAccumulationPlugin;
use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::{Deserialize, Serialize};

/// How data loaders are shared between ranks (`DataLoaderConfiguration` of the reference,
/// `utils/dataclasses.py`).
///
/// ```
/// use accelerate_core::config::DataLoaderConfiguration;
/// let configuration = DataLoaderConfiguration { split_batches: true, ..Default::default() };
/// assert!(configuration.even_batches);
/// configuration.check()?;
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataLoaderConfiguration {
    /// The batch size given to the loader counts all ranks together, and each rank gets an equal part.
    /// Default false: it is the batch of each rank.
    pub split_batches: bool,
    /// Rank 0 reads alone and sends each rank its rows. Default `None`: yes for data that can only be read
    /// in sequence, no otherwise.
    pub dispatch_batches: Option<bool>,
    /// Repeat rows at the end of the data so that all ranks see the same number of batches of the same size;
    /// `gather_for_metrics` drops them. Default true.
    pub even_batches: bool,
    /// Shuffle each epoch by a seed of its own, so that an order can be made again without the epochs
    /// before it. Default false.
    pub use_seedable_sampler: bool,
    /// Seed of the seedable sampler's first epoch; the same on all ranks. Default `None`: drawn by rank 0.
    pub data_seed: Option<u64>,
    /// The loader's sampler, or its stream, already picks the rows of its rank (a stream that opens only this rank's
    /// files, for instance): leave it as it is. What other ranks read is not known then, so metrics count every
    /// row. Default false; Python Accelerate has no such field.
    pub use_configured_sampler: bool,
    /// Copy batches to the device without waiting for the copy to end. Default false.
    pub non_blocking: bool,
    /// Taken over from Python Accelerate and without effect: every loader can say where it stands, with or without it.
    /// Default false.
    pub use_stateful_dataloader: bool,
    /// Settings of gradient accumulation, for those who keep them here. Default `None`; Python Accelerate
    /// keeps them in `GradientAccumulationPlugin` only. Given in both places, they must agree.
    pub gradient_accumulation_kwargs: Option<GradientAccumulationPlugin>,
}

impl Default for DataLoaderConfiguration {
    fn default() -> Self {
        Self {
            split_batches: false,
            dispatch_batches: None,
            even_batches: true,
            use_seedable_sampler: false,
            data_seed: None,
            use_configured_sampler: false,
            non_blocking: false,
            use_stateful_dataloader: false,
            gradient_accumulation_kwargs: None,
        }
    }
}

impl DataLoaderConfiguration {
    /// Checks that the fields do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `use_configured_sampler` together with a field that
    /// would replace or re-deal that sampler, or accumulation settings of 0 steps.
    ///
    /// ```
    /// # use accelerate_core::config::DataLoaderConfiguration;
    /// let configuration = DataLoaderConfiguration {
    ///     use_configured_sampler: true,
    ///     use_seedable_sampler: true,
    ///     ..Default::default()
    /// };
    /// assert!(configuration.check().unwrap_err().is_config());
    /// ```
    pub fn check(&self) -> Result<()> {
        let first = "use_configured_sampler";
        let contradiction = if !self.use_configured_sampler {
            None
        } else if self.use_seedable_sampler {
            Some(("use_seedable_sampler", "one keeps the sampler, the other replaces it"))
        } else if self.split_batches {
            Some(("split_batches", "a sampler that already picks the rows of its rank is not split"))
        } else if self.dispatch_batches == Some(true) {
            Some(("dispatch_batches", "a sampler that already picks the rows of its rank is not dealt"))
        } else {
            None
        };
        if let Some((second, why)) = contradiction {
            return Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        }
        self.gradient_accumulation_kwargs.as_ref().map_or(Ok(()), GradientAccumulationPlugin::check)
    }
}
