//! Random generators: Python's numbers under the same seeds, and states that can be put back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::Generator;
use torch_ext::generator::random_seed_from_default;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The default generator belongs to the process: tests on threads take turns.
fn default_generator() -> (MutexGuard<'static, ()>, Generator) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (turn, Generator::default_cpu().unwrap())
}

fn seeded(seed: u64) -> Generator {
    let generator = Generator::new_cpu().unwrap();
    generator.manual_seed(seed).unwrap();
    generator
}

fn assert_close(tensor: &Tensor, expected: &[f64]) {
    for (index, expected) in expected.iter().enumerate() {
        let value = tensor.double_value(&[i64::try_from(index).unwrap()]);
        assert!((value - expected).abs() < 1e-4, "{value} instead of {expected}");
    }
}

#[test]
fn numbers_are_those_of_python() {
    // torch.rand(3), torch.randn(3) and torch.randperm(10) after torch.manual_seed(0).
    let x = Tensor::zeros([3], FLOAT);
    seeded(0).uniform_(&x, 0.0, 1.0).unwrap();
    assert_close(&x, &[0.4963, 0.7682, 0.0885]);
    seeded(0).normal_(&x, 0.0, 1.0).unwrap();
    assert_close(&x, &[1.5410, -0.2934, -2.1788]);
    let order = seeded(0).randperm(10).unwrap();
    assert_eq!(order, Tensor::from_slice(&[4i64, 1, 7, 5, 3, 9, 0, 8, 6, 2]));
}

#[test]
fn seeds_are_two_words_of_the_mersenne_twister() {
    // The first two outputs of MT19937 seeded with 0, without the sign bit.
    let expected = ((2_357_136_044u64 << 32) | 2_546_248_239) & (u64::MAX >> 1);
    assert_eq!(seeded(0).random_seed().unwrap(), i64::try_from(expected).unwrap());
    let (_turn, _default) = default_generator();
    tch::manual_seed(0);
    assert_eq!(random_seed_from_default().unwrap(), i64::try_from(expected).unwrap());
}

#[test]
fn the_default_generator_is_the_one_operations_use() {
    let (_turn, default) = default_generator();
    tch::manual_seed(11);
    assert_eq!(default.initial_seed().unwrap(), 11);
    let first = Tensor::rand([4], FLOAT);
    default.manual_seed(11).unwrap();
    assert_eq!(Tensor::rand([4], FLOAT), first);
    let own = Tensor::zeros([4], FLOAT);
    seeded(11).uniform_(&own, 0.0, 1.0).unwrap();
    assert_eq!(own, first);
}

#[test]
fn states_go_in_and_out() {
    let generator = seeded(5);
    generator.normal_(&Tensor::zeros([3], FLOAT), 0.0, 1.0).unwrap(); // leaves half a normal pair behind
    let state = generator.state().unwrap();
    assert_eq!((state.kind(), state.size()), (Kind::Uint8, vec![5056]));
    let draw = |generator: &Generator| {
        let x = Tensor::zeros([5], FLOAT);
        generator.normal_(&x, 0.0, 1.0).unwrap();
        x
    };
    let first = draw(&generator);
    assert_ne!(draw(&generator), first);
    generator.set_state(&state).unwrap();
    assert_eq!(draw(&generator), first);
    let other = Generator::new_cpu().unwrap();
    other.set_state(&state).unwrap();
    assert_eq!(draw(&other), first);
    assert_eq!(other.initial_seed().unwrap(), 5);
}

#[test]
fn a_state_is_a_snapshot() {
    let generator = seeded(5);
    let state = generator.state().unwrap();
    let copy = state.copy();
    generator.random_seed().unwrap();
    assert_eq!(state, copy);
}

#[test]
fn a_state_may_begin_anywhere_in_its_memory() {
    let generator = seeded(5);
    let state = generator.state().unwrap();
    let behind_another = Tensor::cat(&[seeded(6).state().unwrap(), state.shallow_clone()], 0).narrow(0, 5056, 5056);
    let other = Generator::new_cpu().unwrap();
    other.set_state(&behind_another).unwrap();
    assert_eq!(other.state().unwrap(), state);
}

#[test]
fn what_is_no_state_is_refused() {
    let generator = seeded(5);
    let state = generator.state().unwrap();
    let cases = [
        Tensor::new(),
        Tensor::zeros([5056], FLOAT),
        state.narrow(0, 0, 100),
        Tensor::zeros([0], (Kind::Uint8, Device::Cpu)),
    ];
    for wrong in cases {
        let error = generator.set_state(&wrong).unwrap_err();
        assert_eq!(error.operation(), "Generator::set_state");
    }
    assert_eq!(generator.state().unwrap(), state, "a refused state must change nothing");
}

#[test]
fn errors_name_the_operation() {
    assert_eq!(seeded(0).randperm(-1).unwrap_err().operation(), "Generator::randperm");
    let negative = seeded(0).multinomial(&Tensor::from_slice(&[1.0, -1.0]), 2);
    assert_eq!(negative.unwrap_err().operation(), "Generator::multinomial");
    let integers = Tensor::zeros([3], (Kind::Int64, Device::Cpu));
    assert_eq!(seeded(0).normal_(&integers, 0.0, 1.0).unwrap_err().operation(), "Generator::normal_");
    assert!(seeded(0).uniform_(&Tensor::zeros([3], FLOAT), 2.0, 1.0).is_err());
}

#[test]
fn filling_a_leaf_is_not_recorded() {
    let weight = Tensor::zeros([3], FLOAT).set_requires_grad(true);
    seeded(0).uniform_(&weight, -1.0, 1.0).unwrap();
    assert!(torch_ext::autograd::is_leaf(&weight) && weight.requires_grad());
    assert!(weight.abs().sum(Kind::Float).double_value(&[]) > 0.0);
}

#[test]
fn cuda_without_cuda_is_a_typed_error() {
    if tch::Cuda::is_available() {
        let generator = Generator::default_cuda(0).unwrap();
        generator.manual_seed(3).unwrap();
        assert_eq!(generator.initial_seed().unwrap(), 3);
        return;
    }
    for index in [0, 127, 128, 1 << 40] {
        let error = Generator::default_cuda(index).unwrap_err();
        assert!(error.is_invalid_argument() && error.message().contains("no CUDA"), "{error}");
    }
    assert!(Generator::default_for(Device::Cuda(0)).is_err());
    assert!(Generator::default_for(Device::Cpu).is_ok());
}

#[test]
fn a_generator_is_shared_between_threads() {
    let generator = seeded(9);
    let mut drawn: Vec<i64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| (0..100).map(|_| generator.random_seed().unwrap()).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let again = seeded(9);
    let mut expected: Vec<i64> = (0..400).map(|_| again.random_seed().unwrap()).collect();
    drawn.sort_unstable();
    expected.sort_unstable();
    assert_eq!(drawn, expected, "each number of the stream must be given out once");
}
