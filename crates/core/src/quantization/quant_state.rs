//! What a file says of a weight of four bits, which is not believed.

use super::{BLOCK_SIZES, NESTED_BLOCK_SIZE, four_bit_values};
use crate::Result;
use crate::config::{FloatType, QuantType};
use crate::error::quantization::QuantizationErrorKind as Kind;
use crate::weight_files::shown;
use serde::Deserialize;

/// Most bytes of the JSON that are read.
const MAX_BYTES: usize = 4096;
/// How far a table in a file may be from the known one: printed digits differ between versions of bitsandbytes.
const TABLE_TOLERANCE: f32 = 1e-4;

/// What `quant_state.bitsandbytes__nf4` says: the facts of a weight that its tensors do not have.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantState {
    /// What codes stand for.
    pub quant_type: QuantType,
    /// Elements that share a scale.
    pub block_size: usize,
    /// The type that the weight had, and has again when it is computed with.
    pub dtype: FloatType,
    /// The shape of the weight.
    pub shape: Vec<i64>,
    /// Where the scales are written in 8 bits: how.
    pub nested: Option<NestedState>,
}

/// How scales are written in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NestedState {
    /// Scales that share a scale.
    pub block_size: usize,
    /// Their mean, which is taken off before.
    pub offset: f32,
}

/// The tensors of a weight of four bits, as far as they can be compared with what is said of them.
#[derive(Clone, Copy, Debug)]
pub struct FourBitParts<'a> {
    /// Bytes of codes.
    pub packed_bytes: usize,
    /// Elements of the scales, and PyTorch's name of their type.
    pub absmax: (usize, &'a str),
    /// The sixteen numbers.
    pub quant_map: &'a [f32],
    /// Elements of the scales' scales, and the 256 numbers of the scales.
    pub nested: Option<(usize, &'a [f32])>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<i64>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

impl QuantState {
    /// Reads JSON that bitsandbytes has written. `quant_type` is what the name of the tensor says.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): no such JSON; another type than the name says; a block size, an
    /// element type or a shape that there is not.
    pub fn from_json(weight: &str, quant_type: QuantType, json: &[u8]) -> Result<Self> {
        let refused = |reason: String| Kind::State { weight: shown(weight), reason };
        let lies = |said: String, found: String| Kind::Lies { weight: shown(weight), said, found };
        if json.len() > MAX_BYTES {
            return Err(refused(format!("it has {} bytes, and at most {MAX_BYTES} are read", json.len())).into());
        }
        // A derived reader takes a list in place of an object.
        if json.trim_ascii_start().first() != Some(&b'{') {
            return Err(refused("it is no JSON object".to_owned()).into());
        }
        let read: Json = serde_json::from_slice(json).map_err(|error| refused(shown(&error.to_string())))?;
        if read.quant_type != quant_type.as_str() {
            return Err(lies(
                format!("quant_type {:?}", shown(&read.quant_type)),
                format!("its name says {:?}", quant_type.as_str()),
            )
            .into());
        }
        if !BLOCK_SIZES.contains(&read.blocksize) {
            return Err(refused(format!("blocksize is {}, and there are {BLOCK_SIZES:?}", read.blocksize)).into());
        }
        let dtype = read.dtype.parse().map_err(|error: crate::Error| refused(error.to_string()))?;
        let numel = read.shape.iter().try_fold(1_i64, |numel, &size| numel.checked_mul(size).filter(|_| size > 0));
        if read.shape.is_empty() || numel.is_none() {
            return Err(refused(format!("{:?} is not the shape of a weight", read.shape)).into());
        }
        let nested = match (read.nested_blocksize, read.nested_dtype.as_deref(), read.nested_offset) {
            (None, None, None) => None,
            (Some(NESTED_BLOCK_SIZE), Some("float32"), Some(offset)) if (offset as f32).is_finite() => {
                Some(NestedState { block_size: NESTED_BLOCK_SIZE, offset: offset as f32 })
            }
            (size, dtype, offset) => {
                let found = format!("nested_blocksize {size:?}, nested_dtype {dtype:?}, nested_offset {offset:?}");
                let wanted = "256, float32 and a number, or none of them";
                return Err(refused(format!("{}, where there are {wanted}", shown(&found))).into());
            }
        };
        Ok(Self { quant_type, block_size: read.blocksize, dtype, shape: read.shape, nested })
    }

    /// The JSON that bitsandbytes writes, to the byte.
    ///
    /// ```
    /// use accelerate_core::config::{FloatType, QuantType};
    /// use accelerate_core::quantization::QuantState;
    /// let state = QuantState {
    ///     quant_type: QuantType::Nf4, block_size: 64, dtype: FloatType::BFloat16, shape: vec![4, 32], nested: None,
    /// };
    /// let json = state.to_json();
    /// assert_eq!(json, r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 32]}"#);
    /// assert_eq!(QuantState::from_json("weight", QuantType::Nf4, json.as_bytes())?, state);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn to_json(&self) -> String {
        let Self { quant_type, block_size, dtype, shape, nested } = self;
        let nested = nested.map_or_else(String::new, |NestedState { block_size, offset }| {
            let offset = python_float(f64::from(offset));
            format!(", \"nested_blocksize\": {block_size}, \"nested_dtype\": \"float32\", \"nested_offset\": {offset}")
        });
        format!(
            "{{\"quant_type\": \"{quant_type}\", \"blocksize\": {block_size}, \"dtype\": \"{dtype}\", \"shape\": \
             {shape:?}{nested}}}"
        )
    }

    /// Number of elements of the weight.
    pub fn numel(&self) -> usize {
        self.shape.iter().map(|&size| usize::try_from(size).unwrap_or_default()).product()
    }

    /// Number of scales.
    pub fn num_blocks(&self) -> usize {
        self.numel().div_ceil(self.block_size)
    }

    /// Compares what is said with the tensors, and with the shape that the model has.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files), with what is said and what was found.
    pub fn check(&self, weight: &str, wanted_shape: &[i64], parts: &FourBitParts<'_>) -> Result<()> {
        let lies = |said: String, found: String| Err(Kind::Lies { weight: shown(weight), said, found }.into());
        if self.shape != wanted_shape {
            return lies(format!("shape {:?}", self.shape), format!("the model has {wanted_shape:?}"));
        }
        let said = format!("shape {:?}", self.shape);
        let packed_bytes = self.numel().div_ceil(2);
        if parts.packed_bytes != packed_bytes {
            return lies(said, format!("there are {} bytes of codes in place of {packed_bytes}", parts.packed_bytes));
        }
        let num_blocks = self.num_blocks();
        let absmax_dtype = if self.nested.is_some() { "uint8" } else { "float32" };
        if parts.absmax != (num_blocks, absmax_dtype) {
            let (found, dtype) = parts.absmax;
            return lies(
                format!("{said} and blocksize {}", self.block_size),
                format!("absmax has {found} elements of {dtype} in place of {num_blocks} of {absmax_dtype}"),
            );
        }
        let table = four_bit_values(self.quant_type);
        let is_near = |(found, known): (&f32, &f32)| (found - known).abs() <= TABLE_TOLERANCE;
        if parts.quant_map.len() != table.len() || !parts.quant_map.iter().zip(&table).all(is_near) {
            return lies(
                format!("quant_type {:?}", self.quant_type.as_str()),
                "quant_map has other numbers".to_owned(),
            );
        }
        self.check_nested(weight, parts)
    }

    fn check_nested(&self, weight: &str, parts: &FourBitParts<'_>) -> Result<()> {
        let lies =
            |said: &str, found: String| Err(Kind::Lies { weight: shown(weight), said: said.to_owned(), found }.into());
        let (nested, found) = match (&self.nested, parts.nested) {
            (None, None) => return Ok(()),
            (Some(nested), Some(found)) => (nested, found),
            (Some(_), None) => return lies("nested scales", "there is no nested_absmax".to_owned()),
            (None, Some(_)) => return lies("nothing of nested scales", "there is a nested_absmax".to_owned()),
        };
        let (found_blocks, map) = found;
        let num_blocks = self.num_blocks().div_ceil(nested.block_size);
        if found_blocks != num_blocks {
            return lies(
                "nested scales",
                format!("nested_absmax has {found_blocks} elements in place of {num_blocks}"),
            );
        }
        let is_rising = map.windows(2).all(|pair| pair[0] <= pair[1]);
        if map.len() != 256 || !is_rising || map.iter().any(|number| !(-1.0..=1.0).contains(number)) {
            return lies("nested scales", "nested_quant_map is not 256 rising numbers from -1 to 1".to_owned());
        }
        Ok(())
    }
}

/// A number as Python writes it.
fn python_float(number: f64) -> String {
    let size = number.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}
