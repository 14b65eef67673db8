//! What is written of states that ranks have parts of.

use super::{FullyShardedDataParallelPlugin, FullyShardedSettings, StateDictType};
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::settings::shortened;
use serde_json::{Map, Value};

/// One rank writes everything.
const RANK0_ONLY: &str = "rank0_only";
/// What is known and changes nothing.
const OFFLOAD_TO_CPU: &str = "offload_to_cpu";

/// That checkpoints have whole tensors, and who writes them ([`StateDictType::Full`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullStateDict {
    /// Does rank 0 write all of the models (`true`), or each rank a part (`false`)?
    pub is_model_on_rank0: bool,
    /// The same of the optimizers.
    pub is_optimizer_on_rank0: bool,
}

impl FullyShardedSettings {
    /// How checkpoints have whole tensors; `None` if they have the parts of ranks.
    ///
    /// ```
    /// use accelerate_core::config::{FullyShardedSettings, StateDictType};
    /// let json = |text: &str| Some(serde_json::from_str(text).unwrap());
    /// let mut settings = FullyShardedSettings { state_dict_config: json(r#"{"rank0_only": true}"#), ..Default::default() };
    /// assert!(settings.full_state_dict().is_none() && settings.check().is_err());
    /// settings.state_dict_type = Some(StateDictType::Full);
    /// settings.check()?;
    /// let full = settings.full_state_dict().unwrap();
    /// assert!(full.is_model_on_rank0 && !full.is_optimizer_on_rank0);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn full_state_dict(&self) -> Option<FullStateDict> {
        (self.state_dict_type == Some(StateDictType::Full)).then(|| FullStateDict {
            is_model_on_rank0: is_rank0_only(self.state_dict_config.as_ref()),
            is_optimizer_on_rank0: is_rank0_only(self.optim_state_dict_config.as_ref()),
        })
    }

    /// Checks that there is a state of this kind, and that its options are known.
    pub(super) fn check_state_dict(&self) -> Result<()> {
        if self.state_dict_type == Some(StateDictType::Local) {
            let (first, second) = ("state_dict_type LOCAL_STATE_DICT", "any number of ranks");
            let why = "elements without their places cannot be loaded elsewhere; set FULL_STATE_DICT";
            return Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        }
        let configs = [
            ("state_dict_config", &self.state_dict_config),
            ("optim_state_dict_config", &self.optim_state_dict_config),
        ];
        for (field, options) in configs {
            let is_known = |(key, value): &(&String, &Value)| {
                [RANK0_ONLY, OFFLOAD_TO_CPU].contains(&key.as_str()) && value.is_boolean()
            };
            if let Some((key, value)) = options.iter().flatten().find(|option| !is_known(option)) {
                let found = shortened(&format!("{key}: {value}"));
                return Err(ConfigErrorKind::StateDictOption { field, found }.into());
            }
            if is_rank0_only(options.as_ref()) && self.state_dict_type != Some(StateDictType::Full) {
                let why = "only whole tensors are written by one rank; set state_dict_type to FULL_STATE_DICT";
                return Err(ConfigErrorKind::Contradiction { first: field, second: "state_dict_type", why }.into());
            }
        }
        Ok(())
    }
}

fn is_rank0_only(options: Option<&Map<String, Value>>) -> bool {
    options.and_then(|options| options.get(RANK0_ONLY)) == Some(&Value::Bool(true))
}

/// The settings, by path, that ask for what is not done, and why it is not.
pub(crate) fn state_dict_notes(
    plugin: &FullyShardedDataParallelPlugin,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let keeps_on_device = |options: &Option<Map<String, Value>>| {
        options.as_ref().and_then(|options| options.get(OFFLOAD_TO_CPU)) == Some(&Value::Bool(false))
    };
    [
        ("fsdp_config.state_dict_config", keeps_on_device(&plugin.state_dict_config)),
        ("fsdp_config.optim_state_dict_config", keeps_on_device(&plugin.optim_state_dict_config)),
    ]
    .into_iter()
    .filter(|(_, is_asked)| *is_asked)
    .map(|(path, _)| {
        (path, "states go through the memory of the host in any case, so offload_to_cpu false changes nothing")
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::nothing("", "", None)]
    #[case::parts("SHARDED_STATE_DICT", "", None)]
    #[case::whole("FULL_STATE_DICT", "", Some([false, false]))]
    #[case::model_by_one("FULL_STATE_DICT", r#"{"rank0_only": true}"#, Some([true, false]))]
    #[case::as_pytorch_has_it("FULL_STATE_DICT", r#"{"offload_to_cpu": true, "rank0_only": false}"#, Some([false, false]))]
    fn what_is_written(#[case] state_dict_type: &str, #[case] config: &str, #[case] wanted: Option<[bool; 2]>) {
        let settings = settings(state_dict_type, config);
        settings.check().unwrap();
        let found = settings.full_state_dict();
        assert_eq!(found.map(|full| [full.is_model_on_rank0, full.is_optimizer_on_rank0]), wanted);
    }

    #[rstest]
    #[case::local("LOCAL_STATE_DICT", "", "cannot be loaded elsewhere")]
    #[case::parts_by_one("SHARDED_STATE_DICT", r#"{"rank0_only": true}"#, "set state_dict_type to FULL_STATE_DICT")]
    #[case::no_type("", r#"{"rank0_only": true}"#, "set state_dict_type to FULL_STATE_DICT")]
    #[case::unknown("FULL_STATE_DICT", r#"{"use_dtensor": true}"#, "state_dict_config has \"use_dtensor: true\"")]
    #[case::no_boolean("FULL_STATE_DICT", r#"{"rank0_only": 1}"#, "each true or false")]
    fn what_cannot_be(#[case] state_dict_type: &str, #[case] config: &str, #[case] wanted: &str) {
        let error = settings(state_dict_type, config).check().unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }

    #[test]
    fn what_changes_nothing_is_told() {
        let config = |text: &str| Some(serde_json::from_str(text).unwrap());
        let plugin = FullyShardedDataParallelPlugin {
            state_dict_config: config(r#"{"offload_to_cpu": true}"#),
            optim_state_dict_config: config(r#"{"offload_to_cpu": false}"#),
            ..Default::default()
        };
        let told: Vec<_> = state_dict_notes(&plugin).map(|(path, _)| path).collect();
        assert_eq!(told, ["fsdp_config.optim_state_dict_config"]);
    }

    fn settings(state_dict_type: &str, config: &str) -> FullyShardedSettings {
        FullyShardedSettings {
            state_dict_type: state_dict_type.parse().ok(),
            state_dict_config: serde_json::from_str(config).ok(),
            ..Default::default()
        }
    }
}
