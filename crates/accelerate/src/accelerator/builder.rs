//! From wishes and environment to an accelerator: everything is decided here, once.

use super::deep_speed::{DeepSpeed, is_asked_for};
use super::{Accelerator, KwargsHandler, Settings};
use crate::amp::{MixedPrecision, Precision, needs_grad_scaler};
use crate::error::{Result, StateError};
use crate::group::Group;
use crate::optim::GradScaler;
use crate::profile::ProfileKwargs;
use crate::session::GradientState;
use crate::state::{Lookup, PartialState, process_environment};
use accelerate_core::accumulation::PartialWindow;
use accelerate_core::config::{
    AutocastKwargs, Compilation, DataLoaderConfiguration, DeepSpeedPlugin, DistributedDataParallelKwargs,
    DynamoBackend, FullyShardedDataParallelPlugin, GradScalerKwargs, GradientAccumulationPlugin,
    InitProcessGroupKwargs, ProjectConfiguration, TorchDynamoPlugin,
};
use accelerate_core::environment::LaunchSettings;
use accelerate_core::names::RngType;
use accelerate_core::schedule::SchedulerUnit;
use std::sync::Arc;
use tch::Device;

/// Describes an [`Accelerator`]. For every setting: what is given here, else the launcher's environment, else
/// the default.
///
/// ```
/// use accelerate::{Accelerator, MixedPrecision};
///
/// let accelerator = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Bf16).build()?;
/// assert_eq!(accelerator.mixed_precision(), MixedPrecision::Bf16);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder makes nothing before `build`"]
pub struct AcceleratorBuilder {
    device_placement: Option<bool>,
    mixed_precision: Option<MixedPrecision>,
    gradient_accumulation_steps: Option<usize>,
    gradient_accumulation_plugin: Option<GradientAccumulationPlugin>,
    partial_window: PartialWindow,
    cpu: bool,
    dataloader_config: Option<DataLoaderConfiguration>,
    rng_types: Option<Vec<RngType>>,
    project_config: Option<ProjectConfiguration>,
    step_scheduler_with_optimizer: Option<bool>,
    scheduler_unit: Option<SchedulerUnit>,
    outputs_to_fp32: Option<bool>,
    fsdp_plugin: Option<FullyShardedDataParallelPlugin>,
    deepspeed_plugin: Option<DeepSpeedPlugin>,
    dynamo_plugin: Option<TorchDynamoPlugin>,
    dynamo_backend: Option<DynamoBackend>,
    handlers: Vec<KwargsHandler>,
}

impl AcceleratorBuilder {
    /// Move models and batches to the device. Default true.
    pub fn device_placement(mut self, device_placement: bool) -> Self {
        self.device_placement = Some(device_placement);
        self
    }

    /// The precision of forward passes. Default: the launcher's, else `MixedPrecision::No`.
    pub fn mixed_precision(mut self, mixed_precision: MixedPrecision) -> Self {
        self.mixed_precision = Some(mixed_precision);
        self
    }

    /// Number of micro-batches whose gradients make one optimizer step. Default: the launcher's, else 1.
    pub fn gradient_accumulation_steps(mut self, steps: usize) -> Self {
        self.gradient_accumulation_steps = Some(steps);
        self
    }

    /// All settings of gradient accumulation; excludes `gradient_accumulation_steps`.
    pub fn gradient_accumulation_plugin(mut self, plugin: GradientAccumulationPlugin) -> Self {
        self.gradient_accumulation_plugin = Some(plugin);
        self
    }

    /// How a window of micro-batches that the data cuts short is scaled. Default: to the true mean.
    pub fn partial_window(mut self, partial_window: PartialWindow) -> Self {
        self.partial_window = partial_window;
        self
    }

    /// Compute on the CPU even where GPUs are present. Default: the launcher's wish, else false.
    pub fn cpu(mut self, cpu: bool) -> Self {
        self.cpu = cpu;
        self
    }

    /// How data loaders are prepared.
    pub fn dataloader_config(mut self, config: DataLoaderConfiguration) -> Self {
        self.dataloader_config = Some(config);
        self
    }

    /// The random number streams that all ranks take over from rank 0 when a pass over a prepared loader begins.
    /// Default: [`RngType::Generator`], which is done in any case, because the order of rows is rank 0's.
    pub fn rng_types(mut self, rng_types: impl IntoIterator<Item = RngType>) -> Self {
        self.rng_types = Some(rng_types.into_iter().collect());
        self
    }

    /// Where the project keeps its files.
    pub fn project_config(mut self, config: ProjectConfiguration) -> Self {
        self.project_config = Some(config);
        self
    }

    /// Whether schedulers move only when the optimizer does. Default true.
    pub fn step_scheduler_with_optimizer(mut self, step: bool) -> Self {
        self.step_scheduler_with_optimizer = Some(step);
        self
    }

    /// What one scheduler step counts. Default: as the reference, one tick per process and optimizer step.
    pub fn scheduler_unit(mut self, unit: SchedulerUnit) -> Self {
        self.scheduler_unit = Some(unit);
        self
    }

    /// Give half-precision outputs of prepared models as float32. Default true, as the reference.
    pub fn outputs_to_fp32(mut self, outputs_to_fp32: bool) -> Self {
        self.outputs_to_fp32 = Some(outputs_to_fp32);
        self
    }

    /// Which compiler prepared models go through, and how. Default: the launcher's, else none.
    ///
    /// Compilers that need Python are an error, and so is every setting that the chosen one has no use for. What there is
    /// besides "no" and "eager": "ts" for models that are TorchScript files ([`nn::ScriptModule`](crate::nn::ScriptModule)),
    /// "aot_inductor" for packages that were compiled ahead of time
    /// ([`nn::AotInductorModule`](crate::nn::AotInductorModule)).
    ///
    /// ```
    /// use accelerate::{Accelerator, DynamoBackend, TorchDynamoPlugin};
    ///
    /// let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Inductor), ..Default::default() };
    /// let error = Accelerator::builder().cpu(true).dynamo_plugin(plugin).build().unwrap_err();
    /// assert!(error.is_config() && error.to_string().contains("needs Python"));
    /// ```
    pub fn dynamo_plugin(mut self, plugin: TorchDynamoPlugin) -> Self {
        self.dynamo_plugin = Some(plugin);
        self
    }

    /// As [`AcceleratorBuilder::dynamo_plugin`] with nothing but the backend; excludes it.
    pub fn dynamo_backend(mut self, backend: DynamoBackend) -> Self {
        self.dynamo_backend = Some(backend);
        self
    }

    /// Settings of one mechanism; each kind at most once.
    pub fn kwargs_handler(mut self, handler: impl Into<KwargsHandler>) -> Self {
        self.handlers.push(handler.into());
        self
    }

    /// Trains as a DeepSpeed configuration says: its stage, precision, accumulation and clipping, on the sharding engine
    /// of [`fsdp_plugin`](Self::fsdp_plugin), which it excludes. Default: none, or with `ACCELERATE_USE_DEEPSPEED` what the
    /// launcher's variables say.
    ///
    /// Every key of the configuration is honoured, refused by name, or told to have no effect here. Batch sizes that it
    /// leaves "auto" come from the loaders that are prepared; numbers that contradict each other are errors then.
    /// `gradient_clipping` is done by each step of a prepared optimizer.
    ///
    /// ```
    /// use accelerate::{Accelerator, DeepSpeedPlugin, MixedPrecision};
    ///
    /// let json = r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}"#;
    /// let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse()?), ..Default::default() };
    /// let accelerator = Accelerator::builder().cpu(true).deepspeed_plugin(plugin).build()?;
    /// assert_eq!(accelerator.gradient_accumulation_steps(), 4);
    /// assert_eq!(accelerator.mixed_precision(), MixedPrecision::Bf16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn deepspeed_plugin(mut self, plugin: DeepSpeedPlugin) -> Self {
        self.deepspeed_plugin = Some(plugin);
        self
    }

    /// Shards models over the ranks, instead of giving each rank a whole one. Default: not, or with `ACCELERATE_USE_FSDP`
    /// as the launcher's `FSDP_*` variables say.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, testing, tch::Tensor};
    ///
    /// let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
    /// let elements = testing::ranks_with(2, builder, |accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let linear = Linear::new(store.root(), 4, 2, Default::default())?;
    ///     let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
    ///     model.forward(&Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]))?;
    ///     Ok(store.parameters().iter().map(|param| param.local().numel()).sum::<usize>())
    /// })?;
    /// assert_eq!(elements, [5, 5]); // of the ten
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn fsdp_plugin(mut self, plugin: FullyShardedDataParallelPlugin) -> Self {
        self.fsdp_plugin = Some(plugin);
        self
    }

    /// Finds this process's place in its run and makes the accelerator. Collective in a run of several processes.
    ///
    /// # Errors
    /// Settings or environment that contradict each other; ranks that do not arrive.
    pub fn build(self) -> Result<Accelerator> {
        self.build_with(&process_environment, PartialState::from_environment)
    }

    /// An accelerator with these settings in the run that `accelerator` has joined: same device, same peers, no new
    /// meeting. Settings not given here are the defaults, not those of `accelerator`.
    ///
    /// ```
    /// use accelerate::Accelerator;
    ///
    /// let training = Accelerator::builder().cpu(true).build()?;
    /// let accumulating = Accelerator::builder().gradient_accumulation_steps(4).build_from(&training)?;
    /// assert_eq!(accumulating.num_processes(), training.num_processes());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Settings that contradict each other.
    pub fn build_from(self, accelerator: &Accelerator) -> Result<Accelerator> {
        let state = accelerator.state().clone();
        self.build_with(&|_| None, |_, _, _| Ok(state))
    }

    /// An accelerator for one rank of a group that exists already.
    pub(crate) fn build_in_group(self, group: Group) -> Result<Accelerator> {
        self.build_with(&|_| None, |_, _, _| Ok(PartialState::of_group(group)))
    }

    fn build_with(
        self,
        lookup: Lookup<'_>,
        state: impl FnOnce(bool, &InitProcessGroupKwargs, Lookup<'_>) -> Result<PartialState>,
    ) -> Result<Accelerator> {
        let environment = LaunchSettings::read(lookup)?;
        let handlers = Handlers::sort(self.handlers)?;
        let dataloader = self.dataloader_config.unwrap_or_default();
        let accumulation_kwargs = dataloader.gradient_accumulation_kwargs.clone();
        let (mut plugin, is_given) = accumulation_plugin(
            self.gradient_accumulation_steps,
            self.gradient_accumulation_plugin.or(accumulation_kwargs),
            environment.gradient_accumulation_steps,
        )?;
        let mut mixed_precision = self.mixed_precision.or(environment.mixed_precision).unwrap_or(MixedPrecision::No);
        check_available(mixed_precision)?;
        let (mut fsdp, deep_speed) = sharding_plugins(self.fsdp_plugin, self.deepspeed_plugin, lookup)?;
        let deep_speed = deep_speed.map(DeepSpeed::read).transpose()?;
        let dynamo = dynamo_plugin(self.dynamo_plugin, self.dynamo_backend)?.or(environment.dynamo);
        let compilation = dynamo.compilation()?;
        check_settings(&handlers.ddp, fsdp.as_ref(), mixed_precision, &dataloader)?;

        let state = state(self.cpu, &handlers.init, lookup)?;
        let (mut scaler, mut gradient_clipping, mut saved_dtype) = (handlers.scaler, None, None);
        if let Some(deep_speed) = &deep_speed {
            let steps = is_given.then_some(plugin.num_steps);
            let resolved = deep_speed.settle(&state, mixed_precision, steps, dataloader.split_batches)?;
            fsdp = Some(resolved.fully_sharded_plugin());
            (mixed_precision, gradient_clipping) = (resolved.mixed_precision, resolved.gradient_clipping);
            saved_dtype = resolved.saved_dtype();
            plugin.num_steps = resolved.gradient_accumulation_steps;
            scaler = resolved.grad_scaler.unwrap_or(scaler);
        }
        let gradient_state = GradientState::new(plugin, self.partial_window)?;
        let scaler = needs_grad_scaler(mixed_precision).then(|| GradScaler::new(scaler)).transpose()?;
        check_device(compilation, state.device())?;
        let precision =
            Precision::new(mixed_precision, state.device(), handlers.autocast, self.outputs_to_fp32.unwrap_or(true));
        let settings = Settings {
            device_placement: self.device_placement.unwrap_or(true),
            dataloader,
            rng_types: self.rng_types.unwrap_or_else(|| vec![RngType::Generator]),
            project: self.project_config.unwrap_or_default(),
            ddp: handlers.ddp,
            fsdp,
            deep_speed: deep_speed.map(Arc::new),
            gradient_clipping,
            saved_dtype,
            step_scheduler_with_optimizer: self.step_scheduler_with_optimizer.unwrap_or(true),
            scheduler_unit: self.scheduler_unit.unwrap_or(SchedulerUnit::Reference),
            profile: handlers.profile,
            compilation,
        };
        Accelerator::from_parts(state, gradient_state, settings, precision, scaler)
    }
}

#[derive(Default)]
struct Handlers {
    ddp: DistributedDataParallelKwargs,
    scaler: GradScalerKwargs,
    init: InitProcessGroupKwargs,
    autocast: AutocastKwargs,
    profile: ProfileKwargs,
}

impl Handlers {
    fn sort(given: Vec<KwargsHandler>) -> Result<Self> {
        let mut sorted = Self::default();
        let mut seen: Vec<&'static str> = Vec::new();
        for handler in given {
            let kind = match handler {
                KwargsHandler::DistributedDataParallel(kwargs) => {
                    sorted.ddp = kwargs;
                    "DistributedDataParallelKwargs"
                }
                KwargsHandler::GradScaler(kwargs) => {
                    sorted.scaler = kwargs;
                    "GradScalerKwargs"
                }
                KwargsHandler::InitProcessGroup(kwargs) => {
                    sorted.init = kwargs;
                    "InitProcessGroupKwargs"
                }
                KwargsHandler::Autocast(kwargs) => {
                    sorted.autocast = kwargs;
                    "AutocastKwargs"
                }
                KwargsHandler::Profile(kwargs) => {
                    sorted.profile = kwargs;
                    "ProfileKwargs"
                }
            };
            if seen.contains(&kind) {
                return Err(StateError::DuplicateHandler { kind }.into());
            }
            seen.push(kind);
        }
        Ok(sorted)
    }
}

/// How gradients accumulate, and whether anyone has said so.
fn accumulation_plugin(
    steps: Option<usize>,
    plugin: Option<GradientAccumulationPlugin>,
    environment: Option<usize>,
) -> Result<(GradientAccumulationPlugin, bool)> {
    match (steps, plugin) {
        (Some(steps), Some(plugin)) if steps != plugin.num_steps => {
            Err(StateError::TwoAccumulationSettings { steps, plugin: plugin.num_steps }.into())
        }
        (_, Some(plugin)) => Ok((plugin, true)),
        (steps, None) => {
            let steps = steps.or(environment);
            let plugin = GradientAccumulationPlugin { num_steps: steps.unwrap_or(1), ..Default::default() };
            Ok((plugin, steps.is_some()))
        }
    }
}

/// What can be told before there is a connection to anyone.
fn check_settings(
    ddp: &DistributedDataParallelKwargs,
    fsdp: Option<&FullyShardedDataParallelPlugin>,
    mixed_precision: MixedPrecision,
    dataloader: &DataLoaderConfiguration,
) -> Result<()> {
    ddp.check()?;
    if let Some(plugin) = fsdp {
        plugin.check()?;
        plugin.check_precision(mixed_precision)?;
    }
    Ok(dataloader.check()?)
}

/// What shards models: what is given, else what the launcher's variables say.
fn sharding_plugins(
    fsdp: Option<FullyShardedDataParallelPlugin>,
    deep_speed: Option<DeepSpeedPlugin>,
    lookup: Lookup<'_>,
) -> Result<(Option<FullyShardedDataParallelPlugin>, Option<DeepSpeedPlugin>)> {
    let fsdp = match fsdp {
        None if deep_speed.is_none() && is_asked_for(lookup, "ACCELERATE_USE_FSDP") => {
            Some(FullyShardedDataParallelPlugin::from_environment(lookup)?)
        }
        fsdp => fsdp,
    };
    let deep_speed = match deep_speed {
        deep_speed if fsdp.is_none() && is_asked_for(lookup, "ACCELERATE_USE_DEEPSPEED") => {
            Some(deep_speed.unwrap_or_default().or(DeepSpeedPlugin::from_environment(lookup)?))
        }
        deep_speed => deep_speed,
    };
    if fsdp.is_some() && deep_speed.is_some() {
        return Err(StateError::TwoShardingPlugins.into());
    }
    Ok((fsdp, deep_speed))
}

fn dynamo_plugin(plugin: Option<TorchDynamoPlugin>, backend: Option<DynamoBackend>) -> Result<TorchDynamoPlugin> {
    match (plugin, backend) {
        (Some(_), Some(_)) => Err(StateError::TwoDynamoSettings.into()),
        (Some(plugin), None) => Ok(plugin),
        (None, backend) => Ok(TorchDynamoPlugin { backend, ..Default::default() }),
    }
}

fn check_device(compilation: Compilation, device: Device) -> Result<()> {
    if compilation != Compilation::CudaGraphs {
        return Ok(());
    }
    if !device.is_cuda() {
        let (device, cure) = (format!("{device:?}"), "run where there is one, or choose backend \"no\"");
        return Err(StateError::GraphsWithoutCuda { device, cure }.into());
    }
    let feature = "dynamo backend \"cudagraphs\"".to_owned();
    Err(StateError::NotAvailable { feature, cure: "choose \"ts\", \"aot_inductor\" or \"no\"" }.into())
}

fn check_available(mixed_precision: MixedPrecision) -> Result<()> {
    if mixed_precision == MixedPrecision::Fp8 {
        let feature = "mixed_precision \"fp8\"".to_owned();
        return Err(StateError::NotAvailable { feature, cure: "use \"bf16\"" }.into());
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use accelerate_core::config::{FloatType, MixedPrecisionPolicy};

    fn build(builder: AcceleratorBuilder, variables: &[(&str, &str)]) -> Result<Accelerator> {
        let lookup = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        builder.cpu(true).build_with(&lookup, PartialState::from_environment)
    }

    #[test]
    fn parameters_are_gathered_in_the_type_that_layers_compute_in() {
        let policy = MixedPrecisionPolicy { param_dtype: Some(FloatType::Float32), ..Default::default() };
        let plugin = FullyShardedDataParallelPlugin { mixed_precision_policy: Some(policy), ..Default::default() };
        let builder = AcceleratorBuilder::default().fsdp_plugin(plugin);
        assert!(build(builder.clone(), &[]).is_ok());
        let error = build(builder.mixed_precision(MixedPrecision::Bf16), &[]).unwrap_err();
        assert!(error.is_config() && error.to_string().contains("param_dtype"), "{error}");
    }

    #[test]
    fn what_is_given_beats_the_environment_beats_the_default() {
        let variables = [("ACCELERATE_MIXED_PRECISION", "bf16"), ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")];
        let plain = build(AcceleratorBuilder::default(), &[]).unwrap();
        assert_eq!((plain.mixed_precision(), plain.gradient_accumulation_steps()), (MixedPrecision::No, 1));
        let launched = build(AcceleratorBuilder::default(), &variables).unwrap();
        assert_eq!((launched.mixed_precision(), launched.gradient_accumulation_steps()), (MixedPrecision::Bf16, 3));
        let builder =
            AcceleratorBuilder::default().mixed_precision(MixedPrecision::Fp16).gradient_accumulation_steps(2);
        let given = build(builder, &variables).unwrap();
        assert_eq!((given.mixed_precision(), given.gradient_accumulation_steps()), (MixedPrecision::Fp16, 2));

        let variables = [("ACCELERATE_DYNAMO_BACKEND", "ts"), ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False")];
        let compilation = |builder| build(builder, &variables).unwrap().settings().compilation;
        assert_eq!(compilation(AcceleratorBuilder::default()), Compilation::TorchScript);
        let given = AcceleratorBuilder::default().dynamo_backend(DynamoBackend::Eager);
        assert_eq!(compilation(given), Compilation::None);
    }

    #[test]
    fn sharding_is_what_the_launcher_says_unless_something_is_given() {
        use accelerate_core::config::ShardingStrategy::{FullShard, OptimizerState, ShardGradOp};
        let strategy = |builder, variables: &[(&str, &str)]| {
            build(builder, variables).unwrap().settings().fsdp.as_ref().map(|plugin| plugin.sharding_strategy)
        };
        let builder = AcceleratorBuilder::default;
        let fsdp = [("ACCELERATE_USE_FSDP", "true"), ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")];
        assert_eq!(strategy(builder(), &fsdp), Some(ShardGradOp));
        assert_eq!(strategy(builder(), &fsdp[1..]), None, "nobody asked to shard");
        assert_eq!(strategy(builder().fsdp_plugin(Default::default()), &fsdp), Some(FullShard));
        let deep_speed = [
            ("ACCELERATE_USE_DEEPSPEED", "true"),
            ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"),
            ("ACCELERATE_GRADIENT_CLIPPING", "0.5"),
        ];
        assert_eq!(strategy(builder(), &deep_speed), Some(OptimizerState));
        assert_eq!(build(builder(), &deep_speed).unwrap().settings().gradient_clipping, Some(0.5));
    }

    #[test]
    fn contradictions_are_named() {
        let plugin = GradientAccumulationPlugin { num_steps: 4, ..Default::default() };
        for (builder, variables, words) in [
            (
                AcceleratorBuilder::default().gradient_accumulation_steps(2).gradient_accumulation_plugin(plugin),
                vec![],
                "gradient_accumulation_steps is 2",
            ),
            (
                AcceleratorBuilder::default()
                    .kwargs_handler(AutocastKwargs::default())
                    .kwargs_handler(AutocastKwargs::default()),
                vec![],
                "two handlers of kind AutocastKwargs",
            ),
            (AcceleratorBuilder::default().mixed_precision(MixedPrecision::Fp8), vec![], "fp8"),
            (AcceleratorBuilder::default().gradient_accumulation_steps(0), vec![], "0"),
            (AcceleratorBuilder::default(), vec![("ACCELERATE_DYNAMO_BACKEND", "inductor")], "needs Python"),
            (AcceleratorBuilder::default(), vec![("ACCELERATE_DYNAMO_MODE", "max-autotune")], "TorchDynamoPlugin.mode"),
            (
                AcceleratorBuilder::default().dynamo_backend(DynamoBackend::Ts),
                vec![("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")],
                "backend \"ts\"",
            ),
            (
                AcceleratorBuilder::default().fsdp_plugin(Default::default()).deepspeed_plugin(Default::default()),
                vec![],
                "both given",
            ),
            (AcceleratorBuilder::default(), vec![("WORLD_SIZE", "2")], "RANK"),
            (AcceleratorBuilder::default(), vec![("ACCELERATE_MIXED_PRECISION", "half")], "half"),
        ] {
            let error = build(builder, &variables).unwrap_err();
            assert!(error.is_config() && error.to_string().contains(words), "{error}");
        }
    }
}
