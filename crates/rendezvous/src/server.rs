//! A store that answers other processes.

use crate::Store;
use crate::error::{Error, Result};
use crate::handshake::{Secret, admit};
use crate::memory::Memory;
use crate::wire::{self, Answer, Request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufReader};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How long a connection may take to prove that it belongs to the run.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many may be about to prove it. When there is one more, one of them goes.
const MAX_STRANGERS: usize = 64;
/// Threads here decode messages and wait; they need little.
const STACK_BYTES: usize = 256 << 10;

/// Where a [`Server`] listens and whom it admits.
///
/// ```
/// use accelerate_rendezvous::{Secret, Server, ServerOptions};
/// let server = Server::bind(&ServerOptions {
///     address: "127.0.0.1:0".parse().unwrap(), // any free port
///     secret: Secret::new(*b"of this run"),
///     max_connections: 16,
/// })?;
/// assert_ne!(server.address().port(), 0);
/// # Ok::<(), accelerate_rendezvous::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Address and port; port 0 for any free one.
    pub address: SocketAddr,
    /// Clients with another secret are sent away.
    pub secret: Secret,
    /// The most connections of members at one time; further ones are closed. A client has one for each of its requests that
    /// wait at the same time.
    pub max_connections: usize,
}

/// Serves a [`Memory`] over TCP until it is dropped. Requests of this process itself need no connection: they go to
/// [`memory`](Self::memory).
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Dropped, it wakes the thread that accepts connections.
    awake: Option<UnixStream>,
    /// That thread, which holds the port.
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    memory: Arc<Memory>,
    secret: Secret,
    max_connections: usize,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    next: u64,
    /// In the order of their arrival, until they have proved who they are.
    strangers: VecDeque<Stranger>,
    members: Vec<(u64, TcpStream)>,
    is_closed: bool,
}

struct Stranger {
    id: u64,
    /// Where it comes from.
    address: IpAddr,
    stream: TcpStream,
}

/// Which of the strangers, who are in the order of their arrival, makes room for the others: the oldest from the address that most
/// of them come from. So a crowd from one machine keeps out nobody from another, however slowly that one answers.
fn makes_room(strangers: &[IpAddr]) -> Option<usize> {
    let crowd = |address: &IpAddr| strangers.iter().filter(|other| *other == address).count();
    // Of equals this finds the last.
    strangers.iter().enumerate().rev().max_by_key(|(_, address)| crowd(address)).map(|(oldest, _)| oldest)
}

impl Shared {
    // Lists are whole after every statement, also where another thread panicked.
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Listens, and answers on threads of its own.
    ///
    /// # Errors
    /// The address is not one of this machine, or taken ([`Error::is_address_in_use`]).
    pub fn bind(options: &ServerOptions) -> Result<Self> {
        let failed = |source| Error::Listen { address: options.address.to_string(), source };
        let listener = TcpListener::bind(options.address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (awake, wakened) = UnixStream::pair().map_err(failed)?;
        let shared = Arc::new(Shared {
            memory: Arc::default(),
            secret: options.secret.clone(),
            max_connections: options.max_connections,
            connections: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let thread = thread::Builder::new().name("store".to_owned()).stack_size(STACK_BYTES);
        // Who has connected may be gone again by the time it is accepted; nobody waits for it then.
        listener.set_nonblocking(true).map_err(failed)?;
        let accept = move || while accept_one(&accepting, &listener, &wakened) {};
        let accepting = thread.spawn(accept).map_err(failed)?;
        Ok(Self { shared, address, awake: Some(awake), accepting: Some(accepting) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it serves.
    pub fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.shared.memory)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut connections = self.shared.connections();
        connections.is_closed = true;
        let Connections { strangers, members, .. } = &mut *connections;
        let strangers = strangers.drain(..).map(|stranger| stranger.stream);
        for stream in strangers.chain(members.drain(..).map(|(_, stream)| stream)) {
            let _gone_already = stream.shutdown(Shutdown::Both);
        }
        drop(connections);
        self.shared.memory.close();
        drop(self.awake.take());
        // The port is free when this returns.
        if let Some(Err(_panicked)) = self.accepting.take().map(JoinHandle::join) {
            // It has ended all the same.
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Waits for a connection and gives it a thread; `false` once the server has been dropped.
fn accept_one(shared: &Arc<Shared>, listener: &TcpListener, wakened: &UnixStream) -> bool {
    let mut events = [listener.as_fd(), wakened.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    match poll(&mut events, PollTimeout::NONE) {
        Err(nix::errno::Errno::EINTR) => return true,
        Err(_) => return false,
        Ok(_) => {}
    }
    if events[1].any().unwrap_or(true) {
        return false;
    }
    let Ok((stream, from)) = listener.accept() else {
        // There are no file descriptors left, or the peer has gone again. The next one may be luckier, and trying without
        // a pause would take a core.
        thread::sleep(Duration::from_millis(5));
        return true;
    };
    // What it is asked for later is waited for.
    let copied = stream.set_nonblocking(false).and_then(|()| stream.try_clone());
    let Ok(copy) = copied else { return true };
    let mut connections = shared.connections();
    if connections.is_closed {
        return false;
    }
    connections.next += 1;
    let id = connections.next;
    connections.strangers.push_back(Stranger { id, address: from.ip(), stream: copy });
    let addresses: Vec<_> = connections.strangers.iter().map(|stranger| stranger.address).collect();
    let too_many = addresses.len() > MAX_STRANGERS;
    let sent_away = makes_room(&addresses).filter(|_| too_many).and_then(|index| connections.strangers.remove(index));
    drop(connections);
    if let Some(stranger) = sent_away {
        let _gone_already = stranger.stream.shutdown(Shutdown::Both);
    }
    let serving = Arc::clone(shared);
    let thread = thread::Builder::new().name("store".to_owned()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        let _ended = serve(&serving, id, &stream);
        let mut connections = serving.connections();
        connections.strangers.retain(|stranger| stranger.id != id);
        connections.members.retain(|(other, _)| *other != id);
    });
    if started.is_err() {
        shared.connections().strangers.retain(|stranger| stranger.id != id);
    }
    true
}

/// Answers one connection until it ends.
fn serve(shared: &Shared, id: u64, stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HANDSHAKE))?;
    stream.set_write_timeout(Some(HANDSHAKE))?;
    if !admit(stream, &shared.secret)? {
        return Ok(());
    }
    {
        let mut connections = shared.connections();
        let Some(position) = connections.strangers.iter().position(|stranger| stranger.id == id) else { return Ok(()) };
        if connections.members.len() >= shared.max_connections {
            return Ok(());
        }
        let member = connections.strangers.remove(position);
        connections.members.extend(member.map(|member| (id, member.stream)));
    }
    stream.set_read_timeout(None)?;
    let mut requests = BufReader::new(stream);
    loop {
        let message = wire::receive(&mut requests)?;
        let Some(request) = Request::decode(&message) else {
            return wire::send(stream, &Answer::Refused("the request cannot be read".to_owned()).encode());
        };
        let Some(answer) = answer(&shared.memory, request) else { return Ok(()) };
        wire::send(stream, &answer.encode())?;
    }
}

/// `None` once the server has been dropped.
fn answer(memory: &Memory, request: Request) -> Option<Answer> {
    // What the memory answers at once needs no time.
    let now = Duration::ZERO;
    let answer = match request {
        Request::Set { key, value } => memory.set(&key, &value, now).map(|()| Answer::Done),
        Request::Get { key, timeout } => memory.get(&key, timeout).map(Answer::Bytes),
        Request::CompareSet { key, expected, desired } => {
            memory.compare_set(&key, &expected, &desired, now).map(Answer::Bytes)
        }
        Request::Append { key, value } => memory.append(&key, &value, now).map(|()| Answer::Done),
        Request::Add { key, amount } => memory.add(&key, amount, now).map(Answer::Number),
        Request::DeleteKey { key } => memory.delete_key(&key, now).map(|was_there| Answer::Number(was_there.into())),
        Request::NumKeys => memory.num_keys(now).map(|count| Answer::Number(count as i64)),
        Request::Check { keys } => memory.check(&slices(&keys), now).map(|are_there| Answer::Number(are_there.into())),
        Request::Wait { keys, timeout } => memory.wait(&slices(&keys), timeout).map(|()| Answer::Done),
    };
    match answer {
        Ok(answer) => Some(answer),
        Err(Error::Closed) => None,
        Err(Error::NotSet { keys, .. }) => Some(Answer::NotSet(keys)),
        Err(error) => Some(Answer::Refused(error.to_string())),
    }
}

fn slices(keys: &[Vec<u8>]) -> Vec<&[u8]> {
    keys.iter().map(Vec::as_slice).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Each letter is an address.
    #[test]
    fn the_oldest_of_the_greatest_crowd_makes_room() {
        for (strangers, wanted) in
            [("", None), ("a", Some(0)), ("abb", Some(1)), ("aabbcb", Some(2)), ("baab", Some(0))]
        {
            let addresses: Vec<_> = strangers.bytes().map(|letter| IpAddr::from([10, 0, 0, letter])).collect();
            assert_eq!(makes_room(&addresses), wanted, "{strangers}");
        }
    }
}
