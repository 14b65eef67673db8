//! `prepare`: every kind of object knows how to become ready for many processes.
//!
//! First all objects of a call tell what a DeepSpeed configuration may leave to them (`describe`). That is resolved once, in
//! `core`. Then each object is prepared by the one resolved configuration (`preparation`), kind by kind (`turn`), so the
//! order of a tuple does not matter.

mod compile;
mod loader;
mod model;
mod preparation;
mod turn;

pub use loader::PrepareDataLoaderOptions;
pub use model::PreparedModel;
use preparation::Preparation;
use turn::{Slot, Turn};

use super::Accelerator;
use crate::data::{DataLoader, DataLoaderShard, LoaderKind};
use crate::engine::inventory;
use crate::error::Result;
use crate::nn::Module;
use crate::optim::{
    AcceleratedOptimizer, AcceleratedScheduler, DeepSpeedLr, DummyOptim, DummyScheduler, LrScheduler, Optimizer,
};
use crate::session::PreparedParameters;
use accelerate_core::config::{OptimizerInCode, PreparedFacts, SchedulerInCode};
use accelerate_core::plan::{Plans, plan_data_parallel};

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
    note = "a struct of layers becomes a model by `impl accelerate::nn::Module`, a closure by `ModuleFn::new(&store, closure)`",
    note = "a dataset goes into `DataLoader::builder(dataset)` first; objects are given by value, without `&`",
    note = "the compiler cannot say which member of a tuple it is; prepare them one by one to find out"
)]
pub trait Prepare<Kind>: Sized {
    /// The object made ready.
    type Prepared;

    /// When it is prepared among the objects of one call.
    #[doc(hidden)]
    const TURN: Turn;

    /// Is there a model, so that preparing is collective?
    #[doc(hidden)]
    const HAS_MODEL: bool = false;

    /// Tells what a DeepSpeed configuration may leave to the object. All objects of a call tell it before one is prepared.
    #[doc(hidden)]
    fn describe(&self, _facts: &mut PreparedFacts) {}

    /// Makes the object ready. Collective for models; every rank prepares the same objects.
    #[doc(hidden)]
    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared>;
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
    const TURN: Turn = Turn::Model;
    const HAS_MODEL: bool = true;

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        preparation.model(self, PrepareModelOptions::default())
    }
}

impl<O: Optimizer> Prepare<kind::Optimizer> for O {
    type Prepared = AcceleratedOptimizer<O>;
    const TURN: Turn = Turn::Optimizer;

    fn describe(&self, facts: &mut PreparedFacts) {
        facts.optimizers.push(OptimizerInCode::Own { lr: self.handle().learning_rates().first().copied() });
    }

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        preparation.optimizer(self)
    }
}

impl<B: Send + 'static, K: LoaderKind> Prepare<kind::DataLoader> for DataLoader<B, K> {
    type Prepared = DataLoaderShard<B, K>;
    const TURN: Turn = Turn::DataLoader;

    fn describe(&self, facts: &mut PreparedFacts) {
        facts.batch_sizes.push(self.batch_size());
    }

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        preparation.data_loader(self, PrepareDataLoaderOptions::default())
    }
}

impl<S: LrScheduler> Prepare<kind::Scheduler> for S {
    type Prepared = AcceleratedScheduler<S>;
    const TURN: Turn = Turn::Scheduler;

    fn describe(&self, facts: &mut PreparedFacts) {
        facts.schedulers.push(SchedulerInCode::Own);
    }

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        Ok(preparation.scheduler(self, preparation.accelerator.config().accelerator.scheduler_unit))
    }
}

impl Prepare<kind::Dummy> for DummyOptim {
    type Prepared = AcceleratedOptimizer<Box<dyn Optimizer>>;
    const TURN: Turn = Turn::Optimizer;

    fn describe(&self, facts: &mut PreparedFacts) {
        let Self { lr, weight_decay, .. } = *self;
        facts.optimizers.push(OptimizerInCode::Dummy { lr, weight_decay });
    }

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        preparation.dummy_optim(self)
    }
}

impl Prepare<kind::Dummy> for DummyScheduler {
    type Prepared = AcceleratedScheduler<DeepSpeedLr>;
    const TURN: Turn = Turn::Scheduler;

    fn describe(&self, facts: &mut PreparedFacts) {
        let Self { total_num_steps, warmup_num_steps, .. } = *self;
        let total_num_steps = total_num_steps.map(|steps| steps as u64);
        facts.schedulers.push(SchedulerInCode::Dummy { total_num_steps, warmup_num_steps, has_callable: false });
    }

    fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
        preparation.dummy_scheduler(&self)
    }
}

macro_rules! unchanged {
    ($($type:ty, [$($bounds:tt)*];)*) => {$(
        impl<$($bounds)*> Prepare<kind::Prepared> for $type {
            type Prepared = Self;
            const TURN: Turn = Turn::Model;

            fn prepare(self, _: &Preparation<'_>) -> Result<Self> {
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
            const TURN: Turn = Turn::of_tuple(&[$($object::TURN),*]);
            const HAS_MODEL: bool = false $(|| $object::HAS_MODEL)*;

            fn describe(&self, facts: &mut PreparedFacts) {
                $(self.$index.describe(facts);)*
            }

            fn prepare(self, preparation: &Preparation<'_>) -> Result<Self::Prepared> {
                let mut slots = ($(Slot::Waiting(self.$index),)*);
                for turn in Turn::BEFORE_LAST {
                    slots = ($(slots.$index.take(turn, preparation)?,)*);
                }
                Ok(($(slots.$index.finish(preparation)?,)*))
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
    /// Makes models, optimizers, data loaders and schedulers ready for this run, in any order. The order of a tuple changes
    /// nothing: all that its objects tell is known before the first one is made ready, and that happens kind by kind.
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
    #[track_caller]
    pub fn prepare<Kind, T: Prepare<Kind>>(&self, objects: T) -> Result<T::Prepared> {
        let _called = crate::status::here();
        let mut facts = PreparedFacts::default();
        objects.describe(&mut facts);
        self.prepare_by(&facts, T::HAS_MODEL, |preparation| objects.prepare(preparation))
    }

    /// Resolves what all objects of a call tell, and then has them prepared by it. What they tell is kept when that is done.
    fn prepare_by<T>(
        &self,
        facts: &PreparedFacts,
        has_model: bool,
        prepare: impl FnOnce(&Preparation<'_>) -> Result<T>,
    ) -> Result<T> {
        let resolution = self.resolve_deep_speed(facts, has_model)?;
        let deep_speed = resolution.as_ref().map(|resolution| &resolution.config);
        let prepared = prepare(&Preparation { accelerator: self, deep_speed })?;
        resolution.map_or(Ok(()), |resolution| self.take_over_deep_speed(resolution))?;
        Ok(prepared)
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
    #[track_caller]
    pub fn prepare_model<M: Module>(&self, model: M, options: PrepareModelOptions) -> Result<PreparedModel<M>> {
        let _called = crate::status::here();
        self.prepare_by(&PreparedFacts::default(), true, |preparation| preparation.model(model, options))
    }

    /// How the parameters of each model prepared so far are kept, in the order of `prepare`; print it to see which are gathered
    /// or reduced together, and what each axis of the mesh divides and sends. Where ranks compute layers together, it is of the slices
    /// of this rank. For a model that was prepared for evaluation it says what training would do.
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
    /// println!("{}", accelerator.plan());
    /// assert_eq!(accelerator.plan()[0].units[0].num_elements, 10);
    /// assert!(accelerator.plan().to_string().contains("memory of each rank"));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn plan(&self) -> Plans {
        let plan = |model: &PreparedParameters| match model.engine.plan() {
            Some(plan) => plan.clone(),
            None => plan_data_parallel(&inventory(&model.store), &self.config().ddp, self.mesh().data().world_size()),
        };
        Plans { mesh: self.mesh(), plans: self.session().objects().models().map(|model| plan(&model)).collect() }
    }

    /// Prepares one optimizer.
    ///
    /// # Errors
    /// A DeepSpeed configuration has an optimizer too; its state is to be offloaded, and it has none that can be.
    #[track_caller]
    pub fn prepare_optimizer<O: Optimizer>(&self, optimizer: O) -> Result<AcceleratedOptimizer<O>> {
        let _called = crate::status::here();
        self.prepare::<kind::Optimizer, O>(optimizer)
    }

    /// Prepares one scheduler.
    ///
    /// # Errors
    /// A DeepSpeed configuration has a scheduler too.
    #[track_caller]
    pub fn prepare_scheduler<S: LrScheduler>(&self, scheduler: S) -> Result<AcceleratedScheduler<S>> {
        let _called = crate::status::here();
        self.prepare::<kind::Scheduler, S>(scheduler)
    }
}
