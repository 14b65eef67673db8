//! What can be wrong with the configuration of an adapter.

use crate::weight_files::listed;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 400;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoraErrorKind {
    #[error("{field} is {found}, and the rank of an adapter goes from 1 to {most}")]
    Rank { field: String, found: usize, most: usize },
    #[error("{field} is {found:?}, and an adapter is multiplied by a number that float32 holds")]
    Alpha { field: String, found: f64 },
    #[error("lora_dropout is {found}; a probability goes from 0 to 1")]
    Dropout { found: f64 },
    #[error("{field} is {found:?}; the choices are {choices}")]
    Choice { field: &'static str, found: String, choices: String },
    #[error(
        "target_modules is missing: name the layers that get the adapter, such as [\"q_proj\", \"v_proj\"], or say \"all-linear\". \
         PEFT's table of defaults by kind of model is not here"
    )]
    NoTargets,
    #[error(
        "{field} goes with a list of target_modules only, and target_modules is a pattern; put the numbers into the pattern"
    )]
    OnlyWithList { field: &'static str },
    #[error(
        "layers_pattern says where layers are counted, and layers_to_transform says which of them; give both or neither"
    )]
    PatternWithoutLayers,
    #[error("lora_bias goes with init_lora_weights true or false, not with \"gaussian\"")]
    BiasWithGaussian,
    #[error("the pattern {pattern:?} of {field} cannot be used: {reason}")]
    Pattern { field: &'static str, pattern: String, reason: String },
    #[error(
        "no layer of the model is meant by target_modules ({targets}){}; its layers are {}",
        if *are_excluded { ", because exclude_modules or modules_to_save have all of them" } else { "" },
        listed(known, LIST_BYTES)
    )]
    NothingMatched { targets: String, are_excluded: bool, known: Vec<String> },
    #[error(
        "target_modules ({targets}) means {path}, which is a {kind}; adapters go on Linear and Embedding layers. Leave it out, or \
         name it in exclude_modules"
    )]
    WrongKind { targets: String, path: String, kind: String },
    #[error(
        "modules_to_save means {path}, which is a {kind}; copies of an adapter's own are kept of Linear and Embedding layers only. \
         Leave it out, or train it by set_requires_grad(true) and save the whole model"
    )]
    SavedKind { path: String, kind: String },
    #[error(
        "lora_bias is not there for embeddings, and {path} is one; leave it out of target_modules, or set lora_bias to false"
    )]
    BiasOfEmbedding { path: String },
    #[error(
        "{name:?} cannot name an adapter: names are made of letters, digits, `_` and `-`, and do not contain \"lora_\" or \
         \"modules_to_save\""
    )]
    AdapterName { name: String },
    #[error("it is not JSON: {reason}")]
    NotJson { reason: String },
    #[error("`{key}` is {found}, and {wanted} is wanted there")]
    Value { key: String, found: String, wanted: &'static str },
    #[error("`{key}` is missing")]
    Missing { key: &'static str },
    #[error("it is of type {found}, and only adapters of type LORA are read")]
    PeftType { found: String },
    #[error("`{key}` is {found}, and this is not there: {why}")]
    Unsupported { key: String, found: String, why: &'static str },
    #[error(
        "`{key}` is {found}, of which nothing is known here: adapters that were made with it may compute something else. If it has \
         no effect on this adapter, remove it from the file"
    )]
    UnknownKey { key: String, found: String },
}
