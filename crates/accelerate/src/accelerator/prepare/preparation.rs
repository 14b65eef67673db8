//! What becomes of each kind of object, once it is known what all objects of the call tell.

use super::{PrepareDataLoaderOptions, PrepareModelOptions, PreparedModel, compile};
use crate::accelerator::{Accelerator, fp8};
use crate::amp::float_kind;
use crate::data::{DataLoader, DataLoaderShard, LoaderKind, LoaderSettings, Shares};
use crate::engine::{self, TensorParallel};
use crate::error::{BigModelError, Result, StateError};
use crate::messages;
use crate::nn::{Module, Param, ParamInitFn};
use crate::optim::{
    AcceleratedOptimizer, AcceleratedScheduler, DeepSpeedLr, DummyOptim, DummyScheduler, LrScheduler, Optimizer,
    SchedulerOptions,
};
use crate::session::{Object, PreparedParameters};
use accelerate_core::config::{ResolvedDeepSpeedConfig, ShardingStrategy};
use accelerate_core::mesh::Axis;
use accelerate_core::schedule::SchedulerUnit;
use std::sync::Arc;

/// One call of `prepare`: the accelerator, and the one configuration by which all objects of the call are prepared.
#[derive(Debug)]
pub struct Preparation<'a> {
    pub(super) accelerator: &'a Accelerator,
    pub(super) deep_speed: Option<&'a ResolvedDeepSpeedConfig>,
}

impl Preparation<'_> {
    pub(super) fn model<M: Module>(&self, model: M, options: PrepareModelOptions) -> Result<PreparedModel<M>> {
        let (accelerator, config) = (self.accelerator, self.accelerator.config());
        let evaluation_mode = options.evaluation_mode;
        compile::check(config.dynamo.compilation()?, model.compilation())?;
        compile::tell_precision(model.compilation(), accelerator.mixed_precision());
        let store = model.params().clone();
        if let Some(param) = store.parameters().iter().find(|param| param.shard_group().is_some()) {
            return Err(StateError::AlreadySharded { parameter: param.name().to_owned() }.into());
        }
        let dispatched = store.parameters_and_buffers().into_iter().find(Param::is_dispatched);
        if let Some(param) = &dispatched
            && (accelerator.num_processes() > 1 || config.fsdp_in_use().is_some())
        {
            return Err(BigModelError::Dispatched { parameter: param.name().to_owned() }.into());
        }
        if dispatched.is_none() && options.device_placement.unwrap_or(config.accelerator.device_placement) {
            store.to_device(accelerator.device())?;
        }
        let wants_empty = accelerator.deep_speed().is_some_and(|deep_speed| deep_speed.wants_empty_weights());
        if wants_empty && accelerator.is_main_process() && !store.parameters().iter().any(Param::is_deferred) {
            let cure = "build it over ParamStore::init_empty_weights";
            messages::warning!("zero3_init_flag has no effect on a model that each process has built whole; {cure}");
        }
        let param_init_fn = config.fsdp_in_use().and_then(|plugin| plugin.param_init_fn.as_ref());
        if let Some(param_init_fn) = param_init_fn.and_then(|function| function.downcast_ref::<ParamInitFn>()) {
            store.default_param_init_fn(param_init_fn);
        }
        if let Some((axis, _)) = accelerator.mesh().divided_sequences() {
            accelerator.check_whole_sequences("prepare")?;
            engine::check_divides_sequences(&store)?;
            // Ranks connect now, and not at some batch.
            accelerator.session().mesh.group(&[axis])?;
        }
        let scaling = fp8::prepare(accelerator, &store)?;
        let tensor_parallel = self.tensor_parallel(&model)?;
        let sharding = config.fsdp_in_use().map(|plugin| (plugin, accelerator.mixed_precision()));
        let engine = engine::start(&engine::Start {
            mesh: &accelerator.session().mesh,
            store: &store,
            kwargs: &config.ddp,
            sharding,
            tensor_parallel: tensor_parallel.as_ref(),
            evaluation_mode,
        })?;
        let parameters = PreparedParameters::new(store, engine, evaluation_mode).with_scaling(scaling);
        let parameters = Arc::new(parameters);
        accelerator.session().register(Object::Model(Arc::downgrade(&parameters)));
        let policy = config.fsdp_in_use().and_then(|plugin| plugin.mixed_precision_policy);
        let output_kind = policy.and_then(|policy| policy.output_dtype).map(float_kind);
        let precision = accelerator.precision().with_outputs(output_kind);
        Ok(PreparedModel::new(model, parameters, tensor_parallel, precision))
    }

    /// Divides the layers of a model, if ranks are to compute it together. Collective then.
    fn tensor_parallel<M: Module>(&self, model: &M) -> Result<Option<TensorParallel>> {
        let (mesh, config) = (&self.accelerator.session().mesh, self.accelerator.config());
        if mesh.shape().size(Axis::Tp) == 1 {
            return Ok(None);
        }
        let sharding = config.fsdp_in_use().filter(|plugin| plugin.sharding_strategy != ShardingStrategy::NoShard);
        let is_sharded = sharding.is_some() && mesh.shape().data().shard_size() > 1;
        let own = model.tensor_parallel_plan();
        TensorParallel::start(mesh, model.params(), (&config.tensor_parallel, own.as_ref()), is_sharded).map(Some)
    }

    pub(super) fn data_loader<B: Send + 'static, K: LoaderKind>(
        &self,
        loader: DataLoader<B, K>,
        options: PrepareDataLoaderOptions,
    ) -> Result<DataLoaderShard<B, K>> {
        let (accelerator, config) = (self.accelerator, self.accelerator.config());
        let shares = match options {
            PrepareDataLoaderOptions { num_processes: None, process_index: None } => {
                Shares::of_mesh(&accelerator.session().mesh.shape())
            }
            PrepareDataLoaderOptions { num_processes, process_index } => {
                let num_shares = num_processes.unwrap_or(accelerator.num_processes());
                let share = process_index.unwrap_or(accelerator.process_index());
                Shares::agree(accelerator.group(), accelerator.device(), num_shares, share)?
            }
        };
        let settings = LoaderSettings {
            configuration: &config.dataloader,
            device_placement: config.accelerator.device_placement,
            rng_types: &config.accelerator.rng_types,
        };
        loader.prepare_for(accelerator.session(), settings, shares)
    }

    pub(super) fn optimizer<O: Optimizer>(&self, mut optimizer: O) -> Result<AcceleratedOptimizer<O>> {
        let accelerator = self.accelerator;
        if let Some(target) = accelerator.optimizer_offload() {
            optimizer.offload_state(target)?;
        }
        let (session, scaler) = (accelerator.session().clone(), accelerator.scaler().cloned());
        let clipping = self.deep_speed.and_then(|config| config.gradient_clipping);
        Ok(AcceleratedOptimizer::new(optimizer, session, scaler, clipping))
    }

    pub(super) fn dummy_optim(&self, dummy: DummyOptim) -> Result<AcceleratedOptimizer<Box<dyn Optimizer>>> {
        let config = self.deep_speed.ok_or(StateError::DummyWithoutDeepSpeed { dummy: "DummyOptim" })?;
        let optimizer = config.optimizer.ok_or(StateError::NoDeepSpeedSection { section: "optimizer" })?;
        self.optimizer(dummy.make(&optimizer)?)
    }

    pub(super) fn scheduler<S: LrScheduler>(&self, scheduler: S, unit: SchedulerUnit) -> AcceleratedScheduler<S> {
        let config = self.accelerator.config();
        let options = SchedulerOptions {
            num_processes: self.accelerator.session().mesh.shape().num_shares(),
            split_batches: config.dataloader.split_batches,
            step_with_optimizer: config.accelerator.step_scheduler_with_optimizer,
            unit,
        };
        AcceleratedScheduler::new(scheduler, self.accelerator.session().clone(), options)
    }

    pub(super) fn dummy_scheduler(&self, dummy: &DummyScheduler) -> Result<AcceleratedScheduler<DeepSpeedLr>> {
        let config = self.deep_speed.ok_or(StateError::DummyWithoutDeepSpeed { dummy: "DummyScheduler" })?;
        let schedule = config.scheduler.ok_or(StateError::NoDeepSpeedSection { section: "scheduler" })?;
        let handle = dummy.optimizer().ok_or(StateError::SchedulerBeforeOptimizer)?;
        // The configuration counts steps of the optimizer.
        Ok(self.scheduler(DeepSpeedLr::new(handle, schedule), SchedulerUnit::OptimizerStep))
    }
}
