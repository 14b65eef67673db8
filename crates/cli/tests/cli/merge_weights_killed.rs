//! What `accelerate merge-weights` leaves when it is killed, and what takes it away.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use rstest::rstest;
use safetensors::Dtype;
use serde_json::json;

use crate::checkpoint::folders::{Tensor, Values, weight_file, write_checkpoint};
use crate::support::{Finished, accelerate, finished};

/// In which a writer says which files get their names, and which it has locked.
const NOTE: &str = ".model.merging.saving";

/// A model of 64 KiB in `in`, a checkpoint in `own` and one of 4 KiB in `large`, and an empty folder `out`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    ["in", "out"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
    fs::write(path("in/model.safetensors"), weight_file(&[("a", Dtype::U8, vec![1 << 16], vec![7; 1 << 16])])).unwrap();
    for (name, num_elements) in [("own", 1), ("large", 1 << 10)] {
        write_checkpoint(&path(name), 1, &[Tensor::f32("model", "a", &vec![1.0; num_elements])], &Values::new());
    }
    folder
}

fn run(folder: &Path, line: &str) -> Finished {
    let mut command = accelerate();
    command.args(line.split(' ')).current_dir(folder);
    finished(command)
}

/// A command that a signal ends when its file has 1 KiB.
fn killed(folder: &Path, line: &str) {
    let mut command = Command::new("env");
    let script = format!("ulimit -c 0; ulimit -f 1; exec \"$0\" {line}");
    command.args(["--default-signal=XFSZ", "sh", "-c", &script, env!("CARGO_BIN_EXE_accelerate")]).current_dir(folder);
    let found = finished(command);
    assert_eq!(found.code, None, "a signal ends it: {found:?}");
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[rstest]
#[case::merge("merge-weights in out", "model.safetensors")]
#[case::convert("checkpoint convert own out", "model.safetensors")]
fn what_a_killed_merge_has_left_goes_with_the_next_command(#[case] line: &str, #[case] written: &str) {
    let folder = folder();
    let out = folder.path().join("out");
    (0..2).for_each(|_| killed(folder.path(), "merge-weights in out"));
    // The second one has removed what the first has left.
    let left = names(&out);
    let is_temporary = |name: &String| name.starts_with(".model.") && name.ends_with(".saving");
    assert!(left.len() == 2 && left.iter().all(is_temporary) && left.contains(&NOTE.to_owned()), "{left:?}");
    run(folder.path(), line).expect(0, &[]);
    assert!(names(&out).iter().all(|name| !name.ends_with(".saving")), "{:?}", names(&out));
    assert!(out.join(written).exists());
}

/// What a merge leaves that is killed between the names of two of its files.
fn killed_between_names(out: &Path, with_index: bool) {
    let names =
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"];
    let noted = names.map(|name| {
        let path = out.join(name);
        fs::write(&path, name).unwrap();
        json!({ "name": name, "inode": fs::metadata(&path).unwrap().ino(), "bytes": name.len() })
    });
    fs::write(out.join(NOTE), json!(noted).to_string()).unwrap();
    if !with_index {
        fs::rename(out.join(names[2]), out.join(".model.a1.saving")).unwrap();
        fs::rename(out.join(names[1]), out.join(".model.a2.saving")).unwrap();
    }
}

/// Shards without their index are no weights, and nothing else would ever take them away.
#[rstest]
#[case::merge("merge-weights in out")]
#[case::convert("checkpoint convert own out")]
fn files_that_have_their_names_without_the_index_go_with_the_next_command(#[case] line: &str) {
    let folder = folder();
    let out = folder.path().join("out");
    killed_between_names(&out, false);
    run(folder.path(), line).expect(0, &[]);
    let found = names(&out);
    let is_left = |name: &String| name.contains("-of-") || name.ends_with(".saving");
    assert!(!found.iter().any(is_left) && found.contains(&"model.safetensors".to_owned()), "{found:?}");
}

/// A killed one that has given all names has done its work, and what somebody has put in the place of a shard is not its own.
#[rstest]
#[case::all_names(true, false, "exists already")]
#[case::another_file(false, true, "model-00001-of-00002.safetensors exists already")]
fn only_what_a_killed_merge_has_left_is_taken_back(
    #[case] with_index: bool,
    #[case] is_replaced: bool,
    #[case] words: &str,
) {
    let folder = folder();
    let out = folder.path().join("out");
    killed_between_names(&out, with_index);
    if is_replaced {
        fs::write(folder.path().join("new"), "another").unwrap();
        fs::rename(folder.path().join("new"), out.join("model-00001-of-00002.safetensors")).unwrap();
    }
    run(folder.path(), "merge-weights in out").expect(1, &[words]);
    assert!(out.join("model-00001-of-00002.safetensors").exists() && !out.join(NOTE).exists());
    assert_eq!(out.join("model.safetensors.index.json").exists(), with_index);
}

/// Two would mix their files.
#[test]
fn one_merge_at_a_time_writes_into_a_folder() {
    let folder = folder();
    let out = folder.path().join("out");
    let note = File::create(out.join(NOTE)).unwrap();
    note.lock().unwrap();
    run(folder.path(), "merge-weights in out --max_shard_size 1KB")
        .expect(1, &["another command is writing weights into out", "name another folder"]);
    assert_eq!(names(&out), [NOTE], "what the other one has written is left alone");
    drop(note);
    run(folder.path(), "merge-weights in out").expect(0, &[]);
    assert_eq!(names(&out), ["model.safetensors"]);
}

/// Only files that such a command may have written itself, and that nobody writes any more, are removed.
#[test]
fn what_is_written_and_what_is_of_others_stays() {
    let folder = folder();
    let out = folder.path().join("out");
    let stays = [
        ".model.a1",
        ".model.saving",
        ".model.a-1.saving",
        ".model.a.1.saving",
        ".other.a1.saving",
        ".checkpoint.a1.saving",
        "model.a1.saving",
        ".model.a1.saving~",
        ".model.locked1.saving",
        "config.json",
    ];
    for name in stays.iter().chain(&[".model.a1.saving", ".model.0123456789abcdef.saving"]) {
        fs::write(out.join(name), "something").unwrap();
    }
    fs::create_dir(out.join(".model.folder1.saving")).unwrap();
    symlink(folder.path().join("in/model.safetensors"), out.join(".model.link1.saving")).unwrap();
    assert!(Command::new("mkfifo").arg(out.join(".model.pipe1.saving")).status().unwrap().success());
    let lock = File::options().write(true).open(out.join(".model.locked1.saving")).unwrap();
    lock.lock().unwrap();
    run(folder.path(), "merge-weights in out").expect(0, &[]);
    let others = [".model.folder1.saving", ".model.link1.saving", ".model.pipe1.saving", "model.safetensors"];
    let mut wanted: Vec<&str> = stays.into_iter().chain(others).collect();
    wanted.sort_unstable();
    assert_eq!(names(&out), wanted);
    assert!(folder.path().join("in/model.safetensors").exists());
}

/// A save that was interrupted once its manifest was there is whole, and the next load gives its files their names.
#[test]
fn files_of_a_save_that_counts_stay() {
    let folder = folder();
    let out = folder.path().join("out");
    for name in ["model.manifest.json", ".model.a1.saving"] {
        fs::write(out.join(name), "{}").unwrap();
    }
    run(folder.path(), "merge-weights in out").expect(1, &["model.manifest.json exists already"]);
    run(folder.path(), "checkpoint convert own out").expect(1, &["out exists already"]);
    assert_eq!(names(&out), [".model.a1.saving", "model.manifest.json"]);
}

/// A destination that is refused stays as it is.
#[rstest]
#[case::with_a_file_of_the_user(&["notes.txt"], false)]
#[case::with_one_that_is_written(&[], true)]
fn a_folder_that_is_not_free_is_not_cleaned_by_convert(#[case] others: &[&str], #[case] is_locked: bool) {
    let folder = folder();
    let out = folder.path().join("out");
    others.iter().chain(&[".model.a1.saving"]).for_each(|name| fs::write(out.join(name), "").unwrap());
    let file = File::options().write(true).open(out.join(".model.a1.saving")).unwrap();
    if is_locked {
        file.lock().unwrap();
    }
    run(folder.path(), "checkpoint convert own out").expect(1, &["out exists already"]);
    assert_eq!(names(&out).len(), others.len() + 1);
}

/// What a conversion writes is hidden beside its place, and goes with the next one to it. Long names have something that stands for them.
#[rstest]
#[case::short("x", ".x.")]
#[case::long(&"x".repeat(250), ".")]
fn what_a_killed_conversion_has_left_is_hidden_and_goes_with_the_next_one(#[case] name: &str, #[case] begins: &str) {
    let folder = folder();
    let parent = folder.path().join("converted");
    let line = format!("checkpoint convert large converted/{name}");
    (0..2).for_each(|_| killed(folder.path(), &line));
    let left = names(&parent);
    assert!(left.len() == 1 && left[0].starts_with(begins) && left[0].ends_with(".converting"), "{left:?}");
    run(folder.path(), &line).expect(0, &[]);
    assert_eq!(names(&parent), [name]);
}
