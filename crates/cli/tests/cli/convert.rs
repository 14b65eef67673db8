//! `accelerate checkpoint convert` on what Python Accelerate has saved, on what this library saves, and on everything else.

mod choices;
mod hostile;
mod notes;
mod numbers;
mod registered;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use accelerate_core::checkpoint::Checkpoint;
use accelerate_core::weight_files::{Header, Pickled, Plain, StoredTensor, TorchArchive};
use rstest::rstest;
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::checkpoint::folders::{Tensor, Values, write_checkpoint};
use crate::support::{Finished, accelerate, finished};

/// What `parity/checkpoints/generate.py` says of a checkpoint: tensors as hexadecimal digits.
#[derive(Debug, Deserialize)]
struct Expected {
    model: BTreeMap<String, String>,
    optimizer: BTreeMap<String, String>,
    random_states: BTreeMap<String, String>,
    last_lr: Vec<f64>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/checkpoints")
}

fn expected(name: &str) -> Expected {
    let all: BTreeMap<String, Value> =
        serde_json::from_str(&fs::read_to_string(fixtures().join("expected.json")).unwrap()).unwrap();
    serde_json::from_value(all[name].clone()).unwrap()
}

/// A copy of a checkpoint of Python's, in the folder `src`.
fn copied(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&fixtures().join(name), &folder.path().join("src"));
    // FSDP saves names.
    let names = fixtures().join(format!("{name}.names.txt"));
    if names.exists() {
        fs::copy(names, folder.path().join("names.txt")).unwrap();
    }
    folder
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => assert!(fs::copy(entry.path(), to).is_ok()),
        }
    }
}

fn run(folder: &Path, line: &str) -> Finished {
    let mut command = accelerate();
    command.arg("checkpoint").args(line.split_whitespace()).current_dir(folder);
    finished(command)
}

const NAMED: &str = "convert src dst --parameter_names names.txt";

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The tensors of a safetensors file.
fn tensors_in(path: &Path) -> BTreeMap<String, String> {
    let file = fs::read(path).unwrap();
    let header = Header::read(&mut file.as_slice(), file.len() as u64).unwrap();
    let data = &file[header.data_at() as usize..];
    let tensor = |it: &accelerate_core::weight_files::HeaderEntry| {
        (it.name.clone(), hexadecimal(&data[it.start as usize..it.end as usize]))
    };
    header.entries().iter().map(tensor).collect()
}

fn description(folder: &Path) -> Checkpoint {
    Checkpoint::from_json(&fs::read_to_string(folder.join("checkpoint.json")).unwrap()).unwrap()
}

fn plain(path: &Path) -> Plain<StoredTensor> {
    Plain::read(&mut fs::File::open(path).unwrap()).unwrap()
}

#[rstest]
#[case("adamw", NAMED, "named by --parameter_names; load it into AdamW")]
#[case("sgd", NAMED, "named by --parameter_names")]
#[case("named", "convert src dst", "the names that the optimizer saved")]
#[case("fsdp1", "convert src dst", "the names that the optimizer saved")]
#[case("fsdp2", "convert src dst", "the names that the optimizer saved; load it into AdamW")]
fn every_number_of_pythons_is_there_and_verified(#[case] name: &str, #[case] line: &str, #[case] how: &str) {
    let folder = copied(name);
    let found = run(folder.path(), line);
    found.expect(0, &[]);
    assert!(found.stdout.contains(how), "{}", found.stdout);
    run(folder.path(), "verify dst").expect(0, &[]);
    let (wanted, dst) = (expected(name), folder.path().join("dst"));
    assert_eq!(tensors_in(&dst.join("model.safetensors")), wanted.model);
    assert_eq!(tensors_in(&dst.join("optimizer.safetensors")), wanted.optimizer);
    if !wanted.random_states.is_empty() {
        assert_eq!(tensors_in(&dst.join("random_states.safetensors")), wanted.random_states);
    }
    let scheduler = &description(&dst).objects["scheduler"].values;
    assert_eq!((&scheduler["last_epoch"], &scheduler["_last_lr"]), (&json!(3), &json!(wanted.last_lr)));
}

#[test]
fn settings_of_groups_have_the_names_of_this_library() {
    let folder = copied("adamw");
    run(folder.path(), NAMED).expect(0, &[]);
    let groups = &description(&folder.path().join("dst")).objects["optimizer"].values["param_groups"];
    let (first, second) = (&groups[0], &groups[1]);
    assert_eq!(first["params"], json!(["first.weight", "norm.weight", "last.weight"]));
    assert_eq!(second["params"], json!(["first.bias", "norm.bias", "tied.bias"]));
    assert_eq!((&first["lr"], &first["initial_lr"]), (&json!(0.0025), &json!(0.01)));
    assert_eq!((&first["weight_decay"], &second["weight_decay"]), (&json!(0.01), &json!(0.0)));
    assert_eq!((&first["momentum"], &first["options"]["betas"]), (&json!(0.9), &json!([0.9, 0.999])));
    assert_eq!((&first["options"]["amsgrad"], &first["name"]), (&json!(false), &Value::Null));
}

#[test]
fn what_cannot_be_carried_over_is_named() {
    let folder = copied("adamw");
    let found = run(folder.path(), &format!("{NAMED} --json --dataloaders 2"));
    let report: Value = serde_json::from_str(&found.stdout).unwrap();
    let left: Vec<&str> =
        report["left_out"].as_array().unwrap().iter().map(|it| it["what"].as_str().unwrap()).collect();
    let others = ["custom_checkpoint_1", "random_states: numpy_random_seed, random_state"];
    assert_eq!(left, [&["custom_checkpoint_1.pkl"][..], &others].concat());
    assert!(report["left_out"][0]["reason"].as_str().unwrap().contains("__main__.Pickled"), "{report}");
    let objects = description(&folder.path().join("dst")).objects;
    let first = &objects["custom_checkpoint_0"];
    assert_eq!(first.values, json!({ "best": 0.5, "epochs": [1, 2] }));
    assert_eq!(first.tensors.keys().collect::<Vec<_>>(), ["running"]);
    assert_eq!(objects["custom_checkpoint_2"].values, json!(7));
    assert!(!objects.contains_key("custom_checkpoint_1"));
    assert_eq!(objects["dataloader_1"].values, json!({ "epoch": 0, "rows_delivered": 0 }));
}

/// The name of a file does not make it a shard. An index does.
#[test]
fn files_that_no_index_names_are_listed() {
    let folder = copied("named");
    let src = folder.path().join("src");
    fs::rename(src.join("model.safetensors"), src.join("model-00001-of-00001.safetensors")).unwrap();
    let names = tensors_in(&src.join("model-00001-of-00001.safetensors")).into_keys();
    let map: BTreeMap<String, &str> = names.map(|name| (name, "model-00001-of-00001.safetensors")).collect();
    fs::write(src.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    for stray in ["adapter-1-of-2.safetensors", "mydata-1-of-3.bin"] {
        fs::write(src.join(stray), "").unwrap();
    }
    let found = run(folder.path(), "convert src dst --json");
    let report: Value = serde_json::from_str(&found.stdout).unwrap();
    let left: Vec<&str> =
        report["left_out"].as_array().unwrap().iter().map(|it| it["what"].as_str().unwrap()).collect();
    assert_eq!(left[..2], ["adapter-1-of-2.safetensors", "mydata-1-of-3.bin"]);
    assert!(!found.stdout.contains("model-00001-of-00001"), "{report}");
}

#[test]
fn a_numbered_checkpoint_goes_on_to_be_numbered() {
    let folder = copied("named");
    run(folder.path(), "convert src project/checkpoints/checkpoint_12").expect(0, &[]);
    assert_eq!(description(&folder.path().join("project/checkpoints/checkpoint_12")).iteration, Some(12));
    let listed = run(folder.path(), "ls project");
    assert!(listed.stdout.contains("completed, newest"), "{}", listed.stdout);
}

/// Without state, or where several parameters have the same shape, nothing tells parameters apart: the optimizer may be made of
/// them in another order than that of the model's file.
#[rstest]
#[case("adamw", "more than one of its parameters or of first.bias, norm.bias")]
#[case("sgd", "more than one of its parameters or of first.bias, norm.weight")]
#[case("plain", "it has no state that tells its shape")]
fn names_that_nothing_tells_are_asked_for(#[case] name: &str, #[case] words: &str) {
    let folder = copied(name);
    run(folder.path(), "convert src dst").expect(1, &[words, "--parameter_names"]);
    assert!(!folder.path().join("dst").exists());
    run(folder.path(), NAMED).expect(0, &[]);
}

#[rstest]
#[case("adamw", NAMED)]
#[case("sgd", NAMED)]
#[case("named", "convert src dst")]
#[case("plain", NAMED)]
fn python_has_the_same_again_after_both_ways(#[case] name: &str, #[case] line: &str) {
    let folder = copied(name);
    let path = |name: &str| folder.path().join(name);
    run(folder.path(), line).expect(0, &[]);
    run(folder.path(), "convert dst python").expect(0, &[]);
    // Names that were saved need not be said again.
    run(folder.path(), "convert python again").expect(0, &[]);
    for file in ["model.safetensors", "optimizer.safetensors", "random_states.safetensors"] {
        if file != "optimizer.safetensors" || path("dst").join(file).exists() {
            assert_eq!(
                fs::read(path("dst").join(file)).unwrap(),
                fs::read(path("again").join(file)).unwrap(),
                "{file}"
            );
        }
    }
    let (one, other) = (description(&path("dst")), description(&path("again")));
    assert_eq!(one.objects["optimizer"].values, other.objects["optimizer"].values);
    for (object, file) in [("optimizer", "optimizer.bin"), ("scheduler", "scheduler.bin")] {
        let [was, is] = ["src", "python"].map(|folder| plain(&path(folder).join(file)));
        for name in ["last_epoch", "base_lrs", "_last_lr", "_step_count"] {
            assert_eq!(was.get(name), is.get(name), "{object}.{name}");
        }
    }
    let settings = |folder: &str| match plain(&path(folder).join("optimizer.bin")).get("param_groups") {
        Some(Plain::List(groups)) => {
            let setting = |name: &str| groups.iter().map(|group| group.get(name).cloned()).collect::<Vec<_>>();
            ["lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "initial_lr", "fused", "params"]
                .map(setting)
        }
        other => panic!("{other:?}"),
    };
    if name != "plain" && name != "sgd" {
        assert_eq!(settings("src"), settings("python"));
    }
}

/// A model, its optimizer, and what goes with them.
fn own() -> (Vec<Tensor>, Values) {
    let state = |name, numbers| Tensor::f32("optimizer", name, numbers).of_shape(&[3, 2]);
    let tensors = vec![
        Tensor::f32("model", "weight", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).of_shape(&[3, 2]),
        Tensor::f32("model", "bias", &[0.5, -0.5]),
        state("exp_avg.weight", &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        state("exp_avg_sq.weight", &[1.1, 1.2, 1.3, 1.4, 1.5, 1.6]),
        Tensor::f32("optimizer", "step.weight", &[3.0]).of_shape(&[]),
    ];
    let group = json!({
        "name": null, "params": ["bias", "weight"], "lr": 0.1, "initial_lr": 0.2, "weight_decay": 0.01, "momentum": 0.9,
        "options": { "betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": false, "maximize": false },
    });
    let values = [
        ("optimizer", json!({ "param_groups": [group] })),
        ("scheduler", json!({ "last_epoch": 3, "_step_count": 4, "base_lrs": [0.2], "_last_lr": [0.1] })),
        (
            "scaler",
            json!({ "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7 }),
        ),
        ("dataloader", json!({ "epoch": 1, "rows_delivered": 24 })),
        ("custom_checkpoint_0", json!({ "step": 3 })),
    ];
    (tensors, values.into())
}

fn write_own(folder: &Path, world_size: usize, divide: fn(Tensor) -> Tensor) {
    let (tensors, values) = own();
    let is_scalar = |tensor: &Tensor| tensor.shape.is_empty();
    let tensors: Vec<Tensor> = tensors.into_iter().map(|it| if is_scalar(&it) { it } else { divide(it) }).collect();
    write_checkpoint(folder, world_size, &tensors, &values);
}

#[test]
fn the_kind_of_a_schedule_is_listed_as_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let (tensors, mut values) = own();
    values.get_mut("scheduler").unwrap()["_scheduler_type"] = json!("StepLr");
    write_checkpoint(&folder.path().join("own"), 1, &tensors, &values);
    let found = run(folder.path(), "convert own python");
    found.expect(0, &[]);
    assert!(found.stdout.contains("scheduler: its kind, StepLr"), "{}", found.stdout);
}

#[test]
fn python_gets_numbers_for_names_and_all_that_its_classes_need() {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("own"), 1, |tensor| tensor);
    let found = run(folder.path(), "convert own python");
    found.expect(0, &[]);
    let place = "dataloader at epoch 1, 24 rows: Python's load_state has no place for it";
    assert!(found.stdout.contains(place) && found.stdout.contains("skip_first_batches"), "{}", found.stdout);
    let optimizer = plain(&folder.path().join("python/optimizer.bin"));
    let Some(Plain::List(groups)) = optimizer.get("param_groups") else { panic!("{optimizer:?}") };
    assert_eq!(groups[0].get("params"), Some(&Plain::List(vec![Plain::Int(0), Plain::Int(1)])));
    assert_eq!(groups[0].get("betas"), Some(&Plain::Tuple(vec![Plain::Float(0.9), Plain::Float(0.999)])));
    assert_eq!((groups[0].get("momentum"), groups[0].get("name")), (None, None));
    let Some(Plain::Dict(state)) = optimizer.get("state") else { panic!("{optimizer:?}") };
    assert_eq!(state.iter().map(|(number, _)| number).collect::<Vec<_>>(), [&Plain::Int(1)]);
    let scheduler = plain(&folder.path().join("python/scheduler.bin"));
    assert_eq!(scheduler.get("lr_lambdas"), Some(&Plain::List(vec![Plain::None])));
    let scaler = plain(&folder.path().join("python/scaler.pt"));
    assert_eq!(
        (scaler.get("scale"), scaler.get("_growth_tracker")),
        (Some(&Plain::Float(1024.0)), Some(&Plain::Int(7)))
    );
    assert_eq!(plain(&folder.path().join("python/custom_checkpoint_0.pkl")).get("step"), Some(&Plain::Int(3)));
    assert!(folder.path().join("python/random_states_0.pkl").exists());
}

#[rstest]
#[case(2, Tensor::sharded)]
#[case(3, Tensor::sharded)]
#[case(5, Tensor::sharded)]
fn a_sharded_run_becomes_what_a_whole_one_does(#[case] world_size: usize, #[case] divide: fn(Tensor) -> Tensor) {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("whole"), 1, |tensor| tensor);
    write_own(&folder.path().join("parts"), world_size, divide);
    run(folder.path(), "convert whole a").expect(0, &[]);
    run(folder.path(), "convert parts b").expect(0, &[]);
    let read = |name: &str, file: &str| fs::read(folder.path().join(name).join(file)).unwrap();
    for file in ["model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl"] {
        assert_eq!(read("a", file), read("b", file), "{file}");
    }
    assert!(folder.path().join(format!("b/random_states_{}.pkl", world_size - 1)).exists());
}

/// What Python Accelerate saves of a run with FSDP is in parts. What is taken of it does not depend on who reads the parts.
#[test]
fn a_model_of_fsdp_becomes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures().join("../weights/dcp_fsdp_2");
    copy_folder(&from, &folder.path().join("src/pytorch_model_fsdp_0"));
    run(folder.path(), "convert src dst").expect(0, &[]);
    run(folder.path(), "verify dst").expect(0, &[]);
    let mut command = accelerate();
    command.arg("merge-weights").args([&from, &folder.path().join("merged")]);
    finished(command).expect(0, &[]);
    let [converted, merged] =
        ["dst", "merged"].map(|name| fs::read(folder.path().join(name).join("model.safetensors")));
    assert_eq!(converted.unwrap(), merged.unwrap());
}

#[test]
fn an_optimizer_of_fsdp_keeps_its_groups_and_becomes_one_file_for_python() {
    let folder = copied("fsdp2");
    run(folder.path(), "convert src dst").expect(0, &[]);
    let groups = &description(&folder.path().join("dst")).objects["optimizer"].values["param_groups"];
    assert_eq!(groups[0]["params"], json!(["0.weight", "1.weight", "2.weight"]));
    assert_eq!(groups[1]["params"], json!(["0.bias", "1.bias", "2.bias"]));
    assert_eq!([&groups[0]["lr"], &groups[0]["initial_lr"]], [&json!(0.0025), &json!(0.01)]);
    assert_eq!([&groups[0]["weight_decay"], &groups[1]["weight_decay"]], [&json!(0.01), &json!(0.0)]);
    run(folder.path(), "convert dst python").expect(0, &[]);
    run(folder.path(), "convert python again").expect(0, &[]);
    let [first, second] =
        ["dst", "again"].map(|name| fs::read(folder.path().join(name).join("optimizer.safetensors")).unwrap());
    assert_eq!(first, second);
}

/// With FULL_STATE_DICT, rank 0 writes whole files. The model's has a name of its own.
#[test]
fn whole_files_of_fsdp_are_read() {
    let folder = copied("sgd");
    let named = |name: &str| folder.path().join("src").join(name);
    fs::rename(named("pytorch_model.bin"), named("pytorch_model_fsdp.bin")).unwrap();
    run(folder.path(), NAMED).expect(0, &[]);
    assert_eq!(tensors_in(&folder.path().join("dst/model.safetensors")), expected("sgd").model);
}

#[test]
fn each_process_keeps_random_numbers_of_its_own() {
    let folder = copied("named");
    let [first, second] = [0, 1].map(|rank| folder.path().join(format!("src/random_states_{rank}.pkl")));
    fs::copy(first, second).unwrap();
    run(folder.path(), "convert src dst").expect(0, &[]);
    let (dst, python) = (folder.path().join("dst"), folder.path().join("python"));
    assert_eq!(description(&dst).world_size, 2);
    let random = tensors_in(&dst.join("random_states.safetensors"));
    assert_eq!(random.keys().collect::<Vec<_>>(), ["rank_0.cpu", "rank_1.cpu"]);
    run(folder.path(), "convert dst python").expect(0, &[]);
    let fresh =
        [0, 1].map(|rank| plain(&python.join(format!("random_states_{rank}.pkl"))).get("random_state").cloned());
    assert!(fresh[0].is_some() && fresh[0] != fresh[1], "Python's own begin with other seeds");
}

#[test]
fn a_loss_scale_is_carried_over() {
    let folder = copied("adamw");
    run(folder.path(), NAMED).expect(0, &[]);
    let wanted = json!({
        "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100, "_growth_tracker": 0,
    });
    assert_eq!(description(&folder.path().join("dst")).objects["scaler"].values, wanted);
}

/// A pickle holds the names of functions that run where Python loads it. What is written here names four of PyTorch's.
#[test]
fn what_python_gets_runs_nothing_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("own"), 2, Tensor::sharded);
    run(folder.path(), "convert own python").expect(0, &[]);
    for entry in fs::read_dir(folder.path().join("python")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension != "safetensors") {
            plain(&path);
        }
    }
}

#[test]
fn a_loader_and_names_are_of_pythons_checkpoints_only() {
    let folder = copied("named");
    write_own(&folder.path().join("own"), 1, |tensor| tensor);
    for flag in ["--dataloaders 1", "--parameter_names names.txt"] {
        run(folder.path(), &format!("convert own dst {flag}")).expect(1, &["is one of this library; leave it out"]);
    }
}

#[test]
fn what_a_killed_conversion_has_left_goes_with_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("own"), 1, |tensor| tensor);
    let (left, others) = (folder.path().join(".out.a1B2c3.converting"), folder.path().join(".other.a1B2c3.converting"));
    for folder in [&left, &others] {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("optimizer.bin"), "half of it").unwrap();
    }
    run(folder.path(), "convert own out").expect(0, &[]);
    assert!(!left.exists() && others.exists());
}

/// Writes a file of `torch.save`, with tensors of these numbers. One number is a tensor without dims.
fn write_torch(path: &Path, value: &Plain<Vec<f32>>) {
    let shape = |numbers: &Vec<f32>| if numbers.len() == 1 { Vec::new() } else { vec![numbers.len() as u64] };
    let Pickled { bytes, tensors } = Pickled::new(value, |it| (Dtype::F32, shape(it))).unwrap();
    let data = tensors.iter().map(|numbers| numbers.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>());
    let numbered = data.enumerate().map(|(number, bytes)| (format!("data/{number}"), bytes));
    let mut archive = TorchArchive::new(Vec::new(), "archive");
    for (name, bytes) in [("data.pkl".to_owned(), bytes)].into_iter().chain(numbered) {
        archive.begin(&name).unwrap();
        archive.append(&bytes).unwrap();
    }
    fs::write(path, archive.finish().unwrap()).unwrap();
}

/// For Python, functions of which nothing is saved are added to it.
#[test]
fn a_schedule_is_the_same_after_both_ways() {
    let folder = copied("adamw");
    for arguments in [NAMED, "convert dst python", "convert python src2 --parameter_names names.txt"] {
        run(folder.path(), arguments).expect(0, &[]);
    }
    let [first, second] = ["dst", "src2"].map(|name| description(&folder.path().join(name)));
    assert!(first.objects["scheduler"].values.get("last_epoch").is_some());
    assert_eq!(first.objects["scheduler"].values, second.objects["scheduler"].values);
    assert_eq!(first.objects["scheduler"].values.get("lr_lambdas"), None);
}

/// An optimizer with this learning rate for the parameters of the checkpoint `named`.
fn with_rate(folder: &Path, lr: Plain<Vec<f32>>) {
    let names = fs::read_to_string(folder.join("names.txt")).unwrap();
    let params = (0..names.lines().count()).map(|number| Plain::Int(number as i64)).collect();
    let betas = Plain::Tuple(vec![Plain::Tensor(vec![0.5]), Plain::Float(0.75)]);
    let group = Plain::dict([("lr", lr), ("betas", betas), ("params", Plain::List(params))]);
    let more = [("epoch", Plain::Int(3)), ("loss_scaler", Plain::None)];
    let state = [("state", Plain::Dict(Vec::new())), ("param_groups", Plain::List(vec![group]))];
    write_torch(&folder.join("src/optimizer.bin"), &Plain::dict(state.into_iter().chain(more)));
}

/// PyTorch takes settings as numbers and as tensors, which fused optimizers and `torch.compile` like better.
#[test]
fn rates_that_are_tensors_are_numbers_and_what_else_is_with_an_optimizer_is_listed() {
    let folder = copied("named");
    with_rate(folder.path(), Plain::Tensor(vec![0.125]));
    let rates = || Plain::List(vec![Plain::Tensor(vec![0.125])]);
    let schedule = [("base_lrs", rates()), ("_last_lr", rates()), ("last_epoch", Plain::Int(1))];
    write_torch(&folder.path().join("src/scheduler.bin"), &Plain::dict(schedule));
    let found = run(folder.path(), NAMED);
    found.expect(0, &[]);
    let extra = "optimizer.bin: epoch, loss_scaler: the state of an optimizer of PyTorch is `state` and `param_groups`";
    assert!(found.stdout.contains(extra), "{}", found.stdout);
    let objects = description(&folder.path().join("dst")).objects;
    let group = &objects["optimizer"].values["param_groups"][0];
    assert_eq!([&group["lr"], &group["options"]["betas"]], [&json!(0.125), &json!([0.5, 0.75])]);
    let schedule = &objects["scheduler"].values;
    assert_eq!([&schedule["base_lrs"], &schedule["_last_lr"]], [&json!([0.125]), &json!([0.125])]);
}

/// A model may have the longest names that are read. What an optimizer keeps of such a parameter has a longer one.
#[test]
fn a_name_that_is_too_long_is_named_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let (src, name) = (folder.path().join("src"), "x".repeat(995));
    fs::create_dir(&src).unwrap();
    write_torch(&src.join("pytorch_model.bin"), &Plain::dict([(name.as_str(), Plain::Tensor(vec![1.0, 2.0]))]));
    let state = Plain::dict([("exp_avg", Plain::Tensor(vec![1.0, 2.0]))]);
    let group = Plain::dict([("lr", Plain::Float(0.1)), ("params", Plain::List(vec![Plain::Int(0)]))]);
    let state = Plain::Dict(vec![(Plain::Int(0), state)]);
    let optimizer = Plain::dict([("state", state), ("param_groups", Plain::List(vec![group]))]);
    write_torch(&src.join("optimizer.bin"), &optimizer);
    run(folder.path(), "convert src dst")
        .expect(1, &["src/optimizer.bin cannot be converted", "the name `exp_avg.xxx", "is 1003 bytes long"]);
}

/// In a safetensors file, notes have the name.
#[test]
fn a_parameter_that_no_safetensors_file_can_have_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let src = folder.path().join("src");
    fs::create_dir(&src).unwrap();
    for (name, words) in [
        ("__metadata__", &["dst/model.safetensors cannot be written", "is called `__metadata__`", "rename"][..]),
        ("metadata", &[]),
    ] {
        write_torch(&src.join("pytorch_model.bin"), &Plain::dict([(name, Plain::Tensor(vec![1.0, 2.0]))]));
        run(folder.path(), "convert src dst").expect(if words.is_empty() { 0 } else { 1 }, words);
        assert_eq!(folder.path().join("dst").exists(), words.is_empty());
    }
}

#[rstest]
#[case(Plain::Tensor(vec![0.1, 0.2]), "group 0 has no learning rate `lr` that is a number, but a tensor")]
#[case(Plain::Tensor(vec![f32::NAN]), "group 0 has no learning rate `lr` that is a number, but NaN")]
#[case(Plain::None, "group 0 has no learning rate `lr` that is a number, but None")]
fn rates_that_are_no_numbers_are_named(#[case] lr: Plain<Vec<f32>>, #[case] words: &str) {
    let folder = copied("named");
    with_rate(folder.path(), lr);
    let found = run(folder.path(), NAMED);
    found.expect(1, &[words]);
    assert!(!found.stderr.contains("not the state of an optimizer"), "{}", found.stderr);
}

/// One that is killed cannot clean up. One that is alive holds a lock, and nothing is taken from it.
#[test]
fn what_a_living_conversion_writes_stays_and_what_a_dead_one_has_left_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("own"), 1, |tensor| tensor);
    run(folder.path(), "convert own python").expect(0, &[]);
    let (to, checkpoints) = ("project/checkpoints/checkpoint_0", folder.path().join("project/checkpoints"));
    let writing = checkpoints.join(".checkpoint_0.a1B2c3.converting");
    fs::create_dir_all(&writing).unwrap();
    let lock = fs::File::open(&writing).unwrap();
    lock.lock().unwrap();
    run(folder.path(), &format!("convert python {to}")).expect(0, &[]);
    assert!(writing.exists());
    for command in ["ls", "verify"] {
        let found = run(folder.path(), &format!("{command} project"));
        found.expect(0, &[]);
        let line = "project/checkpoints/.checkpoint_0.a1B2c3.converting: a conversion is writing it\n";
        assert!(found.stdout.ends_with(line), "{}", found.stdout);
        let json: Value =
            serde_json::from_str(&run(folder.path(), &format!("{command} project --json")).stdout).unwrap();
        assert_eq!(json["conversions"][0]["abandoned"], json!(false));
    }
    drop(lock);
    for command in ["ls", "verify"] {
        let found = run(folder.path(), &format!("{command} project"));
        assert!(found.stdout.ends_with("removes it\n"), "{}", found.stdout);
        let json: Value =
            serde_json::from_str(&run(folder.path(), &format!("{command} project --json")).stdout).unwrap();
        assert_eq!(json["conversions"][0]["abandoned"], json!(true));
    }
    fs::remove_dir_all(folder.path().join(to)).unwrap();
    let alone = "project/checkpoints/.checkpoint_0.a1B2c3.converting: left by a conversion that was ended";
    run(folder.path(), "ls project").expect(1, &["project is no checkpoint", alone]);
    run(folder.path(), &format!("convert python {to}")).expect(0, &[]);
    assert!(!writing.exists());
}

#[rstest]
#[case("dst/")]
#[case("dst/.")]
#[case("./dst//")]
#[case("below/../dst")]
fn a_second_name_of_a_destination_is_the_same_one(#[case] destination: &str) {
    let folder = copied("named");
    fs::create_dir(folder.path().join("below")).unwrap();
    run(folder.path(), &format!("convert src {destination}")).expect(0, &[]);
    run(folder.path(), "verify dst").expect(0, &[]);
    run(folder.path(), &format!("convert src {destination}")).expect(1, &["dst exists already"]);
}

#[rstest]
#[case::of_this_folder(".")]
#[case::of_the_one_above("..")]
#[case::of_a_link("link")]
fn what_is_no_name_of_a_folder_is_refused(#[case] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_own(&folder.path().join("own"), 1, |tensor| tensor);
    let within = folder.path().join("within");
    fs::create_dir_all(within.join("empty")).unwrap();
    std::os::unix::fs::symlink("empty", within.join("link")).unwrap();
    run(&within, &format!("convert ../own {name}")).expect(1, &["name the folder itself"]);
}
