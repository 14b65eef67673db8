//! The store of a run that another process serves.

use crate::Store;
use crate::error::{Error, Result};
use crate::handshake::{Found, Secret, introduce};
use crate::wire::{self, Answer, Request, check_sizes};
use dns_lookup::{AddrInfo, AddrInfoHints, LookupErrorKind, SockType, getaddrinfo};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What a request for which the server waits may take beyond that time.
const WAY: Duration = Duration::from_secs(1);
/// How long one attempt to connect may take; then the next one begins, as long as the deadline has not passed.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Which store to connect to.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Name or address of the machine of the rank that serves it.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The secret of the run.
    pub secret: Secret,
    /// How long to try.
    pub timeout: Duration,
}

impl ConnectOptions {
    fn server(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// A connection to the store of a run, for any number of threads.
pub struct Client {
    options: ConnectOptions,
    /// Found once, because name servers have no deadline.
    addresses: Vec<SocketAddr>,
    /// Connections that nobody uses at the moment.
    idle: Mutex<Vec<TcpStream>>,
}

impl Client {
    /// Tries until the store answers or the time is up. `waiting` is told from time to time how long it has been, and why, and
    /// says whether to go on.
    ///
    /// # Errors
    /// Another program answers there, the secret is another one, or the name has no address: at once. Nobody listens or
    /// answers, or no name server tells the address: when the time is up or `waiting` breaks off.
    ///
    /// ```
    /// use accelerate_rendezvous::{Client, ConnectOptions, Secret, Server, ServerOptions, Store};
    /// use std::ops::ControlFlow;
    /// use std::time::Duration;
    ///
    /// let (secret, timeout) = (Secret::new(*b"of this run"), Duration::from_secs(10));
    /// let address = "127.0.0.1:0".parse().unwrap();
    /// let server = Server::bind(&ServerOptions { address, secret: secret.clone(), max_connections: 16 })?;
    /// let (host, port) = ("127.0.0.1".to_owned(), server.address().port());
    /// let client = Client::connect(ConnectOptions { host, port, secret, timeout }, |_, _| ControlFlow::Continue(()))?;
    /// client.set(b"rank 1", b"is here", timeout)?;
    /// assert_eq!(server.memory().get(b"rank 1", timeout)?, b"is here");
    /// # Ok::<(), accelerate_rendezvous::Error>(())
    /// ```
    pub fn connect(
        options: ConnectOptions,
        mut waiting: impl FnMut(Duration, &Error) -> ControlFlow<()>,
    ) -> Result<Self> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(2);
        loop {
            let left = options.timeout.saturating_sub(begin.elapsed());
            let attempt = left.min(ATTEMPT).max(Duration::from_millis(1));
            let connected = addresses(&options).and_then(|addresses| {
                let stream = connection(&options, &addresses, attempt)?;
                Ok((addresses, stream))
            });
            let error = match connected {
                Ok((addresses, stream)) => return Ok(Self { options, addresses, idle: Mutex::new(vec![stream]) }),
                Err(error) => error,
            };
            let may_pass = matches!(error, Error::Silent { .. } | Error::Connection { .. } | Error::NameServer { .. });
            if !may_pass {
                return Err(error);
            }
            if begin.elapsed() >= options.timeout {
                return Err(match error {
                    Error::Silent { server, .. } => Error::Silent { server, timeout: options.timeout },
                    other => other,
                });
            }
            if waiting(begin.elapsed(), &error).is_break() {
                return Err(error);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    // A list: whole after every statement.
    fn idle(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks on a connection that nobody uses, and makes one if there is none. A connection whose answer did not come is
    /// dropped: the answer might come later.
    fn ask(&self, request: &Request, timeout: Duration) -> Result<Answer> {
        let begin = Instant::now();
        let message = request.encode();
        if message.len() > wire::MAX_MESSAGE_BYTES {
            return Err(Error::TooLarge { what: "a request", found: message.len(), limit: wire::MAX_MESSAGE_BYTES });
        }
        let idle = self.idle().pop();
        let stream = match idle {
            Some(stream) => stream,
            None => connection(&self.options, &self.addresses, timeout)?,
        };
        let failed = |source| failure(&self.options, timeout, source);
        let mut timed = Timed { stream: &stream, begin, timeout };
        wire::send(&mut timed, &message).map_err(failed)?;
        let answer = wire::receive(&mut timed).map_err(failed)?;
        let Some(answer) = Answer::decode(&answer) else {
            return Err(Error::Malformed { server: self.options.server() });
        };
        self.idle().push(stream);
        Ok(answer)
    }

    fn unexpected<T>(&self, answer: Answer, timeout: Duration) -> Result<T> {
        Err(match answer {
            Answer::NotSet(keys) => Error::NotSet { keys, timeout },
            Answer::Refused(reason) => Error::Refused { server: self.options.server(), reason },
            _ => Error::Malformed { server: self.options.server() },
        })
    }

    fn done(&self, request: &Request, timeout: Duration) -> Result<()> {
        match self.ask(request, timeout)? {
            Answer::Done => Ok(()),
            other => self.unexpected(other, timeout),
        }
    }

    fn number(&self, request: &Request, timeout: Duration) -> Result<i64> {
        match self.ask(request, timeout)? {
            Answer::Number(number) => Ok(number),
            other => self.unexpected(other, timeout),
        }
    }

    fn bytes(&self, request: &Request, timeout: Duration) -> Result<Vec<u8>> {
        match self.ask(request, timeout)? {
            Answer::Bytes(bytes) => Ok(bytes),
            other => self.unexpected(other, timeout),
        }
    }
}

impl Store for Client {
    fn set(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()> {
        check_sizes(key, value)?;
        self.done(&Request::Set { key: key.to_vec(), value: value.to_vec() }, timeout)
    }

    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        match self.ask(&Request::Get { key: key.to_vec(), timeout }, timeout.saturating_add(WAY))? {
            Answer::Bytes(bytes) => Ok(bytes),
            other => self.unexpected(other, timeout),
        }
    }

    fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        check_sizes(key, desired)?;
        let [key, expected, desired] = [key, expected, desired].map(<[u8]>::to_vec);
        self.bytes(&Request::CompareSet { key, expected, desired }, timeout)
    }

    fn append(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()> {
        check_sizes(key, value)?;
        self.done(&Request::Append { key: key.to_vec(), value: value.to_vec() }, timeout)
    }

    fn add(&self, key: &[u8], amount: i64, timeout: Duration) -> Result<i64> {
        self.number(&Request::Add { key: key.to_vec(), amount }, timeout)
    }

    fn delete_key(&self, key: &[u8], timeout: Duration) -> Result<bool> {
        Ok(self.number(&Request::DeleteKey { key: key.to_vec() }, timeout)? != 0)
    }

    fn num_keys(&self, timeout: Duration) -> Result<u64> {
        Ok(self.number(&Request::NumKeys, timeout)?.unsigned_abs())
    }

    fn check(&self, keys: &[&[u8]], timeout: Duration) -> Result<bool> {
        let keys = keys.iter().map(|key| key.to_vec()).collect();
        Ok(self.number(&Request::Check { keys }, timeout)? != 0)
    }

    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> Result<()> {
        let keys = keys.iter().map(|key| key.to_vec()).collect();
        match self.ask(&Request::Wait { keys, timeout }, timeout.saturating_add(WAY))? {
            Answer::Done => Ok(()),
            other => self.unexpected(other, timeout),
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("server", &self.options.server()).finish_non_exhaustive()
    }
}

/// A connection that has proved to be to the store of the run.
fn connection(options: &ConnectOptions, addresses: &[SocketAddr], timeout: Duration) -> Result<TcpStream> {
    let begin = Instant::now();
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for (tried, address) in addresses.iter().enumerate() {
        // An address that swallows everything leaves time for the next one.
        let to_try = u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        let left = (timeout.saturating_sub(begin.elapsed()) / to_try).max(Duration::from_millis(1));
        let stream = match TcpStream::connect_timeout(address, left) {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        let failed = |source| failure(options, timeout, source);
        stream.set_nodelay(true).map_err(failed)?;
        return match introduce(Timed { stream: &stream, begin, timeout }, &options.secret).map_err(failed)? {
            Found::TheRun => Ok(stream),
            Found::OtherSecret => Err(Error::OtherSecret { server: options.server() }),
            Found::OtherProgram => Err(Error::OtherProgram { server: options.server() }),
        };
    }
    Err(failure(options, timeout, last))
}

fn addresses(options: &ConnectOptions) -> Result<Vec<SocketAddr>> {
    let hints = AddrInfoHints { socktype: SockType::Stream.into(), ..AddrInfoHints::default() };
    let found = getaddrinfo(Some(&options.host), None, Some(hints)).map_err(|error| {
        let (kind, source) = (error.kind(), error.into());
        unresolved(&options.host, kind, source)
    })?;
    let address = |info: io::Result<AddrInfo>| Some(SocketAddr::new(info.ok()?.sockaddr.ip(), options.port));
    Ok(found.filter_map(address).collect())
}

/// A name without an address will not have one soon, but a name server may answer at the next try.
fn unresolved(host: &str, kind: LookupErrorKind, source: io::Error) -> Error {
    let host = host.to_owned();
    match kind {
        LookupErrorKind::Again | LookupErrorKind::System | LookupErrorKind::Memory => {
            Error::NameServer { host, source }
        }
        _ => Error::UnknownHost { host, source },
    }
}

fn failure(options: &ConnectOptions, timeout: Duration, source: io::Error) -> Error {
    let server = options.server();
    match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Silent { server, timeout },
        io::ErrorKind::InvalidData => Error::Malformed { server },
        io::ErrorKind::UnexpectedEof => {
            let ended = "it has ended the connection";
            Error::Connection { server, source: io::Error::new(io::ErrorKind::ConnectionReset, ended) }
        }
        _ => Error::Connection { server, source },
    }
}

/// A stream all of whose reads and writes together may take some time; a peer that sends a byte now and then does not extend it.
struct Timed<'a> {
    stream: &'a TcpStream,
    begin: Instant,
    timeout: Duration,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.timeout.checked_sub(self.begin.elapsed()).filter(|left| !left.is_zero()) {
            Some(left) => Ok(Some(left)),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_name_server_may_answer_later_is_asked_again() {
        let error = |kind| unresolved("node0", kind, io::ErrorKind::Other.into());
        for kind in [LookupErrorKind::NoName, LookupErrorKind::NoData, LookupErrorKind::Fail] {
            assert!(matches!(error(kind), Error::UnknownHost { .. }), "{kind:?}");
        }
        assert!(matches!(error(LookupErrorKind::Again), Error::NameServer { .. }));
    }
}
