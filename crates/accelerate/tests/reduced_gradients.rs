//! Which backward pass reduces gradients, and what ranks that have not reduced them keep in checkpoints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{Init, Module, ModuleFn, Param, ParamStore};
use accelerate::optim::{AdamW, Sgd};
use accelerate::tch::Tensor;
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AcceleratorBuilder, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, JoinOptions,
    LocalSGD, PreparedModel, Result, ShardingStrategy,
};
use rstest::rstest;

/// A model of two numbers, one for each of two shards, which it multiplies its input by.
fn model(accelerator: &Accelerator) -> Result<(PreparedModel<impl Module<Input = Tensor, Output = Tensor>>, Param)> {
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([2], Init::Ones))?;
    let own = weight.clone();
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| Ok(own.get()? * x)))?;
    Ok((model, weight))
}

/// Ones on rank 0, threes on rank 1.
fn input(accelerator: &Accelerator) -> Tensor {
    Tensor::from_slice(&[2.0 * accelerator.process_index() as f32 + 1.0; 2])
}

fn gradient(weight: &Param) -> Option<f64> {
    weight.grad().map(|gradient| gradient.double_value(&[0]))
}

fn static_graph(is_static: bool) -> AcceleratorBuilder {
    let kwargs = DistributedDataParallelKwargs { static_graph: Some(is_static), ..Default::default() };
    Accelerator::builder().kwargs_handler(kwargs)
}

/// What is computed between the forward pass of a model and its backward pass.
#[derive(Clone, Copy, Debug)]
enum Between {
    Nothing,
    LossOfNoModel,
    ForwardOfAnother,
    ForwardAndBackwardOfAnother,
    BackwardOfAnotherBehindThis,
}

fn sharded(sharding_strategy: ShardingStrategy) -> AcceleratorBuilder {
    let sharding_strategy = Some(sharding_strategy);
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin { sharding_strategy, ..Default::default() })
}

#[rstest]
fn gradients_are_reduced_in_the_backward_pass_of_their_own_model(
    #[values(
        static_graph(true),
        static_graph(false),
        sharded(ShardingStrategy::FullShard),
        sharded(ShardingStrategy::ShardGradOp)
    )]
    builder: AcceleratorBuilder,
    #[values(
        Between::Nothing,
        Between::LossOfNoModel,
        Between::ForwardOfAnother,
        Between::ForwardAndBackwardOfAnother,
        Between::BackwardOfAnotherBehindThis
    )]
    between: Between,
) {
    let found = ranks(2, builder, |accelerator| {
        let ((first, weight), (second, other)) = (model(&accelerator)?, model(&accelerator)?);
        let x = input(&accelerator);
        for step in 1..=3 {
            let output = first.forward(&x)?;
            let of_second = match between {
                Between::Nothing => None,
                Between::LossOfNoModel => {
                    let leaf = Tensor::from_slice(&[1f32]).set_requires_grad(true);
                    accelerator.backward(&(leaf * 2.0).sum(None))?;
                    None
                }
                Between::ForwardOfAnother => Some(second.forward(&x)?),
                Between::ForwardAndBackwardOfAnother => {
                    accelerator.backward(&second.forward(&x)?.sum(None))?;
                    None
                }
                Between::BackwardOfAnotherBehindThis => {
                    accelerator.backward(&second.forward(&output.detach())?.sum(None))?;
                    None
                }
            };
            accelerator.backward(&output.sum(None))?;
            of_second.map_or(Ok(()), |output| accelerator.backward(&output.sum(None)))?;
            assert_eq!(
                gradient(&weight),
                Some(2.0 * f64::from(step)),
                "{between:?} rank {}",
                accelerator.process_index()
            );
            if !matches!(between, Between::Nothing | Between::LossOfNoModel) {
                assert_eq!(
                    gradient(&other),
                    Some(2.0 * f64::from(step)),
                    "{between:?} rank {}",
                    accelerator.process_index()
                );
            }
        }
        Ok(())
    });
    found.unwrap();
}

#[test]
fn a_triggered_reduction_is_for_one_backward_pass() {
    let found = ranks(2, Default::default(), |accelerator| {
        let (model, weight) = model(&accelerator)?;
        let x = input(&accelerator);
        let own = x.double_value(&[0]);
        let pass = |triggers: bool| {
            weight.local().zero_grad();
            let output = model.forward(&x)?;
            if triggers {
                accelerator.trigger_sync_in_backward(&model)?;
            }
            accelerator.backward(&output.sum(None))?;
            Ok(gradient(&weight).unwrap())
        };
        let passes = || -> Result<Vec<f64>> { [false, true, false, true, false].into_iter().map(pass).collect() };
        assert_eq!(accelerator.no_sync(&model, passes)?, [own, 2.0, own, 2.0, own]);
        assert_eq!(pass(false)?, 2.0);
        let local = LocalSGD::new(&accelerator, &model, 8)?;
        assert_eq!(passes()?, [own, 2.0, own, 2.0, own]);
        local.finish()?;
        assert_eq!(pass(false)?, 2.0);
        // One that no backward pass has used ends with the block.
        accelerator.no_sync(&model, || accelerator.trigger_sync_in_backward(&model))?;
        assert_eq!([pass(false)?, pass(false)?], [2.0, 2.0]);
        Ok(())
    });
    found.unwrap();
}

#[test]
fn a_triggered_reduction_before_the_first_one_of_a_static_graph_is_refused() {
    let found = ranks(2, static_graph(true), |accelerator| {
        let (model, _weight) = model(&accelerator)?;
        accelerator.no_sync(&model, || {
            let _output = model.forward(&input(&accelerator))?;
            let error = accelerator.trigger_sync_in_backward(&model).unwrap_err().to_string();
            assert!(error.contains("static_graph") && error.contains("set static_graph to false"), "{error}");
            Ok(())
        })
    });
    found.unwrap();
}

/// The first micro-batch of a window uses one parameter, the second another one, with a checkpoint between them.
#[test]
fn a_resumed_window_reduces_what_was_used_before() {
    let folder = tempfile::tempdir().unwrap();
    let kwargs = DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..Default::default() };
    let builder = Accelerator::builder().gradient_accumulation_steps(2).kwargs_handler(kwargs);
    for resumes in [false, true] {
        let found = ranks(2, builder.clone(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let [first, second] = ["first", "second"].map(|name| store.root().param(name, ([1], Init::Ones)).unwrap());
            let params = [first.clone(), second.clone()];
            let module = ModuleFn::new(&store, move |(x, place): &(Tensor, usize)| Ok(params[*place].get()? * x));
            let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.25)?))?;
            let mut micro_batch = |place: usize| {
                accelerator.accumulate(&model, || {
                    accelerator.backward(&model.forward(&(input(&accelerator), place))?.sum(None))?;
                    optimizer.step()?;
                    optimizer.zero_grad()
                })
            };
            if resumes {
                accelerator.load_state(folder.path())?;
            } else {
                micro_batch(0)?;
                accelerator.save_state(folder.path())?;
            }
            micro_batch(1)?;
            // A micro-batch counts half, and its loss is the sum of two numbers: the mean over ranks is 2.
            Ok([&first, &second].map(|param| param.local().double_value(&[0])))
        });
        assert_eq!(found.unwrap(), [[0.5, 0.5]; 2], "resumes: {resumes}");
    }
}

/// How ranks come to have optimizers of different states.
#[derive(Clone, Copy, Debug)]
enum Apart {
    Join,
    StepsWithinNoSync,
    /// On one rank alone.
    LastStepWithinNoSync,
}

#[rstest]
fn states_of_optimizers_that_differ_are_kept_for_each_rank(
    #[values(Apart::Join, Apart::StepsWithinNoSync, Apart::LastStepWithinNoSync)] apart: Apart,
) {
    let folder = tempfile::tempdir().unwrap();
    let numbers = |accelerator: Accelerator, loads: Option<&str>, saves: &str| {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([1], Init::Ones))?;
        let own = weight.clone();
        let loader = DataLoader::builder(VecDataset::new(vec![1f32, 2.0, 4.0, 8.0, 16.0])).build()?;
        let module = ModuleFn::new(&store, move |x: &Tensor| Ok(own.get()? * x));
        let (model, mut optimizer, loader) = accelerator.prepare((module, AdamW::new(&store, 0.1)?, loader))?;
        if let Some(name) = loads {
            accelerator.load_state(folder.path().join(name))?;
        } else {
            let mut step = |x: &Tensor| {
                accelerator.backward(&model.forward(x)?.sum(None))?;
                optimizer.step()?;
                optimizer.zero_grad()
            };
            let x = input(&accelerator);
            match apart {
                Apart::Join => {
                    accelerator.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || {
                        loader.iter()?.try_for_each(|batch| step(&batch?))
                    })?
                }
                Apart::StepsWithinNoSync => accelerator.no_sync(&model, || step(&x))?,
                Apart::LastStepWithinNoSync => {
                    step(&x)?;
                    if accelerator.process_index() == 1 {
                        accelerator.no_sync(&model, || step(&x))?;
                    }
                }
            }
        }
        accelerator.save_state(folder.path().join(saves))?;
        let state = optimizer.state_dict()?;
        let states = state.tensors.iter().map(|(name, it)| (name.clone(), it.view([-1]).double_value(&[0])));
        Ok((states.collect::<Vec<_>>(), weight.local().double_value(&[0])))
    };
    let before = ranks(2, Default::default(), |accelerator| numbers(accelerator, None, "first")).unwrap();
    assert_ne!(before[0].0, before[1].0, "states that differ");
    // A checkpoint of what was loaded keeps them as well.
    for (loads, saves) in [("first", "second"), ("second", "third")] {
        let found = ranks(2, Default::default(), |accelerator| numbers(accelerator, Some(loads), saves)).unwrap();
        assert_eq!(found, before, "{apart:?} from the {loads}");
    }
}

/// An optimizer without state says nothing of what ranks have trained by themselves: their parameters do.
#[test]
fn parameters_that_differ_are_kept_for_each_rank_without_a_state_of_the_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = |accelerator: Accelerator, loads: Option<&str>, saves: &str| {
        let store = ParamStore::new(accelerator.device());
        let params = ["weight", "bias"].map(|name| store.root().param(name, ([1], Init::Ones)).unwrap());
        let [weight, bias] = params.clone();
        let module = ModuleFn::new(&store, move |x: &Tensor| Ok(weight.get()? * x + bias.get()? * x));
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
        match loads {
            Some(name) => drop(accelerator.load_state(folder.path().join(name))?),
            None => accelerator.no_sync(&model, || {
                accelerator.backward(&model.forward(&input(&accelerator))?.sum(None))?;
                optimizer.step()
            })?,
        }
        accelerator.save_state(folder.path().join(saves))?;
        Ok(params.map(|param| param.local().double_value(&[0])))
    };
    let before = ranks(2, Default::default(), |accelerator| numbers(accelerator, None, "first")).unwrap();
    assert!(before[0][0] != before[1][0] && before[0][1] != before[1][1], "{before:?}");
    for (loads, saves) in [("first", "second"), ("second", "third")] {
        let found = ranks(2, Default::default(), |accelerator| numbers(accelerator, Some(loads), saves)).unwrap();
        assert_eq!(found, before, "from the {loads}");
    }
}
