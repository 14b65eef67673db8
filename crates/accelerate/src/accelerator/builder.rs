//! From what the program says to an accelerator: the configuration is resolved here, once.

use super::{Accelerator, DeepSpeed, KwargsHandler, deep_speed, fp8};
use crate::amp::MixedPrecision;
use crate::error::{Result, StateError};
use crate::group::Group;
use crate::messages;
use crate::session::GradientState;
use crate::state::{Lookup, PartialState, process_environment};
use crate::tracking::LogWith;
use accelerate_core::accumulation::PartialWindow;
use accelerate_core::config::{
    Compilation, ConfigFile, DataLoaderConfiguration, DeepSpeedPlugin, DynamoBackend, FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin, ParallelismConfig, PartialRunConfig, ProjectConfiguration, RunConfig, Sources,
    TorchDynamoPlugin, TorchTensorParallelPlugin, misspelt_variables, settings,
};
use accelerate_core::names::{LogLevel, RngType};
use accelerate_core::schedule::SchedulerUnit;
use accelerate_core::settings::{Origin, Setting, read_file};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
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
    code: PartialRunConfig,
    /// Said beside a plugin that has the same setting, with which it must agree.
    gradient_accumulation_steps: Option<usize>,
    dynamo_backend: Option<DynamoBackend>,
    config_file: Option<PathBuf>,
    /// The kinds of handlers given so far.
    handlers: Vec<&'static str>,
    log_with: LogWith,
}

impl AcceleratorBuilder {
    /// Move models and batches to the device. Default true.
    pub fn device_placement(mut self, device_placement: bool) -> Self {
        self.code.accelerator.device_placement = Some(device_placement);
        self
    }

    /// The precision of forward passes. Default: the launcher's, else `MixedPrecision::No`.
    pub fn mixed_precision(mut self, mixed_precision: MixedPrecision) -> Self {
        self.code.cluster.mixed_precision = Some(mixed_precision);
        self
    }

    /// Number of micro-batches whose gradients make one optimizer step. Default: the launcher's, else 1.
    pub fn gradient_accumulation_steps(mut self, steps: usize) -> Self {
        self.gradient_accumulation_steps = Some(steps);
        self
    }

    /// All settings of gradient accumulation. A number of steps that is given beside it must be the same.
    pub fn gradient_accumulation_plugin(mut self, plugin: GradientAccumulationPlugin) -> Self {
        self.code.gradient_accumulation = plugin;
        self
    }

    /// How a window of micro-batches that the data cuts short is scaled. Default: to the true mean.
    pub fn partial_window(mut self, partial_window: PartialWindow) -> Self {
        self.code.accelerator.partial_window = Some(partial_window);
        self
    }

    /// Compute on the CPU even where GPUs are present. Default: the launcher's wish, else false.
    pub fn cpu(mut self, cpu: bool) -> Self {
        self.code.cluster.use_cpu = Some(cpu);
        self
    }

    /// Compare every call between processes before it is made (debug mode): operation, shapes and dtypes, those of the library
    /// too. A difference is an error on all of them that lists what each one calls. Default: the launcher's wish
    /// (`accelerate launch --debug`), else false. It is on in all processes as soon as one of them asks for it.
    ///
    /// It costs one more exchange for each call. Calls of the accelerator on tensors are compared in any case. The averaging of
    /// gradients that libtorch does inside a backward pass cannot be compared, but the forward pass before it is.
    ///
    /// ```
    /// use accelerate::{Accelerator, ReduceOp, tch::Tensor, testing};
    ///
    /// let error = testing::ranks(2, Accelerator::builder().debug(true), |accelerator| {
    ///     if accelerator.is_main_process() {
    ///         accelerator.group().all_reduce(&Tensor::from_slice(&[1f32, 2.0]), ReduceOp::Sum)?;
    ///     }
    ///     accelerator.wait_for_everyone()
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("rank 0: all_reduce of [2] Float (Sum); rank 1: barrier"), "{text}");
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn debug(mut self, debug: bool) -> Self {
        self.code.cluster.debug = Some(debug);
        self
    }

    /// The least level of messages that the main process writes to standard error, those of the library and of loggers
    /// ([`logging`](crate::logging)). Default: the launcher's wish, else warning. It holds for the whole process, and not at all
    /// where the program has set a subscriber of `tracing`, which decides by itself.
    ///
    /// ```
    /// use accelerate::{Accelerator, logging::LogLevel};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).log_level(LogLevel::Info).build()?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn log_level(mut self, log_level: LogLevel) -> Self {
        self.code.cluster.log_level = Some(log_level);
        self
    }

    /// Where [`Accelerator::log`] writes values: built-in trackers by name (`"tensorboard"`, `"jsonl"`, or `"all"` of them), and
    /// trackers of your own, which implement [`GeneralTracker`](crate::tracking::GeneralTracker). Default: nowhere. A second call
    /// adds more. All processes name the same ones.
    ///
    /// The built-in ones write into the `logging_dir` of the [`ProjectConfiguration`], else into its `project_dir`, and one of the two
    /// has to be set.
    ///
    /// ```
    /// use accelerate::{Accelerator, ProjectConfiguration, values};
    ///
    /// # let folder = std::env::temp_dir().join(format!("accelerate-log-with-doc-{}", std::process::id()));
    /// let project = ProjectConfiguration { project_dir: Some(folder.clone()), ..Default::default() };
    /// let accelerator = Accelerator::builder().cpu(true).project_config(project).log_with("jsonl").build()?;
    /// accelerator.init_trackers("demo", values! { "learning_rate" => 1e-3, "optimizer" => "adamw" })?;
    /// for (step, loss) in [0.9, 0.5].into_iter().enumerate() {
    ///     accelerator.log([("loss", loss)], step)?;
    /// }
    /// accelerator.end_training()?;
    /// let lines = std::fs::read_to_string(folder.join("demo/log.jsonl")).map_err(accelerate::Error::other)?;
    /// assert!(lines.ends_with("\"_step\":1,\"loss\":0.5}\n"), "{lines}");
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn log_with(mut self, trackers: impl Into<LogWith>) -> Self {
        self.log_with.add(trackers.into());
        self
    }

    /// How data loaders are prepared.
    pub fn dataloader_config(mut self, config: DataLoaderConfiguration) -> Self {
        self.code.dataloader = config;
        self
    }

    /// The random number streams that all ranks take over from rank 0 when a pass over a prepared loader begins.
    /// Default: [`RngType::Generator`], which is done in any case, because the order of rows is rank 0's.
    pub fn rng_types(mut self, rng_types: impl IntoIterator<Item = RngType>) -> Self {
        self.code.accelerator.rng_types = Some(rng_types.into_iter().collect());
        self
    }

    /// Where the project keeps its files.
    pub fn project_config(mut self, config: ProjectConfiguration) -> Self {
        self.code.project = config;
        self
    }

    /// When the run has to be over: [`Accelerator::should_stop`] is true from [`stop_margin`](Self::stop_margin) before that on.
    /// Default: the launcher's, else `ACCELERATE_STOP_AT`, else never. The end of a Slurm allocation counts in any case, if it
    /// is earlier.
    ///
    /// ```
    /// use accelerate::Accelerator;
    /// use std::time::{Duration, SystemTime};
    ///
    /// let tonight = SystemTime::now() + Duration::from_secs(6 * 60 * 60);
    /// let accelerator = Accelerator::builder().cpu(true).stop_at(tonight).build()?;
    /// assert!(!accelerator.should_stop()?);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn stop_at(mut self, time: SystemTime) -> Self {
        self.code.cluster.stop_at = Some(time);
        self
    }

    /// How long before the end [`Accelerator::should_stop`] says so: long enough for a step and a save. Default: the launcher's,
    /// else 120 seconds.
    pub fn stop_margin(mut self, margin: Duration) -> Self {
        self.code.cluster.stop_margin = Some(margin);
        self
    }

    /// Whether schedulers move only when the optimizer does. Default true.
    pub fn step_scheduler_with_optimizer(mut self, step: bool) -> Self {
        self.code.accelerator.step_scheduler_with_optimizer = Some(step);
        self
    }

    /// What one scheduler step counts. Default: as the reference, one tick per process and optimizer step.
    pub fn scheduler_unit(mut self, unit: SchedulerUnit) -> Self {
        self.code.accelerator.scheduler_unit = Some(unit);
        self
    }

    /// Give half-precision outputs of prepared models as float32. Default true, as the reference.
    pub fn outputs_to_fp32(mut self, outputs_to_fp32: bool) -> Self {
        self.code.accelerator.outputs_to_fp32 = Some(outputs_to_fp32);
        self
    }

    /// Which compiler prepared models go through, and how. Default: the launcher's, else none.
    ///
    /// Compilers that need Python are an error, and so is every setting that the chosen one has no use for. What there is
    /// besides "no" and "eager": "ts" for models that are TorchScript files ([`nn::ScriptModule`](crate::nn::ScriptModule)),
    /// "aot_inductor" for packages that were compiled ahead of time
    /// ([`nn::ExportedModule`](crate::nn::ExportedModule), and [`nn::AotInductorModule`](crate::nn::AotInductorModule) for inference), and
    /// "cudagraphs" for models whose passes are replayed as CUDA graphs ([`nn::GraphedModule`](crate::nn::GraphedModule)), on a GPU.
    /// [`prepare`](crate::Accelerator::prepare) refuses models that are not of the kind that was named; without a name it takes all kinds.
    ///
    /// ```
    /// use accelerate::{Accelerator, DynamoBackend, TorchDynamoPlugin};
    ///
    /// let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Inductor), ..Default::default() };
    /// let error = Accelerator::builder().cpu(true).dynamo_plugin(plugin).build().unwrap_err();
    /// assert!(error.is_config() && error.to_string().contains("needs Python"));
    /// ```
    pub fn dynamo_plugin(mut self, plugin: TorchDynamoPlugin) -> Self {
        self.code.dynamo = plugin;
        self
    }

    /// As [`AcceleratorBuilder::dynamo_plugin`] with nothing but the backend; excludes it.
    pub fn dynamo_backend(mut self, backend: DynamoBackend) -> Self {
        self.dynamo_backend = Some(backend);
        self
    }

    /// Settings of one mechanism; each kind at most once.
    pub fn kwargs_handler(mut self, handler: impl Into<KwargsHandler>) -> Self {
        match handler.into() {
            KwargsHandler::DistributedDataParallel(kwargs) => {
                self.code.ddp = kwargs;
                self.handlers.push("DistributedDataParallelKwargs");
            }
            KwargsHandler::GradScaler(kwargs) => {
                self.code.grad_scaler = kwargs;
                self.handlers.push("GradScalerKwargs");
            }
            KwargsHandler::InitProcessGroup(kwargs) => {
                self.code.process_group = kwargs;
                self.handlers.push("InitProcessGroupKwargs");
            }
            KwargsHandler::Autocast(kwargs) => {
                self.code.autocast = kwargs;
                self.handlers.push("AutocastKwargs");
            }
            KwargsHandler::Profile(kwargs) => {
                self.code.profile = kwargs;
                self.handlers.push("ProfileKwargs");
            }
            KwargsHandler::FP8Recipe(kwargs) => {
                self.code.fp8 = kwargs;
                self.handlers.push(fp8::HANDLER);
            }
        }
        self
    }

    /// Trains as a DeepSpeed configuration says: its stage, precision, accumulation and clipping, on the sharding engine
    /// of [`fsdp_plugin`](Self::fsdp_plugin), which it excludes. Default: none, or with `ACCELERATE_USE_DEEPSPEED` what the
    /// launcher's variables say.
    ///
    /// Every key of the configuration is honoured, refused by name, or told to have no effect here. What it leaves open comes
    /// from the objects that are prepared, in any order; numbers that contradict each other are errors then.
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
        self.code.deepspeed = plugin;
        self.code.cluster.use_deepspeed = Some(true);
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
    /// let elements = testing::ranks(2, builder, |accelerator| {
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
        self.code.fsdp = plugin;
        self.code.cluster.use_fsdp = Some(true);
        self
    }

    /// How ranks are laid out along several axes: replicas, shards, and ranks that divide each layer. The sizes multiply to the
    /// number of processes.
    pub fn parallelism_config(mut self, config: ParallelismConfig) -> Self {
        self.code.parallelism = config;
        self.code.cluster.use_parallelism_config = Some(true);
        self
    }

    /// Tensor parallelism: how many ranks divide each layer, and how; [`TensorParallelPlan`](crate::TensorParallelPlan) says what a plan
    /// is. The other ranks are replicas.
    pub fn torch_tp_plugin(mut self, plugin: TorchTensorParallelPlugin) -> Self {
        self.code.tensor_parallel = plugin;
        self
    }

    /// A configuration file, YAML or JSON, of this project or of Python Accelerate. What the program says goes before it, and
    /// so do the launcher's flags and the environment.
    ///
    /// ```
    /// use accelerate::Accelerator;
    ///
    /// # let folder = std::env::temp_dir().join(format!("accelerate-config-file-doc-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # let path = folder.join("run.yaml");
    /// std::fs::write(&path, "use_cpu: true\ngradient_accumulation_config: {num_steps: 4}\n")
    ///     .map_err(accelerate::Error::other)?;
    /// let accelerator = Accelerator::builder().config_file(&path).build()?;
    /// assert_eq!(accelerator.gradient_accumulation_steps(), 4);
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn config_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.config_file = Some(path.into());
        self
    }

    /// Finds this process's place in its run and makes the accelerator. Collective in a run of several processes.
    ///
    /// # Errors
    /// Settings or environment that contradict each other; ranks that do not arrive.
    #[track_caller]
    pub fn build(self) -> Result<Accelerator> {
        let _called = crate::status::here();
        let accelerator = self.build_with(&process_environment, PartialState::join)?;
        if accelerator.is_main_process() {
            let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
            for (name, meant) in misspelt_variables(names.iter().map(String::as_str)) {
                messages::warning!("the variable {name} has no effect; {meant} would have one");
            }
        }
        Ok(accelerator)
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
    /// Settings that contradict each other; settings by which processes meet and find their devices, which are those of
    /// `accelerator` ([`cpu`](Self::cpu), [`InitProcessGroupKwargs`](crate::InitProcessGroupKwargs)).
    #[track_caller]
    pub fn build_from(self, accelerator: &Accelerator) -> Result<Accelerator> {
        let _called = crate::status::here();
        let state = accelerator.state().clone();
        self.build_with(&|_| None, |config, _| {
            check_nothing_of_a_meeting(config, state.is_main_process())?;
            Ok(state)
        })
    }

    /// An accelerator for one rank of a group that exists already.
    pub(crate) fn build_in_group(self, group: Group) -> Result<Accelerator> {
        self.build_with(&|_| None, |_, _| Ok(PartialState::of_group(group)))
    }

    pub(super) fn build_with(
        mut self,
        lookup: Lookup<'_>,
        join: impl FnOnce(&RunConfig, Lookup<'_>) -> Result<PartialState>,
    ) -> Result<Accelerator> {
        let (has_file, has_recipe) = (self.config_file.is_some(), self.handlers.contains(&fp8::HANDLER));
        let log_with = std::mem::take(&mut self.log_with);
        let mut config = self.resolve(lookup)?;
        let trackers = log_with.resolve(config.project.has_logging_dir())?;
        messages::set_log_level(config.cluster.log_level);
        let deep_speed = deep_speed::read(&config)?;
        let mut state = join(&config, lookup)?;
        if config.cluster.debug {
            // Already so where processes have met; here a group that has been there before.
            state = state.with_group(state.group().comparing_calls());
        }
        let deep_speed = deep_speed.map(|read| DeepSpeed::settle(read, &mut config, &state)).transpose()?;
        let is_told = |origin: &Origin| match origin {
            Origin::Flag(_) => true,
            Origin::File { .. } => !has_file,
            _ => false,
        };
        // The launcher has told of its own flags and file.
        for message in config.messages().iter().filter(|message| state.is_main_process() && !is_told(&message.origin)) {
            messages::warning!("{message}");
        }
        check_device(config.dynamo.compilation()?, state.device())?;
        fp8::check(&config, has_recipe, &state)?;
        let gradient_state =
            GradientState::new(config.gradient_accumulation.clone(), config.accelerator.partial_window)?;
        Accelerator::from_config(config, deep_speed.map(Arc::new), state, gradient_state, trackers)
    }

    /// What holds before any process has been met.
    fn resolve(self, lookup: Lookup<'_>) -> Result<RunConfig> {
        let mut code = self.code;
        for (number, &kind) in self.handlers.iter().enumerate() {
            if self.handlers[..number].contains(&kind) {
                return Err(StateError::DuplicateHandler { kind }.into());
            }
        }
        match (self.gradient_accumulation_steps, code.gradient_accumulation.num_steps) {
            (Some(steps), Some(plugin)) if steps != plugin => {
                return Err(StateError::TwoAccumulationSettings { steps, plugin }.into());
            }
            (Some(steps), _) => code.gradient_accumulation.num_steps = Some(steps),
            (None, _) => {}
        }
        match (self.dynamo_backend, code.dynamo.backend) {
            (Some(_), Some(_)) => return Err(StateError::TwoDynamoSettings.into()),
            (Some(backend), None) => code.dynamo.backend = Some(backend),
            (None, _) => {}
        }
        let file = self.config_file.map(read_config_file).transpose()?;
        Ok(RunConfig::resolve(Sources { code, environment: Some(lookup), file, ..Default::default() })?)
    }
}

/// Processes that have met already have their devices and their connections. What the program says of these is an error; a
/// file may well be that of the first accelerator, for which it counted.
fn check_nothing_of_a_meeting(config: &RunConfig, tells: bool) -> Result<()> {
    const OF_PROCESSES: [&str; 3] = ["use_cpu", "torch_device", "enable_cpu_affinity"];
    let is_of_meeting =
        |setting: &Setting| setting.section == "process_group_config" || OF_PROCESSES.contains(&setting.path);
    for setting in settings().filter(|setting| is_of_meeting(setting)) {
        let (found, origin) = (config.text(setting).unwrap_or_default(), config.origin(setting.path));
        match origin {
            Origin::Default | Origin::Derived(_) => {}
            Origin::Code => return Err(StateError::MetAlready { setting: setting.path, found }.into()),
            _ if tells => {
                messages::warning!("{} is {found} ({origin}), which has no effect in build_from", setting.path)
            }
            _ => {}
        }
    }
    Ok(())
}

fn read_config_file(path: PathBuf) -> Result<ConfigFile> {
    match read_file(&path) {
        Ok(text) => Ok(ConfigFile::read(&text, &path)?),
        Err(source) => Err(StateError::ConfigFile { path, source }.into()),
    }
}

fn check_device(compilation: Compilation, device: Device) -> Result<()> {
    if compilation != Compilation::CudaGraphs || device.is_cuda() {
        return Ok(());
    }
    let (device, cure) = (format!("{device:?}"), "run where there is one, or choose backend \"no\"");
    Err(StateError::GraphsWithoutCuda { device, cure }.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use accelerate_core::config::{Auto, AutocastKwargs, FloatType, MixedPrecisionPolicy};

    pub(crate) fn build(builder: AcceleratorBuilder, variables: &[(&str, &str)]) -> Result<Accelerator> {
        let lookup = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        builder.cpu(true).build_with(&lookup, PartialState::join)
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
        let compilation = |builder| build(builder, &variables).unwrap().config().dynamo.compilation().unwrap();
        assert_eq!(compilation(AcceleratorBuilder::default()), Compilation::TorchScript);
        let given = AcceleratorBuilder::default().dynamo_backend(DynamoBackend::Eager);
        assert_eq!(compilation(given), Compilation::None);
    }

    #[test]
    fn sharding_is_what_the_launcher_says_unless_something_is_given() {
        use accelerate_core::config::ShardingStrategy::{FullShard, OptimizerState, ShardGradOp};
        let strategy = |builder, variables: &[(&str, &str)]| {
            build(builder, variables).unwrap().config().fsdp_in_use().map(|plugin| plugin.sharding_strategy)
        };
        let builder = AcceleratorBuilder::default;
        let fsdp = [("ACCELERATE_USE_FSDP", "true"), ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")];
        assert_eq!(strategy(builder(), &fsdp), Some(ShardGradOp));
        assert_eq!(strategy(builder(), &fsdp[1..]), None, "nobody asked to shard");
        assert_eq!(strategy(builder().fsdp_plugin(Default::default()), &fsdp), Some(ShardGradOp), "field by field");
        let given = FullyShardedDataParallelPlugin { sharding_strategy: Some(FullShard), ..Default::default() };
        assert_eq!(strategy(builder().fsdp_plugin(given), &fsdp), Some(FullShard));
        let deep_speed = [
            ("ACCELERATE_USE_DEEPSPEED", "true"),
            ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"),
            ("ACCELERATE_GRADIENT_CLIPPING", "0.5"),
        ];
        assert_eq!(strategy(builder(), &deep_speed), Some(OptimizerState));
        let clipping = build(builder(), &deep_speed).unwrap().config().deepspeed.gradient_clipping;
        assert_eq!(clipping, Some(Auto::Value(0.5)));
    }

    #[test]
    fn contradictions_are_named() {
        let plugin = GradientAccumulationPlugin { num_steps: Some(4), ..Default::default() };
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
