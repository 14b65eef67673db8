//! From parts to parameters: when a unit is gathered, when its memory goes, and what is fetched ahead.

use super::order::{Order, Travel};
use super::unit::views;
use super::{Phase, Shard, State};
use crate::error::Result;
use crate::group::InFlight;
use crate::nn::while_recomputing;
use accelerate_core::config::BackwardPrefetch;
use smallvec::SmallVec;
use tch::Tensor;
use torch_ext::autograd::is_grad_enabled;
use torch_ext::storage::storage_id;

/// The units that a pass gathers.
type OrderOf = fn(&mut State) -> &mut Order;

/// Who asks for a unit.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pass {
    Forward,
    Backward,
    /// Somebody outside of both: it says nothing about what is needed next.
    None,
}

impl Shard {
    /// One parameter to compute with. Collective unless its unit is gathered already.
    pub(super) fn materialize(&self, unit: usize, member: usize) -> Result<Tensor> {
        let records = is_grad_enabled() && self.unit(unit).requires_grad;
        let released = self.enter_unit(unit);
        drop(released);
        if let Some((recorded, outputs)) = &self.lock().units[unit].outputs
            && *recorded == records
        {
            return Ok(outputs[member].shallow_clone());
        }
        let pass = match self.lock().phase {
            Phase::Forward => Pass::Forward,
            Phase::Other if self.stays_while_recomputing(unit) => Pass::Backward,
            Phase::Other => Pass::None,
        };
        let whole = self.gather(unit, pass)?;
        let outputs = if records { self.outputs_of(unit, &whole)? } else { self.views(unit, &whole)? };
        let output = outputs[member].shallow_clone();
        let released = {
            let mut state = self.lock();
            if pass != Pass::None {
                state.units[unit].outputs = Some((records, outputs));
                Released::default()
            } else {
                // Nobody says when this use ends, so nothing is kept for the next.
                state.release(unit)
            }
        };
        drop(released);
        Ok(output)
    }

    /// Whether a checkpointed segment is being computed again. Then a unit stays until that is done, and afterwards as long as
    /// the graph needs it.
    fn stays_while_recomputing(&self, unit: usize) -> bool {
        let shard = self.clone();
        while_recomputing(move || {
            let released = {
                let mut state = shard.lock();
                match shard.0.frees_after_forward && state.units[unit].num_tokens == 0 {
                    true => state.release(unit),
                    false => Released { _whole: None, _outputs: state.units[unit].outputs.take() },
                }
            };
            drop(released);
        })
    }

    /// Notes that a unit is in use, and lets those of the module before it go: frozen parameters of a module are a unit
    /// of their own. The root unit stays: what belongs to no module is used at both ends of a model.
    fn enter_unit(&self, unit: usize) -> SmallVec<[Released; 2]> {
        let mut state = self.lock();
        let path = |unit: usize| &self.unit(unit).path;
        if state.phase != Phase::Forward || path(unit).is_empty() {
            return SmallVec::new();
        }
        match state.current.replace(unit) {
            Some(before) if path(before) != path(unit) && self.0.frees_after_forward => {
                let of_module = (0..state.units.len()).filter(|&other| path(other) == path(before));
                of_module.map(|unit| state.release(unit)).collect()
            }
            _ => SmallVec::new(),
        }
    }

    /// The unit's elements of all ranks. Collective unless they are here already.
    pub(super) fn gather(&self, unit: usize, pass: Pass) -> Result<Tensor> {
        if pass == Pass::Forward {
            // Whether it is here or not: that may differ from pass to pass, which units a pass uses may not.
            self.lock().forward_order.record(unit);
        }
        if let Some(whole) = self.lock().units[unit].usable_whole() {
            return Ok(whole);
        }
        self.start_gather(unit, pass)?;
        self.start_expected(unit, pass)?;
        self.receive(unit)
    }

    /// The same in the type in which it is kept, which may be more exact than the one to compute in.
    pub(super) fn gather_exactly(&self, unit: usize) -> Result<Tensor> {
        let (kind, computes_in) = {
            let state = self.lock();
            (state.units[unit].shard.f_kind()?, state.units[unit].kinds.compute)
        };
        if kind == computes_in {
            return self.gather(unit, Pass::None);
        }
        let num_elements = self.unit(unit).shard_elements * self.0.group.world_size();
        let _no_grad = tch::no_grad_guard();
        let whole = self.lock().buffers.take(num_elements, (kind, self.0.device))?;
        let own = self.own_part(unit, &whole)?;
        let in_flight = self.0.group.start_all_gather(&whole, &own, &self.label(unit))?;
        in_flight.map_or(Ok(()), InFlight::wait)?;
        Ok(whole)
    }

    /// Waits for a unit that was asked for.
    fn receive(&self, unit: usize) -> Result<Tensor> {
        let (whole, in_flight) = {
            let mut state = self.lock();
            match state.units[unit].arriving.take() {
                Some(arriving) => arriving,
                None => (self.whole_memory(&mut state, unit)?, None),
            }
        };
        in_flight.map_or(Ok(()), InFlight::wait)?;
        let mut state = self.lock();
        if let Some(outdated) = &state.units[unit].whole {
            let outdated = storage_id(outdated);
            state.gathered.remove(&outdated);
        }
        state.gathered.insert(storage_id(&whole), unit);
        state.units[unit].arrived(&whole)?;
        Ok(whole)
    }

    /// Asks for the unit's elements of all ranks, unless that has been done.
    fn start_gather(&self, unit: usize, pass: Pass) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut state = self.lock();
        if state.units[unit].arriving.is_some() {
            return Ok(());
        }
        let whole = self.whole_memory(&mut state, unit)?;
        drop(state);
        // The others would wait for it until the deadline, and not know why.
        let own = self.own_part(unit, &whole).inspect_err(|error| drop(self.0.group.leave(&error.to_string())))?;
        let in_flight = match self.read_others(unit, &whole, pass)? {
            true => None,
            false => self.0.group.start_all_gather(&whole, &own, &self.label(unit))?,
        };
        let mut state = self.lock();
        state.travelled.push(Travel::Gather(unit));
        let own = &mut state.units[unit];
        own.counts.gathers += 1;
        own.arriving = Some((whole, in_flight));
        Ok(())
    }

    /// Asks for the units that the pass before used after this one.
    fn start_expected(&self, unit: usize, pass: Pass) -> Result<()> {
        let prefetch = &self.0.prefetch;
        let (order_of, is_wanted): (OrderOf, _) = match pass {
            Pass::Forward => (|state| &mut state.forward_order, prefetch.forward),
            Pass::Backward => (|state| &mut state.backward_order, prefetch.backward == BackwardPrefetch::BackwardPre),
            Pass::None => return Ok(()),
        };
        if pass == Pass::Backward {
            // Saved tensors ask again and again.
            self.lock().backward_order.record(unit);
        }
        self.start_next(order_of, is_wanted)
    }

    /// After a unit's backward pass, asks for what the next one needs.
    pub(super) fn start_expected_after_backward(&self) -> Result<()> {
        if self.0.prefetch.backward != BackwardPrefetch::BackwardPost {
            return Ok(());
        }
        self.start_next(|state| &mut state.backward_order, true)
    }

    /// Asks for the units that come next if that `is_wanted`, and has the one after them read from where it is kept.
    fn start_next(&self, order_of: OrderOf, is_wanted: bool) -> Result<()> {
        let (asked, next): (SmallVec<[usize; 2]>, _) = {
            let mut state = self.lock();
            let expected = SmallVec::<[usize; 16]>::from_slice(order_of(&mut state).expected());
            let is_here = |unit: usize| state.units[unit].usable_whole().is_some();
            let count = if is_wanted { self.0.plan.num_ahead(&expected, is_here) } else { 0 };
            let next = expected.get(count).copied().filter(|&unit| !is_here(unit));
            // What is read out of memory needs no time in advance.
            let is_asked = |unit: &usize| state.window.is_none() && !is_here(*unit);
            (expected[..count].iter().copied().filter(is_asked).collect(), next)
        };
        // The kind of pass matters to windows only.
        asked.into_iter().try_for_each(|unit| self.start_gather(unit, Pass::Forward))?;
        if let Some(next) = next {
            self.read_ahead(next);
        }
        Ok(())
    }

    /// Waits for what was asked for in vain, and forgets it: its memory will be used again.
    pub(super) fn receive_what_is_left(&self) -> Result<()> {
        let arriving: SmallVec<[_; 2]> = self.lock().units.iter_mut().filter_map(|unit| unit.arriving.take()).collect();
        arriving.into_iter().try_for_each(|(_whole, in_flight)| in_flight.map_or(Ok(()), InFlight::wait))
    }

    /// Where the whole unit goes.
    fn whole_memory(&self, state: &mut State, unit: usize) -> Result<Tensor> {
        let State { units, buffers, stays_whole, .. } = state;
        match &units[unit].whole {
            Some(whole) if *stays_whole => Ok(whole.shallow_clone()),
            // What is there is outdated, and a graph may need it as it is.
            _ => {
                let num_elements = self.unit(unit).shard_elements * self.0.group.world_size();
                buffers.take(num_elements, (units[unit].kinds.compute, self.0.device))
            }
        }
    }

    /// The parameters in a gathered unit.
    pub(super) fn views(&self, unit: usize, whole: &Tensor) -> Result<Vec<Tensor>, tch::TchError> {
        views(self.unit(unit), &self.0.shapes, whole)
    }

    /// The same as outputs of one node, whose backward is the reduce-scatter.
    fn outputs_of(&self, unit: usize, whole: &Tensor) -> Result<Vec<Tensor>> {
        let locals: Vec<Tensor> = self.lock().units[unit].locals.iter().map(Tensor::shallow_clone).collect();
        let shard = self.clone();
        Ok(torch_ext::apply_function(
            "GatherUnit",
            &locals.iter().collect::<Vec<_>>(),
            |_| Ok(self.views(unit, whole)?),
            move |_, gradients| Ok(shard.reduce(unit, gradients)?),
        )?)
    }

    /// Lets all gathered units go.
    pub(super) fn release_all(&self) {
        let released: Vec<Released> = {
            let mut state = self.lock();
            (0..state.units.len()).map(|unit| state.release(unit)).collect()
        };
        drop(released);
    }
}

/// What a unit held while it was gathered; dropped without the lock, because whoever drops tensors may run anything.
#[derive(Default)]
pub(super) struct Released {
    _whole: Option<Tensor>,
    _outputs: Option<(bool, Vec<Tensor>)>,
}

impl State {
    #[must_use = "to be dropped without the lock"]
    pub(super) fn release(&mut self, unit: usize) -> Released {
        let Self { units, gathered, stays_whole, .. } = self;
        let unit = &mut units[unit];
        let outputs = unit.outputs.take();
        if *stays_whole {
            return Released { _whole: None, _outputs: outputs };
        }
        if let Some(whole) = &unit.whole {
            gathered.remove(&storage_id(whole));
        }
        Released { _whole: unit.whole.take(), _outputs: outputs }
    }
}
