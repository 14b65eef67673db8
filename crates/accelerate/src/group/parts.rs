//! Parts of different sizes, from some ranks to one.

use super::{Group, wire};
use crate::error::Result;
use tch::{Device, Tensor};

impl Group {
    /// Fills `places` on rank `root`, one for each rank of `sources` in their order, with what these give as `own`: tensors
    /// of as many elements of the same kind as their places. Nothing travels but that, and by way of the CPUs. Other ranks go on at
    /// once. Every rank has to call it, with the same `root` and `sources`.
    ///
    /// The place of `root` itself stays as it is.
    pub(crate) fn gather_parts(
        &self,
        root: usize,
        sources: &[usize],
        own: Option<&Tensor>,
        places: &[Tensor],
    ) -> Result<()> {
        const OP: &str = "gather_parts";
        self.check_rank(OP, root)?;
        let Some(links) = &self.inner.links else { return Ok(()) };
        self.compare_call(OP, || format!("ranks {sources:?} to rank {root}"))?;
        let (sequence, group) = (self.next_sequence(), &links.process_group);
        let _entered = self.enter(OP, sequence);
        let explain = |error| self.explain(links, OP, sequence, String::new(), error);
        // Parts of one call must not be taken for those of the next.
        let tag = (sequence % (1 << 20)) as i32;
        if self.rank() != root {
            let Some(own) = own.filter(|_| sources.contains(&self.rank())) else { return Ok(()) };
            let sent = wire::movable(&own.f_to(Device::Cpu)?)?;
            return group.send(&sent, root, tag).and_then(|work| work.wait(None)).map_err(explain);
        }
        let mut in_flight = Vec::with_capacity(sources.len());
        for (&source, place) in sources.iter().zip(places).filter(|(source, _)| **source != root) {
            let place = wire::movable(place)?;
            in_flight.push((group.recv(&place, Some(source), tag).map_err(explain)?, place));
        }
        in_flight.into_iter().try_for_each(|(work, _kept_until_received)| work.wait(None)).map_err(explain)
    }
}
