//! Weights from a folder in the layout of the Hub, whatever small differences their age has left in the names.

use super::BertConfig;
use super::config::{CONFIG_FILE, ConfigError};
use accelerate::checkpoint::{LoadOptions, checkpoint_shapes, load_checkpoint_in_model};
use accelerate::nn::ParamStore;
use accelerate::{Error, Result};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Loads the weights of `folder` into a [`BertForSequenceClassification`](super::BertForSequenceClassification)
/// and returns the names of parameters that keep their random values because the model was never trained to
/// classify: none, or those of the classifier and perhaps the pooler.
///
/// Accepted are files of the classifier, of the bare model (names without `bert.`) and of models pretrained to fill in
/// words (whose `cls.` weights are left out), old names of norms (`gamma`, `beta`) included. Names and shapes are compared
/// with the model before any tensor is read.
///
/// # Errors
/// When there are no weights, or when some are missing, mis-shaped or unknown.
pub fn load_weights(store: &ParamStore, folder: &Path) -> Result<Vec<String>> {
    let shapes = checkpoint_shapes(folder)?;
    let is_bare = is_bare(shapes.iter().map(|(name, _)| name));
    let found: HashSet<String> = shapes.iter().map(|(name, _)| todays_name(name, is_bare)).collect();
    let (known, absent): (Vec<String>, Vec<String>) =
        store.named_parameters().into_iter().map(|(name, _)| name).partition(|name| found.contains(name));
    // A classifier that is there must be whole; only one that is absent altogether is made anew.
    let has_classifier = found.iter().any(|name| is_classifier(name));
    let is_complete = absent.iter().all(|name| is_head(name) && !has_classifier);
    let known: HashSet<String> = known.into_iter().collect();
    let has_strangers = found.iter().any(|name| !known.contains(name) && !is_of_no_use(name));
    let options = LoadOptions { strict: has_strangers || !is_complete, ..Default::default() };
    load_checkpoint_in_model(store, folder, &options.key_map(move |name| todays_name(name, is_bare)))?;
    Ok(absent)
}

/// Do the weights in `folder` include a trained classifier?
///
/// # Errors
/// When there are no weights, or they cannot be read.
pub fn has_classifier(folder: &Path) -> Result<bool> {
    Ok(checkpoint_shapes(folder)?.iter().any(|(name, _)| is_classifier(name)))
}

/// Are the sizes of `config` those of the weights in `folder`? Asked before a model of these sizes is built.
///
/// # Errors
/// When one is not, or the weights cannot be read.
pub fn check_sizes(config: &BertConfig, folder: &Path) -> Result<()> {
    let shapes = checkpoint_shapes(folder)?;
    let is_bare = is_bare(shapes.iter().map(|(name, _)| name));
    let shapes: BTreeMap<String, Vec<i64>> =
        shapes.into_iter().map(|(name, shape)| (todays_name(&name, is_bare), shape)).collect();
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

fn is_classifier(name: &str) -> bool {
    name.starts_with("classifier.")
}

/// What only a model for classification has.
fn is_head(name: &str) -> bool {
    is_classifier(name) || name.starts_with("bert.pooler.")
}

/// Are these the names of a model without any head?
fn is_bare<'a>(mut names: impl Iterator<Item = &'a String>) -> bool {
    names.any(|name| name.starts_with("encoder."))
}

fn todays_name(name: &str, is_bare: bool) -> String {
    let name = match name.rsplit_once('.') {
        Some((module, "gamma")) if module.ends_with("LayerNorm") => format!("{module}.weight"),
        Some((module, "beta")) if module.ends_with("LayerNorm") => format!("{module}.bias"),
        _ => name.to_owned(),
    };
    let is_part = ["embeddings.", "encoder.", "pooler."].iter().any(|part| name.starts_with(part));
    if is_bare && is_part { format!("bert.{name}") } else { name }
}

/// Heads of pretraining, and the numbers 0, 1, 2, ... that old files keep as a buffer.
fn is_of_no_use(name: &str) -> bool {
    name.starts_with("cls.") || name.ends_with("embeddings.position_ids")
}
