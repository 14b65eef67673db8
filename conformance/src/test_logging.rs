//! `tests/test_logging.py`: which processes say what, and in which order. `tests/logging.rs` reads what they have written.

use accelerate::logging::{LogLevel, LogOptions, get_logger};
use accelerate::{Accelerator, DistributedDataParallelKwargs};
use anyhow::Result;
use std::fmt;
use tracing::field::{Field, Visit};
use tracing::span;

const ROUNDS: usize = 5;

/// Everything that a program may log, and one setting without effect, of which the library warns.
pub(crate) fn run() -> Result<()> {
    let kwargs = DistributedDataParallelKwargs { check_reduction: Some(true), ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).kwargs_handler(kwargs).build()?;
    let logger = get_logger(accelerator.state(), "script", None);
    logger.debug("a debug message");
    logger.info("an info");
    for _ in 0..2 {
        logger.warning_once("once");
    }
    logger.error("an error");
    logger.critical("a critical error");
    accelerator.wait_for_everyone()?;
    let options = LogOptions { main_process_only: false, in_order: true };
    // Several rounds, because processes may come in the right order by chance.
    for round in 0..ROUNDS {
        let message = format_args!("round {round}, process {}", accelerator.process_index());
        logger.log(LogLevel::Warning, message, options)?;
    }
    let strict = get_logger(accelerator.state(), "strict", LogLevel::Error);
    strict.warning("not said");
    strict.log(LogLevel::Error, "said", LogOptions { main_process_only: true, in_order: true })?;
    Ok(())
}

/// The same in a program with a subscriber.
pub(crate) fn run_with_subscriber() -> Result<()> {
    tracing::subscriber::set_global_default(Lines)?;
    run()
}

/// Writes each event in one line.
struct Lines;

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("accelerate")
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        eprintln!("{} {}{}", event.metadata().level(), event.metadata().target(), fields.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 = format!("{} {}={value:?}", self.0, field.name());
    }
}
