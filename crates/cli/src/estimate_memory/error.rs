//! What can be wrong with a model's files, and with what is asked about them.

use std::io;
use std::path::{Path, PathBuf};

use accelerate_core::plan::EstimateDtype;
use accelerate_core::weight_files;

#[derive(Debug, thiserror::Error)]
pub(super) enum EstimateError {
    #[error(
        "there is no file at {}; a .safetensors file, an index of several (model.safetensors.index.json) or a folder with \
         either is wanted{}", path.display(), hub_cure(path)
    )]
    NoSuchModel { path: PathBuf },
    #[error("{} cannot be read", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is not a safetensors file, or damaged: {reason}; fetch or save it again", path.display())]
    Header { path: PathBuf, reason: String },
    #[error("{} is {found}, and weights are read from files; name the file that has them", path.display())]
    NotAFile { path: PathBuf, found: &'static str },
    #[error(
        "{}: the tensor {name} has the element type {dtype}, of which libtorch has none; convert the file to another one",
        path.display()
    )]
    ElementType { path: PathBuf, name: String, dtype: String },
    #[error(
        "{} is in PyTorch's own format, of which the sizes are known to Python only; save the model as safetensors \
         (save_model, or save_pretrained with safe_serialization)", path.display()
    )]
    Pickle { path: PathBuf },
    #[error(
        "the folder {} has no weights to choose: model.safetensors, model.safetensors.index.json, or a single file or index \
         of another name is wanted, and there are {}", folder.display(), names_or_none(names)
    )]
    NoWeights { folder: PathBuf, names: Vec<String> },
    #[error("the index {} cannot be understood", path.display())]
    Index { path: PathBuf, source: accelerate_core::Error },
    #[error(
        "the index {} has {found_bytes} bytes, and no index is longer than {most_bytes}; name the index of a model",
        path.display()
    )]
    LargeIndex { path: PathBuf, found_bytes: u64, most_bytes: u64 },
    #[error(
        "the index {} names {file} for {num_tensors} tensor(s), but there is no such file beside it; fetch all files of the \
         model", index.display()
    )]
    MissingFile { index: PathBuf, file: String, num_tensors: usize },
    #[error(
        "the index {} says that {name} is in {file}, which has no such tensor; fetch all files of the model from one place",
        index.display()
    )]
    WrongIndex { index: PathBuf, name: String, file: String },
    #[error(
        "{dtype} cannot be trained, so there is no plan for it; use float32, float16 or bfloat16, or leave out --plan"
    )]
    NotTrainable { dtype: EstimateDtype },
    #[error("a plan is for one element type, and --dtypes names {}; choose one, or leave out --plan", listed(dtypes))]
    SeveralTypes { dtypes: Vec<EstimateDtype> },
}

/// How to get what is named as on the Hub, `owner/name` or `name`.
fn hub_cure(path: &Path) -> String {
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let name = path.to_str().unwrap_or_default();
    let parts: Vec<&str> = name.split('/').collect();
    let is_file = [".safetensors", ".json"].iter().any(|extension| name.ends_with(extension));
    match parts.as_slice() {
        [.., folder] if parts.len() <= 2 && parts.iter().all(|part| is_part(part)) && !is_file => format!(
            ". Models are read from disk only: if {name} is one on the Hugging Face Hub, fetch it first, with\n  \
             huggingface-cli download {name} --local-dir {folder}"
        ),
        _ => String::new(),
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
