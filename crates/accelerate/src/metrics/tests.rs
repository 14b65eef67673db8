//! Numbers of scikit-learn, and rows that count once on any number of processes.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::data::{DataLoader, TensorDataset};
use crate::{Accelerator, testing};
use tch::{Device, Kind, Reduction, Tensor};

/// `f1_score(references, predictions, average=...)` for "macro", "weighted" and "micro", and with `pos_label=1` for "binary".
#[test]
fn f1_is_that_of_scikit_learn() {
    let rows: [(&[i64], &[i64], [f64; 4]); 5] = [
        (&[0, 1, 1], &[0, 1, 1], [1.0, 1.0, 1.0, 1.0]),
        (&[1, 0], &[0, 1], [0.0, 0.0, 0.0, 0.0]),
        (&[0, 0, 0, 0], &[1, 0, 0, 1], [1.0 / 3.0, 1.0 / 3.0, 0.5, 0.0]),
        (&[1, 1, 0, 0], &[1, 0, 0, 0], [0.733_333_333_333_333_3, 0.766_666_666_666_666_7, 0.75, 2.0 / 3.0]),
        (&[0, 2, 1, 0, 0, 1], &[0, 1, 2, 0, 1, 2], [0.8 / 3.0, 0.8 / 3.0, 1.0 / 3.0, 0.0]),
    ];
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let averages = [F1Average::Macro, F1Average::Weighted, F1Average::Micro, F1Average::default()];
    for (predictions, references, wanted) in rows {
        for (average, wanted) in averages.into_iter().zip(wanted) {
            let mut f1 = F1::new(average);
            f1.add_batch(&accelerator, &Tensor::from_slice(predictions), &Tensor::from_slice(references)).unwrap();
            assert!((f1.compute() - wanted).abs() < 1e-12, "{average:?} of {predictions:?}: {}", f1.compute());
        }
    }
    assert!(F1::default().compute().is_nan() && Accuracy::default().compute().is_nan());
}

/// The last batches are filled up with rows from the beginning, which must not count.
#[test]
fn every_row_counts_once_on_any_number_of_processes() {
    let predictions: Vec<i64> = (0..11).map(|row| row % 3).collect();
    let references: Vec<i64> = (0..11).map(|row| row % 4).collect();
    let all = || (Tensor::from_slice(&predictions), Tensor::from_slice(&references));
    let mut found = Vec::new();
    for world_size in [1, 2, 3] {
        let of_ranks = testing::ranks(world_size, Default::default(), |accelerator| {
            let loader = DataLoader::builder(TensorDataset::new(all())?).batch_size(2).build()?;
            let loader = accelerator.prepare(loader)?;
            let (mut accuracy, mut f1) = (Accuracy::default(), F1::new(F1Average::Macro));
            for batch in loader.iter()? {
                let (predictions, references) = batch?;
                accuracy.add_batch(&accelerator, &predictions, &references)?;
                f1.add_batch(&accelerator, &predictions, &references)?;
            }
            Ok((accuracy, f1))
        });
        found.extend(of_ranks.unwrap());
    }
    let (accuracy, f1) = &found[0];
    assert_eq!(accuracy.compute(), 3.0 / 11.0);
    assert!(found.iter().all(|(other, _)| other == accuracy) && found.iter().all(|(_, other)| other == f1));
}

/// Logits and labels of texts of different lengths: the mean of the losses of batches would be another number.
fn texts() -> (Tensor, Tensor) {
    let logits = (Tensor::arange(7 * 4 * 5, (Kind::Float, Device::Cpu)) * 0.7).sin().view([7, 4, 5]) * 3.0;
    let labels: Vec<i64> = (0..28).map(|at| if at % 4 > at / 4 { -100 } else { at % 5 }).collect();
    (logits, Tensor::from_slice(&labels).view([7, 4]))
}

#[test]
fn perplexity_is_that_of_all_tokens() {
    let (logits, labels) = texts();
    let (scores, wanted) = (logits.narrow(1, 0, 3).reshape([-1, 5]), labels.narrow(1, 1, 3).reshape([-1]));
    let mean = scores.cross_entropy_loss(&wanted, None::<Tensor>, Reduction::Mean, -100, 0.0).double_value(&[]);
    for world_size in [1, 2, 3] {
        let of_ranks = testing::ranks(world_size, Default::default(), |accelerator| {
            let rows = TensorDataset::new(texts())?;
            let loader = accelerator.prepare(DataLoader::builder(rows).batch_size(2).build()?)?;
            let mut perplexity = Perplexity::default();
            for batch in loader.iter()? {
                let (logits, labels) = batch?;
                perplexity.add_batch(&accelerator, &logits, &labels)?;
            }
            Ok(perplexity)
        });
        for perplexity in of_ranks.unwrap() {
            assert!((perplexity.mean_loss() - mean).abs() < 1e-6, "{world_size}: {} {mean}", perplexity.mean_loss());
            assert!((perplexity.compute() - mean.exp()).abs() < 1e-5);
        }
    }
}
