//! Pipelined inference: each process computes some blocks of a model (`inference.py` of the reference).
//!
//! Method: Huang et al., "GPipe", arXiv 1811.06965, without its backward pass. A batch goes through the processes in chunks, so that one
//! computes a chunk while the next one computes the chunk before.

use crate::accelerator::Accelerator;
use crate::amp::{MixedPrecision, Precision};
use crate::engine::same_weights;
use crate::error::{Error, Result, StateError};
use crate::group::Group;
use crate::nn::{Init, Param, Pipelined, Resident, Storage, is_floating};
use crate::tensor_tree::{Parcel, TensorTree};
use accelerate_core::mesh::Axis;
use accelerate_core::pipeline::{balanced_stages, rows_of_chunk, stages_from_points};
use std::fmt;
use std::ops::Range;
use tch::Tensor;
use torch_ext::file::aligned_bytes;
use torch_ext::scalar;

const OP: &str = "pipelined forward";

/// Tensors are used where they lie in what was sent.
const PARCEL_ALIGNMENT: usize = 64;

/// What [`prepare_pippy`] may be told; defaults are the reference's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PippyOptions {
    /// Paths of blocks at which the next process goes on, one fewer than processes. Default: none, which is the reference's `"auto"`:
    /// stages whose largest has the fewest bytes.
    pub split_points: Vec<String>,
    /// In how many chunks a batch goes through. Default: the number of processes.
    pub num_chunks: Option<usize>,
    /// Do all processes get the output, and not the last one alone? Default: false.
    pub gather_output: bool,
}

/// Makes a model ready for inference by all processes, each of which computes some of its blocks (`prepare_pippy` of the reference).
///
/// All processes begin with the weights of the first. Each keeps its blocks, and what belongs to no block; the memory of all other blocks is
/// free afterwards. The model computes in the accelerator's precision and is in evaluation mode, and its parameters cannot be trained, saved or loaded any more. Collective.
///
/// In the reference a graph of the model is traced with example inputs; a Rust model says itself what its blocks are, by [`Pipelined`].
///
/// ```
/// use accelerate::nn::{Linear, Module, ParamStore, Pipelined};
/// use accelerate::{PippyOptions, prepare_pippy, tch::{Device, Kind, Tensor}, testing};
/// # use std::ops::Range;
/// # struct Stack { store: ParamStore, layers: Vec<Linear> }
/// # impl Module for Stack {
/// #     type Input = Tensor;
/// #     type Output = Tensor;
/// #     fn forward(&self, input: &Tensor) -> accelerate::Result<Tensor> {
/// #         self.end(self.blocks(0..self.layers.len(), self.begin(input)?)?)
/// #     }
/// #     fn params(&self) -> &ParamStore { &self.store }
/// # }
/// # impl Pipelined for Stack {
/// #     fn block_paths(&self) -> Vec<String> { (0..self.layers.len()).map(|layer| layer.to_string()).collect() }
/// #     fn begin(&self, input: &Tensor) -> accelerate::Result<Vec<Tensor>> { Ok(vec![input.shallow_clone()]) }
/// #     fn blocks(&self, blocks: Range<usize>, mut carried: Vec<Tensor>) -> accelerate::Result<Vec<Tensor>> {
/// #         for layer in &self.layers[blocks] { carried[0] = layer.forward(&carried[0])?; }
/// #         Ok(carried)
/// #     }
/// #     fn end(&self, mut carried: Vec<Tensor>) -> accelerate::Result<Tensor> { Ok(carried.swap_remove(0)) }
/// # }
///
/// testing::ranks(2, Default::default(), |accelerator| {
///     let store = ParamStore::new(accelerator.device());
///     let layers = (0..4).map(|layer| Linear::new(store.root() / layer, 8, 8, Default::default()));
///     let layers = layers.collect::<accelerate::Result<_>>()?;
///     let model = prepare_pippy(&accelerator, Stack { store, layers }, &PippyOptions::default())?;
///     assert_eq!(model.stage(), [0..2, 2..4][accelerator.process_index()]);
///     let output = model.forward(&Tensor::ones([3, 8], (Kind::Float, Device::Cpu)))?;
///     assert_eq!(output.map(|output| output.size()), accelerator.is_last_process().then(|| vec![3, 8]));
///     Ok(())
/// })?;
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// [`is_config`](Error::is_config): fewer blocks than processes, and points that are no blocks in their order. Models that differ between
/// processes; weights without memory, quantised ones and such that a device map keeps elsewhere; axes that divide layers or sequences; on
/// all processes.
pub fn prepare_pippy<M: Pipelined>(
    accelerator: &Accelerator,
    model: M,
    options: &PippyOptions,
) -> Result<PipelinedModel<M>> {
    let group = accelerator.group();
    let num_stages = group.world_size();
    let paths = model.block_paths();
    let stages = check(accelerator, &model).and_then(|()| match options.split_points.is_empty() {
        true => Ok(balanced_stages(&block_sizes(&model, &paths), num_stages)?),
        false => Ok(stages_from_points(&paths, &options.split_points, num_stages)?),
    });
    let stages = group.agree_on_success("prepare_pippy", stages)?;
    let num_chunks = options.num_chunks.unwrap_or(num_stages).max(1);
    let description = format!("{stages:?} {num_chunks} {}", options.gather_output);
    group.agree("prepare_pippy", &description, "give all processes the same options")?;
    same_weights(group, model.params())?;
    let stage = stages[group.rank()].clone();
    group.agree_on_success("prepare_pippy", leave_to_others(&model, &paths, &stages, &stage))?;
    torch_ext::storage::release_free_memory();
    model.params().eval();
    let [before, after] = neighbours(group)?;
    let group = group.clone();
    let (precision, gather_output) = (accelerator.precision(), options.gather_output);
    Ok(PipelinedModel { model, group, before, after, stage, num_chunks, gather_output, precision })
}

/// Frees the blocks of other processes.
fn leave_to_others<M: Pipelined>(
    model: &M,
    paths: &[String],
    stages: &[Range<usize>],
    own: &Range<usize>,
) -> Result<()> {
    for (block, path) in paths.iter().enumerate().filter(|(block, _)| !own.contains(block)) {
        let owner = stages.iter().position(|stage| stage.contains(&block)).unwrap_or_default();
        for param in params_of(model, path) {
            let absent = Absent::new(&param, owner)?;
            drop(param.replace_storage(Box::new(absent)));
        }
    }
    Ok(())
}

fn check<M: Pipelined>(accelerator: &Accelerator, model: &M) -> Result<()> {
    let mesh = accelerator.mesh();
    if let Some(axis) = [Axis::Tp, Axis::Cp, Axis::Sp].into_iter().find(|&axis| 1 < mesh.size(axis)) {
        return Err(StateError::NotPipelined { what: format!("ranks along {}", axis.name()) }.into());
    }
    if accelerator.mixed_precision() == MixedPrecision::Fp8 {
        return Err(StateError::NotPipelined { what: "mixed_precision fp8".to_owned() }.into());
    }
    let all = model.params().parameters_and_buffers();
    match all.iter().find(|param| param.is_deferred() || param.is_dispatched() || param.is_stored_as_several()) {
        Some(param) => {
            let what = format!("`{}`, which is quantised, or has no memory of its own here", param.name());
            Err(StateError::NotPipelined { what }.into())
        }
        None => Ok(()),
    }
}

fn params_of<M: Pipelined>(model: &M, path: &str) -> Vec<Param> {
    let within = |param: &Param| param.name().strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    model.params().parameters_and_buffers().into_iter().filter(within).collect()
}

fn block_sizes<M: Pipelined>(model: &M, paths: &[String]) -> Vec<u64> {
    let num_bytes = |param: &Param| (param.local().numel() * param.kind().elt_size_in_bytes()) as u64;
    paths.iter().map(|path| params_of(model, path).iter().map(num_bytes).sum()).collect()
}

/// This process with the one before it, and with the one after it. Collective.
fn neighbours(group: &Group) -> Result<[Option<Group>; 2]> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut found = [None, None];
    // Of two neighbours, the first has an even number in one round and an odd one in the other.
    for parity in [0, 1] {
        let first = if rank % 2 == parity { Some(rank) } else { rank.checked_sub(1) };
        match first.filter(|first| first + 1 < world_size) {
            Some(first) => {
                let pair = group.subgroup(&[first, first + 1])?;
                found[usize::from(first == rank)] = Some(pair);
            }
            None => drop(group.subgroup(&[rank])?),
        }
    }
    Ok(found)
}

/// A model of which each process computes some blocks: see [`prepare_pippy`].
pub struct PipelinedModel<M> {
    model: M,
    group: Group,
    /// The process before this one, and this one.
    before: Option<Group>,
    /// This process, and the one after it.
    after: Option<Group>,
    stage: Range<usize>,
    num_chunks: usize,
    gather_output: bool,
    precision: Precision,
}

impl<M: Pipelined> PipelinedModel<M>
where
    M::Input: TensorTree,
{
    /// The blocks of this process.
    pub fn stage(&self) -> Range<usize> {
        self.stage.clone()
    }

    /// The output for the input of the first process, `[rows, ..]`: on the last process, or with `gather_output` on all of them; `None`
    /// elsewhere. The inputs of other processes are not looked at. Dim 0 of all tensors of the input is that of the rows; where chunks
    /// do not divide them, the last row is repeated and taken away again. Records no gradients. Collective.
    ///
    /// # Errors
    /// On all processes: an input without rows, or with tensors of different numbers of rows; the first error of a layer on any of them.
    pub fn forward(&self, input: &M::Input) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let rows = if rank == 0 { num_rows(input) } else { Ok(0) };
        let own = self.group.agree_on_success(OP, rows)?;
        let told = Tensor::f_from_slice(&[own as i64])?;
        self.group.broadcast(&told, 0)?;
        let num_rows = i64::try_from(&told)?;
        let chunk_rows = rows_of_chunk(num_rows as usize, self.num_chunks) as i64;
        let (mut outputs, mut failed) = (Vec::new(), None);
        for chunk in 0..self.num_chunks as i64 {
            // A process that has failed goes on to receive, and sends that it has, so that nobody waits for it.
            let begun = match &self.before {
                None => {
                    let input = rows_of(input, chunk * chunk_rows, chunk_rows, num_rows);
                    Some(input.and_then(|input| self.precision.autocast(|| self.model.begin(&input))?))
                }
                Some(before) => self.unpacked(receive(before)?).transpose(),
            };
            let carried = begun.map(|begun| begun.and_then(|carried| self.own_blocks(carried, &mut outputs)));
            let packed = carried.map(|carried| pack(&carried?)).transpose().unwrap_or_else(|error| {
                failed.get_or_insert(error);
                None
            });
            if let Some(after) = &self.after {
                send(after, packed)?;
            }
        }
        let output = match (failed, rank + 1 == world_size) {
            (Some(error), _) => Err(error),
            (None, true) => joined(&outputs, num_rows).map(Some),
            (None, false) => Ok(None),
        };
        let packed = output.and_then(|output| {
            let packed =
                output.as_ref().filter(|_| self.gather_output).map(|output| pack(std::slice::from_ref(output)));
            Ok((output, packed.transpose()?))
        });
        let (output, packed) = self.group.agree_on_success(OP, packed)?;
        if !self.gather_output {
            return Ok(output);
        }
        let sent = broadcast(&self.group, packed, world_size - 1)?;
        match (output, sent) {
            (Some(output), _) => Ok(Some(output)),
            (None, bytes) => Ok(self.unpacked(bytes)?.and_then(|mut tensors| tensors.pop())),
        }
    }

    /// What goes on to the next process; on the last one nothing, but one more output.
    fn own_blocks(&self, carried: Vec<Tensor>, outputs: &mut Vec<Tensor>) -> Result<Vec<Tensor>> {
        let carried = self.precision.autocast(|| self.model.blocks(self.stage.clone(), carried))??;
        if self.after.is_some() {
            return Ok(carried);
        }
        let output = self.precision.autocast(|| self.model.end(carried))??;
        outputs.push(self.precision.cast_outputs(output)?);
        Ok(Vec::new())
    }

    /// Tensors that another process has packed, where this model is computed; `None` if that has failed.
    fn unpacked(&self, bytes: Option<Tensor>) -> Result<Option<Vec<Tensor>>> {
        let Some(bytes) = bytes else { return Ok(None) };
        let device = self.model.params().device();
        let mut parcel = Parcel::from_bytes(&bytes)?;
        let count = parcel.take::<usize>()?;
        (0..count).map(|_| Ok(parcel.take_tensor()?.f_to_device(device)?)).collect::<Result<_>>().map(Some)
    }
}

impl<M: fmt::Debug> fmt::Debug for PipelinedModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, stage, num_chunks, gather_output, .. } = self;
        f.debug_struct("PipelinedModel")
            .field("model", model)
            .field("stage", stage)
            .field("num_chunks", num_chunks)
            .field("gather_output", gather_output)
            .finish_non_exhaustive()
    }
}

/// Rows of all tensors of an input.
fn num_rows<I: TensorTree>(input: &I) -> Result<usize> {
    let mut sizes = Vec::new();
    input.for_each_tensor(&mut |tensor| sizes.push(tensor.size().first().copied().unwrap_or(0)));
    match sizes.first() {
        Some(&rows) if 0 < rows && sizes.iter().all(|&size| size == rows) => Ok(rows as usize),
        _ => Err(StateError::PipelinedRows { sizes }.into()),
    }
}

/// Some rows of an input; behind its end, the last one again.
fn rows_of<I: TensorTree>(input: &I, first: i64, count: i64, num_rows: i64) -> Result<I> {
    let rows: Vec<i64> = (first..first + count).map(|row| row.min(num_rows - 1)).collect();
    let rows = Tensor::f_from_slice(&rows)?;
    input.try_map_tensors(&mut |tensor| Ok(tensor.f_index_select(0, &rows.f_to_device(tensor.device())?)?))
}

/// All rows of the outputs of chunks, without those that were repeated.
fn joined(outputs: &[Tensor], num_rows: i64) -> Result<Tensor> {
    Ok(Tensor::f_cat(outputs, 0)?.f_narrow(0, 0, num_rows)?)
}

fn pack(tensors: &[Tensor]) -> Result<Tensor> {
    let mut parcel = Parcel::default();
    parcel.put(&tensors.len())?;
    tensors.iter().for_each(|tensor| parcel.put_tensor(tensor));
    parcel.to_bytes()
}

/// Sends what a chunk has become to the second process of a pair; `None` says that it has failed. Collective.
fn send(pair: &Group, packed: Option<Tensor>) -> Result<()> {
    broadcast(pair, packed, 0).map(drop)
}

/// What the first process of a pair sends. Collective.
fn receive(pair: &Group) -> Result<Option<Tensor>> {
    broadcast(pair, None, 0)
}

/// The bytes of process `source` of a group, if it has some; those that other processes give do not count. Collective: nothing but that
/// fails on one process alone.
fn broadcast(group: &Group, packed: Option<Tensor>, source: usize) -> Result<Option<Tensor>> {
    let own = packed.filter(|_| group.rank() == source);
    let length = Tensor::f_from_slice(&[own.as_ref().map_or(0, |bytes| bytes.numel() as i64)])?;
    group.broadcast(&length, source)?;
    let num_bytes = usize::try_from(i64::try_from(&length)?).map_err(Error::other)?;
    if num_bytes == 0 {
        return Ok(None);
    }
    let bytes = own.map_or_else(|| Ok(aligned_bytes(num_bytes, PARCEL_ALIGNMENT)?), Ok);
    let bytes = group.agree_on_success(OP, bytes)?;
    group.broadcast(&bytes, source)?;
    Ok(Some(bytes))
}

/// In place of a parameter of a block that another process computes.
struct Absent {
    name: String,
    /// Who computes it.
    owner: usize,
    /// Of its shape and type, with one element for all.
    placeholder: Tensor,
}

impl Absent {
    fn new(param: &Param, owner: usize) -> Result<Self> {
        let (kind, device) = (param.kind(), param.local().device());
        let element = match is_floating(kind) {
            true => scalar::full(&[1], f64::NAN, (kind, device))?,
            false => Tensor::f_zeros([1], (kind, device))?,
        };
        let placeholder = element.f_squeeze_dim(0)?.f_expand(param.shape(), false)?;
        Ok(Self { name: param.name().to_owned(), owner, placeholder })
    }

    fn refuse<T>(&self) -> Result<T> {
        Err(StateError::OnAnotherStage { parameter: self.name.clone(), rank: self.owner }.into())
    }
}

impl Storage for Absent {
    fn materialize(&self) -> Result<Tensor> {
        self.refuse()
    }

    fn local(&self) -> Tensor {
        self.placeholder.shallow_clone()
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.refuse()
    }

    /// Whoever asks for what this process owns of the parameter loads it first.
    fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        self.refuse()
    }

    fn overwrite(&self, _full: &Tensor) -> Result<()> {
        self.refuse()
    }

    fn overwrite_shard(&self, _shard: &Tensor) -> Result<()> {
        self.refuse()
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        self.refuse()
    }
}
