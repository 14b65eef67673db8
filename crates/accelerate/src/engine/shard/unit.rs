//! One unit on one rank: its part, the whole while it is gathered, and how the two divide into parameters.

use super::Counts;
use crate::amp::float_kind;
use crate::error::Result;
use crate::group::{Group, InFlight};
use crate::nn::{WeakParam, is_floating};
use accelerate_core::config::{FloatType, MixedPrecisionPolicy};
use accelerate_core::plan::Unit;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::version;

pub(super) struct UnitState {
    /// This rank's part, `[shard_elements]`, padded with zeros. In `whole` where that always stays and has its type.
    pub(super) shard: Tensor,
    /// The parameters' pieces of it: leaves, each with elements of one parameter, perhaps none.
    pub(super) locals: Vec<Tensor>,
    /// `[world_size * shard_elements]` of the type to compute in, while gathered.
    pub(super) whole: Option<Tensor>,
    /// Other ranks' parts may have changed since the whole was gathered. Only where it always stays.
    pub(super) is_stale: bool,
    /// How often this rank's part had been written to when the whole was gathered.
    gathered_version: i64,
    pub(super) kinds: Kinds,
    /// What `whole` will be.
    pub(super) arriving: Option<(Tensor, Option<InFlight>)>,
    /// The parameters as this forward pass sees them, and whether gradients are recorded.
    pub(super) outputs: Option<(bool, Vec<Tensor>)>,
    /// The parameters, which the storage of each keeps this alive through.
    pub(super) params: Vec<WeakParam>,
    /// Sums of whole gradients that have not been reduced, by member; empty if there are none.
    pub(super) unreduced: Vec<Option<Tensor>>,
    /// How many saved tensors in graphs stand for parameters of the unit.
    pub(super) num_tokens: usize,
    /// How many need the part of an offloaded unit in memory.
    pub(super) num_users: usize,
    /// Parameters whose part is not in `shard` yet.
    pub(super) num_missing: usize,
    pub(super) counts: Counts,
}

/// The element types of a unit beside that of its part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kinds {
    pub(super) compute: Kind,
    pub(super) reduce: Kind,
}

impl Kinds {
    /// Integers stay what they are.
    fn new(own: Kind, policy: MixedPrecisionPolicy) -> Self {
        let kind = |wanted: Option<FloatType>| match wanted {
            Some(_) if !is_floating(own) => own,
            Some(wanted) => float_kind(wanted),
            None => own,
        };
        Self { compute: kind(policy.param_dtype), reduce: kind(policy.reduce_dtype) }
    }
}

impl UnitState {
    /// Room on `home` for this rank's part of parameters that are of this type and computed with on this device, or for all
    /// of them and the part in it if they stay whole.
    pub(super) fn new(
        unit: &Unit,
        params: Vec<WeakParam>,
        options: (Kind, Device),
        home: Device,
        group: &Group,
        stays_whole: bool,
        policy: MixedPrecisionPolicy,
    ) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let size = unit.shard_elements as i64;
        let kinds = Kinds::new(options.0, policy);
        // Memory that nobody has written to is none yet, and whole parameters are still there.
        let whole = || Tensor::f_empty([size * group.world_size() as i64], (kinds.compute, options.1));
        let whole = if stays_whole { Some(whole()?) } else { None };
        let shard = match &whole {
            Some(whole) if kinds.compute == options.0 => whole.f_narrow(0, size * group.rank() as i64, size)?,
            _ => {
                let own = Tensor::f_empty([size], (options.0, home))?;
                // Copies from and to a GPU then need no detour.
                if home == Device::Cpu && options.1.is_cuda() { own.f_pin_memory(options.1)? } else { own }
            }
        };
        let num_own = unit.shard_of(group.rank()).len() as i64;
        let _padding = shard.f_narrow(0, num_own, size - num_own)?.f_zero_()?;
        let mut locals = pieces(unit, group.rank(), &shard)?;
        for local in &mut locals {
            *local = local.f_detach()?.f_set_requires_grad(unit.requires_grad)?;
        }
        Ok(Self {
            shard,
            locals,
            whole,
            is_stale: stays_whole,
            gathered_version: 0,
            kinds,
            arriving: None,
            outputs: None,
            params,
            unreduced: Vec::new(),
            num_tokens: 0,
            num_users: 0,
            num_missing: unit.parameters.len(),
            counts: Counts::default(),
        })
    }
}

impl UnitState {
    /// The whole unit, if that is here and as the other ranks have it: since it was gathered, nobody has written to the
    /// part of this rank in it.
    pub(super) fn usable_whole(&self) -> Option<Tensor> {
        let whole = self.whole.as_ref()?;
        let is_usable = !self.is_stale && self.version().is_ok_and(|version| version == self.gathered_version);
        is_usable.then(|| whole.shallow_clone())
    }

    /// How often this rank's part has been written to.
    pub(super) fn version(&self) -> Result<i64> {
        Ok(version(&self.shard)?)
    }

    /// The same when the whole was gathered.
    pub(super) fn gathered_version(&self) -> i64 {
        self.gathered_version
    }

    /// The whole unit has arrived in `whole`.
    pub(super) fn arrived(&mut self, whole: &Tensor) -> Result<()> {
        self.gathered_version = self.version()?;
        self.is_stale = false;
        self.whole = Some(whole.shallow_clone());
        Ok(())
    }
}

/// The parameters' pieces of a rank's part of a unit.
pub(super) fn pieces(unit: &Unit, rank: usize, own: &Tensor) -> Result<Vec<Tensor>> {
    let first = unit.shard_of(rank).start;
    let piece = |member: usize| {
        let part = unit.part_of(member, rank);
        let start = if part.is_empty() { 0 } else { unit.offsets[member] + part.start - first };
        Ok(own.f_narrow(0, start as i64, part.len() as i64)?)
    };
    (0..unit.parameters.len()).map(piece).collect()
}

/// The parameters in a whole unit, each with a version counter of its own.
pub(super) fn views(unit: &Unit, shapes: &[Vec<i64>], whole: &Tensor) -> Result<Vec<Tensor>, tch::TchError> {
    let _no_grad = tch::no_grad_guard();
    let view = |(member, &position): (usize, &usize)| {
        let shape = &shapes[position];
        let mut view = Tensor::f_empty([0], (whole.f_kind()?, whole.device()))?;
        let offset = unit.offsets[member] as i64;
        view.f_set_source_tensor_storage_offset_(whole, offset, shape, contiguous_strides(shape))
    };
    unit.parameters.iter().enumerate().map(view).collect()
}

/// Of a tensor without gaps.
fn contiguous_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}
