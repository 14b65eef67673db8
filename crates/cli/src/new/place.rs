//! The folder of a new project, which appears whole or not at all.

use std::error::Error;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use accelerate_core::files::other_than_file;
use tempfile::TempDir;

use super::error::NewError;

/// A folder that is new, or empty.
#[derive(Debug)]
pub(super) struct Place {
    folder: PathBuf,
    /// The uppermost folder that is not there yet: the project's own, or one that it is to be in.
    missing: Option<PathBuf>,
}

impl Place {
    /// Nothing of the user's is ever written over.
    pub(super) fn find(folder: &Path) -> Result<Self, NewError> {
        let folder = std::path::absolute(folder).map_err(|source| NewError::io("find", folder, source))?;
        let in_the_way = |found| NewError::NotEmpty { folder: folder.clone(), found };
        let missing = folder.ancestors().take_while(|folder| fs::symlink_metadata(folder).is_err()).last();
        let missing = missing.map(Path::to_path_buf);
        match &missing {
            Some(top) => {
                let below = folder.strip_prefix(top).unwrap_or(&folder);
                if below.components().any(|part| part == Component::ParentDir) {
                    return Err(NewError::GoesUp { folder });
                }
            }
            None if !folder.is_dir() => {
                let kind =
                    fs::metadata(&folder).ok().map(|found| other_than_file(found.file_type()).unwrap_or("a file"));
                return Err(in_the_way(kind.unwrap_or("a link to nothing")));
            }
            None => {
                let mut entries = fs::read_dir(&folder).map_err(|source| NewError::io("read", &folder, source))?;
                if entries.next().is_some() {
                    return Err(in_the_way("a folder with files"));
                }
            }
        }
        Ok(Self { folder, missing })
    }

    /// The absolute path.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Lets `make` fill a temporary folder on the same disk, and moves that into place as the last step. After an error nothing
    /// is left.
    pub(super) fn fill(&self, make: impl FnOnce(&Path) -> Result<(), Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
        match &self.missing {
            Some(top) => self.fill_anew(top, make),
            None => self.fill_empty(make),
        }
    }

    fn fill_anew(
        &self,
        top: &Path,
        make: impl FnOnce(&Path) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let made = temporary(top.parent().unwrap_or(top))?;
        // With an empty `below`, `join` would add a slash.
        let below = self.folder.strip_prefix(top).unwrap_or(Path::new(""));
        let project: PathBuf = made.path().components().chain(below.components()).collect();
        fs::create_dir_all(&project).map_err(|source| NewError::io("create", &project, source))?;
        make(&project)?;
        fs::rename(made.path(), top).map_err(|source| NewError::io("move the finished project to", top, source))?;
        // What has been moved is not temporary any more.
        let _ = made.keep();
        Ok(())
    }

    /// The folder itself stays: it may be the working folder of a shell, or a disk.
    fn fill_empty(&self, make: impl FnOnce(&Path) -> Result<(), Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
        let made = temporary(&self.folder)?;
        make(made.path())?;
        let failed = |source| NewError::io("move the finished project to", &self.folder, source);
        let entries: io::Result<Vec<_>> = fs::read_dir(made.path()).map_err(failed)?.collect();
        let mut moved = Vec::new();
        for entry in entries.map_err(failed)? {
            let target = self.folder.join(entry.file_name());
            if let Err(source) = fs::rename(entry.path(), &target) {
                for (target, origin) in &moved {
                    let _ = fs::rename(target, origin);
                }
                return Err(failed(source).into());
            }
            moved.push((target, entry.path()));
        }
        Ok(())
    }
}

/// With the permissions that other new folders get.
fn temporary(parent: &Path) -> Result<TempDir, NewError> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".accelerate-new-").permissions(Permissions::from_mode(0o777));
    builder.tempdir_in(parent).map_err(|source| NewError::io("create a folder in", parent, source))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn names_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[rstest]
    #[case::new("demo", &["demo", "empty"])]
    #[case::in_new_folders("a/b/demo", &["a", "empty"])]
    #[case::empty("empty", &["empty"])]
    #[case::back_again("empty/../demo", &["demo", "empty"])]
    fn a_project_appears_whole_or_not_at_all(#[case] path: &str, #[case] after: &[&str]) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("empty")).unwrap();
        let folder = root.path().join(path);
        let place = Place::find(&folder).unwrap();
        let error = place.fill(|made| {
            fs::write(made.join("half"), "").unwrap();
            Err("no more".into())
        });
        assert_eq!(error.unwrap_err().to_string(), "no more");
        assert_eq!(names_in(root.path()), ["empty"]);
        assert!(names_in(&root.path().join("empty")).is_empty());

        place
            .fill(|made| {
                fs::create_dir(made.join("src")).unwrap();
                fs::write(made.join("src/main.rs"), "").unwrap();
                Ok(())
            })
            .unwrap();
        assert_eq!(names_in(root.path()), after);
        assert_eq!(names_in(&folder), ["src"]);
        let usual = root.path().join("usual");
        fs::create_dir(&usual).unwrap();
        let mode = |folder: &Path| fs::metadata(folder).unwrap().permissions().mode();
        assert_eq!(mode(&folder), mode(&usual));
    }

    #[rstest]
    #[case("file", "a file")]
    #[case("file/demo", "could not create a folder in")]
    #[case("full", "a folder with files")]
    #[case("link", "a link to nothing")]
    #[case("pipe", "a pipe")]
    #[case("absent/../demo", "without `..`")]
    fn nothing_is_written_over(#[case] path: &str, #[case] words: &str) {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "mine").unwrap();
        fs::create_dir(root.path().join("full")).unwrap();
        fs::write(root.path().join("full/notes"), "mine").unwrap();
        std::os::unix::fs::symlink("gone", root.path().join("link")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(root.path().join("pipe")).status().unwrap().success());
        let outcome = Place::find(&root.path().join(path)).map_err(Box::from).and_then(|place| place.fill(|_| Ok(())));
        let message = outcome.map_or_else(|error: Box<dyn Error>| error.to_string(), |()| "made".to_owned());
        assert!(message.contains(words), "{message}");
        assert_eq!(names_in(root.path()), ["file", "full", "link", "pipe"]);
    }

    #[test]
    fn an_empty_folder_that_fills_meanwhile_loses_nothing_and_gets_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::find(folder.path()).unwrap();
        let outcome = place.fill(|made| {
            fs::create_dir_all(made.join("src/inner")).unwrap();
            fs::write(made.join("a"), "").unwrap();
            fs::create_dir(folder.path().join("src")).unwrap();
            fs::write(folder.path().join("src/notes"), "mine").unwrap();
            Ok(())
        });
        assert!(outcome.is_err());
        assert_eq!(names_in(folder.path()), ["src"]);
        assert_eq!(names_in(&folder.path().join("src")), ["notes"]);
    }

    /// Another project of that name, made meanwhile, stays as it is.
    #[test]
    fn what_appears_meanwhile_stays() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("demo");
        let place = Place::find(&folder).unwrap();
        let outcome = place.fill(|_| {
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("notes"), "mine").unwrap();
            Ok(())
        });
        assert!(outcome.unwrap_err().to_string().contains("demo"));
        assert_eq!((names_in(root.path()), names_in(&folder)), (vec!["demo".to_owned()], vec!["notes".to_owned()]));
    }
}
