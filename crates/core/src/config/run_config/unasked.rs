//! What Python Accelerate's launcher says to processes whether somebody has asked for it or not.
//!
//! A program in Python that leaves a setting open reads it from a variable, and the default of the plugin that reads it is
//! often another one than that of the launcher: `FSDP_USE_ORIG_PARAMS` is true under a launcher and false without one. So a
//! launcher that left these variables out would have scripts train with other settings. Programs in Rust are told which
//! variables these are ([`DEFAULTS_VARIABLE`]) and take them for what they are: nobody has said anything.

use super::{RunConfig, settings};
use crate::names::DistributedType;
use crate::settings::{DEFAULTS_VARIABLE, Origin};
use std::collections::BTreeMap;

/// What `accelerate launch` of the reference writes in every case, by the path of the setting.
const ALWAYS: [(&str, &str); 6] = [
    ("mixed_precision", "no"),
    ("dynamo_config.backend", "NO"),
    ("dynamo_config.mode", "default"),
    ("dynamo_config.fullgraph", "False"),
    ("dynamo_config.dynamic", "False"),
    ("dynamo_config.use_regional_compilation", "False"),
];

/// What it writes with FSDP.
const WITH_FSDP: [(&str, &str); 11] = [
    ("fsdp_config.fsdp_version", "1"),
    ("fsdp_config.sharding_strategy", "FULL_SHARD"),
    ("fsdp_config.reshard_after_forward", "true"),
    ("fsdp_config.cpu_offload", "false"),
    ("fsdp_config.min_num_params", "100000000"),
    ("fsdp_config.forward_prefetch", "false"),
    ("fsdp_config.use_orig_params", "true"),
    ("fsdp_config.cpu_ram_efficient_loading", "true"),
    ("fsdp_config.sync_module_states", "true"),
    ("fsdp_config.activation_checkpointing", "false"),
    ("fsdp_config.activation_checkpointing_offload", "false"),
];

/// What it writes for one process that is not sharded.
const ALONE: [(&str, &str); 1] = [("use_cpu", "False")];

/// In which it lists the keys that a configuration file has for DeepSpeed.
const DEEPSPEED_FIELDS: &str = "ACCELERATE_CONFIG_DS_FIELDS";

impl RunConfig {
    /// The variables that Python Accelerate's launcher sets for `num_processes` processes whether somebody has asked or not,
    /// with the values that it gives them, and one more variable that lists them ([`DEFAULTS_VARIABLE`]). What somebody has said,
    /// [`variables`](Self::variables) or the environment says.
    ///
    /// ```
    /// use accelerate_core::config::{PartialRunConfig, RunConfig, Sources};
    /// let mut code = PartialRunConfig::default();
    /// code.cluster.use_fsdp = Some(true);
    /// let unasked = RunConfig::resolve(Sources { code, ..Default::default() })?.unasked_variables(2);
    /// assert_eq!(unasked["FSDP_USE_ORIG_PARAMS"], "true");
    /// assert_eq!(unasked["ACCELERATE_MIXED_PRECISION"], "no");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn unasked_variables(&self, num_processes: usize) -> BTreeMap<String, String> {
        let (is_fsdp, is_deepspeed) = (self.cluster.use_fsdp, self.cluster.use_deepspeed);
        // The reference writes nothing about compilers where DeepSpeed trains.
        let always = if is_deepspeed { &ALWAYS[..1] } else { &ALWAYS[..] };
        let with_fsdp = if is_fsdp { &WITH_FSDP[..] } else { &[] };
        let is_alone = num_processes == 1 && !is_fsdp && !is_deepspeed && !self.is_multi_gpu();
        let alone = if is_alone { &ALONE[..] } else { &[] };
        let said = self.variables();
        let mut unasked = BTreeMap::new();
        for (path, value) in [always, with_fsdp, alone].concat() {
            let variable = settings().find(|setting| setting.path == path).and_then(|setting| setting.variable());
            if let (Some(variable), Origin::Default) = (variable, self.origin(path))
                && !said.contains_key(&variable)
            {
                unasked.insert(variable, value.to_owned());
            }
        }
        if is_deepspeed {
            unasked.insert(DEEPSPEED_FIELDS.to_owned(), self.fields_of_deepspeed());
        }
        let list = serde_json::to_string(&unasked).unwrap_or_default();
        unasked.insert(DEFAULTS_VARIABLE.to_owned(), list);
        unasked
    }

    /// Does Python's launcher start ranks even for one process, because a `distributed_type` says MULTI_GPU?
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let file = Some(ConfigFile::read("distributed_type: MULTI_GPU\n", "run.yaml".as_ref())?);
    /// assert!(RunConfig::resolve(Sources { file, ..Default::default() })?.is_multi_gpu());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn is_multi_gpu(&self) -> bool {
        self.cluster.distributed_type == Some(DistributedType::MultiGpu) && !self.cluster.use_cpu
    }

    /// The keys that a file has in `deepspeed_config`, and `mixed_precision` if it is from there.
    fn fields_of_deepspeed(&self) -> String {
        let is_from_file = matches!(self.origin("mixed_precision"), Origin::File { .. });
        let precision = is_from_file.then_some("mixed_precision");
        self.notes.deepspeed_keys.iter().copied().chain(precision).collect::<Vec<_>>().join(",")
    }
}
