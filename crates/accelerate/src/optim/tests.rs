//! Prepared optimizers and schedulers, shared loss scaling, saved state, refused settings.

mod memory;
mod schedules;

use super::*;
use crate::nn::{Init, ParamStore};
use crate::session::Session;
use accelerate_core::config::GradScalerKwargs;
use accelerate_core::schedule::SchedulerUnit;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{gradient_of, set_gradient};

/// A store with one weight of one element, 1.0.
fn one_weight() -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    store.root().param("weight", Tensor::from_slice(&[1.0f32])).unwrap();
    store
}

fn weight(store: &ParamStore) -> f64 {
    store.get("weight").unwrap().local().double_value(&[0])
}

fn set_grad(store: &ParamStore, grad: f32) {
    set_gradient(&store.get("weight").unwrap().local(), Some(&Tensor::from_slice(&[grad]))).unwrap();
}

fn grad(store: &ParamStore) -> Option<f64> {
    let grad = gradient_of(&store.get("weight").unwrap().local()).unwrap();
    grad.map(|grad| grad.double_value(&[0]))
}

fn scaler(init_scale: f64, growth_interval: u32) -> GradScaler {
    GradScaler::new(GradScalerKwargs {
        init_scale: Some(init_scale),
        growth_interval: Some(growth_interval),
        ..Default::default()
    })
    .unwrap()
}

/// The scale exists from the first scaled loss on.
fn start_scaling(scaler: &GradScaler) {
    assert!(scaler.scale(&Tensor::from(1.0f32)).unwrap().defined());
}

fn reference(num_processes: usize, split_batches: bool) -> SchedulerOptions {
    SchedulerOptions { num_processes, split_batches, step_with_optimizer: true, unit: SchedulerUnit::Reference }
}

#[test]
fn optim_scheduler_moves_by_processes_like_the_reference() {
    let plain = |options: SchedulerOptions| SchedulerOptions { step_with_optimizer: false, ..options };
    let by_step = |options: SchedulerOptions| SchedulerOptions { unit: SchedulerUnit::OptimizerStep, ..options };
    for (options, ticks) in [
        (reference(1, false), 1),
        (reference(2, false), 2),
        (reference(4, false), 4),
        (reference(4, true), 1),
        (plain(reference(4, false)), 1),
        (by_step(reference(4, false)), 1),
    ] {
        let (store, session) = (one_weight(), Session::single_process());
        let optimizer = Sgd::new(&store, 1.0).unwrap();
        let lambda = LambdaLr::new(&optimizer, |n| 1.0 - n as f64 / 10.0);
        let mut optimizer = AcceleratedOptimizer::new(optimizer, session.clone(), None, None);
        let mut scheduler = AcceleratedScheduler::new(lambda, session, options);
        optimizer.step().unwrap();
        scheduler.step().unwrap();
        assert_eq!(scheduler.get_last_lr(), [1.0 - f64::from(ticks) / 10.0], "{options:?}");
        assert_eq!(scheduler.ticks_per_step(), ticks as usize, "{options:?}");
        let text = scheduler.describe();
        assert_eq!(text.contains(&format!(" {ticks} steps ")), 1 < ticks, "{text}");
    }
}

#[test]
fn optim_schedule_ends_at_zero_with_any_accumulation() {
    for (num_steps, num_processes) in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)] {
        let (store, session) = (one_weight(), Session::single_process());
        session.gradient_state.set_num_steps(num_steps).unwrap();
        let num_batches = 16;
        let total = num_batches / num_steps * num_processes;
        let optimizer = Sgd::new(&store, 1.0).unwrap();
        let linear = LinearWithWarmup::new(&optimizer, 0, total);
        let mut optimizer = AcceleratedOptimizer::new(optimizer, session.clone(), None, None);
        let mut scheduler = AcceleratedScheduler::new(linear, session.clone(), reference(num_processes, false));
        for batch in 0..num_batches {
            assert!(0.0 < scheduler.get_last_lr()[0], "batch {batch} of accumulation {num_steps}");
            session.gradient_state.begin_micro_batch();
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        assert_eq!(scheduler.get_last_lr(), [0.0], "accumulation {num_steps}, {num_processes} processes");
    }
}

#[test]
fn optim_nothing_moves_while_gradients_accumulate() {
    let (store, session) = (one_weight(), Session::single_process());
    let optimizer = Sgd::new(&store, 0.5).unwrap();
    let exponential = ExponentialLr::new(&optimizer, 0.5);
    let mut optimizer = AcceleratedOptimizer::new(optimizer, session.clone(), None, None);
    let mut scheduler = AcceleratedScheduler::new(exponential, session.clone(), reference(1, false));
    set_grad(&store, 1.0);
    session.gradient_state.set_sync_gradients(false);
    optimizer.step().unwrap();
    scheduler.step().unwrap();
    optimizer.zero_grad().unwrap();
    assert_eq!((weight(&store), grad(&store), scheduler.get_last_lr()), (1.0, Some(1.0), vec![0.5]));
    session.gradient_state.set_sync_gradients(true);
    optimizer.step().unwrap();
    scheduler.step().unwrap();
    optimizer.zero_grad().unwrap();
    assert_eq!((weight(&store), grad(&store), scheduler.get_last_lr()), (0.5, None, vec![0.25]));
}

#[test]
fn optim_one_cycle_survives_rounding_up_but_not_running_on() {
    let run = |options: SchedulerOptions, num_steps: usize| -> crate::Result<Vec<f64>> {
        let (store, session) = (one_weight(), Session::single_process());
        let optimizer = Sgd::builder(&store).momentum(0.9).build()?;
        let cycle = OneCycleLr::new(&optimizer, 1.0, 10)?;
        let mut optimizer = AcceleratedOptimizer::new(optimizer, session.clone(), None, None);
        let mut scheduler = AcceleratedScheduler::new(cycle, session, options);
        for _ in 0..num_steps {
            optimizer.step()?;
            scheduler.step()?;
        }
        Ok(scheduler.get_last_lr())
    };
    let end = 1.0 / 25.0 / 1e4;
    for num_steps in [3, 4, 7] {
        let found = run(reference(4, false), num_steps).unwrap()[0];
        assert!((found - end).abs() < 1e-12, "{found} after {num_steps} steps");
    }
    run(reference(4, true), 10).unwrap();
    let error = run(reference(4, true), 11).unwrap_err().to_string();
    assert!(error.contains("11 times") && error.contains("only 10 steps"), "{error}");
}

#[test]
fn optim_overflow_skips_step_and_schedule() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let (store, session) = (one_weight(), Session::single_process());
        let optimizer = AdamW::new(&store, 0.1).unwrap();
        let exponential = ExponentialLr::new(&optimizer, 0.5);
        let scaler = scaler(8.0, 100);
        let mut optimizer = AcceleratedOptimizer::new(optimizer, session.clone(), Some(scaler.clone()), None);
        let mut scheduler = AcceleratedScheduler::new(exponential, session, reference(1, false));
        for (gradient, skipped, scale) in [(bad, true, 4.0), (4.0, false, 4.0), (bad, true, 2.0)] {
            let (before, rate) = (weight(&store), scheduler.get_last_lr()[0]);
            start_scaling(&scaler);
            set_grad(&store, gradient);
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            assert_eq!(optimizer.step_was_skipped(), skipped, "{gradient}");
            assert_eq!(weight(&store) == before, skipped, "{gradient}");
            assert_eq!(scheduler.get_last_lr()[0] == rate, skipped, "{gradient}");
            assert_eq!(scaler.get_scale().unwrap(), scale, "{gradient}");
        }
        let steps = &optimizer.state_dict().unwrap().tensors["step.weight"];
        assert_eq!(steps.double_value(&[]), 1.0);
    }
}

#[test]
fn optim_gradients_are_unscaled_once_per_step() {
    let (store, session) = (one_weight(), Session::single_process());
    let scaler = scaler(8.0, 100);
    let optimizer = Sgd::new(&store, 1.0).unwrap();
    let mut optimizer = AcceleratedOptimizer::new(optimizer, session, Some(scaler.clone()), None);
    for _ in 0..2 {
        start_scaling(&scaler);
        set_grad(&store, 4.0);
        // Clipping unscales; a second clipping and the step must not do it again.
        scaler.unscale_(optimizer.handle()).unwrap();
        scaler.unscale_(optimizer.handle()).unwrap();
        assert_eq!(grad(&store), Some(0.5));
        optimizer.step().unwrap();
    }
    assert_eq!(weight(&store), 0.0);
    // Unscaled, then dropped: what comes next is scaled again.
    set_grad(&store, 4.0);
    scaler.unscale_(optimizer.handle()).unwrap();
    optimizer.zero_grad().unwrap();
    set_grad(&store, 4.0);
    optimizer.step().unwrap();
    assert_eq!(weight(&store), -0.5);
}

#[test]
fn optim_scale_moves_once_for_all_prepared_optimizers() {
    let session = Session::single_process();
    let (store_a, store_b) = (one_weight(), one_weight());
    let scaler = scaler(8.0, 2);
    let prepare =
        |store| AcceleratedOptimizer::new(Sgd::new(store, 1.0).unwrap(), session.clone(), Some(scaler.clone()), None);
    let (mut a, mut b) = (prepare(&store_a), prepare(&store_b));
    start_scaling(&scaler);
    let mut step = |gradient_a: f32, gradient_b: f32| {
        set_grad(&store_a, gradient_a);
        set_grad(&store_b, gradient_b);
        a.step().unwrap();
        let between = scaler.get_scale().unwrap();
        b.step().unwrap();
        (between, scaler.get_scale().unwrap(), a.step_was_skipped(), b.step_was_skipped())
    };
    // Two good steps are the growth interval; the reference would count four and grow twice.
    assert_eq!(step(1.0, 1.0), (8.0, 8.0, false, false));
    assert_eq!(step(1.0, 1.0), (8.0, 16.0, false, false));
    // An overflow in one of them lowers the scale once, after both.
    assert_eq!(step(f32::NAN, 1.0), (16.0, 8.0, true, false));
    assert_eq!(step(1.0, f32::INFINITY), (8.0, 4.0, false, true));
    assert_eq!(step(f32::INFINITY, f32::INFINITY), (4.0, 2.0, true, true));
    // The scale no longer waits for an optimizer that is gone.
    drop(b);
    set_grad(&store_a, f32::INFINITY);
    a.step().unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 1.0);
}

#[test]
fn optim_gradients_of_a_resting_optimizer_follow_the_scale() {
    let session = Session::single_process();
    let (store_a, store_b) = (one_weight(), one_weight());
    let scaler = scaler(8.0, 100);
    let prepare =
        |store| AcceleratedOptimizer::new(Sgd::new(store, 1.0).unwrap(), session.clone(), Some(scaler.clone()), None);
    let (mut a, mut b) = (prepare(&store_a), prepare(&store_b));
    start_scaling(&scaler);
    // B has gathered a true gradient of 0.5; A steps twice before B does.
    set_grad(&store_b, 4.0);
    set_grad(&store_a, f32::NAN);
    a.step().unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 8.0);
    set_grad(&store_a, 4.0);
    a.step().unwrap();
    // A's second step ended the first. Its own gradient was made, and undone, with the old scale.
    assert_eq!((scaler.get_scale().unwrap(), weight(&store_a)), (4.0, 0.5));
    b.step().unwrap();
    assert_eq!(weight(&store_b), 0.5);
}

#[test]
fn optim_scaler_refuses_what_would_be_wrong() {
    let store = one_weight();
    let mut optimizer = Sgd::new(&store, 1.0).unwrap();
    let scaler = scaler(8.0, 100);
    set_grad(&store, 1.0);
    let message = |result: crate::Result<()>| result.unwrap_err().to_string();
    assert!(message(scaler.step(&mut optimizer)).contains("loss that was scaled before"));
    assert!(message(scaler.update()).contains("before any optimizer"));
    start_scaling(&scaler);
    scaler.step(&mut optimizer).unwrap();
    assert!(message(scaler.step(&mut optimizer)).contains("already stepped"));
    assert!(message(scaler.unscale_(optimizer.handle())).contains("already stepped"));
    scaler.update().unwrap();
    scaler.step(&mut optimizer).unwrap();

    let half = ParamStore::with_kind(Device::Cpu, Kind::Half);
    let param = half.root().param("narrow", ([1], Init::Ones)).unwrap();
    set_gradient(&param.local(), Some(&param.local().ones_like())).unwrap();
    let optimizer = Sgd::new(&half, 1.0).unwrap();
    assert!(message(scaler.unscale_(optimizer.handle())).contains("\"narrow\" is float16"));

    let off = GradScaler::new(GradScalerKwargs { enabled: Some(false), ..Default::default() }).unwrap();
    assert_eq!(off.scale(&Tensor::from(3.0f32)).unwrap().double_value(&[]), 3.0);
    assert_eq!((off.get_scale().unwrap(), off.state_dict().unwrap()), (1.0, None));
    assert!(GradScaler::new(GradScalerKwargs { growth_factor: Some(1.0), ..Default::default() }).is_err());
}

/// Trains three steps on fixed gradients, and returns the weights.
fn train(optimizer: &mut impl Optimizer, store: &ParamStore, steps: std::ops::Range<usize>) -> Vec<f64> {
    for step in steps {
        for (index, param) in store.trainable_parameters().iter().enumerate() {
            let gradient = param.local().full_like(((step * 7 + index * 3) % 5) as f64 - 1.5);
            set_gradient(&param.local(), Some(&gradient)).unwrap();
        }
        optimizer.step().unwrap();
    }
    store.trainable_parameters().iter().map(|p| p.local().double_value(&[0])).collect()
}

fn two_weights() -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    store.root().param("weight", ([2], Init::Ones)).unwrap();
    store.root().param("bias", ([3], Init::Ones)).unwrap();
    store
}

fn check_resume<O: Optimizer>(make: impl Fn(&ParamStore) -> O) {
    let whole_store = two_weights();
    let whole = train(&mut make(&whole_store), &whole_store, 0..6);

    let store = two_weights();
    let mut first = make(&store);
    train(&mut first, &store, 0..3);
    first.handle().set_lr(0, 0.37).unwrap();
    let state = first.state_dict().unwrap();
    drop(first);
    let mut second = make(&store);
    second.load_state_dict(&state).unwrap();
    assert_eq!(second.handle().get_lr(0).unwrap(), 0.37);
    let fresh = make(&store).handle().get_lr(0).unwrap();
    second.handle().set_lr(0, fresh).unwrap();
    assert_eq!(train(&mut second, &store, 3..6), whole);
    // What was saved is a copy: going on did not change it.
    for (key, tensor) in state.tensors.iter().filter(|(key, _)| key.starts_with("step.")) {
        assert_eq!(tensor.double_value(&[]), 3.0, "{key}");
    }
}

#[test]
fn optim_training_goes_on_from_saved_state() {
    check_resume(|store| AdamW::builder(store).amsgrad(true).lr(0.1).build().unwrap());
    check_resume(|store| Adam::new(store, 0.1).unwrap());
    check_resume(|store| Sgd::builder(store).momentum(0.9).lr(0.1).build().unwrap());
    check_resume(|store| Sgd::new(store, 0.1).unwrap());
    check_resume(|store| Adagrad::builder(store).lr(0.1).lr_decay(0.1).build().unwrap());
    check_resume(|store| RMSprop::new(store, 0.1).unwrap());
    check_resume(|store| RMSprop::builder(store).momentum(0.9).build().unwrap());
    check_resume(|store| RMSprop::builder(store).momentum(0.9).centered(true).build().unwrap());
    check_resume(|store| Adafactor::new(store, 0.1).unwrap());
    check_resume(|store| Lion::new(store, 0.1).unwrap());
    check_resume(|store| AdamW8bit::new(store, 0.1).unwrap());
}

#[test]
fn optim_saved_state_that_does_not_fit_is_listed_and_refused() {
    let store = two_weights();
    let mut optimizer = AdamW::new(&store, 0.1).unwrap();
    train(&mut optimizer, &store, 0..1);

    let mut state = optimizer.state_dict().unwrap();
    state.tensors.remove("exp_avg.weight");
    state.tensors.insert("exp_avg_sq.bias".to_string(), Tensor::zeros([4], (Kind::Float, Device::Cpu)));
    state.groups[0].lr = 7.0;
    let error = optimizer.load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains("\"exp_avg.weight\" is missing"), "{error}");
    assert!(error.contains("\"exp_avg_sq.bias\" has shape [4], not [3]"), "{error}");
    assert_eq!(optimizer.handle().get_lr(0).unwrap(), 0.1, "nothing was loaded");

    let other = one_weight();
    let mut other = AdamW::new(&other, 0.1).unwrap();
    let error = other.load_state_dict(&optimizer.state_dict().unwrap()).unwrap_err().to_string();
    assert!(error.contains("unknown parameter \"bias\""), "{error}");
    let error = Sgd::new(&store, 0.1).unwrap().load_state_dict(&optimizer.state_dict().unwrap());
    assert!(error.unwrap_err().to_string().contains("another optimizer has saved it"));
}

/// A saved state with another value at a place of its groups.
fn forged(optimizer: &impl Optimizer, pointer: &str, value: serde_json::Value) -> OptimizerState {
    let state = optimizer.state_dict().unwrap();
    let mut groups = serde_json::to_value(&state.groups).unwrap();
    *groups.pointer_mut(pointer).unwrap() = value;
    OptimizerState { groups: serde_json::from_value(groups).unwrap(), ..state }
}

#[test]
fn optim_saved_settings_that_no_optimizer_can_step_with_are_refused() {
    let store = two_weights();
    fn check(mut optimizer: impl Optimizer, place: &str, found: impl Into<serde_json::Value>, wanted: &str) {
        let before = optimizer.state_dict().unwrap().groups;
        let error = optimizer.load_state_dict(&forged(&optimizer, place, found.into())).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error:?} should contain {wanted:?}");
        assert_eq!(optimizer.state_dict().unwrap().groups, before, "nothing was loaded");
    }
    let adamw = || AdamW::new(&store, 0.1).unwrap();
    check(adamw(), "/0/weight_decay", -0.1, "of group 0, AdamW: weight_decay is -0.1");
    check(adamw(), "/0/momentum", 1.0, "beta1 is 1");
    check(adamw(), "/0/options/eps", -1.0, "eps is -1");
    check(Adam::new(&store, 0.1).unwrap(), "/0/options/betas/1", 1.5, "beta2 is 1.5");
    check(Lion::new(&store, 0.1).unwrap(), "/0/options/betas/1", -0.5, "beta2 is -0.5");
    check(AdamW8bit::new(&store, 0.1).unwrap(), "/0/momentum", 1.5, "beta1 is 1.5");
    check(Sgd::new(&store, 0.1).unwrap(), "/0/momentum", -0.9, "momentum is -0.9");
    check(Sgd::builder(&store).momentum(0.9).nesterov(true).build().unwrap(), "/0/options/dampening", 0.5, "dampening");
    check(Adagrad::new(&store, 0.1).unwrap(), "/0/options/lr_decay", -1.0, "lr_decay is -1");
    check(RMSprop::new(&store, 0.1).unwrap(), "/0/options/alpha", -0.1, "alpha is -0.1");
    check(Adafactor::new(&store, 0.1).unwrap(), "/0/options/d", 0.5, "d is 0.5");
}

#[test]
fn optim_a_learning_rate_that_is_no_number_is_neither_stepped_with_nor_saved() {
    let store = two_weights();
    let mut optimizer = Sgd::new(&store, 0.1).unwrap();
    train(&mut optimizer, &store, 0..1);
    optimizer.handle().set_lr(0, f64::NAN).unwrap();
    let before = store.get("weight").unwrap().local().copy();
    store.get("weight").unwrap().get().unwrap().sum(None).backward();
    for error in [optimizer.step().unwrap_err(), optimizer.state_dict().unwrap_err()] {
        assert!(error.to_string().contains("Sgd: lr is NaN"), "{error}");
    }
    assert_eq!(store.get("weight").unwrap().local(), before);
}

#[test]
fn optim_builders_refuse_impossible_settings() {
    let store = two_weights();
    let param = store.get("weight").unwrap();
    let twice = vec![ParamGroup::new(vec![param.clone()]), ParamGroup::new(vec![param.clone()])];
    let refused: Vec<(crate::Result<()>, &str)> = vec![
        (AdamW::new(&store, -0.1).map(drop), "lr is -0.1"),
        (AdamW::new(&store, f64::NAN).map(drop), "lr is NaN"),
        (Adam::builder(&store).betas((1.0, 0.9)).build().map(drop), "beta1 is 1"),
        (Adam::builder(&store).betas((0.9, -0.1)).build().map(drop), "beta2 is -0.1"),
        (AdamW::builder(&store).eps(-1.0).build().map(drop), "eps is -1"),
        (Sgd::builder(&store).momentum(-0.9).build().map(drop), "momentum is -0.9"),
        (Sgd::builder(&store).nesterov(true).build().map(drop), "momentum above 0"),
        (Adagrad::builder(&store).lr_decay(-1.0).build().map(drop), "lr_decay is -1"),
        (RMSprop::builder(&store).alpha(-0.1).build().map(drop), "alpha is -0.1"),
        (RMSprop::builder(&store).eps(f64::NAN).build().map(drop), "eps is NaN"),
        (RMSprop::builder(&store).momentum(-1.0).build().map(drop), "momentum is -1"),
        (Adafactor::new(&store, f64::INFINITY).map(drop), "lr is inf"),
        (Adafactor::builder(&store).beta2_decay(0.1).build().map(drop), "beta2_decay is 0.1"),
        (Adafactor::builder(&store).d(0.9).build().map(drop), "d is 0.9"),
        (Adafactor::builder(&store).eps((Some(-1.0), 1e-3)).build().map(drop), "eps1 is -1"),
        (Adafactor::builder(&store).eps((None, -1.0)).build().map(drop), "eps2 is -1"),
        (Lion::builder(&store).betas((0.9, 1.0)).build().map(drop), "beta2 is 1"),
        (Lion::builder(&store).betas((-0.5, 0.9)).build().map(drop), "beta1 is -0.5"),
        (AdamW8bit::builder(&store).betas((1.5, 0.9)).build().map(drop), "beta1 is 1.5"),
        (AdamW8bit::builder(&store).eps(-1.0).build().map(drop), "eps is -1"),
        (
            AdamW8bit::builder(&store).param_groups(vec![ParamGroup::new(vec![param]).momentum(1.0)]).build().map(drop),
            "beta1 is 1",
        ),
        (
            AdamW::builder(&store).param_groups(twice).build().map(drop),
            "\"weight\" is in parameter group 0 and again in group 1",
        ),
        (AdamW::new(&ParamStore::new(Device::Cpu), 0.1).map(drop), "no parameters to train"),
    ];
    for (result, wanted) in refused {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(wanted), "{error:?} should contain {wanted:?}");
    }
    let optimizer = Adagrad::new(&store, 0.1).unwrap();
    let error = OneCycleLr::new(&optimizer, 1.0, 10).unwrap_err().to_string();
    assert!(error.contains("Adagrad has neither"), "{error}");
    assert!(OneCycleLr::new(&AdamW::new(&store, 0.1).unwrap(), 1.0, 0).is_err());
    assert!(LambdaLr::per_group(&optimizer, Vec::new()).is_err());
    assert!(CosineAnnealingLr::new(&optimizer, 0, 0.0).is_err());
    for (settings, wanted) in [
        (Plateau { factor: 1.0, ..Plateau::default() }, "factor"),
        (Plateau { threshold: -0.1, ..Plateau::default() }, "threshold"),
        (Plateau { min_lr: vec![0.0, 0.1], ..Plateau::default() }, "2 minimal rates"),
    ] {
        let error = ReduceLrOnPlateau::with_settings(&optimizer, settings).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    assert!(optimizer.handle().set_lr(1, 0.1).unwrap_err().to_string().contains("no parameter group 1"));
}

#[test]
fn optim_parameters_of_several_dtypes_step_together() {
    let store = two_weights();
    let narrow = Tensor::ones([3], (Kind::BFloat16, Device::Cpu));
    store.root().param("narrow", narrow).unwrap();
    let mut optimizer = AdamW::builder(&store).lr(0.5).weight_decay(0.0).build().unwrap();
    for param in store.trainable_parameters() {
        set_gradient(&param.local(), Some(&param.local().ones_like())).unwrap();
    }
    optimizer.step().unwrap();
    for param in store.trainable_parameters() {
        assert!((param.local().double_value(&[0]) - 0.5).abs() < 1e-2, "{}", param.name());
    }
    let state = optimizer.state_dict().unwrap();
    assert_eq!(state.tensors["exp_avg.narrow"].kind(), Kind::BFloat16);
    assert_eq!(state.tensors["step.narrow"].kind(), Kind::Float);
}

#[test]
fn optim_frozen_and_untouched_parameters_stay() {
    let store = two_weights();
    store.get("bias").unwrap().set_requires_grad(false).unwrap();
    let mut optimizer = AdamW::new(&store, 0.1).unwrap();
    assert_eq!(optimizer.handle().params().count(), 1);
    optimizer.step().unwrap();
    assert_eq!(store.get("weight").unwrap().local().double_value(&[0]), 1.0);
    assert!(optimizer.state_dict().unwrap().tensors.is_empty());
}

#[test]
fn optim_clipping_handles_the_edges() {
    let store = two_weights();
    let params = store.trainable_parameters();
    assert_eq!(clip_grad_norm_(&params, 1.0).unwrap().double_value(&[]), 0.0);
    let weight = store.get("weight").unwrap();
    set_gradient(&weight.local(), Some(&Tensor::from_slice(&[f32::INFINITY, 1.0]))).unwrap();
    let strict = ClipGradNorm { error_if_nonfinite: true, ..ClipGradNorm::default() };
    let error = clip_grad_norm_(&params, strict).unwrap_err().to_string();
    assert!(error.contains("order 2") && error.contains("inf"), "{error}");
    assert_eq!(weight.grad().unwrap().double_value(&[1]), 1.0, "an error changes nothing");
    clip_grad_value_(&params, 3.0).unwrap();
    assert_eq!(weight.grad().unwrap().double_value(&[0]), 3.0);
}

#[test]
fn optim_schedules_go_on_from_saved_state() {
    let store = one_weight();
    let mut optimizer = Sgd::new(&store, 1.0).unwrap();
    let mut first = LinearWithWarmup::new(&optimizer, 2, 10);
    for _ in 0..4 {
        optimizer.step().unwrap();
        first.step().unwrap();
    }
    let state: SchedulerState =
        serde_json::from_str(&serde_json::to_string(&first.state_dict().unwrap()).unwrap()).unwrap();
    let saved = optimizer.state_dict().unwrap();
    let mut other = Sgd::new(&store, 1.0).unwrap();
    let mut second = LinearWithWarmup::new(&other, 2, 10);
    second.load_state_dict(&state).unwrap();
    other.load_state_dict(&saved).unwrap();
    assert_eq!(other.handle().get_lr(0).unwrap(), 0.75);
    assert_eq!(second.get_last_lr(), [0.75]);
    second.step().unwrap();
    assert_eq!(other.handle().get_lr(0).unwrap(), 0.625);
    let wrong = SchedulerState { last_epoch: usize::MAX, ..state.clone() };
    assert!(second.load_state_dict(&wrong).unwrap_err().to_string().contains("which no run takes"));
    let wrong = SchedulerState { base_lrs: vec![], ..state };
    assert!(second.load_state_dict(&wrong).unwrap_err().to_string().contains("1 parameter groups"));
}
