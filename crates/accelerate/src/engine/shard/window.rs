//! While parameters stay as they are, ranks on one machine read each other's parts out of memory, whenever they need them.
//!
//! Gradients of other ranks' parts lie ready for them in the same way, piece by piece.
//!
//! A window opens with a forward pass and closes when all ranks have compared what they gathered, after the backward pass,
//! before anything changes. Whoever changes parameters in between is found out, by itself or by who has read them.

use super::gather::Pass;
use super::reduce::MOST_PIECES;
use super::unit::UnitState;
use super::{Home, Shard};
use crate::error::{Result, StateError};
use crate::group::{Group, InFlight, MOST_OFFERS, Neighbours, Versions, Visit};
use std::collections::VecDeque;
use std::sync::PoisonError;
use std::thread;
use tch::{Device, Kind, Tensor};
use torch_ext::hooks::queue_callback;

/// How many pieces of gradients may wait to be taken while this rank goes on.
const MOST_LENT: usize = 2;

// What has been offered and not been taken has a place of its own.
const _: () = assert!(MOST_PIECES + MOST_LENT < MOST_OFFERS);

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
    /// Gradients that other ranks may not have taken yet, by the numbers of their offers.
    lent: VecDeque<(i64, Tensor)>,
    /// The running backward pass will say when it has ended.
    is_end_awaited: bool,
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
        // Nobody opens as this, should the others' numbers not arrive.
        let stamps = Tensor::f_full([group.world_size() as i64], -1, (Kind::Int64, Device::Cpu))?;
        let own = Tensor::f_from_slice(&[direct.neighbours.open()])?;
        let opening = group.start_all_gather(&stamps, &own, "parameters at the beginning of a forward pass")?;
        self.lock().window = Some(Window { stamps, opening, lent: VecDeque::new(), is_end_awaited: false, versions });
        Ok(())
    }

    /// Is there an open window? Then nothing needs to be asked for in advance.
    pub(super) fn has_window(&self) -> bool {
        self.lock().window.is_some()
    }

    /// How ranks have opened, by rank; `None` without a window.
    fn stamps(&self) -> Result<Option<Vec<i64>>> {
        let (stamps, opening) = {
            let mut state = self.lock();
            let Some(window) = &mut state.window else { return Ok(None) };
            (window.stamps.shallow_clone(), window.opening.take())
        };
        opening.map_or(Ok(()), InFlight::wait)?;
        Ok(Some(Vec::try_from(&stamps)?))
    }

    /// Reads the other ranks' parts of a unit to where they belong in `whole`; whether that is possible.
    pub(super) fn read_others(&self, unit: usize, whole: &Tensor, pass: Pass) -> Result<bool> {
        // Outside of passes nobody would know when a rank has read what it wants.
        if pass == Pass::None {
            return Ok(false);
        }
        let (Some(direct), Some(stamps)) = (&self.0.direct, self.stamps()?) else { return Ok(false) };
        if pass == Pass::Backward {
            self.await_end_of_reading()?;
        }
        let visit = Visit { op: "all_gather", what: self.label(unit), stamps: &stamps };
        let places = whole.f_detach()?.f_chunk(stamps.len() as i64, 0)?;
        for (rank, place) in places.iter().enumerate().filter(|(rank, _)| *rank != self.0.group.rank()) {
            direct.neighbours.read(rank, direct.parts[unit][rank], place, &visit)?;
        }
        Ok(true)
    }

    fn await_end_of_reading(&self) -> Result<()> {
        let is_awaited = |window: &mut Window| std::mem::replace(&mut window.is_end_awaited, true);
        if self.lock().window.as_mut().is_some_and(is_awaited) {
            return Ok(());
        }
        let shard = self.clone();
        queue_callback(move || {
            if let Some(window) = &mut shard.lock().window {
                window.is_end_awaited = false;
            }
            shard.end_pass();
            Ok(())
        })?;
        Ok(())
    }

    /// Offers rows of gradients, one for each rank, to those that want them; the number of the offer, if that is possible.
    pub(super) fn offer(&self, rows: &Tensor) -> Result<Option<i64>> {
        let (Some(direct), Some(_)) = (&self.0.direct, self.stamps()?) else { return Ok(None) };
        Ok(Some(direct.neighbours.offer(rows.data_ptr() as usize)))
    }

    /// Adds up this rank's rows of an offer of all ranks, `rows` among them, in the order of ranks. `room` is memory for as
    /// many elements.
    pub(super) fn sum_offered(&self, unit: usize, number: i64, rows: Tensor, room: &Tensor, sum: Tensor) -> Result<()> {
        let (Some(direct), Some(stamps)) = (&self.0.direct, self.stamps()?) else {
            return Err(StateError::ChangedWhileRead { unit: self.label(unit) }.into());
        };
        let visit = Visit { op: "reduce_scatter", what: self.label(unit), stamps: &stamps };
        let (own, world_size) = (self.0.group.rank(), stamps.len());
        let row_bytes = rows.numel() / world_size * rows.f_kind()?.elt_size_in_bytes();
        let mut versions = room.f_view([world_size as i64, -1])?.f_unbind(0)?;
        versions[own] = rows.f_view([world_size as i64, -1])?.f_select(0, own as i64)?;
        for (rank, place) in versions.iter().enumerate().filter(|(rank, _)| *rank != own) {
            let taken = direct.neighbours.take(rank, number, own * row_bytes, place, &visit);
            // What this rank has offered goes with the error.
            taken.inspect_err(|_| direct.neighbours.close())?;
        }
        direct.neighbours.has_taken();
        Versions::here(versions).sum_into(sum)?;
        if let Some(window) = &mut self.lock().window {
            window.lent.push_back((number, rows));
        }
        self.await_lent(MOST_LENT)
    }

    /// Waits until other ranks have taken all gradients but the last so many.
    pub(super) fn await_lent(&self, most_left: usize) -> Result<()> {
        loop {
            let (number, _rows) = {
                let mut state = self.lock();
                match &mut state.window {
                    Some(window) if most_left < window.lent.len() => match window.lent.pop_front() {
                        Some(lent) => lent,
                        None => return Ok(()),
                    },
                    _ => return Ok(()),
                }
            };
            if let (Some(direct), Some(stamps)) = (&self.0.direct, self.stamps()?) {
                let visit = Visit { op: "reduce_scatter", what: "gradients".to_owned(), stamps: &stamps };
                let taken = direct.neighbours.await_taken(number, &visit);
                taken.inspect_err(|_| direct.neighbours.close())?;
            }
        }
    }

    /// Says that this rank has read what it needed for a forward or backward pass.
    pub(super) fn end_pass(&self) {
        if let Some(direct) = self.0.direct.as_ref().filter(|_| self.has_window()) {
            direct.neighbours.has_ended();
        }
    }

    /// Closes the window, if there is one, before parameters change. Waits until all ranks have ended as many passes.
    ///
    /// # Errors
    /// Parameters have been changed already.
    pub(super) fn close_window(&self) -> Result<()> {
        let window = self.lock().window.take();
        let (Some(direct), Some(window)) = (&self.0.direct, window) else { return Ok(()) };
        let versions = direct.close(window)?;
        let state = self.lock();
        for (unit, (own, &before)) in state.units.iter().zip(&versions).enumerate() {
            if own.version()? != before {
                return Err(StateError::ChangedWhileRead { unit: self.label(unit) }.into());
            }
        }
        Ok(())
    }
}

impl Direct {
    /// Waits until nobody reads any more; how often own parts had been written to at the beginning.
    fn close(&self, window: Window) -> Result<Vec<i64>> {
        let Window { stamps, opening, versions, lent, .. } = window;
        let opened = opening.map_or(Ok(()), InFlight::wait).and_then(|()| Ok(Vec::<i64>::try_from(&stamps)?));
        let ended = opened.and_then(|stamps| {
            let what = "the end of a pass".to_owned();
            self.neighbours.await_ended(&Visit { op: "forward or backward", what, stamps: &stamps })
        });
        self.neighbours.close();
        drop(lent);
        ended.map(|()| versions)
    }
}

/// Parameters go with their model; others may still be reading them.
impl Drop for super::Inner {
    fn drop(&mut self) {
        let window = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).window.take();
        let (Some(direct), Some(window)) = (&self.direct, window) else { return };
        // A rank that has failed, or not even begun to read, does not wait for others, which may never come so far.
        if window.opening.is_some() || thread::panicking() {
            return direct.neighbours.close();
        }
        // Nobody is left who could be told: who still reads then, finds the window closed.
        let _ = direct.close(window);
    }
}
