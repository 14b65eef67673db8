//! The sizes of a ViT.

use crate::Activation;
use crate::config::{
    PretrainedConfig, WrongValue, check_depths, check_divides, check_num_parameters, check_numbers,
    check_probabilities, check_sizes,
};
use crate::image_classification::{check_labels, label_names, labels_by_name};
use crate::problem::{ProblemType, labels_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Some times as many as the largest models of this kind have.
const MOST_PARAMETERS: i128 = 200_000_000_000;

/// Sizes and rates of a ViT; field names and defaults are those of Transformers' `ViTConfig`, which are the sizes of
/// `vit-base-patch16-224`.
///
/// ```
/// use accelerate_models::vit::ViTConfig;
/// assert_eq!(ViTConfig::default().num_patches(), 196);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ViTConfig {
    /// Width of the stream of activations.
    pub hidden_size: i64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads; divides `hidden_size`.
    pub num_attention_heads: i64,
    /// Width inside of the feed-forward blocks.
    pub intermediate_size: i64,
    /// Their activation.
    pub hidden_act: Activation,
    /// Dropout after embeddings, attention and feed-forward blocks.
    pub hidden_dropout_prob: f64,
    /// Dropout on attention weights.
    pub attention_probs_dropout_prob: f64,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// Added to variances.
    pub layer_norm_eps: f64,
    /// Height and width of an image.
    pub image_size: [i64; 2],
    /// Height and width of a patch. What is left of an image at its end is not looked at.
    pub patch_size: [i64; 2],
    /// Channels of an image.
    pub num_channels: i64,
    /// Do the projections of queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Names of the classes, by label; at least one.
    pub id2label: BTreeMap<usize, String>,
    /// What labels are, where it does not follow from their number and type.
    pub problem_type: Option<ProblemType>,
}

impl Default for ViTConfig {
    fn default() -> Self {
        Self {
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            image_size: [224; 2],
            patch_size: [16; 2],
            num_channels: 3,
            qkv_bias: true,
            id2label: label_names(2),
            problem_type: None,
        }
    }
}

impl ViTConfig {
    /// Patches of an image.
    pub fn num_patches(&self) -> i64 {
        let along = |dim: usize| self.image_size[dim].checked_div(self.patch_size[dim]).unwrap_or_default();
        along(0).saturating_mul(along(1))
    }

    /// Number of classes.
    pub fn num_labels(&self) -> usize {
        self.id2label.len()
    }
}

impl PretrainedConfig for ViTConfig {
    type File = ConfigFile;

    const MODEL: &'static str = "ViT";

    fn from_file(file: ConfigFile) -> Result<Self, WrongValue> {
        if file.model_type != "vit" {
            return Err(WrongValue::new("model_type", format!("{:?}", file.model_type), "\"vit\""));
        }
        Ok(Self {
            hidden_size: file.hidden_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            intermediate_size: file.intermediate_size,
            hidden_act: file.hidden_act,
            hidden_dropout_prob: file.hidden_dropout_prob,
            attention_probs_dropout_prob: file.attention_probs_dropout_prob,
            initializer_range: file.initializer_range,
            layer_norm_eps: file.layer_norm_eps,
            image_size: file.image_size.both(),
            patch_size: file.patch_size.both(),
            num_channels: file.num_channels,
            qkv_bias: file.qkv_bias,
            id2label: labels_of(file.id2label, file.num_labels)?,
            problem_type: file.problem_type,
        })
    }

    fn to_file(&self) -> ConfigFile {
        ConfigFile {
            architectures: vec!["ViTForImageClassification".to_owned()],
            model_type: "vit".to_owned(),
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            intermediate_size: self.intermediate_size,
            hidden_act: self.hidden_act,
            hidden_dropout_prob: self.hidden_dropout_prob,
            attention_probs_dropout_prob: self.attention_probs_dropout_prob,
            initializer_range: self.initializer_range,
            layer_norm_eps: self.layer_norm_eps,
            image_size: Sides::of(self.image_size),
            patch_size: Sides::of(self.patch_size),
            num_channels: self.num_channels,
            qkv_bias: self.qkv_bias,
            label2id: labels_by_name(&self.id2label),
            id2label: self.id2label.clone(),
            problem_type: self.problem_type,
            num_labels: None,
        }
    }

    fn check(&self) -> Result<(), WrongValue> {
        check_depths([("num_hidden_layers", self.num_hidden_layers)])?;
        check_sizes([
            ("hidden_size", self.hidden_size, 1..=1_000_000),
            ("num_attention_heads", self.num_attention_heads, 1..=1_000_000),
            ("intermediate_size", self.intermediate_size, 1..=10_000_000),
            ("num_channels", self.num_channels, 1..=1_000_000),
        ])?;
        let sides = [self.image_size, self.patch_size].into_iter().zip(["image_size", "patch_size"]);
        check_sizes(sides.flat_map(|(sides, key)| sides.map(|side| (key, side, 1..=1_000_000))))?;
        check_probabilities([
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ])?;
        check_numbers(("layer_norm_eps", self.layer_norm_eps), self.initializer_range)?;
        check_divides(("num_attention_heads", self.num_attention_heads), ("hidden_size", self.hidden_size))?;
        if self.num_patches() < 1 {
            let wanted = format!("at most image_size, {:?}", self.image_size);
            return Err(WrongValue::new("patch_size", format!("{:?}", self.patch_size), wanted));
        }
        check_labels(&self.id2label)?;
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(i128::from);
        let layer = 4 * hidden * hidden + 2 * hidden * inner;
        let num_parameters = self.num_hidden_layers as i128 * layer + hidden * i128::from(self.num_patches());
        check_num_parameters(("hidden_size", self.hidden_size), num_parameters, MOST_PARAMETERS)
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }
}

/// A square by its side, or height and width.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Sides {
    Square(i64),
    Rectangle([i64; 2]),
}

impl Sides {
    fn both(self) -> [i64; 2] {
        match self {
            Self::Square(side) => [side; 2],
            Self::Rectangle(sides) => sides,
        }
    }

    fn of(sides: [i64; 2]) -> Self {
        if sides[0] == sides[1] { Self::Square(sides[0]) } else { Self::Rectangle(sides) }
    }
}

/// The file as Transformers writes it.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    architectures: Vec<String>,
    model_type: String,
    hidden_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    intermediate_size: i64,
    hidden_act: Activation,
    hidden_dropout_prob: f64,
    attention_probs_dropout_prob: f64,
    initializer_range: f64,
    layer_norm_eps: f64,
    image_size: Sides,
    patch_size: Sides,
    num_channels: i64,
    qkv_bias: bool,
    id2label: BTreeMap<usize, String>,
    label2id: BTreeMap<String, usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem_type: Option<ProblemType>,
    #[serde(skip_serializing)]
    num_labels: Option<usize>,
}

impl Default for ConfigFile {
    fn default() -> Self {
        ViTConfig::default().to_file()
    }
}
