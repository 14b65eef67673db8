//! A configuration file as a source: its keys become settings.

use super::{PartialRunConfig, settings};
use crate::Result;
use crate::config::cluster::NO_SAGEMAKER;
use crate::error::settings::SettingsErrorKind as Kind;
use crate::names::ComputeEnvironment;
use crate::settings::{Document, Node, NodeValue, Origin, Position, Setting, ValueKind, shortened, shortened_line};
use std::path::{Path, PathBuf};

/// What a configuration file says, and where.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    /// The file.
    pub path: PathBuf,
    pub(super) partial: PartialRunConfig,
    /// Settings with the places of their keys, in the order of the file. Answers have none.
    pub(super) places: Vec<(&'static Setting, Option<Position>)>,
}

/// Sections of the reference that are known by name. Empty ones are passed over.
const REFUSED_SECTIONS: [(&str, &str); 1] =
    [("megatron_lm_config", "Megatron-LM is not available; choose FSDP or a DeepSpeed configuration")];

/// Sections of the reference for other devices, which ask for nothing here.
const INERT_SECTIONS: [&str; 1] = ["ipex_config"];

impl ConfigFile {
    /// Reads `text`, the YAML or JSON of the file at `path`. Files of Python Accelerate are understood, those of old versions,
    /// too. Keys with `null` and sections without keys say nothing.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), naming file, line and column: what [`Document::parse`] refuses, keys that nobody
    /// knows (with the nearest one that is known), and values that are none.
    ///
    /// ```
    /// use accelerate_core::config::ConfigFile;
    /// let error = ConfigFile::read("mixed_precison: bf16\n", "run.yaml".as_ref()).unwrap_err().to_string();
    /// assert!(error.starts_with("run.yaml:1:1:") && error.contains("\"mixed_precision\""), "{error}");
    /// ```
    pub fn read(text: &str, path: &Path) -> Result<Self> {
        let (file, errors) = Self::read_up_to(1, text, path);
        errors.into_iter().next().map_or(Ok(file), Err)
    }

    /// The same, with the errors of the file in the order of its lines, at most 100 of them, and with what it says besides.
    ///
    /// ```
    /// use accelerate_core::config::ConfigFile;
    /// let (file, errors) = ConfigFile::read_all("num_proceses: 2\ndebug: true\nuse_cpu: maybe\n", "run.yaml".as_ref());
    /// assert_eq!(errors.len(), 2);
    /// assert_eq!(file.into_partial().cluster.debug, Some(true));
    /// ```
    pub fn read_all(text: &str, path: &Path) -> (Self, Vec<crate::Error>) {
        // Finding the nearest key takes time, and nobody reads more.
        Self::read_up_to(100, text, path)
    }

    fn read_up_to(most_errors: usize, text: &str, path: &Path) -> (Self, Vec<crate::Error>) {
        let mut file = Self { path: path.to_owned(), partial: PartialRunConfig::default(), places: Vec::new() };
        let root = match Document::parse(text, path) {
            Ok(document) => document.root,
            Err(error) => return (file, vec![error]),
        };
        let NodeValue::Mapping(entries) = &root.value else { return (file, Vec::new()) };
        if let Err(error) = file.refuse_sagemaker(entries) {
            return (file, vec![error]);
        }
        let errors = file.entries(entries).take(most_errors).collect();
        (file, errors)
    }

    /// Takes over what each key says, as long as somebody asks for the next error.
    fn entries(&mut self, entries: &[(String, Position, Node)]) -> impl Iterator<Item = crate::Error> {
        let flat = entries.iter().flat_map(|(key, position, node)| match &node.value {
            NodeValue::Mapping(inner) if is_section(key) => inner
                .iter()
                .map(|(inner, position, node)| (key.as_str(), inner.as_str(), *position, node))
                .collect::<Vec<_>>(),
            _ => vec![("", key.as_str(), *position, node)],
        });
        flat.filter_map(|(section, key, position, node)| match section {
            "" => self.entry(key, position, node).err(),
            section => self.key(section, key, position, node).err(),
        })
    }

    /// A key of the top level.
    fn entry(&mut self, key: &str, position: Position, node: &Node) -> Result<()> {
        if INERT_SECTIONS.contains(&key) {
            return Ok(());
        }
        match REFUSED_SECTIONS.iter().find(|(section, _)| *section == key) {
            Some((_, why)) if !node.is_null() => {
                let (found, origin) = ("a section with keys".to_owned(), self.origin(position).to_string());
                Err(Kind::Refused { name: key.to_owned(), found, origin, why }.into())
            }
            Some(_) => Ok(()),
            None if is_section(key) && node.is_null() => Ok(()),
            None if is_section(key) => {
                let (path, what) = (self.path.clone(), key.to_owned());
                Err(Kind::NotAMapping { path, position: node.position_beside(position), what }.into())
            }
            None => self.key("", key, position, node),
        }
    }

    /// The file that answers will be written to, before there is one.
    pub(crate) fn of_answers(said: &[(&'static Setting, String)]) -> Self {
        let places = said.iter().map(|(setting, _)| (*setting, None)).collect();
        Self { path: "your answers".into(), partial: PartialRunConfig::of_texts(said), places }
    }

    /// A file for Amazon SageMaker has keys of its own, so that is said before they are looked at.
    fn refuse_sagemaker(&self, entries: &[(String, Position, Node)]) -> Result<()> {
        let name = "compute_environment".to_owned();
        let Some((_, position, node)) = entries.iter().find(|(key, ..)| *key == name) else { return Ok(()) };
        match node.text().parse() {
            Ok(found @ ComputeEnvironment::AmazonSagemaker) => {
                let (found, origin) = (found.to_string(), self.origin(*position).to_string());
                Err(Kind::Refused { name, found, origin, why: NO_SAGEMAKER }.into())
            }
            _ => Ok(()),
        }
    }

    /// What the file says, without its places.
    pub fn into_partial(self) -> PartialRunConfig {
        self.partial
    }

    /// What the file says, in the order of its lines: settings, the texts of their values, and where their keys stand.
    ///
    /// ```
    /// use accelerate_core::config::ConfigFile;
    /// let file = ConfigFile::read("debug: yes\nfp16: true\n", "run.yaml".as_ref())?;
    /// let lines = file.said().map(|(setting, text, position)| (setting.path, text, position.map(|place| place.line)));
    /// let wanted = [("debug", "true".to_owned(), Some(1)), ("mixed_precision", "fp16".to_owned(), Some(2))];
    /// assert_eq!(lines.collect::<Vec<_>>(), wanted);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn said(&self) -> impl Iterator<Item = (&'static Setting, String, Option<Position>)> {
        self.places.iter().filter_map(|(setting, position)| Some((*setting, self.partial.text(setting)?, *position)))
    }

    /// The keys in `deepspeed_config`, in the order of their lines.
    pub(super) fn deepspeed_keys(&self) -> Vec<&'static str> {
        let of_section = self.places.iter().filter(|(setting, _)| setting.section == "deepspeed_config");
        let mut keys: Vec<_> = of_section.map(|(setting, position)| (*position, setting.key())).collect();
        keys.sort_unstable();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    pub(super) fn origin(&self, position: impl Into<Option<Position>>) -> Origin {
        Origin::File { path: self.path.clone(), position: position.into() }
    }

    fn key(&mut self, section: &str, key: &str, position: Position, node: &Node) -> Result<()> {
        let of_section = || settings().filter(|setting| setting.section == section && !setting.is_code_only());
        let (setting, text) =
            match (of_section().find(|setting| setting.has_key(key)), old_spelling(section, key, node)) {
                (Some(setting), _) => (setting, node.text()),
                (None, Some((path, text))) => match settings().find(|setting| setting.path == path) {
                    Some(setting) => (setting, text),
                    None => return Ok(()),
                },
                (None, None) => {
                    let known = of_section().map(Setting::key);
                    return Err(self.unknown(section, key, position, known));
                }
            };
        if node.is_null() || !crate::settings::says_something(setting, &text) {
            return Ok(());
        }
        if let Some(found) = wrong_shape(setting, node) {
            let (path, key) = (self.path.clone(), key.to_owned());
            return Err(Kind::Shape {
                path,
                position: node.position_beside(position),
                key,
                found,
                wanted: setting.wanted(),
            }
            .into());
        }
        let before = self.partial.text(setting);
        if !self.partial.say(setting, &text) {
            let (path, key, found) = (self.path.clone(), key.to_owned(), shortened(&text));
            return Err(Kind::FileValue {
                path,
                position: node.position_beside(position),
                key,
                found,
                wanted: setting.wanted_for(&text),
            }
            .into());
        }
        let said = self.places.iter().find(|(known, _)| known.path == setting.path).map(|(_, first)| *first);
        if let (Some(first), true) = (said, before != self.partial.text(setting)) {
            let (first_origin, second_origin) = (self.origin(first).to_string(), self.origin(position).to_string());
            let why = "one setting is said twice; keep one of the two";
            let (first, second) = (shortened_line(&before.unwrap_or_default()), shortened_line(&text));
            let first = format!("{} {first}", setting.path);
            return Err(Kind::Contradiction { first, first_origin, second, second_origin, why }.into());
        }
        self.places.push((setting, Some(position)));
        Ok(())
    }

    fn unknown(
        &self,
        section: &str,
        key: &str,
        position: Position,
        known: impl Iterator<Item = &'static str>,
    ) -> crate::Error {
        let place = if section.is_empty() { "in a configuration file".to_owned() } else { format!("in {section}") };
        let sections = settings().map(|setting| setting.section).filter(|_| section.is_empty());
        let prefix = settings().find(|setting| setting.section == section).map_or("", |setting| setting.key_prefix);
        // Either of the two may have the prefix, and it says nothing about which key was meant.
        let bare = |key: &'static str| key.strip_prefix(prefix).unwrap_or(key);
        let known: Vec<_> = known.chain(sections).collect();
        let word = key.strip_prefix(prefix).unwrap_or(key);
        let nearest_bare = nearest(word, known.iter().map(|key| bare(key)));
        let nearest_key =
            nearest_bare.and_then(|nearest| known.iter().find(|key| bare(key) == nearest)).map(|key| (*key).to_owned());
        let elsewhere = settings().find(|setting| !setting.is_code_only() && setting.has_key(key));
        let home = elsewhere.map(|setting| setting.section).filter(|home| *home != section);
        let path = self.path.clone();
        Kind::UnknownKey { path, position, key: shortened(key), place, hint: hint(home, nearest_key.as_deref()) }.into()
    }
}

fn is_section(key: &str) -> bool {
    settings().any(|setting| !setting.section.is_empty() && setting.section == key)
}

/// What to do about a key that is not known: move it home, or correct it.
fn hint(home: Option<&'static str>, nearest_key: Option<&str>) -> String {
    match (home, nearest_key) {
        (Some(""), _) => "; it belongs to the top level of the file".to_owned(),
        (Some(section), _) => format!("; it belongs to the section {section:?}"),
        (None, Some(nearest)) => format!("; the nearest one is {nearest:?}"),
        (None, None) => String::new(),
    }
}

/// The number that Python's reader of YAML takes a number for that begins with a zero, if that is another one.
fn octal(text: &str) -> Option<u64> {
    let digits = text.strip_prefix('0').filter(|digits| !digits.is_empty())?;
    let number = u64::from_str_radix(digits, 8).ok()?;
    (digits.parse() != Ok(number)).then_some(number)
}

/// What a value is, where the setting has no such values: a list or an object, or a number that Python reads as another one.
fn wrong_shape(setting: &Setting, node: &Node) -> Option<String> {
    let name = |node: &Node| match &node.value {
        _ if node.is_null() => Some("nothing"),
        NodeValue::Scalar { .. } => None,
        NodeValue::List(_) => Some("a list"),
        NodeValue::Mapping(_) => Some("an object"),
    };
    match &node.value {
        NodeValue::Scalar { is_quoted: true, .. } => None,
        NodeValue::Scalar { text, is_quoted: false } => octal(text)
            .map(|number| format!("{text} (which Python reads as {number}; write it without the 0 before it)")),
        NodeValue::Mapping(_) if setting.takes_object() => None,
        NodeValue::List(items) if matches!(setting.kind, ValueKind::List | ValueKind::Text) => {
            let wrong = items.iter().enumerate().find_map(|(index, item)| Some((index + 1, name(item)?)));
            wrong.map(|(number, found)| format!("a list whose element {number} is {found}"))
        }
        _ => name(node).map(str::to_owned),
    }
}

/// The known word that was most likely meant.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    // Longer words are no slip of the hand, and comparing them would take time.
    if word.len() > 100 {
        return None;
    }
    let scored = known.map(|known| (strsim::jaro_winkler(word, known), known)).filter(|(score, _)| *score > 0.8);
    scored.max_by(|(first, _), (second, _)| first.total_cmp(second)).map(|(_, known)| known.to_owned())
}

/// Keys that old versions of the reference wrote: the path of the setting that they are today, and its value.
fn old_spelling(section: &str, key: &str, node: &Node) -> Option<(&'static str, String)> {
    match (section, key) {
        ("", "fp16") => {
            let precision = match crate::environment::str_to_bool(&node.text()) {
                Some(true) => "fp16".to_owned(),
                // Newer files say it by mixed_precision, and this one says nothing against that.
                Some(false) => String::new(),
                None => node.text(),
            };
            Some(("mixed_precision", precision))
        }
        ("", "dynamo_backend") => Some(("dynamo_config.backend", node.text())),
        ("", "gradient_accumulation_steps") => Some(("gradient_accumulation_config.num_steps", node.text())),
        _ => None,
    }
}
