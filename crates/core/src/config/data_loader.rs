//! How data loaders are shared between ranks.

use super::GradientAccumulationPlugin;
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::settings::record::record;

record! {
    /// How data loaders are shared between ranks (`DataLoaderConfiguration` of the reference,
    /// `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{DataLoaderConfiguration, DataLoaderSettings};
    /// let said = DataLoaderConfiguration { split_batches: Some(true), ..Default::default() };
    /// let settings = DataLoaderSettings::from(said);
    /// assert!(settings.split_batches && settings.even_batches);
    /// settings.check()?;
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    DataLoaderConfiguration => DataLoaderSettings, section "dataloader_config", keys "", variables "ACCELERATE_DATALOADER_" {
        /// The batch size given to the loader counts all ranks together, and each rank gets an equal part.
        /// Default false: it is the batch of each rank.
        split_batches: bool = false => setting();
        /// Rank 0 reads alone and sends each rank its rows. Default `None`: yes for data that can only be read
        /// in sequence, no otherwise.
        dispatch_batches: bool => setting();
        /// Repeat rows at the end of the data so that all ranks see the same number of batches of the same size;
        /// `gather_for_metrics` drops them. Default true.
        even_batches: bool = true => setting();
        /// Shuffle each epoch by a seed of its own, so that an order can be made again without the epochs
        /// before it. Default false.
        use_seedable_sampler: bool = false => setting();
        /// Seed of the seedable sampler's first epoch; the same on all ranks. Default `None`: drawn by rank 0.
        data_seed: u64 => setting();
        /// The loader's sampler, or its stream, already picks the rows of its rank (a stream that opens only this rank's
        /// files, for instance): leave it as it is. What other ranks read is not known then, so metrics count every
        /// row. Default false; Python Accelerate has no such field.
        use_configured_sampler: bool = false => setting();
        /// Copy batches to the device without waiting for the copy to end. Default false.
        non_blocking: bool = false => setting();
        /// Taken over from Python Accelerate: every loader can say where it stands, with or without it. Default false.
        use_stateful_dataloader: bool = false => setting().without_effect("every loader can say where it stands");
        /// Settings of gradient accumulation, for those who keep them here. Default `None`; Python Accelerate
        /// keeps them in `GradientAccumulationPlugin` only. Given in both places, they must agree.
        gradient_accumulation_kwargs: GradientAccumulationPlugin => setting();
    }
}

impl DataLoaderSettings {
    /// Checks that the fields do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `use_configured_sampler` together with a field that
    /// would replace or re-deal that sampler.
    ///
    /// ```
    /// # use accelerate_core::config::DataLoaderSettings;
    /// let configuration = DataLoaderSettings {
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
        Ok(())
    }
}
