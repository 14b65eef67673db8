//! Which settings of sharding go together.

use super::{AutoWrapPolicy, FullyShardedSettings, ShardingStrategy};
use crate::Result;
use crate::config::{OffloadDevice, OffloadTarget};
use crate::error::config::ConfigErrorKind;

impl FullyShardedSettings {
    /// Checks that the fields are possible and do not contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): an unknown version, `SIZE_BASED_WRAP` without `min_num_params`,
    /// `reshard_after_forward` or types of a `mixed_precision_policy` against `NO_SHARD`, `dp_shard_size` for a
    /// strategy that is not hybrid, offload of what is unsharded, parameters on NVMe without the
    /// optimizer's state, NVMe without a folder, `activation_checkpointing_offload` without
    /// `activation_checkpointing`, `LOCAL_STATE_DICT`, and options of state dicts that are unknown or without their type.
    ///
    /// ```
    /// # use accelerate_core::config::{AutoWrapPolicy, FullyShardedSettings};
    /// let plugin = FullyShardedSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, ..Default::default() };
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
                    "without a number of parameters no module is large enough or too small; set min_num_params, such as 100000000",
                );
            }
            Some(0) => return Err(ConfigErrorKind::MustBePositive { name: "min_num_params" }.into()),
            Some(_) if !is_by_size => {
                let why =
                    "only SIZE_BASED_WRAP counts parameters; set auto_wrap_policy to it, or leave min_num_params out";
                return contradiction("min_num_params", "auto_wrap_policy", why);
            }
            _ => {}
        }
        if !self.transformer_cls_names_to_wrap.is_empty()
            && self.auto_wrap_policy != AutoWrapPolicy::TransformerBasedWrap
        {
            return contradiction(
                "transformer_cls_names_to_wrap",
                "auto_wrap_policy",
                "only TRANSFORMER_BASED_WRAP looks at names; set auto_wrap_policy to it, or leave them out",
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
                    "they are unsharded at all times",
                );
            }
        }
        self.check_states()?;
        self.check_no_shard()?;
        self.check_policy()?;
        self.check_offload()
    }

    fn check_states(&self) -> Result<()> {
        let contradiction = |first, second, why| Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        if self.cpu_ram_efficient_loading && !self.sync_module_states {
            let why = "where only rank 0 loads, the others need its weights; set the second to true";
            return contradiction("cpu_ram_efficient_loading", "sync_module_states", why);
        }
        self.check_state_dict()
    }

    /// Replicas average all gradients, and nothing is divided that could be made to fit.
    fn check_no_shard(&self) -> Result<()> {
        if self.sharding_strategy != ShardingStrategy::NoShard {
            return Ok(());
        }
        let (second, why) =
            ("sharding_strategy NO_SHARD", "every rank keeps and averages the whole model; choose another strategy");
        for (first, is_asked) in [
            ("ignored_modules", !self.ignored_modules.is_empty()),
            ("max_memory", self.max_memory.is_some()),
            ("sync_module_states false", !self.sync_module_states),
        ] {
            if is_asked {
                return Err(ConfigErrorKind::Contradiction { first, second, why }.into());
            }
        }
        Ok(())
    }

    fn check_policy(&self) -> Result<()> {
        let policy = self.mixed_precision_policy.unwrap_or_default();
        for (field, is_asked, cure) in [
            ("buffer_dtype", policy.buffer_dtype.is_some(), "leave it out, or make the model's buffers in that type"),
            ("keep_low_precision_grads", policy.keep_low_precision_grads == Some(true), "leave it out"),
            ("cast_forward_inputs", policy.cast_forward_inputs == Some(true), "leave it out, and set mixed_precision"),
        ] {
            if is_asked {
                return Err(ConfigErrorKind::NotAvailable { field, cure }.into());
            }
        }
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
        let has_shards = is_sharded && !self.keeps_full_parameters();
        for (field, is_asked, is_possible, why) in [
            ("cpu_offload", self.cpu_offload, has_shards, PARAMETERS_ARE_UNSHARDED),
            ("offload_params", self.offload_params.is_some(), has_shards, PARAMETERS_ARE_UNSHARDED),
            ("offload_optimizer", self.offload_optimizer.is_some(), is_sharded, NOTHING_IS_SHARDED),
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

const PARAMETERS_ARE_UNSHARDED: &str = "parameters are unsharded on every rank at all times; choose FULL_SHARD, SHARD_GRAD_OP or a \
                                    hybrid strategy (offload_optimizer works with OPTIMIZER_STATE, too)";
const NOTHING_IS_SHARDED: &str = "with NO_SHARD nothing is sharded; choose OPTIMIZER_STATE or another strategy";
