//! Fused optimizers, foreach operations and loss scaling, against formulas written out here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tch::{Device, Kind, Tensor};
use torch_ext::amp::{ScaleUpdate, non_finite_check_and_unscale_, update_scale_};
use torch_ext::fused::{
    AdagradTensors, AdamTensors, FusedAdagrad, FusedAdam, FusedSgd, SgdTensors, fused_adagrad_, fused_adam_,
    fused_adamw_, fused_sgd_,
};
use torch_ext::{TensorList, TensorVec, foreach};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.detach().to_kind(Kind::Double).contiguous().view([-1])).unwrap()
}

fn assert_close(tensor: &Tensor, expected: &[f64]) {
    let found = values(tensor);
    assert_eq!(found.len(), expected.len());
    for (found_value, expected_value) in found.iter().zip(expected) {
        assert!(
            (found_value - expected_value).abs() <= 1e-5 * (1.0 + expected_value.abs()),
            "{found:?} instead of {expected:?}"
        );
    }
}

const START: [f32; 3] = [1.0, -2.0, 0.5];
const GRADIENTS: [[f32; 3]; 3] = [[0.1, -0.2, 3.0], [0.4, 0.5, -6.0], [-0.7, 0.8, 0.9]];

// ---- Adam and AdamW ----

/// Kingma & Ba's algorithm 1 with the options of `torch.optim`, in 64 bits.
fn reference_adam(config: &FusedAdam, decoupled: bool) -> Vec<f64> {
    let mut params = START.map(f64::from);
    let (mut mean, mut square, mut largest) = ([0.0; 3], [0.0f64; 3], [0.0f64; 3]);
    for (index, gradients) in GRADIENTS.iter().enumerate() {
        let step = i32::try_from(index).unwrap() + 1;
        for i in 0..3 {
            let mut gradient = f64::from(gradients[i]);
            if config.maximize {
                gradient = -gradient;
            }
            if decoupled {
                params[i] *= 1.0 - config.lr * config.weight_decay;
            } else {
                gradient += config.weight_decay * params[i];
            }
            mean[i] = config.beta1 * mean[i] + (1.0 - config.beta1) * gradient;
            square[i] = config.beta2 * square[i] + (1.0 - config.beta2) * gradient * gradient;
            largest[i] = largest[i].max(square[i]);
            let second = if config.amsgrad { largest[i] } else { square[i] };
            let denominator = (second / (1.0 - config.beta2.powi(step))).sqrt() + config.eps;
            params[i] -= config.lr * mean[i] / (1.0 - config.beta1.powi(step)) / denominator;
        }
    }
    params.to_vec()
}

fn run_adam(config: &FusedAdam, decoupled: bool) -> Tensor {
    let param = floats(&START).set_requires_grad(true);
    let state = || Tensor::zeros([3], FLOAT);
    let (mean, square, largest) = (state(), state(), state());
    let step = Tensor::zeros([0i64; 0], FLOAT);
    for gradients in GRADIENTS {
        let grad = floats(&gradients);
        foreach::add_scalar_(&[&step], 1.0).unwrap();
        let tensors = AdamTensors {
            params: &[&param],
            grads: &[&grad],
            exp_avgs: &[&mean],
            exp_avg_sqs: &[&square],
            max_exp_avg_sqs: if config.amsgrad { &[&largest] } else { &[] },
            state_steps: &[&step],
            ..AdamTensors::default()
        };
        if decoupled { fused_adamw_(config, &tensors) } else { fused_adam_(config, &tensors) }.unwrap();
    }
    param
}

#[test]
fn adam_and_adamw_follow_the_paper() {
    let plain =
        FusedAdam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8, amsgrad: false, maximize: false };
    let configs = [
        plain,
        FusedAdam { weight_decay: 0.3, ..plain },
        FusedAdam { amsgrad: true, ..plain },
        FusedAdam { maximize: true, weight_decay: 0.3, ..plain },
        FusedAdam { eps: 0.5, beta1: 0.5, ..plain },
    ];
    for config in configs {
        for decoupled in [false, true] {
            assert_close(&run_adam(&config, decoupled), &reference_adam(&config, decoupled));
        }
    }
}

#[test]
fn a_fused_step_keeps_leaves_and_counts_as_a_change() {
    let param = run_adam(
        &FusedAdam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8, amsgrad: false, maximize: false },
        true,
    );
    assert!(torch_ext::autograd::is_leaf(&param) && param.requires_grad());
    assert_eq!(torch_ext::autograd::version(&param).unwrap(), 3);
}

// ---- SGD ----

fn reference_sgd(config: &FusedSgd) -> Vec<f64> {
    let mut params = START.map(f64::from);
    let mut buffer = [0.0; 3];
    for (index, gradients) in GRADIENTS.iter().enumerate() {
        for i in 0..3 {
            let mut gradient = f64::from(gradients[i]) * if config.maximize { -1.0 } else { 1.0 };
            gradient += config.weight_decay * params[i];
            if config.momentum != 0.0 {
                buffer[i] = if index == 0 {
                    gradient
                } else {
                    config.momentum * buffer[i] + (1.0 - config.dampening) * gradient
                };
                gradient = if config.nesterov { gradient + config.momentum * buffer[i] } else { buffer[i] };
            }
            params[i] -= config.lr * gradient;
        }
    }
    params.to_vec()
}

#[test]
fn sgd_follows_its_definition() {
    let plain =
        FusedSgd { lr: 0.1, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let configs = [
        plain,
        FusedSgd { weight_decay: 0.2, ..plain },
        FusedSgd { momentum: 0.9, ..plain },
        FusedSgd { momentum: 0.9, dampening: 0.3, maximize: true, ..plain },
        FusedSgd { momentum: 0.9, nesterov: true, weight_decay: 0.1, ..plain },
    ];
    for config in configs {
        let param = floats(&START).set_requires_grad(true);
        let buffer = floats(&[f32::NAN; 3]); // uninitialised before the first step
        for (index, gradients) in GRADIENTS.iter().enumerate() {
            let grad = floats(gradients);
            let tensors = SgdTensors {
                params: &[&param],
                grads: &[&grad],
                momentum_buffers: if config.momentum == 0.0 { &[] } else { &[&buffer] },
                is_first_step: index == 0,
                ..SgdTensors::default()
            };
            fused_sgd_(&config, &tensors).unwrap();
        }
        assert_close(&param, &reference_sgd(&config));
    }
}

// ---- Adagrad ----

#[test]
fn adagrad_follows_the_paper() {
    for (lr_decay, weight_decay, maximize) in [(0.0, 0.0, false), (0.1, 0.2, true)] {
        let config = FusedAdagrad { lr: 0.1, lr_decay, weight_decay, eps: 1e-10, maximize };
        let param = floats(&START);
        let (sum, step) = (Tensor::zeros([3], FLOAT), Tensor::zeros([0i64; 0], FLOAT));
        let (mut expected, mut expected_sum) = (START.map(f64::from), [0.0; 3]);
        for (index, gradients) in GRADIENTS.iter().enumerate() {
            foreach::add_scalar_(&[&step], 1.0).unwrap();
            let grad = floats(gradients);
            let tensors = AdagradTensors {
                params: &[&param],
                grads: &[&grad],
                state_sums: &[&sum],
                state_steps: &[&step],
                ..AdagradTensors::default()
            };
            fused_adagrad_(&config, &tensors).unwrap();
            let rate = config.lr / (1.0 + f64::from(u32::try_from(index).unwrap()) * lr_decay);
            for i in 0..3 {
                let gradient = f64::from(gradients[i]) * if maximize { -1.0 } else { 1.0 } + weight_decay * expected[i];
                expected_sum[i] += gradient * gradient;
                expected[i] -= rate * gradient / (f64::sqrt(expected_sum[i]) + config.eps);
            }
        }
        assert_close(&param, &expected);
    }
}

// ---- what all fused steps share ----

#[test]
fn a_found_infinity_skips_the_step_and_the_scale_is_divided_out() {
    let config =
        FusedSgd { lr: 1.0, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    for (found, expected) in [(1f32, [1.0, -2.0, 0.5]), (0.0, [0.75, -2.25, 0.25])] {
        let (param, grad) = (floats(&START), floats(&[2.0; 3]));
        let tensors = SgdTensors {
            params: &[&param],
            grads: &[&grad],
            grad_scale: Some(&Tensor::from(8f32)),
            found_inf: Some(&Tensor::from(found)),
            ..SgdTensors::default()
        };
        fused_sgd_(&config, &tensors).unwrap();
        assert_close(&param, &expected);
    }
}

#[test]
fn lists_of_unequal_length_are_refused_by_name() {
    let x = floats(&START);
    let adam =
        FusedAdam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8, amsgrad: true, maximize: false };
    let sgd = FusedSgd { lr: 1.0, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let adagrad = FusedAdagrad { lr: 0.1, lr_decay: 0.0, weight_decay: 0.0, eps: 1e-10, maximize: false };
    let full = AdamTensors {
        params: &[&x],
        grads: &[&x],
        exp_avgs: &[&x],
        exp_avg_sqs: &[&x],
        max_exp_avg_sqs: &[&x],
        state_steps: &[&x],
        ..AdamTensors::default()
    };
    let results = [
        (fused_adamw_(&adam, &AdamTensors { grads: &[], ..full }), "`grads` has 0"),
        (fused_adam_(&adam, &AdamTensors { exp_avgs: &[&x, &x], ..full }), "`exp_avgs` has 2"),
        (fused_adam_(&adam, &AdamTensors { state_steps: &[], ..full }), "`state_steps` has 0"),
        (fused_adam_(&adam, &AdamTensors { max_exp_avg_sqs: &[], ..full }), "`max_exp_avg_sqs` has 0"),
        (fused_adam_(&FusedAdam { amsgrad: false, ..adam }, &full), "without amsgrad"),
        (
            fused_sgd_(&sgd, &SgdTensors { params: &[&x], grads: &[&x], ..SgdTensors::default() }),
            "`momentum_buffers` has 0",
        ),
        (fused_adagrad_(&adagrad, &AdagradTensors { params: &[&x], ..AdagradTensors::default() }), "`grads` has 0"),
        (foreach::add_(&[&x], &[], 1.0), "`other` has 0"),
        (foreach::addcmul_(&[&x], &[&x], &[], 1.0), "`right` has 0"),
        (foreach::addcdiv_(&[&x], &[], &[&x], 1.0), "`numerator` has 0"),
        (foreach::copy_(&[], &[&x]), "`source` has 1"),
    ];
    for (result, message) in results {
        let error = result.unwrap_err();
        assert!(error.is_invalid_argument() && error.message().contains(message), "{error}");
    }
}

#[test]
fn empty_lists_are_nothing_to_do() {
    let sgd = FusedSgd { lr: 1.0, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    fused_sgd_(&sgd, &SgdTensors::default()).unwrap();
    let none = TensorVec::with_capacity(0);
    foreach::zero_(&none).unwrap();
    foreach::mul_(&none, &none).unwrap();
    assert!(foreach::norm(&none, 2.0).unwrap().is_empty());
    non_finite_check_and_unscale_(&none, &Tensor::from(0f32), &Tensor::from(1f32)).unwrap();
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let error = foreach::add_(&[&floats(&START)], &[&floats(&[1.0, 2.0])], 1.0).unwrap_err();
    assert_eq!(error.operation(), "foreach::add_");
}

// ---- foreach ----

#[test]
fn foreach_operations_act_on_every_tensor_of_any_shape() {
    type Operation<'a> = &'a dyn Fn(&dyn TensorList, &dyn TensorList);
    let run = |operation: Operation<'_>| {
        let (a, b) = (floats(&[1.0, 2.0]), Tensor::full([2, 2], 3.0, FLOAT));
        let (c, d) = (floats(&[4.0, 8.0]), Tensor::full([2, 2], 2.0, FLOAT));
        let a = a.set_requires_grad(true); // a leaf may be written to
        operation(&[&a, &b], &[&c, &d]);
        [values(&a), values(&b)].concat()
    };
    let cases: [(Operation<'_>, [f64; 6]); 11] = [
        (&|x, y| foreach::add_(x, y, 0.5).unwrap(), [3.0, 6.0, 4.0, 4.0, 4.0, 4.0]),
        (&|x, _| foreach::add_scalar_(x, -1.0).unwrap(), [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]),
        (&|x, y| foreach::mul_(x, y).unwrap(), [4.0, 16.0, 6.0, 6.0, 6.0, 6.0]),
        (&|x, _| foreach::mul_tensor_(x, &Tensor::from(2f32)).unwrap(), [2.0, 4.0, 6.0, 6.0, 6.0, 6.0]),
        (&|x, y| foreach::div_(x, y).unwrap(), [0.25, 0.25, 1.5, 1.5, 1.5, 1.5]),
        (
            &|x, _| {
                foreach::add_scalar_(x, -2.0).unwrap();
                foreach::sign_(x).unwrap();
            },
            [-1.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        ),
        (
            &|x, _| {
                foreach::mul_(x, x).unwrap();
                foreach::sqrt_(x).unwrap();
            },
            [1.0, 2.0, 3.0, 3.0, 3.0, 3.0],
        ),
        (&|x, y| foreach::copy_(x, y).unwrap(), [4.0, 8.0, 2.0, 2.0, 2.0, 2.0]),
        (&|x, y| foreach::lerp_(x, y, 0.25).unwrap(), [1.75, 3.5, 2.75, 2.75, 2.75, 2.75]),
        (&|x, y| foreach::addcmul_(x, y, y, 1.0).unwrap(), [17.0, 66.0, 7.0, 7.0, 7.0, 7.0]),
        (&|x, y| foreach::addcdiv_(x, y, y, -1.0).unwrap(), [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]),
    ];
    for (index, (operation, expected)) in cases.into_iter().enumerate() {
        assert_eq!(run(operation), expected, "case {index}");
    }
}

#[test]
fn norms_of_every_order() {
    let (x, y) = (floats(&[3.0, -4.0]), Tensor::full([2, 2], -2.0, FLOAT));
    for (ord, expected) in [(1.0, [7.0, 8.0]), (2.0, [5.0, 4.0]), (f64::INFINITY, [4.0, 2.0])] {
        let norms = foreach::norm(&[&x, &y], ord).unwrap();
        assert_eq!(norms.iter().map(|norm| norm.double_value(&[])).collect::<Vec<_>>(), expected);
        assert!(norms.iter().all(|norm: Tensor| norm.size().is_empty()));
    }
}

// ---- loss scaling ----

#[test]
fn unscaling_finds_what_is_not_finite() {
    for (bad, expected) in [(1.0f32, 0.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0), (f32::NAN, 1.0)] {
        let (first, second) = (floats(&[8.0, 4.0]), floats(&[2.0, bad]));
        let found_inf = Tensor::from(0f32);
        non_finite_check_and_unscale_(&[&first, &second], &found_inf, &Tensor::from(0.25f32)).unwrap();
        assert_eq!(values(&first), [2.0, 1.0]);
        assert_eq!(found_inf.double_value(&[]), expected);
    }
}

#[test]
fn a_found_infinity_is_never_taken_back() {
    let found_inf = Tensor::from(1f32);
    non_finite_check_and_unscale_(&[&floats(&START)], &found_inf, &Tensor::from(1f32)).unwrap();
    assert_eq!(found_inf.double_value(&[]), 1.0);
}

#[test]
fn the_scale_grows_after_an_interval_and_backs_off_at_once() {
    let rule = ScaleUpdate { growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 3 };
    let (scale, tracker) = (Tensor::from(16f32), Tensor::from(0i32));
    let steps = [(0f32, 16.0, 1), (0.0, 16.0, 2), (0.0, 32.0, 0), (0.0, 32.0, 1), (1.0, 16.0, 0)];
    for (found, expected_scale, expected_tracker) in steps {
        update_scale_(&scale, &tracker, &Tensor::from(found), &rule).unwrap();
        assert_eq!((scale.double_value(&[]), tracker.int64_value(&[])), (expected_scale, expected_tracker));
    }
    assert!(update_scale_(&scale, &Tensor::from(0i64), &Tensor::from(0f32), &rule).is_err());
}

/// One tensor of every length that matters to the loops of the kernel, with a gradient and a state.
fn adam_case(kind: Kind) -> Vec<[Tensor; 4]> {
    tch::manual_seed(7);
    let sizes: [i64; 9] = [0, 1, 7, 8, 9, 1000, 16_384, 16_391, 100_003];
    let random = |size| Tensor::randn([size], (Kind::Float, Device::Cpu)).to_kind(kind);
    sizes.into_iter().map(|size| [random(size), random(size), random(size), random(size).abs()]).collect()
}

fn adam_step(decoupled: bool, config: &FusedAdam, case: &[[Tensor; 4]], grad_scale: Option<&Tensor>) -> Vec<Tensor> {
    adam_step_and(false, decoupled, config, case, grad_scale)
}

fn adam_step_and(
    demote_averages: bool,
    decoupled: bool,
    config: &FusedAdam,
    case: &[[Tensor; 4]],
    grad_scale: Option<&Tensor>,
) -> Vec<Tensor> {
    let copies: Vec<[Tensor; 4]> = case.iter().map(|tensors| tensors.each_ref().map(Tensor::copy)).collect();
    let max: Vec<Tensor> = copies.iter().map(|tensors| &tensors[3] * 1.001).collect();
    let steps: Vec<Tensor> = (0..case.len()).map(|index| Tensor::from(index as f32 + 1.0)).collect();
    let list = |index: usize| -> Vec<&Tensor> { copies.iter().map(|tensors| &tensors[index]).collect() };
    let (max, steps): (Vec<&Tensor>, Vec<&Tensor>) = (max.iter().collect(), steps.iter().collect());
    let tensors = AdamTensors {
        params: &list(0),
        grads: &list(1),
        exp_avgs: &list(2),
        exp_avg_sqs: &list(3),
        max_exp_avg_sqs: if config.amsgrad { &max } else { &[] },
        state_steps: &steps,
        grad_scale,
        demote_averages,
        ..AdamTensors::default()
    };
    let step = if decoupled { fused_adamw_ } else { fused_adam_ };
    step(config, &tensors).unwrap();
    let max = max.into_iter().map(Tensor::copy).filter(|_| config.amsgrad);
    copies.iter().flat_map(|tensors| [0, 2, 3].map(|index| tensors[index].copy())).chain(max).collect()
}

#[test]
fn the_step_on_the_cpu_is_that_of_libtorch_to_the_bit() {
    let case = adam_case(Kind::Float);
    // With a loss scale, even one of 1, libtorch's own kernel runs.
    let one = Tensor::from(1f32);
    for index in 0..64 {
        let on = |bit: i32| index >> bit & 1 == 1;
        let config = FusedAdam {
            lr: 0.013,
            beta1: if on(0) { 0.9 } else { 0.3 },
            beta2: 0.95,
            weight_decay: if on(1) { 0.07 } else { 0.0 },
            eps: 1e-6,
            amsgrad: on(2),
            maximize: on(3),
        };
        let ours = adam_step_and(on(5), on(4), &config, &case, None);
        let theirs = adam_step(on(4), &config, &case, Some(&one));
        for (position, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let same = ours.view_dtype(Kind::Int).equal(&theirs.view_dtype(Kind::Int));
            assert!(same, "{config:?}, decoupled {}, tensor {position} of {:?}", on(4), ours.size());
        }
    }
}

#[test]
fn what_the_own_kernel_is_not_made_for_goes_to_libtorch() {
    let config =
        FusedAdam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8, amsgrad: false, maximize: false };
    let one = Tensor::from(1f32);
    for kind in [Kind::Double, Kind::BFloat16] {
        let case = adam_case(kind);
        let (ours, theirs) = (adam_step(true, &config, &case, None), adam_step(true, &config, &case, Some(&one)));
        assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| ours.equal(theirs)), "{kind:?}");
    }
    let [param, grad, mean, square] =
        adam_case(Kind::Float).remove(5).map(|tensor| tensor.reshape([10, 100]).transpose(0, 1));
    let step = Tensor::from(1f32);
    let before = param.contiguous();
    fused_adamw_(
        &config,
        &AdamTensors {
            params: &[&param],
            grads: &[&grad],
            exp_avgs: &[&mean],
            exp_avg_sqs: &[&square],
            state_steps: &[&step],
            ..AdamTensors::default()
        },
    )
    .unwrap();
    assert!(!param.contiguous().equal(&before));
}

#[test]
fn a_factor_of_the_gradients_is_a_product_beforehand() {
    let config =
        FusedAdam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8, amsgrad: false, maximize: true };
    for kind in [Kind::Float, Kind::Double] {
        let step = |factor: Option<f64>, before: f64| {
            let [param, grad, mean, square] = adam_case(kind).remove(7);
            let (grad, unchanged) = (&grad * before, &grad * before);
            let count = Tensor::from(3f32);
            let tensors = AdamTensors {
                params: &[&param],
                grads: &[&grad],
                exp_avgs: &[&mean],
                exp_avg_sqs: &[&square],
                state_steps: &[&count],
                grad_factor: factor,
                ..AdamTensors::default()
            };
            fused_adamw_(&config, &tensors).unwrap();
            assert!(grad.equal(&unchanged));
            param
        };
        assert!(step(Some(0.37), 1.0).equal(&step(None, 0.37)), "{kind:?}");
        assert!(!step(Some(0.37), 1.0).equal(&step(None, 1.0)), "{kind:?}");
    }
}

#[test]
fn a_sum_of_squares_is_exact_and_finite_exactly_where_all_elements_are() {
    let float = (Kind::Float, Device::Cpu);
    let cases = adam_case(Kind::Float);
    let tensors: Vec<&Tensor> = cases.iter().flatten().collect();
    let wanted: f64 =
        tensors.iter().map(|x| x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])).sum();
    let Some(found) = foreach::sum_of_squares(&tensors).unwrap() else { return };
    assert!((found - wanted).abs() < 1e-12 * wanted, "{found} {wanted}");
    for size in [1, 8, 40_000] {
        for (value, is_finite) in [(f64::from(f32::MAX), true), (f64::INFINITY, false), (f64::NAN, false)] {
            let tensor = Tensor::zeros([size], float);
            let _ = tensor.narrow(0, size - 1, 1).fill_(value);
            let sum = foreach::sum_of_squares(&[&tensor]).unwrap().unwrap();
            assert_eq!(sum.is_finite(), is_finite, "{value} in {size}");
        }
    }
    assert_eq!(foreach::sum_of_squares(&TensorVec::with_capacity(0)).unwrap(), Some(0.0));
    let dense = Tensor::ones([4, 6], float);
    assert_eq!(foreach::sum_of_squares(&[&dense.tr()]).unwrap(), Some(24.0));
    assert_eq!(foreach::sum_of_squares(&[&dense.narrow(1, 0, 2)]).unwrap(), None);
    assert_eq!(foreach::sum_of_squares(&[&dense.to_kind(Kind::Double)]).unwrap(), None);
}

#[test]
fn a_list_holds_its_tensors_and_gathers_their_gradients() {
    let (x, y) = (floats(&START).set_requires_grad(true), floats(&START).set_requires_grad(true));
    let list: TensorVec = [&x, &y].into_iter().collect();
    let mut gradients = TensorVec::with_capacity(2);
    assert!(!list.has_gradient() && !gradients.fill_with_gradients_of(&list) && gradients.is_empty());

    (&y * 2.0).sum(Kind::Float).backward();
    assert!(list.has_gradient() && !gradients.fill_with_gradients_of(&list));
    assert_eq!(gradients.len(), 1);
    (&x * 3.0).sum(Kind::Float).backward();
    assert!(gradients.fill_with_gradients_of(&list));
    assert_eq!(gradients.iter().map(|grad| grad.double_value(&[0])).collect::<Vec<_>>(), [3.0, 2.0]);

    list.drop_gradients().unwrap();
    assert!(!list.has_gradient() && !x.grad().defined());
    // Dropped by the leaves, still held here.
    assert_eq!(gradients.get(0).unwrap().double_value(&[0]), 3.0);
    gradients.clear();
    assert!(gradients.get(0).unwrap_err().to_string().contains("TensorVec::get"));
    drop(x);
    assert_eq!(values(&list.get(0).unwrap()), START.map(f64::from));
}
