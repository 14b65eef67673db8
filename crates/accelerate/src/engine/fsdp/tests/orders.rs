//! Passes use units in one order, and what counts as another one.

use super::*;
use crate::session::Engine;

#[test]
fn another_order_is_an_error_unless_it_may_change() {
    use BackwardPrefetch::{BackwardPre, NoPrefetch};
    for (forward_prefetch, backward_prefetch, dynamic) in
        [(true, NoPrefetch, false), (false, BackwardPre, false), (true, NoPrefetch, true), (false, NoPrefetch, false)]
    {
        let may_change = dynamic || (!forward_prefetch && backward_prefetch == NoPrefetch);
        let plugin = FullyShardedDataParallelPlugin {
            forward_prefetch: Some(forward_prefetch),
            backward_prefetch: Some(backward_prefetch),
            dynamic: Some(dynamic),
            direct_all_gather: Some(false),
            ..Default::default()
        };
        testing::ranks(2, Default::default(), |accelerator| {
            let reversed = Arc::new(Mutex::new(false));
            let (_, engine, model) = steered(&accelerator, &plugin, Arc::clone(&reversed), Arc::default())?;
            let input = Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu));
            let wanted = model.forward(&input)?;
            assert_eq!(model.forward(&input)?, wanted);
            *reversed.lock().unwrap() = true;
            match model.forward(&input) {
                Ok(output) => {
                    assert!(may_change, "another order went by");
                    assert_eq!(output, wanted);
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(!may_change && text.contains("the order unit 1 (layers.1), unit 0 (layers.0)"), "{text}");
                }
            }
            assert!(engine.0.units.num_unsharded_and_arriving().1 == 0);
            Ok(())
        })
        .unwrap();
    }
}

/// Units that are unsharded already are used in that order, too, and passes that fail or are without gradients have none.
#[test]
fn one_order_of_use_is_one_order_whatever_is_gathered() {
    use ShardingStrategy::{FullShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};
    for strategy in [FullShard, ShardGradOp, OptimizerState, OptimizerStateAndGradients] {
        let plugin = FullyShardedDataParallelPlugin {
            sharding_strategy: Some(strategy),
            backward_prefetch: Some(BackwardPrefetch::BackwardPre),
            forward_prefetch: Some(true),
            direct_all_gather: Some(false),
            ..Default::default()
        };
        for world_size in [1, 2] {
            testing::ranks(world_size, Default::default(), |accelerator| {
                let (_, engine, model) = steered(&accelerator, &plugin, Arc::default(), Arc::default())?;
                let input = Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu));
                for _ in 0..2 {
                    // Two micro-batches, two passes before one backward pass, a step, an evaluation, and one that fails.
                    for syncs in [false, true] {
                        Engine::set_gradient_sync(&engine, syncs);
                        let losses = [model.forward(&input)?.f_sum(None)?, model.forward(&input)?.f_sum(None)?];
                        torch_ext::autograd::backward(&[&losses[0], &losses[1]], None, Default::default())?;
                        Engine::after_backward(&engine)?;
                    }
                    Engine::before_step(&engine)?;
                    let _output = tch::no_grad(|| model.forward(&input))?;
                    let error = model.forward(&Tensor::ones([1, 4], (Kind::Float, tch::Device::Cpu))).unwrap_err();
                    assert!(error.to_string().contains("layers.0"), "{strategy}: {error}");
                }
                Ok(())
            })
            .unwrap();
        }
    }
}
