//! Gradient hooks: closures that run during the backward pass.

use crate::autograd::CallbackResult;
use crate::border::{Handle, borrow, check, give, handle, run_callback};
use crate::error::Result;
use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use tch::Tensor;

type DropFn = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn te_register_post_accumulate_grad_hook(
        tensor: Handle,
        data: *mut c_void,
        call: unsafe extern "C" fn(*mut c_void, Handle) -> i32,
        drop: DropFn,
    ) -> i32;
    fn te_register_hook(
        tensor: Handle,
        data: *mut c_void,
        call: unsafe extern "C" fn(*mut c_void, Handle, *mut Handle) -> i32,
        drop: DropFn,
    ) -> i32;
    fn te_queue_callback(data: *mut c_void, call: unsafe extern "C" fn(*mut c_void) -> i32, drop: DropFn) -> i32;
}

/// Answers of a hook beside -1 (failed), shared with shim/autograd.cpp.
const RAN: i32 = 0;
const REMOVED: i32 = 1;

type PostAccumulateHook = dyn FnMut(&Tensor) -> CallbackResult<()> + Send;
type GradientHook = dyn FnMut(&Tensor) -> CallbackResult<Option<Tensor>> + Send;

/// Runs `hook` each time the backward pass has added to `tensor`'s gradient, with the tensor as its argument.
///
/// The gradient is complete for this backward pass and readable with
/// [`gradient_of`](crate::autograd::gradient_of) on the argument; the hook may clear it. Several hooks
/// run in the order of their registration. The tensor keeps the hook alive, not the handle.
/// The counterpart of `Tensor.register_post_accumulate_grad_hook`.
///
/// An error or panic ends the backward pass and reaches the caller of
/// [`autograd::backward`](crate::autograd::backward). Gradients of CPU tensors arrive on the thread that called
/// `backward`, those of CUDA tensors on a thread of libtorch's: hence `Send`.
///
/// # Errors
/// The tensor is not a leaf or does not require a gradient.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use torch_ext::{autograd, hooks};
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let log = Arc::clone(&seen);
/// let hook = hooks::register_post_accumulate_grad_hook(&weight, move |weight| {
///     let gradient = autograd::gradient_of(weight)?.ok_or("no gradient")?;
///     log.lock().unwrap().push(gradient.double_value(&[]));
///     Ok(())
/// })?;
/// autograd::backward(&[&(&weight * 2.0)], None, Default::default())?;
/// hook.remove();
/// autograd::backward(&[&(&weight * 2.0)], None, Default::default())?;
/// assert_eq!(*seen.lock().unwrap(), [2.0]);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn register_post_accumulate_grad_hook(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> CallbackResult<()> + Send + 'static,
) -> Result<HookHandle> {
    let hook: Box<PostAccumulateHook> = Box::new(hook);
    let slot = Arc::new(Slot::new(hook));
    let remover: Weak<dyn Remove> = Arc::downgrade(&(Arc::clone(&slot) as Arc<dyn Remove>));
    let data = Arc::into_raw(slot).cast_mut().cast();
    // SAFETY: the shim takes `data` over in every case and drops it exactly once through the given function.
    let status = unsafe {
        te_register_post_accumulate_grad_hook(
            handle(tensor),
            data,
            call_post_accumulate,
            drop_slot::<PostAccumulateHook>,
        )
    };
    check("register_post_accumulate_grad_hook", status)?;
    Ok(HookHandle { slot: remover })
}

/// Runs `hook` with the gradient that reaches `tensor`, before it is accumulated or passed on.
///
/// The tensor may be a leaf or inside a graph. The hook returns a gradient of the same shape, kind and device
/// to use instead, or `None` to leave it; it must not change its argument in place. Hooks run in the order of
/// their registration. Threads, errors and panics as in [`register_post_accumulate_grad_hook`].
/// The counterpart of `Tensor.register_hook`.
///
/// # Errors
/// The tensor does not require a gradient.
///
/// ```
/// use torch_ext::{autograd, hooks};
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// let hook = hooks::register_hook(&weight, |gradient| Ok(Some(gradient * 10.0)))?;
/// autograd::backward(&[&(&weight * 2.0)], None, Default::default())?;
/// assert_eq!(autograd::gradient_of(&weight)?.map(|gradient| gradient.double_value(&[])), Some(20.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn register_hook(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> CallbackResult<Option<Tensor>> + Send + 'static,
) -> Result<HookHandle> {
    let hook: Box<GradientHook> = Box::new(hook);
    let slot = Arc::new(Slot::new(hook));
    let remover: Weak<dyn Remove> = Arc::downgrade(&(Arc::clone(&slot) as Arc<dyn Remove>));
    let data = Arc::into_raw(slot).cast_mut().cast();
    // SAFETY: the shim takes `data` over in every case and drops it exactly once through the given function.
    let status = unsafe { te_register_hook(handle(tensor), data, call_gradient, drop_slot::<GradientHook>) };
    check("register_hook", status)?;
    Ok(HookHandle { slot: remover })
}

/// Runs `callback` once, when the backward pass that is running now has accumulated all its gradients.
///
/// To be called from inside a backward pass: from a hook or the backward closure of a custom function. Callbacks run in
/// the order in which they were queued, on the thread that called `backward`. Not at all if the pass fails; then they
/// are dropped. An error or panic reaches the caller of [`autograd::backward`](crate::autograd::backward).
/// The counterpart of `Variable._execution_engine.queue_callback`.
///
/// # Errors
/// No backward pass is running on this thread.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use torch_ext::{autograd, hooks};
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// let log = Arc::new(Mutex::new(Vec::new()));
/// let seen = Arc::clone(&log);
/// hooks::register_hook(&weight, move |_| {
///     let seen = Arc::clone(&seen);
///     hooks::queue_callback(move || Ok(seen.lock().unwrap().push("at the end")))?;
///     Ok(None)
/// })?;
/// autograd::backward(&[&(&weight * 2.0)], None, Default::default())?;
/// assert_eq!(*log.lock().unwrap(), ["at the end"]);
/// assert!(hooks::queue_callback(|| Ok(())).is_err());
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn queue_callback(callback: impl FnOnce() -> CallbackResult<()> + Send + 'static) -> Result<()> {
    let data = Box::into_raw(Box::new(Once::Waiting(Box::new(callback)))).cast();
    // SAFETY: the shim takes `data` over in every case and drops it exactly once through the given function.
    check("queue_callback", unsafe { te_queue_callback(data, call_once, drop_once) })
}

/// A callback before and after its only call.
enum Once {
    Waiting(Box<dyn FnOnce() -> CallbackResult<()> + Send>),
    Called,
}

unsafe extern "C" fn call_once(data: *mut c_void) -> i32 {
    run_callback(|| {
        // SAFETY: C++ owns the box through the call and makes no other meanwhile.
        match std::mem::replace(unsafe { &mut *data.cast::<Once>() }, Once::Called) {
            Once::Waiting(callback) => callback(),
            Once::Called => Ok(()),
        }
    })
}

unsafe extern "C" fn drop_once(data: *mut c_void) {
    drop_without_unwinding(|| {
        // SAFETY: the pointer came from `Box::into_raw` of this type, and C++ calls this once.
        drop(unsafe { Box::from_raw(data.cast::<Once>()) });
    });
}

/// Takes a hook off its tensor again.
///
/// As in PyTorch, dropping the handle leaves the hook in place: most hooks stay as long as their tensor.
///
/// ```
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// let handle = torch_ext::hooks::register_hook(&weight, |_| Ok(None))?;
/// handle.remove();
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct HookHandle {
    slot: Weak<dyn Remove>,
}

impl HookHandle {
    /// Removes the hook and drops its closure; a running call ends first. Does nothing if the tensor is gone.
    ///
    /// A hook may remove itself, through a handle that was moved into it, or another hook.
    pub fn remove(&self) {
        if let Some(slot) = self.slot.upgrade() {
            slot.remove();
        }
    }
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookHandle").field("tensor_alive", &(self.slot.strong_count() > 0)).finish()
    }
}

/// The place of one closure, shared by the C++ hook object (strong) and the handle (weak).
struct Slot<F: ?Sized> {
    removed: AtomicBool,
    /// Number of the thread that runs the closure, 0 for none: tells recursion from contention.
    runner: AtomicU64,
    closure: Mutex<Option<Box<F>>>,
}

trait Remove: Send + Sync {
    fn remove(&self);
}

impl<F: ?Sized + Send> Remove for Slot<F> {
    fn remove(&self) {
        self.removed.store(true, Ordering::SeqCst);
        // If it runs right now, whoever runs it drops the closure afterwards.
        let closure = match self.closure.try_lock() {
            Ok(mut closure) => closure.take(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
            Err(TryLockError::WouldBlock) => None,
        };
        // Dropped after the lock is released: what it captured may end up here again.
        drop(closure);
    }
}

impl<F: ?Sized> Slot<F> {
    fn new(closure: Box<F>) -> Self {
        Self { removed: AtomicBool::new(false), runner: AtomicU64::new(0), closure: Mutex::new(Some(closure)) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<F>>> {
        self.closure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the closure unless it is removed; `None` says that it is.
    fn run<R>(&self, call: impl FnOnce(&mut F) -> CallbackResult<R>) -> CallbackResult<Option<R>> {
        let thread = thread_number();
        if self.runner.load(Ordering::SeqCst) == thread {
            return Err("a gradient hook started a backward pass that runs the same hook again".into());
        }
        let mut closure = self.lock();
        let result = match closure.as_deref_mut() {
            Some(hook) if !self.removed.load(Ordering::SeqCst) => {
                self.runner.store(thread, Ordering::SeqCst);
                let _idle = OnDrop(|| self.runner.store(0, Ordering::SeqCst));
                call(hook).map(Some)
            }
            _ => Ok(None),
        };
        let dropped = self.removed.load(Ordering::SeqCst).then(|| closure.take());
        drop(closure);
        drop(dropped);
        result
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A small number of its own for every thread, never 0.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.try_with(|number| *number).unwrap_or(u64::MAX)
}

unsafe extern "C" fn call_post_accumulate(data: *mut c_void, tensor: Handle) -> i32 {
    let mut answer = RAN;
    let status = run_callback(|| {
        // SAFETY: C++ owns one strong reference to the slot through the whole call, and lends the tensor.
        let (slot, tensor) = unsafe { (&*data.cast::<Slot<PostAccumulateHook>>(), borrow(tensor)) };
        if slot.run(|hook| hook(&tensor))?.is_none() {
            answer = REMOVED;
        }
        Ok(())
    });
    if status == 0 { answer } else { status }
}

unsafe extern "C" fn call_gradient(data: *mut c_void, gradient: Handle, result: *mut Handle) -> i32 {
    let mut answer = RAN;
    let status = run_callback(|| {
        // SAFETY: as above.
        let (slot, gradient) = unsafe { (&*data.cast::<Slot<GradientHook>>(), borrow(gradient)) };
        match slot.run(|hook| hook(&gradient))? {
            // SAFETY: `result` is a valid out-parameter; the shim takes the tensor over.
            Some(Some(replacement)) => unsafe { *result = give(replacement) },
            Some(None) => {}
            None => answer = REMOVED,
        }
        Ok(())
    });
    if status == 0 { answer } else { status }
}

unsafe extern "C" fn drop_slot<F: ?Sized>(data: *mut c_void) {
    drop_without_unwinding(|| {
        // SAFETY: the pointer came from `Arc::into_raw` of this type, and C++ calls this once.
        drop(unsafe { Arc::from_raw(data.cast::<Slot<F>>()) });
    });
}

/// Runs the drop of a Rust object that a C++ destructor ends, where nothing may unwind.
///
/// The panic hook has printed the message by then; the panic itself has nowhere to go.
pub(crate) fn drop_without_unwinding(body: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(body));
}
