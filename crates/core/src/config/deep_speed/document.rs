//! A DeepSpeed configuration as it is written.

use super::reader::{FLAG, Findings, InertKey, Kind, NOT_NEGATIVE, POSITIVE, Section};
use super::{Auto, DeepSpeedFile, DeepSpeedOptimizer, DeepSpeedScheduler, DeepSpeedZeroOptimization, json};
use crate::Result;
use crate::config::FloatType;
use crate::error::deep_speed::{Conflict, DeepSpeedErrorKind, Problem};
use serde_json::{Map, Value};

/// `fp16`: half precision, and how losses are scaled in it.
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig};
/// let config = DeepSpeedConfig::from_json(r#"{"fp16": {"enabled": "auto", "initial_scale_power": 10}}"#)?;
/// assert_eq!((config.fp16.enabled, config.fp16.initial_scale_power), (Some(Auto::Auto), 10));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeepSpeedFp16 {
    /// Compute in it. "auto", or absent: as the program's mixed precision says.
    pub enabled: Option<Auto<bool>>,
    /// The first scale is 2 to this power, at most 64. Default 16.
    pub initial_scale_power: u8,
    /// Steps without overflow after which the scale doubles, at least 1. Default 1000.
    pub loss_scale_window: u32,
}

impl Default for DeepSpeedFp16 {
    fn default() -> Self {
        Self { enabled: None, initial_scale_power: 16, loss_scale_window: 1000 }
    }
}

/// `bf16` (or `bfloat16`): bfloat16.
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig};
/// let config = DeepSpeedConfig::from_json(r#"{"bf16": {"enabled": true}}"#)?;
/// assert_eq!(config.bf16.enabled, Some(Auto::Value(true)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeepSpeedBf16 {
    /// Compute in it. "auto", or absent: as the program's mixed precision says.
    pub enabled: Option<Auto<bool>>,
}

/// A DeepSpeed configuration as it is written (<https://www.deepspeed.ai/docs/config-json/>), every key typed. `None` is
/// a key that is absent or `null`.
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig};
/// let config = DeepSpeedConfig::from_json(r#"{"train_batch_size": 16, "gradient_clipping": "auto"}"#)?;
/// assert_eq!((config.train_batch_size, config.gradient_clipping), (Some(Auto::Value(16)), Some(Auto::Auto)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeepSpeedConfig {
    /// Rows per step of the optimizer, over all processes.
    pub train_batch_size: Option<Auto<usize>>,
    /// Rows per forward pass of one process.
    pub train_micro_batch_size_per_gpu: Option<Auto<usize>>,
    /// Forward passes per step of the optimizer.
    pub gradient_accumulation_steps: Option<Auto<usize>>,
    /// Largest 2-norm of all gradients together; 0 for no limit. Default 0.
    pub gradient_clipping: Option<Auto<f64>>,
    /// What is in parts instead of copies.
    pub zero_optimization: Option<DeepSpeedZeroOptimization>,
    /// Half precision.
    pub fp16: DeepSpeedFp16,
    /// bfloat16.
    pub bf16: DeepSpeedBf16,
    /// In which gradients travel.
    pub communication_data_type: Option<FloatType>,
    /// In which gradients add up over micro-batches (`data_types.grad_accum_dtype`).
    pub grad_accum_dtype: Option<FloatType>,
    /// The optimizer, if the configuration has one.
    pub optimizer: Option<DeepSpeedOptimizer<Option<Auto<f64>>>>,
    /// The schedule of the learning rate, if the configuration has one.
    pub scheduler: Option<DeepSpeedScheduler>,
    /// Keys that change nothing here, to be told once.
    pub inert_keys: Vec<InertKey>,
    /// Keys that are "auto" although nothing ever fills them; an error once the configuration is resolved.
    pub unfilled_autos: Vec<String>,
    /// The file that it was read from, for messages.
    pub file: Option<DeepSpeedFile>,
}

const SCALE_POWER: Kind<u8> =
    Kind::new("a whole number from 0 to 64", |value| u8::try_from(value.as_u64()?).ok().filter(|power| *power <= 64));
const FLOAT_TYPE: Kind<FloatType> = Kind::new("\"fp32\", \"fp16\" or \"bf16\"", |value| value.as_str()?.parse().ok());
const WINDOW: Kind<u32> =
    Kind::new("a whole number of at least 1", |value| u32::try_from(value.as_u64()?).ok().filter(|steps| *steps > 0));

impl DeepSpeedConfig {
    /// Reads the text of a configuration file.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): more than 1 MiB, no JSON object, a key that is written twice in it, and what
    /// [`from_entries`](Self::from_entries) refuses.
    ///
    /// ```
    /// use accelerate_core::config::DeepSpeedConfig;
    /// let error = DeepSpeedConfig::from_json(r#"{"train_batch_size": 1, "train_batch_size": 2}"#).unwrap_err();
    /// assert!(error.to_string().contains("\"train_batch_size\" is written twice"));
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_entries(&json::read_object(text)?)
    }

    /// Reads the entries of a configuration. Keys are DeepSpeed's; a number that counts may be written as `5e8`.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), one for all entries that cannot be honoured, each by its full name:
    /// unknown keys, those of features that are not available (unless they are switched off) with what to do instead,
    /// values of a wrong type, unknown names of optimizers and schedulers, and what is missing.
    ///
    /// ```
    /// use accelerate_core::config::DeepSpeedConfig;
    /// let json = r#"{"gradient_cliping": 1.0, "zero_optimization": {"stage": 7, "zero_quantized_weights": true}}"#;
    /// let text = DeepSpeedConfig::from_json(json).unwrap_err().to_string();
    /// assert!(text.contains("gradient_cliping is not known; gradient_clipping is"));
    /// assert!(text.contains("zero_optimization.stage is 7, but must be 0, 1, 2 or 3"));
    /// assert!(text.contains("zero_optimization.zero_quantized_weights is true, which is not available"));
    /// ```
    pub fn from_entries(entries: &Map<String, Value>) -> Result<Self> {
        let mut findings = Findings::default();
        let mut config = Self::read(Section::root(entries.clone(), &mut findings));
        let Findings { problems, inert, stray_autos } = findings;
        if !problems.is_empty() {
            return Err(DeepSpeedErrorKind::Document { problems }.into());
        }
        (config.inert_keys, config.unfilled_autos) = (inert, stray_autos);
        Ok(config)
    }

    /// The error of values that the program contradicts, each with its line where the configuration is a file.
    pub(super) fn conflicts(&self, mut conflicts: Vec<Conflict>) -> crate::Error {
        for conflict in &mut conflicts {
            conflict.place = self.file.as_ref().map(|file| file.place(&conflict.key));
        }
        DeepSpeedErrorKind::Conflicts { conflicts }.into()
    }

    fn read(mut root: Section<'_>) -> Self {
        let mut config = Self {
            train_batch_size: root.auto("train_batch_size", &POSITIVE),
            train_micro_batch_size_per_gpu: root.auto("train_micro_batch_size_per_gpu", &POSITIVE),
            gradient_accumulation_steps: root.auto("gradient_accumulation_steps", &POSITIVE),
            gradient_clipping: root.auto("gradient_clipping", &NOT_NEGATIVE),
            zero_optimization: root.section("zero_optimization").map(DeepSpeedZeroOptimization::read),
            fp16: root.section("fp16").map(read_fp16).unwrap_or_default(),
            communication_data_type: root.plain("communication_data_type", &FLOAT_TYPE),
            optimizer: root.section("optimizer").and_then(DeepSpeedOptimizer::read),
            scheduler: root.section("scheduler").and_then(DeepSpeedScheduler::read),
            ..Self::default()
        };
        if root.has("bf16") && root.has("bfloat16") {
            let (key, found, wanted) = (root.path("bfloat16"), "given".to_owned(), "left out, because there is bf16");
            root.findings.problems.push(Problem::Value { key, found, wanted });
        }
        for key in ["bf16", "bfloat16"] {
            if let Some(section) = root.section(key) {
                config.bf16 = read_bf16(section);
            }
        }
        if let Some(mut section) = root.section("data_types") {
            config.grad_accum_dtype = section.plain("grad_accum_dtype", &FLOAT_TYPE);
            section.finish(None);
        }
        root.finish(None);
        config
    }
}

fn read_fp16(mut section: Section<'_>) -> DeepSpeedFp16 {
    let default = DeepSpeedFp16::default();
    let fp16 = DeepSpeedFp16 {
        enabled: section.auto("enabled", &FLAG),
        initial_scale_power: section.plain("initial_scale_power", &SCALE_POWER).unwrap_or(default.initial_scale_power),
        loss_scale_window: section.plain("loss_scale_window", &WINDOW).unwrap_or(default.loss_scale_window),
    };
    section.finish(None);
    fp16
}

fn read_bf16(mut section: Section<'_>) -> DeepSpeedBf16 {
    let bf16 = DeepSpeedBf16 { enabled: section.auto("enabled", &FLAG) };
    section.finish(None);
    bf16
}
