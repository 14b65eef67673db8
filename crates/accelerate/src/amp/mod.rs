//! Mixed precision: which number format layers compute in, and how small gradients survive fp16.
//!
//! Parameters, gradients and optimizer state stay in float32. `prepare` makes the forward pass compute
//! in the format of [`MixedPrecision`]; with fp16 a [`GradScaler`](crate::optim::GradScaler) keeps gradients in range.

mod precision;

pub use accelerate_core::config::MixedPrecision;
pub(crate) use precision::Precision;

use accelerate_core::config::FloatType;
use tch::Kind;

/// The type as libtorch has it.
pub(crate) fn float_kind(float_type: FloatType) -> Kind {
    match float_type {
        FloatType::Float32 => Kind::Float,
        FloatType::BFloat16 => Kind::BFloat16,
        FloatType::Float16 => Kind::Half,
    }
}

/// The format that matrix products are computed in under autocast; `None` without mixed precision.
///
/// FP8 is not a format of autocast: what is not an FP8 matrix product is computed in bfloat16.
///
/// ```
/// use accelerate::{amp::{MixedPrecision, autocast_kind}, tch::Kind};
///
/// assert_eq!(autocast_kind(MixedPrecision::Fp16), Some(Kind::Half));
/// assert_eq!(autocast_kind(MixedPrecision::No), None);
/// ```
pub fn autocast_kind(precision: MixedPrecision) -> Option<Kind> {
    match precision {
        MixedPrecision::No => None,
        MixedPrecision::Fp16 => Some(Kind::Half),
        MixedPrecision::Bf16 | MixedPrecision::Fp8 => Some(Kind::BFloat16),
    }
}

/// Do gradients of this format need loss scaling? Only fp16's range is that small.
///
/// ```
/// use accelerate::amp::{MixedPrecision, needs_grad_scaler};
///
/// assert!(needs_grad_scaler(MixedPrecision::Fp16));
/// assert!(!needs_grad_scaler(MixedPrecision::Bf16));
/// ```
pub fn needs_grad_scaler(precision: MixedPrecision) -> bool {
    precision == MixedPrecision::Fp16
}
