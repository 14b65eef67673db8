//! How ranks agree on the end of a try: through the rendezvous store, because some of them may have left the others in
//! the middle of a collective.

use crate::error::{MemoryError, Result};
use crate::group::Group;
use std::time::Duration;
use torch_ext::Store;

/// How long a rank waits for the others to have read the verdicts, where the run is about to end.
const FAREWELL: Duration = Duration::from_millis(1500);

/// How a try ended on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Done,
    OutOfMemory(String),
    /// A collective ended because a rank was missing.
    Released(String),
    Failed(String),
}

/// What all ranks do next: a function of all verdicts, so the same everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Accept,
    /// The first rank without memory, and what it said.
    Retry {
        rank: usize,
        text: String,
    },
    Failed {
        rank: usize,
        text: String,
    },
    /// Ranks that have not said how they ended.
    Silent {
        ranks: Vec<usize>,
    },
}

impl Verdict {
    fn encode(&self) -> String {
        match self {
            Self::Done => "done\n".to_owned(),
            Self::OutOfMemory(text) => format!("memory\n{text}"),
            Self::Released(text) => format!("released\n{text}"),
            Self::Failed(text) => format!("failed\n{text}"),
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let (kind, rest) = text.split_once('\n').unwrap_or((&text, ""));
        match kind {
            "done" => Self::Done,
            "memory" => Self::OutOfMemory(rest.to_owned()),
            "released" => Self::Released(rest.to_owned()),
            _ => Self::Failed(rest.to_owned()),
        }
    }
}

/// A rank that failed for another reason than memory fails all; else lack of memory on one rank makes all try again.
pub(super) fn decide(verdicts: &[Option<Verdict>]) -> Decision {
    let ranked = || verdicts.iter().enumerate().filter_map(|(rank, verdict)| Some((rank, verdict.as_ref()?)));
    let failed = ranked().find_map(|(rank, verdict)| match verdict {
        Verdict::Failed(text) => Some(Decision::Failed { rank, text: text.clone() }),
        _ => None,
    });
    let silent: Vec<usize> = (0..verdicts.len()).filter(|rank| verdicts[*rank].is_none()).collect();
    let silent = (!silent.is_empty()).then_some(Decision::Silent { ranks: silent });
    let memory = ranked().find_map(|(rank, verdict)| match verdict {
        Verdict::OutOfMemory(text) => Some(Decision::Retry { rank, text: text.clone() }),
        _ => None,
    });
    let released = ranked().find_map(|(rank, verdict)| match verdict {
        Verdict::Released(text) => Some(Decision::Failed { rank, text: text.clone() }),
        _ => None,
    });
    failed.or(silent).or(memory).or(released).unwrap_or(Decision::Accept)
}

/// Where the ranks of one try meet when it is over. Keeps the store, not the connections.
pub(super) struct Meeting {
    store: Option<Store>,
    rank: usize,
    world_size: usize,
    deadline: Duration,
}

impl Meeting {
    /// Before the group is forked for the try, so that ranks can also meet when that fails.
    pub(super) fn new(group: &Group) -> Result<Self> {
        let place = format!("verdict/{}", group.num_forks());
        Ok(Self {
            store: group.store().map(|store| store.prefix(&place)).transpose()?,
            rank: group.rank(),
            world_size: group.world_size(),
            // Others may have to sit out a collective before they can come.
            deadline: group.timeout().unwrap_or_default() * 2,
        })
    }

    /// Waits until every rank has the connections of the try, or has failed to get them. A rank that left before would make
    /// others wait in Gloo's connecting, which takes five times the group's deadline to give up. Collective.
    pub(super) fn connected(&self) -> Result<()> {
        match &self.store {
            Some(store) => self.exchange(store, "connected", b"", self.deadline).map(drop),
            None => Ok(()),
        }
    }

    /// Tells the others how the try ended here, waits for their words, and decides. Collective.
    pub(super) fn decide(&self, mine: &Verdict) -> Result<Decision> {
        let Some(store) = &self.store else { return Ok(decide(&[Some(mine.clone())])) };
        let verdicts = self.exchange(store, "end", mine.encode().as_bytes(), self.deadline)?;
        let verdicts: Vec<_> = verdicts.iter().map(|bytes| bytes.as_deref().map(Verdict::decode)).collect();
        let decision = decide(&verdicts);
        if matches!(decision, Decision::Failed { .. }) {
            // Rank 0 keeps the store: were it to end now, the others could not read why. It leaves when all have said
            // that they did, maybe before they hear so of each other, and the decision stands without that.
            let _ = self.exchange(store, "read", b"", FAREWELL);
        }
        Ok(decision)
    }

    /// Every rank's bytes, as far as they come within `deadline`.
    fn exchange(&self, store: &Store, topic: &str, mine: &[u8], deadline: Duration) -> Result<Vec<Option<Vec<u8>>>> {
        let keys: Vec<String> = (0..self.world_size).map(|rank| format!("{topic}/{rank}")).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        store.set(names[self.rank], mine)?;
        match store.wait(&names, deadline) {
            Err(error) if !error.is_timeout() => return Err(error.into()),
            _ => {}
        }
        names.iter().map(|name| Ok(if store.check(&[name])? { Some(store.get(name)?) } else { None })).collect()
    }

    pub(super) fn silent(&self, ranks: &[usize]) -> MemoryError {
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        MemoryError::Silent { ranks: ranks.join(", "), deadline: self.deadline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torch_ext::TcpStoreOptions;

    #[test]
    fn verdicts_survive_the_store() {
        for verdict in [
            Verdict::Done,
            Verdict::OutOfMemory("a\nb".into()),
            Verdict::Released(String::new()),
            Verdict::Failed("x".into()),
        ] {
            assert_eq!(Verdict::decode(verdict.encode().as_bytes()), verdict);
        }
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn a_rank_that_never_comes_is_named() {
        let store = Some(Store::hash().unwrap());
        let meeting = Meeting { store, rank: 0, world_size: 3, deadline: Duration::from_millis(20) };
        assert_eq!(meeting.decide(&Verdict::Done).unwrap(), Decision::Silent { ranks: vec![1, 2] });
        let text = meeting.silent(&[1, 2]).to_string();
        assert!(text.contains("ranks 1, 2 did not come"), "{text}");
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn a_store_that_goes_after_the_decision_does_not_undo_it() {
        let deadline = Duration::from_secs(10);
        let connect = |port: u16, is_server: bool| {
            let options = TcpStoreOptions {
                host: "127.0.0.1".into(),
                port,
                is_server,
                num_workers: None,
                wait_for_workers: false,
                timeout: deadline,
                listen_fd: None,
            };
            Store::tcp(&options).unwrap()
        };
        let server = connect(0, true);
        let store = connect(server.port().unwrap(), false);
        server.set("end/0", Verdict::Failed("f".into()).encode().as_bytes()).unwrap();
        let meeting = Meeting { store: Some(store), rank: 1, world_size: 2, deadline };
        let decision = std::thread::scope(|scope| {
            scope.spawn(move || {
                server.wait(&["read/1"], deadline).unwrap();
                drop(server);
            });
            meeting.decide(&Verdict::Done).unwrap()
        });
        assert_eq!(decision, Decision::Failed { rank: 0, text: "f".into() });
    }

    #[test]
    fn all_ranks_do_the_same() {
        let memory = || Some(Verdict::OutOfMemory("m".into()));
        let released = || Some(Verdict::Released("r".into()));
        let failed = || Some(Verdict::Failed("f".into()));
        let done = || Some(Verdict::Done);
        let retry = |rank| Decision::Retry { rank, text: "m".into() };
        for (verdicts, expected) in [
            (vec![done(), done()], Decision::Accept),
            (vec![done(), memory()], retry(1)),
            (vec![released(), memory(), done()], retry(1)),
            (vec![memory(), failed()], Decision::Failed { rank: 1, text: "f".into() }),
            (vec![memory(), None], Decision::Silent { ranks: vec![1] }),
            (vec![failed(), None], Decision::Failed { rank: 0, text: "f".into() }),
            (vec![done(), released()], Decision::Failed { rank: 1, text: "r".into() }),
        ] {
            assert_eq!(decide(&verdicts), expected, "{verdicts:?}");
        }
    }
}
