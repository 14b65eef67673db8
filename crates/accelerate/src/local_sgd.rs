//! Local SGD: ranks train by themselves and average their parameters now and then (`local_sgd.py` of the reference).

use crate::accelerator::Accelerator;
use crate::accelerator::PreparedModel;
use crate::error::{Result, StateError};
use crate::group::{Group, ReduceOp};
use crate::nn::{Module, ParamStore};
use crate::session::Engine;
use accelerate_core::names::DistributedType;
use std::fmt;
use std::sync::Arc;
use tch::Tensor;

/// Ranks that train without averaging gradients, and average their parameters after every `local_sgd_steps` steps
/// (`LocalSGD` of the reference, `local_sgd.py`).
///
/// From [`LocalSGD::new`] on, gradients of the model stay on their rank. Call [`LocalSGD::step`] after every optimizer
/// step and [`LocalSGD::finish`] at the end, with every rank taking the same number of steps. A value that is dropped
/// without `finish`, as after an error, ends the mode and leaves each rank its own parameters, because dropping is not
/// collective.
///
/// Parameters are averaged, frozen ones included; buffers and the optimizer's state stay the ranks' own, and a checkpoint has those of
/// each rank ([`save_state`](Accelerator::save_state)); runs of another number of processes go on with rank 0's. Averages are
/// means over ranks, in the dtype of the parameter. With `local_sgd_steps` 1 and plain SGD, with or without
/// momentum, this equals averaging gradients, because the step is linear in them; with Adam it does not.
///
/// Method: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. All parameters travel in a few flat
/// messages; the reference sends one for each.
///
/// ```
/// use accelerate::{LocalSGD, nn::{Linear, ModuleFn, ParamStore}, optim::Sgd, tch::Tensor, testing};
///
/// let weights = testing::ranks(2, Default::default(), |accelerator| {
///     let store = ParamStore::new(accelerator.device());
///     let linear = Linear::new(store.root(), 1, 1, Default::default())?;
///     linear.weight.copy_(&Tensor::from(0f32))?;
///     let weight = linear.weight.clone();
///     let optimizer = Sgd::new(&store, 1.0)?;
///     let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
///     let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
///
///     let mut local_sgd = LocalSGD::new(&accelerator, &model, 2)?;
///     for _ in 0..2 {
///         let x = Tensor::from_slice(&[accelerator.process_index() as f32 + 1.0]);
///         accelerator.backward(&model.forward(&x)?.sum(None))?; // the gradient is x: 1 on rank 0, 2 on rank 1
///         optimizer.step()?;
///         optimizer.zero_grad()?;
///         local_sgd.step()?;
///     }
///     local_sgd.finish()?;
///     Ok(weight.get()?.f_double_value(&[0, 0])?)
/// })?;
/// assert_eq!(weights, [-3.0, -3.0]); // the mean of -2 and -4
/// # Ok::<(), accelerate::Error>(())
/// ```
#[must_use = "dropped at once, it changes nothing"]
pub struct LocalSGD {
    group: Group,
    store: ParamStore,
    local_sgd_steps: usize,
    num_steps: usize,
    /// Absent where there is nothing to do: switched off, or one process.
    mode: Option<LocalMode>,
}

/// How [`LocalSGD`] trains. A number of steps becomes one by `into`.
///
/// ```
/// use accelerate::LocalSGDOptions;
/// assert_eq!(LocalSGDOptions::default(), LocalSGDOptions::from(8));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSGDOptions {
    /// Parameters are averaged after as many steps. Default 8, as in the reference's example.
    pub local_sgd_steps: usize,
    /// `false` changes nothing and averages nothing, so that a program can leave its loop as it is. Default true.
    pub enabled: bool,
}

impl Default for LocalSGDOptions {
    fn default() -> Self {
        Self { local_sgd_steps: 8, enabled: true }
    }
}

impl From<usize> for LocalSGDOptions {
    fn from(local_sgd_steps: usize) -> Self {
        Self { local_sgd_steps, ..Self::default() }
    }
}

/// Gradients stay on their rank as long as this lives.
struct LocalMode {
    engine: Arc<dyn Engine>,
    before: bool,
}

impl Drop for LocalMode {
    fn drop(&mut self) {
        self.engine.set_gradient_sync(self.before);
    }
}

impl LocalSGD {
    /// Begins to train locally: a number of steps, or [`LocalSGDOptions`]. Not collective. In one process nothing is changed
    /// and nothing averaged.
    ///
    /// # Errors
    /// `local_sgd_steps` of 0; a run whose processes do not each hold the whole model.
    pub fn new<M: Module>(
        accelerator: &Accelerator,
        model: &PreparedModel<M>,
        options: impl Into<LocalSGDOptions>,
    ) -> Result<Self> {
        let LocalSGDOptions { local_sgd_steps, enabled } = options.into();
        let distributed_type = accelerator.distributed_type();
        let whole = matches!(distributed_type, DistributedType::No | DistributedType::MultiCpu);
        if !whole && !distributed_type.is_multi_device() {
            return Err(StateError::LocalSgdKind { distributed_type }.into());
        }
        if model.is_tensor_parallel() {
            return Err(StateError::NotWithTensorParallel { feature: "LocalSGD" }.into());
        }
        if accelerator.mesh().divided_sequences().is_some() {
            return Err(StateError::NotWithDividedSequences { feature: "LocalSGD" }.into());
        }
        if local_sgd_steps == 0 {
            return Err(StateError::NoLocalSteps.into());
        }
        let enabled = enabled && accelerator.use_distributed();
        let mode = enabled.then(|| {
            model.parameters().train_alone();
            let engine = model.shared_engine().clone();
            LocalMode { before: engine.set_gradient_sync(false), engine }
        });
        let (group, store) = (accelerator.group().clone(), model.params().clone());
        Ok(Self { group, store, local_sgd_steps, num_steps: 0, mode })
    }

    /// Counts an optimizer step, and averages the parameters if it is the last of `local_sgd_steps`. Collective then.
    ///
    /// # Errors
    /// A peer that is gone or does not take part, by rank.
    pub fn step(&mut self) -> Result<()> {
        self.num_steps += 1;
        if self.num_steps.is_multiple_of(self.local_sgd_steps) { self.average() } else { Ok(()) }
    }

    /// Averages the parameters a last time, and lets gradients be averaged again. Collective.
    ///
    /// # Errors
    /// A peer that is gone or does not take part, by rank.
    pub fn finish(self) -> Result<()> {
        self.average()
    }

    fn average(&self) -> Result<()> {
        if self.mode.is_none() {
            return Ok(());
        }
        // Codes of a quantised weight have no mean, and they are frozen.
        let parameters = self.store.parameters().into_iter().filter(|param| !param.is_stored_as_several());
        let tensors: Vec<Tensor> = parameters.map(|param| Ok(param.local().f_detach()?)).collect::<Result<_>>()?;
        self.group.all_reduce_coalesced(&tensors, ReduceOp::Mean)
    }
}

impl fmt::Debug for LocalSGD {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSGD")
            .field("local_sgd_steps", &self.local_sgd_steps)
            .field("num_steps", &self.num_steps)
            .field("enabled", &self.mode.is_some())
            .finish_non_exhaustive()
    }
}
