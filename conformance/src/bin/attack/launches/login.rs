//! The place of `ssh` between machines that are namespaces of one: a server in each of them, and the command that logs in there.
//! Words and output go over a connection of the network between them, so what is done to a link is done to the login, too.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::run::MARK;

pub(super) const SERVER: &str = "--login-server";
pub(super) const CLIENT: &str = "--log-in";
/// Each machine has ports of its own.
const PORT: u16 = 2222;
/// What `ssh` exits with when there is no connection.
const NO_CONNECTION: u8 = 255;
const PATIENCE: Duration = Duration::from_secs(5);
const BUFFER_BYTES: usize = 16 << 10;
/// What a piece of what the server sends is: output, words of errors, or how the command has ended.
const OUTPUT: u8 = 1;
const ERRORS: u8 = 2;
const ENDED: u8 = 3;

/// Plays the role that the arguments of this process ask for, if they do.
pub(crate) fn run_if_asked() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        [SERVER, mark] => serve(mark).map(|()| ExitCode::SUCCESS),
        [CLIENT, host, command] => log_in(host, command),
        _ => return None,
    };
    Some(result.unwrap_or_else(|error| {
        eprintln!("{}: {error}", words[0]);
        ExitCode::from(NO_CONNECTION)
    }))
}

/// Runs what is asked for, with the mark of a run, until its own input ends.
fn serve(mark: &str) -> io::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    println!("ready");
    let mark = mark.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mark = mark.clone();
            thread::spawn(move || attend(stream, &mark));
        }
    });
    io::stdin().lock().read_to_end(&mut Vec::new()).map(drop)
}

/// One login. When its connection is over, the command finds the end of its input.
fn attend(stream: TcpStream, mark: &str) -> io::Result<()> {
    let mut words = BufReader::new(stream.try_clone()?);
    let mut command = String::new();
    words.read_line(&mut command)?;
    let mut child = Command::new("sh")
        .args(["-c", command.trim_end()])
        .env(MARK, mark)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let (input, output, errors) = streams(&mut child)?;
    let answer = Arc::new(Mutex::new(stream));
    thread::spawn(move || copy(words, input));
    let to = Arc::clone(&answer);
    let errors = thread::spawn(move || hand_on(errors, ERRORS, &to));
    let sent = hand_on(output, OUTPUT, &answer);
    let _ = errors.join();
    let status = child.wait()?;
    sent?;
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    send(&answer, ENDED, &[u8::try_from(code).unwrap_or(1)])
}

type Streams = (std::process::ChildStdin, std::process::ChildStdout, std::process::ChildStderr);

fn streams(child: &mut Child) -> io::Result<Streams> {
    let streams = child.stdin.take().zip(child.stdout.take()).zip(child.stderr.take());
    streams
        .map(|((input, output), errors)| (input, output, errors))
        .ok_or_else(|| io::Error::other("a pipe is missing"))
}

/// Each piece at once. (`io::copy` lets the kernel do it, which may wait for more than there is.)
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; BUFFER_BYTES];
    // Whichever side has gone, that is the end.
    while let Ok(num_bytes @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..num_bytes]).and_then(|()| to.flush()).is_err() {
            return;
        }
    }
}

fn hand_on(mut from: impl Read, kind: u8, to: &Mutex<TcpStream>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            num_bytes => send(to, kind, &buffer[..num_bytes])?,
        }
    }
}

fn send(to: &Mutex<TcpStream>, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let mut piece = vec![kind];
    piece.extend((bytes.len() as u32).to_be_bytes());
    piece.extend(bytes);
    to.lock().unwrap_or_else(PoisonError::into_inner).write_all(&piece)
}

/// Runs `command` on `host`, with the input and output of this process.
fn log_in(host: &str, command: &str) -> io::Result<ExitCode> {
    let address = SocketAddr::new(host.parse().map_err(io::Error::other)?, PORT);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.write_all(format!("{command}\n").as_bytes())?;
    let words = stream.try_clone()?;
    thread::spawn(move || {
        copy(io::stdin().lock(), &words);
        let _ = words.shutdown(std::net::Shutdown::Write);
    });
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head)?;
        let [kind, a, b, c, d] = head;
        let mut bytes = vec![0; u32::from_be_bytes([a, b, c, d]) as usize];
        stream.read_exact(&mut bytes)?;
        match (kind, &bytes[..]) {
            (OUTPUT, bytes) => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush())?,
            (ERRORS, bytes) => io::stderr().write_all(bytes)?,
            (_, code) => return Ok(ExitCode::from(code.first().copied().unwrap_or(1))),
        }
    }
}
