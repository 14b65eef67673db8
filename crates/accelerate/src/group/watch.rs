//! Says, long before a deadline, that ranks wait for each other: which of them is in which call, and which in none.
//!
//! A thread of its own looks at the calls that this process is in. One that takes a second is written into the store. A rank whose
//! deadline passes finds there who waits as it does, and does not blame that rank. Once calls take as long as people are willing
//! to wait, the main process tells of all that it finds there, again after twice the time. Nothing is written while calls are
//! short.

use super::{Group, Inner, Members};
use crate::error::CollectiveCall;
use crate::messages;
use crate::status::{CallLog, LoggedCall, LoggedGroup};
use accelerate_core::status::BACKWARD;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use torch_ext::Store;

/// How long the store may take to answer; whoever it waits for is not waited for here.
const ANSWER: Duration = Duration::from_secs(1);
/// A call that has taken so long is written into the store, where others read of it; sooner where deadlines are short.
pub(super) const LONG: Duration = Duration::from_secs(1);
/// Number of ranks that people are to be told of.
const COUNT: &str = "count";
/// What is shown of many ranks.
const MOST_NAMED: usize = 16;

/// The calls that this process is in, watched by a thread. Dropped, the thread ends.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    store: Store,
}

struct Shared {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Default)]
struct Calls {
    next: u64,
    /// In the order in which they began; several only where threads have groups of their own.
    running: Vec<Begun>,
    /// What others can read without the store.
    log: Option<CallLog>,
    is_over: bool,
}

struct Begun {
    id: u64,
    group: Arc<str>,
    call: LoggedCall,
}

impl Calls {
    /// A call of a group has ended, which may have been part of another one that goes on.
    fn end(&mut self, id: u64) {
        let Some(position) = self.running.iter().position(|call| call.id == id) else { return };
        let ended = self.running.remove(position);
        let Some(log) = &mut self.log else { return };
        match self.running.iter().rev().find(|call| Arc::ptr_eq(&call.group, &ended.group)) {
            Some(around) => log.begin(&around.group, &around.call),
            None => log.end(&ended.group),
        }
    }
}

impl Shared {
    // Whole after every statement, also where another thread panicked.
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call, until this is dropped.
#[must_use = "the call is watched for as long as this lives"]
pub(crate) struct Entered<'a>(Option<(&'a Shared, u64)>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some((shared, id)) = self.0 {
            shared.lock().end(id);
        }
    }
}

impl Watch {
    /// Watches the calls of this process, and on the main process those of all; says something after `notice`. The others can
    /// read in which call this process is long before `deadline`, by which they ask.
    pub(crate) fn start(
        store: &Store,
        members: Members,
        notice: Duration,
        deadline: Duration,
        log: Option<CallLog>,
    ) -> crate::Result<Self> {
        let store = store.with_timeout(ANSWER)?.prefix("watch")?;
        let calls = Mutex::new(Calls { log, ..Calls::default() });
        let shared = Arc::new(Shared { calls, changed: Condvar::new() });
        let long = LONG.min(notice).min(deadline / 4);
        let mut watcher = Watcher::new(store.clone(), members, notice, long);
        let watched = Arc::clone(&shared);
        let thread = thread::Builder::new().name("watch".to_owned());
        let started = thread.spawn(move || {
            while let Some(running) = next_look(&watched, watcher.pause()) {
                // Without a store there is nobody to tell; the call itself will find that out.
                let _unreachable = watcher.look(running);
            }
        });
        started.map_err(crate::Error::other)?;
        Ok(Self { shared, store })
    }

    /// A group whose calls are watched, on the ranks that belong to it.
    pub(super) fn add(&self, group: LoggedGroup<'_>) {
        if let Some(log) = &mut self.shared.lock().log {
            log.add(group);
        }
    }

    pub(crate) fn enter(&self, group: &Arc<str>, op: &'static str, sequence: u64) -> Entered<'_> {
        let call = LoggedCall::now(op, sequence);
        let mut calls = self.shared.lock();
        calls.next += 1;
        let id = calls.next;
        if let Some(log) = &mut calls.log {
            log.begin(group, &call);
        }
        calls.running.push(Begun { id, group: Arc::clone(group), call });
        Entered(Some((&self.shared, id)))
    }

    /// The call of a group in which a rank of the job is, if it has been there for long.
    pub(super) fn call_of(&self, rank: usize, group: &str) -> torch_ext::Result<Option<CollectiveCall>> {
        let key = rank.to_string();
        let published = if self.store.check(&[&key])? { self.store.get(&key)? } else { Vec::new() };
        Ok(decode(&published).find(|(of, _)| of == group).map(|(_, call)| call))
    }
}

/// Calls as others read them: a line for each, with its group.
fn encode(running: &[Running]) -> String {
    let lines = running.iter().map(|Running { group, call, .. }| format!("{group}\t{}\t{}", call.op, call.sequence));
    lines.collect::<Vec<_>>().join("\n")
}

fn decode(published: &[u8]) -> impl Iterator<Item = (String, CollectiveCall)> {
    let lines: Vec<String> = String::from_utf8_lossy(published).lines().map(str::to_owned).collect();
    lines.into_iter().filter_map(|line| {
        let mut parts = line.split('\t').map(str::to_owned);
        let (group, op, sequence) = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?);
        Some((group, CollectiveCall { op, sequence, shape: String::new() }))
    })
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Entered<'static> {
    /// Where nobody watches.
    pub(super) fn unwatched() -> Self {
        Self(None)
    }
}

/// A call of a group, and how long it has taken so far.
struct Running {
    group: Arc<str>,
    call: CollectiveCall,
    taken: Duration,
}

/// After a pause, the calls of this process, the one that has taken longest first; `None` once the watch is over.
fn next_look(shared: &Shared, pause: Duration) -> Option<Vec<Running>> {
    let (calls, _) = shared
        .changed
        .wait_timeout_while(shared.lock(), pause, |calls| !calls.is_over)
        .unwrap_or_else(PoisonError::into_inner);
    if calls.is_over {
        return None;
    }
    let running = calls.running.iter().map(|call| Running {
        group: Arc::clone(&call.group),
        call: CollectiveCall::watched(call.call.op, call.call.sequence),
        taken: call.call.began.elapsed(),
    });
    Some(running.collect())
}

struct Watcher {
    store: Store,
    members: Members,
    notice: Duration,
    /// A call that has taken so long is one that others can read of.
    long: Duration,
    /// What the others can read of this rank.
    published: String,
    /// This rank is one that people are to be told of.
    is_counted: bool,
    /// Since when ranks wait, on the main process.
    begun: Option<Instant>,
    /// How often that was told.
    told: u32,
}

impl Watcher {
    fn new(store: Store, members: Members, notice: Duration, long: Duration) -> Self {
        let published = String::new();
        Self { store, members, notice, long, published, is_counted: false, begun: None, told: 0 }
    }

    /// Often enough that others read of a call, and people of a wait, in time.
    fn pause(&self) -> Duration {
        (self.long / 4).max(Duration::from_millis(50))
    }

    fn look(&mut self, mut running: Vec<Running>) -> torch_ext::Result<()> {
        let is_told_of = running.iter().any(|call| self.notice <= call.taken);
        running.retain(|call| self.long <= call.taken);
        self.publish(encode(&running))?;
        if is_told_of != self.is_counted {
            self.store.add(COUNT, if is_told_of { 1 } else { -1 })?;
            self.is_counted = is_told_of;
        }
        if self.members.rank() == 0 {
            self.tell()?;
        }
        Ok(())
    }

    /// Says in which calls this rank is for long, or that it is in none any more.
    fn publish(&mut self, calls: String) -> torch_ext::Result<()> {
        let key = self.members.rank().to_string();
        if calls == self.published {
            return Ok(());
        }
        if calls.is_empty() {
            self.store.delete_key(&key)?;
        } else {
            self.store.set(&key, calls.as_bytes())?;
        }
        self.published = calls;
        Ok(())
    }

    /// Tells which rank is where, if any waits for long and it is time to say so once more.
    fn tell(&mut self) -> torch_ext::Result<()> {
        if self.store.add(COUNT, 0)? <= 0 {
            (self.begun, self.told) = (None, 0);
            return Ok(());
        }
        // The rank that waits has done so for a while.
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let (waited, factor) =
            (begun.elapsed().saturating_add(self.notice), 1u32.checked_shl(self.told).unwrap_or(u32::MAX));
        if waited < self.notice.saturating_mul(factor) {
            return Ok(());
        }
        self.told += 1;
        let mut calls = Vec::new();
        for rank in 0..self.members.world_size() {
            let key = rank.to_string();
            let published = if self.store.check(&[&key])? { self.store.get(&key)? } else { Vec::new() };
            let longest = decode(&published).next().map(|(_, call)| call.to_string());
            calls.push((self.members.in_job(rank), longest));
        }
        messages::warning!("ranks have waited for each other for {} s: {}", waited.as_secs(), describe(&calls));
        Ok(())
    }
}

/// Which rank is in which call, and which is in none for long.
fn describe(calls: &[(usize, Option<String>)]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut seen: Vec<&Option<String>> = Vec::new();
    for (_, call) in calls {
        if seen.contains(&call) {
            continue;
        }
        seen.push(call);
        let ranks: Vec<usize> = calls.iter().filter(|(_, other)| other == call).map(|(rank, _)| *rank).collect();
        let more = if ranks.len() > MOST_NAMED { ", ..." } else { "" };
        let names: Vec<String> = ranks.iter().take(MOST_NAMED).map(usize::to_string).collect();
        let (noun, verb) = if ranks.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
        let place = match call {
            Some(call) => format!("in {call}"),
            None => "in no call for long: they compute, hang, are stopped or have ended".to_owned(),
        };
        let place = if ranks.len() == 1 {
            place.replace("they compute, hang, are stopped or have", "it computes, hangs, is stopped or has")
        } else {
            place
        };
        parts.push(format!("{noun} {}{more} {verb} {place}", names.join(", ")));
    }
    parts.join("; ")
}

impl Group {
    /// The same group, with a watch over its calls and those of all groups that are made from it.
    pub(crate) fn watched(self, watch: Watch) -> Self {
        let group = Self { watch: Some(Arc::new(watch)), ..self };
        group.add_to_watch(false);
        group
    }

    pub(super) fn add_to_watch(&self, is_in_background: bool) {
        if let Some(watch) = &self.watch {
            let Inner { name, members, .. } = &*self.inner;
            watch.add(LoggedGroup { name, num_members: members.world_size(), is_in_background });
        }
    }

    /// From now on until it is dropped, this process is in a call.
    pub(super) fn enter(&self, op: &'static str, sequence: u64) -> Entered<'_> {
        match &self.watch {
            Some(watch) => watch.enter(&self.inner.name, op, sequence),
            None => Entered::unwatched(),
        }
    }

    /// The same while memory of another rank is waited for.
    pub(super) fn enter_reading(&self, op: &'static str) -> Entered<'_> {
        self.enter(op, self.inner.sequence.load(Ordering::Relaxed))
    }

    /// The same for a backward pass, whose collectives the reducer starts and waits for.
    pub(crate) fn enter_backward(&self) -> impl Drop + '_ {
        self.enter(BACKWARD, self.inner.sequence.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn watcher(store: &Store, rank: usize) -> Watcher {
        let (store, members) = (store.clone(), Members::all(rank, 3));
        Watcher::new(store, members, Duration::from_secs(30), Duration::from_secs(1))
    }

    fn running(op: &str, seconds: u64) -> Vec<Running> {
        let call = CollectiveCall { op: op.to_owned(), sequence: 7, shape: String::new() };
        vec![Running { group: "/fork/0".into(), call, taken: Duration::from_secs(seconds) }]
    }

    #[test]
    fn calls_are_published_once_they_take_long_counted_once_people_wait_and_withdrawn_when_they_end() {
        let store = Store::hash().unwrap();
        let mut watcher = watcher(&store, 1);
        watcher.look(running("barrier", 0)).unwrap();
        assert!(!store.check(&["1"]).unwrap());
        for (seconds, count) in [(2, 0), (29, 0), (31, 1), (32, 1)] {
            watcher.look(running("barrier", seconds)).unwrap();
            let published: Vec<_> = decode(&store.get("1").unwrap()).collect();
            assert_eq!(published, [("/fork/0".to_owned(), running("barrier", 31).remove(0).call)]);
            assert_eq!(store.add(COUNT, 0).unwrap(), count);
        }
        watcher.look(Vec::new()).unwrap();
        assert!(!store.check(&["1"]).unwrap());
        assert_eq!(store.add(COUNT, 0).unwrap(), 0);
    }

    #[test]
    fn the_main_process_tells_again_after_twice_the_time() {
        let store = Store::hash().unwrap();
        let (mut main, mut other) = (watcher(&store, 0), watcher(&store, 1));
        main.look(Vec::new()).unwrap();
        assert_eq!(main.told, 0);
        other.look(running("barrier", 31)).unwrap();
        main.look(Vec::new()).unwrap();
        main.look(Vec::new()).unwrap();
        assert_eq!(main.told, 1, "told of a rank that waits for the main process");
        main.begun = main.begun.map(|begun| begun.checked_sub(Duration::from_secs(31)).unwrap());
        main.look(Vec::new()).unwrap();
        assert_eq!(main.told, 2);
        other.look(Vec::new()).unwrap();
        main.look(Vec::new()).unwrap();
        assert_eq!((main.told, main.begun), (0, None));
    }

    #[test]
    fn ranks_in_the_same_call_are_named_together() {
        let call = |text: &str| Some(text.to_owned());
        let calls = [(0, call("barrier (collective 3)")), (1, None), (2, call("barrier (collective 3)"))];
        let wanted = "ranks 0, 2 are in barrier (collective 3); rank 1 is in no call for long: it computes, hangs, is stopped or has ended";
        assert_eq!(describe(&calls), wanted);
    }
}
