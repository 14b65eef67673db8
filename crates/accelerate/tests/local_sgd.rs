//! Local SGD on 1 to 4 ranks: parameters equal averages computed by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::testing::ranks;
use accelerate::{Accelerator, LocalSGD, LocalSGDOptions, Result};
use tch::{Device, Kind, Tensor};

fn scalar(value: f64) -> Tensor {
    Tensor::full([1, 1], value, (Kind::Float, Device::Cpu))
}

/// A weight w, without bias, that starts at 0.
fn line(accelerator: &Accelerator) -> Result<(ParamStore, Linear)> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, accelerate::nn::LinearConfig { bias: false, ..Default::default() })?;
    linear.weight.copy_(&scalar(0.0))?;
    Ok((store, linear))
}

const RATE: f64 = 0.125;

/// Minimises (w x - 1)^2 / 2 with x = rank + 1, by plain SGD; gives w after each step and at the end.
fn train(accelerator: &Accelerator, local_sgd_steps: usize, enabled: bool, steps: usize) -> Result<Vec<f64>> {
    let (store, linear) = line(accelerator)?;
    let weight = linear.weight.clone();
    let optimizer = Sgd::new(&store, RATE)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut local_sgd = LocalSGD::new(accelerator, &model, LocalSGDOptions { local_sgd_steps, enabled })?;
    let mut seen = Vec::new();
    for _ in 0..steps {
        accelerator.accumulate(&model, || {
            let error = model.forward(&scalar(accelerator.process_index() as f64 + 1.0))? - 1.0;
            accelerator.backward(&((&error * &error).sum(Kind::Float) / 2.0))?;
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
        local_sgd.step()?;
        seen.push(weight.get().unwrap().double_value(&[0, 0]));
    }
    local_sgd.finish()?;
    seen.push(weight.get().unwrap().double_value(&[0, 0]));
    Ok(seen)
}

/// The same by hand: every rank's own step, and the mean after every `local_sgd_steps`.
fn by_hand(world_size: usize, local_sgd_steps: usize, steps: usize) -> Vec<Vec<f64>> {
    let mut weights = vec![0.0; world_size];
    let mut seen = vec![Vec::new(); world_size];
    let mean = |weights: &mut Vec<f64>| *weights = vec![weights.iter().sum::<f64>() / world_size as f64; world_size];
    for step in 1..=steps {
        for (rank, weight) in weights.iter_mut().enumerate() {
            let x = rank as f64 + 1.0;
            *weight -= RATE * (*weight * x - 1.0) * x;
        }
        if step % local_sgd_steps == 0 {
            mean(&mut weights);
        }
        seen.iter_mut().zip(&weights).for_each(|(seen, weight)| seen.push(*weight));
    }
    mean(&mut weights);
    seen.iter_mut().zip(&weights).for_each(|(seen, weight)| seen.push(*weight));
    seen
}

fn assert_close(found: &[Vec<f64>], wanted: &[Vec<f64>], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().flatten().zip(wanted.iter().flatten()) {
        assert!((found - wanted).abs() < 1e-5, "{what}: {found} instead of {wanted}");
    }
}

#[test]
fn parameters_are_the_means_of_what_ranks_have_learnt() {
    for world_size in 1..=4 {
        for (local_sgd_steps, steps) in [(1, 3), (2, 4), (3, 5), (8, 3)] {
            let found =
                ranks(world_size, Default::default(), |accelerator| train(&accelerator, local_sgd_steps, true, steps))
                    .unwrap();
            let what = format!("{world_size} ranks, {local_sgd_steps} local of {steps} steps");
            assert_close(&found, &by_hand(world_size, local_sgd_steps, steps), &what);
        }
    }
}

#[test]
fn switched_off_it_averages_gradients() {
    for world_size in [1, 3] {
        let found = ranks(world_size, Default::default(), |accelerator| train(&accelerator, 2, false, 4)).unwrap();
        // Averaging gradients is averaging parameters after every step of plain SGD.
        assert_close(&found, &by_hand(world_size, 1, 4), "disabled");
    }
}

#[test]
fn one_local_step_of_sgd_with_momentum_equals_averaged_gradients() {
    let run = |enabled| {
        ranks(3, Default::default(), move |accelerator| {
            let (store, linear) = line(&accelerator)?;
            let weight = linear.weight.clone();
            let optimizer = Sgd::builder(&store).lr(RATE).momentum(0.9).build()?;
            let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
            let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
            let mut local_sgd = LocalSGD::new(&accelerator, &model, LocalSGDOptions { local_sgd_steps: 1, enabled })?;
            let mut seen = Vec::new();
            for _ in 0..5 {
                let error = model.forward(&scalar(accelerator.process_index() as f64 + 1.0))? - 1.0;
                accelerator.backward(&((&error * &error).sum(Kind::Float) / 2.0))?;
                optimizer.step()?;
                optimizer.zero_grad()?;
                local_sgd.step()?;
                seen.push(weight.get().unwrap().double_value(&[0, 0]));
            }
            local_sgd.finish()?;
            assert!(optimizer.handle().num_steps() == 5);
            Ok(seen)
        })
        .unwrap()
    };
    assert_close(&run(true), &run(false), "momentum");
}

#[test]
fn many_tensors_of_several_dtypes_travel_flat() {
    for world_size in [2, 3] {
        let got = ranks(world_size, Default::default(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let kinds = [Kind::Float, Kind::Double, Kind::BFloat16];
            let shapes: [&[i64]; 3] = [&[2, 3], &[], &[4]];
            for (index, (kind, shape)) in kinds.into_iter().zip(shapes).cycle().take(9).enumerate() {
                store.root().param(&format!("p{index}"), Tensor::zeros(shape, (kind, Device::Cpu)))?;
            }
            let model = accelerator.prepare(ModuleFn::new(&store, |x: &Tensor| Ok(x.shallow_clone())))?;
            for (index, param) in store.parameters().iter().enumerate() {
                let value = (accelerator.process_index() * 6 + index) as f64;
                param.copy_(&Tensor::full(param.shape(), value, (param.kind(), Device::Cpu)))?;
            }
            let collectives = collectives_so_far(&accelerator);
            LocalSGD::new(&accelerator, &model, 1)?.finish()?;
            assert_eq!(collectives_so_far(&accelerator) - collectives, 3, "one message for each dtype");
            Ok(store
                .parameters()
                .iter()
                .map(|param| param.get().unwrap().mean(Kind::Double).double_value(&[]))
                .collect::<Vec<_>>())
        })
        .unwrap();
        let offset = 3.0 * (world_size - 1) as f64;
        let expected: Vec<f64> = (0..9).map(|index| index as f64 + offset).collect();
        assert_eq!(got, vec![expected; world_size]);
    }
}

fn collectives_so_far(accelerator: &Accelerator) -> u64 {
    let text = format!("{:?}", accelerator.group());
    let (_, rest) = text.split_once("sequence: ").unwrap();
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

#[test]
fn gradients_are_averaged_again_afterwards_and_after_an_error() {
    for finished in [true, false] {
        let got = ranks(2, Default::default(), |accelerator| {
            let (store, linear) = line(&accelerator)?;
            let weight = linear.weight.clone();
            let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
            let model = accelerator.prepare(model)?;
            let local_sgd = LocalSGD::new(&accelerator, &model, 1)?;
            let x = scalar(accelerator.process_index() as f64 + 1.0);
            accelerator.backward(&model.forward(&x)?.sum(None))?;
            let alone = weight.grad().unwrap().double_value(&[0, 0]);
            if finished {
                local_sgd.finish()?
            } else {
                drop(local_sgd)
            }
            accelerator.backward(&model.forward(&x)?.sum(None))?;
            Ok((alone, weight.grad().unwrap().double_value(&[0, 0])))
        })
        .unwrap();
        assert_eq!(got, [(1.0, 3.0), (2.0, 3.0)], "finished: {finished}");
    }
}

#[test]
fn accumulated_steps_stay_local_too() {
    let builder = Accelerator::builder().gradient_accumulation_steps(2);
    let got = ranks(2, builder, |accelerator| train(&accelerator, 2, true, 4)).unwrap();
    // Four micro-batches are two optimizer steps; both halves of a window have the same gradient.
    let step = |weight: f64, x: f64| weight - RATE * (weight * x - 1.0) * x;
    let mean = |a: f64, b: f64| (a + b) / 2.0;
    let first = [step(0.0, 1.0), step(0.0, 2.0)];
    let first = mean(first[0], first[1]);
    let last = mean(step(first, 1.0), step(first, 2.0));
    let expected = vec![0.0, first, first, last, last];
    assert_close(&got, &[expected.clone(), expected], "accumulated");
}

#[test]
fn nonsense_is_refused() {
    let error = ranks(2, Default::default(), |accelerator| {
        let (store, linear) = line(&accelerator)?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        LocalSGD::new(&accelerator, &model, 0).map(drop)
    })
    .unwrap_err();
    assert!(error.is_config() && error.to_string().contains("local_sgd_steps is 0"), "{error}");
}

/// What a rank has after so many steps: weights and momentum. `saves`: after that many of them, in this folder; `goes_on`: it begins there.
fn with_momentum(
    accelerator: &Accelerator,
    steps: usize,
    saves: Option<usize>,
    goes_on: bool,
    folder: &std::path::Path,
) -> Result<Vec<f64>> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 2, 3, Default::default())?;
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)) * 0.3 + index as f64;
        param.copy_(&values.sin().reshape(param.shape()))?;
    }
    let optimizer = accelerate::optim::AdamW::new(&store, RATE)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    if goes_on {
        accelerator.load_state(folder)?;
    }
    let mut local_sgd = LocalSGD::new(accelerator, &model, 100)?;
    for step in 0..steps {
        let x = Tensor::from_slice(&[accelerator.process_index() as f32 + 1.0, 0.5]);
        accelerator.backward(&model.forward(&x)?.square().sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        local_sgd.step()?;
        if saves == Some(step + 1) {
            accelerator.save_state(folder)?;
        }
    }
    let states = accelerator.state_dict()?;
    let tensors = states.values().flat_map(|state| state.tensors.values());
    Ok(tensors.flat_map(|tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap()).collect())
}

#[test]
fn a_checkpoint_between_averages_has_what_each_rank_has_trained() {
    for world_size in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let run = |steps, saves, goes_on| {
            ranks(world_size, Default::default(), |own| with_momentum(&own, steps, saves, goes_on, folder.path()))
                .unwrap()
        };
        let undisturbed = run(5, Some(3), false);
        assert_ne!(undisturbed[0], undisturbed[1]);
        assert_eq!(run(2, None, true), undisturbed);
        // Others go on with what one rank had, and not with a mixture.
        let of_first = ranks(1, Default::default(), |own| with_momentum(&own, 3, None, false, folder.path())).unwrap();
        let alone = ranks(1, Default::default(), |own| with_momentum(&own, 0, None, true, folder.path())).unwrap();
        assert_eq!(alone, of_first);
    }
}
