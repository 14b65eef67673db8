//! Who is missing: after a collective has failed, ranks tell each other through the store where they are.
//!
//! Nothing is written while all goes well. A rank whose collective fails publishes the call it was in and
//! reads what the others have published. One whose deadline is later has not published anything yet, but the
//! [watch](super::watch) of its process has; a rank of which nothing is known is dead, stuck, or still on its way.

use super::Members;
use super::peer_process::PeerProcess;
use super::watch::LONG;
use crate::error::{CollectiveCall, Findings, StoreState};
use std::time::{Duration, Instant};
use torch_ext::Store;

/// How long a failed rank waits for the others to fail too and publish: then they say themselves where they are, with their shapes.
const GRACE: Duration = Duration::from_secs(1);

/// How long it waits for a rank of which nothing is known then. Had that rank come when this one failed, it would have been in its call for
/// long by now, and its watch would have published that.
const GRACE_OF_UNKNOWN: Duration = LONG.saturating_mul(2);

/// How often a failed rank looks whether it knows of everybody.
const LOOK: Duration = Duration::from_millis(100);

/// How long the rank that keeps the store waits for others to read, which takes them up to the time above, and milliseconds where
/// everybody is there.
const READING: Duration = GRACE_OF_UNKNOWN.saturating_add(Duration::from_secs(1));

/// Says in which call of the group a rank of the job has been for long, if in any.
type LongCall<'a> = dyn Fn(usize) -> torch_ext::Result<Option<CollectiveCall>> + 'a;

impl CollectiveCall {
    fn encode(&self) -> String {
        format!("{}\n{}\n{}", self.op, self.sequence, self.shape)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.splitn(3, '\n');
        Some(Self {
            op: lines.next()?.to_owned(),
            sequence: lines.next()?.parse().ok()?,
            shape: lines.next()?.to_owned(),
        })
    }
}

#[derive(Debug)]
pub(super) struct Journal {
    store: Store,
    members: Members,
}

/// How long the store may take to answer, where there is nothing to wait for. A failed collective has used up its deadline, so
/// this is short: whoever serves the store and does not answer is the one who is missing.
const ANSWER: Duration = Duration::from_secs(1);

impl Journal {
    pub(super) fn new(store: &Store, members: Members) -> torch_ext::Result<Self> {
        Ok(Self { store: store.with_timeout(ANSWER)?.prefix("journal")?, members })
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.members.rank();
        (0..self.members.world_size()).filter(move |rank| *rank != own)
    }

    /// Says that this rank makes no call any more, and why.
    pub(super) fn leave(&self, reason: &str) -> torch_ext::Result<()> {
        let text = format!("{}\n{reason}", PeerProcess::own().encode());
        self.store.set(&left_key(self.members.rank()), text.as_bytes())
    }

    /// Says that this rank has failed by itself in a call that others are still in, and why.
    pub(super) fn fail(&self, call: &CollectiveCall, reason: &str) -> torch_ext::Result<()> {
        let text = format!("{}\n{}\n{reason}", PeerProcess::own().encode(), call.sequence);
        self.store.set(&own_failure_key(self.members.rank()), text.as_bytes())
    }

    /// What a rank has said under a key, if anything.
    fn said(&self, key: &str) -> torch_ext::Result<Option<String>> {
        let is_there = self.store.check(&[key])?;
        Ok(if is_there { Some(String::from_utf8_lossy(&self.store.get(key)?).into_owned()) } else { None })
    }

    /// Ranks that have said why they miss a call, and their processes.
    fn explained(&self, sequence: u64) -> torch_ext::Result<(Findings, Vec<PeerProcess>)> {
        let (mut findings, mut processes) = (Findings::default(), Vec::new());
        for rank in self.others() {
            let in_job = self.members.in_job(rank);
            if let Some(text) = self.said(&left_key(rank))? {
                let (process, reason) = text.split_once('\n').unwrap_or(("", &text));
                processes.extend(PeerProcess::decode(process));
                findings.left.push((in_job, reason.to_owned()));
            }
            if let Some((process, reason)) = self.own_failure(rank, sequence)? {
                processes.extend(process);
                findings.failed.push((in_job, reason));
            }
        }
        Ok((findings, processes))
    }

    /// The process of a rank that has failed by itself in call number `sequence` or in the one before, and why it has. What it
    /// has said of earlier calls is over.
    fn own_failure(&self, rank: usize, sequence: u64) -> torch_ext::Result<Option<(Option<PeerProcess>, String)>> {
        let Some(text) = self.said(&own_failure_key(rank))? else { return Ok(None) };
        let mut lines = text.splitn(3, '\n');
        let process = lines.next().and_then(PeerProcess::decode);
        let failed: Option<u64> = lines.next().and_then(|number| number.parse().ok());
        let is_current = failed.is_some_and(|failed| sequence <= failed.saturating_add(1));
        Ok(is_current.then(|| (process, lines.next().unwrap_or_default().to_owned())))
    }

    /// Has the rank published that call number `sequence` failed on it, or the one before, or that it has left? What it has
    /// published of earlier calls is over. Without the store, nobody can tell that it has not.
    pub(super) fn has_failed(&self, rank: usize, sequence: u64) -> bool {
        let has_failed = || -> torch_ext::Result<bool> {
            if self.store.check(&[&left_key(rank)])? {
                return Ok(true);
            }
            if self.own_failure(rank, sequence)?.is_some() {
                return Ok(true);
            }
            let key = key(rank);
            let call = if self.store.check(&[&key])? { CollectiveCall::decode(&self.store.get(&key)?) } else { None };
            Ok(call.is_some_and(|call| sequence <= call.sequence + 1))
        };
        has_failed().unwrap_or(true)
    }

    /// Publishes this rank's failed call and collects the others'. With them come the processes of ranks that have said
    /// that they are the reason.
    pub(super) fn ask(
        &self,
        mine: &CollectiveCall,
        deadline: Duration,
        long_call: &LongCall<'_>,
    ) -> (Findings, Vec<PeerProcess>) {
        let found = self.collect(mine, deadline, long_call).unwrap_or_else(|error| {
            let store = if error.is_timeout() { StoreState::Silent } else { StoreState::Gone };
            (Findings { store, ..Findings::default() }, Vec::new())
        });
        // Where the store is gone, nobody can read.
        let _unreachable = self.let_others_read(deadline);
        found
    }

    /// Says that this rank has read what it needs. Rank 0 of the job then waits for the others that have failed: the store is
    /// in its process, and would end with it while they read.
    fn let_others_read(&self, deadline: Duration) -> torch_ext::Result<()> {
        self.store.set(&has_read_key(self.members.rank()), b"")?;
        if self.members.in_job(self.members.rank()) != 0 {
            return Ok(());
        }
        let mut readers = Vec::new();
        for rank in self.others() {
            if self.store.check(&[&key(rank)])? {
                readers.push(has_read_key(rank));
            }
        }
        let readers: Vec<&str> = readers.iter().map(String::as_str).collect();
        self.store.wait(&readers, READING.min(deadline))
    }

    /// Returns once every other rank has failed, or is in a call for long, or has had its time.
    fn wait_for_others(&self, deadline: Duration, long_call: &LongCall<'_>) -> torch_ext::Result<()> {
        let begun = Instant::now();
        let keys: Vec<String> = self.others().map(key).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        if has_come(self.store.wait(&names, GRACE.min(deadline)))? {
            return Ok(());
        }
        let time = GRACE_OF_UNKNOWN.min(deadline);
        for rank in self.others() {
            while long_call(self.members.in_job(rank))?.is_none() {
                if has_come(self.store.wait(&[&key(rank)], LOOK.min(time)))? {
                    break;
                }
                if time <= begun.elapsed() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn collect(
        &self,
        mine: &CollectiveCall,
        deadline: Duration,
        long_call: &LongCall<'_>,
    ) -> torch_ext::Result<(Findings, Vec<PeerProcess>)> {
        // What it has read after an earlier call says nothing about this one.
        self.store.delete_key(&has_read_key(self.members.rank()))?;
        self.store.set(&key(self.members.rank()), mine.encode().as_bytes())?;
        let explained = self.explained(mine.sequence)?;
        if !(explained.0.left.is_empty() && explained.0.failed.is_empty()) {
            return Ok(explained);
        }
        self.wait_for_others(deadline, long_call)?;
        // A rank may have said so meanwhile.
        let (mut findings, processes) = self.explained(mine.sequence)?;
        let has_said = |findings: &Findings, rank| findings.left.iter().chain(&findings.failed).any(|it| it.0 == rank);
        for rank in self.others() {
            let in_job = self.members.in_job(rank);
            if has_said(&findings, in_job) {
                continue;
            }
            if !self.store.check(&[&key(rank)])? {
                match long_call(in_job)? {
                    // It waits as this rank did, and its deadline is later.
                    Some(call) if (&call.op, call.sequence) == (&mine.op, mine.sequence) => {}
                    Some(call) => findings.elsewhere.push((in_job, call)),
                    None => findings.silent.push(in_job),
                }
                continue;
            }
            match CollectiveCall::decode(&self.store.get(&key(rank))?) {
                Some(call) if call == *mine => {}
                Some(call) => findings.elsewhere.push((in_job, call)),
                None => findings.silent.push(in_job),
            }
        }
        Ok((findings, processes))
    }
}

/// Is there what was waited for? The time that it may take is over, if not.
fn has_come(waited: torch_ext::Result<()>) -> torch_ext::Result<bool> {
    match waited {
        Ok(()) => Ok(true),
        Err(error) if error.is_timeout() => Ok(false),
        Err(error) => Err(error),
    }
}

fn key(rank: usize) -> String {
    format!("failed/{rank}")
}

fn has_read_key(rank: usize) -> String {
    format!("has_read/{rank}")
}

fn left_key(rank: usize) -> String {
    format!("left/{rank}")
}

fn own_failure_key(rank: usize) -> String {
    format!("own_failure/{rank}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::Failure;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Nobody is in a call for long.
    const NOBODY: fn(usize) -> torch_ext::Result<Option<CollectiveCall>> = |_| Ok(None);

    fn call(op: &str, sequence: u64) -> CollectiveCall {
        CollectiveCall { op: op.into(), sequence, shape: "[2] Float".into() }
    }

    /// A rank that has just come is in its call, although nothing says so at first.
    #[test]
    fn a_rank_whose_watch_has_not_looked_yet_is_not_blamed() {
        let store = Store::hash().unwrap();
        let journal = Journal::new(&store, Members::all(0, 2)).unwrap();
        let own = call("all_reduce", 2);
        let num_asked = std::sync::atomic::AtomicUsize::new(0);
        let after_a_while = |_rank: usize| {
            let is_known = num_asked.fetch_add(1, Ordering::Relaxed) > 0;
            Ok(is_known.then(|| call("all_reduce", 2)))
        };
        let (findings, _) = journal.collect(&own, Duration::from_secs(600), &after_a_while).unwrap();
        assert!(findings.silent.is_empty() && findings.elsewhere.is_empty(), "{findings:?}");
    }

    #[test]
    fn calls_survive_the_store() {
        assert_eq!(CollectiveCall::decode(call("all_reduce", 3).encode().as_bytes()), Some(call("all_reduce", 3)));
        assert_eq!(CollectiveCall::decode(b"nonsense"), None);
    }

    #[test]
    fn silent_and_straying_ranks_are_told_apart() {
        let store = Store::hash().unwrap();
        let journal = |rank| Journal::new(&store, Members::all(rank, 4)).unwrap();
        store.set("journal/failed/1", call("barrier", 9).encode().as_bytes()).unwrap();
        store.set("journal/failed/2", call("all_reduce", 3).encode().as_bytes()).unwrap();
        let findings = journal(0).ask(&call("all_reduce", 3), Duration::from_millis(20), &NOBODY).0;
        assert_eq!(findings.silent, [3]);
        assert_eq!(findings.elsewhere, [(1, call("barrier", 9))]);
        let failure = Failure {
            place: Members::all(0, 4).own_place(),
            call: call("all_reduce", 3),
            deadline: Duration::from_secs(5),
            findings,
        };
        assert_eq!(failure.call(), "rank 0 of 4, all_reduce (collective 3) on [2] Float");
        assert_eq!(failure.blame(), "rank 3 has not made this call; rank 1 is in barrier (collective 9) on [2] Float");
    }

    #[test]
    fn what_a_rank_has_published_of_earlier_calls_is_over() {
        let store = Store::hash().unwrap();
        let journal = Journal::new(&store, Members::all(0, 3)).unwrap();
        assert!(!journal.has_failed(1, 7));
        store.set("journal/failed/1", call("all_gather", 6).encode().as_bytes()).unwrap();
        assert_eq!([6, 7, 8].map(|sequence| journal.has_failed(1, sequence)), [true, true, false]);
        store.set("journal/left/2", b"out of memory").unwrap();
        assert!(journal.has_failed(2, 100));
    }

    #[test]
    fn a_late_rank_is_not_taken_for_a_missing_one() {
        let store = Store::hash().unwrap();
        let journal = Journal::new(&store, Members::all(0, 4)).unwrap();
        let known = |rank: usize| Ok([None, None, Some(call("all_reduce", 3)), Some(call("barrier", 2))][rank].clone());
        let findings = journal.ask(&call("all_reduce", 3), Duration::from_millis(20), &known).0;
        let elsewhere = vec![(3, call("barrier", 2))];
        assert_eq!(findings, Findings { silent: vec![1], elsewhere, ..Findings::default() });
    }

    #[test]
    fn the_rank_that_keeps_the_store_stays_until_others_that_have_failed_have_read() {
        let store = Store::hash().unwrap();
        let journal = |rank| Journal::new(&store, Members::all(rank, 3)).unwrap();
        let is_read = AtomicBool::new(false);
        // Rank 2 has not failed, and is not waited for.
        store.set("journal/failed/1", call("all_reduce", 3).encode().as_bytes()).unwrap();
        store.set("journal/left/2", b"out of memory").unwrap();
        std::thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                journal(0).ask(&call("all_reduce", 3), Duration::from_secs(600), &NOBODY);
                is_read.load(Ordering::SeqCst)
            });
            store.wait(&["journal/has_read/0"], Duration::from_secs(600)).unwrap();
            is_read.store(true, Ordering::SeqCst);
            // Rank 1 reads, and does not wait for anybody.
            journal(1).ask(&call("all_reduce", 3), Duration::from_secs(600), &NOBODY);
            assert!(keeper.join().unwrap(), "rank 0 has gone before rank 1 had read");
        });
    }

    #[test]
    fn a_rank_that_has_left_is_explanation_enough() {
        let store = Store::hash().unwrap();
        let journal = |rank| Journal::new(&store, Members::all(rank, 3)).unwrap();
        journal(2).leave("out of memory").unwrap();
        let (findings, processes) = journal(0).ask(&call("all_reduce", 3), Duration::from_secs(60), &NOBODY);
        assert_eq!(findings, Findings { left: vec![(2, "out of memory".into())], ..Findings::default() });
        assert_eq!(processes, [PeerProcess::own()]);
    }

    #[test]
    fn a_rank_that_has_failed_by_itself_is_explanation_enough_until_the_next_call_but_one() {
        let store = Store::hash().unwrap();
        let journal = |rank| Journal::new(&store, Members::all(rank, 3)).unwrap();
        journal(1).fail(&call("all_reduce", 3), "no such address").unwrap();
        for sequence in [3, 4] {
            let (findings, processes) = journal(0).ask(&call("all_reduce", sequence), Duration::from_secs(60), &NOBODY);
            assert_eq!(findings, Findings { failed: vec![(1, "no such address".into())], ..Findings::default() });
            assert_eq!(processes, [PeerProcess::own()]);
            assert!(journal(0).has_failed(1, sequence));
        }
        assert!(!journal(0).has_failed(1, 5));
    }
}
