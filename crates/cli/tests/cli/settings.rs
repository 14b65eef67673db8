//! What settings become: in the ranks, in warnings, and in refusals before any rank starts.

use std::fs;

use rstest::rstest;

use crate::support::{accelerate, finished, launch, launch_script};

const SAY: &str = "echo $ACCELERATE_USE_FSDP $OMP_NUM_THREADS";

#[test]
fn a_distributed_type_in_the_environment_reaches_the_ranks_as_a_switch() {
    let mut command = launch_script(2, &["--num_cpu_threads_per_process", "1", "--no_prefix"], SAY);
    command.env("ACCELERATE_DISTRIBUTED_TYPE", "FSDP");
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["true 1", "true 1"]);
}

#[test]
fn a_number_of_threads_that_nobody_means_is_told_once_and_replaced() {
    for value in ["0", "abc", "100000"] {
        let mut command = launch_script(2, &["--no_prefix"], "test $OMP_NUM_THREADS != $WRONG && echo usable");
        command.env("OMP_NUM_THREADS", value).env("WRONG", value);
        let ended = finished(command);
        ended.expect(0, &[&format!("OMP_NUM_THREADS is \"{value}\", but must be a whole number from 1 to")]);
        assert_eq!(ended.sorted_stdout(), ["usable", "usable"]);
        assert_eq!(ended.stderr.matches("OMP_NUM_THREADS").count(), 1, "{}", ended.stderr);
    }
    let mut command = launch_script(2, &["--no_prefix"], "echo $OMP_NUM_THREADS");
    command.env("OMP_NUM_THREADS", "1");
    let ended = finished(command);
    assert_eq!((ended.sorted_stdout(), ended.stderr.as_str()), (vec!["1", "1"], ""));
}

/// No rank has said anything when the launcher refuses a file.
#[test]
fn a_deepspeed_file_that_ranks_would_refuse_starts_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    let path = path.to_str().unwrap();
    let zero = "\"zero_optimization\": {\"stage\": 3}";
    for (json, words) in [
        (
            format!("{{{zero}, \"fp16\": {{\"enabled\": true}}, \"bf16\": {{\"enabled\": true}}}}"),
            "fp16.enabled and bf16",
        ),
        (format!("{{{zero}, \"train_batch_size\": 3}}"), "cannot be divided by"),
        (
            "{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}}".into(),
            "nvme_path is missing",
        ),
    ] {
        fs::write(path, json).unwrap();
        let ended = finished(launch_script(2, &["--use_deepspeed", "--deepspeed_config_file", path], "echo started"));
        ended.expect(2, &[words, "ds.json: "]);
        assert_eq!(ended.stdout, "");
    }
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    for flag in ["--config_file", "--deepspeed_config_file"] {
        for (path, words) in [("/dev/zero", "it is a device"), ("/", "it is a folder")] {
            let ended = finished(launch_script(1, &["--use_deepspeed", flag, path], "echo started"));
            ended.expect(2, &[words, path, "cannot be read"]);
            assert_eq!(ended.stdout, "");
        }
    }
}

#[test]
fn more_processes_than_a_machine_holds_are_refused() {
    for (number, words) in [
        (
            "99999999999999999999",
            "--num_processes is \"99999999999999999999\", but must be a whole number from 1 to 1048576",
        ),
        ("1048577", "--num_processes is \"1048577\", but must be a whole number from 1 to 1048576"),
        ("1048576", "more than the 4096"),
    ] {
        let mut command = accelerate();
        command.args(["launch", "--num_processes", number, "true"]);
        finished(command).expect(2, &[words]);
    }
}

#[test]
fn flags_of_the_reference_that_are_not_here_get_no_wrong_tip() {
    for (flag, words) in [
        ("--use_megatron_lm", "--use_megatron_lm is refused: Megatron-LM is not available"),
        ("--use-xpu", "--use_xpu is refused: CPUs and NVIDIA GPUs are available"),
        ("--machine_rank -1", "--machine_rank is \"-1\", but must be a whole number of at least 0"),
    ] {
        let words_of_flag: Vec<_> = flag.split(' ').chain(["true"]).collect();
        let ended = finished(launch(1, &words_of_flag));
        ended.expect(2, &[words]);
        assert!(!ended.stderr.contains("tip:"), "{}", ended.stderr);
    }
}

/// As the book has it: a run on one machine lets in nobody who knows a secret of the shell.
#[rstest]
#[case::one_machine(&["--num_processes", "2"], false)]
#[case::hosts(&["--hosts", "localhost:2"], true)]
#[case::a_command_for_each_machine(
    &["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--num_processes", "4"],
    true
)]
#[case::one_process(&["--num_processes", "1"], true)]
fn a_secret_of_the_shell_holds_only_where_machines_need_the_same(#[case] flags: &[&str], #[case] holds: bool) {
    let mut command = accelerate();
    command.arg("launch").args(flags).args(["sh", "-c", "echo $ACCELERATE_RUN_SECRET"]);
    command.env("ACCELERATE_RUN_SECRET", "of the shell");
    let ended = finished(command);
    ended.expect(0, &[]);
    assert!(ended.stdout.lines().all(|line| line.ends_with("of the shell") == holds), "{ended:?}");
}
