//! Checkpoints without the frozen parameters of models.

use super::Accelerator;
use crate::checkpoint::{OpenCheckpoint, RunState};
use crate::error::{CheckpointError, Result};
use crate::messages;
use crate::session::{AllLeftOut, ObjectState, PreparedParameters, left_out_of, note_left_out};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Accelerator {
    /// What is left out of a checkpoint, by model, where that was asked for. Collective if a model is sharded.
    pub(super) fn frozen_in_models(&self, without: &BTreeSet<String>) -> Result<BTreeMap<String, AllLeftOut>> {
        let mut frozen = BTreeMap::new();
        if !self.project_configuration().adapter_only {
            return Ok(frozen);
        }
        for (name, model) in self.session().objects().named_models().filter(|(name, _)| !without.contains(name)) {
            let left_out = model.describe(&model.frozen_names())?;
            if self.is_main_process() {
                messages::info!("{} frozen tensors of {name} are left out of the checkpoint", left_out.len());
            }
            frozen.insert(name, left_out);
        }
        Ok(frozen)
    }

    /// Fails on every rank unless all models have the parameters that the checkpoint was saved without. Collective.
    pub(super) fn check_left_out(
        &self,
        checkpoint: &OpenCheckpoint,
        states: &BTreeMap<String, ObjectState>,
        models: &[(String, Arc<PreparedParameters>)],
    ) -> Result<()> {
        for (name, model) in models {
            let Some(state) = states.get(name) else { continue };
            let checked = self.check_same(checkpoint, name, model, state);
            self.group().agree_on_success("load_state", checked)?;
        }
        Ok(())
    }

    fn check_same(
        &self,
        checkpoint: &OpenCheckpoint,
        name: &str,
        model: &PreparedParameters,
        state: &ObjectState,
    ) -> Result<()> {
        let path = checkpoint.description_path();
        let wanted = left_out_of(&state.values).map_err(|error| {
            let reason = format!("what it says of tensors that are left out of {name} cannot be understood: {error}");
            CheckpointError::Damaged { path: path.clone(), reason }
        })?;
        if wanted.is_empty() {
            return Ok(());
        }
        let found = model.describe(&wanted.keys().cloned().collect())?;
        let different = wanted.iter().filter_map(|(tensor, wanted)| match found.get(tensor) {
            None => Some(format!("{tensor} is not in the model")),
            Some(found) if (&found.shape, &found.dtype) != (&wanted.shape, &wanted.dtype) => {
                let (found, wanted) = ((&found.dtype, &found.shape), (&wanted.dtype, &wanted.shape));
                Some(format!("{tensor} is {} {:?}, not {} {:?}", found.0, found.1, wanted.0, wanted.1))
            }
            Some(found) if found != wanted => Some(format!("{tensor} has other numbers")),
            Some(_) => None,
        });
        let problems: Vec<String> = different.collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::OtherFrozen { path, object: name.to_owned(), problems }.into())
    }
}

/// The same without the tensors that are left out, of which the values of models say what they are.
pub(super) fn without_frozen(mut state: RunState, without: BTreeMap<String, AllLeftOut>) -> RunState {
    for (name, left_out) in without {
        if let Some(model) = state.objects.get_mut(&name) {
            model.tensors.retain(|tensor, _| !left_out.contains_key(tensor));
            note_left_out(&mut model.values, &left_out);
        }
    }
    state
}
