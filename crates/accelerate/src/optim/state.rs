//! Saved optimizer state: tensors by parameter name, settings by group.

use super::handle::{GroupSettings, OptimizerHandle};
use crate::error::{OptimError, Result};
use crate::messages;
use crate::nn::{Layout, Param, flat_elements};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

/// Everything an optimizer needs to go on later.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = AdamW::new(&store, 1e-3)?;
/// weight.get()?.sum(None).backward();
/// optimizer.step()?;
/// let state = optimizer.state_dict()?;
/// assert_eq!(state.tensors["exp_avg.weight"].size(), [2]);
/// assert_eq!(state.groups[0].lr, 1e-3);
/// AdamW::new(&store, 1.0)?.load_state_dict(&state)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct OptimizerState {
    /// Key: PyTorch's name of the state (`exp_avg`, `momentum_buffer`, `step`, ...), a dot, and the
    /// parameter's name. Copies, not views of the optimizer's own. Parameters that never had a
    /// gradient have none.
    pub tensors: BTreeMap<String, Tensor>,
    /// One entry for each parameter group, in order.
    pub groups: Vec<GroupState>,
    /// By name, which elements of a sharded parameter the tensors are state of: then they are flat. Empty if none is sharded.
    pub layouts: BTreeMap<String, Layout>,
}

impl OptimizerState {
    /// The same numbers in memory of their own.
    pub(super) fn into_copies(mut self) -> Result<Self> {
        for tensor in self.tensors.values_mut() {
            *tensor = tensor.f_detach_copy()?;
        }
        Ok(self)
    }
}

/// The settings of one parameter group.
///
/// ```
/// use accelerate::optim::GroupState;
///
/// let text = r#"{"name": null, "params": ["weight"], "lr": 0.1, "initial_lr": null,
///                "weight_decay": 0.0, "momentum": 0.9, "options": {"nesterov": true}}"#;
/// let group: GroupState = serde_json::from_str(text).unwrap();
/// assert_eq!(group.options["nesterov"], true);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// The group's name, if it has one.
    pub name: Option<String>,
    /// Names of its parameters, in order.
    pub params: Vec<String>,
    /// Learning rate at the time of saving.
    pub lr: f64,
    /// Learning rate that a scheduler's factors multiply; none without scheduler.
    pub initial_lr: Option<f64>,
    /// Weight decay.
    pub weight_decay: f64,
    /// Momentum (SGD, RMSprop) or first beta (Adam, AdamW, Lion).
    pub momentum: f64,
    /// The optimizer's other settings, by PyTorch's names.
    pub options: Map<String, Value>,
}

impl GroupState {
    fn settings(&self) -> GroupSettings {
        let &Self { lr, initial_lr, weight_decay, momentum, .. } = self;
        GroupSettings { lr, initial_lr, weight_decay, momentum }
    }
}

/// The settings that all groups of an optimizer share, under the names PyTorch saves them by.
pub(super) trait SharedOptions: Serialize + DeserializeOwned {
    /// Refuses what the optimizer called `owner` cannot step with, whether a program or a saved state says so. `momenta` are the
    /// momentum, or first beta, of the groups.
    fn check(&self, owner: &'static str, momenta: &[f64]) -> Result<()>;
}

/// Writes the groups' shard of a state.
pub(super) fn save_groups(handle: &OptimizerHandle, options: &impl Serialize) -> Result<Vec<GroupState>> {
    let options = match serde_json::to_value(options).map_err(crate::Error::other)? {
        Value::Object(options) => options,
        _ => Map::new(),
    };
    (0..handle.num_groups())
        .map(|group| {
            let settings = handle.settings(group)?;
            // JSON has no number that is not finite, so that nobody could read it again.
            settings.check(handle.optimizer_name())?;
            Ok(GroupState {
                name: handle.group_name(group).map(str::to_string),
                params: handle.group_params(group).iter().map(|p| p.name().to_string()).collect(),
                lr: settings.lr,
                initial_lr: settings.initial_lr,
                weight_decay: settings.weight_decay,
                momentum: settings.momentum,
                options: options.clone(),
            })
        })
        .collect()
}

/// Writes which elements of its parameters an optimizer has state of.
pub(super) fn save_layouts(handle: &OptimizerHandle) -> BTreeMap<String, Layout> {
    let layout = |param: &Param| Some((param.name().to_owned(), param.shard_layout()?));
    handle.params().filter_map(layout).collect()
}

/// Settings of two groups that are not the same, as texts. The first beta is one that each group has for itself.
fn differing<T: Serialize>(first: &T, other: &T) -> Vec<(String, [String; 2])> {
    let settings = |group: &T| {
        let Ok(Value::Object(mut settings)) = serde_json::to_value(group) else { return Map::new() };
        if let Some(Value::Array(betas)) = settings.get_mut("betas") {
            betas.drain(..1.min(betas.len()));
        }
        settings
    };
    let other = settings(other);
    let pairs = settings(first).into_iter().filter_map(|(name, value)| Some((value, other.get_key_value(&name)?)));
    let pairs = pairs.filter(|(value, (_, other))| value != *other);
    pairs.map(|(value, (name, other))| (name.clone(), [value.to_string(), other.to_string()])).collect()
}

/// The groups' shard of loading: first everything is checked, then everything is set.
pub(super) struct Loading<'a> {
    handle: &'a OptimizerHandle,
    state: &'a OptimizerState,
    problems: Vec<String>,
    num_tensors_used: usize,
    /// The optimizer has its tensors from here, and nobody else has them.
    keeps_tensors: bool,
}

impl<'a> Loading<'a> {
    pub(super) fn new(handle: &'a OptimizerHandle, state: &'a OptimizerState) -> Self {
        let mut loading = Self { handle, state, problems: Vec::new(), num_tensors_used: 0, keeps_tensors: false };
        loading.compare_groups();
        loading
    }

    /// Of a state that is dropped when it has been loaded.
    pub(super) fn taking(handle: &'a OptimizerHandle, state: &'a OptimizerState) -> Self {
        Self { keeps_tensors: true, ..Self::new(handle, state) }
    }

    fn compare_groups(&mut self) {
        let (found, wanted) = (self.state.groups.len(), self.handle.num_groups());
        if found != wanted {
            self.problems.push(format!("it has {found} parameter groups, not {wanted}"));
        }
        for (index, group) in self.state.groups.iter().enumerate().take(wanted) {
            let params = self.handle.group_params(index);
            for param in params.iter().filter(|p| !group.params.iter().any(|name| *name == *p.name())) {
                self.problems.push(format!("group {index} lacks \"{}\"", param.name()));
            }
            for name in group.params.iter().filter(|name| !params.iter().any(|p| **name == *p.name())) {
                self.problems.push(format!("group {index} has the unknown parameter \"{name}\""));
            }
            let refused = group.settings().check(self.handle.optimizer_name()).err();
            self.problems.extend(refused.map(|error| format!("of group {index}, {error}")));
        }
    }

    /// The optimizer's other settings, which its groups share: a state in which they differ is refused.
    pub(super) fn options<T: SharedOptions>(&mut self, present: T) -> T {
        let mut shared: Option<T> = None;
        for (index, group) in self.state.groups.iter().enumerate() {
            let found: T = match serde_json::from_value(Value::Object(group.options.clone())) {
                Ok(found) => found,
                Err(error) => {
                    let own = self.handle.optimizer_name();
                    self.problems.push(format!(
                        "its options are not those of {own}, perhaps because another optimizer has saved it: {error}"
                    ));
                    return present;
                }
            };
            match &shared {
                None => shared = Some(found),
                Some(first) => {
                    let problems = differing(first, &found).into_iter();
                    self.problems.extend(problems.map(|(name, [first, other])| {
                        format!("`{name}` is {other} in group {index} and {first} in group 0, and the groups of this optimizer share it")
                    }));
                }
            }
        }
        let options = shared.unwrap_or(present);
        let momenta: Vec<f64> = self.state.groups.iter().map(|group| group.momentum).collect();
        let refused = options.check(self.handle.optimizer_name(), &momenta).err();
        self.problems.extend(refused.map(|error| error.to_string()));
        options
    }

    /// Of a state that may be another optimizer's, whose weight decay is applied in another place.
    pub(super) fn expect_decoupled(&mut self, is_decoupled: bool) {
        const NAME: &str = "decoupled_weight_decay";
        for (index, group) in self.state.groups.iter().enumerate() {
            let found = group.options.get(NAME).and_then(Value::as_bool).unwrap_or(is_decoupled);
            if found != is_decoupled && group.weight_decay != 0.0 {
                let own = if found { "AdamW" } else { "Adam" };
                self.problems.push(format!("`{NAME}` is {found} in group {index}; load it into {own}"));
            }
        }
    }

    /// Was a state tensor of this name saved for the parameter?
    pub(super) fn has(&self, param: &Param, name: &str) -> bool {
        self.state.tensors.contains_key(&key(name, param))
    }

    /// One parameter's state tensors, copied unless they are kept, in the order of `names`: all of its shape, dtype and
    /// device, but `step`, which is a float scalar there. `None` when nothing was saved for it.
    pub(super) fn tensors(&mut self, param: &Param, names: &[&'static str]) -> Result<Option<Vec<Tensor>>> {
        let target = param.local();
        let mut wanted = Vec::with_capacity(names.len());
        for &name in names {
            wanted.push(if name == "step" {
                Wanted::step(target.device())
            } else {
                Wanted { name, shape: target.size(), kind: target.f_kind()?, device: target.device() }
            });
        }
        self.tensors_as(param, &wanted)
    }

    /// As [`tensors`](Self::tensors), for states that are not all like their parameter.
    pub(super) fn tensors_as(&mut self, param: &Param, wanted: &[Wanted]) -> Result<Option<Vec<Tensor>>> {
        let mut tensors = Vec::with_capacity(wanted.len());
        let mut missing = Vec::new();
        for Wanted { name, shape, kind, device } in wanted {
            let key = key(name, param);
            let Some(saved) = self.state.tensors.get(&key) else {
                missing.push(key);
                continue;
            };
            self.num_tensors_used += 1;
            let saved = match self.own_elements(param, saved, shape)? {
                Ok(saved) => saved,
                Err(problem) => {
                    self.problems.push(format!("\"{key}\" {problem}"));
                    continue;
                }
            };
            let (found_shape, found_kind) = (saved.size(), saved.f_kind()?);
            if found_shape != *shape {
                self.problems.push(format!("\"{key}\" has shape {found_shape:?}, not {shape:?}"));
                continue;
            }
            // Numbers may be rounded; codes of quantized state are no numbers.
            if (found_kind == Kind::Uint8) != (*kind == Kind::Uint8) {
                self.problems.push(format!("\"{key}\" has dtype {found_kind:?}, not {kind:?}"));
                continue;
            }
            let own = saved.f_detach()?.f_to_device(*device)?.f_to_kind(*kind)?;
            tensors.push(if self.keeps_tensors { own.f_contiguous()? } else { own.f_detach_copy()? });
        }
        if missing.len() == wanted.len() {
            return Ok(None);
        }
        self.problems.extend(missing.into_iter().map(|key| format!("\"{key}\" is missing")));
        Ok(Some(tensors))
    }

    /// Of state that has an element for each of its parameter's, those that this process keeps. The inner error says why
    /// they are not there.
    fn own_elements(&self, param: &Param, saved: &Tensor, wanted: &[i64]) -> Result<Result<Tensor, String>> {
        let own = param.shard_layout();
        let is_elementwise = *wanted == *param.local().size();
        match (self.state.layouts.get(param.name()), &own) {
            (None, Some(own)) if is_elementwise && saved.size() == param.shape() => {
                Ok(Ok(flat_elements(&saved.f_detach()?, own)?))
            }
            (Some(found), None) if is_elementwise && found.is_full() && *found.shape() == *param.layout().shape() => {
                Ok(Ok(saved.f_reshape(wanted)?))
            }
            (Some(found), own) if own.as_ref() != Some(found) => {
                let wanted = own.as_ref().map_or_else(|| "all".to_owned(), Layout::to_string);
                Ok(Err(format!(
                    "has {found}, not {wanted}: put all processes' states together (OptimizerState::from_shards)"
                )))
            }
            _ => Ok(Ok(saved.shallow_clone())),
        }
    }

    /// Says whether all of the state fits, and if so sets the groups. To be called before the
    /// optimizer takes over any tensor.
    pub(super) fn finish(mut self) -> Result<()> {
        let unused = self.state.tensors.len().saturating_sub(self.num_tensors_used);
        if unused != 0 && self.problems.is_empty() {
            self.problems.push(format!("{unused} of its tensors belong to no parameter or to another optimizer"));
        }
        if !self.problems.is_empty() {
            let optimizer = self.handle.optimizer_name();
            return Err(OptimError::StateMismatch { optimizer, problems: self.problems }.into());
        }
        for (index, group) in self.state.groups.iter().enumerate() {
            if group.lr < 0.0 {
                let (optimizer, lr) = (self.handle.optimizer_name(), group.lr);
                messages::warning!(
                    "the saved learning rate of group {index} of {optimizer} is {lr}: below 0, steps go up the gradient"
                );
            }
            self.handle.update(index, |settings| *settings = group.settings())?;
        }
        self.handle.state_loaded();
        Ok(())
    }
}

/// A state tensor as the optimizer will hold it.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) name: &'static str,
    pub(super) shape: Vec<i64>,
    pub(super) kind: Kind,
    pub(super) device: Device,
}

impl Wanted {
    /// The number of steps: a float scalar.
    pub(super) fn step(device: Device) -> Self {
        Self { name: "step", shape: Vec::new(), kind: Kind::Float, device }
    }
}

/// Where a state tensor is found: its own name, a dot, the parameter's name.
fn key(name: &str, param: &Param) -> String {
    format!("{name}.{}", param.name())
}

/// Adds one state tensor to the map of saved ones, in the memory of the optimizer's own.
pub(super) fn save_tensor(
    tensors: &mut BTreeMap<String, Tensor>,
    name: &str,
    param: &Param,
    tensor: &Tensor,
) -> Result<()> {
    tensors.insert(key(name, param), tensor.f_detach()?);
    Ok(())
}
