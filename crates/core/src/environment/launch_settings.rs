//! The settings that a launcher passes to its children in `ACCELERATE_*` variables.

use super::{Variables, parse_flag};
use crate::Result;
use crate::config::{MixedPrecision, TorchDynamoPlugin};
use crate::error::environment::EnvironmentErrorKind as Kind;

/// What `accelerate launch` (ours or the reference's) asks of the program it starts.
///
/// A value given in the program's own code goes before the one here, for every field.
///
/// ```
/// use accelerate_core::config::MixedPrecision;
/// use accelerate_core::environment::LaunchSettings;
///
/// let lookup = |name: &str| match name {
///     "ACCELERATE_MIXED_PRECISION" => Some("bf16".to_owned()),
///     "ACCELERATE_USE_CPU" => Some("yes".to_owned()),
///     _ => None,
/// };
/// let settings = LaunchSettings::read(&lookup)?;
/// assert_eq!(settings.mixed_precision, Some(MixedPrecision::Bf16));
/// assert!(settings.use_cpu);
/// assert_eq!(settings.gradient_accumulation_steps, None);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchSettings {
    /// `ACCELERATE_MIXED_PRECISION`.
    pub mixed_precision: Option<MixedPrecision>,
    /// `ACCELERATE_USE_CPU`: compute on the CPU although an accelerator is present.
    pub use_cpu: bool,
    /// `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, at least 1. `auto`, which DeepSpeed configurations write,
    /// says nothing and gives `None`.
    pub gradient_accumulation_steps: Option<usize>,
    /// `ACCELERATE_DEBUG_MODE`: compare shapes over ranks before each collective.
    pub debug_mode: bool,
    /// `ACCELERATE_TORCH_DEVICE`, for example `cuda:1`: the device to use, whatever the automatic choice is.
    pub torch_device: Option<String>,
    /// `ACCELERATE_CPU_AFFINITY`: pin each process to the cores next to its device.
    pub cpu_affinity: bool,
    /// `ACCELERATE_LOG_LEVEL`, as written.
    pub log_level: Option<String>,
    /// `ACCELERATE_DYNAMO_*`: the compiler that models go through.
    pub dynamo: TorchDynamoPlugin,
}

impl LaunchSettings {
    /// Reads the settings through `lookup`. Variables that are set but empty count as not set.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`](crate::Error::is_environment), naming the variable, its value and what it
    /// must be.
    pub fn read(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables { lookup };
        Ok(Self {
            mixed_precision: mixed_precision(&variables)?,
            use_cpu: parse_flag(lookup, "ACCELERATE_USE_CPU", false)?,
            gradient_accumulation_steps: accumulation_steps(&variables)?,
            debug_mode: parse_flag(lookup, "ACCELERATE_DEBUG_MODE", false)?,
            torch_device: variables.text("ACCELERATE_TORCH_DEVICE"),
            cpu_affinity: parse_flag(lookup, "ACCELERATE_CPU_AFFINITY", false)?,
            log_level: variables.text("ACCELERATE_LOG_LEVEL"),
            dynamo: TorchDynamoPlugin::from_environment(lookup)?,
        })
    }
}

fn mixed_precision(variables: &Variables<'_>) -> Result<Option<MixedPrecision>> {
    let name = "ACCELERATE_MIXED_PRECISION";
    let Some(value) = variables.text(name) else {
        return Ok(None);
    };
    match value.parse() {
        Ok(precision) => Ok(Some(precision)),
        Err(cause) => {
            let wanted = "one of no, fp16, bf16, fp8";
            let kind = Kind::Value { name: name.to_owned(), value, wanted };
            Err(crate::Error::new(kind).caused_by(cause))
        }
    }
}

fn accumulation_steps(variables: &Variables<'_>) -> Result<Option<usize>> {
    let name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
    if variables.text(name).is_some_and(|value| value.eq_ignore_ascii_case("auto")) {
        return Ok(None);
    }
    variables.count(name)
}
