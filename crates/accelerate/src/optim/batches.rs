//! Parameters sorted into the lists that fused kernels take, kept from step to step.

use super::handle::{GroupSettings, OptimizerHandle};
use crate::error::Result;
use crate::group::Group;
use crate::nn::Param;
use tch::{Device, Kind, Tensor};
use torch_ext::TensorVec;
use torch_ext::autograd::gradient_of;

/// Parallel lists for one fused call: the members of a group that have gradients, on one device and of one dtype.
#[derive(Debug)]
pub(super) struct Batch<S> {
    /// Positions of the parameters in the optimizer's list of states.
    pub(super) slots: Vec<usize>,
    pub(super) params: TensorVec,
    /// Filled for the length of a step: gradients must be free to go when the user drops them.
    pub(super) grads: TensorVec,
    /// What the optimizer keeps for these parameters.
    pub(super) state: S,
}

/// The batches of all groups. They are made at the first step and again when other parameters have gradients.
#[derive(Debug)]
pub(super) struct Batches<S> {
    groups: Vec<GroupBatches<S>>,
    /// [`storage_version`] of the parameters that the lists hold.
    version: u64,
}

#[derive(Debug)]
struct GroupBatches<S> {
    batches: Vec<Batch<S>>,
    /// Optimizers keep more where there is momentum, and a schedule may switch it on and off.
    has_momentum: bool,
    /// The parameters without gradients.
    resting: TensorVec,
}

impl<S> Default for Batches<S> {
    fn default() -> Self {
        Self { groups: Vec::new(), version: 0 }
    }
}

impl<S> Batches<S> {
    /// To be called when the states that the batches hold are no longer the optimizer's.
    pub(super) fn clear(&mut self) {
        self.groups.clear();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Batch<S>> {
        self.groups.iter().flat_map(|group| &group.batches)
    }

    /// One step of an optimizer: what `step` does to each batch of each group, outside of autograd.
    ///
    /// `state` makes what goes with a batch that holds the parameters of these positions. Parameters for which
    /// `is_apart` differs do not share a batch.
    pub(super) fn step(
        &mut self,
        handle: &OptimizerHandle,
        is_apart: impl Fn(usize) -> bool,
        mut state: impl FnMut(&[usize], &TensorVec, GroupSettings) -> Result<S>,
        mut step: impl FnMut(&Batch<S>, GroupSettings) -> Result<()>,
    ) -> Result<()> {
        let version = handle.check_step()?;
        let _no_grad = tch::no_grad_guard();
        let result = (|| {
            if self.version != version || !self.collect_gradients(handle)? {
                self.make(handle, is_apart, &mut state)?;
                self.version = version;
            }
            for (group, GroupBatches { batches, .. }) in self.groups.iter().enumerate() {
                let settings = handle.settings(group)?;
                batches.iter().try_for_each(|batch| step(batch, settings))?;
            }
            handle.record_step();
            Ok(())
        })();
        self.groups.iter_mut().flat_map(|group| &mut group.batches).for_each(|batch| batch.grads.clear());
        result
    }

    /// False if the batches do not fit the parameters that have gradients now.
    fn collect_gradients(&mut self, handle: &OptimizerHandle) -> Result<bool> {
        if self.groups.len() != handle.num_groups() {
            return Ok(false);
        }
        for (index, group) in self.groups.iter_mut().enumerate() {
            let fits = group.has_momentum == has_momentum(handle.settings(index)?)
                && !group.resting.has_gradient()
                && group.batches.iter_mut().all(|batch| batch.grads.fill_with_gradients_of(&batch.params));
            if !fits {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn make(
        &mut self,
        handle: &OptimizerHandle,
        is_apart: impl Fn(usize) -> bool,
        state: &mut impl FnMut(&[usize], &TensorVec, GroupSettings) -> Result<S>,
    ) -> Result<()> {
        self.groups.clear();
        let mut first_slot = 0;
        for group in 0..handle.num_groups() {
            let (params, settings) = (handle.group_params(group), handle.settings(group)?);
            let (lists, resting) = sort(params, first_slot, &is_apart)?;
            let mut batches = Vec::with_capacity(lists.len());
            for List { slots, params, .. } in lists {
                let state = state(&slots, &params, settings)?;
                let mut grads = TensorVec::with_capacity(params.len());
                grads.fill_with_gradients_of(&params);
                batches.push(Batch { slots, params, grads, state });
            }
            self.groups.push(GroupBatches { batches, has_momentum: has_momentum(settings), resting });
            first_slot += params.len();
        }
        Ok(())
    }
}

fn has_momentum(settings: GroupSettings) -> bool {
    settings.momentum != 0.0
}

/// Changes whenever one of the parameters is stored elsewhere.
pub(super) fn storage_version<'a>(params: impl IntoIterator<Item = &'a Param>) -> u64 {
    params.into_iter().map(Param::storage_version).sum()
}

/// One step of an optimizer that goes parameter by parameter: what `step` does to each position, parameter and gradient,
/// outside of autograd.
pub(super) fn step_each(
    handle: &OptimizerHandle,
    mut step: impl FnMut(usize, &Tensor, &Tensor, GroupSettings) -> Result<()>,
) -> Result<()> {
    handle.check_step()?;
    let _no_grad = tch::no_grad_guard();
    let mut slot = 0;
    for group in 0..handle.num_groups() {
        let settings = handle.settings(group)?;
        for param in handle.group_params(group) {
            let param = param.local();
            if let Some(grad) = gradient_of(&param)? {
                step(slot, &param, &grad, settings)?;
            }
            slot += 1;
        }
    }
    handle.record_step();
    Ok(())
}

struct List {
    key: (Device, Kind, bool),
    slots: Vec<usize>,
    params: TensorVec,
}

/// The parameters that have a gradient, in order, apart by device and dtype; and those that have none.
fn sort(params: &[Param], first_slot: usize, is_apart: impl Fn(usize) -> bool) -> Result<(Vec<List>, TensorVec)> {
    let mut lists: Vec<List> = Vec::with_capacity(1);
    let mut resting = TensorVec::with_capacity(0);
    for (slot, param) in (first_slot..).zip(params) {
        let tensor = param.local();
        if gradient_of(&tensor)?.is_none() {
            resting.push(&tensor);
            continue;
        }
        let key = (tensor.device(), tensor.f_kind()?, is_apart(slot));
        // One or two combinations in practice, so a search beats a map.
        match lists.iter_mut().find(|list| list.key == key) {
            Some(list) => {
                list.slots.push(slot);
                list.params.push(&tensor);
            }
            None => lists.push(List { key, slots: vec![slot], params: [&tensor].into_iter().collect() }),
        }
    }
    Ok((lists, resting))
}

/// The gradients that exist, apart by device, dtype and the ranks that they are spread over: what clipping and unscaling
/// work on.
pub(crate) fn gradients<'a>(params: impl IntoIterator<Item = &'a Param>) -> Result<Vec<Gradients>> {
    let mut lists: Vec<Gradients> = Vec::with_capacity(1);
    for param in params {
        let Some(grad) = gradient_of(&param.local())? else { continue };
        let (device, kind, group) = (grad.device(), grad.f_kind()?, param.shard_group());
        match lists.iter_mut().find(|list| list.device == device && list.kind == kind && list.group == group) {
            Some(list) => list.tensors.push(&grad),
            None => lists.push(Gradients { device, kind, group, tensors: [&grad].into_iter().collect() }),
        }
    }
    Ok(lists)
}

/// Gradients on one device and of one dtype, at least one.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) device: Device,
    pub(crate) kind: Kind,
    /// The ranks that hold the other shards of these gradients; what is computed of them has to be combined.
    pub(crate) group: Option<Group>,
    pub(crate) tensors: TensorVec,
}
