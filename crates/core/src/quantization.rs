//! Weights of 4 and 8 bits as bitsandbytes has them: what codes stand for, what their parts are called in files, what a file may
//! say of them, and which layers of a model have them.

mod code;
mod layers;
mod names;
mod quant_state;

use crate::config::{FloatType, QuantStorage, QuantType};

pub use code::{dynamic_map, four_bit_values};
pub use layers::{LayerFacts, is_under, layers_to_quantize};
pub use names::{FourBitNames, Int8Names, StoredWeight, recognise, weight_of_part};
pub use quant_state::{FourBitParts, NestedState, QuantState};

/// Elements that may share a scale of four bits.
pub const BLOCK_SIZES: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Scales of four bits that share a scale, where they are written in 8 bits.
pub const NESTED_BLOCK_SIZE: usize = 256;

/// What is done to the weights of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantization {
    /// Blocks of four bits.
    FourBit {
        /// What codes stand for.
        quant_type: QuantType,
        /// Are scales written in 8 bits?
        double_quant: bool,
        /// Elements that share a scale.
        block_size: usize,
        /// In which type products are computed, if not in that of the input.
        compute_dtype: Option<FloatType>,
        /// The element type of the tensor of codes.
        storage: QuantStorage,
    },
    /// Rows of eight bits.
    EightBit {
        /// From which size on an element of the input is an outlier; 0 for none.
        threshold: f64,
        /// Do weights stay in 16 bits, and are trained?
        has_fp16_weight: bool,
    },
}

impl Quantization {
    /// The bytes that a weight of this shape takes as codes, scales and their tables.
    ///
    /// ```
    /// use accelerate_core::quantization::Quantization;
    /// let int8 = Quantization::EightBit { threshold: 6.0, has_fp16_weight: false };
    /// assert_eq!(int8.num_bytes(&[4, 100]), 4 * 100 + 4 * 4);
    /// ```
    pub fn num_bytes(&self, shape: &[i64]) -> u64 {
        const FLOAT_BYTES: u64 = 4;
        let numel = shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size.max(0).unsigned_abs()));
        match *self {
            Self::FourBit { double_quant, block_size, .. } => {
                let num_blocks = numel.div_ceil(block_size.max(1) as u64);
                let table = 16 * FLOAT_BYTES;
                let scales = match double_quant {
                    true => {
                        let nested = num_blocks.div_ceil(NESTED_BLOCK_SIZE as u64) * FLOAT_BYTES;
                        num_blocks + nested + 256 * FLOAT_BYTES
                    }
                    false => num_blocks * FLOAT_BYTES,
                };
                numel.div_ceil(2) + scales + table
            }
            Self::EightBit { .. } => {
                let rows = shape.first().map_or(1, |&rows| rows.max(0).unsigned_abs());
                numel.saturating_add(rows.saturating_mul(FLOAT_BYTES))
            }
        }
    }
}
