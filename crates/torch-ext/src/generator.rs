//! Random generators: the streams behind shuffles and initialisations, with their states.

use crate::border::{Handle, adopt, check, handle};
use crate::error::{Error, Result};
use std::fmt;
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn te_generator_default(device: i32, index: i32, result: *mut Handle) -> i32;
    fn te_generator_new_cpu(seed: u64, result: *mut Handle) -> i32;
    fn te_generator_free(generator: Handle);
    fn te_generator_manual_seed(generator: Handle, seed: u64) -> i32;
    fn te_generator_initial_seed(generator: Handle, seed: *mut u64) -> i32;
    fn te_generator_state(generator: Handle, state: *mut Handle) -> i32;
    fn te_generator_set_state(generator: Handle, state: Handle) -> i32;
    fn te_generator_randperm(generator: Handle, n: i64, result: *mut Handle) -> i32;
    fn te_generator_multinomial(generator: Handle, weights: Handle, num_samples: i64, result: *mut Handle) -> i32;
    fn te_generator_uniform(generator: Handle, target: Handle, from: f64, to: f64) -> i32;
    fn te_generator_normal(generator: Handle, target: Handle, mean: f64, std: f64) -> i32;
    fn te_generator_random(generator: Handle, value: *mut i64) -> i32;
}

/// The seed of a generator that was never seeded, `torch.Generator().initial_seed()`.
const DEFAULT_SEED: u64 = 67_280_421_310_721;

/// How long a state of a generator on the CPU is.
const CPU_STATE_BYTES: usize = 5056;

/// Is it a state that a generator on the CPU comes to (`at::mt19937`)? libtorch looks at how many numbers are left, and at which one is
/// next, by themselves: where the two do not belong together, it would read memory behind its 624 numbers. Where all of these are 0, it
/// would draw nothing but 0.
///
/// # Errors
/// It is none.
///
/// ```
/// use torch_ext::generator::{Generator, check_cpu_state};
/// let state = Vec::<u8>::try_from(Generator::new_cpu()?.state()?)?;
/// check_cpu_state(&state)?;
/// assert!(check_cpu_state(&[0; 5056]).is_err() && check_cpu_state(&state[1..]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn check_cpu_state(state: &[u8]) -> Result<()> {
    const NUM_WORDS: usize = 624;
    let refused = |reason: &str| {
        Err(Error::invalid("Generator::set_state", format!("this is no state of a generator: {reason}")))
    };
    if state.len() != CPU_STATE_BYTES {
        return refused(&format!("it has {} bytes and not {CPU_STATE_BYTES}", state.len()));
    }
    let word = |at: usize| state[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
    let left = state[8..].first_chunk().copied().map_or(0, i32::from_le_bytes);
    let next = word(16);
    // All are used up, or those are left that come from the next one on.
    let is_possible = next <= NUM_WORDS as u64 && (left == 1 || i64::from(left) + next as i64 == NUM_WORDS as i64 + 1);
    if !is_possible || left < 1 {
        return refused(&format!("{left} numbers are left behind the one at {next}"));
    }
    if (0..NUM_WORDS).all(|number| word(24 + 8 * number) == 0) {
        return refused("all its numbers are 0");
    }
    Ok(())
}

/// A random generator of libtorch: the counterpart of `torch.Generator`.
///
/// The same seed gives the same numbers as in Python. A handle is one of possibly many on the same stream; libtorch
/// locks the stream for each call, so a generator may be shared between threads, which then share its numbers in
/// the order of their calls.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::Generator;
/// let generator = Generator::new_cpu()?;
/// generator.manual_seed(0)?;
/// let order = generator.randperm(10)?;
/// assert_eq!(order, Tensor::from_slice(&[4i64, 1, 7, 5, 3, 9, 0, 8, 6, 2])); // torch.randperm(10, generator=g)
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct Generator {
    raw: Handle,
}

// SAFETY: the handle is an intrusive pointer with an atomic count, and each access to the generator behind it
// takes its mutex, in the shim or in the kernels.
unsafe impl Send for Generator {}
// SAFETY: as above; the handle itself is never changed.
unsafe impl Sync for Generator {}

impl Generator {
    /// The generator that CPU operations use when they are given none (`torch.manual_seed` seeds it).
    ///
    /// ```
    /// let generator = torch_ext::Generator::default_cpu()?;
    /// tch::manual_seed(7);
    /// assert_eq!(generator.initial_seed()?, 7);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn default_cpu() -> Result<Self> {
        Self::default_of(0, -1)
    }

    /// The generator that operations on a CUDA device use when they are given none.
    ///
    /// # Errors
    /// There is no CUDA in this process (`is_invalid_argument`), or no device of this index.
    ///
    /// ```
    /// if !tch::Cuda::is_available() {
    ///     assert!(torch_ext::Generator::default_cuda(0).is_err_and(|error| error.is_invalid_argument()));
    /// }
    /// ```
    pub fn default_cuda(index: usize) -> Result<Self> {
        // Larger numbers than libtorch counts devices with must not wrap around to one that exists.
        Self::default_of(1, i32::try_from(index).unwrap_or(i32::MAX).min(127))
    }

    /// The default generator of a device.
    ///
    /// ```
    /// torch_ext::Generator::default_for(tch::Device::Cpu)?;
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn default_for(device: Device) -> Result<Self> {
        match device {
            Device::Cuda(index) => Self::default_cuda(index),
            other => Self::default_of(crate::kinds::device_type(other), -1),
        }
    }

    fn default_of(device: i32, index: i32) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: plain values in, a fresh handle out.
        check("Generator::default", unsafe { te_generator_default(device, index, &mut raw) })?;
        Ok(Self { raw })
    }

    /// A CPU generator of its own, with the seed of `torch.Generator()`.
    ///
    /// ```
    /// assert_eq!(torch_ext::Generator::new_cpu()?.initial_seed()?, 67_280_421_310_721);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn new_cpu() -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a plain value in, a fresh handle out.
        check("Generator::new_cpu", unsafe { te_generator_new_cpu(DEFAULT_SEED, &mut raw) })?;
        Ok(Self { raw })
    }

    /// The `at::Generator*`, borrowed.
    #[cfg(feature = "cuda")]
    pub(crate) fn handle(&self) -> Handle {
        self.raw
    }

    /// Starts the stream anew from a seed.
    ///
    /// ```
    /// let generator = torch_ext::Generator::new_cpu()?;
    /// generator.manual_seed(42)?;
    /// let first = generator.random_seed()?;
    /// generator.manual_seed(42)?;
    /// assert_eq!(generator.random_seed()?, first);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn manual_seed(&self, seed: u64) -> Result<()> {
        // SAFETY: the handle is valid while `self` lives.
        check("Generator::manual_seed", unsafe { te_generator_manual_seed(self.raw, seed) })
    }

    /// The seed the stream was last started from.
    pub fn initial_seed(&self) -> Result<u64> {
        let mut seed = 0;
        // SAFETY: the handle is valid while `self` lives.
        check("Generator::initial_seed", unsafe { te_generator_initial_seed(self.raw, &mut seed) })?;
        Ok(seed)
    }

    /// The state of the stream, as a `Uint8` vector on the CPU; the same bytes as Python's `get_state`.
    ///
    /// ```
    /// let generator = torch_ext::Generator::new_cpu()?;
    /// let state = generator.state()?;
    /// let first = generator.random_seed()?;
    /// generator.set_state(&state)?;
    /// assert_eq!(generator.random_seed()?, first);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn state(&self) -> Result<Tensor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the handle is valid while `self` lives; the result is fresh and adopted once.
        unsafe {
            check("Generator::state", te_generator_state(self.raw, &mut raw))?;
            Ok(adopt(raw))
        }
    }

    /// Puts the stream into a state that [`Generator::state`] gave.
    ///
    /// # Errors
    /// The tensor is not a state: wrong kind, device or length, or no generator comes to it.
    pub fn set_state(&self, state: &Tensor) -> Result<()> {
        if state.numel() == CPU_STATE_BYTES && state.kind() == Kind::Uint8 && state.device() == Device::Cpu {
            let bytes = state.f_reshape([-1]).and_then(|flat| Vec::<u8>::try_from(&flat));
            let invalid = |error: tch::TchError| Error::invalid("Generator::set_state", error.to_string());
            check_cpu_state(&bytes.map_err(invalid)?)?;
        }
        // SAFETY: both handles are valid for the call.
        check("Generator::set_state", unsafe { te_generator_set_state(self.raw, handle(state)) })
    }

    /// A random order of `0..n`, `Int64` on the generator's device: `torch.randperm(n, generator=self)`.
    ///
    /// # Errors
    /// `n` is negative.
    pub fn randperm(&self, n: i64) -> Result<Tensor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the handle is valid while `self` lives; the result is fresh and adopted once.
        unsafe {
            check("Generator::randperm", te_generator_randperm(self.raw, n, &mut raw))?;
            Ok(adopt(raw))
        }
    }

    /// `num_samples` positions drawn with replacement, each with a probability proportional to its entry in `weights`:
    /// `torch.multinomial(weights, num_samples, replacement=True, generator=self)`. `weights` is a floating-point vector on
    /// the generator's device, the result `Int64` beside it.
    ///
    /// ```
    /// use tch::Tensor;
    /// let drawn = torch_ext::Generator::new_cpu()?.multinomial(&Tensor::from_slice(&[0.0, 1.0, 3.0]), 20)?;
    /// assert_eq!((drawn.size(), drawn.min().int64_value(&[]) >= 1), (vec![20], true));
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    ///
    /// # Errors
    /// A weight is negative or not finite, all of them are 0, or `num_samples` is not positive.
    pub fn multinomial(&self, weights: &Tensor, num_samples: i64) -> Result<Tensor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: both handles are valid for the call; the result is fresh and adopted once.
        unsafe {
            let rc = te_generator_multinomial(self.raw, handle(weights), num_samples, &mut raw);
            check("Generator::multinomial", rc)?;
            Ok(adopt(raw))
        }
    }

    /// Fills a tensor with uniform numbers from `[from, to)`, in place and unseen by autograd.
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// let x = Tensor::zeros([100], (Kind::Float, Device::Cpu));
    /// torch_ext::Generator::new_cpu()?.uniform_(&x, 1.0, 2.0)?;
    /// assert!(x.min().double_value(&[]) >= 1.0 && x.max().double_value(&[]) < 2.0);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn uniform_(&self, target: &Tensor, from: f64, to: f64) -> Result<()> {
        // SAFETY: both handles are valid for the call.
        check("Generator::uniform_", unsafe { te_generator_uniform(self.raw, handle(target), from, to) })
    }

    /// Fills a tensor with normal numbers, in place and unseen by autograd.
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// let x = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
    /// torch_ext::Generator::new_cpu()?.normal_(&x, 5.0, 0.1)?;
    /// assert!((x.mean(Kind::Float).double_value(&[]) - 5.0).abs() < 0.1);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn normal_(&self, target: &Tensor, mean: f64, std: f64) -> Result<()> {
        // SAFETY: both handles are valid for the call.
        check("Generator::normal_", unsafe { te_generator_normal(self.raw, handle(target), mean, std) })
    }

    /// One number from `0..2^63`: `torch.empty((), dtype=torch.int64).random_(generator=self).item()`.
    pub fn random_seed(&self) -> Result<i64> {
        let mut value = 0;
        // SAFETY: the handle is valid while `self` lives.
        check("Generator::random_seed", unsafe { te_generator_random(self.raw, &mut value) })?;
        Ok(value)
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once.
        unsafe { te_generator_free(self.raw) }
    }
}

impl fmt::Debug for Generator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator").field("initial_seed", &self.initial_seed().ok()).finish()
    }
}

/// One number from the default CPU generator, as Python's samplers and loaders draw their seeds:
/// `torch.empty((), dtype=torch.int64).random_().item()`.
///
/// ```
/// tch::manual_seed(1);
/// let seed = torch_ext::generator::random_seed_from_default()?;
/// assert!(seed >= 0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn random_seed_from_default() -> Result<i64> {
    let mut value = 0;
    // SAFETY: null means the default generator.
    check("random_seed_from_default", unsafe { te_generator_random(std::ptr::null_mut(), &mut value) })?;
    Ok(value)
}
