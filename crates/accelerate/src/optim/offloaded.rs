//! State of optimizers that go element by element, kept off the device between steps.

use super::Optimizer;
use super::batches::storage_version;
use super::handle::{GroupSettings, OptimizerHandle};
use super::state::{Loading, save_tensor};
use crate::error::{OffloadError, OptimError, Result};
use crate::nn::{Param, Resident};
use crate::offload::{Access, Blocks, is_outline, outline};
use accelerate_core::config::OffloadTarget;
use accelerate_core::offload::{Block, BlockLayout, Member, Segment};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::gradient_of;
use torch_ext::{TensorVec, foreach, scalar};

/// A state tensor that every parameter has, and what it begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plane {
    pub(super) name: &'static str,
    pub(super) initial: f64,
}

/// Elements of some parameters of one group and their state: lists as kernels take them, all of them flat.
pub(super) struct Elements {
    pub(super) params: TensorVec,
    pub(super) grads: TensorVec,
    /// One list for each [`Plane`].
    pub(super) state: Vec<TensorVec>,
    /// Counted already.
    pub(super) steps: TensorVec,
}

/// All state of an optimizer, on a disk or in the host's memory.
pub(super) struct OffloadedState {
    target: OffloadTarget,
    planes: Vec<Plane>,
    counts_steps: bool,
    /// By position in the optimizer's list of parameters: float scalars. `None` before the first step.
    steps: Vec<Option<Tensor>>,
    stored: Option<Stored>,
    /// A step or a load that had begun did not end well.
    is_lost: bool,
}

/// Which tensors stand for offloaded state: copies, or those without memory.
pub(super) type OffloadedView = fn(&OffloadedState, &OptimizerHandle) -> Result<BTreeMap<String, Tensor>>;

/// The room for the state.
struct Stored {
    /// [`storage_version`] of the parameters that it is for.
    version: u64,
    blocks: Blocks,
    /// Group of each parameter.
    groups: Vec<usize>,
    /// Positions of the parameters that are in memory together: all of them, or where parameters are on a disk too, those
    /// of one unit.
    rounds: Vec<Vec<usize>>,
}

/// One parameter in one step.
struct Current {
    /// Flat.
    param: Tensor,
    grad: Tensor,
    step: Tensor,
    is_first_step: bool,
}

/// Keeps the state of an optimizer in `offloaded` from now on, which is put where `place` says; also the state that is
/// there already.
pub(super) fn offload<O: Optimizer>(
    optimizer: &mut O,
    offloaded: OffloadedState,
    place: impl Fn(&mut O) -> &mut Option<OffloadedState>,
) -> Result<()> {
    let state = optimizer.state_dict()?;
    let before = place(optimizer).replace(offloaded);
    if !state.tensors.is_empty()
        && let Err(error) = optimizer.load_state_dict(&state)
    {
        *place(optimizer) = before;
        return Err(error);
    }
    Ok(())
}

impl OffloadedState {
    pub(super) fn new(
        target: &OffloadTarget,
        planes: Vec<Plane>,
        counts_steps: bool,
        handle: &OptimizerHandle,
    ) -> Self {
        let steps = handle.params().map(|_| None).collect();
        Self { target: target.clone(), planes, counts_steps, steps, stored: None, is_lost: false }
    }

    /// One step: what `apply` does to the elements of each block, outside of autograd.
    pub(super) fn step(
        &mut self,
        handle: &OptimizerHandle,
        apply: impl Fn(&Elements, GroupSettings) -> Result<()>,
    ) -> Result<()> {
        let version = handle.check_step()?;
        self.check_not_lost(handle)?;
        let _no_grad = tch::no_grad_guard();
        self.reserve(handle, version)?;
        self.is_lost = true;
        let params: Vec<&Param> = handle.params().collect();
        let rounds = self.stored.as_ref().map_or(Vec::new(), |stored| stored.rounds.clone());
        for round in rounds {
            let resident = params[round[0]].load()?;
            self.step_round(handle, &params, &round, &apply)?;
            resident.map_or(Ok(()), Resident::store)?;
        }
        self.is_lost = false;
        handle.record_step();
        Ok(())
    }

    /// The step of the parameters at some positions, which are in memory.
    fn step_round(
        &mut self,
        handle: &OptimizerHandle,
        params: &[&Param],
        round: &[usize],
        apply: impl Fn(&Elements, GroupSettings) -> Result<()>,
    ) -> Result<()> {
        let current = self.begin_step(params, round)?;
        let Self { planes, stored, .. } = self;
        let Some(Stored { blocks, groups, .. }) = stored else { return Ok(()) };
        let present = |block: &Block| block.segments.iter().find_map(|own| current[own.member].as_ref());
        let options = |block: &Block| {
            present(block).map_or((Kind::Float, Device::Cpu), |current| (current.param.kind(), current.param.device()))
        };
        let update = |block: &Block, found: &[Tensor]| {
            for (elements, group) in elements_of(block, found, &current, groups, planes)? {
                apply(&elements, handle.settings(group)?)?;
            }
            Ok(())
        };
        blocks.run(Access::Update, |block| present(block).is_some(), options, update)
    }

    fn check_not_lost(&self, handle: &OptimizerHandle) -> Result<()> {
        match self.is_lost {
            true => Err(OffloadError::Lost { optimizer: handle.optimizer_name() }.into()),
            false => Ok(()),
        }
    }

    /// Makes room for the state of the parameters as they are stored now.
    fn reserve(&mut self, handle: &OptimizerHandle, version: u64) -> Result<()> {
        if self.stored.as_ref().is_some_and(|stored| stored.version == version) {
            return Ok(());
        }
        let params: Vec<Tensor> = handle.params().map(Param::local).collect();
        let (order, members) = members(handle, &params)?;
        let mut layout = BlockLayout::new(&members, self.planes.len());
        layout.blocks.iter_mut().flat_map(|block| &mut block.segments).for_each(|own| own.member = order[own.member]);
        let device = params.first().map_or(Device::Cpu, Tensor::device);
        // The old one goes first: there may be no room for both.
        self.stored = None;
        let groups = (0..handle.num_groups()).flat_map(|group| handle.group_params(group).iter().map(move |_| group));
        let blocks = Blocks::new(layout, &self.target, device)?;
        let rounds = match handle.params().any(Param::is_offloaded) {
            false => vec![order],
            true => {
                let units: Vec<_> = handle.params().map(Param::unit).map(|own| own.map(|member| member.unit)).collect();
                order.chunk_by(|&left, &right| units[left] == units[right]).map(<[usize]>::to_vec).collect()
            }
        };
        self.stored = Some(Stored { version, blocks, groups: groups.collect(), rounds });
        Ok(())
    }

    /// The parameters that have a gradient, with their steps counted.
    fn begin_step(&mut self, params: &[&Param], round: &[usize]) -> Result<Vec<Option<Current>>> {
        let mut current: Vec<Option<Current>> = params.iter().map(|_| None).collect();
        let mut steps = TensorVec::with_capacity(round.len());
        for &position in round {
            let (param, step) = (params[position].local(), &mut self.steps[position]);
            let Some(grad) = gradient_of(&param)? else { continue };
            let is_first_step = step.is_none();
            let step = match step {
                Some(step) => step,
                none => none.insert(Tensor::f_zeros([0i64; 0], (Kind::Float, param.device()))?),
            };
            steps.push(step);
            current[position] = Some(Current {
                param: param.f_detach()?.f_view([-1])?,
                grad: grad.f_reshape([-1])?,
                step: step.shallow_clone(),
                is_first_step,
            });
        }
        if self.counts_steps && !steps.is_empty() {
            foreach::add_scalar_(&steps, 1.0)?;
        }
        Ok(current)
    }

    /// All state by name, in tensors without memory but for the counts of steps: [`read`](Self::read) fills others.
    pub(super) fn outline(&self, handle: &OptimizerHandle) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        self.check_not_lost(handle)?;
        if self.stored.is_none() {
            return Ok(tensors);
        }
        for (param, step) in handle.params().zip(&self.steps) {
            let Some(step) = step else { continue };
            if self.counts_steps {
                save_tensor(&mut tensors, "step", param, step)?;
            }
            let local = param.local();
            for plane in &self.planes {
                tensors.insert(format!("{}.{}", plane.name, param.name()), outline(&local.size(), local.f_kind()?)?);
            }
        }
        Ok(tensors)
    }

    /// Copies of all state on the CPU, by name.
    pub(super) fn save(&self, handle: &OptimizerHandle) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = self.outline(handle)?;
        for tensor in tensors.values_mut().filter(|tensor| is_outline(tensor)) {
            *tensor = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, Device::Cpu))?;
        }
        let is_stored = |key: &str| {
            self.planes.iter().any(|plane| key.split_once('.').is_some_and(|(state, _)| state == plane.name))
        };
        let stored: Vec<(&str, &Tensor)> =
            tensors.iter().map(|(key, tensor)| (key.as_str(), tensor)).filter(|(key, _)| is_stored(key)).collect();
        self.read(handle, &stored)?;
        Ok(tensors)
    }

    /// Fills tensors on the CPU, of the type and as many elements as their parameters have, with state of these names. Each block
    /// is read once.
    pub(super) fn read(&self, handle: &OptimizerHandle, wanted: &[(&str, &Tensor)]) -> Result<()> {
        self.check_not_lost(handle)?;
        let positions: HashMap<&str, usize> =
            handle.params().enumerate().map(|(position, param)| (param.name(), position)).collect();
        let mut places: BTreeMap<usize, Vec<(usize, &Tensor)>> = BTreeMap::new();
        for (key, place) in wanted {
            let plane = |state| self.planes.iter().position(|plane| plane.name == state);
            let found = key.split_once('.').and_then(|(state, name)| Some((*positions.get(name)?, plane(state)?)));
            let Some((position, plane)) = found else {
                let problems = vec![format!("there is no \"{key}\"")];
                return Err(OptimError::StateMismatch { optimizer: handle.optimizer_name(), problems }.into());
            };
            places.entry(position).or_default().push((plane, *place));
        }
        let _no_grad = tch::no_grad_guard();
        self.stored.as_ref().map_or(Ok(()), |stored| stored.read(&places))
    }

    /// Takes over what [`save`](Self::save) has made, with `planes` as the options that were saved with it ask for, unless
    /// something does not fit.
    pub(super) fn load(
        &mut self,
        handle: &OptimizerHandle,
        mut loading: Loading<'_>,
        planes: Vec<Plane>,
    ) -> Result<()> {
        let step = self.counts_steps.then_some("step");
        let names: Vec<&'static str> = step.into_iter().chain(planes.iter().map(|plane| plane.name)).collect();
        let found = handle.params().map(|param| loading.tensors(param, &names)).collect::<Result<Vec<_>>>()?;
        loading.finish()?;
        let _no_grad = tch::no_grad_guard();
        (self.is_lost, self.stored, self.planes) = (true, None, planes);
        self.reserve(handle, storage_version(handle.params()))?;
        let mut loaded = Vec::with_capacity(found.len());
        for ((slot, param), tensors) in self.steps.iter_mut().zip(handle.params()).zip(found) {
            let Some(mut tensors) = tensors else {
                *slot = None;
                loaded.push(None);
                continue;
            };
            *slot = Some(match self.counts_steps {
                true => tensors.remove(0),
                false => Tensor::f_zeros([0i64; 0], (Kind::Float, param.local().device()))?,
            });
            loaded.push(Some(tensors));
        }
        if let Some(stored) = &self.stored {
            stored.write(&loaded)?;
        }
        self.is_lost = false;
        Ok(())
    }
}

impl Stored {
    /// Fills these places, by position of the parameter and with the number of the plane.
    fn read(&self, places: &BTreeMap<usize, Vec<(usize, &Tensor)>>) -> Result<()> {
        let of_segment = |own: &Segment| places.get(&own.member).map_or(&[][..], Vec::as_slice);
        let first = |block: &Block| block.segments.iter().find_map(|own| of_segment(own).first());
        let options = |block: &Block| (first(block).map_or(Kind::Float, |(_, place)| place.kind()), Device::Cpu);
        let visit = |block: &Block, planes: &[Tensor]| {
            for own in &block.segments {
                for (plane, place) in of_segment(own) {
                    let kept = planes[*plane].f_narrow(0, own.at as i64, own.len as i64)?;
                    flat_part(place, own)?.f_copy_(&kept)?;
                }
            }
            Ok(())
        };
        self.blocks.run(Access::Read, |block| first(block).is_some(), options, visit)
    }

    /// Writes the planes of the parameters that have state, by position in the optimizer's list.
    fn write(&self, state: &[Option<Vec<Tensor>>]) -> Result<()> {
        let of_segment = |own: &Segment| state[own.member].as_ref();
        let first = |block: &Block| block.segments.iter().find_map(of_segment).and_then(|planes| planes.first());
        let options =
            |block: &Block| first(block).map_or((Kind::Float, Device::Cpu), |first| (first.kind(), first.device()));
        let visit = |block: &Block, planes: &[Tensor]| {
            for own in &block.segments {
                for (tensor, plane) in of_segment(own).into_iter().flatten().zip(planes) {
                    plane.f_narrow(0, own.at as i64, own.len as i64)?.f_copy_(&flat_part(tensor, own)?)?;
                }
            }
            Ok(())
        };
        self.blocks.run(Access::Write, |block| first(block).is_some(), options, visit)
    }
}

/// The parameters in the order of their blocks: their positions, and how they are divided. What shares a block has one
/// unit, type and device.
fn members(handle: &OptimizerHandle, params: &[Tensor]) -> Result<(Vec<usize>, Vec<Member>)> {
    let mut kinds = Vec::new();
    let mut members = Vec::with_capacity(params.len());
    for (position, (param, tensor)) in handle.params().zip(params).enumerate() {
        let key = (param.unit().map(|member| member.unit), tensor.f_kind()?, tensor.device());
        let unit = kinds.iter().position(|other| *other == key).unwrap_or_else(|| {
            kinds.push(key);
            kinds.len() - 1
        });
        members
            .push((position, Member { num_elements: tensor.numel(), element_bytes: key.1.elt_size_in_bytes(), unit }));
    }
    members.sort_by_key(|(_, member)| member.unit);
    Ok(members.into_iter().unzip())
}

/// A segment of one tensor.
fn flat_part(tensor: &Tensor, own: &Segment) -> Result<Tensor> {
    Ok(tensor.f_view([-1])?.f_narrow(0, own.start as i64, own.len as i64)?)
}

/// What of a block has gradients, by parameter group. State begins here, at a parameter's first step.
fn elements_of(
    block: &Block,
    planes: &[Tensor],
    current: &[Option<Current>],
    groups: &[usize],
    begin: &[Plane],
) -> Result<Vec<(Elements, usize)>> {
    let mut found: Vec<(Elements, usize)> = Vec::with_capacity(1);
    for own in &block.segments {
        let Some(Current { param, grad, step, is_first_step }) = &current[own.member] else { continue };
        let group = groups[own.member];
        let place = match found.iter().position(|(_, other)| *other == group) {
            Some(place) => place,
            None => {
                found.push((Elements::new(planes.len(), block.segments.len()), group));
                found.len() - 1
            }
        };
        let elements = &mut found[place].0;
        elements.params.push(&flat_part(param, own)?);
        elements.grads.push(&flat_part(grad, own)?);
        elements.steps.push(step);
        for ((plane, list), begin) in planes.iter().zip(&mut elements.state).zip(begin) {
            let part = plane.f_narrow(0, own.at as i64, own.len as i64)?;
            if *is_first_step {
                scalar::fill_(&part, begin.initial)?;
            }
            list.push(&part);
        }
    }
    Ok(found)
}

impl Elements {
    fn new(num_planes: usize, capacity: usize) -> Self {
        let list = || TensorVec::with_capacity(capacity);
        Self { params: list(), grads: list(), state: (0..num_planes).map(|_| list()).collect(), steps: list() }
    }
}

impl fmt::Debug for OffloadedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffloadedState")
            .field("target", &self.target)
            .field("planes", &self.planes)
            .finish_non_exhaustive()
    }
}
