//! States of which each process has shards.

use super::{Param, ParamStore};
use crate::error::{NnError, Result};
use accelerate_core::shards::{Copied, cover};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use tch::Tensor;

/// Which elements of a parameter a process keeps.
///
/// ```
/// use accelerate::nn::TensorShard;
/// let shard = TensorShard { shape: vec![3, 2], start: 4, end: 6 };
/// assert!(!shard.is_full() && TensorShard { start: 0, ..shard }.is_full());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorShard {
    /// Sizes of the full parameter.
    pub shape: Vec<i64>,
    /// The first element, counted in the order of the dims.
    pub start: usize,
    /// The one behind the last.
    pub end: usize,
}

impl TensorShard {
    /// Of a parameter of which this process keeps a shard; `None` if the parameter is not sharded.
    pub(crate) fn of(param: &Param) -> Option<Self> {
        param.unit()?;
        let Range { start, end } = param.shard_range();
        Some(Self { shape: param.shape(), start, end })
    }

    /// Are these all elements?
    pub fn is_full(&self) -> bool {
        let numel: usize = self.shape.iter().map(|&size| size.max(0) as usize).product();
        (self.start, self.end) == (0, numel)
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

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
/// let shards = testing::ranks_with(2, builder(), |accelerator| model(&accelerator)?.params().sharded_state_dict())?;
/// assert_eq!(shards[0].tensors["weight"].numel() + shards[1].tensors["weight"].numel(), 4);
/// let alone = builder().cpu(true).build()?;
/// model(&alone)?.params().load_sharded_state_dict(&shards)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ShardedStateDict {
    /// By name, `[elements]` of this process; in full and in shape for what is not sharded. Copies.
    pub tensors: BTreeMap<String, Tensor>,
    /// Of the sharded ones, which elements.
    pub shards: BTreeMap<String, TensorShard>,
}

impl ShardedStateDict {
    fn piece(&self, name: &str) -> Option<(Vec<i64>, Range<usize>, &Tensor)> {
        let tensor = self.tensors.get(name)?;
        Some(match self.shards.get(name) {
            Some(shard) => (shard.shape.clone(), shard.range(), tensor),
            None => (tensor.size(), 0..tensor.numel(), tensor),
        })
    }
}

impl ParamStore {
    /// Copies of this process's shards of all parameters and persistent buffers. Nothing travels: not collective.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn sharded_state_dict(&self) -> Result<ShardedStateDict> {
        let mut state = ShardedStateDict::default();
        for param in self.persistent() {
            let _resident = param.load()?;
            state.tensors.insert(param.name().to_owned(), param.local().f_detach_copy()?);
            state.shards.extend(TensorShard::of(&param).map(|shard| (param.name().to_owned(), shard)));
        }
        Ok(state)
    }

    /// Takes this process's shards from those of other processes, however many these were. Not collective.
    ///
    /// # Errors
    /// Parameters of other shapes, and elements that are in none of the shards, all of them in one error; then nothing was
    /// changed.
    pub fn load_sharded_state_dict(&self, shards: &[ShardedStateDict]) -> Result<()> {
        let mut loaded = Vec::new();
        let mut problems = Vec::new();
        for param in self.persistent() {
            let pieces: Vec<_> = shards.iter().filter_map(|state| state.piece(param.name())).collect();
            let pieces: Vec<_> =
                pieces.iter().map(|(shape, range, tensor)| (shape.as_slice(), range.clone(), *tensor)).collect();
            match assemble(&param.shape(), param.shard_range(), &pieces)? {
                Ok(shard) => loaded.push((param, shard)),
                Err(problem) => problems.push(format!("\"{}\": {problem}", param.name())),
            }
        }
        if !problems.is_empty() {
            return Err(NnError::PartsMismatch { problems }.into());
        }
        loaded.iter().try_for_each(|(param, shard)| param.copy_shard_(shard))
    }
}

/// The elements `wanted` of a tensor of shape `shape`, flat, from pieces: the shapes of the tensors that they are pieces of, their
/// elements, and those as any tensor of as many. The inner error says why they do not fit.
pub(crate) fn assemble(
    shape: &[i64],
    wanted: Range<usize>,
    pieces: &[(&[i64], Range<usize>, &Tensor)],
) -> Result<Result<Tensor, String>> {
    let Some((_, _, first)) = pieces.first() else { return Ok(Err("nothing of it is there".to_owned())) };
    if let Some((found, ..)) = pieces.iter().find(|(found, ..)| *found != shape) {
        return Ok(Err(format!("its shape is {found:?}, not {shape:?}")));
    }
    if let Some((_, range, tensor)) = pieces.iter().find(|(_, range, tensor)| range.len() != tensor.numel()) {
        return Ok(Err(format!("elements {range:?} are {} numbers", tensor.numel())));
    }
    let ranges: Vec<_> = pieces.iter().map(|(_, range, _)| range.clone()).collect();
    let copies = match cover(wanted.clone(), &ranges) {
        Ok(copies) => copies,
        Err(Range { start, end }) => return Ok(Err(format!("elements {start}..{end} are missing"))),
    };
    let _no_grad = tch::no_grad_guard();
    let shard = Tensor::f_empty([wanted.len() as i64], (first.f_kind()?, first.device()))?;
    for Copied { source, from, to } in copies {
        let own = pieces[source].2.f_detach()?.f_reshape([-1])?.f_narrow(0, from.start as i64, from.len() as i64)?;
        shard.f_narrow(0, to as i64, from.len() as i64)?.f_copy_(&own)?;
    }
    Ok(Ok(shard))
}
