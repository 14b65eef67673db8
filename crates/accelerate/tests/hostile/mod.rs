//! The bounds within which a reader has to deal with a file that somebody made to do harm: its message names the
//! file, is at most 2 KB long, and comes within 10 seconds of processor time and 200 MB of memory. A
//! reader that is not linear takes minutes; a busy machine doubles what is counted.

#![allow(dead_code, reason = "each test program uses its own part of it")]

use std::error::Error;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const LARGEST_MESSAGE_BYTES: usize = 2 * 1024;
const LONGEST_CPU_SECONDS: f64 = 10.0;
const LARGEST_GROWTH_BYTES: u64 = 200_000_000;
/// A reader that waits uses no processor time. It is over when this has passed.
const HUNG: Duration = Duration::from_secs(60);
/// The kernel counts processor time in hundredths of a second.
const TICKS_PER_SECOND: f64 = 100.0;

/// What a reader made of a hostile file, within the bounds.
#[derive(Debug)]
pub enum Outcome {
    /// It read the file.
    Read,
    /// It refused the file, with this message: the error and its causes.
    Refused(String),
}

/// Runs a reader over the file at `path`, and panics with the name of the case if the reader panics or leaves the
/// bounds, or if its message does not name the file. `valid_bytes` is the size of what a reader may rightly keep in
/// memory.
pub fn outcome<T, E: Error>(case: &str, path: &Path, valid_bytes: u64, read: impl FnOnce() -> Result<T, E>) -> Outcome {
    let over = end_if_hung(case);
    let memory = reset_peak_memory();
    let began = cpu_seconds();
    let result = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| panic!("{case}: the reader panicked"));
    let took = cpu_seconds() - began;
    let grew = peak_memory().saturating_sub(memory);
    drop(over);

    assert!(took <= LONGEST_CPU_SECONDS, "{case}: the reader computed for {took} s");
    let most = LARGEST_GROWTH_BYTES + valid_bytes;
    assert!(grew <= most, "{case}: the reader took {grew} bytes of memory, and {most} are allowed");
    let Err(error) = result else { return Outcome::Read };
    let message = with_causes(&error);
    let bytes = message.len();
    assert!(bytes <= LARGEST_MESSAGE_BYTES, "{case}: a message of {bytes} bytes: {:.300}", message);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    assert!(message.contains(&name), "{case}: the message does not name {name}: {message}");
    Outcome::Refused(message)
}

/// As [`outcome`], for a file that has to be refused with a message that has all of `parts`.
#[track_caller]
pub fn check_refused<T, E: Error>(
    case: &str,
    path: &Path,
    parts: &[&str],
    read: impl FnOnce() -> Result<T, E>,
) -> String {
    let Outcome::Refused(message) = outcome(case, path, 0, read) else { panic!("{case}: the file was read") };
    for part in parts {
        assert!(message.contains(part), "{case}: {message:?} lacks {part:?}");
    }
    message
}

fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Many errors already repeat their cause.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// Ends the process when the returned value is kept for too long.
fn end_if_hung(case: &str) -> mpsc::Sender<()> {
    let (over, ends) = mpsc::channel::<()>();
    let case = case.to_owned();
    thread::spawn(move || {
        if ends.recv_timeout(HUNG) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{case}: the reader hangs");
            std::process::abort();
        }
    });
    over
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("Linux tells about a process");
    // The second field is the program's name in parentheses, which may have spaces.
    let fields = stat.rsplit_once(')').expect("the name ends").1;
    let ticks: f64 = fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<f64>().unwrap_or(0.0)).sum();
    ticks / TICKS_PER_SECOND
}

/// Begins to measure the peak anew, and returns the memory in use.
fn reset_peak_memory() -> u64 {
    fs::write("/proc/self/clear_refs", "5").expect("a process may reset its own peak");
    status("VmRSS:")
}

fn peak_memory() -> u64 {
    status("VmHWM:")
}

fn status(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux tells about a process");
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the kernel writes this line");
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number of KiB") * 1024
}
