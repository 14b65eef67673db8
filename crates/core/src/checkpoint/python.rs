//! The folder that Python Accelerate's `save_state` writes: which files it has, and how the states in it become those of this
//! library, and these become such states.
//!
//! Names of states are PyTorch's on both sides. What differs is that PyTorch counts parameters, and here they have names.

mod model;
mod names;
mod optimizer;
mod random;
mod values;

pub use model::model_files;
pub use names::{Origin, Parameters, name_parameters};
pub use optimizer::{Named, PythonGroup, PythonOptimizer};
pub use random::{FRESH_WORDS, fresh_random_states};
pub use values::{Left, from_json, schedule_from_json, to_json, without_lambdas};

/// A file of Python Accelerate's `save_state`, by what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PythonFile {
    /// `model.safetensors`, `model_1.safetensors`, or their index.
    Model(usize),
    /// `pytorch_model.bin`, `pytorch_model_1.bin`, or their index. With FSDP `pytorch_model_fsdp.bin`.
    TorchModel(usize),
    /// `pytorch_model_fsdp_0`: a folder with the parts that the ranks of FSDP had.
    ShardedModel(usize),
    /// `optimizer.bin`, `optimizer_1.bin`.
    Optimizer(usize),
    /// `optimizer_0`: a folder with the parts that the ranks of FSDP had.
    ShardedOptimizer(usize),
    /// `scheduler.bin`, `scheduler_1.bin`.
    Scheduler(usize),
    /// `sampler.bin`: an object of Python's own.
    Sampler(usize),
    /// `dl_state_dict.bin`: of a loader of `torchdata`.
    Loader(usize),
    /// `scaler.pt`.
    Scaler,
    /// `random_states_0.pkl`: of the process with this number.
    RandomStates(usize),
    /// `custom_checkpoint_0.pkl`.
    Custom(usize),
}

/// What names of files of a kind begin with, what they end with, and the kind.
type Kind = (&'static str, &'static [&'static str], fn(usize) -> PythonFile);

impl PythonFile {
    /// What a file of this name is.
    ///
    /// ```
    /// use accelerate_core::checkpoint::python::PythonFile;
    /// assert_eq!(PythonFile::named("optimizer.bin"), Some(PythonFile::Optimizer(0)));
    /// assert_eq!(PythonFile::named("pytorch_model_2.bin"), Some(PythonFile::TorchModel(2)));
    /// assert_eq!(PythonFile::named("model.safetensors.index.json"), Some(PythonFile::Model(0)));
    /// assert_eq!(PythonFile::named("pytorch_model_fsdp_0"), Some(PythonFile::ShardedModel(0)));
    /// for other in ["optimizer_0.bin", "optimizer_01.bin", "random_states_x.pkl", "custom_checkpoint.pkl", "notes.bin"] {
    ///     assert_eq!(PythonFile::named(other), None, "{other}");
    /// }
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        let counted = |stem: &str, extension: &str| {
            let rest = name.strip_prefix(stem)?.strip_suffix(extension)?;
            if rest.is_empty() {
                return Some(0);
            }
            number(rest.strip_prefix('_')?).filter(|&number| number > 0)
        };
        let counted_from_zero = |stem: &str, extension: &str| number(name.strip_prefix(stem)?.strip_suffix(extension)?);
        let kinds: [Kind; 7] = [
            ("model", &[".safetensors", ".safetensors.index.json"], Self::Model),
            ("pytorch_model", &[".bin", ".bin.index.json"], Self::TorchModel),
            ("pytorch_model_fsdp", &[".bin"], Self::TorchModel),
            ("optimizer", &[".bin"], Self::Optimizer),
            ("scheduler", &[".bin"], Self::Scheduler),
            ("sampler", &[".bin"], Self::Sampler),
            ("dl_state_dict", &[".bin"], Self::Loader),
        ];
        for (stem, extensions, kind) in kinds {
            if let Some(number) = extensions.iter().find_map(|extension| counted(stem, extension)) {
                return Some(kind(number));
            }
        }
        if name == "scaler.pt" {
            return Some(Self::Scaler);
        }
        let kinds: [Kind; 4] = [
            ("pytorch_model_fsdp_", &[""], Self::ShardedModel),
            ("optimizer_", &[""], Self::ShardedOptimizer),
            ("random_states_", &[".pkl"], Self::RandomStates),
            ("custom_checkpoint_", &[".pkl"], Self::Custom),
        ];
        let mut kinds = kinds.into_iter();
        kinds.find_map(|(stem, extensions, kind)| {
            extensions.iter().find_map(|extension| counted_from_zero(stem, extension)).map(kind)
        })
    }
}

/// As Python writes numbers: without zeros before them.
fn number(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// The name of the object with this number: `optimizer`, `optimizer_1`.
///
/// ```
/// use accelerate_core::checkpoint::python::object_name;
/// assert_eq!([object_name("model", 0), object_name("model", 2)], ["model", "model_2"]);
/// ```
pub fn object_name(kind: &str, number: usize) -> String {
    if number == 0 { kind.to_owned() } else { format!("{kind}_{number}") }
}
