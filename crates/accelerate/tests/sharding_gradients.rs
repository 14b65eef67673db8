//! Large weights of sharded models, whose gradients are made in pieces as they are sent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Embedding, Linear, LinearConfig, ModuleFn, Param, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, FullyShardedDataParallelPlugin, ShardingStrategy, testing};

/// A table that is embedding and head, a layer with a bias and one without, all with gradients of several pieces: the
/// parameters after some steps.
fn train_large_layers(plugin: Option<FullyShardedDataParallelPlugin>, accumulation: usize) -> Vec<Vec<f32>> {
    const WIDTH: i64 = 1024;
    let builder = Accelerator::builder().gradient_accumulation_steps(accumulation);
    let builder = plugin.map_or(builder.clone(), |plugin| builder.fsdp_plugin(plugin));
    testing::ranks(2, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let embed = Embedding::new(store.root() / "embed", 1101, WIDTH, Default::default())?;
        let head =
            Linear::from_params(store.root() / "head", (store.root() / "head").alias("weight", &embed.weight)?, None);
        let hidden = Linear::new(store.root() / "hidden", WIDTH, 1100, Default::default())?;
        let back = Linear::new(store.root() / "back", 1100, WIDTH, LinearConfig { bias: false, ..Default::default() })?;
        for (index, param) in store.parameters().iter().enumerate() {
            let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
            param.copy_(&(values.sin() * 0.05).reshape(param.shape()))?;
        }
        let module = ModuleFn::new(&store, move |tokens: &Tensor| {
            let rows = embed.forward(tokens)?;
            // One layer has an input without a gradient.
            let x = back.forward(&hidden.forward(&rows.f_detach()?)?.f_tanh()?)? + rows;
            head.forward(&x)
        });
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.5)?))?;
        let tokens = Tensor::from_slice(&[1i64, 7, 1100, 7, 7, accelerator.process_index() as i64]).view([2, 3]);
        for step in 0..4 {
            accelerator.accumulate(&model, || {
                let output = model.forward(&(&tokens - (step % 2)).abs())?;
                accelerator.backward(&output.f_square()?.f_mean(None)?)?;
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
        let state = store.state_dict()?;
        let values = |param: &Param| Vec::<f32>::try_from(state.get(param.name()).unwrap().reshape([-1])).unwrap();
        Ok(store.parameters().iter().map(values).collect::<Vec<_>>())
    })
    .unwrap()
    .swap_remove(0)
}

#[test]
fn gradients_that_are_made_in_pieces_are_those_that_are_made_whole() {
    for accumulation in [1, 2] {
        let wanted = train_large_layers(None, accumulation);
        assert!(wanted.iter().flatten().all(|value| value.is_finite()));
        assert_ne!(wanted[0][0], 0.0, "row 0 learns");
        for sharding_strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
            let plugin =
                FullyShardedDataParallelPlugin { sharding_strategy: Some(sharding_strategy), ..Default::default() };
            let found = train_large_layers(Some(plugin), accumulation);
            assert!(found == wanted, "accumulation {accumulation}, {sharding_strategy}");
        }
    }
}
