//! Tensors of any origin, written as safetensors files that appear when all of them are complete.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, other_than_file};
use accelerate_core::weight_files::{
    DEFAULT_STEM, Header, Index, Notes, SaveManifest, WeightFiles, is_weight_file_of, shown,
};
use tempfile::NamedTempFile;

use super::copy::{Copier, Sink};
use super::error::WeightsError;
use super::input::{Tensor, Weights, unreadable};
use super::placing::Turn;
use super::temporary::{OpenFile, remove_abandoned};
use crate::paths::resolved;
use crate::progress::Progress;

/// Whether what was read is what it was taken for, asked when all is written and nothing has its name.
pub(crate) type Check<'a> = &'a dyn Fn() -> Result<(), Box<dyn Error>>;

/// Writes the weights into a folder: `model.safetensors`, or several files of at most `max_shard_bytes` and their index. Where
/// they are is returned in words.
pub(crate) fn write(
    weights: &mut Weights,
    folder: &Path,
    max_shard_bytes: u64,
    check: Check<'_>,
) -> Result<String, Box<dyn Error>> {
    let is_new = make(folder)?;
    let written = in_turn(weights, folder, max_shard_bytes, check);
    if written.is_err() && is_new {
        // Nothing is in it. The error that led here is the one to report.
        let _ = fs::remove_dir(folder);
    }
    written
}

/// Makes the folder if it is absent, which it says.
fn make(folder: &Path) -> Result<bool, WeightsError> {
    let failed = |source| WeightsError::Write { path: folder.to_owned(), source };
    // `new/../folder` is there also while `new` is not.
    let place = resolved(folder).map_err(failed)?;
    let is_new = match fs::metadata(&place) {
        Err(_) => true,
        Ok(found) if !found.is_dir() => {
            let found = other_than_file(found.file_type()).unwrap_or("a file");
            return Err(WeightsError::Kind { path: folder.to_owned(), found, wanted: "a folder for the result" });
        }
        Ok(_) => false,
    };
    fs::create_dir_all(folder).map_err(failed)?;
    Ok(is_new)
}

/// Writes when nobody else does, and only where no weights are. What a killed writer has left is removed.
fn in_turn(
    weights: &mut Weights,
    folder: &Path,
    max_shard_bytes: u64,
    check: Check<'_>,
) -> Result<String, Box<dyn Error>> {
    let turn = Turn::take(folder)?;
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let name = entry.map_err(unreadable(folder))?.file_name().to_string_lossy().into_owned();
        if is_weight_file_of(&name, DEFAULT_STEM) || name == SaveManifest::file_name(DEFAULT_STEM) {
            return Err(WeightsError::Exists { path: folder.join(name) }.into());
        }
    }
    remove_abandoned(folder);
    write_into(weights, (folder, &turn), max_shard_bytes, check)
}

fn write_into(
    weights: &mut Weights,
    (folder, turn): (&Path, &Turn),
    max_shard_bytes: u64,
    check: Check<'_>,
) -> Result<String, Box<dyn Error>> {
    let Weights { files, tensors, notes, .. } = weights;
    let sizes: Vec<_> = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.num_bytes())).collect();
    let WeightFiles { files: planned, index } = WeightFiles::plan(&sizes, max_shard_bytes, DEFAULT_STEM);
    let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let bar = Progress::new("merging", sizes.iter().map(|(_, bytes)| bytes).sum());
    let mut copier = Copier::new(files, bar.clone());
    let mut complete = Vec::new();
    for (name, names) in planned {
        let tensors = names.iter().filter_map(|name| by_name.get(name.as_str()).copied()).collect();
        complete.push(write_file(&mut copier, folder.join(name), (tensors, notes))?);
    }
    if let Some(index) = index {
        let path = folder.join(Index::file_name(DEFAULT_STEM));
        let json =
            index.to_json().map_err(|error| WeightsError::Header { path: path.clone(), reason: error.to_string() })?;
        let mut file = OpenFile::create(path)?;
        file.sink().append(json.as_bytes())?;
        complete.push(file.finish()?);
    }
    bar.finish();
    check()?;
    let num_files = complete.len();
    turn.note(&complete)?;
    let last = put_in_place(folder, complete, |folder| File::open(folder)?.sync_all())?;
    Ok(match num_files {
        0 | 1 => last.shown(),
        _ => format!("{} files of {}, which {} lists", num_files - 1, folder.shown(), Index::file_name(DEFAULT_STEM)),
    })
}

/// Gives complete files their names, the last one last, which names the others, and flushes the folder by `sync`. Nothing is replaced:
/// where a name is taken, or the names do not get to the disk, those that were given are taken back.
fn put_in_place(
    folder: &Path,
    complete: Vec<(NamedTempFile, PathBuf)>,
    sync: impl Fn(&Path) -> io::Result<()>,
) -> Result<PathBuf, WeightsError> {
    let mut placed: Vec<PathBuf> = Vec::new();
    let place = || {
        for (file, path) in complete {
            file.persist_noclobber(&path).map_err(|error| match error.error.kind() {
                ErrorKind::AlreadyExists => WeightsError::Exists { path: path.clone() },
                _ => WeightsError::Write { path: path.clone(), source: error.error },
            })?;
            placed.push(path);
        }
        sync(folder).map_err(|source| WeightsError::Write { path: folder.to_owned(), source })
    };
    if let Err(error) = place() {
        // Without the last, the others are no weights.
        placed.iter().rev().for_each(|path| drop(fs::remove_file(path)));
        return Err(error);
    }
    Ok(placed.pop().unwrap_or_else(|| folder.to_owned()))
}

/// Writes one file under a temporary name.
fn write_file(
    copier: &mut Copier<'_>,
    path: PathBuf,
    (tensors, notes): (Vec<&Tensor>, &Notes),
) -> Result<(NamedTempFile, PathBuf), WeightsError> {
    let mut file = OpenFile::create(path)?;
    write_safetensors(copier, (tensors, notes), &mut file.sink())?;
    let (file, path) = file.finish()?;
    // Names from outside may be more than readers take.
    let num_bytes = file.as_file().metadata().map_err(unreadable(&path))?.len();
    let mut again = file.reopen().map_err(unreadable(&path))?;
    Header::read(&mut again, num_bytes).map_err(|source| WeightsError::NotReadable { path: path.clone(), source })?;
    Ok((file, path))
}

/// Writes tensors as a safetensors file, to the byte as every save of the library does. Notes of the files that they are from are those
/// of the new one.
pub(crate) fn write_safetensors(
    copier: &mut Copier<'_>,
    (mut tensors, notes): (Vec<&Tensor>, &Notes),
    output: &mut Sink<'_>,
) -> Result<(), WeightsError> {
    // The order of every writer of the format: the largest alignment first keeps every tensor aligned without holes.
    tensors.sort_by(|one, other| other.dtype.cmp(&one.dtype).then_with(|| one.name.cmp(&other.name)));
    let header = header(&tensors, notes, output.path)?;
    output.append(&header)?;
    tensors.iter().try_for_each(|tensor| copier.copy(tensor, output))
}

/// The beginning of a file with these tensors.
fn header(tensors: &[&Tensor], notes: &Notes, path: &Path) -> Result<Vec<u8>, WeightsError> {
    if let Some(tensor) = tensors.iter().find(|tensor| !tensor.has_whole_bytes()) {
        let (key, dtype) = (shown(&tensor.name), tensor.dtype);
        return Err(WeightsError::PartsOfBytes { path: path.to_owned(), key, dtype });
    }
    let described = tensors.iter().map(|tensor| {
        let shape = tensor.shape.iter().map(|&size| size as usize).collect();
        (tensor.name.as_str(), tensor.dtype, shape)
    });
    Header::write(described, &notes.agreed())
        .map_err(|source| WeightsError::NotWritable { path: path.to_owned(), source })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::placing::left_in;
    use super::*;
    use rstest::rstest;

    /// Two complete files without their names, and the folder that they are in.
    fn complete() -> (tempfile::TempDir, Vec<(NamedTempFile, PathBuf)>) {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| OpenFile::create(folder.path().join(name)).unwrap().finish().unwrap();
        let files = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"].map(file);
        (folder, files.into())
    }

    fn num_files(folder: &tempfile::TempDir) -> usize {
        fs::read_dir(folder.path()).unwrap().count()
    }

    #[rstest]
    #[case::flushed(|_: &Path| Ok(()), 2)]
    #[case::not_flushed(|_: &Path| Err(ErrorKind::StorageFull.into()), 0)]
    fn what_does_not_get_to_the_disk_is_not_left(#[case] sync: fn(&Path) -> io::Result<()>, #[case] wanted: usize) {
        let (folder, files) = complete();
        assert_eq!(put_in_place(folder.path(), files, sync).is_ok(), wanted > 0);
        assert_eq!(num_files(&folder), wanted);
    }

    #[test]
    fn one_writes_at_a_time_and_takes_back_what_is_not_finished() {
        let (folder, mut files) = complete();
        let turn = Turn::take(folder.path()).unwrap();
        assert!(matches!(Turn::take(folder.path()), Err(WeightsError::Busy { .. })));
        turn.note(&files).unwrap();
        let (index, last) = files.pop().unwrap();
        put_in_place(folder.path(), files, |_| Ok(())).unwrap();
        assert_eq!(left_in(folder.path()), ["model-00001-of-00001.safetensors"]);
        index.persist_noclobber(last).unwrap();
        assert!(left_in(folder.path()).is_empty(), "all have their names");
        drop(turn);
        assert_eq!(num_files(&folder), 2);
    }
}
