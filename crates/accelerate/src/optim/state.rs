//! Saved optimizer state: tensors by parameter name, settings by group.

use super::handle::OptimizerHandle;
use crate::error::{OptimError, Result};
use crate::nn::Param;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Everything an optimizer needs to go on later.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = AdamW::new(&store, 1e-3)?;
/// weight.get().sum(None).backward();
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
    /// Momentum (SGD) or first beta (Adam, AdamW).
    pub momentum: f64,
    /// The optimizer's other settings, by PyTorch's names.
    pub options: serde_json::Map<String, serde_json::Value>,
}

/// Writes the groups' part of a state.
pub(super) fn save_groups(handle: &OptimizerHandle, options: &impl Serialize) -> Result<Vec<GroupState>> {
    let options = match serde_json::to_value(options).map_err(crate::Error::other)? {
        serde_json::Value::Object(options) => options,
        _ => serde_json::Map::new(),
    };
    (0..handle.num_groups())
        .map(|group| {
            let settings = handle.settings(group)?;
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

/// The groups' part of loading: first everything is checked, then everything is set.
pub(super) struct Loading<'a> {
    handle: &'a OptimizerHandle,
    state: &'a OptimizerState,
    problems: Vec<String>,
    num_tensors_used: usize,
}

impl<'a> Loading<'a> {
    pub(super) fn new(handle: &'a OptimizerHandle, state: &'a OptimizerState) -> Self {
        let mut loading = Self { handle, state, problems: Vec::new(), num_tensors_used: 0 };
        loading.compare_groups();
        loading
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
        }
    }

    /// The optimizer's other settings, from the first group (they are the same in all).
    pub(super) fn options<T: serde::de::DeserializeOwned>(&mut self, present: T) -> T {
        let Some(group) = self.state.groups.first() else { return present };
        match serde_json::from_value(serde_json::Value::Object(group.options.clone())) {
            Ok(options) => options,
            Err(error) => {
                self.problems.push(format!("its options cannot be understood: {error}"));
                present
            }
        }
    }

    /// Copies of one parameter's state tensors, in the order of `names`: on its device and, except
    /// for `step`, with its dtype. `None` when nothing was saved for it.
    pub(super) fn tensors(&mut self, param: &Param, names: &[&str]) -> Result<Option<Vec<Tensor>>> {
        let target = param.local();
        let mut tensors = Vec::with_capacity(names.len());
        let mut missing = Vec::new();
        for name in names {
            let key = format!("{name}.{}", param.name());
            let Some(saved) = self.state.tensors.get(&key) else {
                missing.push(key);
                continue;
            };
            self.num_tensors_used += 1;
            let is_step = *name == "step";
            let wanted = if is_step { Vec::new() } else { target.size() };
            if saved.size() != wanted {
                self.problems.push(format!("\"{key}\" has shape {:?}, not {wanted:?}", saved.size()));
                continue;
            }
            let kind = if is_step { Kind::Float } else { target.f_kind()? };
            tensors.push(saved.f_to_device(target.device())?.f_to_kind(kind)?.f_detach_copy()?);
        }
        if missing.len() == names.len() {
            return Ok(None);
        }
        self.problems.extend(missing.into_iter().map(|key| format!("\"{key}\" is missing")));
        Ok(Some(tensors))
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
            self.handle.update(index, |settings| {
                settings.lr = group.lr;
                settings.initial_lr = group.initial_lr;
                settings.weight_decay = group.weight_decay;
                settings.momentum = group.momentum;
            })?;
        }
        Ok(())
    }
}

/// Adds a copy of one state tensor to the map of saved ones.
pub(super) fn save_tensor(
    tensors: &mut BTreeMap<String, Tensor>,
    name: &str,
    param: &Param,
    tensor: &Tensor,
) -> Result<()> {
    tensors.insert(format!("{name}.{}", param.name()), tensor.f_detach_copy()?);
    Ok(())
}
