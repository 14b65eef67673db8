//! Element types in files and in memory.

use safetensors::Dtype;
use tch::Kind;

/// The two names of each type that both sides know.
const PAIRS: [(Dtype, Kind); 13] = [
    (Dtype::BOOL, Kind::Bool),
    (Dtype::U8, Kind::Uint8),
    (Dtype::I8, Kind::Int8),
    (Dtype::F8_E5M2, Kind::Float8e5m2),
    (Dtype::F8_E4M3, Kind::Float8e4m3fn),
    (Dtype::I16, Kind::Int16),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I32, Kind::Int),
    (Dtype::F32, Kind::Float),
    (Dtype::C64, Kind::ComplexFloat),
    (Dtype::F64, Kind::Double),
    (Dtype::I64, Kind::Int64),
];

pub(super) fn to_kind(dtype: Dtype) -> Option<Kind> {
    PAIRS.iter().find(|(known, _)| *known == dtype).map(|(_, kind)| *kind)
}

pub(super) fn to_dtype(kind: Kind) -> Option<Dtype> {
    PAIRS.iter().find(|(_, known)| *known == kind).map(|(dtype, _)| *dtype)
}
