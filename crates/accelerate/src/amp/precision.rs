//! The precision of one run: autocast around forward passes, float32 outputs after them.

use super::{MixedPrecision, autocast_kind};
use crate::error::Result;
use crate::nn::is_floating;
use crate::tensor_tree::TensorTree;
use accelerate_core::config::AutocastSettings;
use tch::{Device, Kind, Tensor};
use torch_ext::Autocast;

/// What `prepare` and `accelerator.autocast` need to know of mixed precision.
#[derive(Clone, Debug)]
pub(crate) struct Precision {
    mixed_precision: MixedPrecision,
    device: Device,
    kwargs: AutocastSettings,
    outputs_to_fp32: bool,
    /// What outputs are cast to in place of that.
    output_kind: Option<Kind>,
}

impl Precision {
    pub(crate) fn new(
        mixed_precision: MixedPrecision,
        device: Device,
        kwargs: AutocastSettings,
        outputs_to_fp32: bool,
    ) -> Self {
        Self { mixed_precision, device, kwargs, outputs_to_fp32, output_kind: None }
    }

    /// The same, with another type for outputs, where that is given.
    pub(crate) fn with_outputs(self, output_kind: Option<Kind>) -> Self {
        Self { output_kind, ..self }
    }

    pub(crate) fn mixed_precision(&self) -> MixedPrecision {
        self.mixed_precision
    }

    /// Runs `body` under autocast, or plainly without mixed precision.
    pub(crate) fn autocast<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        self.autocast_with(&self.kwargs, body)
    }

    /// As [`Precision::autocast`] with other settings, for one block of code.
    pub(crate) fn autocast_with<R>(&self, kwargs: &AutocastSettings, body: impl FnOnce() -> R) -> Result<R> {
        let Some(kind) = autocast_kind(self.mixed_precision) else { return Ok(body()) };
        let autocast = Autocast {
            device: self.device,
            kind,
            enabled: kwargs.enabled,
            cache_enabled: kwargs.cache_enabled.unwrap_or(true),
        };
        Ok(autocast.run(body)?)
    }

    /// Half-precision tensors of a model's output as float32, as the reference does by default, or all floating-point ones
    /// in the type that is asked for.
    pub(crate) fn cast_outputs<T: TensorTree>(&self, output: T) -> Result<T> {
        if let Some(kind) = self.output_kind {
            return output.try_map_tensors(&mut |tensor: &Tensor| match is_floating(tensor.kind()) {
                true => Ok(tensor.f_to_kind(kind)?),
                false => Ok(tensor.shallow_clone()),
            });
        }
        if !self.outputs_to_fp32 || self.mixed_precision == MixedPrecision::No {
            return Ok(output);
        }
        output.try_map_tensors(&mut |tensor: &Tensor| match tensor.kind() {
            Kind::Half | Kind::BFloat16 => Ok(tensor.f_to_kind(Kind::Float)?),
            _ => Ok(tensor.shallow_clone()),
        })
    }
}
