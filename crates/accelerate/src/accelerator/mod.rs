//! The one object a training program talks to.

mod builder;
mod collectives;
mod deep_speed;
mod handlers;
mod join;
mod operations;
mod persistence;
mod prepare;
mod process_control;
mod profile;
mod seed;
mod training;

pub use builder::AcceleratorBuilder;
pub(crate) use deep_speed::DeepSpeed;
pub use handlers::KwargsHandler;
pub use persistence::{AsParamStore, SaveModelOptions};
pub use prepare::{Prepare, PrepareDataLoaderOptions, PreparedModel, kind};
pub use seed::{SeedOptions, set_seed};
pub use training::{HasParameters, ModelEngine, PreparedModels};

use crate::amp::{MixedPrecision, Precision};
use crate::error::Result;
use crate::optim::{GradScaler, OptimizerHandle};
use crate::profile::ProfileKwargs;
use crate::session::Session;
use crate::state::PartialState;
use accelerate_core::config::{
    Compilation, DataLoaderConfiguration, DistributedDataParallelKwargs, FloatType, FullyShardedDataParallelPlugin,
    OffloadTarget, ProjectConfiguration,
};
use accelerate_core::names::RngType;
use accelerate_core::schedule::SchedulerUnit;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
/// accelerator.print(format_args!("training on {:?}", accelerator.device()));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct Accelerator(Arc<Inner>);

struct Inner {
    session: Session,
    settings: Settings,
    precision: Precision,
    scaler: Option<GradScaler>,
    optimizers: Mutex<Vec<OptimizerHandle>>,
    trigger: AtomicBool,
    /// What it was built from.
    recipe: AcceleratorBuilder,
}

/// What the builder decided, as `prepare` needs it.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) device_placement: bool,
    pub(crate) dataloader: DataLoaderConfiguration,
    pub(crate) rng_types: Vec<RngType>,
    pub(crate) project: ProjectConfiguration,
    pub(crate) ddp: DistributedDataParallelKwargs,
    pub(crate) fsdp: Option<FullyShardedDataParallelPlugin>,
    pub(crate) deep_speed: Option<Arc<DeepSpeed>>,
    /// Largest norm of gradients, to which every step of a prepared optimizer clips them.
    pub(crate) gradient_clipping: Option<f64>,
    pub(crate) step_scheduler_with_optimizer: bool,
    /// What `save_model` writes floating-point weights in, if not in their own type.
    pub(crate) saved_dtype: Option<FloatType>,
    pub(crate) scheduler_unit: SchedulerUnit,
    pub(crate) profile: ProfileKwargs,
    pub(crate) compilation: Compilation,
}

impl Settings {
    /// Where optimizers keep their state, if that is not where parameters are: parts in the host's memory have theirs beside
    /// them anyway.
    pub(crate) fn optimizer_offload(&self, device: Device) -> Option<&OffloadTarget> {
        let plugin = self.fsdp.as_ref()?;
        let is_beside_parts = device == Device::Cpu || plugin.params_offload() == Some(&OffloadTarget::Cpu);
        plugin.optimizer_offload().filter(|target| **target != OffloadTarget::Cpu || !is_beside_parts)
    }
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

    fn from_parts(
        session: Session,
        settings: Settings,
        precision: Precision,
        scaler: Option<GradScaler>,
        recipe: AcceleratorBuilder,
    ) -> Self {
        Self(Arc::new(Inner {
            session,
            settings,
            precision,
            scaler,
            optimizers: Mutex::new(Vec::new()),
            trigger: AtomicBool::new(false),
            recipe,
        }))
    }

    /// The same run and settings with nothing prepared and a group of its own. Collective.
    pub(crate) fn fork(&self) -> Result<Self> {
        self.0.recipe.fork(self)
    }

    pub(crate) fn session(&self) -> &Session {
        &self.0.session
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.0.settings
    }

    pub(crate) fn precision(&self) -> Precision {
        self.0.precision.clone()
    }

    pub(crate) fn scaler(&self) -> Option<&GradScaler> {
        self.0.scaler.as_ref()
    }

    fn optimizers(&self) -> MutexGuard<'_, Vec<OptimizerHandle>> {
        // A list of shared handles: whole after every statement, also where another thread panicked.
        self.0.optimizers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn register_optimizer(&self, handle: &OptimizerHandle) {
        self.optimizers().push(handle.clone());
    }

    /// What this process knows of its run.
    pub fn state(&self) -> &PartialState {
        &self.0.session.state
    }

    /// The precision of forward passes.
    pub fn mixed_precision(&self) -> MixedPrecision {
        self.0.precision.mixed_precision()
    }

    /// How data loaders are prepared.
    pub fn dataloader_config(&self) -> &DataLoaderConfiguration {
        &self.0.settings.dataloader
    }

    /// Where the project keeps its files.
    pub fn project_configuration(&self) -> &ProjectConfiguration {
        &self.0.settings.project
    }

    /// Forgets everything prepared so far, so that its memory is freed when the user drops it too. The count of
    /// micro-batches starts anew.
    pub fn free_memory(&self) {
        self.0.session.forget_models();
        self.optimizers().clear();
        self.0.session.gradient_state.restart();
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator")
            .field("state", self.state())
            .field("settings", &self.0.settings)
            .field("mixed_precision", &self.mixed_precision())
            .finish_non_exhaustive()
    }
}
