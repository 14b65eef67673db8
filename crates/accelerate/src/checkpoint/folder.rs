//! Several files that are saved as one: all of them are new, or all of them are as they were.
//!
//! Every file is written under a temporary name. Then comes the manifest, which lists them all with their sizes and
//! checksums, in one rename: from here on the save counts. At last the files get their names. A process that ends before
//! the manifest leaves the folder as it was. One that ends after it leaves files under their temporary names, and the
//! next load or save gives them their names.

use super::atomic::{PendingFile, folder_of, io_error, names_in, remove, remove_abandoned, sample, sync_folder};
use super::fault;
use super::reader::open_file;
use crate::error::{Error, Kind, Result, WeightsError};
use crate::messages;
use accelerate_core::checkpoint::STEM;
use accelerate_core::weight_files::{
    Checksum, EXTENSION, Index, SaveManifest, SavedFile, TORCH_EXTENSION, is_saved_file_name, is_weight_file_of,
};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use torch_ext::mapped_file::MappedFile;

/// Larger manifests are an attack or a damaged file.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;
/// How often a folder is looked at again that somebody saves into meanwhile.
pub(super) const MOST_TRIES: usize = 100;
/// How long another process may take to rename the files of its save.
const LONGEST_COMMIT: Duration = Duration::from_secs(10);
const COMMIT_POLL: Duration = Duration::from_millis(5);

/// Makes a folder ready for a save of weights called `stem`: makes it if it is absent, finishes a save that was interrupted
/// there, and makes room by removing what belongs to no save.
pub(super) fn prepare_folder(folder: &Path, stem: &str) -> Result<()> {
    let new: Vec<&Path> = folder.ancestors().take_while(|it| !it.as_os_str().is_empty() && !it.exists()).collect();
    fault::step().and_then(|()| fs::create_dir_all(folder)).map_err(|error| cannot_create(folder, error))?;
    new.into_iter().try_for_each(|made| sync_folder(folder_of(made)))?;
    // What cannot be finished is replaced: the new save is worth more than the one that was interrupted.
    finish_interrupted_saves(folder).or_else(|error| {
        messages::warning_here!("{error}; the save that begins now replaces it");
        Ok::<(), Error>(())
    })?;
    // What could not be finished stays until the new save counts.
    let pending = own_manifest(folder, stem)?;
    if pending.is_none() && folder.join(SaveManifest::file_name(stem)).exists() {
        // One of a later version lists files that may not be removed, and nobody here knows which.
        return Ok(());
    }
    let listed = pending.into_iter().flat_map(|manifest| manifest.files).filter_map(|file| file.temporary_name);
    remove_abandoned(folder, stem, &listed.collect::<Vec<_>>())
}

/// Says what stands where a folder is to be made, if that is why it cannot be: the system says "File exists" and not which one.
fn cannot_create(folder: &Path, error: io::Error) -> WeightsError {
    // With a slash at the end the system looks for what is behind a link, and finds nothing.
    let without_slash: PathBuf = folder.components().collect();
    let there = without_slash.ancestors().find_map(|path| Some((path, path.symlink_metadata().ok()?)));
    // A link may lead to where this process cannot look.
    let is_no_folder =
        |path: &Path| path.metadata().map_or_else(|error| error.kind() == io::ErrorKind::NotFound, |it| !it.is_dir());
    let Some((path, metadata)) = there.filter(|(path, _)| is_no_folder(path)) else {
        return io_error("create", folder)(error);
    };
    let found = match fs::read_link(path) {
        Ok(target) => format!("a link to {}, where there is no folder", target.display()),
        Err(_) if metadata.is_file() => "a file".to_owned(),
        Err(_) => "neither a file nor a folder".to_owned(),
    };
    WeightsError::NoRoomForFolder { folder: folder.to_owned(), in_the_way: path.to_owned(), found }
}

/// Fails where another kind of save in the folder has files that this one would replace or remove: a checkpoint and a model
/// that was saved by itself have files of the same names. `is_one` says which names files of this save may have.
pub(super) fn refuse_other_saves(folder: &Path, stem: &str, is_one: &dyn Fn(&str) -> bool) -> Result<()> {
    for name in names_in(folder)? {
        let Some(other) = SaveManifest::stem(&name).filter(|other| *other != stem) else { continue };
        let Some(manifest) = own_manifest(folder, other)? else { continue };
        if let Some(file) = manifest.files.iter().find(|file| is_one(&file.name)) {
            let (path, manifest) = (folder.join(&file.name), name);
            return Err(WeightsError::OfAnotherSave { path, manifest }.into());
        }
    }
    Ok(())
}

/// Fails where files of such names are in the folder that no save of this `stem` has written: they would be replaced, or taken for
/// files of this one.
pub(super) fn refuse_foreign_files(folder: &Path, stem: &str, is_one: &dyn Fn(&str) -> bool) -> Result<()> {
    let earlier = read_manifest(folder, stem)?;
    let own: HashSet<&str> = earlier.iter().flat_map(|earlier| &earlier.files).map(|file| file.name.as_str()).collect();
    match names_in(folder)?.iter().find(|name| is_one(name) && !own.contains(name.as_str())) {
        Some(name) => Err(WeightsError::OfNoSave { path: folder.join(name) }.into()),
        None => Ok(()),
    }
}

/// Puts files of a save in their places, in this order, and removes what is left of earlier saves of the same `stem`.
/// The files are complete under their temporary names, and nobody removes them there any more.
pub(super) fn commit_folder(folder: &Path, stem: &str, files: Vec<SavedFile>) -> Result<()> {
    commit_manifest(folder, stem, &SaveManifest::new(files))
}

/// The same, and all files of the earlier save go that are not written anew, whatever their names are.
pub(super) fn commit_instead(folder: &Path, stem: &str, files: Vec<SavedFile>) -> Result<()> {
    // What is no manifest was no save, and its files are nobody's.
    let earlier = own_manifest(folder, stem)?;
    let manifest = SaveManifest::new(files);
    let manifest = earlier.map_or(manifest.clone(), |earlier| manifest.replacing(&earlier));
    commit_manifest(folder, stem, &manifest)
}

fn commit_manifest(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<()> {
    let written = lock(folder).and_then(|lock| {
        check_written(folder, manifest)?;
        // Names have to be on the disk before what lists them.
        sync_folder(folder)?;
        write_manifest(folder, stem, manifest).map(|()| lock)
    });
    let _lock = written.inspect_err(|_| {
        // File systems of a network may report as failed what they have done, and then these files are the save.
        if !matches!(read_manifest(folder, stem), Ok(found) if found.as_ref() != Some(manifest)) {
            return;
        }
        // Without the manifest they belong to nothing. The error that led here is the one to report.
        for name in manifest.files.iter().filter_map(|file| file.temporary_name.as_ref()) {
            let _ = fs::remove_file(folder.join(name));
        }
    })?;
    sync_folder(folder)?;
    put_in_place(folder, stem, manifest)?;
    remove_abandoned(folder, stem, &[])
}

/// Gives the files of saves that were interrupted in this folder their names. Where there are none, nothing is changed.
pub(super) fn finish_interrupted_saves(folder: &Path) -> Result<()> {
    let found = interrupted_saves(folder)?;
    if found.is_empty() {
        return Ok(());
    }
    // Before the lock, because it reads everything.
    let checked: Vec<Result<()>> =
        found.iter().map(|(stem, manifest)| check_interrupted(folder, stem, manifest)).collect();
    let _lock = lock(folder)?;
    // Some were only under way, and are over now.
    let left = interrupted_saves(folder)?;
    for ((stem, manifest), checked) in found.into_iter().zip(checked) {
        if !left.contains(&(stem.clone(), manifest.clone())) {
            continue;
        }
        checked?;
        refuse_if_newer(folder, &stem, &manifest)?;
        put_in_place(folder, &stem, &manifest)?;
        messages::warning_here!("a save into {} had been interrupted; it is finished now", folder.display());
    }
    Ok(())
}

/// What weights are called of which files are under their temporary names, and the manifest of each.
fn interrupted_saves(folder: &Path) -> Result<Vec<(String, SaveManifest)>> {
    let mut found = Vec::new();
    for name in names_in(folder)? {
        let Some(stem) = SaveManifest::stem(&name) else { continue };
        let Some(manifest) = own_manifest(folder, stem)? else { continue };
        if !pending(folder, &manifest).is_empty() {
            found.push((stem.to_owned(), manifest));
        }
    }
    Ok(found)
}

/// Keeps other processes from renaming files in the folder until the returned file is dropped. A file system without
/// locks keeps nobody. A process that keeps the lock for long is stopped, or wants to do harm, and is not waited for: a second
/// one may do the same renames.
fn lock(folder: &Path) -> Result<Option<File>> {
    if !cfg!(unix) {
        return Ok(None);
    }
    let file = File::open(folder).map_err(io_error("open", folder))?;
    let began = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if began.elapsed() < LONGEST_COMMIT => thread::sleep(COMMIT_POLL),
            Err(_) => return Ok(None),
        }
    }
}

/// Makes sure that all files are there under their temporary names: a rank that has ended may have taken its own along.
fn check_written(folder: &Path, manifest: &SaveManifest) -> Result<()> {
    manifest.files.iter().try_for_each(|file| {
        let path = folder.join(file.temporary_name.as_ref().unwrap_or(&file.name));
        let found = fs::metadata(&path).map_err(io_error("read", &path))?.len();
        if found != file.bytes {
            let reason = format!("it has {found} bytes, and {} were written", file.bytes);
            return Err(WeightsError::Header { path, reason }.into());
        }
        Ok(())
    })
}

pub(super) fn write_manifest(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<()> {
    let path = folder.join(SaveManifest::file_name(stem));
    let json = manifest.to_json().map_err(|source| WeightsError::Manifest { path: path.clone(), source })?;
    if json.len() as u64 > MAX_MANIFEST_BYTES {
        let (num_bytes, num_files) = (json.len(), manifest.files.len());
        return Err(WeightsError::LongManifest { path, num_bytes, num_files }.into());
    }
    PendingFile::write(&path, stem, json.as_bytes())?.commit().map(drop)
}

/// The files of a save that are still under their temporary names, with their paths, in the order of the manifest.
fn pending<'a>(folder: &Path, manifest: &'a SaveManifest) -> Vec<(PathBuf, &'a SavedFile)> {
    let paths = manifest.files.iter().filter_map(|file| {
        let temporary = folder.join(file.temporary_name.as_ref()?);
        let is_file = fs::symlink_metadata(&temporary).is_ok_and(|metadata| metadata.is_file());
        is_file.then_some((temporary, file))
    });
    paths.collect()
}

/// Does the name alone say that a save of this `stem` has written a file? Those of a checkpoint are called after its objects, and
/// its manifests list them: whatever else is called `checkpoint` is somebody else's.
fn has_name_of(name: &str, stem: &str) -> bool {
    stem != STEM && is_weight_file_of(name, stem)
}

/// Files of earlier saves that the save of this manifest replaces.
fn stale(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<Vec<PathBuf>> {
    let mut names = names_in(folder)?;
    let is_stale =
        |name: &String| manifest.outdated.contains(name) || has_name_of(name, stem) && manifest.file(name).is_none();
    names.retain(is_stale);
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Makes sure that the files of an interrupted save are all there and whole, under either name, before any of them replaces
/// another one.
fn check_interrupted(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<()> {
    manifest.files.iter().try_for_each(|file| {
        match file.temporary_name.clone().filter(|name| folder.join(name).exists()) {
            Some(name) => check_file(folder, stem, &SavedFile { name, ..file.clone() }, Check::Content),
            None => check_file(folder, stem, file, Check::Quick),
        }
    })
}

/// Somebody else may have written into the folder since a save was interrupted, and what is new does not give way to what is
/// old.
fn refuse_if_newer(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<()> {
    let manifest_path = folder.join(SaveManifest::file_name(stem));
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let Some(committed) = modified(&manifest_path) else { return Ok(()) };
    let replaced = pending(folder, manifest).into_iter().map(|(_, file)| folder.join(&file.name));
    for path in replaced.chain(stale(folder, stem, manifest)?) {
        if modified(&path).is_some_and(|modified| modified > committed) {
            return Err(WeightsError::NewerThanSave { path, manifest: manifest_path }.into());
        }
    }
    Ok(())
}

/// Renames what is still under its temporary name, and removes weights of earlier saves.
fn put_in_place(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<()> {
    let pending = pending(folder, manifest);
    let Some((last, first)) = pending.split_last() else { return Ok(()) };
    let indexes = manifest.files.iter().map(|file| &file.name).chain(&manifest.outdated).filter(|name| is_index(name));
    let usual = Some(Index::file_name(stem)).filter(|index| has_name_of(index, stem));
    for index in indexes.chain(&usual) {
        // Where it has its name already, it is the new one.
        if manifest.file(index).is_none() || pending.iter().any(|(path, file)| file.name == *index && path.exists()) {
            // Readers who know no manifest must not find shards of two saves under one index.
            remove(&folder.join(index))?;
        }
    }
    let rename = |pending: &(PathBuf, &SavedFile)| rename(folder, stem, pending);
    first.iter().try_for_each(rename)?;
    stale(folder, stem, manifest)?.iter().try_for_each(|path| remove(path))?;
    sync_folder(folder)?;
    // With the last one nothing is pending, and nothing of this save is done again.
    rename(last)?;
    sync_folder(folder)?;
    write_manifest(folder, stem, &manifest.finished())
}

pub(super) fn rename(folder: &Path, stem: &str, (temporary, file): &(PathBuf, &SavedFile)) -> Result<()> {
    let path = folder.join(&file.name);
    match fault::step().and_then(|()| fs::rename(temporary, &path)) {
        // Where there are no locks, another process may have renamed it in between.
        Err(error) if error.kind() == ErrorKind::NotFound => check_file(folder, stem, file, Check::Quick),
        Err(source) => Err(WeightsError::InTheWay { path, source }.into()),
        Ok(()) => Ok(()),
    }
}

/// The manifest of the last save of weights called `stem`, if there is one.
pub(super) fn read_manifest(folder: &Path, stem: &str) -> Result<Option<SaveManifest>> {
    let path = folder.join(SaveManifest::file_name(stem));
    let Some(json) = read_small(&path, MAX_MANIFEST_BYTES)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&json);
    let read = SaveManifest::from_json(&text, stem);
    Ok(Some(read.map_err(|source| WeightsError::Manifest { path, source })?))
}

/// The same, and `None` for a file that is none of our manifests, whoever has written it. Whether one is ours that cannot be read
/// at the moment is not known, so that this is an error.
pub(super) fn own_manifest(folder: &Path, stem: &str) -> Result<Option<SaveManifest>> {
    match read_manifest(folder, stem) {
        Err(error) if !matches!(error.kind(), Kind::Weights(WeightsError::Io { .. })) => Ok(None),
        read => read,
    }
}

/// Has a save of files called `stem` been committed in the folder?
///
/// # Errors
/// Its manifest cannot be read.
pub(super) fn is_committed(folder: &Path, stem: &str) -> Result<bool> {
    Ok(read_manifest(folder, stem)?.is_some())
}

/// Is the save still the one that was read?
pub(super) fn is_unchanged(folder: &Path, stem: &str, manifest: &SaveManifest) -> Result<bool> {
    Ok(read_manifest(folder, stem)?.is_some_and(|now| now.finished() == manifest.finished()))
}

/// The manifest of a save, and a file of it as it was saved, of at most so many bytes; `None` if there is no save, or it has no
/// such file.
pub(super) fn read_committed(
    folder: &Path,
    stem: &str,
    name: &str,
    most_bytes: u64,
) -> Result<Option<(SaveManifest, Vec<u8>)>> {
    let Some(manifest) = read_manifest(folder, stem)? else { return Ok(None) };
    let Some(file) = manifest.file(name) else { return Ok(None) };
    check_file(folder, stem, file, Check::Content)?;
    let content = read_small(&folder.join(name), most_bytes)?;
    Ok(content.map(|content| (manifest, content)))
}

/// Compares the content of part number `part` of the files of a save with their checksums, so that several processes share the work:
/// each has about as many bytes. What has been compared, by name: it can be read again without opening anything else.
pub(super) fn verify_part(
    folder: &Path,
    stem: &str,
    part: usize,
    num_parts: usize,
) -> Result<HashMap<String, MappedFile>> {
    let Some(manifest) = read_manifest(folder, stem)? else { return Ok(HashMap::new()) };
    let open = |file: &SavedFile| Ok((file.name.clone(), open_as_saved(folder, stem, file)?));
    manifest.part(part, num_parts).into_iter().map(open).collect()
}

/// A regular file of at most so many bytes; `None` if there is none.
pub(super) fn read_small(path: &Path, most_bytes: u64) -> Result<Option<Vec<u8>>> {
    match fs::metadata(path) {
        // Any other error leaves open whether it is there.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found.map_err(io_error("read", path))?,
    };
    let (file, found_bytes) = open_file(path)?;
    if found_bytes > most_bytes {
        return Err(WeightsError::NotASmallFile { path: path.to_owned(), found_bytes, most_bytes }.into());
    }
    let mut content = Vec::new();
    // The file may have grown since.
    file.take(most_bytes).read_to_end(&mut content).map_err(io_error("read", path))?;
    Ok(Some(content))
}

/// How closely files are compared with their manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// A sample of the content of weights, and the content of all other files.
    Quick,
    /// The content of all files.
    Content,
}

/// Makes sure, quickly, that the weight file or index `name` and everything that was saved with it is as it was saved.
/// Weights that no manifest mentions pass.
pub(super) fn check_saved_with(folder: &Path, name: &str) -> Result<()> {
    for manifest in names_in(folder)? {
        let Some(stem) = SaveManifest::stem(&manifest) else { continue };
        let lists_it = || Ok::<_, Error>(own_manifest(folder, stem)?.is_some_and(|it| it.file(name).is_some()));
        if has_name_of(name, stem) || lists_it()? {
            check_manifest(folder, stem, Check::Quick)?;
        }
    }
    Ok(())
}

fn is_index(name: &str) -> bool {
    Path::new(name).file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| stem.ends_with(".index"))
}

pub(super) fn check_manifest(folder: &Path, stem: &str, check: Check) -> Result<()> {
    let mut before = read_manifest(folder, stem)?;
    let mut num_tries = 0;
    loop {
        let Some(manifest) = &before else { return Ok(()) };
        let checked = manifest.files.iter().try_for_each(|file| check_file(folder, stem, file, check));
        let after = read_manifest(folder, stem)?;
        num_tries += 1;
        if checked.is_ok() || after == before || num_tries == MOST_TRIES {
            return checked;
        }
        // Somebody saved in between.
        before = after;
        finish_interrupted_saves(folder)?;
    }
}

/// Which saves the folder holds: what changes when somebody saves into it, and not when a save is only finished.
pub(super) fn saves_in(folder: &Path) -> Result<Vec<SaveManifest>> {
    let mut saves = Vec::new();
    for name in names_in(folder)? {
        let Some(stem) = SaveManifest::stem(&name) else { continue };
        saves.extend(own_manifest(folder, stem)?.map(|manifest| manifest.finished()));
    }
    Ok(saves)
}

fn check_file(folder: &Path, stem: &str, file: &SavedFile, check: Check) -> Result<()> {
    let extension = Path::new(&file.name).extension();
    let is_large = extension.is_some_and(|extension| extension == EXTENSION || extension == TORCH_EXTENSION);
    if check == Check::Content || !is_large {
        return open_as_saved(folder, stem, file).map(drop);
    }
    let content = open_of_length(folder, stem, file)?;
    compare(folder, stem, file, sample(&content, file.bytes), &file.sample)
}

/// A file of a save whose content is as it was saved.
fn open_as_saved(folder: &Path, stem: &str, file: &SavedFile) -> Result<MappedFile> {
    let mapped = MappedFile::new(open_of_length(folder, stem, file)?);
    let mapped = mapped.map_err(io_error("read", &folder.join(&file.name)))?;
    compare(folder, stem, file, content_checksum(&mapped), &file.xxh3_128)?;
    Ok(mapped)
}

/// A file of a save that is as long as it was saved.
fn open_of_length(folder: &Path, stem: &str, file: &SavedFile) -> Result<File> {
    let path = folder.join(&file.name);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.len() == file.bytes => {}
        Ok(metadata) if metadata.is_file() => {
            let reason = format!("it has {} bytes, and {} were saved", metadata.len(), file.bytes);
            return Err(not_as_saved(path, stem, reason));
        }
        Ok(_) => return Err(not_as_saved(path, stem, "it is not a file".to_owned())),
        Err(error) => return Err(not_as_saved(path, stem, error.to_string())),
    }
    Ok(File::open(&path).map_err(io_error("read", &path))?)
}

fn compare(folder: &Path, stem: &str, file: &SavedFile, found: io::Result<Checksum>, saved: &str) -> Result<()> {
    let path = folder.join(&file.name);
    if found.map_err(io_error("read", &path))?.to_string() == saved {
        return Ok(());
    }
    Err(not_as_saved(path, stem, "its content has changed".to_owned()))
}

fn not_as_saved(path: PathBuf, stem: &str, reason: String) -> Error {
    WeightsError::NotAsSaved { path, reason, manifest: SaveManifest::file_name(stem) }.into()
}

fn content_checksum(content: &MappedFile) -> io::Result<Checksum> {
    let mut checksum = Checksum::new();
    content.visit_blocks(|block| checksum.update(block))?;
    Ok(checksum)
}

pub(super) const NOT_PLAIN: &str = "it has to be a plain name, without folders and without a dot in front";

/// Whether weights may be called `stem`, and files of the user's own may have these names beside them.
pub(super) fn check_own_names<'a>(names: impl Iterator<Item = &'a String>, stem: &str) -> Result<()> {
    if !is_saved_file_name(stem) {
        return Err(WeightsError::FileName { name: stem.to_owned(), reason: NOT_PLAIN }.into());
    }
    for name in names {
        let reason = if !is_saved_file_name(name) {
            NOT_PLAIN
        } else if is_weight_file_of(name, stem) || SaveManifest::stem(name).is_some() {
            "weights and their manifest have names of this kind"
        } else {
            continue;
        };
        return Err(WeightsError::FileName { name: name.clone(), reason }.into());
    }
    Ok(())
}
