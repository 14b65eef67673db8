//! What an agent looks at on its machine before anything starts.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::hosts::is_loopback;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::statvfs;

use super::message::Problem;
use crate::config::{LaunchConfig, Program};
use crate::error::Result;
use crate::machine::num_visible_gpus;
use crate::port::PortReservation;
use crate::program::{ProgramSearch, resolve_program};

/// A machine that does not answer within this time is taken to be out of reach.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// How many machines are tried at the same time.
const MOST_TRIED_AT_ONCE: usize = 64;
/// By which Gloo is told where ranks wait for others.
const GLOO_INTERFACE: &str = "GLOO_SOCKET_IFNAME";
/// As long as Linux makes a queue of connections, unless it is told otherwise.
const QUEUE_LENGTH: i32 = 4096;
/// How many of those who reach the port are kept before the first has to go.
const MOST_KEPT: usize = 256;
const TAKING_PAUSE: Duration = Duration::from_millis(5);
/// With less, the first checkpoint of a small model may not fit.
const LOW_SPACE_BYTES: u64 = 1 << 30;

/// The port of the main process, held by machine 0 until rank 0 opens it.
#[derive(Debug)]
pub(super) struct MainPort {
    reservation: PortReservation,
    /// What other machines reach before there is a rank 0.
    door: Option<Door>,
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
        // That it cannot be reached, the other machines say.
        let door = is_reached_for.then(open).and_then(io::Result::ok).and_then(|listener| Door::open(listener).ok());
        Ok(Self { reservation, door })
    }

    pub(super) fn number(&self) -> u16 {
        self.reservation.number()
    }

    /// From now on the port is rank 0's; other launches on this machine still leave it alone.
    pub(super) fn opened_by_rank_0(self) -> PortReservation {
        drop(self.door);
        self.reservation
    }
}

/// Takes every connection and says nothing, so that strangers who connect, too, cannot fill the queue in which machines of the run
/// would wait.
#[derive(Debug)]
struct Door {
    /// Dropped, it wakes the thread.
    awake: Option<UnixStream>,
    /// Holds the port.
    porter: Option<JoinHandle<()>>,
}

impl Door {
    fn open(listener: TcpListener) -> io::Result<Self> {
        // Each machine tries once, all of them perhaps at the same time.
        rustix::net::listen(&listener, QUEUE_LENGTH)?;
        listener.set_nonblocking(true)?;
        let (awake, wakened) = UnixStream::pair()?;
        let porter =
            thread::Builder::new().name("port".to_owned()).spawn(move || take_connections(&listener, &wakened))?;
        Ok(Self { awake: Some(awake), porter: Some(porter) })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        drop(self.awake.take());
        // Rank 0 may open the port when this returns.
        let _panicked = self.porter.take().map(JoinHandle::join);
    }
}

/// Until the other end of `wakened` is dropped.
fn take_connections(listener: &TcpListener, wakened: &UnixStream) {
    let mut kept = VecDeque::new();
    loop {
        let mut events =
            [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(wakened.as_fd(), PollFlags::IN)];
        match poll(&mut events, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) if events[1].revents().is_empty() => {}
            _ => break,
        }
        match listener.accept() {
            Ok((stream, _)) => kept.push_back(stream),
            // There are no file descriptors left, or the peer has gone again; trying without a pause would take a core.
            Err(_) => thread::sleep(TAKING_PAUSE),
        }
        if kept.len() > MOST_KEPT {
            kept.pop_front().iter().for_each(reset);
        }
    }
    kept.iter().for_each(reset);
}

/// Ends a connection so that nothing of it holds the port, as the side that ends one in the usual way does for a minute.
fn reset(stream: &TcpStream) {
    // Without it, rank 0 opens the port all the same if it says that it may be held so, as all known ones do.
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// Where ranks of this machine would wait for those of other machines, as Gloo chooses it. It can be reached for as long as this
/// value lives.
#[derive(Debug)]
pub(super) struct MeetingPlace {
    address: SocketAddr,
    _door: Door,
}

impl MeetingPlace {
    /// `None` where ranks wait elsewhere: on an interface that is named, or all on one machine; and where it takes too long to find
    /// out.
    pub(super) fn open(config: &LaunchConfig) -> Option<Self> {
        let said = config.environment.iter().rev().find(|(name, _)| name == GLOO_INTERFACE);
        let by_launch = || said.map(|(_, value)| value.clone()).or_else(|| std::env::var_os(GLOO_INTERFACE));
        let interface = said_by_env(config, GLOO_INTERFACE).or_else(by_launch);
        let is_elsewhere = interface.is_some_and(|name| !name.is_empty());
        let is_one_machine = config.num_machines < 2 || config.main_process_ip.as_deref().is_none_or(is_loopback);
        if is_elsewhere || is_one_machine {
            return None;
        }
        // Whoever knows names may be slow to answer.
        let (found, listener) = channel();
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let look = move || drop(found.send(listener_of(&name)));
        thread::Builder::new().name("own name".to_owned()).spawn(look).ok()?;
        let listener = listener.recv_timeout(CONNECT_PATIENCE).ok()??;
        Some(Self { address: listener.local_addr().ok()?, _door: Door::open(listener).ok()? })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The value that the program `env` gives a variable for the program behind it: `env A=1 B=2 program`. Of its options nothing is known
/// here, so that one with a word of its own (`-u NAME`) ends the list.
fn said_by_env(config: &LaunchConfig, name: &str) -> Option<OsString> {
    let Program::Executable(path) = &config.program else { return None };
    if Path::new(path).file_name() != Some(OsStr::new("env")) {
        return None;
    }
    let is_option = |word: &OsString| word.as_bytes().starts_with(b"-");
    let pairs = config.args.iter().skip_while(|word| is_option(word)).map_while(|word| {
        let at = word.as_bytes().iter().position(|byte| *byte == b'=')?;
        let (before, value) = word.as_bytes().split_at(at);
        Some((before, value.strip_prefix(b"=")?))
    });
    let found = pairs.filter(|(before, _)| *before == name.as_bytes()).last();
    found.map(|(_, value)| OsStr::from_bytes(value).to_owned())
}

/// At the first address of the machine's own name that belongs to it; a name that leads nowhere is taken for the loopback.
fn listener_of(name: &str) -> Option<TcpListener> {
    let own = (name, 0).to_socket_addrs().into_iter().flatten();
    own.chain([SocketAddr::from((Ipv4Addr::LOCALHOST, 0))]).find_map(|address| TcpListener::bind(address).ok())
}

/// For each of these addresses why it is out of reach from here, if it is.
pub(super) fn out_of_reach(addresses: &[SocketAddr]) -> Vec<Option<String>> {
    let attempt = |address: &SocketAddr| TcpStream::connect_timeout(address, CONNECT_PATIENCE).err();
    let tried = addresses.chunks(MOST_TRIED_AT_ONCE).flat_map(|some| {
        thread::scope(|scope| {
            let attempts: Vec<_> = some.iter().map(|address| scope.spawn(move || attempt(address))).collect();
            let ended = attempts.into_iter().map(|attempt| attempt.join().ok().flatten());
            ended.map(|error| error.map(|error| error.to_string())).collect::<Vec<_>>()
        })
    });
    tried.collect()
}

/// A file in the working folder of machine 0 by which others know the folder, as long as this value lives.
#[derive(Debug)]
pub(super) struct Beacon {
    path: PathBuf,
    name: String,
}

impl Beacon {
    /// `None` where nothing can be written.
    pub(super) fn light(folder: &OsStr) -> Option<Self> {
        let random = crate::new_secret().ok()?.into_string().ok()?;
        let name = format!(".accelerate_{}", random.get(..16)?);
        let path = Path::new(folder).join(&name);
        File::create_new(&path).ok()?;
        Some(Self { path, name })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Is it in this folder, too? `None` for what is no name of a file.
    pub(super) fn is_seen(name: &str, folder: &OsStr) -> Option<bool> {
        let is_name = Path::new(name).file_name() == Some(OsStr::new(name));
        is_name.then(|| Path::new(folder).join(name).exists())
    }
}

impl Drop for Beacon {
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// How many GPUs the ranks will see.
pub(super) fn num_gpus(config: &LaunchConfig) -> usize {
    let said = config.environment.iter().rev().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES");
    let visible = said.map(|(_, value)| value.clone()).or_else(|| std::env::var_os("CUDA_VISIBLE_DEVICES"));
    num_visible_gpus(Path::new("/dev"), visible.as_deref().and_then(OsStr::to_str))
}

pub(super) fn no_folder(folder: &OsStr, error: &io::Error) -> Problem {
    let text = format!(
        "the working folder {} cannot be used there ({error}); start from a folder that all machines share, or make it there",
        Path::new(folder).shown()
    );
    Problem { text, exit_code: 1 }
}

/// The command that starts the program, or why it cannot be run here.
pub(super) fn program(config: &LaunchConfig) -> Result<Vec<OsString>, Problem> {
    let search = ProgramSearch::of_this_process();
    resolve_program(&config.program, &search).map_err(|error| Problem::of(&error))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
    use rustix::net::{AddressFamily, SocketType};
    use std::io::{Read, Write};

    /// More of them come than are kept, and each stays and says something.
    #[test]
    fn strangers_at_the_port_are_taken_and_leave_it_to_rank_0() {
        let program = crate::config::Program::Executable("true".into());
        let config = LaunchConfig { main_process_port: Some(0), ..LaunchConfig::new(program, 1) };
        let port = MainPort::choose(&config, true).unwrap();
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port.number())).unwrap();
        let mut strangers: Vec<_> = (0..=MOST_KEPT).map(|_| connect()).collect();
        // The first one is let go for the last, so nobody waits in the queue.
        strangers[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ended = strangers[0].read(&mut [0]);
        assert!(matches!(&ended, Ok(0)) || ended.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset));
        strangers[1..].iter_mut().for_each(|stranger| stranger.write_all(b"GET / HTTP/1.1").unwrap());
        let number = port.number();
        let _reservation = port.opened_by_rank_0();
        // Without the word that what is left of connections may hold it.
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, number))).unwrap();
    }

    /// As two machines do, of which one is open and the other is not.
    #[test]
    fn where_ranks_would_wait_is_reached_or_the_reason_told() {
        let config = |main_process_ip: &str| {
            let program = crate::config::Program::Executable("true".into());
            let main_process_ip = Some(main_process_ip.to_owned());
            LaunchConfig { num_machines: 2, main_process_ip, ..LaunchConfig::new(program, 2) }
        };
        let place = MeetingPlace::open(&config("10.0.0.1")).unwrap();
        let open = place.address();
        let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let found = out_of_reach(&[open, closed, open]);
        assert_eq!(found.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, false], "{found:?}");
        drop(place);
        assert!(out_of_reach(&[open])[0].is_some());
        assert!(MeetingPlace::open(&config("localhost")).is_none(), "all of its ranks are here");
        let environment = vec![(GLOO_INTERFACE.into(), "eth1".into())];
        assert!(MeetingPlace::open(&LaunchConfig { environment, ..config("10.0.0.1") }).is_none());
    }

    /// As the book says it, because variables of the launch's shell do not reach other machines.
    #[rstest]
    #[case(&["GLOO_SOCKET_IFNAME=lo", "./program"], Some("lo"))]
    #[case(&["-i", "A=1", "GLOO_SOCKET_IFNAME=a", "GLOO_SOCKET_IFNAME=eth1=x", "./program"], Some("eth1=x"))]
    #[case(&["GLOO_SOCKET_IFNAME=", "./program"], Some(""))]
    #[case::of_the_program(&["A=1", "./program", "GLOO_SOCKET_IFNAME=lo"], None)]
    #[case::another(&["NCCL_SOCKET_IFNAME=lo", "./program"], None)]
    fn an_interface_that_env_names_is_seen(#[case] words: &[&str], #[case] interface: Option<&str>) {
        let args = words.iter().map(OsString::from).collect();
        let config = LaunchConfig { args, ..LaunchConfig::new(Program::Executable("/usr/bin/env".into()), 2) };
        assert_eq!(said_by_env(&config, GLOO_INTERFACE).as_deref(), interface.map(OsStr::new));
        let config = LaunchConfig { program: Program::Executable("envoy".into()), num_machines: 2, ..config };
        assert_eq!(said_by_env(&config, GLOO_INTERFACE), None);
        // Nobody waits at the machine's own name then.
        let of_env = Program::Executable("env".into());
        let config = LaunchConfig { program: of_env, main_process_ip: Some("10.0.0.1".to_owned()), ..config };
        let environment = vec![(GLOO_INTERFACE.into(), OsString::new())];
        let place = MeetingPlace::open(&LaunchConfig { environment, ..config });
        assert_eq!(place.is_none(), interface.is_some_and(|name| !name.is_empty()));
    }

    #[test]
    fn a_beacon_is_seen_in_its_folder_and_leaves_no_trace() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [here, elsewhere] = [0, 1].map(|number: usize| folders[number].path().as_os_str());
        let beacon = Beacon::light(here).unwrap();
        let name = beacon.name().to_owned();
        assert_eq!((Beacon::is_seen(&name, here), Beacon::is_seen(&name, elsewhere)), (Some(true), Some(false)));
        assert_eq!((Beacon::is_seen("../etc", here), Beacon::is_seen("", here)), (None, None));
        drop(beacon);
        assert_eq!(std::fs::read_dir(here).unwrap().count(), 0);
        assert!(Beacon::light(OsStr::new("/proc")).is_none());
    }
}
