//! While parameters stay as they are, ranks on one machine read each other's parts out of memory, whenever they need them.
//!
//! A window opens with a forward pass and closes when all ranks have compared what they gathered, after the backward pass,
//! before anything changes. Whoever changes parameters in between is found out, by itself or by who has read them.

use super::unit::UnitState;
use super::{Home, Shard};
use crate::error::{Result, StateError};
use crate::group::{Group, InFlight, Neighbours};
use tch::{Device, Kind, Tensor};

/// Ranks whose parts can be read.
pub(super) struct Direct {
    neighbours: Neighbours,
    /// Addresses of a unit's parts, by rank.
    parts: Vec<Vec<usize>>,
}

/// The time in which nobody changes parameters.
pub(super) struct Window {
    /// The numbers under which ranks have opened, by rank, and what brings them.
    stamps: Tensor,
    opening: Option<InFlight>,
    /// Tells when all ranks have ended the forward pass.
    leaving: Option<InFlight>,
    /// Parts have been read since.
    reads_on: bool,
    /// How often own parts had been written to.
    versions: Vec<i64>,
}

impl Direct {
    /// `None` on all ranks unless all can read every other's parts, and compute with them as they are. Collective.
    pub(super) fn new(group: &Group, units: &[UnitState], home: &Home) -> Result<Option<Self>> {
        let is_readable = |unit: &UnitState| {
            unit.shard.device() == Device::Cpu && unit.shard.f_kind().is_ok_and(|kind| kind == unit.kinds.compute)
        };
        if units.is_empty() || !matches!(home, Home::Device) || !units.iter().all(is_readable) {
            return Ok(None);
        }
        let Some(neighbours) = group.neighbours()? else { return Ok(None) };
        let own: Vec<i64> = units.iter().map(|unit| unit.shard.data_ptr() as i64).collect();
        let all = Vec::<i64>::try_from(&group.all_gather_into_tensor(&Tensor::f_from_slice(&own)?)?)?;
        let of_unit = |unit: usize| all.iter().skip(unit).step_by(own.len()).map(|&address| address as usize).collect();
        Ok(Some(Self { neighbours, parts: (0..own.len()).map(of_unit).collect() }))
    }
}

impl Shard {
    /// Opens a window for a forward pass and what follows it. Collective, but nobody waits here.
    pub(super) fn open_window(&self) -> Result<()> {
        let Some(direct) = &self.0.direct else { return Ok(()) };
        let group = &self.0.group;
        let versions = self.lock().units.iter().map(|unit| unit.version()).collect::<Result<_>>()?;
        let stamps = Tensor::f_zeros([group.world_size() as i64], (Kind::Int64, Device::Cpu))?;
        let own = Tensor::f_from_slice(&[direct.neighbours.open()])?;
        let opening = group.start_all_gather(&stamps, &own, "parameters at the beginning of a forward pass")?;
        self.lock().window = Some(Window { stamps, opening, leaving: None, reads_on: false, versions });
        Ok(())
    }

    /// Is there an open window? Then nothing needs to be asked for in advance.
    pub(super) fn has_window(&self) -> bool {
        self.lock().window.is_some()
    }

    /// Reads the other ranks' parts of a unit to where they belong in `whole`; whether that is possible.
    pub(super) fn read_others(&self, unit: usize, whole: &Tensor) -> Result<bool> {
        let Some(direct) = &self.0.direct else { return Ok(false) };
        let (stamps, opening) = {
            let mut state = self.lock();
            let Some(window) = &mut state.window else { return Ok(false) };
            window.reads_on |= window.leaving.is_some();
            (window.stamps.shallow_clone(), window.opening.take())
        };
        opening.map_or(Ok(()), InFlight::wait)?;
        let places = whole.f_detach()?.f_chunk(self.0.group.world_size() as i64, 0)?;
        for (rank, place) in places.iter().enumerate().filter(|(rank, _)| *rank != self.0.group.rank()) {
            let stamp = stamps.f_int64_value(&[rank as i64])?;
            direct.neighbours.read(rank, direct.parts[unit][rank], stamp, place, &self.label(unit))?;
        }
        Ok(true)
    }

    /// Says that this rank has read what it needed for the forward pass.
    pub(super) fn leave_window(&self) -> Result<()> {
        if !self.has_window() {
            return Ok(());
        }
        let group = &self.0.group;
        let ends = Tensor::f_zeros([group.world_size() as i64], (Kind::Int64, Device::Cpu))?;
        let own = Tensor::f_zeros([1], (Kind::Int64, Device::Cpu))?;
        let leaving = group.start_all_gather(&ends, &own, "the end of a forward pass")?;
        if let Some(window) = &mut self.lock().window {
            window.leaving = leaving;
        }
        Ok(())
    }

    /// Ends the window of an earlier forward pass, if there is one. Collective.
    pub(super) fn end_window(&self) -> Result<()> {
        // A backward pass that was not the accelerator's may still be reading elsewhere.
        let reads_on = self.lock().window.as_ref().is_some_and(|window| window.reads_on);
        if reads_on {
            self.check_order()?;
        }
        self.close_window()
    }

    /// Closes the window, if there is one, before parameters change. Waits until all ranks have ended the forward pass; what
    /// they read in a backward pass, they say when they [compare](Self::check_order) what they gathered.
    ///
    /// # Errors
    /// Parameters have been changed already.
    pub(super) fn close_window(&self) -> Result<()> {
        let Some(window) = self.lock().window.take() else { return Ok(()) };
        let Window { opening, leaving, versions, .. } = window;
        let ended = [opening, leaving].into_iter().flatten().try_for_each(InFlight::wait);
        if let Some(direct) = &self.0.direct {
            direct.neighbours.close();
        }
        ended?;
        let state = self.lock();
        for (unit, (own, &before)) in state.units.iter().zip(&versions).enumerate() {
            if own.version()? != before {
                return Err(StateError::ChangedWhileRead { unit: self.label(unit) }.into());
            }
        }
        Ok(())
    }
}

/// Parameters go with their model; others may still be reading them.
impl Drop for super::Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(Window { opening, leaving, .. }) = state.window.take() {
            // Nobody is left who could be told: who still reads then, finds the window closed.
            let _ = [opening, leaving].into_iter().flatten().try_for_each(InFlight::wait);
        }
        if let Some(direct) = &self.direct {
            direct.neighbours.close();
        }
    }
}
