//! Every rank says in the store that it is here; nobody goes on before all are.

use super::Meeting;
use crate::error::{Error, Result, StateError, listed_ranks};
use crate::group::PeerProcess;
use accelerate_core::environment::RankVariables;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::process;
use std::time::{Duration, Instant};
use torch_ext::Store;

/// How long to wait before looking whether somebody has refused to take part, and whether it is time to say who is missing.
const SLICE: Duration = Duration::from_millis(500);
/// How long the store may take to answer what it knows.
const ANSWER: Duration = Duration::from_secs(30);
/// Where a rank writes why it does not take part, before it ends.
const REFUSED: &str = "refused";
/// What is shown of many ranks.
const MOST_NAMED: usize = 16;

/// Takes this rank's place, and returns when every rank has taken its own.
///
/// # Errors
/// Somebody else has the place, or says another number of ranks: on that rank, and then on all. Ranks that have not come by the
/// deadline, by number.
pub(super) fn wait_for_all(store: &Store, ranks: &RankVariables, meeting: &Meeting) -> Result<()> {
    let store = &store.with_timeout(meeting.timeout.min(ANSWER))?;
    if let Err(error) = claim(store, ranks) {
        return Err(refused(store, ranks, error));
    }
    let begin = Instant::now();
    let keys: Vec<String> = (0..ranks.world_size).map(place).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    loop {
        let left = meeting.timeout.saturating_sub(begin.elapsed());
        let Err(source) = store.wait(&names, left.min(SLICE)) else { return Ok(()) };
        if !source.is_timeout() {
            return Err(source.into());
        }
        // All that have arrived before this rank looks have met, and may end.
        if let Some(ended) = (meeting.first_ended)()
            && !store.check(&names)?
        {
            let waiting = arrived(store, &names)?;
            let error = StateError::EndedBefore { ended, waiting }.into();
            return Err(refused(store, ranks, error));
        }
        if store.check(&[REFUSED])? {
            let reason = String::from_utf8_lossy(&store.get(REFUSED)?).into_owned();
            stay_until_others_know(ranks);
            return Err(StateError::RefusedElsewhere { reason }.into());
        }
        if left <= SLICE {
            let (missing, timeout) = (missing(store, &names)?, meeting.timeout);
            return Err(StateError::NotArrived { missing, world_size: ranks.world_size, timeout, source }.into());
        }
        if ranks.rank == 0 && meeting.is_time_to_tell(begin.elapsed()) {
            let (missing, world_size) = (missing(store, &names)?, ranks.world_size);
            meeting.tell(begin.elapsed(), || format!("rank 0 waits for {} of {world_size}", listed_ranks(&missing)));
        }
    }
}

/// Why this rank does not take part, once the others can know of it.
fn refused(store: &Store, ranks: &RankVariables, error: Error) -> Error {
    // The others learn it from there; without the store, there is nobody to tell.
    let _nobody_listens = store.set(REFUSED, error.to_string().as_bytes());
    stay_until_others_know(ranks);
    error
}

/// The store ends with rank 0, and the others have to read there first why they end, too.
fn stay_until_others_know(ranks: &RankVariables) {
    if ranks.rank == 0 {
        std::thread::sleep(2 * SLICE);
    }
}

fn place(rank: usize) -> String {
    format!("arrived/{rank}")
}

/// Takes the rank's place, which nobody else may have, among as many as all others say that there are.
fn claim(store: &Store, ranks: &RankVariables) -> Result<()> {
    let RankVariables { rank, world_size, .. } = *ranks;
    let own = world_size.to_string();
    let others = store.compare_set("world_size", b"", own.as_bytes())?;
    if others != own.as_bytes() {
        let others = String::from_utf8_lossy(&others).into_owned();
        return Err(StateError::OtherWorldSize { rank, world_size, others }.into());
    }
    // Neither numbers of processes nor names of machines are unique where there are containers.
    let chance = RandomState::new().build_hasher().finish();
    let process = PeerProcess::own().encode();
    let own = format!("process {} on {}\n{process}\n{chance:016x}", process::id(), host_name());
    let there = store.compare_set(&place(rank), b"", own.as_bytes())?;
    if there == own.as_bytes() {
        return Ok(());
    }
    let there = String::from_utf8_lossy(&there).into_owned();
    let line = |text: &str, number| text.lines().nth(number).unwrap_or_default().to_owned();
    if line(&there, 1) == process {
        return Err(StateError::HasMet { rank }.into());
    }
    let mut own = line(&own, 0);
    let there = line(&there, 0);
    if own == there {
        own.push_str(", in another container");
    }
    Err(StateError::RankTaken { rank, own, there }.into())
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "this machine".to_owned(), |name| name.trim().to_owned())
}

/// The ranks that are there.
fn arrived(store: &Store, names: &[&str]) -> Result<Vec<usize>> {
    let mut arrived = Vec::new();
    for (rank, name) in names.iter().enumerate() {
        if store.check(&[name])? {
            arrived.push(rank);
        }
    }
    Ok(arrived)
}

/// The ranks that are not there, in numbers.
fn missing(store: &Store, names: &[&str]) -> Result<String> {
    let mut missing = Vec::new();
    for (rank, name) in names.iter().enumerate() {
        if !store.check(&[name])? {
            missing.push(rank.to_string());
        }
        if missing.len() > MOST_NAMED {
            missing[MOST_NAMED] = "...".to_owned();
            break;
        }
    }
    Ok(missing.join(", "))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use accelerate_core::environment::Launcher;

    fn ranks(rank: usize, world_size: usize) -> RankVariables {
        RankVariables {
            rank,
            local_rank: rank,
            world_size,
            local_world_size: world_size,
            master_addr: "node0".into(),
            master_port: 29_500,
            source: Launcher::Torchrun,
        }
    }

    fn soon() -> Meeting {
        Meeting::new(Duration::from_millis(30), Duration::MAX)
    }

    #[test]
    fn a_rank_that_never_arrives_is_named() {
        let store = Store::hash().unwrap();
        let error = wait_for_all(&store, &ranks(0, 3), &soon()).unwrap_err();
        assert!(error.is_timeout());
        assert!(error.to_string().contains("1, 2 of 3"), "{error}");
        let error = wait_for_all(&Store::hash().unwrap(), &ranks(0, 1000), &soon()).unwrap_err();
        assert!(error.to_string().contains("15, 16, ... of 1000"), "{error}");
    }

    /// Long before the deadline, on all that wait; whoever is not told so by a launcher learns it from those that are.
    #[test]
    fn a_rank_that_ended_before_all_had_come_is_named_with_those_that_wait_for_it() {
        let late = || Meeting::new(Duration::from_secs(60), Duration::MAX);
        let told = || Meeting { first_ended: Box::new(|| Some(1)), ..late() };
        let store = Store::hash().unwrap();
        claim(&store, &ranks(0, 4)).unwrap();
        let error = wait_for_all(&store, &ranks(2, 4), &told()).unwrap_err();
        assert!(error.is_peer_failure());
        let wanted =
            "rank 1 ended with exit code 0 before it met the others, and ranks 0, 2 wait for it in init_process_group";
        assert!(error.to_string().contains(wanted), "{error}");
        let error = wait_for_all(&store, &ranks(3, 4), &late()).unwrap_err().to_string();
        assert!(error.contains(&format!("another rank does not take part: {wanted}")), "{error}");
    }

    #[test]
    fn a_rank_that_ended_after_all_had_come_has_met_them() {
        let store = Store::hash().unwrap();
        claim(&store, &ranks(0, 2)).unwrap();
        let told = Meeting { first_ended: Box::new(|| Some(0)), ..soon() };
        wait_for_all(&store, &ranks(1, 2), &told).unwrap();
    }

    #[test]
    fn a_rank_that_is_given_twice_is_an_error_of_all() {
        let store = Store::hash().unwrap();
        claim(&store, &ranks(1, 2)).unwrap();
        store.set("arrived/1", b"process 1 on node7").unwrap();
        let error = wait_for_all(&store, &ranks(1, 2), &soon()).unwrap_err();
        assert!(
            error.to_string().contains("rank 1 is taken") && error.to_string().contains("process 1 on node7"),
            "{error}"
        );
        let error = wait_for_all(&store, &ranks(0, 2), &Meeting::new(Duration::from_secs(60), Duration::MAX));
        // Its places are all taken, and so it goes on; a third rank that waits for others learns why they do not come.
        error.unwrap();
        store.delete_key("arrived/0").unwrap();
        store.delete_key("arrived/1").unwrap();
        let error =
            wait_for_all(&store, &ranks(0, 2), &Meeting::new(Duration::from_secs(60), Duration::MAX)).unwrap_err();
        assert!(error.to_string().contains("rank 1 is taken"), "{error}");
    }

    #[test]
    fn a_process_that_has_met_the_others_already_is_told_how_to_make_another_accelerator() {
        let store = Store::hash().unwrap();
        claim(&store, &ranks(1, 2)).unwrap();
        let error = claim(&store, &ranks(1, 2)).unwrap_err().to_string();
        assert!(error.contains("as rank 1") && error.contains("build_from(&first)"), "{error}");
    }

    #[test]
    fn another_number_of_ranks_is_told_at_once() {
        let store = Store::hash().unwrap();
        claim(&store, &ranks(0, 2)).unwrap();
        let error =
            wait_for_all(&store, &ranks(1, 4), &Meeting::new(Duration::from_secs(60), Duration::MAX)).unwrap_err();
        assert!(error.to_string().contains("WORLD_SIZE is 4 on rank 1") && error.to_string().contains("2"), "{error}");
    }
}
