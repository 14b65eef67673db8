//! Rows of files that are made of parts which can only be decoded whole.

use super::cache::Cache;
use super::file::{Joined, PositionedFile, open_all};
use super::row::{Budget, Cells, Row};
use crate::error::{Place, ReaderError, Result, RowProblem};
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// One opened file.
pub(super) trait Source {
    /// What a part is called.
    const PART: &'static str;
    /// The option that says how many bytes of memory a part may become.
    const LIMIT: &'static str;

    /// Decoded rows.
    type Part;
    /// One row of them.
    type Cells<'a>: Cells<'a>
    where
        Self: 'a;

    fn path(&self) -> &Path;

    /// Names of the wanted columns, in the order in which they are wanted.
    fn columns(&self) -> &[String];

    /// Number of rows of each part.
    fn part_rows(&self) -> impl Iterator<Item = usize>;

    /// About how many bytes of memory a part takes when it is decoded; 0 if that cannot be said before.
    fn part_bytes(&self, part: usize) -> u64;

    /// How many bytes of memory a part may become.
    fn limit(&self, part: usize) -> u64;

    fn place(&self, part: usize, row: usize) -> Place;

    /// The error of a part that becomes `found` bytes in memory, if these are too many.
    fn check_size(&self, part: usize, found: u64) -> Result<(), ReaderError> {
        let limit = self.limit(part);
        if found <= limit {
            return Ok(());
        }
        let problem = RowProblem::TooLarge { what: Self::PART, found, limit, setting: Self::LIMIT };
        Err(ReaderError::Row { place: self.place(part, 0), problem })
    }

    /// Decodes the wanted columns of a part, and says how many bytes they take. `row` is the one that is wanted of them.
    fn decode(&self, part: usize, row: usize) -> Result<(Self::Part, u64), ReaderError>;

    fn cells(part: &Self::Part, row: usize) -> Self::Cells<'_>;
}

/// Several files one behind the other, and the parts of them that were decoded lately.
#[derive(Debug)]
pub(super) struct Table<S: Source> {
    sources: Vec<S>,
    /// File and part of it.
    parts: Vec<(usize, usize)>,
    joined: Joined,
    columns: Vec<String>,
    cache: Cache<S::Part>,
}

impl<S: Source> Table<S> {
    pub(super) fn open(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        open: impl Fn(PositionedFile) -> Result<S, ReaderError>,
        cache_bytes: u64,
    ) -> Result<Self> {
        let mut first: Option<(PathBuf, Vec<String>)> = None;
        let sources = open_all(paths, |file| {
            let source = open(file)?;
            let found = source.columns().to_vec();
            let (path, wanted) = first.get_or_insert_with(|| (source.path().to_owned(), found.clone()));
            if found != *wanted {
                let (first, wanted) = (path.clone(), wanted.clone());
                return Err(ReaderError::OtherColumns { path: source.path().to_owned(), found, first, wanted }.into());
            }
            Ok(source)
        })?;
        let parts = sources.iter().enumerate().flat_map(|(position, source)| {
            source.part_rows().enumerate().map(move |(part, num_rows)| ((position, part), num_rows))
        });
        let (parts, num_rows): (Vec<_>, Vec<_>) = parts.unzip();
        let columns = first.map(|(_, columns)| columns).unwrap_or_default();
        Ok(Self { sources, parts, joined: Joined::new(num_rows), columns, cache: Cache::new(cache_bytes) })
    }

    pub(super) fn columns(&self) -> &[String] {
        &self.columns
    }

    pub(super) fn len(&self) -> usize {
        self.joined.len()
    }

    pub(super) fn place(&self, index: usize) -> Result<Place> {
        let (part, row) = self.joined.locate(index)?;
        let (source, part) = self.parts[part];
        Ok(self.sources[source].place(part, row))
    }

    pub(super) fn get<T: DeserializeOwned>(&self, index: usize) -> Result<T> {
        let (key, row) = self.joined.locate(index)?;
        let (source, part) = self.parts[key];
        let source = &self.sources[source];
        let decoded = self.cache.get(key, source.part_bytes(part), || source.decode(part, row))?;
        let limit = source.limit(part);
        let budget = Budget::new(limit);
        let row_cells = Row { names: &self.columns, cells: S::cells(&decoded, row), budget: &budget };
        row_cells.to_value().map_err(|problem| {
            let too_large = RowProblem::TooLarge { what: "row", found: limit, limit, setting: S::LIMIT };
            let problem = if budget.is_spent() { too_large } else { problem };
            ReaderError::Row { place: source.place(part, row), problem }.into()
        })
    }
}
