//! How much an element takes.

use crate::error::device_map::DeviceMapErrorKind;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// An element type by PyTorch's name, or one of the reference's own for quantised weights: `int2`, `int4`, `fp8`.
///
/// ```
/// use accelerate_core::device_map::ElementType;
/// let [half, packed] = ["torch.float16", "int4"].map(|name| name.parse::<ElementType>().unwrap());
/// assert_eq!((half.bits(), packed.bits()), (16, 4));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ElementType {
    name: String,
    bits: u32,
}

impl ElementType {
    /// PyTorch's name, without `torch.`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bits of one element. A `bool` counts as one, as the reference counts it.
    pub const fn bits(&self) -> u32 {
        self.bits
    }

    /// Does it stay as it is when a model is cast? Integers and truth values do.
    pub(super) fn is_kept(&self) -> bool {
        ["uint", "int", "bool"].iter().any(|beginning| self.name.starts_with(beginning))
    }
}

impl FromStr for ElementType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.trim();
        let name = name.strip_prefix("torch.").unwrap_or(name);
        let bits = match name {
            "bool" => 1,
            "int2" => 2,
            "int4" => 4,
            "fp8" | "float8_e4m3fn" | "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz" | "float8_e8m0fnu" => 8,
            "int8" | "uint8" => 8,
            "int16" | "uint16" | "float16" | "bfloat16" => 16,
            "int32" | "uint32" | "float32" => 32,
            "int64" | "uint64" | "float64" | "complex64" => 64,
            "complex128" => 128,
            _ => return Err(DeviceMapErrorKind::ElementType { found: text.to_owned() }.into()),
        };
        Ok(Self { name: name.to_owned(), bits })
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}
