//! DeepSpeed's configuration as a value.
//!
//! The way of a configuration: [`DeepSpeedSettings::config`] reads the JSON document that the plugin names and puts the
//! plugin's own fields into it, [`check_deep_speed_prepared`] compares it with the optimizer and the scheduler of the
//! program, [`DeepSpeedSettings::resolve`] fills every `"auto"` from what the run knows, and
//! [`ResolvedDeepSpeedConfig::fully_sharded_settings`] says how that is done here. Nothing in the document is passed over in
//! silence: a key is honoured, or among the [`InertKey`]s, or an error.

mod auto;
mod document;
mod json;
mod keys;
mod optimizer;
mod plugin;
mod prepared;
mod reader;
mod resolve;
mod scheduler;
mod sharding;
mod zero;

pub use auto::Auto;
pub use document::{DeepSpeedBf16, DeepSpeedConfig, DeepSpeedFp16};
pub use optimizer::{DeepSpeedOptimizer, DeepSpeedOptimizerType, OptimizerAlgorithm};
pub use plugin::{DeepSpeedPlugin, DeepSpeedSettings, DeepSpeedSource};
pub use prepared::{OptimizerInCode, SchedulerInCode, check_deep_speed_prepared};
pub use reader::InertKey;
pub use resolve::{DeepSpeedFacts, ResolvedDeepSpeedConfig};
pub use scheduler::{DeepSpeedSchedule, DeepSpeedScheduler, DeepSpeedSchedulerType, WarmupType};
pub use zero::{DeepSpeedOffload, DeepSpeedZeroOptimization, ZeroStage};
