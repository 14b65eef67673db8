//! What can go wrong with adapters.

use super::shown::problem_lines;
use accelerate_core::weight_files::listed;
use std::path::PathBuf;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 600;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoraError {
    #[error(
        "the model has adapters already, {parameter} is of one; use the PeftModel that it was made by, whose add_adapter adds \
         another one"
    )]
    HasAdapters { parameter: String },
    #[error(
        "{operation} would change what is trained of a model that is prepared, such as {parameter}, and its engine and optimizers \
         would not know; do that before Accelerator::prepare"
    )]
    Prepared { operation: &'static str, parameter: String },
    #[error(
        "there is an adapter called {name:?} already; choose another name, or take that one away by delete_adapter"
    )]
    NameTaken { name: String },
    #[error("there is no adapter called {name:?}; there are {}", listed(known, LIST_BYTES))]
    NoAdapter { name: String, known: Vec<String> },
    #[error(
        "the adapter {second:?} would train biases of the model, which {first:?} trains already; they are not copies, so one \
         adapter alone can: set bias to none in the other"
    )]
    BiasTwice { first: String, second: String },
    #[error(
        "two of these adapters have a copy of {path} (modules_to_save), and a layer is computed by one; activate one of them"
    )]
    TwoCopies { path: String },
    #[error(
        "{path} is a {kind}, which is always computed in the same way; adapters go on Linear, Conv1D and Embedding layers"
    )]
    NoKernel { path: String, kind: &'static str },
    #[error(
        "{operation} does not go while adapters are merged ({}); call unmerge_adapter first",
        listed(names, LIST_BYTES)
    )]
    Merged { operation: &'static str, names: Vec<String> },
    #[error(
        "{parameter} is sharded over ranks, and a merged weight would be whole on each of them; save the adapter, and merge it in a \
         process that has the whole model"
    )]
    MergedSharded { parameter: String },
    #[error(
        "{parameter} is quantised, and an adapter that is added to its codes would be rounded to them; load the model without \
         quantisation and merge there, or use merge_adapter, which keeps merged weights beside it"
    )]
    MergedIntoCodes { parameter: String },
    #[error(
        "{parameter} is the weight of another layer, too, which would change with it; leave the layer out of the adapter, or use \
         merge_adapter, which keeps merged weights apart"
    )]
    MergedIntoShared { parameter: String },
    #[error("the adapter of {path} has a bias (lora_bias), and the layer has none that it could be added to")]
    MergedWithoutBias { path: String },
    #[error(
        "the weight of {path} with the adapter {adapter:?} merged into it is not finite; the adapter seems to be broken"
    )]
    MergedNotFinite { adapter: String, path: String },
    #[error("there is no {} in {}{hint}", accelerate_core::lora::ADAPTER_CONFIG, folder.display())]
    NoAdapterFile { folder: PathBuf, hint: String },
    #[error("the adapter in {} cannot be used: {source}", path.display())]
    Config { path: PathBuf, source: accelerate_core::Error },
    #[error(
        "the weights in {} are not those of this adapter on this model:\n  {}\nNothing was loaded. Check that the model is the one \
         that the adapter was trained on",
        path.display(), problem_lines(problems)
    )]
    DoesNotFit { path: PathBuf, problems: Vec<String> },
}

impl LoraError {
    /// Is it about what the program asked for, and not about a file?
    pub(crate) fn is_config(&self) -> bool {
        !self.is_weights()
    }

    pub(crate) fn is_weights(&self) -> bool {
        matches!(self, Self::Config { .. } | Self::DoesNotFit { .. } | Self::NoAdapterFile { .. })
    }
}
