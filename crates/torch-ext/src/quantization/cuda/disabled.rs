//! A build without CUDA: there is no device that could have kernels.

use crate::error::{Error, ErrorKind, Result};
use crate::quantization::{Blocks4bit, Int8Rows};
use tch::{Device, Kind, Tensor};

/// Never made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernels {}

impl Kernels {
    pub(crate) fn of(_device: Device) -> Result<Self> {
        let message = "this build has no kernels for CUDA devices; build with the cargo feature `cuda` of torch-ext";
        Err(Error::new(ErrorKind::NotCompiled, "quantization", message))
    }

    pub(crate) fn dequantize_4bit(
        self,
        _blocks: Blocks4bit<'_>,
        _shape: &[i64],
        _kind: Kind,
    ) -> Result<Option<Tensor>> {
        match self {}
    }

    pub(crate) fn linear_4bit(
        self,
        _input: &Tensor,
        _blocks: Blocks4bit<'_>,
        _sizes: [i64; 2],
        _bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        match self {}
    }

    pub(crate) fn dequantize_blockwise(
        self,
        _codes: &Tensor,
        _absmax: &Tensor,
        _table: &Tensor,
        _block_size: i64,
        _offset: f32,
    ) -> Result<Option<Tensor>> {
        match self {}
    }

    pub(crate) fn int8_vectorwise_quant(self, _matrix: &Tensor, _threshold: f64) -> Result<Option<Int8Rows>> {
        match self {}
    }

    pub(crate) fn int8_scaled_mm(
        self,
        _a: (&Tensor, &Tensor),
        _b: (&Tensor, &Tensor),
        _bias: Option<&Tensor>,
        _kind: Kind,
    ) -> Result<Option<Tensor>> {
        match self {}
    }
}
