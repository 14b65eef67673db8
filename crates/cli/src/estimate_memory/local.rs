//! A model's files in a folder of this machine.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, other_than_file};
use accelerate_core::weight_files::Header;

use super::error::EstimateError;
use super::source::ModelFiles;

/// The files of one folder.
pub(super) struct LocalFiles {
    folder: PathBuf,
}

impl LocalFiles {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl ModelFiles for LocalFiles {
    fn place(&self, name: &str) -> String {
        self.path(name).shown()
    }

    fn names(&self) -> Result<Vec<String>, EstimateError> {
        let unreadable = |source| EstimateError::Unreadable { place: self.folder.shown(), source };
        let entries = fs::read_dir(&self.folder).map_err(unreadable)?;
        let mut names = entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(unreadable)?;
        names.sort();
        Ok(names)
    }

    fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    fn header(&self, name: &str) -> Result<Header, EstimateError> {
        let (mut file, found_bytes) = open_file(&self.path(name))?;
        Header::read(&mut file, found_bytes).map_err(|source| EstimateError::header(self.place(name), &source))
    }

    fn text(&self, name: &str, most_bytes: u64) -> Result<String, EstimateError> {
        let (file, found_bytes) = open_file(&self.path(name))?;
        if found_bytes > most_bytes {
            return Err(EstimateError::LargeFile { place: self.place(name), found_bytes, most_bytes });
        }
        let mut text = String::new();
        // The file may have grown since.
        file.take(most_bytes)
            .read_to_string(&mut text)
            .map_err(|source| EstimateError::Unreadable { place: self.place(name), source })?;
        Ok(text)
    }

    fn num_readers(&self) -> usize {
        1
    }
}

/// The file and its length. Devices and pipes have no end, and are refused.
pub(super) fn open_file(path: &Path) -> Result<(File, u64), EstimateError> {
    let place = || path.shown();
    let unreadable = |source| EstimateError::Unreadable { place: place(), source };
    // Asked before opening: to open a pipe is to wait for its writer.
    let kind = fs::metadata(path).map_err(unreadable)?.file_type();
    if let Some(found) = other_than_file(kind) {
        return Err(EstimateError::NotAFile { place: place(), found });
    }
    let file = File::open(path).map_err(unreadable)?;
    let found_bytes = file.metadata().map_err(unreadable)?.len();
    Ok((file, found_bytes))
}
