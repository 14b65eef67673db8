//! DeepSpeed configurations filled from the objects that are passed to `prepare`: numbers about batches, and dummies.

use super::deep_speed_resolve::{loaders, refuses, resolve};
use accelerate_core::config::*;
use rstest::rstest;
use serde_json::{Value, json};

/// train, micro, accumulation; absent as `null`, on two processes.
#[rstest]
#[case::loaders(json!(["auto", "auto", "auto"]), &[8, 16], None, [16, 8, 1])]
#[case::accelerator(json!(["auto", "auto", "auto"]), &[8], Some(4), [64, 8, 4])]
#[case::nothing(json!([null, null, null]), &[8], None, [16, 8, 1])]
#[case::accelerator_of_nothing(json!([null, null, null]), &[8], Some(3), [48, 8, 3])]
#[case::written(json!([32, 4, 4]), &[], None, [32, 4, 4])]
#[case::written_twice(json!([32, 4, 4]), &[4], Some(4), [32, 4, 4])]
#[case::no_train(json!([null, 4, 3]), &[], None, [24, 4, 3])]
#[case::no_micro(json!([24, null, 3]), &[], None, [24, 4, 3])]
#[case::no_micro_whatever_loaders(json!([24, null, 3]), &[5], None, [24, 4, 3])]
#[case::no_micro_and_no_loader(json!([24, "auto", 3]), &[], None, [24, 4, 3])]
#[case::no_accumulation(json!([24, 4, null]), &[], None, [24, 4, 3])]
#[case::no_accumulation_by_loader(json!([24, "auto", null]), &[4], None, [24, 4, 3])]
#[case::train_alone(json!([24, null, null]), &[], None, [24, 12, 1])]
fn batches(#[case] written: Value, #[case] sizes: &[usize], #[case] given: Option<usize>, #[case] wanted: [usize; 3]) {
    let document = json!({
        "train_batch_size": written[0], "train_micro_batch_size_per_gpu": written[1],
        "gradient_accumulation_steps": written[2], "zero_optimization": {}
    });
    let facts = DeepSpeedFacts { gradient_accumulation_steps: given, ..loaders(sizes) };
    let found = resolve(document, &facts).unwrap();
    let found = [found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps];
    assert_eq!(found, wanted.map(Some));
}

#[rstest]
#[case::product(json!([16, 4, 4]), &[], None,
    "train_batch_size is 16, but train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 4 * 2 processes is 32; \
     write 32 or \"auto\"")]
#[case::auto_accumulation(json!([16, 4, "auto"]), &[], None, "gradient_accumulation_steps 1 * 2 processes is 8")]
#[case::by_loader(json!([24, "auto", 3]), &[5], None,
    "per_gpu 5 (that of the loaders) * gradient_accumulation_steps 3 * 2 processes is 30")]
#[case::accumulation(json!([24, 5, null]), &[], None,
    "train_batch_size is 24, which cannot be divided by train_micro_batch_size_per_gpu * 2 processes to give \
     gradient_accumulation_steps; make it a multiple of 10")]
#[case::micro(json!([24, null, 5]), &[], None, "to give train_micro_batch_size_per_gpu; make it a multiple of 10")]
#[case::other_accumulation(json!([32, 4, 4]), &[], Some(2),
    "gradient_accumulation_steps is 4, but gradient_accumulation_steps of the accelerator is 2")]
fn no_batches(#[case] written: Value, #[case] sizes: &[usize], #[case] given: Option<usize>, #[case] message: &str) {
    let document = json!({
        "train_batch_size": written[0], "train_micro_batch_size_per_gpu": written[1],
        "gradient_accumulation_steps": written[2], "zero_optimization": {}
    });
    let facts = DeepSpeedFacts { gradient_accumulation_steps: given, ..loaders(sizes) };
    refuses(resolve(document, &facts), &[message]);
}

#[test]
fn loaders_tell_the_micro_batch() {
    let document = || json!({"zero_optimization": {}, "train_micro_batch_size_per_gpu": "auto"});
    let plugin = DeepSpeedSettings { is_train_batch_min: false, ..Default::default() };
    let facts = loaders(&[8, 16]);
    let config = plugin.config(&|_| Ok(String::new())).unwrap();
    assert_eq!(plugin.resolve(&config, &facts).unwrap().train_micro_batch_size_per_gpu, Some(16));
    let split = DeepSpeedFacts { split_batches: true, ..facts };
    assert_eq!(resolve(document(), &split).unwrap().train_micro_batch_size_per_gpu, Some(4));
    let tiny = DeepSpeedFacts { split_batches: true, ..loaders(&[1]) };
    refuses(resolve(document(), &tiny), &["fewer rows than there are processes"]);
    refuses(resolve(document(), &with_a_stream()), &["has no batch size"]);
    let nobody = DeepSpeedFacts { world_size: 0, ..Default::default() };
    refuses(resolve(document(), &nobody), &["world_size is 0"]);
}

/// Two loaders, of which one is not cut into batches of one size.
fn with_a_stream() -> DeepSpeedFacts {
    let objects = PreparedFacts { batch_sizes: vec![Some(8), None], ..Default::default() };
    DeepSpeedFacts { objects, ..loaders(&[]) }
}

/// train, micro, accumulation as written, and as resolved before there is a loader and after one of 4 rows was prepared.
#[rstest]
#[case::autos(json!(["auto", "auto", "auto"]), [None, None, Some(1)], [Some(8), Some(4), Some(1)])]
#[case::nothing(json!([null, null, 3]), [None, None, Some(3)], [Some(24), Some(4), Some(3)])]
#[case::steps_by_loaders(json!([24, "auto", null]), [Some(24), None, None], [Some(24), Some(4), Some(3)])]
#[case::micro_by_division(json!([24, "auto", 3]), [Some(24), Some(4), Some(3)], [Some(24), Some(4), Some(3)])]
fn what_only_loaders_tell_is_open_before_them(
    #[case] written: Value,
    #[case] before: [Option<usize>; 3],
    #[case] after: [Option<usize>; 3],
) {
    let document = json!({
        "train_batch_size": written[0], "train_micro_batch_size_per_gpu": written[1],
        "gradient_accumulation_steps": written[2], "zero_optimization": {}
    });
    let batch = |facts: &DeepSpeedFacts| {
        let found = resolve(document.clone(), facts).unwrap();
        [found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps]
    };
    assert_eq!((batch(&loaders(&[])), batch(&loaders(&[4]))), (before, after));
}

/// A loader that cannot tell is an error only where it would have to.
#[test]
fn a_stream_beside_numbers_that_are_written() {
    let zero = json!({});
    let document = |train: Value, steps: Value| {
        json!({"zero_optimization": zero, "train_batch_size": train, "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": steps})
    };
    assert_eq!(
        resolve(document(json!(24), json!(3)), &with_a_stream()).unwrap().train_micro_batch_size_per_gpu,
        Some(4)
    );
    refuses(resolve(document(json!(24), json!(null)), &with_a_stream()), &["has no batch size"]);
}

#[rstest]
#[case(json!({"train_micro_batch_size_per_gpu": 4}), "train_micro_batch_size_per_gpu")]
#[case(json!({"train_batch_size": 8}), "train_batch_size")]
fn loaders_of_another_size_are_told(#[case] mut document: Value, #[case] key: &str) {
    document["zero_optimization"] = json!({});
    let keys = |facts: &DeepSpeedFacts| resolve(document.clone(), facts).unwrap().inert_keys;
    assert_eq!(keys(&loaders(&[8])).iter().map(|inert| inert.key.as_str()).collect::<Vec<_>>(), [key]);
    assert_eq!((keys(&loaders(&[4, 8])), keys(&loaders(&[]))), (vec![], vec![]));
}

const DUMMY_OPTIM: OptimizerInCode = OptimizerInCode::Dummy { lr: Some(0.1), weight_decay: Some(0.2) };
pub(super) const SILENT_OPTIM: OptimizerInCode = OptimizerInCode::Dummy { lr: None, weight_decay: None };
const DUMMY_SCHEDULER: SchedulerInCode =
    SchedulerInCode::Dummy { total_num_steps: Some(101), warmup_num_steps: Some(0), has_callable: false };

/// A loader of one row beside these.
pub(super) fn objects(optimizers: &[OptimizerInCode], schedulers: &[SchedulerInCode]) -> DeepSpeedFacts {
    let (optimizers, schedulers) = (optimizers.to_vec(), schedulers.to_vec());
    let objects = PreparedFacts { optimizers, schedulers, batch_sizes: vec![Some(1)] };
    DeepSpeedFacts { objects, ..loaders(&[]) }
}

fn dummies() -> DeepSpeedFacts {
    objects(&[DUMMY_OPTIM], &[DUMMY_SCHEDULER])
}

fn of_autos() -> Value {
    json!({
        "zero_optimization": {},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}}
    })
}

#[test]
fn dummies_fill_optimizer_and_schedule() {
    let found = resolve(of_autos(), &dummies()).unwrap();
    let optimizer = found.optimizer.unwrap();
    assert_eq!((optimizer.lr, optimizer.weight_decay), (0.1, 0.2));
    let schedule = |total_num_steps| DeepSpeedSchedule::WarmupDecayLr {
        warmup_min_lr: 0.0,
        warmup_max_lr: 0.1,
        warmup_num_steps: 1,
        warmup_type: WarmupType::Log,
        total_num_steps,
    };
    assert_eq!(found.scheduler, Some(schedule(51)));
    let mut split = DeepSpeedFacts { split_batches: true, ..dummies() };
    split.objects.batch_sizes = vec![Some(2)];
    assert_eq!(resolve(of_autos(), &split).unwrap().scheduler, Some(schedule(101)));
}

#[test]
fn what_is_not_said_has_defaults() {
    let document = json!({
        "zero_optimization": {}, "optimizer": {"type": "Adagrad"}, "scheduler": {"type": "WarmupLR"}
    });
    let silent = SchedulerInCode::Dummy { total_num_steps: None, warmup_num_steps: None, has_callable: false };
    let found = resolve(document.clone(), &objects(&[SILENT_OPTIM], &[silent])).unwrap();
    let optimizer = found.optimizer.unwrap();
    assert_eq!((optimizer.lr, optimizer.weight_decay), (0.01, 0.0));
    let wanted = DeepSpeedSchedule::WarmupLr {
        warmup_min_lr: 0.0,
        warmup_max_lr: Some(0.01),
        warmup_num_steps: 1000,
        warmup_type: WarmupType::Log,
    };
    assert_eq!(found.scheduler, Some(wanted));
    // Keys that are absent are filled by the dummies, too.
    let optimizer = resolve(document, &objects(&[DUMMY_OPTIM], &[])).unwrap().optimizer.unwrap();
    assert_eq!((optimizer.lr, optimizer.weight_decay), (0.1, 0.2));
}

#[test]
fn the_schedule_rises_to_the_rate_that_the_optimizer_has() {
    let mut document = of_autos();
    document["optimizer"]["params"]["lr"] = json!(0.5);
    let facts = objects(&[SILENT_OPTIM], &[DUMMY_SCHEDULER]);
    let schedule = resolve(document, &facts).unwrap().scheduler.unwrap();
    assert!(matches!(schedule, DeepSpeedSchedule::WarmupDecayLr { warmup_max_lr: 0.5, .. }), "{schedule:?}");
    let mut document = of_autos();
    document["optimizer"] = json!(null);
    let own = |rates: &[f64]| {
        let optimizers: Vec<_> = rates.iter().map(|&lr| OptimizerInCode::Own { lr: Some(lr) }).collect();
        resolve(document.clone(), &objects(&optimizers, &[DUMMY_SCHEDULER]))
    };
    let schedule = own(&[0.25]).unwrap().scheduler.unwrap();
    assert!(matches!(schedule, DeepSpeedSchedule::WarmupDecayLr { warmup_max_lr: 0.25, .. }), "{schedule:?}");
    for rates in [&[][..], &[0.25, 0.5]] {
        refuses(own(rates), &["scheduler.params.warmup_max_lr: the optimizer's rate is not known"]);
    }
}

#[test]
fn autos_that_nothing_fills_are_listed_together() {
    let mut document = of_autos();
    document["optimizer"]["params"]["betas"] = json!("auto");
    document["zero_optimization"]["overlap_comm"] = json!("auto");
    document["train_micro_batch_size_per_gpu"] = json!("auto");
    document["optimizer"]["params"]["lr"] = json!(0.1);
    let silent = SchedulerInCode::Dummy { total_num_steps: None, warmup_num_steps: None, has_callable: false };
    let mut facts = objects(&[SILENT_OPTIM], &[silent]);
    facts.objects.batch_sizes = vec![None];
    refuses(
        resolve(document, &facts),
        &[
            "optimizer.params.betas: nothing in the program tells it",
            "zero_optimization.overlap_comm: nothing in the program tells it",
            "train_micro_batch_size_per_gpu: a loader that was passed to prepare has no batch size",
            "scheduler.params.total_num_steps: the DummyScheduler that was passed to prepare has no total_num_steps",
        ],
    );
}

/// Sections whose dummies come later are no error, and nothing is made of them yet.
#[test]
fn sections_are_open_before_their_dummies() {
    let found = resolve(of_autos(), &loaders(&[])).unwrap();
    assert_eq!((found.optimizer, found.scheduler), (None, None));
    let found = resolve(of_autos(), &objects(&[DUMMY_OPTIM], &[])).unwrap();
    assert!(found.optimizer.is_some() && found.scheduler.is_none());
}

#[test]
fn dummies_become_one_optimizer_and_one_schedule() {
    let other = OptimizerInCode::Dummy { lr: Some(0.3), weight_decay: Some(0.2) };
    for pair in [[DUMMY_OPTIM, other], [other, DUMMY_OPTIM]] {
        let wanted = ["AdamW with lr 0.1 and weight_decay 0.2", "AdamW with lr 0.3", "build_from"];
        refuses(resolve(of_autos(), &objects(&pair, &[])), &wanted);
    }
    let mut document = of_autos();
    document["optimizer"]["params"] = json!({"lr": 0.3, "weight_decay": 0.2});
    assert!(resolve(document, &objects(&[other, SILENT_OPTIM], &[])).is_ok(), "they become the same");
    let longer = SchedulerInCode::Dummy { total_num_steps: Some(201), warmup_num_steps: None, has_callable: false };
    let schedulers = [DUMMY_SCHEDULER, longer];
    refuses(
        resolve(of_autos(), &objects(&[DUMMY_OPTIM], &schedulers)),
        &["the DummySchedulers that were passed", "total_num_steps 51, and", "total_num_steps 101;"],
    );
}

/// What the first call of `prepare` tells, what a later one adds, and what is said of both.
#[rstest]
#[case::same(&[4], &[8], &[])]
#[case::other_steps(&[4], &[2], &["gradient_accumulation_steps is 3 (for batches of 4 rows), as an earlier call",
    "makes it 6 (for batches of 2 rows)"])]
#[case::open_before(&[], &[2], &[])]
fn numbers_in_use_stay(#[case] first: &[usize], #[case] more: &[usize], #[case] messages: &[&str]) {
    let document = json!({"zero_optimization": {}, "train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"});
    let mut facts = loaders(first);
    let earlier = resolve(document.clone(), &facts).unwrap();
    facts.objects.extend(&loaders(more).objects);
    let now = resolve(document, &facts).unwrap();
    let checked = now.check_after(&earlier);
    match messages {
        [] => checked.unwrap(),
        messages => refuses(checked.map(|()| now), messages),
    }
}

#[test]
fn the_schedule_in_use_stays() {
    let mut document = of_autos();
    document["optimizer"] = json!(null);
    document["scheduler"] = json!({"type": "WarmupLR", "params": {"warmup_max_lr": null, "warmup_num_steps": 4}});
    let silent = SchedulerInCode::Dummy { total_num_steps: None, warmup_num_steps: None, has_callable: false };
    let with =
        |rate| resolve(document.clone(), &objects(&[OptimizerInCode::Own { lr: Some(rate) }], &[silent])).unwrap();
    refuses(
        with(0.5).check_after(&with(0.25)).map(|()| with(0.5)),
        &["the schedule of the DeepSpeed configuration is WarmupLR with warmup_max_lr 0.25", "warmup_max_lr 0.5"],
    );
}

#[test]
fn a_summary_says_what_processes_train_by() {
    let found = resolve(of_autos(), &dummies()).unwrap();
    assert_eq!(
        found.summary(),
        "gradient_accumulation_steps 1, AdamW with lr 0.1 and weight_decay 0.2, WarmupDecayLR with warmup_max_lr 0.1, \
         warmup_num_steps 1 and total_num_steps 51"
    );
}

#[test]
fn dummies_that_say_something_else_are_listed_together() {
    let mut document = of_autos();
    document["optimizer"]["params"] = json!({"lr": 0.5, "weight_decay": 0});
    document["scheduler"]["params"] = json!({"warmup_num_steps": 5, "total_num_steps": 101});
    refuses(
        resolve(document, &dummies()),
        &[
            "optimizer.params.lr is 0.5, but lr of the DummyOptim is 0.1",
            "optimizer.params.weight_decay is 0.0, but weight_decay of the DummyOptim is 0.2",
            "scheduler.params.warmup_num_steps is 5, but warmup_num_steps of the DummyScheduler is 1",
            "scheduler.params.total_num_steps is 101, but total_num_steps of the DummyScheduler, per process, is 51",
        ],
    );
}

#[test]
fn mismatches_with_the_program_are_found_here_too() {
    let own = objects(&[OptimizerInCode::Own { lr: None }], &[DUMMY_SCHEDULER]);
    refuses(resolve(of_autos(), &own), &["pass a DummyOptim in its place"]);
}
