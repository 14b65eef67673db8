//! States of which each process has parts.

use super::{Param, ParamStore};
use crate::error::{NnError, Result};
use accelerate_core::parts::{Copied, cover};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use tch::Tensor;

/// Which elements of a parameter a process keeps.
///
/// ```
/// use accelerate::nn::TensorPart;
/// let part = TensorPart { shape: vec![3, 2], start: 4, end: 6 };
/// assert!(!part.is_whole() && TensorPart { start: 0, ..part }.is_whole());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPart {
    /// Sizes of the whole parameter.
    pub shape: Vec<i64>,
    /// The first element, counted in the order of the dims.
    pub start: usize,
    /// The one behind the last.
    pub end: usize,
}

impl TensorPart {
    /// Of a parameter of which this process keeps a part; `None` if the parameter is not sharded.
    pub(crate) fn of(param: &Param) -> Option<Self> {
        param.unit()?;
        let Range { start, end } = param.part();
        Some(Self { shape: param.shape(), start, end })
    }

    /// Are these all elements?
    pub fn is_whole(&self) -> bool {
        let numel: usize = self.shape.iter().map(|&size| size.max(0) as usize).product();
        (self.start, self.end) == (0, numel)
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// One process's parts of a model's parameters and persistent buffers, as values: what [`ParamStore::state_dict`] is to a whole
/// model. The parts of all processes make up a model on any number of processes.
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
/// let parts = testing::ranks_with(2, builder(), |accelerator| model(&accelerator)?.params().sharded_state_dict())?;
/// assert_eq!(parts[0].tensors["weight"].numel() + parts[1].tensors["weight"].numel(), 4);
/// let alone = builder().cpu(true).build()?;
/// model(&alone)?.params().load_sharded_state_dict(&parts)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ShardedStateDict {
    /// By name, `[elements]` of this process; whole and in shape for what is not sharded. Copies.
    pub tensors: BTreeMap<String, Tensor>,
    /// Of the sharded ones, which elements.
    pub parts: BTreeMap<String, TensorPart>,
}

impl ShardedStateDict {
    fn piece(&self, name: &str) -> Option<(Vec<i64>, Range<usize>, &Tensor)> {
        let tensor = self.tensors.get(name)?;
        Some(match self.parts.get(name) {
            Some(part) => (part.shape.clone(), part.range(), tensor),
            None => (tensor.size(), 0..tensor.numel(), tensor),
        })
    }
}

impl ParamStore {
    /// Copies of this process's parts of all parameters and persistent buffers. Nothing travels: not collective.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn sharded_state_dict(&self) -> Result<ShardedStateDict> {
        let mut state = ShardedStateDict::default();
        for param in self.persistent() {
            let _resident = param.bring()?;
            state.tensors.insert(param.name().to_owned(), param.local().f_detach_copy()?);
            state.parts.extend(TensorPart::of(&param).map(|part| (param.name().to_owned(), part)));
        }
        Ok(state)
    }

    /// Takes this process's parts from those of other processes, however many these were. Not collective.
    ///
    /// # Errors
    /// Parameters of other shapes, and elements that are in none of the parts, all of them in one error; then nothing was
    /// changed.
    pub fn load_sharded_state_dict(&self, parts: &[ShardedStateDict]) -> Result<()> {
        let mut loaded = Vec::new();
        let mut problems = Vec::new();
        for param in self.persistent() {
            let pieces: Vec<_> = parts.iter().filter_map(|state| state.piece(param.name())).collect();
            let pieces: Vec<_> =
                pieces.iter().map(|(shape, range, tensor)| (shape.as_slice(), range.clone(), *tensor)).collect();
            match assemble(&param.shape(), param.part(), &pieces)? {
                Ok(part) => loaded.push((param, part)),
                Err(problem) => problems.push(format!("\"{}\": {problem}", param.name())),
            }
        }
        if !problems.is_empty() {
            return Err(NnError::PartsMismatch { problems }.into());
        }
        loaded.iter().try_for_each(|(param, part)| param.copy_part_(part))
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
    let part = Tensor::f_empty([wanted.len() as i64], (first.f_kind()?, first.device()))?;
    for Copied { source, from, to } in copies {
        let own = pieces[source].2.f_detach()?.f_reshape([-1])?.f_narrow(0, from.start as i64, from.len() as i64)?;
        part.f_narrow(0, to as i64, from.len() as i64)?.f_copy_(&own)?;
    }
    Ok(Ok(part))
}
