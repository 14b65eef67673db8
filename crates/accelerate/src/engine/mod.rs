//! The engines, which keep what the ranks hold of a model in step. `prepare` chooses one for each model.
//!
//! An engine is given the mesh of ranks, the model's parameters and settings. It knows neither the session nor the
//! accelerator; the session calls it at the points of a step that [`Engine`] names.

mod comm_hook;
mod fsdp;
mod gradient_sync;
mod hooks;
mod inventory;
mod power_sgd;
mod replicate;
mod sequence_parallel;
mod tensor_parallel;

use crate::error::Result;
use crate::group::Group;
use crate::nn::{CheckpointOptions, ParamStore};
use crate::session::{DeviceMesh, Engine};
use accelerate_core::config::{
    DistributedDataParallelSettings, FullyShardedSettings, MixedPrecision, ShardingStrategy,
};
use accelerate_core::mesh::Mesh;
pub use comm_hook::{CommHook, GradBucket};
pub(crate) use inventory::inventory;
pub(crate) use sequence_parallel::{
    Sequence, check_model as check_divides_sequences, compare_buffers, sequence_length,
};
use std::sync::Arc;
pub(crate) use tensor_parallel::TensorParallel;

/// One replica of the model: nothing to keep in step.
#[derive(Debug, Default)]
struct Alone {
    tensor_parallel: Option<TensorParallel>,
    _unreduced: Option<replicate::Unreduced>,
}

impl Engine for Alone {
    fn before_step(&self) -> Result<()> {
        self.tensor_parallel.as_ref().map_or(Ok(()), TensorParallel::check_gradients)
    }
}

/// What an engine is told of the model that it begins to serve.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    /// The ranks of the job, and what they divide models along.
    pub(crate) mesh: &'a DeviceMesh,
    pub(crate) store: &'a ParamStore,
    /// How replicas average their gradients.
    pub(crate) kwargs: &'a DistributedDataParallelSettings,
    /// How the model is sharded, if it is, and the precision of its forward passes.
    pub(crate) sharding: Option<(&'a FullyShardedSettings, MixedPrecision)>,
    /// Ranks compute the model's layers together.
    pub(crate) tensor_parallel: Option<&'a TensorParallel>,
    /// Is the model evaluated only, so that it gets no gradients?
    pub(crate) evaluation_mode: bool,
}

/// Gives a model on all ranks the values of rank 0. Collective.
///
/// # Errors
/// Ranks with different models.
pub(crate) fn same_weights(group: &Group, store: &ParamStore) -> Result<()> {
    replicate::check_same_model(group, store)?;
    replicate::copy_from(group, store, 0)
}

/// The engine for a model, with its parameters made equal on all ranks. Collective.
pub(crate) fn start(model: &Start<'_>) -> Result<Arc<dyn Engine>> {
    let &Start { mesh, store, kwargs, sharding, tensor_parallel, evaluation_mode } = model;
    kwargs.check()?;
    hooks::check(kwargs)?;
    if let Some((plugin, _)) = sharding.filter(|(plugin, _)| plugin.activation_checkpointing) {
        let offload_to_cpu = plugin.activation_checkpointing_offload;
        store.gradient_checkpointing_enable(CheckpointOptions { offload_to_cpu, ..Default::default() })?;
    }
    match sharding {
        Some((plugin, mixed_precision)) if plugin.sharding_strategy != ShardingStrategy::NoShard => {
            Ok(Arc::new(fsdp::FullyShard::start(model, plugin, mixed_precision)?))
        }
        _ => {
            store.materialize()?;
            // Of ranks that divide a sequence, each has gradients of its own tokens.
            let replicas = mesh.group(Mesh::REPLICATE)?;
            match replicas.world_size() == 1 || evaluation_mode {
                true => Ok(Arc::new(Alone { tensor_parallel: tensor_parallel.cloned(), _unreduced: None })),
                false => replicate::Replicate::start(&replicas, store, kwargs, tensor_parallel),
            }
        }
    }
}
