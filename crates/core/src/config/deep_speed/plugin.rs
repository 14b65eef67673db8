//! The plugin that names a configuration, or takes its place.

use super::merge::{Merge, Source};
use super::{Auto, DeepSpeedConfig, DeepSpeedFile, DeepSpeedOffload, DeepSpeedZeroOptimization, ZeroStage, json};
use crate::Result;
use crate::config::OffloadDevice;
use crate::error::config::ConfigErrorKind;
use crate::error::deep_speed::{Conflict, DeepSpeedErrorKind, Problem};
use crate::settings::record::record;
use crate::settings::{SettingValue, ValueKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where a DeepSpeed configuration is: in a file, or here. Text that begins with `{` is the configuration itself. (The
/// reference takes it in base64 too.)
///
/// ```
/// use accelerate_core::config::DeepSpeedSource;
/// assert_eq!("ds_config.json".parse::<DeepSpeedSource>()?, DeepSpeedSource::Path("ds_config.json".into()));
/// assert!(matches!(r#"{"train_batch_size": 8}"#.parse()?, DeepSpeedSource::Entries(_)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum DeepSpeedSource {
    /// A JSON file.
    Path(PathBuf),
    /// Its content.
    Entries(Map<String, Value>),
}

impl FromStr for DeepSpeedSource {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self> {
        if !text.trim_start().starts_with('{') {
            return Ok(Self::Path(text.into()));
        }
        json::read_object(text).map(Self::Entries)
    }
}

impl Serialize for DeepSpeedSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Path(path) => path.serialize(serializer),
            Self::Entries(entries) => entries.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for DeepSpeedSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) => text.parse().map_err(serde::de::Error::custom),
            Value::Object(entries) => Ok(Self::Entries(entries)),
            _ => Err(serde::de::Error::custom("a DeepSpeed configuration is a path or an object")),
        }
    }
}

impl SettingValue for DeepSpeedSource {
    const KIND: ValueKind = ValueKind::Path;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn write(&self) -> String {
        match self {
            Self::Path(path) => path.to_string_lossy().into_owned(),
            Self::Entries(entries) => Value::Object(entries.clone()).to_string(),
        }
    }
}

const BY_SSH: &str =
    "machines of a host file are reached by ssh; choose pdsh, or start the program with that launcher itself";
const NO_MSAMP: &str = "MS-AMP is not available; choose mixed_precision bf16";
const NO_EXPERTS: &str =
    "leave it out, and name modules in transformer_cls_names_to_wrap of a FullyShardedDataParallelPlugin";

record! {
    /// Training by a DeepSpeed configuration (`DeepSpeedPlugin` of the reference, `utils/dataclasses.py`).
    ///
    /// A field that is `None` says nothing: the configuration decides, else the default given here. A field that says
    /// something fills "auto" and absent keys of the configuration; the reference passes over the field where the key is
    /// absent.
    ///
    /// ```
    /// use accelerate_core::config::{Auto, DeepSpeedPlugin, OffloadDevice, ZeroStage};
    /// let plugin: DeepSpeedPlugin = serde_json::from_str(
    ///     r#"{"zero_stage": 3, "gradient_accumulation_steps": "auto", "offload_param_device": "cpu"}"#,
    /// ).unwrap();
    /// assert_eq!((plugin.zero_stage, plugin.gradient_accumulation_steps), (Some(ZeroStage::Parameters), Some(Auto::Auto)));
    /// assert_eq!(plugin.offload_param_device, Some(OffloadDevice::Cpu));
    /// ```
    DeepSpeedPlugin => DeepSpeedSettings, section "deepspeed_config", keys "deepspeed_", variables "ACCELERATE_DEEPSPEED_" {
        /// The DeepSpeed configuration: a JSON file. The other settings fill what it leaves open ("auto").
        ///
        /// Default none: it is made from the other settings.
        #[serde(deserialize_with = "none_is_absent")]
        hf_ds_config: DeepSpeedSource => setting()
            .keys(&["deepspeed_config_file", "hf_ds_config"]).variable("ACCELERATE_DEEPSPEED_CONFIG_FILE")
            .flag("deepspeed_config_file").or_object();
        /// Micro-batches per optimizer step, at least 1. Default "auto": the accelerator's.
        ///
        /// It has a variable of its own, so that it can be told to processes that only may train by a DeepSpeed configuration.
        /// `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, which is the accelerator's, says it as well.
        gradient_accumulation_steps: Auto<usize> => setting().at_least(1);
        /// Largest 2-norm of all gradients together; 0 for no limit.
        ///
        /// Default: "auto" without a configuration, which is 1.0.
        gradient_clipping: Auto<f64> => setting().variable("ACCELERATE_GRADIENT_CLIPPING").flag("gradient_clipping");
        /// What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        ///
        /// Default without a configuration 2.
        zero_stage: ZeroStage => setting().flag("zero_stage").reference_default("2");
        /// Is the smallest batch of all loaders the one that `train_micro_batch_size_per_gpu` means, or the largest? Default
        /// true.
        is_train_batch_min: bool = true => setting();
        /// In a DeepSpeed configuration each block is a unit in any case.
        auto_wrap_policy: bool => setting().without_effect("by a DeepSpeed configuration each block is a unit in any case");
        /// Where the optimizer's state is kept between steps: none, cpu, nvme.
        ///
        /// From stage 1. Default none.
        offload_optimizer_device: OffloadDevice => setting().flag("offload_optimizer_device").reference_default("none");
        /// Where parameters are kept while they are not used: none, cpu, nvme.
        ///
        /// Stage 3 only. Default none.
        offload_param_device: OffloadDevice => setting().flag("offload_param_device").reference_default("none");
        /// The folder for the optimizer's state on "nvme".
        #[serde(deserialize_with = "none_is_absent")]
        offload_optimizer_nvme_path: PathBuf => setting().flag("offload_optimizer_nvme_path").reference_default("none");
        /// The folder for parameters on "nvme".
        #[serde(deserialize_with = "none_is_absent")]
        offload_param_nvme_path: PathBuf => setting().flag("offload_param_nvme_path").reference_default("none");
        /// Does the program build models without memory for their parameters, to be sharded from the start? Stage 3 only.
        ///
        /// It does so by `ParamStore::init_empty_weights`. A flag does not change how a program builds its models: `true` is a
        /// warning where one was built whole. Default: models may be built either way.
        zero3_init_flag: bool => setting().variable("ACCELERATE_DEEPSPEED_ZERO3_INIT").flag("zero3_init_flag");
        /// Write weights in the 16 bits of fp16 or bf16 when a model is saved at stage 3.
        ///
        /// That is what `save_model` and `get_state_dict` give. `save_state` writes what is trained, and goes on from it. Default false:
        /// in the 32 that are trained.
        zero3_save_16bit_model: bool => setting().flag("zero3_save_16bit_model").reference_default("false");
        /// Classes of layers with experts, separated by commas.
        transformer_moe_cls_names: Vec<String> => setting()
            .keys(&["deepspeed_moe_layer_cls_names", "transformer_moe_cls_names"])
            .variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES").flag("deepspeed_moe_layer_cls_names")
            .refused(NO_EXPERTS).for_python();
        /// Train with MS-AMP.
        enable_msamp: bool => setting().refused(NO_MSAMP).harmless(&["false"]);
        /// The level of MS-AMP: O1, O2 or O3.
        msamp_opt_level: String => setting().refused(NO_MSAMP).harmless(&["O1"]).reference_default("O1");
        /// DeepSpeed's list of machines, which are started on by ssh, as with --hostfile.
        hostfile: PathBuf => setting().launcher().keys(&["deepspeed_hostfile", "hostfile"]).flag("deepspeed_hostfile");
        /// Machines of the list that are left out, or GPUs of them: node1@node2:0,2.
        exclusion_filter: String => setting().launcher()
            .keys(&["deepspeed_exclusion_filter"]).flag("deepspeed_exclusion_filter");
        /// Machines of the list that are used, or GPUs of them: node1@node2:0,2.
        inclusion_filter: String => setting().launcher()
            .keys(&["deepspeed_inclusion_filter"]).flag("deepspeed_inclusion_filter");
        /// What starts the processes of several machines: pdsh (by ssh, here), or standard, which leaves the host file alone.
        multinode_launcher: String => setting().launcher()
            .keys(&["deepspeed_multinode_launcher"]).flag("deepspeed_multinode_launcher").harmless(&["standard", "pdsh"])
            .refused(BY_SSH);
    }
}

impl DeepSpeedSettings {
    /// Checks that the fields are possible by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): no accumulation steps, a norm that is negative or no number, an
    /// "nvme" device without a folder where there is no configuration that could name it.
    ///
    /// ```
    /// # use accelerate_core::config::{DeepSpeedSettings, OffloadDevice};
    /// let plugin = DeepSpeedSettings { offload_param_device: Some(OffloadDevice::Nvme), ..Default::default() };
    /// assert!(plugin.check().unwrap_err().to_string().contains("offload_param_nvme_path is missing"));
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.gradient_accumulation_steps == Some(Auto::Value(0)) {
            return Err(ConfigErrorKind::MustBePositive { name: "gradient_accumulation_steps" }.into());
        }
        if let Some(Auto::Value(found)) = self.gradient_clipping
            && !(found.is_finite() && found >= 0.0)
        {
            let (name, wanted) = ("gradient_clipping", "a number of at least 0");
            return Err(ConfigErrorKind::OutOfRange { name, found, wanted }.into());
        }
        let devices = [
            ("offload_optimizer", self.offload_optimizer_device, &self.offload_optimizer_nvme_path),
            ("offload_param", self.offload_param_device, &self.offload_param_nvme_path),
        ];
        for (name, device, path) in devices {
            if self.hf_ds_config.is_none() && device == Some(OffloadDevice::Nvme) && path.is_none() {
                let [device, path] = match name {
                    "offload_param" => ["offload_param_device", "offload_param_nvme_path"],
                    _ => ["offload_optimizer_device", "offload_optimizer_nvme_path"],
                };
                return Err(DeepSpeedErrorKind::NoFolder { device, path }.into());
            }
        }
        Ok(())
    }

    /// The configuration with the plugin's fields in it. `read` gives the text of the file that `hf_ds_config` names.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): what [`check`](Self::check) and [`DeepSpeedConfig::from_entries`]
    /// refuse; a file that cannot be read; a configuration without `zero_optimization` and no `zero_stage`; fields that
    /// differ from what the configuration says, all in one error.
    ///
    /// ```
    /// use accelerate_core::config::{Auto, DeepSpeedSettings, ZeroStage};
    /// let plugin = DeepSpeedSettings {
    ///     hf_ds_config: Some("ds_config.json".parse()?),
    ///     gradient_clipping: Some(Auto::Value(0.5)),
    ///     ..Default::default()
    /// };
    /// let file = r#"{"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}"#;
    /// let config = plugin.config(&|_| Ok(file.to_owned()))?;
    /// assert_eq!(config.gradient_clipping, Some(Auto::Value(0.5)));
    ///
    /// let plugin = DeepSpeedSettings { zero_stage: Some(ZeroStage::Gradients), ..plugin };
    /// let error = plugin.config(&|_| Ok(file.to_owned())).unwrap_err();
    /// let words = "zero_optimization.stage is 3 (ds_config.json:1:24), but DeepSpeedPlugin.zero_stage is 2";
    /// assert!(error.to_string().contains(words), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn config(&self, read: &dyn Fn(&Path) -> std::io::Result<String>) -> Result<DeepSpeedConfig> {
        self.check()?;
        match &self.hf_ds_config {
            None => self.put_into(self.config_of_fields()),
            Some(DeepSpeedSource::Entries(entries)) => self.put_into(DeepSpeedConfig::from_entries(entries)?),
            Some(DeepSpeedSource::Path(path)) => {
                let text = read(path).map_err(|cause| {
                    crate::Error::new(DeepSpeedErrorKind::File { path: path.clone() }).caused_by(cause)
                })?;
                let file = DeepSpeedFile::of(path, &text);
                let config = DeepSpeedConfig::from_json(&text)
                    .and_then(|config| self.put_into(DeepSpeedConfig { file: Some(file.clone()), ..config }));
                config.map_err(|error| error.in_deepspeed_file(&file))
            }
        }
    }

    /// The configuration with the plugin's fields in it.
    fn put_into(&self, mut config: DeepSpeedConfig) -> Result<DeepSpeedConfig> {
        if config.zero_optimization.is_none() && self.zero_stage.is_none() {
            let why = "write {\"stage\": ..}, or give DeepSpeedPlugin.zero_stage";
            let problems = vec![Problem::Missing { key: "zero_optimization".to_owned(), why }];
            return Err(DeepSpeedErrorKind::Document { problems }.into());
        }
        let conflicts = self.merge_into(&mut config);
        if conflicts.is_empty() { Ok(config) } else { Err(config.conflicts(conflicts)) }
    }

    /// What stands for a configuration where there is none.
    fn config_of_fields(&self) -> DeepSpeedConfig {
        DeepSpeedConfig {
            train_batch_size: Some(Auto::Auto),
            train_micro_batch_size_per_gpu: Some(Auto::Auto),
            gradient_accumulation_steps: Some(Auto::Auto),
            gradient_clipping: Some(Auto::Auto),
            zero_optimization: Some(DeepSpeedZeroOptimization {
                stage: Some(Auto::Value(self.zero_stage.unwrap_or(ZeroStage::Gradients))),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn merge_into(&self, config: &mut DeepSpeedConfig) -> Vec<Conflict> {
        macro_rules! field {
            ($field:ident) => {
                Source::setting(
                    concat!("DeepSpeedPlugin.", stringify!($field)),
                    concat!("deepspeed_config.", stringify!($field)),
                )
            };
        }
        let mut merge = Merge::default();
        let zero = config.zero_optimization.get_or_insert_default();
        merge.put(
            "gradient_accumulation_steps",
            field!(gradient_accumulation_steps),
            &mut config.gradient_accumulation_steps,
            self.gradient_accumulation_steps.and_then(Auto::value),
        );
        merge.put(
            "gradient_clipping",
            field!(gradient_clipping),
            &mut config.gradient_clipping,
            self.gradient_clipping.and_then(Auto::value),
        );
        merge.put("zero_optimization.stage", field!(zero_stage), &mut zero.stage, self.zero_stage);
        let DeepSpeedOffload { device, nvme_path } = &mut zero.offload_optimizer;
        let [key_of_device, key_of_path] =
            ["zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path"];
        merge.put(key_of_device, field!(offload_optimizer_device), device, self.offload_optimizer_device);
        merge.put(
            key_of_path,
            field!(offload_optimizer_nvme_path),
            nvme_path,
            self.offload_optimizer_nvme_path.clone(),
        );
        let DeepSpeedOffload { device, nvme_path } = &mut zero.offload_param;
        let [key_of_device, key_of_path] =
            ["zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"];
        merge.put(key_of_device, field!(offload_param_device), device, self.offload_param_device);
        merge.put(key_of_path, field!(offload_param_nvme_path), nvme_path, self.offload_param_nvme_path.clone());
        merge.put(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            field!(zero3_save_16bit_model),
            &mut zero.stage3_gather_16bit_weights_on_model_save,
            self.zero3_save_16bit_model,
        );
        merge.conflicts
    }
}

pub(super) const NVME_NEEDS_PATH: &str = "device \"nvme\" needs a folder on that disk";

/// The reference writes "none" for a path that is not there.
fn none_is_absent<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::String(text) if text == "none" => Ok(None),
        value => T::deserialize(value).map(Some).map_err(serde::de::Error::custom),
    }
}
