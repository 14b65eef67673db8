//! Weights into quantised ones, and those into a model.

use super::four_bit::{FourBitOptions, FourBitTensors, FourBitWeight};
use super::int8::{Int8Tensors, Int8Weight, Linear8bit, LinearFp16Weight};
use super::kind_of;
use crate::error::Result;
use crate::nn::{LinearKernel, LinearLayer, Param, Storage, TrainingFlag};
use accelerate_core::config::QuantType;
use accelerate_core::quantization::Quantization;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// A quantised weight that is not in the model yet.
pub(crate) struct Quantized {
    storage: Box<dyn Storage>,
    kernel: Arc<dyn LinearKernel>,
}

impl Quantized {
    /// What it is stored as, the large ones first, and how many are large.
    pub(crate) fn parts(&self) -> (Vec<Param>, usize) {
        (self.storage.stored_as().unwrap_or_default(), self.storage.piece_sizes().len())
    }
}

/// Makes quantised weights for one model.
pub(crate) struct Quantizer {
    quantization: Quantization,
    training: TrainingFlag,
}

impl Quantizer {
    pub(crate) fn new(quantization: Quantization, training: TrainingFlag) -> Self {
        Self { quantization, training }
    }

    /// The kernel of a layer whose weight stays in 16 bits and is quantised in every forward pass, if that is asked for.
    pub(crate) fn fp16_kernel(&self) -> Option<Arc<dyn LinearKernel>> {
        match self.quantization {
            Quantization::EightBit { threshold, has_fp16_weight: true } => {
                Some(Arc::new(LinearFp16Weight { threshold, training: self.training.clone() }))
            }
            _ => None,
        }
    }

    /// Quantises numbers, on the device where they are.
    pub(crate) fn quantize(&self, name: &str, full: &Tensor) -> Result<Quantized> {
        match self.quantization {
            Quantization::FourBit { quant_type, double_quant, block_size, storage, .. } => {
                let options = FourBitOptions { quant_type, double_quant, block_size, storage };
                Ok(self.four_bit(FourBitWeight::quantize(name, full, options)?))
            }
            Quantization::EightBit { .. } => Ok(self.int8(Int8Weight::quantize(name, full)?)),
        }
    }

    /// A weight of four bits out of a file.
    pub(crate) fn four_bit_from_file(
        &self,
        name: &str,
        shape: &[i64],
        quant_type: QuantType,
        tensors: FourBitTensors,
    ) -> Result<Quantized> {
        Ok(self.four_bit(FourBitWeight::from_file(name, shape, quant_type, tensors)?))
    }

    /// A weight of eight bits out of a file; `kind` is what its numbers are if somebody asks for them.
    pub(crate) fn int8_from_file(
        &self,
        name: &str,
        shape: &[i64],
        kind: Kind,
        tensors: Int8Tensors,
    ) -> Result<Quantized> {
        Ok(self.int8(Int8Weight::from_file(name, shape, kind, tensors)?))
    }

    fn four_bit(&self, weight: FourBitWeight) -> Quantized {
        let compute_dtype = match self.quantization {
            Quantization::FourBit { compute_dtype, .. } => compute_dtype.map(kind_of),
            Quantization::EightBit { .. } => None,
        };
        let kernel = Arc::new(weight.kernel(compute_dtype));
        Quantized { storage: Box::new(weight), kernel }
    }

    fn int8(&self, weight: Int8Weight) -> Quantized {
        let threshold = match self.quantization {
            Quantization::EightBit { threshold, .. } => threshold,
            Quantization::FourBit { .. } => 0.0,
        };
        let kernel = Arc::new(Linear8bit { threshold, training: self.training.clone() });
        Quantized { storage: Box::new(weight), kernel }
    }
}

/// Puts a quantised weight into a parameter and its kernel into the layers that have it. The layers' other parameters are frozen
/// with it, as in bitsandbytes.
pub(crate) fn put_in(param: &Param, layers: &[LinearLayer], quantized: Quantized) -> Result<()> {
    drop(param.replace_storage(quantized.storage));
    for layer in layers {
        layer.set_kernel(Arc::clone(&quantized.kernel));
        layer.bias().into_iter().try_for_each(|bias| bias.set_requires_grad(false))?;
    }
    Ok(())
}
