//! The number format that layers compute in.

use super::FloatType;
use crate::names::spelled_enum;

spelled_enum! {
    /// The number format that layers compute in while parameters stay in 32 bits
    /// (`PrecisionType` of the reference, `utils/dataclasses.py`).
    ///
    /// Read from text in upper or lower case; an unquoted YAML `no`, which is the boolean false, is read as
    /// [`MixedPrecision::No`].
    ///
    /// ```
    /// use accelerate_core::config::MixedPrecision;
    /// assert_eq!("BF16".parse::<MixedPrecision>()?, MixedPrecision::Bf16);
    /// assert_eq!(MixedPrecision::default().to_string(), "no");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    MixedPrecision, "mixed precision", false_is = No {
        /// No mixed precision: compute in the format of the parameters. The default.
        #[default]
        No = "no",
        /// IEEE half precision; losses are scaled against underflow.
        Fp16 = "fp16",
        /// bfloat16: the range of 32 bits with 8 bits of precision.
        Bf16 = "bf16",
        /// 8-bit floating point for matrix products.
        Fp8 = "fp8",
    }
}

impl MixedPrecision {
    /// The element type that layers compute in, where that is not the parameters' own.
    ///
    /// ```
    /// use accelerate_core::config::{FloatType, MixedPrecision};
    /// assert_eq!(MixedPrecision::Bf16.float_type(), Some(FloatType::BFloat16));
    /// assert_eq!(MixedPrecision::No.float_type(), None);
    /// ```
    pub const fn float_type(self) -> Option<FloatType> {
        match self {
            Self::No => None,
            Self::Fp16 => Some(FloatType::Float16),
            Self::Bf16 | Self::Fp8 => Some(FloatType::BFloat16),
        }
    }
}
