//! Units that are gathered as FP8 codes: a byte for each element, with a scale for each parameter.
//!
//! Method: torchao 0.18, `torchao/float8/fsdp_utils.py`. A scale is made of the largest value over all ranks, so that codes are those
//! that one rank would make of the whole parameter.

use super::FullyShard;
use super::units::{in_shape_of, pieces};
use crate::error::Result;
use crate::group::ReduceOp;
use crate::nn::Float8Codes;
use tch::{Kind, Tensor};
use torch_ext::apply_function;
use torch_ext::fp8::largest_value;
use torch_ext::scalar;

/// The type of codes.
pub(super) const CODES: Kind = Float8Codes::KIND;

/// The codes as bytes, which every backend can move.
pub(super) fn as_bytes(codes: &Tensor) -> Result<Tensor> {
    Ok(codes.f_view_dtype(Kind::Uint8)?)
}

impl FullyShard {
    /// One parameter as codes, if its unit is gathered as those. Collective unless the unit is here already.
    pub(super) fn codes(&self, unit: usize, member: usize) -> Result<Option<Float8Codes>> {
        let units = &self.0.units;
        if !units.content(unit).in_fp8 {
            return Ok(None);
        }
        let (full, stand_in) = self.use_unit(unit, member)?;
        let codes = tch::no_grad(|| in_shape_of(&full, units.offset(unit, member), units.shape(unit, member)))?;
        Ok(Some(Float8Codes { codes, scale: units.scale(unit, member)?, stand_in }))
    }

    /// A parameter dequantized from its codes, for whoever computes with it outside of its layer.
    pub(super) fn dequantized(&self, unit: usize, member: usize) -> Result<Tensor> {
        let Some(Float8Codes { codes, scale, stand_in }) = self.codes(unit, member)? else {
            return Ok(self.use_unit(unit, member)?.1);
        };
        let kind = stand_in.f_kind()?;
        let numbers = apply_function(
            "DequantizeFloat8",
            &[&stand_in],
            |_| Ok(vec![codes.f_to_kind(Kind::Float)?.f_div(&scale)?.f_to_kind(kind)?]),
            |_, gradients| Ok(gradients),
        )?;
        Ok(numbers.into_iter().next().unwrap_or(stand_in))
    }

    /// Codes of this rank's shard, at its place in the memory of the unit. Collective: ranks find the largest values together, but not
    /// in a backward pass, which computes with the codes of the forward pass.
    pub(super) fn place_codes(&self, unit: usize, full: &Tensor, is_backward: bool) -> Result<Tensor> {
        let units = &self.0.units;
        let (content, own) = (units.content(unit), units.place_of_shard(unit, full)?);
        let shard = self.0.offloader.shard_in_memory(unit)?.f_to_device(units.device)?;
        let numbers = pieces(content, units.rank, &shard)?;
        let known = units.scales(unit).filter(|_| is_backward);
        let scales = match known {
            Some(scales) => scales,
            None => self.agree_on_scales(&numbers)?,
        };
        for ((numbers, mut place), scale) in numbers.iter().zip(pieces(content, units.rank, &own)?).zip(&scales) {
            if numbers.numel() > 0 {
                place.f_copy_(&Float8Codes::of_piece(numbers, scale)?)?;
            }
        }
        units.set_scales(unit, scales);
        Ok(own)
    }

    /// The scale of each parameter, from the pieces of all ranks. Collective.
    fn agree_on_scales(&self, pieces: &[Tensor]) -> Result<Vec<Tensor>> {
        let units = &self.0.units;
        let largest = Tensor::f_zeros([pieces.len() as i64], (Kind::Float, units.device))?;
        for (piece, place) in pieces.iter().zip(0..).filter(|(piece, _)| piece.numel() > 0) {
            largest.f_select(0, place)?.f_copy_(&largest_value(piece, None)?)?;
        }
        // Some backends' maximum passes over NaN, so whether there is one is reduced beside the values.
        let is_nan = largest.f_isnan()?.f_to_kind(Kind::Float)?;
        let both = Tensor::f_stack(&[largest.f_nan_to_num(0.0, f64::INFINITY, f64::INFINITY)?, is_nan], 0)?;
        self.0.transport.group().all_reduce(&both, ReduceOp::Max)?;
        let is_number = both.f_select(0, 1)?.f_to_kind(Kind::Bool)?.f_logical_not()?;
        let nan = scalar::full(&[], f64::NAN, (Kind::Float, units.device))?;
        let largest = both.f_select(0, 0)?.f_where_self(&is_number, &nan)?;
        largest.f_unbind(0)?.iter().map(Float8Codes::scale_of).collect()
    }
}
