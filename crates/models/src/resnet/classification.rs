//! ResNet with a linear classifier.

use super::{ResNetConfig, ResNetModel};
use crate::PretrainedModel;
use crate::image_classification::{ImageClassificationInput, ImageClassifierOutput};
use crate::problem::ProblemType;
use accelerate::Result;
use accelerate::nn::{Linear, Module, ParamStore, Path};
use accelerate::tch::Tensor;

/// `transformers.ResNetForImageClassification`, by names and numbers.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate_models::ImageClassificationInput;
/// use accelerate_models::resnet::{ResNetConfig, ResNetForImageClassification};
///
/// let config = ResNetConfig { embedding_size: 8, hidden_sizes: vec![8, 16], depths: vec![1, 1], ..ResNetConfig::resnet18(10) };
/// let model = ResNetForImageClassification::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// let pixel_values = Tensor::rand([2, 3, 32, 32], (Kind::Float, Device::Cpu));
/// let output = model.forward(&ImageClassificationInput { pixel_values, labels: Some(Tensor::from_slice(&[3i64, 9])) })?;
/// assert_eq!(output.logits.size(), [2, 10]);
/// output.loss.unwrap().backward();
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ResNetForImageClassification {
    store: ParamStore,
    resnet: ResNetModel,
    classifier: Linear,
    problem_type: Option<ProblemType>,
}

impl ResNetForImageClassification {
    /// Registers all parameters and running statistics under `path`, with the initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &ResNetConfig) -> Result<Self> {
        let resnet = ResNetModel::new(&(path / "resnet"), config)?;
        let width = config.hidden_sizes.last().copied().unwrap_or_default();
        // The first part of the classifier in Transformers flattens, and has no parameters.
        let classifier = Linear::new(path / "classifier" / 1, width, config.num_labels() as i64, Default::default())?;
        Ok(Self { store: path.store().clone(), resnet, classifier, problem_type: config.problem_type })
    }

    /// Scores before softmax `[batch, num_labels]` of `pixel_values [batch, num_channels, height, width]`.
    ///
    /// # Errors
    /// Another number of channels; one value per channel while training.
    pub fn logits(&self, pixel_values: &Tensor) -> Result<Tensor> {
        let hidden = self.resnet.forward(pixel_values)?;
        self.classifier.forward(&self.resnet.pooled(&hidden)?)
    }
}

impl Module for ResNetForImageClassification {
    type Input = ImageClassificationInput;
    type Output = ImageClassifierOutput;

    fn forward(&self, input: &ImageClassificationInput) -> Result<ImageClassifierOutput> {
        ImageClassifierOutput::new(self.logits(&input.pixel_values)?, input.labels.as_ref(), self.problem_type)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

impl PretrainedModel for ResNetForImageClassification {
    type Config = ResNetConfig;

    const BASE: &'static str = "resnet.";
    const HEADS: &'static [&'static str] = &["classifier."];

    fn from_config(path: &Path, config: &ResNetConfig) -> Result<Self> {
        Self::new(path, config)
    }
}
