//! Writing without waiting: to a stream that waits for room, because other processes have it, too, and not all of them could bear
//! a stream that does not.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::{Errno, write};
use rustix::termios::isatty;

/// A pipe or socket that has room has room for this much (`PIPE_BUF` of Linux).
const PIECE_BYTES: usize = 4096;

const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A stream that takes what it has room for.
#[derive(Debug)]
pub(crate) struct Outlet {
    stream: BorrowedFd<'static>,
    /// The same stream, opened once more for this process alone, which does not wait.
    unshared: Option<OwnedFd>,
    /// How much is written at once.
    piece_bytes: usize,
}

impl Outlet {
    pub(crate) fn new(stream: BorrowedFd<'static>) -> Self {
        let kind = fstat(stream).map(|found| FileType::from_raw_mode(found.st_mode));
        let unshared = match kind {
            Ok(FileType::Fifo) => opened_again(stream),
            // One that says that it has room may still wait in the middle of a line.
            Ok(FileType::CharacterDevice) if isatty(stream) => opened_again(stream),
            _ => None,
        };
        let never_waits = unshared.is_some() || kind == Ok(FileType::RegularFile);
        Self { stream, unshared, piece_bytes: if never_waits { usize::MAX } else { PIECE_BYTES } }
    }

    pub(crate) fn stream(&self) -> BorrowedFd<'_> {
        self.unshared.as_ref().map_or(self.stream, AsFd::as_fd)
    }

    /// Writes what there is room for now, and says how much that was.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut num_written = 0;
        while num_written < bytes.len() && self.has_room(&NO_TIME)? {
            let rest = &bytes[num_written..];
            match write(self.stream(), &rest[..rest.len().min(self.piece_bytes)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => num_written += written,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(num_written)
    }

    pub(crate) fn wait_for_room(&self) -> io::Result<()> {
        match poll(&mut [PollFd::from_borrowed_fd(self.stream(), PollFlags::OUT)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Is there room, or will there be some within this time? Where nobody reads any more, writing tells.
    pub(crate) fn has_room(&self, patience: &Timespec) -> io::Result<bool> {
        let mut polled = [PollFd::from_borrowed_fd(self.stream(), PollFlags::OUT)];
        match poll(&mut polled, Some(patience)) {
            Ok(number) => Ok(number > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Not for a file, of which it would overwrite the beginning. It fails for a terminal of another user.
fn opened_again(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", stream.as_raw_fd());
    open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;

    /// Streams of tests live as long as the test program.
    fn leaked(stream: impl Into<OwnedFd>) -> BorrowedFd<'static> {
        let stream: &'static OwnedFd = Box::leak(Box::new(stream.into()));
        stream.as_fd()
    }

    #[test]
    fn a_pipe_takes_what_it_has_room_for_and_nobody_waits() {
        let (mut reader, writer) = io::pipe().unwrap();
        let outlet = Outlet::new(leaked(writer));
        let bytes = vec![b'x'; 1 << 20];
        let first = outlet.write(&bytes).unwrap();
        assert!(first > 0 && first < bytes.len(), "{first} bytes");
        assert_eq!(outlet.write(&bytes[first..]).unwrap(), 0);
        reader.read_exact(&mut vec![0; first]).unwrap();
        assert_eq!(outlet.write(&bytes[first..]).unwrap(), first);
        drop(reader);
        assert_eq!(outlet.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// A terminal whose screen nobody draws. Line ends become two characters.
    #[test]
    fn a_terminal_takes_what_it_has_room_for_and_nobody_waits() {
        use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let near = openpt(flags).unwrap();
        unlockpt(&near).unwrap();
        let outlet = Outlet::new(leaked(ioctl_tiocgptpeer(&near, flags).unwrap()));
        let bytes = b"line\n\n\n".repeat(1 << 16);
        let mut num_written = 0;
        while let written @ 1.. = outlet.write(&bytes[num_written..]).unwrap() {
            num_written += written;
        }
        assert!(num_written > 0 && num_written < bytes.len(), "{num_written} bytes");
    }

    #[test]
    fn a_file_takes_everything() {
        let file = tempfile::tempfile().unwrap();
        let bytes = vec![b'x'; 1 << 20];
        assert_eq!(Outlet::new(leaked(file)).write(&bytes).unwrap(), bytes.len());
    }
}
