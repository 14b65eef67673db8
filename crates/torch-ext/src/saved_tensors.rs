//! Default saved-tensor hooks: what an operation saves for its backward pass can be replaced by a token.
//!
//! libtorch offers these hooks to Python alone. Here they work through an engine of our own, a subclass of
//! `torch::autograd::Engine` that only answers the question which hooks a tensor to be saved gets. The first
//! use of this module makes it the process's default engine, for good; everything else is inherited, so backward
//! passes, threads and nested passes behave as before, and without hooks the price per saved tensor is the
//! look at two thread-local numbers. In a Python process Python's own engine holds that place: do not mix.

use crate::autograd::CallbackResult;
use crate::border::{CallbackFailure, Handle, borrow, check, give, run_callback, take_callback_failure};
use crate::error::Result;
use crate::hooks::drop_without_unwinding;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Once;
use tch::Tensor;

unsafe extern "C" {
    fn te_saved_tensors_install(
        pack: unsafe extern "C" fn(Handle, *mut *mut c_void) -> i32,
        unpack: unsafe extern "C" fn(*mut c_void, *mut Handle) -> i32,
        drop: unsafe extern "C" fn(*mut c_void),
    ) -> i32;
    fn te_saved_tensors_set_pushed(pushed: usize);
}

/// Decides what the graph keeps of a tensor that an operation saves for its backward pass.
///
/// ```
/// use std::rc::Rc;
/// use tch::{Kind, Tensor};
/// use torch_ext::autograd::{self, CallbackResult};
/// use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken, with_saved_tensor_hooks};
///
/// /// Keeps saved tensors in half precision.
/// struct Compress;
/// struct Compressed(Tensor, Kind);
/// impl SavedTensorHooks for Compress {
///     fn pack(&self, tensor: &Tensor) -> Packed {
///         Packed::Token(Box::new(Compressed(tensor.to_kind(Kind::BFloat16), tensor.kind())))
///     }
/// }
/// impl SavedToken for Compressed {
///     fn unpack(&self) -> CallbackResult<Tensor> {
///         Ok(self.0.f_to_kind(self.1)?)
///     }
/// }
///
/// let x = Tensor::from(3f32).set_requires_grad(true);
/// let y = with_saved_tensor_hooks(Rc::new(Compress), || &x * &x)?;
/// autograd::backward(&[&y], None, Default::default())?;
/// assert_eq!(autograd::gradient_of(&x)?.map(|gradient| gradient.double_value(&[])), Some(6.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub trait SavedTensorHooks {
    /// Called once for each tensor saved, on the thread of the forward pass, without recording gradients and
    /// without these hooks.
    ///
    /// It must not change the tensor in place. [`storage_id`](crate::storage::storage_id) tells whose memory it is.
    /// A panic ends the operation that saves; [`with_saved_tensor_hooks`] raises it again.
    fn pack(&self, tensor: &Tensor) -> Packed;
}

/// What the graph keeps of a saved tensor.
pub enum Packed {
    /// The tensor itself, as without hooks. A change in place before the backward pass is still found.
    Keep,
    /// Something it can be made from again. The graph does not hold the tensor's memory.
    Token(Box<dyn SavedToken>),
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "Keep",
            Self::Token(_) => "Token(..)",
        })
    }
}

/// Stands for a saved tensor in the graph.
///
/// It is dropped as soon as its node has run without `retain_graph`, or with the graph, on whichever thread
/// that happens. `Send` is enough: libtorch holds the node's lock while it unpacks or drops.
pub trait SavedToken: Send {
    /// Makes the tensor again: same shape, kind and, for kernels that look, same strides.
    ///
    /// Called once for each backward pass through the node, on the thread that runs it. An error ends the
    /// backward pass, as does a tensor of another shape or kind.
    fn unpack(&self) -> CallbackResult<Tensor>;
}

/// Runs `body` with `hooks` on this thread. Inner calls replace outer ones for their duration.
///
/// # Panics
/// Raises a panic of [`SavedTensorHooks::pack`] again, also when tch turned it into an error or a panic of its own.
///
/// See [`SavedTensorHooks`] for an example.
pub fn with_saved_tensor_hooks<R>(hooks: Rc<dyn SavedTensorHooks>, body: impl FnOnce() -> R) -> Result<R> {
    let guard = push_saved_tensor_hooks(hooks)?;
    // Whatever is still there belongs to an earlier call that nobody asked about.
    drop(take_callback_failure());
    let result = catch_unwind(AssertUnwindSafe(body));
    drop(guard);
    if let Some(CallbackFailure::Panic(payload)) = take_callback_failure() {
        resume_unwind(payload);
    }
    result.or_else(|payload| resume_unwind(payload))
}

/// Puts `hooks` in charge of this thread until the guard is dropped; for scopes that are not one closure.
///
/// A panic of [`SavedTensorHooks::pack`] surfaces as an error of the operation that saved; its message is printed,
/// its payload is lost. Prefer [`with_saved_tensor_hooks`].
///
/// ```
/// use std::rc::Rc;
/// use torch_ext::saved_tensors::{Packed, SavedTensorHooks, push_saved_tensor_hooks};
/// struct KeepAll;
/// impl SavedTensorHooks for KeepAll {
///     fn pack(&self, _: &tch::Tensor) -> Packed { Packed::Keep }
/// }
/// let guard = push_saved_tensor_hooks(Rc::new(KeepAll))?;
/// let x = tch::Tensor::from(3f32).set_requires_grad(true);
/// let y = &x * &x;
/// drop(guard);
/// torch_ext::autograd::backward(&[&y], None, Default::default())?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn push_saved_tensor_hooks(hooks: Rc<dyn SavedTensorHooks>) -> Result<SavedTensorHooksGuard> {
    install()?;
    let entry = STACK.with(|stack| {
        let mut stack = stack.borrow_mut();
        stack.pushed += 1;
        let entry = stack.pushed;
        stack.entries.push((entry, hooks));
        // SAFETY: a number of this thread.
        unsafe { te_saved_tensors_set_pushed(stack.entries.len()) };
        entry
    });
    Ok(SavedTensorHooksGuard { entry, this_thread: PhantomData })
}

/// Takes its hooks away when dropped. The hooks pushed last are in charge, whatever the order of the drops.
#[must_use = "the hooks are taken away when the guard is dropped"]
pub struct SavedTensorHooksGuard {
    entry: u64,
    /// The stack belongs to one thread.
    this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for SavedTensorHooksGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedTensorHooksGuard").finish_non_exhaustive()
    }
}

impl Drop for SavedTensorHooksGuard {
    fn drop(&mut self) {
        // When the thread ends, its stack may be gone already.
        let removed = STACK.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            let place = stack.entries.iter().position(|(entry, _)| *entry == self.entry)?;
            let hooks = stack.entries.remove(place);
            // SAFETY: a number of this thread.
            unsafe { te_saved_tensors_set_pushed(stack.entries.len()) };
            Some(hooks)
        });
        // Outside the borrow: dropping the hooks may run anything.
        drop(removed);
    }
}

#[derive(Default)]
struct Stack {
    pushed: u64,
    entries: Vec<(u64, Rc<dyn SavedTensorHooks>)>,
}

thread_local! {
    static STACK: RefCell<Stack> = RefCell::default();
}

fn install() -> Result<()> {
    static INSTALL: Once = Once::new();
    let mut status = 0;
    INSTALL.call_once(|| {
        // SAFETY: the functions live as long as the process.
        status = unsafe { te_saved_tensors_install(pack, unpack, drop_token) };
    });
    check("saved_tensor_hooks", status)
}

unsafe extern "C" fn pack(tensor: Handle, token: *mut *mut c_void) -> i32 {
    run_callback(|| {
        let Some(hooks) = STACK.with(|stack| stack.borrow().entries.last().map(|(_, hooks)| Rc::clone(hooks))) else {
            return Ok(());
        };
        // SAFETY: C++ lends the tensor for the call.
        let tensor = unsafe { borrow(tensor) };
        if let Packed::Token(boxed) = hooks.pack(&tensor) {
            // A box of a box: a trait object's pointer is two words, C++ keeps one.
            // SAFETY: `token` is a valid out-parameter; C++ drops it through `drop_token`.
            unsafe { *token = Box::into_raw(Box::new(boxed)).cast() };
        }
        Ok(())
    })
}

unsafe extern "C" fn unpack(token: *mut c_void, result: *mut Handle) -> i32 {
    run_callback(|| {
        // SAFETY: the pointer was made by `pack` and is not dropped yet; the node's lock keeps others away.
        let token = unsafe { &*token.cast::<Box<dyn SavedToken>>() };
        let tensor = token.unpack()?;
        // SAFETY: `result` is a valid out-parameter; the shim takes the tensor over.
        unsafe { *result = give(tensor) };
        Ok(())
    })
}

unsafe extern "C" fn drop_token(token: *mut c_void) {
    // SAFETY: made by `pack`, dropped once.
    drop_without_unwinding(|| drop(unsafe { Box::from_raw(token.cast::<Box<dyn SavedToken>>()) }));
}
