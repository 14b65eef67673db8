//! A DeepSpeed configuration is resolved from all objects of a call, and of earlier calls: their order changes nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, DummyOptim, DummyScheduler, LinearWithWarmup};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DataLoaderConfiguration, DeepSpeedPlugin, Result, find_executable_batch_size,
    testing,
};
use rstest::rstest;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn by(json: &str) -> AcceleratorBuilder {
    let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse().unwrap()), ..Default::default() };
    Accelerator::builder().deepspeed_plugin(plugin)
}

fn model(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root() / "linear", 5, 5, Default::default())?;
    linear.weight.copy_(&(Tensor::arange(25, FLOAT) * 0.7).sin().view([5, 5]))?;
    linear.bias.as_ref().unwrap().copy_(&Tensor::zeros([5], FLOAT))?;
    let module = ModuleFn::new(&store, move |input: &Tensor| Ok(linear.forward(input)?.f_tanh()?));
    Ok((store, module))
}

fn loader(batch_size: usize) -> Result<DataLoader<(Tensor, Tensor)>> {
    let rows = Tensor::arange(48 * 5, FLOAT).view([48, 5]);
    DataLoader::builder(TensorDataset::new((rows.sin(), rows.cos()))?).batch_size(batch_size).build()
}

/// Whatever the numbers of a configuration change: windows, rates, losses and weights.
#[derive(Debug, PartialEq)]
struct Outcome {
    num_steps: usize,
    rates: Vec<f64>,
    losses: Vec<f64>,
    weights: Vec<f64>,
}

/// Trains for one epoch, as a macro because each kind of object has a type of its own.
macro_rules! outcome {
    ($accelerator:ident, $store:ident, $model:ident, $optimizer:ident, $scheduler:ident, $loader:ident) => {{
        let (mut rates, mut losses) = (Vec::new(), Vec::new());
        for batch in $loader.iter()? {
            let (rows, wanted) = batch?;
            $accelerator.accumulate(&$model, || {
                let loss = ($model.forward(&rows)? - wanted).f_square()?.f_mean(Kind::Float)? * 100.0;
                losses.push(loss.f_double_value(&[])?);
                $accelerator.backward(&loss)?;
                $optimizer.step()?;
                $scheduler.step()?;
                rates.push($scheduler.get_last_lr()[0]);
                $optimizer.zero_grad()
            })?;
        }
        let mut weights = Vec::new();
        for (_, tensor) in $store.state_dict()?.iter() {
            weights.extend(Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1]))?);
        }
        Ok(Outcome { num_steps: $accelerator.gradient_accumulation_steps(), rates, losses, weights })
    }};
}

/// Calls `$macro!` with the four names in the order number `$number` of all 24.
macro_rules! permuted {
    ($macro:ident, $context:tt, $number:expr, $a:ident, $b:ident, $c:ident, $d:ident) => {
        match $number {
            0 => $macro!($context, $a, $b, $c, $d),
            1 => $macro!($context, $a, $b, $d, $c),
            2 => $macro!($context, $a, $c, $b, $d),
            3 => $macro!($context, $a, $c, $d, $b),
            4 => $macro!($context, $a, $d, $b, $c),
            5 => $macro!($context, $a, $d, $c, $b),
            6 => $macro!($context, $b, $a, $c, $d),
            7 => $macro!($context, $b, $a, $d, $c),
            8 => $macro!($context, $b, $c, $a, $d),
            9 => $macro!($context, $b, $c, $d, $a),
            10 => $macro!($context, $b, $d, $a, $c),
            11 => $macro!($context, $b, $d, $c, $a),
            12 => $macro!($context, $c, $a, $b, $d),
            13 => $macro!($context, $c, $a, $d, $b),
            14 => $macro!($context, $c, $b, $a, $d),
            15 => $macro!($context, $c, $b, $d, $a),
            16 => $macro!($context, $c, $d, $a, $b),
            17 => $macro!($context, $c, $d, $b, $a),
            18 => $macro!($context, $d, $a, $b, $c),
            19 => $macro!($context, $d, $a, $c, $b),
            20 => $macro!($context, $d, $b, $a, $c),
            21 => $macro!($context, $d, $b, $c, $a),
            22 => $macro!($context, $d, $c, $a, $b),
            _ => $macro!($context, $d, $c, $b, $a),
        }
    };
}

const NUM_ORDERS: usize = 24;

/// How the objects reach `prepare`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Calls {
    OneTuple,
    /// Two pairs, one call for each.
    Pairs,
    OneEach,
}

macro_rules! one_tuple {
    ([$accelerator:ident $prepared:expr], $a:ident, $b:ident, $c:ident, $d:ident) => {{
        let ($a, $b, $c, $d) = $accelerator.prepare(($a, $b, $c, $d))?;
        $prepared
    }};
}

macro_rules! pairs {
    ([$accelerator:ident $prepared:expr], $a:ident, $b:ident, $c:ident, $d:ident) => {{
        let ($a, $b) = $accelerator.prepare(($a, $b))?;
        let ($c, $d) = $accelerator.prepare(($c, $d))?;
        $prepared
    }};
}

macro_rules! one_each {
    ([$accelerator:ident $prepared:expr], $a:ident, $b:ident, $c:ident, $d:ident) => {{
        let $a = $accelerator.prepare($a)?;
        let $b = $accelerator.prepare($b)?;
        let $c = $accelerator.prepare($c)?;
        let $d = $accelerator.prepare($d)?;
        $prepared
    }};
}

/// Prepares the four objects and trains.
macro_rules! run {
    ($accelerator:ident, $calls:expr, $order:expr, $store:ident, $a:ident, $b:ident, $c:ident, $d:ident) => {{
        let ($a, mut $b, mut $c, $d) = match $calls {
            Calls::OneTuple => permuted!(one_tuple, [$accelerator($a, $b, $c, $d)], $order, $a, $b, $c, $d),
            Calls::Pairs => permuted!(pairs, [$accelerator($a, $b, $c, $d)], $order, $a, $b, $c, $d),
            Calls::OneEach => permuted!(one_each, [$accelerator($a, $b, $c, $d)], $order, $a, $b, $c, $d),
        };
        outcome!($accelerator, $store, $a, $b, $c, $d)
    }};
}

/// Of 24 rows per step two ranks with batches of 4 make three micro-batches.
const BATCH: &str = r#""zero_optimization": {"stage": 2}, "gradient_clipping": 0.5,
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto""#;

fn of_dummies(calls: Calls, order: usize) -> Result<Outcome> {
    let sections = r#""optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto",
        "total_num_steps": "auto", "warmup_type": "linear"}}"#;
    let outcomes = testing::ranks(2, by(&format!("{{{BATCH}, {sections}}}")), |accelerator| {
        let (store, model) = model(&accelerator)?;
        let optimizer = DummyOptim::new(&store).lr(0.05).weight_decay(0.1);
        let scheduler = DummyScheduler::new(&optimizer).total_num_steps(8).warmup_num_steps(2);
        let loader = loader(4)?;
        run!(accelerator, calls, order, store, model, optimizer, scheduler, loader)
    });
    Ok(outcomes?.swap_remove(0))
}

fn of_own(calls: Calls, order: usize) -> Result<Outcome> {
    let outcomes = testing::ranks(2, by(&format!("{{{BATCH}}}")), |accelerator| {
        let (store, model) = model(&accelerator)?;
        let optimizer = AdamW::new(&store, 0.05)?;
        let scheduler = LinearWithWarmup::new(&optimizer, 2, 8);
        let loader = loader(4)?;
        run!(accelerator, calls, order, store, model, optimizer, scheduler, loader)
    });
    Ok(outcomes?.swap_remove(0))
}

/// Is the scheduler passed in an earlier call than the optimizer? They are the second and third of the four.
fn scheduler_has_an_earlier_call(calls: Calls, order: usize) -> bool {
    macro_rules! places {
        ([], $a:ident, $b:ident, $c:ident, $d:ident) => {
            [stringify!($a), stringify!($b), stringify!($c), stringify!($d)]
        };
    }
    let names = permuted!(places, [], order, model, optimizer, scheduler, loader);
    let call = |name: &str| {
        let place = names.iter().position(|other| *other == name).unwrap();
        match calls {
            Calls::OneTuple => 0,
            Calls::Pairs => place / 2,
            Calls::OneEach => place,
        }
    };
    call("scheduler") < call("optimizer")
}

#[rstest]
fn objects_may_be_prepared_in_any_order(
    #[values(Calls::OneTuple, Calls::Pairs, Calls::OneEach)] calls: Calls,
    #[values(true, false)] has_dummies: bool,
) {
    let run = |calls, order| if has_dummies { of_dummies(calls, order) } else { of_own(calls, order) };
    let wanted = run(Calls::OneTuple, 0).unwrap();
    assert_eq!((wanted.num_steps, wanted.losses.len()), (3, 6));
    assert!(wanted.rates[5] > 0.0 && wanted.rates[0] == 0.0, "the rate moves: {:?}", wanted.rates);
    for order in 0..NUM_ORDERS {
        let found = run(calls, order);
        if has_dummies && scheduler_has_an_earlier_call(calls, order) {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("to an earlier one"), "{error}");
        } else {
            assert_eq!(found.unwrap(), wanted, "{calls:?} in order {order}");
        }
    }
}

#[test]
fn objects_in_tuples_of_tuples_are_prepared_in_any_order() {
    let json = r#"{"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}"#;
    let accelerator = by(json).cpu(true).build().unwrap();
    let (store, module) = model(&accelerator).unwrap();
    let optimizer = DummyOptim::new(&store).lr(0.5);
    let scheduler = DummyScheduler::new(&optimizer);
    let ((scheduler, _model), (_loader, _optimizer)) =
        accelerator.prepare(((scheduler, module), (loader(4).unwrap(), optimizer))).unwrap();
    assert_eq!(scheduler.get_last_lr(), [0.0], "the rise begins at its lowest rate");
}

/// Ranks may pass one tuple in different orders, although a loader that dispatches is as collective as a model.
#[test]
fn collectives_have_the_same_order_on_all_ranks() {
    let config = DataLoaderConfiguration { dispatch_batches: Some(true), ..Default::default() };
    let rows = testing::ranks(2, Accelerator::builder().dataloader_config(config), |accelerator| {
        let (_store, module) = model(&accelerator)?;
        let (_model, loader) = match accelerator.is_main_process() {
            true => accelerator.prepare((module, loader(4)?))?,
            false => {
                let (loader, module) = accelerator.prepare((loader(4)?, module))?;
                (module, loader)
            }
        };
        loader.iter()?.map(|batch| Ok(batch?.0.size()[0])).sum::<Result<i64>>()
    });
    assert_eq!(rows.unwrap(), [24, 24]);
}

#[test]
fn what_is_in_use_is_not_changed_by_a_later_call() {
    let accelerator = by(&format!("{{{BATCH}}}")).cpu(true).build().unwrap();
    let (_store, module) = model(&accelerator).unwrap();
    let (_model, _loader) = accelerator.prepare((module, loader(4).unwrap())).unwrap();
    assert_eq!(accelerator.gradient_accumulation_steps(), 6);
    let error = accelerator.prepare(loader(2).unwrap()).map(drop).unwrap_err();
    let text = error.to_string();
    for words in ["is 6 (for batches of 4 rows)", "12 (for batches of 2 rows)", "pass all of it to one call"] {
        assert!(error.is_config() && text.contains(words), "{words}: {text}");
    }
    // A call that has failed leaves nothing behind, and a larger loader does not matter.
    let _evaluation = accelerator.prepare(loader(8).unwrap()).unwrap();
    assert_eq!(accelerator.gradient_accumulation_steps(), 6);
    // What the program says itself is not overruled by objects that add nothing to it.
    accelerator.set_gradient_accumulation_steps(2).unwrap();
    let _more = accelerator.prepare(loader(8).unwrap()).unwrap();
    assert_eq!(accelerator.gradient_accumulation_steps(), 2);
    accelerator.free_memory();
    let _loader = accelerator.prepare(loader(2).unwrap()).unwrap();
    assert_eq!(accelerator.gradient_accumulation_steps(), 12, "what was forgotten does not count");
}

/// Only a loader could tell the number of micro-batches.
#[test]
fn accumulation_does_not_begin_before_its_length_is_known() {
    let accelerator = by(&format!("{{{BATCH}}}")).cpu(true).build().unwrap();
    let (_store, module) = model(&accelerator).unwrap();
    let model = accelerator.prepare(module).unwrap();
    let error = accelerator.accumulate(&model, || Ok(())).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("no loader was prepared"), "{error}");
    accelerator.set_gradient_accumulation_steps(2).unwrap();
    accelerator.accumulate(&model, || Ok(())).unwrap();
}

/// Every rank fails, and says what the other one has.
#[rstest]
#[case::other_numbers(BATCH, 2, ["rank 0: prepare of gradient_accumulation_steps 3", "rank 1: prepare of gradient_accumulation_steps 6"])]
#[case::one_fails(BATCH, 5, ["train_batch_size is 24, which cannot be divided", "resolving the DeepSpeed configuration"])]
fn ranks_agree_on_what_they_train_by(#[case] json: &str, #[case] batch_size: usize, #[case] words: [&str; 2]) {
    let errors = testing::ranks(2, by(&format!("{{{json}}}")), |accelerator| {
        let (_store, module) = model(&accelerator)?;
        let loader = loader(if accelerator.is_main_process() { 4 } else { batch_size })?;
        Ok(accelerator.prepare((loader, module)).map(drop).unwrap_err().to_string())
    });
    let errors = errors.unwrap().join("\n");
    assert!(words.iter().all(|words| errors.contains(words)), "{errors}");
}

/// A try begins with nothing prepared, so its batches alone decide.
#[test]
fn each_try_of_a_batch_size_is_resolved_by_itself() {
    let accelerator = by(&format!("{{{BATCH}}}")).cpu(true).build().unwrap();
    let mut steps = Vec::new();
    let executable = find_executable_batch_size().starting_batch_size(8);
    let mut executable = executable.reduce_batch_size_fn(|batch_size| batch_size / 2);
    let found = executable.run_on(&accelerator, |accelerator, batch_size| {
        let _loader = accelerator.prepare(loader(batch_size)?)?;
        steps.push(accelerator.gradient_accumulation_steps());
        if batch_size > 2 { Err(accelerate::Error::other("CUDA out of memory.")) } else { Ok(batch_size) }
    });
    assert_eq!((found.unwrap(), steps), (2, vec![3, 6, 12]));
}

/// What a call has told counts only if all its objects were prepared.
#[test]
fn a_call_that_fails_leaves_nothing_behind() {
    let json = r#"{"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}"#;
    let accelerator = by(json).cpu(true).build().unwrap();
    let (store, _module) = model(&accelerator).unwrap();
    let optimizer = DummyOptim::new(&store);
    let too_early = DummyScheduler::new(&optimizer).total_num_steps(8);
    let error = accelerator.prepare(too_early).map(drop).unwrap_err().to_string();
    assert!(error.contains("the DummyScheduler was prepared before its DummyOptim"), "{error}");
    let scheduler = DummyScheduler::new(&optimizer).total_num_steps(16);
    let _prepared = accelerator.prepare((scheduler, optimizer)).unwrap();
}
