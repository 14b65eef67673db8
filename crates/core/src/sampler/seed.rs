//! Which seed shuffles which epoch.

/// The shuffle seeds of successive epochs (`SeedableRandomSampler` of the reference, `data_loader.py`).
///
/// Epoch `e` is shuffled by a generator seeded with `data_seed + e` (wrapping), so any epoch can be made
/// again without the ones before it. Every rank must be given the same `data_seed`, that of rank 0; the
/// reference lets it differ per rank under `device_specific` seeds, and then rows are seen twice or never.
///
/// ```
/// use accelerate_core::sampler::SeedableRandomSampler;
/// let mut sampler = SeedableRandomSampler { data_seed: 42, epoch: 0 };
/// assert_eq!(sampler.seed(), 42);
/// sampler.finish_epoch();
/// assert_eq!(sampler.seed(), 43);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SeedableRandomSampler {
    /// Seed of epoch 0.
    pub data_seed: u64,
    /// The epoch that is shuffled next; set it to repeat or skip epochs (`set_epoch` of the reference).
    pub epoch: u64,
}

impl SeedableRandomSampler {
    /// The seed for the generator that shuffles the current epoch.
    ///
    /// ```
    /// # use accelerate_core::sampler::SeedableRandomSampler;
    /// let last = SeedableRandomSampler { data_seed: u64::MAX, epoch: 1 };
    /// assert_eq!(last.seed(), 0); // the sum wraps
    /// ```
    pub const fn seed(&self) -> u64 {
        self.data_seed.wrapping_add(self.epoch)
    }

    /// Goes on to the next epoch; called after a complete pass over the data.
    ///
    /// ```
    /// # use accelerate_core::sampler::SeedableRandomSampler;
    /// let mut sampler = SeedableRandomSampler { data_seed: 7, epoch: 3 };
    /// sampler.finish_epoch();
    /// assert_eq!(sampler.epoch, 4);
    /// ```
    pub const fn finish_epoch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
    }
}
