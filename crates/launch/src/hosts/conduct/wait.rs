//! Waiting until something can be done: one `poll` over all connections, signals, output and the next deadline.

use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};

use super::Conductor;
use crate::supervise::{backlog, timespec};

/// What can be done now, with the numbers of machines.
#[derive(Default)]
pub(super) struct Events {
    pub(super) readable: Vec<usize>,
    pub(super) writable: Vec<usize>,
    pub(super) has_signal: bool,
    /// For output that waits.
    pub(super) has_room: bool,
}

impl Conductor<'_> {
    /// Blocks until something can be done. Nothing is read from machines while nobody takes what they have sent.
    pub(super) fn wait(&self) -> Events {
        let losses = self.machines.iter().filter(|machine| machine.connection.ended().is_none());
        let losses = losses.filter_map(|machine| machine.lost_at);
        let deadlines = [self.give_up_at, self.listens_at, self.reporter.wakes_at()];
        let deadline = deadlines.into_iter().flatten().chain(losses).min();
        let timeout = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let is_full = backlog::is_full(self.reporter, self.stopped_by.is_some());
        let room = self.reporter.backlog().map(|backlog| backlog.room);
        let writes: Vec<_> = self.machines.iter().map(|machine| machine.connection.to_agent().writes_to()).collect();
        let mut owners = Vec::new();
        let mut descriptors = vec![PollFd::from_borrowed_fd(self.signals.descriptor(), PollFlags::IN)];
        for (index, (machine, write)) in self.machines.iter().zip(&writes).enumerate() {
            let reads = machine.connection.reads_from().filter(|_| !is_full).map(|from| (from, PollFlags::IN));
            let write = write.as_deref().map(|file| (file.as_fd(), PollFlags::OUT));
            for (descriptor, flags) in reads.chain(write) {
                owners.push((index, flags));
                descriptors.push(PollFd::from_borrowed_fd(descriptor, flags));
            }
        }
        descriptors.extend(room.map(|room| PollFd::from_borrowed_fd(room, PollFlags::OUT)));
        if poll(&mut descriptors, timeout.as_ref()).is_err() {
            return Events { has_signal: true, ..Events::default() };
        }
        let is_ready = |descriptor: &PollFd<'_>| !descriptor.revents().is_empty();
        let ready: Vec<_> = owners.into_iter().zip(&descriptors[1..]).filter(|(_, found)| is_ready(found)).collect();
        let owners_of = |wanted: PollFlags| {
            let owners = ready.iter().filter(|((_, flags), _)| *flags == wanted).map(|((index, _), _)| *index);
            let mut owners: Vec<_> = owners.collect();
            owners.dedup();
            owners
        };
        Events {
            readable: owners_of(PollFlags::IN),
            writable: owners_of(PollFlags::OUT),
            has_signal: is_ready(&descriptors[0]),
            has_room: room.is_some() && descriptors.last().is_some_and(is_ready),
        }
    }
}
