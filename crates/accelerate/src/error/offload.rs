//! What can go wrong with state that is kept off the device.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum OffloadError {
    #[error(
        "no file for offloaded state can be made in {}: {source}. Create the folder or mount its disk, and see to it that \
         this process may write there",
        folder.display()
    )]
    Folder { folder: PathBuf, source: std::io::Error },

    #[error(
        "{} has no room for {:.1} GiB of offloaded state: {source}. Free some, or offload to another disk",
        folder.display(),
        *num_bytes as f64 / f64::from(1 << 30)
    )]
    NoRoom { folder: PathBuf, num_bytes: u64, source: std::io::Error },

    #[error(
        "cannot {action} offloaded state in {}: {source}. A step that was running has changed some parameters and not others: \
         mend the disk, then load a checkpoint",
        folder.display()
    )]
    Transfer { action: &'static str, folder: PathBuf, source: std::io::Error },

    #[error(
        "no thread for offloaded state can be started: {source}. The limit of threads or of memory is reached: raise it \
         (ulimit -u, or that of the container)"
    )]
    Spawn { source: std::io::Error },

    #[error("a thread that reads and writes offloaded state has ended early")]
    ThreadGone,

    #[error(
        "the offloaded state of this {optimizer} was lost in a step that failed; load a state \
         (Optimizer::load_state_dict), with the parameters that belong to it"
    )]
    Lost { optimizer: &'static str },

    #[error(
        "the state of {optimizer} cannot be kept off the device; use an optimizer whose steps go element by element \
         (Adam, AdamW, Adagrad, Lion), or do not offload its state"
    )]
    NotElementwise { optimizer: &'static str },
}
