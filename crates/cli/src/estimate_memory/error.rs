//! What can be wrong with a model's files, and with what is asked about them.

use accelerate_core::names::counted;
use std::io;
use std::path::PathBuf;

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::plan::EstimateDtype;
use accelerate_core::weight_files;

use super::hub::HubError;

#[derive(Debug, thiserror::Error)]
pub(super) enum EstimateError {
    #[error(
        "there is no file at {}; a .safetensors file, an index of several (model.safetensors.index.json), a folder with \
         either, or the name of a model on the Hugging Face Hub (owner/name) is wanted", path.shown()
    )]
    NoSuchModel { path: PathBuf },
    #[error(
        "{id} is neither a path of this machine nor {}, and HF_HUB_OFFLINE says that the network is not to be used; unset it, \
         or fetch the model where there is a network, with\n  hf download {id} --local-dir {}",
        in_cache(cache.as_ref()), id.rsplit('/').next().unwrap_or(id)
    )]
    Offline { id: String, cache: Option<PathBuf>, source: Option<Box<EstimateError>> },
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("{place} cannot be read")]
    Unreadable { place: String, source: io::Error },
    #[error("{place} is not a safetensors file, or damaged: {reason}; fetch or save it again")]
    Header { place: String, reason: String },
    #[error("{place} is {found}, and weights are read from files; name the file that has them")]
    NotAFile { place: String, found: &'static str },
    #[error(
        "{place}: the tensor {name} has the element type {dtype}, of which libtorch has none; convert the file to another one",
        name = in_one_line(name), dtype = in_one_line(dtype)
    )]
    ElementType { place: String, name: String, dtype: String },
    #[error(
        "{place} is in PyTorch's own format, of which the sizes are known to Python only; save the model as safetensors \
         (save_model, or save_pretrained with safe_serialization)"
    )]
    Pickle { place: String },
    #[error(
        "{place} has no weights to choose: model.safetensors, model.safetensors.index.json, or a single file or index of \
         another name is wanted, and there are {}",
        names_or_none(names)
    )]
    NoWeights { place: String, names: Vec<String> },
    #[error("the index {place} cannot be understood")]
    Index { place: String, source: accelerate_core::Error },
    #[error("{place} has {found_bytes} bytes, and at most {most_bytes} are read of such a file; name that of a model")]
    LargeFile { place: String, found_bytes: u64, most_bytes: u64 },
    #[error(
        "the index {index} names {file} for {tensors}, but there is no such file beside it; fetch all files of the model",
        file = in_one_line(file),
        tensors = counted(*num_tensors, "tensor")
    )]
    MissingFile { index: String, file: String, num_tensors: usize },
    #[error(
        "the index {index} says that {name} is in {file}, which has no such tensor; fetch all files of the model from one place",
        name = in_one_line(name), file = in_one_line(file)
    )]
    WrongIndex { index: String, name: String, file: String },
    #[error(
        "there is no {place}, which says {what}; leave out {flags}, or name the folder that has it beside the weights"
    )]
    NoConfig { place: String, what: &'static str, flags: &'static str },
    #[error("{place} does not say {what}")]
    Config { place: String, what: &'static str, source: accelerate_core::Error },
    #[error(
        "{dtype} cannot be trained, so there is no plan for it; use float32, float16 or bfloat16, or leave out --plan"
    )]
    NotTrainable { dtype: EstimateDtype },
    #[error("a plan is for one element type, and --dtypes names {}; choose one, or leave out --plan", listed(dtypes))]
    SeveralTypes { dtypes: Vec<EstimateDtype> },
}

impl EstimateError {
    pub(super) fn header(place: String, problem: &accelerate_core::Error) -> Self {
        Self::Header { place, reason: problem.to_string() }
    }

    /// Whether somebody fetched a part of the model only, which says nothing about the model.
    pub(super) fn is_incomplete(&self) -> bool {
        matches!(self, Self::NoWeights { .. } | Self::Pickle { .. } | Self::MissingFile { .. })
    }
}

fn in_cache(cache: Option<&PathBuf>) -> String {
    match cache {
        Some(folder) => format!("complete in the cache {}", folder.shown()),
        None => "in a cache, because none of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME is set".to_owned(),
    }
}

fn names_or_none(names: &[String]) -> String {
    if names.is_empty() { "no files".to_owned() } else { weight_files::listed(names, 600) }
}

fn listed<T: ToString>(items: &[T]) -> String {
    const MOST: usize = 8;
    let mut listed: Vec<String> = items.iter().take(MOST).map(T::to_string).collect();
    match items.len() {
        number if MOST < number => listed.push(format!("{} more", number - MOST)),
        _ => {}
    }
    listed.join(", ")
}
