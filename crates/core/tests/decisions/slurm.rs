//! Allocations, batch scripts and jobs of Slurm.

use accelerate_core::slurm::{BatchJob, Job, PerNode, allocation, expand_hosts, is_in_step};
use proptest::prelude::*;
use rstest::rstest;
use std::collections::HashMap;
use std::time::Duration;

/// Variables written as `NAME=value` with spaces between.
fn lookup(text: &str) -> impl Fn(&str) -> Option<String> + use<> {
    let variables: HashMap<String, String> = text
        .split_whitespace()
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    move |name| variables.get(name).cloned()
}

#[rstest]
#[case("node1", &["node1"])]
#[case("node1,node2", &["node1", "node2"])]
#[case("n[1-3]", &["n1", "n2", "n3"])]
#[case("n[08-10,7],login", &["n08", "n09", "n10", "n7", "login"])]
#[case("r[1-2]n[5,6].local", &["r1n5.local", "r1n6.local", "r2n5.local", "r2n6.local"])]
#[case("n[99-101]", &["n99", "n100", "n101"])]
#[case("", &[])]
#[case(",b", &[])]
#[case("a,", &[])]
#[case("n[]", &[])]
#[case("n[x]", &[])]
#[case("n[5-3]", &[])]
#[case("n[1-]", &[])]
#[case("n]1", &[])]
#[case("n[1-3", &[])]
#[case("n[[1]]", &[])]
#[case("two words", &[])]
#[case("n[1-99999999]", &[])]
#[case("n[0-18446744073709551615]", &[])]
#[case("n[1-9999][1-9999]", &[])]
fn host_lists(#[case] list: &str, #[case] wanted: &[&str]) {
    assert_eq!(expand_hosts(list).unwrap_or_default(), wanted);
}

#[rstest]
#[case::tasks("SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=2,1", None, "2 on n1, 1 on n2", PerNode::Tasks)]
#[case::tasks_per_node("SLURM_NTASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4(x2)", None, "4 on n1, 4 on n2", PerNode::Tasks)]
#[case::nobody_asked_for_tasks("SLURM_TASKS_PER_NODE=16(x2)", None, "1 on n1, 1 on n2", PerNode::One)]
#[case::tasks_of_other_nodes("SLURM_NTASKS=9 SLURM_TASKS_PER_NODE=3(x3)", None, "1 on n1, 1 on n2", PerNode::One)]
#[case::gpus(
    "SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=1(x2) SLURM_GPUS_PER_NODE=a100:8",
    None,
    "8 on n1, 8 on n2",
    PerNode::Gpus
)]
#[case::gpus_of_two_kinds("SLURM_GPUS_PER_NODE=a100:2,v100:2", None, "4 on n1, 4 on n2", PerNode::Gpus)]
#[case::gpus_of_this_node("SLURM_GPUS_ON_NODE=4", None, "4 on n1, 4 on n2", PerNode::Gpus)]
#[case::gpus_of_the_job_and_this_node("SLURM_GPUS=8 SLURM_GPUS_ON_NODE=4", None, "4 on n1, 4 on n2", PerNode::Gpus)]
#[case::gpus_of_each_node(
    "SLURM_GPUS_PER_NODE=2 SLURM_GPUS=5 SLURM_GPUS_ON_NODE=3",
    None,
    "2 on n1, 2 on n2",
    PerNode::Gpus
)]
#[case::gpus_of_the_job("SLURM_GPUS=8", None, "4 on n1, 4 on n2", PerNode::Gpus)]
#[case::no_gpu("SLURM_GPUS_ON_NODE=0", None, "1 on n1, 1 on n2", PerNode::One)]
#[case::said("SLURM_GPUS_PER_NODE=8 SLURM_NTASKS=2", Some(5), "3 on n1, 2 on n2", PerNode::Said)]
fn how_many_processes_each_node_gets(
    #[case] variables: &str,
    #[case] num_processes: Option<usize>,
    #[case] nodes: &str,
    #[case] per_node: PerNode,
) {
    let variables = lookup(&format!("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] {variables}"));
    let found = allocation(&variables, num_processes, false).unwrap().unwrap();
    assert_eq!((found.to_string().as_str(), found.per_node), (nodes, per_node));
}

#[test]
fn gpus_do_not_count_where_processes_stay_on_the_cpu() {
    let variables =
        lookup("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_GPUS_ON_NODE=4 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2");
    assert_eq!(allocation(&variables, None, true).unwrap().unwrap().to_string(), "2 on n1");
}

#[rstest]
#[case::no_job("", None)]
#[case::a_task_of_srun("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n1", None)]
#[case::a_job_without_nodes("SLURM_JOB_ID=7", None)]
#[case::a_shell_on_the_login_node("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1", Some(false))]
#[case::a_shell_of_salloc_on_the_node("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=login", Some(true))]
#[case::a_batch_script("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURMD_NODENAME=n1", Some(true))]
#[case::a_shell_that_slurm_put_on_the_node(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_JOB_NODELIST=n1 SLURMD_NODENAME=n1",
    Some(true)
)]
#[case::the_first_of_two("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURMD_NODENAME=n1", Some(false))]
fn where_processes_are_to_be_started(#[case] variables: &str, #[case] is_here: Option<bool>) {
    let found = allocation(&lookup(variables), None, false).unwrap();
    assert_eq!(found.map(|allocation| allocation.is_on("login")), is_here);
    assert_eq!(is_in_step(&lookup(variables)), variables.contains("STEP_ID=0"));
}

#[rstest]
#[case::fewer_processes(
    "",
    Some(1),
    "--num_processes 1 counts the processes of all machines together, and the Slurm job has 2"
)]
#[case::no_number_of_gpus("SLURM_GPUS_PER_NODE=a100", None, "SLURM_GPUS_PER_NODE is \"a100\"")]
#[case::unequal_gpus("SLURM_GPUS=8 SLURM_GPUS_ON_NODE=6", None, "of which this one has 6, so how many processes each")]
#[case::gpus_that_do_not_divide("SLURM_GPUS=3", None, "ask Slurm for --gpus-per-node, or say --num_processes")]
#[case::too_many_gpus("SLURM_GPUS_PER_NODE=18446744073709551615,1", None, "SLURM_GPUS_PER_NODE is")]
#[case::too_many("SLURM_GPUS_PER_NODE=1048576", None, "more than the 1048576 processes")]
fn what_an_allocation_cannot_be(#[case] variables: &str, #[case] num_processes: Option<usize>, #[case] message: &str) {
    let variables = lookup(&format!("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] {variables}"));
    let error = allocation(&variables, num_processes, false).unwrap_err();
    assert!(error.is_environment() && error.to_string().contains(message), "{error}");
}

#[test]
fn a_broken_host_list_is_named() {
    let error = allocation(&lookup("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-"), None, false).unwrap_err();
    assert!(error.to_string().contains("SLURM_JOB_NODELIST is \"n[1-\""), "{error}");
}

fn job() -> BatchJob {
    BatchJob {
        name: "train".to_owned(),
        num_nodes: 2,
        stop_margin: Duration::from_secs(120),
        launch: "accelerate launch 'my program'".to_owned(),
        ..Default::default()
    }
}

fn options(script: &str) -> Vec<&str> {
    script.lines().filter_map(|line| line.strip_prefix("#SBATCH ")).collect()
}

#[test]
fn a_job_says_what_it_needs() {
    let script = BatchJob {
        num_processes: Some(6),
        time: Some("1-12:00:00".to_owned()),
        partition: Some("long,short".to_owned()),
        options: vec!["--account=lab".to_owned(), "--constraint=a100&ib".to_owned()],
        ..job()
    }
    .script()
    .unwrap();
    let wanted = [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=3",
        "--time=1-12:00:00",
        "--partition=long,short",
        "--output=accelerate-%j.out",
        "--open-mode=append",
        "--no-requeue",
        "--account=lab",
        "--constraint=a100&ib",
    ];
    assert_eq!(options(&script), wanted);
    assert!(
        script.starts_with("#!/bin/bash\n") && script.ends_with("\nexec accelerate launch 'my program'\n"),
        "{script}"
    );
}

#[test]
fn a_job_that_is_queued_again_gets_a_signal_before_the_ranks_look_at_the_clock() {
    let script = BatchJob { requeue: true, gpus_per_node: Some(4), num_processes: Some(8), ..job() }.script().unwrap();
    let wanted =
        ["--gpus-per-node=4", "--output=accelerate-%j.out", "--open-mode=append", "--requeue", "--signal=B:USR1@150"];
    assert_eq!(options(&script)[2..], wanted);
    assert!(script.contains("\naccelerate launch 'my program' &\n") && script.contains("scontrol requeue"), "{script}");
    let late = BatchJob { requeue: true, stop_margin: Duration::MAX, time: None, ..job() }.script().unwrap_err();
    assert!(late.to_string().contains("at most 65535 s"), "{late}");
}

/// A shell with some of the variables of a job: the other node would stay idle without a word.
#[rstest]
#[case("SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2", true)]
#[case("SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_NODELIST=", true)]
#[case("SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1", false)]
#[case("SLURM_JOB_ID=7", false)]
#[case("SLURM_JOB_NUM_NODES=2", false)]
fn several_nodes_without_their_names_are_an_error(#[case] variables: &str, #[case] is_error: bool) {
    let found = allocation(&lookup(variables), None, false);
    let says =
        |error: &accelerate_core::Error| error.is_environment() && error.to_string().contains("SLURM_JOB_NODELIST");
    assert!(found.as_ref().is_err_and(says) == is_error && (is_error || found.unwrap().is_none()));
}

/// What ends before its time and is not queued again must not look as if it were done. The launch ends well when it is told of its time.
#[rstest]
#[case::queued("exit 0", 0, "it is queued again")]
#[case::refused("echo disabled >&2; exit 1", 1, "could not queue it again: submit the script once more")]
fn a_job_that_could_not_be_queued_again_is_an_error(#[case] scontrol: &str, #[case] code: i32, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        path
    };
    write("scontrol", &format!("#!/bin/sh\n{scontrol}\n"));
    // As Slurm does it, the script is told; here by its launch, which knows that it listens.
    let launch = write("launch", "#!/bin/sh\ntrap 'exit 0' USR1\nkill -USR1 $PPID\nwhile :; do sleep 0.01; done\n");
    let launch = launch.to_str().unwrap().to_owned();
    let script = write("job", &BatchJob { requeue: true, launch, ..job() }.script().unwrap());
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut command = std::process::Command::new("bash");
    let ended = command.arg(script).env("PATH", path).env("SLURM_JOB_ID", "7").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(code) && said.contains(words), "{:?} {said}", ended.status);
}

#[rstest]
#[case("train", "train")]
#[case("my program\n#SBATCH --uid=0", "my_program__SBATCH_--uid_0")]
#[case("größe", "gr__e")]
#[case("", "accelerate")]
fn names_of_jobs(#[case] name: &str, #[case] wanted: &str) {
    let script = BatchJob { name: name.to_owned(), ..job() }.script().unwrap();
    assert_eq!(options(&script)[0], format!("--job-name={wanted}"));
}

#[rstest]
#[case(BatchJob { time: Some("1 day".to_owned()), ..job() }, "--time \"1 day\"")]
#[case(BatchJob { time: Some(String::new()), ..job() }, "--time \"\"")]
#[case(BatchJob { partition: Some("a\n#SBATCH --uid=0".to_owned()), ..job() }, "--partition \"a\\n#SBATCH --uid=0\"")]
#[case(BatchJob { partition: Some("-x".to_owned()), ..job() }, "--partition \"-x\"")]
#[case(BatchJob { options: vec!["account=lab".to_owned()], ..job() }, "--sbatch \"account=lab\"")]
#[case(BatchJob { options: vec!["--comment=two words".to_owned()], ..job() }, "--sbatch \"--comment=two words\"")]
#[case(BatchJob { options: vec!["--comment='x'".to_owned()], ..job() }, "--sbatch")]
fn values_that_would_end_their_line_are_refused(#[case] job: BatchJob, #[case] message: &str) {
    let error = job.script().unwrap_err();
    assert!(error.is_environment() && error.to_string().contains(message), "{error}");
}

#[rstest]
#[case("JobState=PENDING Reason=Resources ExitCode=0:0", false, 1)]
#[case("JobState=RUNNING Reason=None ExitCode=0:0", false, 1)]
#[case("JobState=COMPLETING ExitCode=0:0", false, 1)]
#[case("JobState=COMPLETED ExitCode=0:0", true, 0)]
#[case("JobState=FAILED ExitCode=3:0", true, 3)]
#[case("JobState=FAILED ExitCode=0:9", true, 137)]
#[case("JobState=CANCELLED ExitCode=0:15", true, 143)]
#[case("JobState=TIMEOUT ExitCode=0:0", true, 1)]
#[case("JobState=FAILED ExitCode=300:0", true, 1)]
#[case("JobState=FAILED ExitCode=x", true, 1)]
#[case("", false, 1)]
fn how_jobs_end(#[case] text: &str, #[case] is_over: bool, #[case] exit_code: u8) {
    let job = Job::parse(text);
    assert_eq!((job.is_over(), job.exit_code()), (is_over, exit_code), "{job:?}");
}

#[test]
fn a_job_as_slurm_22_shows_it() {
    let text = "JobId=3 JobName=train\n   UserId=root(0) GroupId=root(0) MCS_label=N/A\n   JobState=RUNNING Reason=None Dependency=(null)\n   \
                Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n   ReqNodeList=(null) ExcNodeList=(null)\n   NodeList=n[1-2]\n   \
                BatchHost=n1\n   StdErr=/w/my run/a.out\n   StdIn=/dev/null\n   StdOut=/w/my run/a.out\n   Power=\n";
    let job = Job::parse(text);
    assert_eq!((job.state.as_str(), job.reason.as_deref()), ("RUNNING", None));
    assert_eq!((job.nodes.as_deref(), job.output.as_deref()), (Some("n[1-2]"), Some("/w/my run/a.out")));
}

proptest! {
    #[test]
    fn any_host_list(list in "[a-z0-9,\\[\\] -]{0,16}") {
        if let Some(hosts) = expand_hosts(&list) {
            prop_assert!(!hosts.is_empty() && hosts.iter().all(|host| !host.is_empty()));
        }
    }
}
