//! The configuration records of the Python API: same names, same fields, same keys in YAML and JSON.
//!
//! Each record is a plain struct with public fields, `Default`, and a `check` where fields can be wrong
//! together. An unknown key in a file is an error. The documentation of each field gives its default, and
//! Python Accelerate's where that differs.

mod autocast;
mod data_loader;
mod deep_speed;
mod distributed_data_parallel;
mod fully_sharded;
mod grad_scaler;
mod gradient_accumulation;
mod mixed_precision;
mod offload;
mod power_sgd;
mod process_group;
mod profile;
mod project;
mod torch_dynamo;

pub use autocast::AutocastKwargs;
pub use data_loader::DataLoaderConfiguration;
pub use deep_speed::{
    Auto, DeepSpeedBf16, DeepSpeedConfig, DeepSpeedFacts, DeepSpeedFp16, DeepSpeedOffload, DeepSpeedOptimizer,
    DeepSpeedOptimizerType, DeepSpeedPlugin, DeepSpeedSchedule, DeepSpeedScheduler, DeepSpeedSchedulerType,
    DeepSpeedSource, DeepSpeedZeroOptimization, InertKey, OptimizerAlgorithm, OptimizerInCode, ResolvedDeepSpeedConfig,
    SchedulerInCode, WarmupType, ZeroStage, check_deep_speed_prepared,
};
pub use distributed_data_parallel::{DDPCommunicationHookType, DistributedDataParallelKwargs, FIRST_BUCKET_BYTES};
pub use fully_sharded::{
    AutoWrapPolicy, BackwardPrefetch, FloatType, FullyShardedDataParallelPlugin, MixedPrecisionPolicy, ShardingStrategy,
};
pub use grad_scaler::GradScalerKwargs;
pub use gradient_accumulation::GradientAccumulationPlugin;
pub use mixed_precision::MixedPrecision;
pub use offload::{OffloadDevice, OffloadTarget};
pub use power_sgd::PowerSGDState;
pub use process_group::InitProcessGroupKwargs;
pub use profile::{ProfilerActivity, ScheduleOption};
pub use project::ProjectConfiguration;
pub use torch_dynamo::{Compilation, DynamoBackend, DynamoMode, TorchDynamoPlugin};

use serde::{Deserialize, Deserializer};

/// `null` becomes the type's default; records whose field default differs use their own function.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
