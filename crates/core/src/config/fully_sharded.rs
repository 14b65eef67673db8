//! How a model is sharded over ranks.

mod checks;
mod state_dict;

pub use state_dict::FullStateDict;
pub(crate) use state_dict::state_dict_notes;

use super::{Callback, MixedPrecision, OffloadTarget};
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::mesh::Mesh;
use crate::names::spelled_enum;
use crate::settings::object_value;
use crate::settings::record::record;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

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
        /// Optimizer state; parameters are unsharded at all times. Micro-batches without synchronisation add up whole
        /// gradients (ZeRO-1).
        OptimizerState = "OPTIMIZER_STATE",
        /// Optimizer state and gradients; parameters are unsharded at all times. Every backward pass reduces gradients to
        /// shards, also inside of an accumulation window (ZeRO-2).
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
/// float32 where that has 16 bits and the run is in mixed precision ([`FullyShardedSettings::kept`]).
///
/// ```
/// use accelerate_core::config::{FloatType, FullyShardedSettings, MixedPrecisionPolicy};
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
    /// from other ranks is added up in the type of the shards. Default: as `param_dtype`.
    pub reduce_dtype: Option<FloatType>,
    /// To which floating-point outputs of the prepared model are cast. Default: float32 in mixed precision, as without sharding,
    /// and what they are otherwise.
    pub output_dtype: Option<FloatType>,
    /// In which type buffers are kept (version 1). Default: in their own; another one is not available.
    pub buffer_dtype: Option<FloatType>,
    /// Keep gradients in `reduce_dtype` for the optimizer (version 1). Default false: they have the type of the shards; true is
    /// not available.
    pub keep_low_precision_grads: Option<bool>,
    /// Cast the inputs of the prepared model to `param_dtype` (version 2). Default: autocast brings inputs and parameters
    /// together in mixed precision, and without it inputs stay as they are; true is not available.
    pub cast_forward_inputs: Option<bool>,
}

object_value!(MixedPrecisionPolicy);

spelled_enum! {
    /// What `reshard_after_forward` says: yes or no, or in version 1 the name of a strategy, which Python Accelerate's
    /// questionnaire asks for under this key.
    ///
    /// ```
    /// use accelerate_core::config::{ReshardAfterForward, ShardingStrategy};
    /// assert_eq!(ReshardAfterForward::from(false), ReshardAfterForward::No);
    /// assert_eq!("SHARD_GRAD_OP".parse::<ReshardAfterForward>()?.strategy(), Some(ShardingStrategy::ShardGradOp));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ReshardAfterForward, "answer to whether parameters are freed after the forward pass" {
        /// Parameters are freed.
        Yes = "true" | "yes" | "on" | "y" | "t",
        /// They stay until the end of the backward pass.
        No = "false" | "no" | "off" | "n" | "f" | "0",
        /// The strategy of this name.
        FullShard = "FULL_SHARD" | "1",
        /// The strategy of this name.
        ShardGradOp = "SHARD_GRAD_OP" | "2",
        /// The strategy of this name.
        NoShard = "NO_SHARD" | "3",
        /// The strategy of this name.
        HybridShard = "HYBRID_SHARD" | "4",
        /// The strategy of this name.
        HybridShardZero2 = "HYBRID_SHARD_ZERO2" | "5",
    }
}

impl From<bool> for ReshardAfterForward {
    fn from(frees: bool) -> Self {
        if frees { Self::Yes } else { Self::No }
    }
}

impl ReshardAfterForward {
    /// Yes or no, if that is what it says.
    pub const fn answer(self) -> Option<bool> {
        match self {
            Self::Yes => Some(true),
            Self::No => Some(false),
            _ => None,
        }
    }

    /// The strategy, if it names one.
    pub const fn strategy(self) -> Option<ShardingStrategy> {
        match self {
            Self::Yes | Self::No => None,
            Self::FullShard => Some(ShardingStrategy::FullShard),
            Self::ShardGradOp => Some(ShardingStrategy::ShardGradOp),
            Self::NoShard => Some(ShardingStrategy::NoShard),
            Self::HybridShard => Some(ShardingStrategy::HybridShard),
            Self::HybridShardZero2 => Some(ShardingStrategy::HybridShardZero2),
        }
    }
}

spelled_enum! {
    /// In which form a state is written (`state_dict_type` of the reference, PyTorch's `StateDictType`).
    ///
    /// ```
    /// use accelerate_core::config::StateDictType;
    /// assert_eq!(StateDictType::Full.to_string(), "FULL_STATE_DICT");
    /// ```
    StateDictType, "type of state dict" {
        /// Whole parameters by name.
        Full = "FULL_STATE_DICT" | "1",
        /// Each rank's own elements as they lie in memory.
        Local = "LOCAL_STATE_DICT" | "2",
        /// Each rank's own elements with their places.
        Sharded = "SHARDED_STATE_DICT" | "3",
    }
}

record! {
    /// How a model is sharded over ranks (`FullyShardedDataParallelPlugin` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedDataParallelPlugin, FullyShardedSettings, ShardingStrategy};
    /// let plugin: FullyShardedDataParallelPlugin = serde_json::from_str(
    ///     r#"{"sharding_strategy": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}"#,
    /// ).unwrap();
    /// let settings = FullyShardedSettings::from(plugin);
    /// assert_eq!(settings.sharding_strategy, ShardingStrategy::ShardGradOp);
    /// assert!(settings.sync_module_states);
    /// ```
    FullyShardedDataParallelPlugin => FullyShardedSettings, section "fsdp_config", keys "fsdp_", variables "FSDP_" {
        /// Which of PyTorch's two versions the other settings follow, 1 or 2.
        ///
        /// They differ in names only. Default 1.
        fsdp_version: u32 = 1 => setting().variable("FSDP_VERSION").flag("fsdp_version");
        /// What is sharded: FULL_SHARD (everything), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 (or 1 to 5),
        /// OPTIMIZER_STATE, OPTIMIZER_STATE_AND_GRADIENTS.
        ///
        /// Default everything.
        sharding_strategy: ShardingStrategy = ShardingStrategy::FullShard =>
            setting().flag("fsdp_sharding_strategy").seed_default("None");
        /// Are parameters freed between the forward and the backward pass? true or false.
        ///
        /// Version 2's name for the choice between `FULL_SHARD` (`true`) and `SHARD_GRAD_OP` (`false`). With version 1 also
        /// the name of a strategy. Default none: as `sharding_strategy` says.
        reshard_after_forward: ReshardAfterForward => setting().flag("fsdp_reshard_after_forward");
        /// Among how many neighbouring ranks HYBRID_SHARD and HYBRID_SHARD_ZERO2 divide the model.
        ///
        /// `ParallelismConfig` of the reference has it by this name. Default: those of one machine.
        dp_shard_size: usize => setting().flag("dp_shard_size").at_least(1);
        /// What is gathered together: TRANSFORMER_BASED_WRAP (each block), SIZE_BASED_WRAP, NO_WRAP (everything).
        ///
        /// Default: one unit of everything.
        auto_wrap_policy: AutoWrapPolicy = AutoWrapPolicy::NoWrap =>
            setting().flag("fsdp_auto_wrap_policy").seed_default("None");
        /// Paths of the modules that TRANSFORMER_BASED_WRAP takes for blocks, separated by commas; * stands for any one name.
        ///
        /// For example `encoder.layer.*`. Where Python has class names, a Rust model has paths; one that no module has is an
        /// error. Default empty: every numbered module, outermost first, such as the blocks of a transformer.
        transformer_cls_names_to_wrap: Vec<String> = Vec::new() => setting()
            .keys(&["transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"])
            .variable("FSDP_TRANSFORMER_CLS_TO_WRAP").flag("fsdp_transformer_layer_cls_to_wrap");
        /// Paths of modules that every process keeps whole, separated by commas; * stands for any one name.
        ///
        /// Their gradients are averaged as without sharding. (PyTorch leaves them to the program, so ranks drift apart.)
        /// Default empty.
        ignored_modules: Vec<String> = Vec::new() => setting().flag("fsdp_ignored_modules").seed_default("None");
        /// Number of parameters from which SIZE_BASED_WRAP makes a module a unit.
        ///
        /// Needed by `SIZE_BASED_WRAP` only. Python Accelerate's launcher says 100,000,000.
        min_num_params: usize => setting().flag("fsdp_min_num_params");
        /// Begin with the weights and buffers of rank 0 on all ranks.
        ///
        /// Default true; Python Accelerate's is false, and true in its launcher.
        sync_module_states: bool = true => setting().flag("fsdp_sync_module_states").reference_default("false");
        /// When a backward pass asks for the next units: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH.
        ///
        /// Default: when they are needed.
        backward_prefetch: BackwardPrefetch = BackwardPrefetch::NoPrefetch =>
            setting().flag("fsdp_backward_prefetch").keys(&["backward_prefetch", "backward_prefetch_policy"]).seed_default("None");
        /// Does a forward pass ask for the next units ahead, in the order of the pass before?
        ///
        /// Default false.
        forward_prefetch: bool = false => setting().flag("fsdp_forward_prefetch");
        /// Limit the bytes of units that are asked for ahead and have not been used yet.
        ///
        /// Together they take as much as the largest unit ([`Plan::bytes_ahead`](crate::plan::Plan::bytes_ahead)), though one
        /// may always be asked for. Default true; otherwise all that the pass before used are asked for at once.
        limit_all_gathers: bool = true => setting();
        /// With `forward_prefetch` or `backward_prefetch`, allow forward passes to use units in another order than the pass
        /// before; ranks still have to agree. Default false: that is an error. Not a field of Python Accelerate's.
        dynamic: bool = false => setting();
        /// Where all ranks that share a model run on one machine's CPU and may read each other's memory (Linux, one user, one
        /// container), take shards out of it in place of sending them; nothing is asked for ahead then. Ranks with the same parent
        /// let each other do it. Default true. Not a field of Python Accelerate's.
        direct_all_gather: bool = true => setting();
        /// Compute activations of checkpointed layers twice in place of keeping them.
        ///
        /// Those are the layers in `nn::Checkpointed`. Default false.
        activation_checkpointing: bool = false => setting().flag("fsdp_activation_checkpointing");
        /// Keep the inputs of such layers in the memory of the host.
        ///
        /// They are all that is kept of them between the passes. Needs `activation_checkpointing`. On a CPU it changes
        /// nothing. Default false.
        activation_checkpointing_offload: bool = false => setting().flag("fsdp_activation_checkpointing_offload");
        /// Keep shards, gradients and optimizer state in the memory of the host.
        ///
        /// The optimizer steps there too; what is gathered is on the device that computes. Needs a strategy that shards
        /// parameters. On a CPU it changes nothing. Default false.
        cpu_offload: bool = false => setting()
            .keys(&["offload_params", "cpu_offload"]).variable("FSDP_OFFLOAD_PARAMS").flag("fsdp_offload_params")
            .seed_default("None");
        /// Where the optimizer's state of this rank's shards is kept between steps, with any strategy but `NO_SHARD`. Default
        /// none: as `cpu_offload` says. Not a field of Python Accelerate's plugin, which leaves it to DeepSpeed
        /// (`offload_optimizer`).
        offload_optimizer: OffloadTarget => setting().variable("FSDP_OFFLOAD_OPTIMIZER_TARGET");
        /// Where this rank's shards of parameters are kept while they are not used, with a strategy that shards them.
        /// On NVMe they need the optimizer's state there, too. Default none: as `cpu_offload` says. Not a field of Python
        /// Accelerate's plugin, which leaves it to DeepSpeed (`offload_param`).
        offload_params: OffloadTarget => setting().keys(&["offload_params_target"]).variable("FSDP_OFFLOAD_PARAMS_TARGET");
        /// The most bytes that parameters, gradients and Adam's state may take on a rank in any phase; preparing a model that
        /// needs more is an error on all ranks, before anything is divided ([`Plan::check_fits`](crate::plan::Plan::check_fits)).
        /// Default none. Not a field of Python Accelerate's.
        max_memory: u64 => setting();
        /// In which types to compute and reduce. Default: both in that of the accelerator's mixed precision.
        mixed_precision_policy: MixedPrecisionPolicy => setting();
        /// Does save_state write whole tensors (FULL_STATE_DICT) or the parts that ranks have (SHARDED_STATE_DICT)?
        ///
        /// Whole ones are read by other programs, too, and are gathered one after the other; parts are written as they are. Either
        /// goes on with any sharding on any number of ranks. Default parts; Python Accelerate's default is that of
        /// `fsdp_version`, whole ones with version 1.
        state_dict_type: StateDictType => setting().flag("fsdp_state_dict_type").reference_default("FULL_STATE_DICT");
        /// Options of the model's state: {"rank0_only": true} has rank 0 write all whole tensors, in one file.
        ///
        /// That needs `FULL_STATE_DICT`, and the memory of its host. Otherwise all ranks write about as much each. `offload_to_cpu`
        /// is known and changes nothing, because states go through the host's memory in any case. Default none. (In Python
        /// Accelerate `rank0_only` is true with `FULL_STATE_DICT`.)
        state_dict_config: Map<String, Value> => setting();
        /// The same of the optimizer's state. Default none.
        optim_state_dict_config: Map<String, Value> => setting();
        /// For programs in Python; here optimizers see the original parameters in any case.
        use_orig_params: bool = true => setting().flag("fsdp_use_orig_params").reference_default("false")
            .without_effect("optimizers always see the original parameters, by name");
        /// For programs in Python; here each process reads the shards of a file that it keeps. Needs --fsdp_sync_module_states.
        cpu_ram_efficient_loading: bool = false => setting().flag("fsdp_cpu_ram_efficient_loading").harmless(&["true"])
            .without_effect("each process reads the shards of a file that it keeps");
        /// Gives the values of parameters that have no memory yet, as `ParamStore::set_param_init_fn` of the library does.
        /// Default none: as each layer initialises itself.
        #[serde(skip)]
        param_init_fn: Callback => setting().code_only();
    }
}

impl FullyShardedSettings {
    /// Are parameters freed between the forward and the backward pass?
    ///
    /// ```
    /// # use accelerate_core::config::FullyShardedSettings;
    /// let plugin = FullyShardedSettings { reshard_after_forward: Some(false.into()), ..Default::default() };
    /// assert!(!plugin.frees_after_forward());
    /// ```
    pub fn frees_after_forward(&self) -> bool {
        use ShardingStrategy::{FullShard, HybridShard};
        let answer = self.reshard_after_forward.and_then(ReshardAfterForward::answer);
        answer.unwrap_or(matches!(self.sharding_strategy, FullShard | HybridShard))
    }

    /// How `world_size` ranks, `local_world_size` of them on each machine, divide the model.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): the ranks do not fill whole groups.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedSettings, ShardingStrategy};
    /// let sharding_strategy = ShardingStrategy::HybridShard;
    /// let plugin = FullyShardedSettings { sharding_strategy, ..Default::default() };
    /// assert_eq!(plugin.mesh(16, 8)?.num_replicas(), 2);
    /// assert_eq!(FullyShardedSettings::default().mesh(16, 8)?.num_replicas(), 1);
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

    /// Are parameters unsharded between steps too? Then they are gathered once after each step.
    ///
    /// ```
    /// # use accelerate_core::config::{FullyShardedSettings, ShardingStrategy};
    /// let sharding_strategy = ShardingStrategy::OptimizerState;
    /// assert!(FullyShardedSettings { sharding_strategy, ..Default::default() }.keeps_full_parameters());
    /// ```
    pub fn keeps_full_parameters(&self) -> bool {
        use ShardingStrategy::{OptimizerState, OptimizerStateAndGradients};
        matches!(self.sharding_strategy, OptimizerState | OptimizerStateAndGradients)
    }

    /// Where the optimizer's state of this rank's shards is kept between steps: `offload_optimizer`, else the host's memory
    /// with `cpu_offload`; `None` for the device that computes.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedSettings, OffloadTarget};
    /// let plugin = FullyShardedSettings { cpu_offload: true, ..Default::default() };
    /// assert_eq!(plugin.optimizer_offload(), Some(&OffloadTarget::Cpu));
    /// assert_eq!(FullyShardedSettings::default().optimizer_offload(), None);
    /// ```
    pub fn optimizer_offload(&self) -> Option<&OffloadTarget> {
        self.offload_optimizer.as_ref().or_else(|| self.offload_by_flag())
    }

    /// Where this rank's shards of parameters are kept while they are not used: `offload_params`, else the host's memory
    /// with `cpu_offload`; `None` for the device that computes.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedSettings, OffloadTarget};
    /// let nvme = OffloadTarget::Nvme("/local_nvme".into());
    /// let plugin = FullyShardedSettings {
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
    /// use accelerate_core::config::{FloatType, FullyShardedSettings, MixedPrecision};
    /// let policy = FullyShardedSettings::default().precision(MixedPrecision::Bf16);
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
    /// use accelerate_core::config::{FloatType, FullyShardedSettings, MixedPrecision, MixedPrecisionPolicy};
    /// let policy = MixedPrecisionPolicy { param_dtype: Some(FloatType::BFloat16), ..Default::default() };
    /// let plugin = FullyShardedSettings { mixed_precision_policy: Some(policy), ..Default::default() };
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
}
