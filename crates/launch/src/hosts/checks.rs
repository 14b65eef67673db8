//! What an agent looks at on its machine before anything starts.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use accelerate_core::files::{ShownPath, in_one_line};
use rustix::fs::statvfs;

use super::message::Problem;
use crate::config::LaunchConfig;
use crate::error::Result;
use crate::port::PortReservation;
use crate::program::{ProgramSearch, resolve_program};

/// A machine that does not answer within this time is taken to be out of reach.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// As long as Linux makes a queue of connections, unless it is told otherwise.
const QUEUE_LENGTH: i32 = 4096;
/// With less, the first checkpoint of a small model may not fit.
const LOW_SPACE_BYTES: u64 = 1 << 30;

/// The port of the main process, held by machine 0 until rank 0 opens it.
#[derive(Debug)]
pub(super) struct MainPort {
    reservation: PortReservation,
    /// What other machines reach before there is a rank 0.
    listener: Option<TcpListener>,
}

impl MainPort {
    /// The one that `config` names, or any free one: the agents of all machines are told which.
    pub(super) fn choose(config: &LaunchConfig, is_reached_for: bool) -> Result<Self> {
        let reservation = PortReservation::for_config(&LaunchConfig { num_machines: 1, ..config.clone() })?;
        let number = reservation.number();
        // IPv6 may be switched off. Where neither can be opened, others do not reach it, and say so.
        let open = || {
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, number))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)))
        };
        let listener = is_reached_for.then(open).and_then(io::Result::ok);
        // Nobody accepts, and each machine tries once: the queue holds them all. That it cannot be longer, they would tell.
        let _ = listener.as_ref().map(|listener| rustix::net::listen(listener, QUEUE_LENGTH));
        Ok(Self { reservation, listener })
    }

    pub(super) fn number(&self) -> u16 {
        self.reservation.number()
    }

    /// From now on the port is rank 0's; other launches on this machine still leave it alone.
    pub(super) fn opened_by_rank_0(self) -> PortReservation {
        drop(self.listener);
        self.reservation
    }
}

pub(super) fn no_folder(folder: &OsStr, error: &io::Error) -> Problem {
    let text = format!(
        "the working folder {} cannot be used there ({error}); start from a folder that all machines share, or make it there",
        Path::new(folder).shown()
    );
    Problem { text, exit_code: 1 }
}

/// Why the program cannot be run here.
pub(super) fn program(config: &LaunchConfig) -> Option<Problem> {
    let search = ProgramSearch::of_this_process();
    resolve_program(&config.program, &search).err().map(|error| Problem::of(&error))
}

/// Why the main process would not be found from here.
pub(super) fn main_process(config: &LaunchConfig, port: u16) -> Option<String> {
    let name = config.main_process_ip.as_deref()?;
    let shown = in_one_line(name);
    let addresses: Vec<_> = match (name, port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            return Some(format!(
                "the name {shown} of the main process's machine has no address there ({error}); give an address that all \
                 machines reach with --main_process_ip"
            ));
        }
    };
    let mut problem = format!("the name {shown} has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT_PATIENCE) {
            Ok(_) => return None,
            Err(error) => problem = format!("{address} is not reached ({error})"),
        }
    }
    Some(format!(
        "the port {port} of the main process at {shown} is out of reach from there: {problem}; open it in the firewall, choose an \
         open one with --main_process_port, or name another address with --main_process_ip"
    ))
}

pub(super) fn free_space(folder: &OsStr) -> Option<String> {
    let found = statvfs(folder).ok()?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let shown = Path::new(folder).shown();
    (free < LOW_SPACE_BYTES).then(|| format!("only {} MiB are free in {shown}", free >> 20))
}
