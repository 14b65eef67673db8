//! Optimizer state of full parameters, from the shards that processes keep.

use super::{AcceleratedOptimizer, Optimizer, OptimizerState};
use crate::error::{Error, OptimError, Result};
use crate::group::Group;
use crate::nn::{Layout, Pieces, assemble};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

impl OptimizerState {
    /// Puts together what the processes of one run have saved, each its shards: state of full parameters, which
    /// [`Optimizer::load_state_dict`] takes on any number of processes, sharded or not. Processes that hold the same shards
    /// may be left out.
    ///
    /// # Errors
    /// Elements or settings that no state has; states of different optimizers; state in blocks ([`AdamW8bit`](super::AdamW8bit)),
    /// which [`dequantized`](super::Optimizer::dequantized) makes numbers of.
    ///
    /// ```
    /// use accelerate::{nn::Layout, optim::OptimizerState, tch::Tensor};
    ///
    /// let shard = |start, values: &[f32]| OptimizerState {
    ///     tensors: [("exp_avg.weight".to_owned(), Tensor::from_slice(values))].into(),
    ///     layouts: [("weight".to_owned(), Layout::full([3, 1]).flat(start..start + values.len()).unwrap())].into(),
    ///     ..Default::default()
    /// };
    /// let full = OptimizerState::from_shards(&[shard(2, &[3.0]), shard(0, &[1.0, 2.0])])?;
    /// assert_eq!(full.tensors["exp_avg.weight"], Tensor::from_slice(&[1f32, 2.0, 3.0]).view([3, 1]));
    /// assert!(full.layouts.is_empty());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn from_shards(states: &[OptimizerState]) -> Result<Self> {
        let Some(first) = states.first() else { return Ok(Self::default()) };
        let mut problems = Vec::new();
        if let Some(other) = states.iter().position(|state| state.groups != first.groups) {
            problems.push(format!("the parameter groups of states 0 and {other} differ"));
        }
        let mut pieces: BTreeMap<&str, Vec<(&OptimizerState, &Tensor)>> = BTreeMap::new();
        for state in states {
            state.tensors.iter().for_each(|(key, tensor)| pieces.entry(key).or_default().push((state, tensor)));
        }
        let mut tensors = BTreeMap::new();
        for (key, found) in pieces {
            let (state, tensor) = found[0];
            let Some(layout) = state.layout_of(key).filter(|_| tensor.dim() != 0) else {
                tensors.insert(key.to_owned(), tensor.f_detach_copy()?);
                continue;
            };
            let of_states: Pieces<'_> = found
                .iter()
                .filter_map(|(state, tensor)| state.layout_of(key).map(|layout| (layout, *tensor)))
                .collect();
            match assemble_full(layout, &of_states)? {
                Ok(full) => drop(tensors.insert(key.to_owned(), full)),
                Err(problem) => problems.push(format!("\"{key}\": {problem}")),
            }
        }
        if !problems.is_empty() {
            return Err(OptimError::StatesMismatch { problems }.into());
        }
        Ok(Self { tensors, groups: first.groups.clone(), layouts: BTreeMap::new() })
    }

    /// Of the parameter that a state tensor belongs to, which elements it is for.
    fn layout_of(&self, key: &str) -> Option<&Layout> {
        key.split_once('.').and_then(|(_, parameter)| self.layouts.get(parameter))
    }
}

/// What a process tells about a state tensor before any travels.
#[derive(Serialize, Deserialize)]
enum Entry {
    /// The same on all processes that have it: the number of steps.
    Scalar(f64),
    /// Of a parameter that is not sharded.
    Replicated,
    /// Elements of this layout, of the kind with this name.
    Elements(Layout, String),
}

/// By key, on one process.
type Entries = BTreeMap<String, Entry>;

impl<O: Optimizer> AcceleratedOptimizer<O> {
    /// State of full parameters, on every process and on the CPU: what `state_dict` is for an optimizer whose parameters are
    /// not sharded (`FSDP.optim_state_dict` of PyTorch with a full state dict). Tensors travel one after the other. What is in
    /// blocks of a few bits ([`AdamW8bit`](super::AdamW8bit)) becomes numbers, as by
    /// [`dequantized`](Optimizer::dequantized). Collective.
    ///
    /// # Errors
    /// State of an optimizer of yours that does not go element by element; a failure between processes.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::optim::{AdamW, Optimizer};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor, testing};
    ///
    /// let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
    /// testing::ranks(2, builder, |accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let linear = Linear::new(store.root(), 2, 2, Default::default())?;
    ///     let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    ///     let (model, mut optimizer) = accelerator.prepare((model, AdamW::new(&store, 0.1)?))?;
    ///     accelerator.backward(&model.forward(&Tensor::from_slice(&[1f32, 2.0]))?.sum(None))?;
    ///     optimizer.step()?;
    ///     let full = optimizer.full_state_dict()?;
    ///     assert_eq!(full.tensors["exp_avg.weight"].size(), [2, 2]);
    ///     optimizer.load_state_dict(&full)
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn full_state_dict(&self) -> Result<OptimizerState> {
        let mut own = self.state_dict()?;
        // The ranks that hold one model together: parameters that some of them have whole are shared by fewer.
        let sharded = self.handle().params().filter_map(|param| Some((param.shard_group()?, param.local().device())));
        let sharded = sharded.max_by_key(|(group, _)| group.world_size());
        let Some((group, device)) = sharded else { return Ok(own) };
        let tensors = std::mem::take(&mut own.tensors).into_iter();
        let (parts, whole): (BTreeMap<_, _>, BTreeMap<_, _>) =
            tensors.partition(|(key, _)| own.layout_of(key).is_some());
        own.tensors = group.agree_on_success("full_state_dict", self.dequantized(parts))?;
        own.tensors.extend(whole);
        let entries = own.tensors.iter().map(|(key, tensor)| self.entry(&own, key, tensor));
        let all = exchange(&group, entries.collect())?;
        // The same keys in the same order everywhere: processes have no state of shards without elements.
        let keys: BTreeMap<&str, &Entry> = all.iter().flatten().map(|(key, entry)| (key.as_str(), entry)).collect();
        let mut tensors = BTreeMap::new();
        for (key, entry) in keys {
            let found = own.tensors.get(key);
            let tensor = match (entry, found) {
                (Entry::Elements(layout, kind), _) => full_tensor((&group, device), &all, key, found, layout, kind)?,
                (Entry::Scalar(_) | Entry::Replicated, Some(own)) => own.f_to(Device::Cpu)?,
                (Entry::Scalar(value), None) => scalar::full(&[], *value, (Kind::Float, Device::Cpu))?,
                (Entry::Replicated, None) => continue,
            };
            tensors.insert(key.to_owned(), tensor);
        }
        Ok(OptimizerState { tensors, groups: own.groups, layouts: BTreeMap::new() })
    }

    fn entry(&self, own: &OptimizerState, key: &str, tensor: &Tensor) -> Result<(String, Entry)> {
        let in_blocks = || OptimError::StateInBlocks { optimizer: self.handle().optimizer_name(), key: key.to_owned() };
        let entry = match own.layout_of(key) {
            None => Entry::Replicated,
            _ if tensor.dim() == 0 => Entry::Scalar(tensor.f_double_value(&[])?),
            Some(layout) if tensor.dim() == 1 && tensor.numel() == layout.numel() => {
                Entry::Elements(layout.clone(), format!("{:?}", tensor.f_kind()?))
            }
            _ => return Err(in_blocks().into()),
        };
        Ok((key.to_owned(), entry))
    }
}

/// Every process's entries, unless one of them could not make its own. Collective.
fn exchange(group: &Group, own: Result<Entries>) -> Result<Vec<Entries>> {
    let own = group.agree_on_success("full_state_dict", own)?;
    let all = group.all_gather_bytes(&serde_json::to_vec(&own).map_err(Error::other)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::other)).collect()
}

/// A state tensor of a full parameter from the `found` elements of all processes. Collective.
fn full_tensor(
    (group, device): (&Group, Device),
    all: &[Entries],
    key: &str,
    found: Option<&Tensor>,
    layout: &Layout,
    kind: &str,
) -> Result<Tensor> {
    let layouts: Vec<Option<&Layout>> = all
        .iter()
        .map(|entries| match entries.get(key) {
            Some(Entry::Elements(layout, _)) => Some(layout),
            _ => None,
        })
        .collect();
    let kind =
        [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double].into_iter().find(|own| format!("{own:?}") == kind);
    let kind = kind.ok_or_else(|| Error::other(format!("\"{key}\" has elements of an unknown kind")))?;
    let longest = layouts.iter().flatten().map(|layout| layout.numel()).max().unwrap_or(0) as i64;
    // Messages are of equal sizes.
    let padded = Tensor::f_zeros([longest], (kind, device))?;
    if let Some(found) = found {
        padded.f_narrow(0, 0, found.numel() as i64)?.f_copy_(found)?;
    }
    let gathered = group.all_gather(&padded)?;
    let mut pieces = Vec::with_capacity(layouts.len());
    for (tensor, layout) in gathered.iter().zip(layouts) {
        let Some(layout) = layout else { continue };
        pieces.push((layout, tensor.f_narrow(0, 0, layout.numel() as i64)?.f_to(Device::Cpu)?));
    }
    let pieces = pieces.iter().map(|(layout, tensor)| (*layout, tensor)).collect();
    let problems = |problem| OptimError::StatesMismatch { problems: vec![format!("\"{key}\": {problem}")] };
    Ok(assemble_full(layout, &pieces)?.map_err(problems)?)
}

/// The tensor that `layout` is of. The inner error says why the pieces do not make it up.
fn assemble_full(layout: &Layout, pieces: &Pieces<'_>) -> Result<Result<Tensor, String>> {
    let shape: Vec<i64> = layout.shape().iter().map(|&size| size as i64).collect();
    match assemble(&Layout::full(layout.shape()), pieces)? {
        Ok(flat) => Ok(Ok(flat.f_reshape(shape)?)),
        Err(problem) => Ok(Err(problem)),
    }
}
