//! `accelerate export-model`, with a shell script in the place of Python, and with PyTorch where there is one.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{Finished, accelerate, finished};

/// What a script begins with: `out` is the package to write, and `say` reports what failed.
const BEGINNING: &str = r#"#!/bin/sh
field() { printf %s "$order" | sed "s/.*\"$1\":\"\([^\"]*\)\".*/\1/"; }
order=$3
out=$(field output)
write() { echo new > "$out"; echo new > "${out%pt2}safetensors"; }
say() { printf '{"stage":"%s","text":"%s","place":""}' "$1" "$2" > "$(field failure)"; exit 1; }
"#;

/// An export to `out/model.pt2` of a folder, by a script.
fn export(folder: &Path, script: &str) -> Command {
    let python = folder.join("python");
    fs::write(&python, format!("{BEGINNING}{script}\n")).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = accelerate();
    command.current_dir(folder).args(["export-model", "models:build", "--inputs", "int64[batch=4]", "--python"]);
    command.arg(&python).args(["--output", "out/model.pt2"]);
    command
}

/// A folder with `out` in it, where files have this content.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    for (name, content) in files {
        fs::write(folder.path().join("out").join(name), content).unwrap();
    }
    folder
}

/// The names in `out`, with what files say.
fn left(folder: &Path) -> Vec<String> {
    let content = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => format!("{} {}", path.file_name().unwrap().display(), text.trim()),
        Err(_) => path.file_name().unwrap().display().to_string(),
    };
    let mut names: Vec<_> =
        fs::read_dir(folder.join("out")).unwrap().map(|entry| content(entry.unwrap().path())).collect();
    names.sort_unstable();
    names
}

const OLD: [(&str, &str); 2] = [("model.pt2", "old"), ("model.safetensors", "old")];

#[rstest]
#[case::new(&[], "", "write", 0, "are written", &["model.pt2 new", "model.safetensors new"])]
#[case::there(&OLD, "", "write", 1, "--overwrite replaces it", &["model.pt2 old", "model.safetensors old"])]
#[case::replaced(&OLD, "--overwrite", "write", 0, "are written", &["model.pt2 new", "model.safetensors new"])]
#[case::left_by_a_stop(&OLD[1..], "", "write", 1, "without its package", &["model.safetensors old"])]
#[case::nothing(&OLD, "--overwrite", "true", 1, "ended without a package", &["model.pt2 old", "model.safetensors old"])]
#[case::failed(&[], "", "say export 'data-dependent'", 1, "torch.where", &[])]
#[case::no_index(&[], "", r#"case $3 in *'"integers":2'*) say examples IndexError;; esac; write"#, 0, "are written", &["model.pt2 new", "model.safetensors new"])]
#[case::no_index_either(&[], "", "say examples 'IndexError: 1'", 1, "batch=4; other sizes", &[])]
fn what_is_there_afterwards(
    #[case] files: &[(&str, &str)],
    #[case] flags: &str,
    #[case] script: &str,
    #[case] code: i32,
    #[case] words: &str,
    #[case] wanted: &[&str],
) {
    let folder = folder(files);
    let mut command = export(folder.path(), script);
    let found = finished_with(command.args(flags.split_whitespace()));
    assert_eq!(found.code, Some(code), "{found:?}");
    assert!(format!("{}{}", found.stdout, found.stderr).contains(words), "{found:?}");
    assert_eq!(left(folder.path()), wanted, "{found:?}");
}

fn finished_with(command: &mut Command) -> Finished {
    command.output().unwrap().into()
}

/// Values of the new package beside the old package would be loaded with it, where shapes are the same.
#[test]
fn an_old_package_that_stays_keeps_its_values() {
    let folder = folder(&OLD[1..]);
    fs::create_dir(folder.path().join("out/model.pt2")).unwrap();
    let mut command = export(folder.path(), "write");
    command.arg("--overwrite");
    finished(command).expect(1, &["model.pt2 could not be written"]);
    assert_eq!(left(folder.path()), ["model.pt2", "model.safetensors old"]);
}

/// Python is told, too.
#[rstest]
#[case(Signal::INT)]
#[case(Signal::TERM)]
#[case(Signal::HUP)]
fn a_signal_leaves_nothing_behind(#[case] signal: Signal) {
    let folder = folder(&OLD);
    let mut command = export(folder.path(), "echo ready; exec sleep 1000");
    let mut child = command.arg("--overwrite").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    kill_process(Pid::from_child(&child), signal).unwrap();
    // Its end is that of the script as well, which has the same pipe.
    assert_eq!(stdout.read_line(&mut line).unwrap(), 0);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.signal(), output.stderr.as_slice()), (Some(signal.as_raw()), &b""[..]));
    assert_eq!(left(folder.path()), ["model.pt2 old", "model.safetensors old"]);
}

/// A Python that has the PyTorch of packages.
fn python() -> Option<&'static str> {
    let question = "import safetensors.torch, torch; print(torch.__version__)";
    let has_torch = |python: &&str| {
        let said = Command::new(python).args(["-c", question]).output();
        said.is_ok_and(|said| said.stdout.starts_with(b"2.11.0"))
    };
    let found = ["python3", "python3.11"].into_iter().find(has_torch);
    if found.is_none() {
        eprintln!("skipped, because no Python here has torch 2.11.0 and safetensors");
    }
    found
}

/// What PyTorch exports is not always what the model computes.
#[rstest]
#[case::derivative("build_tripled", "the gradient of linear.weight differs")]
#[case::derivative_beside_padding("build_without_padding", "the gradient of linear.weight differs")]
#[case::not_finite("build_only_padding", "whole numbers 0 and 1 in turn")]
#[case::state_in_python("build_counting", "the loss differs")]
#[case::state_in_evaluation("build_evaluating", "in the pass of \"eval\"")]
#[case::random_numbers_of_python("build_drawing", "draws random numbers of Python")]
#[case::assigned_buffer("build_assigning", "assigns another tensor to mean")]
#[case::branch("build_branching", "torch.where")]
#[case::no_model("no_model", "int is not a Module subclass")]
#[case::raising("raising", "ValueError: no configuration, at ")]
#[case::missing("missing", "cannot be imported from this folder")]
fn what_a_package_would_compute_wrongly_is_refused(#[case] function: &str, #[case] words: &str) {
    let Some(found) = exported(function) else { return };
    found.expect(1, &["accelerate export-model: error: ", words]);
    assert_eq!(found.stderr.trim_end().lines().count(), 1, "{}", found.stderr);
}

/// Buffers that are changed in place are kept, and labels that are all 0 are tried where 1 is none.
#[rstest]
#[case("build_in_place")]
#[case("build_one_row")]
fn what_a_package_computes_rightly_is_written(#[case] function: &str) {
    if let Some(found) = exported(function) {
        found.expect(0, &[]);
        assert!(found.stdout.contains("are written") || found.stderr.contains("are written"), "{found:?}");
    }
}

fn exported(function: &str) -> Option<Finished> {
    let python = python()?;
    let folder = tempfile::tempdir().unwrap();
    let mut command = accelerate();
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/export_model"));
    command.args(["export-model", &format!("models:{function}"), "--inputs", "float32[batch,4]", "int64[batch]"]);
    command.args(["--python", python, "--output"]).arg(folder.path().join("model.pt2"));
    command.env("TORCHINDUCTOR_VEC_ISA_OK", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    Some(finished(command))
}
