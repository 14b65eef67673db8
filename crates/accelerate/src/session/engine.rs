//! What a session asks of the engine that keeps a model in step.

use super::join::{Join, Pass};
use super::registry::ObjectState;
use crate::error::{Error, Result};
use crate::nn::Param;
use accelerate_core::plan::Plan;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use tch::Tensor;
use torch_ext::saved_tensors::SavedTensorHooksGuard;

/// Calls a function with tensor after tensor.
pub(crate) type Visit<'a> = &'a dyn Fn(&mut dyn FnMut(&Tensor));

/// Is this one of the parameters that a call is about?
pub(crate) type Concerns<'a> = &'a dyn Fn(&Param) -> bool;

/// Holds for the length of a forward pass.
pub(crate) type ForwardScope = Option<SavedTensorHooksGuard>;

/// Puts a state that has been read, and that fits, in place.
pub(crate) type Takeover<'a> = Box<dyn FnOnce() + 'a>;

/// The points of a training step at which an engine acts.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Before a forward pass. `_gradients_wanted`: it may be followed by a backward pass.
    fn before_forward(&self, _gradients_wanted: bool) -> Result<()> {
        Ok(())
    }

    /// Around a forward pass: saved-tensor hooks that hold inside.
    fn enter_forward(&self) -> Result<ForwardScope> {
        Ok(None)
    }

    /// The end of it; `_failure` is the model's, if it has failed.
    fn leave_forward(&self, _failure: Option<&Error>) -> Result<()> {
        Ok(())
    }

    /// After it; `_outputs` visits every tensor of its output.
    fn after_forward(&self, _gradients_wanted: bool, _outputs: Visit<'_>) -> Result<()> {
        Ok(())
    }

    /// After a backward pass.
    fn after_backward(&self) -> Result<()> {
        Ok(())
    }

    /// Before gradients are looked at outside of a backward pass. Collective.
    fn complete_gradients(&self) -> Result<()> {
        Ok(())
    }

    /// Multiplies all gradients that ranks have not reduced yet.
    fn scale_unreduced(&self, _factor: f64) -> Result<()> {
        Ok(())
    }

    /// Drops those gradients of parameters that a call `_concerns`, and that ranks have not reduced yet.
    fn drop_unreduced(&self, _concerns: Concerns<'_>) -> Result<()> {
        Ok(())
    }

    /// After a forward pass that has panicked: what it held goes. Nobody is asked or told.
    fn abandon_forward(&self) {}

    /// Before parameters are updated.
    fn before_step(&self) -> Result<()> {
        Ok(())
    }

    /// Whether coming backward passes reduce gradients over ranks; returns what held before.
    fn set_gradient_sync(&self, _sync: bool) -> bool {
        true
    }

    /// From now on, reductions are announced to ranks that are out of batches, as those of model number `model`; `None`
    /// ends that.
    ///
    /// # Errors
    /// An engine whose reductions cannot be followed.
    fn set_join(&self, _join: Option<(Arc<Join>, usize)>) -> Result<()> {
        Ok(())
    }

    /// Takes part in a pass of the other ranks without a batch; `source` is the first of them. If it reduces, gradients of
    /// an open window are contributed. Collective.
    fn follow(&self, _source: usize, _pass: Pass) -> Result<()> {
        Ok(())
    }

    /// Overwrites parameters and buffers with those of rank `source`. Collective.
    fn copy_from(&self, _source: usize) -> Result<()> {
        Ok(())
    }

    /// Before the state of the run is saved. Collective.
    fn before_save(&self) -> Result<()> {
        Ok(())
    }

    /// What the engine itself has learned that a run needs to go on to the bit. Nothing for most.
    fn state(&self) -> Result<Value> {
        Ok(Value::Null)
    }

    /// Takes over what [`state`](Self::state) gave on the same rank of another run. Not collective.
    fn load_state(&self, _state: &Value) -> Result<()> {
        Ok(())
    }

    /// What the model's communication hook keeps from step to step on this rank, in its own memory; `None` of one that keeps
    /// nothing.
    fn hook_state(&self) -> Result<Option<ObjectState>> {
        Ok(None)
    }

    /// Reads what [`hook_state`](Self::hook_state) gave on the same rank, and changes nothing yet: that is left to what is given
    /// back, which cannot fail. Without a state the hook begins anew. Tensors are missing where there is no such rank. Not
    /// collective.
    fn read_hook_state(&self, _state: Option<&ObjectState>) -> Result<Takeover<'_>> {
        Ok(Box::new(|| ()))
    }

    /// Gradients of this rank's batches that are kept in full until ranks reduce them, by the name of the parameter.
    fn unreduced(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// Goes on in a window of which parameters already have their gradients; `_unreduced` are those that ranks have not reduced,
    /// as [`unreduced`](Self::unreduced) gave them.
    fn reopen_window(&self, _unreduced: &BTreeMap<&str, &Tensor>) -> Result<()> {
        Ok(())
    }

    /// What was decided about the model's parameters, where that cannot be found out from them any more.
    fn plan(&self) -> Option<&Plan> {
        None
    }

    /// Has an optimizer stepped by gradients of this rank alone? Then states of optimizers differ between ranks.
    fn has_stepped_alone(&self) -> bool {
        false
    }

    /// Makes the next backward pass reduce, although its forward pass ran without synchronisation. Those after it do as before.
    fn trigger_sync_in_backward(&self) -> Result<()> {
        Ok(())
    }
}
