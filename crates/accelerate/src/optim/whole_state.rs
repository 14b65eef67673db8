//! Optimizer state of whole parameters, from the parts that processes keep.

use super::{AcceleratedOptimizer, Optimizer, OptimizerState};
use crate::error::{Error, OptimError, Result};
use crate::group::Group;
use crate::nn::{TensorPart, assemble};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

/// `[shape, elements, their tensor]` by key.
type Pieces<'a> = Vec<(&'a [i64], std::ops::Range<usize>, &'a Tensor)>;

impl OptimizerState {
    /// Puts together what the processes of one run have saved, each its parts: state of whole parameters, which
    /// [`Optimizer::load_state_dict`] takes on any number of processes, sharded or not. Processes that hold the same parts
    /// may be left out.
    ///
    /// # Errors
    /// Elements or settings that no state has; states of different optimizers; state that does not go element by element
    /// ([`AdamW8bit`](super::AdamW8bit)).
    ///
    /// ```
    /// use accelerate::{nn::TensorPart, optim::OptimizerState, tch::Tensor};
    ///
    /// let part = |start, values: &[f32]| OptimizerState {
    ///     tensors: [("exp_avg.weight".to_owned(), Tensor::from_slice(values))].into(),
    ///     parts: [("weight".to_owned(), TensorPart { shape: vec![3, 1], start, end: start + values.len() })].into(),
    ///     ..Default::default()
    /// };
    /// let whole = OptimizerState::from_parts(&[part(2, &[3.0]), part(0, &[1.0, 2.0])])?;
    /// assert_eq!(whole.tensors["exp_avg.weight"], Tensor::from_slice(&[1f32, 2.0, 3.0]).view([3, 1]));
    /// assert!(whole.parts.is_empty());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn from_parts(states: &[OptimizerState]) -> Result<Self> {
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
            let Some(part) = state.part_of(key).filter(|_| tensor.dim() != 0) else {
                tensors.insert(key.to_owned(), tensor.f_detach_copy()?);
                continue;
            };
            let of_states: Pieces<'_> = found
                .iter()
                .filter_map(|(state, tensor)| state.part_of(key).map(|part| (&*part.shape, part.range(), *tensor)))
                .collect();
            let numel = part.shape.iter().product::<i64>().max(0) as usize;
            match assemble(&part.shape, 0..numel, &of_states)? {
                Ok(whole) => drop(tensors.insert(key.to_owned(), whole.f_reshape(&part.shape)?)),
                Err(problem) => problems.push(format!("\"{key}\": {problem}")),
            }
        }
        if !problems.is_empty() {
            return Err(OptimError::StatesMismatch { problems }.into());
        }
        Ok(Self { tensors, groups: first.groups.clone(), parts: BTreeMap::new() })
    }

    /// Of the parameter that a state tensor belongs to, which elements it is for.
    fn part_of(&self, key: &str) -> Option<&TensorPart> {
        key.split_once('.').and_then(|(_, parameter)| self.parts.get(parameter))
    }
}

/// What a process tells about a state tensor before any travels.
#[derive(Serialize, Deserialize)]
enum Entry {
    /// The same on all processes that have it: the number of steps.
    Scalar(f64),
    /// Of a parameter that is not sharded.
    Whole,
    /// Elements of this part, of the kind with this name.
    Elements(TensorPart, String),
}

/// By key, on one process.
type Entries = BTreeMap<String, Entry>;

impl<O: Optimizer> AcceleratedOptimizer<O> {
    /// State of whole parameters, on every process and on the CPU: what `state_dict` is for an optimizer whose parameters are
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
    ///     let whole = optimizer.full_state_dict()?;
    ///     assert_eq!(whole.tensors["exp_avg.weight"].size(), [2, 2]);
    ///     optimizer.load_state_dict(&whole)
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn full_state_dict(&self) -> Result<OptimizerState> {
        let own = self.state_dict()?;
        let sharded = self.handle().params().find_map(|param| Some((param.shard_group()?, param.local().device())));
        let Some((group, device)) = sharded else { return Ok(own) };
        let entries = own.tensors.iter().map(|(key, tensor)| self.entry(&own, key, tensor));
        let all = exchange(&group, entries.collect())?;
        // The same keys in the same order everywhere: processes have no state of parts without elements.
        let keys: BTreeMap<&str, &Entry> = all.iter().flatten().map(|(key, entry)| (key.as_str(), entry)).collect();
        let mut tensors = BTreeMap::new();
        for (key, entry) in keys {
            let found = own.tensors.get(key);
            let tensor = match (entry, found) {
                (Entry::Elements(part, kind), _) => whole((&group, device), &all, key, found, part, kind)?,
                (Entry::Scalar(_) | Entry::Whole, Some(own)) => own.f_to(Device::Cpu)?,
                (Entry::Scalar(value), None) => Tensor::f_full([0i64; 0], *value, (Kind::Float, Device::Cpu))?,
                (Entry::Whole, None) => continue,
            };
            tensors.insert(key.to_owned(), tensor);
        }
        Ok(OptimizerState { tensors, groups: own.groups, parts: BTreeMap::new() })
    }

    fn entry(&self, own: &OptimizerState, key: &str, tensor: &Tensor) -> Result<(String, Entry)> {
        let in_blocks = || OptimError::StateInBlocks { optimizer: self.handle().optimizer_name(), key: key.to_owned() };
        let entry = match own.part_of(key) {
            None => Entry::Whole,
            _ if tensor.dim() == 0 => Entry::Scalar(tensor.f_double_value(&[])?),
            Some(part) if tensor.dim() == 1 && tensor.numel() == part.range().len() => {
                Entry::Elements(part.clone(), format!("{:?}", tensor.f_kind()?))
            }
            _ => return Err(in_blocks().into()),
        };
        Ok((key.to_owned(), entry))
    }
}

/// Every process's entries, unless one of them could not make its own. Collective.
fn exchange(group: &Group, own: Result<Entries>) -> Result<Vec<Entries>> {
    let text = own.as_ref().map_err(Error::to_string);
    let all = group.all_gather_bytes(&serde_json::to_vec(&text).map_err(Error::other)?)?;
    own?;
    let parse = |bytes: &Vec<u8>| serde_json::from_slice::<Result<Entries, String>>(bytes).map_err(Error::other);
    all.iter().map(|bytes| parse(bytes)?.map_err(Error::other)).collect()
}

/// A state tensor of a whole parameter from the `found` elements of all processes. Collective.
fn whole(
    (group, device): (&Group, Device),
    all: &[Entries],
    key: &str,
    found: Option<&Tensor>,
    part: &TensorPart,
    kind: &str,
) -> Result<Tensor> {
    let parts: Vec<Option<&TensorPart>> = all
        .iter()
        .map(|entries| match entries.get(key) {
            Some(Entry::Elements(part, _)) => Some(part),
            _ => None,
        })
        .collect();
    let kind =
        [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double].into_iter().find(|own| format!("{own:?}") == kind);
    let kind = kind.ok_or_else(|| Error::other(format!("\"{key}\" has elements of an unknown kind")))?;
    let longest = parts.iter().flatten().map(|part| part.range().len()).max().unwrap_or(0) as i64;
    // Messages are of equal sizes.
    let padded = Tensor::f_zeros([longest], (kind, device))?;
    if let Some(found) = found {
        padded.f_narrow(0, 0, found.numel() as i64)?.f_copy_(found)?;
    }
    let gathered = group.all_gather(&padded)?;
    let mut pieces = Vec::with_capacity(parts.len());
    for (tensor, part) in gathered.iter().zip(parts) {
        let Some(part) = part else { continue };
        pieces.push((part, tensor.f_narrow(0, 0, part.range().len() as i64)?.f_to(Device::Cpu)?));
    }
    let pieces: Pieces<'_> = pieces.iter().map(|(part, tensor)| (&*part.shape, part.range(), tensor)).collect();
    let numel = part.shape.iter().product::<i64>().max(0) as usize;
    let problems = |problem| OptimError::StatesMismatch { problems: vec![format!("\"{key}\": {problem}")] };
    Ok(assemble(&part.shape, 0..numel, &pieces)?.map_err(problems)?.f_reshape(&part.shape)?)
}
