//! The numbers that codes stand for.

use crate::config::QuantType;

/// The sixteen numbers of four bits, by code: from "QLoRA" (arXiv 2305.14314) for nf4; for fp4 a float of three bits and a sign,
/// whose largest is 1.
///
/// ```
/// use accelerate_core::{config::QuantType, quantization::four_bit_values};
/// assert_eq!(four_bit_values(QuantType::Nf4)[7], 0.0);
/// assert_eq!(four_bit_values(QuantType::Fp4)[3], 1.0);
/// ```
#[allow(clippy::excessive_precision, reason = "the digits of the original")]
pub fn four_bit_values(quant_type: QuantType) -> [f32; 16] {
    match quant_type {
        QuantType::Nf4 => [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ],
        QuantType::Fp4 => {
            const SIZES: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
            // The ninth code is zero again, without a sign.
            std::array::from_fn(|code| match code {
                8 => 0.0,
                0..8 => SIZES[code] / 12.0,
                _ => -SIZES[code - 8] / 12.0,
            })
        }
    }
}

/// The 256 numbers that scales of four bits are written by, in rising order: `create_dynamic_map(signed=True)` of bitsandbytes
/// (arXiv 2110.02861). There are seven decades; each is cut into twice as many parts as the one below, whose middles are
/// the numbers.
///
/// ```
/// let map = accelerate_core::quantization::dynamic_map();
/// assert_eq!((map[127], map[255]), (0.0, 1.0));
/// ```
pub fn dynamic_map() -> [f32; 256] {
    let mut numbers = vec![0.0, 1.0];
    for decade in 0..7_i32 {
        let num_parts = 1_i32 << decade;
        // torch.linspace(0.1, 1) counts from both ends, and rounds once for each number.
        let step = (1.0 - 0.1_f32) / num_parts as f32;
        let border = |place: i32| match place < (num_parts + 1) / 2 {
            true => step.mul_add(place as f32, 0.1),
            false => (-step).mul_add((num_parts - place) as f32, 1.0),
        };
        let scale = 10_f64.powi(decade - 6) as f32;
        for part in 0..num_parts {
            let number = scale * ((border(part) + border(part + 1)) / 2.0);
            numbers.extend([number, -number]);
        }
    }
    numbers.sort_by(f32::total_cmp);
    std::array::from_fn(|code| numbers.get(code).copied().unwrap_or_default())
}
