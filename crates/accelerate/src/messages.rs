//! What the crate says while it works: to the program's subscriber of `tracing`, or where there is none to standard error.
//!
//! Python's logging shows warnings to who has asked for nothing, so a program without a subscriber sees them here, too. No
//! subscriber is installed for that: there can be only one, and the program may install its own later.
//!
//! A process has one standard error, so what is written there is decided once for a process, too: by the level that was said
//! last, and by the rank that a launcher has given the process.

use accelerate_core::names::LogLevel;
use anstyle::{AnsiColor, Style};
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

static LOG_LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Warning as u8);

static RANK: AtomicUsize = AtomicUsize::new(ALONE);

/// In place of a rank, for a process without others.
const ALONE: usize = usize::MAX;

/// From now on, messages of at least this level are written, if one is named.
pub(crate) fn set_log_level(log_level: Option<LogLevel>) {
    if let Some(log_level) = log_level {
        LOG_LEVEL.store(log_level as u8, Ordering::Relaxed);
    }
}

/// The least level that is written.
pub(crate) fn log_level() -> LogLevel {
    let number = usize::from(LOG_LEVEL.load(Ordering::Relaxed));
    LogLevel::ALL.get(number).copied().unwrap_or(LogLevel::Warning)
}

/// This process is one of several.
pub(crate) fn set_rank(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Is there a subscriber? Then it gets everything, and decides.
pub(crate) fn has_subscriber() -> bool {
    tracing::dispatcher::has_been_set()
}

/// Which processes write a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Writers {
    /// What holds for the run is said once.
    MainProcess,
    /// What holds for one process is said by that one.
    EachProcess,
}

impl Writers {
    fn include(self, rank: Option<usize>) -> bool {
        self == Self::EachProcess || rank.is_none_or(|rank| rank == 0)
    }
}

/// A message as it is written to standard error.
pub(crate) struct Message<'a> {
    pub(crate) log_level: LogLevel,
    /// Who says it.
    pub(crate) name: &'a str,
    /// The process that says it, where it is not for all that the main process speaks.
    pub(crate) rank: Option<usize>,
    pub(crate) text: &'a dyn fmt::Display,
}

impl Message<'_> {
    pub(crate) fn write(&self) {
        let mut stderr = std::io::stderr();
        let has_colour = anstream::AutoStream::choice(&stderr) != anstream::ColorChoice::Never;
        // In one piece, so that lines of several processes do not mix. Where nobody reads it, nobody misses it.
        let _ = stderr.write_all(self.line(has_colour).as_bytes());
    }

    fn line(&self, has_colour: bool) -> String {
        let Self { log_level, name, rank, text } = self;
        let style = if has_colour { style(*log_level) } else { Style::new() };
        let rank = rank.map(|rank| format!("rank {rank}: ")).unwrap_or_default();
        format!("{name}: {style}{log_level}:{style:#} {rank}{text}\n")
    }
}

fn style(log_level: LogLevel) -> Style {
    match log_level {
        LogLevel::Debug | LogLevel::Info => Style::new(),
        LogLevel::Warning => Style::new().bold().fg_color(Some(AnsiColor::Yellow.into())),
        LogLevel::Error | LogLevel::Critical => Style::new().bold().fg_color(Some(AnsiColor::Red.into())),
    }
}

/// Writes a message of the crate where nobody subscribes.
pub(crate) fn write(log_level: LogLevel, writers: Writers, text: fmt::Arguments<'_>) {
    let rank = Some(RANK.load(Ordering::Relaxed)).filter(|rank| *rank != ALONE);
    if self::log_level() <= log_level && writers.include(rank) {
        let rank = rank.filter(|_| writers == Writers::EachProcess);
        Message { log_level, name: "accelerate", rank, text: &text }.write();
    }
}

/// Says that standard output cannot be written, the first time in this process.
pub(crate) fn warn_once_of_lost_output(error: &std::io::Error) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    if !IS_TOLD.swap(true, Ordering::Relaxed) {
        crate::messages::warning_here!("standard output cannot be written ({error}); the program goes on without it");
    }
}

/// One message: the event of `tracing`, or else the line.
macro_rules! message {
    ($event:ident, $log_level:ident, $writers:ident, $($text:tt)+) => {
        if $crate::messages::has_subscriber() {
            tracing::$event!($($text)+);
        } else {
            let (log_level, writers) =
                (accelerate_core::names::LogLevel::$log_level, $crate::messages::Writers::$writers);
            $crate::messages::write(log_level, writers, format_args!($($text)+));
        }
    };
}
pub(crate) use message;

/// What helps to find out why something is as it is.
macro_rules! debug {
    ($($text:tt)+) => { $crate::messages::message!(debug, Debug, MainProcess, $($text)+) };
}
pub(crate) use debug;

/// What happens.
macro_rules! info {
    ($($text:tt)+) => { $crate::messages::message!(info, Info, MainProcess, $($text)+) };
}
pub(crate) use info;

/// What is likely a mistake, the same one on all processes.
macro_rules! warning {
    ($($text:tt)+) => { $crate::messages::message!(warn, Warning, MainProcess, $($text)+) };
}
pub(crate) use warning;

/// What is likely a mistake on this process, and not on all.
macro_rules! warning_here {
    ($($text:tt)+) => { $crate::messages::message!(warn, Warning, EachProcess, $($text)+) };
}
pub(crate) use warning_here;

/// What went wrong on this process and could not be returned.
macro_rules! error {
    ($($text:tt)+) => { $crate::messages::message!(error, Error, EachProcess, $($text)+) };
}
pub(crate) use error;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_with_name_level_and_rank() {
        let line = |log_level, rank, has_colour| {
            Message { log_level, name: "accelerate", rank, text: &"a text" }.line(has_colour)
        };
        for (log_level, rank, has_colour, wanted) in [
            (LogLevel::Warning, None, false, "accelerate: warning: a text\n"),
            (LogLevel::Error, Some(3), false, "accelerate: error: rank 3: a text\n"),
            (LogLevel::Warning, None, true, "accelerate: \u{1b}[1m\u{1b}[33mwarning:\u{1b}[0m a text\n"),
            (LogLevel::Critical, None, true, "accelerate: \u{1b}[1m\u{1b}[31mcritical:\u{1b}[0m a text\n"),
            (LogLevel::Info, None, true, "accelerate: info: a text\n"),
        ] {
            assert_eq!(line(log_level, rank, has_colour), wanted);
        }
    }

    #[test]
    fn the_main_process_speaks_for_all_and_each_for_itself() {
        for (writers, rank, wanted) in [
            (Writers::MainProcess, None, true),
            (Writers::MainProcess, Some(0), true),
            (Writers::MainProcess, Some(1), false),
            (Writers::EachProcess, None, true),
            (Writers::EachProcess, Some(1), true),
        ] {
            assert_eq!(writers.include(rank), wanted, "{writers:?} {rank:?}");
        }
    }

    #[test]
    fn the_level_is_the_one_that_was_said_last() {
        assert_eq!(log_level(), LogLevel::Warning);
        for &level in LogLevel::ALL {
            set_log_level(Some(level));
            set_log_level(None);
            assert_eq!(log_level(), level);
        }
        set_log_level(Some(LogLevel::Warning));
    }
}
