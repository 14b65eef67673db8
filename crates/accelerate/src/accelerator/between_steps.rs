//! What a run keeps from step to step beside its objects, each rank for itself: gradients that wait for a step, and what communication
//! hooks have left.

use super::Accelerator;
use super::checkpointing::does_not_fit;
use crate::checkpoint::{OpenCheckpoint, is_kept_elsewhere};
use crate::error::{CheckpointError, Error, Result};
use crate::session::{ObjectState, PreparedParameters, Takeover};
use accelerate_core::checkpoint::{COMM_HOOK, Checkpoint, GRADIENTS, KEPT_BY_RANK, is_of_one_rank};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tch::Tensor;

/// Before the name of a tensor of a model's hook.
fn of_hook(model: &str) -> String {
    format!("{model}.")
}

/// Was this state of one rank written by another machine, into a folder of its own? Without its tensors it is not that state.
pub(super) fn is_elsewhere(object: &str, state: &ObjectState) -> bool {
    if object.starts_with(KEPT_BY_RANK) {
        return is_kept_elsewhere(state);
    }
    let models = state.values.as_object().into_iter().flat_map(|models| models.values());
    let has_tensors = || models.into_iter().any(|model| model["num_buckets"].as_u64() != Some(0));
    is_of_one_rank(object) && state.tensors.is_empty() && (object.starts_with(GRADIENTS) || has_tensors())
}

/// A model and its saved gradients by name.
type ModelGradients = (Arc<PreparedParameters>, BTreeMap<String, Tensor>);

pub(super) fn gradients_of_rank(rank: usize) -> String {
    format!("{GRADIENTS}{rank}")
}

pub(super) fn comm_hook_of_rank(rank: usize) -> String {
    format!("{COMM_HOOK}{rank}")
}

/// What models keep from step to step, beside parameters: found to fit, and not in place yet.
pub(super) struct BetweenSteps<'a> {
    pub(super) gradients: Vec<ModelGradients>,
    pub(super) hooks: Vec<Takeover<'a>>,
}

impl Accelerator {
    /// What the hooks of all models keep on this process, if one of them does.
    pub(super) fn hook_states(&self, left_out: &BTreeSet<String>) -> Result<Option<ObjectState>> {
        let (mut tensors, mut values) = (BTreeMap::new(), serde_json::Map::new());
        for (model, own) in self.session().objects().named_models().filter(|(name, _)| !left_out.contains(name)) {
            let Some(state) = own.engine.hook_state().map_err(|error| error.context(model.clone()))? else { continue };
            let before = of_hook(&model);
            tensors.extend(state.tensors.into_iter().map(|(name, tensor)| (format!("{before}{name}"), tensor)));
            values.insert(model, state.values);
        }
        Ok((!values.is_empty()).then(|| ObjectState { tensors, values: values.into(), ..Default::default() }))
    }

    /// Reads where the hooks of all models go on. On another number of processes, all do with the values of rank 0 and without
    /// tensors. Nothing is changed before the calls that are given back.
    fn read_hook_states<'a>(
        models: &'a [(String, Arc<PreparedParameters>)],
        checkpoint: &OpenCheckpoint,
        own: Option<ObjectState>,
    ) -> Result<Vec<Takeover<'a>>> {
        let first = || checkpoint.description.objects.get(&comm_hook_of_rank(0)).map(|first| first.values.clone());
        let ObjectState { tensors, values, .. } =
            own.unwrap_or_else(|| ObjectState { values: first().unwrap_or_default(), ..Default::default() });
        let takeovers = models.iter().map(|(name, model)| {
            let before = of_hook(name);
            let of_model = |(full, tensor): (&String, &Tensor)| {
                Some((full.strip_prefix(&before)?.to_owned(), tensor.shallow_clone()))
            };
            let tensors = tensors.iter().filter_map(of_model).collect();
            let state =
                values.get(name).map(|values| ObjectState { tensors, values: values.clone(), ..Default::default() });
            model.engine.read_hook_state(state.as_ref()).map_err(|error| error.context(name.clone()))
        });
        takeovers.collect()
    }

    /// The gradients of all models that wait for a step, by model and name.
    pub(super) fn gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut gradients = BTreeMap::new();
        for (model, own) in self.session().objects().named_models() {
            let named = own.gradients().map_err(|error| error.context(model.clone()))?;
            gradients.extend(named.into_iter().map(|(name, gradient)| (format!("{model}.{name}"), gradient)));
        }
        Ok(gradients)
    }

    /// The saved gradients of each model, which fit it.
    fn saved_gradients(&self, checkpoint: &OpenCheckpoint, saved: Option<ObjectState>) -> Result<Vec<ModelGradients>> {
        let Checkpoint { world_size, objects, .. } = &checkpoint.description;
        let path = checkpoint.description_path().display().to_string();
        let error = || Error::from(CheckpointError::OtherGradients { world_size: *world_size }).context(path.clone());
        if *world_size != self.num_processes() && objects.keys().any(|name| name.starts_with(GRADIENTS)) {
            return Err(error());
        }
        let ObjectState { tensors: saved, values, .. } = saved.unwrap_or_default();
        // Pieces of models that are divided in another way may be as large.
        if !values.is_null() && values != self.session().objects().model_layouts() {
            return Err(error());
        }
        let of_model = |model: &str| -> BTreeMap<String, Tensor> {
            let name = |name: &str| name.strip_prefix(model)?.strip_prefix('.').map(str::to_owned);
            saved.iter().filter_map(|(full, it)| Some((name(full)?, it.shallow_clone()))).collect()
        };
        let prepared = self.session().objects();
        let gradients: Vec<_> = prepared.named_models().map(|(name, model)| (model, of_model(&name))).collect();
        let fits = gradients.iter().all(|(model, saved)| model.takes_gradients(saved));
        if fits { Ok(gradients) } else { Err(error()) }
    }

    /// Puts saved gradients in place of those that are there.
    pub(super) fn load_gradients(&self, gradients: &[ModelGradients]) -> Result<()> {
        gradients.iter().try_for_each(|(model, saved)| model.load_gradients(saved))?;
        if gradients.iter().any(|(_, saved)| !saved.is_empty()) {
            self.session().objects().optimizers().for_each(|optimizer| optimizer.gradients_made());
        }
        Ok(())
    }

    /// Takes what models keep from step to step out of what was read. Nothing is changed yet.
    pub(super) fn between_steps<'a>(
        &self,
        checkpoint: &OpenCheckpoint,
        states: &mut BTreeMap<String, ObjectState>,
        models: &'a [(String, Arc<PreparedParameters>)],
    ) -> Result<BetweenSteps<'a>> {
        let gradients = states.remove(&gradients_of_rank(self.process_index()));
        let gradients = self.saved_gradients(checkpoint, gradients)?;
        let hooks = states.remove(&comm_hook_of_rank(self.process_index()));
        let hooks =
            Self::read_hook_states(models, checkpoint, hooks).map_err(|error| does_not_fit(checkpoint, &error))?;
        Ok(BetweenSteps { gradients, hooks })
    }
}
