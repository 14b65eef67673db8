//! Process groups, their collectives, and the asynchronous work these return.

use crate::border::{Handle, check, handle, handles};
use crate::error::{Error, Result};
use crate::nccl::{self, NcclOptions};
use crate::store::{Store, c_string, milliseconds};
use crate::work::Work;
use std::ffi::c_char;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tch::Tensor;

type Handles = *const Handle;

unsafe extern "C" {
    fn te_pg_gloo(
        store: Handle,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        interface: *const c_char,
        host: *const c_char,
        threads: i32,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_free(group: Handle);
    fn te_pg_set_timeout(group: Handle, timeout_ms: i64) -> i32;
    fn te_pg_all_reduce(group: Handle, list: Handles, count: usize, op: i32, timeout_ms: i64, out: *mut Handle) -> i32;
    fn te_pg_all_reduce_coalesced(
        group: Handle,
        list: Handles,
        count: usize,
        op: i32,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_reduce(group: Handle, value: Handle, root: i32, op: i32, timeout_ms: i64, out: *mut Handle) -> i32;
    fn te_pg_broadcast(group: Handle, value: Handle, root: i32, timeout_ms: i64, out: *mut Handle) -> i32;
    fn te_pg_all_gather(
        group: Handle,
        outputs: Handles,
        count: usize,
        input: Handle,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_all_gather_into_tensor(
        group: Handle,
        output: Handle,
        input: Handle,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_reduce_scatter(
        group: Handle,
        output: Handle,
        inputs: Handles,
        count: usize,
        op: i32,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_reduce_scatter_tensor(
        group: Handle,
        output: Handle,
        input: Handle,
        op: i32,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_gather(
        group: Handle,
        outputs: Handles,
        count: usize,
        input: Handle,
        root: i32,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_scatter(
        group: Handle,
        output: Handle,
        inputs: Handles,
        count: usize,
        root: i32,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_all_to_all_single(
        group: Handle,
        output: Handle,
        input: Handle,
        output_splits: *const i64,
        num_output_splits: usize,
        input_splits: *const i64,
        num_input_splits: usize,
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_pg_send(group: Handle, value: Handle, destination: i32, tag: i32, out: *mut Handle) -> i32;
    fn te_pg_recv(group: Handle, value: Handle, source: i32, tag: i32, out: *mut Handle) -> i32;
    fn te_pg_barrier(group: Handle, timeout_ms: i64, out: *mut Handle) -> i32;
    fn te_pg_monitored_barrier(group: Handle, timeout_ms: i64, wait_all_ranks: bool) -> i32;
    fn te_pg_broadcast_coalesced(group: Handle, list: Handles, count: usize, buffer_bytes: usize, root: i32) -> i32;
    fn te_pg_verify_params(group: Handle, list: Handles, count: usize) -> i32;
}

/// How a reducing collective combines values; the numbers are c10d's `ReduceOp::RedOpType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum = 0,
    /// Mean over ranks (NCCL only; with Gloo sum and divide).
    Avg = 1,
    /// Product over ranks.
    Product = 2,
    /// Smallest value.
    Min = 3,
    /// Largest value.
    Max = 4,
    /// Bitwise and, integers only.
    BitAnd = 5,
    /// Bitwise or, integers only.
    BitOr = 6,
    /// Bitwise exclusive or, integers only.
    BitXor = 7,
}

/// Which of this machine's network addresses Gloo listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GlooInterface {
    /// The address that this machine's host name resolves to, or the loopback address.
    HostName,
    /// The address that this name resolves to, for example `127.0.0.1` when all ranks share a machine.
    Address(String),
    /// The address of a network interface, for example `eth0`.
    Interface(String),
}

/// How long [`ProcessGroup::monitored_barrier`] waits, and for whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MonitoredBarrierOptions {
    /// Default `None`: as long as the group does.
    pub timeout: Option<Duration>,
    /// Name all ranks that did not arrive? Default false: the first one only, at once.
    pub wait_all_ranks: bool,
}

/// Settings of a Gloo process group.
///
/// ```
/// use torch_ext::{GlooInterface, GlooOptions};
///
/// let options = GlooOptions { interface: GlooInterface::Address("127.0.0.1".into()), ..GlooOptions::default() };
/// assert_eq!(options.timeout.as_secs(), 1800);
/// ```
#[derive(Clone, Debug)]
pub struct GlooOptions {
    /// Deadline of each collective that does not name its own; 1800 s as in PyTorch.
    pub timeout: Duration,
    /// Where to listen.
    pub interface: GlooInterface,
    /// Threads that run collectives; collectives on more threads may overlap. 2 as in PyTorch.
    pub threads: usize,
}

impl Default for GlooOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(1800), interface: GlooInterface::HostName, threads: 2 }
    }
}

/// A `c10d::ProcessGroup`: ranks 0 to `world_size - 1` that call the same collectives in the same order.
///
/// Calls only start the operation; the [`Work`] they return has to be waited for before the tensors are
/// used. `timeout: None` takes the group's own deadline. Tensors may live on any device the backend
/// supports and have to be contiguous.
///
/// ```
/// use torch_ext::{GlooInterface, GlooOptions, ProcessGroup, ReduceOp, Store};
/// use tch::Tensor;
///
/// let options = GlooOptions { interface: GlooInterface::Address("127.0.0.1".into()), ..GlooOptions::default() };
/// let group = ProcessGroup::gloo(&Store::hash()?, 0, 1, &options)?;
/// let tensor = Tensor::from_slice(&[1.0f32, 2.0]);
/// group.all_reduce(&tensor, ReduceOp::Sum, None)?.wait(None)?;
/// assert_eq!(tensor, Tensor::from_slice(&[1.0f32, 2.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct ProcessGroup {
    // c10d counts operations without a lock, so the order of calls is made one here.
    group: Mutex<Handle>,
    rank: usize,
    world_size: usize,
}

// SAFETY: the handle is an atomically counted pointer to an object that is used under the mutex only.
unsafe impl Send for ProcessGroup {}
// SAFETY: as above.
unsafe impl Sync for ProcessGroup {}

impl ProcessGroup {
    /// Connects `world_size` processes by Gloo, meeting in `store`. Every rank has to call this.
    ///
    /// # Errors
    /// [`Error::is_timeout`] or [`Error::is_connection`] when not all ranks arrive within the options' timeout.
    pub fn gloo(store: &Store, rank: usize, world_size: usize, options: &GlooOptions) -> Result<Self> {
        const OPERATION: &str = "ProcessGroupGloo";
        if rank >= world_size {
            return Err(Error::invalid(
                OPERATION,
                format!("rank {rank} does not fit a world of {world_size} (ranks count from 0)"),
            ));
        }
        let (interface, address) = match &options.interface {
            GlooInterface::HostName => (None, None),
            GlooInterface::Address(text) => (None, Some(c_string(OPERATION, "the address", text)?)),
            GlooInterface::Interface(text) => (Some(c_string(OPERATION, "the interface", text)?), None),
        };
        let pointer = |text: &Option<std::ffi::CString>| text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
        let mut out = std::ptr::null_mut();
        // SAFETY: the store and both strings live through the call; the group keeps its own reference to the store.
        check(OPERATION, unsafe {
            te_pg_gloo(
                store.handle(),
                to_i32(OPERATION, rank)?,
                to_i32(OPERATION, world_size)?,
                milliseconds(options.timeout),
                pointer(&interface),
                pointer(&address),
                to_i32(OPERATION, options.threads.max(1))?,
                &mut out,
            )
        })?;
        Ok(Self { group: Mutex::new(out), rank, world_size })
    }

    /// Connects `world_size` processes by NCCL, one CUDA device each. Every rank has to call this. Needs the cargo
    /// feature `cuda`; without it an error that [`Error::is_feature_disabled`].
    pub fn nccl(store: &Store, rank: usize, world_size: usize, options: &NcclOptions<'_>) -> Result<Self> {
        const OPERATION: &str = "ProcessGroupNCCL";
        let group = nccl::nccl(store, to_i32(OPERATION, rank)?, to_i32(OPERATION, world_size)?, options)?;
        Ok(Self { group: Mutex::new(group), rank, world_size })
    }

    /// This process's number in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes the group has.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Changes the deadline of operations that do not name their own.
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        // SAFETY: the handle is alive.
        check("set_timeout", unsafe { te_pg_set_timeout(*self.lock(), milliseconds(timeout)) })
    }

    /// Combines the tensor over all ranks, in place. Collective.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp, timeout: Option<Duration>) -> Result<Work> {
        let list = [handle(tensor)];
        // SAFETY: borrowed tensor handles; the work keeps its own references to the tensors.
        Work::start("all_reduce", |out| unsafe {
            te_pg_all_reduce(*self.lock(), list.as_ptr(), 1, op as i32, limit(timeout), out)
        })
    }

    /// Combines several tensors of one dtype over all ranks in one operation, in place. Collective.
    pub fn all_reduce_coalesced(&self, tensors: &[Tensor], op: ReduceOp, timeout: Option<Duration>) -> Result<Work> {
        let list = handles(tensors);
        // SAFETY: as in `all_reduce`.
        Work::start("all_reduce_coalesced", |out| unsafe {
            te_pg_all_reduce_coalesced(*self.lock(), list.as_ptr(), list.len(), op as i32, limit(timeout), out)
        })
    }

    /// Combines the tensor over all ranks into rank `root`'s tensor. Collective.
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp, timeout: Option<Duration>) -> Result<Work> {
        let root = self.peer("reduce", root)?;
        // SAFETY: as in `all_reduce`.
        Work::start("reduce", |out| unsafe {
            te_pg_reduce(*self.lock(), handle(tensor), root, op as i32, limit(timeout), out)
        })
    }

    /// Overwrites the tensor with that of rank `root`. Collective.
    pub fn broadcast(&self, tensor: &Tensor, root: usize, timeout: Option<Duration>) -> Result<Work> {
        let root = self.peer("broadcast", root)?;
        // SAFETY: as in `all_reduce`.
        Work::start("broadcast", |out| unsafe {
            te_pg_broadcast(*self.lock(), handle(tensor), root, limit(timeout), out)
        })
    }

    /// Fills `outputs[r]` with rank r's `input`; one output per rank, all of the input's shape. Collective.
    pub fn all_gather(&self, outputs: &[Tensor], input: &Tensor, timeout: Option<Duration>) -> Result<Work> {
        self.one_per_rank("all_gather", outputs)?;
        let list = handles(outputs);
        // SAFETY: as in `all_reduce`.
        Work::start("all_gather", |out| unsafe {
            te_pg_all_gather(*self.lock(), list.as_ptr(), list.len(), handle(input), limit(timeout), out)
        })
    }

    /// Fills `output` (world size times the input's elements) with all ranks' inputs in rank order. Collective.
    pub fn all_gather_into_tensor(&self, output: &Tensor, input: &Tensor, timeout: Option<Duration>) -> Result<Work> {
        self.world_size_times("all_gather_into_tensor", output, input)?;
        // SAFETY: as in `all_reduce`.
        Work::start("all_gather_into_tensor", |out| unsafe {
            te_pg_all_gather_into_tensor(*self.lock(), handle(output), handle(input), limit(timeout), out)
        })
    }

    /// Combines all ranks' `inputs[r]` into rank r's `output`. Collective.
    pub fn reduce_scatter(
        &self,
        output: &Tensor,
        inputs: &[Tensor],
        op: ReduceOp,
        timeout: Option<Duration>,
    ) -> Result<Work> {
        self.one_per_rank("reduce_scatter", inputs)?;
        let list = handles(inputs);
        // SAFETY: as in `all_reduce`.
        Work::start("reduce_scatter", |out| unsafe {
            te_pg_reduce_scatter(
                *self.lock(),
                handle(output),
                list.as_ptr(),
                list.len(),
                op as i32,
                limit(timeout),
                out,
            )
        })
    }

    /// Combines all ranks' `input` (world size times the output's elements); rank r receives part r. Collective.
    pub fn reduce_scatter_tensor(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        timeout: Option<Duration>,
    ) -> Result<Work> {
        self.world_size_times("reduce_scatter_tensor", input, output)?;
        // SAFETY: as in `all_reduce`.
        Work::start("reduce_scatter_tensor", |out| unsafe {
            te_pg_reduce_scatter_tensor(*self.lock(), handle(output), handle(input), op as i32, limit(timeout), out)
        })
    }

    /// Fills `outputs[r]` on rank `root` with rank r's `input`; other ranks give no outputs. Collective.
    pub fn gather(&self, outputs: &[Tensor], input: &Tensor, root: usize, timeout: Option<Duration>) -> Result<Work> {
        let peer = self.peer("gather", root)?;
        self.only_on_root("gather", outputs, root)?;
        let list = handles(outputs);
        // SAFETY: as in `all_reduce`.
        Work::start("gather", |out| unsafe {
            te_pg_gather(*self.lock(), list.as_ptr(), list.len(), handle(input), peer, limit(timeout), out)
        })
    }

    /// Sends `inputs[r]` of rank `root` to rank r's `output`; other ranks give no inputs. Collective.
    pub fn scatter(&self, output: &Tensor, inputs: &[Tensor], root: usize, timeout: Option<Duration>) -> Result<Work> {
        let peer = self.peer("scatter", root)?;
        self.only_on_root("scatter", inputs, root)?;
        let list = handles(inputs);
        // SAFETY: as in `all_reduce`.
        Work::start("scatter", |out| unsafe {
            te_pg_scatter(*self.lock(), handle(output), list.as_ptr(), list.len(), peer, limit(timeout), out)
        })
    }

    /// Sends part r of `input` to rank r, along dim 0. Empty splits mean equal parts; otherwise they count
    /// rows per rank. Collective.
    pub fn all_to_all_single(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_splits: &[i64],
        input_splits: &[i64],
        timeout: Option<Duration>,
    ) -> Result<Work> {
        // SAFETY: as in `all_reduce`; the splits live through the call and are copied.
        Work::start("all_to_all_single", |out| unsafe {
            te_pg_all_to_all_single(
                *self.lock(),
                handle(output),
                handle(input),
                output_splits.as_ptr(),
                output_splits.len(),
                input_splits.as_ptr(),
                input_splits.len(),
                limit(timeout),
                out,
            )
        })
    }

    /// Sends `inputs[r]` to rank r and fills `outputs[r]` with what rank r sent here. Waits. Collective.
    ///
    /// All tensors share one dtype; shapes may differ from rank to rank as long as both sides agree.
    pub fn all_to_all(&self, outputs: &mut [Tensor], inputs: &[Tensor], timeout: Option<Duration>) -> Result<()> {
        const OPERATION: &str = "all_to_all";
        self.one_per_rank(OPERATION, outputs)?;
        self.one_per_rank(OPERATION, inputs)?;
        let flat = |list: &[Tensor]| -> std::result::Result<Tensor, tch::TchError> {
            Tensor::f_cat(&list.iter().map(|t| t.f_reshape([-1])).collect::<std::result::Result<Vec<_>, _>>()?, 0)
        };
        let sizes = |list: &[Tensor]| list.iter().map(|t| t.numel() as i64).collect::<Vec<_>>();
        let torch = |error: tch::TchError| Error::invalid(OPERATION, error.to_string());
        let sent = flat(inputs).map_err(torch)?;
        let received = flat(outputs).map_err(torch)?;
        self.all_to_all_single(&received, &sent, &sizes(outputs), &sizes(inputs), timeout)?.wait(timeout)?;
        let parts = received.f_split_with_sizes(sizes(outputs), 0).map_err(torch)?;
        for (output, part) in outputs.iter_mut().zip(parts) {
            let shaped = part.f_view(output.size().as_slice()).map_err(torch)?;
            tch::no_grad(|| output.f_copy_(&shaped)).map_err(torch)?;
        }
        Ok(())
    }

    /// Sends the tensor to one rank, which has to call [`ProcessGroup::recv`] with the same tag.
    pub fn send(&self, tensor: &Tensor, destination: usize, tag: i32) -> Result<Work> {
        let destination = self.peer("send", destination)?;
        // SAFETY: as in `all_reduce`.
        Work::start("send", |out| unsafe { te_pg_send(*self.lock(), handle(tensor), destination, tag, out) })
    }

    /// Receives into the tensor from one rank, or from whichever rank sends first (`None`; see [`Work::source_rank`]).
    pub fn recv(&self, tensor: &Tensor, source: Option<usize>, tag: i32) -> Result<Work> {
        let source = source.map(|rank| self.peer("recv", rank)).transpose()?.unwrap_or(-1);
        // SAFETY: as in `all_reduce`.
        Work::start("recv", |out| unsafe { te_pg_recv(*self.lock(), handle(tensor), source, tag, out) })
    }

    /// Completes when every rank has called it. Collective.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<Work> {
        // SAFETY: the handle is alive.
        Work::start("barrier", |out| unsafe { te_pg_barrier(*self.lock(), limit(timeout), out) })
    }

    /// A barrier whose error on rank 0 names the ranks that did not arrive. Waits. Collective, Gloo only.
    pub fn monitored_barrier(&self, options: MonitoredBarrierOptions) -> Result<()> {
        let MonitoredBarrierOptions { timeout, wait_all_ranks } = options;
        // SAFETY: the handle is alive.
        check("monitored_barrier", unsafe { te_pg_monitored_barrier(*self.lock(), limit(timeout), wait_all_ranks) })
    }

    /// Overwrites all tensors with those of rank `root`, packed into buffers of `buffer_bytes`. Waits. Collective.
    pub fn broadcast_coalesced(&self, tensors: &[Tensor], buffer_bytes: usize, root: usize) -> Result<()> {
        let root = self.peer("broadcast_coalesced", root)?;
        let list = handles(tensors);
        // SAFETY: as in `all_reduce`.
        check("broadcast_coalesced", unsafe {
            te_pg_broadcast_coalesced(*self.lock(), list.as_ptr(), list.len(), buffer_bytes, root)
        })
    }

    /// Fails on ranks whose parameters differ from rank 0's in number, shape, strides or dtype. Collective.
    pub fn verify_params_across_processes(&self, params: &[Tensor]) -> Result<()> {
        let list = handles(params);
        // SAFETY: as in `all_reduce`.
        check("verify_params_across_processes", unsafe { te_pg_verify_params(*self.lock(), list.as_ptr(), list.len()) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Handle> {
        // The handle itself never changes, so a panic elsewhere cannot have left it half-written.
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, operation: &'static str, rank: usize) -> Result<i32> {
        if rank >= self.world_size {
            return Err(Error::invalid(
                operation,
                format!("there is no rank {rank} in a group of {} (ranks count from 0)", self.world_size),
            ));
        }
        to_i32(operation, rank)
    }

    fn one_per_rank(&self, operation: &'static str, list: &[Tensor]) -> Result<()> {
        if list.len() == self.world_size {
            return Ok(());
        }
        Err(Error::invalid(
            operation,
            format!("found {} tensors, wanted one per rank of the group: {}", list.len(), self.world_size),
        ))
    }

    fn only_on_root(&self, operation: &'static str, list: &[Tensor], root: usize) -> Result<()> {
        if self.rank == root {
            return self.one_per_rank(operation, list);
        }
        if list.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(
            operation,
            format!("rank {} gave a list of {} tensors, but only rank {root} has one", self.rank, list.len()),
        ))
    }

    fn world_size_times(&self, operation: &'static str, large: &Tensor, small: &Tensor) -> Result<()> {
        if large.numel() == small.numel() * self.world_size {
            return Ok(());
        }
        Err(Error::invalid(
            operation,
            format!(
                "the large tensor has {} elements, wanted {} ranks times {} elements = {}",
                large.numel(),
                self.world_size,
                small.numel(),
                small.numel() * self.world_size
            ),
        ))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let group = self.group.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this handle owns one reference and is dropped once.
        unsafe { te_pg_free(*group) }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup").field("rank", &self.rank).field("world_size", &self.world_size).finish()
    }
}

/// Milliseconds for the border; 0 stands for "the operation's own deadline".
pub(crate) fn limit(timeout: Option<Duration>) -> i64 {
    timeout.map_or(0, milliseconds)
}

fn to_i32(operation: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::invalid(operation, format!("{value} does not fit 31 bits")))
}
