//! Distributed and mixed-precision training, made simple.
//!
//! A plain training loop becomes one that runs on any number of processes and devices by four
//! changed lines: build an [`Accelerator`], `prepare` what you made, take batches as they come, and
//! call `accelerator.backward`.
//!
//! Cargo features, all off by default:
//!
//! - `cuda`: NCCL and everything else for NVIDIA GPUs.
//! - `arrow`, `csv`, `parquet`: readers of such files in [`data::readers`].
//! - `hub`: fetching datasets from the Hugging Face Hub; brings an HTTP client and an asynchronous runtime.

// Derived code names this crate as its users do, also where it stands inside of it.
extern crate self as accelerate;

pub use accelerate_core::mesh::{Axis, Mesh};
pub use accelerate_core::tensor_parallel::{LayerRule, ParallelStyle, TensorParallelPlan};
pub use tch;

mod accelerator;
pub mod amp;
pub mod big_model;
pub mod checkpoint;
pub mod data;
#[cfg(doctest)]
mod documentation;
mod engine;
mod error;
mod fp8;
mod group;
mod inference;
#[doc(hidden)]
pub mod launchers;
mod local_sgd;
pub mod logging;
pub mod lora;
mod memory;
mod messages;
pub mod metrics;
pub mod nn;
mod offload;
pub mod optim;
pub mod profile;
mod quant;
mod quantized_model;
mod session;
mod state;
mod status;
mod tensor_tree;
pub mod testing;
pub mod tracking;

pub use accelerate_core::accumulation::PartialWindow;
pub use accelerate_core::config::{
    AORecipeKwargs, AmaxComputeAlgorithm, Auto, AutoWrapPolicy, AutocastKwargs, BackwardPrefetch,
    BnbQuantizationConfig, Callback, Compilation, DDPCommunicationHook, DDPCommunicationHookType,
    DataLoaderConfiguration, DataLoaderSettings, DeepSpeedPlugin, DeepSpeedSource, DistributedDataParallelKwargs,
    DynamoBackend, DynamoMode, FP8BackendType, FP8Format, FP8RecipeKwargs, Float8LinearRecipeName, FloatType,
    FullyShardedDataParallelPlugin, GradScalerKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs,
    MSAMPRecipeKwargs, MixedPrecision, MixedPrecisionPolicy, OffloadDevice, OffloadTarget, ParallelismConfig,
    PowerSGDState, ProfilerActivity, ProjectConfiguration, ProjectSettings, QuantStorage, QuantType, RendezvousOptions,
    ReshardAfterForward, RunConfig, ScheduleOption, ShardingStrategy, StateDictType, TERecipeKwargs, TorchDynamoPlugin,
    TorchTensorParallelPlugin, ZeroStage,
};
pub use accelerate_core::names::{DistributedType, RngType};
pub use accelerate_core::schedule::SchedulerUnit;
pub use accelerate_core::settings::Origin;
pub use accelerate_derive::TensorTree;
pub use accelerator::{
    Accelerator, AcceleratorBuilder, CheckpointFolder, ContextParallelOptions, HasParameters, JoinOptions,
    KwargsHandler, ModelRef, PadOptions, Prepare, PrepareDataLoaderOptions, PrepareModelOptions, PreparedModel,
    ReduceOptions, Registered, RemovableHandle, SeedOptions, StateHookContext, kind, set_seed,
};
pub use checkpoint::SaveModelOptions;
pub use engine::{CommHook, GradBucket};
pub use error::{Error, Result};
pub use group::{Group, ReduceOp};
pub use inference::{PipelinedModel, PippyOptions, prepare_pippy};
pub use launchers::{NotebookLauncherOptions, Workers, debug_launcher, notebook_launcher};
pub use local_sgd::{LocalSGD, LocalSGDOptions};
pub use memory::{ExecutableBatchSize, clear_device_cache, find_executable_batch_size};
pub use profile::ProfileKwargs;
pub use quantized_model::{load_and_quantize_model, load_quantize_and_dispatch};
pub use session::{ObjectState, Stateful};
pub use state::{PartialState, PartialStateOptions, SplitBetweenProcesses, SplitOptions};
pub use tensor_tree::Parcel;
pub use tensor_tree::TensorTree;

/// `println!` on the first process of each machine (`Accelerator.print` of the reference). Its first argument is an
/// [`Accelerator`] or a [`PartialState`].
///
/// ```
/// use accelerate::{Accelerator, main_println};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let loss = 0.25;
/// main_println!(accelerator, "step {}: loss {loss:.2}", 7);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[macro_export]
macro_rules! main_println {
    ($accelerator:expr, $($message:tt)+) => {
        $accelerator.print(::std::format_args!($($message)+))
    };
}

/// What a training program names: `use accelerate::prelude::*;`.
pub mod prelude {
    pub use crate::MixedPrecision::{self, Bf16, Fp16};
    pub use crate::data::{DataLoader, Dataset, TensorDataset, VecDataset, skip_first_batches};
    pub use crate::nn::{Module, ParamStore};
    pub use crate::optim::{AdamW, LinearWithWarmup, LrScheduler, Optimizer, Sgd};
    pub use crate::{Accelerator, Error, Result, TensorTree, main_println};
    pub use tch::{self, Device, Kind, Tensor};
}
