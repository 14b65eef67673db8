//! Schedules around schedules: where they stop and go on, and what they refuse.

use super::*;

/// Steps optimizer and schedule, and returns the rates from the present one on.
fn rates(optimizer: &mut Sgd, scheduler: &mut impl LrScheduler, steps: usize) -> Vec<f64> {
    let mut rates = scheduler.get_last_lr();
    for _ in 0..steps {
        optimizer.step().unwrap();
        scheduler.step().unwrap();
        rates.extend(scheduler.get_last_lr());
    }
    assert_eq!(rates.last(), optimizer.handle().learning_rates().last());
    rates
}

#[test]
fn optim_a_warmup_goes_on_from_every_step() {
    let store = one_weight();
    let start = |lr: f64| {
        let optimizer = Sgd::new(&store, lr).unwrap();
        let scheduler = Warmup::new(StepLr::new(&optimizer, 2, 0.5).unwrap(), 4, 0.0).unwrap();
        (optimizer, scheduler)
    };
    let (mut optimizer, mut scheduler) = start(1.0);
    let whole = rates(&mut optimizer, &mut scheduler, 10);
    assert_eq!(whole, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]);
    for stop in 0..whole.len() {
        let (mut optimizer, mut scheduler) = start(1.0);
        rates(&mut optimizer, &mut scheduler, stop);
        let text = serde_json::to_string(&scheduler.state_dict().unwrap()).unwrap();
        // The rate in the new program's text does not count any more.
        let (mut second, mut resumed) = start(7.0);
        resumed.load_state_dict(&serde_json::from_str(&text).unwrap()).unwrap();
        second.load_state_dict(&optimizer.state_dict().unwrap()).unwrap();
        assert_eq!(resumed.last_epoch(), stop);
        assert_eq!(rates(&mut second, &mut resumed, 10 - stop), whole[stop..], "stopped after {stop} steps");
    }
}

#[test]
fn optim_a_warmup_rises_to_the_first_rate_of_a_cycle_and_adds_its_steps() {
    let store = one_weight();
    let mut optimizer = Sgd::builder(&store).lr(9.0).momentum(0.9).build().unwrap();
    let cycle = OneCycleLr::new(&optimizer, 1.0, 5).unwrap();
    let first = cycle.get_last_lr()[0];
    let mut scheduler = Warmup::new(cycle, 2, 0.5).unwrap();
    assert_eq!(scheduler.total_steps(), Some(7));
    assert_eq!(rates(&mut optimizer, &mut scheduler, 2), [0.5 * first, 0.75 * first, first]);
    assert_eq!(optimizer.handle().get_momentum(0).unwrap(), 0.95);
    rates(&mut optimizer, &mut scheduler, 5);
    assert!(scheduler.step().unwrap_err().to_string().contains("only 5 steps"));
    assert_eq!((scheduler.last_epoch(), scheduler.inner().last_epoch()), (7, 5));
}

#[test]
fn optim_schedules_refuse_what_cannot_be_meant() {
    let store = one_weight();
    let mut optimizer = Sgd::new(&store, 0.5).unwrap();
    let lambda = |optimizer: &Sgd| LambdaLr::new(optimizer, |_| 1.0);
    let mut stepped = lambda(&optimizer);
    rates(&mut optimizer, &mut stepped, 3);
    let polynomial = |lr_end, power| PolynomialWithWarmup::with_settings(&optimizer, 0, 4, lr_end, power).map(|_| ());
    for (result, words) in [
        (Warmup::new(stepped, 2, 0.0).map(|_| ()), "last_epoch of the schedule to warm up is 3, but it has to be 0"),
        (Warmup::new(lambda(&optimizer), 2, 1.5).map(|_| ()), "start_factor is 1.5"),
        (Warmup::new(lambda(&optimizer), 2, f64::NAN).map(|_| ()), "start_factor is NaN"),
        (LinearLr::new(&optimizer, 0.0, 1.0, 2).map(|_| ()), "Warmup begins at 0"),
        (LinearLr::new(&optimizer, 0.5, -1.0, 2).map(|_| ()), "end_factor is -1"),
        (LinearLr::new(&optimizer, 0.5, 1.0, 0).map(|_| ()), "total_iters is 0"),
        (polynomial(0.5, 1.0), "lr_end is 0.5"),
        (polynomial(-0.1, 1.0), "lr_end is -0.1"),
        (polynomial(0.1, 0.0), "power is 0"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let alone = lambda(&optimizer).state_dict().unwrap();
    let mut warm = Warmup::new(lambda(&optimizer), 2, 0.0).unwrap();
    let error = warm.load_state_dict(&alone).unwrap_err().to_string();
    assert!(error.contains("holds 0 inner schedules, but Warmup has 1"), "{error}");
}
