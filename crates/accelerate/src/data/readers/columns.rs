//! Which columns of a file are wanted.

use super::limits::{MAX_COLUMNS, MAX_NAME_BYTES};
use crate::error::ReaderError;
use std::collections::HashMap;
use std::path::Path;

/// Refuses more columns than are read.
pub(super) fn check_columns(path: &Path, found: usize) -> Result<(), ReaderError> {
    if MAX_COLUMNS < found {
        return Err(ReaderError::TooManyColumns { path: path.to_owned(), found, most: MAX_COLUMNS });
    }
    Ok(())
}

/// Refuses a name that is too long, or occurs twice: whoever asks for it would get one of the two columns.
pub(super) fn check_names<'a>(path: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), ReaderError> {
    let mut positions = HashMap::new();
    // Spreadsheet programs write columns without names behind the others.
    for (position, name) in (1..).zip(names).filter(|(_, name)| !name.is_empty()) {
        if MAX_NAME_BYTES < name.len() {
            let (path, found) = (path.to_owned(), name.len());
            return Err(ReaderError::LongName { path, position, found, most: MAX_NAME_BYTES });
        }
        if let Some(first) = positions.insert(name, position) {
            let (path, name) = (path.to_owned(), name.to_owned());
            return Err(ReaderError::DuplicateColumn { path, name, first, second: position });
        }
    }
    Ok(())
}

/// The wanted columns of one file.
#[cfg(any(feature = "arrow", feature = "parquet"))]
#[derive(Debug)]
pub(super) struct Selection {
    /// Where each of them is in the file, in the order in which they are wanted.
    pub(super) positions: Vec<usize>,
    /// Their names, in the same order.
    pub(super) names: Vec<String>,
}

#[cfg(any(feature = "arrow", feature = "parquet"))]
impl Selection {
    /// Finds the columns among those of the file; all of them without `wanted`. `setting` names the option that lists them.
    pub(super) fn new(
        path: &Path,
        found: &[String],
        wanted: Option<&[String]>,
        setting: &'static str,
    ) -> Result<Self, ReaderError> {
        check_columns(path, found.len())?;
        if found.is_empty() {
            return Err(ReaderError::NoColumns { path: path.to_owned() });
        }
        check_names(path, found.iter().map(String::as_str))?;
        let by_name: HashMap<&String, usize> = found.iter().zip(0..).collect();
        let position = |wanted: &String| match by_name.get(wanted) {
            Some(&position) => Ok(position),
            None => {
                let (path, found, wanted) = (path.to_owned(), found.to_vec(), wanted.clone());
                Err(ReaderError::NoSuchColumn { path, found, wanted })
            }
        };
        let positions: Vec<usize> = match wanted {
            None => (0..found.len()).collect(),
            Some(wanted) => wanted.iter().map(position).collect::<Result<_, _>>()?,
        };
        let names = wanted.unwrap_or(found).to_vec();
        let mut distinct = positions.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != positions.len() || distinct.is_empty() {
            return Err(ReaderError::Selection { setting, found: names });
        }
        Ok(Self { positions, names })
    }
}
