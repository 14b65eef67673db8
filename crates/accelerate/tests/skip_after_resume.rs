//! A program that is ported from Python skips batches by itself after `load_state`, which has brought its loader to its place already.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset, skip_first_batches};
use accelerate::{Accelerator, Error, Result};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span;

/// Keeps the warnings of one thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<String>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

impl Visit for Warnings {
    fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
        *self.0.lock().unwrap() += &format!("{value:?}");
    }
}

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
    let text = warnings.0.lock().unwrap().clone();
    (first.unwrap(), text)
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
