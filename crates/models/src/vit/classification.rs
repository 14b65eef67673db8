//! ViT, and ViT with a linear classifier on the vector that stands for the whole image.

use super::ViTConfig;
use super::embeddings::Embeddings;
use super::layer::{ViTLayer, layer_norm, linear};
use crate::image_classification::{ImageClassificationInput, ImageClassifierOutput};
use crate::problem::ProblemType;
use crate::tensor_parallel::{encoder_plan, features};
use crate::{PretrainedConfig, PretrainedModel};
use accelerate::nn::{Checkpointed, LayerNorm, Linear, Module, ParamStore, Path};
use accelerate::tch::Tensor;
use accelerate::{Error, Result, TensorParallelPlan};

/// `transformers.ViTModel` without its pooler: a vector for the whole image, and one for each patch.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate_models::vit::{ViTConfig, ViTModel};
///
/// let sizes = ViTConfig { hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, ..Default::default() };
/// let config = ViTConfig { image_size: [12, 8], patch_size: [4, 4], ..sizes };
/// let model = ViTModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// assert_eq!(model.forward(&Tensor::ones([2, 3, 12, 8], (Kind::Float, Device::Cpu)))?.size(), [2, 7, 8]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ViTModel {
    embeddings: Embeddings,
    layers: Vec<Checkpointed<ViTLayer>>,
    layernorm: LayerNorm,
}

impl ViTModel {
    /// Registers all parameters under `path`, with the initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &ViTConfig) -> Result<Self> {
        config.check().map_err(Error::other)?;
        let layer =
            |index: usize| Checkpointed::new(path / "encoder" / "layer" / index, |path| ViTLayer::new(path, config));
        Ok(Self {
            embeddings: Embeddings::new(&(path / "embeddings"), config)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            layernorm: layer_norm(path / "layernorm", config)?,
        })
    }

    /// `pixel_values [batch, num_channels, height, width]` to `[batch, 1 + num_patches, hidden_size]`.
    ///
    /// # Errors
    /// Images of another size.
    pub fn forward(&self, pixel_values: &Tensor) -> Result<Tensor> {
        let hidden = self.embeddings.forward(pixel_values)?;
        let hidden = self.layers.iter().try_fold(hidden, |hidden, layer| layer.forward(&hidden))?;
        self.layernorm.forward(&hidden)
    }
}

/// `transformers.ViTForImageClassification`, by names and numbers.
///
/// ```
/// use accelerate::nn::{Module, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate_models::ImageClassificationInput;
/// use accelerate_models::vit::{ViTConfig, ViTForImageClassification};
///
/// let sizes = ViTConfig { hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, ..Default::default() };
/// let config = ViTConfig { image_size: [12, 8], patch_size: [4, 4], ..sizes };
/// let model = ViTForImageClassification::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// let pixel_values = Tensor::rand([2, 3, 12, 8], (Kind::Float, Device::Cpu));
/// let output = model.forward(&ImageClassificationInput { pixel_values, labels: Some(Tensor::from_slice(&[0i64, 1])) })?;
/// output.loss.unwrap().backward();
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ViTForImageClassification {
    store: ParamStore,
    vit: ViTModel,
    classifier: Linear,
    /// Features of a head of attention.
    head_dim: usize,
    problem_type: Option<ProblemType>,
}

impl ViTForImageClassification {
    /// Registers all parameters under `path`, with the initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &ViTConfig) -> Result<Self> {
        let vit = ViTModel::new(&(path / "vit"), config)?;
        let sizes = (config.hidden_size, config.num_labels() as i64);
        let head_dim = features(config.hidden_size.checked_div(config.num_attention_heads));
        let classifier = linear(path / "classifier", sizes, true, config)?;
        Ok(Self { store: path.store().clone(), vit, classifier, head_dim, problem_type: config.problem_type })
    }

    /// Scores before softmax `[batch, num_labels]` of `pixel_values [batch, num_channels, height, width]`.
    ///
    /// # Errors
    /// Images of another size.
    pub fn logits(&self, pixel_values: &Tensor) -> Result<Tensor> {
        self.classifier.forward(&self.vit.forward(pixel_values)?.f_select(1, 0)?)
    }
}

impl Module for ViTForImageClassification {
    type Input = ImageClassificationInput;
    type Output = ImageClassifierOutput;

    fn forward(&self, input: &ImageClassificationInput) -> Result<ImageClassifierOutput> {
        ImageClassifierOutput::new(self.logits(&input.pixel_values)?, input.labels.as_ref(), self.problem_type)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    /// Heads of attention and inner features are divided.
    fn tensor_parallel_plan(&self) -> Option<TensorParallelPlan> {
        Some(encoder_plan("vit.encoder.layer", "attention", self.head_dim))
    }
}

impl PretrainedModel for ViTForImageClassification {
    type Config = ViTConfig;

    const BASE: &'static str = "vit.";
    const HEADS: &'static [&'static str] = &["classifier."];

    fn from_config(path: &Path, config: &ViTConfig) -> Result<Self> {
        Self::new(path, config)
    }

    /// The pooler of a bare model.
    fn is_of_no_use(name: &str) -> bool {
        name.starts_with("vit.pooler.") || name.starts_with("pooler.")
    }
}
