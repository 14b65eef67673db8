//! Whether a folder still has the saves in it that were looked at before.
//!
//! A run that goes on may save into the folder that is being read. Its files take the names of those that were verified, so that
//! some of what is read would be of one save, and some of another.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use accelerate_core::files::ShownPath;
use accelerate_core::weight_files::{SaveManifest, SavedFile};

use super::files::names_in;
use super::folder::Save;

/// What is in a folder before it is verified and read.
#[derive(Debug)]
pub(crate) struct Seen {
    folder: PathBuf,
    saves: Vec<SeenSave>,
}

#[derive(Debug, PartialEq)]
struct SeenSave {
    stem: String,
    /// As it is when the save is over: files may get their names while they are read.
    manifest: SaveManifest,
    files: Vec<Option<Identity>>,
}

/// What tells a file from another one of its name: device, number, length, and when it was written last.
type Identity = (u64, u64, u64, (i64, i64));

/// Another save is there than the one that was verified.
#[derive(Debug, thiserror::Error)]
#[error(
    "somebody saved into {} while it was read, so that two saves would be mixed; wait until that save is over, and run the \
     command again",
    folder.shown()
)]
pub(crate) struct Changed {
    folder: PathBuf,
}

impl Seen {
    /// What is there now. What cannot be read is told by whoever verifies it.
    pub(crate) fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), saves: saves_in(folder) }
    }

    /// Makes sure that all that was read since is of the same saves.
    pub(crate) fn check(&self) -> Result<(), Changed> {
        if saves_in(&self.folder) == self.saves { Ok(()) } else { Err(Changed { folder: self.folder.clone() }) }
    }
}

fn saves_in(folder: &Path) -> Vec<SeenSave> {
    let names = names_in(folder).unwrap_or_default();
    let stems = names.iter().filter_map(|name| SaveManifest::stem(name));
    let saves = stems.filter_map(|stem| Save::read(folder, stem).ok().flatten());
    let seen = |save: Save| SeenSave {
        stem: save.stem.clone(),
        manifest: save.manifest.finished(),
        files: save.manifest.files.iter().map(|file| identity(&save, file)).collect(),
    };
    saves.map(seen).collect()
}

fn identity(save: &Save, file: &SavedFile) -> Option<Identity> {
    let of = |found: Metadata| (found.dev(), found.ino(), found.len(), (found.mtime(), found.mtime_nsec()));
    let look = || fs::metadata(save.path_of(file)).map(of);
    // It may get its own name between two looks.
    look().or_else(|_| look()).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::checkpoint::sample::{save_over, write_sample};
    use rstest::rstest;

    /// Gives a file of the save its name, of which the manifest says a temporary one.
    fn interrupted(folder: &Path) {
        let path = folder.join("checkpoint.manifest.json");
        let mut manifest = SaveManifest::from_json(&fs::read_to_string(&path).unwrap(), "checkpoint").unwrap();
        manifest.files[0].temporary_name = Some(".checkpoint.a1.saving".to_owned());
        fs::rename(folder.join(&manifest.files[0].name), folder.join(".checkpoint.a1.saving")).unwrap();
        fs::write(path, manifest.to_json().unwrap()).unwrap();
    }

    fn finished(folder: &Path) {
        fs::rename(folder.join(".checkpoint.a1.saving"), folder.join("model.safetensors")).unwrap();
    }

    type Change = fn(&Path);

    #[rstest]
    #[case::nothing(|_: &Path| (), |_: &Path| (), true)]
    #[case::another_file(|_: &Path| (), |it: &Path| fs::write(it.join("notes.txt"), "more").unwrap(), true)]
    #[case::a_name(interrupted, finished, true)]
    #[case::a_save(|_: &Path| (), |it: &Path| save_over(it, 2.0), false)]
    #[case::the_same_save_again(|_: &Path| (), |it: &Path| save_over(it, 1.0), false)]
    #[case::a_file_in_place(|_: &Path| (), |it: &Path| fs::write(it.join("model.safetensors"), "other").unwrap(), false)]
    #[case::a_file_less(|_: &Path| (), |it: &Path| fs::remove_file(it.join("model.safetensors")).unwrap(), false)]
    #[case::no_manifest(|_: &Path| (), |it: &Path| fs::remove_file(it.join("checkpoint.manifest.json")).unwrap(), false)]
    fn another_save_is_seen(#[case] before: Change, #[case] meanwhile: Change, #[case] is_the_same: bool) {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a");
        write_sample(&folder, 1.0);
        before(&folder);
        let seen = Seen::of(&folder);
        meanwhile(&folder);
        assert_eq!(seen.check().is_ok(), is_the_same, "{seen:?}");
    }
}
