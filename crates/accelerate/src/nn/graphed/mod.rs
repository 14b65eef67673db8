//! Models whose passes are recorded as graphs of the device and replayed: one launch for each direction.

mod compare;
mod passes;
mod recorded;
mod recorder;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use recorder::{CudaGraphs, Recorder};

use super::compiled::{FromTensors, tensors_of};
use super::{Module, Param, ParamStore};
use crate::error::{NnError, Result};
use accelerate_core::config::Compilation;
use compare::{Comparison, Stored};
use passes::{Key, Pass, pass};
use recorded::Recorded;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Kind, Tensor};
use torch_ext::apply_function;
use torch_ext::autocast::{Autocast, autocast_dtype, is_autocast_enabled};
use torch_ext::autograd::is_grad_enabled;

const MODULE: &str = "GraphedModule";

/// A model whose forward and backward passes in training mode are CUDA graphs: what `prepare` takes where
/// [`TorchDynamoPlugin`](crate::TorchDynamoPlugin) has the backend `cudagraphs`.
///
/// The first pass is made three times on a stream apart, then recorded, one graph for each direction, with inputs at fixed places and
/// memory of its own. The first three replays are compared with passes of the model itself, with the same random numbers and other
/// values of the parameters: outputs, gradients of all parameters, buffers. Where they differ, the pass is an error, and all later ones are
/// made by the model itself. Passes without gradients, in evaluation mode, with inputs that want gradients, or with inputs of other shapes
/// than the first, are the model's own too. So are those whose results are not all finite while comparing goes on.
///
/// Outputs and gradients are copies, which the next pass does not change. A backward pass has to come before the next forward
/// pass, and only once. A parameter that is stored elsewhere than before lets the model be recorded anew.
///
/// What no comparison can find: a forward pass that decides something on the host which changes only later, such as by the number
/// of the step.
///
/// Method: `torch.cuda.make_graphed_callables`.
///
/// ```
/// use accelerate::nn::{GraphedModule, Linear, ModuleFn, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let linear = Linear::new(store.root(), 2, 1, Default::default())?;
/// let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
/// assert!(GraphedModule::new(model).is_err()); // there is no graph of a CPU's work
/// # use accelerate::nn::Module;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct GraphedModule<M, R: Recorder = CudaGraphs> {
    model: M,
    recorder: R,
    /// Backward passes of a device run on a thread of libtorch's.
    recorded: RefCell<Option<Arc<Mutex<Recorded<R>>>>>,
    is_off: Cell<bool>,
    num_replays: Cell<usize>,
}

impl<M: Module> GraphedModule<M> {
    /// Of a model whose parameters are on a CUDA device.
    ///
    /// # Errors
    /// Those of [`CudaGraphs::new`].
    pub fn new(model: M) -> Result<Self> {
        let recorder = CudaGraphs::new(model.params().device())?;
        Ok(Self::with_recorder(model, recorder))
    }
}

impl<M: Module, R: Recorder> GraphedModule<M, R> {
    fn with_recorder(model: M, recorder: R) -> Self {
        Self { model, recorder, recorded: RefCell::new(None), is_off: Cell::new(false), num_replays: Cell::new(0) }
    }

    /// How many forward passes were replays whose outputs went to the caller.
    pub fn num_replays(&self) -> usize {
        self.num_replays.get()
    }

    /// Has a comparison found a difference, so that all passes are the model's own?
    pub fn is_off(&self) -> bool {
        self.is_off.get()
    }
}

impl<M, R> GraphedModule<M, R>
where
    M: Module,
    M::Input: FromTensors,
    M::Output: FromTensors,
    R: Recorder,
{
    /// One pass of the model itself. Casts of parameters are not kept: a graph would go on with those that it found.
    fn eager(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let device = self.model.params().device();
        let again = M::Input::from_tensors(inputs.iter().map(Tensor::shallow_clone).collect());
        let input = again.ok_or(NnError::GraphedTree { what: "input" })?;
        let forward = || Ok(tensors_of(&self.model.forward(&input)?));
        match autocast_of(device)? {
            Some(kind) => Autocast { device, kind, enabled: true, cache_enabled: false }.run(forward)?,
            None => forward(),
        }
    }

    fn record(&self, key: Key, stored: &Stored, inputs: &[Tensor]) -> Result<Arc<Mutex<Recorded<R>>>> {
        // Its memory goes before more is taken.
        self.recorded.replace(None);
        let before = stored.now()?;
        let recorded = self.recorder.fresh().and_then(|recorder| {
            Recorded::new(key, recorder, &stored.parameters, inputs, &mut |inputs| self.eager(inputs))
        });
        stored.put_back(&before)?;
        let recorded = recorded.map_err(|source| NnError::GraphNotRecorded { source: Box::new(source) })?;
        let recorded = Arc::new(Mutex::new(recorded));
        self.recorded.replace(Some(Arc::clone(&recorded)));
        Ok(recorded)
    }

    /// Both ways, with everything as it was afterwards.
    fn compare(&self, recorded: &mut Recorded<R>, stored: &Stored, inputs: &[Tensor]) -> Result<Comparison> {
        recorded.put_inputs(inputs)?;
        let before = stored.now()?;
        let outcome = stored.with_other_parameters(&before, || {
            compare::both(recorded, stored, &before, &mut |inputs| self.eager(inputs))
        });
        stored.put_back(&before)?;
        outcome
    }

    /// The pass as one node of the graph of gradients.
    fn replay(&self, shared: &Arc<Mutex<Recorded<R>>>, stored: &Stored, inputs: &[Tensor]) -> Result<M::Output> {
        let params: Vec<&Tensor> = stored.parameters.iter().collect();
        let turn = Arc::new(Mutex::new(0));
        let (own, of_backward, for_backward) = (Arc::clone(shared), Arc::clone(shared), Arc::clone(&turn));
        let outputs = apply_function(
            MODULE,
            &params,
            |context| {
                context.once_differentiable();
                let mut recorded = lock(&own);
                recorded.put_inputs(inputs)?;
                *lock(&turn) = recorded.forward(&mut |inputs| self.eager(inputs))?;
                let outputs = recorded.copied_outputs()?;
                for (output, is_differentiable) in outputs.iter().zip(recorded.are_differentiable()) {
                    if !is_differentiable {
                        context.mark_non_differentiable(output);
                    }
                }
                Ok(outputs)
            },
            move |context, of_outputs| {
                let mut recorded = lock(&of_backward);
                recorded.take_turn(*lock(&for_backward))?;
                let gradients = recorded.backward(&of_outputs)?;
                let needed = |(index, gradient)| if context.needs_input_grad(index) { gradient } else { None };
                Ok(gradients.into_iter().enumerate().map(needed).collect())
            },
        )?;
        self.num_replays.set(self.num_replays.get() + 1);
        Ok(M::Output::from_tensors(outputs).ok_or(NnError::GraphedTree { what: "output" })?)
    }

    fn is_training(&self, inputs: &[Tensor]) -> bool {
        self.model.params().is_training() && is_grad_enabled() && !inputs.iter().any(Tensor::requires_grad)
    }
}

impl<M, R> Module for GraphedModule<M, R>
where
    M: Module,
    M::Input: FromTensors,
    M::Output: FromTensors,
    R: Recorder,
{
    type Input = M::Input;
    type Output = M::Output;

    fn forward(&self, input: &M::Input) -> Result<M::Output> {
        let inputs = tensors_of(input);
        if self.is_off.get() || !self.is_training(&inputs) {
            return self.model.forward(input);
        }
        let stored = Stored::of(self.model.params())?;
        let key = key(self.model.params(), &stored, &inputs)?;
        let known = self.recorded.borrow().clone();
        let pass = {
            let recorded = known.as_deref().map(lock);
            pass(recorded.as_ref().map(|recorded| (&recorded.key, recorded.num_compared)), &key)
        };
        let shared = match (pass, known) {
            (Pass::Eager, _) => return self.model.forward(input),
            (Pass::Compare | Pass::Replay, Some(known)) => known,
            _ => self.record(key, &stored, &inputs).inspect_err(|_| self.is_off.set(true))?,
        };
        if pass != Pass::Replay {
            let mut recorded = lock(&shared);
            match self.compare(&mut recorded, &stored, &inputs)? {
                Comparison::Same => recorded.num_compared += 1,
                Comparison::NotFinite => return self.model.forward(input),
                Comparison::Differs { what, by, most } => {
                    self.is_off.set(true);
                    return Err(NnError::GraphDiffers { what, by, most }.into());
                }
            }
        }
        self.replay(&shared, &stored, &inputs)
    }

    fn params(&self) -> &ParamStore {
        self.model.params()
    }

    fn compilation(&self) -> Compilation {
        Compilation::CudaGraphs
    }
}

impl<M: fmt::Debug, R: Recorder> fmt::Debug for GraphedModule<M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(MODULE).field("model", &self.model).field("is_off", &self.is_off).finish_non_exhaustive()
    }
}

// Every statement leaves what is behind it whole, or the turn of the pass is over.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn autocast_of(device: tch::Device) -> Result<Option<Kind>> {
    Ok(if is_autocast_enabled(device)? { Some(autocast_dtype(device)?) } else { None })
}

fn key(store: &ParamStore, stored: &Stored, inputs: &[Tensor]) -> Result<Key> {
    let input = |input: &Tensor| Ok((input.size(), input.f_kind()?, input.device()));
    let place = |tensor: &Tensor| (tensor.data_ptr() as usize, tensor.requires_grad());
    Ok(Key {
        inputs: inputs.iter().map(input).collect::<Result<_>>()?,
        autocast: autocast_of(store.device())?,
        stored: stored.everything().map(place).collect(),
    })
}

/// What a recording may read for as long as it lives.
fn fixed(param: &Param) -> Result<Tensor> {
    if param.unit().is_some() || param.is_offloaded() || param.is_deferred() || param.is_stored_as_several() {
        return Err(NnError::GraphedStorage { name: param.name().to_owned() }.into());
    }
    param.get()
}
