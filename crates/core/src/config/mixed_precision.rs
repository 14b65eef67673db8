//! The number format that layers compute in.

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
