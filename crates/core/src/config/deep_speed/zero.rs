//! The section `zero_optimization`.

use super::Auto;
use super::reader::{COUNT, FLAG, Kind, Section, TEXT};
use crate::config::OffloadDevice;
use crate::settings::{SettingValue, ValueKind};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;

/// What is in parts instead of copies (`zero_optimization.stage` of DeepSpeed; Rajbhandari et al., "ZeRO", arXiv
/// 1910.02054). In files a number from 0 to 3.
///
/// ```
/// use accelerate_core::config::ZeroStage;
/// assert_eq!(ZeroStage::new(3), Some(ZeroStage::Parameters));
/// assert_eq!((ZeroStage::new(4), ZeroStage::Gradients.as_u8()), (None, 2));
/// assert_eq!(serde_json::to_string(&ZeroStage::OptimizerStates).unwrap(), "1");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ZeroStage {
    /// 0: nothing. The default of DeepSpeed where its configuration says nothing.
    #[default]
    Disabled,
    /// 1: what the optimizer keeps.
    OptimizerStates,
    /// 2: gradients too. The default of the plugin.
    Gradients,
    /// 3: parameters too.
    Parameters,
}

impl ZeroStage {
    /// The stage of that number; `None` above 3.
    pub const fn new(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Disabled),
            1 => Some(Self::OptimizerStates),
            2 => Some(Self::Gradients),
            3 => Some(Self::Parameters),
            _ => None,
        }
    }

    /// Its number.
    pub const fn as_u8(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_u8().fmt(f)
    }
}

impl SettingValue for ZeroStage {
    const KIND: ValueKind = ValueKind::Choice(&["0", "1", "2", "3"]);

    fn read(text: &str) -> Option<Self> {
        Self::new(text.trim().parse().ok()?)
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Serialize for ZeroStage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.as_u8())
    }
}

impl<'de> Deserialize<'de> for ZeroStage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u64::deserialize(deserializer)?;
        Self::new(number).ok_or_else(|| D::Error::custom(format_args!("{number} is not a ZeRO stage: 0, 1, 2 or 3")))
    }
}

/// `zero_optimization.offload_optimizer` or `zero_optimization.offload_param`.
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig, OffloadDevice};
/// let json = r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}}"#;
/// let offload = DeepSpeedConfig::from_json(json)?.zero_optimization.unwrap().offload_param;
/// assert_eq!((offload.device, offload.nvme_path), (Some(Auto::Value(OffloadDevice::Cpu)), None));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeepSpeedOffload {
    /// Where to. Default none.
    pub device: Option<Auto<OffloadDevice>>,
    /// The folder for [`OffloadDevice::Nvme`], which needs it.
    pub nvme_path: Option<Auto<PathBuf>>,
}

/// `zero_optimization`: what is in parts (DeepSpeed's `runtime/zero/config.py`). `None` is a key that is absent.
///
/// The three sizes are those that Accelerate fills where they are "auto"; what is gathered together is decided here by
/// the model's modules instead, so that they are [inert](super::InertKey).
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig, ZeroStage};
/// let config = DeepSpeedConfig::from_json(r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}"#)?;
/// let zero = config.zero_optimization.unwrap();
/// assert_eq!(zero.stage, Some(Auto::Value(ZeroStage::Gradients)));
/// assert_eq!(zero.reduce_bucket_size, Some(Auto::Value(500_000_000)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeepSpeedZeroOptimization {
    /// What is in parts. Default 0.
    pub stage: Option<Auto<ZeroStage>>,
    /// Where the state of the optimizer is kept.
    pub offload_optimizer: DeepSpeedOffload,
    /// Where parameters are kept; stage 3 only.
    pub offload_param: DeepSpeedOffload,
    /// Write weights in 16 bits when a model is saved at stage 3. Default false: in the 32 that are trained.
    pub stage3_gather_16bit_weights_on_model_save: Option<Auto<bool>>,
    /// Elements reduced in one message. "auto": the square of the hidden size.
    pub reduce_bucket_size: Option<Auto<u64>>,
    /// Elements fetched ahead of their use. "auto": 0.9 times the square of the hidden size.
    pub stage3_prefetch_bucket_size: Option<Auto<u64>>,
    /// Elements below which a parameter stays whole. "auto": ten times the hidden size.
    pub stage3_param_persistence_threshold: Option<Auto<u64>>,
    /// Among how many neighbouring ranks the model is divided, where the other groups hold the same (MiCS; Zhang et al.,
    /// arXiv 2205.00119); stage 3 only. In files -1 or 0 for none. Default none: among all.
    pub mics_shard_size: Option<usize>,
}

/// `Some(None)` is a number that asks for nothing.
const GROUP: Kind<Option<usize>> =
    Kind::new("-1 for none, or a whole number of at least 0", |value| match value.as_i64() {
        Some(-1 | 0) => Some(None),
        number => usize::try_from(number?).ok().map(Some),
    });
const STAGE: Kind<ZeroStage> = Kind::new("0, 1, 2 or 3", |value| ZeroStage::new(value.as_u64()?));
const DEVICE: Kind<OffloadDevice> = Kind::new("\"none\", \"cpu\" or \"nvme\"", |value| value.as_str()?.parse().ok());

impl DeepSpeedZeroOptimization {
    pub(super) fn read(mut section: Section<'_>) -> Self {
        const WHY: &str = "here the modules of a model decide what is gathered and reduced together";
        let mut zero = Self {
            stage: section.auto("stage", &STAGE),
            offload_optimizer: DeepSpeedOffload::read(section.section("offload_optimizer")),
            offload_param: DeepSpeedOffload::read(section.section("offload_param")),
            stage3_gather_16bit_weights_on_model_save: section.auto("stage3_gather_16bit_weights_on_model_save", &FLAG),
            mics_shard_size: section.plain("mics_shard_size", &GROUP).flatten(),
            ..Self::default()
        };
        for (key, slot) in [
            ("reduce_bucket_size", &mut zero.reduce_bucket_size),
            ("stage3_prefetch_bucket_size", &mut zero.stage3_prefetch_bucket_size),
            ("stage3_param_persistence_threshold", &mut zero.stage3_param_persistence_threshold),
        ] {
            *slot = section.auto(key, &COUNT);
            if slot.is_some() {
                let key = section.path(key);
                section.findings.inert.push(super::InertKey { key, why: WHY });
            }
        }
        section.finish(None);
        zero
    }
}

impl DeepSpeedOffload {
    fn read(section: Option<Section<'_>>) -> Self {
        let Some(mut section) = section else {
            return Self::default();
        };
        let device = section.auto("device", &DEVICE);
        let nvme_path = section.auto("nvme_path", &TEXT).and_then(|path| match path {
            Auto::Auto => Some(Auto::Auto),
            Auto::Value(path) => (path != "none").then(|| Auto::Value(path.into())),
        });
        section.finish(None);
        Self { device, nvme_path }
    }
}
