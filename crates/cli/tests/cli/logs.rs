//! `--tee` and `--log_dir`: output in files besides, named as torchrun names them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::support::{finished, launch, launch_script};

/// The files below the only run's folder, with what is in them.
fn files(log_dir: &Path) -> Vec<(String, String)> {
    let run = only_folder(log_dir);
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("none_"), "{run:?}");
    let mut files = Vec::new();
    for rank in fs::read_dir(run.join("attempt_0")).unwrap() {
        for file in fs::read_dir(rank.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            let name = path.strip_prefix(run.join("attempt_0")).unwrap().display().to_string();
            files.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    files.sort();
    files
}

fn only_folder(folder: &Path) -> PathBuf {
    let entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

const SAY: &str = "echo out $RANK; echo err $RANK >&2";

#[test]
fn output_goes_to_the_terminal_and_to_a_file_of_each_stream() {
    let folder = tempfile::tempdir().unwrap();
    let log_dir = folder.path().join("made/on/the/way");
    let ended = finished(launch_script(2, &["--tee", "3", "--log_dir", log_dir.to_str().unwrap()], SAY));
    ended.expect(0, &["[rank 0] err 0\n", "[rank 1] err 1\n", "files of the processes' output are in "]);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] out 0", "[rank 1] out 1"]);
    let wanted = [
        ("0/stderr.log", "err 0\n"),
        ("0/stdout.log", "out 0\n"),
        ("1/stderr.log", "err 1\n"),
        ("1/stdout.log", "out 1\n"),
    ];
    assert_eq!(files(&log_dir), wanted.map(|(name, text)| (name.to_owned(), text.to_owned())));
}

#[test]
fn each_rank_may_have_other_streams_and_one_process_has_some_too() {
    let folder = tempfile::tempdir().unwrap();
    let log_dir = folder.path().to_str().unwrap();
    finished(launch_script(2, &["-t", "1:1", "--log-dir", log_dir], SAY)).expect(0, &[]);
    assert_eq!(files(folder.path()), [("1/stdout.log".to_owned(), "out 1\n".to_owned())]);

    let folder = tempfile::tempdir().unwrap();
    let log_dir = folder.path().to_str().unwrap();
    let ended = finished(launch_script(1, &["--tee", "2", "--log_dir", log_dir, "-q"], SAY));
    // A single process shows what it would show without files.
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(0), "out\n", "err\n"));
    assert_eq!(files(folder.path()), [("0/stderr.log".to_owned(), "err\n".to_owned())]);
}

/// As under torchrun: the folder is made, and only a program that tells its errors there writes into it.
#[test]
fn a_folder_without_tee_holds_what_programs_write_there() {
    let folder = tempfile::tempdir().unwrap();
    let log_dir = folder.path().to_str().unwrap();
    let script = "echo '{}' >$TORCHELASTIC_ERROR_FILE; echo out";
    let ended = finished(launch_script(1, &["--log_dir", log_dir], script));
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("out\n", ""), "no output is said to be there");
    assert_eq!(files(folder.path()), [("0/error.json".to_owned(), "{}\n".to_owned())]);
}

#[test]
fn a_folder_for_temporary_files_is_made_where_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch_script(2, &["--tee", "1"], SAY);
    command.env("TMPDIR", folder.path());
    finished(command).expect(0, &[folder.path().to_str().unwrap()]);
    assert_eq!(files(&only_folder(folder.path())).len(), 2);
}

#[test]
fn a_folder_for_temporary_files_that_cannot_be_used_is_named_with_its_variable() {
    let mut command = launch_script(2, &["--tee", "1"], SAY);
    command.env("TMPDIR", "/proc/nowhere");
    let ended = finished(command);
    let cure = "name a folder for TMPDIR or --log_dir in which this user may make files";
    ended.expect(1, &["/proc/nowhere/accelerate_none_", ", because TMPDIR is /proc/nowhere; ", cure]);
    assert_eq!(ended.stdout, "");
}

#[test]
fn two_launches_do_not_share_files() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        finished(launch_script(2, &["--tee", "3", "--log_dir", folder.path().to_str().unwrap()], SAY)).expect(0, &[]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_before_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let ended = finished(launch_script(2, &["--tee", "3", "--log_dir", file.to_str().unwrap()], SAY));
    ended.expect(1, &["--log_dir", file.to_str().unwrap(), "cannot be written", "caused by"]);
    assert_eq!(ended.stdout, "");
    finished(launch_script(2, &["--log_dir", ""], SAY)).expect(2, &["--log_dir is empty"]);
    finished(launch_script(2, &["--tee", "0:1,2:1"], SAY)).expect(2, &["local rank 2", "from 0 to 1"]);
}

/// The disk is full from the first byte on: ranks go on, the terminal shows everything, and it is said once.
#[test]
fn a_full_disk_ends_nothing_and_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let full = folder.path().join("none_full/attempt_0/0");
    fs::create_dir_all(&full).unwrap();
    symlink("/dev/full", full.join("stdout.log")).unwrap();
    let config = accelerate_launch::LaunchConfig {
        tee: accelerate_core::config::Tee::All(accelerate_core::config::Streams { stdout: true, stderr: false }),
        log_dir: Some(folder.path().join("none_full")),
        // Two writes, so two failures.
        args: vec!["-c".into(), "echo one; /bin/true; echo two".into()],
        ..accelerate_launch::LaunchConfig::new(accelerate_launch::Program::Executable("sh".into()), 1)
    };
    let machine = accelerate_launch::Machine::probe();
    let plan = accelerate_launch::plan(&config, &["sh".into()], 1, &machine);
    let mut seen = Seen::default();
    accelerate_launch::supervise(&plan, &mut seen).unwrap();
    assert_eq!(seen.output, "one\ntwo\n");
    assert_eq!(seen.notices.len(), 1, "{:?}", seen.notices);
    assert!(seen.notices[0].contains("stdout.log cannot be written (No space left on device"), "{:?}", seen.notices);
}

#[derive(Default)]
struct Seen {
    output: String,
    notices: Vec<String>,
}

impl accelerate_launch::Reporter for Seen {
    fn output(&mut self, _: accelerate_launch::Source, bytes: &[u8]) -> std::io::Result<()> {
        self.output.push_str(std::str::from_utf8(bytes).unwrap());
        Ok(())
    }

    fn notice(&mut self, notice: &accelerate_launch::Notice) -> std::io::Result<()> {
        self.notices.push(notice.to_string());
        Ok(())
    }
}

#[test]
fn an_empty_folder_for_temporary_files_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch(2, &["--tee", "3"]);
    command.arg("true").env("TMPDIR", "").current_dir(folder.path());
    let ended = finished(command);
    ended.expect(0, &["output are in /"]);
    let made = ended.stderr.lines().find_map(|line| line.split_once("output are in ")).unwrap().1;
    fs::remove_dir_all(Path::new(made).parent().unwrap()).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
