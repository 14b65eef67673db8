//! Seeds.

use super::Accelerator;
use crate::error::Result;
use accelerate_core::mesh::Mesh;

/// How [`Accelerator::set_seed`] seeds, beyond the seed.
///
/// ```
/// use accelerate::SeedOptions;
///
/// assert!(!SeedOptions::default().device_specific);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeedOptions {
    /// Every process gets a seed of its own: the number of the process is added. Default false.
    ///
    /// Weights differ between processes then until `prepare` makes them rank 0's; the order of rows is rank 0's in any
    /// case.
    pub device_specific: bool,
    /// From here on libtorch uses deterministic algorithms only, and an operation that has none is an error
    /// (`torch.use_deterministic_algorithms(True)`). Default false, which changes nothing.
    pub deterministic: bool,
}

/// Seeds the default generators of the CPU and of all GPUs (`set_seed` of the reference, `utils/random.py`): what
/// initialisations, dropout, and shuffles without a generator of their own draw from. Rust's own random numbers, the crate
/// `rand`'s for instance, are not touched.
///
/// Goes before the model is built. See [`Accelerator::set_seed`] for seeds that differ between processes.
///
/// ```
/// use accelerate::{set_seed, tch::{Device, Kind, Tensor}};
///
/// set_seed(42);
/// let first = Tensor::randn([3], (Kind::Float, Device::Cpu));
/// set_seed(42);
/// assert_eq!(Tensor::randn([3], (Kind::Float, Device::Cpu)), first);
/// ```
pub fn set_seed(seed: u64) {
    // libtorch takes the bits of the number as an unsigned one.
    tch::manual_seed(seed as i64);
}

impl Accelerator {
    /// [`set_seed`] with options; returns the seed of this process.
    ///
    /// ```
    /// use accelerate::{Accelerator, SeedOptions, testing};
    ///
    /// let seeds = testing::ranks(2, Default::default(), |accelerator| {
    ///     accelerator.set_seed(7, SeedOptions { device_specific: true, ..Default::default() })
    /// })?;
    /// assert_eq!(seeds, [7, 8]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// libtorch's own.
    pub fn set_seed(&self, seed: u64, options: SeedOptions) -> Result<u64> {
        // Ranks that compute the same layers together draw the same numbers; those that divide a sequence have tokens of their own.
        let own = self.mesh().rank_in(Mesh::GRADIENTS, self.process_index()) as u64;
        let seed = if options.device_specific { seed.wrapping_add(own) } else { seed };
        set_seed(seed);
        if options.deterministic {
            torch_ext::use_deterministic_algorithms(true, Default::default())?;
        }
        Ok(seed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    #[test]
    fn a_seed_decides_what_is_drawn() {
        let accelerator = Accelerator::builder().cpu(true).build().unwrap();
        let draw = |seed, options| {
            accelerator.set_seed(seed, options).unwrap();
            Tensor::rand([4], (Kind::Float, Device::Cpu))
        };
        let plain = SeedOptions::default();
        assert_eq!(draw(3, plain), draw(3, plain));
        assert_ne!(draw(3, plain), draw(4, plain));
        // A single process has number 0.
        assert_eq!(draw(3, SeedOptions { device_specific: true, ..plain }), draw(3, plain));
        assert_eq!(accelerator.set_seed(u64::MAX, plain).unwrap(), u64::MAX);
        assert_eq!(torch_ext::Generator::default_cpu().unwrap().initial_seed().unwrap(), u64::MAX);
    }

    #[test]
    fn algorithms_become_deterministic_when_asked_for() {
        let accelerator = Accelerator::builder().cpu(true).build().unwrap();
        let enabled = || torch_ext::are_deterministic_algorithms_enabled().unwrap();
        accelerator.set_seed(0, SeedOptions::default()).unwrap();
        assert!(!enabled());
        accelerator.set_seed(0, SeedOptions { deterministic: true, ..Default::default() }).unwrap();
        assert!(enabled());
        torch_ext::use_deterministic_algorithms(false, Default::default()).unwrap();
    }
}
