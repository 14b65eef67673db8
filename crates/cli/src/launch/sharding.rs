//! The flags about sharding: from words to the variables that programs read, checked before anything starts.

use accelerate_core::Error;
use accelerate_core::config::{
    AutoWrapPolicy, BackwardPrefetch, DeepSpeedPlugin, FullyShardedDataParallelPlugin, OffloadDevice, ShardingStrategy,
    ZeroStage,
};
use clap::Args;
use clap::builder::BoolishValueParser;
use std::ffi::OsString;
use std::path::PathBuf;

/// A variable and its value.
type Variable = (OsString, OsString);

/// What `FullyShardedDataParallelPlugin` is made of where a program leaves it open.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding (FSDP), for a program that leaves it open")]
pub(super) struct FsdpArguments {
    /// Shard models over the processes (ACCELERATE_USE_FSDP, and FSDP_* for the flags below).
    #[arg(long = "use_fsdp", alias = "use-fsdp", conflicts_with = "use_deepspeed")]
    use_fsdp: bool,

    /// Which of PyTorch's two versions the other flags follow, 1 or 2; they differ in names only.
    #[arg(long = "fsdp_version", alias = "fsdp-version", value_name = "N", requires = "use_fsdp")]
    fsdp_version: Option<u32>,

    /// What is kept in parts: FULL_SHARD (the default), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2
    /// (or 1 to 5), OPTIMIZER_STATE, OPTIMIZER_STATE_AND_GRADIENTS.
    #[arg(long = "fsdp_sharding_strategy", alias = "fsdp-sharding-strategy", value_name = "STRATEGY")]
    #[arg(requires = "use_fsdp")]
    fsdp_sharding_strategy: Option<ShardingStrategy>,

    /// Are parameters freed between the forward and the backward pass? true or false.
    ///
    /// With version 1 also the name of a strategy, as in the reference.
    #[arg(long = "fsdp_reshard_after_forward", alias = "fsdp-reshard-after-forward", value_name = "BOOL")]
    #[arg(requires = "use_fsdp")]
    fsdp_reshard_after_forward: Option<String>,

    /// What is gathered together: TRANSFORMER_BASED_WRAP (each block), SIZE_BASED_WRAP, NO_WRAP (everything).
    #[arg(long = "fsdp_auto_wrap_policy", alias = "fsdp-auto-wrap-policy", value_name = "POLICY")]
    #[arg(requires = "use_fsdp")]
    fsdp_auto_wrap_policy: Option<AutoWrapPolicy>,

    /// Paths of the modules that TRANSFORMER_BASED_WRAP takes for blocks, separated by commas; * stands for any one name.
    ///
    /// Without it every numbered module is one. For example encoder.layer.*
    #[arg(long = "fsdp_transformer_layer_cls_to_wrap", alias = "fsdp-transformer-layer-cls-to-wrap")]
    #[arg(value_name = "PATHS", requires = "use_fsdp")]
    fsdp_transformer_layer_cls_to_wrap: Option<String>,

    /// Number of parameters from which SIZE_BASED_WRAP makes a module a unit.
    #[arg(long = "fsdp_min_num_params", alias = "fsdp-min-num-params", value_name = "N", requires = "use_fsdp")]
    fsdp_min_num_params: Option<usize>,

    /// Paths of modules that every process keeps whole, separated by commas; * stands for any one name.
    #[arg(long = "fsdp_ignored_modules", alias = "fsdp-ignored-modules", value_name = "PATHS", requires = "use_fsdp")]
    fsdp_ignored_modules: Option<String>,

    /// When a backward pass asks for the next unit: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH.
    #[arg(
        long = "fsdp_backward_prefetch",
        alias = "fsdp-backward-prefetch",
        value_name = "WHEN",
        requires = "use_fsdp"
    )]
    fsdp_backward_prefetch: Option<BackwardPrefetch>,

    /// Does a forward pass ask for the next unit before it is used?
    #[arg(long = "fsdp_forward_prefetch", alias = "fsdp-forward-prefetch", value_name = "BOOL", requires = "use_fsdp")]
    #[arg(value_parser = BoolishValueParser::new())]
    fsdp_forward_prefetch: Option<bool>,

    /// Keep parts, gradients and optimizer state in the memory of the host.
    #[arg(long = "fsdp_offload_params", alias = "fsdp-offload-params", value_name = "BOOL", requires = "use_fsdp")]
    #[arg(value_parser = BoolishValueParser::new())]
    fsdp_offload_params: Option<bool>,

    /// Begin with the weights of rank 0 on all ranks.
    #[arg(
        long = "fsdp_sync_module_states",
        alias = "fsdp-sync-module-states",
        value_name = "BOOL",
        requires = "use_fsdp"
    )]
    #[arg(value_parser = BoolishValueParser::new())]
    fsdp_sync_module_states: Option<bool>,

    /// Compute activations of checkpointed layers twice in place of keeping them.
    #[arg(long = "fsdp_activation_checkpointing", alias = "fsdp-activation-checkpointing", value_name = "BOOL")]
    #[arg(requires = "use_fsdp", value_parser = BoolishValueParser::new())]
    fsdp_activation_checkpointing: Option<bool>,

    /// Keep the inputs of such layers in the memory of the host.
    #[arg(long = "fsdp_activation_checkpointing_offload", alias = "fsdp-activation-checkpointing-offload")]
    #[arg(value_name = "BOOL", requires = "use_fsdp", value_parser = BoolishValueParser::new())]
    fsdp_activation_checkpointing_offload: Option<bool>,

    /// FULL_STATE_DICT, or with version 2 SHARDED_STATE_DICT.
    #[arg(long = "fsdp_state_dict_type", alias = "fsdp-state-dict-type", value_name = "TYPE", requires = "use_fsdp")]
    fsdp_state_dict_type: Option<String>,

    /// For programs in Python; here optimizers see parts of the original parameters in any case.
    #[arg(long = "fsdp_use_orig_params", alias = "fsdp-use-orig-params", value_name = "BOOL", requires = "use_fsdp")]
    #[arg(value_parser = BoolishValueParser::new())]
    fsdp_use_orig_params: Option<bool>,

    /// For programs in Python; here each process reads the parts of a file that it keeps. Needs --fsdp_sync_module_states.
    #[arg(long = "fsdp_cpu_ram_efficient_loading", alias = "fsdp-cpu-ram-efficient-loading", value_name = "BOOL")]
    #[arg(requires = "use_fsdp", value_parser = BoolishValueParser::new())]
    fsdp_cpu_ram_efficient_loading: Option<bool>,
}

/// What `DeepSpeedPlugin` is made of where a program leaves it open.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding (DeepSpeed configurations), for a program that leaves it open")]
pub(super) struct DeepSpeedArguments {
    /// Shard models as a DeepSpeed configuration says (ACCELERATE_USE_DEEPSPEED, and ACCELERATE_DEEPSPEED_* for the flags
    /// below).
    #[arg(long = "use_deepspeed", alias = "use-deepspeed")]
    use_deepspeed: bool,

    /// The configuration: a JSON file. The flags below fill what it leaves open ("auto").
    #[arg(
        long = "deepspeed_config_file",
        alias = "deepspeed-config-file",
        value_name = "FILE",
        requires = "use_deepspeed"
    )]
    deepspeed_config_file: Option<PathBuf>,

    /// What is kept in parts: 0 nothing, 1 optimizer state, 2 gradients too (the default), 3 everything.
    #[arg(long = "zero_stage", alias = "zero-stage", value_name = "STAGE", requires = "use_deepspeed")]
    #[arg(value_parser = crate::estimate_memory::zero_stage)]
    zero_stage: Option<ZeroStage>,

    /// Where the optimizer's state is kept between steps: none, cpu, nvme.
    #[arg(long = "offload_optimizer_device", alias = "offload-optimizer-device", value_name = "DEVICE")]
    #[arg(requires = "use_deepspeed")]
    offload_optimizer_device: Option<OffloadDevice>,

    /// Where parameters are kept while they are not used: none, cpu, nvme.
    #[arg(long = "offload_param_device", alias = "offload-param-device", value_name = "DEVICE")]
    #[arg(requires = "use_deepspeed")]
    offload_param_device: Option<OffloadDevice>,

    /// The folder for --offload_optimizer_device nvme.
    #[arg(long = "offload_optimizer_nvme_path", alias = "offload-optimizer-nvme-path", value_name = "FOLDER")]
    #[arg(requires = "use_deepspeed")]
    offload_optimizer_nvme_path: Option<PathBuf>,

    /// The folder for --offload_param_device nvme.
    #[arg(long = "offload_param_nvme_path", alias = "offload-param-nvme-path", value_name = "FOLDER")]
    #[arg(requires = "use_deepspeed")]
    offload_param_nvme_path: Option<PathBuf>,

    /// Largest 2-norm of all gradients together.
    #[arg(long = "gradient_clipping", alias = "gradient-clipping", value_name = "NORM", requires = "use_deepspeed")]
    gradient_clipping: Option<String>,

    /// Does the program build models without memory for their parameters, to be made in parts? Stage 3 only.
    #[arg(long = "zero3_init_flag", alias = "zero3-init-flag", value_name = "BOOL", requires = "use_deepspeed")]
    #[arg(value_parser = BoolishValueParser::new())]
    zero3_init_flag: Option<bool>,

    /// Write weights in 16 bits when a model is saved at stage 3.
    #[arg(long = "zero3_save_16bit_model", alias = "zero3-save-16bit-model", value_name = "BOOL")]
    #[arg(requires = "use_deepspeed", value_parser = BoolishValueParser::new())]
    zero3_save_16bit_model: Option<bool>,
}

impl FsdpArguments {
    /// What the ranks get.
    pub(super) fn variables(&self) -> Vec<Variable> {
        collect([
            ("ACCELERATE_USE_FSDP", flag(self.use_fsdp, "true")),
            // Of two that are asked for, the other might come from this command's own environment.
            ("ACCELERATE_USE_DEEPSPEED", flag(self.use_fsdp, "false")),
            ("FSDP_VERSION", text(self.fsdp_version)),
            ("FSDP_SHARDING_STRATEGY", text(self.fsdp_sharding_strategy)),
            ("FSDP_RESHARD_AFTER_FORWARD", text(self.fsdp_reshard_after_forward.as_ref())),
            ("FSDP_AUTO_WRAP_POLICY", text(self.fsdp_auto_wrap_policy)),
            ("FSDP_TRANSFORMER_CLS_TO_WRAP", text(self.fsdp_transformer_layer_cls_to_wrap.as_ref())),
            ("FSDP_MIN_NUM_PARAMS", text(self.fsdp_min_num_params)),
            ("FSDP_IGNORED_MODULES", text(self.fsdp_ignored_modules.as_ref())),
            ("FSDP_BACKWARD_PREFETCH", text(self.fsdp_backward_prefetch)),
            ("FSDP_FORWARD_PREFETCH", text(self.fsdp_forward_prefetch)),
            ("FSDP_OFFLOAD_PARAMS", text(self.fsdp_offload_params)),
            ("FSDP_SYNC_MODULE_STATES", text(self.fsdp_sync_module_states)),
            ("FSDP_ACTIVATION_CHECKPOINTING", text(self.fsdp_activation_checkpointing)),
            ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", text(self.fsdp_activation_checkpointing_offload)),
            ("FSDP_STATE_DICT_TYPE", text(self.fsdp_state_dict_type.as_ref())),
            ("FSDP_USE_ORIG_PARAMS", text(self.fsdp_use_orig_params)),
            ("FSDP_CPU_RAM_EFFICIENT_LOADING", text(self.fsdp_cpu_ram_efficient_loading)),
        ])
    }

    /// Fails on what every rank would fail on. `lookup` gives what the ranks will find.
    pub(super) fn check(&self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), Error> {
        if !self.use_fsdp {
            return Ok(());
        }
        let plugin = FullyShardedDataParallelPlugin::from_environment(lookup)?;
        // As a variable this is passed over without SIZE_BASED_WRAP, because the reference's launcher always sets it.
        let min_num_params = self.fsdp_min_num_params.or(plugin.min_num_params);
        FullyShardedDataParallelPlugin { min_num_params, ..plugin }.check()
    }
}

impl DeepSpeedArguments {
    /// What the ranks get.
    pub(super) fn variables(&self) -> Vec<Variable> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.clone().into_os_string());
        collect([
            ("ACCELERATE_USE_DEEPSPEED", flag(self.use_deepspeed, "true")),
            ("ACCELERATE_USE_FSDP", flag(self.use_deepspeed, "false")),
            ("ACCELERATE_DEEPSPEED_CONFIG_FILE", path(&self.deepspeed_config_file)),
            ("ACCELERATE_DEEPSPEED_ZERO_STAGE", text(self.zero_stage)),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", text(self.offload_optimizer_device)),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", text(self.offload_param_device)),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", path(&self.offload_optimizer_nvme_path)),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", path(&self.offload_param_nvme_path)),
            ("ACCELERATE_GRADIENT_CLIPPING", text(self.gradient_clipping.as_ref())),
            ("ACCELERATE_DEEPSPEED_ZERO3_INIT", text(self.zero3_init_flag)),
            ("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", text(self.zero3_save_16bit_model)),
        ])
    }

    /// As [`FsdpArguments::check`]; reads the configuration.
    pub(super) fn check(&self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), Error> {
        if !self.use_deepspeed {
            return Ok(());
        }
        let plugin = DeepSpeedPlugin::from_environment(lookup)?;
        plugin.check()?;
        plugin.config(&|path| std::fs::read_to_string(path)).map(drop)
    }
}

fn collect<const N: usize>(variables: [(&str, Option<OsString>); N]) -> Vec<Variable> {
    variables.into_iter().filter_map(|(name, value)| Some((name.into(), value?))).collect()
}

fn flag(is_given: bool, value: &str) -> Option<OsString> {
    is_given.then(|| value.into())
}

fn text(value: Option<impl ToString>) -> Option<OsString> {
    value.map(|value| value.to_string().into())
}
