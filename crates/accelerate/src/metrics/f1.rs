//! How well classes are found and kept apart.

use super::ratio;
use crate::{Accelerator, Result};
use std::collections::BTreeMap;
use tch::Tensor;

/// How the scores of the classes become one; the names of scikit-learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum F1Average {
    /// The score of one class.
    Binary {
        /// Which one. scikit-learn's default: 1.
        pos_label: i64,
    },
    /// The mean over all classes that are predicted or wanted anywhere.
    Macro,
    /// The same, weighted by how often a class is wanted.
    Weighted,
    /// Of all classes taken together, which is the accuracy where each row has one class.
    Micro,
}

impl Default for F1Average {
    fn default() -> Self {
        Self::Binary { pos_label: 1 }
    }
}

/// The harmonic mean of precision and recall (`f1_score` of scikit-learn). A class that is neither predicted nor wanted scores 0.
///
/// ```
/// use accelerate::metrics::{F1, F1Average};
/// use accelerate::{Accelerator, tch::Tensor};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let mut f1 = F1::default();
/// let (predictions, references) = (Tensor::from_slice(&[1i64, 1, 0, 0]), Tensor::from_slice(&[1i64, 0, 0, 0]));
/// f1.add_batch(&accelerator, &predictions, &references)?;
/// assert_eq!(f1.compute(), 2.0 / 3.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct F1 {
    /// How the scores of the classes become one.
    pub average: F1Average,
    classes: BTreeMap<i64, Counts>,
}

/// Of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    predicted: u64,
    wanted: u64,
    both: u64,
}

impl F1 {
    /// Nothing counted yet.
    pub fn new(average: F1Average) -> Self {
        Self { average, classes: BTreeMap::new() }
    }

    /// Counts a batch: `predictions` and `references` of one shape `[batch, ..]`, integers. Collective.
    ///
    /// # Errors
    /// Those of [`Accelerator::gather_for_metrics`]; shapes that do not fit each other.
    #[track_caller]
    pub fn add_batch(&mut self, accelerator: &Accelerator, predictions: &Tensor, references: &Tensor) -> Result<()> {
        let pairs = Tensor::f_stack(&[predictions, references], -1)?;
        let pairs = accelerator.gather_for_metrics(&pairs)?.f_reshape([-1, 2])?;
        let [predictions, references] = [0, 1].map(|column| -> Result<Vec<i64>> {
            Ok(Vec::try_from(&pairs.f_select(1, column)?.f_to_kind(tch::Kind::Int64)?)?)
        });
        for (predicted, wanted) in predictions?.into_iter().zip(references?) {
            self.classes.entry(predicted).or_default().predicted += 1;
            let counts = self.classes.entry(wanted).or_default();
            counts.wanted += 1;
            counts.both += u64::from(predicted == wanted);
        }
        Ok(())
    }

    /// From 0 to 1; not a number where nothing was counted.
    pub fn compute(&self) -> f64 {
        let num_rows: u64 = self.classes.values().map(|counts| counts.wanted).sum();
        if num_rows == 0 {
            return f64::NAN;
        }
        let scores = self.classes.values().map(|counts| (counts.score(), counts.wanted));
        match self.average {
            F1Average::Binary { pos_label } => self.classes.get(&pos_label).map_or(0.0, |counts| counts.score()),
            F1Average::Macro => scores.map(|(score, _)| score).sum::<f64>() / self.classes.len() as f64,
            F1Average::Weighted => scores.map(|(score, wanted)| score * wanted as f64).sum::<f64>() / num_rows as f64,
            F1Average::Micro => ratio(self.classes.values().map(|counts| counts.both).sum(), num_rows),
        }
    }
}

impl Counts {
    fn score(&self) -> f64 {
        let Self { predicted, wanted, both } = self;
        ratio(2 * both, predicted + wanted)
    }
}
