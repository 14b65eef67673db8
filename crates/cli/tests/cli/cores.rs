//! `--enable_cpu_affinity`: each process is kept on cores of its own.

use std::fs;

use crate::support::{finished, launch_script};

const CORES: &str =
    "grep Cpus_allowed_list /proc/self/status | tr -d '\\t'; echo $ACCELERATE_RANK_CORES $OMP_NUM_THREADS";

/// The cores that this process may use.
fn allowed() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    accelerate_launch::core_numbers(list).unwrap()
}

#[test]
fn processes_share_the_cores_and_have_as_many_threads() {
    let cores = allowed();
    let ended = finished(launch_script(2, &["--cpu", "--enable_cpu_affinity", "--no_prefix"], CORES));
    ended.expect(0, &[]);
    let (first, second) = match cores.len() {
        1 => (cores.clone(), cores.clone()),
        number => (cores[..number.div_ceil(2)].to_vec(), cores[number.div_ceil(2)..].to_vec()),
    };
    for share in [first, second] {
        let list = accelerate_launch::core_list(&share);
        assert!(ended.stdout.contains(&format!("Cpus_allowed_list:{list}\n")), "{list}: {}", ended.stdout);
        assert!(
            ended.stdout.contains(&format!("\n{list} ")) || ended.stdout.starts_with(&format!("{list} ")),
            "{}",
            ended.stdout
        );
    }
}

#[test]
fn without_the_flag_every_process_may_use_every_core() {
    let all = accelerate_launch::core_list(&allowed());
    let mut command = launch_script(2, &["--no_prefix"], CORES);
    // What a launch around this one has said is not for these processes.
    command.env("ACCELERATE_RANK_CORES", "0");
    let ended = finished(command);
    assert_eq!(ended.stdout.matches(&format!("Cpus_allowed_list:{all}\n")).count(), 2, "{}", ended.stdout);
}

/// A share of the cores that the launcher itself may use.
#[test]
fn a_launcher_on_one_core_gives_that_one_to_all() {
    let core = allowed()[0];
    let mut command = std::process::Command::new("taskset");
    command.args([
        "-c",
        &core.to_string(),
        env!("CARGO_BIN_EXE_accelerate"),
        "launch",
        "--num_processes",
        "3",
        "--no_prefix",
    ]);
    command.args(["--enable_cpu_affinity", "--cpu", "sh", "-c", CORES]).env_remove("OMP_NUM_THREADS");
    let ended = finished(command);
    assert_eq!(ended.stdout.matches(&format!("Cpus_allowed_list:{core}\n")).count(), 3, "{ended:?}");
    assert_eq!(ended.stdout.lines().filter(|line| *line == format!("{core} 1")).count(), 3, "{ended:?}");
}
