//! A terminal for the local main process, so that it draws its progress bar as it would without a launcher.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{
    LocalModes, OptionalActions, OutputModes, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize,
};

use crate::plan::{Terminal, TerminalSize};

/// A pseudo terminal: the rank writes to the far end, the launcher reads from the near end.
#[derive(Debug)]
pub(crate) struct RankTerminal {
    streams: Terminal,
    near: OwnedFd,
    far: Option<OwnedFd>,
}

impl RankTerminal {
    pub(crate) fn open(streams: Terminal) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let near = openpt(flags)?;
        unlockpt(&near)?;
        let far = ioctl_tiocgptpeer(&near, flags)?;
        let mut modes = tcgetattr(&far)?;
        // The real terminal translates line ends; doing it twice would change the bytes.
        modes.output_modes.remove(OutputModes::OPOST);
        modes.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&far, OptionalActions::Now, &modes)?;
        tcsetwinsize(&near, winsize(streams.size))?;
        Ok(Self { streams, near, far: Some(far) })
    }

    /// For each stream, whether it ends here.
    pub(crate) fn serves(&self) -> [bool; 2] {
        [self.streams.stdout, self.streams.stderr]
    }

    pub(crate) fn near_end(&self) -> io::Result<OwnedFd> {
        self.near.try_clone()
    }

    pub(crate) fn far_end(&self) -> io::Result<Stdio> {
        match &self.far {
            Some(far) => Ok(far.try_clone()?.into()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Only when nobody has it open any more does reading report the end.
    pub(crate) fn close_far_end(&mut self) {
        self.far = None;
    }

    /// Makes it as large as the real terminal is now.
    pub(crate) fn follow_size(&self) {
        if let Some(size) = TerminalSize::of_this_process() {
            // A bar that is drawn for the old width is ugly, not wrong.
            let _ = tcsetwinsize(&self.near, winsize(size));
        }
    }
}

fn winsize(size: TerminalSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl TerminalSize {
    /// The size of the terminal behind this process's standard error or output.
    pub(crate) fn of_this_process() -> Option<Self> {
        tcgetwinsize(rustix::stdio::stderr())
            .or_else(|_| tcgetwinsize(rustix::stdio::stdout()))
            .ok()
            .map(|size| Self { rows: size.ws_row, columns: size.ws_col })
    }
}
