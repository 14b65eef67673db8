//! From gradients of whole parameters to the mean of this rank's part, piece by piece beside the backward pass.

use super::order::Travel;
use super::unit::{UnitState, pieces};
use super::{Shard, State};
use crate::error::Result;
use crate::group::{InFlight, ReduceOp, Versions};
use accelerate_core::plan::Unit;
use std::collections::VecDeque;
use std::ops::Range;
use tch::{Kind, Tensor};
use torch_ext::autograd::{gradient_of, set_gradient};
use torch_ext::hooks::queue_callback;
use torch_ext::storage::storage_use_count;

/// What one message carries, of all ranks together. Large enough that its price is its bytes, small enough that
/// gradients are not held twice.
const PIECE_BYTES: usize = 4 << 20;

/// How many pieces travel at once.
const MOST_PIECES: usize = 4;

/// The gradients that are on their way, in the order in which they were sent.
#[derive(Default)]
pub(super) struct Reducing {
    pieces: VecDeque<Piece>,
    /// Units whose sums are added up over replicas, in the order in which that began.
    replicated: VecDeque<Replicated>,
    /// The running backward pass will call [`Shard::finish_backward`].
    is_end_awaited: bool,
}

/// A piece of a unit's gradients.
struct Piece {
    versions: Versions,
    /// Where the sum goes, in the gradient of this rank's part.
    sum: Tensor,
    /// The unit and the gradient of its part, with the last piece.
    completes: Option<(usize, Tensor)>,
}

/// A unit's gradient on its way between the ranks that have the same part.
struct Replicated {
    in_flight: Option<InFlight>,
    unit: usize,
    gradient: Tensor,
}

impl Shard {
    /// Takes the gradients of a unit's parameters from the backward pass. What it returns is accumulated there and then;
    /// what is reduced over ranks comes at the end of the pass. Collective where gradients are synchronised.
    pub(super) fn reduce(&self, unit: usize, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let _no_grad = tch::no_grad_guard();
        if self.0.job.world_size() == 1 {
            let flatten = |gradient: Option<Tensor>| gradient.map(|gradient| gradient.f_reshape([-1])).transpose();
            return Ok(gradients.into_iter().map(flatten).collect::<Result<_, _>>()?);
        }
        let nothing_yet = gradients.iter().map(|_| None).collect();
        // Of an embedding that is not tied.
        let dense = |gradient: Option<Tensor>| match gradient {
            Some(gradient) if gradient.is_sparse() => Ok(Some(gradient.f_to_dense(None, false)?)),
            gradient => Ok(gradient),
        };
        let gradients = gradients.into_iter().map(dense).collect::<Result<Vec<_>>>()?;
        let (syncs, before) = {
            let mut state = self.lock();
            (state.gradient_sync, std::mem::take(&mut state.units[unit].unreduced))
        };
        let is_sum = !syncs || !before.is_empty();
        let kind = self.lock().units[unit].kinds.reduce;
        let gradients = if is_sum { added(before, gradients, kind)? } else { gradients };
        if syncs {
            self.start_reduce(unit, gradients)?;
            self.await_end_of_backward()?;
            self.start_expected_after_backward()?;
        } else {
            self.lock().units[unit].unreduced = gradients;
        }
        Ok(nothing_yet)
    }

    fn await_end_of_backward(&self) -> Result<()> {
        if !std::mem::replace(&mut self.lock().reducing.is_end_awaited, true) {
            let shard = self.clone();
            queue_callback(move || Ok(shard.finish_backward()?))?;
        }
        Ok(())
    }

    /// Sends what other ranks add up, and makes room for the sum of this rank's part.
    fn start_reduce(&self, unit: usize, gradients: Vec<Option<Tensor>>) -> Result<()> {
        let (content, world_size) = (self.unit(unit), self.0.group.world_size());
        let (sum, options) = {
            let State { units, buffers, travelled, .. } = &mut *self.lock();
            travelled.push(Travel::ReduceScatter(unit));
            units[unit].counts.reduce_scatters += 1;
            let UnitState { shard, kinds, .. } = &units[unit];
            let sum = buffers.take(content.shard_elements, (shard.f_kind()?, shard.device()))?;
            (sum, (kinds.reduce, shard.device()))
        };
        // Before the sum, as in `c10d::Reducer`: the same rounding, and no overflow that the mean would not have. As a
        // tensor, because the product with a number would be made elsewhere and copied.
        let scale = Tensor::f_full([0i64; 0], (self.0.job.world_size() as f64).recip(), options)?;
        let step = (PIECE_BYTES / options.0.elt_size_in_bytes() / world_size).clamp(1, content.shard_elements.max(1));
        for start in (0..content.shard_elements).step_by(step) {
            let range = start..(start + step).min(content.shard_elements);
            self.finish_pieces(MOST_PIECES - 1)?;
            let memory = || -> Result<Tensor> {
                let whole = self.lock().buffers.take(step * world_size, options)?;
                Ok(whole.f_narrow(0, 0, (range.len() * world_size) as i64)?)
            };
            let rows = memory()?;
            pack(content, &gradients, &range, &rows, &scale)?;
            let versions = self.0.group.start_reduce_scatter(&rows, memory, &self.label(unit))?;
            let place = sum.f_narrow(0, range.start as i64, range.len() as i64)?;
            let completes = (range.end == content.shard_elements).then(|| (unit, sum.shallow_clone()));
            self.lock().reducing.pieces.push_back(Piece { versions, sum: place, completes });
        }
        Ok(())
    }

    /// Waits until at most so many pieces are on their way.
    fn finish_pieces(&self, most_left: usize) -> Result<()> {
        loop {
            let piece = {
                let mut state = self.lock();
                if state.reducing.pieces.len() <= most_left {
                    return Ok(());
                }
                state.reducing.pieces.pop_front()
            };
            let Some(Piece { versions, sum, completes }) = piece else { return Ok(()) };
            versions.sum_into(sum)?;
            match (completes, &self.0.replicas) {
                (None, _) => {}
                (Some((unit, gradient)), None) => self.accumulate(unit, &gradient)?,
                (Some((unit, gradient)), Some(replicas)) => {
                    let in_flight = replicas.start_all_reduce(&gradient, &self.label(unit))?;
                    self.lock().reducing.replicated.push_back(Replicated { in_flight, unit, gradient });
                }
            }
        }
    }

    /// Waits until all units' gradients are sums over all ranks.
    fn finish_replicated(&self) -> Result<()> {
        let replicated = std::mem::take(&mut self.lock().reducing.replicated);
        replicated.into_iter().try_for_each(|Replicated { in_flight, unit, gradient }| {
            in_flight.map_or(Ok(()), InFlight::wait)?;
            self.accumulate(unit, &gradient)
        })
    }

    /// Gives the parameters their pieces of the gradient of this rank's part.
    fn accumulate(&self, unit: usize, gradient: &Tensor) -> Result<()> {
        let locals: Vec<Tensor> = self.lock().units[unit].locals.iter().map(Tensor::shallow_clone).collect();
        for (local, piece) in locals.iter().zip(pieces(self.unit(unit), self.0.group.rank(), gradient)?) {
            match gradient_of(local)? {
                Some(mut before) => drop(before.f_add_(&piece)?),
                None => set_gradient(local, Some(&piece))?,
            }
        }
        Ok(())
    }

    /// At the end of a backward pass whose gradients are reduced.
    fn finish_backward(&self) -> Result<()> {
        self.lock().reducing.is_end_awaited = false;
        self.reduce_what_is_left()
    }

    /// Reduces gradients that were kept whole and that no later backward pass has touched, and waits for all of them.
    pub(super) fn reduce_what_is_left(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for unit in 0..self.0.plan.units.len() {
            let left = std::mem::take(&mut self.lock().units[unit].unreduced);
            if !left.is_empty() {
                self.start_reduce(unit, left)?;
            }
        }
        self.finish_pieces(0)?;
        self.finish_replicated()
    }

    /// Averages the gradients of parameters that are in no unit; one that is missing counts as zeros. Collective.
    pub(super) fn average_replicated(&self) -> Result<()> {
        self.lock().has_own_gradients = false;
        if self.0.job.world_size() == 1 || self.0.replicated.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let mut gradients = Vec::with_capacity(self.0.replicated.len());
        for param in &self.0.replicated {
            let local = param.local();
            let mut gradient = match gradient_of(&local)? {
                Some(gradient) => gradient,
                None => local.f_zeros_like()?,
            };
            // Before the sum, as in `c10d::Reducer`.
            gradients.push(gradient.f_mul_scalar_(1.0 / self.0.job.world_size() as f64)?);
            set_gradient(&local, gradients.last())?;
        }
        self.0.job.all_reduce_coalesced(&gradients, ReduceOp::Sum)
    }

    /// Forgets a backward pass that has failed. What is on its way has to arrive first: its memory will be used again.
    pub(super) fn abandon_backward(&self) -> Result<()> {
        let Reducing { pieces, replicated, .. } = std::mem::take(&mut self.lock().reducing);
        pieces.into_iter().try_for_each(|piece| piece.versions.sum_into(piece.sum))?;
        replicated.into_iter().try_for_each(|unit| unit.in_flight.map_or(Ok(()), InFlight::wait))
    }
}

/// Sums of gradients, by member, of element type `kind`; `before` is empty if there are none yet. As
/// DistributedDataParallel does it, older ones first.
fn added(before: Vec<Option<Tensor>>, gradients: Vec<Option<Tensor>>, kind: Kind) -> Result<Vec<Option<Tensor>>> {
    let mut before = before.into_iter();
    let add = |gradient: Option<Tensor>| match (before.next().flatten(), gradient) {
        (Some(mut sum), Some(gradient)) => Ok(Some(sum.f_add_(&gradient)?)),
        // It will be added to, so nobody else may look at it.
        (None, Some(gradient)) => {
            let is_ours = storage_use_count(&gradient) == 1 && gradient.is_contiguous() && gradient.f_kind()? == kind;
            let gradient = gradient.f_detach()?;
            Ok(Some(if is_ours { gradient } else { gradient.f_contiguous()?.f_totype(kind)?.f_detach_copy()? }))
        }
        (sum, None) => Ok(sum),
    };
    gradients.into_iter().map(add).collect()
}

/// Writes elements `range` of a tensor, counted in the order of its dims, multiplied by `scale`. A tensor with other strides
/// is read in rows: the gradient of a linear layer is a transposed matrix, and a copy of it all would be as large.
fn write_scaled(tensor: &Tensor, range: &Range<usize>, place: &mut Tensor, scale: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        let flat = tensor.f_view([-1])?;
        return write_product(&flat.f_narrow(0, range.start as i64, range.len() as i64)?, place, scale);
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
        let mut part = place.f_narrow(0, (start - range.start) as i64, (end - start) as i64)?.f_view_as(&own)?;
        write_product(&own, &mut part, scale)?;
        start = end;
    }
    Ok(())
}

fn write_product(own: &Tensor, place: &mut Tensor, scale: &Tensor) -> Result<()> {
    if own.f_kind()? == place.f_kind()? {
        let _ = own.f_mul_out(place, scale)?;
    } else {
        // A product is rounded to the type of the gradient before it is written.
        place.f_copy_(own)?;
        let _ = place.f_mul_(scale)?;
    }
    Ok(())
}

/// Writes what each rank gets of `range` of its part, one row for each, multiplied by `scale`. What stands behind the last
/// element of the unit is nobody's.
fn pack(unit: &Unit, gradients: &[Option<Tensor>], range: &Range<usize>, rows: &Tensor, scale: &Tensor) -> Result<()> {
    let size = range.len();
    for rank in 0..rows.numel() / size.max(1) {
        let (from, to) = (rank * unit.shard_elements + range.start, rank * unit.shard_elements + range.end);
        let place = |start: usize, end: usize| {
            rows.f_narrow(0, (rank * size + start - from) as i64, end.saturating_sub(start) as i64)
        };
        let first = unit.offsets.partition_point(|&offset| offset <= from).saturating_sub(1);
        for (member, gradient) in gradients.iter().enumerate().skip(first) {
            let (start, end) = (unit.offsets[member].max(from), unit.offsets[member + 1].min(to));
            if to <= start {
                break;
            }
            if end <= start {
                continue;
            }
            let mut place = place(start, end)?;
            match gradient {
                Some(gradient) => {
                    let first = unit.offsets[member];
                    write_scaled(gradient, &(start - first..end - first), &mut place, scale)?;
                }
                None => drop(place.f_zero_()?),
            };
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Device;

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
}
