//! Which layers of a model an adapter is for: PEFT's rules (`check_target_module_exists`, `get_pattern_key`).

use super::pattern::Pattern;
use super::{LoraConfig, Modules, TaskType};
use crate::error::lora::LoraErrorKind as Kind;
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// `target_modules` for all linear layers but the output layer.
const ALL_LINEAR: &str = "all-linear";

/// What computes a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// A product with a matrix.
    Linear,
    /// Rows of a table.
    Embedding,
    /// Something else, by its name.
    Other(String),
}

/// A layer of a model, as far as adapters are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerEntry {
    /// Its path, such as `layers.0.q_proj`.
    pub path: String,
    /// What it is.
    pub kind: LayerKind,
    /// Of its weight: `[out_features, in_features]`, or `[num_embeddings, embedding_dim]`.
    pub shape: [usize; 2],
    /// Has it a bias?
    pub has_bias: bool,
    /// Does it share its weight with an embedding? Then it is the output layer of a language model.
    pub is_tied: bool,
    /// Is its weight stored as `[in_features, out_features]`, as a `Conv1D` has it?
    pub is_transposed: bool,
}

impl LayerEntry {
    /// A layer without bias whose weight is its own.
    pub fn new(path: impl Into<String>, kind: LayerKind, shape: [usize; 2]) -> Self {
        Self { path: path.into(), kind, shape, has_bias: false, is_tied: false, is_transposed: false }
    }
}

/// A layer with its adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedLayer {
    /// Its position in the list that was resolved.
    pub layer: usize,
    /// The adapter's rank.
    pub r: usize,
    /// What its product is multiplied by.
    pub scaling: f64,
}

/// What a configuration means for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The layers that get the adapter.
    pub layers: Vec<AdaptedLayer>,
    /// Positions of the layers of which the adapter has a copy.
    pub saved: Vec<usize>,
    /// Has B a bias?
    pub lora_bias: bool,
    /// What of `target_modules`, `modules_to_save`, `rank_pattern` and `alpha_pattern` meant no layer: field and name.
    pub unmatched: Vec<(&'static str, String)>,
}

impl LoraConfig {
    /// Decides which of `layers` get the adapter, with which rank and factor.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): those of [`check`](Self::check); a pattern that cannot be used; no layer that is
    /// meant; a layer that is meant and cannot have an adapter.
    ///
    /// ```
    /// use accelerate_core::lora::{LayerEntry, LayerKind, LoraConfig};
    /// let layers = ["layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"]
    ///     .map(|path| LayerEntry::new(path, LayerKind::Linear, [4, 4]));
    /// let config = LoraConfig {
    ///     target_modules: Some(["q_proj"].into()),
    ///     rank_pattern: [("1.q_proj".to_owned(), 2)].into(),
    ///     ..Default::default()
    /// };
    /// let resolved = config.resolve(&layers)?;
    /// let ranks: Vec<_> = resolved.layers.iter().map(|adapted| (adapted.layer, adapted.r, adapted.scaling)).collect();
    /// assert_eq!(ranks, [(0, 8, 1.0), (2, 2, 4.0)]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn resolve(&self, layers: &[LayerEntry]) -> Result<Resolved> {
        self.check()?;
        let targets = Targets::new(self)?;
        let ranks = Overrides::new("rank_pattern", &self.rank_pattern)?;
        let alphas = Overrides::new("alpha_pattern", &self.alpha_pattern)?;
        let saved = self.saved(layers)?;
        let mut resolved =
            Resolved { layers: Vec::new(), saved: saved.clone(), lora_bias: self.lora_bias, unmatched: Vec::new() };
        let mut are_excluded = false;
        for (layer, entry) in layers.iter().enumerate() {
            if !targets.names(entry)? {
                continue;
            }
            if targets.excludes(&entry.path)? || saved.contains(&layer) {
                are_excluded = true;
                continue;
            }
            self.check_target(entry)?;
            let r = ranks.find(&entry.path)?.unwrap_or(self.r);
            let alpha = alphas.find(&entry.path)?.unwrap_or(self.lora_alpha);
            resolved.layers.push(AdaptedLayer { layer, r, scaling: self.scaling(r, alpha) });
        }
        if resolved.layers.is_empty() {
            let targets = self.target_modules.as_ref().map(ToString::to_string).unwrap_or_default();
            let known = layers.iter().map(|entry| entry.path.clone()).collect();
            return Err(Kind::NothingMatched { targets, are_excluded, known }.into());
        }
        resolved.unmatched = self.unmatched(layers);
        let paths: Vec<&str> = resolved.layers.iter().map(|own| layers[own.layer].path.as_str()).collect();
        resolved.unmatched.extend(ranks.unused("rank_pattern", &paths)?);
        resolved.unmatched.extend(alphas.unused("alpha_pattern", &paths)?);
        Ok(resolved)
    }

    fn check_target(&self, entry: &LayerEntry) -> Result<()> {
        match &entry.kind {
            LayerKind::Embedding if self.lora_bias => Err(Kind::BiasOfEmbedding { path: entry.path.clone() }.into()),
            LayerKind::Linear | LayerKind::Embedding => Ok(()),
            LayerKind::Other(kind) => {
                let targets = self.target_modules.as_ref().map(ToString::to_string).unwrap_or_default();
                Err(Kind::WrongKind { targets, path: entry.path.clone(), kind: kind.clone() }.into())
            }
        }
    }

    /// Layers that `modules_to_save` means.
    fn saved(&self, layers: &[LayerEntry]) -> Result<Vec<usize>> {
        let names = self.all_modules_to_save();
        let mut saved = Vec::new();
        for (layer, entry) in layers.iter().enumerate() {
            if !names.iter().any(|name| is_in_module(&entry.path, name)) {
                continue;
            }
            if let LayerKind::Other(kind) = &entry.kind {
                return Err(Kind::SavedKind { path: entry.path.clone(), kind: kind.clone() }.into());
            }
            saved.push(layer);
        }
        Ok(saved)
    }

    /// Names that were said and mean nothing. The heads of a task are not the user's words.
    fn unmatched(&self, layers: &[LayerEntry]) -> Vec<(&'static str, String)> {
        let mut unmatched = Vec::new();
        if let Some(Modules::List(names)) = &self.target_modules {
            let is_absent = |name: &&String| !layers.iter().any(|entry| ends_with(&entry.path, name));
            unmatched.extend(names.iter().filter(is_absent).map(|name| ("target_modules", name.clone())));
        }
        let is_absent = |name: &&String| !layers.iter().any(|entry| is_in_module(&entry.path, name));
        unmatched.extend(self.modules_to_save.iter().filter(is_absent).map(|name| ("modules_to_save", name.clone())));
        unmatched
    }
}

/// Is `name` the path, or the last parts of it?
fn ends_with(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Is the layer, or a module around it, one whose path ends so? Letter by letter, as in PEFT: `head` means `lm_head`, too.
fn is_in_module(path: &str, name: &str) -> bool {
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    ends.into_iter().any(|end| path[..end].ends_with(name))
}

/// The compiled form of what says which layers are meant.
struct Targets<'a> {
    config: &'a LoraConfig,
    target: Option<Pattern>,
    exclude: Option<Pattern>,
    /// Of the number of a layer.
    numbers: Vec<Pattern>,
}

impl<'a> Targets<'a> {
    fn new(config: &'a LoraConfig) -> Result<Self> {
        let pattern = |field, modules: &Option<Modules>| match modules {
            Some(Modules::Pattern(text)) => Pattern::full(field, text).map(Some),
            _ => Ok(None),
        };
        let numbers = match &config.layers_pattern[..] {
            [] => vec![Pattern::new("layers_pattern", "", r"\A.*?\.[^.]*\.(?P<idx>\d+)\.")?],
            patterns => {
                let number = |text: &String| {
                    Pattern::new("layers_pattern", text, &format!(r"\A(?:|.*?\.){text}\.(?P<idx>\d+)\."))
                };
                patterns.iter().map(number).collect::<Result<_>>()?
            }
        };
        let target = if config.is_all_linear() { None } else { pattern("target_modules", &config.target_modules)? };
        Ok(Self { config, target, exclude: pattern("exclude_modules", &config.exclude_modules)?, numbers })
    }

    fn names(&self, entry: &LayerEntry) -> Result<bool> {
        let path = &entry.path;
        if self.config.is_all_linear() {
            return Ok(entry.kind == LayerKind::Linear && !entry.is_tied && !self.config.is_head(path));
        }
        match (&self.target, &self.config.target_modules) {
            (Some(pattern), _) => pattern.matches(path),
            (None, Some(Modules::List(names))) if names.contains(path) => Ok(true),
            (None, Some(Modules::List(names))) => {
                Ok(names.iter().any(|name| ends_with(path, name)) && self.has_wanted_number(path)?)
            }
            (None, _) => Ok(false),
        }
    }

    fn has_wanted_number(&self, path: &str) -> Result<bool> {
        let wanted = &self.config.layers_to_transform;
        if wanted.is_empty() {
            return Ok(true);
        }
        for pattern in &self.numbers {
            if let Some(found) = pattern.index(path)? {
                return Ok(found.parse().is_ok_and(|number: usize| wanted.contains(&number)));
            }
        }
        Ok(false)
    }

    fn excludes(&self, path: &str) -> Result<bool> {
        match (&self.exclude, &self.config.exclude_modules) {
            (Some(pattern), _) => pattern.matches(path),
            (None, Some(Modules::List(names))) => Ok(names.iter().any(|name| ends_with(path, name))),
            (None, _) => Ok(false),
        }
    }
}

impl LoraConfig {
    /// Does `target_modules` stand for all linear layers?
    pub fn is_all_linear(&self) -> bool {
        matches!(&self.target_modules, Some(Modules::Pattern(text)) if text.eq_ignore_ascii_case(ALL_LINEAR))
    }

    /// Is this the output layer of a whole model, by its name?
    fn is_head(&self, path: &str) -> bool {
        match self.task_type {
            Some(TaskType::SeqCls) => ["score", "classifier"].contains(&path),
            _ => path == "lm_head",
        }
    }
}

/// Numbers for some layers, by pattern.
struct Overrides<T> {
    patterns: Vec<(Pattern, T)>,
}

impl<T: Copy> Overrides<T> {
    fn new(field: &'static str, numbers: &BTreeMap<String, T>) -> Result<Self> {
        let compiled = |(text, number): (&String, &T)| {
            Ok((Pattern::new(field, text, &format!(r"\A(?:.*\.)?(?:{text})\z"))?, *number))
        };
        Ok(Self { patterns: numbers.iter().map(compiled).collect::<Result<_>>()? })
    }

    /// Those that fit none of the paths.
    fn unused(&self, field: &'static str, paths: &[&str]) -> Result<Vec<(&'static str, String)>> {
        let mut unused = Vec::new();
        for (pattern, _) in &self.patterns {
            let is_used =
                paths.iter().try_fold(false, |found, path| Ok::<_, Error>(found || pattern.matches(path)?))?;
            unused.extend((!is_used).then(|| (field, pattern.text().to_owned())));
        }
        Ok(unused)
    }

    /// The first that fits.
    fn find(&self, path: &str) -> Result<Option<T>> {
        for (pattern, number) in &self.patterns {
            if pattern.matches(path)? {
                return Ok(Some(*number));
            }
        }
        Ok(None)
    }
}
