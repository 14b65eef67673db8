//! The units of a model on one rank: its shards, what is unsharded at the moment, and how both divide into parameters.

use super::buffers::Buffers;
use super::codes::CODES;
use crate::amp::float_kind;
use crate::error::{Result, StateError};
use crate::group::{NeededBy, PendingCollective};
use crate::nn::is_floating;
use accelerate_core::config::{FloatType, MixedPrecisionPolicy};
use accelerate_core::layout::Layout;
use accelerate_core::plan::{Plan, Unit};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::version;
use torch_ext::device::pin_memory;
use torch_ext::storage::storage_id;

/// All units of a model. Their memory is theirs; who fills it is not.
pub(super) struct Units {
    pub(super) plan: Plan,
    /// Sizes of the full parameters, in the order of the inventory.
    shapes: Vec<Vec<i64>>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Where parameters are computed with.
    pub(super) device: Device,
    /// Unsharded units stay for good.
    pub(super) stays_unsharded: bool,
    pub(super) buffers: Arc<Buffers>,
    state: Mutex<State>,
}

struct State {
    units: Vec<UnitState>,
    /// Storage of an unsharded unit -> the unit.
    unsharded: HashMap<usize, usize>,
    phase: Phase,
    /// The unit that was asked for last in this forward pass.
    current: Option<usize>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Phase {
    /// In the forward pass of the prepared model.
    Forward,
    /// In a backward pass, or between passes.
    Other,
}

/// The unit before it is used: what [`Units`] is made of.
pub(super) struct UnitState {
    /// `[shard_elements]`, padded with zeros. In `full` where that always stays and has its type.
    shard: Tensor,
    /// The parameters' pieces of it: leaves, each with elements of one parameter, perhaps none.
    locals: Vec<Tensor>,
    kinds: Kinds,
    /// `[world_size * shard_elements]` of the type that is gathered, while unsharded.
    full: Option<Tensor>,
    /// Of a unit that is gathered as codes: the scale of each parameter, from the first gather after a step on.
    scales: Option<Vec<Tensor>>,
    /// Other ranks' shards may have changed since they were gathered. Only where the unit stays unsharded.
    is_stale: bool,
    /// How often this rank's shard had been written to when the unit was gathered.
    gathered_version: i64,
    /// What `full` will be.
    arriving: Option<Arriving>,
    /// The parameters as this forward pass sees them, and whether gradients are recorded.
    outputs: Option<(bool, Vec<Tensor>)>,
    /// How many saved tensors in graphs stand for parameters of the unit.
    num_tokens: usize,
    /// Parameters whose elements are not in `shard` yet.
    num_missing: usize,
}

/// Memory for an unsharded unit, and the gather that fills it.
pub(super) type Arriving = (Tensor, Option<PendingCollective>);

/// The element types of a unit beside that of its shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kinds {
    /// What is gathered.
    pub(super) gather: Kind,
    /// What is computed with, and what gradients come in: the same, unless codes are gathered.
    pub(super) compute: Kind,
    pub(super) reduce: Kind,
}

impl Kinds {
    /// All the same.
    fn of(own: Kind) -> Self {
        Self { gather: own, compute: own, reduce: own }
    }

    /// Integers stay what they are.
    fn new(own: Kind, policy: MixedPrecisionPolicy) -> Self {
        let kind = |wanted: Option<FloatType>| match wanted {
            Some(_) if !is_floating(own) => own,
            Some(wanted) => float_kind(wanted),
            None => own,
        };
        let compute = kind(policy.param_dtype);
        Self { gather: compute, compute, reduce: kind(policy.reduce_dtype) }
    }
}

/// What all units of a model have in common.
pub(super) struct Common {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Where parameters are computed with, and where their shards are between uses.
    pub(super) device: Device,
    pub(super) shard_device: Device,
    pub(super) stays_unsharded: bool,
    pub(super) policy: MixedPrecisionPolicy,
}

impl UnitState {
    /// Room for this rank's shard of parameters of type `kind`, or for all of them and the shard in it if they stay
    /// unsharded.
    pub(super) fn new(unit: &Unit, kind: Kind, common: &Common) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let size = unit.shard_elements as i64;
        let kinds = if unit.keeps_dtype { Kinds::of(kind) } else { Kinds::new(kind, common.policy) };
        let kinds = if unit.in_fp8 { Kinds { gather: CODES, ..kinds } } else { kinds };
        // Memory that nobody has written to is none yet, and full parameters are still there.
        let full = || Tensor::f_empty([size * common.world_size as i64], (kinds.gather, common.device));
        let full = if common.stays_unsharded { Some(full()?) } else { None };
        let shard = match &full {
            Some(full) if kinds.gather == kind => full.f_narrow(0, size * common.rank as i64, size)?,
            _ => {
                let own = Tensor::f_empty([size], (kind, common.shard_device))?;
                // Copies from and to a GPU then need no detour.
                let is_pinned = common.shard_device == Device::Cpu && common.device.is_cuda();
                if is_pinned { pin_memory(&own)? } else { own }
            }
        };
        let num_own = unit.shard_of(common.rank).len() as i64;
        let _padding = shard.f_narrow(0, num_own, size - num_own)?.f_zero_()?;
        let mut locals = pieces(unit, common.rank, &shard)?;
        for local in &mut locals {
            *local = local.f_detach()?.f_set_requires_grad(unit.requires_grad)?;
        }
        Ok(Self {
            shard,
            locals,
            kinds,
            full,
            scales: None,
            is_stale: common.stays_unsharded,
            gathered_version: 0,
            arriving: None,
            outputs: None,
            num_tokens: 0,
            num_missing: unit.parameters.len(),
        })
    }

    /// Can other processes read the shard, and compute with it as it is?
    pub(super) fn is_readable(&self) -> bool {
        self.shard.device() == Device::Cpu && self.shard.f_kind().is_ok_and(|kind| kind == self.kinds.gather)
    }

    pub(super) fn shard(&self) -> Tensor {
        self.shard.shallow_clone()
    }

    /// The unsharded unit, if it is here and as the other ranks have it: since it was gathered, nobody has written to the
    /// shard of this rank in it.
    fn usable(&self) -> Option<Tensor> {
        let full = self.full.as_ref()?;
        let is_usable = !self.is_stale && version(&self.shard).is_ok_and(|own| own == self.gathered_version);
        is_usable.then(|| full.shallow_clone())
    }
}

/// What a unit held while it was unsharded; dropped without the lock, because whoever drops tensors may run anything.
#[derive(Default)]
pub(super) struct Released {
    _full: Option<Tensor>,
    _outputs: Option<(bool, Vec<Tensor>)>,
}

impl State {
    #[must_use = "to be dropped without the lock"]
    fn release(&mut self, unit: usize, stays_unsharded: bool) -> Released {
        let own = &mut self.units[unit];
        let outputs = own.outputs.take();
        if stays_unsharded {
            return Released { _full: None, _outputs: outputs };
        }
        if let Some(full) = &own.full {
            self.unsharded.remove(&storage_id(full));
        }
        Released { _full: own.full.take(), _outputs: outputs }
    }
}

impl Units {
    pub(super) fn new(plan: Plan, shapes: Vec<Vec<i64>>, common: &Common, units: Vec<UnitState>) -> Self {
        let state = State { units, unsharded: HashMap::new(), phase: Phase::Other, current: None };
        Self {
            plan,
            shapes,
            rank: common.rank,
            world_size: common.world_size,
            device: common.device,
            stays_unsharded: common.stays_unsharded,
            buffers: Arc::default(),
            state: Mutex::new(state),
        }
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.plan.units.len()
    }

    pub(super) fn content(&self, unit: usize) -> &Unit {
        &self.plan.units[unit]
    }

    /// A unit in messages: `unit 1 (layers.0)`.
    pub(super) fn label(&self, unit: usize) -> String {
        let path = &self.content(unit).path;
        format!("unit {unit} ({})", if path.is_empty() { "root" } else { path })
    }

    /// Sizes of a full parameter.
    pub(super) fn shape(&self, unit: usize, member: usize) -> &[i64] {
        &self.shapes[self.content(unit).parameters[member]]
    }

    /// Which elements of a parameter this rank keeps.
    pub(super) fn layout(&self, unit: usize, member: usize) -> Layout {
        self.plan.layout(self.content(unit).parameters[member], self.rank)
    }

    /// The name of a parameter.
    pub(super) fn name(&self, unit: usize, member: usize) -> &str {
        &self.plan.inventory.parameters[self.content(unit).parameters[member]].name
    }

    /// This rank's shard.
    pub(super) fn shard(&self, unit: usize) -> Tensor {
        self.lock().units[unit].shard()
    }

    /// How often each shard has been written to.
    pub(super) fn versions(&self) -> Result<Vec<i64>> {
        self.lock().units.iter().map(|unit| Ok(version(&unit.shard)?)).collect()
    }

    pub(super) fn version(&self, unit: usize) -> Result<i64> {
        Ok(version(&self.lock().units[unit].shard)?)
    }

    /// A parameter's piece of the shard.
    pub(super) fn local(&self, unit: usize, member: usize) -> Tensor {
        self.lock().units[unit].locals[member].shallow_clone()
    }

    pub(super) fn locals(&self, unit: usize) -> Vec<Tensor> {
        self.lock().units[unit].locals.iter().map(Tensor::shallow_clone).collect()
    }

    pub(super) fn kinds(&self, unit: usize) -> Kinds {
        self.lock().units[unit].kinds
    }

    /// A parameter's piece, for its elements to be copied to, and whether it is the last one of its unit.
    pub(super) fn local_to_fill(&self, unit: usize, member: usize) -> (Tensor, bool) {
        let own = &mut self.lock().units[unit];
        own.num_missing -= 1;
        (own.locals[member].shallow_clone(), own.num_missing == 0)
    }

    /// Number of elements of the unsharded unit, padding included.
    pub(super) fn full_elements(&self, unit: usize) -> usize {
        self.content(unit).shard_elements * self.world_size
    }

    /// Where this rank's shard belongs in the unsharded unit.
    pub(super) fn place_of_shard(&self, unit: usize, full: &Tensor) -> Result<Tensor> {
        let size = self.content(unit).shard_elements as i64;
        Ok(full.f_narrow(0, size * self.rank as i64, size)?)
    }

    /// Memory for the unsharded unit, in the type that is gathered.
    pub(super) fn memory_to_gather(&self, unit: usize) -> Result<Tensor> {
        let (kept, kind) = {
            let own = &self.lock().units[unit];
            // What is there otherwise is outdated, and a graph may need it as it is.
            let kept = own.full.as_ref().filter(|_| self.stays_unsharded);
            (kept.map(Tensor::shallow_clone), own.kinds.gather)
        };
        match kept {
            Some(full) => Ok(full),
            None => self.buffers.take(self.full_elements(unit), (kind, self.device)),
        }
    }

    pub(super) fn usable(&self, unit: usize) -> Option<Tensor> {
        self.lock().units[unit].usable()
    }

    pub(super) fn is_arriving(&self, unit: usize) -> bool {
        self.lock().units[unit].arriving.is_some()
    }

    /// A gather of the unit has been started.
    pub(super) fn set_arriving(&self, unit: usize, arriving: Arriving) {
        self.lock().units[unit].arriving = Some(arriving);
    }

    pub(super) fn take_arriving(&self, unit: usize) -> Option<Arriving> {
        self.lock().units[unit].arriving.take()
    }

    /// Waits for what was asked for in vain, and forgets it: its memory will be used again.
    pub(super) fn forget_arriving(&self) -> Result<()> {
        let arriving: SmallVec<[_; 2]> = self.lock().units.iter_mut().filter_map(|unit| unit.arriving.take()).collect();
        arriving.into_iter().try_for_each(|(_full, pending)| pending.map_or(Ok(()), PendingCollective::wait))
    }

    /// The unsharded unit has arrived.
    pub(super) fn set_full(&self, unit: usize, full: &Tensor) -> Result<()> {
        let State { units, unsharded, .. } = &mut *self.lock();
        let own = &mut units[unit];
        own.gathered_version = version(&own.shard)?;
        own.is_stale = false;
        if let Some(outdated) = own.full.replace(full.shallow_clone()) {
            unsharded.remove(&storage_id(&outdated));
        }
        unsharded.insert(storage_id(full), unit);
        Ok(())
    }

    /// Other ranks may change their shards of all units from now on.
    pub(super) fn set_stale(&self) {
        self.lock().units.iter_mut().for_each(|unit| unit.scales = None);
        if self.stays_unsharded {
            self.lock().units.iter_mut().for_each(|unit| unit.is_stale = true);
        }
    }

    /// Other ranks have changed their shards of this unit, too.
    pub(super) fn set_unit_stale(&self, unit: usize) {
        self.lock().units[unit].is_stale = true;
    }

    /// The parameters in an unsharded unit, each with a version counter of its own.
    pub(super) fn views(&self, unit: usize, full: &Tensor) -> Result<Vec<Tensor>, tch::TchError> {
        let _no_grad = tch::no_grad_guard();
        let members = 0..self.content(unit).parameters.len();
        members.map(|member| in_shape_of(full, self.offset(unit, member), self.shape(unit, member))).collect()
    }

    /// What graphs see of the parameters: themselves, or what stands in for codes, which have no gradients.
    pub(super) fn graph_outputs(&self, unit: usize, full: &Tensor) -> Result<Vec<Tensor>, tch::TchError> {
        if !self.content(unit).in_fp8 {
            return self.views(unit, full);
        }
        let _no_grad = tch::no_grad_guard();
        let stand_in = |member: usize| {
            let (shape, options) = (self.shape(unit, member), (self.kinds(unit).compute, self.device));
            let mut all = Tensor::f_empty([0], options)?;
            // Each element is the same one.
            all.f_set_source_tensor_storage_offset_(&Tensor::f_zeros([1], options)?, 0, shape, vec![0; shape.len()])
        };
        (0..self.content(unit).parameters.len()).map(stand_in).collect()
    }

    /// Where a parameter begins in the unit.
    pub(super) fn offset(&self, unit: usize, member: usize) -> i64 {
        self.content(unit).offsets[member] as i64
    }

    /// The unsharded unit and what this forward pass sees of a parameter, if it has asked for the unit already.
    pub(super) fn full_and_output(&self, unit: usize, member: usize, records: bool) -> Option<(Tensor, Tensor)> {
        let state = self.lock();
        let own = &state.units[unit];
        let (recorded, outputs) = own.outputs.as_ref()?;
        let full = own.full.as_ref().filter(|_| *recorded == records)?;
        Some((full.shallow_clone(), outputs[member].shallow_clone()))
    }

    /// The scales of codes, if ranks have agreed on them.
    pub(super) fn scales(&self, unit: usize) -> Option<Vec<Tensor>> {
        self.lock().units[unit].scales.as_ref().map(|scales| scales.iter().map(Tensor::shallow_clone).collect())
    }

    pub(super) fn set_scales(&self, unit: usize, scales: Vec<Tensor>) {
        self.lock().units[unit].scales = Some(scales);
    }

    /// The scale of a parameter whose codes are here.
    pub(super) fn scale(&self, unit: usize, member: usize) -> Result<Tensor> {
        let scale = self.scales(unit).and_then(|scales| Some(scales.get(member)?.shallow_clone()));
        scale.ok_or_else(|| StateError::NoScales { unit: self.label(unit) }.into())
    }

    /// Keeps what a pass sees of the unit's parameters; without one nobody says when a use ends, and nothing is kept.
    pub(super) fn keep_outputs(&self, unit: usize, needed_by: NeededBy, outputs: (bool, Vec<Tensor>)) -> Released {
        let mut state = self.lock();
        if needed_by == NeededBy::Outside {
            return state.release(unit, self.stays_unsharded);
        }
        Released { _full: None, _outputs: state.units[unit].outputs.replace(outputs) }
    }

    /// From now on the graph alone keeps what it needs.
    pub(super) fn drop_outputs(&self) {
        let outputs: Vec<_> = self.lock().units.iter_mut().map(|unit| unit.outputs.take()).collect();
        drop(outputs);
    }

    pub(super) fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub(super) fn begin_forward(&self) {
        let mut state = self.lock();
        (state.phase, state.current) = (Phase::Forward, None);
    }

    pub(super) fn end_forward(&self) {
        self.lock().phase = Phase::Other;
    }

    /// Notes that a unit is in use. Where units `frees` their memory, those of the module before it go: frozen parameters of a
    /// module are a unit of their own. The root unit stays: what belongs to no module is used at both ends of a model.
    pub(super) fn enter(&self, unit: usize, frees: bool) -> SmallVec<[Released; 2]> {
        let mut state = self.lock();
        let path = |unit: usize| &self.content(unit).path;
        if state.phase != Phase::Forward || path(unit).is_empty() {
            return SmallVec::new();
        }
        match state.current.replace(unit) {
            Some(before) if path(before) != path(unit) && frees => {
                let of_module = (0..self.len()).filter(|&other| path(other) == path(before));
                of_module.map(|unit| state.release(unit, self.stays_unsharded)).collect()
            }
            _ => SmallVec::new(),
        }
    }

    /// A checkpointed segment that needed the unit once more has been computed. Where units `frees` their memory it goes now,
    /// unless a graph needs it.
    pub(super) fn end_recomputing(&self, unit: usize, frees: bool) -> Released {
        let mut state = self.lock();
        match frees && state.units[unit].num_tokens == 0 {
            true => state.release(unit, self.stays_unsharded),
            false => Released { _full: None, _outputs: state.units[unit].outputs.take() },
        }
    }

    /// Lets a unit go, unless a forward pass is under way.
    pub(super) fn release_outside(&self, unit: usize) -> Released {
        let mut state = self.lock();
        if state.phase == Phase::Other { state.release(unit, self.stays_unsharded) } else { Released::default() }
    }

    /// Lets all units go.
    pub(super) fn release_all(&self) {
        let released: Vec<Released> = {
            let mut state = self.lock();
            (0..self.len()).map(|unit| state.release(unit, self.stays_unsharded)).collect()
        };
        drop(released);
    }

    /// The unit that a tensor is a view of, if it is an unsharded one, and the version with which that was gathered: a graph
    /// keeps a token for it.
    pub(super) fn add_token(&self, tensor: &Tensor) -> Option<(usize, i64)> {
        let State { units, unsharded, .. } = &mut *self.lock();
        let unit = *unsharded.get(&storage_id(tensor))?;
        units[unit].num_tokens += 1;
        Some((unit, units[unit].gathered_version))
    }

    /// A graph has dropped a token. With the last one of a backward pass the unit goes.
    pub(super) fn remove_token(&self, unit: usize) -> Released {
        let mut state = self.lock();
        state.units[unit].num_tokens -= 1;
        let is_done = state.units[unit].num_tokens == 0 && state.phase != Phase::Forward;
        if is_done { state.release(unit, self.stays_unsharded) } else { Released::default() }
    }
}

#[cfg(test)]
impl Units {
    /// How many units are unsharded, and how many are on their way.
    pub(super) fn num_unsharded_and_arriving(&self) -> (usize, usize) {
        let state = self.lock();
        (state.unsharded.len(), state.units.iter().filter(|unit| unit.arriving.is_some()).count())
    }

    pub(super) fn has_full(&self) -> bool {
        self.lock().units.iter().any(|unit| unit.full.is_some())
    }

    pub(super) fn num_tokens(&self) -> Vec<usize> {
        self.lock().units.iter().map(|unit| unit.num_tokens).collect()
    }

    /// Plants a shard of another size, which cannot be gathered.
    pub(super) fn spoil_shard(&self, unit: usize) {
        let own = &mut self.lock().units[unit].shard;
        *own = Tensor::zeros([own.numel() as i64 + 1], (own.kind(), own.device()));
    }
}

/// The parameters' pieces of a rank's shard of a unit.
pub(super) fn pieces(unit: &Unit, rank: usize, own: &Tensor) -> Result<Vec<Tensor>> {
    let first = unit.shard_of(rank).start;
    let piece = |member: usize| {
        let shard = unit.member_shard(member, rank);
        let start = if shard.is_empty() { 0 } else { unit.offsets[member] + shard.start - first };
        Ok(own.f_narrow(0, start as i64, shard.len() as i64)?)
    };
    (0..unit.parameters.len()).map(piece).collect()
}

/// The elements of a flat tensor from `offset` on, in a shape, with a version counter of their own.
pub(super) fn in_shape_of(full: &Tensor, offset: i64, shape: &[i64]) -> Result<Tensor, tch::TchError> {
    let mut view = Tensor::f_empty([0], (full.f_kind()?, full.device()))?;
    view.f_set_source_tensor_storage_offset_(full, offset, shape, contiguous_strides(shape))
}

/// Of a tensor without gaps.
fn contiguous_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}
