//! What safetensors files say about themselves beside tensors: `__metadata__`.

use std::collections::{BTreeMap, BTreeSet};

/// What the `format` of PyTorch's files is.
const PYTORCH: &str = "pt";

/// The notes of safetensors files whose tensors come together: what all of them say alike. A file that does not say its `format` has
/// that of PyTorch, `pt`.
///
/// ```
/// use accelerate_core::weight_files::Notes;
/// let note = |key: &str, text: &str| (key.to_owned(), text.to_owned());
/// let mut notes = Notes::default();
/// notes.add([note("author", "me"), note("part", "1")].into());
/// notes.add([note("author", "me"), note("part", "2"), note("format", "pt")].into());
/// assert_eq!(notes.agreed(), [note("author", "me"), note("format", "pt")].into());
/// assert_eq!(notes.differing(), ["part"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// `None` before the first file.
    agreed: Option<BTreeMap<String, String>>,
    differing: BTreeSet<String>,
}

impl Notes {
    /// The key of the note that says in whose way tensors are named and laid out.
    pub const FORMAT: &str = "format";

    /// Takes the notes of one more file.
    pub fn add(&mut self, mut notes: BTreeMap<String, String>) {
        or_pytorch(&mut notes);
        let Some(agreed) = &mut self.agreed else {
            self.agreed = Some(notes);
            return;
        };
        let keys = agreed.keys().chain(notes.keys());
        let differing: Vec<String> = keys.filter(|key| agreed.get(*key) != notes.get(*key)).cloned().collect();
        for key in differing {
            agreed.remove(&key);
            self.differing.insert(key);
        }
    }

    /// The notes of a file that has the tensors of all of them. It says its `format` also where they say different ones, or are no
    /// safetensors files: `pt`.
    pub fn agreed(&self) -> BTreeMap<String, String> {
        let mut notes = self.agreed.clone().unwrap_or_default();
        or_pytorch(&mut notes);
        notes
    }

    /// The keys that some file has not, or has with another text.
    pub fn differing(&self) -> Vec<String> {
        self.differing.iter().cloned().collect()
    }
}

fn or_pytorch(notes: &mut BTreeMap<String, String>) {
    notes.entry(Notes::FORMAT.to_owned()).or_insert_with(|| PYTORCH.to_owned());
}
