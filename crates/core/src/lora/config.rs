//! What a user says of an adapter.

use crate::error::lora::LoraErrorKind as Kind;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Which modules: names, or one pattern for whole paths.
///
/// ```
/// use accelerate_core::lora::Modules;
/// assert_eq!(Modules::from(["q_proj", "v_proj"]), Modules::List(vec!["q_proj".into(), "v_proj".into()]));
/// assert_eq!(Modules::from("all-linear"), Modules::Pattern("all-linear".into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modules {
    /// Each is a path, or the last parts of one: `q_proj` and `self_attn.q_proj` both stand for
    /// `layers.0.self_attn.q_proj`.
    List(Vec<String>),
    /// A regular expression that a whole path has to match, in the syntax of Python's `re`; look-around included. As
    /// [`target_modules`](LoraConfig::target_modules), `all-linear` stands for all linear layers but the output layer.
    Pattern(String),
}

impl From<&str> for Modules {
    fn from(pattern: &str) -> Self {
        Self::Pattern(pattern.to_owned())
    }
}

impl<S: Into<String>, const N: usize> From<[S; N]> for Modules {
    fn from(names: [S; N]) -> Self {
        Self::List(names.into_iter().map(Into::into).collect())
    }
}

impl From<Vec<String>> for Modules {
    fn from(names: Vec<String>) -> Self {
        Self::List(names)
    }
}

impl fmt::Display for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::List(names) => f.write_str(&crate::weight_files::listed(names, 300)),
            Self::Pattern(pattern) => f.write_str(&crate::weight_files::shown(pattern)),
        }
    }
}

macro_rules! named_choice {
    ($(#[$meta:meta])* $type:ident, $what:literal { $($(#[$variant_meta:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type {
            $($(#[$variant_meta])* $variant,)*
        }

        impl $type {
            /// As PEFT writes it.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($name => Ok(Self::$variant),)*
                    other => {
                        let choices = [$($name),*].join(", ");
                        Err(Kind::Choice { field: $what, found: other.to_owned(), choices }.into())
                    }
                }
            }
        }
    };
}

named_choice! {
    /// Which biases of the model are trained beside the adapter.
    ///
    /// ```
    /// use accelerate_core::lora::LoraBias;
    /// assert_eq!("lora_only".parse::<LoraBias>()?, LoraBias::LoraOnly);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    LoraBias, "bias" {
        /// None.
        None = "none",
        /// All of the model's.
        All = "all",
        /// Those of the layers that have the adapter.
        LoraOnly = "lora_only",
    }
}

named_choice! {
    /// What a model is for. Those that classify or mark answers have a head that is trained with the adapter.
    ///
    /// ```
    /// use accelerate_core::lora::TaskType;
    /// assert_eq!(TaskType::SeqCls.head_names(), ["classifier", "score"]);
    /// assert_eq!(TaskType::CausalLm.head_names(), [""; 0]);
    /// ```
    TaskType, "task_type" {
        /// Text classification.
        SeqCls = "SEQ_CLS",
        /// From sequences to sequences.
        Seq2SeqLm = "SEQ_2_SEQ_LM",
        /// The next token.
        CausalLm = "CAUSAL_LM",
        /// Token classification.
        TokenCls = "TOKEN_CLS",
        /// Answers as ranges of a text.
        QuestionAns = "QUESTION_ANS",
        /// Hidden states.
        FeatureExtraction = "FEATURE_EXTRACTION",
    }
}

impl TaskType {
    /// What PEFT adds to [`modules_to_save`](LoraConfig::modules_to_save) for it.
    pub fn head_names(self) -> &'static [&'static str] {
        match self {
            Self::SeqCls | Self::TokenCls => &["classifier", "score"],
            Self::QuestionAns => &["qa_outputs"],
            Self::Seq2SeqLm | Self::CausalLm | Self::FeatureExtraction => &[],
        }
    }
}

/// How the matrices of a new adapter are filled. Each begins from the numbers that PEFT draws, so one seed gives one adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitLoraWeights {
    /// `true` in PEFT: A as the weight of a linear layer, B zero; of embeddings A zero, B normal. The adapter changes nothing at
    /// first.
    #[default]
    Default,
    /// `"gaussian"`: A normal with standard deviation 1/r, B zero.
    Gaussian,
    /// `false`: both random, for tests; the adapter changes the model at once.
    Random,
}

/// An adapter, as `peft.LoraConfig` describes it.
///
/// Not here, and refused by name where a file has them: other initialisations (PiSSA, OLoRA, CorDA, LoftQ, EVA, ...), DoRA and
/// the other variants, `layer_replication`, `target_parameters`, `trainable_token_indices`, `megatron_config`.
///
/// ```
/// use accelerate_core::lora::LoraConfig;
/// let config = LoraConfig { r: 16, target_modules: Some(["q_proj", "v_proj"].into()), ..Default::default() };
/// assert_eq!((config.lora_alpha, config.scaling(16, 8.0)), (8.0, 0.5));
/// config.check()?;
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank: rows of A and columns of B. Default 8.
    pub r: usize,
    /// The adapter is multiplied by this divided by `r`. Default 8.
    pub lora_alpha: f64,
    /// Probability with which elements of the adapter's input are dropped in training. Default 0.
    pub lora_dropout: f64,
    /// The layers that get the adapter: linear ones and embeddings. Has to be given.
    pub target_modules: Option<Modules>,
    /// Layers that do not get it, whatever `target_modules` says. Default: none.
    pub exclude_modules: Option<Modules>,
    /// Further modules that are trained, as copies of the adapter's own: a layer is meant where the path of it, or of a module
    /// around it, ends with one of these. Default: none, but for [`TaskType::head_names`].
    pub modules_to_save: Vec<String>,
    /// Biases that are trained. Default: none.
    pub bias: LoraBias,
    /// Divide by the square root of `r` in place of `r` (rank-stabilised LoRA, arXiv 2312.03732). Default false.
    pub use_rslora: bool,
    /// How the matrices are filled.
    pub init_lora_weights: InitLoraWeights,
    /// Are the weights of the layers stored as `[in_features, out_features]`? Found out, as in PEFT: true of GPT-2's `Conv1D`, and
    /// false of linear layers, whatever is asked for. The matrices of an adapter are the same either way.
    pub fan_in_fan_out: bool,
    /// Numbers of the layers to adapt, of those that a list of `target_modules` names; empty for all.
    pub layers_to_transform: Vec<usize>,
    /// The names of the lists in which layers are counted, such as `layers`; empty for any. Patterns, as in PEFT.
    pub layers_pattern: Vec<String>,
    /// Other ranks, by the end of a path or a pattern for it. The first that fits counts, in alphabetical order, which is that of
    /// PEFT's files.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas, in the same way.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Has B a bias? Default false.
    pub lora_bias: bool,
    /// What the model is for. Default: nothing is known.
    pub task_type: Option<TaskType>,
    /// Where the model came from. Only written and read.
    pub base_model_name_or_path: Option<String>,
    /// Which version of it. Only written and read.
    pub revision: Option<String>,
    /// The adapter is not trained. Default false; files say true, as PEFT's do.
    pub inference_mode: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: None,
            exclude_modules: None,
            modules_to_save: Vec::new(),
            bias: LoraBias::None,
            use_rslora: false,
            init_lora_weights: InitLoraWeights::default(),
            fan_in_fan_out: false,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            lora_bias: false,
            task_type: None,
            base_model_name_or_path: None,
            revision: None,
            inference_mode: false,
        }
    }
}

/// Larger ranks are an accident or an attack: no layer has as many rows.
const MAX_RANK: usize = 1 << 24;

impl LoraConfig {
    /// What an adapter of rank `r` with `lora_alpha` is multiplied by.
    pub fn scaling(&self, r: usize, lora_alpha: f64) -> f64 {
        let r = r as f64;
        lora_alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// The modules to save, with the heads of the task.
    pub fn all_modules_to_save(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.modules_to_save.iter().map(String::as_str).collect();
        for head in self.task_type.into_iter().flat_map(TaskType::head_names) {
            if !names.contains(head) {
                names.push(head);
            }
        }
        names
    }

    /// Whether all of it can be used.
    ///
    /// # Errors
    /// [`is_config`](Error::is_config): a rank of zero, a dropout that is no probability, an alpha that float32 does not hold, a field
    /// that does not go with another, or no `target_modules`.
    ///
    /// ```
    /// use accelerate_core::lora::LoraConfig;
    /// let error = LoraConfig { r: 0, ..Default::default() }.check().unwrap_err();
    /// assert!(error.is_config() && error.to_string().contains("r is 0"), "{error}");
    /// ```
    pub fn check(&self) -> Result<()> {
        let ranks = self.rank_pattern.iter().map(|(pattern, r)| (format!("rank_pattern[{pattern:?}]"), *r));
        for (field, r) in std::iter::once(("r".to_owned(), self.r)).chain(ranks) {
            if !(1..=MAX_RANK).contains(&r) {
                return Err(Kind::Rank { field, found: r, most: MAX_RANK }.into());
            }
        }
        let alphas = self.alpha_pattern.iter().map(|(pattern, alpha)| (format!("alpha_pattern[{pattern:?}]"), *alpha));
        for (field, alpha) in std::iter::once(("lora_alpha".to_owned(), self.lora_alpha)).chain(alphas) {
            // Weights are multiplied by it as a float32.
            if alpha.abs() > f64::from(f32::MAX) || alpha.is_nan() {
                return Err(Kind::Alpha { field, found: alpha }.into());
            }
        }
        if !(0.0..=1.0).contains(&self.lora_dropout) {
            return Err(Kind::Dropout { found: self.lora_dropout }.into());
        }
        match &self.target_modules {
            None => return Err(Kind::NoTargets.into()),
            Some(Modules::List(names)) if names.is_empty() => return Err(Kind::NoTargets.into()),
            Some(Modules::Pattern(_)) if !self.layers_to_transform.is_empty() => {
                return Err(Kind::OnlyWithList { field: "layers_to_transform" }.into());
            }
            Some(Modules::Pattern(_)) if !self.layers_pattern.is_empty() => {
                return Err(Kind::OnlyWithList { field: "layers_pattern" }.into());
            }
            Some(_) => {}
        }
        if !self.layers_pattern.is_empty() && self.layers_to_transform.is_empty() {
            return Err(Kind::PatternWithoutLayers.into());
        }
        if self.lora_bias && self.init_lora_weights == InitLoraWeights::Gaussian {
            return Err(Kind::BiasWithGaussian.into());
        }
        Ok(())
    }
}
