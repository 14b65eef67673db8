//! The last call of each group, in the page of this process.

use super::{CallSite, Page, call_site, nanoseconds};
use accelerate_core::status::{CallEntry, words};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A group, as others read of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoggedGroup<'a> {
    /// The same on all ranks.
    pub(crate) name: &'a Arc<str>,
    pub(crate) num_members: usize,
    /// Its calls are made by a thread beside the program.
    pub(crate) is_in_background: bool,
}

/// A call that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoggedCall {
    pub(crate) op: &'static str,
    pub(crate) sequence: u64,
    pub(crate) site: Option<CallSite>,
    pub(crate) began: Instant,
}

impl LoggedCall {
    /// One that begins now, on this thread.
    pub(crate) fn now(op: &'static str, sequence: u64) -> Self {
        Self { op, sequence, site: call_site(), began: Instant::now() }
    }
}

/// Writes calls, from one thread at a time.
#[derive(Debug)]
pub(crate) struct CallLog {
    page: Arc<Page>,
    /// Whose each place is.
    places: [Option<Weak<str>>; words::NUM_CALLS],
}

impl CallLog {
    pub(super) fn new(page: Arc<Page>) -> Self {
        Self { page, places: [const { None }; words::NUM_CALLS] }
    }

    /// From now on calls of this group are written: in a place that no group has that is still there. Where there are more groups
    /// than places, those that came later are left out.
    pub(crate) fn add(&mut self, LoggedGroup { name, num_members, is_in_background }: LoggedGroup<'_>) {
        let is_free = |place: &Option<Weak<str>>| place.as_ref().is_none_or(|group| group.strong_count() == 0);
        if self.place_of(name).is_some() {
            return;
        }
        if let Some(number) = self.places.iter().position(is_free) {
            self.places[number] = Some(Arc::downgrade(name));
            let entry = CallEntry { group: name, num_members, is_in_background, ..CallEntry::default() };
            self.change(number, |place| entry.write_group(|word, value| place[word].store(value, Ordering::Relaxed)));
        }
    }

    /// The group is in this call.
    pub(crate) fn begin(&mut self, group: &Arc<str>, call: &LoggedCall) {
        let Some(number) = self.place_of(group) else { return };
        let entry = CallEntry {
            op: call.op,
            sequence: call.sequence,
            site: call.site.map(|site| (site.file(), site.line())),
            began: self.page.time(call.began),
            ..CallEntry::default()
        };
        self.change(number, |place| entry.write_call(|word, value| place[word].store(value, Ordering::Relaxed)));
    }

    /// The call that the group was in has ended.
    pub(crate) fn end(&mut self, group: &Arc<str>) {
        let Some(number) = self.place_of(group) else { return };
        // To some milliseconds, for a fraction of what the exact time costs.
        let at = nanoseconds(clock_gettime(ClockId::MonotonicCoarse));
        self.change(number, |place| {
            let began = place[CallEntry::BEGAN_IN_PLACE].load(Ordering::Relaxed);
            place[CallEntry::ENDED_IN_PLACE].store(at.max(began), Ordering::Relaxed);
        });
    }

    fn place_of(&self, group: &Arc<str>) -> Option<usize> {
        self.places.iter().position(|place| place.as_ref().is_some_and(|place| is_of(place, group)))
    }

    /// Stores words of a place.
    fn change(&self, number: usize, store: impl FnOnce(&[AtomicU64])) {
        let count = words::CALLS + number * words::WORDS_OF_CALL;
        self.page.change(count, |page| store(&page[count..count + words::WORDS_OF_CALL]));
    }
}

fn is_of(place: &Weak<str>, group: &Arc<str>) -> bool {
    std::ptr::addr_eq(place.as_ptr(), Arc::as_ptr(group))
}
