//! `accelerate merge-weights`: one safetensors file, made of the parts that many processes have saved.

mod error;

use accelerate_core::names::counted;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use accelerate_core::checkpoint::{DESCRIPTION, STEM};
use accelerate_core::files::ShownPath;
use accelerate_core::weight_files::{DEFAULT_MAX_SHARD_BYTES, Header, SaveManifest, format_size, listed, shown};
use clap::Args;
use error::MergeError;

use crate::checkpoint::{Seen, newest_in};
use crate::flags::size_above_zero;
use crate::paths;
use crate::weights::{self, Weights, WeightsError};

/// Names of this many bytes are listed in a message.
const MOST_LISTED_BYTES: usize = 300;

/// Merge the weights of a sharded checkpoint into model.safetensors.
///
/// The checkpoint is a folder that `save_state` wrote, however its processes divided the model, one that PyTorch wrote in
/// parts (torch.distributed.checkpoint, which Python Accelerate uses for SHARDED_STATE_DICT), or one with safetensors shards
/// or PyTorch's .bin files. Nothing in a file is executed: whatever is no tensor is left out and named. No more than one
/// tensor is in memory at a time.
///
/// Of a checkpoint of `save_state`, every byte is first compared with what was saved. What safetensors files note about themselves
/// (`__metadata__`) is in the result; of several files, what all of them say alike.
#[derive(Debug, Args)]
#[command(after_help = "Every flag may also be spelled with - instead of _.")]
#[command(after_long_help = "Examples:\n  \
    The model of a checkpoint that Python Accelerate has saved with FSDP:\n    \
      accelerate merge-weights checkpoints/checkpoint_0/pytorch_model_fsdp_0 merged\n  \
    The model of a sharded run of this library, whole:\n    \
      accelerate merge-weights checkpoints/checkpoint_3 merged\n  \
    One file of several shards, however large:\n    \
      accelerate merge-weights model merged --max_shard_size 1TB\n\n\
    Every flag may also be spelled with - instead of _ (--max-shard-size).\n\n\
    Nothing in the output folder is replaced: weights that are there already are an error.\n\
    Exit code: 0; 1 if the checkpoint cannot be read or the result not be written; 2 for wrong flags.")]
pub(crate) struct Arguments {
    /// The folder of the checkpoint.
    #[arg(value_name = "CHECKPOINT_DIRECTORY")]
    checkpoint_directory: PathBuf,

    /// The folder for the merged weights. It is made if it is absent.
    #[arg(value_name = "OUTPUT_PATH")]
    output_path: PathBuf,

    /// The largest file to write. More than that becomes several files and model.safetensors.index.json.
    #[arg(long = "max_shard_size", alias = "max-shard-size", value_name = "SIZE", default_value = "10GB")]
    #[arg(value_parser = size_above_zero)]
    max_shard_size: u64,

    /// Remove the folder of the checkpoint after merging. Refused where it holds anything that is not in the result.
    #[arg(long = "remove_checkpoint_dir", alias = "remove-checkpoint-dir")]
    remove_checkpoint_dir: bool,

    /// Refused: it would write pytorch_model.bin, which is a program that runs wherever it is loaded.
    #[arg(long = "unsafe_serialization", alias = concat!("uns", "afe-serialization"))]
    unsafe_serialization: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Arguments { checkpoint_directory, output_path, .. } = arguments;
    if arguments.unsafe_serialization {
        return Err(MergeError::UnsafeSerialization.into());
    }
    if arguments.remove_checkpoint_dir {
        check_apart(checkpoint_directory, output_path)?;
    }
    let Opened { seen, mut weights } = Opened::open(checkpoint_directory, arguments.remove_checkpoint_dir)?;
    weights.check_tensors(checkpoint_directory)?;
    if arguments.remove_checkpoint_dir {
        check_all_is_merged(checkpoint_directory, &weights)?;
    }
    let (num_tensors, num_bytes) = (weights.tensors.len(), weights.num_bytes());
    let is_of_one_save = || Ok(seen.check()?);
    let written = weights::write(&mut weights, output_path, arguments.max_shard_size, &is_of_one_save)?;
    // Of a result that is not there, nothing is left out.
    tell_what_is_left_out(&weights);
    crate::print_message(&format!(
        "accelerate merge-weights: {}, {}, {} in {written}",
        counted(num_tensors, "tensor"),
        format_size(num_bytes),
        if num_tensors == 1 { "is" } else { "are" }
    ));
    if arguments.remove_checkpoint_dir {
        // Something may have come while weights were written.
        check_all_is_merged(checkpoint_directory, &weights)?;
        let failed = |source| MergeError::Remove { path: checkpoint_directory.clone(), source };
        // The folder of this process cannot be removed as `.`.
        let folder = fs::canonicalize(checkpoint_directory).unwrap_or_else(|_| checkpoint_directory.clone());
        fs::remove_dir_all(folder).map_err(failed)?;
        crate::print_message(&format!("accelerate merge-weights: {} is removed", checkpoint_directory.shown()));
    }
    Ok(())
}

/// Weights of which the bytes were compared with what was saved, if the folder says that.
struct Opened {
    /// What was in the folder before any of it was read.
    seen: Seen,
    weights: Weights,
}

impl Opened {
    fn open(folder: &Path, removes: bool) -> Result<Self, Box<dyn Error>> {
        let seen = Seen::of(folder);
        let weights = match check_own(folder, removes)? {
            true => crate::checkpoint::model_weights(folder)?,
            false => weights::open(folder).map_err(|error| in_project(folder, error))?,
        };
        Ok(Self { seen, weights })
    }
}

/// Of a project, the error says which checkpoint of it could be merged.
fn in_project(folder: &Path, error: WeightsError) -> WeightsError {
    match error {
        WeightsError::NoCheckpoint { folder: found, within } if within.is_empty() => {
            WeightsError::NoCheckpoint { folder: found, within: newest_in(folder).into_iter().collect() }
        }
        error => error,
    }
}

/// Of what this library has saved, only weights that are whole and as they were saved are merged, and nothing is removed: a
/// checkpoint holds more than weights. Is it a checkpoint of a whole run?
fn check_own(folder: &Path, removes: bool) -> Result<bool, Box<dyn Error>> {
    let folder_of = || folder.to_owned();
    // With a slash behind its name, a link is the folder that it leads to.
    let own_name: PathBuf = folder.components().collect();
    if removes && fs::symlink_metadata(own_name).is_ok_and(|found| found.is_symlink()) {
        return Err(MergeError::RemovesLink { link: folder_of() }.into());
    }
    // What is not there, or is no folder, is told by whoever reads it.
    let Ok(entries) = fs::read_dir(folder) else { return Ok(false) };
    let names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let has_manifest = names.iter().any(|name| SaveManifest::stem(name).is_some());
    let is_checkpoint = names.iter().any(|name| name == DESCRIPTION || *name == SaveManifest::file_name(STEM));
    if is_checkpoint && removes {
        return Err(MergeError::RemovesCheckpoint { folder: folder_of() }.into());
    }
    if (is_checkpoint || has_manifest) && !crate::checkpoint::is_as_saved(folder)? {
        return Err(MergeError::NotAsSaved { folder: folder_of() }.into());
    }
    Ok(is_checkpoint)
}

/// Makes sure that what is written is not removed afterwards.
fn check_apart(checkpoint: &Path, output: &Path) -> Result<(), Box<dyn Error>> {
    let (checkpoint, output) = (checkpoint.to_owned(), output.to_owned());
    match paths::is_within(&output, &checkpoint) {
        Ok(true) => Err(MergeError::OutputWithin { output, checkpoint }.into()),
        Ok(false) => Ok(()),
        Err(source) => Err(WeightsError::Write { path: output, source }.into()),
    }
}

/// Makes sure that nothing is removed but what is in the result.
fn check_all_is_merged(folder: &Path, weights: &Weights) -> Result<(), MergeError> {
    let read_names: Vec<_> = weights.files.names().collect();
    let is_read = |name: &str| name == weights.taken || read_names.iter().any(|read| *read == name);
    // What cannot be listed was read all the same, and is removed by nobody.
    let listed = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = listed.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(|name| !is_read(name));
    // Of tied tensors the result has one name, so that removing would lose the others.
    let inside = [&weights.others, &weights.unlisted, &weights.tied].into_iter().flatten().cloned();
    let files = read_names.iter().map(|name| (*name).to_owned()).chain([weights.taken.clone()]);
    let notes = weights.notes.agreed();
    let said = files.collect::<BTreeSet<_>>().into_iter().flat_map(|name| said_besides(folder, &name, &notes));
    let mut unmerged: Vec<String> = names.chain(inside).chain(said).collect();
    unmerged.sort();
    match unmerged.is_empty() {
        true => Ok(()),
        false => Err(MergeError::RemovesMore { folder: folder.to_owned(), unmerged }),
    }
}

/// What the metadata of a safetensors file, or an index, says besides what the result says again, whose notes these are.
fn said_besides(folder: &Path, name: &str, notes: &BTreeMap<String, String>) -> Vec<String> {
    let is_index = name.ends_with(".index.json");
    let path = folder.join(name);
    let text = match is_index {
        true => fs::read(&path).ok(),
        false if name.ends_with(".safetensors") => header_of(&path),
        false => None,
    };
    let said: Option<serde_json::Map<String, serde_json::Value>> =
        text.and_then(|text| serde_json::from_slice(&text).ok());
    let Some(said) = said else { return Vec::new() };
    let besides = |key: &str| format!("`{}` in {}", shown(key), shown(name));
    let metadata = said.get(if is_index { "metadata" } else { Header::METADATA_KEY }).and_then(|it| it.as_object());
    let is_said_again = |key: &str, value: &serde_json::Value| match is_index {
        true => ["format", "total_size", "total_parameters"].contains(&key),
        false => notes.get(key).map(String::as_str) == value.as_str(),
    };
    let inner = metadata.into_iter().flatten().filter(|(key, value)| !is_said_again(key, value)).map(|(key, _)| key);
    let outer = said.keys().filter(|key| is_index && !["metadata", "weight_map"].contains(&key.as_str()));
    inner.chain(outer).map(|key| besides(key)).collect()
}

/// The JSON at the beginning of a safetensors file that has been read before.
fn header_of(path: &Path) -> Option<Vec<u8>> {
    let mut file = fs::File::open(path).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let mut header = Vec::new();
    file.take(u64::from_le_bytes(length).min(Header::MAX_BYTES)).read_to_end(&mut header).ok()?;
    Some(header)
}

fn tell_what_is_left_out(weights: &Weights) {
    if !weights.not_taken.is_empty() {
        crate::print_message(&format!(
            "accelerate merge-weights: these are the weights of {}; there are others, which were not looked at: {}",
            shown(&weights.taken),
            listed(&weights.not_taken, MOST_LISTED_BYTES)
        ));
    }
    let tell = |what: &str, names: &[String]| {
        if !names.is_empty() {
            let listed = listed(names, MOST_LISTED_BYTES);
            crate::print_message(&format!("accelerate merge-weights: left out, because {what}: {listed}"));
        }
    };
    tell("they are no tensors", &weights.others);
    tell("they are other names of tensors that are written", &weights.tied);
    tell("the index does not name them", &weights.unlisted);
    tell("files differ in these notes about themselves", &weights.notes.differing());
    tell("they are further models, which `accelerate checkpoint convert` writes", &weights.other_models);
}

const _: () = assert!(DEFAULT_MAX_SHARD_BYTES == 10_000_000_000, "the default of --max_shard_size says so");

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::checkpoint::Changed;
    use crate::checkpoint::sample::{save_over, write_sample};

    #[test]
    fn a_save_meanwhile_is_an_error_and_nothing_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
        write_sample(&input, 1.0);
        let Opened { seen, mut weights } = Opened::open(&input, false).unwrap();
        save_over(&input, 2.0);
        let error = weights::write(&mut weights, &output, 1 << 20, &|| Ok(seen.check()?)).unwrap_err();
        assert!(error.is::<Changed>(), "{error}");
        assert!(!output.exists());
    }
}
