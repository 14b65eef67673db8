//! `accelerate launch --dry_run`: what would be started, and nothing is.

use serde_json::Value;

use crate::support::{Finished, finished, launch, launch_script};

fn shown(num_processes: usize, flags: &[&str]) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let flags: Vec<_> = ["--dry_run"].iter().chain(flags).copied().collect();
    let mut command = launch_script(num_processes, &flags, "echo started | tee started");
    command.current_dir(folder.path()).env("CUDA_VISIBLE_DEVICES", "").env("SLURM_PROCID", "3");
    let ended = finished(command);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something was started, or a folder made");
    ended
}

#[test]
fn command_variables_cores_and_devices_are_shown() {
    let shown = shown(2, &["--mixed_precision", "bf16", "--tee", "1", "--log_dir", "logs"]);
    shown.expect(0, &[]);
    for line in [
        "nothing is started; a launch would start 2 of 2 processes on this machine\n",
        "/sh -c 'echo started | tee started'\n",
        "  ACCELERATE_MIXED_PRECISION=bf16\n",
        "  MASTER_PORT=(any free port)\n",
        "  ACCELERATE_RUN_SECRET=(not shown)\n",
        "  SLURM_PROCID is removed\n",
        "rank 0: device cpu, cores any of ",
        "rank 1: device cpu, cores any of ",
        "logs/none_RANDOM/attempt_0/1/stdout.log\n",
        "  RANK=1\n",
    ] {
        assert!(shown.stdout.contains(line), "{line:?} is missing in\n{}", shown.stdout);
    }
    // What all have is shown once.
    assert_eq!(shown.stdout.matches("WORLD_SIZE=2\n").count(), 3, "{}", shown.stdout);
}

#[test]
fn json_is_the_same_for_programs() {
    let flags = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "a", "--gpu_ids", "1", "--json"];
    let shown = shown(4, &flags);
    shown.expect(0, &[]);
    let json: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!(json["num_processes"], 4);
    assert_eq!(json["command"][2], "echo started | tee started");
    let ranks = json["ranks"].as_array().unwrap();
    assert_eq!(ranks.iter().map(|rank| rank["rank"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(ranks[1]["local_rank"], 1);
    assert!(!ranks[1]["cores"].as_array().unwrap().is_empty());
    let variables = &ranks[1]["environment"];
    assert_eq!((&variables["RANK"], &variables["MASTER_PORT"]), (&"3".into(), &"29500".into()));
    assert_eq!(variables["CUDA_VISIBLE_DEVICES"], "1");
    // Several machines are given one from outside.
    assert_eq!(variables.get("ACCELERATE_RUN_SECRET"), None);
}

#[test]
fn what_a_launch_would_fail_on_fails_here_too() {
    let mut command = launch(2, &["--dry_run"]);
    command.arg("/nowhere/train");
    finished(command).expect(127, &["/nowhere/train was not found"]);
    shown(2, &["--machine_rank", "3"]).expect(2, &["--machine_rank 3 is out of range"]);
    let mut command = launch(1, &["--json"]);
    command.arg("true");
    finished(command).expect(2, &["--dry_run"]);
}
