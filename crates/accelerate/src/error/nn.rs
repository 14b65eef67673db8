//! What can go wrong in `nn`.

use super::shown::problem_lines;
use tch::{Kind, TchError};

#[derive(Debug, thiserror::Error)]
pub(crate) enum NnError {
    #[error(
        "{parameter} is sharded over ranks, and a sharded model does not move to another device or element type, nor is it \
         initialised again; do that before `prepare`"
    )]
    ShardedData { parameter: String },
    #[error(
        "{parameter} is sharded over ranks, and whether it gets gradients was decided by `prepare`, for all parameters of its \
         unit; call set_requires_grad before that"
    )]
    ShardedRequiresGrad { parameter: String },
    #[error(
        "{parameter} was frozen when the model was prepared, so that no gradient of it would be averaged over the ranks, which would \
         drift apart; unfreeze it before `prepare`, or take the model back with into_inner, unfreeze it and prepare model and \
         optimizer anew"
    )]
    UnreducedRequiresGrad { parameter: String },
    #[error(
        "gradients are asked for within a checkpointed segment, before what it saves for them is there; ask for them outside, or \
         do not checkpoint the segment"
    )]
    DifferentiatedWithin,
    #[error(
        "{parameter} has no memory yet, because its store was made by ParamStore::init_empty_weights; load or save it after \
         Accelerator::prepare, or after ParamStore::materialize"
    )]
    Deferred { parameter: String },
    #[error(
        "activation checkpointing was asked for, but no layer of the model is made to be computed again; put its blocks into \
         nn::Checkpointed, or call nn::checkpoint where they are used"
    )]
    NothingToCheckpoint,
    #[error(
        "{what} of a checkpointed segment was changed between its forward pass and the backward pass, which computes it again: \
         gradients would mix old and new values. Run the backward pass first"
    )]
    ChangedBeforeRecomputing { what: String },
    #[error(
        "a checkpointed segment saved {wanted} tensors in the forward pass and {found} when it was computed again; it has to do \
         the same both times, whatever else has changed"
    )]
    RecomputedOtherwise { wanted: usize, found: usize },
    #[error(
        "attention that is computed again in the backward pass has to be computed by the kernel of the forward pass, and where ranks \
         divide sequences there are two: take ScaledDotProductAttention::kernel before the segment and call it within, or do not \
         checkpoint the layer"
    )]
    AttentionWithinCheckpoint,
    #[error(
        "within maybe_context_parallel ranks have some tokens of each sequence, and a model that has not been prepared would let them look at \
         these alone; prepare it (for evaluation only: PrepareModelOptions::evaluation_mode), or call it outside"
    )]
    AttentionNotPrepared,
    #[error(
        "an attn_mask of MultiheadAttention says which query sees which key, and where ranks divide sequences no rank has all queries; \
         use is_causal and a key_padding_mask, which is divided as the tokens are"
    )]
    MaskOfDividedSequence,
    #[error(
        "what was saved does not make up this model:\n  {}\nNothing was loaded. Give the state of the same model, and where processes \
         sharded it, the shards of all of them",
        problem_lines(problems)
    )]
    PartsMismatch { problems: Vec<String> },
    #[error(
        "the parameter name `{name}` is taken already, by a tensor of shape {shape:?}; give each layer its \
         own place with `&path / \"name\"`, or use `path.alias` to tie two layers to one weight"
    )]
    DuplicateName { name: String, shape: Vec<i64> },

    #[error(
        "`{name}` cannot name a parameter: it is empty or has an empty part between two dots; names look \
         like `encoder.layer.0.weight`"
    )]
    MalformedName { name: String },

    #[error(
        "`{alias}` cannot be tied to `{name}`, because that parameter belongs to another store; tie \
         parameters that were made under the same ParamStore"
    )]
    ForeignAlias { alias: String, name: String },

    #[error(
        "`{name}` cannot be a parameter: its elements are {kind:?}, which have no gradient; use \
         `path.buffer` for state that is not learned"
    )]
    IntegerParameter { name: String, kind: Kind },

    #[error(
        "{layer} at `{name}` cannot take an input of shape {found:?} and element type {}; it takes {wanted}: {source}",
        kind_name(.kind)
    )]
    Forward { layer: &'static str, name: String, wanted: String, found: Vec<i64>, kind: Option<Kind>, source: TchError },

    #[error(
        "the embedding at `{path}` has no row {index} for padding; padding_idx goes from -{num_embeddings}, which is the first, \
         to {}",
        num_embeddings - 1
    )]
    PaddingIndex { path: String, index: i64, num_embeddings: i64 },

    #[error("the dropout at `{path}` has p = {p}; a probability goes from 0 to 1")]
    Probability { path: String, p: f64 },

    #[error(
        "{layer} at `{path}` cannot split {what} = {whole} evenly by {by} = {parts}; choose {by} so \
         that it divides {what}"
    )]
    NotDivisible { layer: &'static str, path: String, what: &'static str, whole: i64, by: &'static str, parts: i64 },

    #[error(
        "{layer} at `{name}` cannot learn from an input of shape {found:?}: one value per channel has no \
         variance; use larger batches, drop the last incomplete one, or call `store.eval()` for evaluation"
    )]
    OneValuePerChannel { layer: &'static str, name: String, found: Vec<i64> },

    #[error(
        "{path} gave {found} tensors, but the program takes {wanted}; name another output type, \
         {module}<Input, Output>, or return other tensors there"
    )]
    NumOutputs { module: &'static str, path: String, found: usize, wanted: &'static str },

    #[error("{module} {path}: {source}")]
    Compiled { module: &'static str, path: String, source: torch_ext::Error },

    #[error(
        "a CUDA graph of the model gives another result than the model itself: {what} is {by:.1e} of its size away (rounding is \
         {most:.0e}), so graphs are off for this model from now on. Its forward pass decides by values, keeps what it computed before, or \
         uses memory that has moved"
    )]
    GraphDiffers { what: String, by: f64, most: f64 },

    #[error(
        "the passes of the model cannot be recorded as CUDA graphs, so graphs are off for this model from now on: {source}"
    )]
    GraphNotRecorded { source: Box<super::Error> },

    #[error(
        "the backward pass of a model on CUDA graphs came after another forward pass of it, which has overwritten what it needs; run it \
         before the next forward pass, or train the model without graphs"
    )]
    GraphOverwritten,

    #[error(
        "a second backward pass through the same forward pass of a model on CUDA graphs: the first one has overwritten what it needs; run \
         the forward pass again, or train the model without graphs"
    )]
    GraphUsed,

    #[error(
        "{name} is sharded, offloaded, quantised, or has no memory yet, so it has no place that a CUDA graph could read; train the model \
         without graphs"
    )]
    GraphedStorage { name: String },

    #[error(
        "CUDA graphs record work of a CUDA device, but the model is on {device:?}; move it to a GPU, or train it without graphs"
    )]
    GraphedDevice { device: tch::Device },

    #[error(
        "the model's {what} cannot be made of its own tensors again, so its passes cannot be recorded; take and give tensors, tuples or vectors"
    )]
    GraphedTree { what: &'static str },

    #[error(
        "AotInductorModule {path} was given inputs that want gradients, but its compiled code has no backward pass; call \
         it inside of tch::no_grad, detach the inputs, or train the model as an ExportedModule, a ScriptModule or in Rust"
    )]
    NoBackward { path: String },

    #[error(
        "ExportedModule {path} is a package for inference only: it holds no backward pass. Make one with `accelerate export-model`,          or load it as an AotInductorModule"
    )]
    OnlyForInference { path: String },

    #[error("ExportedModule {path}: {source}")]
    Signature { path: String, source: accelerate_core::Error },

    #[error(
        "the values of an exported model could not be read from {path}: {source}. `accelerate export-model` writes them beside          the package; keep both files together"
    )]
    ExportedValues { path: String, source: TchError },

    #[error(
        "{name} {problem}, in {path}; {kind:?} of shape {shape:?} is wanted. This file and the package beside it are not of one          export; make both again"
    )]
    ExportedValue { path: String, name: String, problem: String, kind: Kind, shape: Vec<i64> },

    #[error("ExportedModule {path} has tensors of type {dtype}, which has no counterpart here")]
    ExportedDtype { path: String, dtype: String },

    #[error(
        "ExportedModule {path} was given inputs that want gradients, but its compiled code has gradients of parameters only; detach          the inputs, or put the layers before them into the exported model"
    )]
    NoGradientOfInputs { path: String },

    #[error(
        "{name} requires a gradient, but ExportedModule {path} has none for it: it was frozen, or the loss did not depend on it,          when the model was exported. Freeze it with set_requires_grad(false), or export the model again"
    )]
    ExportedWithoutGradient { path: String, name: String },

    #[error(
        "{name}, a buffer of ExportedModule {path}, is not contiguous, and is changed in place; copy a contiguous tensor into it"
    )]
    BufferNotContiguous { path: String, name: String },

    #[error(
        "ExportedModule {path} was in evaluation mode in this forward pass, whose compiled code has no backward pass; call train() on \
         the model before, or wrap the pass in tch::no_grad if it needs no gradients"
    )]
    NoBackwardInEvaluation { path: String },

    #[error(
        "{parameter} is kept where a device map says, so that the model cannot be moved or cast; dispatch it by another map, or load it \
         in the other type"
    )]
    DispatchedData { parameter: String },

    #[error(
        "{parameter} is quantised, and codes have no gradient; train adapters beside it, or load the layer without quantising it \
         (llm_int8_skip_modules)"
    )]
    QuantizedRequiresGrad { parameter: String },

    #[error("{parameter} is quantised, and is not initialised again; load its weights")]
    QuantizedInitialisation { parameter: String },

    #[error("the parts of the quantised weight {parameter} are not what its layer was made for; load the model again")]
    NotQuantized { parameter: String },

    #[error(
        "{parameter} was overwritten with another quant_state: {found} in place of {wanted}. Its codes would be misread; load such \
         files with load_and_quantize_model"
    )]
    OtherQuantState { parameter: String, found: String, wanted: String },

    #[error(
        "the codes of {parameter} cannot be stored as {kind:?}: their bytes do not fill its elements, or it is none of uint8, \
         float16, bfloat16 and float32; leave bnb_4bit_quant_storage out"
    )]
    QuantStorage { parameter: String, kind: Kind },

    #[error(
        "the quantised layer at `{name}` cannot take an input of shape {found:?} and element type {}; it takes {wanted}",
        kind_name(.kind)
    )]
    QuantizedForward { name: String, wanted: String, found: Vec<i64>, kind: Option<Kind> },

    #[error(
        "{parameter} has numbers that float16 does not hold (above 65504, or not a number), and 8 bits are made by way of it; \
         use 4 bits, or skip the layer (llm_int8_skip_modules)"
    )]
    BeyondFloat16 { parameter: String },

    #[error(
        "{path} is a Conv1D, whose weight is stored transposed, and with llm_int8_has_fp16_weight it would stay as it is; leave that setting \
         out, or skip the layer (llm_int8_skip_modules)"
    )]
    Conv1DInFp16 { path: String },

    #[error(
        "{parameter} has numbers that are not finite, and with bnb_4bit_use_double_quant the scales of all others would be none either; save \
         finite weights, or leave that setting out"
    )]
    NotFiniteWeight { parameter: String },

    #[error("{parameter} is quantised already; load the weights into a model that was made anew")]
    AlreadyQuantized { parameter: String },

    #[error(
        "the parameters belong to {holder}, which would keep the weights as they were; write the model's layers with accelerate::nn"
    )]
    HeldElsewhere { holder: &'static str },

    #[error("a tensor cannot be divided into 0 tiles; ask for at least one tile")]
    NoTiles,

    #[error("a tensor of {dims} dims has no dim {dim} to be divided into tiles")]
    NoDimOfTiles { dim: i64, dims: i64 },

    #[error(
        "a loss in tiles takes hidden states [rows, features] and labels [rows], and was given {hidden:?} and {labels:?}; flatten the \
         dims of the batch"
    )]
    LabelsOfTiles { hidden: Vec<i64>, labels: Vec<i64> },

    #[error("a label is neither a class from 0 to {} nor ignore_index", num_classes - 1)]
    NoSuchClass { num_classes: i64 },

    #[error("there is no reduction {found} of a loss; take Reduction::None, Mean or Sum")]
    NoSuchReduction { found: i64 },

    #[error(
        "a tensor of shape {shape:?} has no fan-in and fan-out: Xavier and Kaiming initialisation need at \
         least the two dims [out, in]; use uniform, normal or constant values instead"
    )]
    NoFan { shape: Vec<i64> },
}

pub(super) fn kind_name(kind: &Option<Kind>) -> String {
    kind.map_or_else(|| "unknown".to_owned(), |kind| format!("{kind:?}"))
}
