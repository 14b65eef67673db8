//! All ranks use the order of rank 0: ranks as threads that meet.

use super::*;
use crate::data::{BatchSampler, Sampler};
use std::sync::Barrier;

/// Tensors that the ranks of one process hand each other.
#[derive(Debug)]
struct Table {
    slots: Mutex<Vec<Option<Tensor>>>,
    barrier: Barrier,
}

#[derive(Debug)]
struct Seat {
    rank: usize,
    table: Arc<Table>,
}

impl Exchange for Seat {
    fn of_rank_zero(&self, tensor: &Tensor) -> Result<Tensor> {
        let all = self.of_all_ranks(tensor)?;
        assert_eq!(all[0].size(), tensor.size(), "a collective needs equal shapes");
        Ok(all[0].copy())
    }

    fn of_all_ranks(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        self.table.slots.lock().unwrap()[self.rank] = Some(tensor.copy());
        self.table.barrier.wait();
        let all = self.table.slots.lock().unwrap().iter().map(|slot| slot.as_ref().unwrap().copy()).collect();
        // Nobody may write again before all have read.
        self.table.barrier.wait();
        Ok(all)
    }
}

fn on_ranks<T: Send>(num_processes: usize, body: impl Fn(Place) -> T + Sync) -> Vec<T> {
    let table = Arc::new(Table {
        slots: Mutex::new((0..num_processes).map(|_| None).collect()),
        barrier: Barrier::new(num_processes),
    });
    std::thread::scope(|scope| {
        let run = |rank| {
            let exchange: Arc<dyn Exchange> = Arc::new(Seat { rank, table: Arc::clone(&table) });
            let place = Place { exchange: Some(exchange), ..place(rank, num_processes) };
            let body = &body;
            scope.spawn(move || body(place))
        };
        let threads: Vec<_> = (0..num_processes).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Two epochs of every rank's rows, all ranks together.
fn union(passes: Vec<Vec<Vec<i64>>>) -> Vec<Vec<i64>> {
    let num_epochs = passes[0].len();
    let of_epoch = |epoch: usize| {
        let mut rows: Vec<i64> = passes.iter().flat_map(|passes| passes[epoch].clone()).collect();
        rows.sort_unstable();
        rows
    };
    (0..num_epochs).map(of_epoch).collect()
}

fn two_epochs(loader: &NumberedShard) -> Vec<Vec<i64>> {
    (0..2).map(|_| pass(loader.iter().unwrap()).concat()).collect()
}

#[test]
fn shuffled_ranks_see_every_row_once() {
    // Ranks draw from the one default generator of this process in any order, so each has another seed.
    for use_seedable_sampler in [false, true] {
        let configuration = DataLoaderSettings { use_seedable_sampler, ..Default::default() };
        let passes = on_ranks(3, |place| {
            let loader = numbered(24).batch_size(4).shuffle(true).build().unwrap();
            two_epochs(&loader.prepare_at(place, &configuration).unwrap())
        });
        assert_ne!(passes[0][0], passes[0][1], "epochs differ");
        let all: Vec<i64> = (0..24).collect();
        assert_eq!(union(passes), [all.clone(), all]);
    }
}

#[test]
fn the_epoch_of_rank_zero_is_the_one_that_counts() {
    let configuration = DataLoaderSettings { use_seedable_sampler: true, data_seed: Some(3), ..Default::default() };
    let passes = on_ranks(2, |place| {
        let rank = place.share;
        let loader = numbered(10).shuffle(true).build().unwrap();
        let loader = loader.prepare_at(place, &configuration).unwrap();
        // A mistake: set_epoch on the main process only.
        if rank == 0 {
            loader.set_epoch(5);
        }
        vec![pass(loader.iter().unwrap()).concat()]
    });
    assert_eq!(union(passes), [(0..10).collect::<Vec<i64>>()]);
}

#[test]
fn samplers_that_differ_between_ranks_give_way_to_rank_zero() {
    struct Rotated(usize);
    impl Sampler for Rotated {
        fn len(&self) -> usize {
            8
        }
        fn indices(&self, epoch: usize) -> Result<Vec<usize>> {
            Ok((0..8).map(|row| (row + self.0 + epoch) % 8).collect())
        }
    }
    for rotation in [0, 3] {
        let passes = on_ranks(2, |place| {
            let sampler = Rotated(rotation * place.share);
            let loader = numbered(8).batch_size(2).sampler(sampler).build().unwrap();
            two_epochs(&loader.prepare_at(place, &DataLoaderSettings::default()).unwrap())
        });
        assert_eq!(passes[0], [[0, 1, 4, 5], [1, 2, 5, 6]], "rank 0 goes by its own sampler");
        assert_eq!(passes[1], [[2, 3, 6, 7], [3, 4, 7, 0]], "rank 1 goes by that of rank 0");
    }
}

#[test]
fn batch_samplers_that_differ_in_length_give_way_to_rank_zero() {
    struct Chunks(usize);
    impl BatchSampler for Chunks {
        fn len(&self) -> usize {
            6 / self.0
        }
        fn batches(&self, _: usize) -> Result<Vec<Vec<usize>>> {
            Ok((0..6).collect::<Vec<_>>().chunks(self.0).map(<[usize]>::to_vec).collect())
        }
    }
    let passes = on_ranks(2, |place| {
        let loader = numbered(6).batch_sampler(Chunks(1 + place.share)).build().unwrap();
        let loader = loader.prepare_at(place, &DataLoaderSettings::default()).unwrap();
        pass(loader.iter().unwrap())
    });
    assert_eq!(passes, [[[0], [2], [4]], [[1], [3], [5]]]);
}

#[test]
fn datasets_that_differ_in_length_are_refused_by_rank() {
    for use_seedable_sampler in [false, true] {
        let configuration = DataLoaderSettings { use_seedable_sampler, ..Default::default() };
        let messages = on_ranks(2, |place| {
            let loader = numbered(10 + place.share).shuffle(true).build().unwrap();
            let loader = loader.prepare_at(place, &configuration).unwrap();
            loader.iter().err().map(|error| error.to_string())
        });
        assert_eq!(messages[0], None);
        let message = messages[1].as_deref().unwrap();
        assert!(message.starts_with("rank 1 has 11 rows to shuffle, but rank 0 has 10;"), "{message}");
    }
}
