//! What can be wrong with a plan of tensor parallelism.

use crate::settings::shortened;
use crate::weight_files::listed;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 400;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TensorParallelErrorKind {
    #[error(
        "a rule of a plan is a style such as \"colwise\", or {{\"style\": \"colwise\", \"unit\": 64, \"parts\": 2}}, and for \
         {pattern:?} was found {found}"
    )]
    MalformedRule { pattern: String, found: String },
    #[error(
        "\"auto\" in parallelize_plan is {{}} or {{\"head_dim\": 64}}, the number of features of a head, and {found} was found"
    )]
    MalformedAuto { found: String },
    #[error(
        "nobody says how the model's layers are divided: give a parallelize_plan, styles such as \"colwise\" by paths of layers, or \
         {{\"auto\": {{}}}} for layers that have the usual names, or implement Module::tensor_parallel_plan for the model"
    )]
    NoPlan,
    #[error(
        "no attention or feed-forward layers were found by the usual names (\"auto\" in parallelize_plan); say how layers are divided by \
         their paths, which are {}",
        listed(known, LIST_BYTES)
    )]
    NothingToDivide { known: Vec<String> },
    #[error(
        "{layer} is a layer of attention, and how many features a head has, no layer says: give \"auto\" in parallelize_plan as \
         {{\"head_dim\": 64}}"
    )]
    NoHeadDim { layer: String },
    #[error("the style {style} for {pattern:?} is not available: {why}")]
    StyleNotAvailable { pattern: String, style: String, why: &'static str },
    #[error("the rule for {pattern:?} has a 0; units and parts are counted from 1")]
    ZeroInRule { pattern: String },
    #[error(
        "the tokens between layers are to be divided (sequence_parallelism), and no plan says which norms and dropouts compute some of \
         them; add rules such as \"layers.*.norm\": \"sequence_parallel\" to parallelize_plan"
    )]
    NoSequenceRules,
    #[error("{pattern:?} is the path of no layer of the model; its layers are {}", listed(known, LIST_BYTES))]
    NoSuchLayer { pattern: String, known: Vec<String> },
    #[error("the plan has two rules for {layer}, by {first:?} and {second:?}; leave one of them out")]
    TwoRules { layer: String, first: String, second: String },
    #[error(
        "{first} and {second} share {weight}, and the plan divides it in two ways; divide both along the same features, such as \
         embedding_rowwise and colwise"
    )]
    TwoLayouts { weight: String, first: String, second: String },
    #[error(
        "{layer} is {} {kind}, and the plan says {style}; linear layers are divided by colwise and rowwise styles, embeddings by \
         embedding_rowwise and embedding_colwise, and other layers stay whole (replicate); LayerNorm, RMSNorm, Dropout and \
         embeddings may compute some tokens each (sequence_parallel)",
        if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" }
    )]
    StyleOfOtherLayer { layer: String, kind: &'static str, style: &'static str },
    #[error(
        "{layer} is {style}, and all tokens of its output were asked for (with_all_tokens), which is for sequence_parallel layers"
    )]
    AllTokensOfOther { layer: String, style: &'static str },
    #[error("{layer}: {features} features do not divide into {parts} equal parts of whole units of {unit} features")]
    CutUnit { layer: String, features: usize, unit: usize, parts: usize },
    #[error(
        "{layer} has {features} features, and {tp_size} ranks need {tp_size} units of {unit} features, of which there are {units} (a \
         head of attention is a unit): use fewer ranks along tp"
    )]
    TooFewUnits { layer: String, features: usize, unit: usize, units: usize, tp_size: usize },
    #[error("config.json does not say how layers are divided: {reason}")]
    Config { reason: String },
    #[error(
        "no plan for tensor parallelism is known for the model_type {:?}; there is one for gpt2, llama, mistral and qwen2. A program \
         prints the plan of any model with Accelerator::plan",
        shortened(model_type)
    )]
    UnknownModel { model_type: String },
}

impl TensorParallelErrorKind {
    /// Is it about what was said, and not about the layers that it was said of?
    pub(crate) fn is_config(&self) -> bool {
        matches!(
            self,
            Self::MalformedRule { .. }
                | Self::MalformedAuto { .. }
                | Self::StyleNotAvailable { .. }
                | Self::ZeroInRule { .. }
        )
    }
}
