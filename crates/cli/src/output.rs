//! What the command prints: results on standard output, messages and errors on standard error. Every subcommand prints here.

use std::error::Error;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use accelerate_core::files::{in_one_line, printable};
use accelerate_launch::{write_patiently, write_within};
use anstyle::{AnsiColor, Style};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::stderr;

/// How long a reader may take before a command that has been told to stop ends without it.
const PATIENCE: Duration = Duration::from_secs(1);

/// A result did not reach whoever asked for it.
#[derive(Debug, thiserror::Error)]
#[error("the result cannot be written to standard output; free the disk that it goes to, or send it to another place")]
pub(crate) struct Unwritten {
    #[from]
    source: io::Error,
}

/// Prints a result byte by byte as it is: a program or a shell may read it.
///
/// # Errors
///
/// [`Unwritten`], but not where the reader has gone: `accelerate env | head -1` is no mistake.
pub(crate) fn print_result(text: &str) -> Result<(), Unwritten> {
    handed_over(&mut io::stdout().lock(), text)
}

/// The same for a result with colours in it, which only a terminal shows.
pub(crate) fn print_coloured(text: &str) -> Result<(), Unwritten> {
    handed_over(&mut anstream::stdout().lock(), text)
}

fn handed_over(out: &mut dyn Write, text: &str) -> Result<(), Unwritten> {
    match write_patiently(out, io::stdout(), text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Has the reader of the results gone?
pub(crate) fn is_reader_gone() -> bool {
    let stdout = io::stdout();
    let mut found = [PollFd::new(&stdout, PollFlags::empty())];
    // What cannot be found out is taken for no.
    poll(&mut found, Some(&Timespec::default())).is_ok() && found[0].revents().contains(PollFlags::ERR)
}

/// Prints `text`, which describes `error`, and then the chain of its causes. In colour at a terminal.
pub(crate) fn print_error(speaker: &str, error: &dyn Error, text: &str) {
    print_styled(&with_causes(speaker, error, text));
}

/// The same for a command that has been told to stop: it does not wait for a reader that takes nothing.
pub(crate) fn print_last_error(speaker: &str, error: &dyn Error, text: &str) {
    let text = with_causes(speaker, error, text) + "\n";
    let is_plain = anstream::AutoStream::choice(&io::stderr()) == anstream::ColorChoice::Never;
    let text = if is_plain { anstream::adapter::strip_str(&text).to_string() } else { text };
    // Where nobody reads it, nobody is left to tell.
    let _ = write_within(PATIENCE, stderr(), text.as_bytes());
}

fn with_causes(speaker: &str, error: &dyn Error, text: &str) -> String {
    let bad: Style = AnsiColor::Red.on_default().bold();
    let first = format!("{bad}{speaker}: error:{bad:#} {}", printable(text));
    let causes = std::iter::successors(error.source(), |&error| error.source());
    causes.fold(first, |text, cause| {
        let cause = printable(&cause.to_string());
        // An error may give its cause as its reason.
        if text.ends_with(&cause) { text } else { format!("{text}\n  caused by: {cause}") }
    })
}

/// Prints a message on standard error. What is in it of other people's texts cannot steer the terminal: control characters
/// other than the ends of lines are shown as such. A name gets into a message by [`ShownPath`](accelerate_core::files::ShownPath)
/// or [`in_one_line`](accelerate_core::files::in_one_line), so that it does not end a line either.
pub(crate) fn print_message(text: &str) {
    print_styled(&printable(text));
}

/// The same for a text with colours of our own in it.
pub(crate) fn print_styled(text: &str) {
    // Where nobody reads it, nobody is left to tell.
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// The words as one line that a shell takes apart again. What a terminal would obey, and bytes that are no UTF-8, are written
/// by numbers in `$'...'`, which bash and zsh read.
pub(crate) fn shell_command<'a>(words: impl Iterator<Item = &'a OsStr>) -> String {
    let quoted = |word: &OsStr| match word.to_str() {
        Some(text) if in_one_line(text) == text => {
            // Only a zero byte cannot be quoted, and no argument has one.
            shlex::try_quote(text).map_or_else(|_| text.to_owned(), |quoted| quoted.into_owned())
        }
        _ => {
            let byte = |&byte: &u8| match byte {
                b' '..=b'~' if byte != b'\'' && byte != b'\\' => char::from(byte).to_string(),
                _ => format!("\\x{byte:02x}"),
            };
            format!("$'{}'", word.as_bytes().iter().map(byte).collect::<String>())
        }
    };
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Takes some bytes, and then fails so; when it is flushed, too.
    struct Failing {
        num_left: usize,
        kind: io::ErrorKind,
    }

    impl Write for Failing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.num_left);
            self.num_left -= taken;
            if taken == 0 { Err(self.kind.into()) } else { Ok(taken) }
        }

        fn flush(&mut self) -> io::Result<()> {
            if self.num_left == 0 { Err(self.kind.into()) } else { Ok(()) }
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Caused {
        text: &'static str,
        source: io::Error,
    }

    #[rstest]
    #[case::said_already("it cannot be read: no luck", "me: error: it cannot be read: no luck")]
    #[case::not_said("it cannot be read", "me: error: it cannot be read\n  caused by: no luck")]
    fn a_cause_is_said_once(#[case] text: &'static str, #[case] wanted: &str) {
        let error = Caused { text, source: io::Error::other("no luck") };
        let said = with_causes("me", &error, &error.to_string());
        assert_eq!(anstream::adapter::strip_str(&said).to_string(), wanted);
    }

    #[rstest]
    #[case::enough_room(9, io::ErrorKind::StorageFull, true)]
    #[case::full_in_the_middle(2, io::ErrorKind::StorageFull, false)]
    #[case::full_when_flushed(5, io::ErrorKind::StorageFull, false)]
    #[case::nobody_reads(2, io::ErrorKind::BrokenPipe, true)]
    fn a_result_is_written_whole_or_told(#[case] num_left: usize, #[case] kind: io::ErrorKind, #[case] is_fine: bool) {
        let written = handed_over(&mut Failing { num_left, kind }, "hello");
        assert_eq!(written.is_ok(), is_fine, "{written:?}");
    }
}
