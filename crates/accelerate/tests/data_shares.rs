//! Ranks that share their rows with others, on real ranks: threads connected by Gloo.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{
    DataLoader, DataLoaderConfiguration, DataLoaderShard, IterableDataset, LoaderKind, RowStream, Rows, VecDataset,
};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, PrepareDataLoaderOptions, Result, testing};

struct Numbers(i64);

impl IterableDataset for Numbers {
    type Item = i64;
    fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
        Ok(Box::new(Rows((0..self.0).map(Ok))))
    }
}

fn rows_of(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// The batches of this rank, and all that metrics gather.
fn pass<K: LoaderKind>(
    accelerator: &Accelerator,
    loader: &DataLoaderShard<Tensor, K>,
) -> Result<(Vec<Vec<i64>>, Vec<i64>)> {
    let (mut batches, mut gathered) = (Vec::new(), Vec::new());
    for batch in loader.iter()? {
        let batch = batch?;
        let rows = rows_of(&accelerator.gather_for_metrics(&batch)?);
        assert_eq!(accelerator.gather_object_for_metrics(&rows_of(&batch))?, rows);
        gathered.extend(rows);
        batches.push(rows_of(&batch));
    }
    Ok((batches, gathered))
}

fn of_two(share: usize) -> PrepareDataLoaderOptions {
    PrepareDataLoaderOptions { num_processes: Some(2), process_index: Some(share) }
}

/// With `share(rank)` of two, four ranks run through `num_rows` rows, shuffled or dispatched.
fn four_ranks(dispatch: bool, num_rows: i64, share: fn(usize) -> usize) -> Vec<(Vec<Vec<i64>>, Vec<i64>)> {
    testing::ranks(4, Default::default(), move |accelerator| {
        let configuration = DataLoaderConfiguration { dispatch_batches: Some(dispatch), ..Default::default() };
        let accelerator = Accelerator::builder().dataloader_config(configuration).build_from(&accelerator)?;
        let share = share(accelerator.process_index());
        if dispatch {
            let loader = DataLoader::iterable(Numbers(num_rows)).batch_size(2).build()?;
            return pass(&accelerator, &accelerator.prepare_data_loader(loader, of_two(share))?);
        }
        let rows = VecDataset::new((0..num_rows).collect());
        let loader = DataLoader::builder(rows).batch_size(2).shuffle(true).build()?;
        pass(&accelerator, &accelerator.prepare_data_loader(loader, of_two(share))?)
    })
    .unwrap()
}

#[test]
fn ranks_of_one_share_get_the_same_batches_and_rows_count_once() {
    type Share = fn(usize) -> usize;
    let shares: [(&str, Share); 3] =
        [("blocks", |rank| rank / 2), ("in turns", |rank| rank % 2), ("rank 0 has the second", |rank| 1 - rank / 2)];
    for (name, share) in shares {
        for dispatch in [false, true] {
            let seen = four_ranks(dispatch, 7, share);
            for (rank, (batches, gathered)) in seen.iter().enumerate() {
                let twin = (0..4).find(|other| share(*other) == share(rank)).unwrap();
                assert_eq!(*batches, seen[twin].0, "{name}, dispatch {dispatch}, rank {rank}");
                assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2], "{name}, dispatch {dispatch}");
                assert_eq!(*gathered, seen[0].1, "{name}, dispatch {dispatch}, rank {rank}");
                let mut sorted = gathered.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..7).collect::<Vec<_>>(), "{name}, dispatch {dispatch}, rank {rank}");
            }
        }
    }
}

#[test]
fn shares_that_do_not_fit_are_an_error_on_every_rank() {
    testing::ranks(3, Default::default(), |accelerator| {
        let loader = DataLoader::builder(VecDataset::new(vec![1i64, 2])).build()?;
        let error = accelerator.prepare_data_loader(loader, of_two(accelerator.process_index() % 2)).unwrap_err();
        assert!(error.is_data() && error.to_string().contains("2 of 3 ranks want share 0"), "{error}");
        Ok(())
    })
    .unwrap();
}
