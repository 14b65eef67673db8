//! Data-parallel models whose steps do not all train the same parameters, or do not all reduce.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{BatchNorm1d, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor, no_grad};
use accelerate::{Accelerator, DistributedDataParallelKwargs, Result, testing};
use rstest::rstest;

const WIDTH: i64 = 4;

fn input(rank: usize, step: usize) -> Tensor {
    let start = (rank * 7 + step * 3) as i64;
    (Tensor::arange_start(start, start + 2 * WIDTH, (Kind::Float, accelerate::tch::Device::Cpu)) * 0.37)
        .sin()
        .view([2, WIDTH])
}

/// The usual reason for `find_unused_parameters`: heads that take turns. libtorch notes when the unused ones are others.
#[rstest]
#[case::copied(false)]
#[case::views(true)]
fn heads_that_take_turns_get_the_mean_of_all_ranks(#[case] gradient_as_bucket_view: bool) {
    let kwargs = DistributedDataParallelKwargs {
        find_unused_parameters: Some(true),
        gradient_as_bucket_view: Some(gradient_as_bucket_view),
        ..Default::default()
    };
    let trained = |num_ranks: usize| {
        let builder = Accelerator::builder().cpu(true).kwargs_handler(kwargs.clone());
        testing::ranks(num_ranks, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let heads: Vec<Linear> = (0..2)
                .map(|head| Linear::new(store.root() / "heads" / head, WIDTH, 1, Default::default()))
                .collect::<Result<_>>()?;
            for param in store.parameters() {
                param.copy_(&Tensor::full(&*param.shape(), 0.1, (Kind::Float, accelerator.device())))?;
            }
            let model = ModuleFn::new(&store, move |(head, x): &(usize, Tensor)| heads[*head].forward(x));
            let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
            for step in 0..5 {
                // One rank takes the rows of all, so that its mean is that of the others.
                let rows: Vec<Tensor> = match accelerator.num_processes() {
                    1 => (0..2).map(|rank| input(rank, step)).collect(),
                    _ => vec![input(accelerator.process_index(), step)],
                };
                let output = model.forward(&(step % 2, Tensor::cat(&rows, 0)))?;
                accelerator.backward(&output.square().mean(Kind::Float))?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            let state = model.params().state_dict()?;
            Ok(Tensor::cat(&state.iter().map(|(_, tensor)| tensor.reshape(-1)).collect::<Vec<_>>(), 0).detach())
        })
    };
    let (alone, together) = (trained(1).unwrap(), trained(2).unwrap());
    for of_rank in &together {
        assert!(of_rank.allclose(&alone[0], 1e-6, 1e-7, false), "{of_rank:?} {:?}", alone[0]);
    }
}

/// Nothing would average its gradients, and ranks would drift apart.
#[test]
fn what_was_frozen_for_several_ranks_is_not_unfrozen() {
    for (num_ranks, are_all_frozen) in [(2, false), (2, true), (1, false)] {
        testing::ranks(num_ranks, Accelerator::builder().cpu(true), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let body = Linear::new(store.root() / "body", WIDTH, WIDTH, Default::default())?;
            let head = Linear::new(store.root() / "head", WIDTH, 1, Default::default())?;
            let (weight, of_head) = (body.weight.clone(), head.weight.clone());
            let frozen = store.parameters().into_iter().filter(|it| are_all_frozen || it.name().starts_with("body"));
            frozen.collect::<Vec<_>>().iter().try_for_each(|param| param.set_requires_grad(false))?;
            let model = ModuleFn::new(&store, move |x: &Tensor| head.forward(&body.forward(x)?));
            let model = accelerator.prepare(model)?;
            let unfrozen = weight.set_requires_grad(true);
            if num_ranks == 1 {
                unfrozen?;
                return Ok(());
            }
            let error = unfrozen.unwrap_err().to_string();
            assert!(error.starts_with("body.weight was frozen when the model was prepared"), "{error}");
            assert!(!weight.requires_grad());
            // It is what it was, and what ranks average may be frozen for a while.
            weight.set_requires_grad(false)?;
            if !are_all_frozen {
                of_head.set_requires_grad(false)?;
                of_head.set_requires_grad(true)?;
            }
            // With the model taken back it can be changed.
            drop(model.into_inner());
            weight.set_requires_grad(true)
        })
        .unwrap();
    }
}

/// Each rank has statistics of its own there, and the next pass of the run that saved leaves them to it.
#[test]
fn buffers_go_on_in_the_middle_of_a_window() {
    let folder = tempfile::tempdir().unwrap();
    let builder = || Accelerator::builder().cpu(true).gradient_accumulation_steps(3);
    let run = |steps: std::ops::Range<usize>, saves: bool| {
        testing::ranks(2, builder(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let norm = BatchNorm1d::new(store.root() / "norm", WIDTH, Default::default())?;
            let model = ModuleFn::new(&store, move |x: &Tensor| norm.forward(x));
            let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
            let rank = accelerator.process_index();
            if steps.start > 0 {
                accelerator.load_state(folder.path().join(steps.start.to_string()))?;
            }
            let mut evaluated = Vec::new();
            for step in steps.clone() {
                model.params().train();
                accelerator.accumulate(&model, || {
                    accelerator.backward(&model.forward(&input(rank, step))?.square().sum(Kind::Float))?;
                    optimizer.step()?;
                    optimizer.zero_grad()
                })?;
                if saves {
                    accelerator.save_state(folder.path().join((step + 1).to_string()))?;
                }
                model.params().eval();
                evaluated.push(no_grad(|| model.forward(&input(rank, 20)))?.double_value(&[0, 1]));
            }
            Ok(evaluated)
        })
        .unwrap()
    };
    let whole = run(0..7, true);
    assert_eq!(whole, run(0..7, false), "saving changed the run");
    for start in 1..6 {
        let rest: Vec<Vec<f64>> = whole.iter().map(|of_rank| of_rank[start..].to_vec()).collect();
        assert_eq!(run(start..7, false), rest, "from step {start}");
    }
}

/// A state in memory is taken without a collective, so the next pass still begins with rank 0's buffers.
#[test]
fn buffers_go_on_from_a_state_in_memory() {
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let norm = BatchNorm1d::new(store.root() / "norm", WIDTH, Default::default())?;
        let model = ModuleFn::new(&store, move |x: &Tensor| norm.forward(x));
        let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
        let rank = accelerator.process_index();
        let mut train = |step| -> Result<Vec<f32>> {
            accelerator.backward(&model.forward(&input(rank, step))?.square().sum(Kind::Float))?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            let tensors: Vec<Tensor> =
                store.state_dict()?.iter().map(|(_, it)| it.detach().to_kind(Kind::Float).reshape(-1)).collect();
            Ok(Vec::try_from(Tensor::cat(&tensors, 0))?)
        };
        train(0)?;
        let states = accelerator.state_dict()?;
        let wanted = train(1)?;
        accelerator.load_state_dict(&states)?;
        assert_eq!(train(1)?, wanted);
        Ok(())
    })
    .unwrap();
}
