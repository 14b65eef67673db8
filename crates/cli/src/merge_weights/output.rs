//! Tensors of any origin, written as safetensors files that appear when all of them are complete.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, other_than_file};
use accelerate_core::weight_files::{
    DEFAULT_STEM, Header, Index, Run, SaveManifest, StoredBytes, TEMPORARY_SUFFIX, WeightFiles, is_weight_file_of,
    shown, temporary_prefix,
};
use indicatif::{ProgressBar, ProgressStyle};
use safetensors::tensor::{Metadata, TensorInfo};
use tempfile::NamedTempFile;

use super::error::MergeError;
use super::input::{Files, Piece, Tensor, Weights, unreadable};

/// How much is copied at a time.
const BLOCK_BYTES: usize = 1 << 20;
/// Shorter runs than this are not read one by one, but with all that lies in between.
const SHORT_RUN_BYTES: u64 = 256;
/// But not where so many times the bytes of a tensor lie in between.
const SPARSE: u64 = 16;

/// Writes the weights into a folder: `model.safetensors`, or several files of at most `max_shard_bytes` and their index. Where
/// they are is returned in words.
pub(super) fn write(weights: &mut Weights, folder: &Path, max_shard_bytes: u64) -> Result<String, MergeError> {
    let is_new = prepare(folder)?;
    let written = write_into(weights, folder, max_shard_bytes);
    if written.is_err() && is_new {
        // Nothing is in it. The error that led here is the one to report.
        let _ = fs::remove_dir(folder);
    }
    written
}

/// Makes the folder if it is absent, which it says, and makes sure that there are no weights in it.
fn prepare(folder: &Path) -> Result<bool, MergeError> {
    let failed = |source| MergeError::Write { path: folder.to_owned(), source };
    match fs::metadata(folder) {
        Err(_) => return fs::create_dir_all(folder).map(|()| true).map_err(failed),
        Ok(found) if !found.is_dir() => {
            let found = other_than_file(found.file_type()).unwrap_or("a file");
            return Err(MergeError::Kind { path: folder.to_owned(), found, wanted: "a folder for the result" });
        }
        Ok(_) => (),
    }
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let name = entry.map_err(unreadable(folder))?.file_name().to_string_lossy().into_owned();
        if is_weight_file_of(&name, DEFAULT_STEM) || name == SaveManifest::file_name(DEFAULT_STEM) {
            return Err(MergeError::Exists { path: folder.join(name) });
        }
    }
    Ok(false)
}

fn write_into(weights: &mut Weights, folder: &Path, max_shard_bytes: u64) -> Result<String, MergeError> {
    let Weights { files, tensors, .. } = weights;
    let sizes: Vec<_> = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.num_bytes())).collect();
    let WeightFiles { files: planned, index } = WeightFiles::plan(&sizes, max_shard_bytes, DEFAULT_STEM);
    let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let bar = progress_bar(sizes.iter().map(|(_, bytes)| bytes).sum());
    let mut copier = Copier { files, bar, checked: HashSet::new() };
    let mut complete = Vec::new();
    for (name, names) in planned {
        let tensors = names.iter().filter_map(|name| by_name.get(name.as_str()).copied()).collect();
        complete.push(write_file(&mut copier, folder.join(name), tensors)?);
    }
    if let Some(index) = index {
        let path = folder.join(Index::file_name(DEFAULT_STEM));
        let json =
            index.to_json().map_err(|error| MergeError::Header { path: path.clone(), reason: error.to_string() })?;
        let mut file = OpenFile::create(path)?;
        file.append(json.as_bytes())?;
        complete.push(file.finish()?);
    }
    copier.bar.finish_and_clear();
    let num_files = complete.len();
    let last = put_in_place(folder, complete)?;
    Ok(match num_files {
        0 | 1 => last.shown(),
        _ => format!("{} files of {}, which {} lists", num_files - 1, folder.shown(), Index::file_name(DEFAULT_STEM)),
    })
}

/// It is drawn on a terminal only.
fn progress_bar(num_bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("merging [{bar:32}] {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left)");
    ProgressBar::new(num_bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Gives complete files their names, the last one last, which names the others. Nothing is replaced: where a name is taken, those
/// that were given are taken back.
fn put_in_place(folder: &Path, complete: Vec<(NamedTempFile, PathBuf)>) -> Result<PathBuf, MergeError> {
    let mut placed: Vec<PathBuf> = Vec::new();
    for (file, path) in complete {
        if let Err(error) = file.persist_noclobber(&path) {
            for path in &placed {
                let _ = fs::remove_file(path);
            }
            return Err(match error.error.kind() {
                ErrorKind::AlreadyExists => MergeError::Exists { path },
                _ => MergeError::Write { path, source: error.error },
            });
        }
        placed.push(path);
    }
    let failed = |source| MergeError::Write { path: folder.to_owned(), source };
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    Ok(placed.pop().unwrap_or_else(|| folder.to_owned()))
}

/// Writes one file under a temporary name.
fn write_file(
    copier: &mut Copier<'_>,
    path: PathBuf,
    mut tensors: Vec<&Tensor>,
) -> Result<(NamedTempFile, PathBuf), MergeError> {
    // The order of every writer of the format: the largest alignment first keeps every tensor aligned without holes.
    tensors.sort_by(|one, other| other.dtype.cmp(&one.dtype).then_with(|| one.name.cmp(&other.name)));
    let header = header(&tensors, &path)?;
    let mut file = OpenFile::create(path)?;
    file.append(&(header.len() as u64).to_le_bytes())?;
    file.append(&header)?;
    tensors.iter().try_for_each(|tensor| copier.copy(tensor, &mut file))?;
    file.finish()
}

fn header(tensors: &[&Tensor], path: &Path) -> Result<Vec<u8>, MergeError> {
    let too_large = |reason: String| MergeError::Header { path: path.to_owned(), reason };
    let mut offset = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = offset;
        offset += tensor.num_bytes() as usize;
        let shape = tensor.shape.iter().map(|&size| size as usize).collect();
        (tensor.name.clone(), TensorInfo { dtype: tensor.dtype, shape, data_offsets: (start, offset) })
    });
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos.collect()).map_err(|error| too_large(error.to_string()))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| too_large(error.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > Header::MAX_BYTES {
        return Err(too_large(format!(
            "its header would have {} bytes; choose a smaller --max_shard_size",
            header.len()
        )));
    }
    Ok(header)
}

/// A file under a temporary name. Dropped, it is removed.
struct OpenFile {
    file: BufWriter<NamedTempFile>,
    path: PathBuf,
}

impl OpenFile {
    fn create(path: PathBuf) -> Result<Self, MergeError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        // What is left under such a name when this process is killed, the next save into the folder removes. The umask
        // decides who may read it.
        let prefix = temporary_prefix(DEFAULT_STEM);
        let file = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(TEMPORARY_SUFFIX)
            .rand_bytes(16)
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder);
        let file = file.map_err(|source| MergeError::Write { path: path.clone(), source })?;
        // Tells whoever saves into the folder that the writer lives. Where there are no locks, nobody is told.
        let _ = file.as_file().try_lock();
        Ok(Self { file: BufWriter::with_capacity(BLOCK_BYTES, file), path })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), MergeError> {
        self.file.write_all(bytes).map_err(|source| MergeError::Write { path: self.path.clone(), source })
    }

    /// Sees to it that all is on the disk.
    fn finish(self) -> Result<(NamedTempFile, PathBuf), MergeError> {
        let Self { file, path } = self;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error);
        let flushed = file.and_then(|file| file.as_file().sync_all().map(|()| file));
        match flushed {
            Ok(file) => Ok((file, path)),
            Err(source) => Err(MergeError::Write { path, source }),
        }
    }
}

/// Copies data of tensors, and compares them with their checksums.
struct Copier<'a> {
    files: &'a mut Files,
    bar: ProgressBar,
    /// Several tensors may be views of one storage, which is checked once.
    checked: HashSet<(usize, StoredBytes)>,
}

impl Copier<'_> {
    fn copy(&mut self, tensor: &Tensor, output: &mut OpenFile) -> Result<(), MergeError> {
        let mut pieces: Vec<&Piece> = tensor.pieces.iter().collect();
        pieces.sort_by(|one, other| one.offsets.cmp(&other.offsets));
        pieces.iter().try_for_each(|piece| self.check(piece, &tensor.name))?;
        // Pieces that lie in the tensor one behind the other can follow each other in the file.
        if pieces.iter().all(|piece| one_run(piece, tensor).is_some()) {
            for (piece, run) in pieces.iter().filter_map(|piece| Some((piece, one_run(piece, tensor)?))) {
                self.stream(piece, run, output)?;
            }
            return Ok(());
        }
        let too_large = || MergeError::Memory { key: shown(&tensor.name), num_bytes: tensor.num_bytes() };
        let mut data = Vec::new();
        let num_bytes = usize::try_from(tensor.num_bytes()).map_err(|_| too_large())?;
        data.try_reserve_exact(num_bytes).map_err(|_| too_large())?;
        data.resize(num_bytes, 0);
        pieces.iter().try_for_each(|piece| self.gather(piece, tensor, &mut data))?;
        output.append(&data)
    }

    /// Compares the storage of a piece with its checksum.
    fn check(&mut self, piece: &Piece, name: &str) -> Result<(), MergeError> {
        let storage = piece.stored.storage();
        let Some(wanted) = storage.crc32 else { return Ok(()) };
        if !self.checked.insert((piece.file, storage.clone())) {
            return Ok(());
        }
        let mut hasher = crc32fast::Hasher::new();
        self.blocks(piece.file, storage.range.start, storage.len(), |block| {
            hasher.update(block);
            Ok(())
        })?;
        if hasher.finalize() != wanted {
            let path = self.files.path(piece.file).to_owned();
            return Err(MergeError::Checksum { path, key: shown(name) });
        }
        Ok(())
    }

    fn stream(&mut self, piece: &Piece, run: Run, output: &mut OpenFile) -> Result<(), MergeError> {
        let bar = self.bar.clone();
        self.blocks(piece.file, run.from, run.bytes, |block| {
            bar.inc(block.len() as u64);
            output.append(block)
        })
    }

    /// Shows a range of a file, a block at a time.
    fn blocks(
        &mut self,
        number: usize,
        mut at: u64,
        length: u64,
        mut show: impl FnMut(&[u8]) -> Result<(), MergeError>,
    ) -> Result<(), MergeError> {
        let path = self.files.path(number).to_owned();
        let (file, _) = self.files.get(number)?;
        let mut block = vec![0; BLOCK_BYTES.min(usize::try_from(length).unwrap_or(BLOCK_BYTES))];
        let end = at + length;
        while at < end {
            let part = block.len().min(usize::try_from(end - at).unwrap_or(block.len()));
            let part = &mut block[..part];
            file.read_exact_at(part, at).map_err(unreadable(&path))?;
            show(part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Puts a piece in its places among the data of a tensor.
    fn gather(&mut self, piece: &Piece, tensor: &Tensor, data: &mut [u8]) -> Result<(), MergeError> {
        self.bar.inc(piece.stored.num_bytes());
        let path = self.files.path(piece.file).to_owned();
        let (file, _) = self.files.get(piece.file)?;
        let span = piece.stored.span();
        let is_dense = (span.end - span.start) / SPARSE <= piece.stored.num_bytes();
        let mut runs = piece.stored.runs_within(&tensor.shape, &piece.offsets).peekable();
        let is_short = is_dense && runs.peek().is_some_and(|run| run.bytes < SHORT_RUN_BYTES);
        let mut all = vec![0; if is_short { (span.end - span.start) as usize } else { 0 }];
        file.read_exact_at(&mut all, span.start).map_err(unreadable(&path))?;
        for run in runs {
            let beyond = || unreadable(&path)(ErrorKind::UnexpectedEof.into());
            let target = data.get_mut(run.to as usize..(run.to + run.bytes) as usize).ok_or_else(beyond)?;
            if is_short {
                let from = (run.from - span.start) as usize;
                target.copy_from_slice(all.get(from..from + target.len()).ok_or_else(beyond)?);
            } else {
                file.read_exact_at(target, run.from).map_err(unreadable(&path))?;
            }
        }
        Ok(())
    }
}

/// The run that a piece is, if it is one.
fn one_run(piece: &Piece, tensor: &Tensor) -> Option<Run> {
    let mut runs = piece.stored.runs_within(&tensor.shape, &piece.offsets);
    let first = runs.next();
    match runs.next() {
        Some(_) => None,
        // A piece without elements is one of no length.
        None => Some(first.unwrap_or(Run { from: piece.stored.storage().range.start, to: 0, bytes: 0 })),
    }
}
