//! Optimizers, schedules, clipping and loss scaling give PyTorch's numbers.
//!
//! The numbers were written by `parity/optim/generate.py` with torch 2.11.0.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod processor;

use accelerate::GradScalerKwargs;
use accelerate::nn::{ParamStore, init::Init};
use accelerate::optim::schedule::OneCycle;
use accelerate::optim::{
    Adafactor, Adagrad, Adam, AdamW, AdamW8bit, AnnealStrategy, ClipGradNorm, ConstantWithWarmup, CosineAnnealingLr,
    CosineWithHardRestartsWithWarmup, CosineWithWarmup, ExponentialLr, GradScaler, InverseSqrtWithWarmup, LambdaLr,
    LinearLr, LinearWithWarmup, Lion, LrScheduler, MultiStepLr, OneCycleLr, Optimizer, ParamGroup, Plateau,
    PolynomialLr, PolynomialWithWarmup, RMSprop, ReduceLrOnPlateau, Sgd, StepLr, Warmup, clip_grad_norm_,
};
use accelerate::tch::{Device, Kind, Tensor};
use serde_json::Value;
use torch_ext::autograd::set_gradient;

fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn tensor(values: &Value, shape: &Value) -> Tensor {
    let shape: Vec<i64> = shape.as_array().unwrap().iter().map(|dim| dim.as_i64().unwrap()).collect();
    Tensor::from_slice(&floats(values)).to_kind(Kind::Float).reshape(shape)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape(-1)).unwrap()
}

/// The instruction set libtorch's kernels choose on this machine, as PyTorch names it.
fn cpu_capability() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let has_avx512 = is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq");
        if has_avx2 && has_avx512 {
            return "AVX512";
        }
        if has_avx2 {
            return "AVX2";
        }
    }
    "DEFAULT"
}

#[track_caller]
fn assert_close(found: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let scale = wanted.abs().max(1e-3);
        assert!((found - wanted).abs() <= tolerance * scale, "{what}[{i}]: {found}, PyTorch has {wanted}");
    }
}

/// Runs one optimizer over the recorded gradients and compares every step and the final state.
fn check_optimizer<O: Optimizer>(case: &str, make: impl FnOnce(&ParamStore) -> accelerate::Result<O>) {
    let document = document(include_str!("../../../parity/optim/optimizers.json"));
    let same_kernels = processor::is_intel() && document["cpu_capability"] == cpu_capability();
    // Some last bits more add up over steps with momentum.
    let tolerance = if processor::is_intel() { 1e-6 } else { 4e-6 };
    let case_data = &document["cases"][case];
    let store = ParamStore::new(Device::Cpu);
    let names = ["weight", "bias", "scale"];
    for name in names {
        let start = tensor(&document["start"][name], &document["shapes"][name]);
        store.root().param(name, start).unwrap();
    }
    let mut optimizer = make(&store).unwrap();
    let param = |name: &str| store.get(name).unwrap().local();
    for (number, grads) in document["grads"].as_array().unwrap().iter().enumerate() {
        optimizer.zero_grad().unwrap();
        for (name, grad) in grads.as_object().unwrap() {
            set_gradient(&param(name), Some(&tensor(grad, &document["shapes"][name]))).unwrap();
        }
        optimizer.step().unwrap();
        for name in names {
            let (found, wanted) = (values(&param(name)), floats(&case_data["steps"][number][name]));
            let what = format!("{case}: {name} after step {number}");
            assert_close(&found, &wanted, tolerance, &what);
            if same_kernels {
                // serde_json may miss the last bit of a double; of a float's value it misses none.
                let bits = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&wanted), "{what} differs in bits");
            }
        }
    }
    for name in names {
        let wanted = floats(&case_data["for_loop_last"][name]);
        // A weight near 0 shows the last bit of what it was before.
        assert_close(&values(&param(name)), &wanted, 2e-6, &format!("{case}: {name}, not fused"));
    }
    let state = optimizer.state_dict().unwrap();
    let wanted = case_data["state"].as_object().unwrap();
    assert_eq!(state.tensors.keys().collect::<Vec<_>>(), {
        let mut keys: Vec<_> = wanted.keys().collect();
        keys.sort();
        keys
    });
    for (key, wanted) in wanted {
        let what = format!("{case}: {key}");
        assert_close(&values(&state.tensors[key]), &floats(wanted), tolerance, &what);
    }
}

#[test]
fn optim_adamw_steps_like_pytorch() {
    check_optimizer("adamw_default", |store| AdamW::new(store, 1e-2));
    check_optimizer("adamw_amsgrad", |store| {
        AdamW::builder(store).lr(1e-2).amsgrad(true).weight_decay(0.1).betas((0.8, 0.95)).build()
    });
    check_optimizer("adamw_no_decay", |store| AdamW::builder(store).lr(3e-3).weight_decay(0.0).eps(1e-6).build());
}

#[test]
fn optim_adam_steps_like_pytorch() {
    check_optimizer("adam_default", |store| Adam::new(store, 1e-2));
    check_optimizer("adam_l2", |store| Adam::builder(store).lr(1e-2).weight_decay(0.1).maximize(true).build());
}

#[test]
fn optim_sgd_steps_like_pytorch() {
    check_optimizer("sgd_plain", |store| Sgd::new(store, 0.1));
    check_optimizer("sgd_momentum", |store| {
        Sgd::builder(store).lr(0.1).momentum(0.9).dampening(0.3).weight_decay(0.05).build()
    });
    check_optimizer("sgd_nesterov", |store| {
        Sgd::builder(store).lr(0.1).momentum(0.9).nesterov(true).maximize(true).build()
    });
}

#[test]
fn optim_adagrad_steps_like_pytorch() {
    check_optimizer("adagrad_default", |store| Adagrad::new(store, 0.1));
    check_optimizer("adagrad_decay", |store| {
        let builder = Adagrad::builder(store).lr(0.1).lr_decay(0.05).weight_decay(0.02);
        builder.initial_accumulator_value(0.1).build()
    });
}

#[test]
fn optim_rmsprop_steps_like_pytorch() {
    check_optimizer("rmsprop_default", |store| RMSprop::new(store, 1e-2));
    check_optimizer("rmsprop_momentum", |store| {
        RMSprop::builder(store).momentum(0.9).weight_decay(0.1).alpha(0.9).build()
    });
    check_optimizer("rmsprop_centered", |store| {
        RMSprop::builder(store).lr(1e-2).centered(true).maximize(true).eps(1e-6).build()
    });
    check_optimizer("rmsprop_all", |store| {
        let builder = RMSprop::builder(store).lr(3e-3).momentum(0.5).weight_decay(0.05);
        builder.centered(true).maximize(true).build()
    });
}

#[test]
fn optim_adafactor_steps_like_pytorch() {
    check_optimizer("adafactor_default", |store| Adafactor::new(store, 1e-2));
    check_optimizer("adafactor_decay", |store| {
        let builder = Adafactor::builder(store).lr(0.8).weight_decay(0.1).beta2_decay(-0.5);
        builder.d(1.5).eps((Some(0.5), 2.0)).build()
    });
    check_optimizer("adafactor_maximize", |store| {
        Adafactor::builder(store).lr(0.1).maximize(true).eps((Some(1e-15), 1e-3)).build()
    });
}

#[test]
fn optim_lion_steps_like_its_definition() {
    check_optimizer("lion_default", |store| Lion::new(store, 1e-2));
    check_optimizer("lion_decay", |store| Lion::builder(store).lr(3e-3).betas((0.5, 0.8)).weight_decay(0.2).build());
}

/// The numbers of the generator's rule, as float32.
fn ruled(numel: i64, step: i64) -> Tensor {
    let number = |position: i64| {
        let share = ((position * 7919 + step * 104_729) % 1009) as f64 / 1009.0 - 0.5;
        share * 10f64.powf(-((position % 7) as f64) / 2.0)
    };
    Tensor::from_slice(&(0..numel).map(number).collect::<Vec<_>>()).to_kind(Kind::Float)
}

#[test]
fn optim_adamw8bit_steps_and_codes_like_its_definition() {
    let document = document(include_str!("../../../parity/optim/adamw8bit.json"));
    let numel = document["numel"].as_i64().unwrap();
    let store = ParamStore::new(Device::Cpu);
    let param = store.root().param("weight", ruled(numel, 0).reshape([64, 64])).unwrap().local();
    let builder = AdamW8bit::builder(&store).lr(1e-2).betas((0.9, 0.95)).eps(1e-8).weight_decay(0.1);
    let mut optimizer = builder.build().unwrap();
    for (index, row) in document["rows"].as_array().unwrap().iter().enumerate() {
        set_gradient(&param, Some(&ruled(numel, index as i64 + 1).reshape([64, 64]))).unwrap();
        optimizer.step().unwrap();
        let what = format!("step {}", index + 1);
        let every_16th = |tensor: &Tensor| values(&tensor.reshape([-1, 16]).narrow(1, 0, 1));
        assert_close(&every_16th(&param), &floats(&row["param"]), 1e-5, &what);
        let sum = param.sum(Kind::Double).double_value(&[]);
        assert!((sum - row["param_sum"].as_f64().unwrap()).abs() < 1e-3, "{what}: {sum}");
        let state = optimizer.state_dict().unwrap().tensors;
        for name in ["exp_avg", "exp_avg_sq"] {
            let codes = &state[&format!("{name}.weight")];
            assert_eq!(every_16th(codes), floats(&row[name]), "{what}: {name}");
            let sum = codes.sum(Kind::Int64).int64_value(&[]);
            assert_eq!(sum, row[format!("{name}_sum")].as_i64().unwrap(), "{what}: {name}");
            let scales = values(&state[&format!("{name}_scale.weight")]);
            assert_close(&scales, &floats(&row[format!("{name}_scale")]), 1e-6, &format!("{what}: scale of {name}"));
        }
    }
}

/// Two groups with learning rates 0.1 and 0.02, as in the generator.
fn two_groups() -> Sgd {
    let store = ParamStore::new(Device::Cpu);
    let one = store.root().param("one", ([1], Init::Zeros)).unwrap();
    let two = store.root().param("two", ([1], Init::Zeros)).unwrap();
    let groups = vec![ParamGroup::new(vec![one]), ParamGroup::new(vec![two]).lr(0.02)];
    Sgd::builder(&store).lr(0.1).momentum(0.9).param_groups(groups).build().unwrap()
}

fn check_schedule<S: LrScheduler>(case: &str, make: impl FnOnce(&Sgd) -> S) {
    let document = document(include_str!("../../../parity/optim/schedules.json"));
    let mut optimizer = two_groups();
    let mut scheduler = make(&optimizer);
    let wanted = document[case]["lrs"].as_array().unwrap();
    let momenta = floats(&document[case]["momentum"]);
    for (step, (wanted, momentum)) in wanted.iter().zip(momenta).enumerate() {
        if 0 < step {
            optimizer.step().unwrap();
            scheduler.step().unwrap();
        }
        let what = format!("{case} at step {step}");
        for (found, wanted) in scheduler.get_last_lr().into_iter().zip(floats(wanted)) {
            assert!((found - wanted).abs() <= 4e-16 * wanted.abs().max(0.1), "{what}: {found}, not {wanted}");
        }
        assert_eq!(scheduler.get_last_lr(), optimizer.handle().learning_rates(), "{what}");
        let found = optimizer.handle().get_momentum(0).unwrap();
        assert!((found - momentum).abs() < 1e-15, "{what}: momentum {found}, not {momentum}");
    }
}

#[test]
fn optim_warmup_schedules_follow_transformers() {
    check_schedule("linear_10_100", |o| LinearWithWarmup::new(o, 10, 100));
    check_schedule("linear_0_7", |o| LinearWithWarmup::new(o, 0, 7));
    check_schedule("constant_5", |o| ConstantWithWarmup::new(o, 5));
    check_schedule("cosine_5_50", |o| CosineWithWarmup::new(o, 5, 50));
    check_schedule("cosine_3_40_cycles_1.5", |o| CosineWithWarmup::with_num_cycles(o, 3, 40, 1.5));
    check_schedule("restarts_4_30_3", |o| CosineWithHardRestartsWithWarmup::new(o, 4, 30, 3));
    check_schedule("restarts_0_9_1", |o| CosineWithHardRestartsWithWarmup::new(o, 0, 9, 1));
    check_schedule("inverse_sqrt_5", |o| InverseSqrtWithWarmup::new(o, 5));
    check_schedule("inverse_sqrt_0", |o| InverseSqrtWithWarmup::new(o, 0));
    check_schedule("inverse_sqrt_3_timescale_7", |o| InverseSqrtWithWarmup::with_timescale(o, 3, 7));
    check_schedule("polynomial_warmup_4_20", |o| PolynomialWithWarmup::new(o, 4, 20).unwrap());
    check_schedule("polynomial_warmup_0_11_0.001_2.5", |o| {
        PolynomialWithWarmup::with_settings(o, 0, 11, 0.001, 2.5).unwrap()
    });
}

#[test]
fn optim_warmups_before_other_schedules_follow_pytorch() {
    check_schedule("warmed_step_4_0.1", |o| Warmup::new(StepLr::new(o, 3, 0.5).unwrap(), 4, 0.1).unwrap());
    check_schedule("warmed_cosine_5_third", |o| {
        Warmup::new(CosineAnnealingLr::new(o, 10, 1e-3).unwrap(), 5, 1.0 / 3.0).unwrap()
    });
    check_schedule("warmed_one_cycle_3_0.5", |o| Warmup::new(OneCycleLr::new(o, 0.5, 8).unwrap(), 3, 0.5).unwrap());
    check_schedule("warmed_lambda_3_1", |o| {
        Warmup::new(LambdaLr::new(o, |step| 0.95f64.powf(step as f64)), 3, 1.0).unwrap()
    });
}

#[test]
fn optim_decays_follow_pytorch() {
    check_schedule("step_3_0.5", |o| StepLr::new(o, 3, 0.5).unwrap());
    check_schedule("exponential_0.97", |o| ExponentialLr::new(o, 0.97));
    check_schedule("polynomial_10_2", |o| PolynomialLr::new(o, 10, 2.0).unwrap());
    check_schedule("multi_step_2_5_5_9_0.3", |o| MultiStepLr::new(o, &[9, 5, 2, 5], 0.3));
    check_schedule("cosine_annealing_7_0.001", |o| CosineAnnealingLr::new(o, 7, 0.001).unwrap());
    check_schedule("cosine_annealing_10", |o| CosineAnnealingLr::new(o, 10, 0.0).unwrap());
    check_schedule("linear_lr_0.25_1_6", |o| LinearLr::new(o, 0.25, 1.0, 6).unwrap());
    check_schedule("linear_lr_default", |o| LinearLr::new(o, 1.0 / 3.0, 1.0, 5).unwrap());
    check_schedule("linear_lr_1_0_4", |o| LinearLr::new(o, 1.0, 0.0, 4).unwrap());
    check_schedule("lambda_0.95", |o| LambdaLr::new(o, |step| 0.95f64.powf(step as f64)));
}

#[test]
fn optim_one_cycle_follows_pytorch() {
    check_schedule("one_cycle_20", |o| OneCycleLr::new(o, 0.5, 20).unwrap());
    check_schedule("one_cycle_13_linear", |o| {
        let cycle = OneCycle {
            total_steps: 13,
            pct_start: 0.4,
            anneal_strategy: AnnealStrategy::Linear,
            ..OneCycle::default()
        };
        OneCycleLr::with_settings(o, &[0.5], cycle).unwrap()
    });
    check_schedule("one_cycle_30_three_phase", |o| {
        let cycle = OneCycle { total_steps: 30, three_phase: true, ..OneCycle::default() };
        OneCycleLr::with_settings(o, &[0.5], cycle).unwrap()
    });
}

#[test]
fn optim_plateaus_lower_rates_like_pytorch() {
    let document = document(include_str!("../../../parity/optim/plateau.json"));
    for case in document["cases"].as_array().unwrap() {
        let mut options = case["options"].clone();
        if let Some(min_lr) = options.get("min_lr").and_then(Value::as_f64) {
            options["min_lr"] = serde_json::json!([min_lr]);
        }
        let settings: Plateau = serde_json::from_value(options).unwrap();
        let optimizer = two_groups();
        let mut scheduler = ReduceLrOnPlateau::with_settings(&optimizer, settings.clone()).unwrap();
        let rows = case["rows"].as_array().unwrap();
        for (index, (metric, row)) in document["metrics"].as_array().unwrap().iter().zip(rows).enumerate() {
            let what = format!("{settings:?} after metric {index}");
            let before = scheduler.get_last_lr();
            let lowered = scheduler.step(metric.as_f64().unwrap_or(f64::NAN));
            let found = scheduler.get_last_lr();
            assert!(lowered || found == before, "{what}");
            assert_eq!(found, optimizer.handle().learning_rates(), "{what}");
            for (found, wanted) in found.into_iter().zip(floats(&row[0])) {
                assert!((found - wanted).abs() <= 1e-15 * wanted, "{what}: {found}, not {wanted}");
            }
            // Going on from saved state changes nothing.
            let text = serde_json::to_string(&scheduler.state_dict()).unwrap();
            scheduler = ReduceLrOnPlateau::with_settings(&optimizer, settings.clone()).unwrap();
            scheduler.load_state_dict(&serde_json::from_str(&text).unwrap());
            let state = scheduler.state_dict();
            let counts = (state.num_bad_epochs, state.cooldown_counter, state.last_epoch);
            let count = |value: &Value| value.as_u64().unwrap() as usize;
            let wanted = (count(&row[2]), count(&row[3]), index + 1);
            assert_eq!((state.best, counts), (row[1].as_f64(), wanted), "{what}");
        }
    }
}

#[test]
fn optim_clipping_follows_pytorch() {
    let document = document(include_str!("../../../parity/optim/clip.json"));
    for case in document["cases"].as_array().unwrap() {
        let store = ParamStore::new(Device::Cpu);
        let names = ["weight", "bias", "scale"];
        for name in names {
            let grad = tensor(&document["grads"][name], &document["shapes"][name]);
            let param = store.root().param(name, grad.zeros_like()).unwrap();
            set_gradient(&param.local(), Some(&grad)).unwrap();
        }
        let norm_type = case["norm_type"].as_f64().unwrap_or(f64::INFINITY);
        let max_norm = case["max_norm"].as_f64().unwrap();
        let norm =
            clip_grad_norm_(&store.trainable_parameters(), ClipGradNorm { max_norm, norm_type, ..Default::default() })
                .unwrap();
        let what = format!("norm of order {norm_type}, at most {max_norm}");
        assert_close(&[norm.double_value(&[])], &[case["total_norm"].as_f64().unwrap()], 1e-6, &what);
        for name in names {
            let grad = store.get(name).unwrap().grad().unwrap();
            assert_close(&values(&grad), &floats(&case["grads"][name]), 1e-6, &what);
        }
    }
}

#[test]
fn optim_grad_scaler_moves_like_pytorch() {
    let document = document(include_str!("../../../parity/optim/grad_scaler.json"));
    for case in document["cases"].as_array().unwrap() {
        let kwargs: GradScalerKwargs = serde_json::from_value(case["options"].clone()).unwrap();
        let scaler = GradScaler::new(kwargs).unwrap();
        let store = ParamStore::new(Device::Cpu);
        let param = store.root().param("weight", Tensor::from_slice(&[0.5f32])).unwrap();
        let mut optimizer = AdamW::new(&store, 0.1).unwrap();
        let script = document["script"].as_str().unwrap().chars();
        for (number, (event, row)) in script.zip(case["rows"].as_array().unwrap()).enumerate() {
            let factor = match event {
                'i' => f64::INFINITY,
                'n' => f64::NAN,
                _ => 0.25 * (number as f64 + 1.0),
            };
            optimizer.zero_grad().unwrap();
            let loss = (param.get().unwrap() * factor).sum(Kind::Float);
            scaler.scale(&loss).unwrap().backward();
            scaler.step(&mut optimizer).unwrap();
            scaler.update().unwrap();
            let state = scaler.state_dict().unwrap().unwrap();
            let what = format!("step {number} ({event})");
            assert_eq!(optimizer.handle().step_was_skipped(), event != '.', "{what}");
            assert_eq!(state.scale, row["scale"].as_f64().unwrap(), "{what}");
            assert_eq!(state.growth_tracker, row["tracker"].as_i64().unwrap(), "{what}");
            assert_close(&values(&param.get().unwrap()), &[row["param"].as_f64().unwrap()], 1e-6, &what);
        }
    }
}
