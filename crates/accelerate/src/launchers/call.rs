//! What a launching process and its workers tell each other: which function, its argument, and its result.
//!
//! Both are files in memory that have no name. A worker opens them through the launcher's descriptors, which the system allows to
//! the same user only, and they are gone with the launcher. A variable says which descriptors of which process; it counts for
//! children of that process, and not for programs that a worker starts, although they inherit it.

use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use rustix::process::{Pid, getpid, getppid};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub(super) const VARIABLE: &str = "ACCELERATE_WORKER_CALL";
/// What `/proc` shows of the files.
const FILE_NAME: &str = "accelerate-call";

/// The launcher's side.
pub(super) struct CallFiles {
    call: File,
    /// One for each rank of this machine.
    results: Vec<File>,
}

impl CallFiles {
    pub(super) fn make(name: &str, args: &[u8], num_results: usize) -> io::Result<Self> {
        let memory = || Ok::<_, io::Error>(File::from(memfd_create(FILE_NAME, MemfdFlags::CLOEXEC)?));
        let mut call = memory()?;
        call.write_all(name.as_bytes())?;
        call.write_all(b"\n")?;
        call.write_all(args)?;
        Ok(Self { call, results: (0..num_results).map(|_| memory()).collect::<io::Result<_>>()? })
    }

    /// The value of [`VARIABLE`].
    pub(super) fn variable(&self) -> String {
        let results: Vec<_> = self.results.iter().map(|file| file.as_raw_fd().to_string()).collect();
        format!("{}:{}:{}", getpid().as_raw_nonzero(), self.call.as_raw_fd(), results.join(","))
    }

    /// What the process with this local rank has returned in an attempt; `None` if it has not. It may have in one before.
    pub(super) fn result(&self, local_rank: usize, attempt: usize) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        if let Some(mut file) = self.results.get(local_rank) {
            file.rewind()?;
            file.read_to_end(&mut bytes)?;
        }
        Ok(bytes.strip_prefix(head(attempt).as_bytes()).map(<[u8]>::to_vec))
    }
}

/// What stands before a result: how often the processes had been started before.
fn head(attempt: usize) -> String {
    format!("{attempt}\n")
}

/// The worker's side.
#[derive(Debug, PartialEq)]
pub(super) struct Call {
    launcher: Pid,
    call: u32,
    results: Vec<u32>,
}

/// Was this process started to run a function?
pub(super) fn is_worker_process() -> bool {
    Call::inherited().is_some_and(|call| call.is_for_this_process())
}

impl Call {
    /// What this process, or one that it comes from, was started for by a launcher.
    pub(super) fn inherited() -> Option<Self> {
        Self::read(&std::env::var(VARIABLE).ok()?)
    }

    /// Not for the launcher's child that has started this one.
    pub(super) fn is_for_this_process(&self) -> bool {
        getppid() == Some(self.launcher)
    }

    /// The launcher has ended. A process that it had just started would take itself for the program.
    pub(super) fn is_over(&self) -> bool {
        !Path::new(&self.path(self.call)).exists()
    }

    fn read(variable: &str) -> Option<Self> {
        let mut parts = variable.split(':');
        let (launcher, call, results) = (parts.next()?, parts.next()?, parts.next()?);
        let results = results.split(',').map(|number| number.parse().ok()).collect::<Option<Vec<_>>>()?;
        Some(Self { launcher: Pid::from_raw(launcher.parse().ok()?)?, call: call.parse().ok()?, results })
    }

    /// The name of the function, and its argument.
    pub(super) fn function(&self) -> io::Result<(String, Vec<u8>)> {
        let mut bytes = Vec::new();
        self.open(self.call, OpenOptions::new().read(true))?.read_to_end(&mut bytes)?;
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
        let args = bytes.split_off(end + 1);
        bytes.truncate(end);
        Ok((String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?, args))
    }

    /// Hands over the result of the process with this local rank in this attempt.
    pub(super) fn answer(&self, local_rank: usize, attempt: usize, result: &[u8]) -> io::Result<()> {
        let descriptor = self.results.get(local_rank).ok_or(io::ErrorKind::InvalidInput)?;
        let mut file = self.open(*descriptor, OpenOptions::new().write(true).truncate(true))?;
        file.write_all(&[head(attempt).as_bytes(), result].concat())
    }

    /// Opens nothing but what a launcher has made: a variable can say anything.
    fn open(&self, descriptor: u32, options: &mut OpenOptions) -> io::Result<File> {
        let path = self.path(descriptor);
        if fs::read_link(&path)?.as_os_str() != format!("/memfd:{FILE_NAME} (deleted)").as_str() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)
    }

    fn path(&self, descriptor: u32) -> String {
        format!("/proc/{}/fd/{descriptor}", self.launcher.as_raw_nonzero())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let files = CallFiles::make("program::train", b"a\nb", 2).unwrap();
        let call = Call::read(&files.variable()).unwrap();
        assert_eq!(call.function().unwrap(), ("program::train".to_owned(), b"a\nb".to_vec()));
        call.answer(1, 0, b"long result").unwrap();
        call.answer(1, 0, b"result").unwrap();
        assert_eq!((files.result(0, 0).unwrap(), files.result(1, 0).unwrap()), (None, Some(b"result".to_vec())));
        assert!(call.answer(2, 0, b"").is_err());
    }

    #[test]
    fn a_result_counts_in_its_own_attempt() {
        let files = CallFiles::make("program::train", b"", 1).unwrap();
        let call = Call::read(&files.variable()).unwrap();
        call.answer(0, 1, b"result").unwrap();
        let found: Vec<_> = [0, 1, 11].into_iter().map(|attempt| files.result(0, attempt).unwrap()).collect();
        assert_eq!(found, [None, Some(b"result".to_vec()), None]);
        // A process that was killed while it wrote has not returned.
        call.answer(0, 0, b"").unwrap();
        assert_eq!(files.result(0, 0).unwrap(), Some(Vec::new()));
    }

    #[test]
    fn files_that_no_launcher_has_made_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("precious");
        fs::write(&path, "precious").unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let zeros = File::open("/dev/zero").unwrap();
        let call = Call { launcher: getpid(), call: zeros.as_raw_fd() as u32, results: vec![file.as_raw_fd() as u32] };
        assert!(call.function().is_err() && call.answer(0, 0, b"result").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn only_children_of_the_launcher_are_called() {
        for (variable, is_call) in
            [("1:2:3", true), ("1:2:3,4", true), ("", false), ("1:2", false), ("0:2:3", false), ("1:x:3", false)]
        {
            assert_eq!(Call::read(variable).is_some(), is_call, "{variable}");
        }
    }
}
