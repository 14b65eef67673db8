//! Training and development rows, wherever the command line says that they come from.

use crate::arguments::Arguments;
use crate::corpus;
use crate::hub::{self, HubError};
use crate::readers::{self, DataError, Table};
use std::path::PathBuf;

/// The two parts of the data.
#[derive(Clone, Debug)]
pub struct Splits {
    /// What the model learns from.
    pub train: Table,
    /// What it is judged by.
    pub dev: Table,
}

/// The data cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SplitsError {
    /// A file is malformed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The Hub did not deliver.
    #[error(transparent)]
    Hub(#[from] HubError),
}

impl Splits {
    /// Reads the files or the data set that `arguments` name; makes the embedded corpus when they name none.
    ///
    /// Files from the Hub are kept in its cache, so a second process that asks later reads them from there.
    ///
    /// # Errors
    /// When a file is missing or malformed, or the Hub cannot be reached.
    ///
    /// ```
    /// use nlp_example::{arguments::Arguments, splits::Splits};
    ///
    /// let splits = Splits::load(&Arguments::parse_line(["nlp_example"])?)?;
    /// assert_eq!(splits.dev.rows.len(), 800);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load(arguments: &Arguments) -> Result<Self, SplitsError> {
        if let (Some(train), Some(dev)) = (&arguments.train_file, &arguments.validation_file) {
            return Ok(Self { train: readers::read(train)?, dev: readers::read(dev)? });
        }
        if let Some(name) = &arguments.dataset_name {
            let files = hub::dataset_files(name, arguments.dataset_config_name.as_deref())?;
            return Ok(Self { train: read_all(name, &files.train)?, dev: read_all(name, &files.dev)? });
        }
        let corpus = corpus::generate();
        Ok(Self { train: corpus.train, dev: corpus.dev })
    }
}

fn read_all(name: &str, paths: &[PathBuf]) -> Result<Table, DataError> {
    let mut rows = Vec::new();
    for path in paths {
        rows.extend(readers::read(path)?.rows);
    }
    Ok(Table { source: PathBuf::from(name), rows })
}
