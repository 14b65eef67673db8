//! Accuracy and F1 from predictions and labels.

use std::fmt;

/// How well predictions agree with labels. Both numbers lie between 0 and 1.
///
/// ```
/// use nlp_example::metrics::Scores;
///
/// let scores = Scores::new(&[1, 1, 0, 0], &[1, 0, 0, 0], 2);
/// assert_eq!(scores.accuracy, 0.75);
/// assert_eq!(scores.to_string(), "accuracy=0.7500 f1=0.6667");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Share of predictions that equal their label.
    pub accuracy: f64,
    /// With two labels the F1 of label 1, with more the unweighted mean of every label's F1
    /// (scikit-learn's `f1_score` with `average="binary"` and `average="macro"`). A label that is
    /// neither predicted nor present scores 0.
    pub f1: f64,
}

impl Scores {
    /// Compares `predictions` with `labels`, position by position; both hold numbers below `num_labels`.
    ///
    /// Pairs stop at the end of the shorter slice; without any pair both scores are 0.
    pub fn new(predictions: &[i64], labels: &[i64], num_labels: usize) -> Self {
        let pairs = || predictions.iter().zip(labels);
        let count =
            |holds: &dyn Fn(i64, i64) -> bool| pairs().filter(|&(&predicted, &label)| holds(predicted, label)).count();
        let f1_of = |class: i64| {
            let true_positives = count(&|predicted, label| predicted == class && label == class);
            let wrong = count(&|predicted, label| (predicted == class) != (label == class));
            ratio(2 * true_positives, 2 * true_positives + wrong)
        };
        let f1 =
            if num_labels <= 2 { f1_of(1) } else { (0..num_labels as i64).map(f1_of).sum::<f64>() / num_labels as f64 };
        Self { accuracy: ratio(count(&|predicted, label| predicted == label), pairs().count()), f1 }
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl fmt::Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "accuracy={:.4} f1={:.4}", self.accuracy, self.f1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    // Expected values are scikit-learn's.
    #[rstest]
    #[case::all_right(&[0, 1, 1], &[0, 1, 1], 2, 1.0, 1.0)]
    #[case::all_wrong(&[1, 0], &[0, 1], 2, 0.0, 0.0)]
    #[case::never_positive(&[0, 0, 0, 0], &[1, 0, 0, 1], 2, 0.5, 0.0)]
    #[case::one_false_alarm(&[1, 1, 0, 0], &[1, 0, 0, 0], 2, 0.75, 2.0 / 3.0)]
    #[case::three_labels(&[0, 2, 1, 0, 0, 1], &[0, 1, 2, 0, 1, 2], 3, 2.0 / 6.0, 0.8 / 3.0)]
    #[case::nothing(&[], &[], 2, 0.0, 0.0)]
    fn scores_equal_scikit_learn(
        #[case] predictions: &[i64],
        #[case] labels: &[i64],
        #[case] num_labels: usize,
        #[case] accuracy: f64,
        #[case] f1: f64,
    ) {
        let scores = Scores::new(predictions, labels, num_labels);
        assert!((scores.accuracy - accuracy).abs() < 1e-12, "{scores:?}");
        assert!((scores.f1 - f1).abs() < 1e-12, "{scores:?}");
    }
}
