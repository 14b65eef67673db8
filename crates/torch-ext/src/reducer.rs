//! `c10d::Reducer`: the engine of DistributedDataParallel.

use crate::border::{Handle, check, give, handles, run_callback};
use crate::error::{Error, Result};
use crate::kinds::scalar_type;
use crate::process_group::ProcessGroup;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// What errors call a reducer that is made, or told an order.
const OPERATION: &str = "Reducer";

unsafe extern "C" {
    fn te_bucket_assignment(
        params: *const Handle,
        count: usize,
        limits: *const usize,
        num_limits: usize,
        assignment: *mut usize,
        num_buckets: *mut usize,
    ) -> i32;
    fn te_reducer_new(
        params: *const Handle,
        count: usize,
        names: *const *const c_char,
        name_lengths: *const usize,
        group: Handle,
        first_bucket_bytes: i64,
        bucket_bytes: i64,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        order: *const usize,
        order_count: usize,
        out: *mut Handle,
    ) -> i32;
    fn te_reducer_free(reducer: Handle);
    fn te_reducer_prepare_for_forward(reducer: Handle) -> i32;
    fn te_reducer_rebuild_buckets(reducer: Handle, out: *mut bool) -> i32;
    fn te_reducer_prepare_for_backward(reducer: Handle, outputs: *const Handle, count: usize) -> i32;
    fn te_reducer_mark_used(reducer: Handle, positions: *const usize, count: usize) -> i32;
    fn te_reducer_check_finalized(reducer: Handle) -> i32;
    fn te_reducer_delay_all_reduce(reducer: Handle, order: *const usize, order_count: usize) -> i32;
    fn te_reducer_shadow_backward(
        reducer: Handle,
        group: Handle,
        params: *const Handle,
        count: usize,
        find_unused_parameters: bool,
        contribution: f64,
        keep: bool,
    ) -> i32;
    fn te_reducer_order(reducer: Handle, params: *const Handle, count: usize, order: *mut usize) -> i32;
    fn te_reducer_num_buckets(reducer: Handle, out: *mut usize) -> i32;
    fn te_reducer_compress(reducer: Handle, group: Handle, scalar_type: i32) -> i32;
    fn te_reducer_register_hook(reducer: Handle, group: Handle, scalar_type: i32, table: HookTable) -> i32;
}

/// Mirrors `RustHookTable` in shim/reducer.cpp.
#[repr(C)]
struct HookTable {
    context: *mut c_void,
    call: unsafe extern "C" fn(*mut c_void, Handle, *const Handle, usize, usize, bool, *mut Handle) -> i32,
    drop: unsafe extern "C" fn(*mut c_void),
}

/// Settings of a [`Reducer`], named as the arguments of `DistributedDataParallel`.
///
/// ```
/// let options = torch_ext::ReducerOptions::default();
/// assert_eq!(options.bucket_bytes, 25 << 20);
/// ```
#[derive(Clone, Debug)]
pub struct ReducerOptions {
    /// Size of the first bucket in bytes, small so that reduction starts early; 1 MiB as in PyTorch.
    pub first_bucket_bytes: i64,
    /// Size of the other buckets in bytes (`bucket_cap_mb` times 1 MiB); 25 MiB as in PyTorch.
    pub bucket_bytes: i64,
    /// Search the graph for parameters that got no part in the output, and reduce zeros for them.
    pub find_unused_parameters: bool,
    /// Let gradients be views into the buckets: saves a copy and the memory of one set of gradients.
    pub gradient_as_bucket_view: bool,
    /// The graph is the same in every iteration.
    pub static_graph: bool,
    /// Positions of all parameters in the order in which an earlier reducer had them in its buckets, as
    /// [`Reducer::order`] gave it, so that this one adds up numbers in the same order from the first iteration on. Empty where the
    /// order is to be learned from the first backward pass.
    pub order: Vec<usize>,
}

impl Default for ReducerOptions {
    fn default() -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            find_unused_parameters: false,
            gradient_as_bucket_view: false,
            static_graph: false,
            order: Vec::new(),
        }
    }
}

/// A bucket of gradients as a communication hook sees it.
#[derive(Debug)]
pub struct GradBucket<'a> {
    /// All gradients of the bucket, flat, of this rank only, not divided by the world size. The hook may write to it.
    pub buffer: &'a Tensor,
    /// The same gradients one by one: views into `buffer`, in its order, each of its parameter's shape.
    pub gradients: &'a [Tensor],
    /// Position of the bucket in the order of reduction, from 0.
    pub index: usize,
    /// Is this the last bucket of the backward pass?
    pub is_last: bool,
}

type BoxedError = Box<dyn std::error::Error + Send + Sync>;
type Hook = Box<dyn FnMut(GradBucket<'_>) -> std::result::Result<Option<Tensor>, BoxedError> + Send>;

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs.
///
/// Method: Li et al., "PyTorch Distributed", VLDB 2020. Per iteration: [`Reducer::prepare_for_forward`],
/// the forward pass, [`Reducer::prepare_for_backward`] with its outputs, the backward pass; afterwards
/// the gradients are means over ranks. An iteration without the two calls accumulates locally (`no_sync`).
pub struct Reducer {
    handle: ManuallyDrop<Handle>,
    params: Vec<Tensor>,
    find_unused_parameters: bool,
    // The reducer issues collectives on this group, so the group has to outlive it.
    group: Arc<ProcessGroup>,
}

// SAFETY: the reducer guards its state by a mutex; autograd calls it from its own threads as well.
unsafe impl Send for Reducer {}

impl Reducer {
    /// Puts hooks on `params` (leaves that require gradients, equal on all ranks). `names` appear in errors.
    pub fn new(params: &[Tensor], names: &[&str], group: Arc<ProcessGroup>, options: &ReducerOptions) -> Result<Self> {
        if params.is_empty() {
            return Err(Error::invalid(OPERATION, "found no parameter that requires a gradient, wanted at least one"));
        }
        if params.len() != names.len() {
            return Err(Error::invalid(
                OPERATION,
                format!("found {} names for {} parameters, wanted one each", names.len(), params.len()),
            ));
        }
        let order = &options.order;
        if !order.is_empty() {
            check_order(order, params.len())?;
        }
        let list = handles(params);
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr().cast()).collect();
        let lengths: Vec<usize> = names.iter().map(|name| name.len()).collect();
        let mut out = std::ptr::null_mut();
        // SAFETY: all arrays live through the call and are copied; the reducer keeps references to the tensors.
        check(OPERATION, unsafe {
            te_reducer_new(
                list.as_ptr(),
                list.len(),
                pointers.as_ptr(),
                lengths.as_ptr(),
                *group.lock(),
                options.first_bucket_bytes,
                options.bucket_bytes,
                options.find_unused_parameters,
                options.gradient_as_bucket_view,
                options.static_graph,
                order.as_ptr(),
                order.len(),
                &mut out,
            )
        })?;
        Ok(Self {
            handle: ManuallyDrop::new(out),
            params: params.iter().map(Tensor::shallow_clone).collect(),
            find_unused_parameters: options.find_unused_parameters,
            group,
        })
    }

    /// To be called before each forward pass that will be followed by a reducing backward pass.
    ///
    /// # Errors
    /// When parameters of the previous iteration never received a gradient; libtorch's text lists their indices.
    pub fn prepare_for_forward(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        check("DistributedDataParallel", unsafe { te_reducer_prepare_for_forward(*self.handle) })?;
        Ok(())
    }

    /// After the first iteration, orders the buckets as the gradients came; `true` if it did. Collective then.
    pub fn rebuild_buckets(&self) -> Result<bool> {
        let mut out = false;
        // SAFETY: the handle is alive.
        check("DistributedDataParallel", unsafe { te_reducer_rebuild_buckets(*self.handle, &mut out) })?;
        Ok(out)
    }

    /// Arms the reduction for the next backward pass. `outputs` are searched only with `find_unused_parameters`.
    pub fn prepare_for_backward(&self, outputs: &[Tensor]) -> Result<()> {
        let list = handles(outputs);
        // SAFETY: the array lives through the call.
        check("DistributedDataParallel", unsafe {
            te_reducer_prepare_for_backward(*self.handle, list.as_ptr(), list.len())
        })
    }

    /// Goes on in a window of accumulation in which these parameters have got gradients already: with `find_unused_parameters`, their
    /// gradients are reduced even if the rest of the window does not use them.
    ///
    /// # Errors
    /// A position that no parameter has.
    pub fn mark_used(&self, positions: &[usize]) -> Result<()> {
        if let Some(position) = positions.iter().find(|position| self.params.len() <= **position) {
            let found = format!("found position {position} among {} parameters", self.params.len());
            return Err(Error::invalid(OPERATION, found));
        }
        // SAFETY: the handle is alive, the array lives through the call, and its positions are those of parameters.
        check("DistributedDataParallel", unsafe {
            te_reducer_mark_used(*self.handle, positions.as_ptr(), positions.len())
        })
    }

    /// Fails if a backward pass began to reduce and parameters are still missing.
    pub fn check_finalized(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        check("DistributedDataParallel", unsafe { te_reducer_check_finalized(*self.handle) })
    }

    /// With `static_graph`, reduces everything at the end of the *first* backward pass, which only records the
    /// graph. To be called once, after that pass. `order`: positions of all parameters in the order in which their gradients came
    /// in that pass, by which the next [`rebuild_buckets`](Self::rebuild_buckets) orders the buckets. Collective.
    ///
    /// # Errors
    /// The order is not of all parameters.
    pub fn delay_all_reduce(&self, order: &[usize]) -> Result<()> {
        check_order(order, self.params.len())?;
        // SAFETY: the handle is alive, and the array lives through the call.
        check("DistributedDataParallel", unsafe {
            te_reducer_delay_all_reduce(*self.handle, order.as_ptr(), order.len())
        })
    }

    /// Takes part in a backward pass of the other ranks without one of its own (`_DDPJoinHook.main_hook` of
    /// `torch.nn.parallel.distributed`): reduces every bucket, and what ranks say of unused parameters, in the
    /// order of a backward pass. Waits. Collective.
    ///
    /// This rank's part is zeros or, with `contribution`, its own gradients multiplied by that number. The others divide
    /// by the world size, or the communication hook does; so without a hook `contribution` has to contain that
    /// division. Afterwards this rank's gradients are the reduced ones, with `keep`, or else gone if they were
    /// contributed.
    ///
    /// The first backward pass with `static_graph` cannot be taken part in.
    pub fn shadow_backward(&self, contribution: Option<f64>, keep: bool) -> Result<()> {
        let list = handles(&self.params);
        // Not locked through the call: a hook locks the group for its own collectives. The reducer itself never does.
        let group = *self.group.lock();
        // SAFETY: all handles are alive through the call.
        check("DistributedDataParallel", unsafe {
            te_reducer_shadow_backward(
                *self.handle,
                group,
                list.as_ptr(),
                list.len(),
                self.find_unused_parameters,
                contribution.unwrap_or(0.0),
                keep,
            )
        })
    }

    /// Positions of the parameters in the order in which they lie in the buckets: what
    /// [`ReducerOptions::order`] takes.
    pub fn order(&self) -> Result<Vec<usize>> {
        let list = handles(&self.params);
        let mut order = vec![0; list.len()];
        // SAFETY: the handle is alive, and both arrays have the length that is said.
        check("DistributedDataParallel", unsafe {
            te_reducer_order(*self.handle, list.as_ptr(), list.len(), order.as_mut_ptr())
        })?;
        Ok(order)
    }

    /// How many buckets the gradients are in.
    pub fn num_buckets(&self) -> Result<usize> {
        let mut out = 0;
        // SAFETY: the handle is alive.
        check("DistributedDataParallel", unsafe { te_reducer_num_buckets(*self.handle, &mut out) })?;
        Ok(out)
    }

    /// How many parameters the reducer watches.
    pub fn num_params(&self) -> usize {
        self.params.len()
    }

    /// Sends gradients as `Half` or `BFloat16` (`fp16_compress_hook`, `bf16_compress_hook` of PyTorch). Once, before
    /// the first backward.
    pub fn compress(&self, wire: Kind) -> Result<()> {
        let wire = wire_type("Reducer::compress", Some(wire))?;
        // SAFETY: both handles are alive; the hook keeps its own reference to the group.
        check("Reducer::compress", unsafe { te_reducer_compress(*self.handle, *self.group.lock(), wire) })
    }

    /// Replaces the all-reduce by `hook`, which returns the reduced bucket: the mean over ranks, flat, of the
    /// buffer's size; or `None` for the plain mean, which is then reduced while the backward pass goes on. It runs
    /// on the thread of the backward pass, bucket after bucket in the same order on all ranks, so it may issue
    /// collectives. Once, before the first backward.
    ///
    /// With `wire`, `Half` or `BFloat16`, the hook sees and returns buckets of that dtype
    /// (`fp16_compress_wrapper`, `bf16_compress_wrapper` of PyTorch).
    pub fn register_comm_hook(
        &self,
        wire: Option<Kind>,
        hook: impl FnMut(GradBucket<'_>) -> std::result::Result<Option<Tensor>, BoxedError> + Send + 'static,
    ) -> Result<()> {
        let wire = wire_type("register_comm_hook", wire)?;
        let boxed: Box<Hook> = Box::new(Box::new(hook));
        let table = HookTable { context: Box::into_raw(boxed).cast(), call: call_hook, drop: drop_hook };
        // SAFETY: both handles are alive; the shim owns the context from here on and drops it exactly once, also on failure.
        check("register_comm_hook", unsafe { te_reducer_register_hook(*self.handle, *self.group.lock(), wire, table) })
    }
}

/// The dtype on the wire as the shim reads it: -1 is the gradients' own.
fn wire_type(operation: &'static str, wire: Option<Kind>) -> Result<i32> {
    match wire {
        None => Ok(-1),
        Some(kind @ (Kind::Half | Kind::BFloat16)) => Ok(scalar_type(kind)),
        Some(other) => Err(Error::invalid(operation, format!("found {other:?}, wanted Half or BFloat16"))),
    }
}

unsafe extern "C" fn call_hook(
    context: *mut c_void,
    buffer: Handle,
    gradients: *const Handle,
    count: usize,
    index: usize,
    is_last: bool,
    result: *mut Handle,
) -> i32 {
    run_callback(|| {
        // SAFETY: the context is the `Box<Hook>` made in `register_comm_hook`; the reducer calls it from one thread at a time.
        let hook = unsafe { &mut *context.cast::<Hook>() };
        // SAFETY: libtorch lends the tensors for this call; cloning a handle makes a tensor of our own.
        let own = |raw: Handle| unsafe { Tensor::clone_from_ptr(raw.cast()) };
        let buffer = own(buffer);
        let gradients: Vec<Tensor> = match count {
            0 => Vec::new(),
            // SAFETY: the shim passes `count` handles, alive through the call.
            _ => unsafe { std::slice::from_raw_parts(gradients, count) }.iter().copied().map(own).collect(),
        };
        let Some(reduced) = hook(GradBucket { buffer: &buffer, gradients: &gradients, index, is_last })? else {
            return Ok(());
        };
        if reduced.numel() != buffer.numel() {
            return Err(format!(
                "the communication hook returned {} elements for a bucket of {}",
                reduced.numel(),
                buffer.numel()
            )
            .into());
        }
        // SAFETY: `result` is the shim's out-parameter; ownership of the tensor passes to it.
        unsafe { *result = give(reduced) };
        Ok(())
    })
}

unsafe extern "C" fn drop_hook(context: *mut c_void) {
    // SAFETY: the context is the `Box<Hook>` made in `register_comm_hook`, and the shim drops it once.
    drop(unsafe { Box::from_raw(context.cast::<Hook>()) });
}

/// Every parameter is to be there once.
fn check_order(order: &[usize], num_params: usize) -> Result<()> {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    match sorted.into_iter().eq(0..num_params) {
        true => Ok(()),
        false => Err(Error::invalid(OPERATION, format!("found an order that is not of all {num_params} parameters"))),
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // SAFETY: this handle owns the reducer and is dropped once; `group` is dropped after it.
        unsafe { te_reducer_free(*self.handle) }
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer").field("num_params", &self.params.len()).finish()
    }
}

/// The bucket of each parameter as `compute_bucket_assignment_by_size` gives it; `limits` in bytes, the last
/// one serves all further buckets.
///
/// ```
/// use tch::{Device, Kind, Tensor};
///
/// let params: Vec<_> = (0..3).map(|_| Tensor::zeros([4], (Kind::Float, Device::Cpu))).collect();
/// assert_eq!(torch_ext::compute_bucket_assignment_by_size(&params, &[16, 32])?, vec![0, 1, 1]);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn compute_bucket_assignment_by_size(params: &[Tensor], limits: &[usize]) -> Result<Vec<usize>> {
    let list = handles(params);
    let mut assignment = vec![0; params.len()];
    let mut num_buckets = 0;
    // SAFETY: `assignment` has room for one entry per parameter.
    check("compute_bucket_assignment_by_size", unsafe {
        te_bucket_assignment(
            list.as_ptr(),
            list.len(),
            limits.as_ptr(),
            limits.len(),
            assignment.as_mut_ptr(),
            &mut num_buckets,
        )
    })?;
    Ok(assignment)
}
