//! What cannot be merged, and what cannot be removed afterwards.

use std::io;
use std::path::PathBuf;

use accelerate_core::files::ShownPath;
use accelerate_core::weight_files::listed;

#[derive(Debug, thiserror::Error)]
pub(super) enum MergeError {
    #[error(
        "--unsafe_serialization asks for pytorch_model.bin, a pickle that can run any program where it is loaded; leave the \
         flag out: every library that loads .bin files loads model.safetensors as well"
    )]
    UnsafeSerialization,
    #[error(
        "{} would be within {}, which --remove_checkpoint_dir removes after merging; name another folder for the result",
        output.shown(), checkpoint.shown()
    )]
    OutputWithin { output: PathBuf, checkpoint: PathBuf },
    #[error(
        "{} is a checkpoint of a whole run, of which weights are only a part; leave --remove_checkpoint_dir out",
        folder.shown()
    )]
    RemovesCheckpoint { folder: PathBuf },
    #[error(
        "{} holds what is not in the result: {}; move it elsewhere, or leave --remove_checkpoint_dir out",
        folder.shown(), listed(unmerged, 300)
    )]
    RemovesMore { folder: PathBuf, unmerged: Vec<String> },
    #[error("{} is a link, and --remove_checkpoint_dir would leave what it leads to; name the folder itself", link.shown())]
    RemovesLink { link: PathBuf },
    #[error(
        "the files in {} are not as they were saved; `accelerate checkpoint verify` lists what is wrong", folder.shown()
    )]
    NotAsSaved { folder: PathBuf },
    #[error("{} cannot be removed; the merged weights are complete", path.shown())]
    Remove { path: PathBuf, source: io::Error },
}
