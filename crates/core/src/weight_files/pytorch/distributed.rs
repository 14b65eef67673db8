//! The metadata of `torch.distributed.checkpoint`: which tensors a checkpoint has, and in which files their parts are.

use super::contents::{count, counts};
use super::file::{check_number, check_tensor_name};
use super::globals::Global;
use super::pickle::{Data, Pairs, Pickle, Value};
use super::strided::{StoredTensor, shape_bytes};
use super::tiling::{Block, first_fault};
use crate::Result;
use crate::error::pytorch::{DistributedProblem as Problem, PytorchErrorKind as Kind, TensorProblem};
use crate::weight_files::index::is_plain_file_name;
use crate::weight_files::shown;
use safetensors::Dtype;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Most parts of all tensors together: some times as many as runs on thousands of ranks have.
const MOST_PARTS: usize = 1 << 24;

/// What the file `.metadata` of a checkpoint says, checked: the parts of each tensor fill it, and no element is in two of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedCheckpoint {
    /// In the order of the checkpoint.
    pub tensors: Vec<DistributedTensor>,
    /// The keys of what is no tensor. It is stored as a pickle of its own, and read by [`Plain::read_range`](super::Plain::read_range).
    pub others: Vec<String>,
    /// The files that parts are in. They lie in the folder of the checkpoint.
    pub files: Vec<String>,
}

/// A tensor of a [`DistributedCheckpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedTensor {
    /// What the checkpoint calls it.
    pub key: String,
    /// The same without the one dictionary that everything is in, which is `model` for models that Python Accelerate saved.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes, outermost dim first.
    pub shape: Vec<u64>,
    /// Its parts. Those without elements are left out.
    pub chunks: Vec<Chunk>,
}

/// A part of a [`DistributedTensor`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where it begins in the tensor.
    pub offsets: Vec<u64>,
    /// Its sizes.
    pub sizes: Vec<u64>,
    /// Its file, by the place in [`DistributedCheckpoint::files`].
    pub file: usize,
    /// Where in the file `torch.save` has written it.
    pub range: Range<u64>,
}

impl DistributedCheckpoint {
    /// The name of the file that has the metadata.
    pub const FILE_NAME: &'static str = ".metadata";

    /// Reads the metadata.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): they are damaged, name other functions or classes than metadata need
    /// or files in other folders, or the parts of a tensor do not make it up.
    ///
    /// ```
    /// use accelerate_core::weight_files::DistributedCheckpoint;
    /// let error = DistributedCheckpoint::read(b"\x80\x02cos\nsystem\n.").unwrap_err();
    /// assert!(error.to_string().contains("it names `os.system`"), "{error}");
    /// ```
    pub fn read(metadata: &[u8]) -> Result<Self> {
        Described::read(&Pickle::read(metadata)?).map(|described| described.checkpoint)
    }
}

/// What the metadata say, and what more of it can be asked for.
pub(super) struct Described<'a> {
    pub(super) checkpoint: DistributedCheckpoint,
    pub(super) places: Places<'a>,
    /// For each key the dictionaries and lists that it was in, if the metadata say them.
    pub(super) paths: Option<Pairs<'a>>,
}

impl<'a> Described<'a> {
    pub(super) fn read(pickle: &'a Pickle<'_>) -> Result<Self> {
        let metadata =
            state(pickle.root(), "Metadata").ok_or(Problem::Structure("it is another object")).map_err(Kind::from)?;
        let field = |name| field(metadata, name).map(Value::data);
        let Some(Data::Dict(described)) = field("state_dict_metadata") else {
            return Err(Kind::from(Problem::Structure("it describes no state")).into());
        };
        let mut places = match field("storage_data") {
            Some(Data::Dict(places)) => Places::read(places)?,
            _ => return Err(Kind::from(Problem::Structure("it names no files")).into()),
        };
        let paths = match field("planner_data") {
            Some(Data::Dict(paths)) => Some(paths),
            _ => None,
        };
        let outermost = paths.map(Outermost::read).unwrap_or_default();
        let (mut tensors, mut others, mut keys) = (Vec::new(), Vec::new(), HashSet::new());
        for (key, value) in described.iter() {
            let Data::Text(key) = key.data() else {
                return Err(Kind::from(Problem::Structure("a key is no text")).into());
            };
            if !keys.insert(key) {
                return Err(Kind::from(Problem::Twice { key: shown(key) }).into());
            }
            check_number(keys.len())?;
            match state(value, "TensorStorageMetadata") {
                Some(described) => tensors.push(tensor(key, described, &mut places)?),
                None if object(value, "BytesStorageMetadata").is_some() => others.push(key.to_owned()),
                None => return Err(Kind::from(Problem::Structure("it describes something else than a tensor")).into()),
            }
        }
        places.check_apart()?;
        let outermost = outermost.of_all(&keys);
        let mut taken = HashSet::new();
        for tensor in &mut tensors {
            let within = outermost.and_then(|outermost| tensor.key.strip_prefix(outermost)?.strip_prefix('.'));
            tensor.name = within.unwrap_or(&tensor.key).to_owned();
            check_tensor_name(&tensor.name)?;
            if !taken.insert(&tensor.name) {
                return Err(Kind::from(Problem::Twice { key: shown(&tensor.name) }).into());
            }
        }
        let files = places.files.clone();
        Ok(Self { checkpoint: DistributedCheckpoint { tensors, others, files }, places, paths })
    }
}

impl Chunk {
    /// Makes sure that what is stored is this part of that tensor.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): it has another shape or element type, or takes more than is stored.
    pub fn check(&self, stored: &StoredTensor, tensor: &DistributedTensor) -> Result<()> {
        if stored.num_bytes() > stored.storage().len() {
            return Err(Kind::from(Problem::Repeated).into());
        }
        if stored.shape() == self.sizes && stored.dtype() == tensor.dtype {
            return Ok(());
        }
        let problem = Problem::OtherTensor {
            found: stored.shape().to_vec(),
            found_dtype: stored.dtype().to_string(),
            wanted: self.sizes.clone(),
            wanted_dtype: tensor.dtype.to_string(),
        };
        Err(Kind::from(problem).into())
    }
}

fn tensor<'a>(key: &'a str, described: Pairs<'_>, places: &mut Places<'a>) -> Result<DistributedTensor> {
    let wrong = |problem| Kind::from(Problem::Tensor { key: shown(key), problem });
    let description = || wrong(TensorProblem::Description);
    let shape = field(described, "size").and_then(counts).ok_or_else(description)?;
    let dtype = field(described, "properties").and_then(dtype_of_properties).ok_or_else(description)?;
    let unknown = || wrong(TensorProblem::ElementType { found: dtype.path().to_owned() });
    let dtype = dtype.dtype().ok_or_else(unknown)?;
    if shape_bytes(&shape, dtype).is_none() {
        return Err(wrong(TensorProblem::Shape { shape }).into());
    }
    let Some(Data::List(parts)) = field(described, "chunks").map(Value::data) else { return Err(description().into()) };
    let many = || Kind::from(Problem::Structure("it has more parts than are read"));
    places.left = places.left.checked_sub(parts.len()).ok_or_else(many)?;
    let mut blocks = Vec::new();
    for part in parts.iter() {
        let part = state(part, "ChunkStorageMetadata").ok_or_else(description)?;
        let offsets = field(part, "offsets").and_then(counts).ok_or_else(description)?;
        let sizes = field(part, "sizes").and_then(counts).ok_or_else(description)?;
        let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
        let is_within = ends.zip(&shape).all(|(end, size)| end.is_some_and(|end| end <= *size));
        if !is_within || offsets.len() != shape.len() || sizes.len() != shape.len() {
            return Err(Kind::from(Problem::BeyondTensor { key: shown(key), offsets, sizes, shape }).into());
        }
        if !sizes.contains(&0) {
            blocks.push((offsets, sizes));
        }
    }
    let views: Vec<_> = blocks.iter().map(|(offsets, sizes)| Block { offsets, sizes }).collect();
    if let Some(at) = first_fault(&shape, &views) {
        return Err(Kind::from(Problem::NotTiled { key: shown(key), at }).into());
    }
    let chunks = blocks.into_iter().map(|(offsets, sizes)| {
        let (file, range) = places.find(key, &offsets)?;
        Ok(Chunk { offsets, sizes, file, range })
    });
    let chunks = chunks.collect::<Result<_>>()?;
    Ok(DistributedTensor { key: key.to_owned(), name: key.to_owned(), dtype, shape, chunks })
}

/// The element type, which is the first of the properties, whatever they are kept in.
fn dtype_of_properties(properties: Value<'_>) -> Option<Global> {
    let Data::Object(_, state) = object(properties, "TensorProperties")? else { return None };
    let dtype = match state?.data() {
        Data::Tuple(items) => items.get(0)?,
        Data::Dict(pairs) => field(pairs, "dtype")?,
        _ => return None,
    };
    match dtype.data() {
        Data::Global(dtype) => Some(dtype),
        _ => None,
    }
}

/// Where parts are, by key and offsets.
pub(super) struct Places<'a> {
    of: HashMap<(&'a str, Vec<u64>), Pairs<'a>>,
    /// The same of what is no tensor.
    of_values: HashMap<&'a str, Pairs<'a>>,
    pub(super) files: Vec<String>,
    numbers: HashMap<&'a str, usize>,
    /// All that was found: the file, where in it, and the key.
    found: Vec<(usize, Range<u64>, &'a str)>,
    /// How many parts may still be told of. Many tensors may be told to have the same list of empty ones.
    left: usize,
}

impl<'a> Places<'a> {
    fn read(places: Pairs<'a>) -> Result<Self> {
        let damaged = || Kind::from(Problem::Structure("a part has no name or no place"));
        let (mut of, mut of_values) = (HashMap::new(), HashMap::new());
        for (part, place) in places.iter() {
            let part = state(part, "MetadataIndex").ok_or_else(damaged)?;
            let Some(Data::Text(key)) = field(part, "fqn").map(Value::data) else { return Err(damaged().into()) };
            let place = state(place, "_StorageInfo").ok_or_else(damaged)?;
            let before = match field(part, "offset").filter(|offsets| !matches!(offsets.data(), Data::None)) {
                None => of_values.insert(key, place),
                Some(offsets) => of.insert((key, counts(offsets).ok_or_else(damaged)?), place),
            };
            if before.is_some() {
                return Err(Kind::from(Problem::Twice { key: shown(key) }).into());
            }
        }
        Ok(Self { of, of_values, files: Vec::new(), numbers: HashMap::new(), found: Vec::new(), left: MOST_PARTS })
    }

    fn find(&mut self, key: &'a str, offsets: &[u64]) -> Result<(usize, Range<u64>)> {
        let absent = || Kind::from(Problem::NoFile { key: shown(key), offsets: offsets.to_vec() });
        let place = *self.of.get(&(key, offsets.to_vec())).ok_or_else(absent)?;
        self.range(key, place)
    }

    /// Where something is that is no tensor.
    pub(super) fn find_value(&mut self, key: &'a str) -> Result<(usize, Range<u64>)> {
        let absent = || Kind::from(Problem::NoFile { key: shown(key), offsets: Vec::new() });
        let place = *self.of_values.get(key).ok_or_else(absent)?;
        self.range(key, place)
    }

    fn range(&mut self, key: &'a str, place: Pairs<'a>) -> Result<(usize, Range<u64>)> {
        let Some(Data::Text(file)) = field(place, "relative_path").map(Value::data) else {
            return Err(Kind::from(Problem::Structure("a part has no name or no place")).into());
        };
        if !is_plain_file_name(file) {
            return Err(Kind::from(Problem::FileOutsideFolder { key: shown(key), file: shown(file) }).into());
        }
        check_not_transformed(key, place)?;
        let number = |name| field(place, name).and_then(count);
        let range = number("offset").zip(number("length"));
        let range = range.and_then(|(start, length)| Some(start..start.checked_add(length)?));
        let range = range.ok_or_else(|| Kind::from(Problem::Range { key: shown(key), file: shown(file) }))?;
        let number = *self.numbers.entry(file).or_insert_with(|| {
            self.files.push(file.to_owned());
            self.files.len() - 1
        });
        self.found.push((number, range.clone(), key));
        Ok((number, range))
    }

    /// Makes sure that all that was found has a place of its own. What PyTorch writes has, and what is in a place is read for each
    /// who is said to be there.
    pub(super) fn check_apart(&mut self) -> Result<()> {
        self.found.sort_unstable_by_key(|(file, range, _)| (*file, range.start));
        for pair in self.found.windows(2) {
            if let [(file, first, key), (other_file, second, other)] = pair
                && file == other_file
                && first.end > second.start
            {
                let file = self.files.get(*file).map(|file| shown(file)).unwrap_or_default();
                return Err(Kind::from(Problem::SamePlace { key: shown(key), other: shown(other), file }).into());
            }
        }
        Ok(())
    }
}

/// Extensions may compress what they write.
fn check_not_transformed(key: &str, place: Pairs<'_>) -> Result<()> {
    let found = match field(place, "transform_descriptors").map(Value::data) {
        None | Some(Data::None) => return Ok(()),
        Some(Data::List(transforms) | Data::Tuple(transforms)) => match transforms.get(0) {
            None => return Ok(()),
            Some(first) => first,
        },
        Some(_) => return Err(Kind::from(Problem::Structure("a part has no name or no place")).into()),
    };
    let found = if let Data::Text(name) = found.data() { shown(name) } else { found.kind() };
    Err(Kind::from(Problem::Transformed { key: shown(key), found }).into())
}

/// The outermost dictionary that each key was in before all of them became one.
#[derive(Default)]
struct Outermost<'a>(HashMap<&'a str, &'a str>);

impl<'a> Outermost<'a> {
    fn read(paths: Pairs<'a>) -> Self {
        let entry = |(key, path): (Value<'a>, Value<'a>)| {
            let (Data::Text(key), Data::Tuple(path) | Data::List(path)) = (key.data(), path.data()) else {
                return None;
            };
            match path.get(0)?.data() {
                Data::Text(first) if path.len() > 1 => Some((key, first)),
                _ => None,
            }
        };
        Self(paths.iter().filter_map(entry).collect())
    }

    /// The one that all of these keys were in, if it is one.
    fn of_all(&self, keys: &HashSet<&'a str>) -> Option<&'a str> {
        let mut found = keys.iter().map(|key| self.0.get(key).copied());
        let first = found.next()??;
        found.all(|other| other == Some(first)).then_some(first)
    }
}

/// The value, if it is an object of a class of this name.
fn object<'a>(value: Value<'a>, class: &str) -> Option<Data<'a>> {
    match value.data() {
        data @ Data::Object(global, _) if global.path().rsplit('.').next() == Some(class) => Some(data),
        _ => None,
    }
}

/// The fields of an object of a class of this name. No class has as many as would take long to look through.
fn state<'a>(value: Value<'a>, class: &str) -> Option<Pairs<'a>> {
    const MOST_FIELDS: usize = 16;
    match object(value, class)? {
        Data::Object(_, Some(state)) => match state.data() {
            Data::Dict(pairs) if pairs.len() <= MOST_FIELDS => Some(pairs),
            _ => None,
        },
        _ => None,
    }
}

fn field<'a>(pairs: Pairs<'a>, name: &str) -> Option<Value<'a>> {
    pairs.iter().find(|(key, _)| key.is_text(name)).map(|(_, value)| value)
}
