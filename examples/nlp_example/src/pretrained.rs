//! The starting point: a trained model from a folder or the Hub, or a new one of a size that suits the data.

use crate::arguments::Arguments;
use crate::readers::Table;
use crate::tokenize::TextTokenizer;
use accelerate_models::PretrainedConfig;
use accelerate_models::bert::{self, BertConfig};
use accelerate_models::hub::{HubError, model_folder};
use std::path::{Path, PathBuf};

/// Tokens in a vocabulary that is learned from the training split, at most.
pub const VOCABULARY_SIZE: usize = 8000;

/// The folder that `--model_name_or_path` means. `None` without the option.
///
/// # Errors
/// When there is no such folder and the Hub cannot help.
pub fn folder(arguments: &Arguments) -> Result<Option<PathBuf>, HubError> {
    arguments.model_name_or_path.as_ref().map(|name| model_folder(name, None)).transpose()
}

/// The sizes of a new model for this vocabulary and these labels.
///
/// # Errors
/// When the labels do not count 0, 1, 2, ... without a gap.
pub fn new_config(arguments: &Arguments, tokenizer: &TextTokenizer, train: &Table) -> anyhow::Result<BertConfig> {
    let config = BertConfig::small(tokenizer.vocab_size() as i64, train.num_labels()?, arguments.max_length as i64);
    Ok(BertConfig { pad_token_id: tokenizer.pad_id(), ..config })
}

/// The sizes of the model in `folder`. A model that has no classifier yet gets one for the labels of `train`.
///
/// # Errors
/// When the folder's files are missing or malformed, or do not fit each other.
pub fn config_of(folder: &Path, tokenizer: &TextTokenizer, train: &Table) -> anyhow::Result<BertConfig> {
    let config = BertConfig::from_folder(folder)?;
    bert::check_sizes(&config, folder)?;
    let (num_tokens, num_rows) = (tokenizer.vocab_size(), config.vocab_size);
    anyhow::ensure!(
        num_tokens as i64 <= num_rows,
        "the tokenizer in {} knows {num_tokens} tokens, but the model's vocab_size is {num_rows}; the two belong to \
         different models",
        folder.display()
    );
    if bert::has_classifier(folder)? {
        return Ok(config);
    }
    let num_labels = train.num_labels()?;
    Ok(config.with_num_labels(num_labels))
}
