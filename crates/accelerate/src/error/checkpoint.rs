//! What can go wrong when the state of a run is saved or goes on.

use super::shown::problem_lines;
use accelerate_core::names::counted;
use std::ops::Range;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error(
        "save_state was called without a folder, and checkpoints are not named automatically; give it a folder, or set \
         automatic_checkpoint_naming in ProjectConfiguration"
    )]
    NoFolder,

    #[error(
        "save_state was given the folder {}, and automatic_checkpoint_naming names folders itself; give it None",
        folder.display()
    )]
    TwoNames { folder: PathBuf },

    #[error("there is no checkpoint to go on from in {}: {found}. Name the folder of one", folder.display())]
    NoCheckpoint { folder: PathBuf, found: String },

    #[error(
        "process {rank} cannot read whether {} was completed: {problem}. Make it readable, or name the folder to go on from: a run that \
         went on from an earlier checkpoint might remove it",
        folder.display()
    )]
    Unreadable { folder: PathBuf, rank: usize, problem: String },

    #[error(
        "a hook before save_state has written {}, which is a file of the checkpoint that was in this folder, and would be removed with \
         it; write files of other names, or save to another folder",
        path.display()
    )]
    ChangedByHook { path: PathBuf },

    #[error(
        "there is no folder {} to go on from; name the folder of a checkpoint, such as checkpoints/checkpoint_1 of a project, or None \
         for the newest of them",
        folder.display()
    )]
    NoSuchFolder { folder: PathBuf },

    #[error(
        "{} is not a checkpoint: no save_state into it was completed, since there is no checkpoint.manifest.json",
        folder.display()
    )]
    NotCommitted { folder: PathBuf },

    #[error(
        "the thread that writes checkpoints ended with a panic, whose message is above; this is a fault of the library"
    )]
    WriterPanicked,

    #[error("no thread could be started that writes the checkpoint: {source}; save with save_state, which needs none")]
    NoThread { source: std::io::Error },

    #[error(
        "somebody saved into {} while it was read, so that parts of two checkpoints may have been read; nothing has changed. Load it \
         once more, and let no other run save there",
        folder.display()
    )]
    SavedMeanwhile { folder: PathBuf },

    #[error("{} cannot be used: {source}", path.display())]
    Description { path: PathBuf, source: accelerate_core::Error },

    /// Not the error itself, which may repeat what is in the file, however long that is.
    #[error("{} says of an object what the one that was prepared does not take: {reason}", path.display())]
    DoesNotFit { path: PathBuf, reason: String },

    #[error("{} is not what the checkpoint says of it: {reason}; go on from an earlier checkpoint", path.display())]
    Damaged { path: PathBuf, reason: String },

    #[error(
        "{} says that `{name}` is state in blocks of numbers (\"is_elementwise\": false), which other ranks than those that wrote it \
         cannot divide anew, and this rank keeps {wanted}; go on with as many processes and the same sharding as before",
        path.display()
    )]
    InBlocks { path: PathBuf, name: String, wanted: String },

    #[error(
        "elements {}..{} of `{name}` of {object} are on none of the ranks that write into this folder; write into one folder \
         that all machines share, without save_on_each_node",
        missing.start, missing.end
    )]
    NotHeld { object: String, name: String, missing: Range<usize> },

    #[error(
        "`{name}` of {object} is divided into {num_runs} runs of elements, and no checkpoint is read with more than {} of one tensor; \
         divide its outermost dim, or have it saved whole with state_dict_type FULL_STATE_DICT",
        accelerate_core::checkpoint::MOST_RUNS
    )]
    TooDivided { object: String, name: String, num_runs: usize },

    #[error(
        "{} would have {num_bytes} bytes, more than is read again; divide the model over fewer processes, or into fewer tensors",
        path.display()
    )]
    LongDescription { path: PathBuf, num_bytes: usize },

    #[error(
        "{object} could not be read once more after all of the checkpoint had been compared with its hashes: {source}; some \
         of the run is that of the checkpoint and some is not, so load a checkpoint again before anything else, or end"
    )]
    HalfLoaded { object: String, source: crate::Error },

    #[error(
        "gradients wait for a step that have been divided by the loss scale already, as clip_grad_norm_ does it, and a checkpoint has \
         no place for that; save before they are clipped, or after optimizer.step() and zero_grad()"
    )]
    UnscaledGradients,

    #[error(
        "{call} cannot be called in a save or load hook; call it after the save_state or load_state that runs the hook, and in a hook \
         use save_model or load_checkpoint_in_model"
    )]
    WithinHook { call: &'static str },

    #[error("a hook leaves out `{model}`, and no model has that name; there are {known}")]
    NoModelToLeaveOut { model: String, known: String },

    #[error(
        "a registered value cannot be brought back from what JSON holds of it: {source}; JSON has neither infinities nor NaN, \
         so begin with None or f64::MAX"
    )]
    NotInJson { source: serde_json::Error },

    #[error(
        "a registered value has an infinite number or NaN, which would come back as nothing, because JSON has neither; put a number \
         in its place, such as f64::MAX"
    )]
    NotFinite,

    #[error(
        "`{object}` of the checkpoint is not in this folder: with save_on_each_node each machine has that of its own processes; go on \
         with the same processes on each machine, or have this machine read the folder of the one that had this process"
    )]
    OnAnotherMachine { object: String },

    #[error(
        "the checkpoint has {found} numbers as `{name}` of the PowerSGD hook, and the bucket of gradients needs {wanted}; go on \
         from another checkpoint"
    )]
    OtherBucket { name: String, found: usize, wanted: usize },

    #[error(
        "the checkpoint has what the PowerSGD hook keeps of {found} of {wanted} buckets, and no `{name}`; go on from another \
         checkpoint"
    )]
    MissingBucket { name: String, found: usize, wanted: usize },

    #[error(
        "the checkpoint has gradients that wait for a step, and they are those of {} with the parameters that each of them had; \
         go on with as many processes, the same model and the same sharding, or save where accelerator.sync_gradients() is true \
         and zero_grad of every optimizer has been called",
        counted(*world_size as u64, "process")
    )]
    OtherGradients { world_size: usize },

    #[error(
        "the checkpoint was saved without the frozen parameters of {object} (adapter_only), and those of the model are others, says {}:\n  \
         {}\nNothing was loaded. Give the model the weights that the adapter was trained beside",
        path.display(), problem_lines(problems)
    )]
    OtherFrozen { path: PathBuf, object: String, problems: Vec<String> },
}
