//! Compares what two trainings left behind: losses, and parameters by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// How far two trainings are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Difference {
    /// The largest absolute difference of any rank's loss at any step.
    pub(super) loss: f64,
    /// The largest difference of a parameter, as a part of the largest absolute value of its tensor.
    pub(super) parameter: f64,
}

impl Difference {
    /// A difference that is not a number is none that is small enough.
    pub(super) fn is_within(self, bound: Difference) -> bool {
        self.loss <= bound.loss && self.parameter <= bound.parameter
    }
}

/// Values by name.
pub(super) type Parameters = BTreeMap<String, Vec<f64>>;

/// Compares the folders of two trainings, `losses.json` and `final.safetensors`. Files of different shape are an error,
/// not a difference.
pub(super) fn folders(ours: &Path, theirs: &Path) -> Result<Difference> {
    let read = |folder: &Path, name: &str| {
        let path = folder.join(name);
        fs::read(&path).with_context(|| format!("could not read {}", path.display()))
    };
    let losses = |folder: &Path| parse_losses(&read(folder, "losses.json")?);
    let loss = losses_apart(&losses(ours)?, &losses(theirs)?)?;
    let (our_bytes, their_bytes) = (read(ours, "final.safetensors")?, read(theirs, "final.safetensors")?);
    let parameter = parameters_apart(&parse_parameters(&our_bytes)?, &parse_parameters(&their_bytes)?)?;
    Ok(Difference { loss, parameter })
}

/// One list per step, one loss per rank.
fn parse_losses(bytes: &[u8]) -> Result<Vec<Vec<f64>>> {
    serde_json::from_slice(bytes).context("losses.json is not a list of lists of numbers")
}

/// By names with shapes.
fn parse_parameters(bytes: &[u8]) -> Result<Parameters> {
    let tensors = SafeTensors::deserialize(bytes)?;
    let named =
        tensors.iter().map(|(name, tensor)| Ok((format!("{name} {:?}", tensor.shape()), values(name, &tensor)?)));
    named.collect()
}

/// The largest difference of a loss: one list per step, one loss per rank.
pub(super) fn losses_apart(ours: &[Vec<f64>], theirs: &[Vec<f64>]) -> Result<f64> {
    ensure!(!theirs.is_empty() && ours.len() == theirs.len(), "{} steps here, {} there", ours.len(), theirs.len());
    let mut largest = 0.0;
    for (step, (our_losses, their_losses)) in ours.iter().zip(theirs).enumerate() {
        let (our_ranks, their_ranks) = (our_losses.len(), their_losses.len());
        ensure!(our_ranks == their_ranks, "step {step}: losses of {our_ranks} ranks here, of {their_ranks} there");
        for (our_loss, their_loss) in our_losses.iter().zip(their_losses) {
            largest = larger(largest, (our_loss - their_loss).abs());
        }
    }
    Ok(largest)
}

/// The largest difference of a parameter, as a part of the largest absolute value of its tensor.
pub(super) fn parameters_apart(ours: &Parameters, theirs: &Parameters) -> Result<f64> {
    if !ours.keys().eq(theirs.keys()) {
        let only = |some: &Parameters, others: &Parameters| {
            some.keys().filter(|name| !others.contains_key(*name)).cloned().collect::<Vec<_>>().join(", ")
        };
        let (here, there) = (only(ours, theirs), only(theirs, ours));
        bail!("different parameters; only here: [{here}], only there: [{there}]");
    }
    let pairs = ours.values().zip(theirs.values());
    Ok(pairs.fold(0.0, |largest, (ours, theirs)| larger(largest, values_apart(ours, theirs))))
}

fn values(name: &str, tensor: &TensorView<'_>) -> Result<Vec<f64>> {
    ensure!(tensor.dtype() == Dtype::F32, "{name}: {:?} is not compared, only float32 is", tensor.dtype());
    let numbers = tensor.data().chunks_exact(4).map(|bytes| match bytes {
        [a, b, c, d] => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        _ => f64::NAN,
    });
    Ok(numbers.collect())
}

/// The largest difference as a part of the largest of `theirs`; the plain difference if all are zero.
fn values_apart(ours: &[f64], theirs: &[f64]) -> f64 {
    let largest = largest_difference(ours, theirs);
    let scale = theirs.iter().fold(0.0, |largest, their| larger(largest, their.abs()));
    if scale > 0.0 { largest / scale } else { largest }
}

/// Not a number if there are not equally many, or one of them is none.
pub(super) fn largest_difference(ours: &[f64], theirs: &[f64]) -> f64 {
    if ours.len() != theirs.len() {
        return f64::NAN;
    }
    ours.iter().zip(theirs).fold(0.0, |largest, (our, their)| larger(largest, (our - their).abs()))
}

/// The larger of two; not a number if either is, which `f64::max` would forget.
fn larger(one: f64, other: f64) -> f64 {
    if one.is_nan() || other.is_nan() { f64::NAN } else { one.max(other) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn write(folder: &Path, losses: &str, tensors: &[(&str, &[f32])]) {
        fs::write(folder.join("losses.json"), losses).unwrap();
        let bytes: Vec<Vec<u8>> =
            tensors.iter().map(|(_, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
        let views = tensors
            .iter()
            .zip(&bytes)
            .map(|((name, values), bytes)| (*name, TensorView::new(Dtype::F32, vec![values.len()], bytes).unwrap()));
        fs::write(folder.join("final.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    fn compare(ours: (&str, &[(&str, &[f32])]), theirs: (&str, &[(&str, &[f32])])) -> Result<Difference> {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(one.path(), ours.0, ours.1);
        write(other.path(), theirs.0, theirs.1);
        folders(one.path(), other.path())
    }

    #[test]
    fn equal_trainings_have_no_difference() {
        let side: (&str, &[(&str, &[f32])]) = ("[[0.5, 0.25]]", &[("a", &[1.0, -2.0])]);
        assert_eq!(compare(side, side).unwrap(), Difference { loss: 0.0, parameter: 0.0 });
    }

    #[test]
    fn the_largest_difference_counts_wherever_it_is() {
        let ours = ("[[0.5, 0.25], [0.125, 1.0]]", &[("a", &[1.0_f32, -2.0][..]), ("b", &[0.5][..])][..]);
        let theirs = ("[[0.5, 0.25], [0.125, 1.5]]", &[("a", &[1.5_f32, -2.0][..]), ("b", &[0.5][..])][..]);
        assert_eq!(compare(ours, theirs).unwrap(), Difference { loss: 0.5, parameter: 0.25 });
    }

    #[test]
    fn what_is_not_a_number_never_counts_as_equal() {
        let good = ("[[0.5]]", &[("a", &[1.0_f32, 2.0][..])][..]);
        let bad = ("[[0.5]]", &[("a", &[f32::NAN, 2.0][..])][..]);
        assert!(compare(bad, good).unwrap().parameter.is_nan());
        assert!(compare(good, bad).unwrap().parameter.is_nan());
    }

    #[test]
    fn what_cannot_be_compared_is_an_error() {
        let good = ("[[0.5]]", &[("a", &[1.0_f32][..])][..]);
        let others = [
            ("[]", good.1, "steps"),
            ("[[0.5], [0.5]]", good.1, "steps"),
            ("[[0.5, 0.5]]", good.1, "ranks"),
            ("[[null]]", good.1, "list of lists"),
            ("[[0.5]]", &[("b", &[1.0_f32][..])][..], "only here: [b [1]], only there: [a [1]]"),
            ("[[0.5]]", &[("a", &[1.0_f32, 2.0][..])][..], "only here: [a [2]], only there: [a [1]]"),
        ];
        for (losses, tensors, want) in others {
            let message = format!("{:#}", compare((losses, tensors), good).unwrap_err());
            assert!(message.contains(want), "{message}");
        }
    }
}
