//! `prepare`: every kind of object knows how to become ready for many processes.

mod compile;
mod loader;
mod model;

pub use loader::PrepareDataLoaderOptions;
pub use model::PreparedModel;

use super::Accelerator;
use crate::amp::float_kind;
use crate::data::{DataLoader, DataLoaderShard, LoaderKind};
use crate::engine::{self, inventory};
use crate::error::{Result, StateError};
use crate::messages;
use crate::nn::{Module, Param, ParamInitFn};
use crate::optim::{
    AcceleratedOptimizer, AcceleratedScheduler, DeepSpeedLr, DummyOptim, DummyScheduler, LrScheduler, Optimizer,
    SchedulerOptions,
};
use crate::session::{Object, PreparedParameters};
use accelerate_core::plan::{Plan, plan_data_parallel};
use accelerate_core::schedule::SchedulerUnit;
use std::sync::Arc;

/// How [`Accelerator::prepare_model`] prepares a model.
///
/// ```
/// assert!(!accelerate::PrepareModelOptions::default().evaluation_mode);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrepareModelOptions {
    /// Move it to the device? Default `None`: as the accelerator does.
    pub device_placement: Option<bool>,
    /// Leave gradients alone, because the model is only evaluated? Default false.
    pub evaluation_mode: bool,
}

/// What [`Accelerator::prepare`] takes: a model, an optimizer, a data loader, a scheduler, something
/// prepared already, or a tuple of up to eight of them in any order.
///
/// The parameter only tells the compiler which of these an object is; it is always inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be prepared",
    label = "neither a Module, an Optimizer, an LrScheduler, a DataLoader nor a tuple of them",
    note = "a model implements accelerate::nn::Module, an optimizer accelerate::optim::Optimizer"
)]
pub trait Prepare<Kind> {
    /// The object made ready.
    type Prepared;

    /// Makes the object ready. Collective for models; every rank prepares the same objects in the same order.
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared>;
}

/// The kinds of object that can be prepared; inferred, never written.
pub mod kind {
    /// A [`Module`](crate::nn::Module).
    #[derive(Debug)]
    pub struct Model;
    /// An [`Optimizer`](crate::optim::Optimizer).
    #[derive(Debug)]
    pub struct Optimizer;
    /// A [`DataLoader`](crate::data::DataLoader).
    #[derive(Debug)]
    pub struct DataLoader;
    /// An [`LrScheduler`](crate::optim::LrScheduler).
    #[derive(Debug)]
    pub struct Scheduler;
    /// A [`DummyOptim`](crate::optim::DummyOptim) or [`DummyScheduler`](crate::optim::DummyScheduler).
    #[derive(Debug)]
    pub struct Dummy;
    /// Something that `prepare` returned before.
    #[derive(Debug)]
    pub struct Prepared;
}

impl<M: Module> Prepare<kind::Model> for M {
    type Prepared = PreparedModel<M>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_model(self, PrepareModelOptions::default())
    }
}

impl<O: Optimizer> Prepare<kind::Optimizer> for O {
    type Prepared = AcceleratedOptimizer<O>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_optimizer(self)
    }
}

impl<B: Send + 'static, K: LoaderKind> Prepare<kind::DataLoader> for DataLoader<B, K> {
    type Prepared = DataLoaderShard<B, K>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_data_loader(self, PrepareDataLoaderOptions::default())
    }
}

impl<S: LrScheduler> Prepare<kind::Scheduler> for S {
    type Prepared = AcceleratedScheduler<S>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_scheduler(self)
    }
}

impl Prepare<kind::Dummy> for DummyOptim {
    type Prepared = AcceleratedOptimizer<Box<dyn Optimizer>>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        let Some(deep_speed) = accelerator.deep_speed() else {
            return Err(StateError::DummyWithoutDeepSpeed { dummy: "DummyOptim" }.into());
        };
        let optimizer = deep_speed.optimizer(self.lr, self.weight_decay)?;
        accelerator.wrap_optimizer(self.make(&optimizer)?)
    }
}

impl Prepare<kind::Dummy> for DummyScheduler {
    type Prepared = AcceleratedScheduler<DeepSpeedLr>;
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        let Some(deep_speed) = accelerator.deep_speed() else {
            return Err(StateError::DummyWithoutDeepSpeed { dummy: "DummyScheduler" }.into());
        };
        let handle = self.optimizer().ok_or(StateError::SchedulerBeforeOptimizer)?;
        let schedule = deep_speed.schedule(self.total_num_steps, self.warmup_num_steps)?;
        // The configuration counts steps of the optimizer.
        Ok(accelerator.wrap_scheduler(DeepSpeedLr::new(handle, schedule), SchedulerUnit::OptimizerStep))
    }
}

macro_rules! unchanged {
    ($($type:ty, [$($bounds:tt)*];)*) => {$(
        impl<$($bounds)*> Prepare<kind::Prepared> for $type {
            type Prepared = Self;
            fn prepare(self, _: &Accelerator) -> Result<Self> {
                Ok(self)
            }
        }
    )*};
}

unchanged! {
    PreparedModel<M>, [M];
    AcceleratedOptimizer<O>, [O];
    DataLoaderShard<B, K>, [B, K];
    AcceleratedScheduler<S>, [S];
}

macro_rules! tuple {
    ($($object:ident $kind:ident $index:tt),*) => {
        impl<$($object, $kind),*> Prepare<($($kind,)*)> for ($($object,)*)
        where
            $($object: Prepare<$kind>),*
        {
            type Prepared = ($($object::Prepared,)*);
            fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                Ok(($(self.$index.prepare(accelerator)?,)*))
            }
        }
    };
}

tuple!(A KA 0);
tuple!(A KA 0, B KB 1);
tuple!(A KA 0, B KB 1, C KC 2);
tuple!(A KA 0, B KB 1, C KC 2, D KD 3);
tuple!(A KA 0, B KB 1, C KC 2, D KD 3, E KE 4);
tuple!(A KA 0, B KB 1, C KC 2, D KD 3, E KE 4, F KF 5);
tuple!(A KA 0, B KB 1, C KC 2, D KD 3, E KE 4, F KF 5, G KG 6);
tuple!(A KA 0, B KB 1, C KC 2, D KD 3, E KE 4, F KF 5, G KG 6, H KH 7);

impl Accelerator {
    /// Makes models, optimizers, data loaders and schedulers ready for this run, in any order.
    ///
    /// - Models move to the device, become equal on all ranks (rank 0's weights), and average their
    ///   gradients over ranks during [`Accelerator::backward`]; their `forward` runs in mixed precision.
    /// - Optimizers and schedulers act only where gradients are synchronised.
    /// - Data loaders give each rank its share, on the device.
    ///
    /// Collective if a model is among them.
    ///
    /// # Errors
    /// Ranks with different models; settings that cannot be honoured; a failure between ranks.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Linear, ModuleFn, ParamStore}, optim::Sgd, tch::Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let linear = Linear::new(store.root(), 2, 1, Default::default())?;
    /// let optimizer = Sgd::new(&store, 0.1)?;
    /// let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    ///
    /// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let loss = model.forward(&Tensor::from_slice(&[1.0f32, 2.0]))?.sum(None);
    /// accelerator.backward(&loss)?;
    /// optimizer.step()?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn prepare<Kind, T: Prepare<Kind>>(&self, objects: T) -> Result<T::Prepared> {
        objects.prepare(self)
    }

    /// Prepares one model. Collective.
    ///
    /// ```
    /// use accelerate::{Accelerator, PrepareModelOptions, nn::{Linear, ModuleFn, ParamStore}, tch::Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let linear = Linear::new(store.root(), 2, 1, Default::default())?;
    /// let teacher = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    /// let options = PrepareModelOptions { evaluation_mode: true, ..Default::default() };
    /// let teacher = accelerator.prepare_model(teacher, options)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Accelerator::prepare`].
    pub fn prepare_model<M: Module>(&self, model: M, options: PrepareModelOptions) -> Result<PreparedModel<M>> {
        let config = self.config();
        let evaluation_mode = options.evaluation_mode;
        compile::check(config.dynamo.compilation()?, model.compilation())?;
        let store = model.params().clone();
        if let Some(param) = store.parameters().iter().find(|param| param.shard_group().is_some()) {
            return Err(StateError::AlreadySharded { parameter: param.name().to_owned() }.into());
        }
        if options.device_placement.unwrap_or(config.accelerator.device_placement) {
            store.to_device(self.device())?;
        }
        let wants_empty = self.deep_speed().is_some_and(|deep_speed| deep_speed.wants_empty_weights());
        if wants_empty && self.is_main_process() && !store.parameters().iter().any(Param::is_deferred) {
            let cure = "build it over ParamStore::init_empty_weights";
            messages::warning!("zero3_init_flag has no effect on a model that each process has built whole; {cure}");
        }
        let param_init_fn = config.fsdp_in_use().and_then(|plugin| plugin.param_init_fn.as_ref());
        if let Some(param_init_fn) = param_init_fn.and_then(|function| function.downcast_ref::<ParamInitFn>()) {
            store.default_param_init_fn(param_init_fn);
        }
        let sharding = config.fsdp_in_use().map(|plugin| (plugin, self.mixed_precision()));
        let engine = engine::start(&engine::Start {
            mesh: &self.session().mesh,
            store: &store,
            kwargs: &config.ddp,
            sharding,
            evaluation_mode,
        })?;
        store.set_of_prepared_model(!evaluation_mode);
        let prepared = PreparedParameters { store, engine: engine.clone() };
        self.session().register(Object::Model(Arc::new(prepared)));
        let policy = config.fsdp_in_use().and_then(|plugin| plugin.mixed_precision_policy);
        let output_kind = policy.and_then(|policy| policy.output_dtype).map(float_kind);
        Ok(PreparedModel::new(model, engine, self.precision().with_outputs(output_kind)))
    }

    /// How the parameters of each model prepared so far are kept, in the order of `prepare`; print it to see which are gathered
    /// or reduced together. For a model that was prepared for evaluation it says what training would do.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor};
    ///
    /// let plugin = FullyShardedDataParallelPlugin::default();
    /// let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let linear = Linear::new(store.root(), 4, 2, Default::default())?;
    /// let _model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
    /// assert_eq!(accelerator.plan()[0].units[0].num_elements, 10);
    /// println!("{}", accelerator.plan()[0]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn plan(&self) -> Vec<Plan> {
        let plan = |model: &PreparedParameters| match model.engine.plan() {
            Some(plan) => plan.clone(),
            None => plan_data_parallel(&inventory(&model.store), &self.config().ddp, self.num_processes()),
        };
        self.session().objects().models().map(plan).collect()
    }

    /// Prepares one optimizer.
    ///
    /// # Errors
    /// A DeepSpeed configuration has an optimizer too; its state is to be offloaded, and it has none that can be.
    pub fn prepare_optimizer<O: Optimizer>(&self, optimizer: O) -> Result<AcceleratedOptimizer<O>> {
        if let Some(deep_speed) = self.deep_speed() {
            deep_speed.optimizer_prepared(optimizer.handle().learning_rates().first().copied())?;
        }
        self.wrap_optimizer(optimizer)
    }

    fn wrap_optimizer<O: Optimizer>(&self, mut optimizer: O) -> Result<AcceleratedOptimizer<O>> {
        if let Some(target) = self.optimizer_offload() {
            optimizer.offload_state(target)?;
        }
        let (session, scaler) = (self.session().clone(), self.scaler().cloned());
        let clipping = self.deep_speed().and_then(|deep_speed| deep_speed.gradient_clipping());
        Ok(AcceleratedOptimizer::new(optimizer, session, scaler, clipping))
    }

    /// Prepares one scheduler.
    ///
    /// # Errors
    /// A DeepSpeed configuration has a scheduler too.
    pub fn prepare_scheduler<S: LrScheduler>(&self, scheduler: S) -> Result<AcceleratedScheduler<S>> {
        if let Some(deep_speed) = self.deep_speed() {
            deep_speed.scheduler_prepared()?;
        }
        Ok(self.wrap_scheduler(scheduler, self.config().accelerator.scheduler_unit))
    }

    fn wrap_scheduler<S: LrScheduler>(&self, scheduler: S, unit: SchedulerUnit) -> AcceleratedScheduler<S> {
        let config = self.config();
        let options = SchedulerOptions {
            num_processes: self.num_processes(),
            split_batches: config.dataloader.split_batches,
            step_with_optimizer: config.accelerator.step_scheduler_with_optimizer,
            unit,
        };
        AcceleratedScheduler::new(scheduler, self.session().clone(), options)
    }
}
