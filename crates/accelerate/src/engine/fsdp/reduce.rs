//! From gradients of full parameters to the mean of this rank's shard, piece by piece beside the backward pass.

use super::gradient::Gradient;
use super::issued::{IssuedCollective, IssuedCollectives};
use super::units::{Units, pieces};
use crate::engine::gradient_sync::GradientSync;
use crate::error::Result;
use crate::group::{Group, MOST_PENDING, PendingCollective, PendingSum, ReduceOp, ShardTransport};
use crate::nn::{DeferredWeightGrad, Param, WeakParam};
use crate::session::Concerns;
use accelerate_core::plan::Unit;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{gradient_of, set_gradient};
use torch_ext::hooks::queue_callback;
use torch_ext::scalar;
use torch_ext::storage::storage_use_count;

/// What one message carries, of all ranks together. Large enough that its price is its bytes, small enough that
/// gradients are not held twice.
const PIECE_BYTES: usize = 4 << 20;

/// Which ranks reduce, and what for.
pub(super) struct ReductionRanks {
    /// The ranks that read different rows.
    pub(super) data: Group,
    /// The ranks that have the same shard, if there are others.
    pub(super) replicas: Option<Group>,
    /// Parameters that are full on every rank, and whether they were to get gradients when the model was prepared.
    pub(super) replicated: Vec<(Param, bool)>,
    /// Are all gradients reduced in the backward pass that makes them, whoever asks to wait?
    pub(super) always_reduces: bool,
}

/// Takes gradients from backward passes, and gives parameters those of their shards.
pub(super) struct GradientReducer {
    units: Arc<Units>,
    transport: ShardTransport,
    issued: Arc<IssuedCollectives>,
    ranks: ReductionRanks,
    /// The parameters of each unit, whose storages keep this alive.
    params: Vec<Vec<WeakParam>>,
    /// Where shards are between uses, and their gradients.
    device: Device,
    gradient_sync: GradientSync,
    state: Mutex<State>,
}

struct State {
    /// Sums of full gradients that have not been reduced, by unit and member; empty if there are none.
    unreduced: Vec<Vec<Option<Tensor>>>,
    /// Gradients of [`ReductionRanks::replicated`] may not be averages yet.
    has_own_gradients: bool,
    backward: Backward,
}

/// The gradients that are on their way, in the order in which they were sent.
#[derive(Default)]
struct Backward {
    pieces: VecDeque<Piece>,
    /// Gradients of weights that nobody has computed, by unit and member.
    deferred: Vec<(usize, usize, DeferredWeightGrad)>,
    /// Units whose sums are added up over replicas, in the order in which that began.
    replicated: VecDeque<Replicated>,
    /// The running backward pass will call [`GradientReducer::finish_backward`].
    is_end_awaited: bool,
}

/// A piece of a unit's gradients.
struct Piece {
    unit: usize,
    pending: PendingSum,
    /// Elements of the memory that its rows are in.
    buffer_elements: usize,
    /// Where the sum goes, in the gradient of this rank's shard.
    sum: Tensor,
    /// The gradient of the unit's shard, with the last piece.
    completes: Option<Tensor>,
}

/// A unit's gradient on its way between the ranks that have the same shard.
struct Replicated {
    pending: Option<PendingCollective>,
    unit: usize,
    gradient: Tensor,
}

/// What a backward pass gets for a unit's parameters there and then, and whether the rest is on its way to other ranks.
pub(super) type Reduced = (Vec<Option<Tensor>>, bool);

impl GradientReducer {
    pub(super) fn new(
        units: Arc<Units>,
        transport: ShardTransport,
        issued: Arc<IssuedCollectives>,
        ranks: ReductionRanks,
        params: Vec<Vec<WeakParam>>,
        device: Device,
    ) -> Self {
        let state = State {
            unreduced: params.iter().map(|_| Vec::new()).collect(),
            has_own_gradients: false,
            backward: Backward::default(),
        };
        let (gradient_sync, state) = (GradientSync::default(), Mutex::new(state));
        Self { units, transport, issued, ranks, params, device, gradient_sync, state }
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether backward passes reduce from now on; returns what held before.
    pub(super) fn set_gradient_sync(&self, sync: bool) -> bool {
        self.gradient_sync.set(sync || self.ranks.always_reduces)
    }

    /// The next backward pass reduces.
    pub(super) fn reduce_in_one_backward(&self) {
        self.gradient_sync.turn_on_for_one_backward();
    }

    /// A forward pass begins whose gradients are wanted.
    pub(super) fn expect_own_gradients(&self) {
        self.lock().has_own_gradients = true;
    }

    /// Takes the gradients of a unit's parameters from the backward pass. What it returns is accumulated there and then;
    /// what is reduced over ranks comes at the end of the pass. Collective where gradients are synchronised.
    pub(super) fn reduce(self: &Arc<Self>, unit: usize, gradients: Vec<Option<Tensor>>) -> Result<Reduced> {
        let _no_grad = tch::no_grad_guard();
        if self.ranks.data.world_size() == 1 {
            let flatten = |gradient: Tensor| gradient.f_reshape([-1])?.f_to_device(self.device);
            let own = gradients.into_iter().map(|own| own.map(flatten).transpose()).collect::<Result<_, _>>()?;
            return Ok((own, false));
        }
        let nothing_yet = gradients.iter().map(|_| None).collect();
        let gradients = self.with_deferred(unit, gradients)?;
        let (syncs, before) = {
            let mut state = self.lock();
            (self.gradient_sync.is_on(), std::mem::take(&mut state.unreduced[unit]))
        };
        if syncs && before.is_empty() {
            self.start_reduce(unit, &gradients)?;
        } else {
            let sums = added(before, gradients, self.units.kinds(unit).reduce)?;
            if !syncs {
                self.lock().unreduced[unit] = sums;
                return Ok((nothing_yet, false));
            }
            self.start_reduce(unit, &computed(sums)?)?;
        }
        self.await_end_of_backward()?;
        Ok((nothing_yet, true))
    }

    /// Keeps the gradient of a weight as a product, until the backward pass comes to the weight's unit.
    pub(super) fn defer(&self, unit: usize, member: usize, gradient: DeferredWeightGrad) {
        self.lock().backward.deferred.push((unit, member, gradient));
    }

    /// The gradients of a unit's parameters, by member.
    fn with_deferred(&self, unit: usize, computed: Vec<Option<Tensor>>) -> Result<Vec<Gradient>> {
        let mut deferred: Vec<Vec<DeferredWeightGrad>> = computed.iter().map(|_| Vec::new()).collect();
        for (_, member, gradient) in self.lock().backward.deferred.extract_if(.., |(of, _, _)| *of == unit) {
            deferred[member].push(gradient);
        }
        deferred.into_iter().zip(computed).map(|(deferred, computed)| Gradient::new(deferred, computed)).collect()
    }

    fn await_end_of_backward(self: &Arc<Self>) -> Result<()> {
        if !std::mem::replace(&mut self.lock().backward.is_end_awaited, true) {
            let reducer = Arc::clone(self);
            queue_callback(move || Ok(reducer.finish_backward()?))?;
        }
        Ok(())
    }

    /// Sends what other ranks add up, and makes room for the sum of this rank's shard.
    fn start_reduce(&self, unit: usize, gradients: &[Gradient]) -> Result<()> {
        let (content, world_size) = (self.units.content(unit), self.units.world_size);
        let (buffers, device) = (&self.units.buffers, self.units.device);
        self.issued.record(IssuedCollective::ReduceScatter(unit));
        let sum = buffers.take(content.shard_elements, (self.units.shard(unit).f_kind()?, device))?;
        let options = (self.units.kinds(unit).reduce, device);
        // Before the sum, as in `c10d::Reducer`: the same rounding, and no overflow that the mean would not have. As a
        // tensor, because the product with a number would be made elsewhere and copied.
        let scale = scalar::full(&[], (self.ranks.data.world_size() as f64).recip(), options)?;
        let step = (PIECE_BYTES / options.0.elt_size_in_bytes() / world_size).clamp(1, content.shard_elements.max(1));
        let buffer_elements = step * world_size;
        for start in (0..content.shard_elements).step_by(step) {
            let range = start..(start + step).min(content.shard_elements);
            self.finish_pieces(MOST_PENDING - 1)?;
            let memory = || -> Result<Tensor> {
                let all = buffers.take(buffer_elements, options)?;
                Ok(all.f_narrow(0, 0, (range.len() * world_size) as i64)?)
            };
            let rows = memory()?;
            pack(content, gradients, &range, &rows, &scale)?;
            let pending = self.transport.start_sum(&rows, memory, &self.units.label(unit))?;
            let place = sum.f_narrow(0, range.start as i64, range.len() as i64)?;
            let completes = (range.end == content.shard_elements).then(|| sum.shallow_clone());
            self.lock().backward.pieces.push_back(Piece { unit, pending, buffer_elements, sum: place, completes });
        }
        Ok(())
    }

    /// Waits until at most so many pieces are on their way.
    fn finish_pieces(&self, most_left: usize) -> Result<()> {
        loop {
            let piece = {
                let pieces = &mut self.lock().backward.pieces;
                if pieces.len() <= most_left { None } else { pieces.pop_front() }
            };
            let Some(Piece { unit, pending, buffer_elements, sum, completes }) = piece else { return Ok(()) };
            let room = |rows: &Tensor| -> Result<Tensor> {
                let all = self.units.buffers.take(buffer_elements, (rows.f_kind()?, rows.device()))?;
                Ok(all.f_narrow(0, 0, rows.numel() as i64)?)
            };
            self.transport.finish_sum(pending, room, sum, &self.units.label(unit))?;
            match (completes, &self.ranks.replicas) {
                (None, _) => {}
                (Some(gradient), None) => self.accumulate(unit, &gradient)?,
                (Some(gradient), Some(replicas)) => {
                    let pending = replicas.start_all_reduce(&gradient, &self.units.label(unit))?;
                    self.lock().backward.replicated.push_back(Replicated { pending, unit, gradient });
                }
            }
        }
    }

    /// Waits until all units' gradients are sums over all ranks.
    fn finish_replicated(&self) -> Result<()> {
        let replicated = std::mem::take(&mut self.lock().backward.replicated);
        replicated.into_iter().try_for_each(|Replicated { pending, unit, gradient }| {
            pending.map_or(Ok(()), PendingCollective::wait)?;
            self.accumulate(unit, &gradient)
        })
    }

    /// Gives the parameters their pieces of the gradient of this rank's shard.
    fn accumulate(&self, unit: usize, gradient: &Tensor) -> Result<()> {
        let locals = self.units.locals(unit);
        let gradient = gradient.f_to_device(self.device)?;
        for (local, piece) in locals.iter().zip(pieces(self.units.content(unit), self.units.rank, &gradient)?) {
            match gradient_of(local)? {
                Some(mut before) => drop(before.f_add_(&piece)?),
                None => set_gradient(local, Some(&piece))?,
            }
        }
        Ok(())
    }

    /// At the end of a backward pass whose gradients are reduced.
    fn finish_backward(&self) -> Result<()> {
        self.lock().backward.is_end_awaited = false;
        self.reduce_what_is_left()
    }

    /// Reduces gradients that were kept in full and that no later backward pass has touched, and waits for all of them.
    fn reduce_what_is_left(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for unit in 0..self.units.len() {
            let left = std::mem::take(&mut self.lock().unreduced[unit]);
            if !left.is_empty() {
                self.start_reduce(unit, &computed(left)?)?;
            }
        }
        self.finish_pieces(0)?;
        self.transport.finish_sums()?;
        self.finish_replicated()
    }

    /// After a backward pass. Collective where it synchronises.
    pub(super) fn after_backward(&self) -> Result<()> {
        if self.gradient_sync.end_backward() {
            return self.average_replicated();
        }
        self.lock().has_own_gradients = true;
        Ok(())
    }

    /// Reduces all that backward passes have left. Collective.
    pub(super) fn complete(&self) -> Result<()> {
        self.reduce_what_is_left()?;
        if self.lock().has_own_gradients { self.average_replicated() } else { Ok(()) }
    }

    /// Changes the gradients that have not been reduced of the parameters that a call is about.
    pub(super) fn each_unreduced(
        &self,
        concerns: Concerns<'_>,
        change: impl Fn(&mut Option<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (unit, params) in self.params.iter().enumerate() {
            let mut unreduced = std::mem::take(&mut self.lock().unreduced[unit]);
            let is_concerned = |param: &WeakParam| param.upgrade().is_some_and(|param| concerns(&param));
            let mut concerned = params.iter().zip(&mut unreduced).filter(|(param, _)| is_concerned(param));
            let changed = concerned.try_for_each(|(_, gradient)| change(gradient));
            // Nothing is to be reduced of a unit without any.
            if unreduced.iter().any(Option::is_some) {
                self.lock().unreduced[unit] = unreduced;
            }
            changed?;
        }
        Ok(())
    }

    /// The sums of full gradients that have not been reduced, by the name of the parameter.
    pub(super) fn unreduced(&self) -> Result<Vec<(String, Tensor)>> {
        let state = self.lock();
        let mut found = Vec::new();
        for (params, sums) in self.params.iter().zip(&state.unreduced) {
            for (param, sum) in params.iter().zip(sums) {
                if let (Some(param), Some(sum)) = (param.upgrade(), sum) {
                    found.push((param.name().to_owned(), sum.f_detach()?));
                }
            }
        }
        Ok(found)
    }

    /// Takes over such sums; parameters in no unit have their gradients.
    pub(super) fn reopen_window(&self, sums: &BTreeMap<&str, &Tensor>) -> Result<()> {
        let mut unreduced = Vec::with_capacity(self.params.len());
        for params in &self.params {
            let sum = |param: &WeakParam| -> Result<Option<Tensor>> {
                let name = param.upgrade().map(|param| param.name().to_owned()).unwrap_or_default();
                let sum = sums.get(name.as_str());
                Ok(sum.map(|sum| sum.f_to_device(self.units.device)).transpose()?)
            };
            let own = params.iter().map(sum).collect::<Result<Vec<_>>>()?;
            // Nothing is to be reduced of a unit without any.
            unreduced.push(if own.iter().any(Option::is_some) { own } else { Vec::new() });
        }
        let mut state = self.lock();
        state.unreduced = unreduced;
        state.has_own_gradients = true;
        Ok(())
    }

    /// Averages the gradients of parameters that are in no unit; one that is missing counts as zeros. Collective.
    fn average_replicated(&self) -> Result<()> {
        self.lock().has_own_gradients = false;
        let ReductionRanks { data, replicated, .. } = &self.ranks;
        if data.world_size() == 1 || replicated.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let mut gradients = Vec::with_capacity(replicated.len());
        for (param, trained) in replicated {
            let local = param.local();
            // Of those that were unfrozen since `prepare`, too.
            if !trained && !local.requires_grad() {
                continue;
            }
            let own = gradient_of(&local)?;
            // Zeros would let a parameter that was frozen since then decay.
            let is_kept = own.is_some() || local.requires_grad();
            let gradient = own.map_or_else(|| local.f_zeros_like(), Ok)?;
            // Before the sum, as in `c10d::Reducer`.
            scalar::mul_(&gradient, 1.0 / data.world_size() as f64)?;
            gradients.push(gradient);
            if is_kept {
                set_gradient(&local, gradients.last())?;
            }
        }
        data.all_reduce_coalesced(&gradients, ReduceOp::Sum)
    }

    /// Forgets a backward pass that has failed. What has been sent has to arrive first: its memory will be used again. Who still
    /// reads what was offered finds the shards closed.
    pub(super) fn abandon_backward(&self) -> Result<()> {
        let Backward { pieces, replicated, .. } = std::mem::take(&mut self.lock().backward);
        for Piece { pending, sum, .. } in pieces {
            if let PendingSum::Sent(pending) = pending {
                pending.write_to(sum)?;
            }
        }
        replicated.into_iter().try_for_each(|unit| unit.pending.map_or(Ok(()), PendingCollective::wait))
    }
}

/// Sums of gradients, by member, of element type `kind`; `before` is empty if there are none yet. As
/// DistributedDataParallel does it, older ones first.
fn added(before: Vec<Option<Tensor>>, gradients: Vec<Gradient>, kind: Kind) -> Result<Vec<Option<Tensor>>> {
    let mut before = before.into_iter();
    let add = |gradient: Gradient| match (before.next().flatten(), gradient.into_tensor()?) {
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
fn computed(sums: Vec<Option<Tensor>>) -> Result<Vec<Gradient>> {
    sums.into_iter().map(|sum| Gradient::new(Vec::new(), sum)).collect()
}

/// Writes what each rank gets of `range` of its shard, one row for each, multiplied by `scale`. What stands behind the last
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
