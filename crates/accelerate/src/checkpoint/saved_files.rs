//! What a program may ask of a folder before it saves there, and of the files of a save that it reads by itself.

use super::atomic::{PendingFile, io_error, names_in, remove_abandoned};
use super::folder::{Check, NOT_PLAIN, check_manifest, finish_interrupted_saves, own_manifest, read_small};
use crate::error::{Result, WeightsError};
use accelerate_core::weight_files::{DEFAULT_STEM, SaveManifest, is_saved_file_name, is_weight_file_of};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Makes sure that weights can be saved into `folder`: makes it if it is absent, finishes a save that was interrupted there,
/// looks for folders where files are to be, and writes a file and removes it.
///
/// Call it before training, so that a disk or a path that is wrong is found before the work and not after it.
/// [`Accelerator::check_save_directory`](crate::Accelerator::check_save_directory) does so on the main process for all of them.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): the folder cannot be made or written; something is in the way, or was written
/// after a save was interrupted.
///
/// ```
/// let folder = std::env::temp_dir().join(format!("accelerate-check-{}", std::process::id()));
/// accelerate::checkpoint::check_save_directory(&folder)?;
/// assert!(accelerate::checkpoint::check_save_directory("/dev/null/folder").is_err());
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn check_save_directory(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    fs::create_dir_all(folder).map_err(io_error("create", folder))?;
    finish_interrupted_saves(folder)?;
    remove_abandoned(folder, "check", &[])?;
    for name in names_in(folder)? {
        let is_ours = is_weight_file_of(&name, DEFAULT_STEM) || SaveManifest::stem(&name).is_some();
        let path = folder.join(&name);
        if is_ours && path.is_dir() {
            return Err(WeightsError::NotAFile { path, found: "a folder" }.into());
        }
    }
    // A block of its own, which a full disk does not have.
    PendingFile::write(&folder.join("check"), "check", &[0; 4096]).map(drop)
}

/// Reads a file that was saved with a model's weights, such as its `config.json`:
/// [`SaveModelOptions::files`](super::SaveModelOptions::files).
///
/// Finishes a save into the folder that was interrupted, so that this file and the weights are of one save, and compares
/// the content with the checksum in the folder's manifest. In folders from elsewhere, which have no manifest, it reads the
/// file as it is. Not collective.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): there is no such file, it is not as it was saved, or has more than 1 GiB.
///
/// ```
/// use accelerate::checkpoint::{SaveModelOptions, read_saved_file, save_model_weights};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let folder = std::env::temp_dir().join(format!("accelerate-read-saved-{}", std::process::id()));
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root() / "classifier", 4, 2, Default::default())?;
/// let files = [("config.json".to_owned(), br#"{"hidden_size": 4}"#.to_vec())].into();
/// save_model_weights(&store, &folder, &SaveModelOptions { files, ..Default::default() })?;
/// assert_eq!(read_saved_file(&folder, "config.json")?, br#"{"hidden_size": 4}"#);
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn read_saved_file(folder: impl AsRef<Path>, name: &str) -> Result<Vec<u8>> {
    const MOST_BYTES: u64 = 1 << 30;
    let folder = folder.as_ref();
    let path = folder.join(name);
    if !is_saved_file_name(name) {
        return Err(WeightsError::FileName { name: name.to_owned(), reason: NOT_PLAIN }.into());
    }
    check_saved_files(folder)?;
    let absent = || io_error("read", &path)(ErrorKind::NotFound.into());
    Ok(read_small(&path, MOST_BYTES)?.ok_or_else(absent)?)
}

/// Makes sure that files which were saved into `folder` together are together. Call it before other programs or libraries
/// read them; [`read_saved_file`] and [`load_checkpoint_in_model`](super::load_checkpoint_in_model) do the same. It is quick;
/// [`verify_saved_files`] reads everything.
///
/// Finishes a save that was interrupted, and compares samples of the weights and the content of all other files with the
/// manifests in the folder. In folders from elsewhere there is none, and nothing is compared. Not collective.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): a file that is not as it was saved; no such folder.
///
/// ```
/// let folder = std::env::temp_dir().join(format!("accelerate-check-saved-{}", std::process::id()));
/// std::fs::create_dir_all(&folder).map_err(accelerate::Error::other)?;
/// accelerate::checkpoint::check_saved_files(&folder)?;
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn check_saved_files(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    finish_interrupted_saves(folder)?;
    for manifest in names_in(folder)? {
        let Some(stem) = SaveManifest::stem(&manifest) else { continue };
        if own_manifest(folder, stem)?.is_some() {
            check_manifest(folder, stem, Check::Quick)?;
        }
    }
    Ok(())
}

/// Compares the content of every file that saves into `folder` wrote with the checksums in their manifests. Reads everything.
///
/// Loading compares samples of the weights, and the content of the other files, which is quick. This also finds a
/// flipped bit. Finishes a save that was interrupted. Not collective.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): the first file that is not as it was saved; no manifest in the folder.
///
/// ```
/// use accelerate::checkpoint::{save_model_weights, verify_saved_files};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let folder = std::env::temp_dir().join(format!("accelerate-verify-{}", std::process::id()));
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root() / "classifier", 4, 2, Default::default())?;
/// save_model_weights(&store, &folder, &Default::default())?;
/// verify_saved_files(&folder)?;
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn verify_saved_files(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    finish_interrupted_saves(folder)?;
    let names = names_in(folder)?;
    let stems: Vec<&str> = names.iter().filter_map(|name| SaveManifest::stem(name)).collect();
    if stems.is_empty() {
        return Err(WeightsError::NoManifest { folder: folder.to_owned() }.into());
    }
    stems.into_iter().try_for_each(|stem| check_manifest(folder, stem, Check::Content))
}
