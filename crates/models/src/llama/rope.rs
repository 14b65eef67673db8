//! Rotary position embeddings (Su et al. 2021, <https://arxiv.org/abs/2104.09864>): pairs of features are turned by an angle that
//! grows with the position.

use super::{LlamaConfig, RopeScaling};
use accelerate::Result;
use accelerate::tch::{Device, Kind, Tensor};
use std::f32::consts::PI;
use torch_ext::scalar;

/// Angles per position, one for each pair of features: float32 whatever the model computes in, or far positions would fall
/// together.
#[derive(Debug)]
pub(super) struct RotaryEmbedding {
    frequencies: Vec<f32>,
}

/// Cosines and sines of the angles at some positions, `[batch or 1, 1, length, head_dim]`.
#[derive(Debug)]
pub(super) struct Angles {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl RotaryEmbedding {
    pub(super) fn new(config: &LlamaConfig) -> Result<Self> {
        let exponents: Vec<f32> =
            (0..config.head_dim / 2).map(|pair| (2 * pair) as f32 / config.head_dim as f32).collect();
        let exponents = Tensor::f_from_slice(&exponents)?;
        // By libtorch, so that the frequencies are Transformers' to the bit.
        let theta = scalar::full(&exponents.size(), config.rope_theta, (Kind::Float, Device::Cpu))?;
        let frequencies = Vec::<f32>::try_from(&theta.f_pow(&exponents)?.f_reciprocal()?)?;
        Ok(Self {
            frequencies: frequencies.into_iter().map(|frequency| scaled(frequency, config.rope_scaling)).collect(),
        })
    }

    /// At `positions [batch or 1, length]`, int64, for activations of element type `kind`.
    pub(super) fn at(&self, positions: &Tensor, kind: Kind) -> Result<Angles> {
        let frequencies = Tensor::f_from_slice(&self.frequencies)?.f_to(positions.device())?;
        let angles = positions.f_to_kind(Kind::Float)?.f_unsqueeze(-1)?.f_mul(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?.f_unsqueeze(1)?;
        Ok(Angles { cos: angles.f_cos()?.f_to_kind(kind)?, sin: angles.f_sin()?.f_to_kind(kind)? })
    }
}

/// In float32 and in the order of operations of Transformers.
fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::Default => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let (factor, length) = (factor as f32, original_max_position_embeddings as f64);
            let wavelength = 2.0 * PI / frequency;
            if wavelength < (length / high_freq_factor) as f32 {
                return frequency;
            }
            if wavelength > (length / low_freq_factor) as f32 {
                return frequency / factor;
            }
            let smooth =
                (length as f32 / wavelength - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

impl Angles {
    /// `[batch, num_heads, length, head_dim]`, turned. The first half of a head's features are paired with the second.
    pub(super) fn turn(&self, heads: &Tensor) -> Result<Tensor> {
        let half = heads.size4()?.3 / 2;
        let (first, second) = (heads.f_narrow(-1, 0, half)?, heads.f_narrow(-1, half, half)?);
        let across = Tensor::f_cat(&[&second.f_neg()?, &first], -1)?;
        Ok(heads.f_mul(&self.cos)?.f_add(&across.f_mul(&self.sin)?)?)
    }
}
