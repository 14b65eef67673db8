//! What can go wrong between a rank and the store.

use std::io;
use std::time::Duration;

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that was not answered, or refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Keys that were waited for are not there.
    #[error("timed out after {timeout:?}: nobody has set these keys of the store: {keys}")]
    NotSet {
        /// The keys, as text.
        keys: String,
        /// How long they were waited for.
        timeout: Duration,
    },
    /// The server is connected and silent.
    #[error(
        "timed out: {server}, which serves the store of the run, has not answered within {timeout:?}; is it stopped, or overloaded?"
    )]
    Silent {
        /// Its address.
        server: String,
        /// How long it was waited for.
        timeout: Duration,
    },
    /// The connection is gone, or cannot be made.
    #[error("the connection to {server}, which serves the store of the run, failed")]
    Connection {
        /// Its address.
        server: String,
        /// What the system said.
        source: io::Error,
    },
    /// The name of the server's machine has no address.
    #[error("\"{host}\" is not the name of a machine; give the address of rank 0's machine")]
    UnknownHost {
        /// The name.
        host: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// No name server has told the address of the server's machine.
    #[error(
        "the address of \"{host}\" could not be asked for; see that this machine reaches its name server, or give an address"
    )]
    NameServer {
        /// The name.
        host: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Something else answers there.
    #[error("{server} is held by another program, which does not answer as the store of a run; choose another port")]
    OtherProgram {
        /// Its address.
        server: String,
    },
    /// The two sides have different secrets.
    #[error(
        "{server} serves the store of a run with another secret; all ranks of a run need the same one, and two runs on one \
         machine need ports of their own"
    )]
    OtherSecret {
        /// Its address.
        server: String,
    },
    /// A key, value or request beyond the bounds.
    #[error("{what} of {found} bytes is more than the store takes, {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The most that is taken.
        limit: usize,
    },
    /// The value is not a number, or the sum is too large.
    #[error("the value of \"{key}\" cannot be added to: {reason}")]
    NotANumber {
        /// The key, as text.
        key: String,
        /// Why.
        reason: &'static str,
    },
    /// The server does not carry out a request.
    #[error("{server}, which serves the store of the run, refused a request: {reason}")]
    Refused {
        /// Its address.
        server: String,
        /// Why.
        reason: String,
    },
    /// What was received cannot be read.
    #[error("{server} sent an answer that cannot be read")]
    Malformed {
        /// Its address.
        server: String,
    },
    /// The server has been closed.
    #[error("the store of the run has been closed")]
    Closed,
    /// The system has no random numbers for a nonce or a secret.
    #[error("the system gives no random numbers: {reason}")]
    NoRandomNumbers {
        /// What it said.
        reason: String,
    },
    /// The server cannot listen.
    #[error("cannot listen at {address}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// A deadline has passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::NotSet { .. } | Self::Silent { .. })
    }

    /// The server could not be reached, or went away.
    pub fn is_connection(&self) -> bool {
        matches!(
            self,
            Self::Connection { .. }
                | Self::Closed
                | Self::Malformed { .. }
                | Self::OtherProgram { .. }
                | Self::OtherSecret { .. }
        )
    }

    /// The port is taken already.
    pub fn is_address_in_use(&self) -> bool {
        matches!(self, Self::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

/// Keys as text, the first few.
pub(crate) fn shown(keys: &[&[u8]]) -> String {
    const MOST: usize = 8;
    let shown = keys.iter().take(MOST).map(|key| String::from_utf8_lossy(key).into_owned());
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if keys.len() > MOST {
        text.push_str(&format!(" and {} more", keys.len() - MOST));
    }
    text
}
