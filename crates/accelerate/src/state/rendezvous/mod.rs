//! How the processes of a run find each other: one store, then one group.

mod arrival;
mod run_store;

use crate::error::{Result, StateError};
use crate::group::{Group, Members, PeerProcess, Watch, connect_gloo};
use crate::messages;
use crate::state::Lookup;
use crate::status::{LoggedCall, LoggedGroup, Status};
use accelerate_core::config::RunConfig;
use accelerate_core::environment::RankVariables;
use accelerate_core::status::RENDEZVOUS;
use accelerate_rendezvous::Secret;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tch::Device;
use torch_ext::{GlooInterface, GlooOptions, NcclOptions, ProcessGroup, Store, TcpStoreOptions};

/// Where rank 0 says which process it is.
const RANK_0: &str = "process/0";

/// Where the ranks meet.
#[derive(Debug, PartialEq, Eq)]
enum MeetingPoint {
    /// A TCP store. `served` says that somebody else, such as torchrun's agent, serves it already.
    Tcp {
        host: String,
        port: u16,
        served: bool,
        prefix: String,
    },
    File {
        path: PathBuf,
    },
}

/// A process that has failed ends within this time, usually: its launcher has to see it end before those that lose it.
const TIME_TO_END: Duration = Duration::from_secs(2);

/// Connects this rank with its peers. If one of them asks for debug mode, all compare their calls. Collective over the run.
pub(super) fn connect(
    ranks: &RankVariables,
    device: Device,
    backend: &'static str,
    config: &RunConfig,
    lookup: Lookup<'_>,
    status: &Status,
) -> Result<Group> {
    let kwargs = &config.process_group;
    let timeout = kwargs.timeout_for(backend);
    let meeting_point = meeting_point(ranks, kwargs.init_method.as_deref(), lookup)?;
    let (told, own) = (status.clone(), ranks.clone());
    let first_ended = Box::new(move || told.first_ended(&own));
    let until_all_are_here = config.cluster.rdzv_conf.join_timeout.unwrap_or(timeout);
    let meeting = Meeting { first_ended, ..Meeting::new(until_all_are_here, kwargs.waiting_notice()) };
    let mut log = status.call_log();
    let logged: Arc<str> = RENDEZVOUS.into();
    if let Some(log) = &mut log {
        log.add(LoggedGroup { name: &logged, num_members: ranks.world_size, is_in_background: false });
        log.begin(&logged, &LoggedCall::now(RENDEZVOUS, 1));
    }
    let store = open(&meeting_point, ranks, &meeting, lookup)?;
    let mut kept = KeptOnError((ranks.rank == 0).then(|| store.clone()));
    // Said before this rank is here, so that every rank can know of it once all are.
    const DEBUG: &str = "debug";
    if config.cluster.debug {
        store.set(DEBUG, b"1")?;
    }
    if ranks.rank == 0 {
        store.set(RANK_0, PeerProcess::own().encode().as_bytes())?;
    }
    arrival::wait_for_all(&store, ranks, &meeting)?;
    if let Some(log) = &mut log {
        log.end(&logged);
    }
    let rank_0 = process_of_rank_0(&store, ranks)?;
    let compares_calls = store.check(&[DEBUG])?;
    let options =
        GlooOptions { timeout, interface: interface(&meeting_point, ranks, lookup), ..GlooOptions::default() };
    let gloo = connect_gloo(options.clone());
    let connect = match device {
        Device::Cuda(device_index) if backend == "nccl" => Arc::new(move |store: &Store, members: &Members| {
            let options = NcclOptions { timeout, device_index, cpu: Some(&gloo(store, members)?) };
            Ok(ProcessGroup::nccl(&store.prefix("nccl")?, members.rank(), members.world_size(), &options)?)
        }),
        _ => gloo,
    };
    let members = Members::all(ranks.rank, ranks.world_size);
    let watch = Watch::start(&store, members.clone(), meeting.notice, timeout, log)?;
    // A rank that cannot reach the others keeps them waiting here.
    let connecting = watch.enter(&logged, RENDEZVOUS, 1);
    let group = Group::new(connect, &store, options, members)?;
    drop(connecting);
    let group = group.watched(watch).with_rank_0(rank_0);
    if device == Device::Cpu {
        group.look_for_peers()?;
    }
    kept.0 = None;
    Ok(if compares_calls { group.comparing_calls() } else { group })
}

/// Which process rank 0 is, for the others.
fn process_of_rank_0(store: &Store, ranks: &RankVariables) -> Result<Option<PeerProcess>> {
    match ranks.rank {
        0 => Ok(None),
        _ => Ok(PeerProcess::decode(&String::from_utf8_lossy(&store.get(RANK_0)?))),
    }
}

/// The store that rank 0 keeps for all, which stays for a moment where rank 0 fails: with the store the others fail as well, and who
/// starts them takes the first process that ends for the one that failed by itself.
struct KeptOnError(Option<Store>);

impl Drop for KeptOnError {
    fn drop(&mut self) {
        if let Some(store) = self.0.take() {
            let keep = move || {
                thread::park_timeout(TIME_TO_END);
                drop(store);
            };
            // Without a thread it goes at once.
            drop(thread::Builder::new().name("rendezvous".to_owned()).spawn(keep));
        }
    }
}

fn meeting_point(ranks: &RankVariables, init_method: Option<&str>, lookup: Lookup<'_>) -> Result<MeetingPoint> {
    let method = init_method.unwrap_or("env://");
    let wrong = || StateError::InitMethod { found: method.to_owned() };
    if let Some(path) = method.strip_prefix("file://") {
        return if path.is_empty() { Err(wrong().into()) } else { Ok(MeetingPoint::File { path: path.into() }) };
    }
    if let Some(address) = method.strip_prefix("tcp://") {
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let host = host.trim_matches(['[', ']']).to_owned();
        return Ok(MeetingPoint::Tcp { host, port, served: false, prefix: String::new() });
    }
    if method != "env://" {
        return Err(wrong().into());
    }
    // torchrun's agent keeps the store alive across restarts, each with its own prefix, as
    // torch/distributed/rendezvous.py does.
    let served = lookup("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    let attempt = lookup("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|| "0".to_owned());
    let prefix = if served { format!("/worker/attempt_{attempt}") } else { String::new() };
    Ok(MeetingPoint::Tcp { host: ranks.master_addr.clone(), port: ranks.master_port, served, prefix })
}

/// How long ranks may take to meet, and when people are told what is waited for.
struct Meeting {
    timeout: Duration,
    /// How long nothing is said.
    notice: Duration,
    /// When to say it next, from the beginning.
    next: Cell<Duration>,
    /// The first rank that has ended with code 0, as the launcher tells. Who has not met the others by then never will.
    first_ended: Box<dyn Fn() -> Option<usize>>,
}

impl Meeting {
    fn new(timeout: Duration, notice: Duration) -> Self {
        Self { timeout, notice, next: Cell::new(notice), first_ended: Box::new(|| None) }
    }

    fn is_time_to_tell(&self, waited: Duration) -> bool {
        self.next.get() <= waited
    }

    /// Says what is waited for, if it is time to; the next time it will be after as long again.
    fn tell(&self, waited: Duration, what: impl FnOnce() -> String) {
        if self.is_time_to_tell(waited) {
            self.next.set(waited * 2);
            messages::warning_here!("after {} s, {}; the deadline is at {:?}", waited.as_secs(), what(), self.timeout);
        }
    }
}

/// The variable by which a launcher hands the secret of the run on.
const SECRET: &str = "ACCELERATE_RUN_SECRET";

fn open(meeting_point: &MeetingPoint, ranks: &RankVariables, meeting: &Meeting, lookup: Lookup<'_>) -> Result<Store> {
    let (host, port, served, prefix) = match meeting_point {
        MeetingPoint::File { path } => return Ok(Store::file(path, ranks.world_size)?),
        MeetingPoint::Tcp { host, port, served, prefix } => (host, *port, *served, prefix),
    };
    if !served {
        let secret = lookup(SECRET).unwrap_or_default();
        if secret.is_empty() && ranks.rank == 0 && !run_store::is_loopback(host) {
            messages::warning!(
                "whoever reaches {host}:{port} may take part in this run, because it has no secret; set {SECRET} to the same \
                 random text on all machines"
            );
        }
        return run_store::open((host, port), ranks, Secret::new(secret), meeting);
    }
    // Somebody else's store, which speaks c10d's language.
    let store = Store::tcp(&TcpStoreOptions {
        host: host.clone(),
        port,
        is_server: false,
        num_workers: None,
        // Arrivals are counted below, where the missing ones can be named.
        wait_for_workers: false,
        timeout: meeting.timeout,
        listen_fd: None,
    })?;
    Ok(if prefix.is_empty() { store } else { store.prefix(prefix)? })
}

/// Ranks of one machine talk over the loopback; others over the interface that is named, or the host name's.
fn interface(meeting_point: &MeetingPoint, ranks: &RankVariables, lookup: Lookup<'_>) -> GlooInterface {
    if let Some(name) = lookup("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty()) {
        return GlooInterface::Interface(name);
    }
    let loopback_host = match meeting_point {
        MeetingPoint::Tcp { host, .. } => run_store::is_loopback(host),
        MeetingPoint::File { .. } => false,
    };
    if loopback_host || ranks.local_world_size == ranks.world_size {
        return GlooInterface::Address("127.0.0.1".to_owned());
    }
    GlooInterface::HostName
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use accelerate_core::environment::Launcher;

    fn ranks() -> RankVariables {
        RankVariables {
            rank: 1,
            local_rank: 1,
            world_size: 2,
            local_world_size: 2,
            master_addr: "node0".into(),
            master_port: 29_500,
            source: Launcher::Torchrun,
        }
    }

    #[test]
    fn meeting_points_follow_the_init_method() {
        let tcp = |host: &str, port, served, prefix: &str| MeetingPoint::Tcp {
            host: host.into(),
            port,
            served,
            prefix: prefix.into(),
        };
        let nothing = |_: &str| None;
        let agent = |name: &str| match name {
            "TORCHELASTIC_USE_AGENT_STORE" => Some("True".to_owned()),
            "TORCHELASTIC_RESTART_COUNT" => Some("3".to_owned()),
            _ => None,
        };
        let point = |method, lookup: Lookup<'_>| meeting_point(&ranks(), method, lookup).unwrap();
        assert_eq!(point(None, &nothing), tcp("node0", 29_500, false, ""));
        assert_eq!(point(Some("env://"), &agent), tcp("node0", 29_500, true, "/worker/attempt_3"));
        assert_eq!(point(Some("tcp://other:1234"), &agent), tcp("other", 1234, false, ""));
        assert_eq!(point(Some("tcp://[::1]:1234"), &nothing), tcp("::1", 1234, false, ""));
        assert_eq!(point(Some("file:///shared/x"), &nothing), MeetingPoint::File { path: "/shared/x".into() });
        for wrong in ["tcp://host", "tcp://host:port", "http://x", "file://", ""] {
            let error = meeting_point(&ranks(), Some(wrong), &nothing).unwrap_err();
            assert!(error.is_config() && error.to_string().contains("init_method"), "{error}");
        }
    }
}
