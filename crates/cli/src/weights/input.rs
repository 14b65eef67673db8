//! What a folder has of weights, whatever has written them: names, and the places of their data.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use accelerate_core::checkpoint::python::{PythonFile, model_files};
use accelerate_core::files::other_than_file;
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{
    DistributedCheckpoint, EXTENSION, Header, Index, Notes, StoredBytes, StoredTensor, TorchFile, choose_weight_file,
    shown,
};
use safetensors::Dtype;

use super::distributed::open_distributed;
use super::error::WeightsError;

/// The names of PyTorch's own files.
const BIN: &str = "pytorch_model.bin";
const BIN_INDEX: &str = "pytorch_model.bin.index.json";
/// What Python Accelerate calls the whole model of a run with FSDP (`FULL_STATE_DICT`).
const FSDP_BIN: &str = "pytorch_model_fsdp.bin";

/// The weights of a checkpoint. Of their data nothing has been read.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    pub(crate) files: Files,
    pub(crate) tensors: Vec<Tensor>,
    /// The names of what is no tensor.
    pub(crate) others: Vec<String>,
    /// Further names of tensors.
    pub(crate) tied: Vec<String>,
    /// Tensors that no index names.
    pub(crate) unlisted: Vec<String>,
    /// The file that they are in, or that names those that they are in.
    pub(crate) taken: String,
    /// Others of that kind, which nothing was read of.
    pub(crate) not_taken: Vec<String>,
    /// The tensors are in the order of the model.
    pub(crate) is_ordered: bool,
    /// Models beside the one that this is.
    pub(crate) other_models: Vec<String>,
    /// What the files say about themselves.
    pub(crate) notes: Notes,
}

impl Weights {
    pub(crate) fn num_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.num_bytes()))
    }

    /// A model without tensors is none, whatever else a file has.
    pub(crate) fn check_tensors(&self, path: &Path) -> Result<(), WeightsError> {
        if self.tensors.is_empty() {
            return Err(WeightsError::NoTensors { path: path.to_owned(), others: self.others.clone() });
        }
        Ok(())
    }
}

/// A tensor and where its data are.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Data,
}

impl Tensor {
    /// One that a file has as a whole.
    pub(crate) fn stored(name: String, file: usize, stored: StoredTensor) -> Self {
        let (dtype, shape) = (stored.dtype(), stored.shape().to_vec());
        Self { name, dtype, shape, data: Data::Pieces(vec![Piece::whole(file, stored)]) }
    }
}

/// Where the elements of a tensor are.
#[derive(Debug)]
pub(crate) enum Data {
    /// In blocks of all its dims, which fill it.
    Pieces(Vec<Piece>),
    /// In parts of which layouts say the elements. Each element is in one of them.
    Parts(Vec<Part>),
    /// Here.
    Bytes(Vec<u8>),
}

impl Tensor {
    /// Does each element take a byte or more? Others have no place of their own in a file.
    pub(crate) fn has_whole_bytes(&self) -> bool {
        self.dtype.bitsize().is_multiple_of(8)
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        let of_part = |part: &Part| (part.layout.numel() as u64).saturating_mul((self.dtype.bitsize() / 8) as u64);
        match &self.data {
            Data::Pieces(pieces) => pieces.iter().map(|piece| piece.stored.num_bytes()).fold(0, u64::saturating_add),
            Data::Parts(parts) => parts.iter().map(of_part).fold(0, u64::saturating_add),
            Data::Bytes(bytes) => bytes.len() as u64,
        }
    }
}

/// A block of a tensor in a file.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) file: usize,
    /// Where it begins in the tensor.
    pub(crate) offsets: Vec<u64>,
    pub(crate) stored: StoredTensor,
}

impl Piece {
    /// All of a tensor.
    pub(crate) fn whole(file: usize, stored: StoredTensor) -> Self {
        Self { file, offsets: vec![0; stored.shape().len()], stored }
    }
}

/// Elements of a tensor that lie in a file one behind the other.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) file: usize,
    /// The place of the first of them in the file, in bytes.
    pub(crate) at: u64,
    pub(crate) layout: Layout,
}

/// A process may have about a thousand files open.
const MOST_OPEN: usize = 64;

/// Files by number. Only some of them are open at a time: a checkpoint may have more than a process may open.
#[derive(Debug, Default)]
pub(crate) struct Files {
    paths: Vec<PathBuf>,
    /// The one that was opened last stands last.
    open: VecDeque<(usize, File, u64)>,
    /// Which files were opened under these numbers first: what was read of one does not tell what is in another.
    first: BTreeMap<usize, Identity>,
}

/// What tells a file from another one that has its name, and from itself with other content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    num_bytes: u64,
    changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        let changed = (metadata.mtime(), metadata.mtime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), num_bytes: metadata.len(), changed }
    }
}

impl Files {
    pub(crate) fn add(&mut self, path: PathBuf) -> usize {
        self.paths.push(path);
        self.paths.len() - 1
    }

    /// The names of all of them.
    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.paths.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
    }

    pub(crate) fn path(&self, number: usize) -> &Path {
        self.paths.get(number).map_or(Path::new(""), PathBuf::as_path)
    }

    /// The file and its length. Devices and pipes have no end, and are refused.
    pub(crate) fn get(&mut self, number: usize) -> Result<(&mut File, u64), WeightsError> {
        let place = match self.open.iter().position(|(open, ..)| *open == number) {
            Some(place) => place,
            None => {
                let (file, num_bytes) = open_file(self.path(number))?;
                let found = Identity::of(&file.metadata().map_err(unreadable(self.path(number)))?);
                if *self.first.entry(number).or_insert(found) != found {
                    return Err(WeightsError::Replaced { path: self.path(number).to_owned() });
                }
                if self.open.len() == MOST_OPEN {
                    self.open.pop_front();
                }
                self.open.push_back((number, file, num_bytes));
                self.open.len() - 1
            }
        };
        let (_, file, num_bytes) = &mut self.open[place];
        Ok((file, *num_bytes))
    }
}

pub(crate) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> WeightsError {
    let path = path.to_owned();
    move |source| WeightsError::Unreadable { path, source }
}

fn open_file(path: &Path) -> Result<(File, u64), WeightsError> {
    // Asked before opening: to open a pipe is to wait for its writer.
    let kind = fs::metadata(path).map_err(unreadable(path))?.file_type();
    if let Some(found) = other_than_file(kind) {
        return Err(WeightsError::Kind { path: path.to_owned(), found, wanted: "a file" });
    }
    let file = File::open(path).map_err(unreadable(path))?;
    let num_bytes = file.metadata().map_err(unreadable(path))?.len();
    Ok((file, num_bytes))
}

/// Is it not there? Of what may not be looked at, the one who opens it says so.
pub(super) fn is_missing(path: &Path) -> bool {
    matches!(path.try_exists(), Ok(false))
}

/// All of a file, which has at most so many bytes.
pub(super) fn read_all(path: &Path, most_bytes: u64) -> Result<Vec<u8>, WeightsError> {
    let (file, found_bytes) = open_file(path)?;
    if found_bytes > most_bytes {
        return Err(WeightsError::Large { path: path.to_owned(), found_bytes, most_bytes });
    }
    let mut content = Vec::new();
    // The file may have grown since.
    file.take(most_bytes).read_to_end(&mut content).map_err(unreadable(path))?;
    Ok(content)
}

/// Looks for weights in a folder.
pub(crate) fn open(folder: &Path) -> Result<Weights, WeightsError> {
    let metadata = fs::metadata(folder).map_err(|source| match source.kind() {
        ErrorKind::NotFound => WeightsError::NoFolder { folder: folder.to_owned() },
        _ => unreadable(folder)(source),
    })?;
    if !metadata.is_dir() {
        let found = other_than_file(metadata.file_type()).unwrap_or("a file");
        return Err(WeightsError::Kind { path: folder.to_owned(), found, wanted: "the folder of a checkpoint" });
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        names.push(entry.map_err(unreadable(folder))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
    let found =
        candidates(&borrowed).map_err(|source| WeightsError::Ambiguous { folder: folder.to_owned(), source })?;
    let [first, not_taken @ ..] = &found[..] else { return Err(nothing_to_open(folder, &borrowed)) };
    let path = folder.join(first);
    if is_one_of_several(first) {
        return Err(WeightsError::OneOfSeveral { path });
    }
    let opened = match *first {
        DistributedCheckpoint::FILE_NAME => open_distributed(folder),
        BIN | FSDP_BIN => open_single(&path, torch_tensors),
        BIN_INDEX => open_index(&path, torch_tensors),
        index if index.ends_with(".json") => open_index(&path, safetensors_tensors),
        _ => open_single(&path, safetensors_tensors),
    };
    let not_taken = not_taken.iter().map(|&name| name.to_owned()).collect();
    let other_models = further_models(first, &borrowed);
    opened.map(|weights| Weights { taken: (*first).to_owned(), not_taken, other_models, ..weights })
}

/// The models of a run beside the one that is taken, as Accelerate names their files: `model_1.safetensors`, `pytorch_model_1.bin`,
/// `pytorch_model_fsdp_1.bin`, and their parts and indexes.
fn further_models(taken: &str, names: &[&str]) -> Vec<String> {
    let model = |name: &str| {
        let of_torch = name.strip_prefix("pytorch_model_").map(|rest| rest.strip_prefix("fsdp_").unwrap_or(rest));
        let (number, rest) = of_torch.or_else(|| name.strip_prefix("model_"))?.split_once(['.', '-'])?;
        let is_weights = [EXTENSION, "bin", "index.json"].iter().any(|ending| rest.ends_with(ending));
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.is_empty();
        (is_weights && is_number).then(|| format!("model_{number}"))
    };
    let of_taken = model(taken);
    let found: BTreeSet<String> = names.iter().filter_map(|name| model(name)).collect();
    found.into_iter().filter(|name| Some(name) != of_taken.as_ref()).collect()
}

/// Does a name say that there are more files, as `model-00001-of-00002.safetensors` does?
fn is_one_of_several(name: &str) -> bool {
    let number = |(_, rest): (&str, &str)| rest.split('.').next()?.parse::<usize>().ok();
    name.rsplit_once("-of-").and_then(number).is_some_and(|number| number > 1)
}

/// The names that say where weights are. The first one counts: what is written in parts is what a merge is for, and PyTorch's own
/// files are those that libraries keep beside newer ones.
fn candidates<'a>(names: &[&'a str]) -> accelerate_core::Result<Vec<&'a str>> {
    let parts = names.iter().copied().filter(|name| *name == DistributedCheckpoint::FILE_NAME);
    let chosen = choose_weight_file(names);
    let of_python = model_files(names, 0)?.into_iter().filter(|name| Some(*name) != chosen);
    // A folder of parts is named by itself, as the error says that there is one.
    let is_sharded = |name: &&str| matches!(PythonFile::named(name), Some(PythonFile::ShardedModel(_)));
    Ok(parts.chain(chosen).chain(of_python.filter(|name| !is_sharded(name))).collect())
}

fn nothing_to_open(folder: &Path, names: &[&str]) -> WeightsError {
    let suffix = format!(".{EXTENSION}");
    let files: Vec<_> = names.iter().filter(|name| name.ends_with(&suffix)).map(|&name| name.to_owned()).collect();
    if files.len() > 1 {
        return WeightsError::NoIndex { folder: folder.to_owned(), files };
    }
    let is_checkpoint = |path: &PathBuf| path.join(DistributedCheckpoint::FILE_NAME).is_file();
    // Weights are not in the parts of an optimizer.
    let is_optimizer = |name: &&&str| matches!(PythonFile::named(name), Some(PythonFile::ShardedOptimizer(_)));
    let names = names.iter().filter(|name| !is_optimizer(name));
    let within = names.map(|name| folder.join(name)).filter(is_checkpoint).take(4).collect();
    WeightsError::NoCheckpoint { folder: folder.to_owned(), within }
}

/// What a file has.
#[derive(Debug, Default)]
struct Contents {
    tensors: Vec<(String, StoredTensor)>,
    /// The names of what is none.
    others: Vec<String>,
    /// What it says about itself, if it is of a kind that can.
    notes: Option<BTreeMap<String, String>>,
}

/// Reads what is in an open file of this length.
type Reader = fn(&mut File, u64) -> accelerate_core::Result<Contents>;

fn safetensors_tensors(file: &mut File, num_bytes: u64) -> accelerate_core::Result<Contents> {
    let (header, notes) = Header::read_with_notes(file, num_bytes)?;
    let tensor = |entry: &accelerate_core::weight_files::HeaderEntry| {
        let range = header.data_at() + entry.start..header.data_at() + entry.end;
        let shape = entry.shape.iter().map(|&size| size as u64).collect();
        let storage = StoredBytes { range, crc32: None };
        (entry.name.clone(), StoredTensor::contiguous(entry.dtype, shape, storage))
    };
    let tensors = header.entries().iter().map(tensor).collect();
    Ok(Contents { tensors, notes: Some(notes), ..Contents::default() })
}

fn torch_tensors(file: &mut File, _: u64) -> accelerate_core::Result<Contents> {
    let TorchFile { tensors, others } = TorchFile::read(file)?;
    let tensors = tensors.into_iter().map(|tensor| (tensor.name, tensor.stored)).collect();
    Ok(Contents { tensors, others, ..Contents::default() })
}

/// The weights in this file, or in those that this index names. Its name says which.
pub(crate) fn open_named(path: &Path) -> Result<Weights, WeightsError> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let is_torch = name.ends_with(".bin") || name.ends_with(".bin.index.json");
    let read: Reader = if is_torch { torch_tensors } else { safetensors_tensors };
    match name.ends_with(".json") {
        true => open_index(path, read),
        false => open_single(path, read).map(|weights| Weights { is_ordered: is_torch, ..weights }),
    }
}

fn open_single(path: &Path, read: Reader) -> Result<Weights, WeightsError> {
    let mut weights = Weights::default();
    let contents = weights.read_file(path, read)?;
    weights.take(0, contents);
    Ok(weights)
}

fn open_index(path: &Path, read: Reader) -> Result<Weights, WeightsError> {
    let json = read_all(path, Index::MAX_BYTES)?;
    let damaged = |source| WeightsError::Damaged { path: path.to_owned(), source };
    let index = Index::from_json(&String::from_utf8_lossy(&json)).map_err(damaged)?;
    let mut names_in: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    for (name, file) in &index.weight_map {
        names_in.entry(file).or_default().insert(name);
    }
    let mut weights = Weights::default();
    for (number, (file, mut wanted)) in names_in.into_iter().enumerate() {
        let path = path.with_file_name(file);
        if let Some(key) = wanted.iter().next().filter(|_| is_missing(&path)) {
            return Err(WeightsError::MissingFile { path, key: shown(key) });
        }
        let mut contents = weights.read_file(&path, read)?;
        contents.tensors.retain(|(name, _)| {
            let is_wanted = wanted.remove(name.as_str());
            if !is_wanted {
                weights.unlisted.push(name.clone());
            }
            is_wanted
        });
        if let Some(key) = wanted.iter().min() {
            return Err(WeightsError::WrongIndex { path, key: shown(key) });
        }
        weights.take(number, contents);
    }
    Ok(weights)
}

impl Weights {
    /// Reads what is in the next file.
    fn read_file(&mut self, path: &Path, read: Reader) -> Result<Contents, WeightsError> {
        let number = self.files.add(path.to_owned());
        let (file, num_bytes) = self.files.get(number)?;
        read(file, num_bytes).map_err(|source| WeightsError::Damaged { path: path.to_owned(), source })
    }

    /// Takes up what is in a file. What has the same elements as a tensor before is another name of that.
    fn take(&mut self, file: usize, Contents { tensors, others, notes }: Contents) {
        self.others.extend(others);
        notes.into_iter().for_each(|notes| self.notes.add(notes));
        let mut known = HashSet::new();
        for (name, stored) in tensors {
            // Without elements, all of them are in the same place.
            if stored.num_bytes() > 0 && !known.insert(stored.clone()) {
                self.tied.push(name);
                continue;
            }
            self.tensors.push(Tensor::stored(name, file, stored));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_replaced_since_it_was_first_opened_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::default();
        for number in 0..=MOST_OPEN {
            let path = folder.path().join(number.to_string());
            fs::write(&path, [1]).unwrap();
            files.add(path);
            files.get(number).unwrap();
        }
        // The first is closed by now, and the last is not.
        for number in [0, MOST_OPEN] {
            fs::write(folder.path().join("new"), [2]).unwrap();
            fs::rename(folder.path().join("new"), files.path(number)).unwrap();
        }
        assert!(matches!(files.get(0), Err(WeightsError::Replaced { .. })));
        assert!(files.get(MOST_OPEN).is_ok() && files.get(1).is_ok());
    }

    /// Twice as many as a file may have: comparing each with each takes longer than a test may.
    #[test]
    fn views_of_one_storage_are_told_apart() {
        let storage = StoredBytes { range: 0..1 << 20, crc32: None };
        let view = |size: u64| StoredTensor::contiguous(Dtype::U8, vec![size], storage.clone());
        let named = |name: char| (1..=300_000).map(move |size| (format!("{name}{size}"), size));
        let tensors = named('a').chain(named('b')).map(|(name, size)| (name, view(size)));
        let mut weights = Weights::default();
        weights.take(0, Contents { tensors: tensors.collect(), ..Contents::default() });
        assert_eq!((weights.tensors.len(), weights.tied.len()), (300_000, 300_000));
        assert_eq!((weights.tensors[7].name.as_str(), weights.tied[7].as_str()), ("a8", "b8"));
    }
}
