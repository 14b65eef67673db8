//! Weights of 4 and 8 bits.

use super::FloatType;
use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::names::spelled_enum;
use crate::quantization::{BLOCK_SIZES, Quantization};
use crate::settings::record::record;

spelled_enum! {
    /// The sixteen numbers that four bits stand for (`bnb_4bit_quant_type`).
    ///
    /// ```
    /// use accelerate_core::config::QuantType;
    /// assert_eq!("nf4".parse::<QuantType>()?, QuantType::Nf4);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    QuantType, "type of four bits" {
        /// A float of a sign, two bits of exponent and one of mantissa. The default, as in the reference.
        Fp4 = "fp4",
        /// NormalFloat: quantiles of the normal distribution (QLoRA, arXiv 2305.14314). The better one for trained weights.
        Nf4 = "nf4",
    }
}

spelled_enum! {
    /// The element type of the tensor that holds codes of four bits (`bnb_4bit_quant_storage`). The bytes are the same.
    QuantStorage, "storage type of four bits" {
        /// A byte for two codes.
        Uint8 = "uint8" | "torch.uint8",
        /// Two bytes at a time.
        Float16 = "float16" | "fp16" | "torch.float16",
        /// Two bytes at a time.
        BFloat16 = "bfloat16" | "bf16" | "torch.bfloat16",
        /// Four bytes at a time.
        Float32 = "float32" | "fp32" | "torch.float32",
    }
}

impl QuantStorage {
    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Uint8 => 1,
            Self::Float16 | Self::BFloat16 => 2,
            Self::Float32 => 4,
        }
    }
}

record! {
    /// Weights of 4 or 8 bits (`BnbQuantizationConfig` of the reference, `utils/dataclasses.py`, and of the documented class).
    /// `load_and_quantize_model` reads it.
    ///
    /// ```
    /// use accelerate_core::config::{BnbQuantizationConfig, QuantType, QuantizationSettings};
    /// let config = BnbQuantizationConfig {
    ///     load_in_4bit: Some(true),
    ///     bnb_4bit_quant_type: Some(QuantType::Nf4),
    ///     ..Default::default()
    /// };
    /// assert!(QuantizationSettings::from(config).check().is_ok());
    /// assert!(QuantizationSettings::default().check().is_err());
    /// ```
    BnbQuantizationConfig => QuantizationSettings,
    section "quantization_config", keys "", variables "ACCELERATE_QUANTIZATION_" {
        /// Weights of 8 bits, a row of a weight with one scale (LLM.int8(), arXiv 2208.07339).
        load_in_8bit: bool = false => setting();
        /// Weights of 4 bits, a block of a weight with one scale (QLoRA, arXiv 2305.14314).
        load_in_4bit: bool = false => setting();
        /// Size from which on an element of the input of a layer with weights of 8 bits is an outlier, whose column is computed
        /// with as it is. 0 for none.
        llm_int8_threshold: f64 = 6.0 => setting();
        /// Paths of modules that keep their weights. Without them, the head and layers with tied weights do.
        llm_int8_skip_modules: Vec<String> => setting().keys(&["llm_int8_skip_modules", "skip_modules"]);
        /// Keep the numbers of modules that a device map has elsewhere than where the model is computed, in 32 bits.
        llm_int8_enable_fp32_cpu_offload: bool = false => setting();
        /// Keep weights in 16 bits, train them, and make codes of 8 bits of them in every forward pass.
        llm_int8_has_fp16_weight: bool = false => setting();
        /// In which type layers with weights of 4 bits compute. Without it, in that of their input.
        bnb_4bit_compute_dtype: FloatType => setting().reference_default("fp16");
        /// The numbers that 4 bits stand for.
        bnb_4bit_quant_type: QuantType = QuantType::Fp4 => setting();
        /// Write the scales of 4 bits in 8 bits, which saves 0.37 bits for each weight.
        bnb_4bit_use_double_quant: bool = false => setting();
        /// The element type of tensors that hold 4 bits. Without it, uint8.
        bnb_4bit_quant_storage: QuantStorage => setting();
        /// Weights of 4 bits that have one scale: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
        bnb_4bit_blocksize: usize = 64 => setting();
        /// The type of weights that are not quantised. Without it float16 beside weights of 8 bits, and that of
        /// `bnb_4bit_compute_dtype` beside weights of 4 bits.
        torch_dtype: FloatType => setting();
        /// Paths of modules that stay in 32 bits.
        keep_in_fp32_modules: Vec<String> => setting();
    }
}

impl QuantizationSettings {
    /// What is to be done, if the settings go together.
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): neither or both of 4 and 8 bits; a threshold below 0; a block size that
    /// there is not.
    pub fn check(&self) -> Result<Quantization> {
        let contradiction = |why| ConfigErrorKind::Contradiction { first: "load_in_8bit", second: "load_in_4bit", why };
        let is_size = self.llm_int8_threshold >= 0.0;
        if !is_size {
            let (name, found) = ("llm_int8_threshold", self.llm_int8_threshold);
            return Err(ConfigErrorKind::OutOfRange { name, found, wanted: "0 or above" }.into());
        }
        if !BLOCK_SIZES.contains(&self.bnb_4bit_blocksize) {
            let wanted = "32, 64, 128, 256, 512, 1024, 2048 or 4096";
            let (name, found) = ("bnb_4bit_blocksize", self.bnb_4bit_blocksize as f64);
            return Err(ConfigErrorKind::OutOfRange { name, found, wanted }.into());
        }
        let is_other = self.torch_dtype.is_some_and(|dtype| dtype != FloatType::Float32);
        if self.llm_int8_enable_fp32_cpu_offload && is_other {
            let (first, second) = ("torch_dtype", "llm_int8_enable_fp32_cpu_offload");
            let why = "which keeps what is offloaded in 32 bits, and the layers beside it take and give what it does";
            return Err(ConfigErrorKind::Contradiction { first, second, why }.into());
        }
        match (self.load_in_8bit, self.load_in_4bit) {
            (true, true) => Err(contradiction("a weight has one of them; set one").into()),
            (false, false) => Err(ConfigErrorKind::NeitherWidth.into()),
            (true, false) => Ok(Quantization::EightBit {
                threshold: self.llm_int8_threshold,
                has_fp16_weight: self.llm_int8_has_fp16_weight,
            }),
            (false, true) => Ok(Quantization::FourBit {
                quant_type: self.bnb_4bit_quant_type,
                double_quant: self.bnb_4bit_use_double_quant,
                block_size: self.bnb_4bit_blocksize,
                compute_dtype: self.bnb_4bit_compute_dtype,
                storage: self.bnb_4bit_quant_storage.unwrap_or(QuantStorage::Uint8),
            }),
        }
    }

    /// The type of weights that are not quantised; `None` where they keep their own.
    pub fn other_dtype(&self) -> Option<FloatType> {
        let default = if self.load_in_8bit { Some(FloatType::Float16) } else { self.bnb_4bit_compute_dtype };
        self.torch_dtype.or(default)
    }

    /// What is said and changes nothing, in words for the user.
    pub fn without_use(&self, has_device_map: bool) -> Vec<&'static str> {
        let defaults = Self::default();
        let of_8bit = self.load_in_4bit
            && (self.llm_int8_threshold != defaults.llm_int8_threshold || self.llm_int8_has_fp16_weight);
        let of_4bit = self.load_in_8bit
            && (self.bnb_4bit_compute_dtype.is_some()
                || self.bnb_4bit_quant_type != defaults.bnb_4bit_quant_type
                || self.bnb_4bit_use_double_quant
                || self.bnb_4bit_quant_storage.is_some()
                || self.bnb_4bit_blocksize != defaults.bnb_4bit_blocksize);
        let texts = [
            (of_8bit, "llm_int8_threshold and llm_int8_has_fp16_weight change nothing for weights of 4 bits"),
            (of_4bit, "settings that begin with bnb_4bit change nothing for weights of 8 bits"),
            (
                self.llm_int8_enable_fp32_cpu_offload && !has_device_map,
                "llm_int8_enable_fp32_cpu_offload changes nothing without a device map",
            ),
        ];
        texts.into_iter().filter(|(is_so, _)| *is_so).map(|(_, text)| text).collect()
    }
}
