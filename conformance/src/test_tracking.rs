//! `tests/test_tracking.py`: TensorBoard's files and trackers of the program's own. Those of services are refused by name.

use accelerate::tch::Tensor;
use accelerate::tracking::{GeneralTracker, LoggerType, TrackerRun, Value, Values};
use accelerate::{Accelerator, AcceleratorBuilder, Error, ProjectConfiguration, Result, main_println, values};
use anyhow::{Context, ensure};
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn run(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("test_tracking needs a --folder that all ranks share")?;
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_project_dir(&accelerator, folder)?;
    test_project_dir_with_config(&accelerator, folder)?;
    test_services_are_refused(&accelerator, folder)?;
    test_init_trackers(&accelerator, &folder.join("init_trackers"))?;
    test_log(&accelerator, &folder.join("log"))?;
    test_log_with_tensor(&accelerator, &folder.join("log_with_tensor"))?;
    custom_tracker_init_trackers(&accelerator, &folder.join("custom_init"))?;
    custom_tracker_log(&accelerator, &folder.join("custom_log"))?;
    every_process_has_its_own(&accelerator, &folder.join("every_process"))?;
    main_println!(accelerator, "test_tracking: all checks passed");
    Ok(())
}

fn with_tensorboard(accelerator: &Accelerator, folder: &Path) -> Result<Accelerator> {
    let project_dir = Some(folder.to_owned());
    let config = ProjectConfiguration { project_dir, ..Default::default() };
    Accelerator::builder().project_config(config).log_with("tensorboard").build_from(accelerator)
}

fn config() -> Values {
    values! { "num_iterations" => 12, "learning_rate" => 1e-2, "some_boolean" => false, "some_string" => "some_value" }
}

fn logged() -> Values {
    values! { "total_loss" => 0.1, "iteration" => 1, "my_text" => "some_value" }
}

fn test_project_dir(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let error = refused(Accelerator::builder().log_with("tensorboard"), accelerator)?;
    let wanted = "logging with \"tensorboard\" requires a logging_dir";
    ensure!(error.is_config() && error.to_string().contains(wanted), "{error}");
    with_tensorboard(accelerator, folder)?;
    Ok(())
}

fn test_project_dir_with_config(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let project_dir = Some(folder.to_owned());
    let config = ProjectConfiguration { total_limit: Some(30), project_dir, ..Default::default() };
    Accelerator::builder().project_config(config).log_with("tensorboard").build_from(accelerator)?;
    Ok(())
}

fn test_services_are_refused(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let project_dir = Some(folder.to_owned());
    let config = ProjectConfiguration { project_dir, ..Default::default() };
    for name in ["wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio", "nothing"] {
        let builder = Accelerator::builder().project_config(config.clone()).log_with(name);
        let error = refused(builder, accelerator)?;
        ensure!(error.is_config() && error.to_string().contains(name), "{name}: {error}");
    }
    for log_with in [LoggerType::All, LoggerType::TensorBoard] {
        Accelerator::builder().project_config(config.clone()).log_with(log_with).build_from(accelerator)?;
    }
    Ok(())
}

fn test_init_trackers(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracked = with_tensorboard(accelerator, folder)?;
    tracked.init_trackers("test_project_with_config", config())?;
    tracked.end_training()?;
    let files = files_below(&folder.join("test_project_with_config"))?;
    let yaml = only(&files, |name| name == "hparams.yml")?;
    let wanted = "learning_rate: 0.01\nnum_iterations: 12\nsome_boolean: false\nsome_string: some_value\n";
    ensure!(fs::read_to_string(yaml)? == wanted);
    // One of the run itself and one of its hyperparameters: the main process alone has written.
    ensure!(files.len() == 3, "{files:?}");
    Ok(())
}

fn test_log(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracked = with_tensorboard(accelerator, folder)?;
    tracked.init_trackers("test_project_with_log", None)?;
    tracked.log(logged(), 0)?;
    tracked.end_training()?;
    let files = files_below(&folder.join("test_project_with_log"))?;
    let file = only(&files, |name| name.starts_with("events.out.tfevents."))?;
    let bytes = fs::read(file)?;
    for name in ["total_loss", "iteration", "my_text/text_summary", "some_value"] {
        ensure!(contains(&bytes, name.as_bytes()), "{name} is not in {}", file.display());
    }
    Ok(())
}

fn test_log_with_tensor(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracked = with_tensorboard(accelerator, folder)?;
    tracked.init_trackers("test_project_with_log", None)?;
    tracked.log([("tensor", Tensor::from(1i64))], 0)?;
    let several = tracked.log([("tensor", Tensor::from_slice(&[1f32, 2.0]))], 0);
    // Only where it is logged it is read.
    ensure!(several.is_err_and(|error| error.is_tracking()) == tracked.is_main_process());
    tracked.end_training()?;
    let files = files_below(&folder.join("test_project_with_log"))?;
    let file = only(&files, |name| name.starts_with("events.out.tfevents."))?;
    // `Summary.Value` with its tag and its number.
    let value = [b"\x0a\x06tensor\x15".as_slice(), &1f32.to_le_bytes()].concat();
    ensure!(contains(&fs::read(file)?, &value), "the converted tensor is not in the file");
    Ok(())
}

/// Writes a table, one row for each call (`MyCustomTracker` of the reference).
struct MyCustomTracker {
    path: PathBuf,
    main_process_only: bool,
    rows: Vec<String>,
}

const COLUMNS: [&str; 7] =
    ["total_loss", "iteration", "my_text", "learning_rate", "num_iterations", "some_boolean", "some_string"];

impl MyCustomTracker {
    fn new(folder: &Path) -> Self {
        Self { path: folder.join("log.csv"), main_process_only: true, rows: Vec::new() }
    }

    fn write(&mut self, values: &[(String, Value)]) {
        let cell = |column: &&str| match values.iter().find(|(name, _)| name == column) {
            Some((_, Value::Int(value))) => value.to_string(),
            Some((_, Value::Float(value))) => value.to_string(),
            Some((_, Value::Bool(value))) => value.to_string(),
            Some((_, Value::Text(value))) => value.clone(),
            _ => String::new(),
        };
        self.rows.push(COLUMNS.iter().map(cell).collect::<Vec<_>>().join(","));
    }
}

impl GeneralTracker for MyCustomTracker {
    fn name(&self) -> &str {
        "my_custom_tracker"
    }

    fn main_process_only(&self) -> bool {
        self.main_process_only
    }

    fn start(&mut self, run: &TrackerRun<'_>) -> Result<()> {
        if !self.main_process_only {
            self.path = self.path.with_extension(format!("{}.csv", run.process_index));
        }
        self.rows.push(COLUMNS.join(","));
        Ok(())
    }

    fn store_init_configuration(&mut self, values: &[(String, Value)]) -> Result<()> {
        self.write(values);
        Ok(())
    }

    fn log(&mut self, values: &[(String, Value)], _: Option<usize>, _: &[(String, Value)]) -> Result<()> {
        self.write(values);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(Error::other)?;
        fs::write(&self.path, self.rows.join("\n")).map_err(Error::other)
    }
}

fn custom_tracker_init_trackers(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracked = Accelerator::builder().log_with(MyCustomTracker::new(folder)).build_from(accelerator)?;
    tracked.init_trackers("Some name", config())?;
    tracked.end_training()?;
    ensure!(
        fs::read_to_string(folder.join("log.csv"))? == format!("{}\n,,,0.01,12,false,some_value", COLUMNS.join(","))
    );
    Ok(())
}

fn custom_tracker_log(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracked = Accelerator::builder().log_with(MyCustomTracker::new(folder)).build_from(accelerator)?;
    tracked.init_trackers("Some name", None)?;
    let handle = tracked.get_tracker("my_custom_tracker")?;
    ensure!(handle.is_some() == tracked.is_main_process() && tracked.trackers().len() == handle.iter().count());
    ensure!(tracked.get_tracker("tensorboard").is_err(), "another name is an error on every process");
    tracked.log(logged(), 0)?;
    tracked.end_training()?;
    ensure!(fs::read_to_string(folder.join("log.csv"))? == format!("{}\n0.1,1,some_value,,,,", COLUMNS.join(",")));
    Ok(())
}

/// Here `main_process_only` acts, which in the reference it does for trackers that are called by hand.
fn every_process_has_its_own(accelerator: &Accelerator, folder: &Path) -> anyhow::Result<()> {
    let tracker = MyCustomTracker { main_process_only: false, ..MyCustomTracker::new(folder) };
    let tracked = Accelerator::builder().log_with(tracker).build_from(accelerator)?;
    tracked.init_trackers("Some name", None)?;
    tracked.log([("iteration", tracked.process_index())], None)?;
    tracked.end_training()?;
    for rank in 0..tracked.num_processes() {
        let text = fs::read_to_string(folder.join(format!("log.{rank}.csv")))?;
        ensure!(text == format!("{}\n,{rank},,,,,", COLUMNS.join(",")), "{text}");
    }
    Ok(())
}

fn refused(builder: AcceleratorBuilder, accelerator: &Accelerator) -> anyhow::Result<Error> {
    builder.build_from(accelerator).err().context("it should have been refused")
}

fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        match path.is_dir() {
            true => files.extend(files_below(&path)?),
            false => files.push(path),
        }
    }
    Ok(files)
}

/// The one file that is called so.
fn only(files: &[PathBuf], is_called: impl Fn(&str) -> bool) -> anyhow::Result<&PathBuf> {
    let name = |path: &&PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(&is_called);
    match files.iter().filter(name).collect::<Vec<_>>().as_slice() {
        [file] => Ok(file),
        others => anyhow::bail!("{} of {files:?}", others.len()),
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}
