//! Trackers: what is written, what a run that goes on does, and how failures are told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::tracking::{GeneralTracker, InitTrackersOptions, LogOptions, TensorBoardTracker, TrackerRun, Value};
use accelerate::{Accelerator, AcceleratorBuilder, Error, ProjectConfiguration, Result, tch::Tensor, testing, values};
use rstest::rstest;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

fn builder(folder: &Path) -> AcceleratorBuilder {
    let project_dir = Some(folder.to_owned());
    let logging_dir = Some(PathBuf::from("logs"));
    let config = ProjectConfiguration { project_dir, logging_dir, ..Default::default() };
    Accelerator::builder().cpu(true).project_config(config)
}

fn lines(folder: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(folder.join("logs/run/log.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn event_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    files
}

#[test]
fn every_kind_of_value_is_a_line() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).log_with("jsonl").build()?;
    accelerator.init_trackers("run", values! { "lr" => 1e-3, "name" => "bert", "layers" => None::<i64> })?;
    accelerator.log([("loss", &Tensor::from(0.5f32))], 7)?;
    accelerator.log(
        values! {
            "int" => 3_usize, "bool" => Tensor::from(true), "text" => "a\"b", "map" => [("p", 1.5), ("q", f64::INFINITY)],
            "nan" => f32::NAN, "one" => Tensor::from_slice(&[4i64]).set_requires_grad(false),
        },
        None,
    )?;
    accelerator.end_training()?;
    let mut lines = lines(folder.path());
    for line in &mut lines {
        assert!(line.as_object_mut().unwrap().remove("_timestamp").unwrap().as_f64().unwrap() > 1.6e9);
    }
    assert_eq!(
        lines,
        [
            serde_json::json!({"_config": {"lr": 1e-3, "name": "bert", "layers": null}}),
            serde_json::json!({"_step": 7, "loss": 0.5}),
            serde_json::json!({
                "int": 3, "bool": true, "text": "a\"b", "map": {"p": 1.5, "q": "Infinity"}, "nan": "NaN", "one": 4
            }),
        ]
    );
    Ok(())
}

#[test]
fn a_run_that_goes_on_adds_to_what_is_there() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    for step in 0..2 {
        let accelerator = builder(folder.path()).log_with("all").build()?;
        accelerator.init_trackers("run", None)?;
        accelerator.log([("loss", 0.5)], step)?;
        // The first run is not told that it ends.
        if step == 1 {
            accelerator.end_training()?;
        }
    }
    let steps: Vec<_> = lines(folder.path()).iter().map(|line| line["_step"].as_i64()).collect();
    assert_eq!(steps, [Some(0), Some(1)]);
    assert_eq!(event_files(&folder.path().join("logs/run")).len(), 3, "two of TensorBoard and one of lines");
    Ok(())
}

#[test]
fn a_torn_last_line_stays_by_itself() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logs/run/log.jsonl");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "{\"_step\":0}\n{\"_ste").unwrap();
    let accelerator = builder(folder.path()).log_with("jsonl").build()?;
    accelerator.init_trackers("run", None)?;
    accelerator.log([("loss", 0.5)], 1)?;
    accelerator.end_training()?;
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[..2], ["{\"_step\":0}", "{\"_ste"]);
    assert!(lines[2].ends_with("\"_step\":1,\"loss\":0.5}") && lines.len() == 3, "{text}");
    Ok(())
}

#[test]
fn a_full_disk_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logs/run/log.jsonl");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let accelerator = builder(folder.path()).log_with("all").build().unwrap();
    accelerator.init_trackers("run", None).unwrap();
    let error = accelerator.log([("loss", 0.5)], 1).unwrap_err();
    let text = error.to_string();
    assert!(error.is_tracking() && text.contains("\"jsonl\"") && text.contains("log.jsonl"), "{text}");
    assert!(text.contains("make room"), "{text}");
    let events = event_files(&folder.path().join("logs/run"))
        .into_iter()
        .find(|path| path.to_string_lossy().contains("tfevents"));
    let events = fs::read(events.unwrap()).unwrap();
    assert!(events.windows(4).any(|window| window == b"loss"), "the other tracker has it");
}

#[rstest]
#[case::a_file_in_its_place(|logs: &Path| fs::write(logs, "").unwrap(), "run", values!{}, "make the folder")]
#[case::outside(|_: &Path| (), "../run", values!{}, "project_name")]
#[case::option(|_: &Path| (), "run", values!{ "flush_sec" => 1 }, "has no option \"flush_sec\"")]
#[case::kind_of_option(|_: &Path| (), "run", values!{ "purge_step" => "x" }, "must be a whole number")]
fn what_cannot_start(
    #[case] prepare: fn(&Path),
    #[case] project: &str,
    #[case] options: accelerate::tracking::Values,
    #[case] words: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    prepare(&folder.path().join("logs"));
    let accelerator = builder(folder.path()).log_with("tensorboard").build().unwrap();
    let init_kwargs = [("tensorboard".to_owned(), options)].into();
    let error = accelerator.init_trackers(project, InitTrackersOptions { config: None, init_kwargs }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(words) && text.contains("tracker \"tensorboard\""), "{text}");
    assert!(accelerator.trackers().is_empty() && accelerator.log([("loss", 1)], 0).is_err());
}

#[test]
fn calls_that_come_at_the_wrong_time_are_errors() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).log_with("jsonl").build()?;
    let check = |result: Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert!(error.is_tracking() && error.to_string().contains(words), "{error}");
    };
    check(accelerator.log([("loss", 1)], 0), "log comes before init_trackers");
    check(accelerator.get_tracker("jsonl").map(drop), "get_tracker comes before init_trackers");
    check(accelerator.get_tracker("wandb").map(drop), "no tracker \"wandb\"; log_with has jsonl");
    accelerator.init_trackers("run", None)?;
    check(accelerator.init_trackers("other", None), "the project \"run\"");
    let log_kwargs = [("tensorboard".to_owned(), values! {})].into();
    check(accelerator.log([("loss", 1)], LogOptions { step: None, log_kwargs }), "log_kwargs is for the tracker");
    check(accelerator.log([("loss", Tensor::from_slice(&[1f32, 2.0]))], 0), "a tensor of shape [2]");
    assert!(accelerator.log([("_step", 1)], 0).unwrap_err().to_string().contains("_step"));
    accelerator.end_training()?;
    check(accelerator.log([("loss", 1)], 0), "log comes before init_trackers");
    accelerator.init_trackers("other", None)?;
    accelerator.end_training()?;
    let without = Accelerator::builder().cpu(true).build()?;
    without.init_trackers("run", None)?;
    without.log([("loss", 1)], 0)?;
    without.end_training()
}

#[test]
fn maps_have_folders_and_the_tracker_says_where() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).log_with(TensorBoardTracker::default()).build()?;
    accelerator.init_trackers("team/run", None)?;
    accelerator.log([("loss/all", [("train", 0.5), ("dev", 0.6)])], 0)?;
    accelerator.log([("loss/all", [("train", 0.4), ("dev", 0.5)])], 1)?;
    let error = accelerator.log([("loss", vec![("train".to_owned(), Value::from("x"))])], 1).unwrap_err();
    assert!(error.to_string().contains("loss.train is a text"), "{error}");
    let tracker = accelerator.get_tracker("tensorboard")?.unwrap();
    let logging_dir = tracker.with(|tracker: &mut TensorBoardTracker| tracker.logging_dir().map(Path::to_owned))?;
    let logging_dir = logging_dir.unwrap();
    assert_eq!(logging_dir, folder.path().join("logs/team/run"));
    for line in ["loss_all_train", "loss_all_dev"] {
        assert_eq!(event_files(&logging_dir.join(line)).len(), 1);
    }
    assert!(tracker.with(|_: &mut Failing| ()).unwrap_err().is_tracking());
    accelerator.end_training()
}

/// Cannot finish on one rank.
struct Failing {
    rank: usize,
    is_on: bool,
    calls: Arc<Mutex<Vec<&'static str>>>,
}

impl GeneralTracker for Failing {
    fn name(&self) -> &str {
        "failing"
    }

    fn start(&mut self, run: &TrackerRun<'_>) -> Result<()> {
        self.is_on = run.process_index == self.rank;
        self.calls.lock().unwrap().push("start");
        Ok(())
    }

    fn log(&mut self, _: &[(String, Value)], _: Option<usize>, _: &[(String, Value)]) -> Result<()> {
        self.calls.lock().unwrap().push("log");
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.calls.lock().unwrap().push("finish");
        if self.is_on { Err(Error::other("the service is gone")) } else { Ok(()) }
    }
}

#[test]
fn a_tracker_that_cannot_finish_is_an_error_on_every_rank_and_hides_no_save() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let failing = || Failing { rank: 0, is_on: false, calls: calls.clone() };
    let errors = testing::ranks(2, builder(folder.path()).log_with(failing()), |accelerator| {
        accelerator.init_trackers("run", None)?;
        accelerator.log([("loss", 1)], 0)?;
        let tracker = accelerator.end_training().unwrap_err().to_string();
        accelerator.init_trackers("run", None)?;
        accelerator.save_state_async(file.join("checkpoint"))?;
        let save = accelerator.end_training().unwrap_err().to_string();
        accelerator.end_training()?;
        Ok((tracker, save))
    })
    .unwrap();
    for (tracker, save) in errors {
        assert!(tracker.contains("\"failing\": the service is gone"), "{tracker}");
        assert!(save.contains("was not saved"), "{save}");
    }
    assert_eq!(*calls.lock().unwrap(), ["start", "log", "finish", "start", "finish"], "of the main process alone");
}

#[test]
fn what_is_dropped_finishes() -> Result<()> {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let tracker = Failing { rank: 9, is_on: false, calls: calls.clone() };
    let accelerator = Accelerator::builder().cpu(true).log_with(tracker).build()?;
    accelerator.init_trackers("run", None)?;
    drop(accelerator);
    assert_eq!(*calls.lock().unwrap(), ["start", "finish"]);
    Ok(())
}

#[test]
fn two_trackers_of_one_name_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = builder(folder.path()).log_with("tensorboard").log_with(TensorBoardTracker::default()).build();
    assert!(error.unwrap_err().to_string().contains("two trackers are called \"tensorboard\""));
}
