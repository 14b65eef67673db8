//! Strangers in the network of a run, who connect to the port of its main process from before it is open until the run has ended:
//! some say nothing, some talk nonsense or stop in the middle of the greeting, some belong to another run, whose secret is another
//! one, and one of these is a rank that trains.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use accelerate_rendezvous::{Client, ConnectOptions, Error, Secret, Store};
use anyhow::{Context, Result, ensure};

use super::network::Machines;

const ROLE: &str = "--strangers";
/// How many come at once, and the time until the next ones do.
const BURST: usize = 100;
const BETWEEN_BURSTS: Duration = Duration::from_millis(100);
/// How many connections they keep, unless the other side ends them.
const MOST_KEPT: usize = 400;
/// How long they wait for a connection, or for a word.
const PATIENCE: Duration = Duration::from_millis(50);
const BETWEEN_MEMBERS: Duration = Duration::from_millis(20);
/// What the store says first, what it is to be answered, and how it begins to speak to a member.
const GREETING_BYTES: usize = 40;
const ANSWER_BYTES: usize = 64;
const WELCOME: u8 = 1;

/// What strangers have found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) connections: u64,
    /// Who tried to be a member and was refused.
    pub(super) refused: u64,
    pub(super) let_in: u64,
}

/// Strangers on a machine of their own, for as long as this value lives.
pub(super) struct Strangers(Child);

impl Strangers {
    /// One of them claims to be `rank` of `world_size`.
    pub(super) fn start(
        machines: &Machines,
        machine: usize,
        address: SocketAddr,
        program: &Path,
        (rank, world_size): (usize, usize),
    ) -> Result<Self> {
        let mut command = machines.command_on(machine)?;
        command.arg(std::env::current_exe()?).args([ROLE, &address.to_string()]).arg(program);
        command.args([rank.to_string(), world_size.to_string()]);
        Ok(Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("`nsenter` cannot be run")?))
    }

    /// Lets them leave, and tell.
    pub(super) fn end(mut self) -> Result<Tally> {
        drop(self.0.stdin.take());
        let mut text = String::new();
        let stdout = self.0.stdout.take().context("a pipe is missing")?;
        io::BufReader::new(stdout).read_to_string(&mut text)?;
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [connections, refused, let_in] = numbers[..] else { anyhow::bail!("strangers said {text:?}") };
        Ok(Tally { connections, refused, let_in })
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Tally {
    /// Nobody may be let in, and somebody has to have tried.
    pub(super) fn check(self) -> Result<()> {
        ensure!(self.let_in == 0, "strangers were let in: {self:?}");
        ensure!(self.refused > 0, "no stranger came as far as the secret: {self:?}");
        Ok(())
    }
}

/// Plays the strangers if the arguments of this process ask for that, until its input ends.
pub(crate) fn run_if_asked() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [ROLE, address, program, rank, world_size] = words[..] else { return None };
    let result = address.parse().map_err(io::Error::other);
    let result = result.and_then(|address| Siege::new(address).carry_out(program, rank, world_size));
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("strangers: {error}");
            ExitCode::FAILURE
        }
    })
}

struct Siege {
    address: SocketAddr,
    is_over: AtomicBool,
    connections: AtomicU64,
    refused: AtomicU64,
    let_in: AtomicU64,
}

impl Siege {
    fn new(address: SocketAddr) -> Self {
        let [connections, refused, let_in] = [(); 3].map(|()| AtomicU64::new(0));
        Self { address, is_over: AtomicBool::new(false), connections, refused, let_in }
    }

    fn carry_out(&self, program: &str, rank: &str, world_size: &str) -> io::Result<()> {
        thread::scope(|scope| {
            scope.spawn(|| self.crowd());
            scope.spawn(|| self.members_of_another_run());
            let rank = scope.spawn(|| self.rank_of_another_run(program, rank, world_size));
            let ended = io::stdin().lock().read_to_end(&mut Vec::new());
            self.is_over.store(true, Ordering::SeqCst);
            rank.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?;
            ended.map(drop)
        })?;
        let numbers = [&self.connections, &self.refused, &self.let_in].map(|number| number.load(Ordering::SeqCst));
        println!("{} {} {}", numbers[0], numbers[1], numbers[2]);
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn crowd(&self) {
        let mut kept = VecDeque::new();
        for number in 0.. {
            if number % BURST == 0 {
                thread::park_timeout(BETWEEN_BURSTS);
            }
            if self.is_over() {
                return;
            }
            // Nobody listens yet, or any more.
            let Ok(stream) = TcpStream::connect_timeout(&self.address, PATIENCE) else { continue };
            self.connections.fetch_add(1, Ordering::SeqCst);
            // Who is hung up on has nothing to say.
            let _ = self.talk(&stream, number);
            kept.push_back(stream);
            if kept.len() > MOST_KEPT {
                kept.pop_front();
            }
        }
    }

    fn talk(&self, mut stream: &TcpStream, number: usize) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut greeting = [0; GREETING_BYTES];
        match number % 6 {
            0 => Ok(()),
            1 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
            2 => stream.write_all(&[0xff; 4096]),
            // What the store of c10d would understand.
            3 => stream.write_all(&[0x86, 0x55, 0xf1, 0x3c, 0, 1, 0, 0, 0, 0]),
            4 => {
                stream.read_exact(&mut greeting)?;
                stream.write_all(&greeting[..ANSWER_BYTES / 3])
            }
            _ => {
                stream.read_exact(&mut greeting)?;
                // The number of keys is asked for before anybody is admitted.
                stream.write_all(&[&[0; ANSWER_BYTES][..], &8_u32.to_le_bytes(), &6_u64.to_le_bytes()].concat())?;
                let mut word = [0];
                stream.read_exact(&mut word)?;
                self.count(word == [WELCOME]);
                Ok(())
            }
        }
    }

    fn count(&self, is_let_in: bool) {
        if is_let_in { &self.let_in } else { &self.refused }.fetch_add(1, Ordering::SeqCst);
    }

    /// They know how to be members, and not of what.
    fn members_of_another_run(&self) {
        for number in 0.. {
            if self.is_over() {
                return;
            }
            let secret = if number % 2 == 0 { Secret::new(*b"of another run") } else { Secret::new([]) };
            let (host, port) = (self.address.ip().to_string(), self.address.port());
            let options = ConnectOptions { host, port, secret, timeout: PATIENCE };
            match Client::connect(options, |_, _| ControlFlow::Continue(())) {
                Ok(client) => {
                    self.count(true);
                    let _ = client.add(b"stranger", 1, PATIENCE);
                }
                Err(Error::OtherSecret { .. }) => self.count(false),
                // Nobody listens, or there are too many at the door.
                Err(_) => {}
            }
            thread::park_timeout(BETWEEN_MEMBERS);
        }
    }

    /// It knows everything but the secret, and claims to be a rank that the run has or has not.
    fn rank_of_another_run(&self, program: &str, rank: &str, world_size: &str) -> io::Result<()> {
        let mut command = Command::new(program);
        command.args(["checkpointed", "--folder"]).arg(std::env::temp_dir().join("of_strangers"));
        command.env("ACCELERATE_USE_CPU", "true").env("ACCELERATE_RUN_SECRET", "of another run");
        command.envs([("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]);
        command.env("MASTER_ADDR", self.address.ip().to_string());
        command.env("MASTER_PORT", self.address.port().to_string());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                // The run has ended before this rank was ready.
                None if self.is_over() => {
                    child.kill()?;
                    child.wait()?;
                    return Ok(());
                }
                None => thread::park_timeout(PATIENCE),
            }
        };
        let mut words = String::new();
        child.stderr.take().map(|mut stream| stream.read_to_string(&mut words)).transpose()?;
        // Whatever else it failed of, it had come further.
        self.count(status.success() || !words.contains("secret"));
        Ok(())
    }
}
