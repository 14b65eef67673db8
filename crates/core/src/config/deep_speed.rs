//! DeepSpeed's configuration as a value.
//!
//! The way of a configuration: [`DeepSpeedSettings::config`] reads the JSON document that the plugin names and puts the
//! plugin's own fields into it. [`DeepSpeedSettings::resolve`] fills every `"auto"` from what the run knows and from what the
//! objects tell that are passed to `prepare` ([`PreparedFacts`]): once when there are none, and once for every call.
//! [`ResolvedDeepSpeedConfig::fully_sharded_settings`] says how that is done here. Nothing in the document is passed over in
//! silence: a key is honoured, or among the [`InertKey`]s, or an error.

mod auto;
mod document;
mod file;
mod json;
mod keys;
mod merge;
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
pub use file::DeepSpeedFile;
pub use optimizer::{DeepSpeedOptimizer, DeepSpeedOptimizerType, OptimizerAlgorithm};
pub use plugin::{DeepSpeedPlugin, DeepSpeedSettings, DeepSpeedSource};
pub use prepared::{OptimizerInCode, PreparedFacts, SchedulerInCode};
pub use reader::InertKey;
pub use resolve::{DeepSpeedFacts, ResolvedDeepSpeedConfig};
pub use scheduler::{DeepSpeedSchedule, DeepSpeedScheduler, DeepSpeedSchedulerType, WarmupType};
pub use zero::{DeepSpeedOffload, DeepSpeedZeroOptimization, ZeroStage};
