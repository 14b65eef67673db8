//! Which columns of a file are wanted.

use crate::error::ReaderError;
use std::path::Path;

/// The wanted columns of one file.
#[derive(Debug)]
pub(super) struct Selection {
    /// Where each of them is in the file, in the order in which they are wanted.
    pub(super) positions: Vec<usize>,
    /// Their names, in the same order.
    pub(super) names: Vec<String>,
}

impl Selection {
    /// Finds the columns among those of the file; all of them without `wanted`. `setting` names the option that lists them.
    pub(super) fn new(
        path: &Path,
        found: &[String],
        wanted: Option<&[String]>,
        setting: &'static str,
    ) -> Result<Self, ReaderError> {
        let positions: Vec<usize> = match wanted {
            None => (0..found.len()).collect(),
            Some(wanted) => wanted.iter().map(|wanted| position(path, found, wanted)).collect::<Result<_, _>>()?,
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

fn position(path: &Path, found: &[String], wanted: &String) -> Result<usize, ReaderError> {
    found.iter().position(|name| name == wanted).ok_or_else(|| ReaderError::NoSuchColumn {
        path: path.to_owned(),
        found: found.to_vec(),
        wanted: wanted.clone(),
    })
}
