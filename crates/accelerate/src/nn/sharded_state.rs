//! States of which each process has shards.

use super::storage::full_layout;
use super::{Param, ParamStore};
use crate::error::{NnError, Result};
use crate::offload::outline;
use accelerate_core::layout::{Copied, Layout};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use tch::Tensor;

/// One process's shards of a model's parameters and persistent buffers, as values: what [`ParamStore::state_dict`] is to a model
/// that is not sharded. The shards of all processes make up a model on any number of processes.
///
/// ```
/// use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
/// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor, testing};
///
/// let builder = || Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
/// let model = |accelerator: &Accelerator| {
///     let store = ParamStore::new(accelerator.device());
///     let linear = Linear::new(store.root(), 2, 2, Default::default())?;
///     accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))
/// };
/// let shards = testing::ranks(2, builder(), |accelerator| model(&accelerator)?.params().sharded_state_dict())?;
/// assert_eq!(shards[0].tensors["weight"].numel() + shards[1].tensors["weight"].numel(), 4);
/// let alone = builder().cpu(true).build()?;
/// model(&alone)?.params().load_sharded_state_dict(&shards)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ShardedStateDict {
    /// By name, `[elements]` of this process; in full and in shape for what is not sharded. Copies.
    pub tensors: BTreeMap<String, Tensor>,
    /// Of the sharded ones, which elements these are.
    pub layouts: BTreeMap<String, Layout>,
}

impl ShardedStateDict {
    fn piece(&self, name: &str) -> Option<(Layout, &Tensor)> {
        let tensor = self.tensors.get(name)?;
        let layout = self.layouts.get(name).cloned();
        Some((layout.unwrap_or_else(|| full_layout(tensor)), tensor))
    }
}

impl Param {
    /// The values that this process stores, in the shape of [`local`](Self::local); of a parameter that is offloaded, while it is
    /// [loaded](Self::load). What a device map keeps on a disk has no values in `local`.
    pub(crate) fn stored_values(&self) -> Result<Tensor> {
        match self.is_kept_on_disk() && !self.is_stored_as_several() {
            true => self.full_tensor(),
            false => Ok(self.local().f_detach()?),
        }
    }
}

impl ParamStore {
    /// Copies of this process's shards of all parameters and persistent buffers. Nothing travels: not collective.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn sharded_state_dict(&self) -> Result<ShardedStateDict> {
        self.shards(|param| {
            let _resident = param.load()?;
            Ok(param.stored_values()?.f_detach_copy()?)
        })
    }

    /// As [`sharded_state_dict`](Self::sharded_state_dict), but in the memory of the parameters themselves, which the next step
    /// changes. Without memory where they are elsewhere than on their device.
    pub(crate) fn sharded_state_views(&self) -> Result<ShardedStateDict> {
        self.shards(|param| {
            let local = param.local();
            if param.is_offloaded() { outline(&local.size(), local.f_kind()?) } else { Ok(local.f_detach()?) }
        })
    }

    fn shards(&self, shard: impl Fn(&Param) -> Result<Tensor>) -> Result<ShardedStateDict> {
        let mut state = ShardedStateDict::default();
        for param in self.persistent() {
            state.tensors.insert(param.name().to_owned(), shard(&param)?);
            state.layouts.extend(param.shard_layout().map(|layout| (param.name().to_owned(), layout)));
        }
        Ok(state)
    }

    /// Takes this process's shards from those of other processes, however many these were. Not collective.
    ///
    /// # Errors
    /// Parameters of other shapes, elements that are in none of the shards, and tensors that the model does not have, all of them in
    /// one error; then nothing was changed.
    pub fn load_sharded_state_dict(&self, shards: &[ShardedStateDict]) -> Result<()> {
        self.load_shards_but(&BTreeSet::new(), shards)
    }

    /// The same but for tensors that stay as they are.
    pub(crate) fn load_shards_but(&self, left_out: &BTreeSet<String>, shards: &[ShardedStateDict]) -> Result<()> {
        self.check_shards_but(left_out, shards)?;
        for param in self.persistent().iter().filter(|param| !left_out.contains(param.name())) {
            let pieces: Vec<_> = shards.iter().filter_map(|state| state.piece(param.name())).collect();
            let pieces: Pieces<'_> = pieces.iter().map(|(layout, tensor)| (layout, *tensor)).collect();
            // Most often one piece is what is wanted, and is copied once.
            let shard = match &pieces[..] {
                [(layout, tensor)] if **layout == param.layout() => tensor.f_detach()?.f_reshape([-1])?,
                _ => assemble(&param.layout(), &pieces)?.map_err(|problem| mismatch(param, &problem))?,
            };
            param.copy_shard_(&shard)?;
        }
        Ok(())
    }

    /// Whether [`load_shards_but`](Self::load_shards_but) would take these. Nothing is changed, and no tensor is copied.
    pub(crate) fn check_shards_but(&self, left_out: &BTreeSet<String>, shards: &[ShardedStateDict]) -> Result<()> {
        let mut problems = Vec::new();
        for param in self.persistent().iter().filter(|param| !left_out.contains(param.name())) {
            let pieces: Vec<_> = shards.iter().filter_map(|state| state.piece(param.name())).collect();
            let pieces = pieces.iter().map(|(layout, tensor)| (layout, *tensor)).collect();
            if let Err(problem) = copies(&param.layout(), &pieces) {
                problems.push(format!("\"{}\": {problem}", param.name()));
            }
        }
        let known: BTreeSet<String> = self.persistent().iter().map(|param| param.name().to_owned()).collect();
        let aliases = self.aliases();
        let found: BTreeSet<&String> = shards.iter().flat_map(|state| state.tensors.keys()).collect();
        let unexpected = found.into_iter().filter(|name| !known.contains(*name) && !aliases.contains_key(*name));
        problems.extend(unexpected.map(|name| format!("\"{name}\": the model has no tensor of this name")));
        if problems.is_empty() { Ok(()) } else { Err(NnError::PartsMismatch { problems }.into()) }
    }
}

/// Copies the elements of `source` to `place`, in their order, unless `source` is the memory of `place` itself, as after a checkpoint
/// was read there. Either way it counts as a write, which a backward pass that has saved `place` finds.
pub(super) fn copy_unless_there(place: &Tensor, source: &Tensor) -> Result<()> {
    let source = source.f_reshape(place.size())?;
    let is_there = place.numel() > 0
        && (place.data_ptr(), place.f_kind()?, place.device())
            == (source.data_ptr(), source.f_kind()?, source.device())
        && place.is_contiguous()
        && source.is_contiguous();
    // Of a view without elements the write is one to the whole tensor.
    let (mut written, source) = match is_there {
        true => (place.f_reshape([-1])?.f_narrow(0, 0, 0)?, source.f_reshape([-1])?.f_narrow(0, 0, 0)?),
        false => (place.shallow_clone(), source),
    };
    written.f_copy_(&source)?;
    Ok(())
}

fn mismatch(param: &Param, problem: &str) -> NnError {
    NnError::PartsMismatch { problems: vec![format!("\"{}\": {problem}", param.name())] }
}

/// The layouts of pieces of one tensor, and their elements as any tensor of as many.
pub(crate) type Pieces<'a> = Vec<(&'a Layout, &'a Tensor)>;

/// The elements `wanted` of a tensor, flat, from pieces of it. The inner error says why they do not fit.
pub(crate) fn assemble(wanted: &Layout, pieces: &Pieces<'_>) -> Result<Result<Tensor, String>> {
    let copies = match copies(wanted, pieces) {
        Ok(copies) => copies,
        Err(problem) => return Ok(Err(problem)),
    };
    let Some((_, first)) = pieces.first() else { return Ok(Err("nothing of it is there".to_owned())) };
    let _no_grad = tch::no_grad_guard();
    let shard = Tensor::f_empty([wanted.numel() as i64], (first.f_kind()?, first.device()))?;
    let flat: Vec<Tensor> =
        pieces.iter().map(|(_, tensor)| Ok(tensor.f_detach()?.f_reshape([-1])?)).collect::<Result<_>>()?;
    for Copied { source, from, to } in copies {
        let own = flat[source].f_narrow(0, from.start as i64, from.len() as i64)?;
        shard.f_narrow(0, to as i64, from.len() as i64)?.f_copy_(&own)?;
    }
    Ok(Ok(shard))
}

/// How to put `wanted` together, or why the pieces do not fit.
fn copies(wanted: &Layout, pieces: &Pieces<'_>) -> Result<Vec<Copied>, String> {
    if pieces.is_empty() {
        return Err("nothing of it is there".to_owned());
    }
    if let Some((found, _)) = pieces.iter().find(|(found, _)| found.shape() != wanted.shape()) {
        return Err(format!("its shape is {:?}, not {:?}", found.shape(), wanted.shape()));
    }
    if let Some((layout, tensor)) = pieces.iter().find(|(layout, tensor)| layout.numel() != tensor.numel()) {
        return Err(format!("{layout} are {} numbers", tensor.numel()));
    }
    let copies = wanted.copies_from(pieces.iter().map(|(layout, _)| *layout));
    copies.map_err(|Range { start, end }| format!("elements {start}..{end} are missing"))
}

/// The elements of `layout`, flat, of a tensor that has the full shape: a view where they lie one behind the other.
pub(crate) fn flat_elements(full: &Tensor, layout: &Layout) -> Result<Tensor> {
    let flat = full.f_reshape([-1])?;
    let runs = layout.runs().map(|run| flat.f_narrow(0, run.start as i64, run.len() as i64));
    let mut runs = runs.collect::<Result<Vec<_>, _>>()?;
    match runs.len() {
        0 => Ok(flat.f_narrow(0, 0, 0)?),
        1 => Ok(runs.swap_remove(0)),
        _ => Ok(Tensor::f_cat(&runs, 0)?),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};
    use torch_ext::autograd::version;

    #[test]
    fn what_was_read_into_place_counts_as_written() {
        let place = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).view([2, 2]).set_requires_grad(true);
        let _no_grad = tch::no_grad_guard();
        let own = place.detach().view([-1]);
        let before = version(&place).unwrap();
        copy_unless_there(&place, &own).unwrap();
        assert!(before < version(&place).unwrap());
        // Other memory is copied.
        copy_unless_there(&place, &Tensor::from_slice(&[5f64, 6.0, 7.0, 8.0])).unwrap();
        assert_eq!(Vec::<f32>::try_from(own.shallow_clone()).unwrap(), [5.0, 6.0, 7.0, 8.0]);
        assert!(copy_unless_there(&place, &Tensor::zeros([3], (Kind::Float, Device::Cpu))).is_err());
        copy_unless_there(&place.narrow(0, 0, 0), &own.narrow(0, 0, 0)).unwrap();
    }
}
