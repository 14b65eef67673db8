//! Filling a configuration from what the run knows.

mod batch;
mod sections;

use super::merge::Merge;
use super::plugin::NVME_NEEDS_PATH;
use super::{
    Auto, DeepSpeedConfig, DeepSpeedOffload, DeepSpeedOptimizer, DeepSpeedSchedule, DeepSpeedSettings,
    DeepSpeedZeroOptimization, InertKey, PreparedFacts, ZeroStage,
};
use crate::Result;
use crate::config::{FloatType, GradScalerSettings, MixedPrecision, OffloadDevice, OffloadTarget};
use crate::error::config::ConfigErrorKind;
use crate::error::deep_speed::{DeepSpeedErrorKind, Problem, RemainingAuto};
use std::fmt;
use std::path::PathBuf;

/// What the run knows, and what the objects tell that were passed to `prepare` so far.
///
/// ```
/// use accelerate_core::config::{DeepSpeedFacts, PreparedFacts};
/// let objects = PreparedFacts { batch_sizes: vec![Some(8), Some(16)], ..Default::default() };
/// let facts = DeepSpeedFacts { world_size: 2, objects, ..Default::default() };
/// assert!(facts.objects.optimizers.is_empty() && !facts.split_batches);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedFacts {
    /// Count of all processes. Default 1.
    pub world_size: usize,
    /// Micro-batches per optimizer step, where the program gives a number itself.
    pub gradient_accumulation_steps: Option<usize>,
    /// The mixed precision asked for; `No` asks for nothing.
    pub mixed_precision: MixedPrecision,
    /// Are batches of the loaders cut into one part for each process? Default false: each process gets whole ones.
    pub split_batches: bool,
    /// The width of the model's layers, if it is known. Without it three sizes that change nothing here stay unknown
    /// where they are "auto", which is an error in the reference.
    pub hidden_size: Option<u64>,
    /// Is everything computed in the memory of the host? Then what is offloaded there is there already. Default false.
    pub computes_on_cpu: bool,
    /// What the objects tell. Default nothing: there are none yet.
    pub objects: PreparedFacts,
}

impl Default for DeepSpeedFacts {
    fn default() -> Self {
        Self {
            world_size: 1,
            gradient_accumulation_steps: None,
            mixed_precision: MixedPrecision::No,
            split_batches: false,
            hidden_size: None,
            computes_on_cpu: false,
            objects: PreparedFacts::default(),
        }
    }
}

/// A configuration in which every number is known that the run and the objects so far tell.
///
/// ```
/// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedSettings, PreparedFacts};
/// let plugin = DeepSpeedSettings::default();
/// let objects = PreparedFacts { batch_sizes: vec![Some(8)], ..Default::default() };
/// let facts = DeepSpeedFacts { world_size: 2, objects, ..Default::default() };
/// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &facts)?;
/// assert_eq!((resolved.train_micro_batch_size_per_gpu, resolved.train_batch_size), (Some(8), Some(16)));
/// assert_eq!((resolved.gradient_clipping, resolved.zero_stage.as_u8()), (Some(1.0), 2));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedDeepSpeedConfig {
    /// Rows per step of the optimizer, over all processes. `None` before the loaders are there that tell it.
    pub train_batch_size: Option<usize>,
    /// Rows per forward pass of one process. `None` before the loaders are there that tell it.
    pub train_micro_batch_size_per_gpu: Option<usize>,
    /// Forward passes per step of the optimizer. `None` before the loaders are there that tell it.
    pub gradient_accumulation_steps: Option<usize>,
    /// Largest 2-norm of all gradients together; `None` for no limit.
    pub gradient_clipping: Option<f64>,
    /// What is in parts instead of copies.
    pub zero_stage: ZeroStage,
    /// May models be built without memory for their parameters (`ParamStore::init_empty_weights`), which are then made in
    /// parts from the start? The program builds them so.
    pub zero3_init: bool,
    /// Among how many neighbouring ranks parameters are divided, if not among all; they fill whole groups.
    pub mics_shard_size: Option<usize>,
    /// Where the state of the optimizer is kept, if not where it is computed.
    pub offload_optimizer: Option<OffloadTarget>,
    /// Where parameters are kept, if not where they are computed with.
    pub offload_param: Option<OffloadTarget>,
    /// At stage 3, `save_model` writes weights in the 16 bits of the mixed precision in place of the 32 that are trained.
    pub stage3_gather_16bit_weights_on_model_save: bool,
    /// In which gradients travel and add up over micro-batches, if not in what the mixed precision computes in.
    pub reduce_dtype: Option<FloatType>,
    /// Elements reduced in one message, if given.
    pub reduce_bucket_size: Option<u64>,
    /// Elements fetched ahead of their use, if given.
    pub stage3_prefetch_bucket_size: Option<u64>,
    /// Elements below which a parameter stays whole, if given.
    pub stage3_param_persistence_threshold: Option<u64>,
    /// What the `DummyOptim`s become; `None` before there is one.
    pub optimizer: Option<DeepSpeedOptimizer>,
    /// What the `DummyScheduler`s become; `None` before there is one.
    pub scheduler: Option<DeepSpeedSchedule>,
    /// What layers compute in.
    pub mixed_precision: MixedPrecision,
    /// How losses are scaled, in fp16.
    pub grad_scaler: Option<GradScalerSettings>,
    /// What was asked for but changes nothing here, to be told once.
    pub inert_keys: Vec<InertKey>,
}

/// What is gathered while a configuration is filled, to be reported together.
struct Filling<'a> {
    config: &'a DeepSpeedConfig,
    facts: &'a DeepSpeedFacts,
    remaining: Vec<RemainingAuto>,
    merge: Merge,
    problems: Vec<Problem>,
    inert: Vec<InertKey>,
}

impl DeepSpeedSettings {
    /// Fills every "auto" of `config`, which [`config`](Self::config) gave, from what the run knows (`_prepare_deepspeed`
    /// of the reference, `accelerator.py`).
    ///
    /// | key | from |
    /// |---|---|
    /// | `train_micro_batch_size_per_gpu` | the smallest (`is_train_batch_min`) or largest batch of all loaders |
    /// | `gradient_accumulation_steps` | the accelerator, else 1 |
    /// | `train_batch_size` | the product of these two and the count of processes |
    /// | `gradient_clipping` | 1.0 |
    /// | `fp16.enabled`, `bf16.enabled` | the mixed precision |
    /// | `zero_optimization.stage3_gather_16bit_weights_on_model_save` | false |
    /// | `zero_optimization.{reduce_bucket_size, stage3_prefetch_bucket_size, stage3_param_persistence_threshold}` | h * h, 0.9 * h * h, 10 * h, for the hidden size h |
    /// | `optimizer.params.{lr, weight_decay}` | the `DummyOptim` |
    /// | `scheduler.params.warmup_min_lr` | 0 |
    /// | `scheduler.params.warmup_max_lr` | the optimizer's rate |
    /// | `scheduler.params.warmup_num_steps` | the `DummyScheduler`, at least 1 |
    /// | `scheduler.params.total_num_steps` | the `DummyScheduler`, divided by the count of processes unless batches are split |
    ///
    /// Of the three numbers about batches one may be absent, which is then computed. `warmup_max_lr` is the rate that the
    /// optimizer will have; in the reference it is the `DummyOptim`'s, even where the configuration gives another.
    ///
    /// What only objects can tell that are not there yet stays open, because later calls of `prepare` may bring them: it is
    /// resolved again with the facts of all calls, whose order does not matter.
    /// [`check_after`](ResolvedDeepSpeedConfig::check_after) then compares it with what is in use.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): what [`PreparedFacts::check`] refuses; each "auto" that the objects
    /// do not fill, all in one error; numbers that differ from the program's, all in one error; dummies that become two
    /// optimizers or two schedules; a `train_batch_size` that is not the product; fp16 and bf16 at once; an "nvme" device without a folder; parameters on NVMe without the optimizer's
    /// state; a `mics_shard_size` that does not divide the count of processes.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedSettings};
    /// let json = r#"{"zero_optimization": {"stage": 2}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}"#;
    /// let plugin = DeepSpeedSettings { hf_ds_config: Some(json.parse()?), ..Default::default() };
    /// let config = plugin.config(&|_| Ok(String::new()))?;
    /// let facts = DeepSpeedFacts { world_size: 2, ..Default::default() };
    /// assert_eq!(plugin.resolve(&config, &facts)?.gradient_accumulation_steps, Some(2));
    ///
    /// let facts = DeepSpeedFacts { gradient_accumulation_steps: Some(4), ..facts };
    /// assert!(plugin.resolve(&config, &facts).unwrap_err().to_string().contains("* 2 processes is 32"));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn resolve(&self, config: &DeepSpeedConfig, facts: &DeepSpeedFacts) -> Result<ResolvedDeepSpeedConfig> {
        let resolved = self.filled(config, facts);
        match &config.file {
            Some(file) => resolved.map_err(|error| error.in_deepspeed_file(file)),
            None => resolved,
        }
    }

    fn filled(&self, config: &DeepSpeedConfig, facts: &DeepSpeedFacts) -> Result<ResolvedDeepSpeedConfig> {
        if facts.world_size == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "world_size" }.into());
        }
        facts.objects.check(config)?;
        let mut filling = Filling::new(config, facts);
        let batch = filling.batch(self.is_train_batch_min);
        let (mixed_precision, grad_scaler) = filling.precision()?;
        let optimizer = filling.optimizer()?;
        let scheduler = filling.scheduler(optimizer.as_ref())?;
        let zero = config.zero_optimization.clone().unwrap_or_default();
        // Where a configuration says "auto" and nobody says more, the plugin's default holds, not DeepSpeed's.
        let auto_stage = self.zero_stage.unwrap_or(ZeroStage::Gradients);
        let zero_stage = zero.stage.map_or(ZeroStage::Disabled, |stage| stage.value().unwrap_or(auto_stage));
        let (offload_optimizer, offload_param) = filling.offloads(&zero, zero_stage);
        let mics_shard_size = filling.mics_shard_size(zero.mics_shard_size, zero_stage);
        let saves_16bit = filling.saves_16bit(&zero, zero_stage, mixed_precision);
        let reduce_dtype = filling.reduce_dtype(zero_stage);
        let zero3_init = filling.zero3_init(self.zero3_init_flag, zero_stage);
        let size = |slot: Option<Auto<u64>>, of: fn(u64) -> u64| {
            slot.and_then(|size| size.value().or(facts.hidden_size.map(of)))
        };
        let inert_keys = filling.finish()?;
        let batch = batch?;
        Ok(ResolvedDeepSpeedConfig {
            train_batch_size: batch.train,
            train_micro_batch_size_per_gpu: batch.micro,
            gradient_accumulation_steps: batch.accumulation,
            gradient_clipping: config
                .gradient_clipping
                .map(|norm| norm.value().unwrap_or(1.0))
                .filter(|&norm| norm > 0.0),
            zero_stage,
            zero3_init,
            mics_shard_size,
            offload_optimizer,
            offload_param,
            stage3_gather_16bit_weights_on_model_save: saves_16bit,
            reduce_dtype,
            reduce_bucket_size: size(zero.reduce_bucket_size, |width| width.saturating_mul(width)),
            stage3_prefetch_bucket_size: size(zero.stage3_prefetch_bucket_size, |width| {
                (0.9 * width as f64 * width as f64) as u64
            }),
            stage3_param_persistence_threshold: size(zero.stage3_param_persistence_threshold, |width| {
                width.saturating_mul(10)
            }),
            optimizer,
            scheduler,
            mixed_precision,
            grad_scaler,
            inert_keys,
        })
    }
}

impl ResolvedDeepSpeedConfig {
    /// Checks that numbers which are in use since an earlier call of `prepare` have not become others by what more objects
    /// tell.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), naming both numbers.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedSettings, PreparedFacts};
    /// let json = r#"{"zero_optimization": {}, "train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}"#;
    /// let plugin = DeepSpeedSettings { hf_ds_config: Some(json.parse()?), ..Default::default() };
    /// let config = plugin.config(&|_| Ok(String::new()))?;
    /// let with_loaders = |batch_sizes: &[usize]| {
    ///     let batch_sizes = batch_sizes.iter().copied().map(Some).collect();
    ///     let objects = PreparedFacts { batch_sizes, ..Default::default() };
    ///     plugin.resolve(&config, &DeepSpeedFacts { objects, ..Default::default() })
    /// };
    /// let error = with_loaders(&[8, 4])?.check_after(&with_loaders(&[8])?).unwrap_err();
    /// assert!(error.to_string().starts_with("gradient_accumulation_steps is 3 (for batches of 8 rows), as an earlier call"));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn check_after(&self, earlier: &Self) -> Result<()> {
        let steps = |resolved: &Self| {
            let (steps, rows) = (resolved.gradient_accumulation_steps?, resolved.train_micro_batch_size_per_gpu);
            Some((steps, rows.map(|rows| format!(" (for batches of {rows} rows)")).unwrap_or_default()))
        };
        if let (Some((before, rows_before)), Some((now, rows_now))) = (steps(earlier), steps(self))
            && before != now
        {
            let (before, now) = (format!("{before}{rows_before}"), format!("{now}{rows_now}"));
            return Err(DeepSpeedErrorKind::Changed { what: "gradient_accumulation_steps", before, now }.into());
        }
        unchanged("the optimizer of the DeepSpeed configuration", earlier.optimizer, self.optimizer)?;
        unchanged("the schedule of the DeepSpeed configuration", earlier.scheduler, self.scheduler)
    }

    /// What every process has to train by, in words: processes that differ in it would go different ways.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedSettings};
    /// let plugin = DeepSpeedSettings::default();
    /// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &DeepSpeedFacts::default())?;
    /// assert_eq!(resolved.summary(), "gradient_accumulation_steps 1, gradient_clipping 1");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn summary(&self) -> String {
        let words = [
            self.gradient_accumulation_steps.map(|steps| format!("gradient_accumulation_steps {steps}")),
            self.gradient_clipping.map(|norm| format!("gradient_clipping {norm}")),
            self.optimizer.map(|optimizer| optimizer.to_string()),
            self.scheduler.map(|schedule| schedule.to_string()),
        ];
        words.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

fn unchanged<T: PartialEq + fmt::Display>(what: &'static str, before: Option<T>, now: Option<T>) -> Result<()> {
    match (before, now) {
        (Some(before), Some(now)) if before != now => {
            let (before, now) = (before.to_string(), now.to_string());
            Err(DeepSpeedErrorKind::Changed { what, before, now }.into())
        }
        _ => Ok(()),
    }
}

const PARAMETERS_ARE_WHOLE: &str = "below stage 3 parameters are whole";

impl<'a> Filling<'a> {
    fn new(config: &'a DeepSpeedConfig, facts: &'a DeepSpeedFacts) -> Self {
        let remaining = config
            .unfilled_autos
            .iter()
            .map(|key| RemainingAuto { key: key.clone(), why: "nothing in the program tells it" })
            .collect();
        let inert = config.inert_keys.clone();
        Self { config, facts, remaining, merge: Merge::default(), problems: Vec::new(), inert }
    }

    fn remains(&mut self, key: &str, why: &'static str) {
        self.remaining.push(RemainingAuto { key: key.to_owned(), why });
    }

    fn has_no_effect(&mut self, key: &str, why: &'static str) {
        self.inert.push(InertKey { key: key.to_owned(), why });
    }

    /// The keys without effect, unless something was wrong.
    fn finish(self) -> Result<Vec<InertKey>> {
        if !self.merge.conflicts.is_empty() {
            return Err(self.config.conflicts(self.merge.conflicts));
        }
        if !self.remaining.is_empty() {
            return Err(DeepSpeedErrorKind::RemainingAuto { remaining: self.remaining }.into());
        }
        if !self.problems.is_empty() {
            return Err(DeepSpeedErrorKind::Document { problems: self.problems }.into());
        }
        Ok(self.inert)
    }

    fn offloads(
        &mut self,
        zero: &DeepSpeedZeroOptimization,
        stage: ZeroStage,
    ) -> (Option<OffloadTarget>, Option<OffloadTarget>) {
        let optimizer = self.offload("zero_optimization.offload_optimizer", &zero.offload_optimizer);
        let param = self.offload("zero_optimization.offload_param", &zero.offload_param);
        let only = |filling: &mut Self, target: Option<OffloadTarget>, key, from: ZeroStage, why| {
            if target.is_some() && stage < from {
                filling.has_no_effect(key, why);
                return None;
            }
            target
        };
        let optimizer = only(
            self,
            optimizer,
            "zero_optimization.offload_optimizer",
            ZeroStage::OptimizerStates,
            "at stage 0 nothing is in parts",
        );
        let param = only(self, param, "zero_optimization.offload_param", ZeroStage::Parameters, PARAMETERS_ARE_WHOLE);
        let is_on_nvme = |target: &Option<OffloadTarget>| matches!(target, Some(OffloadTarget::Nvme(_)));
        if is_on_nvme(&param) && !is_on_nvme(&optimizer) {
            self.problems.push(Problem::Refused {
                key: "zero_optimization.offload_param.device".to_owned(),
                found: "\"nvme\" without the optimizer's state".to_owned(),
                instead: "a step changes parameters block by block together with their state; write \"nvme\" with its \
                          \"nvme_path\" in \"offload_optimizer\" too, or \"cpu\" here",
            });
        }
        (optimizer, param)
    }

    /// What asks for groups of ranks at stage 3, where DeepSpeed looks at it.
    fn mics_shard_size(&mut self, size: Option<usize>, stage: ZeroStage) -> Option<usize> {
        let (key, size) = ("zero_optimization.mics_shard_size", size?);
        if stage < ZeroStage::Parameters {
            self.has_no_effect(key, PARAMETERS_ARE_WHOLE);
            return None;
        }
        if !self.facts.world_size.is_multiple_of(size) {
            let found = format!("{size} among {} processes", self.facts.world_size);
            let wanted = "a number that divides that of the processes, so that they fill whole groups";
            self.problems.push(Problem::Value { key: key.to_owned(), found, wanted });
        }
        Some(size)
    }

    fn offload(&mut self, key: &str, offload: &DeepSpeedOffload) -> Option<OffloadTarget> {
        let path = || offload.nvme_path.clone().and_then(Auto::value).filter(|path| !path.as_os_str().is_empty());
        match offload.device.and_then(Auto::value).unwrap_or_default() {
            OffloadDevice::None => None,
            OffloadDevice::Cpu if self.facts.computes_on_cpu => {
                self.has_no_effect(key, "everything is in the memory of the host already");
                None
            }
            OffloadDevice::Cpu => Some(OffloadTarget::Cpu),
            OffloadDevice::Nvme => {
                if path().is_none() {
                    let key = format!("{key}.nvme_path");
                    self.problems.push(Problem::Missing { key, why: NVME_NEEDS_PATH });
                }
                Some(OffloadTarget::Nvme(path().unwrap_or_else(PathBuf::new)))
            }
        }
    }

    fn saves_16bit(
        &mut self,
        zero: &DeepSpeedZeroOptimization,
        stage: ZeroStage,
        mixed_precision: MixedPrecision,
    ) -> bool {
        let key = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        match zero.stage3_gather_16bit_weights_on_model_save.and_then(Auto::value) {
            None => return false,
            Some(false) => self.has_no_effect(key, "a saved model is always whole, and in 32 bits unless this is true"),
            Some(true) if stage < ZeroStage::Parameters => self.has_no_effect(key, PARAMETERS_ARE_WHOLE),
            Some(true) if mixed_precision.float_type().is_none() => {
                self.has_no_effect(key, "without fp16 or bf16 nothing is in 16 bits");
            }
            Some(true) => return true,
        }
        false
    }

    /// What both types of gradients are, which is one here.
    fn reduce_dtype(&mut self, stage: ZeroStage) -> Option<FloatType> {
        let (travels, adds_up) = (self.config.communication_data_type, self.config.grad_accum_dtype);
        let dtype = travels.or(adds_up)?;
        let mut refuse = |key: &str, found, instead| {
            self.problems.push(Problem::Refused { key: key.to_owned(), found, instead });
        };
        if adds_up.is_some_and(|adds_up| adds_up != dtype) {
            let found = format!("another type than communication_data_type, \"{dtype}\"");
            let instead = "gradients add up in the type that they travel in; give one of the two, or both alike";
            refuse("data_types.grad_accum_dtype", found, instead);
        } else if stage == ZeroStage::Disabled && dtype != FloatType::Float32 {
            let found = format!("\"{dtype}\" at stage 0");
            match travels {
                Some(_) => {
                    refuse("communication_data_type", found, "set comm_hook of DistributedDataParallelKwargs");
                }
                None => refuse(
                    "data_types.grad_accum_dtype",
                    found,
                    "remove it; gradients add up in that of the parameters",
                ),
            }
        }
        Some(dtype).filter(|_| stage != ZeroStage::Disabled)
    }

    fn zero3_init(&mut self, flag: Option<bool>, stage: ZeroStage) -> bool {
        let is_stage_3 = stage == ZeroStage::Parameters;
        if flag == Some(true) && !is_stage_3 {
            self.has_no_effect("zero3_init_flag", PARAMETERS_ARE_WHOLE);
        }
        flag.unwrap_or(true) && is_stage_3
    }
}
