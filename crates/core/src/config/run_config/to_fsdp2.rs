//! From the first version of FSDP to the second.

use super::PartialRunConfig;
use crate::Result;
use crate::config::{FullyShardedDataParallelPlugin, ShardingStrategy};
use crate::error::settings::SettingsErrorKind as Kind;
use crate::settings::Record;

/// A configuration for version 2 of FSDP, made of one for version 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Fsdp2Conversion {
    /// What the new file says; the same as before if nothing was to convert.
    pub said: PartialRunConfig,
    /// What became of settings that version 2 does not have, or why nothing was to convert: a sentence each.
    pub notes: Vec<String>,
    /// Was there anything to convert?
    pub is_converted: bool,
}

/// Settings of version 1 that files of version 2 leave out, as Python Accelerate does, with the reason.
const LEFT_OUT: [(&str, &str); 4] = [
    ("backward_prefetch", "version 2 decides it by itself"),
    ("forward_prefetch", "Python Accelerate does not have it with version 2"),
    ("sync_module_states", "with version 2 all processes begin with the weights of rank 0"),
    ("use_orig_params", "with version 2 optimizers always see the original parameters"),
];

impl PartialRunConfig {
    /// The same for version 2 of FSDP, where `reshard_after_forward` takes the place of `sharding_strategy` and some settings
    /// do not exist.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): a strategy that version 2 cannot say, such as `OPTIMIZER_STATE`.
    ///
    /// ```
    /// use accelerate_core::config::ConfigFile;
    /// let text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n";
    /// let version_2 = ConfigFile::read(text, "run.yaml".as_ref())?.into_partial().to_fsdp2()?.said.fsdp;
    /// assert_eq!(version_2.fsdp_version, Some(2));
    /// assert_eq!(version_2.reshard_after_forward, Some(false.into()));
    /// assert_eq!(version_2.sharding_strategy, None);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn to_fsdp2(&self) -> Result<Fsdp2Conversion> {
        let unchanged =
            |why: &str| Fsdp2Conversion { said: self.clone(), notes: vec![why.to_owned()], is_converted: false };
        if self.fsdp == FullyShardedDataParallelPlugin::default() {
            return Ok(unchanged("there is no fsdp_config, so there is nothing to convert"));
        }
        if self.fsdp.fsdp_version == Some(2) {
            return Ok(unchanged("fsdp_version is 2 already, so there is nothing to convert"));
        }
        let mut said = self.clone();
        let mut notes = Vec::new();
        // Python's launcher goes by the strategy where a file has both.
        let named = said.fsdp.reshard_after_forward.and_then(crate::config::ReshardAfterForward::strategy);
        if let Some(strategy) = said.fsdp.sharding_strategy.take().or(named) {
            said.fsdp.reshard_after_forward = Some(frees_after_forward(strategy)?.into());
            notes.extend(differs(strategy).map(|how| format!("sharding_strategy {strategy}: {how}")));
        }
        for setting in FullyShardedDataParallelPlugin::settings() {
            let left_out = LEFT_OUT.iter().find(|(field, _)| *field == setting.field);
            if let (Some((_, why)), Some(found)) = (left_out, said.fsdp.text(setting)) {
                notes.push(format!("{} {found} is left out: {why}", setting.field));
            }
        }
        let fsdp = FullyShardedDataParallelPlugin {
            fsdp_version: Some(2),
            backward_prefetch: None,
            forward_prefetch: None,
            sync_module_states: None,
            use_orig_params: None,
            ..said.fsdp
        };
        Ok(Fsdp2Conversion { said: Self { fsdp, ..said }, notes, is_converted: true })
    }
}

/// The `reshard_after_forward` that stands for a strategy, as Python Accelerate converts it.
fn frees_after_forward(strategy: ShardingStrategy) -> Result<bool> {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    match strategy {
        FullShard | HybridShard => Ok(true),
        ShardGradOp | HybridShardZero2 | NoShard => Ok(false),
        other => {
            let (name, found, origin) =
                ("fsdp_config.sharding_strategy".to_owned(), other.to_string(), "configuration file".to_owned());
            let why = "version 2 has no word for it; keep version 1, or choose FULL_SHARD or SHARD_GRAD_OP";
            Err(Kind::Refused { name, found, origin, why }.into())
        }
    }
}

/// What training does otherwise after the conversion.
fn differs(strategy: ShardingStrategy) -> Option<&'static str> {
    use ShardingStrategy::{HybridShard, HybridShardZero2, NoShard};
    match strategy {
        NoShard => Some("version 2 shards in any case, so the result is as SHARD_GRAD_OP; for replicas leave FSDP out"),
        HybridShard | HybridShardZero2 => {
            Some("version 2 shards over all processes, where the strategy had groups of them")
        }
        _ => None,
    }
}
