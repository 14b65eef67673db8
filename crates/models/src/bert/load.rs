//! Weights from a folder in the layout of the Hub, whatever small differences their age has left in the names.

use super::{BertConfig, BertForSequenceClassification};
use crate::pretrained::{self, names_in_model};
use crate::{CONFIG_FILE, ConfigError};
use accelerate::checkpoint::checkpoint_shapes;
use accelerate::nn::ParamStore;
use accelerate::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Loads the weights of `folder` into a [`BertForSequenceClassification`] and returns the names of parameters that keep their
/// random values because the model was never trained to classify: none, or those of the classifier and perhaps the pooler.
///
/// Accepted are files of the classifier, of the bare model (names without `bert.`) and of models pretrained to fill in
/// words (whose `cls.` weights are left out), old names of norms (`gamma`, `beta`) included. Names and shapes are compared
/// with the model before any tensor is read.
///
/// # Errors
/// When there are no weights, or when some are missing, mis-shaped or unknown.
pub fn load_weights(store: &ParamStore, folder: &Path) -> Result<Vec<String>> {
    Ok(pretrained::load_weights::<BertForSequenceClassification>(store, folder, true)?.missing_keys)
}

/// Do the weights in `folder` include a trained classifier?
///
/// # Errors
/// When there are no weights, or they cannot be read.
pub fn has_classifier(folder: &Path) -> Result<bool> {
    Ok(checkpoint_shapes(folder)?.iter().any(|(name, _)| name.starts_with("classifier.")))
}

/// Are the sizes of `config` those of the weights in `folder`? Asked before a model of these sizes is built.
///
/// # Errors
/// When one is not, or the weights cannot be read.
pub fn check_sizes(config: &BertConfig, folder: &Path) -> Result<()> {
    let shapes = checkpoint_shapes(folder)?;
    let names = names_in_model::<BertForSequenceClassification>(shapes.iter().map(|(name, _)| name.as_str()));
    let shapes: BTreeMap<String, Vec<i64>> = shapes.iter().map(|(name, shape)| (names(name), shape.clone())).collect();
    let sizes = [
        ("vocab_size", config.vocab_size, "embeddings.word_embeddings", 0),
        ("hidden_size", config.hidden_size, "embeddings.word_embeddings", 1),
        ("max_position_embeddings", config.max_position_embeddings, "embeddings.position_embeddings", 0),
        ("type_vocab_size", config.type_vocab_size, "embeddings.token_type_embeddings", 0),
        ("intermediate_size", config.intermediate_size, "encoder.layer.0.intermediate.dense", 0),
    ];
    let of_tables = sizes.into_iter().filter_map(|(key, found, module, dim)| {
        let wanted = *shapes.get(&format!("bert.{module}.weight"))?.get(dim)?;
        Some((key, found, wanted))
    });
    let num_layers = shapes.keys().filter_map(|name| {
        name.strip_prefix("bert.encoder.layer.")?.split_once('.')?.0.parse::<i64>().ok()?.checked_add(1)
    });
    let layers = num_layers.max().map(|wanted| ("num_hidden_layers", config.num_hidden_layers as i64, wanted));
    match of_tables.chain(layers).find(|(_, found, wanted)| found != wanted) {
        Some((key, found, wanted)) => {
            let (found, wanted) = (found.to_string(), format!("{wanted}, which the weights beside it have"));
            Err(Error::other(ConfigError::Value { path: folder.join(CONFIG_FILE), key, found, wanted }))
        }
        None => Ok(()),
    }
}
