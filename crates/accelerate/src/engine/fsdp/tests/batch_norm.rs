//! Batch normalisation in mixed precision.

use super::{start, with_engine};
use crate::nn::{BatchNorm1d, Linear, ModuleFn, ParamStore};
use crate::{FloatType, FullyShardedDataParallelPlugin, MixedPrecisionPolicy, Result, ShardingStrategy, testing};
use accelerate_core::plan::Placement;
use tch::{Device, Kind, Tensor};

fn plugin(param_dtype: Option<FloatType>, sharding_strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        mixed_precision_policy: Some(MixedPrecisionPolicy { param_dtype, ..Default::default() }),
        sharding_strategy: Some(sharding_strategy),
        ..Default::default()
    }
}

/// A layer, and a normalisation whose weights are no numbers of bfloat16.
fn layers(store: &ParamStore) -> Result<(Linear, BatchNorm1d)> {
    let linear = Linear::new(store.root() / "linear", 3, 4, Default::default())?;
    let norm = BatchNorm1d::new(store.root() / "norm", 4, Default::default())?;
    for (name, param) in store.named_parameters() {
        let count = param.shape().iter().product::<i64>();
        let values = match name.starts_with("norm") {
            true => Tensor::f_full([count], 1.001, (Kind::Float, Device::Cpu))?,
            false => Tensor::f_arange(count, (Kind::Float, Device::Cpu))?.f_sin()?,
        };
        param.copy_(&values.f_view(&param.shape()[..])?)?;
    }
    Ok((linear, norm))
}

/// The sum of squares of what comes out.
fn loss(norm: &BatchNorm1d, hidden: &Tensor) -> Result<Tensor> {
    Ok(norm.forward(hidden)?.f_square()?.f_sum(Kind::Float)?)
}

#[test]
fn it_stays_in_its_own_element_type() {
    use ShardingStrategy::{FullShard, OptimizerState, ShardGradOp};
    for strategy in [FullShard, ShardGradOp, OptimizerState] {
        testing::ranks(2, Default::default(), move |accelerator| {
            let input = Tensor::f_arange(15, (Kind::Float, Device::Cpu))?.f_cos()?.f_view([5, 3])?;
            let input = input.f_to_kind(Kind::BFloat16)?;
            // What is computed where nothing is sharded: the layer in bfloat16, the normalisation in float32.
            let own = ParamStore::new(accelerator.device());
            let (linear, norm) = layers(&own)?;
            let [weight, bias] = [Some(&linear.weight), linear.bias.as_ref()]
                .map(|param| Ok::<_, crate::Error>(param.unwrap().get()?.f_to_kind(Kind::BFloat16)?));
            let hidden = input.f_linear(&weight?, Some(bias?))?;
            let wanted = loss(&norm, &hidden)?;
            torch_ext::autograd::backward(&[&wanted], None, Default::default())?;

            let store = ParamStore::new(accelerator.device());
            let (linear, sharded) = layers(&store)?;
            let engine = start(&accelerator, &store, &plugin(Some(FloatType::BFloat16), strategy))?;
            let statistics = sharded.running_var.clone();
            let module = ModuleFn::new(&store, move |input: &Tensor| loss(&sharded, &linear.forward(input)?));
            let model = with_engine(module, &engine, &accelerator);
            let found = model.forward(&input)?;
            torch_ext::autograd::backward(&[&found], None, Default::default())?;

            assert_eq!(found, wanted);
            assert_eq!(statistics.unwrap().get()?, norm.running_var.as_ref().unwrap().get()?);
            // Each rank has the shard of one of the two.
            let name = ["norm.weight", "norm.bias"][accelerator.process_index()];
            let gradients = [&store, &own].map(|store| store.get(name).unwrap().grad().unwrap());
            assert_eq!(gradients[0], gradients[1]);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn it_has_a_unit_of_its_own_only_where_others_change_theirs() {
    testing::ranks(2, Default::default(), |accelerator| {
        for (param_dtype, wanted) in [(None, [0, 0, 0, 0]), (Some(FloatType::BFloat16), [0, 0, 1, 1])] {
            let store = ParamStore::new(accelerator.device());
            let _layers = layers(&store)?;
            let engine = start(&accelerator, &store, &plugin(param_dtype, ShardingStrategy::FullShard))?;
            let units = wanted.map(|unit| Placement::Shard { unit });
            assert_eq!(engine.0.units.plan.placements, units);
        }
        Ok(())
    })
    .unwrap();
}
