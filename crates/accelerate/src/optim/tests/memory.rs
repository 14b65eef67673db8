//! Optimizers whose state differs from their parameters in shape or dtype, and skipped steps of the newer ones.

use super::{one_weight, set_grad, weight};
use crate::nn::{Init, ParamStore};
use crate::optim::{Adafactor, AdamW, AdamW8bit, Lion, OneCycleLr, Optimizer, OptimizerState, ParamGroup, RMSprop};
use std::ops::Range;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::set_gradient;

/// One weight that is quantized, two that are not: too small, and no whole number of blocks.
fn several_sizes(kind: Kind) -> ParamStore {
    let store = ParamStore::with_kind(Device::Cpu, kind);
    for (name, shape) in [("large", vec![128, 64]), ("small", vec![8, 32]), ("odd", vec![4097])] {
        store.root().param(name, (shape, Init::Ones)).unwrap();
    }
    store
}

/// Gradients of many sizes, from `exp(-spread)` to `exp(spread)`; the same for the same step.
fn set_grads(store: &ParamStore, step: usize, spread: f64) {
    for param in store.trainable_parameters() {
        let local = param.local();
        let position = Tensor::arange(local.numel() as i64, (Kind::Double, Device::Cpu));
        let wave = (&position * 0.7 + step as f64 * 0.3).sin() * ((&position * 0.013).sin() * -spread).exp();
        set_gradient(&local, Some(&wave.to_kind(local.kind()).reshape(local.size()))).unwrap();
    }
}

fn train(optimizer: &mut impl Optimizer, store: &ParamStore, steps: Range<usize>) {
    train_spread(optimizer, store, steps, 4.0);
}

fn train_spread(optimizer: &mut impl Optimizer, store: &ParamStore, steps: Range<usize>, spread: f64) {
    for step in steps {
        set_grads(store, step, spread);
        optimizer.step().unwrap();
    }
}

fn weights(store: &ParamStore) -> Vec<f64> {
    let flat: Vec<Tensor> = store.trainable_parameters().iter().map(|param| param.local().reshape(-1)).collect();
    Vec::try_from(Tensor::cat(&flat, 0).detach().to_kind(Kind::Double)).unwrap()
}

fn num_bytes(state: &OptimizerState, param: &str) -> usize {
    let of_param = state.tensors.iter().filter(|(key, _)| key.ends_with(&format!(".{param}")));
    of_param.map(|(_, tensor)| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
}

#[test]
fn optim_state_has_the_promised_size() {
    let store = several_sizes(Kind::Float);
    let state = |optimizer: &mut dyn Optimizer| {
        set_grads(&store, 0, 4.0);
        optimizer.step().unwrap();
        optimizer.state_dict().unwrap()
    };
    let (entries, step) = (128 * 64, 4);
    let eight_bit = state(&mut AdamW8bit::new(&store, 0.1).unwrap());
    // Two codes for each entry, two scales for each block of 256: 2.03 bytes.
    assert_eq!(num_bytes(&eight_bit, "large"), 2 * entries + 2 * 4 * (entries / 256) + step);
    assert_eq!(num_bytes(&eight_bit, "small"), 2 * 4 * 256 + step);
    assert_eq!(num_bytes(&eight_bit, "odd"), 2 * 4 * 4097 + step);
    assert_eq!(num_bytes(&state(&mut AdamW::new(&store, 0.1).unwrap()), "large"), 8 * entries + step);
    assert_eq!(num_bytes(&state(&mut Lion::new(&store, 0.1).unwrap()), "large"), 4 * entries);
    let factored = state(&mut Adafactor::new(&store, 0.1).unwrap());
    assert_eq!(num_bytes(&factored, "large"), 4 * (128 + 64) + step);
    assert_eq!(num_bytes(&factored, "odd"), 4 * 4097 + step);
}

#[test]
fn optim_8_bits_stay_close_to_exact_averages() {
    let (lr, num_steps) = (1e-2, 10);
    for (spread, tolerance) in [(1.0, 0.015), (4.0, 0.07)] {
        let (exact_store, store) = (several_sizes(Kind::Float), several_sizes(Kind::Float));
        train_spread(&mut AdamW::new(&exact_store, lr).unwrap(), &exact_store, 0..num_steps, spread);
        train_spread(&mut AdamW8bit::new(&store, lr).unwrap(), &store, 0..num_steps, spread);
        let (exact, found) = (weights(&exact_store), weights(&store));
        let distances: Vec<f64> = exact.iter().zip(&found).map(|(exact, found)| (exact - found).abs()).collect();
        let (large, others) = distances.split_at(128 * 64);
        let mean = large.iter().sum::<f64>() / large.len() as f64;
        let moved = exact[..large.len()].iter().map(|weight| (weight - 1.0).abs()).sum::<f64>() / large.len() as f64;
        assert!(0.0 < mean && mean < tolerance * moved, "{mean} of {moved}");
        // Not one weight runs away.
        let worst = large.iter().copied().fold(0.0, f64::max);
        assert!(worst < lr * num_steps as f64, "{worst}");
        assert!(others.iter().all(|&distance| distance < 1e-5), "small tensors are exact");
    }
}

#[test]
fn optim_narrow_and_wide_parameters_train_in_8_bits() {
    for (kind, tolerance) in [(Kind::BFloat16, 1e-2), (Kind::Half, 2e-3), (Kind::Double, 1e-7)] {
        let (float_store, store) = (several_sizes(Kind::Float), several_sizes(kind));
        train(&mut AdamW8bit::new(&float_store, 1e-2).unwrap(), &float_store, 0..1);
        train(&mut AdamW8bit::new(&store, 1e-2).unwrap(), &store, 0..1);
        for (found, wanted) in weights(&store).into_iter().zip(weights(&float_store)) {
            assert!((found - wanted).abs() < tolerance, "{kind:?}: {found}, not {wanted}");
        }
        assert_eq!(store.get("large").unwrap().local().kind(), kind);
    }
}

fn check_resume<O: Optimizer>(what: &str, make: impl Fn(&ParamStore) -> O) {
    let whole_store = several_sizes(Kind::Float);
    train(&mut make(&whole_store), &whole_store, 0..6);
    let store = several_sizes(Kind::Float);
    let mut first = make(&store);
    train(&mut first, &store, 0..3);
    let mut second = make(&store);
    second.load_state_dict(&first.state_dict().unwrap()).unwrap();
    drop(first);
    train(&mut second, &store, 3..6);
    // Not assert_eq: nobody wants to read all those numbers.
    assert!(weights(&store) == weights(&whole_store), "{what}");
}

#[test]
fn optim_unlike_state_goes_on_to_the_bit() {
    check_resume("AdamW8bit", |store| AdamW8bit::new(store, 1e-2).unwrap());
    check_resume("Adafactor", |store| Adafactor::builder(store).weight_decay(0.1).build().unwrap());
    check_resume("Lion", |store| Lion::new(store, 1e-2).unwrap());
    check_resume("RMSprop", |store| RMSprop::builder(store).momentum(0.9).centered(true).build().unwrap());
}

#[test]
fn optim_unlike_state_that_does_not_fit_is_refused() {
    let store = several_sizes(Kind::Float);
    let mut optimizer = AdamW8bit::new(&store, 1e-2).unwrap();
    train(&mut optimizer, &store, 0..1);
    let float = (Kind::Float, Device::Cpu);
    let rows = [
        ("exp_avg_scale.large", Some(Tensor::ones([31], float)), "has shape [31], not [32]"),
        ("exp_avg_sq.large", Some(Tensor::ones([128, 64], float)), "has dtype Float, not Uint8"),
        ("exp_avg.small", Some(Tensor::ones([8, 32], (Kind::Uint8, Device::Cpu))), "has dtype Uint8, not Float"),
        ("exp_avg_sq_scale.large", None, "is missing"),
    ];
    for (key, tensor, wanted) in rows {
        let mut state = optimizer.state_dict().unwrap();
        match tensor {
            Some(tensor) => state.tensors.insert(key.to_string(), tensor),
            None => state.tensors.remove(key),
        };
        let error = optimizer.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(wanted), "{error}");
    }
}

/// The averages of exact AdamW, or of full parameters, are numbers and no codes.
#[test]
fn optim_averages_that_are_numbers_are_rounded_anew() {
    let store = several_sizes(Kind::Float);
    let mut exact = AdamW::new(&store, 1e-2).unwrap();
    train(&mut exact, &store, 0..1);
    let saved = exact.state_dict().unwrap();
    let mut optimizer = AdamW8bit::new(&store, 1e-2).unwrap();
    optimizer.load_state_dict(&saved).unwrap();
    let kept = optimizer.state_dict().unwrap().tensors;
    assert_eq!((kept["exp_avg.large"].kind(), kept["exp_avg.small"].kind()), (Kind::Uint8, Kind::Float));
    let numbers = optimizer.dequantized(kept).unwrap();
    for (name, wanted) in &saved.tensors {
        let largest = wanted.abs().max().double_value(&[]);
        let apart = (&numbers[name] - wanted).abs().max().double_value(&[]);
        assert!(apart <= 0.0072 * largest, "{name}: {apart} of {largest}");
    }
}

fn check_skip<O: Optimizer>(what: &str, make: impl Fn(&ParamStore) -> O) {
    let store = one_weight();
    let mut optimizer = make(&store);
    for (found_inf, num_states) in [(1.0f32, 0), (0.0, 1), (1.0, 1)] {
        let before = weight(&store);
        set_grad(&store, if found_inf == 0.0 { 0.5 } else { f32::NAN });
        optimizer.step_unless(&Tensor::from(found_inf)).unwrap();
        assert_eq!(weight(&store) == before, found_inf != 0.0, "{what}");
        assert_eq!(optimizer.state_dict().unwrap().tensors.is_empty(), num_states == 0, "{what}");
        if let Some(steps) = optimizer.state_dict().unwrap().tensors.get("step.weight") {
            assert_eq!(steps.double_value(&[]), 1.0, "{what}");
        }
    }
}

#[test]
fn optim_skipped_steps_leave_weights_and_state_alone() {
    check_skip("RMSprop", |store| RMSprop::new(store, 0.1).unwrap());
    check_skip("Adafactor", |store| Adafactor::new(store, 0.1).unwrap());
    check_skip("Lion", |store| Lion::new(store, 0.1).unwrap());
    check_skip("AdamW8bit", |store| AdamW8bit::new(store, 0.1).unwrap());
}

#[test]
fn optim_momentum_of_the_newer_ones_follows_groups_and_cycles() {
    // A buffer that a schedule switches on later starts from zero.
    let store = one_weight();
    let mut optimizer = RMSprop::new(&store, 0.1).unwrap();
    for (momentum, has_buffer) in [(0.0, false), (0.9, true), (0.0, true)] {
        optimizer.handle().set_momentum(0, momentum).unwrap();
        set_grad(&store, 1.0);
        optimizer.step().unwrap();
        let state = optimizer.state_dict().unwrap();
        assert_eq!(state.tensors.contains_key("momentum_buffer.weight"), has_buffer);
        RMSprop::new(&store, 0.1).unwrap().load_state_dict(&state).unwrap();
    }
    let group = |store: &ParamStore| vec![ParamGroup::new(store.trainable_parameters()).momentum(0.5)];
    let lion = Lion::builder(&store).param_groups(group(&store)).build().unwrap();
    assert_eq!(lion.state_dict().unwrap().groups[0].options["betas"][0], 0.5);
    let eight_bit = AdamW8bit::builder(&store).param_groups(group(&store)).build().unwrap();
    assert_eq!(eight_bit.state_dict().unwrap().groups[0].options["betas"][0], 0.5);
    OneCycleLr::new(&lion, 1.0, 10).unwrap();
    assert_eq!(lion.handle().get_momentum(0).unwrap(), 0.95);
    let error = OneCycleLr::new(&Adafactor::new(&store, 0.1).unwrap(), 1.0, 10).unwrap_err().to_string();
    assert!(error.contains("Adafactor has neither"), "{error}");
}
