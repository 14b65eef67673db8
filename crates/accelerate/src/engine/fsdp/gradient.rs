//! The gradient of one parameter while it leaves a rank piece by piece, with as little of it computed as can be.

use crate::error::Result;
use crate::nn::DeferredWeightGrad;
use std::ops::Range;
use tch::Tensor;

/// What a backward pass gives one parameter.
pub(super) enum Gradient {
    Absent,
    Dense(Tensor),
    /// A matrix, as what it is the sum of.
    Sum {
        /// Rows and columns.
        size: (usize, usize),
        summands: Vec<Summand>,
    },
}

pub(super) enum Summand {
    /// Of a linear layer.
    Deferred(DeferredWeightGrad),
    /// Of anything.
    Dense(Tensor),
    /// Of an embedding.
    Rows {
        /// In ascending order, none twice.
        indices: Vec<i64>,
        /// `[indices, columns]`.
        values: Tensor,
    },
}

impl Gradient {
    /// The sum of deferred, in the order of the backward pass, and of what libtorch has added up itself, which it hands over
    /// at the end of the pass.
    pub(super) fn new(deferred: Vec<DeferredWeightGrad>, computed: Option<Tensor>) -> Result<Self> {
        let is_sum = !deferred.is_empty() || computed.as_ref().is_some_and(Tensor::is_sparse);
        let size = match (deferred.first(), &computed) {
            (Some(product), _) => product.size(),
            (None, Some(computed)) if is_sum => (computed.size()[0] as usize, computed.size()[1] as usize),
            (None, computed) => {
                return Ok(computed.as_ref().map_or(Self::Absent, |it| Self::Dense(it.shallow_clone())));
            }
        };
        let mut summands: Vec<Summand> = deferred.into_iter().map(Summand::Deferred).collect();
        summands.extend(computed.map(Summand::computed).transpose()?);
        Ok(Self::Sum { size, summands })
    }

    /// All of it as one tensor.
    pub(super) fn into_tensor(self) -> Result<Option<Tensor>> {
        match self {
            Self::Absent => Ok(None),
            Self::Dense(tensor) => Ok(Some(tensor)),
            Self::Sum { size, summands } => rows_of(&summands, &(0..size.0)),
        }
    }

    /// Writes elements `range`, counted in the order of the dims, multiplied by `scale`.
    pub(super) fn write(&self, range: &Range<usize>, place: &mut Tensor, scale: &Tensor) -> Result<()> {
        match self {
            Self::Absent => {}
            Self::Dense(tensor) => return write_scaled(tensor, range, place, scale),
            Self::Sum { size: (_, num_columns), summands } => {
                let rows = range.start / num_columns..range.end.div_ceil(*num_columns);
                if let Some(sum) = rows_of(summands, &rows)? {
                    let start = range.start - rows.start * num_columns;
                    let own = sum.f_view([-1])?.f_narrow(0, start as i64, range.len() as i64)?;
                    return write_scaled_rows(&own, place, scale);
                }
            }
        }
        let _ = place.f_zero_()?;
        Ok(())
    }
}

/// The sum of some rows, in memory of its own; `None` for zeros.
fn rows_of(summands: &[Summand], rows: &Range<usize>) -> Result<Option<Tensor>> {
    summands.iter().try_fold(None, |sum, summand| summand.added_to(sum, rows))
}

impl Summand {
    fn computed(gradient: Tensor) -> Result<Self> {
        if !gradient.is_sparse() {
            return Ok(Self::Dense(gradient));
        }
        let gradient = gradient.f_coalesce()?;
        let indices = Vec::try_from(gradient.f_indices()?.f_select(0, 0)?)?;
        Ok(Self::Rows { indices, values: gradient.f_values()? })
    }

    /// Adds these rows of it to a sum of them.
    fn added_to(&self, sum: Option<Tensor>, rows: &Range<usize>) -> Result<Option<Tensor>> {
        let (start, size) = (rows.start as i64, rows.len() as i64);
        let own = match self {
            Self::Deferred(gradient) => gradient.rows(rows)?,
            Self::Dense(tensor) => tensor.f_narrow(0, start, size)?.f_detach_copy()?,
            Self::Rows { indices, values } => {
                let place = |row: usize| indices.partition_point(|&index| (index as usize) < row);
                let places = place(rows.start)..place(rows.end);
                if places.is_empty() {
                    return Ok(sum);
                }
                let options = (values.f_kind()?, values.device());
                let mut sum = sum.map_or_else(|| Tensor::f_zeros([size, values.size()[1]], options), Ok)?;
                let own: Vec<i64> = indices[places.clone()].iter().map(|index| index - start).collect();
                let own = Tensor::f_from_slice(&own)?.f_to_device(options.1)?;
                let values = values.f_narrow(0, places.start as i64, places.len() as i64)?;
                return Ok(Some(sum.f_index_add_(0, &own, &values)?));
            }
        };
        Ok(Some(match sum {
            Some(mut sum) => sum.f_add_(&own)?,
            None => own,
        }))
    }
}

/// Writes elements `range` of a tensor, counted in the order of its dims, multiplied by `scale`. A tensor with other strides
/// is read in rows: the gradient of a linear layer is a transposed matrix, and a copy of it all would be as large.
fn write_scaled(tensor: &Tensor, range: &Range<usize>, place: &mut Tensor, scale: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        let flat = tensor.f_view([-1])?;
        return write_scaled_rows(&flat.f_narrow(0, range.start as i64, range.len() as i64)?, place, scale);
    }
    let row = tensor.numel() / tensor.size()[0].max(1) as usize;
    let mut start = range.start;
    while start < range.end {
        let (index, column) = (start / row, start % row);
        let num_rows = (range.end - start) / row;
        let (own, end) = if column == 0 && num_rows > 0 {
            (tensor.f_narrow(0, index as i64, num_rows as i64)?, start + num_rows * row)
        } else {
            let end = range.end.min((index + 1) * row);
            let flat = tensor.f_select(0, index as i64)?.f_reshape([-1])?;
            (flat.f_narrow(0, column as i64, (end - start) as i64)?, end)
        };
        let mut rows = place.f_narrow(0, (start - range.start) as i64, (end - start) as i64)?.f_view_as(&own)?;
        write_scaled_rows(&own, &mut rows, scale)?;
        start = end;
    }
    Ok(())
}

fn write_scaled_rows(own: &Tensor, place: &mut Tensor, scale: &Tensor) -> Result<()> {
    if own.f_kind()? == place.f_kind()? {
        let _ = own.f_mul_out(place, scale)?;
    } else {
        // A product is rounded to the type of the gradient before it is written.
        place.f_copy_(own)?;
        let _ = place.f_mul_(scale)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn any_range_of_any_strides_is_written_in_the_order_of_the_dims() {
        let numbers = Tensor::arange(24, (Kind::Float, Device::Cpu));
        let scale = Tensor::from(0.5f32);
        for tensor in [numbers.view([4, 6]), numbers.view([6, 4]).tr(), numbers.view([2, 3, 4]).permute([2, 0, 1])] {
            let wanted = tensor.reshape([-1]) * 0.5;
            for start in 0..24 {
                for end in start..=24 {
                    for kind in [Kind::Float, Kind::Double] {
                        let mut place = Tensor::zeros([(end - start) as i64], (kind, Device::Cpu));
                        write_scaled(&tensor, &(start..end), &mut place, &scale).unwrap();
                        let wanted = wanted.narrow(0, start as i64, (end - start) as i64).to_kind(kind);
                        assert_eq!(place, wanted, "{start}..{end} of {:?}", tensor.stride());
                    }
                }
            }
        }
    }

    #[test]
    fn any_range_of_a_sum_is_written_whatever_it_is_the_sum_of() {
        let options = (Kind::Float, Device::Cpu);
        let product = || {
            DeferredWeightGrad::new(&Tensor::arange(8, options).view([2, 4]), &Tensor::arange(6, options).view([2, 3]))
        };
        let dense = || Tensor::arange(12, options).view([4, 3]);
        let rows = || {
            let (indices, values) = (Tensor::from_slice(&[1i64, 3]).view([1, 2]), Tensor::arange(6, options) + 1);
            Tensor::sparse_coo_tensor_indices_size(&indices, &values.view([2, 3]), [4, 3], options, false)
        };
        for (num_deferred, computed) in
            [(0, Some(rows())), (1, None), (1, Some(rows())), (2, Some(dense())), (1, Some(dense())), (0, None)]
        {
            let gradient = || {
                let deferred = (0..num_deferred).map(|_| product()).collect();
                Gradient::new(deferred, computed.as_ref().map(Tensor::shallow_clone)).unwrap()
            };
            let mut wanted = Tensor::zeros([4, 3], options);
            (0..num_deferred).for_each(|_| wanted += product().rows(&(0..4)).unwrap());
            if let Some(computed) = &computed {
                wanted += if computed.is_sparse() { computed.to_dense(None, false) } else { computed.shallow_clone() };
            }
            assert_eq!(gradient().into_tensor().unwrap().unwrap_or_else(|| wanted.zeros_like()), wanted);
            let (flat, scale) = (wanted.view([-1]) * 0.5, Tensor::from(0.5f32));
            for start in 0..12 {
                for end in start + 1..=12 {
                    let mut place = Tensor::full([(end - start) as i64], f64::NAN, options);
                    gradient().write(&(start..end), &mut place, &scale).unwrap();
                    assert_eq!(place, flat.narrow(0, start as i64, (end - start) as i64), "{start}..{end}");
                }
            }
        }
    }
}
