//! How far numbers are from each other.

use accelerate_core::weight_files::Plain;
use safetensors::Dtype;
use serde::Serialize;

/// How two tensors of one shape and element type differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Difference {
    pub(super) num_elements: u64,
    /// How many are not equal.
    pub(super) num_different: u64,
    /// The largest distance of two numbers that are not equal. `None` where none is finite, or the type has none.
    pub(super) max_absolute: Option<f64>,
    /// The same as a part of the larger one of the two.
    pub(super) max_relative: Option<f64>,
    /// How many of those that are not equal have no finite distance: one of them is NaN or infinite.
    pub(super) num_not_finite: u64,
}

impl Difference {
    /// Counts more elements, given by their bytes. Without `tolerance` equal means the same bits, so that NaN is equal to the
    /// same NaN, and -0 not to 0. With it, either distance is at most so large.
    pub(super) fn add(&mut self, dtype: Dtype, [left, right]: [&[u8]; 2], tolerance: Option<f64>) {
        let size = (dtype.bitsize() / 8).max(1);
        self.num_elements += (left.len() / size) as u64;
        if left == right {
            return;
        }
        for (left, right) in left.chunks_exact(size).zip(right.chunks_exact(size)) {
            if left != right {
                self.add_different(distance(dtype, left, right), tolerance);
            }
        }
    }

    /// Of two elements with different bits.
    fn add_different(&mut self, distance: Option<Distance>, tolerance: Option<f64>) {
        let Some(Distance { absolute, relative }) = distance else {
            self.num_different += 1;
            return;
        };
        if tolerance.is_some_and(|most| absolute <= most || relative <= most) {
            return;
        }
        self.num_different += 1;
        if !absolute.is_finite() {
            self.num_not_finite += 1;
            return;
        }
        let larger = |most: Option<f64>, found: f64| Some(most.map_or(found, |most| most.max(found)));
        self.max_absolute = larger(self.max_absolute, absolute);
        self.max_relative = larger(self.max_relative, relative);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Distance {
    absolute: f64,
    relative: f64,
}

impl Distance {
    pub(super) fn of(left: f64, right: f64) -> Self {
        let absolute = (left - right).abs();
        let largest = left.abs().max(right.abs());
        // Infinite numbers of one sign have no distance, and NaN has none to anything.
        Self { absolute, relative: if absolute == 0.0 { 0.0 } else { absolute / largest } }
    }

    pub(super) fn is_within(self, tolerance: f64) -> bool {
        self.absolute <= tolerance || self.relative <= tolerance
    }
}

/// The number that these bytes are, if the element type has numbers that Python has, too.
pub(super) fn number<T>(dtype: Dtype, bytes: &[u8]) -> Option<Plain<T>> {
    let whole = || {
        let number = integer(dtype, bytes)?;
        i64::try_from(number).map(Plain::Int).or_else(|_| u64::try_from(number).map(Plain::LargeInt)).ok()
    };
    float(dtype, bytes).map(Plain::Float).or_else(whole)
}

/// `None` for types that are compared by their bits only.
fn distance(dtype: Dtype, left: &[u8], right: &[u8]) -> Option<Distance> {
    if let (Some(left), Some(right)) = (float(dtype, left), float(dtype, right)) {
        return Some(Distance::of(left, right));
    }
    // Neighbours among large integers are one float.
    let (left, right) = (integer(dtype, left)?, integer(dtype, right)?);
    let absolute = (left - right).unsigned_abs() as f64;
    let largest = left.unsigned_abs().max(right.unsigned_abs()) as f64;
    Some(Distance { absolute, relative: absolute / largest })
}

fn float(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().ok()?).into(),
        // The upper half of a float of 32 bits.
        Dtype::BF16 => f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().ok()?)) << 16).into(),
        Dtype::F16 => half(u16::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}

/// The number of IEEE 754's binary16.
fn half(bits: u16) -> f64 {
    const FRACTION_BITS: i32 = 10;
    let (exponent, fraction) = (i32::from(bits >> FRACTION_BITS & 0x1f), f64::from(bits & 0x3ff));
    let size = match exponent {
        // Subnormal numbers have no leading one.
        0 => fraction * 2f64.powi(-14 - FRACTION_BITS),
        0x1f if fraction == 0.0 => f64::INFINITY,
        0x1f => f64::NAN,
        _ => (fraction + f64::from(1 << FRACTION_BITS)) * 2f64.powi(exponent - 15 - FRACTION_BITS),
    };
    if bits >> 15 == 0 { size } else { -size }
}

fn integer(dtype: Dtype, bytes: &[u8]) -> Option<i128> {
    Some(match dtype {
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::U64 => u64::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::I32 => i32::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::U32 => u32::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::I16 => i16::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::U16 => u16::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::I8 => i8::from_le_bytes(bytes.try_into().ok()?).into(),
        Dtype::U8 | Dtype::BOOL => u8::from_le_bytes(bytes.try_into().ok()?).into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0x0000, 0.0)]
    #[case(0x8000, -0.0)]
    #[case(0x3c00, 1.0)]
    #[case(0xc000, -2.0)]
    #[case(0x7bff, 65504.0)]
    #[case(0x0400, 6.103_515_625e-5)]
    #[case(0x0001, 5.960_464_477_539_063e-8)]
    #[case(0x03ff, 6.097_555_160_522_461e-5)]
    #[case(0x7c00, f64::INFINITY)]
    #[case(0xfc00, f64::NEG_INFINITY)]
    #[case(0x3555, 0.333_251_953_125)]
    fn numbers_of_16_bits(#[case] bits: u16, #[case] wanted: f64) {
        assert_eq!(half(bits).to_bits(), wanted.to_bits());
    }

    fn different(num_different: u64, absolute: f64, relative: f64) -> Difference {
        let (max_absolute, max_relative) = (Some(absolute), Some(relative));
        Difference { num_elements: 2, num_different, max_absolute, max_relative, num_not_finite: 0 }
    }

    fn without_distance(num_different: u64, num_not_finite: u64) -> Difference {
        Difference { num_elements: 2, num_different, num_not_finite, ..Default::default() }
    }

    fn of_f32(numbers: [f32; 2]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[rstest]
    #[case([1.0, 2.0], [1.0, 2.0], None, without_distance(0, 0))]
    #[case([1.0, 2.0], [1.0, 2.5], None, different(1, 0.5, 0.2))]
    #[case([1.0, 2.0], [0.0, 2.5], None, different(2, 1.0, 1.0))]
    #[case([f32::NAN, 1.0], [f32::NAN, 1.0], None, without_distance(0, 0))]
    #[case([f32::NAN, 1.0], [2.0, 1.0], None, without_distance(1, 1))]
    #[case([f32::NAN, 1.0], [2.0, 1.0], Some(1e9), without_distance(1, 1))]
    #[case([f32::INFINITY, 1.0], [f32::NEG_INFINITY, 1.0], Some(0.5), without_distance(1, 1))]
    #[case([0.0, 1.0], [-0.0, 1.0], None, different(1, 0.0, 0.0))]
    #[case([0.0, 1.0], [-0.0, 1.0], Some(0.0), without_distance(0, 0))]
    #[case([1e-9, 1.0], [2e-9, 1.0], Some(1e-6), without_distance(0, 0))]
    #[case([1e9, 1.0], [1_000_000_512.0, 1.0], Some(1e-6), without_distance(0, 0))]
    #[case([1.0, 4.0], [2.0, 4.0], Some(0.25), different(1, 1.0, 0.5))]
    fn floats(
        #[case] left: [f32; 2],
        #[case] right: [f32; 2],
        #[case] tolerance: Option<f64>,
        #[case] wanted: Difference,
    ) {
        let mut found = Difference::default();
        found.add(Dtype::F32, [&of_f32(left), &of_f32(right)], tolerance);
        assert_eq!(found, wanted);
    }

    /// Each pair is one apart, whatever a float makes of it.
    #[rstest]
    #[case(Dtype::I64, &i64::MAX.to_le_bytes(), &(i64::MAX - 1).to_le_bytes(), Some(1.0))]
    #[case(Dtype::U64, &u64::MAX.to_le_bytes(), &(u64::MAX - 1).to_le_bytes(), Some(1.0))]
    #[case(Dtype::I32, &[0, 0, 0, 0], &[255, 255, 255, 255], Some(1.0))]
    #[case(Dtype::U32, &[0, 1, 0, 0], &[255, 0, 0, 0], Some(1.0))]
    #[case(Dtype::I16, &[0, 0], &[255, 255], Some(1.0))]
    #[case(Dtype::U16, &[0, 1], &[255, 0], Some(1.0))]
    #[case(Dtype::I8, &[0], &[255], Some(1.0))]
    #[case(Dtype::U8, &[1], &[2], Some(1.0))]
    #[case(Dtype::BOOL, &[0], &[1], Some(1.0))]
    #[case(Dtype::BF16, &[0x80, 0x3f], &[0x00, 0x40], Some(1.0))]
    #[case(Dtype::F16, &[0x00, 0x3c], &[0x00, 0x40], Some(1.0))]
    #[case(Dtype::F64, &1f64.to_le_bytes(), &2f64.to_le_bytes(), Some(1.0))]
    #[case(Dtype::F8_E4M3, &[1], &[2], None)]
    #[case(Dtype::C64, &[0; 8], &[1; 8], None)]
    fn every_type(#[case] dtype: Dtype, #[case] left: &[u8], #[case] right: &[u8], #[case] wanted: Option<f64>) {
        let mut found = Difference::default();
        found.add(dtype, [left, right], None);
        assert_eq!((found.num_elements, found.num_different, found.max_absolute), (1, 1, wanted));
    }
}
