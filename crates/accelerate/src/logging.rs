//! Log messages of a program that runs in several processes (`accelerate.logging` of the reference, `logging.py`).
//!
//! Messages are events of the crate [`tracing`](https://docs.rs/tracing) where the program has set a subscriber, which then decides
//! what becomes of them. Otherwise those of at least the run's `log_level` (`ACCELERATE_LOG_LEVEL`,
//! [`AcceleratorBuilder::log_level`](crate::AcceleratorBuilder::log_level); default warning) are lines on standard error. The
//! library's own messages go the same way.

use crate::error::Result;
use crate::messages::{self, Message};
use crate::state::PartialState;
pub use accelerate_core::names::LogLevel;
use std::collections::HashSet;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// A logger for the processes of `state`, under a name that stands before each message; [`module_path!`] is a good one.
///
/// `log_level` is the least level that it passes on, to whomever. `None` leaves that to the subscriber of `tracing`, or where
/// there is none to the level of the run.
///
/// The reference asks for no state, because its own is global to the process.
///
/// ```
/// use accelerate::Accelerator;
/// use accelerate::logging::{LogLevel, get_logger};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let logger = get_logger(accelerator.state(), module_path!(), LogLevel::Info);
/// let loss = 0.25;
/// logger.info(format_args!("the loss is {loss}"));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn get_logger(
    state: &PartialState,
    name: impl Into<String>,
    log_level: impl Into<Option<LogLevel>>,
) -> MultiProcessAdapter {
    let (state, name, log_level) = (state.clone(), name.into(), log_level.into());
    MultiProcessAdapter { state, name, log_level, said: Mutex::default() }
}

/// Which processes log a message, and in which order.
///
/// ```
/// let options = accelerate::logging::LogOptions::default();
/// assert!(options.main_process_only && !options.in_order);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Only the main process logs it. Default true.
    pub main_process_only: bool,
    /// One process logs it after the other, by rank, and all wait for that. Default false. With `main_process_only` there is
    /// nothing to order, so nobody waits.
    pub in_order: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { main_process_only: true, in_order: false }
    }
}

/// A logger that knows of the other processes (`MultiProcessAdapter` of the reference, `logging.py`), made by [`get_logger`].
///
/// [`debug`](Self::debug), [`info`](Self::info), [`warning`](Self::warning), [`error`](Self::error) and
/// [`critical`](Self::critical) log on the main process, and may be called by any of them. [`log`](Self::log) takes
/// [`LogOptions`].
///
/// An event of `tracing` has the target `accelerate::logging`, the message, and the fields `logger` (the name) and `rank`.
/// `tracing` has no level above error, so critical messages are errors with a field `critical`.
#[derive(Debug)]
pub struct MultiProcessAdapter {
    state: PartialState,
    name: String,
    log_level: Option<LogLevel>,
    /// What [`warning_once`](Self::warning_once) has said.
    said: Mutex<HashSet<String>>,
}

impl MultiProcessAdapter {
    /// What helps to find mistakes. On the main process.
    pub fn debug(&self, message: impl Display) {
        self.log_on_main(LogLevel::Debug, &message);
    }

    /// What happens. On the main process.
    pub fn info(&self, message: impl Display) {
        self.log_on_main(LogLevel::Info, &message);
    }

    /// What is likely a mistake. On the main process.
    pub fn warning(&self, message: impl Display) {
        self.log_on_main(LogLevel::Warning, &message);
    }

    /// What went wrong. On the main process.
    pub fn error(&self, message: impl Display) {
        self.log_on_main(LogLevel::Error, &message);
    }

    /// What ends the program. On the main process.
    pub fn critical(&self, message: impl Display) {
        self.log_on_main(LogLevel::Critical, &message);
    }

    /// A warning on the main process that this logger gives once, however often the same text comes.
    pub fn warning_once(&self, message: impl Display) {
        let text = message.to_string();
        // A set that only grows: a panic elsewhere does not spoil it.
        if self.said.lock().unwrap_or_else(PoisonError::into_inner).insert(text.clone()) {
            self.warning(text);
        }
    }

    /// Logs a message as `options` say. Collective with `in_order` and without `main_process_only`, whatever the level: so
    /// processes with different levels do not wait for each other.
    ///
    /// ```
    /// use accelerate::logging::{LogLevel, LogOptions, get_logger};
    /// use accelerate::testing;
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     let logger = get_logger(accelerator.state(), "data", LogLevel::Info);
    ///     let rows = 10 * accelerator.process_index();
    ///     let options = LogOptions { main_process_only: false, in_order: true };
    ///     // data: info: rank 0: 0 rows
    ///     // data: info: rank 1: 10 rows
    ///     logger.log(LogLevel::Info, format_args!("{rows} rows"), options)
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// With `in_order`, a process that is gone or does not log: as of any collective.
    pub fn log(&self, log_level: LogLevel, message: impl Display, options: LogOptions) -> Result<()> {
        match options {
            LogOptions { main_process_only: true, .. } => self.log_on_main(log_level, &message),
            LogOptions { in_order: false, .. } => self.log_here(log_level, &message),
            LogOptions { in_order: true, .. } => {
                for rank in 0..self.state.num_processes() {
                    if rank == self.state.process_index() {
                        self.log_here(log_level, &message);
                    }
                    self.state.group().barrier()?;
                }
            }
        }
        Ok(())
    }

    /// Would a message of this level be passed on?
    pub fn is_enabled_for(&self, log_level: LogLevel) -> bool {
        match self.log_level {
            Some(least) => least <= log_level,
            None => messages::has_subscriber() || messages::log_level() <= log_level,
        }
    }

    fn log_on_main(&self, log_level: LogLevel, message: &dyn Display) {
        if self.state.is_main_process() {
            self.emit(log_level, None, message);
        }
    }

    fn log_here(&self, log_level: LogLevel, message: &dyn Display) {
        let rank = self.state.use_distributed().then(|| self.state.process_index());
        self.emit(log_level, rank, message);
    }

    /// `rank` is shown on standard error, where other processes may say the same.
    fn emit(&self, log_level: LogLevel, rank: Option<usize>, text: &dyn Display) {
        let logger = self.name.as_str();
        if !self.is_enabled_for(log_level) {
            return;
        }
        if !messages::has_subscriber() {
            return Message { log_level, name: logger, rank, text }.write();
        }
        let rank = self.state.process_index();
        match log_level {
            LogLevel::Debug => tracing::debug!(logger, rank, "{text}"),
            LogLevel::Info => tracing::info!(logger, rank, "{text}"),
            LogLevel::Warning => tracing::warn!(logger, rank, "{text}"),
            LogLevel::Error => tracing::error!(logger, rank, "{text}"),
            LogLevel::Critical => tracing::error!(logger, rank, critical = true, "{text}"),
        }
    }
}
