//! What a session keeps of everything prepared: states by name, all of them, and nothing after `free_memory`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, DataLoaderShard, VecDataset};
use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, LinearWithWarmup, Sgd};
use accelerate::tch::Tensor;
use accelerate::{
    Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, GradScalerKwargs, MixedPrecision, PreparedModel,
    Result, testing,
};

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
        testing::ranks_with(world_size, builder(is_sharded), |accelerator| {
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
    let words = "there is none of optimizer, and optimizer_1 was not prepared";
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

#[test]
fn objects_are_counted_by_kind_and_leave_when_they_are_taken_back() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let names = |accelerator: &Accelerator| accelerator.state_dict().unwrap().into_keys().collect::<Vec<_>>();
    let optimizer = || {
        let store = ParamStore::new(accelerator.device());
        Linear::new(store.root(), 1, 1, Default::default()).unwrap();
        accelerator.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap()
    };
    let (first, second) = (optimizer(), optimizer());
    // What is prepared already is not registered again.
    let second = accelerator.prepare(second).unwrap();
    assert_eq!(names(&accelerator), ["optimizer", "optimizer_1"]);
    let scheduler = accelerator.prepare(LinearWithWarmup::new(&*second.optimizer(), 1, 2)).unwrap();
    assert_eq!(names(&accelerator), ["optimizer", "optimizer_1", "scheduler"]);
    first.into_inner().unwrap();
    scheduler.into_inner().unwrap();
    assert_eq!(names(&accelerator), ["optimizer"]);
    drop(second);
    assert_eq!(names(&accelerator), ["optimizer"], "shared until free_memory");
    accelerator.free_memory();
    assert_eq!(names(&accelerator), [""; 0]);
}

#[test]
fn free_memory_keeps_the_scaler_alone() {
    let accelerator = builder(false).cpu(true).build().unwrap();
    let training = training(accelerator.clone()).unwrap();
    drop(training);
    accelerator.free_memory();
    assert_eq!(accelerator.state_dict().unwrap().into_keys().collect::<Vec<_>>(), ["scaler"]);
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
