//! Says, long before a deadline, that ranks wait for each other: which of them is in which call, and which in none.
//!
//! A thread of its own looks at the calls that this process is in. One that takes long is written into the store, and the main
//! process tells of all that it finds there, again after twice the time. Nothing is written, and nobody is asked, while calls
//! are short.

use super::Members;
use crate::error::CollectiveCall;
use crate::messages;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use torch_ext::Store;

/// How long the store may take to answer; whoever it waits for is not waited for here.
const ANSWER: Duration = Duration::from_secs(1);
/// Number of ranks that wait for long.
const COUNT: &str = "count";
/// What is shown of many ranks.
const MOST_NAMED: usize = 16;

/// The calls that this process is in, watched by a thread. Dropped, the thread ends.
pub(crate) struct Watch(Arc<Shared>);

struct Shared {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Default)]
struct Calls {
    next: u64,
    /// In the order in which they began; several only where threads have groups of their own.
    running: Vec<(u64, &'static str, u64, Instant)>,
    is_over: bool,
}

impl Shared {
    // Whole after every statement, also where another thread panicked.
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call, until this is dropped.
#[must_use = "the call is watched for as long as this lives"]
pub(super) struct Entered<'a>(Option<(&'a Shared, u64)>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some((shared, id)) = self.0 {
            shared.lock().running.retain(|(other, ..)| *other != id);
        }
    }
}

impl Watch {
    /// Watches the calls of this process, and on the main process those of all; says something after `notice`.
    pub(crate) fn start(store: &Store, members: Members, notice: Duration) -> crate::Result<Self> {
        let store = store.with_timeout(ANSWER)?.prefix("watch")?;
        let shared = Arc::new(Shared { calls: Mutex::default(), changed: Condvar::new() });
        let mut watcher = Watcher { store, members, notice, is_published: false, begun: None, told: 0 };
        let watched = Arc::clone(&shared);
        let thread = thread::Builder::new().name("watch".to_owned());
        let started = thread.spawn(move || {
            while let Some(longest) = next_look(&watched, watcher.pause()) {
                // Without a store there is nobody to tell; the call itself will find that out.
                let _unreachable = watcher.look(longest);
            }
        });
        started.map_err(crate::Error::other)?;
        Ok(Self(shared))
    }

    pub(super) fn enter(&self, op: &'static str, sequence: u64) -> Entered<'_> {
        let mut calls = self.0.lock();
        calls.next += 1;
        let id = calls.next;
        calls.running.push((id, op, sequence, Instant::now()));
        Entered(Some((&self.0, id)))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
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

/// A call and how long it has taken so far.
type Running = (CollectiveCall, Duration);

/// After a pause, the call that has taken longest, if there is one; `None` once the watch is over.
fn next_look(shared: &Shared, pause: Duration) -> Option<Option<Running>> {
    let (calls, _) = shared
        .changed
        .wait_timeout_while(shared.lock(), pause, |calls| !calls.is_over)
        .unwrap_or_else(PoisonError::into_inner);
    if calls.is_over {
        return None;
    }
    Some(calls.running.first().map(|(_, op, sequence, begun)| {
        let call = CollectiveCall { op: (*op).to_owned(), sequence: *sequence, shape: String::new() };
        (call, begun.elapsed())
    }))
}

struct Watcher {
    store: Store,
    members: Members,
    notice: Duration,
    /// The others can read in which call this rank is.
    is_published: bool,
    /// Since when ranks wait, on the main process.
    begun: Option<Instant>,
    /// How often that was told.
    told: u32,
}

impl Watcher {
    /// Often enough that a notice comes in time.
    fn pause(&self) -> Duration {
        (self.notice / 4).clamp(Duration::from_millis(50), Duration::from_secs(5))
    }

    fn look(&mut self, longest: Option<Running>) -> torch_ext::Result<()> {
        self.publish(longest.filter(|(_, taken)| self.notice <= *taken))?;
        if self.members.rank() == 0 {
            self.tell()?;
        }
        Ok(())
    }

    /// Says in which call this rank is for long, or that it is in none any more.
    fn publish(&mut self, long: Option<Running>) -> torch_ext::Result<()> {
        let key = self.members.rank().to_string();
        match long {
            Some((call, _)) => {
                self.store.set(&key, call.to_string().as_bytes())?;
                if !std::mem::replace(&mut self.is_published, true) {
                    self.store.add(COUNT, 1)?;
                }
            }
            None if std::mem::take(&mut self.is_published) => {
                self.store.delete_key(&key)?;
                self.store.add(COUNT, -1)?;
            }
            None => {}
        }
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
        let (waited, factor) = (begun.elapsed() + self.notice, 1u32.checked_shl(self.told).unwrap_or(u32::MAX));
        if waited < self.notice.saturating_mul(factor) {
            return Ok(());
        }
        self.told += 1;
        let mut calls = Vec::new();
        for rank in 0..self.members.world_size() {
            let key = rank.to_string();
            let call = if self.store.check(&[&key])? { Some(self.store.get(&key)?) } else { None };
            calls.push((self.members.in_job(rank), call.map(|call| String::from_utf8_lossy(&call).into_owned())));
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
            None => "in no call for long, and compute, are stuck or have ended".to_owned(),
        };
        let place = if ranks.len() == 1 {
            place.replace("compute, are stuck or have", "computes, is stuck or has")
        } else {
            place
        };
        parts.push(format!("{noun} {}{more} {verb} {place}", names.join(", ")));
    }
    parts.join("; ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn watcher(store: &Store, rank: usize) -> Watcher {
        let (store, members) = (store.clone(), Members::all(rank, 3));
        Watcher { store, members, notice: Duration::from_secs(30), is_published: false, begun: None, told: 0 }
    }

    fn running(op: &str, seconds: u64) -> Option<Running> {
        let call = CollectiveCall { op: op.to_owned(), sequence: 7, shape: String::new() };
        Some((call, Duration::from_secs(seconds)))
    }

    #[test]
    fn calls_are_published_once_they_take_long_and_withdrawn_when_they_end() {
        let store = Store::hash().unwrap();
        let mut watcher = watcher(&store, 1);
        watcher.look(running("barrier", 29)).unwrap();
        assert!(!store.check(&["1"]).unwrap());
        for _ in 0..2 {
            watcher.look(running("barrier", 31)).unwrap();
            assert_eq!(store.get("1").unwrap(), b"barrier number 7");
            assert_eq!(store.add(COUNT, 0).unwrap(), 1);
        }
        watcher.look(None).unwrap();
        assert!(!store.check(&["1"]).unwrap());
        assert_eq!(store.add(COUNT, 0).unwrap(), 0);
    }

    #[test]
    fn the_main_process_tells_again_after_twice_the_time() {
        let store = Store::hash().unwrap();
        let (mut main, mut other) = (watcher(&store, 0), watcher(&store, 1));
        main.look(None).unwrap();
        assert_eq!(main.told, 0);
        other.look(running("barrier", 31)).unwrap();
        main.look(None).unwrap();
        main.look(None).unwrap();
        assert_eq!(main.told, 1, "told of a rank that waits for the main process");
        main.begun = main.begun.map(|begun| begun.checked_sub(Duration::from_secs(31)).unwrap());
        main.look(None).unwrap();
        assert_eq!(main.told, 2);
        other.look(None).unwrap();
        main.look(None).unwrap();
        assert_eq!((main.told, main.begun), (0, None));
    }

    #[test]
    fn ranks_in_the_same_call_are_named_together() {
        let call = |text: &str| Some(text.to_owned());
        let calls = [(0, call("barrier number 3")), (1, None), (2, call("barrier number 3"))];
        let wanted =
            "ranks 0, 2 are in barrier number 3; rank 1 is in no call for long, and computes, is stuck or has ended";
        assert_eq!(describe(&calls), wanted);
    }
}
