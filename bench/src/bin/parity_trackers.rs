//! Logs values by the TensorBoard tracker: our half of `cargo xtask parity trackers`.
//!
//! `parity/trackers.py` does the same with Python Accelerate, from the same cases.

use std::fs;
use std::path::PathBuf;

use accelerate::tracking::{InitTrackersOptions, LogOptions, Value, Values};
use accelerate::{Accelerator, ProjectConfiguration};
use anyhow::Result;
use clap::Parser;
use serde::Deserialize;
use serde_json::Map;

/// Make a project in a folder for each case.
#[derive(Debug, Parser)]
struct Arguments {
    /// The file of cases
    cases: PathBuf,
    /// Where the projects go
    folder: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Case {
    project: String,
    config: Option<Map<String, serde_json::Value>>,
    init_kwargs: Map<String, serde_json::Value>,
    logs: Vec<Log>,
}

#[derive(Debug, Deserialize)]
struct Log {
    /// In an order, which a map of JSON has not.
    values: Vec<(String, serde_json::Value)>,
    step: Option<usize>,
    kwargs: Map<String, serde_json::Value>,
}

fn main() -> Result<()> {
    let Arguments { cases, folder } = Arguments::parse();
    let cases: Vec<Case> = serde_json::from_str(&fs::read_to_string(cases)?)?;
    for (number, Case { project, config, init_kwargs, logs }) in cases.into_iter().enumerate() {
        let project_dir = Some(folder.join(number.to_string()));
        let project_config = ProjectConfiguration { project_dir, ..Default::default() };
        let builder = Accelerator::builder().cpu(true).project_config(project_config).log_with("tensorboard");
        let accelerator = builder.build()?;
        let kwargs =
            |values: Map<String, serde_json::Value>| [("tensorboard".to_owned(), values.into_iter().collect())];
        let options = InitTrackersOptions {
            config: config.map(|config| config.into_iter().collect()),
            init_kwargs: kwargs(init_kwargs).into(),
        };
        accelerator.init_trackers(&project, options)?;
        for Log { values, step, kwargs: log_kwargs } in logs {
            let values: Values = values.into_iter().map(|(name, value)| (name, value_of(value))).collect();
            accelerator.log(values, LogOptions { step, log_kwargs: kwargs(log_kwargs).into() })?;
        }
        accelerator.end_training()?;
    }
    Ok(())
}

/// JSON has no numbers that are not finite: they are `float:nan` and `float:inf`.
fn value_of(value: serde_json::Value) -> Value {
    let number = value.as_str().and_then(|text| text.strip_prefix("float:")).and_then(|text| text.parse::<f64>().ok());
    number.map_or_else(|| value.into(), Value::Float)
}
