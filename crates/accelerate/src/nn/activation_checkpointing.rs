//! Activations that are computed again in the backward pass in place of being kept.
//!
//! Method: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, as `torch.utils.checkpoint` does it with
//! `use_reentrant=False`: what operations save becomes a token, and the first token that the backward pass looks at runs the
//! segment once more.

use super::layer::Layer;
use super::{Param, Path};
use crate::error::{Error, NnError, Result};
use std::borrow::Borrow;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Tensor};
use torch_ext::autocast::{autocast_dtype, is_autocast_enabled, is_cache_enabled};
use torch_ext::autograd::{CallbackResult, is_grad_enabled, version};
use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken, with_saved_tensor_hooks};
use torch_ext::{Autocast, Generator};

/// How [`checkpoint`] recomputes.
///
/// ```
/// use accelerate::nn::CheckpointOptions;
/// let options = CheckpointOptions { offload_to_cpu: true, ..Default::default() };
/// assert!(options.preserve_rng_state);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// Draw the same random numbers again, as dropout needs it. Default true.
    pub preserve_rng_state: bool,
    /// Keep the inputs of the segment in the memory of the CPU until then. Default false.
    pub offload_to_cpu: bool,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self { preserve_rng_state: true, offload_to_cpu: false }
    }
}

/// Calls `function` on `inputs`, and keeps the inputs in place of what its operations save: the backward pass calls it
/// once more (`torch.utils.checkpoint.checkpoint` with `use_reentrant=False`).
///
/// Gradients are those of a plain call, also of parameters and other tensors that `function` captures. The second call gets
/// the same random numbers and runs under the same autocast. What a sharded model gathers for it, the backward pass would have
/// gathered anyway. Without gradients it is a plain call. Captured tensors that are neither inputs nor [`Param`]s must not be
/// written to before the backward pass: nobody compares them.
///
/// # Errors
/// Those of `function`. Out of the backward pass: an input or a [`Param`] was changed since, or the second call did not save
/// what the first one did.
///
/// ```
/// use accelerate::nn::{Linear, ParamStore, checkpoint};
/// use accelerate::tch::{Device, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let linear = Linear::new(store.root(), 2, 2, Default::default())?;
/// let block = linear.clone();
/// let input = Tensor::from_slice(&[1f32, -2.0]);
/// let gelu = move |inputs: &[Tensor]| Ok(block.forward(&inputs[0])?.f_gelu("none")?);
/// let output = checkpoint(&[&input], Default::default(), gelu)?;
/// output.sum(None).backward();
/// assert!(linear.weight.grad().is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// ```
/// use accelerate::nn::{CheckpointOptions, checkpoint};
/// use accelerate::tch::Tensor;
///
/// let x = Tensor::from(2f32).set_requires_grad(true);
/// let options = CheckpointOptions { preserve_rng_state: false, ..Default::default() };
/// let y = checkpoint(&[&x], options, |inputs| Ok(inputs[0].f_square()?.f_exp()?))?;
/// y.backward();
/// assert!((x.grad().double_value(&[]) - 4.0 * 4f64.exp()).abs() < 1e-3);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn checkpoint(
    inputs: &[&Tensor],
    options: CheckpointOptions,
    function: impl Fn(&[Tensor]) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let own: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
    if !is_grad_enabled() {
        return function(&own);
    }
    let segment = Arc::new(Segment {
        kept: Mutex::new(Kept {
            inputs: inputs.iter().map(|input| Input::keep(input, options.offload_to_cpu)).collect::<Result<_>>()?,
            surroundings: Surroundings::here(inputs.first().map_or(Device::Cpu, |input| input.device()), &options)?,
            params: Vec::new(),
            function: Box::new(function),
        }),
        num_saved: AtomicUsize::new(0),
        has_output: AtomicBool::new(false),
        recomputed: Mutex::default(),
    });
    let scope = Scope::enter(Run::First(Vec::new()));
    let output = {
        let kept = segment.kept();
        with_saved_tensor_hooks(Rc::new(Recording(Arc::clone(&segment))), || (kept.function)(&own))?
    };
    if let Run::First(params) = scope.leave() {
        segment.kept().params = params;
    }
    segment.has_output.store(true, Ordering::Release);
    output
}

/// A layer that is [`checkpoint`]ed where its store asks for it ([`ParamStore::gradient_checkpointing_enable`],
/// `activation_checkpointing` of a [`FullyShardedDataParallelPlugin`](crate::FullyShardedDataParallelPlugin)).
///
/// ```
/// use accelerate::nn::{Checkpointed, Linear, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let block = Checkpointed::new(store.root() / "block", |path| Linear::new(path, 2, 2, Default::default()))?;
/// store.gradient_checkpointing_enable(Default::default())?;
/// let output = block.forward(&Tensor::ones([2], (Kind::Float, Device::Cpu)))?;
/// output.sum(None).backward();
/// assert!(block.layer.weight.grad().is_some() && store.get("block.weight").is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// [`ParamStore::gradient_checkpointing_enable`]: crate::nn::ParamStore::gradient_checkpointing_enable
#[derive(Clone, Debug)]
pub struct Checkpointed<L> {
    /// The layer itself.
    pub layer: Arc<L>,
    switch: CheckpointingSwitch,
}

/// How layers of a store are checkpointed, if they are; shared by all of them.
pub(super) type CheckpointingSwitch = Arc<Mutex<Option<CheckpointOptions>>>;

impl<L: Send + Sync + 'static> Checkpointed<L> {
    /// Builds the layer under `path`; its parameters have the names that they would have without this.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn new(path: impl Borrow<Path>, make: impl FnOnce(&Path) -> Result<L>) -> Result<Self> {
        let path = path.borrow();
        Ok(Self { layer: Arc::new(make(path)?), switch: path.store().checkpointing_switch() })
    }

    /// `call` of the layer and `inputs`, for a layer that takes more than one tensor: a mask, positions.
    ///
    /// ```
    /// use accelerate::nn::{Checkpointed, Linear, ParamStore};
    /// use accelerate::tch::{Device, Kind, Tensor};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let block = Checkpointed::new(store.root() / "block", |path| Linear::new(path, 2, 2, Default::default()))?;
    /// store.gradient_checkpointing_enable(Default::default())?;
    /// let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
    /// let output = block.call(&[&ones, &ones], |layer, inputs| layer.forward(&inputs[0].f_add(&inputs[1])?))?;
    /// output.sum(None).backward();
    /// assert!(block.layer.weight.grad().is_some());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `call` and of [`checkpoint`].
    pub fn call(
        &self,
        inputs: &[&Tensor],
        call: impl Fn(&L, &[Tensor]) -> Result<Tensor> + Send + 'static,
    ) -> Result<Tensor> {
        let options = *self.switch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(options) = options else {
            let inputs: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
            return call(&self.layer, &inputs);
        };
        let layer = Arc::clone(&self.layer);
        checkpoint(inputs, options, move |inputs| call(&layer, inputs))
    }
}

impl<L: Layer + Sync + 'static> Checkpointed<L> {
    /// The layer's output.
    ///
    /// # Errors
    /// Those of the layer and of [`checkpoint`].
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.call(&[input], |layer, inputs| layer.forward(&inputs[0]))
    }
}

impl<L: Layer + Sync + 'static> Layer for Checkpointed<L> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Checkpointed::forward(self, input)
    }
}

/// What is computed twice.
struct Segment {
    kept: Mutex<Kept>,
    /// How many tensors its operations have saved.
    num_saved: AtomicUsize,
    /// Is the first call over?
    has_output: AtomicBool,
    /// These, after the second call, until somebody asks for them.
    recomputed: Mutex<Vec<Option<Tensor>>>,
}

type Function = dyn Fn(&[Tensor]) -> Result<Tensor> + Send;

struct Kept {
    inputs: Vec<Input>,
    surroundings: Surroundings,
    /// The parameters that were asked for, and how often each had been written to.
    params: Vec<(Param, i64)>,
    function: Box<Function>,
}

impl Segment {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recomputed(&self) -> MutexGuard<'_, Vec<Option<Tensor>>> {
        self.recomputed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recompute(&self) -> Result<()> {
        if !self.has_output.load(Ordering::Acquire) {
            return Err(NnError::DifferentiatedWithin.into());
        }
        let kept = self.kept();
        kept.check_unchanged()?;
        let inputs: Vec<Tensor> = kept.inputs.iter().map(Input::again).collect::<Result<_>>()?;
        let replay = Rc::new(Replay::default());
        let scope = Scope::enter(Run::Second(Vec::new()));
        let hooks: Rc<dyn SavedTensorHooks> = Rc::clone(&replay) as Rc<dyn SavedTensorHooks>;
        let outcome = kept.surroundings.run(|| with_saved_tensor_hooks(hooks, || (kept.function)(&inputs)));
        if let Run::Second(at_end) = scope.leave() {
            at_end.into_iter().for_each(|run| run());
        }
        let _output = outcome???;
        let tensors = replay.0.take();
        let (wanted, found) = (self.num_saved.load(Ordering::Relaxed), tensors.len());
        if wanted != found {
            return Err(NnError::RecomputedOtherwise { wanted, found }.into());
        }
        *self.recomputed() = tensors.into_iter().map(Some).collect();
        Ok(())
    }
}

impl Kept {
    fn check_unchanged(&self) -> Result<()> {
        for (index, input) in self.inputs.iter().enumerate() {
            if version(&input.tensor)? != input.version {
                return Err(NnError::ChangedBeforeRecomputing { what: format!("input {index}") }.into());
            }
        }
        for (param, before) in &self.params {
            if version(&param.local())? != *before {
                return Err(NnError::ChangedBeforeRecomputing { what: format!("\"{}\"", param.name()) }.into());
            }
        }
        Ok(())
    }
}

/// An input of a segment, outside of the graph.
struct Input {
    tensor: Tensor,
    version: i64,
    requires_grad: bool,
    device: Device,
}

impl Input {
    fn keep(input: &Tensor, offload_to_cpu: bool) -> Result<Self> {
        let detached = input.f_detach()?;
        let tensor = if offload_to_cpu { detached.f_to(Device::Cpu)? } else { detached };
        let version = version(&tensor)?;
        Ok(Self { tensor, version, requires_grad: input.requires_grad(), device: input.device() })
    }

    fn again(&self) -> Result<Tensor> {
        Ok(self.tensor.f_to(self.device)?.f_detach()?.f_set_requires_grad(self.requires_grad)?)
    }
}

/// What else the outcome of a call depends on.
struct Surroundings {
    autocast: Autocast,
    /// The default generator of the device and its state.
    random: Option<(Generator, Tensor)>,
}

impl Surroundings {
    fn here(device: Device, options: &CheckpointOptions) -> Result<Self> {
        let autocast = Autocast {
            device,
            kind: autocast_dtype(device)?,
            enabled: is_autocast_enabled(device)?,
            cache_enabled: is_cache_enabled(),
        };
        let random = match options.preserve_rng_state {
            true => {
                let generator = Generator::default_for(device)?;
                let state = generator.state()?;
                Some((generator, state))
            }
            false => None,
        };
        Ok(Self { autocast, random })
    }

    /// Runs `body` in these surroundings with gradients, and leaves everything as it was.
    fn run<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        let present = self.random.as_ref().map(|(generator, state)| {
            let present = generator.state()?;
            generator.set_state(state)?;
            Ok::<_, Error>((generator, present))
        });
        let present = present.transpose()?;
        let outcome = self.autocast.run(|| tch::with_grad(body));
        if let Some((generator, state)) = present {
            generator.set_state(&state)?;
        }
        Ok(outcome?)
    }
}

/// During the first call: everything that is saved becomes a token.
struct Recording(Arc<Segment>);

impl SavedTensorHooks for Recording {
    fn pack(&self, _tensor: &Tensor) -> Packed {
        let index = self.0.num_saved.fetch_add(1, Ordering::Relaxed);
        Packed::Token(Box::new(Slot { segment: Arc::clone(&self.0), index }))
    }
}

/// During the second call: the same tensors in the same order, and nothing for a graph that nobody goes through.
#[derive(Default)]
struct Replay(RefCell<Vec<Tensor>>);

impl SavedTensorHooks for Replay {
    fn pack(&self, tensor: &Tensor) -> Packed {
        self.0.borrow_mut().push(tensor.detach());
        Packed::Token(Box::new(Unused))
    }
}

struct Unused;

impl SavedToken for Unused {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Err("a graph that was made only for what it saves has no backward pass".into())
    }
}

/// Stands for the `index`-th tensor that a segment's operations have saved.
struct Slot {
    segment: Arc<Segment>,
    index: usize,
}

impl Slot {
    fn take(&self) -> Option<Tensor> {
        self.segment.recomputed().get_mut(self.index).and_then(Option::take)
    }
}

impl SavedToken for Slot {
    fn unpack(&self) -> CallbackResult<Tensor> {
        if let Some(tensor) = self.take() {
            return Ok(tensor);
        }
        self.segment.recompute()?;
        self.take().ok_or_else(|| "a saved tensor was not made again".into())
    }
}

thread_local! {
    /// The segments that this thread is in, innermost last.
    static SCOPES: RefCell<Vec<Run>> = const { RefCell::new(Vec::new()) };
}

/// Of a segment's function.
enum Run {
    /// Parameters that it asks for.
    First(Vec<(Param, i64)>),
    /// What to do at its end.
    Second(Vec<Box<dyn FnOnce()>>),
}

/// A segment that this thread is in, until this is dropped.
struct Scope;

impl Scope {
    fn enter(call: Run) -> Self {
        SCOPES.with_borrow_mut(|scopes| scopes.push(call));
        Self
    }

    fn leave(self) -> Run {
        let call = SCOPES.with_borrow_mut(Vec::pop);
        std::mem::forget(self);
        call.unwrap_or(Run::First(Vec::new()))
    }
}

impl Drop for Scope {
    /// After a panic.
    fn drop(&mut self) {
        let call = SCOPES.with_borrow_mut(Vec::pop);
        if let Some(Run::Second(ends)) = call {
            ends.into_iter().for_each(|end| end());
        }
    }
}

/// Notes that a parameter is used, if a segment is being recorded.
pub(super) fn note_use(param: &Param) {
    let is_recording = SCOPES.with_borrow(|scopes| matches!(scopes.last(), Some(Run::First(_))));
    // A parameter's version is asked for while nothing here is borrowed.
    if is_recording && let Ok(version) = version(&param.local()) {
        SCOPES.with_borrow_mut(|scopes| {
            if let Some(Run::First(params)) = scopes.last_mut() {
                params.push((param.clone(), version));
            }
        });
    }
}

/// Is this thread in a segment that is computed twice?
pub(crate) fn while_checkpointing() -> bool {
    SCOPES.with_borrow(|scopes| !scopes.is_empty())
}

/// Is this thread computing activations again?
pub(crate) fn is_recomputing() -> bool {
    SCOPES.with_borrow(|scopes| scopes.iter().any(|run| matches!(run, Run::Second(_))))
}

/// Is this thread computing activations again? Then `at_end` is run when it has done that.
pub(crate) fn while_recomputing(at_end: impl FnOnce() + 'static) -> bool {
    SCOPES.with_borrow_mut(|scopes| match scopes.last_mut() {
        Some(Run::Second(ends)) => {
            ends.push(Box::new(at_end));
            true
        }
        _ => false,
    })
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("num_saved", &self.num_saved).finish_non_exhaustive()
    }
}
