//! The reference's own tests of its launcher, under their names (`tests/test_cli.py`, `tests/test_launch.py`). What a test there looks for
//! inside of Python's parser is looked for here in what a launch starts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;

use crate::support::{Finished, accelerate, finished};

/// Files as versions 0.5 to 1.15 of the reference have written them.
const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../parity/config/read");

/// What a Rust program is not started with, although Python Accelerate's parser reads it, and the reason. Its test leaves out
/// `fp8`, `mpi` and `sagemaker`.
const REFUSED: [(&str, &str); 10] = [
    ("0_11_deepspeed_file.yaml", "/data/zero3.json"),
    ("0_11_fsdp_without_prefix.yaml", "only SIZE_BASED_WRAP counts parameters"),
    ("0_14_dynamo_word.yaml", "needs Python"),
    ("0_18_dynamo_config.yaml", "needs Python"),
    ("0_28_mpi.yaml", "start the program with mpirun itself"),
    ("0_30_megatron.yaml", "Megatron-LM is not available"),
    ("0_30_sagemaker.yaml", "Amazon SageMaker is not available"),
    ("1_08_regional.yaml", "nothing is compiled"),
    ("1_10_deepspeed_auto.yaml", "which is refused"),
    ("by_hand_fp8_msamp.json", "MS-AMP is not available"),
];

fn launched(words: &[&str]) -> Finished {
    let mut command = accelerate();
    command.arg("launch").args(words);
    finished(command)
}

/// What a launch with these flags would start.
#[track_caller]
fn planned(flags: &[&str]) -> Value {
    let shown = launched(&[flags, &["--dry_run", "--json", "sh", "-c", "true"]].concat());
    shown.expect(0, &[]);
    serde_json::from_str(&shown.stdout).unwrap()
}

fn written(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn test_no_config() {
    let ended = launched(&["--monitor_interval", "0.1", "sh", "-c", "echo trained"]);
    ended.expect(0, &[]);
    assert_eq!(ended.stdout, "trained\n");
}

#[test]
fn test_config_compatibility() {
    let mut num_files = 0;
    for entry in fs::read_dir(FILES).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let ended = launched(&["--config_file", path.to_str().unwrap(), "--no_prefix", "sh", "-c", "echo trained"]);
        match REFUSED.iter().find(|(refused, _)| *refused == name) {
            Some((_, why)) => ended.expect(2, &[why, "error: "]),
            None => {
                assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
                assert!(
                    ended.stdout.lines().all(|line| line == "trained") && !ended.stdout.is_empty(),
                    "{name}: {ended:?}"
                );
            }
        }
        num_files += 1;
    }
    assert!(num_files > 40, "{num_files} files in {FILES}");
}

#[test]
fn test_invalid_keys() {
    let folder = tempfile::tempdir().unwrap();
    let text = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\ninvalid_key: a\nanother_invalid_key: b\n";
    let file = written(folder.path(), "invalid_keys.yaml", text);
    let ended = launched(&["--config_file", &file, "sh", "-c", "echo trained"]);
    ended.expect(2, &["invalid_keys.yaml:4", "invalid_key"]);
    assert_eq!(ended.stdout, "");
}

/// The checks themselves are a program that takes long; what stands for it here says that it was asked.
#[test]
fn test_accelerate_test() {
    let folder = tempfile::tempdir().unwrap();
    let program = written(folder.path(), "checks", "#!/bin/sh\nexit 0\n");
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = accelerate();
    command.args(["test", "--cpu", "--program", &program]);
    let ended = finished(command);
    ended.expect(0, &[]);
    assert!(ended.stdout.contains("ok    test_script") && ended.stdout.contains(" 0 failed"), "{ended:?}");
}

/// There `mpirun` is called by the launcher. Here it starts the program, or launches that take its ranks' places.
#[test]
fn test_mpi_multicpu_config_cmd() {
    let file = format!("{FILES}/0_28_mpi.yaml");
    let cure = "start the program with mpirun itself: its variables are understood";
    launched(&["--config_file", &file, "true"]).expect(2, &["mpirun_config.mpirun_hostfile", cure]);
    let mut command = accelerate();
    command.args(["launch", "--cpu", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE"]);
    command.env("OMPI_COMM_WORLD_RANK", "3").env("OMPI_COMM_WORLD_SIZE", "16");
    assert_eq!(finished(command).stdout, "3 of 16\n");
}

/// Flags go before the file, which goes before defaults.
#[test]
fn test_validate_launch_command() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        "debug: true\nnum_processes: 1\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sync_module_states: false\n";
    let file = written(folder.path(), "validate.yaml", text);
    let plan = planned(&["--num-processes", "2", "--config-file", &file]);
    let variables = &plan["ranks"][0]["environment"];
    assert_eq!(plan["num_processes"], 2);
    assert_eq!(
        (&variables["ACCELERATE_DEBUG_MODE"], &variables["FSDP_SYNC_MODULE_STATES"]),
        (&"true".into(), &"false".into())
    );
}

#[test]
fn test_hyphen() {
    let plan = planned(&["--multi-gpu", "--use-fsdp", "--num-processes", "4"]);
    assert_eq!(
        (&plan["num_processes"], &plan["ranks"][0]["environment"]["ACCELERATE_USE_FSDP"]),
        (&4.into(), &"true".into())
    );
    assert_eq!(planned(&["--multi-gpu", "--use-fsdp", "--num_processes", "4"])["num_processes"], 4);
}

#[test]
fn test_underscore() {
    let plan = planned(&["--multi_gpu", "--use_fsdp", "--num_processes", "4"]);
    assert_eq!(
        (&plan["num_processes"], &plan["ranks"][0]["environment"]["ACCELERATE_USE_FSDP"]),
        (&4.into(), &"true".into())
    );
    assert_eq!(planned(&["--multi_gpu", "--use_fsdp", "--num-processes", "4"])["num_processes"], 4);
}

/// Each flag has one spelling there.
#[test]
fn test_duplicate_entities() {
    let help = launched(&["--help"]);
    help.expect(0, &[]);
    let words = help.stdout.split(|letter: char| !(letter.is_alphanumeric() || "-_".contains(letter)));
    let flags: Vec<&str> = words.filter_map(|word| word.strip_prefix("--")).collect();
    assert!(flags.contains(&"num_processes") && flags.contains(&"main_process_ip"));
    for flag in flags.iter().filter(|flag| flag.contains('_')) {
        let twin = flag.replace('_', "-");
        // An introduction names one of them.
        let most = usize::from(twin == "num-processes");
        assert!(flags.iter().filter(|other| **other == twin).count() <= most, "--{twin}");
    }
}

#[test]
fn test_auto_port_selection() {
    let ended =
        launched(&["--num_processes", "2", "--main_process_port", "0", "--no_prefix", "sh", "-c", "echo $MASTER_PORT"]);
    ended.expect(0, &[]);
    let ports: Vec<u16> = ended.stdout.lines().map(|line| line.parse().unwrap()).collect();
    assert!(ports.len() == 2 && ports[0] == ports[1] && ports[0] > 0, "{ports:?}");
}

/// All of it comes through, although nobody could keep it, and the cause is told once more.
#[test]
fn test_child_stderr_is_written_through_and_attached() {
    let script = "yes xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx | head -n 200000 >&2; echo the real cause >&2; exit 1";
    let ended = launched(&["--num_processes", "2", "--no_prefix", "sh", "-c", script]);
    ended.expect(1, &["last lines of rank ", "\n    the real cause\n"]);
    assert!(ended.stderr.lines().filter(|line| line.starts_with("xxxx")).count() >= 200_000);
}
