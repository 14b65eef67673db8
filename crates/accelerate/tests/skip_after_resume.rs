//! A program that is ported from Python skips batches by itself after `load_state`, which has brought its loader to its place already.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset, skip_first_batches};
use accelerate::{Accelerator, Error, Result};
use std::path::Path;
use warnings::Warnings;

mod warnings;

/// The first row that a run sees, and what it is warned of.
fn first_row(loaded: Option<&Path>, num_skipped: usize) -> (i64, String) {
    let warnings = Warnings::default();
    let first = tracing::subscriber::with_default(warnings.clone(), || -> Result<i64> {
        let accelerator = Accelerator::builder().cpu(true).build()?;
        let loader = DataLoader::builder(VecDataset::new((0..20_i64).collect())).batch_size(2).build()?;
        let loader = accelerator.prepare(loader)?;
        if let Some(folder) = loaded {
            accelerator.load_state(folder)?;
        }
        let batch = skip_first_batches(&loader, num_skipped).iter()?.next().unwrap()?;
        Ok(batch.int64_value(&[0]))
    });
    (first.unwrap(), warnings.taken().concat())
}

#[test]
fn batches_that_are_skipped_beside_those_of_a_checkpoint_are_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let loader = DataLoader::builder(VecDataset::new((0..20_i64).collect())).batch_size(2).build().unwrap();
    let loader = accelerator.prepare(loader).unwrap();
    let mut batches = loader.iter().unwrap();
    batches.by_ref().take(3).for_each(|batch| drop(batch.unwrap()));
    accelerator.save_state(folder.path()).unwrap();
    assert_eq!(first_row(None, 3), (6, String::new()));
    assert_eq!(first_row(Some(folder.path()), 0), (6, String::new()));
    let (row, warned) = first_row(Some(folder.path()), 3);
    assert_eq!(row, 12);
    assert!(warned.contains("goes on behind the 6 rows") && warned.contains("leaves out 3 batches"), "{warned}");
}

/// As the book says of loops that are left early: the rest of the pass comes first, unless the program says which epoch begins.
#[test]
fn a_pass_that_was_left_goes_on_unless_another_epoch_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = |next_epoch: Option<usize>, loads: bool| -> Result<i64> {
        let accelerator = Accelerator::builder().cpu(true).build()?;
        let loader = DataLoader::builder(VecDataset::new((0..20_i64).collect())).batch_size(2).build()?;
        let loader = accelerator.prepare(loader)?;
        if loads {
            accelerator.load_state(folder.path())?;
        } else {
            loader.iter()?.take(3).try_for_each(|batch| batch.map(drop))?;
            accelerator.save_state(folder.path())?;
        }
        next_epoch.iter().for_each(|epoch| loader.set_epoch(*epoch));
        let batch = loader.iter()?.next().unwrap()?;
        Ok(batch.int64_value(&[0]))
    };
    assert_eq!((run(None, false).unwrap(), run(None, true).unwrap()), (0, 6));
    assert_eq!((run(Some(1), false).unwrap(), run(Some(1), true).unwrap()), (0, 0));
}

/// The way back from an empty word, as of a variable that is not set.
#[test]
fn a_checkpoint_has_a_folder_that_does_not_move() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let error: Error = accelerator.save_state("").unwrap_err();
    assert!(error.is_checkpoint() && error.to_string().contains("without a folder"), "{error}");
    let folder = tempfile::tempdir_in(".").unwrap();
    let relative = Path::new(folder.path().file_name().unwrap()).join("checkpoint");
    let saved = accelerator.save_state(&*relative).unwrap();
    assert!(saved.is_absolute() && saved.ends_with(&relative), "{}", saved.display());
}
