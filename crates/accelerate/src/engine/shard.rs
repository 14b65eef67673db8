//! Full sharding: each rank keeps an equal part of every unit, and gathers a unit only while it computes with it.
//!
//! A unit's parameters are the outputs of one node in the autograd graph, whose backward is the reduce-scatter of their
//! gradients. What operations save of a gathered parameter is replaced by a token, so that the memory goes after the
//! last use in the forward pass and comes back by one more gather when the backward pass first needs it.
//!
//! Method: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et
//! al., "ZeRO", SC 2020. PyTorch hangs this on modules; here it hangs on parameters ([`Storage`]), so any code that
//! asks for a parameter takes part.

mod buffers;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use buffers::Buffers;

use super::replicate::{check_same_model, copy_from, difference_from_main};
use super::{Engine, ForwardScope, Join, Reduction};
use crate::context::Context;
use crate::error::{Error, Result, StateError};
use crate::group::{Group, ReduceOp};
use crate::nn::{Param, ParamStore, Storage};
use accelerate_core::config::FullyShardedDataParallelPlugin;
use accelerate_core::plan::{Inventory, ParameterEntry, Plan, Unit, plan_sharded};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Kind, Tensor};
use torch_ext::autograd::{CallbackResult, is_grad_enabled};
use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken, push_saved_tensor_hooks};
use torch_ext::storage::{storage_id, storage_offset};

/// The engine of a sharded model; clones are the same one.
#[derive(Clone)]
pub(super) struct Shard(Arc<Inner>);

struct Inner {
    group: Group,
    plan: Plan,
    /// Sizes of the whole parameters, in the order of the inventory.
    shapes: Vec<Vec<i64>>,
    frees_after_forward: bool,
    state: Mutex<State>,
}

struct State {
    units: Vec<UnitState>,
    buffers: Buffers,
    /// Storage of a gathered unit -> the unit.
    gathered: HashMap<usize, usize>,
    phase: Phase,
    /// The unit that was asked for last in this forward pass.
    current: Option<usize>,
    /// What travelled since ranks last compared: a gather and a reduce-scatter of equal sizes cannot be told from those of
    /// another unit by anyone else.
    travelled: Vec<Travel>,
    /// Why a parameter could not be gathered: [`Storage::materialize`] has no way to say it.
    failure: Option<Error>,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// In the forward pass of the prepared model.
    Forward,
    /// In a backward pass, or between passes.
    Other,
}

/// A collective of a unit.
#[derive(Clone, Copy)]
enum Travel {
    Gather(usize),
    ReduceScatter(usize),
}

struct UnitState {
    /// This rank's part, `[shard_elements]`, padded with zeros.
    shard: Tensor,
    /// The parameters' pieces of it: leaves, each with elements of one parameter, perhaps none.
    locals: Vec<Tensor>,
    /// `[world_size * shard_elements]` while gathered.
    whole: Option<Tensor>,
    /// The parameters as this forward pass sees them, and whether gradients are recorded.
    outputs: Option<(bool, Vec<Tensor>)>,
    /// How many saved tensors in graphs stand for parameters of the unit.
    num_tokens: usize,
    counts: Counts,
}

/// How often a unit's parameters and gradients travelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) gathers: usize,
    pub(crate) reduce_scatters: usize,
}

impl Shard {
    /// Takes the parameters of `store` apart. Collective.
    pub(super) fn start(
        context: &Context,
        store: &ParamStore,
        plugin: &FullyShardedDataParallelPlugin,
    ) -> Result<Self> {
        if let Some(holder) = store.tensor_holder() {
            return Err(StateError::TensorsElsewhere { holder }.into());
        }
        let group = context.group.clone();
        check_same_model(&group, store)?;
        if plugin.sync_module_states && group.world_size() > 1 {
            copy_from(&group, store, 0)?;
        }
        let params = store.parameters();
        let plan = plan_sharded(&inventory(store, &params)?, plugin, group.world_size());
        let units = plan.units.iter().map(|unit| split(unit, &params, &group)).collect::<Result<Vec<_>>>()?;
        let shard = Self(Arc::new(Inner {
            group,
            shapes: params.iter().map(Param::shape).collect(),
            frees_after_forward: plugin.frees_after_forward(),
            state: Mutex::new(State {
                units,
                buffers: Buffers::default(),
                gathered: HashMap::new(),
                phase: Phase::Other,
                current: None,
                travelled: Vec::new(),
                failure: None,
            }),
            plan,
        }));
        for (unit, content) in shard.0.plan.units.iter().enumerate() {
            for (member, &position) in content.parameters.iter().enumerate() {
                params[position].replace_storage(Box::new(Part { shard: shard.clone(), unit, member }));
            }
        }
        Ok(shard)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unit(&self, unit: usize) -> &Unit {
        &self.0.plan.units[unit]
    }

    /// One parameter to compute with. Collective unless its unit is gathered already.
    fn materialize(&self, unit: usize, member: usize) -> Result<Tensor> {
        let records = is_grad_enabled() && self.unit(unit).requires_grad;
        let released = self.enter_unit(unit);
        drop(released);
        if let Some((recorded, outputs)) = &self.lock().units[unit].outputs
            && *recorded == records
        {
            return Ok(outputs[member].shallow_clone());
        }
        let whole = self.gather(unit)?;
        let outputs = if records { self.outputs_of(unit, &whole)? } else { self.views(unit, &whole)? };
        let output = outputs[member].shallow_clone();
        let released = {
            let mut state = self.lock();
            if state.phase == Phase::Forward {
                state.units[unit].outputs = Some((records, outputs));
                Released::default()
            } else {
                // Nobody says when this use ends, so nothing is kept for the next.
                state.release(unit)
            }
        };
        drop(released);
        Ok(output)
    }

    /// Notes that a unit is in use, and lets the one before it go. The root unit stays: what belongs to no module is
    /// used at both ends of a model.
    fn enter_unit(&self, unit: usize) -> Released {
        let mut state = self.lock();
        if state.phase != Phase::Forward || self.unit(unit).path.is_empty() {
            return Released::default();
        }
        match state.current.replace(unit) {
            Some(before) if before != unit && self.0.frees_after_forward => state.release(before),
            _ => Released::default(),
        }
    }

    /// The unit's elements of all ranks.
    fn gather(&self, unit: usize) -> Result<Tensor> {
        let shard = {
            let state = self.lock();
            match &state.units[unit].whole {
                Some(whole) => return Ok(whole.shallow_clone()),
                None => state.units[unit].shard.shallow_clone(),
            }
        };
        let _no_grad = tch::no_grad_guard();
        let whole = self.buffer(unit)?;
        self.0.group.all_gather_into(&whole, &shard)?;
        let mut state = self.lock();
        state.travelled.push(Travel::Gather(unit));
        state.gathered.insert(storage_id(&whole), unit);
        state.units[unit].whole = Some(whole.shallow_clone());
        state.units[unit].counts.gathers += 1;
        Ok(whole)
    }

    /// Memory for a whole unit.
    fn buffer(&self, unit: usize) -> Result<Tensor> {
        let num_elements = self.unit(unit).shard_elements * self.0.group.world_size();
        let State { units, buffers, .. } = &mut *self.lock();
        let shard = &units[unit].shard;
        buffers.take(num_elements, (shard.f_kind()?, shard.device()))
    }

    /// The parameters in a gathered unit, each with a version counter of its own.
    fn views(&self, unit: usize, whole: &Tensor) -> Result<Vec<Tensor>, tch::TchError> {
        let _no_grad = tch::no_grad_guard();
        let content = self.unit(unit);
        let view = |(member, &position): (usize, &usize)| {
            let shape = &self.0.shapes[position];
            let mut view = Tensor::f_empty([0], (whole.f_kind()?, whole.device()))?;
            let offset = content.offsets[member] as i64;
            view.f_set_source_tensor_storage_offset_(whole, offset, shape, contiguous_strides(shape))
        };
        content.parameters.iter().enumerate().map(view).collect()
    }

    /// The same as outputs of one node, whose backward is the reduce-scatter.
    fn outputs_of(&self, unit: usize, whole: &Tensor) -> Result<Vec<Tensor>> {
        let locals: Vec<Tensor> = self.lock().units[unit].locals.iter().map(Tensor::shallow_clone).collect();
        let shard = self.clone();
        Ok(torch_ext::apply_function(
            "GatherUnit",
            &locals.iter().collect::<Vec<_>>(),
            |_| Ok(self.views(unit, whole)?),
            move |_, gradients| Ok(shard.reduce_scatter(unit, gradients)?),
        )?)
    }

    /// The mean over ranks of the whole gradients; of each parameter, this rank's piece.
    fn reduce_scatter(&self, unit: usize, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let _no_grad = tch::no_grad_guard();
        let (content, group) = (self.unit(unit), &self.0.group);
        let flat = self.buffer(unit)?;
        let num_elements = flat.numel();
        let place = |start: usize, end: usize| flat.f_narrow(0, start as i64, (end - start) as i64);
        let _ = place(content.num_elements, num_elements)?.f_zero_()?;
        // Before the sum, as in `c10d::Reducer`: the same rounding, and no overflow that the mean would not have. As a
        // tensor, because the product with a number would be made elsewhere and copied.
        let scale = Tensor::f_full([0i64; 0], (group.world_size() as f64).recip(), (flat.f_kind()?, flat.device()))?;
        for (member, gradient) in gradients.into_iter().enumerate() {
            let mut place = place(content.offsets[member], content.offsets[member + 1])?;
            let _ = match gradient {
                Some(gradient) => gradient.f_mul_out(&place.f_view_as(&gradient)?, &scale)?,
                None => place.f_zero_()?,
            };
        }
        let own = group.reduce_scatter_with(&flat, &self.buffer(unit)?, ReduceOp::Sum)?;
        let mut state = self.lock();
        state.travelled.push(Travel::ReduceScatter(unit));
        state.units[unit].counts.reduce_scatters += 1;
        drop(state);
        pieces(content, group.rank(), &own)?.into_iter().map(|piece| Ok(Some(piece))).collect()
    }

    /// Lets all gathered units go.
    fn release_all(&self) {
        let released: Vec<Released> = {
            let mut state = self.lock();
            (0..state.units.len()).map(|unit| state.release(unit)).collect()
        };
        drop(released);
    }

    /// Fails on every rank unless all ranks have gathered and reduced the same units in the same order. Collective if
    /// anything has travelled.
    fn check_order(&self) -> Result<()> {
        let travelled = std::mem::take(&mut self.lock().travelled);
        if travelled.is_empty() {
            return Ok(());
        }
        let line = |travel: &Travel| {
            let (what, unit) = match travel {
                Travel::Gather(unit) => ("gathers", unit),
                Travel::ReduceScatter(unit) => ("reduces", unit),
            };
            let path = &self.unit(*unit).path;
            format!("{what} unit {unit} ({})\n", if path.is_empty() { "root" } else { path })
        };
        let order: String = travelled.iter().map(line).collect();
        let Some(orders) = self.0.group.disagreement("check_order", &order)? else { return Ok(()) };
        let (rank, on_main, there) = difference_from_main(&orders);
        Err(StateError::DifferentOrders { rank, on_main, there }.into())
    }

    /// Of a parameter that was asked for outside of a forward pass, where nobody could be told.
    fn pending_failure(&self) -> Result<()> {
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    /// How often each unit travelled so far, in the order of the plan.
    #[cfg(test)]
    pub(super) fn counts(&self) -> Vec<Counts> {
        self.lock().units.iter().map(|unit| unit.counts).collect()
    }
}

/// What a unit held while it was gathered; dropped without the lock, because whoever drops tensors may run anything.
#[derive(Default)]
struct Released {
    _whole: Option<Tensor>,
    _outputs: Option<(bool, Vec<Tensor>)>,
}

impl State {
    #[must_use = "to be dropped without the lock"]
    fn release(&mut self, unit: usize) -> Released {
        let Self { units, gathered, .. } = self;
        let unit = &mut units[unit];
        if let Some(whole) = &unit.whole {
            gathered.remove(&storage_id(whole));
        }
        Released { _whole: unit.whole.take(), _outputs: unit.outputs.take() }
    }
}

impl Engine for Shard {
    fn enter_forward(&self) -> Result<ForwardScope> {
        // Of a forward pass that ended in a panic.
        self.release_all();
        self.pending_failure()?;
        let mut state = self.lock();
        (state.phase, state.current) = (Phase::Forward, None);
        drop(state);
        if !self.0.frees_after_forward {
            return Ok(None);
        }
        Ok(Some(push_saved_tensor_hooks(Rc::new(self.clone()))?))
    }

    fn leave_forward(&self) -> Result<()> {
        let failure = {
            let mut state = self.lock();
            state.phase = Phase::Other;
            state.failure.take()
        };
        if self.0.frees_after_forward || !is_grad_enabled() {
            self.release_all();
        } else {
            // The graph holds the memory until the backward pass is over.
            self.lock().units.iter_mut().for_each(|unit| unit.outputs = None);
        }
        failure.map_or(Ok(()), Err)?;
        // With gradients the backward pass follows, which compares for both.
        if is_grad_enabled() { Ok(()) } else { self.check_order() }
    }

    fn after_backward(&self) -> Result<()> {
        self.release_all();
        self.check_order()
    }

    fn before_step(&self) -> Result<()> {
        self.pending_failure()?;
        // Of backward passes that were not the accelerator's.
        self.check_order()
    }

    fn set_join(&self, join: Option<(Arc<Join>, usize)>) -> Result<()> {
        if join.is_none() {
            return Ok(());
        }
        let feature = "join_uneven_inputs of a sharded model".to_owned();
        let cure = "give all ranks as many batches: DataLoaderConfiguration.even_batches";
        Err(StateError::NotAvailable { feature, cure }.into())
    }

    fn follow(&self, _source: usize, _reduction: Reduction) -> Result<()> {
        Ok(())
    }

    fn plan(&self) -> Option<&Plan> {
        Some(&self.0.plan)
    }
}

impl SavedTensorHooks for Shard {
    fn pack(&self, tensor: &Tensor) -> Packed {
        let mut state = self.lock();
        let Some(&unit) = state.gathered.get(&storage_id(tensor)) else { return Packed::Keep };
        state.units[unit].num_tokens += 1;
        Packed::Token(Box::new(Token {
            shard: self.clone(),
            unit,
            sizes: tensor.size(),
            strides: tensor.stride(),
            offset: storage_offset(tensor),
        }))
    }
}

/// Stands in the graph for (a view of) a gathered parameter.
struct Token {
    shard: Shard,
    unit: usize,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

impl SavedToken for Token {
    fn unpack(&self) -> CallbackResult<Tensor> {
        let whole = self.shard.gather(self.unit)?;
        Ok(whole.f_as_strided(&self.sizes[..], &self.strides[..], self.offset)?)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let released = {
            let mut state = self.shard.lock();
            state.units[self.unit].num_tokens -= 1;
            let is_done = state.units[self.unit].num_tokens == 0 && state.phase != Phase::Forward;
            if is_done { state.release(self.unit) } else { Released::default() }
        };
        drop(released);
    }
}

/// The storage of one parameter of a sharded model.
struct Part {
    shard: Shard,
    unit: usize,
    member: usize,
}

impl Part {
    fn shape(&self) -> &[i64] {
        let position = self.shard.unit(self.unit).parameters[self.member];
        &self.shard.0.shapes[position]
    }
}

impl Storage for Part {
    fn materialize(&self) -> Tensor {
        self.shard.materialize(self.unit, self.member).unwrap_or_else(|error| {
            tracing::error!("a parameter could not be gathered: {error}");
            let stand_in = {
                let mut state = self.shard.lock();
                state.failure.get_or_insert(error);
                let shard = &state.units[self.unit].shard;
                Tensor::f_zeros(self.shape(), (shard.kind(), shard.device()))
            };
            // The forward pass goes on with zeros and ends in the error that is kept.
            stand_in.unwrap_or_else(|_| Tensor::new())
        })
    }

    fn local(&self) -> Tensor {
        self.shard.lock().units[self.unit].locals[self.member].shallow_clone()
    }

    fn whole_shape(&self) -> Vec<i64> {
        self.shape().to_vec()
    }

    fn whole(&self) -> Result<Tensor> {
        let whole = self.shard.gather(self.unit)?;
        let view = self.shard.views(self.unit, &whole)?.swap_remove(self.member);
        let copy = view.f_detach_copy()?;
        let released = {
            let mut state = self.shard.lock();
            if state.phase == Phase::Other { state.release(self.unit) } else { Released::default() }
        };
        drop(released);
        Ok(copy)
    }

    fn overwrite(&self, whole: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let part = self.shard.unit(self.unit).part_of(self.member, self.shard.0.group.rank());
        let flat = whole.f_expand(self.shape(), true)?.f_reshape([-1])?;
        self.local().f_copy_(&flat.f_narrow(0, part.start as i64, part.len() as i64)?)?;
        Ok(())
    }

    fn group(&self) -> Option<Group> {
        Some(self.shard.0.group.clone())
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("num_units", &self.0.plan.units.len()).finish_non_exhaustive()
    }
}

/// Of a tensor without gaps.
fn contiguous_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// The parameters' pieces of a rank's part of a unit.
fn pieces(unit: &Unit, rank: usize, own: &Tensor) -> Result<Vec<Tensor>> {
    let first = unit.shard_of(rank).start;
    let piece = |member: usize| {
        let part = unit.part_of(member, rank);
        let start = if part.is_empty() { 0 } else { unit.offsets[member] + part.start - first };
        Ok(own.f_narrow(0, start as i64, part.len() as i64)?)
    };
    (0..unit.parameters.len()).map(piece).collect()
}

fn split(unit: &Unit, params: &[Param], group: &Group) -> Result<UnitState> {
    let _no_grad = tch::no_grad_guard();
    let first = params[unit.parameters[0]].local();
    let shard = Tensor::f_zeros([unit.shard_elements as i64], (first.f_kind()?, first.device()))?;
    let mut locals = pieces(unit, group.rank(), &shard)?;
    for (member, (local, &position)) in locals.iter_mut().zip(&unit.parameters).enumerate() {
        let part = unit.part_of(member, group.rank());
        let whole = params[position].local().f_detach()?.f_reshape([-1])?;
        local.f_copy_(&whole.f_narrow(0, part.start as i64, part.len() as i64)?)?;
        *local = local.f_detach()?.f_set_requires_grad(unit.requires_grad)?;
    }
    Ok(UnitState { shard, locals, whole: None, outputs: None, num_tokens: 0, counts: Counts::default() })
}

fn inventory(store: &ParamStore, params: &[Param]) -> Result<Inventory> {
    let aliases = store.aliases();
    let entry = |param: &Param| {
        let local = param.local();
        let kind = local.f_kind()?;
        Ok(ParameterEntry {
            name: param.name().to_owned(),
            shape: local.size().into_iter().map(|size| size.max(0) as usize).collect(),
            dtype: dtype_name(kind),
            element_bytes: kind.elt_size_in_bytes(),
            requires_grad: local.requires_grad(),
            ties: aliases.iter().filter(|(_, first)| *first == param.name()).map(|(alias, _)| alias.clone()).collect(),
        })
    };
    Ok(Inventory { parameters: params.iter().map(entry).collect::<Result<_>>()? })
}

/// As PyTorch writes it.
fn dtype_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".to_owned(),
        Kind::Double => "float64".to_owned(),
        Kind::Half => "float16".to_owned(),
        Kind::BFloat16 => "bfloat16".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}
