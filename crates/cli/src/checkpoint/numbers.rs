//! How far numbers are from each other.

use accelerate_core::weight_files::Plain;
use safetensors::Dtype;
use serde::{Serialize, Serializer};

/// How two tensors of one shape and element type differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Difference {
    pub(super) num_elements: u64,
    /// How many are not equal.
    pub(super) num_different: u64,
    /// The largest distance of two numbers that are not equal. `None` where all that differ are NaN or infinite, or the type has
    /// no distances. Infinite where it is beyond what a float of 64 bits can be.
    #[serde(serialize_with = "as_number")]
    pub(super) max_absolute: Option<f64>,
    /// The same as a part of the larger one of the two.
    pub(super) max_relative: Option<f64>,
    /// How many of those that are not equal have no distance: one of them is NaN or infinite.
    pub(super) num_not_finite: u64,
}

/// JSON has no infinite numbers, and null would be taken for no distance.
fn as_number<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match number {
        Some(number) if number.is_infinite() => serializer.serialize_str("inf"),
        number => number.serialize(serializer),
    }
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
        if relative.is_nan() {
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
    /// NaN where one of the two is NaN or infinite.
    relative: f64,
}

impl Distance {
    pub(super) fn of(left: f64, right: f64) -> Self {
        let absolute = (left - right).abs();
        let largest = left.abs().max(right.abs());
        // Two large numbers of opposite signs may be farther from each other than any float is from 0. Their parts are not.
        let is_beyond = absolute.is_infinite() && largest.is_finite();
        let relative = if is_beyond { (left / largest - right / largest).abs() } else { part(absolute, largest) };
        Self { absolute, relative }
    }

    /// Of complex numbers, each a real and an imaginary part that 32 bits hold, so that nothing overflows here.
    fn of_complex(left: [f64; 2], right: [f64; 2]) -> Self {
        let absolute = f64::hypot(left[0] - right[0], left[1] - right[1]);
        let [left, right] = [left, right].map(|[real, imaginary]| f64::hypot(real, imaginary));
        Self { absolute, relative: part(absolute, left.max(right)) }
    }

    pub(super) fn is_within(self, tolerance: f64) -> bool {
        self.absolute <= tolerance || self.relative <= tolerance
    }
}

/// A distance as a part of the larger number. Infinite numbers of one sign have no distance, and NaN has none to anything.
fn part(absolute: f64, largest: f64) -> f64 {
    if absolute == 0.0 { 0.0 } else { absolute / largest }
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
    if let (Dtype::C64, Some(left), Some(right)) = (dtype, complex(left), complex(right)) {
        return Some(Distance::of_complex(left, right));
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
        dtype => eight_bits(dtype, *bytes.first()?)?,
    })
}

/// The real and the imaginary part of a complex number of 64 bits.
fn complex(bytes: &[u8]) -> Option<[f64; 2]> {
    let (real, imaginary) = bytes.split_at_checked(4)?;
    Some([float(Dtype::F32, real)?, float(Dtype::F32, imaginary)?])
}

/// The number of IEEE 754's binary16.
fn half(bits: u16) -> f64 {
    match (bits & 0x7c00, bits & 0x3ff) {
        (0x7c00, 0) if bits >> 15 == 0 => f64::INFINITY,
        (0x7c00, 0) => f64::NEG_INFINITY,
        (0x7c00, _) => f64::NAN,
        _ => without_exceptions(bits.into(), [5, 10], 15),
    }
}

/// The number of a type of eight bits that has an exponent: <https://arxiv.org/abs/2209.05433>, those that end with `FNUZ`
/// <https://arxiv.org/abs/2206.02915>, and `E8M0`, the scales of OCP's microscaling formats.
fn eight_bits(dtype: Dtype, bits: u8) -> Option<f64> {
    Some(match (dtype, bits) {
        (Dtype::F8_E4M3, 0x7f | 0xff) | (Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ, 0x80) | (Dtype::F8_E8M0, 0xff) => {
            f64::NAN
        }
        // The upper half of a float of 16 bits.
        (Dtype::F8_E5M2, _) => half(u16::from(bits) << 8),
        (Dtype::F8_E4M3, _) => without_exceptions(bits.into(), [4, 3], 7),
        (Dtype::F8_E4M3FNUZ, _) => without_exceptions(bits.into(), [4, 3], 8),
        (Dtype::F8_E5M2FNUZ, _) => without_exceptions(bits.into(), [5, 2], 16),
        (Dtype::F8_E8M0, _) => 2f64.powi(i32::from(bits) - 127),
        _ => return None,
    })
}

/// The number whose sign, exponent and fraction these bits are, where none of them stand for NaN or infinity.
fn without_exceptions(bits: u32, [exponent_bits, fraction_bits]: [i32; 2], bias: i32) -> f64 {
    let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)).cast_signed();
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1));
    let size = match exponent {
        // Subnormal numbers have no leading one.
        0 => fraction * 2f64.powi(1 - bias - fraction_bits),
        _ => (fraction + f64::from(1 << fraction_bits)) * 2f64.powi(exponent - bias - fraction_bits),
    };
    if bits >> (exponent_bits + fraction_bits) == 0 { size } else { -size }
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

    /// The largest and the smallest numbers are those that `torch.finfo` gives.
    #[rstest]
    #[case(Dtype::F8_E5M2, 0x7b, 57344.0)]
    #[case(Dtype::F8_E5M2, 0x01, 1.525_878_906_25e-5)]
    #[case(Dtype::F8_E5M2, 0x80, -0.0)]
    #[case(Dtype::F8_E5M2, 0xfc, f64::NEG_INFINITY)]
    #[case(Dtype::F8_E5M2, 0x7d, f64::NAN)]
    #[case(Dtype::F8_E4M3, 0x7e, 448.0)]
    #[case(Dtype::F8_E4M3, 0x38, 1.0)]
    #[case(Dtype::F8_E4M3, 0x08, 0.015_625)]
    #[case(Dtype::F8_E4M3, 0x81, -0.001_953_125)]
    #[case(Dtype::F8_E4M3, 0xff, f64::NAN)]
    #[case(Dtype::F8_E4M3FNUZ, 0x7f, 240.0)]
    #[case(Dtype::F8_E4M3FNUZ, 0x40, 1.0)]
    #[case(Dtype::F8_E4M3FNUZ, 0x01, 0.000_976_562_5)]
    #[case(Dtype::F8_E4M3FNUZ, 0x80, f64::NAN)]
    #[case(Dtype::F8_E5M2FNUZ, 0xff, -57344.0)]
    #[case(Dtype::F8_E5M2FNUZ, 0x01, 7.629_394_531_25e-6)]
    #[case(Dtype::F8_E5M2FNUZ, 0x80, f64::NAN)]
    #[case(Dtype::F8_E8M0, 0x7f, 1.0)]
    #[case(Dtype::F8_E8M0, 0x00, 5.877_471_754_111_438e-39)]
    #[case(Dtype::F8_E8M0, 0xfe, 1.701_411_834_604_692_3e38)]
    #[case(Dtype::F8_E8M0, 0xff, f64::NAN)]
    fn numbers_of_8_bits(#[case] dtype: Dtype, #[case] bits: u8, #[case] wanted: f64) {
        let found = float(dtype, &[bits]);
        assert_eq!(found.map(f64::to_bits), Some(wanted.to_bits()), "{found:?}");
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

    /// The largest numbers are twice as far apart as a float can be.
    #[rstest]
    #[case(1e308, -1e308, None, different(1, f64::INFINITY, 2.0))]
    #[case(-f64::MAX, f64::MAX, None, different(1, f64::INFINITY, 2.0))]
    #[case(f64::MAX, -1e308, Some(1.5), different(1, f64::INFINITY, 1.0 + 1e308 / f64::MAX))]
    #[case(f64::MAX, -1e308, Some(1.6), without_distance(0, 0))]
    #[case(f64::MAX, f64::INFINITY, Some(1e9), without_distance(1, 1))]
    #[case(f64::MAX, 1e308, None, different(1, f64::MAX - 1e308, (f64::MAX - 1e308) / f64::MAX))]
    fn distances_beyond_all_floats_are_infinite(
        #[case] left: f64,
        #[case] right: f64,
        #[case] tolerance: Option<f64>,
        #[case] wanted: Difference,
    ) {
        let mut found = Difference::default();
        let [left, right] = [left, right].map(|number| [number.to_le_bytes(), 1f64.to_le_bytes()].concat());
        found.add(Dtype::F64, [&left, &right], tolerance);
        assert_eq!(found, wanted);
        let infinite = wanted.max_absolute.is_some_and(f64::is_infinite);
        assert_eq!(serde_json::to_value(found).is_ok_and(|json| json["max_absolute"] == "inf"), infinite);
    }

    /// Complex numbers are as far apart as points of a plane.
    #[rstest]
    #[case([3.0, 4.0], [3.0, 4.0], None, without_distance(0, 0))]
    #[case([3.0, 4.0], [0.0, 0.0], None, different(1, 5.0, 1.0))]
    #[case([3.0, 4.0], [6.0, 8.0], Some(0.25), different(1, 5.0, 0.5))]
    #[case([3.0, 4.0], [6.0, 8.0], Some(0.5), without_distance(0, 0))]
    #[case([1.0, 1e-9], [1.0, -1e-9], Some(1e-6), without_distance(0, 0))]
    #[case([0.0, 1.0], [-0.0, 1.0], Some(0.0), without_distance(0, 0))]
    #[case([f32::MAX, 0.0], [-f32::MAX, 0.0], None, different(1, 2.0 * f64::from(f32::MAX), 2.0))]
    #[case([f32::NAN, 1.0], [0.0, 1.0], Some(1e9), without_distance(1, 1))]
    #[case([f32::INFINITY, 0.0], [0.0, 0.0], Some(1e9), without_distance(1, 1))]
    #[case([f32::INFINITY, f32::NAN], [0.0, 0.0], Some(1e9), without_distance(1, 1))]
    fn complex_numbers(
        #[case] left: [f32; 2],
        #[case] right: [f32; 2],
        #[case] tolerance: Option<f64>,
        #[case] wanted: Difference,
    ) {
        let mut found = Difference::default();
        let [left, right] = [left, right].map(of_f32);
        found.add(Dtype::C64, [&left, &right], tolerance);
        assert_eq!(found, Difference { num_elements: 1, ..wanted });
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
    #[case(Dtype::F8_E5M2, &[0x3c], &[0x40], Some(1.0))]
    #[case(Dtype::F8_E4M3, &[0x38], &[0x40], Some(1.0))]
    #[case(Dtype::F8_E4M3FNUZ, &[0x40], &[0x48], Some(1.0))]
    #[case(Dtype::F8_E5M2FNUZ, &[0x40], &[0x44], Some(1.0))]
    #[case(Dtype::F8_E8M0, &[127], &[128], Some(1.0))]
    #[case(Dtype::C64, &[0; 8], &[0, 0, 0x80, 0x3f, 0, 0, 0, 0], Some(1.0))]
    fn every_type(#[case] dtype: Dtype, #[case] left: &[u8], #[case] right: &[u8], #[case] wanted: Option<f64>) {
        let mut found = Difference::default();
        found.add(dtype, [left, right], None);
        assert_eq!((found.num_elements, found.num_different, found.max_absolute), (1, 1, wanted));
    }
}
