//! State in blocks of 8 bits goes on on any number of ranks and with any sharding: to the bit where no block is cut otherwise.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, LinearConfig, Module, ModuleFn, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AdamW8bit, Optimizer};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, PreparedModel, Result, ShardingStrategy,
    StateDictType, testing,
};
use rstest::rstest;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Numbers by name.
type Numbers = BTreeMap<String, Vec<f64>>;

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW8bit>,
}

/// A weight in 18 blocks of 256 numbers, with a bias behind it, so that no number of ranks but one cuts between blocks.
const ODD: (i64, bool) = (72, true);
/// A weight in 16 blocks, which two and four ranks divide evenly.
const EVEN: (i64, bool) = (64, false);

fn training(
    accelerator: Accelerator,
    (width, bias): (i64, bool),
) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 64, width, LinearConfig { bias, ..Default::default() })?;
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.1).reshape(param.shape()))?;
    }
    let optimizer = AdamW8bit::new(&store, 0.01)?;
    let module = ModuleFn::new(&store, move |rows: &Tensor| linear.forward(rows));
    let (model, optimizer) = accelerator.prepare((module, optimizer))?;
    Ok(Training { accelerator, model, optimizer })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    fn train(&mut self, steps: Range<i64>) -> Result<Vec<f64>> {
        let mut losses = Vec::new();
        for step in steps {
            let rows = (Tensor::arange(8 * 64, (Kind::Float, Device::Cpu)) * 0.3 + step as f64).sin().view([8, 64]);
            let loss = self.model.forward(&rows)?.f_square()?.f_mean(Kind::Float)?;
            losses.push(loss.f_double_value(&[])?);
            self.accelerator.backward(&loss)?;
            self.optimizer.step()?;
            self.optimizer.zero_grad()?;
        }
        Ok(losses)
    }

    /// What the averages are, of full parameters. Collective where they are sharded.
    fn numbers(&self) -> Result<Numbers> {
        let full = self.optimizer.full_state_dict()?.tensors;
        let numbers = |(name, tensor): (String, Tensor)| {
            Ok((name, Vec::try_from(&tensor.f_to_kind(Kind::Double)?.f_view([-1])?)?))
        };
        // Of a model that is not sharded they are codes.
        AdamW8bit::new(self.model.params(), 0.1)?.dequantized(full)?.into_iter().map(numbers).collect()
    }

    /// Codes and scales, as this rank keeps them.
    fn kept(&self) -> Result<Numbers> {
        let numbers = |(name, tensor): (String, Tensor)| {
            Ok((name, Vec::try_from(&tensor.f_to_kind(Kind::Double)?.f_view([-1])?)?))
        };
        self.optimizer.state_dict()?.tensors.into_iter().map(numbers).collect()
    }
}

fn sharded(strategy: ShardingStrategy, state_dict_type: StateDictType) -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin {
        sharding_strategy: Some(strategy),
        state_dict_type: Some(state_dict_type),
        ..Default::default()
    })
}

/// Trains three steps and saves, on so many ranks; the numbers of each.
fn save(
    folder: &Path,
    world_size: usize,
    builder: AcceleratorBuilder,
    model: (i64, bool),
) -> Vec<(Numbers, Numbers, Vec<f64>)> {
    testing::ranks(world_size, builder, |accelerator| {
        let mut training = training(accelerator, model)?;
        training.train(0..3)?;
        training.accelerator.save_state(folder)?;
        let (numbers, kept) = (training.numbers()?, training.kept()?);
        Ok((numbers, kept, training.train(3..6)?))
    })
    .unwrap()
}

fn load(
    folder: &Path,
    world_size: usize,
    builder: AcceleratorBuilder,
    model: (i64, bool),
) -> Vec<(Numbers, Numbers, Vec<f64>)> {
    testing::ranks(world_size, builder, |accelerator| {
        let mut training = training(accelerator, model)?;
        // Other numbers than those of the checkpoint, in the memory that it is read into.
        training.train(10..11)?;
        training.accelerator.load_state(folder)?;
        let (numbers, kept) = (training.numbers()?, training.kept()?);
        Ok((numbers, kept, training.train(3..6)?))
    })
    .unwrap()
}

/// How far the numbers of both are apart, by the largest of each tensor. Steps are the same.
fn apart(one: &Numbers, other: &Numbers) -> f64 {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let mut farthest: f64 = 0.0;
    for (name, numbers) in one {
        assert_eq!(numbers.len(), other[name].len(), "{name}");
        let largest = numbers.iter().fold(f64::MIN_POSITIVE, |largest, number| largest.max(number.abs()));
        for (one, other) in numbers.iter().zip(&other[name]) {
            farthest = farthest.max((one - other).abs() / largest);
        }
    }
    farthest
}

use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};
use StateDictType::{Full, Sharded};

#[rstest]
#[case::ddp(2, Accelerator::builder())]
#[case::full_shard(2, sharded(FullShard, Sharded))]
#[case::full_shard_on_three(3, sharded(FullShard, Sharded))]
#[case::shard_grad_op(4, sharded(ShardGradOp, Sharded))]
#[case::no_shard(2, sharded(NoShard, Sharded))]
fn the_same_ranks_go_on_to_the_bit(
    #[case] world_size: usize,
    #[case] builder: AcceleratorBuilder,
    #[values(ODD, EVEN)] model: (i64, bool),
) {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(folder.path(), world_size, builder.clone(), model);
    let loaded = load(folder.path(), world_size, builder, model);
    for (saved, loaded) in saved.iter().zip(&loaded) {
        assert_eq!(saved.1, loaded.1, "codes and scales");
        assert_eq!(saved.2, loaded.2, "losses");
    }
}

/// Half of the distance of two codes is 0.0071 of the largest in a block.
const ROUNDED: f64 = 0.0072;

#[rstest]
#[case::two_to_one(2, sharded(FullShard, Sharded), 1, sharded(FullShard, Sharded))]
#[case::two_to_three(2, sharded(FullShard, Sharded), 3, sharded(FullShard, Sharded))]
#[case::three_to_four(3, sharded(ShardGradOp, Sharded), 4, sharded(FullShard, Sharded))]
#[case::shards_to_whole(2, sharded(FullShard, Sharded), 2, Accelerator::builder())]
#[case::whole_to_shards(2, Accelerator::builder(), 2, sharded(FullShard, Sharded))]
#[case::whole_to_alone(2, Accelerator::builder(), 1, Accelerator::builder())]
#[case::alone_to_shards(1, Accelerator::builder(), 4, sharded(ShardGradOp, Sharded))]
#[case::hybrid(4, sharded(HybridShard, Sharded), 3, sharded(FullShard, Sharded))]
#[case::full_to_the_same(2, sharded(FullShard, Full), 2, sharded(FullShard, Full))]
#[case::full_to_three(2, sharded(FullShard, Full), 3, sharded(FullShard, Sharded))]
#[case::full_to_whole(3, sharded(FullShard, Full), 2, Accelerator::builder())]
#[case::full_from_one(1, sharded(FullShard, Full), 2, sharded(FullShard, Full))]
fn other_ranks_go_on_with_the_same_numbers(
    #[case] from: usize,
    #[case] saver: AcceleratorBuilder,
    #[case] to: usize,
    #[case] loader: AcceleratorBuilder,
    #[values(ODD, EVEN)] model: (i64, bool),
) {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(folder.path(), from, saver, model);
    for (numbers, _, losses) in load(folder.path(), to, loader, model) {
        let apart = apart(&saved[0].0, &numbers);
        assert!(apart <= ROUNDED, "{apart}");
        let differs = losses.iter().zip(&saved[0].2).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
        assert!(differs < 0.02, "{losses:?} here and {:?} there", saved[0].2);
    }
}

/// No block is cut, so that nothing is rounded.
#[rstest]
#[case::two_to_four(2, sharded(FullShard, Sharded), 4, sharded(FullShard, Sharded))]
#[case::four_to_one(4, sharded(ShardGradOp, Sharded), 1, sharded(FullShard, Sharded))]
#[case::whole_to_shards(2, Accelerator::builder(), 2, sharded(FullShard, Sharded))]
#[case::shards_to_whole(4, sharded(FullShard, Sharded), 1, Accelerator::builder())]
fn blocks_that_are_not_cut_stay_what_they_are(
    #[case] from: usize,
    #[case] saver: AcceleratorBuilder,
    #[case] to: usize,
    #[case] loader: AcceleratorBuilder,
) {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(folder.path(), from, saver, EVEN);
    for (numbers, _, losses) in load(folder.path(), to, loader, EVEN) {
        assert_eq!(saved[0].0, numbers);
        let differs = losses.iter().zip(&saved[0].2).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
        assert!(differs < 1e-4, "{losses:?} here and {:?} there", saved[0].2);
    }
}
