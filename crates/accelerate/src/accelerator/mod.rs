//! The one object a training program talks to.

mod adapters;
mod between_steps;
mod builder;
mod checkpointing;
mod collectives;
mod context_parallel;
mod deep_speed;
mod fp8;
mod handlers;
mod join;
mod left_out;
mod models;
mod operations;
mod pending_save;
mod persistence;
mod prepare;
mod process_control;
mod profile;
mod registered;
mod seed;
mod should_stop;
mod state_dict;
mod state_hooks;
mod sync_batch_norm;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tracking;
mod training;

pub use builder::AcceleratorBuilder;
pub use checkpointing::CheckpointFolder;
pub use context_parallel::ContextParallelOptions;
pub(crate) use deep_speed::DeepSpeed;
pub use handlers::KwargsHandler;
pub use join::JoinOptions;
pub use models::{HasParameters, ModelRef};
pub use operations::{PadOptions, ReduceOptions};
pub use prepare::{Prepare, PrepareDataLoaderOptions, PrepareModelOptions, PreparedModel, kind};
pub use registered::Registered;
pub use seed::{SeedOptions, set_seed};
pub use state_hooks::{RemovableHandle, StateHookContext};

use context_parallel::DividedNow;
use pending_save::BackgroundSave;

use crate::amp::{MixedPrecision, Precision, needs_grad_scaler};
use crate::error::Result;
use crate::optim::GradScaler;
use crate::session::{GradientState, Object, ObjectState, Session};
use crate::state::PartialState;
use crate::tracking::{Process, Trackers, Wanted};
use accelerate_core::config::{DataLoaderSettings, FP8BackendType, OffloadTarget, ProjectSettings, RunConfig};
use state_hooks::StateHooks;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use tch::Device;

/// Makes one training program run on one process or many, in any precision (`Accelerator` of the reference).
///
/// Cheap to clone; clones are the same accelerator. Nothing is global: two accelerators do not know of
/// each other.
///
/// ```
/// use accelerate::Accelerator;
///
/// let accelerator = Accelerator::builder().cpu(true).gradient_accumulation_steps(2).build()?;
/// assert_eq!((accelerator.process_index(), accelerator.num_processes()), (0, 1));
/// accelerate::main_println!(accelerator, "training on {:?}", accelerator.device());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct Accelerator(Arc<Inner>);

struct Inner {
    session: Session,
    config: RunConfig,
    deep_speed: Option<Arc<DeepSpeed>>,
    precision: Precision,
    scaler: Option<GradScaler>,
    trigger: AtomicBool,
    /// All ranks have been told to save and to end.
    is_stopping: AtomicBool,
    /// The number of the next automatically named checkpoint.
    checkpoint_iteration: AtomicUsize,
    /// That `total_limit` has no effect here is said once.
    has_told_of_limit: AtomicBool,
    /// How good the run is, for checkpoints.
    checkpoint_metric: Mutex<Option<f64>>,
    background_save: BackgroundSave,
    /// Inside of `maybe_context_parallel`.
    sequence: DividedNow,
    trackers: Trackers,
    /// What is called before the state of the run is saved, and before it is loaded.
    save_hooks: Arc<StateHooks>,
    load_hooks: Arc<StateHooks>,
}

impl Accelerator {
    /// An accelerator with the defaults, and with what a launcher put into the environment.
    ///
    /// # Errors
    /// As [`AcceleratorBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Starts to describe an accelerator; [`AcceleratorBuilder::build`] makes it.
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::default()
    }

    /// An accelerator of the processes of `state`, with nothing prepared.
    fn from_config(
        config: RunConfig,
        deep_speed: Option<Arc<DeepSpeed>>,
        state: PartialState,
        gradient_state: GradientState,
        trackers: Vec<Wanted>,
    ) -> Result<Self> {
        let mixed_precision = config.cluster.mixed_precision;
        let outputs_to_fp32 = config.accelerator.outputs_to_fp32;
        let mut autocast = config.autocast.clone();
        autocast.enabled &= mixed_precision != MixedPrecision::Fp8 || config.fp8.use_autocast;
        let precision = Precision::new(mixed_precision, state.device(), autocast, outputs_to_fp32);
        let scaler =
            needs_grad_scaler(mixed_precision).then(|| GradScaler::new(config.grad_scaler.clone())).transpose()?;
        let session = Session::new(
            state.clone(),
            config.mesh(state.num_processes(), state.num_local_processes())?,
            gradient_state,
        );
        let (trigger, is_stopping) = (AtomicBool::new(false), AtomicBool::new(false));
        let checkpoint_iteration = AtomicUsize::new(config.project.iteration);
        let process = Process { index: state.process_index(), count: state.num_processes() };
        let logging_dir = config.project.has_logging_dir().then(|| config.project.resolved_logging_dir());
        let trackers = Trackers::new(trackers, logging_dir, process);
        let [save_hooks, load_hooks] = [(); 2].map(|()| Arc::new(StateHooks::default()));
        let accelerator = Self(Arc::new(Inner {
            session,
            config,
            deep_speed,
            precision,
            scaler,
            trigger,
            is_stopping,
            checkpoint_iteration,
            has_told_of_limit: AtomicBool::new(false),
            checkpoint_metric: Mutex::default(),
            background_save: BackgroundSave::default(),
            sequence: DividedNow::default(),
            trackers,
            save_hooks,
            load_hooks,
        }));
        accelerator.register_scaler();
        Ok(accelerator)
    }

    /// The scaler is there before anything is prepared.
    fn register_scaler(&self) {
        if let Some(scaler) = self.scaler() {
            self.session().register(Object::GradScaler(Arc::new(scaler.clone())));
        }
    }

    /// An accelerator of the same run and settings, whose session has nothing prepared, with no trackers and a group of its own: when
    /// ranks fail in there, this one remains usable. Collective.
    pub(crate) fn fork(&self) -> Result<Self> {
        let state = self.state().with_group(self.group().fork()?);
        let deep_speed = self.deep_speed().map(|deep_speed| Arc::new(deep_speed.anew()));
        Self::from_config(self.config().clone(), deep_speed, state, self.session().gradient_state.anew(), Vec::new())
    }

    pub(crate) fn session(&self) -> &Session {
        &self.0.session
    }

    /// The configuration of this run, resolved from code, flags, environment and file. Printed, it is a table that says of each
    /// value where it came from.
    ///
    /// ```
    /// use accelerate::{Accelerator, MixedPrecision};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Bf16).build()?;
    /// let config = accelerator.config();
    /// assert_eq!(config.cluster.mixed_precision, MixedPrecision::Bf16);
    /// assert_eq!(config.origin("mixed_precision").to_string(), "code");
    /// assert!(config.to_string().contains("dataloader_config.even_batches"));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn config(&self) -> &RunConfig {
        &self.0.config
    }

    /// The DeepSpeed configuration that this run trains by.
    pub(crate) fn deep_speed(&self) -> Option<&Arc<DeepSpeed>> {
        self.0.deep_speed.as_ref()
    }

    /// Where optimizers keep their state, if that is not where parameters are: shards in the host's memory have theirs beside
    /// them anyway.
    pub(crate) fn optimizer_offload(&self) -> Option<&OffloadTarget> {
        let plugin = self.config().fsdp_in_use()?;
        let is_beside_shards = self.device() == Device::Cpu || plugin.params_offload() == Some(&OffloadTarget::Cpu);
        plugin.optimizer_offload().filter(|target| **target != OffloadTarget::Cpu || !is_beside_shards)
    }

    pub(crate) fn precision(&self) -> Precision {
        self.0.precision.clone()
    }

    pub(crate) fn scaler(&self) -> Option<&GradScaler> {
        self.0.scaler.as_ref()
    }

    /// What this process knows of its run.
    pub fn state(&self) -> &PartialState {
        &self.0.session.state
    }

    /// The precision of forward passes.
    pub fn mixed_precision(&self) -> MixedPrecision {
        self.0.precision.mixed_precision()
    }

    /// Whose way to compute in FP8 is followed (`fp8_backend` of the reference); `None` in other precisions.
    ///
    /// ```
    /// use accelerate::{Accelerator, FP8BackendType, MixedPrecision, TERecipeKwargs};
    ///
    /// let builder = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Fp8);
    /// assert_eq!(builder.clone().build()?.fp8_backend(), Some(FP8BackendType::AO));
    /// let accelerator = builder.kwargs_handler(TERecipeKwargs::default()).build()?;
    /// assert_eq!(accelerator.fp8_backend(), Some(FP8BackendType::TE));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn fp8_backend(&self) -> Option<FP8BackendType> {
        let backend = self.config().fp8.backend.unwrap_or(FP8BackendType::AO);
        (self.mixed_precision() == MixedPrecision::Fp8).then_some(backend)
    }

    /// How data loaders are prepared.
    pub fn dataloader_config(&self) -> &DataLoaderSettings {
        &self.config().dataloader
    }

    /// Where the project keeps its files.
    pub fn project_configuration(&self) -> &ProjectSettings {
        &self.config().project
    }

    /// The states of everything prepared so far that the program still has, as copies: models, optimizers, schedulers, data loaders and the loss scaler,
    /// by kind and order (`model`, `model_1`, `optimizer`, `scheduler`, `dataloader`, `scaler`). Of what is sharded, each
    /// process has its own elements. Gradients that are being accumulated are not part of it. Not collective.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Init, ModuleFn, ParamStore}, optim::{AdamW, LinearWithWarmup}, tch::Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let weight = store.root().param("weight", ([2], Init::Ones))?;
    /// let optimizer = AdamW::new(&store, 0.1)?;
    /// let scheduler = LinearWithWarmup::new(&optimizer, 1, 10);
    /// let model = ModuleFn::new(&store, { let weight = weight.clone(); move |x: &Tensor| Ok(weight.get()? * x) });
    /// let (model, mut optimizer, mut scheduler) = accelerator.prepare((model, optimizer, scheduler))?;
    /// let mut train = || {
    ///     accelerator.backward(&model.forward(&Tensor::from_slice(&[1f32, 2.0]))?.sum(None))?;
    ///     optimizer.step()?;
    ///     scheduler.step()?;
    ///     optimizer.zero_grad()?;
    ///     Ok::<_, accelerate::Error>(weight.get()?.copy())
    /// };
    /// train()?;
    /// let states = accelerator.state_dict()?;
    /// assert_eq!(states.keys().collect::<Vec<_>>(), ["model", "optimizer", "scheduler"]);
    /// let then = train()?;
    /// accelerator.load_state_dict(&states)?;
    /// assert_eq!(train()?, then);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of the objects, by name; an optimizer or a scheduler that is in use, because the call comes out of its own
    /// step, or from another thread in the middle of it.
    #[track_caller]
    pub fn state_dict(&self) -> Result<BTreeMap<String, ObjectState>> {
        let _called = crate::status::here();
        self.session().objects().state_dict()
    }

    /// Takes everything prepared back to where [`Accelerator::state_dict`] found it on this process. Not collective, but
    /// every process has to call it.
    ///
    /// # Errors
    /// States of other objects than were prepared. Those of the objects, by name; an optimizer or a scheduler that is in use, as
    /// with [`Accelerator::state_dict`]. Nothing is changed then on this process.
    #[track_caller]
    pub fn load_state_dict(&self, states: &BTreeMap<String, ObjectState>) -> Result<()> {
        let _called = crate::status::here();
        self.session().objects().load_state_dict(states, &BTreeSet::new())
    }

    /// Forgets everything prepared so far, also what the program still has: calls of the accelerator's leave it out from
    /// now on. The count of micro-batches starts anew. Memory is freed when the program drops what it has.
    pub fn free_memory(&self) {
        self.session().clear();
        if let Some(deep_speed) = self.deep_speed() {
            deep_speed.forget_objects();
        }
        self.register_scaler();
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator")
            .field("state", self.state())
            .field("config", self.config())
            .finish_non_exhaustive()
    }
}
