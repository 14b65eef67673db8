//! `cargo xtask parity trackers`: event files of both sides, read by TensorBoard.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

#[derive(Debug, Args)]
pub(super) struct Trackers {}

/// What both programs log; each case is a project of its own.
fn cases() -> Value {
    let log = |step: Value, values: Value, kwargs: Value| json!({"step": step, "values": values, "kwargs": kwargs});
    let case = |project: &str, config: Value, init_kwargs: Value, logs: Vec<Value>| json!({"project": project, "config": config, "init_kwargs": init_kwargs, "logs": logs});
    let values = json!([["total_loss", 0.1], ["iteration", 1], ["my_text", "some_value"]]);
    let config =
        json!({"num_iterations": 12, "learning_rate": 1e-2, "some_boolean": false, "some_string": "some_value"});
    let losses = (0..50).map(|step| log(json!(step), json!([["loss", 1.0 / f64::from(step + 1)]]), json!({})));
    let edges = json!([
        ["nan", "float:nan"],
        ["inf", "float:inf"],
        ["minus", "float:-inf"],
        ["zero", 0.0],
        ["yes", true],
        ["no", false],
        ["large", 1e300],
        ["tiny", -1e-50],
        ["int", 123_456_789],
        ["nothing", null],
        ["a/b c", 2.5],
        ["grün", "mehr\nals eine Zeile, ✓"],
        ["empty", ""]
    ]);
    let map = |loss: f64| json!([["loss/all", {"dev": loss, "train": 2}], ["plain", 1]]);
    json!([
        case("test_project_with_config", config, json!({}), vec![]),
        case("test_project_with_log", Value::Null, json!({}), vec![log(json!(0), values.clone(), json!({}))]),
        case("without_step", Value::Null, json!({}), vec![log(Value::Null, values, json!({}))]),
        case("team/losses", json!({"none": null, "one": 1}), json!({}), losses.collect()),
        case("edges", json!({}), json!({}), vec![log(json!(1_000_000_007), edges, json!({}))]),
        case(
            "maps",
            Value::Null,
            json!({}),
            vec![log(json!(0), map(0.5), json!({})), log(json!(1), map(0.25), json!({})),]
        ),
        case(
            "options",
            Value::Null,
            json!({"purge_step": 7, "filename_suffix": ".again"}),
            vec![
                log(json!(7), json!([["loss", 0.1]]), json!({"new_style": true})),
                log(
                    json!(8),
                    json!([["loss", 0.1]]),
                    json!({"new_style": true, "double_precision": true, "walltime": 5.5})
                ),
            ]
        ),
    ])
}

pub(super) fn run(_: &Trackers) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::with_tensorboard()?;
    ranks::build()?;
    println!("reference: {}", environment.versions);
    let work = paths::target_folder().join("parity/trackers");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("could not remove {}", work.display()))?;
    }
    fs::create_dir_all(&work)?;
    let cases = cases();
    let cases_file = work.join("cases.json");
    fs::write(&cases_file, cases.to_string())?;
    let [theirs, ours] = ["theirs", "ours"].map(|side| work.join(side));
    process::read(script(&environment, "write").arg(&cases_file).arg(&theirs))?;
    process::read(std::process::Command::new(paths::release_binary("parity_trackers")).arg(&cases_file).arg(&ours))?;

    let mut num_different = 0;
    for (number, case) in cases.as_array().into_iter().flatten().enumerate() {
        let read = |side: &Path| -> Result<Value> {
            let folder: PathBuf = side.join(number.to_string());
            let printed = process::read(script(&environment, "read").arg(folder))?;
            serde_json::from_str(&printed).context("parity/trackers.py printed something else than JSON")
        };
        let (theirs, ours) = (read(&theirs)?, read(&ours)?);
        let is_equal = theirs == ours;
        num_different += usize::from(!is_equal);
        println!("parity=trackers case={} {}", case["project"], if is_equal { "equal" } else { "DIFFERENT" });
        if !is_equal {
            println!("  theirs: {theirs}\n  ours:   {ours}");
        }
    }
    if num_different > 0 {
        bail!("{num_different} projects are not what Python writes");
    }
    Ok(())
}

fn script(environment: &Environment, what: &str) -> std::process::Command {
    let mut command = environment.command();
    command.arg(paths::repository_root().join("parity/trackers.py")).arg(what);
    command
}
