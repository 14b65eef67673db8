//! Numbers and ranges of machines: where they have their effect, and what is told where they have none.

use rstest::rstest;

use crate::support::{accelerate, finished};

/// Neither an address nor another number of processes would make such a range possible.
#[rstest]
#[case::alone(&["--nnodes", "1:2"])]
#[case::with_an_address(&["--nnodes", "1:2", "--main_process_ip", "10.0.0.1"])]
#[case::of_one_of_them(&["--num_machines", "2", "--min_machines", "1", "--machine_rank", "1"])]
#[case::without_a_start(&["--nnodes", "1:2", "--dry_run"])]
fn a_range_of_machines_that_nobody_lists_is_refused(#[case] flags: &[&str]) {
    let mut command = accelerate();
    command.arg("launch").args(flags).args(["sh", "-c", "echo started"]);
    let ended = finished(command);
    ended
        .expect(2, &["error: a range of machines, 1 to 2 (--nnodes 1:2), needs one launcher", "--hosts or --hostfile"]);
    assert!(!ended.stderr.contains("can only find each other") && ended.stdout.is_empty(), "{ended:?}");
}

#[test]
fn more_machines_than_are_named_have_no_effect_which_is_told() {
    let mut command = accelerate();
    command.args(["launch", "--hosts", "localhost:1,127.0.0.1:1", "--nnodes", "2:4", "--no_preflight"]);
    command.args(["--main_process_ip", "127.0.0.1", "sh", "-c", "echo $RANK/$WORLD_SIZE"]);
    let ended = finished(command);
    ended.expect(
        0,
        &["accelerate launch: num_machines (or --nnodes) is 4, but 2 hosts are named, and no others can join a run later"],
    );
    assert_eq!(ended.sorted_stdout(), ["[rank 0] 0/2", "[rank 1] 1/2"]);
}

/// A process that nobody can leave behind is not numbered either.
#[test]
fn a_least_number_without_a_list_has_no_effect_which_is_told() {
    let mut command = accelerate();
    command.args(["launch", "--num_processes", "1", "--min_machines", "1", "sh", "-c", "echo rank=$RANK"]);
    let ended = finished(command);
    ended.expect(0, &["accelerate launch: min_machines (or MIN of --nnodes MIN:MAX) is 1, which has no effect here: only of machines that --hosts"]);
    assert_eq!(ended.stdout, "rank=\n");
}

/// Nobody has typed the flags that the error names.
#[test]
fn an_error_says_who_has_said_what_it_is_about() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    std::fs::write(&file, "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 127.0.0.1\n").unwrap();
    let mut command = accelerate();
    command.env("ACCELERATE_NUM_PROCESSES", "3").args(["launch", "--config_file"]).arg(&file).arg("true");
    finished(command).expect(
        2,
        &[
            "--num_processes 3 counts the processes of all machines",
            "\n  num_processes 3 comes from environment variable ACCELERATE_NUM_PROCESSES",
            "\n  num_machines 2 comes from ",
            "run.yaml:1:1",
        ],
    );
    let mut command = accelerate();
    command.args(["launch", "--num_processes", "3", "--num_machines", "2", "--machine_rank", "0"]);
    command.args(["--main_process_ip", "127.0.0.1", "true"]);
    let ended = finished(command);
    ended.expect(2, &["--num_processes 3 counts"]);
    assert!(!ended.stderr.contains("comes from"), "{ended:?}");
}
