//! What is in checkpoints, whether it is right, and in what two of them differ.

pub(crate) mod folders;
mod hostile;
mod terminal;

use std::fs;
use std::path::Path;

use accelerate_core::checkpoint::STEM;
use rstest::rstest;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::support::{Finished, accelerate, finished};
pub(crate) use folders::weight_file;
use folders::{Tensor, Values, interrupt, write_checkpoint, write_manifest};

fn checkpoint(folder: &Path, line: &str) -> Finished {
    let mut command = accelerate();
    command.arg("checkpoint").args(line.split_whitespace()).current_dir(folder);
    finished(command)
}

/// A model of six and two elements, the state of its optimizer, and a scheduler.
fn run() -> Vec<Tensor> {
    vec![
        Tensor::f32("model", "weight", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).of_shape(&[2, 3]),
        Tensor::f32("model", "bias", &[0.5, -0.5]),
        Tensor::f32("optimizer", "exp_avg.weight", &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]).of_shape(&[2, 3]),
    ]
}

fn values() -> Values {
    [("scheduler", json!({"last_epoch": 3, "base_lrs": [0.1, 0.2]}))].into()
}

fn sharded(tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.into_iter().map(Tensor::sharded).collect()
}

/// A folder with the same run as `a`, on one process and whole, and as `b`.
fn pair(world_size: usize, tensors: &[Tensor], values: &Values) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(&folder.path().join("a"), 1, &run(), &self::values());
    write_checkpoint(&folder.path().join("b"), world_size, tensors, values);
    folder
}

#[track_caller]
fn expect_lines(found: &Finished, code: i32, lines: &[&str]) {
    found.expect(code, &[]);
    let squeezed: Vec<String> =
        found.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in lines {
        assert!(squeezed.iter().any(|found| found == line), "{line:?} is missing in\n{}", found.stdout);
    }
    assert!(!found.stdout.contains('\u{1b}'), "no colours outside of a terminal");
}

fn parsed(found: &Finished) -> Value {
    serde_json::from_str(&found.stdout).unwrap_or_else(|error| panic!("{error}: {found:?}"))
}

/// `checkpoint_2` and `checkpoint_10` are completed, the others are not.
fn project() -> tempfile::TempDir {
    let project = tempfile::tempdir().unwrap();
    let folder = |number: usize| project.path().join(format!("checkpoints/checkpoint_{number}"));
    for number in [2, 9, 10, 11, 12] {
        write_checkpoint(&folder(number), 2, &run(), &values());
    }
    fs::remove_file(folder(9).join("optimizer.safetensors")).unwrap();
    fs::remove_file(folder(11).join("checkpoint.manifest.json")).unwrap();
    fs::write(folder(12).join("checkpoint.manifest.json"), "{").unwrap();
    // No checkpoints.
    fs::create_dir(project.path().join("checkpoints/checkpoint_013")).unwrap();
    fs::write(project.path().join("checkpoints/checkpoint_14"), "a file").unwrap();
    project
}

#[rstest]
#[case("ls")]
#[case("ls checkpoints")]
fn checkpoints_are_listed_in_order_and_the_newest_completed_one_is_marked(#[case] line: &str) {
    let found = checkpoint(project().path(), line);
    found.expect(0, &[]);
    let numbers: Vec<&str> = found.stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(numbers, ["checkpoint", "2", "9", "10", "11", "12"]);
    let line = |number: usize| found.stdout.lines().find(|line| line.starts_with(&number.to_string())).unwrap();
    for (number, words) in [
        (2, "completed"),
        (9, "damaged: optimizer.safetensors: it is missing"),
        (10, "completed, newest"),
        (11, "not completed: there is no checkpoint.manifest.json in it"),
        (12, "damaged: checkpoint.manifest.json: "),
    ] {
        assert!(line(number).contains(words), "{words:?} is missing in\n{}", found.stdout);
    }
    assert!(line(2).ends_with("completed"), "{}", found.stdout);
}

#[test]
fn the_list_as_json_has_sizes_in_bytes() {
    let project = project();
    let found = checkpoint(project.path(), "ls --json");
    found.expect(0, &[]);
    let json = parsed(&found);
    let entries = json["checkpoints"].as_array().unwrap();
    let newest: Vec<&Value> = entries.iter().filter(|entry| entry["newest"] == json!(true)).collect();
    assert_eq!(newest.len(), 1);
    assert_eq!((&newest[0]["number"], &newest[0]["num_processes"]), (&json!(10), &json!(2)));
    let verified = parsed(&checkpoint(project.path(), "verify . --json"));
    for (entry, verified) in entries.iter().zip(verified["folders"].as_array().unwrap()) {
        assert_eq!(entry["num_bytes"], verified["num_bytes"], "{entry} {verified}");
        assert_ne!(entry["num_bytes"], json!(0));
    }
    assert_eq!(entries[3]["state"], json!("not completed"));
}

#[test]
fn one_checkpoint_shows_its_objects_and_values() {
    let folder = pair(2, &sharded(run()), &values());
    let found = checkpoint(folder.path(), "ls b --tensors");
    expect_lines(
        &found,
        0,
        &[
            "object tensors elements size pieces dtypes",
            "model 2 8 32 B 4 F32",
            "optimizer 1 6 24 B 2 F32",
            "scheduler 0 0 0 B 0",
            "weight F32 [2, 3] 24 B model.rank-00000-of-00002.safetensors, model.rank-00001-of-00002.safetensors",
            r#"scheduler {"base_lrs":[0.1,0.2],"last_epoch":3}"#,
        ],
    );
    assert!(!checkpoint(folder.path(), "ls b").stdout.contains("rank-00000"), "tensors are listed when asked for");
    let json = parsed(&checkpoint(folder.path(), "ls a --json"));
    assert_eq!(json["objects"]["model"]["num_elements"], json!(8));
    assert_eq!(json["objects"]["scheduler"]["values"]["base_lrs"], json!([0.1, 0.2]));
    assert_eq!(json["objects"]["model"]["tensors"], Value::Null);
    let json = parsed(&checkpoint(folder.path(), "ls a --json --tensors"));
    assert_eq!(json["objects"]["model"]["tensors"]["bias"]["files"], json!(["model.safetensors"]));
}

#[test]
fn columns_are_aligned() {
    let found = checkpoint(project().path(), "ls");
    let ends: Vec<Option<usize>> =
        found.stdout.lines().take(2).map(|line| line.find("completed").or(line.find("state"))).collect();
    assert_eq!(ends[0], ends[1], "{}", found.stdout);
}

#[rstest]
#[case("ls nowhere", "there is no folder nowhere")]
#[case("ls empty", "empty is no checkpoint")]
#[case("ls model", "`accelerate checkpoint verify` looks at")]
#[case("ls a/model.safetensors", "there is no folder")]
#[case("verify empty", "empty is no checkpoint")]
#[case("verify nowhere", "there is no folder nowhere")]
fn what_is_no_checkpoint_is_said_to_be_none(#[case] line: &str, #[case] words: &str) {
    let folder = pair(1, &run(), &values());
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::create_dir(folder.path().join("model")).unwrap();
    write_manifest(&folder.path().join("model"), "model");
    checkpoint(folder.path(), line).expect(1, &[words]);
}

#[rstest]
#[case(1, run())]
#[case(2, run())]
#[case(2, sharded(run()))]
#[case(4, sharded(run()))]
fn a_checkpoint_as_it_was_saved_is_verified(#[case] world_size: usize, #[case] tensors: Vec<Tensor>) {
    let folder = pair(world_size, &tensors, &values());
    let found = checkpoint(folder.path(), "verify a b");
    found.expect(0, &[]);
    assert!(found.stdout.starts_with("ok a: ") && found.stdout.contains("\nok b: "), "{}", found.stdout);
    let json = parsed(&checkpoint(folder.path(), "verify b --json"));
    assert_eq!((&json["folders"][0]["ok"], &json["folders"][0]["faults"]), (&json!(true), &json!([])));
}

#[test]
fn a_folder_that_is_no_checkpoint_keeps_no_other_from_being_verified() {
    let folder = pair(2, &run(), &values());
    fs::create_dir(folder.path().join("empty")).unwrap();
    let found = checkpoint(folder.path(), "verify empty a nowhere b");
    found.expect(1, &["empty is no checkpoint", "there is no folder nowhere"]);
    assert!(found.stdout.starts_with("ok a: ") && found.stdout.contains("\nok b: "), "{}", found.stdout);
    let json = parsed(&checkpoint(folder.path(), "verify empty a --json"));
    assert_eq!((&json["folders"][0]["folder"], &json["folders"][0]["ok"]), (&json!("a"), &json!(true)));
    assert_eq!((&json["folders"][1]["folder"], &json["folders"][1]["ok"]), (&json!("empty"), &json!(false)));
    assert!(json["folders"][1]["error"].as_str().unwrap().contains("empty is no checkpoint"), "{json}");
}

#[test]
fn a_project_is_verified_checkpoint_by_checkpoint() {
    let project = project();
    let json = parsed(&checkpoint(project.path(), "verify . --json"));
    let oks: Vec<&Value> = json["folders"].as_array().unwrap().iter().map(|folder| &folder["ok"]).collect();
    assert_eq!(oks, [true, false, true, false, false]);
    checkpoint(project.path(), "verify checkpoints").expect(1, &[]);
}

/// A trained model beside the checkpoints of its run.
#[test]
fn a_model_in_a_project_hides_no_checkpoint() {
    let project = tempfile::tempdir().unwrap();
    write_checkpoint(project.path(), 2, &run(), &values());
    let folder = |number: usize| project.path().join(format!("checkpoints/checkpoint_{number}"));
    for number in [1, 2] {
        write_checkpoint(&folder(number), 2, &run(), &values());
    }
    let found = checkpoint(project.path(), "verify .");
    found.expect(0, &[]);
    assert!(!found.stdout.contains("Written by no save"), "{}", found.stdout);
    let path = folder(2).join("optimizer.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    checkpoint(project.path(), "verify .").expect(1, &[]);
    let json = parsed(&checkpoint(project.path(), "verify . --json"));
    let oks: Vec<&Value> = json["folders"].as_array().unwrap().iter().map(|folder| &folder["ok"]).collect();
    assert_eq!(oks, [true, true, false]);
}

/// A run that is ended while it saves goes on from the saves before.
#[test]
fn a_save_that_was_not_completed_is_told_and_no_damage_beside_others() {
    let project = tempfile::tempdir().unwrap();
    let folder = |number: usize| project.path().join(format!("checkpoints/checkpoint_{number}"));
    for number in [1, 2] {
        write_checkpoint(&folder(number), 2, &run(), &values());
    }
    fs::remove_file(folder(2).join("checkpoint.manifest.json")).unwrap();
    let verified = |line: &str, code: i32| {
        let found = checkpoint(project.path(), line);
        found.expect(code, &[]);
        assert!(
            found.stdout.contains("NOT COMPLETED ") && found.stdout.contains("Nothing is resumed from it."),
            "{found:?}"
        );
    };
    verified("verify .", 0);
    verified("verify checkpoints", 0);
    // Somebody means that one.
    verified("verify checkpoints/checkpoint_2", 1);
    verified("verify checkpoints/checkpoint_1 checkpoints/checkpoint_2", 1);
    fs::remove_file(folder(1).join("checkpoint.manifest.json")).unwrap();
    verified("verify .", 1);
}

#[test]
fn of_a_project_the_newest_completed_checkpoint_is_compared() {
    let project = project();
    for folder in [".", "checkpoints"] {
        let found = checkpoint(project.path(), &format!("diff {folder} checkpoints/checkpoint_2"));
        found.expect(0, &[]);
        assert!(found.stdout.contains("checkpoints/checkpoint_10 (2 processes)"), "{}", found.stdout);
    }
    for number in [2, 10] {
        fs::remove_file(project.path().join(format!("checkpoints/checkpoint_{number}/checkpoint.manifest.json")))
            .unwrap();
    }
    checkpoint(project.path(), "diff . .").expect(2, &["none of the checkpoints in . is complete and whole"]);
}

/// A bit that has flipped is no difference between two runs.
#[test]
fn damage_of_the_same_size_is_noticed_before_anything_is_compared() {
    let folder = pair(1, &run(), &values());
    let path = folder.path().join("b/optimizer.safetensors");
    let mut content = fs::read(&path).unwrap();
    *content.last_mut().unwrap() ^= 1;
    fs::write(&path, content).unwrap();
    for line in ["diff a b", "diff b a", "diff a b --objects model"] {
        let found = checkpoint(folder.path(), line);
        found.expect(2, &["the checkpoint b is damaged", "optimizer.safetensors: its content has changed"]);
        assert_eq!(found.stdout, "");
    }
}

#[test]
fn foreign_files_are_named_and_no_error() {
    let folder = pair(1, &run(), &values());
    fs::write(folder.path().join("a/notes.txt"), "mine").unwrap();
    fs::write(folder.path().join("a/.checkpoint.x7.saving"), "half").unwrap();
    let found = checkpoint(folder.path(), "verify a");
    found.expect(0, &[]);
    assert!(found.stdout.contains("Written by no save, and not looked at: notes.txt"), "{}", found.stdout);
    assert!(found.stdout.contains("removes them then): .checkpoint.x7.saving"), "{}", found.stdout);
}

#[rstest]
#[case(&["model.safetensors", "optimizer.safetensors", "checkpoint.json"])]
#[case(&["optimizer.safetensors"])]
#[case(&["checkpoint.json"])]
fn an_interrupted_save_is_told_and_left_as_it_is(#[case] pending: &[&str]) {
    let folder = pair(1, &run(), &values());
    interrupt(&folder.path().join("a"), STEM, pending);
    let names = || {
        let mut names: Vec<_> =
            fs::read_dir(folder.path().join("a")).unwrap().map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    let found = checkpoint(folder.path(), "verify a");
    found.expect(0, &[]);
    assert!(found.stdout.contains("The next load or save here gives its files their names."), "{}", found.stdout);
    let listed = checkpoint(folder.path(), "ls a");
    assert!(listed.stdout.contains("interrupted: all is there"), "{}", listed.stdout);
    expect_lines(&checkpoint(folder.path(), "diff a b"), 0, &["The checkpoints are equal."]);
    assert_eq!(names(), before);
}

#[test]
fn a_save_that_is_over_is_not_called_interrupted() {
    let folder = pair(1, &run(), &values());
    interrupt(&folder.path().join("a"), STEM, &[]);
    assert!(!checkpoint(folder.path(), "verify a").stdout.contains("interrupted"));
    assert!(!checkpoint(folder.path(), "ls a").stdout.contains("interrupted"));
}

#[test]
fn saved_models_are_verified_too() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    for (file, name) in [(first, "a"), (second, "b")] {
        let content = weight_file(&[(name, Dtype::F32, vec![1], vec![0; 4])]);
        fs::write(folder.path().join(file), content).unwrap();
    }
    let index = json!({"metadata": {"total_size": 8}, "weight_map": {"a": first, "b": second}}).to_string();
    let index_path = folder.path().join("model.safetensors.index.json");
    fs::write(&index_path, &index).unwrap();
    write_manifest(folder.path(), "model");
    let found = checkpoint(folder.path(), "verify .");
    assert!(found.code == Some(0) && found.stdout.starts_with("ok .: 3 files"), "{found:?}");
    // An index that belongs to other weights.
    fs::write(&index_path, index.replace("\"b\":", "\"c\":")).unwrap();
    write_manifest(folder.path(), "model");
    let found = checkpoint(folder.path(), "verify .");
    assert!(found.code == Some(1) && found.stdout.contains("it has no tensor `c`, which the index says"), "{found:?}");
}

#[rstest]
#[case(1, run())]
#[case(2, run())]
#[case(2, sharded(run()))]
#[case(3, sharded(run()))]
#[case(5, sharded(run()))]
fn the_same_numbers_are_equal_however_they_are_divided(#[case] world_size: usize, #[case] tensors: Vec<Tensor>) {
    let folder = pair(world_size, &tensors, &values());
    let lines = ["model: equal, 2 tensors", "scheduler: equal", "The checkpoints are equal."];
    expect_lines(&checkpoint(folder.path(), "diff a b"), 0, &lines);
    expect_lines(&checkpoint(folder.path(), "diff b a"), 0, &lines);
    let json = parsed(&checkpoint(folder.path(), "diff a b --json"));
    assert_eq!((&json["equal"], &json["num_processes"]), (&json!(true), &json!([1, world_size])));
}

/// Of parts in columns no two neighbouring rows are together.
#[test]
fn columns_are_compared_with_rows() {
    let numbers: Vec<f32> = (0_u8..35).map(f32::from).collect();
    let tensor = Tensor::f32("model", "weight", &numbers).of_shape(&[5, 7]);
    let mut other = tensor.clone();
    set(&mut other, 34, 68.0);
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(&folder.path().join("a"), 2, &[tensor.clone().in_columns()], &Values::new());
    for (name, world_size, tensor) in
        [("b", 3, tensor.clone().in_columns()), ("c", 2, tensor.clone().sharded()), ("d", 1, tensor)]
    {
        write_checkpoint(&folder.path().join(name), world_size, &[tensor], &Values::new());
        expect_lines(&checkpoint(folder.path(), &format!("diff a {name}")), 0, &[]);
    }
    write_checkpoint(&folder.path().join("e"), 3, &[other.in_columns()], &Values::new());
    expect_lines(&checkpoint(folder.path(), "diff a e"), 1, &["weight 1 35 3.400e1 5.000e-1"]);
    checkpoint(folder.path(), "verify a b c d e").expect(0, &[]);
}

fn changed(name: &str, change: impl Fn(&mut Tensor)) -> Vec<Tensor> {
    let mut tensors = run();
    change(tensors.iter_mut().find(|tensor| tensor.name == name).unwrap());
    tensors
}

fn set(tensor: &mut Tensor, element: usize, number: f32) {
    tensor.bytes[element * 4..][..4].copy_from_slice(&number.to_le_bytes());
}

#[rstest]
#[case(changed("weight", |it| set(it, 4, 5.5)), "weight 1 6 5.000e-1 9.091e-2")]
#[case(sharded(changed("weight", |it| { set(it, 0, 0.0); set(it, 5, 8.0) })), "weight 2 6 2.000e0 1.000e0")]
#[case(changed("bias", |it| set(it, 0, f32::NAN)), "bias 1 2 - - 1 with NaN or infinity")]
#[case(changed("weight", |it| it.shape = vec![3, 2]), "weight shape [2, 3] in A, [3, 2] in B")]
#[case(changed("weight", |it| it.dtype = Dtype::I32), "weight F32 in A, I32 in B")]
#[case(changed("weight", |it| it.name = "weights"), "weights only in B")]
#[case(changed("weight", |it| it.name = "weights"), "weight only in A")]
#[case(changed("exp_avg.weight", |it| it.object = "optimizer_1"), "optimizer: only in A")]
#[case(changed("exp_avg.weight", |it| it.object = "optimizer_1"), "optimizer_1: only in B")]
fn each_difference_of_tensors_is_shown(#[case] tensors: Vec<Tensor>, #[case] line: &str) {
    let folder = pair(2, &tensors, &values());
    expect_lines(&checkpoint(folder.path(), "diff a b"), 1, &[line, "The checkpoints differ."]);
    let json = parsed(&checkpoint(folder.path(), "diff a b --json"));
    assert_eq!(json["equal"], json!(false));
}

#[test]
fn values_that_differ_are_named_by_their_path() {
    let other = [("scheduler", json!({"last_epoch": 4, "base_lrs": [0.1], "new": true}))].into();
    let folder = pair(1, &run(), &other);
    let lines =
        ["scheduler: 3 values differ", "base_lrs[1] 0.2 -", "last_epoch 3 4", "new - true", "model: equal, 2 tensors"];
    expect_lines(&checkpoint(folder.path(), "diff a b"), 1, &lines);
}

/// The order in which gradients came is found out by each number of processes anew.
#[rstest]
#[case(1, None, 0)]
#[case(2, None, 0)]
#[case(2, Some(json!({"other": 1})), 1)]
#[case(4, None, 1)]
fn the_order_of_gradients_is_no_difference_between_numbers_of_processes(
    #[case] num_others: usize,
    #[case] more: Option<Value>,
    #[case] code: i32,
) {
    let folder = tempfile::tempdir().unwrap();
    let with = |order: Value, more: &Option<Value>| {
        let mut model = more.clone().unwrap_or_else(|| json!({}));
        model["gradient_order"] = order;
        Values::from([("model", model)])
    };
    write_checkpoint(&folder.path().join("a"), 4, &run(), &with(json!(["bias", "weight"]), &None));
    let other = if num_others == 1 { Values::new() } else { with(json!(["weight", "bias"]), &more) };
    write_checkpoint(&folder.path().join("b"), num_others, &run(), &other);
    checkpoint(folder.path(), "diff a b").expect(code, &[]);
    checkpoint(folder.path(), "diff b a").expect(code, &[]);
}

#[rstest]
#[case("", 1)]
#[case("--tolerance 0.01", 1)]
#[case("--tolerance 0.1", 0)]
#[case("--tolerance 0", 1)]
#[case("--tolerance -1", 2)]
#[case("--tolerance=-1", 2)]
#[case("--tolerance inf", 2)]
#[case("--tolerance much", 2)]
fn a_tolerance_says_how_near_is_equal(#[case] flags: &str, #[case] code: i32) {
    // Half of eleven halves: a relative difference of a eleventh.
    let folder = pair(1, &changed("weight", |it| set(it, 4, 5.5)), &values());
    checkpoint(folder.path(), &format!("diff a b {flags}")).expect(code, &[]);
}

/// Half of the larger number, whatever type it is of.
#[rstest]
#[case::complex(Dtype::C64, &[[0, 0, 0x40, 0x40], [0, 0, 0x80, 0x40]].concat(), &[[0, 0, 0xc0, 0x40], [0, 0, 0, 0x41]].concat(), "5.000e0")]
#[case::eight_bits(Dtype::F8_E4M3, &[0x38], &[0x40], "1.000e0")]
#[case::eight_bits_without_fraction(Dtype::F8_E8M0, &[127], &[128], "1.000e0")]
fn a_tolerance_is_for_complex_numbers_and_floats_of_eight_bits(
    #[case] dtype: Dtype,
    #[case] a: &[u8],
    #[case] b: &[u8],
    #[case] absolute: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [("a", a), ("b", b)] {
        let tensor = Tensor { dtype, shape: vec![1], bytes: bytes.to_vec(), ..Tensor::f32("model", "x", &[]) };
        write_checkpoint(&folder.path().join(name), 1, &[tensor], &Values::new());
    }
    expect_lines(&checkpoint(folder.path(), "diff a b"), 1, &[&format!("x 1 1 {absolute} 5.000e-1")]);
    checkpoint(folder.path(), "diff a b --tolerance 0.49").expect(1, &[]);
    checkpoint(folder.path(), "diff a b --tolerance 0.5").expect(0, &[]);
}

/// They are farther apart than a float of 64 bits can be.
#[test]
fn large_numbers_of_opposite_signs_have_an_infinite_difference() {
    let folder = tempfile::tempdir().unwrap();
    for (name, number) in [("a", 1e308_f64), ("b", -1e308)] {
        let bytes = number.to_le_bytes().to_vec();
        let tensor = Tensor { dtype: Dtype::F64, shape: vec![1], bytes, ..Tensor::f32("model", "x", &[]) };
        write_checkpoint(&folder.path().join(name), 1, &[tensor], &Values::new());
    }
    expect_lines(&checkpoint(folder.path(), "diff a b"), 1, &["x 1 1 inf 2.000e0"]);
    let numbers = &parsed(&checkpoint(folder.path(), "diff a b --json"))["objects"]["model"]["tensors"]["x"]["numbers"];
    let found = ["max_absolute", "max_relative", "num_not_finite"].map(|name| &numbers[name]);
    assert_eq!(found, [&json!("inf"), &json!(2.0), &json!(0)]);
    checkpoint(folder.path(), "diff a b --tolerance 2").expect(0, &[]);
}

#[rstest]
#[case("--objects model", 0)]
#[case("--objects model optimizer", 0)]
#[case("--objects model scheduler", 1)]
#[case("", 1)]
fn objects_may_be_chosen(#[case] flags: &str, #[case] code: i32) {
    let folder = pair(2, &sharded(run()), &[("scheduler", json!({"last_epoch": 4}))].into());
    let found = checkpoint(folder.path(), &format!("diff a b {flags}"));
    found.expect(code, &[]);
    assert_eq!(found.stdout.contains("optimizer: equal"), flags.is_empty() || flags.contains("optimizer"));
}

#[rstest]
#[case(
    "diff a a --objects model head",
    "neither checkpoint has an object `head`; there are model, optimizer, scheduler"
)]
#[case("diff a nowhere", "there is no folder nowhere")]
#[case("diff a empty", "empty is no checkpoint")]
#[case("diff a checkpoint_3", "the save into checkpoint_3 was not completed")]
#[case("diff a", "<B>")]
#[case("diff a damaged", "the checkpoint damaged is damaged")]
fn what_cannot_be_compared_is_neither_equal_nor_different(#[case] line: &str, #[case] words: &str) {
    let folder = pair(1, &run(), &values());
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::create_dir(folder.path().join("checkpoint_3")).unwrap();
    write_checkpoint(&folder.path().join("damaged"), 1, &run(), &values());
    fs::remove_file(folder.path().join("damaged/model.safetensors")).unwrap();
    checkpoint(folder.path(), line).expect(2, &[words]);
}

/// More than one block of each tensor, whose borders differ on both sides.
#[test]
fn long_tensors_are_compared_to_their_end() {
    let numbers: Vec<f32> = (0..1_000_003_u32).map(|number| number as f32).collect();
    let long = |last: f32| {
        let mut numbers = numbers.clone();
        *numbers.last_mut().unwrap() = last;
        Tensor::f32("model", "long", &numbers).sharded()
    };
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(&folder.path().join("a"), 2, &[long(0.0)], &Values::new());
    write_checkpoint(&folder.path().join("b"), 3, &[long(1.0)], &Values::new());
    expect_lines(&checkpoint(folder.path(), "diff a b"), 1, &["long 1 1000003 1.000e0 1.000e0"]);
    expect_lines(&checkpoint(folder.path(), "diff a a"), 0, &[]);
}

/// They are whole, and nobody is told to remove them.
#[test]
fn checkpoints_of_python_accelerate_are_named_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint_0 = folder.path().join("run/checkpoints/checkpoint_0");
    fs::create_dir_all(&checkpoint_0).unwrap();
    fs::create_dir(folder.path().join("alone")).unwrap();
    for name in ["model.safetensors", "optimizer.bin", "random_states_0.pkl"] {
        fs::write(checkpoint_0.join(name), "").unwrap();
        fs::write(folder.path().join("alone").join(name), "").unwrap();
    }
    for line in ["verify run", "verify alone", "ls alone", "diff alone alone", "ls run"] {
        let found = checkpoint(folder.path(), line);
        let text = found.stdout.clone() + &found.stderr;
        assert!(text.contains("Python Accelerate") && text.contains("checkpoint convert"), "{line}: {text}");
        assert!(!text.contains("can be removed"), "{line}: {text}");
    }
}
