//! Computing in FP8: number formats, scales, and which layers take part.
//!
//! A tensor is multiplied by a scale, so that its largest value meets the largest number of the format, and rounded to 8 bits.
//! Dynamic scaling makes the scale of the tensor itself, as torchao 0.18 does; delayed scaling makes it of the largest values of
//! earlier passes, as TransformerEngine does ([`DelayedScaling`]). What is here is a function of its arguments; the products
//! themselves are computed by the main crate, which asks tensors for their largest values.

mod delayed;

pub use delayed::{DelayedScaling, ScalingState};

use crate::Result;
use crate::config::{AmaxComputeAlgorithm, FP8BackendType, FP8Format, FP8Settings, Float8LinearRecipeName};
use crate::error::config::ConfigErrorKind;

/// An FP8 number format.
///
/// ```
/// use accelerate_core::fp8::Float8;
/// assert_eq!((Float8::E4M3.max(), Float8::E5M2.max()), (448.0, 57344.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float8 {
    /// Four bits of exponent and three of mantissa, without infinities (`float8_e4m3fn`).
    E4M3,
    /// Five bits of exponent and two of mantissa (`float8_e5m2`).
    E5M2,
}

impl Float8 {
    /// The largest finite number.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
        }
    }
}

/// The smallest largest value that a scale is made of: that of a tensor of zeros is finite.
pub const SMALLEST_AMAX: f64 = 1e-12;

/// The scale that torchao makes of the largest absolute value `amax`: computed in 64 bits, rounded to 32, and then, if asked for,
/// rounded down to a power of two.
///
/// ```
/// use accelerate_core::fp8::{Float8, dynamic_scale};
/// assert_eq!(dynamic_scale(3.0, Float8::E4M3, false), 149.33333);
/// assert_eq!(dynamic_scale(3.0, Float8::E4M3, true), 128.0);
/// assert_eq!(dynamic_scale(0.0, Float8::E4M3, false), 4.48e14);
/// assert_eq!(dynamic_scale(f32::INFINITY, Float8::E5M2, false), 0.0);
/// assert!(dynamic_scale(f32::NAN, Float8::E4M3, true).is_nan());
/// ```
pub fn dynamic_scale(amax: f32, format: Float8, power_of_two: bool) -> f32 {
    let amax = f64::from(amax);
    // What is not a number stays none.
    let amax = if amax < SMALLEST_AMAX { SMALLEST_AMAX } else { amax };
    let scale = (f64::from(format.max()) / amax) as f32;
    // In 32 bits, as there: the logarithm of what is a last digit below a power of two is that of the power.
    if power_of_two { scale.log2().floor().exp2() } else { scale }
}

/// Which FP8 format a layer computes in, and with which scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp8Recipe {
    /// Scales of the tensors themselves.
    Dynamic(DynamicScaling),
    /// Scales of the passes before.
    Delayed(DelayedScaling),
}

/// Scales that are made of the tensors that they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DynamicScaling {
    /// Which elements have a scale together.
    pub recipe: Float8LinearRecipeName,
    /// Pad what a product on a GPU adds up along.
    pub pad_inner_dim: bool,
    /// Gather sharded weights as codes, where all elements of one have a scale together.
    pub gathers_codes: bool,
}

impl DynamicScaling {
    /// The format of gradients of outputs. All else is E4M3.
    ///
    /// ```
    /// use accelerate_core::{config::Float8LinearRecipeName, fp8::{DynamicScaling, Float8}};
    /// let of = |recipe| DynamicScaling { recipe, pad_inner_dim: true, gathers_codes: false }.gradient_format();
    /// assert_eq!(of(Float8LinearRecipeName::Tensorwise), Float8::E5M2);
    /// assert_eq!(of(Float8LinearRecipeName::Rowwise), Float8::E4M3);
    /// ```
    pub fn gradient_format(self) -> Float8 {
        match self.recipe {
            Float8LinearRecipeName::Tensorwise => Float8::E5M2,
            Float8LinearRecipeName::Rowwise | Float8LinearRecipeName::RowwiseWithGwHp => Float8::E4M3,
        }
    }

    /// Are scales powers of two?
    pub fn has_powers_of_two(self) -> bool {
        self.recipe != Float8LinearRecipeName::Tensorwise
    }
}

impl Fp8Recipe {
    /// The recipe that settings ask for.
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): MS-AMP; E5M2 for both passes; a margin above 64.
    ///
    /// ```
    /// use accelerate_core::config::{FP8BackendType, FP8Settings};
    /// use accelerate_core::fp8::Fp8Recipe;
    /// let settings = FP8Settings { backend: Some(FP8BackendType::MSAMP), ..Default::default() };
    /// assert!(Fp8Recipe::of_settings(&settings).unwrap_err().to_string().contains("MS-AMP"));
    /// ```
    pub fn of_settings(settings: &FP8Settings) -> Result<Self> {
        const MOST_MARGIN: usize = 64;
        match settings.backend.unwrap_or(FP8BackendType::AO) {
            FP8BackendType::MSAMP => Err(ConfigErrorKind::NoMsamp.into()),
            FP8BackendType::AO => Ok(Self::Dynamic(DynamicScaling {
                recipe: settings.recipe_name,
                pad_inner_dim: settings.pad_inner_dim,
                gathers_codes: settings.enable_fsdp_float8_all_gather
                    && settings.recipe_name == Float8LinearRecipeName::Tensorwise,
            })),
            FP8BackendType::TE => {
                if settings.fp8_format == FP8Format::E5M2 {
                    return Err(ConfigErrorKind::E5M2Everywhere.into());
                }
                if settings.margin > MOST_MARGIN {
                    let (found, wanted) = (settings.margin as f64, "at most 64");
                    return Err(ConfigErrorKind::OutOfRange { name: "margin", found, wanted }.into());
                }
                Ok(Self::Delayed(DelayedScaling {
                    margin: settings.margin as i32,
                    interval: settings.interval,
                    is_hybrid: settings.fp8_format == FP8Format::Hybrid,
                    amax_history_len: settings.amax_history_len,
                    is_most_recent: settings.amax_compute_algo == AmaxComputeAlgorithm::MostRecent,
                    during_eval: settings.use_autocast_during_eval,
                    pad_inner_dim: settings.pad_inner_dim,
                }))
            }
        }
    }
}

/// A linear layer, as far as it matters for computing in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSize {
    /// Size of the last dim of its input.
    pub in_features: i64,
    /// Size of the last dim of its output.
    pub out_features: i64,
}

/// What sizes have to be multiples of: the kernels of GPUs multiply blocks of so many numbers.
pub const MULTIPLE: i64 = 16;

/// Which of the linear layers of a model compute in FP8, by their place in `layers`, which are all of them in the order in which
/// they were made. The first and the last do not, because a model trains badly otherwise, and neither do layers with a size that 16
/// does not divide (`filter_linear_layers` of the reference, `utils/ao.py`).
///
/// ```
/// use accelerate_core::fp8::{LinearSize, layers_in_8_bits};
/// let layers = [(16, 32), (32, 32), (32, 24), (24, 32), (32, 16)];
/// let layers = layers.map(|(in_features, out_features)| LinearSize { in_features, out_features });
/// assert_eq!(layers_in_8_bits(&layers), [1]);
/// ```
pub fn layers_in_8_bits(layers: &[LinearSize]) -> Vec<usize> {
    let last = layers.len().saturating_sub(1);
    let fits = |size: &LinearSize| size.in_features % MULTIPLE == 0 && size.out_features % MULTIPLE == 0;
    let takes_part = |(place, size): (usize, &LinearSize)| (place > 0 && place < last && fits(size)).then_some(place);
    layers.iter().enumerate().filter_map(takes_part).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&[], &[])]
    #[case(&[(16, 16)], &[])]
    #[case(&[(16, 16), (16, 16)], &[])]
    #[case(&[(8, 16), (16, 16), (16, 3)], &[1])]
    #[case(&[(16, 16), (16, 48), (48, 16), (16, 16)], &[1, 2])]
    #[case(&[(16, 16), (16, 40), (40, 16), (16, 32), (16, 16)], &[3])]
    fn the_first_the_last_and_odd_sizes_are_left_alone(#[case] sizes: &[(i64, i64)], #[case] wanted: &[usize]) {
        let size = |&(in_features, out_features): &(i64, i64)| LinearSize { in_features, out_features };
        assert_eq!(layers_in_8_bits(&sizes.iter().map(size).collect::<Vec<_>>()), wanted);
    }

    #[rstest]
    #[case(1.0, Float8::E4M3, false, 448.0)]
    #[case(448.0, Float8::E4M3, false, 1.0)]
    #[case(57344.0, Float8::E5M2, false, 1.0)]
    #[case(1e-20, Float8::E4M3, false, 4.48e14)]
    // 448 / 1.75 is a power of two itself.
    #[case(1.75, Float8::E4M3, true, 256.0)]
    #[case(1.750_000_1, Float8::E4M3, true, 256.0)]
    #[case(1.750_01, Float8::E4M3, true, 128.0)]
    #[case(1.749_999_9, Float8::E4M3, true, 256.0)]
    #[case(f32::MAX, Float8::E4M3, false, 1.316_553_8e-36)]
    fn scales_are_those_of_torchao(
        #[case] amax: f32,
        #[case] format: Float8,
        #[case] power_of_two: bool,
        #[case] wanted: f32,
    ) {
        assert_eq!(dynamic_scale(amax, format, power_of_two), wanted);
    }

    #[rstest]
    #[case(FP8Settings { backend: Some(FP8BackendType::MSAMP), ..Default::default() }, "MS-AMP is not available")]
    #[case(
        FP8Settings { backend: Some(FP8BackendType::TE), fp8_format: FP8Format::E5M2, ..Default::default() },
        "HYBRID or E4M3"
    )]
    #[case(FP8Settings { backend: Some(FP8BackendType::TE), margin: 65, ..Default::default() }, "margin is 65")]
    fn what_cannot_be_trained_is_refused(#[case] settings: FP8Settings, #[case] words: &str) {
        let error = Fp8Recipe::of_settings(&settings).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(words), "{error}");
    }
}
