//! Optimizer state of full parameters, from the shards that processes keep.

use super::{AcceleratedOptimizer, Optimizer, OptimizerState};
use crate::error::{Error, OptimError, Result};
use crate::group::Group;
use crate::nn::{TensorShard, assemble};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

/// `[shape, elements, their tensor]` by key.
type Pieces<'a> = Vec<(&'a [i64], std::ops::Range<usize>, &'a Tensor)>;

impl OptimizerState {
    /// Puts together what the processes of one run have saved, each its shards: state of full parameters, which
    /// [`Optimizer::load_state_dict`] takes on any number of processes, sharded or not. Processes that hold the same shards
    /// may be left out.
    ///
    /// # Errors
    /// Elements or settings that no state has; states of different optimizers; state that does not go element by element
    /// ([`AdamW8bit`](super::AdamW8bit)).
    ///
    /// ```
    /// use accelerate::{nn::TensorShard, optim::OptimizerState, tch::Tensor};
    ///
    /// let shard = |start, values: &[f32]| OptimizerState {
    ///     tensors: [("exp_avg.weight".to_owned(), Tensor::from_slice(values))].into(),
    ///     shards: [("weight".to_owned(), TensorShard { shape: vec![3, 1], start, end: start + values.len() })].into(),
    ///     ..Default::default()
    /// };
    /// let full = OptimizerState::from_shards(&[shard(2, &[3.0]), shard(0, &[1.0, 2.0])])?;
    /// assert_eq!(full.tensors["exp_avg.weight"], Tensor::from_slice(&[1f32, 2.0, 3.0]).view([3, 1]));
    /// assert!(full.shards.is_empty());
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
            let Some(shard) = state.shard_of(key).filter(|_| tensor.dim() != 0) else {
                tensors.insert(key.to_owned(), tensor.f_detach_copy()?);
                continue;
            };
            let of_states: Pieces<'_> = found
                .iter()
                .filter_map(|(state, tensor)| state.shard_of(key).map(|shard| (&*shard.shape, shard.range(), *tensor)))
                .collect();
            let numel = shard.shape.iter().product::<i64>().max(0) as usize;
            match assemble(&shard.shape, 0..numel, &of_states)? {
                Ok(full) => drop(tensors.insert(key.to_owned(), full.f_reshape(&shard.shape)?)),
                Err(problem) => problems.push(format!("\"{key}\": {problem}")),
            }
        }
        if !problems.is_empty() {
            return Err(OptimError::StatesMismatch { problems }.into());
        }
        Ok(Self { tensors, groups: first.groups.clone(), shards: BTreeMap::new() })
    }

    /// Of the parameter that a state tensor belongs to, which elements it is for.
    fn shard_of(&self, key: &str) -> Option<&TensorShard> {
        key.split_once('.').and_then(|(_, parameter)| self.shards.get(parameter))
    }
}

/// What a process tells about a state tensor before any travels.
#[derive(Serialize, Deserialize)]
enum Entry {
    /// The same on all processes that have it: the number of steps.
    Scalar(f64),
    /// Of a parameter that is not sharded.
    Replicated,
    /// Elements of this shard, of the kind with this name.
    Elements(TensorShard, String),
}

/// By key, on one process.
type Entries = BTreeMap<String, Entry>;

impl<O: Optimizer> AcceleratedOptimizer<O> {
    /// State of full parameters, on every process and on the CPU: what `state_dict` is for an optimizer whose parameters are
    /// not sharded (`FSDP.optim_state_dict` of PyTorch with a full state dict). Tensors travel one after the other.
    /// Collective.
    ///
    /// # Errors
    /// State that does not go element by element ([`AdamW8bit`](super::AdamW8bit)); a failure between processes.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::optim::{AdamW, Optimizer};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor, testing};
    ///
    /// let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
    /// testing::ranks_with(2, builder, |accelerator| {
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
        let own = self.state_dict()?;
        let sharded = self.handle().params().find_map(|param| Some((param.shard_group()?, param.local().device())));
        let Some((group, device)) = sharded else { return Ok(own) };
        let entries = own.tensors.iter().map(|(key, tensor)| self.entry(&own, key, tensor));
        let all = exchange(&group, entries.collect())?;
        // The same keys in the same order everywhere: processes have no state of shards without elements.
        let keys: BTreeMap<&str, &Entry> = all.iter().flatten().map(|(key, entry)| (key.as_str(), entry)).collect();
        let mut tensors = BTreeMap::new();
        for (key, entry) in keys {
            let found = own.tensors.get(key);
            let tensor = match (entry, found) {
                (Entry::Elements(shard, kind), _) => full_tensor((&group, device), &all, key, found, shard, kind)?,
                (Entry::Scalar(_) | Entry::Replicated, Some(own)) => own.f_to(Device::Cpu)?,
                (Entry::Scalar(value), None) => Tensor::f_full([0i64; 0], *value, (Kind::Float, Device::Cpu))?,
                (Entry::Replicated, None) => continue,
            };
            tensors.insert(key.to_owned(), tensor);
        }
        Ok(OptimizerState { tensors, groups: own.groups, shards: BTreeMap::new() })
    }

    fn entry(&self, own: &OptimizerState, key: &str, tensor: &Tensor) -> Result<(String, Entry)> {
        let in_blocks = || OptimError::StateInBlocks { optimizer: self.handle().optimizer_name(), key: key.to_owned() };
        let entry = match own.shard_of(key) {
            None => Entry::Replicated,
            _ if tensor.dim() == 0 => Entry::Scalar(tensor.f_double_value(&[])?),
            Some(shard) if tensor.dim() == 1 && tensor.numel() == shard.range().len() => {
                Entry::Elements(shard.clone(), format!("{:?}", tensor.f_kind()?))
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
    shard: &TensorShard,
    kind: &str,
) -> Result<Tensor> {
    let shards: Vec<Option<&TensorShard>> = all
        .iter()
        .map(|entries| match entries.get(key) {
            Some(Entry::Elements(shard, _)) => Some(shard),
            _ => None,
        })
        .collect();
    let kind =
        [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double].into_iter().find(|own| format!("{own:?}") == kind);
    let kind = kind.ok_or_else(|| Error::other(format!("\"{key}\" has elements of an unknown kind")))?;
    let longest = shards.iter().flatten().map(|shard| shard.range().len()).max().unwrap_or(0) as i64;
    // Messages are of equal sizes.
    let padded = Tensor::f_zeros([longest], (kind, device))?;
    if let Some(found) = found {
        padded.f_narrow(0, 0, found.numel() as i64)?.f_copy_(found)?;
    }
    let gathered = group.all_gather(&padded)?;
    let mut pieces = Vec::with_capacity(shards.len());
    for (tensor, shard) in gathered.iter().zip(shards) {
        let Some(shard) = shard else { continue };
        pieces.push((shard, tensor.f_narrow(0, 0, shard.range().len() as i64)?.f_to(Device::Cpu)?));
    }
    let pieces: Pieces<'_> = pieces.iter().map(|(shard, tensor)| (&*shard.shape, shard.range(), tensor)).collect();
    let numel = shard.shape.iter().product::<i64>().max(0) as usize;
    let problems = |problem| OptimError::StatesMismatch { problems: vec![format!("\"{key}\": {problem}")] };
    Ok(assemble(&shard.shape, 0..numel, &pieces)?.map_err(problems)?.f_reshape(&shard.shape)?)
}
