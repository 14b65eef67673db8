//! The configuration records of the Python API: same names, same fields, same keys in YAML and JSON.
//!
//! Each is declared once, as a record of [`settings`](crate::settings): the form that users write has optional fields,
//! because a value may also come from a flag, a variable or a file; the form that engines read is named `...Settings`, and
//! has a `check` where values can be wrong together. [`RunConfig::resolve`] makes one of the other.

mod accelerator;
mod autocast;
mod callback;
mod cluster;
mod data_loader;
mod deep_speed;
mod distributed_data_parallel;
mod fp8;
mod fully_sharded;
mod grad_scaler;
mod gradient_accumulation;
mod mixed_precision;
mod offload;
mod parallelism;
mod power_sgd;
mod process_group;
mod profile;
mod project;
mod quantization;
mod questions;
mod rendezvous_options;
mod run_config;
mod tee;
mod torch_dynamo;

pub use accelerator::{AcceleratorConfig, AcceleratorSettings};
pub use autocast::{AutocastKwargs, AutocastSettings};
pub use callback::Callback;
pub use cluster::{ClusterConfig, ClusterSettings, MpirunConfig, MpirunSettings};
pub use data_loader::{DataLoaderConfiguration, DataLoaderSettings};
pub use deep_speed::{
    Auto, DeepSpeedBf16, DeepSpeedConfig, DeepSpeedFacts, DeepSpeedFile, DeepSpeedFp16, DeepSpeedOffload,
    DeepSpeedOptimizer, DeepSpeedOptimizerType, DeepSpeedPlugin, DeepSpeedSchedule, DeepSpeedScheduler,
    DeepSpeedSchedulerType, DeepSpeedSettings, DeepSpeedSource, DeepSpeedZeroOptimization, InertKey,
    OptimizerAlgorithm, OptimizerInCode, PreparedFacts, ResolvedDeepSpeedConfig, SchedulerInCode, WarmupType,
    ZeroStage,
};
pub use distributed_data_parallel::{
    DDPCommunicationHook, DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedDataParallelSettings,
    FIRST_BUCKET_BYTES,
};
pub(crate) use fp8::no_msamp;
pub use fp8::{
    AORecipeKwargs, AmaxComputeAlgorithm, FP8BackendType, FP8Format, FP8RecipeKwargs, FP8Settings,
    Float8LinearRecipeName, MSAMPRecipeKwargs, TERecipeKwargs,
};
pub use fully_sharded::{
    AutoWrapPolicy, BackwardPrefetch, FloatType, FullStateDict, FullyShardedDataParallelPlugin, FullyShardedSettings,
    MixedPrecisionPolicy, ReshardAfterForward, ShardingStrategy, StateDictType,
};
pub use grad_scaler::{GradScalerKwargs, GradScalerSettings};
pub use gradient_accumulation::{GradientAccumulationPlugin, GradientAccumulationSettings};
pub use mixed_precision::MixedPrecision;
pub use offload::{OffloadDevice, OffloadTarget};
pub use parallelism::{
    ContextParallelStrategy, ParallelismConfig, ParallelismSettings, TensorParallelSettings, TorchTensorParallelPlugin,
};
pub use power_sgd::PowerSGDState;
pub use process_group::{InitProcessGroupKwargs, ProcessGroupSettings};
pub use profile::{ProfileKwargs, ProfileSettings, ProfilerActivity, ScheduleOption};
pub use project::{ProjectConfiguration, ProjectSettings};
pub use quantization::{BnbQuantizationConfig, QuantStorage, QuantType, QuantizationSettings};
pub use questions::{Answers, Choice, Form, MachineFacts, Next, Passed, Question, Questionnaire, Refused, are_numbers};
pub use rendezvous_options::RendezvousOptions;
pub use run_config::{
    ConfigFile, FileFormat, Fsdp2Conversion, LaunchPlace, Lookup, Message, Overridden, PartialRunConfig, PassedEnd,
    RunConfig, Sources, changed_lines, default_config_files, hugging_face_home, is_in_files_of_reference,
    misspelt_variables, settings,
};
pub use tee::{Streams, Tee};
pub use torch_dynamo::{Compilation, DynamoBackend, DynamoMode, DynamoSettings, TorchDynamoPlugin};
