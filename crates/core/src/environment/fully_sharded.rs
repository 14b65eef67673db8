//! What the launcher says about sharding, in `FSDP_*` variables.

use super::Variables;
use crate::Result;
use crate::config::{FullyShardedDataParallelPlugin, ShardingStrategy};
use crate::error::environment::EnvironmentErrorKind as Kind;

const BOOLEAN: &str = "one of y, yes, t, true, on, 1 or n, no, f, false, off, 0";

/// Variables that are not honoured, the values that ask for nothing (all that a launcher writes unasked among them), and
/// what to do about others.
const NOT_HONOURED: &[(&str, &[&str], &str)] = &[
    // Optimizers see parts of the original parameters, and every rank loads what it keeps, whatever is set.
    ("FSDP_USE_ORIG_PARAMS", YES_OR_NO, "it is true or false"),
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", YES_OR_NO, "it is true or false"),
];

const YES_OR_NO: &[&str] = &["false", "no", "off", "0", "n", "f", "none", "true", "yes", "on", "1", "y", "t"];

impl FullyShardedDataParallelPlugin {
    /// What the launcher's variables say (`FullyShardedDataParallelPlugin.__post_init__` of the reference,
    /// `utils/dataclasses.py`); the default where they say nothing. Variables that are set but empty count as not set.
    /// What comes of it is not [checked](Self::check) yet.
    ///
    /// Read are `FSDP_{VERSION, SHARDING_STRATEGY, RESHARD_AFTER_FORWARD, AUTO_WRAP_POLICY, TRANSFORMER_CLS_TO_WRAP,
    /// MIN_NUM_PARAMS, SYNC_MODULE_STATES, BACKWARD_PREFETCH, FORWARD_PREFETCH, IGNORED_MODULES, OFFLOAD_PARAMS,
    /// ACTIVATION_CHECKPOINTING, ACTIVATION_CHECKPOINTING_OFFLOAD}`; `FSDP_OFFLOAD_PARAMS` is the field `cpu_offload`. Of two
    /// variables that a launcher always sets, only what was asked for counts: `FSDP_MIN_NUM_PARAMS` for `SIZE_BASED_WRAP`,
    /// and `FSDP_SHARDING_STRATEGY=FULL_SHARD` only where `FSDP_RESHARD_AFTER_FORWARD` names no other strategy. (In the
    /// reference's version 1 the latter is never looked at, although its questionnaire asks for it.)
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`](crate::Error::is_environment), naming the variable, its value and what it must be: values
    /// that cannot be read, two strategies, and every other `FSDP_*` variable of the reference that asks for something.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedDataParallelPlugin, ShardingStrategy};
    /// let lookup = |name: &str| (name == "FSDP_SHARDING_STRATEGY").then(|| "SHARD_GRAD_OP".to_owned());
    /// let plugin = FullyShardedDataParallelPlugin::from_environment(&lookup)?;
    /// assert_eq!(plugin.sharding_strategy, ShardingStrategy::ShardGradOp);
    ///
    /// let lookup = |name: &str| (name == "FSDP_OFFLOAD_PARAMS").then(|| "true".to_owned());
    /// assert!(FullyShardedDataParallelPlugin::from_environment(&lookup)?.cpu_offload);
    ///
    /// let lookup = |name: &str| (name == "FSDP_STATE_DICT_TYPE").then(|| "LOCAL_STATE_DICT".to_owned());
    /// let error = FullyShardedDataParallelPlugin::from_environment(&lookup).unwrap_err();
    /// assert!(error.is_environment() && error.to_string().contains("FSDP_STATE_DICT_TYPE is \"LOCAL_STATE_DICT\""));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn from_environment(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables { lookup };
        let default = Self::default();
        let fsdp_version = version(&variables)?.unwrap_or(default.fsdp_version);
        refuse_others(&variables, fsdp_version)?;
        let (sharding_strategy, reshard_after_forward) = strategy(&variables, fsdp_version)?;
        let auto_wrap_policy = variables
            .parsed("FSDP_AUTO_WRAP_POLICY", "one of TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP", str::parse)?
            .unwrap_or(default.auto_wrap_policy);
        let names = variables.text("FSDP_TRANSFORMER_CLS_TO_WRAP").filter(|names| names != "None");
        let min_num_params = variables.number("FSDP_MIN_NUM_PARAMS", "a whole number of at least 0")?;
        let backward_prefetch = match variables.text("FSDP_BACKWARD_PREFETCH").as_deref() {
            Some("None") => None,
            _ => variables.parsed(
                "FSDP_BACKWARD_PREFETCH",
                "one of BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH",
                str::parse,
            )?,
        };
        let sync_module_states = variables.flag("FSDP_SYNC_MODULE_STATES")?.unwrap_or(default.sync_module_states);
        if !sync_module_states && variables.flag("FSDP_CPU_RAM_EFFICIENT_LOADING")? == Some(true) {
            let [first, second] = ["FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES"].map(str::to_owned);
            let why = "where only rank 0 loads, the others need its weights; set the second to true";
            return Err(Kind::Contradiction { first, second, why }.into());
        }
        Ok(Self {
            fsdp_version,
            sharding_strategy,
            reshard_after_forward,
            auto_wrap_policy,
            transformer_cls_names_to_wrap: paths(names),
            ignored_modules: paths(variables.text("FSDP_IGNORED_MODULES").filter(|names| names != "None")),
            min_num_params: min_num_params.filter(|_| auto_wrap_policy == crate::config::AutoWrapPolicy::SizeBasedWrap),
            sync_module_states,
            backward_prefetch: backward_prefetch.unwrap_or(default.backward_prefetch),
            activation_checkpointing: variables
                .flag("FSDP_ACTIVATION_CHECKPOINTING")?
                .unwrap_or(default.activation_checkpointing),
            activation_checkpointing_offload: variables
                .flag("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")?
                .unwrap_or(default.activation_checkpointing_offload),
            cpu_offload: variables.flag("FSDP_OFFLOAD_PARAMS")?.unwrap_or(default.cpu_offload),
            forward_prefetch: variables.flag("FSDP_FORWARD_PREFETCH")?.unwrap_or(default.forward_prefetch),
            ..default
        })
    }
}

fn paths(names: Option<String>) -> Vec<String> {
    names.map(|names| names.split(',').map(|name| name.trim().to_owned()).collect()).unwrap_or_default()
}

fn version(variables: &Variables<'_>) -> Result<Option<u32>> {
    let (name, wanted) = ("FSDP_VERSION", "1 or 2");
    match variables.number(name, wanted)? {
        Some(version @ (0 | 3..)) => {
            Err(Kind::Value { name: name.to_owned(), value: u32::to_string(&version), wanted }.into())
        }
        version => Ok(version),
    }
}

fn refuse_others(variables: &Variables<'_>, fsdp_version: u32) -> Result<()> {
    for &(name, harmless, instead) in NOT_HONOURED {
        if let Some(value) = variables.text(name)
            && !harmless.contains(&value.to_ascii_lowercase().as_str())
        {
            return Err(Kind::Unavailable { name: name.to_owned(), value, instead }.into());
        }
    }
    let (name, default) =
        ("FSDP_STATE_DICT_TYPE", if fsdp_version == 2 { "SHARDED_STATE_DICT" } else { "FULL_STATE_DICT" });
    match variables.text(name) {
        Some(value) if ![default, "FULL_STATE_DICT"].iter().any(|known| known.eq_ignore_ascii_case(&value)) => {
            let instead = "a state is whole; set it to FULL_STATE_DICT";
            Err(Kind::Unavailable { name: name.to_owned(), value, instead }.into())
        }
        _ => Ok(()),
    }
}

/// The strategy, and version 2's word on resharding.
fn strategy(variables: &Variables<'_>, fsdp_version: u32) -> Result<(ShardingStrategy, Option<bool>)> {
    let (first, second) = ("FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD");
    let wanted = "a sharding strategy, such as FULL_SHARD, SHARD_GRAD_OP or NO_SHARD";
    let named: Option<ShardingStrategy> = variables.parsed(first, wanted, str::parse)?;
    let reshard = variables.text(second).map(|text| text.to_ascii_lowercase());
    let flag = reshard.as_deref().and_then(super::str_to_bool);
    if fsdp_version == 2 {
        if let Some(value) = variables.text(first).filter(|_| named != Some(ShardingStrategy::FullShard)) {
            let instead = "with version 2 set FSDP_RESHARD_AFTER_FORWARD to true or false";
            return Err(Kind::Unavailable { name: first.to_owned(), value, instead }.into());
        }
        return match (flag, reshard) {
            (None, Some(value)) => Err(Kind::Value { name: second.to_owned(), value, wanted: BOOLEAN }.into()),
            (flag, _) => Ok((ShardingStrategy::FullShard, flag)),
        };
    }
    // "1" is a strategy here and "true" elsewhere; a launcher writes "true" unasked.
    let by_reshard = match reshard.as_deref() {
        Some("true" | "false") | None => None,
        Some(_) => variables.parsed::<ShardingStrategy>(second, wanted, str::parse)?,
    };
    match (named, by_reshard) {
        (Some(named), Some(other)) if named != other && named != ShardingStrategy::FullShard => {
            let why = "they name two strategies; set one of them, or both alike";
            Err(Kind::Contradiction { first: first.to_owned(), second: second.to_owned(), why }.into())
        }
        (named, by_reshard) => {
            let keeps = (reshard.as_deref() == Some("false")).then_some(false);
            Ok((by_reshard.or(named).unwrap_or_default(), keeps))
        }
    }
}
