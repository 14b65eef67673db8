//! State tensors in 8 bits: a code for each entry, and a scale for each block of entries.
//!
//! The method of Dettmers and others, "8-bit Optimizers via Block-wise Quantization" (2021): the entries of
//! a block are divided by the largest of their sizes, and the quotient becomes the number of the nearest
//! of 256 fixed values. The values are dense near 0, because most entries of a block are far
//! smaller than its largest.

use crate::error::Result;
use accelerate_core::checkpoint::BLOCK_ELEMENTS;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// Entries that share a scale.
const BLOCK_SIZE: i64 = BLOCK_ELEMENTS as i64;

/// Smaller tensors are kept exact: they are many (biases, norms), sensitive, and weigh nothing.
const MIN_ENTRIES: usize = 4096;

/// Is the state of a parameter with that many entries kept in 8 bits? They are those of the whole parameter: the shards of one
/// are all kept alike, however it is cut.
pub(super) const fn is_quantized(num_entries: usize) -> bool {
    MIN_ENTRIES <= num_entries && num_entries.is_multiple_of(BLOCK_ELEMENTS)
}

/// Number of blocks of so many entries. The last block of a shard may have fewer than the others.
pub(super) const fn num_blocks(num_entries: usize) -> i64 {
    num_entries.div_ceil(BLOCK_ELEMENTS) as i64
}

/// The values that codes stand for, in rising order.
///
/// There are seven decades, the lowest from 1e-7 to 1e-6 and the highest from 0.1 to 1. Each is cut into
/// equal parts, twice as many as the decade below, whose middles are the values. Unsigned, the
/// lowest has 2 and the highest 128. Signed, it is half as many, on both sides. 0 and 1 are added.
fn dynamic_map(signed: bool) -> Vec<f64> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..7 {
        let num_parts = if signed { 1 << decade } else { 2 << decade };
        for part in 0..num_parts {
            let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(num_parts);
            let value = middle * 10f64.powi(decade - 6);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    values
}

/// Turns numbers into codes and back.
///
/// An entry comes back with an error of at most 0.0071 (signed) or 0.0036 (unsigned) of the largest in
/// its block, and of at most 6.2% (signed) or 3.3% (unsigned) of itself if it is no smaller than a
/// tenth of the largest. Each further tenth about doubles the share.
#[derive(Debug)]
pub(super) struct Codebook {
    /// Float, 256.
    values: Tensor,
    /// Float, 255: where one code ends and the next begins.
    borders: Tensor,
}

impl Codebook {
    /// For averages of gradients.
    pub(super) fn signed(device: Device) -> Result<Self> {
        Self::new(&dynamic_map(true), device)
    }

    /// For averages of squares.
    ///
    /// What is above 0 never becomes 0 here, but at least the lowest code, 3.25e-7 of the largest in the
    /// block. An entry without past would be divided by the root of next to nothing when its gradient
    /// passes through 0: with gradients of 1 to 1000 in a block, single weights move a thousand times as
    /// far as the learning rate allows.
    pub(super) fn unsigned(device: Device) -> Result<Self> {
        Self::new(&dynamic_map(false), device)
    }

    fn new(values: &[f64], device: Device) -> Result<Self> {
        let mut borders: Vec<f64> =
            values.iter().zip(values.iter().skip(1)).map(|(low, high)| (low + high) / 2.0).collect();
        if let ([0.0, ..], Some(lowest)) = (values, borders.first_mut()) {
            *lowest = f64::from(f32::MIN_POSITIVE);
        }
        let tensor = |numbers: &[f64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(numbers)?.f_to_kind(Kind::Float)?.f_to_device(device)?)
        };
        Ok(Self { values: tensor(values)?, borders: tensor(&borders)? })
    }

    /// Codes of the tensor's shape (uint8), and one scale for each block (float).
    pub(super) fn quantize(&self, tensor: &Tensor) -> Result<(Tensor, Tensor)> {
        let blocks = in_blocks(&tensor.f_to_kind(Kind::Float)?)?;
        // A block of zeros must not be divided by zero.
        let scale = scalar::clamp_min(&blocks.f_abs()?.f_amax([1], false)?, f64::from(f32::MIN_POSITIVE))?;
        let codes = blocks.f_div(&scale.f_unsqueeze(1)?)?.f_bucketize(&self.borders, true, true)?;
        Ok((out_of_blocks(&codes.f_to_kind(Kind::Uint8)?, &tensor.size())?, scale))
    }

    /// The numbers that [`quantize`](Self::quantize) wrote down, as floats.
    pub(super) fn dequantize(&self, codes: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let indices = codes.f_to_kind(Kind::Int)?.f_reshape(-1)?;
        let blocks = in_blocks(&self.values.f_index_select(0, &indices)?)?;
        out_of_blocks(&blocks.f_mul(&scale.f_unsqueeze(1)?)?, &codes.size())
    }
}

/// `[blocks, BLOCK_SIZE]`, the last one filled up with zeros.
fn in_blocks(tensor: &Tensor) -> Result<Tensor> {
    let (num_entries, num_blocks) = (tensor.numel() as i64, num_blocks(tensor.numel()));
    let flat = tensor.f_reshape([num_entries])?;
    let missing = num_blocks * BLOCK_SIZE - num_entries;
    let filled = if missing == 0 { flat } else { flat.f_constant_pad_nd([0, missing])? };
    Ok(filled.f_reshape([num_blocks, BLOCK_SIZE])?)
}

/// The entries without those that fill up the last block.
fn out_of_blocks(blocks: &Tensor, size: &[i64]) -> Result<Tensor> {
    Ok(blocks.f_reshape([-1])?.f_narrow(0, 0, size.iter().product())?.f_reshape(size)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn optim_maps_have_256_values_and_the_ends_of_the_paper() {
        for (signed, lowest, least_above_zero) in [(true, -0.992_968_75, 0.55e-6), (false, 0.0, 0.325e-6)] {
            let map = dynamic_map(signed);
            assert_eq!(map.len(), 256);
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]), "strictly rising");
            assert!((map[0] - lowest).abs() < 1e-12, "{}", map[0]);
            assert_eq!(map[255], 1.0);
            let zero = map.iter().position(|&value| value == 0.0).unwrap();
            assert!((map[zero + 1] - least_above_zero).abs() < 1e-12, "{}", map[zero + 1]);
        }
    }

    #[test]
    fn optim_numbers_come_back_as_worked_out_by_hand() {
        // Around 0.5 signed values are 0.1 + 0.9 * (part + 0.5) / 64, unsigned ones have 128 parts.
        let signed_half = 0.1 + 0.9 * 28.5 / 64.0;
        let unsigned_half = 0.1 + 0.9 * 56.5 / 128.0;
        let rows = [
            // (signed, scale, entry over scale, comes back as)
            (true, 2.0, 1.0, 1.0),
            (true, 2.0, -1.0, -(0.1 + 0.9 * 63.5 / 64.0)),
            (true, 2.0, 0.5, signed_half),
            (true, 2.0, -0.5, -signed_half),
            (true, 2.0, 1e-9, 0.0),
            (true, 1e-20, 0.5, signed_half),
            (false, 3.0, 0.5, unsigned_half),
            (false, 3.0, 0.4e-6, 0.325e-6),
            // Squares above 0 stay above 0.
            (false, 3.0, 1e-7, 0.325e-6),
            (false, 3.0, 1e-30, 0.325e-6),
            (false, 3.0, 0.0, 0.0),
            (false, 1e-30, 1.0, 1.0),
        ];
        for (signed, scale, entry, wanted) in rows {
            let book = if signed { Codebook::signed(Device::Cpu) } else { Codebook::unsigned(Device::Cpu) }.unwrap();
            let mut block = vec![0.0; 512];
            // Only the first block; the second is of zeros and stays so.
            (block[0], block[1]) = (scale, entry * scale);
            let (codes, scales) = book.quantize(&Tensor::from_slice(&block).reshape([2, 16, 16])).unwrap();
            assert_eq!((codes.kind(), codes.size()), (Kind::Uint8, vec![2, 16, 16]));
            let found = book.dequantize(&codes, &scales).unwrap().to_kind(Kind::Double);
            assert!((found.double_value(&[0, 0, 0]) / scale - 1.0).abs() < 1e-6);
            let back = found.double_value(&[0, 0, 1]) / scale;
            assert!((back - wanted).abs() <= 1e-6 * wanted.abs(), "{entry} came back as {back}, not {wanted}");
            assert_eq!(found.get(1).abs().max().double_value(&[]), 0.0);
            let (again, _) = book.quantize(&found).unwrap();
            assert_eq!(again, codes, "what came back once comes back unchanged");
        }
    }

    #[test]
    fn optim_a_last_block_may_be_short() {
        let book = Codebook::signed(Device::Cpu).unwrap();
        let numbers = (Tensor::arange(600, (Kind::Float, Device::Cpu)) * 0.7).sin();
        for num_entries in [0i64, 1, 255, 256, 257, 512, 600] {
            let (codes, scale) = book.quantize(&numbers.narrow(0, 0, num_entries)).unwrap();
            assert_eq!((codes.size(), scale.size()), (vec![num_entries], vec![num_blocks(num_entries as usize)]));
            let found = book.dequantize(&codes, &scale).unwrap();
            assert_eq!((found.size(), codes.is_contiguous()), (vec![num_entries], true));
            // Whole blocks are those of more entries, to the bit.
            let whole = num_entries / 256 * 256;
            let (more, _) = book.quantize(&numbers.narrow(0, 0, 512)).unwrap();
            assert_eq!(codes.narrow(0, 0, whole), more.narrow(0, 0, whole));
            if num_entries > 0 {
                let worst = (found - numbers.narrow(0, 0, num_entries)).abs().max().double_value(&[]);
                assert!(worst <= 0.0071, "{num_entries}: {worst}");
            }
        }
    }

    #[test]
    fn optim_errors_of_numbers_in_8_bits_stay_below_their_bounds() {
        let numbers: Vec<f64> = (0..=65_535).map(|i| f64::from(i) / 65_535.0).collect();
        for (signed, absolute, share) in [(true, 0.0071, 0.062), (false, 0.0036, 0.033)] {
            let book = if signed { Codebook::signed(Device::Cpu) } else { Codebook::unsigned(Device::Cpu) }.unwrap();
            for sign in if signed { vec![1.0, -1.0] } else { vec![1.0] } {
                // The largest entry of each block is 1, so that the numbers are their own quotients.
                let blocks = (Tensor::from_slice(&numbers) * sign).reshape([-1, 256]);
                let ones = Tensor::ones([256, 256], (Kind::Double, Device::Cpu));
                let tensor = Tensor::cat(&[&blocks.narrow(1, 0, 255), &ones.narrow(1, 0, 1)], 1);
                let (codes, scale) = book.quantize(&tensor).unwrap();
                let errors = (book.dequantize(&codes, &scale).unwrap() - &tensor).abs();
                let worst = errors.max().double_value(&[]);
                assert!(worst <= absolute && absolute * 0.9 < worst, "{worst}");
                let shares = (&errors / tensor.abs()).masked_select(&tensor.abs().ge(0.1));
                let worst = shares.max().double_value(&[]);
                assert!(worst <= share && share * 0.9 < worst, "{worst}");
            }
        }
    }
}
