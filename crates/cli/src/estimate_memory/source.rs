//! Where a model's files are: in a folder of this machine, in the cache of the Hub, or on the Hub.

use std::path::Path;

use accelerate_core::files::ShownPath;
use accelerate_core::plan::{Inventory, TransformerShape};
use accelerate_core::tensor_parallel::KnownModel;
use accelerate_core::weight_files::Header;
use serde::Serialize;

use super::error::EstimateError;
use super::hub::{Cache, HubId, HubSettings, Repository};
use super::weights::{self, Chosen};

const CONFIG: &str = "config.json";

/// Files that lie side by side, known by their names.
pub(super) trait ModelFiles: Sync {
    /// Where the file of this name is, for messages.
    fn place(&self, name: &str) -> String;
    /// The names of all files.
    fn names(&self) -> Result<Vec<String>, EstimateError>;
    fn has(&self, name: &str) -> bool;
    /// The header of a safetensors file.
    fn header(&self, name: &str) -> Result<Header, EstimateError>;
    /// All of a file of text, which may have `most_bytes`.
    fn text(&self, name: &str, most_bytes: u64) -> Result<String, EstimateError>;
    /// How many files are read at the same time.
    fn num_readers(&self) -> usize;
}

/// Which of the places a model was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    Local,
    Cache,
    Hub,
}

/// A model that was found.
pub(super) struct Model {
    pub(super) origin: Origin,
    /// The folder or file, or the address of the commit.
    pub(super) place: String,
    pub(super) inventory: Inventory,
    files: Box<dyn ModelFiles>,
}

impl Model {
    /// What exists on disk under this name, else the model of this name in the cache, else that on the Hub.
    pub(super) fn find(
        name: &Path,
        settings: impl FnOnce() -> Result<HubSettings, EstimateError>,
    ) -> Result<Self, EstimateError> {
        if name.symlink_metadata().is_ok() {
            return Self::read(Origin::Local, name.shown(), weights::local(name)?);
        }
        let absent = || EstimateError::NoSuchModel { path: name.to_owned() };
        let id = name.to_str().and_then(HubId::parse).ok_or_else(absent)?;
        let settings = settings()?;
        let cached = Self::in_cache(&id, settings.cache.as_ref());
        match cached {
            Some(Ok(model)) => Ok(model),
            Some(Err(incomplete)) if !incomplete.is_incomplete() => Err(incomplete),
            cached if settings.is_offline => {
                let cache = settings.cache.map(|cache| cache.0);
                let source = cached.and_then(Result::err).map(Box::new);
                Err(EstimateError::Offline { id: id.to_string(), cache, source })
            }
            _ => {
                let repository = Repository::open(id, &settings)?;
                let place = repository.place("");
                let names = repository.names()?;
                let first = weights::choose(&repository, &names)?;
                Self::read(Origin::Hub, place.trim_end_matches('/').to_owned(), (Box::new(repository), first))
            }
        }
    }

    fn in_cache(id: &HubId, cache: Option<&Cache>) -> Option<Result<Self, EstimateError>> {
        let folder = cache?.snapshot(id)?;
        let read = |found| Self::read(Origin::Cache, folder.shown(), found);
        Some(weights::local(&folder).and_then(read))
    }

    fn read(origin: Origin, place: String, (files, first): Chosen) -> Result<Self, EstimateError> {
        let inventory = weights::inventory(files.as_ref(), &first)?;
        Ok(Self { origin, place, inventory, files })
    }

    /// What its `config.json` says of its size.
    pub(super) fn transformer(&self) -> Result<TransformerShape, EstimateError> {
        let what = "how large the activations of a transformer are";
        self.of_config(what, "--batch_size and --sequence_length", TransformerShape::from_config)
    }

    /// How ranks divide its layers, by its `config.json`.
    pub(super) fn tensor_parallel(&self) -> Result<KnownModel, EstimateError> {
        self.of_config("how ranks divide its layers", "--parallelism_config_tp_size", KnownModel::from_config)
    }

    fn of_config<T>(
        &self,
        what: &'static str,
        flags: &'static str,
        read: impl Fn(&str) -> accelerate_core::Result<T>,
    ) -> Result<T, EstimateError> {
        let place = self.files.place(CONFIG);
        if !self.files.has(CONFIG) {
            return Err(EstimateError::NoConfig { place, what, flags });
        }
        let text = self.files.text(CONFIG, TransformerShape::MAX_CONFIG_BYTES)?;
        read(&text).map_err(|source| EstimateError::Config { place, what, source })
    }

    /// Which of several possible places was taken; nothing where the name can only be a path.
    pub(super) fn explanation(&self, name: &Path) -> Option<String> {
        let id = name.to_str().and_then(HubId::parse)?;
        let Self { place, .. } = self;
        Some(match self.origin {
            Origin::Local => {
                format!("{id} is what lies on this disk, which comes before a model of that name on the Hub")
            }
            Origin::Cache => format!("{id} is in the cache, so that the Hub was not asked: {place}"),
            Origin::Hub => format!("{id} is on the Hub, and only headers were fetched: {place}"),
        })
    }
}
