//! How tch's kinds and devices are written at the border.

use crate::error::{Error, Result};
use tch::{Device, Kind};

/// `c10::ScalarType` of a kind, a number that is the same in every release; tch keeps its own table private.
///
/// ```
/// assert_eq!(torch_ext::scalar_type(tch::Kind::BFloat16), 15);
/// ```
pub fn scalar_type(kind: Kind) -> i32 {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::QInt8 => 12,
        Kind::QUInt8 => 13,
        Kind::QInt32 => 14,
        Kind::BFloat16 => 15,
        Kind::Float8e5m2 => 23,
        Kind::Float8e4m3fn => 24,
        Kind::Float8e5m2fnuz => 25,
        Kind::Float8e4m3fnuz => 26,
    }
}

/// The kind of a `c10::ScalarType`, where tch has one.
///
/// ```
/// assert_eq!(torch_ext::kind_from_scalar_type(15), Some(tch::Kind::BFloat16));
/// ```
pub fn kind_from_scalar_type(value: i32) -> Option<Kind> {
    const KINDS: [Kind; 20] = [
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::Float,
        Kind::Double,
        Kind::ComplexHalf,
        Kind::ComplexFloat,
        Kind::ComplexDouble,
        Kind::Bool,
        Kind::QInt8,
        Kind::QUInt8,
        Kind::QInt32,
        Kind::BFloat16,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2fnuz,
        Kind::Float8e4m3fnuz,
    ];
    KINDS.into_iter().find(|&kind| scalar_type(kind) == value)
}

/// `c10::DeviceType` of a device.
pub(crate) fn device_type(device: Device) -> i32 {
    match device {
        Device::Cpu => 0,
        Device::Cuda(_) => 1,
        Device::Vulkan => 10,
        Device::Mps => 13,
    }
}

/// Refuses lists of unequal length: the kernels index all of them by the first one's length.
pub(crate) fn check_lengths(operation: &'static str, first: (&str, usize), others: &[(&str, usize)]) -> Result<()> {
    for (name, length) in others {
        if *length != first.1 {
            return Err(Error::invalid(
                operation,
                format!(
                    "`{}` has {} tensors, but `{name}` has {length}; every list needs one tensor per entry of `{}`",
                    first.0, first.1, first.0
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_way_there_and_back() {
        for number in 0..=26 {
            if let Some(kind) = kind_from_scalar_type(number) {
                assert_eq!(scalar_type(kind), number);
            }
        }
        assert_eq!(kind_from_scalar_type(15), Some(Kind::BFloat16));
        assert_eq!(kind_from_scalar_type(16), None);
    }
}
