//! Training by a DeepSpeed configuration: what it says becomes settings of the accelerator.

use crate::error::{Result, StateError};
use crate::messages;
use crate::state::PartialState;
use accelerate_core::config::{
    Auto, DeepSpeedConfig, DeepSpeedFacts, DeepSpeedOptimizer, DeepSpeedSchedule, DeepSpeedSettings, FloatType,
    GradScalerKwargs, GradScalerSettings, OptimizerInCode, ResolvedDeepSpeedConfig, RunConfig, SchedulerInCode,
    ShardingStrategy, check_deep_speed_prepared,
};
use accelerate_core::settings::{Origin, Record};
use std::fs;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use tch::Device;

/// A configuration while objects are prepared: loaders tell numbers that it leaves open.
#[derive(Debug)]
pub(crate) struct DeepSpeed {
    settings: DeepSpeedSettings,
    config: DeepSpeedConfig,
    facts: Mutex<DeepSpeedFacts>,
    /// What holds whatever is prepared.
    resolved: OnceLock<ResolvedDeepSpeedConfig>,
}

impl DeepSpeed {
    /// Reads the configuration, its file included.
    pub(super) fn read(settings: &DeepSpeedSettings) -> Result<Self> {
        let config = settings.config(&|path| fs::read_to_string(path))?;
        Ok(Self { settings: settings.clone(), config, facts: Mutex::default(), resolved: OnceLock::new() })
    }

    /// The same configuration where nothing is prepared yet.
    pub(super) fn anew(&self) -> Self {
        let facts =
            DeepSpeedFacts { batch_sizes: Vec::new(), optimizer: None, scheduler: None, ..self.facts().clone() };
        let (settings, config) = (self.settings.clone(), self.config.clone());
        Self { settings, config, facts: Mutex::new(facts), resolved: self.resolved.clone() }
    }

    fn facts(&self) -> MutexGuard<'_, DeepSpeedFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts into `run` what holds before any object is prepared. Where the batch size is left to the loaders, its numbers
    /// are not checked yet.
    pub(super) fn settle(&self, run: &mut RunConfig, state: &PartialState) -> Result<()> {
        let steps = "gradient_accumulation_config.num_steps";
        let is_said = *run.origin(steps) != Origin::Default;
        let facts = DeepSpeedFacts {
            world_size: state.num_processes(),
            gradient_accumulation_steps: is_said.then_some(run.gradient_accumulation.num_steps),
            mixed_precision: run.cluster.mixed_precision,
            split_batches: run.dataloader.split_batches,
            computes_on_cpu: state.device() == Device::Cpu,
            ..Default::default()
        };
        let mut config = self.without_batch_size();
        // These are checked against the objects that are prepared for them.
        (config.optimizer, config.scheduler) = (None, None);
        let resolved = self.settings.resolve(&config, &facts)?;
        *self.facts() = facts;
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
            run.gradient_accumulation.num_steps = resolved.gradient_accumulation_steps;
        });
        let hook = &run.ddp.comm_hook;
        if !hook.is_none() && run.fsdp.sharding_strategy != ShardingStrategy::NoShard {
            let feature = format!("comm_hook \"{hook}\" beside a DeepSpeed configuration that shards");
            let cure = "leave it out, and set communication_data_type in the configuration";
            return Err(StateError::NotAvailable { feature, cure }.into());
        }
        // A configuration is settled once.
        let _ = self.resolved.set(resolved);
        Ok(())
    }

    /// Largest norm of gradients, to which every step of a prepared optimizer clips them.
    pub(crate) fn gradient_clipping(&self) -> Option<f64> {
        self.resolved.get()?.gradient_clipping
    }

    /// What `save_model` writes floating-point weights in, if not in their own type.
    pub(crate) fn saved_dtype(&self) -> Option<FloatType> {
        self.resolved.get()?.saved_dtype()
    }

    /// Compares the batch size of one more loader with the configuration. Returns the number of micro-batches per step.
    ///
    /// # Errors
    /// The numbers do not multiply to `train_batch_size`, or "auto" remains.
    pub(crate) fn loader_prepared(&self, batch_size: Option<usize>) -> Result<usize> {
        let mut config = self.config.clone();
        (config.optimizer, config.scheduler) = (None, None);
        let facts = {
            let mut facts = self.facts();
            facts.batch_sizes.push(batch_size);
            DeepSpeedFacts { optimizer: None, scheduler: None, ..facts.clone() }
        };
        let resolved = self.settings.resolve(&config, &facts)?;
        // Told here, because loaders for evaluation may well have other sizes.
        for inert in resolved.inert_keys.iter().filter(|inert| inert.key == "train_micro_batch_size_per_gpu") {
            messages::warning!("DeepSpeed's {} has no effect: {}", inert.key, inert.why);
        }
        Ok(resolved.gradient_accumulation_steps)
    }

    /// Refuses an optimizer of the program's own beside one of the configuration.
    pub(crate) fn optimizer_prepared(&self, lr: Option<f64>) -> Result<()> {
        let own = OptimizerInCode::Own { lr };
        check_deep_speed_prepared(&self.config, Some(&own), None)?;
        self.facts().optimizer = Some(own);
        Ok(())
    }

    /// Refuses a scheduler of the program's own beside one of the configuration.
    pub(crate) fn scheduler_prepared(&self) -> Result<()> {
        Ok(check_deep_speed_prepared(&self.config, self.facts().optimizer.as_ref(), Some(&SchedulerInCode::Own))?)
    }

    /// The optimizer that the configuration describes, for a dummy with these numbers.
    pub(crate) fn optimizer(&self, lr: Option<f64>, weight_decay: Option<f64>) -> Result<DeepSpeedOptimizer> {
        let dummy = OptimizerInCode::Dummy { lr, weight_decay };
        check_deep_speed_prepared(&self.config, Some(&dummy), None)?;
        let config = DeepSpeedConfig { scheduler: None, ..self.without_batch_size() };
        let facts = DeepSpeedFacts { optimizer: Some(dummy), scheduler: None, ..self.facts().clone() };
        let resolved = self.settings.resolve(&config, &facts)?;
        self.facts().optimizer = facts.optimizer;
        resolved.optimizer.ok_or_else(|| StateError::NoDeepSpeedSection { section: "optimizer" }.into())
    }

    /// The schedule that the configuration describes, for a dummy with these numbers.
    pub(crate) fn schedule(
        &self,
        total_num_steps: Option<u64>,
        warmup_num_steps: Option<usize>,
    ) -> Result<DeepSpeedSchedule> {
        let dummy = SchedulerInCode::Dummy { total_num_steps, warmup_num_steps, has_callable: false };
        let facts = DeepSpeedFacts { scheduler: Some(dummy), ..self.facts().clone() };
        let resolved = self.settings.resolve(&self.without_batch_size(), &facts)?;
        resolved.scheduler.ok_or_else(|| StateError::NoDeepSpeedSection { section: "scheduler" }.into())
    }

    /// Is the program to build models without memory for their parameters?
    pub(crate) fn wants_empty_weights(&self) -> bool {
        self.settings.zero3_init_flag == Some(true)
    }

    /// The configuration with some batch size, where it leaves that to the loaders.
    fn without_batch_size(&self) -> DeepSpeedConfig {
        let mut config = self.config.clone();
        if !matches!(config.train_micro_batch_size_per_gpu, Some(Auto::Value(_))) {
            config.train_micro_batch_size_per_gpu = Some(Auto::Value(1));
            config.train_batch_size = Some(Auto::Auto);
        }
        config
    }
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
