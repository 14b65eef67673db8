//! Where a launch finds itself: among the ranks of another launcher, on one of several machines, on a single one.

use std::net::TcpListener;

use rstest::rstest;

use crate::support::{accelerate, finished};

const SAY: &[&str] =
    &["sh", "-c", "echo ${RANK-none} ${OMPI_COMM_WORLD_RANK-none} ${MASTER_ADDR-none} ${WORLD_SIZE-none}"];

fn launched(variables: &[(&str, &str)], flags: &[&str]) -> crate::support::Finished {
    let mut command = accelerate();
    command.envs(variables.iter().copied()).arg("launch").args(flags).args(SAY);
    finished(command)
}

const MPI: &[(&str, &str)] = &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
const STEP: &[(&str, &str)] =
    &[("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")];
const POD: &[(&str, &str)] = &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "pod-0")];

#[rstest]
#[case(MPI, &["--cpu"], "none 1 none none\n")]
#[case(POD, &["--num_processes", "1"], "1 none pod-0 2\n")]
#[case::numbered_anew(MPI, &["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "a", "--num_processes", "2"], "0 none a 2\n")]
fn the_process_of_a_launch_takes_its_place_among_the_ranks_of_another(
    #[case] variables: &[(&str, &str)],
    #[case] flags: &[&str],
    #[case] wanted: &str,
) {
    let ended = launched(variables, flags);
    ended.expect(0, &[]);
    assert_eq!(ended.stdout, wanted);
}

#[rstest]
#[case(&["--num_processes", "2"], "it would start 2 processes as a run of its own")]
#[case(&["--hosts", "localhost:1"], "--hosts starts processes on other machines")]
fn several_processes_among_the_ranks_of_another_launcher_are_refused(#[case] flags: &[&str], #[case] words: &str) {
    launched(MPI, flags)
        .expect(2, &["another launcher has made this launch rank 1 of 2 (OMPI_COMM_WORLD_SIZE)", words]);
}

/// Each of the tasks would train alone, and nobody would know.
#[test]
fn the_process_of_a_launch_takes_its_place_in_a_step_of_slurm() {
    let script = ["launch", "--cpu", "sh", "-c", "echo ${SLURM_PROCID-none} ${RANK-none}"];
    let found = |variables: &[(&str, &str)]| {
        let mut command = accelerate();
        command.envs(variables.iter().copied()).args(script);
        let ended = finished(command);
        ended.expect(0, &[]);
        ended.stdout
    };
    assert_eq!(found(STEP), "1 none\n");
    // In the shell of a terminal there are no others to meet.
    assert_eq!(found(&[STEP, &[("SLURM_PTY_PORT", "40001")]].concat()), "none none\n");
}

#[test]
fn several_processes_in_each_task_of_srun_are_refused_with_what_works_in_a_job() {
    let words = ["rank 1 of 2 (SLURM_STEP_NUM_TASKS)", "start 2 processes", "start the launch once, without srun"];
    launched(STEP, &["--num_processes", "2"]).expect(2, &words);
    let shown = launched(STEP, &["--num_processes", "1", "--dry_run"]);
    assert!(shown.stdout.contains("would start 1 of 2 processes") && shown.stdout.contains("\nrank 1: "), "{shown:?}");
}

/// As that launcher does, in everything that people are told.
#[test]
fn a_rank_of_another_launcher_keeps_its_name() {
    let flags = ["--num_processes", "1"];
    let shown = launched(MPI, &[&flags[..], &["--dry_run"]].concat());
    shown.expect(0, &[]);
    assert!(shown.stdout.contains("would start 1 of 2 processes on this machine\n"), "{shown:?}");
    assert!(shown.stdout.contains("\nrank 1: device "), "{shown:?}");
    let mut failing = accelerate();
    failing.envs(MPI.iter().copied()).arg("launch").args(flags).args(["sh", "-c", "exit 3"]);
    finished(failing).expect(3, &["error: rank 1 (process "]);
}

#[rstest]
#[case(&[("WORLD_SIZE", "2")], "WORLD_SIZE=2: this names no rank of another launcher and has no effect")]
#[case(&[("RANK", "5"), ("WORLD_SIZE", "2")], "RANK=5, WORLD_SIZE=2: this names no rank of another launcher")]
fn numbers_that_name_no_rank_are_told(#[case] variables: &[(&str, &str)], #[case] words: &str) {
    let ended = launched(variables, &["--num_processes", "1", "--cpu"]);
    ended.expect(0, &[words]);
    assert_eq!(ended.stdout, "none none none none\n");
}

const TWO_MACHINES: &[&str] = &["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "a"];
const SECOND_NODE: &[(&str, &str)] =
    &[("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("SLURM_NNODES", "2"), ("SLURM_NODEID", "1")];

#[test]
fn a_machine_without_a_number_is_refused_unless_slurm_says_it() {
    launched(&[], TWO_MACHINES).expect(2, &["there are 2 machines, and nothing says which one this is"]);
    let ended = launched(SECOND_NODE, TWO_MACHINES);
    ended.expect(0, &["this is machine 1 of 2 (SLURM_NODEID)"]);
    assert_eq!(ended.stdout, "1 none a 2\n");
}

#[test]
fn a_rendezvous_that_would_number_machines_is_told_that_it_does_not() {
    let flags = [TWO_MACHINES, &["--machine_rank", "1", "--rdzv_backend", "c10d"]].concat();
    launched(&[], &flags).expect(0, &["rdzv_backend c10d assigns no numbers to machines here: this is machine 1"]);
}

#[test]
fn the_processes_of_one_machine_meet_on_it() {
    let ended =
        launched(&[], &["--num_processes", "2", "--main_process_ip", "192.0.2.1", "--no_prefix", "--no_preflight"]);
    ended.expect(0, &["main_process_ip is 192.0.2.1", "--no_preflight has no effect"]);
    assert_eq!(ended.sorted_stdout(), ["0 none 127.0.0.1 2", "1 none 127.0.0.1 2"]);
}

/// It opens no port.
#[test]
fn a_single_process_starts_although_its_port_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    launched(&[], &["--num_processes", "1", "--main_process_port", &port, "--role", "trainer"])
        .expect(0, &["a single process meets no others", "role is trainer (flag --role), which has no effect"]);
    launched(&[], &["--num_processes", "2", "--main_process_port", &port]).expect(1, &[&port]);
}

#[test]
fn the_last_of_a_flag_that_is_repeated_counts() {
    let ended = launched(&[], &["--num_processes", "3", "--cpu", "--num-processes", "1", "--cpu"]);
    ended.expect(0, &[]);
    assert_eq!(ended.stdout, "none none none none\n");
}
