//! What a session knows of everything prepared: states by name, all of them, and nothing of what the program has dropped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, DataLoaderShard, VecDataset, skip_first_batches};
use accelerate::nn::{Init, Linear, ModuleFn, ParamStore};
use accelerate::optim::{
    AcceleratedOptimizer, AcceleratedScheduler, AdamW, LinearWithWarmup, LrScheduler, Optimizer, OptimizerHandle,
    OptimizerState, SchedulerState, Sgd,
};
use accelerate::tch::Tensor;
use accelerate::{
    Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, GradScalerKwargs, MixedPrecision,
    PrepareModelOptions, PreparedModel, Result, testing,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};

/// Sharded or not, with a loss scale that grows at every second step.
fn builder(is_sharded: bool) -> AcceleratorBuilder {
    let scaler = GradScalerKwargs { init_scale: Some(4.0), growth_interval: Some(2), ..Default::default() };
    let builder = Accelerator::builder().mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaler);
    if is_sharded { builder.fsdp_plugin(FullyShardedDataParallelPlugin::default()) } else { builder }
}

/// A program in the middle of training.
struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    loader: DataLoaderShard<Tensor>,
    scheduler: AcceleratedScheduler<LinearWithWarmup>,
}

fn training(
    accelerator: Accelerator,
) -> Result<Training<impl accelerate::nn::Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root() / "linear", 1, 3, Default::default())?;
    linear.weight.copy_(&Tensor::from_slice(&[0.5f32, -1.0, 2.0]).f_view([3, 1])?)?;
    let optimizer = AdamW::new(&store, 0.1)?;
    let scheduler = LinearWithWarmup::new(&optimizer, 2, 40);
    let rows = VecDataset::new((0..24).map(|row| row as f32 / 8.0).collect());
    let loader = DataLoader::builder(rows).batch_size(2).shuffle(true).build()?;
    let model = ModuleFn::new(&store, move |rows: &Tensor| linear.forward(&rows.f_view([-1, 1])?));
    let (model, optimizer, loader, scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
    Ok(Training { accelerator, model, optimizer, loader, scheduler })
}

impl<M: accelerate::nn::Module<Input = Tensor, Output = Tensor>> Training<M> {
    /// Trains on the next batches of this epoch, and says what was seen and where that led.
    fn train(&mut self, num_batches: usize) -> Result<Vec<f64>> {
        let mut seen = Vec::new();
        for batch in self.loader.iter()?.take(num_batches) {
            let batch = batch?;
            seen.extend(Vec::<f64>::try_from(&batch.to_kind(accelerate::tch::Kind::Double))?);
            self.accelerator.backward(&self.model.forward(&batch)?.square().mean(None))?;
            self.optimizer.step()?;
            self.scheduler.step()?;
            self.optimizer.zero_grad()?;
            seen.extend(self.scheduler.get_last_lr());
        }
        for param in self.model.params().parameters() {
            seen.extend(Vec::<f64>::try_from(
                &param.local().detach().to_kind(accelerate::tch::Kind::Double).flatten(0, -1),
            )?);
        }
        let states = self.accelerator.state_dict()?;
        seen.push(states["scaler"].values["scale"].as_f64().expect("a scale"));
        Ok(seen)
    }
}

#[test]
fn everything_goes_back_to_where_its_state_was_taken() {
    for (world_size, is_sharded) in [(1, false), (2, false), (2, true)] {
        testing::ranks(world_size, builder(is_sharded), |accelerator| {
            let mut training = training(accelerator)?;
            training.train(3)?;
            let states = training.accelerator.state_dict()?;
            let names: Vec<&str> = states.keys().map(String::as_str).collect();
            assert_eq!(names, ["dataloader", "model", "optimizer", "scaler", "scheduler"]);
            assert_eq!(states["model"].layouts.len(), if is_sharded { 2 } else { 0 });
            // Goes on from the same place within the epoch: a loop that was left begins its epoch anew otherwise.
            training.accelerator.load_state_dict(&states)?;
            let first = training.train(3)?;
            let elsewhere = training.train(2)?;
            training.accelerator.load_state_dict(&states)?;
            let again = training.train(3)?;
            assert_eq!(first, again, "{world_size} ranks, sharded {is_sharded}");
            assert_ne!(first, elsewhere);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn states_of_other_objects_are_refused_and_change_nothing() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let mut training = training(accelerator).unwrap();
    let mut states = training.accelerator.state_dict().unwrap();
    let before = training.train(2).unwrap();
    let optimizer = states.remove("optimizer").unwrap();
    states.insert("optimizer_1".to_owned(), optimizer);
    let error = training.accelerator.load_state_dict(&states).unwrap_err();
    let words = "there is none of optimizer, and optimizer_1 was neither prepared nor registered";
    assert!(error.is_config() && error.to_string().contains(words), "{error}");
    assert_eq!(training.train(0).unwrap(), before[before.len() - 7..]);
}

#[test]
fn an_object_that_cannot_take_its_state_is_named() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let training = training(accelerator).unwrap();
    let mut states = training.accelerator.state_dict().unwrap();
    states.get_mut("model").unwrap().tensors.remove("linear.bias");
    let error = training.accelerator.load_state_dict(&states).unwrap_err().to_string();
    assert!(error.starts_with("model: ") && error.contains("linear.bias"), "{error}");
}

fn names(accelerator: &Accelerator) -> Vec<String> {
    accelerator.state_dict().unwrap().into_keys().collect()
}

#[test]
fn objects_are_counted_by_kind_and_leave_when_they_are_taken_back() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let optimizer = || {
        let store = ParamStore::new(accelerator.device());
        Linear::new(store.root(), 1, 1, Default::default()).unwrap();
        accelerator.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap()
    };
    let (first, second) = (optimizer(), optimizer());
    // What is prepared already is not registered again.
    let mut second = accelerator.prepare(second).unwrap();
    assert_eq!(names(&accelerator), ["optimizer", "optimizer_1"]);
    let scheduler = accelerator.prepare(LinearWithWarmup::new(&*second.optimizer(), 1, 2)).unwrap();
    assert_eq!(names(&accelerator), ["optimizer", "optimizer_1", "scheduler"]);
    first.into_inner().unwrap();
    scheduler.into_inner().unwrap();
    assert_eq!(names(&accelerator), ["optimizer"]);
    accelerator.free_memory();
    assert_eq!(names(&accelerator), [""; 0]);
    second.step().unwrap();
}

#[test]
fn free_memory_keeps_the_scaler_alone() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let training = training(accelerator.clone()).unwrap();
    accelerator.free_memory();
    assert_eq!(names(&accelerator), ["scaler"]);
    drop(training);
}

#[test]
fn what_the_program_drops_is_gone() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let Training { model, optimizer, loader, scheduler, .. } = training(accelerator.clone()).unwrap();
    assert_eq!(names(&accelerator), ["dataloader", "model", "optimizer", "scaler", "scheduler"]);
    drop(optimizer);
    assert_eq!(names(&accelerator), ["dataloader", "model", "scaler", "scheduler"]);
    drop(scheduler);
    let rest = skip_first_batches(&loader, 1);
    drop(loader);
    assert_eq!(
        names(&accelerator),
        ["dataloader", "model", "scaler"],
        "a loader that skips stands where its loader does"
    );
    let mut batches = rest.iter().unwrap();
    drop(rest);
    batches.next();
    let states = accelerator.state_dict().unwrap();
    assert_eq!(states["dataloader"].values["rows_delivered"], 4, "a pass goes on without its loader");
    drop(batches);
    assert_eq!(names(&accelerator), ["model", "scaler"]);
    let module = model.into_inner();
    assert_eq!(names(&accelerator), ["scaler"]);
    assert!(accelerator.plan().is_empty());
    drop(accelerator.prepare(module).unwrap());
    assert_eq!(names(&accelerator), ["scaler"]);
}

#[test]
fn a_parameter_is_a_prepared_model_s_until_the_last_of_them_is_gone() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, Default::default()).unwrap();
    let module = || {
        let linear = linear.clone();
        ModuleFn::new(&store, move |input: &Tensor| linear.forward(input))
    };
    let mut unprepared = Sgd::new(&store, 0.1).unwrap();
    let first = accelerator.prepare(module()).unwrap();
    let second = accelerator.prepare(module()).unwrap();
    let options = PrepareModelOptions { evaluation_mode: true, ..Default::default() };
    drop(accelerator.prepare_model(module(), options).unwrap());
    drop(first);
    unprepared.step().unwrap_err();
    accelerator.free_memory();
    unprepared.step().unwrap();
    // It has been released already.
    drop(second);
    let _third = accelerator.prepare(module()).unwrap();
    unprepared.step().unwrap_err();
}

#[test]
fn an_optimizer_made_anew_divides_its_gradients_once() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([1], Init::Ones)).unwrap();
    drop(accelerator.prepare(Sgd::new(&store, 0.5).unwrap()).unwrap());
    let _optimizer = accelerator.prepare(Sgd::new(&store, 0.5).unwrap()).unwrap();
    accelerator.backward(&(weight.get().unwrap() * 3.0).sum(None)).unwrap();
    accelerator.unscale_gradients().unwrap();
    assert_eq!(weight.grad().unwrap().double_value(&[0]), 3.0, "the scale is 4");
}

/// An optimizer and a schedule of the user's own, which call something in the middle of their own calls.
struct Calling<T> {
    inner: T,
    in_step: Box<dyn FnMut() + Send>,
    in_state_dict: Box<dyn Fn() + Send>,
}

impl Optimizer for Calling<Sgd> {
    fn step(&mut self) -> Result<()> {
        (self.in_step)();
        self.inner.step()
    }
    fn handle(&self) -> &OptimizerHandle {
        self.inner.handle()
    }
    fn state_dict(&self) -> Result<OptimizerState> {
        (self.in_state_dict)();
        self.inner.state_dict()
    }
    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        self.inner.load_state_dict(state)
    }
}

impl LrScheduler for Calling<LinearWithWarmup> {
    fn step(&mut self) -> Result<()> {
        (self.in_step)();
        self.inner.step()
    }
    fn get_last_lr(&self) -> Vec<f64> {
        self.inner.get_last_lr()
    }
    fn handle(&self) -> &OptimizerHandle {
        self.inner.handle()
    }
    fn last_epoch(&self) -> usize {
        self.inner.last_epoch()
    }
    fn state_dict(&self) -> Result<SchedulerState> {
        (self.in_state_dict)();
        self.inner.state_dict()
    }
    fn load_state_dict(&mut self, state: &SchedulerState) -> Result<()> {
        self.inner.load_state_dict(state)
    }
}

fn sgd(accelerator: &Accelerator) -> Sgd {
    let store = ParamStore::new(accelerator.device());
    Linear::new(store.root(), 1, 1, Default::default()).unwrap();
    Sgd::new(&store, 0.1).unwrap()
}

/// What a call said that had to fail.
type Said = Arc<Mutex<Vec<String>>>;

#[test]
fn a_step_that_asks_for_its_own_state_is_told_so() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let (said, states) = (Said::default(), Arc::new(Mutex::new(BTreeMap::new())));
    let asking = || {
        let (accelerator, said, states) = (accelerator.clone(), Arc::clone(&said), Arc::clone(&states));
        Box::new(move || {
            let errors = [accelerator.state_dict().err(), accelerator.load_state_dict(&states.lock().unwrap()).err()];
            said.lock().unwrap().extend(errors.map(|error| error.expect("it is in use").to_string()));
        })
    };
    let optimizer = Calling { inner: sgd(&accelerator), in_step: asking(), in_state_dict: Box::new(|| ()) };
    let inner = LinearWithWarmup::new(&optimizer.inner, 1, 9);
    let scheduler = Calling { inner, in_step: asking(), in_state_dict: Box::new(|| ()) };
    let (mut optimizer, mut scheduler) = accelerator.prepare((optimizer, scheduler)).unwrap();
    *states.lock().unwrap() = accelerator.state_dict().unwrap();
    let check = |what: &str| {
        let said = std::mem::take(&mut *said.lock().unwrap());
        assert_eq!(said.len(), 2);
        for (error, call) in said.iter().zip(["state_dict", "load_state_dict"]) {
            let wanted = format!("{what}: Accelerator::{call} needs a prepared {what} that is in use: ");
            assert!(error.starts_with(&wanted) && error.ends_with("Make it between training steps"), "{error}");
        }
    };
    optimizer.step().unwrap();
    check("optimizer");
    scheduler.step().unwrap();
    check("scheduler");
    let _in_hand = optimizer.optimizer();
    accelerator.state_dict().unwrap_err();
}

#[test]
fn what_another_thread_is_reading_is_not_lost() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let (began, begins) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let waits = Box::new(move || {
        began.send(()).unwrap();
        let _ = goes_on.recv();
    });
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, Default::default()).unwrap();
    let mut unprepared = Sgd::new(&store, 0.1).unwrap();
    let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    let optimizer = Calling { inner: sgd(&accelerator), in_step: Box::new(|| ()), in_state_dict: waits };
    let inner = LinearWithWarmup::new(&optimizer.inner, 1, 9);
    let (model, optimizer, scheduler) = accelerator.prepare((model, optimizer, inner)).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| accelerator.state_dict().map(|states| states.len()));
        begins.recv().unwrap();
        let text = "cannot be taken back, because another thread is just using it through the accelerator";
        let in_use = optimizer.into_inner().err().unwrap();
        assert!(in_use.to_string().contains(&format!("the optimizer {text}")), "{in_use}");
        let optimizer = in_use.into_inner();
        // All that one call is about is in use until it has ended.
        let in_use = scheduler.into_inner().unwrap_err();
        assert!(in_use.to_string().contains(&format!("the scheduler {text}")), "{in_use}");
        let scheduler = in_use.into_inner();
        let _model = model.into_inner();
        unprepared.step().unwrap();
        drop(go_on);
        assert_eq!(reader.join().unwrap().unwrap(), 3);
        assert_eq!(scheduler.into_inner().unwrap().get_last_lr(), [0.0]);
        assert_eq!(optimizer.into_inner().unwrap().handle().learning_rates(), [0.0]);
    });
    assert_eq!(names(&accelerator), [""; 0]);
}

#[test]
fn two_sessions_do_not_know_of_each_other() {
    let [first, second] = [4, 1].map(|steps| {
        let builder = Accelerator::builder().cpu(true).gradient_accumulation_steps(steps);
        builder.build().unwrap()
    });
    let store = ParamStore::new(first.device());
    Linear::new(store.root(), 1, 1, Default::default()).unwrap();
    let _optimizer = first.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap();
    assert_eq!((first.state_dict().unwrap().len(), second.state_dict().unwrap().len()), (1, 0));
    second.free_memory();
    second.set_sync_gradients(false);
    assert_eq!((first.state_dict().unwrap().len(), first.sync_gradients()), (1, true));
}
