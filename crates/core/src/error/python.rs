//! What can be wrong with states that Python Accelerate has saved, and with what they are to become. Names are shortened already.

/// How a user writes the names of an optimizer's parameters into a file.
const NAMES: &str = "write them with Python, as `accelerate checkpoint convert --help` shows, and name the file with \
                     --parameter_names";

#[derive(Debug, thiserror::Error)]
pub(crate) enum PythonErrorKind {
    #[error(
        "the same model is there twice: whole in `{whole}`, and in parts in the folder `{parts}`, and no file says which of them \
         counts; move the other one out of the folder"
    )]
    WholeAndParts { whole: String, parts: String },
    #[error("it is not the state of an optimizer of PyTorch: {reason}")]
    Optimizer { reason: String },
    #[error(
        "it is the state of {name}, an optimizer of PyTorch that this library does not have; move the file out of the folder, and \
         all else is converted"
    )]
    ForeignOptimizer { name: &'static str },
    #[error(
        "group {place} has no learning rate `lr` that is a number{}",
        found.as_ref().map(|found| format!(", but {found}")).unwrap_or_default()
    )]
    LearningRate { place: usize, found: Option<String> },
    #[error(
        "`{name}` of group {place} is no number, but {found}; make it one of Python's in the optimizer's groups, as `float` does, \
         and save again"
    )]
    GroupSetting { place: usize, name: &'static str, found: String },
    #[error(
        "{found} names of parameters are said, and the optimizer has {wanted} parameters; one for each is wanted, in its order"
    )]
    ParameterCount { found: usize, wanted: usize },
    #[error(
        "parameter number {number} is called `{saved}` by the optimizer itself, and `{given}` by --parameter_names; leave the flag out, \
         or look whether the file of names is of another run"
    )]
    OtherName { number: usize, saved: String, given: String },
    #[error(
        "two models have a parameter `{name}`, and an optimizer of both saves its state by names here, so that the two cannot be told \
         apart; in Python put the models into one module, which names them `first.{name}` and `second.{name}`, or give each an optimizer \
         of its own, and save again; without the optimizer's file in the folder, all else is converted"
    )]
    InTwoModels { name: String },
    #[error("two of its parameters are called `{name}`; each has a name of its own, so look into the list of names")]
    ParameterTwice { name: String },
    #[error(
        "one of its parameters is called `{name}`, and no model has a tensor of that name; of weights that are tied, the file \
         of the model has one name, which is the one to be used"
    )]
    NoSuchParameter { name: String },
    #[error(
        "`{name}` has shape {found:?} in the model, and the optimizer's state of it has {wanted:?}; the order of names is another one"
    )]
    ParameterShape { name: String, found: Vec<u64>, wanted: Vec<u64> },
    #[error("which parameter number {number} is cannot be told from the files: {}; {NAMES}", candidates_of(shape.as_deref(), candidates))]
    UnnamedParameter { number: usize, shape: Option<Vec<u64>>, candidates: Vec<String> },
}

fn candidates_of(shape: Option<&[u64]>, candidates: &[String]) -> String {
    match (shape, candidates) {
        (None, _) => "it has no state that tells its shape".to_owned(),
        (Some(shape), []) => format!("its state has shape {shape:?}, and no tensor of the model has"),
        (Some(shape), candidates) => {
            format!(
                "its state has shape {shape:?}, as more than one of its parameters or of {} have",
                candidates.join(", ")
            )
        }
    }
}
