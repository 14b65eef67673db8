//! From shards to parameters: when a unit is gathered, when its memory goes, and what is gathered ahead.

use super::FullyShard;
use super::codes::as_bytes;
use super::issued::IssuedCollective;
use super::prefetch::Expected;
use super::units::{Phase, Released};
use crate::error::Result;
use crate::group::{NeededBy, PendingCollective};
use crate::nn::while_recomputing;
use smallvec::SmallVec;
use std::sync::Arc;
use tch::Tensor;
use torch_ext::autograd::is_grad_enabled;
use torch_ext::hooks::queue_callback;

impl FullyShard {
    /// One parameter to compute with. Collective unless its unit is gathered already.
    pub(super) fn materialize(&self, unit: usize, member: usize) -> Result<Tensor> {
        match self.0.units.content(unit).in_fp8 {
            true => self.dequantized(unit, member),
            false => Ok(self.use_unit(unit, member)?.1),
        }
    }

    /// A unit in full, and what a graph sees of one of its parameters. Collective unless it is gathered already.
    pub(super) fn use_unit(&self, unit: usize, member: usize) -> Result<(Tensor, Tensor)> {
        let units = &self.0.units;
        let records = is_grad_enabled() && units.content(unit).requires_grad;
        drop(units.enter(unit, self.0.frees_after_forward));
        if let Some(used) = units.full_and_output(unit, member, records) {
            return Ok(used);
        }
        let needed_by = match units.phase() {
            Phase::Forward => NeededBy::Forward,
            Phase::Other if self.stays_while_recomputing(unit) => NeededBy::Backward,
            Phase::Other => NeededBy::Outside,
        };
        let full = self.gather(unit, needed_by)?;
        let outputs = if records { self.outputs_of(unit, &full)? } else { units.graph_outputs(unit, &full)? };
        let output = outputs[member].shallow_clone();
        drop(units.keep_outputs(unit, needed_by, (records, outputs)));
        Ok((full, output))
    }

    /// Whether a checkpointed segment is being computed again. Then a unit stays until that is done, and afterwards as long as
    /// the graph needs it.
    fn stays_while_recomputing(&self, unit: usize) -> bool {
        let engine = self.clone();
        while_recomputing(move || drop(engine.0.units.end_recomputing(unit, engine.0.frees_after_forward)))
    }

    /// The unit's elements of all ranks. Collective unless they are here already.
    pub(super) fn gather(&self, unit: usize, needed_by: NeededBy) -> Result<Tensor> {
        if needed_by == NeededBy::Forward {
            self.0.prefetcher.record_forward(unit);
        }
        if let Some(full) = self.0.units.usable(unit) {
            return Ok(full);
        }
        let is_backward = needed_by == NeededBy::Backward;
        self.start_gather(unit, needed_by, is_backward)?;
        let (expected, is_wanted) = self.0.prefetcher.after_gather(unit, needed_by);
        self.start_next(&expected, is_wanted, is_backward)?;
        self.receive(unit)
    }

    /// All parameters of a unit as ranks keep them, which may be more exact than what is computed with; there only as long
    /// as somebody holds them. Collective.
    pub(super) fn gather_exactly(&self, unit: usize) -> Result<Vec<Tensor>> {
        let units = &self.0.units;
        let (kind, gathered) = (units.shard(unit).f_kind()?, units.kinds(unit).gather);
        let full = if kind == gathered {
            self.gather(unit, NeededBy::Outside)?
        } else {
            let _no_grad = tch::no_grad_guard();
            let full = units.buffers.take(units.full_elements(unit), (kind, units.device))?;
            let own = self.leave_on_error(self.0.offloader.place_shard(unit, &full))?;
            let pending = self.0.transport.group().start_all_gather(&full, &own, &units.label(unit))?;
            pending.map_or(Ok(()), PendingCollective::wait)?;
            full
        };
        let views = units.views(unit, &full)?;
        drop::<Released>(units.release_outside(unit));
        Ok(views)
    }

    /// Waits for a unit that was asked for.
    fn receive(&self, unit: usize) -> Result<Tensor> {
        let units = &self.0.units;
        let (full, pending) = match units.take_arriving(unit) {
            Some(arriving) => arriving,
            None => (units.memory_to_gather(unit)?, None),
        };
        pending.map_or(Ok(()), PendingCollective::wait)?;
        units.set_full(unit, &full)?;
        Ok(full)
    }

    /// Asks for the unit's elements of all ranks, unless that has been done. `is_backward`: in a backward pass, which computes with the
    /// codes of the forward pass.
    fn start_gather(&self, unit: usize, needed_by: NeededBy, is_backward: bool) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let (units, transport) = (&self.0.units, &self.0.transport);
        if units.is_arriving(unit) {
            return Ok(());
        }
        let full = units.memory_to_gather(unit)?;
        let is_in_fp8 = units.content(unit).in_fp8;
        let own = self.leave_on_error(match is_in_fp8 {
            true => self.place_codes(unit, &full, is_backward),
            false => self.0.offloader.place_shard(unit, &full),
        })?;
        if needed_by == NeededBy::Backward && transport.begin_backward() {
            let transport = transport.clone();
            queue_callback(move || {
                transport.end_backward();
                Ok(())
            })?;
        }
        let sent = if is_in_fp8 { [as_bytes(&full)?, as_bytes(&own)?] } else { [full.shallow_clone(), own] };
        let pending = transport.start_all_gather(unit, (&sent[0], &sent[1]), needed_by, &units.label(unit))?;
        self.0.issued.record(IssuedCollective::AllGather(unit));
        units.set_arriving(unit, (full, pending));
        Ok(())
    }

    /// Where this rank's shard cannot be read, the others are told: they would wait for it until the deadline, and not know why.
    fn leave_on_error(&self, shard: Result<Tensor>) -> Result<Tensor> {
        shard.inspect_err(|error| drop(self.0.transport.group().leave(&error.to_string())))
    }

    /// After a unit's backward pass, asks for what the next one needs.
    fn start_expected_after_backward(&self) -> Result<()> {
        self.0.prefetcher.after_backward_of_unit().map_or(Ok(()), |expected| self.start_next(&expected, true, true))
    }

    /// Asks for the units that are expected next if that `is_wanted`, and has the one after them read from where it is kept.
    fn start_next(&self, expected: &Expected, is_wanted: bool, is_backward: bool) -> Result<()> {
        let (units, transport) = (&self.0.units, &self.0.transport);
        let is_here = |unit: usize| units.usable(unit).is_some();
        let count = if is_wanted { units.plan.num_ahead(expected, is_here) } else { 0 };
        let next = expected.get(count).copied().filter(|&unit| !is_here(unit));
        if !transport.reads() {
            let asked: SmallVec<[usize; 2]> =
                expected[..count].iter().copied().filter(|&unit| !is_here(unit)).collect();
            // What is sent is sent to any pass alike.
            asked.into_iter().try_for_each(|unit| self.start_gather(unit, NeededBy::Forward, is_backward))?;
        }
        if let Some(next) = next {
            self.0.offloader.read_ahead(next);
        }
        Ok(())
    }

    /// The parameters in a unit as outputs of one node, whose backward is the reduce-scatter.
    fn outputs_of(&self, unit: usize, full: &Tensor) -> Result<Vec<Tensor>> {
        let locals = self.0.units.locals(unit);
        let engine = self.clone();
        Ok(torch_ext::apply_function(
            "GatherUnit",
            &locals.iter().collect::<Vec<_>>(),
            |context| {
                context.once_differentiable();
                Ok(self.0.units.graph_outputs(unit, full)?)
            },
            move |_, gradients| {
                let (own, is_reducing) = Arc::clone(&engine.0.reducer).reduce(unit, gradients)?;
                if is_reducing {
                    engine.start_expected_after_backward()?;
                }
                Ok(own)
            },
        )?)
    }
}
