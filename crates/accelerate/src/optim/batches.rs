//! Sorting of parameters into the lists that fused kernels take.

use super::handle::{GroupSettings, OptimizerHandle};
use crate::error::Result;
use crate::nn::Param;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::gradient_of;

/// Parallel lists for one fused call: all on one device with one dtype.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) device: Device,
    kind: Kind,
    /// Positions of the parameters in the optimizer's list of states.
    pub(super) slots: Vec<usize>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) gradients: Vec<Tensor>,
}

impl Batch {
    pub(super) fn params(&self) -> Vec<&Tensor> {
        references(&self.tensors)
    }

    pub(super) fn grads(&self) -> Vec<&Tensor> {
        references(&self.gradients)
    }
}

/// A list as the kernels take it.
pub(crate) fn references(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

/// One step of an optimizer: what it does to each batch of each group, outside of autograd.
pub(super) fn step_batches(
    handle: &OptimizerHandle,
    mut step: impl FnMut(&Batch, GroupSettings) -> Result<()>,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut first_slot = 0;
    for group in 0..handle.num_groups() {
        let params = handle.group_params(group);
        let settings = handle.settings(group)?;
        for batch in batches(params, first_slot)? {
            step(&batch, settings)?;
        }
        first_slot += params.len();
    }
    handle.record_step();
    Ok(())
}

/// The parameters that have a gradient, in order, apart by device and dtype.
///
/// `first_slot` is the position of the first of `params` in the optimizer's list of states.
fn batches(params: &[Param], first_slot: usize) -> Result<Vec<Batch>> {
    let mut batches: Vec<Batch> = Vec::with_capacity(1);
    for (offset, param) in params.iter().enumerate() {
        let tensor = param.local();
        let Some(grad) = gradient_of(&tensor)? else { continue };
        let (device, kind) = (tensor.device(), tensor.f_kind()?);
        // One or two combinations in practice, so a search beats a map.
        let found = batches.iter().position(|batch| batch.device == device && batch.kind == kind);
        let batch = match found {
            Some(found) => &mut batches[found],
            None => {
                let room = params.len() - offset;
                batches.push(Batch {
                    device,
                    kind,
                    slots: Vec::with_capacity(room),
                    tensors: Vec::with_capacity(room),
                    gradients: Vec::with_capacity(room),
                });
                let last = batches.len() - 1;
                &mut batches[last]
            }
        };
        batch.slots.push(first_slot + offset);
        batch.tensors.push(tensor);
        batch.gradients.push(grad);
    }
    Ok(batches)
}

/// The gradients that exist, apart by device and dtype: what clipping and unscaling work on.
pub(crate) fn gradients<'a>(params: impl IntoIterator<Item = &'a Param>) -> Result<Vec<Vec<Tensor>>> {
    let mut lists: Vec<((Device, Kind), Vec<Tensor>)> = Vec::with_capacity(1);
    for param in params {
        let Some(grad) = gradient_of(&param.local())? else { continue };
        let key = (grad.device(), grad.f_kind()?);
        match lists.iter_mut().find(|(other, _)| *other == key) {
            Some((_, list)) => list.push(grad),
            None => lists.push((key, vec![grad])),
        }
    }
    Ok(lists.into_iter().map(|(_, list)| list).collect())
}
