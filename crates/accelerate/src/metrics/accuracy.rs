//! How many predictions are right.

use super::ratio;
use crate::{Accelerator, Result};
use tch::{Kind, Tensor};

/// The part of the predictions that equal their reference (`accuracy_score` of scikit-learn).
///
/// ```
/// use accelerate::metrics::Accuracy;
/// use accelerate::{data::{DataLoader, VecDataset}, tch::Kind, testing};
///
/// testing::ranks(2, Default::default(), |accelerator| {
///     let loader = DataLoader::builder(VecDataset::new(vec![0i64, 1, 2, 3, 4])).batch_size(2).build()?;
///     let loader = accelerator.prepare(loader)?;
///     let mut accuracy = Accuracy::default();
///     for batch in loader.iter()? {
///         let numbers = batch?;
///         let predictions = numbers.f_fmod_tensor(&numbers.f_ones_like()?.f_add(&numbers.f_ones_like()?)?)?;
///         accuracy.add_batch(&accelerator, &predictions, &numbers)?;
///     }
///     assert_eq!(accuracy.compute(), 0.4);
///     Ok(())
/// })?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accuracy {
    num_right: u64,
    num_all: u64,
}

impl Accuracy {
    /// Counts a batch: `predictions` and `references` of one shape `[batch, ..]`, integers. Collective.
    ///
    /// # Errors
    /// Those of [`Accelerator::gather_for_metrics`]; shapes that do not fit each other.
    #[track_caller]
    pub fn add_batch(&mut self, accelerator: &Accelerator, predictions: &Tensor, references: &Tensor) -> Result<()> {
        let is_right = predictions.f_eq_tensor(references)?;
        let is_right = accelerator.gather_for_metrics(&is_right)?;
        self.num_right += u64::try_from(is_right.f_sum(Kind::Int64)?.f_int64_value(&[])?).unwrap_or_default();
        self.num_all += is_right.numel() as u64;
        Ok(())
    }

    /// From 0 to 1; not a number where nothing was counted.
    pub fn compute(&self) -> f64 {
        ratio(self.num_right, self.num_all)
    }
}
