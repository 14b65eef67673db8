//! From gradients of whole parameters to the mean of this rank's part, piece by piece beside the backward pass.

use super::gradient::Gradient;
use super::order::Travel;
use super::unit::{UnitState, pieces};
use super::{Shard, State};
use crate::session::Concerns;
use crate::error::Result;
use crate::group::{InFlight, ReduceOp, Versions};
use crate::nn::{Product, WeakParam};
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
pub(super) const MOST_PIECES: usize = 4;

/// The gradients that are on their way, in the order in which they were sent.
#[derive(Default)]
pub(super) struct Reducing {
    pieces: VecDeque<Piece>,
    /// Gradients of weights that nobody has computed, by unit and member.
    products: Vec<(usize, usize, Product)>,
    /// Units whose sums are added up over replicas, in the order in which that began.
    replicated: VecDeque<Replicated>,
    /// The running backward pass will call [`Shard::finish_backward`].
    is_end_awaited: bool,
}

/// A piece of a unit's gradients.
struct Piece {
    unit: usize,
    travel: PieceTravel,
    /// Where the sum goes, in the gradient of this rank's part.
    sum: Tensor,
    /// The gradient of the unit's part, with the last piece.
    completes: Option<Tensor>,
}

/// How a piece comes to the ranks that add it up.
enum PieceTravel {
    Sent(Versions),
    /// It lies in `rows`, one for each rank, in a buffer of `buffer_elements`.
    Offered {
        number: i64,
        rows: Tensor,
        buffer_elements: usize,
    },
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
            let home = self.0.home.device(self.0.device);
            let flatten = |gradient: Tensor| gradient.f_reshape([-1])?.f_to_device(home);
            return Ok(gradients.into_iter().map(|own| own.map(flatten).transpose()).collect::<Result<_, _>>()?);
        }
        let nothing_yet = gradients.iter().map(|_| None).collect();
        let gradients = self.with_products(unit, gradients)?;
        let (syncs, before) = {
            let mut state = self.lock();
            (state.gradient_sync, std::mem::take(&mut state.units[unit].unreduced))
        };
        if syncs && before.is_empty() {
            self.start_reduce(unit, &gradients)?;
        } else {
            let kind = self.lock().units[unit].kinds.reduce;
            let sums = added(before, gradients, kind)?;
            if !syncs {
                self.lock().units[unit].unreduced = sums;
                return Ok(nothing_yet);
            }
            self.start_reduce(unit, &whole(sums)?)?;
        }
        self.await_end_of_backward()?;
        self.start_expected_after_backward()?;
        Ok(nothing_yet)
    }

    /// Keeps the gradient of a weight as a product, until the backward pass comes to the weight's unit.
    pub(super) fn take_product(&self, unit: usize, member: usize, product: Product) {
        self.lock().reducing.products.push((unit, member, product));
    }

    /// The gradients of a unit's parameters, by member.
    fn with_products(&self, unit: usize, computed: Vec<Option<Tensor>>) -> Result<Vec<Gradient>> {
        let mut products: Vec<Vec<Product>> = computed.iter().map(|_| Vec::new()).collect();
        for (_, member, product) in self.lock().reducing.products.extract_if(.., |(of, _, _)| *of == unit) {
            products[member].push(product);
        }
        products.into_iter().zip(computed).map(|(products, computed)| Gradient::new(products, computed)).collect()
    }

    fn await_end_of_backward(&self) -> Result<()> {
        if !std::mem::replace(&mut self.lock().reducing.is_end_awaited, true) {
            let shard = self.clone();
            queue_callback(move || Ok(shard.finish_backward()?))?;
        }
        Ok(())
    }

    /// Sends what other ranks add up, and makes room for the sum of this rank's part.
    fn start_reduce(&self, unit: usize, gradients: &[Gradient]) -> Result<()> {
        let (content, world_size) = (self.unit(unit), self.0.group.world_size());
        let (sum, options) = {
            let State { units, buffers, travelled, .. } = &mut *self.lock();
            travelled.push(Travel::ReduceScatter(unit));
            units[unit].counts.reduce_scatters += 1;
            let UnitState { shard, kinds, .. } = &units[unit];
            let sum = buffers.take(content.shard_elements, (shard.f_kind()?, self.0.device))?;
            (sum, (kinds.reduce, self.0.device))
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
            pack(content, gradients, &range, &rows, &scale)?;
            let travel = match self.offer(&rows)? {
                Some(number) => PieceTravel::Offered { number, rows, buffer_elements: step * world_size },
                None => PieceTravel::Sent(self.0.group.start_reduce_scatter(&rows, memory, &self.label(unit))?),
            };
            let place = sum.f_narrow(0, range.start as i64, range.len() as i64)?;
            let completes = (range.end == content.shard_elements).then(|| sum.shallow_clone());
            self.lock().reducing.pieces.push_back(Piece { unit, travel, sum: place, completes });
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
            let Some(Piece { unit, travel, sum, completes }) = piece else { return Ok(()) };
            match travel {
                PieceTravel::Sent(versions) => versions.sum_into(sum)?,
                PieceTravel::Offered { number, rows, buffer_elements } => {
                    let room = self.lock().buffers.take(buffer_elements, (rows.f_kind()?, rows.device()))?;
                    let room = room.f_narrow(0, 0, rows.numel() as i64)?;
                    self.sum_offered(unit, number, rows, &room, sum)?;
                }
            }
            match (completes, &self.0.replicas) {
                (None, _) => {}
                (Some(gradient), None) => self.accumulate(unit, &gradient)?,
                (Some(gradient), Some(replicas)) => {
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
        let gradient = gradient.f_to_device(self.0.home.device(self.0.device))?;
        for (local, piece) in locals.iter().zip(pieces(self.unit(unit), self.0.group.rank(), &gradient)?) {
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
                self.start_reduce(unit, &whole(left)?)?;
            }
        }
        self.finish_pieces(0)?;
        self.await_lent(0)?;
        self.finish_replicated()
    }

    /// Changes the gradients that have not been reduced of the parameters that a call is about.
    pub(super) fn each_unreduced(
        &self,
        concerns: Concerns<'_>,
        change: impl Fn(&mut Option<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for unit in 0..self.0.plan.units.len() {
            let (params, mut unreduced) = {
                let own = &mut self.lock().units[unit];
                if own.unreduced.is_empty() {
                    continue;
                }
                (own.params.clone(), std::mem::take(&mut own.unreduced))
            };
            let is_concerned = |param: &WeakParam| param.upgrade().is_some_and(|param| concerns(&param));
            let mut concerned = params.iter().zip(&mut unreduced).filter(|(param, _)| is_concerned(param));
            let changed = concerned.try_for_each(|(_, gradient)| change(gradient));
            // Nothing is to be reduced of a unit without any.
            if unreduced.iter().any(Option::is_some) {
                self.lock().units[unit].unreduced = unreduced;
            }
            changed?;
        }
        Ok(())
    }

    /// Averages the gradients of parameters that are in no unit; one that is missing counts as zeros. Collective.
    pub(super) fn average_replicated(&self) -> Result<()> {
        self.lock().has_own_gradients = false;
        if self.0.job.world_size() == 1 || self.0.replicated.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let mut gradients = Vec::with_capacity(self.0.replicated.len());
        for (param, trained) in &self.0.replicated {
            let local = param.local();
            // Of those that were unfrozen since `prepare`, too.
            if !trained && !local.requires_grad() {
                continue;
            }
            let own = gradient_of(&local)?;
            // Zeros would let a parameter that was frozen since then decay.
            let is_kept = own.is_some() || local.requires_grad();
            let mut gradient = own.map_or_else(|| local.f_zeros_like(), Ok)?;
            // Before the sum, as in `c10d::Reducer`.
            gradients.push(gradient.f_mul_scalar_(1.0 / self.0.job.world_size() as f64)?);
            if is_kept {
                set_gradient(&local, gradients.last())?;
            }
        }
        self.0.job.all_reduce_coalesced(&gradients, ReduceOp::Sum)
    }

    /// Forgets a backward pass that has failed. What is on its way has to arrive first: its memory will be used again.
    pub(super) fn abandon_backward(&self) -> Result<()> {
        let Reducing { pieces, replicated, .. } = std::mem::take(&mut self.lock().reducing);
        for Piece { travel, sum, .. } in pieces {
            match travel {
                PieceTravel::Sent(versions) => versions.sum_into(sum)?,
                // Whoever still reads it finds the window closed.
                PieceTravel::Offered { .. } => self.close_window()?,
            }
        }
        replicated.into_iter().try_for_each(|unit| unit.in_flight.map_or(Ok(()), InFlight::wait))
    }
}

/// Sums of gradients, by member, of element type `kind`; `before` is empty if there are none yet. As
/// DistributedDataParallel does it, older ones first.
fn added(before: Vec<Option<Tensor>>, gradients: Vec<Gradient>, kind: Kind) -> Result<Vec<Option<Tensor>>> {
    let mut before = before.into_iter();
    let add = |gradient: Gradient| match (before.next().flatten(), gradient.into_whole()?) {
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

/// Gradients that have been added up.
fn whole(sums: Vec<Option<Tensor>>) -> Result<Vec<Gradient>> {
    sums.into_iter().map(|sum| Gradient::new(Vec::new(), sum)).collect()
}

/// Writes what each rank gets of `range` of its part, one row for each, multiplied by `scale`. What stands behind the last
/// element of the unit is nobody's.
fn pack(unit: &Unit, gradients: &[Gradient], range: &Range<usize>, rows: &Tensor, scale: &Tensor) -> Result<()> {
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
            let first = unit.offsets[member];
            gradient.write(&(start - first..end - first), &mut place(start, end)?, scale)?;
        }
    }
    Ok(())
}
