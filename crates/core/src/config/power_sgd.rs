//! Options of PowerSGD, the low-rank compression of gradients.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::{Deserialize, Serialize};

/// Options of the `power_sgd` and `batched_power_sgd` hooks, given as `comm_state_option`
/// (`PowerSGDState` of PyTorch, `torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`;
/// method: Vogels et al., "PowerSGD", arXiv 1905.13727).
///
/// ```
/// use accelerate_core::config::PowerSGDState;
/// let state: PowerSGDState = serde_json::from_str(r#"{"start_powerSGD_iter": 10}"#).unwrap();
/// assert_eq!((state.matrix_approximation_rank, state.start_power_sgd_iter), (1, 10));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PowerSGDState {
    /// Columns of the two factors that stand for a gradient matrix, at least 1. Default 1.
    pub matrix_approximation_rank: usize,
    /// Steps with plain averaging before compression begins; at least 2 with `use_error_feedback` or
    /// `warm_start`, because the first two steps still settle the buckets. Default 1000.
    #[serde(rename = "start_powerSGD_iter")]
    pub start_power_sgd_iter: u64,
    /// A gradient is compressed if that divides its size by more than this. Default 2.
    pub min_compression_rate: f64,
    /// Add to each gradient what compression lost of the one before. Default true.
    pub use_error_feedback: bool,
    /// Begin from the factors of the step before. Default true.
    pub warm_start: bool,
    /// Added to the norm of a column before the division by it. Default 0.
    pub orthogonalization_epsilon: f64,
    /// Seed of the random factors, equal on all ranks. Default 0.
    pub random_seed: u32,
    /// Steps between two reports of the compression reached. Default 10000.
    pub compression_stats_logging_frequency: u64,
    /// Compress gradients of equal shape in one batched product. Default false.
    pub batch_tensors_with_same_shape: bool,
}

impl Default for PowerSGDState {
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_power_sgd_iter: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            orthogonalization_epsilon: 0.0,
            random_seed: 0,
            compression_stats_logging_frequency: 10_000,
            batch_tensors_with_same_shape: false,
        }
    }
}

impl PowerSGDState {
    /// Checks that the fields are possible and do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): rank 0, a rate or epsilon that is negative or no number, or
    /// compression that begins before step 2 although it remembers something.
    ///
    /// ```
    /// # use accelerate_core::config::PowerSGDState;
    /// let state = PowerSGDState { start_power_sgd_iter: 1, ..Default::default() };
    /// assert!(state.check().unwrap_err().to_string().contains("start_powerSGD_iter is 1"));
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.matrix_approximation_rank == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "matrix_approximation_rank" }.into());
        }
        for (name, found) in [
            ("min_compression_rate", self.min_compression_rate),
            ("orthogonalization_epsilon", self.orthogonalization_epsilon),
        ] {
            if !found.is_finite() || found < 0.0 {
                return Err(ConfigErrorKind::OutOfRange { name, found, wanted: "a number from 0" }.into());
            }
        }
        if (self.use_error_feedback || self.warm_start) && self.start_power_sgd_iter <= 1 {
            return Err(ConfigErrorKind::OutOfRange {
                name: "start_powerSGD_iter",
                found: self.start_power_sgd_iter as f64,
                wanted: "at least 2 with use_error_feedback or warm_start: the first two steps settle the buckets",
            }
            .into());
        }
        Ok(())
    }
}
