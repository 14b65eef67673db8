//! Loaders, seen from the inside: several ranks in one process, and what they tell the gradient state.

mod agreement;
mod golden;
mod passes;
mod shares;
mod workers;

use super::agreement::Exchange;
use super::shard::Place;
use super::share::Shares;
use super::{DataLoader, DataLoaderBuilder, DataLoaderShard, DefaultCollate, VecDataset};
use crate::Result;
use crate::session::GradientState;
use accelerate_core::config::DataLoaderSettings;
use accelerate_core::mesh::Mesh;
use std::sync::{Arc, Mutex};
use tch::Tensor;

/// A loader over rows that hold their own number.
fn numbered(num_rows: usize) -> DataLoaderBuilder<VecDataset<i64>, DefaultCollate> {
    DataLoader::builder(VecDataset::new((0..num_rows as i64).collect()))
}

type Numbered = DataLoader<Tensor>;
type NumberedShard = DataLoaderShard<Tensor>;

fn rows_of(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// The rows of a whole pass, batch by batch.
fn pass(batches: impl Iterator<Item = Result<Tensor>>) -> Vec<Vec<i64>> {
    batches.map(|batch| rows_of(&batch.unwrap())).collect()
}

/// Is the innermost loop at its last batch?
fn at_end(state: &GradientState) -> bool {
    state.active_position().is_some_and(|position| position.end_of_dataloader)
}

fn place(rank: usize, num_processes: usize) -> Place {
    Place {
        share: rank,
        shares: Shares::of_mesh(&Mesh::replicated(num_processes)),
        gradient_state: GradientState::new(Default::default(), Default::default()).unwrap(),
        exchange: None,
        dispatch: None,
        rng_types: Vec::new(),
        device: None,
    }
}

/// The share of one rank of many, none of which exists.
fn shard(loader: Numbered, rank: usize, num_processes: usize, configuration: &DataLoaderSettings) -> NumberedShard {
    loader.prepare_at(place(rank, num_processes), configuration).unwrap()
}

/// What rank 0 said, for ranks that run after it.
#[derive(Clone, Debug, Default)]
struct Recording(Arc<Mutex<Vec<Tensor>>>);

impl Recording {
    fn exchange(&self, rank: usize) -> Arc<dyn Exchange> {
        Arc::new(Replay { rank, said: self.clone(), position: Mutex::new(0) })
    }
}

#[derive(Debug)]
struct Replay {
    rank: usize,
    said: Recording,
    position: Mutex<usize>,
}

impl Exchange for Replay {
    fn of_rank_zero(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut said = self.said.0.lock().unwrap();
        if self.rank == 0 {
            said.push(tensor.copy());
        }
        let mut position = self.position.lock().unwrap();
        *position += 1;
        Ok(said[*position - 1].copy())
    }

    fn of_all_ranks(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        Ok(vec![tensor.copy()])
    }
}
