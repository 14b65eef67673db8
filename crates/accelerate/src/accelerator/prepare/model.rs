//! A model made ready: its forward pass runs in mixed precision and arms the gradient reduction.

use crate::amp::Precision;
use crate::engine::TensorParallel;
use crate::error::Result;
use crate::nn::Module;
use crate::session::{Engine, PreparedParameters};
use crate::tensor_tree::TensorTree;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use torch_ext::autograd::is_grad_enabled;

/// A prepared model. Derefs to the user's own; [`PreparedModel::forward`] adds what the run needs. The accelerator knows of it
/// as long as it lives.
pub struct PreparedModel<M> {
    model: M,
    parameters: Arc<PreparedParameters>,
    tensor_parallel: Option<TensorParallel>,
    precision: Precision,
}

impl<M> PreparedModel<M> {
    pub(crate) fn new(
        model: M,
        parameters: Arc<PreparedParameters>,
        tensor_parallel: Option<TensorParallel>,
        precision: Precision,
    ) -> Self {
        Self { model, parameters, tensor_parallel, precision }
    }

    pub(crate) fn shared_engine(&self) -> &Arc<dyn Engine> {
        &self.parameters.engine
    }

    pub(crate) fn parameters(&self) -> &PreparedParameters {
        &self.parameters
    }

    pub(crate) fn is_tensor_parallel(&self) -> bool {
        self.tensor_parallel.is_some()
    }

    /// The model as it was given to `prepare`, without the run around it, and no longer among the accelerator's. One that is
    /// sharded stays so.
    pub fn into_inner(self) -> M {
        // Now, also where another thread is just reading its state from the accelerator.
        self.parameters.release();
        self.model
    }
}

impl<M: Module> PreparedModel<M> {
    /// The model's forward pass under autocast, with half-precision outputs as float32.
    ///
    /// With several processes and gradients enabled this is collective: it arms the averaging of gradients for the backward
    /// pass.
    ///
    /// A replicated model with buffers, such as the running means of batch norm, takes over those of rank 0 before the first
    /// forward pass after one that averaged gradients, as PyTorch's `DistributedDataParallel` does: before the first
    /// micro-batch of a window, and before the first evaluation after a step. That is collective without gradients, too, so
    /// a rank that evaluates alone waits for the others until its deadline. It calls the model within: `(*model).forward(..)`.
    ///
    /// # Errors
    /// The model's own; parameters that got no gradient in the step before, by name; a failed peer.
    #[track_caller]
    pub fn forward(&self, input: &M::Input) -> Result<M::Output> {
        let _called = crate::status::here();
        let (engine, gradients_wanted) = (&*self.parameters.engine, is_grad_enabled());
        engine.before_forward(gradients_wanted)?;
        self.tensor_parallel.iter().for_each(TensorParallel::begin_forward);
        let scope = engine.enter_forward()?;
        let guard = AbandonOnPanic(engine);
        let output = self.precision.autocast(|| self.model.forward(input)).and_then(|output| output);
        std::mem::forget(guard);
        if output.is_err() {
            self.tensor_parallel.iter().for_each(TensorParallel::abandon_forward);
        }
        drop(scope);
        let left = engine.leave_forward(output.as_ref().err());
        // Why the model has failed explains what may have failed after it.
        let output = output.map_err(|error| match &self.tensor_parallel {
            Some(tensor_parallel) => tensor_parallel.explain(error),
            None => error,
        })?;
        left?;
        self.tensor_parallel.as_ref().map_or(Ok(()), TensorParallel::end_forward)?;
        engine.after_forward(gradients_wanted, &|visit| output.for_each_tensor(visit))?;
        self.precision.cast_outputs(output)
    }
}

/// Dropped by a panic in a model.
struct AbandonOnPanic<'a>(&'a dyn Engine);

impl Drop for AbandonOnPanic<'_> {
    fn drop(&mut self) {
        self.0.abandon_forward();
    }
}

impl<M> Deref for PreparedModel<M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.model
    }
}

impl<M: fmt::Debug> fmt::Debug for PreparedModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedModel").field("model", &self.model).field("engine", &self.parameters.engine).finish()
    }
}
