//! Training by a DeepSpeed configuration: what it says becomes settings of the accelerator, and of what is prepared.

use super::Accelerator;
use crate::error::{Result, StateError};
use crate::messages;
use crate::state::PartialState;
use accelerate_core::config::{
    DeepSpeedConfig, DeepSpeedFacts, DeepSpeedSettings, FloatType, GradScalerKwargs, GradScalerSettings, PreparedFacts,
    ResolvedDeepSpeedConfig, RunConfig, ShardingStrategy,
};
use accelerate_core::settings::{Origin, Record, read_file};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Device;

/// A configuration and what it is resolved to: when the accelerator is built, and then by each call of `prepare` from what all
/// calls so far have told. [`DeepSpeedSettings::resolve`] decides; here it is only kept.
#[derive(Debug)]
pub(crate) struct DeepSpeed {
    settings: DeepSpeedSettings,
    config: DeepSpeedConfig,
    /// With nothing prepared.
    at_start: Arc<Resolution>,
    now: Mutex<Arc<Resolution>>,
    /// Nobody has told the number of micro-batches yet.
    are_steps_open: AtomicBool,
}

/// What the run and its objects have told, and what follows from it.
#[derive(Debug)]
pub(super) struct Resolution {
    facts: DeepSpeedFacts,
    pub(super) config: ResolvedDeepSpeedConfig,
}

/// Reads the configuration that a run trains by, its file included.
pub(super) fn read(run: &RunConfig) -> Result<Option<DeepSpeedConfig>> {
    let read = || run.deepspeed.config(&read_file);
    Ok(run.cluster.use_deepspeed.then(read).transpose().map_err(|error| with_places(run, error))?)
}

impl DeepSpeed {
    /// Resolves the configuration before any object is prepared, and puts what holds then into `run`.
    pub(super) fn settle(config: DeepSpeedConfig, run: &mut RunConfig, state: &PartialState) -> Result<Self> {
        let settings = run.deepspeed.clone();
        let computes_on_cpu = state.device() == Device::Cpu;
        let facts = DeepSpeedFacts { computes_on_cpu, ..run.deepspeed_facts(state.num_processes()) };
        let resolved = settings.resolve(&config, &facts).map_err(|error| with_places(run, error))?;
        for inert in resolved.inert_keys.iter().filter(|_| state.is_main_process()) {
            messages::info!("DeepSpeed's {} has no effect: {}", inert.key, inert.why);
        }
        if let Some(scaler) = &resolved.grad_scaler {
            check_scaler(run, scaler)?;
            run.derive(CONFIGURATION, |run| run.grad_scaler = scaler.clone());
        }
        run.derive(CONFIGURATION, |run| {
            run.fsdp = resolved.fully_sharded_settings();
            run.cluster.mixed_precision = resolved.mixed_precision;
            let num_steps = &mut run.gradient_accumulation.num_steps;
            *num_steps = resolved.gradient_accumulation_steps.unwrap_or(*num_steps);
        });
        let hook = &run.ddp.comm_hook;
        if !hook.is_none() && run.fsdp.sharding_strategy != ShardingStrategy::NoShard {
            let feature = format!("comm_hook \"{hook}\" beside a DeepSpeed configuration that shards");
            let cure = "leave it out, and set communication_data_type in the configuration";
            return Err(StateError::NotAvailable { feature, cure }.into());
        }
        Ok(Self::begin(settings, config, Arc::new(Resolution { facts, config: resolved })))
    }

    /// The same configuration with nothing prepared.
    pub(super) fn anew(&self) -> Self {
        let anew = Self::begin(self.settings.clone(), self.config.clone(), Arc::clone(&self.at_start));
        // The number of micro-batches that holds is handed on, too.
        anew.are_steps_open.store(self.are_steps_open.load(Ordering::Relaxed), Ordering::Relaxed);
        anew
    }

    fn begin(settings: DeepSpeedSettings, config: DeepSpeedConfig, at_start: Arc<Resolution>) -> Self {
        let are_steps_open = AtomicBool::new(at_start.config.gradient_accumulation_steps.is_none());
        Self { settings, config, now: Mutex::new(Arc::clone(&at_start)), at_start, are_steps_open }
    }

    fn now(&self) -> MutexGuard<'_, Arc<Resolution>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What follows if `objects` are prepared, too. Nothing is kept of it before [`take_over`](Self::take_over).
    fn resolve(&self, objects: &PreparedFacts) -> accelerate_core::Result<Resolution> {
        let earlier = Arc::clone(&self.now());
        let mut facts = earlier.facts.clone();
        facts.objects.extend(objects);
        let config = self.settings.resolve(&self.config, &facts)?;
        config.check_after(&earlier.config)?;
        Ok(Resolution { facts, config })
    }

    fn take_over(&self, resolution: Resolution) -> Arc<Resolution> {
        if resolution.config.gradient_accumulation_steps.is_some() {
            self.steps_are_said();
        }
        std::mem::replace(&mut self.now(), Arc::new(resolution))
    }

    /// Forgets what objects have told that are no more.
    pub(super) fn forget_objects(&self) {
        *self.now() = Arc::clone(&self.at_start);
    }

    /// Somebody has told the number of micro-batches.
    pub(super) fn steps_are_said(&self) {
        self.are_steps_open.store(false, Ordering::Relaxed);
    }

    /// Refuses to accumulate where only a loader could tell the number of micro-batches, and none was prepared.
    pub(super) fn check_steps(&self) -> Result<()> {
        match self.are_steps_open.load(Ordering::Relaxed) {
            true => Err(StateError::OpenAccumulation.into()),
            false => Ok(()),
        }
    }

    /// What `save_model` writes floating-point weights in, if not in their own type.
    pub(super) fn saved_dtype(&self) -> Option<FloatType> {
        self.at_start.config.saved_dtype()
    }

    /// Is the program to build models without memory for their parameters?
    pub(super) fn wants_empty_weights(&self) -> bool {
        self.settings.zero3_init_flag == Some(true)
    }
}

impl Accelerator {
    /// The DeepSpeed configuration as it is with these objects. Ranks compare it if `has_model`, which makes it collective:
    /// with other numbers they would go different ways.
    pub(super) fn resolve_deep_speed(&self, objects: &PreparedFacts, has_model: bool) -> Result<Option<Resolution>> {
        let Some(deep_speed) = self.deep_speed() else { return Ok(None) };
        let resolution = deep_speed.resolve(objects).map_err(|error| with_places(self.config(), error).into());
        if !has_model {
            return resolution.map(Some);
        }
        let group = &self.session().group;
        let resolution = group.agree_on_success("resolving the DeepSpeed configuration", resolution)?;
        group.agree(
            "prepare",
            &resolution.config.summary(),
            "prepare the same objects with the same numbers on all ranks",
        )?;
        Ok(Some(resolution))
    }

    /// Goes by `resolution` from now on, whose objects are prepared.
    pub(super) fn take_over_deep_speed(&self, resolution: Resolution) -> Result<()> {
        let Some(deep_speed) = self.deep_speed() else { return Ok(()) };
        let (steps, inert) = (resolution.config.gradient_accumulation_steps, resolution.config.inert_keys.clone());
        let earlier = deep_speed.take_over(resolution);
        let is_new = |key| !earlier.config.inert_keys.contains(key);
        for inert in inert.iter().filter(|key| self.is_main_process() && is_new(key)) {
            messages::warning!("DeepSpeed's {} has no effect: {}", inert.key, inert.why);
        }
        match steps {
            Some(steps) if earlier.config.gradient_accumulation_steps.is_none() => {
                self.set_gradient_accumulation_steps(steps)
            }
            _ => Ok(()),
        }
    }
}

fn with_places(run: &RunConfig, error: accelerate_core::Error) -> accelerate_core::Error {
    run.with_places("deepspeed_config", error)
}

const CONFIGURATION: &str = "DeepSpeed configuration";

/// What the program says of loss scaling must be what the configuration's section `fp16` says.
fn check_scaler(run: &RunConfig, scaler: &GradScalerSettings) -> Result<()> {
    let configured = GradScalerKwargs::from(scaler.clone());
    let said = GradScalerKwargs::from(run.grad_scaler.clone());
    for setting in GradScalerKwargs::settings() {
        let (Some(configured), Some(said)) = (configured.text(setting), said.text(setting)) else { continue };
        let origin = run.origin(setting.path);
        if *origin != Origin::Default && configured != said {
            let (field, origin) = (setting.field, origin.to_string());
            return Err(StateError::TwoLossScales { field, said, origin, configured }.into());
        }
    }
    Ok(())
}
