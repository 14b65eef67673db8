//! The state of a schedule is taken by schedules of the same kind, and by no others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, ParamStore};
use accelerate::optim::{
    ConstantWithWarmup, CosineAnnealingLr, CosineWithHardRestartsWithWarmup, CosineWithWarmup, ExponentialLr,
    InverseSqrtWithWarmup, LambdaLr, LinearLr, LinearWithWarmup, LrScheduler, MultiStepLr, OneCycleLr, PolynomialLr,
    PolynomialWithWarmup, SchedulerState, Sgd, StepLr, Warmup,
};
use accelerate::tch::Device;
use accelerate::{Accelerator, Result};
use rstest::rstest;
use serde_json::{Value, json};

type Schedule = Box<dyn LrScheduler>;
type Kind = (&'static str, fn(&Sgd) -> Schedule);

/// A schedule of each kind, by the name of its type.
const KINDS: [Kind; 15] = [
    ("LambdaLr", |sgd| Box::new(LambdaLr::new(sgd, |_| 0.5))),
    ("StepLr", |sgd| Box::new(StepLr::new(sgd, 1, 0.5).unwrap())),
    ("MultiStepLr", |sgd| Box::new(MultiStepLr::new(sgd, &[1], 0.5))),
    ("ExponentialLr", |sgd| Box::new(ExponentialLr::new(sgd, 0.5))),
    ("PolynomialLr", |sgd| Box::new(PolynomialLr::new(sgd, 9, 1.0).unwrap())),
    ("LinearLr", |sgd| Box::new(LinearLr::new(sgd, 0.5, 1.0, 9).unwrap())),
    ("CosineAnnealingLr", |sgd| Box::new(CosineAnnealingLr::new(sgd, 9, 0.0).unwrap())),
    ("OneCycleLr", |sgd| Box::new(OneCycleLr::new(sgd, 1.0, 9).unwrap())),
    ("LinearWithWarmup", |sgd| Box::new(LinearWithWarmup::new(sgd, 2, 9))),
    ("ConstantWithWarmup", |sgd| Box::new(ConstantWithWarmup::new(sgd, 2))),
    ("CosineWithWarmup", |sgd| Box::new(CosineWithWarmup::new(sgd, 2, 9))),
    ("CosineWithHardRestartsWithWarmup", |sgd| Box::new(CosineWithHardRestartsWithWarmup::new(sgd, 2, 9, 1))),
    ("InverseSqrtWithWarmup", |sgd| Box::new(InverseSqrtWithWarmup::new(sgd, 2))),
    ("PolynomialWithWarmup", |sgd| Box::new(PolynomialWithWarmup::new(sgd, 2, 9).unwrap())),
    ("Warmup", |sgd| Box::new(Warmup::new(ExponentialLr::new(sgd, 0.5), 1, 0.0).unwrap())),
];

fn sgd() -> Sgd {
    let store = ParamStore::new(Device::Cpu);
    store.root().param("weight", ([2], Init::Zeros)).unwrap();
    Sgd::builder(&store).lr(1.0).momentum(0.9).build().unwrap()
}

/// What a schedule saves after two steps, as JSON.
fn saved(kind: fn(&Sgd) -> Schedule) -> Value {
    let mut scheduler = kind(&sgd());
    scheduler.step().unwrap();
    scheduler.step().unwrap();
    serde_json::to_value(scheduler.state_dict().unwrap()).unwrap()
}

fn load(scheduler: &mut dyn LrScheduler, state: &Value) -> Result<()> {
    let state: SchedulerState = serde_json::from_value(state.clone()).unwrap();
    scheduler.load_state_dict(&state)
}

#[test]
fn every_kind_takes_its_own_state_and_that_of_no_other() {
    for (saving, from) in KINDS {
        let state = saved(from);
        assert_eq!(state["_scheduler_type"], json!(saving));
        for (loading, to) in KINDS {
            let mut scheduler = to(&sgd());
            let before = scheduler.state_dict().unwrap();
            let loaded = load(&mut *scheduler, &state);
            if saving == loading {
                loaded.unwrap();
                assert_eq!(scheduler.last_epoch(), 2, "{saving}");
                continue;
            }
            let error = loaded.expect_err(&format!("{saving} into {loading}")).to_string();
            assert!(
                error.contains(&format!("the schedule \"{saving}\"")) && error.contains(&format!("but {loading}")),
                "{error}"
            );
            assert_eq!(scheduler.state_dict().unwrap(), before, "{saving} into {loading}");
        }
    }
}

/// As PyTorch saves it, and as earlier versions did.
#[test]
fn a_state_that_does_not_say_its_kind_is_taken() {
    for (name, kind) in KINDS {
        let mut state = saved(kind);
        state.as_object_mut().unwrap().remove("_scheduler_type");
        let inner = state.pointer_mut("/_schedulers/0").and_then(Value::as_object_mut);
        inner.into_iter().for_each(|inner| drop(inner.remove("_scheduler_type")));
        let mut scheduler = kind(&sgd());
        load(&mut *scheduler, &state).unwrap();
        assert_eq!(scheduler.last_epoch(), 2, "{name}");
        // From now on it is said.
        assert_eq!(scheduler.state_dict().unwrap().scheduler_type.as_deref(), Some(name));
    }
}

/// What is changed in the state of a warmup before an exponential decay, and the words of the error.
#[rstest]
#[case::another_one_follows("/_schedulers/0/_scheduler_type", json!("StepLr"), "the schedule \"StepLr\", but ExponentialLr")]
#[case::another_one_around_it("/_scheduler_type", json!("MyWarmup"), "the schedule \"MyWarmup\", but Warmup")]
#[case::a_long_name("/_scheduler_type", json!("x".repeat(100_000)), "(100000 bytes), but Warmup,")]
#[case::no_name("/_scheduler_type", json!(""), "the schedule \"\", but Warmup")]
#[case::none_follows("/_schedulers", json!([]), "state of the schedule \"Warmup\" holds 0 inner schedules, but Warmup has 1")]
fn a_warmup_takes_all_of_its_state_or_none(#[case] pointer: &str, #[case] value: Value, #[case] words: &str) {
    let warmup = KINDS[14].1;
    let mut state = saved(warmup);
    *state.pointer_mut(pointer).unwrap() = value;
    let mut scheduler = warmup(&sgd());
    let before = scheduler.state_dict().unwrap();
    let error = load(&mut *scheduler, &state).unwrap_err().to_string();
    assert!(error.contains(words) && error.len() < 600, "{error}");
    assert_eq!(scheduler.state_dict().unwrap(), before);
}

#[test]
fn load_state_names_both_schedules_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = || Accelerator::builder().cpu(true).build().unwrap();
    let saving = accelerator();
    let optimizer = sgd();
    let scheduler = OneCycleLr::new(&optimizer, 4.0, 9).unwrap();
    let (mut optimizer, mut scheduler) = saving.prepare((optimizer, scheduler)).unwrap();
    optimizer.step().unwrap();
    scheduler.step().unwrap();
    saving.save_state(folder.path()).unwrap();

    let loading = accelerator();
    let optimizer = sgd();
    let scheduler = StepLr::new(&optimizer, 1, 0.5).unwrap();
    let (optimizer, scheduler) = loading.prepare((optimizer, scheduler)).unwrap();
    let error = loading.load_state(folder.path()).unwrap_err();
    assert!(error.is_checkpoint(), "{error}");
    let words = [
        "checkpoint.json",
        "scheduler: the state was saved by",
        "\"OneCycleLr\", but StepLr",
        "Load it into the schedule",
    ];
    assert!(words.iter().all(|words| error.to_string().contains(words)), "{error}");
    assert_eq!((scheduler.get_last_lr(), optimizer.handle().get_lr(0).unwrap()), (vec![1.0], 1.0));
}
