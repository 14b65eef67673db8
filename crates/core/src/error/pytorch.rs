//! What can be wrong with weights that PyTorch has saved. Names are shortened already.

use crate::names::counted;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PytorchErrorKind {
    #[error("it cannot be read: {reason}")]
    Unreadable { reason: String },
    #[error("its pickle cannot be understood: {0}")]
    Pickle(#[from] PickleProblem),
    #[error("it is no archive of torch.save, or damaged: {0}")]
    Archive(#[from] ArchiveProblem),
    #[error(transparent)]
    Contents(#[from] ContentsProblem),
    #[error(transparent)]
    Distributed(#[from] DistributedProblem),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PickleProblem {
    #[error("it has {found_bytes} bytes, more than the {} that are read", crate::weight_files::MAX_PICKLE_BYTES)]
    Long { found_bytes: u64 },
    #[error("the instruction at byte {at} is cut off")]
    Ended { at: usize },
    #[error("{} left over at its end, which is byte {at}, or other bytes follow", values_are(*left))]
    Rest { at: usize, left: usize },
    #[error("at byte {at} there are more than {most} lists and dictionaries, which is the most that is read of it")]
    Many { at: usize, most: usize },
    #[error("the instruction {code:#04x} at byte {at} is none of those that PyTorch writes for weights")]
    Instruction { at: usize, code: u8 },
    #[error(
        "at byte {at} it names `{name}`, which weights do not need; nothing that a pickle names is run here, and a file that \
         names other things may do harm elsewhere: if you trust it, load it with PyTorch and save the tensors alone"
    )]
    Global { at: usize, name: String },
    #[error("at byte {at} it uses `{name}` in another way than PyTorch does")]
    Use { at: usize, name: &'static str },
    #[error("the instruction at byte {at} needs {wanted}, and does not find it")]
    Operand { at: usize, wanted: &'static str },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveProblem {
    #[error(
        "a zip archive ends with a list of what is in it, and its {found_bytes} bytes do not; files that PyTorch wrote before \
         version 1.6 have no such list: load them with PyTorch and save them again"
    )]
    NoEnd { found_bytes: u64 },
    #[error("its list of entries does not fit its {found_bytes} bytes")]
    List { found_bytes: u64 },
    #[error("its list of entries has {found_bytes} bytes, more than the {most_bytes} that are read")]
    LongList { found_bytes: u64, most_bytes: u64 },
    #[error("entry {number} of its list is damaged")]
    Entry { number: usize },
    #[error("the entry `{name}` is compressed or encrypted, which PyTorch's are not")]
    Packed { name: String },
    #[error("the entry `{name}` is not where the list of entries says")]
    Place { name: String },
    #[error("the entries `{name}` and `{other}` lie on top of each other")]
    Overlap { name: String, other: String },
    #[error("it has the entry `{name}` twice")]
    Twice { name: String },
    #[error("it has no entry `{name}`")]
    Absent { name: String },
    #[error("the content of `{name}` has changed since it was written: its checksum is another one")]
    Checksum { name: String },
    #[error("it was written on a machine that puts the highest byte of a number first, and is not read")]
    ByteOrder,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ContentsProblem {
    #[error("it holds {found}, where {wanted} is wanted")]
    Kind { found: String, wanted: &'static str },
    #[error("`{name}`: {problem}")]
    Tensor { name: String, problem: TensorProblem },
    #[error("it holds a tensor of which {0}")]
    OnlyTensor(TensorProblem),
    #[error("the name `{name}` is there twice")]
    Twice { name: String },
    #[error("{reason}, and no tensor may be called so")]
    Name { reason: String },
    #[error("it has more than {most} tensors")]
    Many { most: usize },
    #[error("its values hold each other more than {most} deep")]
    Deep { most: usize },
    #[error("its texts have more than {most} bytes, counted as often as they are held")]
    LongTexts { most: usize },
    #[error("its tensors have more than {most} sizes and strides, counted as often as they are held")]
    ManySizes { most: usize },
    #[error("its values are more than {most}, counted as often as they are held")]
    ManyValues { most: usize },
    #[error("{found} cannot be written into a file of torch.save")]
    NotWritten { found: String },
    #[error(
        "its tensors repeat their elements, so that they take {bytes} bytes more than it has itself, and at most {most} are \
         written"
    )]
    Repeated { bytes: u64, most: u64 },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TensorProblem {
    #[error("the element type is {found}, which safetensors does not have")]
    ElementType { found: String },
    #[error("the values are stored in another form ({found}); load it with PyTorch and save it as a plain tensor")]
    Form { found: String },
    #[error("the description is not one that PyTorch writes")]
    Description,
    #[error("the shape {shape:?} has more elements or dims than can be read")]
    Shape { shape: Vec<u64> },
    #[error("the elements reach to byte {wanted_bytes} of a storage that has {found_bytes}")]
    BeyondStorage { wanted_bytes: u64, found_bytes: u64 },
    #[error("its storage `{key}` has {found_bytes} bytes, and {wanted_bytes} are said")]
    StorageSize { key: String, found_bytes: u64, wanted_bytes: u64 },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DistributedProblem {
    #[error("it is not the metadata of a checkpoint: {0}")]
    Structure(&'static str),
    #[error("`{key}` is there twice")]
    Twice { key: String },
    #[error("`{key}`: {problem}")]
    Tensor { key: String, problem: TensorProblem },
    #[error("`{key}`: no file is named for the part at {offsets:?}")]
    NoFile { key: String, offsets: Vec<u64> },
    #[error(
        "`{key}` is said to be in the file `{file}`; a file has to lie in the folder itself, and to be named without a path, \
         without control characters, and in at most 255 bytes"
    )]
    FileOutsideFolder { key: String, file: String },
    #[error(
        "it does not say what dictionaries and lists `{key}` was in, as PyTorch does; save it again with PyTorch 2"
    )]
    NoPath { key: String },
    #[error("`{key}`: its place in the file `{file}` is not one")]
    Range { key: String, file: String },
    #[error(
        "`{key}` and `{other}` are said to be in the same place of the file `{file}`, and each part has one of its own"
    )]
    SamePlace { key: String, other: String, file: String },
    #[error("`{key}` was transformed when it was written ({found}), which cannot be undone here")]
    Transformed { key: String, found: String },
    #[error("`{key}`: the part of shape {sizes:?} at {offsets:?} does not fit into the shape {shape:?}")]
    BeyondTensor { key: String, offsets: Vec<u64>, sizes: Vec<u64>, shape: Vec<u64> },
    #[error(
        "`{key}`: its parts overlap, or leave a gap, at {at:?}; parts have to divide the tensor as a grid does, and fill it"
    )]
    NotTiled { key: String, at: Vec<u64> },
    #[error("the tensor that is stored repeats its elements, which none of a checkpoint does")]
    Repeated,
    #[error(
        "the tensor that is stored is {found_dtype} of shape {found:?}, and the metadata say {wanted_dtype} of shape \
         {wanted:?}"
    )]
    OtherTensor { found: Vec<u64>, found_dtype: String, wanted: Vec<u64>, wanted_dtype: String },
}

/// `1 value is`, `2 values are`.
fn values_are(number: usize) -> String {
    format!("{} {}", counted(number, "value"), if number == 1 { "is" } else { "are" })
}
