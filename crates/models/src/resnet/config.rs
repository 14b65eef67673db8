//! The sizes of a ResNet.

use super::residual::REDUCTION;
use crate::Activation;
use crate::config::{PretrainedConfig, WrongValue, check_depths, check_num_parameters, check_sizes};
use crate::image_classification::{check_labels, label_names, labels_by_name};
use crate::problem::{ProblemType, labels_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Some times as many as the largest models of this kind have.
const MOST_PARAMETERS: i128 = 20_000_000_000;

/// What a layer of a stage consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResNetLayerType {
    /// Two convolutions of 3 by 3, as in ResNet-18 and ResNet-34.
    Basic,
    /// One of 1 by 1 to a quarter of the channels, one of 3 by 3, and one of 1 by 1 back, as in ResNet-50.
    Bottleneck,
}

/// Sizes of a ResNet; field names and defaults are those of Transformers' `ResNetConfig`, which are the sizes of ResNet-50.
///
/// ```
/// use accelerate_models::resnet::ResNetConfig;
/// assert_eq!(ResNetConfig::resnet18(10).num_labels(), 10);
/// assert_eq!(ResNetConfig::default().depths, [3, 4, 6, 3]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetConfig {
    /// Channels of an image.
    pub num_channels: i64,
    /// Channels behind the first convolution.
    pub embedding_size: i64,
    /// Channels of each stage.
    pub hidden_sizes: Vec<i64>,
    /// Number of layers of each stage, as many as there are `hidden_sizes`.
    pub depths: Vec<usize>,
    /// What a layer consists of.
    pub layer_type: ResNetLayerType,
    /// The activation behind the first convolution and behind each layer; inside of a layer it is the rectifier.
    pub hidden_act: Activation,
    /// Does the first stage halve the image, as the others do?
    pub downsample_in_first_stage: bool,
    /// Does the first convolution of a bottleneck halve the image, and not the second?
    pub downsample_in_bottleneck: bool,
    /// Names of the classes, by label; at least one.
    pub id2label: BTreeMap<usize, String>,
    /// What labels are, where it does not follow from their number and type.
    pub problem_type: Option<ProblemType>,
}

impl Default for ResNetConfig {
    fn default() -> Self {
        Self {
            num_channels: 3,
            embedding_size: 64,
            hidden_sizes: vec![256, 512, 1024, 2048],
            depths: vec![3, 4, 6, 3],
            layer_type: ResNetLayerType::Bottleneck,
            hidden_act: Activation::Relu,
            downsample_in_first_stage: false,
            downsample_in_bottleneck: false,
            id2label: label_names(2),
            problem_type: None,
        }
    }
}

impl ResNetConfig {
    /// The sizes of ResNet-18.
    pub fn resnet18(num_labels: usize) -> Self {
        Self {
            hidden_sizes: vec![64, 128, 256, 512],
            depths: vec![2, 2, 2, 2],
            layer_type: ResNetLayerType::Basic,
            id2label: label_names(num_labels),
            ..Self::default()
        }
    }

    /// Number of classes.
    pub fn num_labels(&self) -> usize {
        self.id2label.len()
    }
}

impl PretrainedConfig for ResNetConfig {
    type File = ConfigFile;

    const MODEL: &'static str = "ResNet";

    fn from_file(file: ConfigFile) -> Result<Self, WrongValue> {
        if file.model_type != "resnet" {
            return Err(WrongValue::new("model_type", format!("{:?}", file.model_type), "\"resnet\""));
        }
        Ok(Self {
            num_channels: file.num_channels,
            embedding_size: file.embedding_size,
            hidden_sizes: file.hidden_sizes,
            depths: file.depths,
            layer_type: file.layer_type,
            hidden_act: file.hidden_act,
            downsample_in_first_stage: file.downsample_in_first_stage,
            downsample_in_bottleneck: file.downsample_in_bottleneck,
            id2label: labels_of(file.id2label, file.num_labels)?,
            problem_type: file.problem_type,
        })
    }

    fn to_file(&self) -> ConfigFile {
        ConfigFile {
            architectures: vec!["ResNetForImageClassification".to_owned()],
            model_type: "resnet".to_owned(),
            num_channels: self.num_channels,
            embedding_size: self.embedding_size,
            hidden_sizes: self.hidden_sizes.clone(),
            depths: self.depths.clone(),
            layer_type: self.layer_type,
            hidden_act: self.hidden_act,
            downsample_in_first_stage: self.downsample_in_first_stage,
            downsample_in_bottleneck: self.downsample_in_bottleneck,
            label2id: labels_by_name(&self.id2label),
            id2label: self.id2label.clone(),
            problem_type: self.problem_type,
            num_labels: None,
        }
    }

    fn check(&self) -> Result<(), WrongValue> {
        check_sizes([
            ("num_channels", self.num_channels, 1..=1_000_000),
            ("embedding_size", self.embedding_size, 1..=1_000_000),
        ])?;
        let (num_stages, num_depths) = (self.hidden_sizes.len(), self.depths.len());
        if !(1..=1000).contains(&num_stages) {
            return Err(WrongValue::new("hidden_sizes", format!("a list of {num_stages}"), "1 to 1000 stages"));
        }
        if num_stages != num_depths {
            let wanted = format!("as many as hidden_sizes, {num_stages}");
            return Err(WrongValue::new("depths", format!("a list of {num_depths}"), wanted));
        }
        check_sizes(self.hidden_sizes.iter().map(|size| ("hidden_sizes", *size, 1..=1_000_000)))?;
        check_depths(self.depths.iter().map(|depth| ("depths", *depth)))?;
        if self.layer_type == ResNetLayerType::Bottleneck
            && let Some(size) = self.hidden_sizes.iter().find(|size| **size % REDUCTION != 0)
        {
            let wanted = format!("a multiple of {REDUCTION}, by which bottlenecks reduce it");
            return Err(WrongValue::new("hidden_sizes", size, wanted));
        }
        check_labels(&self.id2label)?;
        let of_stage = |(size, depth): (&i64, &usize)| 18 * i128::from(*size) * i128::from(*size) * *depth as i128;
        let num_parameters = self.hidden_sizes.iter().zip(&self.depths).map(of_stage).sum();
        let largest = self.hidden_sizes.iter().copied().max().unwrap_or_default();
        check_num_parameters(("hidden_sizes", largest), num_parameters, MOST_PARAMETERS)
    }

    /// Of a classifier that files do not have.
    fn initializer_range(&self) -> f64 {
        let width = self.hidden_sizes.last().copied().unwrap_or(1) as f64;
        // The deviation of numbers that are spread evenly within 1/sqrt(width).
        (3.0 * width).sqrt().recip()
    }
}

/// The file as Transformers writes it.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    architectures: Vec<String>,
    model_type: String,
    num_channels: i64,
    embedding_size: i64,
    hidden_sizes: Vec<i64>,
    depths: Vec<usize>,
    layer_type: ResNetLayerType,
    hidden_act: Activation,
    downsample_in_first_stage: bool,
    downsample_in_bottleneck: bool,
    id2label: BTreeMap<usize, String>,
    label2id: BTreeMap<String, usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem_type: Option<ProblemType>,
    #[serde(skip_serializing)]
    num_labels: Option<usize>,
}

impl Default for ConfigFile {
    fn default() -> Self {
        ResNetConfig::default().to_file()
    }
}
