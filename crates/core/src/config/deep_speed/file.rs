//! Where the keys of a configuration stand in its file.

use crate::files::ShownPath;
use crate::settings::{Document, Node, NodeValue, Position, shortened};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The most bytes of a key with its sections.
const LONGEST_KEY: usize = 256;

/// The file of a DeepSpeed configuration: messages name the places of its keys.
///
/// ```
/// use accelerate_core::config::{DeepSpeedSettings, ZeroStage};
/// let plugin = DeepSpeedSettings {
///     hf_ds_config: Some("ds.json".parse()?),
///     zero_stage: Some(ZeroStage::Gradients),
///     ..Default::default()
/// };
/// let file = "{\n  \"zero_optimization\": {\n    \"stage\": 3\n  }\n}";
/// let error = plugin.config(&|_| Ok(file.to_owned())).unwrap_err();
/// assert!(error.to_string().contains("zero_optimization.stage is 3 (ds.json:3:5)"), "{error}");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeepSpeedFile {
    /// The file.
    pub path: PathBuf,
    /// Places of keys with their sections before them. Keys that are longer than any that is known are left out.
    pub positions: BTreeMap<String, Position>,
}

impl DeepSpeedFile {
    /// The places of the keys in `text`, which is JSON and so also YAML. Where that reader gives up there are none.
    pub(super) fn of(path: &Path, text: &str) -> Self {
        let mut file = Self { path: path.to_owned(), ..Self::default() };
        if let Ok(document) = Document::parse(text, path) {
            file.note("", &document.root);
        }
        file
    }

    fn note(&mut self, prefix: &str, node: &Node) {
        let NodeValue::Mapping(entries) = &node.value else { return };
        for (key, position, node) in entries {
            if prefix.len() + key.len() > LONGEST_KEY {
                continue;
            }
            let key = format!("{prefix}{key}");
            self.note(&format!("{key}."), node);
            self.positions.insert(key, *position);
        }
    }

    /// Where `key` stands: it, or where it is missing the section in which it belongs.
    pub(crate) fn position(&self, key: &str) -> Option<Position> {
        let mut key = key;
        loop {
            if let Some(position) = self.positions.get(key) {
                return Some(*position);
            }
            key = key.rsplit_once('.')?.0;
        }
    }

    /// The place of `key`, or only the file.
    pub(super) fn place(&self, key: &str) -> String {
        let path = shortened(&self.path.shown());
        self.position(key).map_or_else(|| path.clone(), |position| format!("{path}:{position}"))
    }
}
