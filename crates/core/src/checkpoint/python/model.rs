//! Which of several files of a model counts.

use super::PythonFile;
use crate::Result;
use crate::error::python::PythonErrorKind as Kind;
use crate::weight_files::shown;

/// Of the names in a folder, those that hold the model with this number as Python Accelerate's `save_state` writes it. The first
/// one counts, as in `load_state`: safetensors before pickles, one file before the index of several, and `pytorch_model.bin` before
/// `pytorch_model_fsdp.bin`. `accelerate merge-weights` and `accelerate checkpoint convert` choose by this.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): a whole model is there, and beside it the folder with the parts that ranks of FSDP
/// had. Python takes the one that `state_dict_type` names, which no file says; they may be of different steps.
///
/// ```
/// use accelerate_core::checkpoint::python::model_files;
/// let names = ["pytorch_model.bin", "optimizer.bin", "model.safetensors", "pytorch_model_fsdp_1"];
/// assert_eq!(model_files(&names, 0)?, ["model.safetensors", "pytorch_model.bin"]);
/// assert_eq!(model_files(&names, 1)?, ["pytorch_model_fsdp_1"]);
/// let error = model_files(&["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"], 0).unwrap_err();
/// assert!(error.to_string().contains("move the other one out of the folder"), "{error}");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn model_files<'a>(names: &[&'a str], number: usize) -> Result<Vec<&'a str>> {
    let is_it = |file: &PythonFile| {
        [PythonFile::Model(number), PythonFile::TorchModel(number), PythonFile::ShardedModel(number)].contains(file)
    };
    let mut found: Vec<(PythonFile, &str)> =
        names.iter().filter_map(|&name| Some((PythonFile::named(name).filter(is_it)?, name))).collect();
    found.sort_unstable();
    match found.as_slice() {
        [(_, whole), .., (PythonFile::ShardedModel(_), parts)] => {
            Err(Kind::WholeAndParts { whole: shown(whole), parts: shown(parts) }.into())
        }
        found => Ok(found.iter().map(|(_, name)| *name).collect()),
    }
}
