//! What belongs to one save of a folder, and how far it got.

use super::checksum::Checksum;
use super::shown::{shortened_reason, shown};
use super::version::{newer_version, other_format};
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

const FORMAT: &str = "accelerate-save";
const VERSION: u32 = 1;
const SUFFIX: &str = ".manifest.json";

/// The list of all files that one save wrote into a folder: weights, their index, and files of the user's own such as a
/// configuration. It is `model.manifest.json` beside weights that are called `model`.
///
/// A save writes every file under a temporary name first, then this manifest, then gives the files their names. Once the
/// manifest is there, the save counts: whoever finds files of it under their temporary names gives them their names. At last
/// the manifest is written once more without temporary names, so that the same save gives the same bytes.
///
/// ```
/// use accelerate_core::weight_files::{SaveManifest, SavedFile, temporary_prefix, TEMPORARY_SUFFIX};
/// let temporary_name = format!("{}0123abcd{TEMPORARY_SUFFIX}", temporary_prefix("model"));
/// let file = SavedFile { name: "config.json".into(), temporary_name: Some(temporary_name), bytes: 2, xxh3_128: "0".repeat(32), sample: "0".repeat(32) };
/// let manifest = SaveManifest::new(vec![file]);
/// assert_eq!(SaveManifest::from_json(&manifest.to_json()?, "model")?, manifest);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveManifest {
    format: String,
    version: u32,
    /// In the order in which they get their names.
    pub files: Vec<SavedFile>,
    /// Files of the save before it that go when these have their names. Empty in the manifest of a save that is over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outdated: Vec<String>,
}

/// A file of a [`SaveManifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Its name in the folder.
    pub name: String,
    /// What it is called until all files of the save are written. `None` in the manifest of a save that is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temporary_name: Option<String>,
    /// Its size.
    pub bytes: u64,
    /// The [`Checksum`] of its content.
    pub xxh3_128: String,
    /// The same of blocks at even distances in it, which is quick to compare and tells the weights of two models apart.
    pub sample: String,
}

impl SaveManifest {
    /// Of these files, in the order in which they get their names.
    pub fn new(files: Vec<SavedFile>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, files, outdated: Vec::new() }
    }

    /// A save over `earlier`, of which nothing is to be left.
    #[must_use]
    pub fn replacing(mut self, earlier: &Self) -> Self {
        let names = earlier.files.iter().map(|file| &file.name).chain(&earlier.outdated);
        self.outdated = names.filter(|name| self.file(name).is_none()).cloned().collect();
        self
    }

    /// The name of the manifest for weight files called `stem`.
    ///
    /// ```
    /// # use accelerate_core::weight_files::SaveManifest;
    /// assert_eq!(SaveManifest::file_name("model"), "model.manifest.json");
    /// ```
    pub fn file_name(stem: &str) -> String {
        format!("{stem}{SUFFIX}")
    }

    /// The stem of a manifest's file name: `model` of `model.manifest.json`.
    ///
    /// ```
    /// # use accelerate_core::weight_files::SaveManifest;
    /// assert_eq!(SaveManifest::stem("model.manifest.json"), Some("model"));
    /// assert_eq!(SaveManifest::stem("model.json"), None);
    /// ```
    pub fn stem(file_name: &str) -> Option<&str> {
        file_name.strip_suffix(SUFFIX).filter(|stem| !stem.is_empty() && !stem.starts_with('.'))
    }

    /// Reads the manifest that belongs to weights called `stem`.
    ///
    /// # Errors
    ///
    /// [`Error::is_weight_files`]: not such a manifest, one of a later version ([`Error::is_newer_version`]), a name that leads out of the folder or appears
    /// twice, or something that is not a checksum.
    pub fn from_json(json: &str, stem: &str) -> Result<Self> {
        // Not the parser's error itself, which repeats what it has found, however long that is.
        let parsed = serde_json::from_str(json).map_err(|cause| shortened_reason(&cause.to_string()));
        let checked = parsed.and_then(|manifest: Self| manifest.check(stem).map_or(Ok(manifest), Err));
        checked.map_err(|reason| newer_version(json, FORMAT, VERSION).unwrap_or(Kind::Manifest { reason }.into()))
    }

    /// Writes the manifest as JSON, indented by two, with a newline at the end.
    ///
    /// # Errors
    ///
    /// [`Error::is_weight_files`]: never in practice.
    pub fn to_json(&self) -> Result<String> {
        match serde_json::to_string_pretty(self) {
            Ok(json) => Ok(json + "\n"),
            Err(cause) => Err(Error::new(Kind::Manifest { reason: cause.to_string() }).caused_by(cause)),
        }
    }

    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&SavedFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Part number `part` of the files, of so many parts with about as many bytes each: the largest files go first, each to the part
    /// that has the fewest bytes. Each file is in one part.
    ///
    /// ```
    /// # use accelerate_core::weight_files::{SaveManifest, SavedFile};
    /// let file = |bytes: u64| SavedFile {
    ///     name: format!("{bytes}.json"), temporary_name: None, bytes, xxh3_128: "0".repeat(32), sample: "0".repeat(32),
    /// };
    /// let manifest = SaveManifest::new([3, 9, 4, 2].map(file).into());
    /// let bytes = |part| manifest.part(part, 2).iter().map(|file| file.bytes).collect::<Vec<_>>();
    /// assert_eq!([bytes(0), bytes(1)], [vec![9], vec![4, 3, 2]]);
    /// ```
    pub fn part(&self, part: usize, num_parts: usize) -> Vec<&SavedFile> {
        let mut files: Vec<&SavedFile> = self.files.iter().collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.bytes));
        let mut loads = vec![0u64; num_parts.max(1)];
        let mut own = Vec::new();
        for file in files {
            let Some((least, load)) = loads.iter_mut().enumerate().min_by_key(|(_, load)| **load) else { continue };
            *load = load.saturating_add(file.bytes);
            own.extend((least == part).then_some(file));
        }
        own
    }

    /// The manifest of the same save when it is over.
    pub fn finished(&self) -> Self {
        let files = self.files.iter().map(|file| SavedFile { temporary_name: None, ..file.clone() });
        Self::new(files.collect())
    }

    /// What is wrong with it, if anything.
    fn check(&self, stem: &str) -> Option<String> {
        if let Some(reason) = other_format((&self.format, self.version), (FORMAT, VERSION)) {
            return Some(reason);
        }
        let mut names = BTreeSet::new();
        for SavedFile { name, temporary_name, xxh3_128, sample, .. } in &self.files {
            let name_shown = shown(name);
            if !is_saved_file_name(name) {
                return Some(format!("`{name_shown}` is not the name of a file in its folder"));
            }
            if !names.insert(name) {
                return Some(format!("it lists `{name_shown}` twice"));
            }
            if let Some(found) = temporary_name
                && !is_temporary_file_of(found, stem)
            {
                let found = shown(found);
                return Some(format!("the temporary name of `{name_shown}` is `{found}`, which no save gives"));
            }
            if ![xxh3_128, sample].iter().all(|text| Checksum::is_written_as(text)) {
                let wanted = Checksum::NUM_DIGITS;
                return Some(format!("the checksum of `{name_shown}` is not {wanted} hexadecimal digits"));
            }
        }
        self.outdated.iter().find_map(|name| match names.contains(name) {
            true => Some(format!("it lists `{}` as new and as outdated", shown(name))),
            false if !is_saved_file_name(name) || Self::stem(name).is_some() => {
                Some(format!("`{}` is not the name of an outdated file in its folder", shown(name)))
            }
            false => None,
        })
    }
}

/// The blocks of a file that [`SavedFile::sample`] is the checksum of, one behind the other: 64 at even distances, of 4096 bytes
/// or all that the file has. Those of a short file overlap.
///
/// ```
/// use accelerate_core::weight_files::sample_blocks;
/// let blocks: Vec<_> = sample_blocks(1_000_000).collect();
/// assert_eq!((blocks.len(), &blocks[0], &blocks[63]), (64, &(0..4096), &(995_904..1_000_000)));
/// assert!(sample_blocks(3).all(|block| block == (0..3)));
/// ```
pub fn sample_blocks(num_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    const BLOCKS: u64 = 64;
    const BLOCK_BYTES: u64 = 4096;
    let last = num_bytes.saturating_sub(BLOCK_BYTES);
    (0..BLOCKS).map(move |number| {
        // As `last * number / (BLOCKS - 1)`, which could overflow.
        let at = last / (BLOCKS - 1) * number + last % (BLOCKS - 1) * number / (BLOCKS - 1);
        at..at + BLOCK_BYTES.min(num_bytes - at)
    })
}

/// Whether a save may write a file of this name: one in the folder itself, and not a hidden one.
///
/// ```
/// use accelerate_core::weight_files::is_saved_file_name;
/// assert!(is_saved_file_name("config.json"));
/// for other in ["", ".", "..", ".hidden", "a/b", "/etc/passwd", "nul\0"] {
///     assert!(!is_saved_file_name(other), "{other}");
/// }
/// ```
pub fn is_saved_file_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// What the temporary names of a save of weights called `stem` begin with. Random letters and [`TEMPORARY_SUFFIX`] follow.
///
/// ```
/// # use accelerate_core::weight_files::temporary_prefix;
/// assert_eq!(temporary_prefix("model"), ".model.");
/// ```
pub fn temporary_prefix(stem: &str) -> String {
    format!(".{stem}.")
}

/// What temporary names end with.
pub const TEMPORARY_SUFFIX: &str = ".saving";

/// Whether a file of this name was written by a save of weights called `stem` that has not given it its name.
///
/// ```
/// use accelerate_core::weight_files::is_temporary_file_of;
/// assert!(is_temporary_file_of(".model.x7Rt01.saving", "model"));
/// for other in ["model.safetensors", ".model.saving", ".model.a.b.saving", ".other.x7Rt01.saving", ".model.x7.tmp"] {
///     assert!(!is_temporary_file_of(other, "model"), "{other}");
/// }
/// ```
pub fn is_temporary_file_of(file_name: &str, stem: &str) -> bool {
    file_name
        .strip_prefix(&temporary_prefix(stem))
        .and_then(|rest| rest.strip_suffix(TEMPORARY_SUFFIX))
        .is_some_and(|random| !random.is_empty() && random.bytes().all(|letter| letter.is_ascii_alphanumeric()))
}
