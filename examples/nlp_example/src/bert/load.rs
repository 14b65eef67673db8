//! Weights from a folder in the layout of the Hub, whatever small differences their age has left in the names.

use accelerate::nn::{ParamStore, StateDict};
use accelerate::tch::Tensor;
use accelerate::{Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// All weights in one file.
const WEIGHTS_FILE: &str = "model.safetensors";

/// Which file of several holds which weight.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Loads the weights of `folder` into a [`BertForSequenceClassification`](super::BertForSequenceClassification)
/// and returns the names of parameters that keep their random values because the model was never trained to
/// classify: none, or those of the classifier and perhaps the pooler.
///
/// Accepted are files of the classifier, of the bare model (names without `bert.`) and of models pretrained to fill in
/// words (whose `cls.` weights are left out), old names of norms (`gamma`, `beta`) included.
///
/// # Errors
/// When there are no weights, or when some are missing, mis-shaped or unknown; all of them are listed.
pub fn load_weights(store: &ParamStore, folder: &Path) -> Result<Vec<String>> {
    let mut state = StateDict::default();
    for path in weight_files(folder)? {
        for (name, tensor) in Tensor::read_safetensors(&path)? {
            state.insert(name, tensor);
        }
    }
    let state = with_todays_names(state);
    let new_head: Vec<String> = store
        .named_parameters()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| is_head(name) && state.get(name).is_none())
        .collect();
    // A classifier that is there must be whole; only one that is absent altogether is made anew.
    let has_classifier = state.names().any(|name| name.starts_with("classifier."));
    let new_head = if has_classifier { Vec::new() } else { new_head };
    let complete = with_present_values(state, store, &new_head)?;
    store
        .load_state_dict(&complete, Default::default())
        .map_err(|error| error.context(format!("the weights in {}", folder.display())))?;
    Ok(new_head)
}

/// Do the weights in `folder` include a trained classifier?
///
/// # Errors
/// When there are no weights, or they cannot be read.
pub fn has_classifier(folder: &Path) -> Result<bool> {
    for path in weight_files(folder)? {
        let weights = Tensor::read_safetensors(&path)?;
        if weights.iter().any(|(name, _)| name.starts_with("classifier.")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What only a model for classification has.
fn is_head(name: &str) -> bool {
    name.starts_with("classifier.") || name.starts_with("bert.pooler.")
}

fn with_present_values(mut state: StateDict, store: &ParamStore, names: &[String]) -> Result<StateDict> {
    for name in names {
        if let Some(param) = store.get(name) {
            state.insert(name, param.local().f_detach_copy()?);
        }
    }
    Ok(state)
}

fn with_todays_names(state: StateDict) -> StateDict {
    let is_bare = state.names().any(|name| name.starts_with("encoder."));
    let rename = |name: String| {
        let name = match name.rsplit_once('.') {
            Some((module, "gamma")) if module.ends_with("LayerNorm") => format!("{module}.weight"),
            Some((module, "beta")) if module.ends_with("LayerNorm") => format!("{module}.bias"),
            _ => name,
        };
        let is_part = ["embeddings.", "encoder.", "pooler."].iter().any(|part| name.starts_with(part));
        if is_bare && is_part { format!("bert.{name}") } else { name }
    };
    // Heads of pretraining, and the numbers 0, 1, 2, ... that old files keep as a buffer.
    let is_of_no_use = |name: &str| name.starts_with("cls.") || name.ends_with("embeddings.position_ids");
    state.into_iter().map(|(name, tensor)| (rename(name), tensor)).filter(|(name, _)| !is_of_no_use(name)).collect()
}

/// The files that hold weights: one, or those that the index names.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let single = folder.join(WEIGHTS_FILE);
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join(INDEX_FILE);
    if !index.exists() {
        return Err(Error::other(format!(
            "{} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; wanted the weights of a BERT model in one of these forms",
            folder.display()
        )));
    }
    let in_index = |error: Error| error.context(index.display().to_string());
    let text = std::fs::read_to_string(&index).map_err(|error| in_index(Error::other(error)))?;
    let index: Index = serde_json::from_str(&text).map_err(|error| in_index(Error::other(error)))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    Ok(files.into_iter().map(|file| folder.join(file)).collect())
}
