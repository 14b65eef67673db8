//! Values of a run in one file, without a program that shows it.

use super::append::AppendFile;
use super::{GeneralTracker, TrackerRun, Value, as_i64, now};
use crate::error::{Result, TrackingError};
use crate::messages;
use accelerate_core::tracking::{JSON_LINES_FILE, Options, config_line, line, run_folder};

const NAME: &str = "jsonl";

/// Writes one JSON object for each call of [`Accelerator::log`](crate::Accelerator::log) into
/// `<logging_dir>/<project_name>/log.jsonl`: `log_with("jsonl")`. The reference has no such tracker.
///
/// `_timestamp` (seconds since 1970) and `_step`, where one was given, come first, then the values by their names, numbers in full
/// precision. The line with the configuration has it as `_config`. A number that is not finite is `"NaN"`, `"Infinity"` or
/// `"-Infinity"`, since JSON has none for it. `pandas.read_json(path, lines=True)` reads it.
///
/// Whatever was logged is with the operating system when the call returns, and on the disk when the tracker has finished. A run that
/// goes on appends. A last line that a machine's failure has cut short is left, with a warning, and the next one begins behind it.
#[derive(Debug, Default)]
pub struct JsonLinesTracker {
    file: Option<AppendFile>,
}

impl JsonLinesTracker {
    fn file(&mut self, call: &'static str) -> Result<&mut AppendFile> {
        self.file.as_mut().ok_or_else(|| TrackingError::NotStarted { call }.into())
    }
}

impl GeneralTracker for JsonLinesTracker {
    fn name(&self) -> &str {
        NAME
    }

    fn requires_logging_directory(&self) -> bool {
        true
    }

    fn start(&mut self, run: &TrackerRun<'_>) -> Result<()> {
        Options::new(NAME, &[], run.init_kwargs)?;
        let folder = run_folder(run.logging_dir()?, run.project_name)?;
        let mut file = AppendFile::open(folder.join(JSON_LINES_FILE))?;
        if file.last_byte()?.is_some_and(|last| last != b'\n') {
            messages::warning_here!(
                "the last line of {} is cut short, as by a machine that failed; it stays as it is, and new lines follow",
                file.path().display()
            );
            file.append(b"\n")?;
        }
        self.file = Some(file);
        Ok(())
    }

    fn store_init_configuration(&mut self, values: &[(String, Value)]) -> Result<()> {
        self.file("store_init_configuration")?.append(config_line(now(), values).as_bytes())
    }

    fn log(&mut self, values: &[(String, Value)], step: Option<usize>, kwargs: &[(String, Value)]) -> Result<()> {
        Options::new(NAME, &[], kwargs)?;
        let line = line(now(), as_i64(step), values)?;
        self.file("log")?.append(line.as_bytes())
    }

    fn finish(&mut self) -> Result<()> {
        self.file.take().map_or(Ok(()), |file| file.sync())
    }
}
