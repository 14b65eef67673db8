//! Element types of offloaded weights by the names that NumPy and PyTorch have for them.

use crate::error::{BigModelError, Result};
use accelerate_core::device_map::ElementType;
use safetensors::Dtype;
use tch::Kind;

/// NumPy has no name for the last ones: there it is PyTorch's.
const NAMES: [(&str, Kind, Dtype); 13] = [
    ("bool", Kind::Bool, Dtype::BOOL),
    ("uint8", Kind::Uint8, Dtype::U8),
    ("int8", Kind::Int8, Dtype::I8),
    ("int16", Kind::Int16, Dtype::I16),
    ("int32", Kind::Int, Dtype::I32),
    ("int64", Kind::Int64, Dtype::I64),
    ("float16", Kind::Half, Dtype::F16),
    ("float32", Kind::Float, Dtype::F32),
    ("float64", Kind::Double, Dtype::F64),
    ("complex64", Kind::ComplexFloat, Dtype::C64),
    ("bfloat16", Kind::BFloat16, Dtype::BF16),
    ("float8_e4m3fn", Kind::Float8e4m3fn, Dtype::F8_E4M3),
    ("float8_e5m2", Kind::Float8e5m2, Dtype::F8_E5M2),
];

pub(super) fn kind_of(name: &str) -> Option<Kind> {
    NAMES.iter().find(|(known, ..)| *known == name).map(|(_, kind, _)| *kind)
}

pub(super) fn kind_in_file(dtype: Dtype) -> Option<Kind> {
    NAMES.iter().find(|(_, _, known)| *known == dtype).map(|(_, kind, _)| *kind)
}

pub(super) fn name_of(kind: Kind) -> Option<&'static str> {
    NAMES.iter().find(|(_, known, _)| *known == kind).map(|(name, ..)| *name)
}

/// For device maps.
pub(crate) fn element_type(kind: Kind) -> Result<ElementType> {
    let name = name_of(kind).ok_or_else(|| BigModelError::KindNotWritable { name: format!("{kind:?}"), kind })?;
    Ok(name.parse()?)
}
