//! The first commands that somebody types: `setup`, `new` and `doctor`. libtorch is a folder of empty files here.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use rstest::rstest;
use rustix::process::Signal;

use crate::support::{Witness, accelerate, finished, send};

/// A folder that looks like a libtorch of this version.
fn libtorch(version: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for file in [
        "include/torch/csrc/api/include/torch/torch.h",
        "lib/libtorch_cpu.so",
        "lib/libtorch_cpu.dylib",
        "lib/libc10.so",
        "lib/libc10.dylib",
    ] {
        fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
        fs::write(root.join(file), "").unwrap();
    }
    fs::write(root.join("build-version"), version).unwrap();
    folder
}

/// The command in `folder`, with a cache of its own that is empty.
fn in_folder(folder: &Path, libtorch: &Path, arguments: &[&str]) -> Command {
    let mut command = accelerate();
    command.args(arguments).current_dir(folder).env("LIBTORCH", libtorch).env("XDG_CACHE_HOME", folder.join("cache"));
    command
}

fn project() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("src")).unwrap();
    fs::write(folder.path().join("Cargo.toml"), "[package]\nname = \"mine\"\n").unwrap();
    folder
}

#[test]
fn setup_tells_cargo_once_and_says_what_it_wrote() {
    let (project, libtorch) = (project(), libtorch("2.11.0+cpu\n"));
    // From a folder within the project, too.
    let setup = || finished(in_folder(&project.path().join("src"), libtorch.path(), &["setup"]));
    let first = setup();
    first.expect(0, &[]);
    assert!(first.stdout.contains("libtorch 2.11.0 in") && first.stdout.contains("(from LIBTORCH)"), "{first:?}");
    assert!(first.stdout.contains("Wrote") && first.stdout.contains(".cargo/config.toml"), "{first:?}");
    let text = || fs::read_to_string(project.path().join(".cargo/config.toml")).unwrap();
    let before = text();
    assert!(before.contains("LIBTORCH = { value = \".libtorch\", relative = true, force = true }"), "{before}");
    assert!(project.path().join(".libtorch/lib/libc10.so").exists());

    let second = setup();
    second.expect(0, &[]);
    assert!(second.stdout.contains("names it already"), "{second:?}");
    assert_eq!(text(), before);
}

#[rstest]
#[case::nothing("absent", "there is nothing")]
#[case::a_file("Cargo.toml", "there is a file")]
#[case::not_libtorch("src", "not a libtorch")]
fn setup_and_doctor_refuse_a_libtorch_that_is_none_and_say_the_cure(#[case] name: &str, #[case] found: &str) {
    let project = project();
    let named = project.path().join(name);
    let setup = finished(in_folder(project.path(), &named, &["setup"]));
    setup.expect(1, &["LIBTORCH", name, found, "unset LIBTORCH", "accelerate setup"]);
    assert!(!project.path().join(".cargo").exists() && !project.path().join(".libtorch").exists());
    let doctor = finished(in_folder(project.path(), &named, &["doctor"]));
    doctor.expect(1, &[]);
    assert!(doctor.stdout.contains("PROBLEM libtorch") && doctor.stdout.contains(found), "{doctor:?}");
}

#[test]
fn another_version_is_refused_by_both_versions() {
    let (project, libtorch) = (project(), libtorch("2.9.1"));
    let setup = finished(in_folder(project.path(), libtorch.path(), &["setup"]));
    setup.expect(1, &["libtorch 2.9.1", "2.11.0"]);
}

#[test]
fn setup_wants_a_project_where_one_is_named() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    let named = finished(in_folder(folder.path(), libtorch.path(), &["setup", "--folder", "."]));
    named.expect(1, &["no project", "accelerate new"]);
    let unnamed = finished(in_folder(folder.path(), libtorch.path(), &["setup"]));
    unnamed.expect(0, &[]);
    assert!(unnamed.stdout.contains("no project here"), "{unnamed:?}");
    assert!(!folder.path().join(".cargo").exists());
}

#[test]
fn a_folder_of_ones_own_in_the_configuration_is_checked_and_kept() {
    let (project, libtorch) = (project(), libtorch("2.11.0"));
    let config = project.path().join(".cargo/config.toml");
    fs::create_dir(project.path().join(".cargo")).unwrap();
    let text = format!("[env]\nLIBTORCH = \"{}\" # mine\n", libtorch.path().display());
    fs::write(&config, &text).unwrap();
    let setup = finished(in_folder(project.path(), Path::new(""), &["setup"]));
    setup.expect(0, &[]);
    assert!(setup.stdout.contains("stays in force"), "{setup:?}");
    assert_eq!(fs::read_to_string(&config).unwrap(), text);

    fs::write(&config, "[env]\nLIBTORCH = \"absent\"\n").unwrap();
    let wrong = finished(in_folder(project.path(), Path::new(""), &["setup"]));
    wrong.expect(1, &["cargo configuration", "absent"]);
}

#[test]
fn doctor_finds_what_is_missing_and_its_json_says_the_same() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    let mut healthy = in_folder(folder.path(), libtorch.path(), &["doctor", "--json"]);
    // Programs are found, whatever they are.
    healthy.env("CXX", "cargo");
    let healthy = finished(healthy);
    let checks: serde_json::Value = serde_json::from_str(&healthy.stdout).unwrap();
    let checks = checks.as_array().unwrap();
    assert_eq!(checks[0]["name"], "libtorch");
    assert_eq!(checks[0]["verdict"], "ok", "{healthy:?}");

    let mut ill = in_folder(folder.path(), libtorch.path(), &["doctor"]);
    ill.env("CXX", folder.path().join("no-compiler"));
    let ill = finished(ill);
    ill.expect(1, &[]);
    assert!(ill.stdout.contains("PROBLEM C++ compiler") && ill.stdout.contains("Install g++"), "{ill:?}");
    assert_eq!(ill.stdout.lines().filter(|line| !line.starts_with(' ')).count(), checks.len() + 2, "{ill:?}");
}

/// A clone of the library, as far as a manifest is concerned.
fn clone() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("crates/accelerate");
    fs::create_dir_all(&library).unwrap();
    fs::write(library.join("Cargo.toml"), "[package]\nname = \"accelerate-rs\"\n").unwrap();
    folder
}

#[rstest]
fn a_new_project_is_whole_and_formatted(#[values("nlp", "cv", "lm")] template: &str) {
    let (folder, libtorch, clone) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"), clone());
    let arguments = ["new", "my-demo", "--template", template, "--accelerate", clone.path().to_str().unwrap()];
    let new = finished(in_folder(folder.path(), libtorch.path(), &arguments));
    new.expect(0, &[]);
    assert!(new.stdout.contains("by the path that you named") && new.stdout.contains("cargo test"), "{new:?}");
    let project = folder.path().join("my-demo");
    let manifest = fs::read_to_string(project.join("Cargo.toml")).unwrap();
    assert!(manifest.contains("name = \"my-demo\"") && manifest.contains("crates/accelerate\""), "{manifest}");
    for file in [".cargo/config.toml", ".gitignore", "README.md", "build.rs", ".libtorch/include"] {
        assert!(project.join(file).exists(), "{file}");
    }
    let mut rustfmt = Command::new("rustfmt");
    rustfmt.current_dir(&project).args(["--check", "src/main.rs", "src/lib.rs", "tests/training.rs", "build.rs"]);
    finished(rustfmt).expect(0, &[]);
    let mut metadata = Command::new("cargo");
    metadata.current_dir(&project).args(["read-manifest", "--offline"]);
    let metadata = finished(metadata);
    metadata.expect(0, &[]);
    assert!(metadata.stdout.contains("\"my_demo\""), "{metadata:?}");
}

#[test]
fn a_new_project_within_a_workspace_is_one_of_its_own() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    fs::write(folder.path().join("Cargo.toml"), "[workspace]\n").unwrap();
    finished(in_folder(folder.path(), libtorch.path(), &["new", "demo"])).expect(0, &[]);
    assert!(fs::read_to_string(folder.path().join("demo/Cargo.toml")).unwrap().contains("[workspace]"));
    assert!(folder.path().join("demo/.cargo/config.toml").exists() && !folder.path().join(".cargo").exists());
}

#[test]
fn new_writes_over_nothing() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    fs::create_dir(folder.path().join("full")).unwrap();
    fs::write(folder.path().join("full/notes.txt"), "mine").unwrap();
    fs::write(folder.path().join("file"), "mine").unwrap();
    for (name, found) in [("full", "a folder with files"), ("file", "a file")] {
        let refused = finished(in_folder(folder.path(), libtorch.path(), &["new", name]));
        refused.expect(1, &[name, found, "--path"]);
    }
    assert_eq!(fs::read_dir(folder.path().join("full")).unwrap().count(), 1);
    fs::create_dir(folder.path().join("empty")).unwrap();
    finished(in_folder(folder.path(), libtorch.path(), &["new", "empty"])).expect(0, &[]);
}

#[rstest]
#[case(&["new", "MyModel"], "`my_model`")]
#[case(&["new", "2fast"], "my_fast")]
#[case(&["new", "fn"], "my_fn")]
#[case(&["new", "demo", "--accelerate", "absent"], "name the folder of a clone")]
fn new_refuses_with_a_cure(#[case] arguments: &[&str], #[case] cure: &str) {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    finished(in_folder(folder.path(), libtorch.path(), arguments)).expect(1, &[": error: ", cure]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Half a project would stand in the way of the next try.
#[test]
fn new_with_a_wrong_libtorch_leaves_nothing_and_the_next_try_works() {
    let (folder, wrong, right) = (tempfile::tempdir().unwrap(), libtorch("2.9.1"), libtorch("2.11.0"));
    for (named, found) in [(wrong.path(), "libtorch 2.9.1"), (Path::new("absent"), "where there is nothing")] {
        let refused = finished(in_folder(folder.path(), named, &["new", "demo", "--path", "my projects/demo"]));
        refused.expect(1, &["accelerate new: error: LIBTORCH", found, "2.11.0", "unset LIBTORCH", "accelerate setup"]);
        assert_eq!((refused.stdout.as_str(), fs::read_dir(folder.path()).unwrap().count()), ("", 0));
    }
    let new = finished(in_folder(folder.path(), right.path(), &["new", "demo", "--path", "my projects/demo"]));
    new.expect(0, &[]);
    assert!(new.stdout.contains("\n  cd 'my projects/demo'\n"), "{new:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(folder.path().join("my projects/demo/.cargo/config.toml").exists());
}

#[test]
fn a_folder_that_looks_like_a_flag_can_be_typed_as_shown() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    let new = finished(in_folder(folder.path(), libtorch.path(), &["new", "demo", "--path=-x"]));
    new.expect(0, &[]);
    assert!(new.stdout.contains("\n  cd ./-x\n"), "{new:?}");
}

/// Builds use what was linked, whatever the variable says by then. Only `setup` looks at it again.
#[test]
fn a_wrong_libtorch_is_refused_by_setup_and_does_no_harm_to_builds() {
    let (project, right, wrong) = (project(), libtorch("2.11.0"), libtorch("2.9.1"));
    finished(in_folder(project.path(), right.path(), &["setup"])).expect(0, &[]);
    let config = || fs::read_to_string(project.path().join(".cargo/config.toml")).unwrap();
    let before = config();
    let doctor = finished(in_folder(project.path(), wrong.path(), &["doctor"]));
    assert!(doctor.stdout.contains("ok      libtorch: 2.11.0") && doctor.stdout.contains("linked"), "{doctor:?}");
    let again = finished(in_folder(project.path(), wrong.path(), &["setup"]));
    again.expect(1, &["LIBTORCH points at", "libtorch 2.9.1", "unset LIBTORCH"]);
    assert_eq!(config(), before);
    assert_eq!(fs::read_link(project.path().join(".libtorch/include")).unwrap(), right.path().join("include"));
}

/// A new project needs nothing; one that was there needs what `new` would have written.
#[test]
fn setup_says_what_else_a_project_needs_and_what_it_says_is_enough() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    finished(in_folder(folder.path(), libtorch.path(), &["new", "demo"])).expect(0, &[]);
    let demo = folder.path().join("demo");
    let setup = || finished(in_folder(&demo, libtorch.path(), &["setup"])).stdout;
    assert_eq!(setup().lines().count(), 2, "{}", setup());
    let (manifest, script) = (demo.join("Cargo.toml"), demo.join("build.rs"));
    let whole = fs::read_to_string(&manifest).unwrap();
    let line = whole.lines().find(|line| line.contains("accelerate-rs")).unwrap();
    fs::write(&manifest, whole.replace(line, "")).unwrap();
    fs::remove_file(&script).unwrap();
    let said = setup();
    assert!(said.contains("Cargo.toml does not name the library yet") && said.contains("has no build.rs"), "{said}");
    assert!(said.contains(&format!("\n    {line}\n")) && said.contains("\n    fn main() {\n"), "{said}");
}

/// A program of this name, first on the search path.
fn with_program(folder: &Path, name: &str, script: &str) -> OsString {
    let program = folder.join("bin").join(name);
    fs::create_dir_all(folder.join("bin")).unwrap();
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let others = std::env::var_os("PATH").unwrap();
    std::env::join_paths(std::iter::once(folder.join("bin")).chain(std::env::split_paths(&others))).unwrap()
}

/// Each asks another program something, and each names the one that prints without end.
#[rstest]
#[case(&["doctor"], "c++", "PROBLEM C++ compiler: `c++ --version` printed more than")]
#[case(&["doctor"], "rustc", "PROBLEM rustc: `rustc --version` printed more than")]
#[case(&["setup"], "python3", "accelerate setup: error: `python3 -c")]
#[case(&["new", "demo"], "python3", "accelerate new: error: `python3 -c")]
#[case(&["launch", "no-such-program"], "cargo", "accelerate launch: error: `")]
fn a_program_that_floods_is_ended_and_named(#[case] words: &[&str], #[case] program: &str, #[case] said: &str) {
    let project = project();
    let mut command = in_folder(project.path(), Path::new(""), words);
    command.env("PATH", with_program(project.path(), program, "exec yes")).env_remove("CXX");
    command.env_remove("CARGO_TARGET_DIR");
    let ended = finished(command);
    ended.expect(1, &[]);
    let all = format!("{}{}", ended.stdout, ended.stderr);
    assert!(all.contains(said) && all.contains("16777216 bytes") && all.contains("in a shell to see"), "{all}");
    assert!(!project.path().join("demo").exists());
}

/// A download may take long, so it has no limit of time. It does not fill the memory, and what pip says last is shown.
#[rstest]
#[case("exec yes", "`python3 -m pip download")]
#[case("echo no such wheel >&2; exit 7", "pip could not download nvidia")]
#[case("head -c 100000 /dev/zero | tr '\\0' x; echo; echo no such wheel; exit 7", "no such wheel")]
fn a_download_that_fails_is_told_shortly(#[case] download: &str, #[case] said: &str) {
    let project = project();
    let script = format!(
        "case \"$*\" in *version_info*) echo 3;; *'download --help'*) echo --resume-retries;; *'pip download'*) {download};; esac"
    );
    let mut command = in_folder(project.path(), Path::new(""), &["setup"]);
    command.env("PATH", with_program(project.path(), "python3", &script));
    let setup = finished(command);
    setup.expect(1, &["accelerate setup: error: ", said]);
    assert!(setup.stderr.len() < 3000, "{} bytes", setup.stderr.len());
}

/// What is asked has a process group of its own, which a signal to this command alone would not reach.
#[test]
fn a_command_that_is_told_to_stop_ends_what_it_asked() {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    let compiler = folder.path().join("bin/c++");
    with_program(folder.path(), "c++", &format!("echo ready >/dev/fd/$WITNESS; {}", crate::support::LIVE_ON));
    let mut command = in_folder(folder.path(), libtorch.path(), &["doctor"]);
    command.env("CXX", compiler);
    let mut witness = Witness::new();
    let mut doctor = witness.start(command);
    witness.wait_for("ready", 1);
    send(&doctor, Signal::TERM);
    witness.expect_nobody_survives();
    assert_eq!(doctor.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
}

#[rstest]
#[case::none(|_: &Path| (), "ok      configuration file: there is no default one")]
#[case::good(|path: &Path| fs::write(path, "num_processes: 2\n").unwrap(), "ok      configuration file: ")]
#[case::wrong(|path: &Path| fs::write(path, "num_processes: many\n").unwrap(), "has 1 error; the first: ")]
#[case::dangling(|path: &Path| std::os::unix::fs::symlink("gone", path).unwrap(), "PROBLEM configuration file: ")]
#[case::pipe(pipe, "it is a pipe")]
fn doctor_looks_at_the_default_configuration_file(#[case] make: fn(&Path), #[case] said: &str) {
    let (folder, libtorch) = (tempfile::tempdir().unwrap(), libtorch("2.11.0"));
    fs::create_dir(folder.path().join("accelerate")).unwrap();
    make(&folder.path().join("accelerate/default_config.yaml"));
    let mut doctor = in_folder(folder.path(), libtorch.path(), &["doctor"]);
    doctor.env("HF_HOME", folder.path()).env("CXX", "cargo");
    let doctor = finished(doctor);
    assert!(doctor.stdout.contains(said), "{}", doctor.stdout);
    let is_fine = doctor.stdout.contains("ok      configuration file");
    assert_eq!(doctor.stdout.contains("accelerate config"), !is_fine, "{}", doctor.stdout);
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}
