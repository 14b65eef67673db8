//! Process control: the accelerator's view of [`PartialState`], under the reference's names.

use super::Accelerator;
use crate::error::Result;
use crate::group::{Group, ReduceOp};
use crate::state::{SplitBetweenProcesses, SplitOptions};
use accelerate_core::config::ShardingStrategy;
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::names::DistributedType;
use std::fmt;
use std::sync::atomic::Ordering;
use tch::{Device, Tensor};

impl Accelerator {
    /// The device this process computes on.
    pub fn device(&self) -> Device {
        self.state().device()
    }

    /// How the processes of the run work together.
    pub fn distributed_type(&self) -> DistributedType {
        if self.deep_speed().is_some() {
            return DistributedType::DeepSpeed;
        }
        match self.config().fsdp_in_use() {
            Some(plugin) if plugin.sharding_strategy != ShardingStrategy::NoShard => DistributedType::Fsdp,
            _ => self.state().distributed_type(),
        }
    }

    /// Does the run have more than one process?
    pub fn use_distributed(&self) -> bool {
        self.state().use_distributed()
    }

    /// Count of all processes.
    pub fn num_processes(&self) -> usize {
        self.state().num_processes()
    }

    /// Number of this process among all, from 0.
    pub fn process_index(&self) -> usize {
        self.state().process_index()
    }

    /// Number of this process's share of the data, from 0: processes that compute one model together have the same rows, and the
    /// same number (`data_parallel_rank` of the reference).
    pub fn data_parallel_rank(&self) -> usize {
        self.session().mesh.shape().rank_in(Mesh::DP, self.process_index())
    }

    /// Number of this process among those that divide each layer with it, from 0 (`tensor_parallel_rank` of the reference).
    pub fn tensor_parallel_rank(&self) -> usize {
        self.session().mesh.shape().rank_in(&[Axis::Tp], self.process_index())
    }

    /// How the processes are laid out along named axes (`torch_device_mesh` of the reference).
    ///
    /// ```
    /// use accelerate::{Accelerator, ParallelismConfig, testing};
    ///
    /// let config = ParallelismConfig { dp_replicate_size: Some(2), tp_size: Some(2), ..Default::default() };
    /// let ranks = testing::ranks(4, Accelerator::builder().parallelism_config(config), |accelerator| {
    ///     assert_eq!(accelerator.mesh().to_string(), "dp_replicate 2 x tp 2");
    ///     Ok((accelerator.data_parallel_rank(), accelerator.tensor_parallel_rank()))
    /// })?;
    /// assert_eq!(ranks, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn mesh(&self) -> Mesh {
        self.session().mesh.shape()
    }

    /// Number of this process among those of its machine, from 0.
    pub fn local_process_index(&self) -> usize {
        self.state().local_process_index()
    }

    /// How often the run has been started before: by `accelerate launch --max_restarts` or torchrun, which restart processes that
    /// failed (`TORCHELASTIC_RESTART_COUNT`), by Slurm, which queues jobs again (`SLURM_RESTART_COUNT`), and by Kubernetes, which starts
    /// the pods of a JobSet again (`JOBSET_RESTART_ATTEMPT`). A program for which it is more than 0 goes on from its newest checkpoint.
    ///
    /// The agents of torchrun count each for themselves, so this is the largest number of all ranks. Collective.
    ///
    /// # Errors
    /// Ranks that make another call, or none.
    ///
    /// ```
    /// let accelerator = accelerate::Accelerator::builder().cpu(true).build()?;
    /// if accelerator.restart_count()? > 0 && accelerator.latest_checkpoint()?.is_some() {
    ///     accelerator.load_state(None)?;
    /// }
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn restart_count(&self) -> Result<usize> {
        let own = self.state().own_restart_count();
        Ok(self.values_of_all(own)?.into_iter().max().unwrap_or(own))
    }

    /// Is this rank 0?
    pub fn is_main_process(&self) -> bool {
        self.state().is_main_process()
    }

    /// Is this the first process of its machine?
    pub fn is_local_main_process(&self) -> bool {
        self.state().is_local_main_process()
    }

    /// Is this the highest rank?
    pub fn is_last_process(&self) -> bool {
        self.state().is_last_process()
    }

    /// All processes of the run, for collectives on single tensors.
    pub fn group(&self) -> &Group {
        self.state().group()
    }

    /// Returns when every process has called it; at once in a run of one. Collective.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        let _called = crate::status::here();
        self.state().wait_for_everyone()
    }

    /// Runs `function` on rank 0 and gives `None` elsewhere.
    pub fn on_main_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.state().on_main_process(function)
    }

    /// Runs `function` on the first process of each machine and gives `None` elsewhere.
    pub fn on_local_main_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.state().on_local_main_process(function)
    }

    /// Runs `function` on the highest rank and gives `None` elsewhere.
    pub fn on_last_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.state().on_last_process(function)
    }

    /// Runs `function` on rank `process_index` and gives `None` elsewhere.
    pub fn on_process<T>(&self, process_index: usize, function: impl FnOnce() -> T) -> Option<T> {
        self.state().on_process(process_index, function)
    }

    /// Runs `function` on the process with that number on each machine and gives `None` elsewhere.
    pub fn on_local_process<T>(&self, local_process_index: usize, function: impl FnOnce() -> T) -> Option<T> {
        self.state().on_local_process(local_process_index, function)
    }

    /// Runs `function` on rank 0 first and on the others when it is done. Collective.
    #[track_caller]
    pub fn main_process_first<T>(&self, function: impl FnOnce() -> Result<T>) -> Result<T> {
        let _called = crate::status::here();
        self.state().main_process_first(function)
    }

    /// Runs `function` on the first process of each machine first and on the others when it is done. Collective.
    #[track_caller]
    pub fn local_main_process_first<T>(&self, function: impl FnOnce() -> Result<T>) -> Result<T> {
        let _called = crate::status::here();
        self.state().local_main_process_first(function)
    }

    /// This process's share of `inputs`; see [`PartialState::split_between_processes`](crate::PartialState::split_between_processes).
    pub fn split_between_processes<T: SplitBetweenProcesses>(&self, inputs: &T, options: SplitOptions) -> Result<T> {
        self.state().split_between_processes(inputs, options)
    }

    /// Prints a line on the first process of each machine: what [`main_println!`](crate::main_println) calls.
    pub fn print(&self, message: fmt::Arguments<'_>) {
        self.state().print(message);
    }

    /// Raises a flag that [`Accelerator::check_trigger`] sees on every process, for example to stop early.
    pub fn set_trigger(&self) {
        self.0.trigger.store(true, Ordering::Relaxed);
    }

    /// Did any process raise the flag? Lowers it if so. Collective.
    ///
    /// ```
    /// use accelerate::testing;
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     if accelerator.is_last_process() {
    ///         accelerator.set_trigger();
    ///     }
    ///     assert!(accelerator.check_trigger()?);
    ///     assert!(!accelerator.check_trigger()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        let _called = crate::status::here();
        let raised =
            Tensor::f_from_slice(&[i64::from(self.0.trigger.load(Ordering::Relaxed))])?.f_to_device(self.device())?;
        self.group().all_reduce(&raised, ReduceOp::Sum)?;
        let raised = raised.f_int64_value(&[0])? > 0;
        if raised {
            self.0.trigger.store(false, Ordering::Relaxed);
        }
        Ok(raised)
    }
}
