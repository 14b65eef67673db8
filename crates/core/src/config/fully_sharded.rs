//! How a model is sharded over ranks.

use super::{MixedPrecision, OffloadDevice, OffloadTarget, null_is_default};
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::mesh::Mesh;
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};

spelled_enum! {
    /// What each rank keeps only a part of (`sharding_strategy` of the reference).
    ///
    /// ```
    /// use accelerate_core::config::ShardingStrategy;
    /// assert_eq!("2".parse::<ShardingStrategy>()?, ShardingStrategy::ShardGradOp);
    /// assert_eq!(ShardingStrategy::default().to_string(), "FULL_SHARD");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    ShardingStrategy, "sharding strategy" {
        /// Parameters, gradients and optimizer state; parameters are gathered for the forward pass and again for the
        /// backward pass (ZeRO-3). The default.
        #[default]
        FullShard = "FULL_SHARD" | "1",
        /// The same, but parameters stay gathered from the forward pass to the end of the backward pass.
        ShardGradOp = "SHARD_GRAD_OP" | "2",
        /// Nothing: plain data parallelism.
        NoShard = "NO_SHARD" | "3",
        /// Optimizer state; parameters are whole at all times. Micro-batches without synchronisation add up whole
        /// gradients (ZeRO-1).
        OptimizerState = "OPTIMIZER_STATE",
        /// Optimizer state and gradients; parameters are whole at all times. Every backward pass reduces gradients to
        /// parts, also inside of an accumulation window (ZeRO-2).
        OptimizerStateAndGradients = "OPTIMIZER_STATE_AND_GRADIENTS",
        /// As `FULL_SHARD` within groups of `dp_shard_size` ranks, which average their gradients with the other groups: what
        /// is gathered stays within a machine.
        HybridShard = "HYBRID_SHARD" | "4",
        /// As `SHARD_GRAD_OP` within such groups.
        HybridShardZero2 = "HYBRID_SHARD_ZERO2" | "_HYBRID_SHARD_ZERO2" | "5",
    }
}

spelled_enum! {
    /// How parameters are divided into units, which are gathered together (`auto_wrap_policy` of the reference).
    ///
    /// ```
    /// use accelerate_core::config::AutoWrapPolicy;
    /// assert_eq!(AutoWrapPolicy::default().to_string(), "NO_WRAP");
    /// ```
    #[derive(Default)]
    AutoWrapPolicy, "auto-wrap policy" {
        /// One unit per module path that `transformer_cls_names_to_wrap` matches, and one of the rest.
        TransformerBasedWrap = "TRANSFORMER_BASED_WRAP",
        /// From the leaves up, a module becomes a unit once it has `min_num_params` parameters that are in none.
        SizeBasedWrap = "SIZE_BASED_WRAP",
        /// One unit of everything. The default.
        #[default]
        NoWrap = "NO_WRAP",
    }
}

spelled_enum! {
    /// When the parameters of the next unit of a backward pass are asked for (`backward_prefetch` of the reference).
    ///
    /// ```
    /// use accelerate_core::config::BackwardPrefetch;
    /// assert_eq!(BackwardPrefetch::default().to_string(), "NO_PREFETCH");
    /// ```
    #[derive(Default)]
    BackwardPrefetch, "backward prefetch" {
        /// Before the gradients of the present unit are computed: two units in memory, most overlap.
        BackwardPre = "BACKWARD_PRE" | "1",
        /// After them, while they travel.
        BackwardPost = "BACKWARD_POST" | "2",
        /// When they are needed. The default.
        #[default]
        NoPrefetch = "NO_PREFETCH" | "3",
    }
}

spelled_enum! {
    /// An element type of parameters and gradients, as PyTorch writes it.
    ///
    /// ```
    /// use accelerate_core::config::FloatType;
    /// assert_eq!("bf16".parse::<FloatType>()?, FloatType::BFloat16);
    /// assert_eq!(FloatType::Float32.to_string(), "float32");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    FloatType, "floating-point type" {
        /// 32 bits.
        Float32 = "float32" | "fp32" | "torch.float32",
        /// 16 bits with the range of `float32`.
        BFloat16 = "bfloat16" | "bf16" | "torch.bfloat16",
        /// 16 bits with a small range.
        Float16 = "float16" | "fp16" | "torch.float16",
    }
}

impl FloatType {
    /// Bytes of one element.
    ///
    /// ```
    /// use accelerate_core::config::FloatType;
    /// assert_eq!(FloatType::BFloat16.element_bytes(), 2);
    /// ```
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 | Self::Float16 => 2,
        }
    }
}

/// The element types in which a sharded model computes and reduces (`MixedPrecision` and `MixedPrecisionPolicy` of
/// PyTorch's two versions). Every rank's part, its gradient and the optimizer's state keep the parameters' own type, or
/// float32 where that has 16 bits and the run is in mixed precision ([`FullyShardedDataParallelPlugin::kept`]).
///
/// ```
/// use accelerate_core::config::{FloatType, FullyShardedDataParallelPlugin, MixedPrecisionPolicy};
/// let policy: MixedPrecisionPolicy = serde_json::from_str(r#"{"param_dtype": "bf16"}"#).unwrap();
/// assert_eq!(policy, MixedPrecisionPolicy { param_dtype: Some(FloatType::BFloat16), ..Default::default() });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MixedPrecisionPolicy {
    /// In which parameters are gathered and computed with. Default: that of the run's `mixed_precision`, else their own;
    /// with `mixed_precision` another one is an error. Inputs stay as they are: with `mixed_precision`, autocast brings both
    /// together.
    pub param_dtype: Option<FloatType>,
    /// In which gradients travel, and in which whole ones add up over micro-batches that do not synchronise. What arrives
    /// from other ranks is added up in the type of the parts. Default: as `param_dtype`.
    pub reduce_dtype: Option<FloatType>,
    /// To which floating-point outputs of the prepared model are cast. Default: float32 in mixed precision, as without sharding,
    /// and what they are otherwise.
    pub output_dtype: Option<FloatType>,
}

/// How a model is sharded over ranks (`FullyShardedDataParallelPlugin` of the reference, `utils/dataclasses.py`).
/// A key that this version does not honour is an error, in files and here alike.
///
/// ```
/// use accelerate_core::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin, ShardingStrategy};
/// let plugin: FullyShardedDataParallelPlugin = serde_json::from_str(
///     r#"{"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}"#,
/// ).unwrap();
/// assert_eq!(plugin.sharding_strategy, ShardingStrategy::ShardGradOp);
/// assert!(serde_json::from_str::<FullyShardedDataParallelPlugin>(r#"{"use_orig_params": true}"#).is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FullyShardedDataParallelPlugin {
    /// Which of PyTorch's two versions the other fields follow, 1 or 2. They differ in names only. Default 1.
    pub fsdp_version: u32,
    /// What is sharded. Default everything.
    #[serde(deserialize_with = "null_is_default")]
    pub sharding_strategy: ShardingStrategy,
    /// Version 2's name for the choice between `FULL_SHARD` (`true`) and `SHARD_GRAD_OP` (`false`). Default none: as
    /// `sharding_strategy` says.
    pub reshard_after_forward: Option<bool>,
    /// Among how many neighbouring ranks `HYBRID_SHARD` and `HYBRID_SHARD_ZERO2` divide the model (`ParallelismConfig` of
    /// the reference has it by this name). Default: those of one machine.
    pub dp_shard_size: Option<usize>,
    /// How parameters are divided into units. Default: one unit.
    #[serde(deserialize_with = "null_is_default")]
    pub auto_wrap_policy: AutoWrapPolicy,
    /// Paths of the modules that are units of their own, `*` for any one name between dots: `encoder.layer.*`. Where
    /// Python has class names, a Rust model has paths; one that no module has is an error. Default empty: every
    /// numbered module, outermost first, such as the blocks of a transformer.
    #[serde(deserialize_with = "null_is_default")]
    pub transformer_cls_names_to_wrap: Vec<String>,
    /// Paths of modules whose parameters every rank keeps whole, `*` for any one name between dots; gradients are averaged as
    /// without sharding. (PyTorch leaves them to the program, so ranks drift apart.) Default empty.
    #[serde(deserialize_with = "null_is_default")]
    pub ignored_modules: Vec<String>,
    /// Number of parameters from which a module is a unit. Needed by `SIZE_BASED_WRAP` only.
    pub min_num_params: Option<usize>,
    /// Copy parameters and buffers of rank 0 to all ranks first. Default true; Python Accelerate's is false, and true
    /// in its launcher.
    pub sync_module_states: bool,
    /// In a backward pass, ask for the next units ahead. Default no.
    #[serde(deserialize_with = "null_is_default")]
    pub backward_prefetch: BackwardPrefetch,
    /// In a forward pass, ask for the next units ahead, in the order of the pass before. Default false.
    pub forward_prefetch: bool,
    /// Limit the bytes of units that are asked for ahead and have not been used yet: together those of the largest unit
    /// ([`Plan::bytes_ahead`](crate::plan::Plan::bytes_ahead)), though one may always be. Default true; otherwise all that
    /// the pass before used are asked for at once.
    pub limit_all_gathers: bool,
    /// With `forward_prefetch` or `backward_prefetch`, allow forward passes to use units in another order than the pass
    /// before; ranks still have to agree. Default false: that is an error. Not a field of Python Accelerate's.
    pub dynamic: bool,
    /// Where all ranks that share a model run on one machine's CPU and may read each other's memory (Linux, one user, one
    /// container), take parts out of it in place of sending them; nothing is asked for ahead then. Ranks with the same parent
    /// let each other do it. Default true. Not a field of Python Accelerate's.
    pub direct_all_gather: bool,
    /// Compute the activations of layers in `nn::Checkpointed` once more in the backward pass in place of keeping them.
    /// Default false.
    pub activation_checkpointing: bool,
    /// Keep the inputs of such layers, which are all that is kept of them between the passes, in the host's memory. Needs
    /// `activation_checkpointing`. On a CPU it changes nothing. Default false.
    #[serde(deserialize_with = "null_is_default")]
    pub activation_checkpointing_offload: bool,
    /// Keep this rank's parts of parameters, their gradients and the optimizer's state in the host's memory, where the
    /// optimizer steps too; what is gathered is on the device that computes. Needs a strategy that keeps parameters in
    /// parts. On a CPU it changes nothing. Default false.
    #[serde(deserialize_with = "null_is_default")]
    pub cpu_offload: bool,
    /// Where the optimizer's state of this rank's parts is kept between steps, with any strategy but `NO_SHARD`. Default
    /// none: as `cpu_offload` says. Not a field of Python Accelerate's plugin, which leaves it to DeepSpeed
    /// (`offload_optimizer`).
    pub offload_optimizer: Option<OffloadTarget>,
    /// Where this rank's parts of parameters are kept while they are not used, with a strategy that keeps them in parts.
    /// On NVMe they need the optimizer's state there, too. Default none: as `cpu_offload` says. Not a field of Python
    /// Accelerate's plugin, which leaves it to DeepSpeed (`offload_param`).
    pub offload_params: Option<OffloadTarget>,
    /// The most bytes that parameters, gradients and Adam's state may take on a rank in any phase; preparing a model that
    /// needs more is an error on all ranks, before anything is divided ([`Plan::check_fits`](crate::plan::Plan::check_fits)).
    /// Default none. Not a field of Python Accelerate's.
    pub max_memory: Option<u64>,
    /// In which types to compute and reduce. Default: both in that of the accelerator's mixed precision.
    pub mixed_precision_policy: Option<MixedPrecisionPolicy>,
}

impl Default for FullyShardedDataParallelPlugin {
    fn default() -> Self {
        Self {
            fsdp_version: 1,
            sharding_strategy: ShardingStrategy::FullShard,
            reshard_after_forward: None,
            dp_shard_size: None,
            auto_wrap_policy: AutoWrapPolicy::NoWrap,
            transformer_cls_names_to_wrap: Vec::new(),
            ignored_modules: Vec::new(),
            min_num_params: None,
            sync_module_states: true,
            backward_prefetch: BackwardPrefetch::NoPrefetch,
            forward_prefetch: false,
            limit_all_gathers: true,
            dynamic: false,
            direct_all_gather: true,
            activation_checkpointing: false,
            activation_checkpointing_offload: false,
            cpu_offload: false,
            offload_optimizer: None,
            offload_params: None,
            max_memory: None,
            mixed_precision_policy: None,
        }
    }
}

impl FullyShardedDataParallelPlugin {
    /// Are parameters freed between the forward and the backward pass?
    ///
    /// ```
    /// # use accelerate_core::config::FullyShardedDataParallelPlugin;
    /// let plugin = FullyShardedDataParallelPlugin { reshard_after_forward: Some(false), ..Default::default() };
    /// assert!(!plugin.frees_after_forward());
    /// ```
    pub fn frees_after_forward(&self) -> bool {
        use ShardingStrategy::{FullShard, HybridShard};
        self.reshard_after_forward.unwrap_or(matches!(self.sharding_strategy, FullShard | HybridShard))
    }

    /// How `world_size` ranks, `local_world_size` of them on each machine, divide the model.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): the ranks do not fill whole groups.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedDataParallelPlugin, ShardingStrategy};
    /// let sharding_strategy = ShardingStrategy::HybridShard;
    /// let plugin = FullyShardedDataParallelPlugin { sharding_strategy, ..Default::default() };
    /// assert_eq!(plugin.mesh(16, 8)?.num_replicas(), 2);
    /// assert_eq!(FullyShardedDataParallelPlugin::default().mesh(16, 8)?.num_replicas(), 1);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn mesh(&self, world_size: usize, local_world_size: usize) -> Result<Mesh> {
        match self.is_hybrid() {
            true => Mesh::new(world_size, self.dp_shard_size.unwrap_or(local_world_size)),
            false => Ok(world_size.into()),
        }
    }

    fn is_hybrid(&self) -> bool {
        use ShardingStrategy::{HybridShard, HybridShardZero2};
        matches!(self.sharding_strategy, HybridShard | HybridShardZero2)
    }

    /// Are parameters whole between steps too? Then they are gathered once after each step.
    ///
    /// ```
    /// # use accelerate_core::config::{FullyShardedDataParallelPlugin, ShardingStrategy};
    /// let sharding_strategy = ShardingStrategy::OptimizerState;
    /// assert!(FullyShardedDataParallelPlugin { sharding_strategy, ..Default::default() }.keeps_full_parameters());
    /// ```
    pub fn keeps_full_parameters(&self) -> bool {
        use ShardingStrategy::{OptimizerState, OptimizerStateAndGradients};
        matches!(self.sharding_strategy, OptimizerState | OptimizerStateAndGradients)
    }

    /// Where the optimizer's state of this rank's parts is kept between steps: `offload_optimizer`, else the host's memory
    /// with `cpu_offload`; `None` for the device that computes.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedDataParallelPlugin, OffloadTarget};
    /// let plugin = FullyShardedDataParallelPlugin { cpu_offload: true, ..Default::default() };
    /// assert_eq!(plugin.optimizer_offload(), Some(&OffloadTarget::Cpu));
    /// assert_eq!(FullyShardedDataParallelPlugin::default().optimizer_offload(), None);
    /// ```
    pub fn optimizer_offload(&self) -> Option<&OffloadTarget> {
        self.offload_optimizer.as_ref().or_else(|| self.offload_by_flag())
    }

    /// Where this rank's parts of parameters are kept while they are not used: `offload_params`, else the host's memory
    /// with `cpu_offload`; `None` for the device that computes.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedDataParallelPlugin, OffloadTarget};
    /// let nvme = OffloadTarget::Nvme("/local_nvme".into());
    /// let plugin = FullyShardedDataParallelPlugin {
    ///     cpu_offload: true,
    ///     offload_params: Some(nvme.clone()),
    ///     ..Default::default()
    /// };
    /// assert_eq!(plugin.params_offload(), Some(&nvme)); // the field that says more counts
    /// ```
    pub fn params_offload(&self) -> Option<&OffloadTarget> {
        self.offload_params.as_ref().or_else(|| self.offload_by_flag())
    }

    fn offload_by_flag(&self) -> Option<&OffloadTarget> {
        self.cpu_offload.then_some(&OffloadTarget::Cpu)
    }

    /// The policy of a run in `mixed_precision`: what is given, else both types that of the run.
    ///
    /// ```
    /// use accelerate_core::config::{FloatType, FullyShardedDataParallelPlugin, MixedPrecision};
    /// let policy = FullyShardedDataParallelPlugin::default().precision(MixedPrecision::Bf16);
    /// assert_eq!((policy.param_dtype, policy.reduce_dtype), (Some(FloatType::BFloat16), Some(FloatType::BFloat16)));
    /// ```
    pub fn precision(&self, mixed_precision: MixedPrecision) -> MixedPrecisionPolicy {
        let given = self.mixed_precision_policy.unwrap_or_default();
        let param_dtype = given.param_dtype.or(mixed_precision.float_type());
        MixedPrecisionPolicy { param_dtype, reduce_dtype: given.reduce_dtype.or(param_dtype), ..given }
    }

    /// Checks that a run in `mixed_precision` computes with parameters in the type that they are gathered in.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `param_dtype` of the policy is another type.
    ///
    /// ```
    /// use accelerate_core::config::{FloatType, FullyShardedDataParallelPlugin, MixedPrecision, MixedPrecisionPolicy};
    /// let policy = MixedPrecisionPolicy { param_dtype: Some(FloatType::BFloat16), ..Default::default() };
    /// let plugin = FullyShardedDataParallelPlugin { mixed_precision_policy: Some(policy), ..Default::default() };
    /// assert!(plugin.check_precision(MixedPrecision::Bf16).is_ok() && plugin.check_precision(MixedPrecision::No).is_ok());
    /// assert!(plugin.check_precision(MixedPrecision::Fp16).unwrap_err().to_string().contains("param_dtype"));
    /// ```
    pub fn check_precision(&self, mixed_precision: MixedPrecision) -> Result<()> {
        let of_run = mixed_precision.float_type();
        match self.mixed_precision_policy.and_then(|policy| policy.param_dtype) {
            Some(param_dtype) if of_run.is_some_and(|of_run| of_run != param_dtype) => {
                Err(ConfigErrorKind::Contradiction {
                    first: "mixed_precision_policy.param_dtype",
                    second: "mixed_precision",
                    why: "autocast would copy every whole parameter into the run's type and keep that until the backward pass; \
                          leave param_dtype out, or set mixed_precision to \"no\"",
                }
                .into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that the fields are possible and do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): an unknown version, `SIZE_BASED_WRAP` without `min_num_params`,
    /// `reshard_after_forward` or types of a `mixed_precision_policy` against `NO_SHARD`, `dp_shard_size` for a
    /// strategy that is not hybrid, offload of what is whole on every rank, parameters on NVMe without the
    /// optimizer's state, NVMe without a folder, and `activation_checkpointing_offload` without
    /// `activation_checkpointing`.
    ///
    /// ```
    /// # use accelerate_core::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin};
    /// let plugin = FullyShardedDataParallelPlugin { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, ..Default::default() };
    /// assert!(plugin.check().unwrap_err().to_string().contains("min_num_params"));
    /// ```
    pub fn check(&self) -> Result<()> {
        if !(1..=2).contains(&self.fsdp_version) {
            let (name, found) = ("fsdp_version", f64::from(self.fsdp_version));
            return Err(ConfigErrorKind::OutOfRange { name, found, wanted: "1 or 2" }.into());
        }
        let contradiction = |first, second, why| Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        let is_by_size = self.auto_wrap_policy == AutoWrapPolicy::SizeBasedWrap;
        match self.min_num_params {
            None if is_by_size => {
                return contradiction(
                    "auto_wrap_policy SIZE_BASED_WRAP",
                    "min_num_params",
                    "without a number of parameters no module is large enough or too small",
                );
            }
            Some(0) => return Err(ConfigErrorKind::MustBePositive { name: "min_num_params" }.into()),
            Some(_) if !is_by_size => {
                return contradiction("min_num_params", "auto_wrap_policy", "only SIZE_BASED_WRAP counts parameters");
            }
            _ => {}
        }
        if !self.transformer_cls_names_to_wrap.is_empty()
            && self.auto_wrap_policy != AutoWrapPolicy::TransformerBasedWrap
        {
            return contradiction(
                "transformer_cls_names_to_wrap",
                "auto_wrap_policy",
                "only TRANSFORMER_BASED_WRAP looks at paths",
            );
        }
        if self.dp_shard_size.is_some() && !self.is_hybrid() {
            return contradiction(
                "dp_shard_size",
                "sharding_strategy",
                "only the hybrid strategies have groups of ranks",
            );
        }
        if self.reshard_after_forward.is_some() {
            if self.sharding_strategy == ShardingStrategy::NoShard {
                return contradiction(
                    "reshard_after_forward",
                    "sharding_strategy NO_SHARD",
                    "nothing is ever gathered",
                );
            }
            if self.keeps_full_parameters() {
                return contradiction(
                    "reshard_after_forward",
                    "a sharding_strategy without parameters",
                    "they are whole on every rank at all times",
                );
            }
        }
        self.check_policy()?;
        self.check_offload()
    }

    fn check_policy(&self) -> Result<()> {
        let policy = self.mixed_precision_policy.unwrap_or_default();
        let has_types = policy.param_dtype.is_some() || policy.reduce_dtype.is_some();
        if has_types && self.sharding_strategy == ShardingStrategy::NoShard {
            return Err(ConfigErrorKind::Contradiction {
                first: "param_dtype or reduce_dtype of mixed_precision_policy",
                second: "sharding_strategy NO_SHARD",
                why: "nothing is ever gathered; set mixed_precision, and comm_hook of DistributedDataParallelKwargs for \
                      gradients",
            }
            .into());
        }
        Ok(())
    }

    fn check_offload(&self) -> Result<()> {
        let contradiction = |first, second, why| Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        if self.activation_checkpointing_offload && !self.activation_checkpointing {
            return contradiction(
                "activation_checkpointing_offload",
                "activation_checkpointing false",
                "only layers that are computed twice have inputs to offload; set activation_checkpointing to true",
            );
        }
        let is_sharded = self.sharding_strategy != ShardingStrategy::NoShard;
        let has_parts = is_sharded && !self.keeps_full_parameters();
        for (field, is_asked, is_possible, why) in [
            ("cpu_offload", self.cpu_offload, has_parts, PARAMETERS_ARE_WHOLE),
            ("offload_params", self.offload_params.is_some(), has_parts, PARAMETERS_ARE_WHOLE),
            ("offload_optimizer", self.offload_optimizer.is_some(), is_sharded, NOTHING_IS_IN_PARTS),
        ] {
            if is_asked && !is_possible {
                return contradiction(field, "sharding_strategy", why);
            }
        }
        for (field, target) in
            [("offload_optimizer", &self.offload_optimizer), ("offload_params", &self.offload_params)]
        {
            if matches!(target, Some(OffloadTarget::Nvme(path)) if path.as_os_str().is_empty()) {
                return Err(ConfigErrorKind::NoFolder { field }.into());
            }
        }
        let is_on_nvme =
            |target: Option<&OffloadTarget>| target.map(OffloadTarget::device) == Some(OffloadDevice::Nvme);
        if is_on_nvme(self.params_offload()) && !is_on_nvme(self.optimizer_offload()) {
            return contradiction(
                "offload_params on NVMe",
                "offload_optimizer elsewhere",
                "a step changes parameters block by block together with their state; put both on NVMe, or offload_params to cpu",
            );
        }
        Ok(())
    }
}

const PARAMETERS_ARE_WHOLE: &str = "parameters are whole on every rank at all times; choose FULL_SHARD, SHARD_GRAD_OP or a \
                                    hybrid strategy (offload_optimizer works with OPTIMIZER_STATE, too)";
const NOTHING_IS_IN_PARTS: &str = "with NO_SHARD nothing is in parts; choose OPTIMIZER_STATE or another strategy";
