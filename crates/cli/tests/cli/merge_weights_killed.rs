//! What `accelerate merge-weights` leaves when it is killed, and what takes it away.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use rstest::rstest;
use safetensors::Dtype;

use crate::checkpoint::folders::{Tensor, Values, weight_file, write_checkpoint};
use crate::support::{Finished, accelerate, finished};

/// A model of 64 KiB in `in`, a checkpoint in `own`, and an empty folder `out`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    ["in", "out"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
    fs::write(path("in/model.safetensors"), weight_file(&[("a", Dtype::U8, vec![1 << 16], vec![7; 1 << 16])])).unwrap();
    write_checkpoint(&path("own"), 1, &[Tensor::f32("model", "a", &[1.0])], &Values::new());
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
    assert!(left.len() == 1 && left[0].starts_with(".model.") && left[0].ends_with(".saving"), "{left:?}");
    run(folder.path(), line).expect(0, &[]);
    assert!(names(&out).iter().all(|name| !name.ends_with(".saving")), "{:?}", names(&out));
    assert!(out.join(written).exists());
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
