//! Event files that TensorBoard reads.

use super::append::{AppendFile, write_file};
use super::{GeneralTracker, TrackerRun, Value, as_i64, now};
use crate::error::{Result, TrackingError};
use crate::messages;
use accelerate_core::tracking::{
    Event, HPARAMS_FILE, Options, ScalarStyle, event_file_name, hparams, hparams_yaml, numbers, run_folder, scalar,
    scalars_folder, text, timestamp,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &str = "tensorboard";
/// Options of PyTorch's `SummaryWriter`.
const INIT_OPTIONS: &[&str] = &["comment", "purge_step", "max_queue", "flush_secs", "filename_suffix"];
/// Those for which there is nothing to do here.
const IDLE_OPTIONS: [&str; 3] = ["comment", "max_queue", "flush_secs"];
/// Options of its `add_scalar`.
const LOG_OPTIONS: &[&str] = &["walltime", "new_style", "double_precision"];

/// Writes what `tensorboard --logdir` shows: `log_with("tensorboard")` (`TensorBoardTracker` of the reference, `tracking.py`, over
/// PyTorch's `SummaryWriter`). Files lie where the reference puts them, and have the same bytes in them.
///
/// - Numbers are scalars, in float32; booleans are 1 and 0. Texts are texts. A map of numbers is one chart with several lines, each of
///   which has a folder of its own. Nothing ([`Value::None`]) and lists are left out, as in the reference.
/// - The configuration becomes a page of hyperparameters, and beside it `hparams.yml`.
/// - `init_kwargs` takes `purge_step` (what earlier files of the folder have from this step on is no longer shown: for a run
///   that goes on from a checkpoint) and `filename_suffix`. `max_queue` and `flush_secs` have no effect, because everything is with the
///   operating system when a call returns; nor has `comment`, as in the reference.
/// - `log_kwargs` takes `walltime` (seconds since 1970), `new_style` and `double_precision`.
///
/// A run that goes on in the same folder begins a new file there, and TensorBoard shows all of them as one run.
#[derive(Debug, Default)]
pub struct TensorBoardTracker {
    run: Option<Run>,
}

#[derive(Debug)]
struct Run {
    folder: PathBuf,
    suffix: String,
    /// By their folders. Lines of charts come as they are first drawn.
    files: BTreeMap<PathBuf, AppendFile>,
}

impl TensorBoardTracker {
    /// The folder of the event files (`SummaryWriter.get_logdir` of PyTorch), while a run goes on.
    pub fn logging_dir(&self) -> Option<&Path> {
        self.run.as_ref().map(|run| run.folder.as_path())
    }

    fn run(&mut self, call: &'static str) -> Result<&mut Run> {
        self.run.as_mut().ok_or_else(|| TrackingError::NotStarted { call }.into())
    }
}

impl Run {
    fn append(&mut self, folder: &Path, records: &[u8]) -> Result<()> {
        if let Some(file) = self.files.get_mut(folder) {
            return file.append(records);
        }
        let mut file = event_file(folder, &self.suffix)?;
        file.append(records)?;
        self.files.insert(folder.to_owned(), file);
        Ok(())
    }
}

/// A new file with its first record.
fn event_file(folder: &Path, suffix: &str) -> Result<AppendFile> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (wall_time, number) = (now(), NEXT.fetch_add(1, Ordering::Relaxed));
    let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
    let name = event_file_name(wall_time, &host, std::process::id(), number, suffix);
    let mut file = AppendFile::create(folder.join(name))?;
    file.append(&Event::file_version(wall_time))?;
    Ok(file)
}

impl GeneralTracker for TensorBoardTracker {
    fn name(&self) -> &str {
        NAME
    }

    fn requires_logging_directory(&self) -> bool {
        true
    }

    fn start(&mut self, run: &TrackerRun<'_>) -> Result<()> {
        let options = Options::new(NAME, INIT_OPTIONS, run.init_kwargs)?;
        for option in IDLE_OPTIONS.into_iter().filter(|option| options.has(option)) {
            messages::warning!(
                "the option {option} of the tracker \"tensorboard\" has no effect: nothing is held back"
            );
        }
        let purge_step = options.integer("purge_step")?;
        let suffix = options.part_of_file_name("filename_suffix")?.unwrap_or_default().to_owned();
        let folder = run_folder(run.logging_dir()?, run.project_name)?;
        let mut file = event_file(&folder, &suffix)?;
        if let Some(step) = purge_step {
            file.append(&Event::session_start(now(), step))?;
        }
        self.run = Some(Run { files: BTreeMap::from([(folder.clone(), file)]), folder, suffix });
        Ok(())
    }

    /// Two folders named by the time, one for the page and one for the file, are what the reference makes.
    fn store_init_configuration(&mut self, values: &[(String, Value)]) -> Result<()> {
        let Run { folder, suffix: _, files: _ } = self.run("store_init_configuration")?;
        let summaries = hparams(values)?;
        let wall_time = now();
        let record = |summary| Event { wall_time, step: None, summary }.record();
        let file = &mut event_file(&folder.join(timestamp(wall_time)), "")?;
        file.append(&summaries.map(record).concat())?;
        file.sync()?;
        write_file(&folder.join(timestamp(now())).join(HPARAMS_FILE), &hparams_yaml(values))
    }

    fn log(&mut self, values: &[(String, Value)], step: Option<usize>, kwargs: &[(String, Value)]) -> Result<()> {
        let options = Options::new(NAME, LOG_OPTIONS, kwargs)?;
        let style = ScalarStyle {
            new_style: options.boolean("new_style")?.unwrap_or_default(),
            double_precision: options.boolean("double_precision")?.unwrap_or_default(),
        };
        let wall_time = options.number("walltime")?.unwrap_or_else(now);
        let record = |summary| Event { wall_time, step: as_i64(step), summary }.record();
        let run = self.run("log")?;
        // All is known to be right before anything is written.
        let mut records: Vec<(PathBuf, Vec<u8>)> = vec![(run.folder.clone(), Vec::new())];
        for (name, value) in values {
            match value {
                Value::Text(words) => records[0].1.extend(record(text(name, words))),
                Value::Map(lines) => {
                    for (tag, number) in numbers(name, lines)? {
                        let line = record(scalar(name, number, ScalarStyle::default()));
                        records.push((scalars_folder(&run.folder, name, &tag)?, line));
                    }
                }
                value => {
                    if let Some(number) = value.number() {
                        records[0].1.extend(record(scalar(name, number, style)));
                    }
                }
            }
        }
        records
            .iter()
            .filter(|(_, records)| !records.is_empty())
            .try_for_each(|(folder, records)| run.append(folder, records))
    }

    fn finish(&mut self) -> Result<()> {
        self.run.take().map_or(Ok(()), |run| run.files.values().try_for_each(AppendFile::sync))
    }
}
