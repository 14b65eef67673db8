//! The commands of the seed documents, as they stand there: each ends well. The programs are stubs that print what they get.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rstest::rstest;

use crate::support::{Finished, accelerate};

/// The settings that the article shows as a default file.
const ARTICLE: &str = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\n\
    gpu_ids: all\nmachine_rank: 0\nmain_process_ip: 127.0.0.1\nmain_process_port: 29500\nmixed_precision: fp16\n\
    num_machines: 1\nnum_processes: 2\nuse_cpu: false\n";

/// A script that prints its arguments, and where it is in its run.
const SCRIPT: &str = "import os, sys\nprint('got', sys.argv[1:], os.environ.get('WORLD_SIZE', '1'))\n";

/// The command in a folder with the files that the documents speak of, where every question is answered by its default.
fn typed(words: &str, default_file: Option<&str>) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    };
    file("path_to_script.py", SCRIPT);
    file("train.py", SCRIPT);
    file("path_to_config.yaml", "num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n");
    if let Some(text) = default_file {
        file("home/accelerate/default_config.yaml", text);
    }
    // The program of the checks, where one that is installed would be.
    let checks = file("bin/conformance", "#!/bin/sh\n[ -d \"$3\" ]\n");
    std::fs::set_permissions(checks, PermissionsExt::from_mode(0o755)).unwrap();

    let mut command = accelerate();
    command.args(words.split_whitespace().skip(1)).current_dir(folder.path());
    command.env("HF_HOME", folder.path().join("home")).env("PATH", with_folder(&folder.path().join("bin")));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = answered(command);
    if words == "accelerate config" {
        let written = std::fs::read_to_string(folder.path().join("home/accelerate/default_config.yaml"));
        assert!(written.is_ok_and(|text| text.contains("compute_environment: LOCAL_MACHINE")), "{ended:?}");
    }
    ended
}

fn with_folder(folder: &Path) -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap();
    std::env::join_paths(std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path))).unwrap()
}

/// An empty line for every question.
fn answered(mut command: Command) -> Finished {
    let mut child = command.spawn().unwrap();
    // A command that asks nothing may have ended before.
    let _ = child.stdin.take().unwrap().write_all("\n".repeat(100).as_bytes());
    Finished::from(child.wait_with_output().unwrap())
}

#[rstest]
#[case("accelerate config", None, "")]
#[case("accelerate test", None, "12 passed, 0 failed")]
#[case("accelerate test --config_file path_to_config.yaml", None, "12 passed, 0 failed, on 2 processes")]
#[case("accelerate launch path_to_script.py --args_for_the_script", None, "got ['--args_for_the_script'] 1")]
#[case(
    "accelerate launch --config_file path_to_config.yaml path_to_script.py --args_for_the_script",
    None,
    "[rank 1] got ['--args_for_the_script'] 2"
)]
#[case("accelerate launch -h", None, "--num_machines")]
#[case("accelerate launch --multi_gpu -h", None, "--same_network")]
#[case("accelerate launch train.py", None, "got [] 1")]
#[case::with_the_file_of_the_article("accelerate launch --dry_run train.py", Some(ARTICLE), "MASTER_PORT=29500")]
#[case::with_the_file_of_the_article("accelerate launch --dry_run train.py", Some(ARTICLE), "WORLD_SIZE=2")]
#[case::with_the_file_of_the_article("accelerate launch --dry_run train.py", Some(ARTICLE), "MIXED_PRECISION=fp16")]
#[case::with_the_file_of_the_article("accelerate config validate", Some(ARTICLE), "0 errors")]
fn commands_of_the_seed_documents_can_be_typed(
    #[case] words: &str,
    #[case] default_file: Option<&str>,
    #[case] wanted: &str,
) {
    let ended = typed(words, default_file);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains(wanted), "{ended:?}");
}
