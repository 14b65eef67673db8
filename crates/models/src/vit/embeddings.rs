//! From an image to vectors: one for each patch, and one in front that stands for the whole.

use super::ViTConfig;
use accelerate::nn::{Conv2d, Conv2dConfig, Dropout, Init, Param, Path};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Error, Result};

#[derive(Debug)]
pub(super) struct Embeddings {
    cls_token: Param,
    position_embeddings: Param,
    projection: Conv2d,
    dropout: Dropout,
    image_size: [i64; 2],
}

/// An image that the model has no positions for.
#[derive(Debug, thiserror::Error)]
#[error(
    "pixel_values are {found:?}; wanted [batch, num_channels, height, width] with images of {wanted:?}, as image_size says"
)]
struct OtherImage {
    found: Vec<i64>,
    wanted: [i64; 2],
}

impl Embeddings {
    pub(super) fn new(path: &Path, config: &ViTConfig) -> Result<Self> {
        let (hidden, std) = (config.hidden_size, config.initializer_range);
        let truncated = Init::TruncNormal { mean: 0.0, std, low: -2.0, high: 2.0 };
        let projection = Conv2dConfig {
            stride: config.patch_size,
            weight_init: Init::Normal { mean: 0.0, std },
            bias_init: Some(Init::Zeros),
            ..Default::default()
        };
        let patches = path / "patch_embeddings" / "projection";
        Ok(Self {
            cls_token: path.param("cls_token", ([1, 1, hidden], truncated))?,
            position_embeddings: path
                .param("position_embeddings", ([1, config.num_patches() + 1, hidden], truncated))?,
            projection: Conv2d::new(patches, config.num_channels, hidden, config.patch_size, projection)?,
            dropout: Dropout::new(path / "dropout", config.hidden_dropout_prob)?,
            image_size: config.image_size,
        })
    }

    /// `[batch, num_channels, height, width]` to `[batch, num_patches + 1, hidden_size]`.
    pub(super) fn forward(&self, pixel_values: &Tensor) -> Result<Tensor> {
        let found = pixel_values.size();
        if found.get(2..) != Some(&self.image_size[..]) {
            return Err(Error::other(OtherImage { found, wanted: self.image_size }));
        }
        // As in Transformers, images have 32 bits whatever the model has.
        let kind = self.projection.weight.kind();
        let casts = pixel_values.f_kind()? == Kind::Float && matches!(kind, Kind::Half | Kind::BFloat16);
        let pixel_values = if casts { pixel_values.f_to_kind(kind)? } else { pixel_values.shallow_clone() };
        let patches = self.projection.forward(&pixel_values)?.f_flatten(2, -1)?.f_transpose(1, 2)?;
        let (batch, _, hidden) = patches.size3()?;
        let whole = self.cls_token.get()?.f_expand([batch, 1, hidden], false)?;
        let all = Tensor::f_cat(&[&whole, &patches], 1)?.f_add(&self.position_embeddings.get()?)?;
        self.dropout.forward(&all)
    }
}
