//! The store of a run: served by rank 0, closed to everybody who does not know the run's secret.

use super::{Meeting, RANK_0};
use crate::error::{Result, StateError};
use crate::group::PeerProcess;
use accelerate_core::environment::RankVariables;
use accelerate_rendezvous::{Client, ConnectOptions, Error, Secret, Server, ServerOptions, Store};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;
use torch_ext::StoreBackend;

/// Each process has one connection, and one more for each of its threads that wait at the same time.
const CONNECTIONS_PER_RANK: usize = 8;

/// The store, where c10d asks for it.
struct RunStore {
    store: Arc<dyn Store>,
    /// Of rank 0: it ends with the last handle on the store.
    _server: Option<Server>,
}

/// Serves the store on rank 0, and connects to it on the others.
pub(super) fn open(
    (host, port): (&str, u16),
    ranks: &RankVariables,
    secret: Secret,
    meeting: &Meeting,
) -> Result<torch_ext::Store> {
    let timeout = meeting.timeout;
    let store = if ranks.rank == 0 {
        let server =
            serve(host, port, ranks.world_size, secret.clone()).map_err(|source| match source.is_address_in_use() {
                true if is_served_by_this_process((host, port), secret) => StateError::HasMet { rank: 0 },
                true => StateError::PortTaken { port, source: Box::new(source) },
                false => StateError::Rendezvous { source },
            })?;
        RunStore { store: server.memory(), _server: Some(server) }
    } else {
        let options = ConnectOptions { host: host.to_owned(), port, secret, timeout };
        let mut ended = None;
        let client = Client::connect(options, |waited, why| {
            meeting.tell(waited, || format!("rank {} waits for rank 0 at {host}:{port} ({why})", ranks.rank));
            // Nobody can have met without this rank.
            ended = (meeting.first_ended)();
            ended.map_or(ControlFlow::Continue(()), |_| ControlFlow::Break(()))
        })
        .map_err(|source| match (ended, source) {
            (Some(ended), _) => StateError::EndedBefore { ended, waiting: vec![ranks.rank] },
            (None, source @ Error::Connection { .. }) => {
                StateError::NobodyListens { host: host.to_owned(), port, timeout, source: Box::new(source) }
            }
            (None, source) => StateError::Rendezvous { source },
        })?;
        RunStore { store: Arc::new(client), _server: None }
    };
    Ok(torch_ext::Store::from_backend(store, timeout)?)
}

/// Is it an earlier meeting of this process that holds the port?
fn is_served_by_this_process((host, port): (&str, u16), secret: Secret) -> bool {
    const ANSWER: Duration = Duration::from_secs(1);
    let host = if is_loopback(host) { host } else { "localhost" }.to_owned();
    let rank_0 =
        Client::connect(ConnectOptions { host, port, secret, timeout: ANSWER }, |_, _| ControlFlow::Continue(()))
            .and_then(|client| client.get(RANK_0.as_bytes(), ANSWER));
    rank_0.is_ok_and(|process| process == PeerProcess::own().encode().as_bytes())
}

/// Ranks of one machine meet at its loopback, which nobody else can reach. Others may have another address for rank 0's machine
/// than it has itself, so that one listens at all of its addresses.
fn serve(host: &str, port: u16, world_size: usize, secret: Secret) -> Result<Server, Error> {
    let any = |address: IpAddr| ServerOptions {
        address: SocketAddr::new(address, port),
        secret: secret.clone(),
        max_connections: world_size.saturating_mul(CONNECTIONS_PER_RANK),
    };
    if is_loopback(host) {
        let address = host.parse().ok().filter(IpAddr::is_loopback).unwrap_or(Ipv4Addr::LOCALHOST.into());
        return Server::bind(&any(address));
    }
    // With both families, if this machine has both.
    Server::bind(&any(Ipv6Addr::UNSPECIFIED.into())).or_else(|error| match error.is_address_in_use() {
        true => Err(error),
        false => Server::bind(&any(Ipv4Addr::UNSPECIFIED.into())),
    })
}

/// Does the name or address mean this machine, on every machine?
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn to_torch(operation: &'static str, error: &Error) -> torch_ext::Error {
    let mut text = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        text.push_str(&format!(": {source}"));
    }
    match error.is_timeout() {
        true => torch_ext::Error::timeout(operation, text),
        false => torch_ext::Error::connection(operation, text),
    }
}

impl StoreBackend for RunStore {
    fn set(&self, key: &[u8], value: &[u8], timeout: Duration) -> torch_ext::Result<()> {
        self.store.set(key, value, timeout).map_err(|error| to_torch("Store::set", &error))
    }
    fn get(&self, key: &[u8], timeout: Duration) -> torch_ext::Result<Vec<u8>> {
        self.store.get(key, timeout).map_err(|error| to_torch("Store::get", &error))
    }
    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        timeout: Duration,
    ) -> torch_ext::Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired, timeout).map_err(|error| to_torch("Store::compare_set", &error))
    }
    fn append(&self, key: &[u8], value: &[u8], timeout: Duration) -> torch_ext::Result<()> {
        self.store.append(key, value, timeout).map_err(|error| to_torch("Store::append", &error))
    }
    fn add(&self, key: &[u8], amount: i64, timeout: Duration) -> torch_ext::Result<i64> {
        self.store.add(key, amount, timeout).map_err(|error| to_torch("Store::add", &error))
    }
    fn delete_key(&self, key: &[u8], timeout: Duration) -> torch_ext::Result<bool> {
        self.store.delete_key(key, timeout).map_err(|error| to_torch("Store::delete_key", &error))
    }
    fn num_keys(&self, timeout: Duration) -> torch_ext::Result<i64> {
        let count = self.store.num_keys(timeout).map_err(|error| to_torch("Store::num_keys", &error))?;
        Ok(i64::try_from(count).unwrap_or(i64::MAX))
    }
    fn check(&self, keys: &[&[u8]], timeout: Duration) -> torch_ext::Result<bool> {
        self.store.check(keys, timeout).map_err(|error| to_torch("Store::check", &error))
    }
    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> torch_ext::Result<()> {
        self.store.wait(keys, timeout).map_err(|error| to_torch("Store::wait", &error))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_the_loopback_is_this_machine_on_every_machine() {
        for host in ["127.0.0.1", "127.3.2.1", "::1", "localhost"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["", "0.0.0.0", "::", "10.0.0.1", "node0", "localhost.example.org"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn a_run_on_one_machine_listens_to_nobody_else() {
        let address = |host| serve(host, 0, 2, Secret::new([])).unwrap().address().ip();
        assert_eq!(address("127.0.0.1"), Ipv4Addr::LOCALHOST);
        assert_eq!(address("localhost"), Ipv4Addr::LOCALHOST);
        assert!(address("node0").is_unspecified());
    }
}
