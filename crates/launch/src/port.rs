//! Choosing, checking and reserving the rendezvous port.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};

use rustix::io::Errno;

use crate::config::LaunchConfig;
use crate::error::{Error, Result};

/// The port of the reference when several machines meet and none was named.
const DEFAULT_PORT_OF_SEVERAL_MACHINES: u16 = 29500;
/// Ports below this one need privileges or belong to well-known services.
const LOWEST_CHOSEN_PORT: u16 = 10_000;
const NUM_ATTEMPTS: usize = 64;

/// The rendezvous port, kept apart from other launches on this machine for as long as the value lives.
///
/// Rank 0 opens the TCP port itself, later, so the launcher cannot hold it. It holds the *UDP* port of the
/// same number instead: nothing else uses that one, the kernel frees it however the launcher ends, and
/// every launcher looks at it first. Two launches at the same moment therefore never choose the same port.
#[derive(Debug)]
pub struct PortReservation {
    number: u16,
    _mark: Option<UdpSocket>,
}

impl PortReservation {
    /// The port for `config`: the one it names if that is free, else one that nobody uses. On machines
    /// other than 0 nothing is checked, because the port is opened elsewhere, nor for a process that meets no others.
    ///
    /// # Errors
    ///
    /// [`Error::is_port_taken`].
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, PortReservation, Program};
    /// let config = LaunchConfig::new(Program::Executable("true".into()), 2);
    /// let first = PortReservation::for_config(&config)?;
    /// let second = PortReservation::for_config(&config)?;
    /// assert_ne!(first.number(), second.number());
    /// # Ok::<(), accelerate_launch::Error>(())
    /// ```
    pub fn for_config(config: &LaunchConfig) -> Result<Self> {
        match Self::named(config) {
            Some(number) if config.machine_rank > 0 || !config.is_numbered() => Ok(Self { number, _mark: None }),
            Some(number) => {
                check_free(number).map_err(|source| Error::port(number, source))?;
                // Somebody else's UDP socket is no reason to refuse a port the user named.
                Ok(Self { number, _mark: mark(number).ok() })
            }
            None => Self::any(),
        }
    }

    /// The port that `config` names, or that several machines take without a word; `None` for any free one.
    pub fn named(config: &LaunchConfig) -> Option<u16> {
        match config.main_process_port {
            None if config.num_machines > 1 => Some(DEFAULT_PORT_OF_SEVERAL_MACHINES),
            Some(0) | None => None,
            named => named,
        }
    }

    /// The TCP port number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Prefers ports outside the range from which the kernel serves outgoing connections: those may be
    /// taken by anyone between now and the moment rank 0 listens, which for a Python program is seconds.
    fn any() -> Result<Self> {
        let ceiling = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
            .ok()
            .and_then(|range| range.split_whitespace().next()?.parse::<u16>().ok())
            .unwrap_or(0);
        if ceiling > LOWEST_CHOSEN_PORT {
            let span = u64::from(ceiling - LOWEST_CHOSEN_PORT);
            for _ in 0..NUM_ATTEMPTS {
                let offset = u16::try_from(random() % span).unwrap_or(0);
                if let Some(reservation) = Self::try_number(LOWEST_CHOSEN_PORT + offset)? {
                    return Ok(reservation);
                }
            }
        }
        for _ in 0..NUM_ATTEMPTS {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                .map_err(|source| Error::system("looking for a free port", source))?;
            let number = listener.local_addr().map_err(|source| Error::system("looking for a free port", source))?;
            drop(listener);
            if let Some(reservation) = Self::try_number(number.port())? {
                return Ok(reservation);
            }
        }
        Err(Error::system("looking for a free port", io::Error::from(io::ErrorKind::AddrInUse)))
    }

    /// `None` where another number may be free.
    fn try_number(number: u16) -> Result<Option<Self>> {
        match mark(number).and_then(|mark| check_free(number).map(|()| mark)) {
            Ok(mark) => Ok(Some(Self { number, _mark: Some(mark) })),
            Err(error) if is_of_every_number(&error) => Err(Error::system("looking for a free port", error)),
            Err(_) => Ok(None),
        }
    }
}

/// This process or this machine can have no more of them, whatever their numbers.
fn is_of_every_number(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

/// The store listens on every interface, so every interface must be free. IPv6 may be switched off.
fn check_free(number: u16) -> io::Result<()> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, number))?;
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, number)) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse || is_of_every_number(&error) => Err(error),
        _ => Ok(()),
    }
}

fn mark(number: u16) -> io::Result<UdpSocket> {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, number))
}

/// The standard library seeds every `RandomState` from the system; that is all the randomness needed here.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Program;

    fn config(port: Option<u16>) -> LaunchConfig {
        LaunchConfig { main_process_port: port, ..LaunchConfig::new(Program::Executable("true".into()), 2) }
    }

    #[test]
    fn a_hundred_reservations_are_distinct_and_free() {
        let reservations: Vec<_> = (0..100).map(|_| PortReservation::for_config(&config(Some(0))).unwrap()).collect();
        let mut numbers: Vec<_> = reservations.iter().map(PortReservation::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 100);
        for number in numbers {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)).unwrap();
        }
    }

    #[test]
    fn a_named_port_that_is_in_use_is_refused_by_name() {
        for address in ["127.0.0.1:0", "0.0.0.0:0"] {
            let holder = TcpListener::bind(address).unwrap();
            let number = holder.local_addr().unwrap().port();
            let error = PortReservation::for_config(&config(Some(number))).unwrap_err();
            assert!(error.is_port_taken(), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&number.to_string()) && text.contains("--main_process_port 0"), "{text}");
        }
    }

    #[test]
    fn only_what_concerns_every_port_ends_the_search() {
        let is_over = |errno: Errno| is_of_every_number(&io::Error::from_raw_os_error(errno.raw_os_error()));
        assert!(is_over(Errno::MFILE) && is_over(Errno::NOBUFS));
        assert!(!is_over(Errno::ADDRINUSE) && !is_over(Errno::ACCESS));
        assert!(!is_of_every_number(&io::Error::from(io::ErrorKind::AddrInUse)));
    }

    #[test]
    fn other_machines_do_not_open_the_port_and_so_do_not_check_it() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = holder.local_addr().unwrap().port();
        let elsewhere = LaunchConfig { num_machines: 2, machine_rank: 1, ..config(Some(number)) };
        assert_eq!(PortReservation::for_config(&elsewhere).unwrap().number(), number);
    }
}
