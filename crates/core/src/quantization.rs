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
