//! Tensor parallelism: which layers of a model several ranks compute together, and which part of each a rank has.
//!
//! Method: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv 1909.08053.
//! Styles have the names that Hugging Face Transformers gives them, in its versions 4 and 5.

mod known;
mod stack;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use known::KnownModel;

use crate::error::tensor_parallel::TensorParallelErrorKind as Kind;
use crate::error::{Error, Result};
use crate::names::spelled_enum;
use serde_json::{Map, Value};
use std::ops::Range;

spelled_enum! {
    /// How ranks divide a layer.
    ///
    /// ```
    /// use accelerate_core::tensor_parallel::ParallelStyle;
    /// assert_eq!("colwise_rep".parse::<ParallelStyle>()?, ParallelStyle::ColwiseGatherOutput);
    /// assert_eq!(ParallelStyle::Rowwise.as_str(), "rowwise");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ParallelStyle, "style of tensor parallelism" {
        /// Each rank has some of the output features of a linear layer. Its input is the same on all ranks, and its output stays
        /// divided along the last dim.
        Colwise = "colwise" | "ColwiseParallel",
        /// The same, and all ranks get all of the output.
        ColwiseGatherOutput = "colwise_gather_output" | "colwise_rep",
        /// Colwise for a layer whose output features are several equal parts one after the other, such as queries, keys and values:
        /// each rank has some of each part.
        PackedColwise = "packed_colwise",
        /// Each rank has some of the input features of a linear layer. Its input is divided along the last dim, as a colwise layer
        /// leaves it, and the sum over ranks is the output of all of them.
        Rowwise = "rowwise" | "RowwiseParallel",
        /// The same with an input that all ranks have in full.
        RowwiseSplitInput = "rowwise_split_input" | "rowwise_rep",
        /// Each rank has some rows of an embedding, and all ranks get the rows that are asked for.
        EmbeddingRowwise = "embedding_rowwise" | "vocab_parallel_rowwise",
        /// Each rank has some columns of an embedding, and all ranks get full rows.
        EmbeddingColwise = "embedding_colwise",
        /// Every rank has the whole layer.
        Replicate = "replicate",
        /// Every rank has the whole layer and computes a part of what it computes, such as a norm within the heads that the rank has:
        /// gradients are summed over ranks.
        ReplicateWithGradAllReduce = "replicated_with_grad_allreduce",
        /// Every rank has the whole layer, a norm, a dropout or an embedding of positions, and computes some of the tokens: see
        /// [`TensorParallelPlan::divides_sequence`].
        SequenceParallel = "sequence_parallel" | "SequenceParallel",
    }
}

/// Styles of Transformers that are known by name alone, and why.
const NOT_AVAILABLE: &[(&str, &str)] = &[
    ("packed_rowwise", "it divides the experts of a mixture, which are not available"),
    ("local_packed_rowwise", "it divides the experts of a mixture, which are not available"),
    ("local_colwise", "it divides the experts of a mixture, which are not available"),
    ("local_rowwise", "it divides the experts of a mixture, which are not available"),
    ("local", "it divides the experts of a mixture, which are not available"),
    ("gather", "it divides the experts of a mixture, which are not available"),
    ("all_reduce", "it divides the experts of a mixture, which are not available"),
    ("moe_tp_experts", "mixtures of experts are not available"),
    ("grouped_gemm", "mixtures of experts are not available"),
    ("ep_router", "mixtures of experts are not available"),
    ("ep_dispatch_experts", "mixtures of experts are not available"),
];

impl ParallelStyle {
    /// Does it divide the output features of a linear layer?
    pub fn is_colwise(self) -> bool {
        matches!(self, Self::Colwise | Self::ColwiseGatherOutput | Self::PackedColwise)
    }

    /// Does it divide the input features of a linear layer?
    pub fn is_rowwise(self) -> bool {
        matches!(self, Self::Rowwise | Self::RowwiseSplitInput)
    }

    /// Has every rank the whole layer?
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Replicate | Self::ReplicateWithGradAllReduce | Self::SequenceParallel)
    }

    fn is_embedding(self) -> bool {
        matches!(self, Self::EmbeddingRowwise | Self::EmbeddingColwise)
    }
}

/// What a plan says of the layers of one pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRule {
    /// How ranks divide the layer.
    pub style: ParallelStyle,
    /// How many features stay together, such as those of a head of attention. Default: 1.
    pub unit: usize,
    /// Of how many equal parts the output features of a [`PackedColwise`](ParallelStyle::PackedColwise) layer consist. Default: 2.
    pub parts: usize,
    /// Do all ranks get all tokens of what a [`SequenceParallel`](ParallelStyle::SequenceParallel) layer computes, because what
    /// follows is not divided? In files `"output_layouts": "Replicate"`, as in torch. Default: no.
    pub gathers_tokens: bool,
}

impl LayerRule {
    /// The same, and all ranks get all tokens of the output.
    #[must_use]
    pub fn with_all_tokens(self) -> Self {
        Self { gathers_tokens: true, ..self }
    }

    /// The same, where so many features stay together.
    #[must_use]
    pub fn with_unit(self, unit: usize) -> Self {
        Self { unit, ..self }
    }

    /// The same for output features of so many equal parts.
    #[must_use]
    pub fn with_parts(self, parts: usize) -> Self {
        Self { parts, ..self }
    }

    /// `"colwise"`, or `{"style": "colwise", "unit": 64}`.
    fn of_json(pattern: &str, value: &Value) -> Result<Self> {
        let malformed = || Kind::MalformedRule { pattern: pattern.to_owned(), found: value.to_string() };
        let style = |text: &str| {
            if let Some((_, why)) = NOT_AVAILABLE.iter().find(|(name, _)| *name == text) {
                let (pattern, style) = (pattern.to_owned(), text.to_owned());
                return Err(Error::from(Kind::StyleNotAvailable { pattern, style, why }));
            }
            text.parse::<ParallelStyle>()
        };
        match value {
            Value::String(text) => Ok(style(text)?.into()),
            Value::Object(fields) => {
                let known = ["style", "unit", "parts", "output_layouts"];
                let text = fields.get("style").and_then(Value::as_str).ok_or_else(malformed)?;
                if fields.keys().any(|key| !known.contains(&key.as_str())) {
                    return Err(malformed().into());
                }
                let number = |key: &str, default: usize| match fields.get(key) {
                    None => Ok(default),
                    Some(number) => number.as_u64().and_then(|it| usize::try_from(it).ok()).ok_or_else(malformed),
                };
                let rule = Self::from(style(text)?);
                let gathers_tokens = match fields.get("output_layouts").map(Value::as_str) {
                    None => false,
                    Some(Some("Replicate")) if rule.style == ParallelStyle::SequenceParallel => true,
                    Some(_) => return Err(malformed().into()),
                };
                let (unit, parts) = (number("unit", rule.unit)?, number("parts", rule.parts)?);
                Ok(Self { unit, parts, gathers_tokens, ..rule })
            }
            _ => Err(malformed().into()),
        }
    }
}

impl From<ParallelStyle> for LayerRule {
    fn from(style: ParallelStyle) -> Self {
        let parts = if style == ParallelStyle::PackedColwise { 2 } else { 1 };
        Self { style, unit: 1, parts, gathers_tokens: false }
    }
}

/// How the layers of a model are divided: rules by patterns of paths (`tp_plan` of Transformers).
///
/// A pattern is a path such as `model.layers.*.mlp.up_proj`, in which `*` stands for any one component. The first component of
/// the path may be left out, as in Transformers the name of the base model, unless the pattern is the whole path of another layer.
///
/// ```
/// use accelerate_core::tensor_parallel::{LayerEntry, LayerKind, ParallelStyle, TensorParallelPlan};
/// let plan = TensorParallelPlan::default()
///     .with("layers.*.up", ParallelStyle::Colwise)
///     .with("layers.*.down", ParallelStyle::Rowwise);
/// let layers = [("layers.0.up", [10, 4]), ("layers.0.down", [4, 10])]
///     .map(|(path, sizes)| LayerEntry::new(path, LayerKind::Linear, sizes));
/// let divided = plan.divide(&layers, 3)?;
/// assert_eq!(divided[0].slices, [0..4, 4..7, 7..10]);
/// assert_eq!(divided[1].slices, divided[0].slices);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorParallelPlan {
    rules: Vec<(String, LayerRule)>,
    /// Those that count for layers that no other rule is for: the model's, where the program has rules of its own.
    fallback: Vec<(String, LayerRule)>,
    /// Those that count where tokens are to be divided, too.
    sequence_rules: Vec<(String, LayerRule)>,
    /// The rules of the model count as well, or those that names of layers suggest.
    auto: Option<AutoPlan>,
}

/// What the program says where it asks for a plan by `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AutoPlan {
    head_dim: Option<usize>,
}

/// In the place of a pattern: the plan of the model counts, or that of [`TensorParallelPlan::of_stack`].
const AUTO: &str = "auto";

impl AutoPlan {
    /// `{}`, or `{"head_dim": 64}`.
    fn of_json(value: &Value) -> Result<Self> {
        let head_dim = match value.as_object().map(|fields| (fields.len(), fields.get("head_dim"))) {
            Some((0, _)) => Some(None),
            Some((1, Some(width))) => width.as_u64().and_then(|width| usize::try_from(width).ok()).map(Some),
            _ => None,
        };
        match head_dim {
            Some(head_dim) => Ok(Self { head_dim }),
            None => Err(Kind::MalformedAuto { found: value.to_string() }.into()),
        }
    }
}

/// What computes a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// A product with a matrix.
    Linear,
    /// Rows of a table.
    Embedding,
    /// Something else, by its name.
    Other(&'static str),
}

/// A layer of a model, as far as plans are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerEntry {
    /// Its path, such as `layers.0.up`.
    pub path: String,
    /// What it is.
    pub kind: LayerKind,
    /// Of its weight: `[out_features, in_features]`, or `[num_embeddings, embedding_dim]`.
    pub sizes: [usize; 2],
    /// The name of its weight, which layers may share.
    pub weight: String,
}

impl LayerEntry {
    /// A layer with a weight of its own.
    pub fn new(path: impl Into<String>, kind: LayerKind, sizes: [usize; 2]) -> Self {
        let path = path.into();
        Self { weight: format!("{path}.weight"), path, kind, sizes }
    }
}

/// A layer that ranks divide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DividedLayer {
    /// Its position in the list that was divided.
    pub layer: usize,
    /// How.
    pub style: ParallelStyle,
    /// Of how many equal parts the divided features consist.
    pub parts: usize,
    /// By rank: which features of each part it has. Output features of colwise styles, input features of rowwise ones; of an
    /// embedding rows or columns. Empty for a layer that each rank has whole.
    pub slices: Vec<Range<usize>>,
    /// As in its [`LayerRule`].
    pub gathers_tokens: bool,
}

impl DividedLayer {
    /// Which of the weight's sizes, as a [`LayerEntry`] has them, is divided.
    pub fn size_index(&self) -> usize {
        match self.style {
            ParallelStyle::Rowwise | ParallelStyle::RowwiseSplitInput | ParallelStyle::EmbeddingColwise => 1,
            _ => 0,
        }
    }
}

impl TensorParallelPlan {
    /// The same with one more rule.
    #[must_use]
    pub fn with(mut self, pattern: impl Into<String>, rule: impl Into<LayerRule>) -> Self {
        self.rules.push((pattern.into(), rule.into()));
        self
    }

    /// The same with one more rule that counts only once [`with_sequence_parallelism`](Self::with_sequence_parallelism) is called.
    #[must_use]
    pub fn with_sequence_rule(mut self, pattern: impl Into<String>, rule: impl Into<LayerRule>) -> Self {
        self.sequence_rules.push((pattern.into(), rule.into()));
        self
    }

    /// The same where ranks divide the tokens between divided layers, too: with its rules for that, or with those of `known` if it has
    /// none.
    ///
    /// ```
    /// use accelerate_core::tensor_parallel::{ParallelStyle, TensorParallelPlan};
    /// let plan = TensorParallelPlan::llama(64, 1);
    /// assert!(!plan.divides_sequence());
    /// assert!(plan.with_sequence_parallelism(None)?.divides_sequence());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): neither has any, and no rule of this plan is
    /// [`SequenceParallel`](ParallelStyle::SequenceParallel).
    pub fn with_sequence_parallelism(mut self, known: Option<&Self>) -> Result<Self> {
        let rules = match known {
            Some(known) if self.sequence_rules.is_empty() => known.sequence_rules.clone(),
            _ => std::mem::take(&mut self.sequence_rules),
        };
        self.fallback.extend(rules);
        if self.divides_sequence() { Ok(self) } else { Err(Kind::NoSequenceRules.into()) }
    }

    /// Do ranks divide the tokens of what is between divided layers? They do as soon as one layer is
    /// [`SequenceParallel`](ParallelStyle::SequenceParallel). A rowwise layer and an embedding then leave some tokens to each rank, and
    /// a colwise layer collects them: what is kept for the backward pass becomes less, and as much travels as without
    /// (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198).
    pub fn divides_sequence(&self) -> bool {
        self.all_rules().any(|(_, rule)| rule.style == ParallelStyle::SequenceParallel)
    }

    fn all_rules(&self) -> impl Iterator<Item = &(String, LayerRule)> {
        self.rules.iter().chain(&self.fallback)
    }

    /// Has it no rule?
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.auto.is_none()
    }

    /// The rules that count for a model with these layers: the plan's own, and where it says `auto`, for all layers that these are not
    /// for, those of `known`, the plan that the model brings, or else of [`of_stack`](Self::of_stack). An empty plan is that of the model.
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): there is no rule, and nobody has said `auto`; those of `of_stack`.
    pub fn for_layers(mut self, known: Option<&Self>, layers: &[LayerEntry]) -> Result<Self> {
        let found = match (self.auto.take(), known) {
            (None, None) if self.rules.is_empty() => return Err(Kind::NoPlan.into()),
            (None, None) => return Ok(self),
            (None, Some(known)) if !self.rules.is_empty() => return Ok(self.with_units_of(known, layers)),
            (_, Some(known)) => known.clone(),
            (Some(auto), None) => Self::of_stack(layers, auto.head_dim)?,
        };
        self.fallback.extend(found.rules.into_iter().chain(found.fallback));
        if self.sequence_rules.is_empty() {
            self.sequence_rules = found.sequence_rules;
        }
        Ok(self)
    }

    /// The plan of a configuration file: styles by pattern. A value is `"colwise"`, or
    /// `{"style": "packed_colwise", "parts": 3, "unit": 64}`. `"auto": {}` or `"auto": {"head_dim": 64}` in the place of a pattern asks
    /// for the plan of the model, or for that of [`of_stack`](Self::of_stack).
    ///
    /// ```
    /// use accelerate_core::tensor_parallel::{ParallelStyle, TensorParallelPlan};
    /// let map = serde_json::json!({ "layers.*.up": "colwise", "layers.*.down": { "style": "rowwise", "unit": 64 } });
    /// let plan = TensorParallelPlan::from_json(map.as_object().unwrap())?;
    /// assert!(!plan.is_empty());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): a style that is not known or not available, by its pattern.
    pub fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let rules = map.iter().filter(|(pattern, _)| *pattern != AUTO);
        let rules = rules.map(|(pattern, value)| Ok((pattern.clone(), LayerRule::of_json(pattern, value)?)));
        let auto = map.get(AUTO).map(AutoPlan::of_json).transpose()?;
        Ok(Self { rules: rules.collect::<Result<_>>()?, auto, ..Self::default() })
    }

    /// The same with the units and parts of `known` where this plan divides the same layers in the same direction and says none of
    /// its own: a model knows which features are a head.
    #[must_use]
    pub fn with_units_of(mut self, known: &Self, layers: &[LayerEntry]) -> Self {
        for (pattern, rule) in &mut self.rules {
            let is_same = |other: &LayerRule| {
                (rule.style.is_colwise() && other.style.is_colwise())
                    || (rule.style.is_rowwise() && other.style.is_rowwise())
            };
            let pattern = Pattern::new(pattern, layers);
            let own = layers.iter().filter(|layer| pattern.is_of(&layer.path));
            let of_layer = |layer: &LayerEntry| {
                let rules = known.all_rules().filter(|(pattern, _)| Pattern::new(pattern, layers).is_of(&layer.path));
                rules.map(|(_, rule)| *rule).find(is_same)
            };
            let Some(other) = own.filter_map(of_layer).next() else { continue };
            // A gathered output is in order whatever its parts are.
            if rule.unit == 1 && rule.style != ParallelStyle::ColwiseGatherOutput {
                rule.unit = other.unit;
            }
            // A number of parts that is not the usual one was given by the program.
            let leaves_parts_open = match rule.style {
                ParallelStyle::Colwise => true,
                ParallelStyle::PackedColwise => rule.parts == LayerRule::from(rule.style).parts,
                _ => false,
            };
            if other.style == ParallelStyle::PackedColwise && leaves_parts_open {
                (rule.style, rule.parts) = (other.style, other.parts);
            }
        }
        self
    }

    /// The rules that are for one of these layers: a head that shares the embedding's weight is not in files.
    fn of_layers(mut self, layers: &[LayerEntry]) -> Self {
        self.rules.retain(|(pattern, _)| layers.iter().any(|layer| Pattern::new(pattern, layers).is_of(&layer.path)));
        self
    }

    /// Which features of each layer each of `tp_size` ranks has. Sizes need not divide evenly: the first ranks have one unit more.
    /// Layers that stay whole are not listed.
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): a pattern that is the path of no layer; two rules for one layer, or for two layers
    /// that share a weight; a style that is not for such a layer; features that are no whole units, or fewer units than ranks.
    pub fn divide(&self, layers: &[LayerEntry], tp_size: usize) -> Result<Vec<DividedLayer>> {
        for (pattern, rule) in self.all_rules() {
            if rule.unit == 0 || rule.parts == 0 {
                return Err(Kind::ZeroInRule { pattern: pattern.clone() }.into());
            }
            if !layers.iter().any(|layer| Pattern::new(pattern, layers).is_of(&layer.path)) {
                let known = layers.iter().map(|layer| layer.path.clone()).collect();
                return Err(Kind::NoSuchLayer { pattern: pattern.clone(), known }.into());
            }
        }
        let [own_rules, fallback] = [&self.rules, &self.fallback]
            .map(|rules| rules.iter().map(|(text, rule)| (Pattern::new(text, layers), rule)).collect::<Vec<_>>());
        let mut divided: Vec<DividedLayer> = Vec::new();
        for (position, layer) in layers.iter().enumerate() {
            let is_own = |(pattern, _): &&(Pattern<'_>, &LayerRule)| pattern.is_of(&layer.path);
            let counts = if own_rules.iter().any(|rule| is_own(&rule)) { &own_rules } else { &fallback };
            let mut rules = counts.iter().filter(is_own);
            let Some((pattern, rule)) = rules.next() else { continue };
            if let Some((second, _)) = rules.find(|(_, other)| other != rule) {
                let (layer, first, second) = (layer.path.clone(), pattern.text.to_owned(), second.text.to_owned());
                return Err(Kind::TwoRules { layer, first, second }.into());
            }
            if rule.gathers_tokens && rule.style != ParallelStyle::SequenceParallel {
                let (layer, style) = (layer.path.clone(), rule.style.as_str());
                return Err(Kind::AllTokensOfOther { layer, style }.into());
            }
            if let Some(own) = divide_layer(position, layer, **rule, tp_size)? {
                let shares = |other: &&DividedLayer| layers[other.layer].weight == layer.weight;
                if let Some(other) = divided.iter().find(shares) {
                    let is_same =
                        (other.size_index(), other.parts, &other.slices) == (own.size_index(), own.parts, &own.slices);
                    if !is_same {
                        let [first, second] = [other.layer, position].map(|at| layers[at].path.clone());
                        return Err(Kind::TwoLayouts { weight: layer.weight.clone(), first, second }.into());
                    }
                }
                divided.push(own);
            }
        }
        self.check_whole_weights(layers, &divided)?;
        Ok(divided)
    }

    /// Gradients of a layer that sees some tokens or heads are summed over ranks; another layer with the same weight, which sees all,
    /// would be counted as often as there are ranks.
    fn check_whole_weights(&self, layers: &[LayerEntry], divided: &[DividedLayer]) -> Result<()> {
        let is_divided = |position: usize| divided.iter().any(|own| own.layer == position);
        for own in divided.iter().filter(|own| own.style.is_whole()) {
            let LayerEntry { path, weight, .. } = &layers[own.layer];
            let shares = |(position, other): &(usize, &LayerEntry)| other.weight == *weight && !is_divided(*position);
            if let Some((_, other)) = layers.iter().enumerate().find(shares) {
                let (weight, first, second) = (weight.clone(), path.clone(), other.path.clone());
                return Err(Kind::TwoLayouts { weight, first, second }.into());
            }
        }
        Ok(())
    }
}

/// Layers that compute each token by itself, and by PyTorch's documentation may be sequence-parallel.
const KEEPS_TOKENS_APART: [&str; 3] = ["LayerNorm", "RMSNorm", "Dropout"];

fn divide_layer(position: usize, layer: &LayerEntry, rule: LayerRule, tp_size: usize) -> Result<Option<DividedLayer>> {
    let mut style = rule.style;
    // Transformers has the same names for both kinds of layer.
    if layer.kind == LayerKind::Embedding {
        style = match style {
            ParallelStyle::Rowwise => ParallelStyle::EmbeddingRowwise,
            ParallelStyle::Colwise | ParallelStyle::ColwiseGatherOutput => ParallelStyle::EmbeddingColwise,
            other => other,
        };
    }
    let in_sequence = style == ParallelStyle::SequenceParallel;
    let kind = match layer.kind {
        _ if style == ParallelStyle::Replicate => return Ok(None),
        _ if style == ParallelStyle::ReplicateWithGradAllReduce => None,
        LayerKind::Other(kind) if in_sequence && KEEPS_TOKENS_APART.contains(&kind) => None,
        LayerKind::Linear if !style.is_embedding() && !in_sequence => None,
        LayerKind::Embedding if style.is_embedding() || in_sequence => None,
        LayerKind::Linear => Some("linear layer"),
        LayerKind::Embedding => Some("embedding"),
        LayerKind::Other(kind) => Some(kind),
    };
    if let Some(kind) = kind {
        return Err(Kind::StyleOfOtherLayer { layer: layer.path.clone(), kind, style: style.as_str() }.into());
    }
    if style.is_whole() {
        let gathers_tokens = rule.gathers_tokens;
        return Ok(Some(DividedLayer { layer: position, style, parts: 1, slices: Vec::new(), gathers_tokens }));
    }
    let parts = if style == ParallelStyle::PackedColwise { rule.parts } else { 1 };
    let divided = DividedLayer { layer: position, style, parts, slices: Vec::new(), gathers_tokens: false };
    let features = layer.sizes[divided.size_index()];
    let path = || layer.path.clone();
    if !parts.checked_mul(rule.unit).is_some_and(|unit| features.is_multiple_of(unit)) {
        return Err(Kind::CutUnit { layer: path(), features, unit: rule.unit, parts }.into());
    }
    let units = features / parts / rule.unit;
    if units < tp_size {
        return Err(Kind::TooFewUnits { layer: path(), features, unit: rule.unit, units, tp_size }.into());
    }
    let of_rank = |rank: usize| {
        let start = |rank: usize| (rank * (units / tp_size) + rank.min(units % tp_size)) * rule.unit;
        start(rank)..start(rank + 1)
    };
    Ok(Some(DividedLayer { slices: (0..tp_size).map(of_rank).collect(), ..divided }))
}

/// A path in which `*` stands for any one component. The first component of a path may be left out, unless the pattern is all of another
/// one: then it means that one.
struct Pattern<'a> {
    text: &'a str,
    is_full: bool,
}

impl<'a> Pattern<'a> {
    fn new(text: &'a str, layers: &[LayerEntry]) -> Self {
        Self { text, is_full: layers.iter().any(|layer| is_path(text, &layer.path)) }
    }

    fn is_of(&self, path: &str) -> bool {
        let rest = path.split_once('.').filter(|_| !self.is_full);
        is_path(self.text, path) || rest.is_some_and(|(_, rest)| is_path(self.text, rest))
    }
}

fn is_path(pattern: &str, path: &str) -> bool {
    let (mut pattern, mut path) = (pattern.split('.'), path.split('.'));
    loop {
        match (pattern.next(), path.next()) {
            (None, None) => return true,
            (Some("*"), Some(_)) => {}
            (Some(wanted), Some(found)) if wanted == found => {}
            _ => return false,
        }
    }
}
