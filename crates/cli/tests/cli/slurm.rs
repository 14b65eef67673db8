//! Launching through Slurm: a controller and two nodes of it on this machine, out of unpacked packages.
//!
//! `cargo xtask soak slurm` gets the packages and runs these tests; without them they are skipped.

mod cluster;

use rstest::rstest;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::support::{Finished, accelerate, finished, named_pipe, send};
use cluster::Cluster;

/// A rank that says who it is, tells `$PWD/ready` so, and waits for a signal.
const WAITS: &str = "import os, signal, time\n\
    def ends(number, frame): print('got', signal.Signals(number).name, flush=True); os._exit(0)\n\
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, ends)\n\
    open('ready', 'a').write('ready\\n')\n\
    while True: time.sleep(0.05)";

/// `accelerate launch [flags]`, in the environment and the folder of the cluster.
fn launch(cluster: &Cluster, flags: &[&str]) -> Command {
    let mut command = accelerate();
    command.args(["launch", "--cpu"]).args(flags);
    cluster.prepare(&mut command);
    command
}

fn submit(cluster: &Cluster, flags: &[&str], script: &str) -> Command {
    let mut command = launch(cluster, &["--slurm", "--nodes", "1", "--num_processes", "2"]);
    command.args(flags).args(["bash", "-c", script]);
    command
}

/// What ranks have printed. The messages of the launcher go to the same file of a job.
fn ranks(output: &str) -> Vec<&str> {
    let mut lines: Vec<_> = output.lines().filter(|line| line.starts_with("[rank")).collect();
    lines.sort_unstable();
    lines
}

fn started(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(child: Child) -> Finished {
    child.wait_with_output().unwrap().into()
}

#[test]
fn a_submitted_job_is_followed_to_its_end_and_its_code() {
    let Some(cluster) = Cluster::start() else { return };
    let done = finished(submit(&cluster, &[], "echo \"rank $RANK of $WORLD_SIZE\""));
    done.expect(0, &["submitted as job 1", "job 1 is completed"]);
    assert_eq!(ranks(&done.stdout), ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]);
    let script = "echo \"until ${SLURM_JOB_END_TIME:+known}\"; exit $((RANK * 3))";
    let failed = finished(submit(&cluster, &["--time", "5"], script));
    failed.expect(3, &["job 2 is failed"]);
    for line in ["[rank 1] until known", "rank 1 (process", "exited with code 3"] {
        assert!(failed.stdout.contains(line), "{line:?} is missing in {failed:?}");
    }
}

#[test]
fn words_reach_the_program_of_a_job_as_they_are() {
    let Some(cluster) = Cluster::start() else { return };
    let mut command = launch(&cluster, &["--slurm", "--quiet", "--num_processes", "1", "printf", "<%s>"]);
    command.args(["two words", "it's", "$HOME", "", "a\nb", "--nodes", "*"]);
    let done = finished(command);
    done.expect(0, &[]);
    assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("<two words><it's><$HOME><><a\nb><--nodes><*>", ""));
}

#[test]
fn a_job_that_slurm_refuses_says_why() {
    let Some(cluster) = Cluster::start() else { return };
    let refused = finished(submit(&cluster, &["--partition", "nowhere"], "true"));
    refused.expect(1, &["Slurm has refused the job: ", "invalid partition"]);
}

#[test]
fn an_interrupt_cancels_the_job_and_shows_what_its_ranks_still_say() {
    let Some(cluster) = Cluster::start() else { return };
    let mut command = launch(&cluster, &["--slurm", "--num_processes", "2", "--no_python", "python3", "-c", WAITS]);
    command.args(["x"]);
    let child = started(command);
    cluster.wait_for_lines("ready", 2);
    send(&child, Signal::INT);
    let stopped = ended(child);
    stopped.expect(130, &["SIGINT: cancelling job 1", "job 1 is cancelled"]);
    assert_eq!(stopped.stdout.matches("got SIGTERM").count(), 2, "{stopped:?}");
}

#[test]
fn a_terminal_that_goes_away_leaves_the_job_running() {
    let Some(cluster) = Cluster::start() else { return };
    let child = started(launch(&cluster, &["--slurm", "--num_processes", "1", "--no_python", "python3", "-c", WAITS]));
    cluster.wait_for_lines("ready", 1);
    send(&child, Signal::HUP);
    ended(child).expect(129, &["SIGHUP: job 1 goes on; `scancel 1` ends it"]);
    assert_eq!(cluster.ask("squeue", &["--noheader", "--format", "%T"]).trim(), "RUNNING");
}

/// The minute is over before the margin is, so Slurm sends the signal at once.
#[test]
fn a_job_whose_time_is_over_is_queued_again_and_goes_on() {
    let Some(cluster) = Cluster::start() else { return };
    let program = format!(
        "import os\nif os.environ.get('SLURM_RESTART_COUNT'): print('goes on', flush=True); raise SystemExit(0)\n{WAITS}"
    );
    let mut command = launch(&cluster, &["--slurm", "--time", "1", "--requeue", "--num_processes", "2"]);
    command.args(["--no_python", "python3", "-c", &program]);
    let child = started(command);
    // Slurm would wait for two minutes before it starts the job again.
    cluster.wait_until("squeue", &["--noheader", "--format", "%r"], |answer| answer.trim() == "BeginTime");
    cluster.ask("scontrol", &["update", "JobId=1", "StartTime=now"]);
    let done = ended(child);
    done.expect(0, &["job 1 is completed"]);
    let text = done.stdout.as_str();
    assert_eq!((text.matches("got SIGUSR1").count(), text.matches("goes on").count()), (2, 2), "{text}");
    assert!(text.contains("the time of job 1 is over; it is queued again"), "{text}");
}

#[test]
fn a_script_that_is_printed_is_one_that_slurm_takes() {
    let Some(cluster) = Cluster::start() else { return };
    let emitted = finished(launch(
        &cluster,
        &["--emit", "slurm", "--num_processes", "2", "--time", "5", "bash", "-c", "echo \"here is $RANK\""],
    ));
    emitted.expect(0, &[]);
    fs::write(cluster.folder().join("job.sh"), &emitted.stdout).unwrap();
    cluster.ask("sbatch", &["--wait", "job.sh"]);
    let mut output = String::new();
    let file = fs::File::open(cluster.folder().join("accelerate-1.out"));
    file.unwrap().read_to_string(&mut output).unwrap();
    assert_eq!(ranks(&output), ["[rank 0] here is 0", "[rank 1] here is 1"]);
}

/// `salloc [flags] accelerate launch --cpu PROGRAM`.
fn in_allocation(cluster: &Cluster, salloc: &[&str], words: &[&str]) -> Command {
    let mut command = Command::new("salloc");
    command.args(["--quiet"]).args(salloc).args([env!("CARGO_BIN_EXE_accelerate"), "launch", "--cpu"]).args(words);
    command.env("HF_HOME", cluster.folder());
    cluster.prepare(&mut command);
    command
}

const WHO: &str = "echo \"$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR\"";

#[test]
fn an_allocation_is_filled_with_the_tasks_that_it_has_on_each_node() {
    let Some(cluster) = Cluster::start() else { return };
    let done = finished(in_allocation(&cluster, &["-N2", "-n3"], &["sh", "-c", WHO]));
    done.expect(0, &["in Slurm job 1, starting 2 on n1, 1 on n2 (the tasks of the job)"]);
    let wanted = ["[rank 0] 0/3 0/2 n1 n1", "[rank 1] 1/3 1/2 n1 n1", "[rank 2] 2/3 0/1 n2 n1"];
    assert_eq!(done.sorted_stdout(), wanted);
    let said = finished(in_allocation(&cluster, &["-N1", "-n4"], &["--num_processes", "2", "sh", "-c", WHO]));
    said.expect(0, &["in Slurm job 2, starting 2 on n1 (--num_processes)"]);
    assert_eq!(said.sorted_stdout(), ["[rank 0] 0/2 0/2 n1 127.0.0.1", "[rank 1] 1/2 1/2 n1 127.0.0.1"]);
}

#[test]
fn a_rank_that_fails_on_one_node_ends_those_of_the_others() {
    let Some(cluster) = Cluster::start() else { return };
    let script = "test $RANK = 2 && exit 3; sleep 600";
    let failed = finished(in_allocation(&cluster, &["-N2", "-n3"], &["sh", "-c", script]));
    failed.expect(3, &["rank 2 on n2 (process ", "exited with code 3", "ranks 0-1 were running and have been ended"]);
    cluster.wait_until("squeue", &["--noheader", "--steps"], str::is_empty);
}

/// What ranks do whose first attempt ends with the kill of rank 2.
const KILLED_ONCE: &str = "case $TORCHELASTIC_RESTART_COUNT,$RANK in 0,2) kill -9 $$;; 0,*) sleep 600;; esac; \
    echo \"$RANK is back on $SLURMD_NODENAME\"";
const BACK: [&str; 3] = ["[rank 0] 0 is back on n1", "[rank 1] 1 is back on n1", "[rank 2] 2 is back on n2"];

#[test]
fn ranks_of_an_allocation_are_started_again_on_all_of_its_nodes() {
    let Some(cluster) = Cluster::start() else { return };
    let words = ["--max_restarts", "1", "sh", "-c", KILLED_ONCE];
    let done = finished(in_allocation(&cluster, &["-N2", "-n3"], &words));
    done.expect(0, &["rank 2 on n2 (process ", "SIGKILL"]);
    assert_eq!(done.sorted_stdout(), BACK);
    cluster.wait_until("squeue", &["--noheader", "--steps"], str::is_empty);
}

#[test]
fn ranks_of_a_submitted_job_are_started_again_in_that_job() {
    let Some(cluster) = Cluster::start() else { return };
    let flags = ["--slurm", "--nodes", "2", "--num_processes", "3", "--max_restarts", "1", "sh", "-c", KILLED_ONCE];
    let done = finished(launch(&cluster, &flags));
    done.expect(0, &["job 1 is completed"]);
    assert_eq!(ranks(&done.stdout), BACK);
}

#[test]
fn a_job_of_two_nodes_has_its_output_in_one_place() {
    let Some(cluster) = Cluster::start() else { return };
    let mut command = launch(&cluster, &["--slurm", "--nodes", "2", "--num_processes", "3", "sh", "-c"]);
    command.arg(WHO);
    let done = finished(command);
    done.expect(0, &["job 1 is completed"]);
    assert_eq!(ranks(&done.stdout), ["[rank 0] 0/3 0/2 n1 n1", "[rank 1] 1/3 1/2 n1 n1", "[rank 2] 2/3 0/1 n2 n1"]);
}

/// Slurm signals the script, the launcher, the agents and the ranks themselves, and kills them after a while.
#[rstest]
#[case::on_two_nodes(&["--nodes", "2"])]
#[case::on_one_node_by_a_script_that_waits(&["--nodes", "1", "--requeue"])]
fn ranks_of_a_job_that_slurm_ends_have_time_to_save(#[case] flags: &[&str]) {
    let Some(cluster) = Cluster::start() else { return };
    let program = WAITS.replace("os._exit(0)", "time.sleep(2); print('saved', flush=True); os._exit(0)");
    let mut command = launch(&cluster, &["--slurm", "--num_processes", "2", "--no_python"]);
    command.args(flags).args(["python3", "-c", &program]);
    let child = started(command);
    cluster.wait_for_lines("ready", 2);
    cluster.ask("scancel", &["1"]);
    let done = ended(child);
    done.expect(143, &["job 1 is cancelled"]);
    assert_eq!(done.stdout.matches("saved").count(), 2, "{done:?}");
}

/// The variables of a job, and no Slurm.
fn in_job_of_two_nodes(words: &[&str]) -> Finished {
    let mut command = accelerate();
    command.args(["launch", "--cpu"]).args(words).env("SLURM_JOB_ID", "7").env("SLURM_JOB_NODELIST", "n[1-2]");
    finished(command)
}

#[test]
fn what_was_said_of_machines_and_what_the_job_has_are_compared() {
    in_job_of_two_nodes(&["--num_machines", "3", "true"])
        .expect(2, &["--num_machines (or --nnodes) is 3, but the Slurm job 7 has 2 nodes"]);
    in_job_of_two_nodes(&["--num_processes", "1", "true"]).expect(2, &["the Slurm job has 2 nodes; use at least 2"]);
    let shown = in_job_of_two_nodes(&["--num_processes", "3", "--dry_run", "true"]);
    shown.expect(0, &[]);
    for line in ["n1: ranks 0-1, by: srun --quiet ", "n2: rank 2, by: srun --quiet ", "--nodelist=n2"] {
        assert!(shown.stdout.contains(line), "{line:?} is missing in\n{}", shown.stdout);
    }
}

/// As `srun accelerate launch --machine_rank $SLURM_NODEID ...`, and as what a launch has started does.
#[test]
fn whoever_starts_machines_one_by_one_is_left_to_it() {
    let machines = ["--num_processes", "2", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "n1"];
    let shown = in_job_of_two_nodes(&[&machines[..], &["--dry_run", "true"]].concat());
    assert!(shown.stdout.contains("would start 1 of 2 processes on this machine"), "{shown:?}");
    let mut command = accelerate();
    command.args(["launch", "--cpu", "--dry_run", "true"]).env("SLURM_JOB_ID", "7").env("SLURM_JOB_NODELIST", "n[1-2]");
    command.env("ACCELERATE_LAUNCH_ID", "x");
    assert!(finished(command).stdout.contains("would start 1 of 1 process on this machine"));
}

/// Without a cluster.
#[test]
fn flags_about_a_job_without_a_job_are_refused() {
    let check = |flags: &[&str], code: i32, words: &[&str]| {
        let mut command = accelerate();
        command.args(["launch"]).args(flags).arg("true").env("PATH", "/usr/bin:/bin");
        finished(command).expect(code, words);
    };
    check(&["--nodes", "2"], 2, &["--nodes is about a job of a cluster; say --slurm to submit one"]);
    check(&["--emit", "slurm", "--time", "1 day"], 2, &["--time \"1 day\" cannot stand in a batch script"]);
    check(&["--job_name", "x"], 2, &["--job_name is about a job of a cluster"]);
    check(&["--emit", "slurm", "--job_name", "a run"], 2, &["--job_name \"a run\"", "a_run is one"]);
    check(&["--emit", "slurm", "--job_name", ""], 2, &["--job_name \"\"", "accelerate is one"]);
    check(&["--emit", "slurm", "--job_name", "v2_Run"], 0, &[]);
    check(&["--slurm", "--nodes", "0"], 2, &["--nodes"]);
    check(&["--slurm", "--nodes", "3", "--num_machines", "2"], 2, &["--nodes is 3 and num_machines is 2; leave one"]);
    check(&["--emit", "slurm", "--nodes", "3", "--num_processes", "2"], 2, &["the job has 3 nodes; use at least one"]);
    let pods = ["--emit", "trainjob", "--image", "i", "--nodes", "2", "--num_processes", "3"];
    check(&pods, 2, &["use a multiple of the 2 nodes"]);
    let elsewhere = " says on which machines a launch takes place, and so does the job of a cluster; leave it out";
    for flag in ["--hosts", "--hostfile", "--main_process_ip"] {
        check(&["--emit", "slurm", flag, "a"], 2, &[&format!("{flag}{elsewhere}")]);
    }
    check(&["--slurm", "--machine_rank", "1", "--num_machines", "2"], 2, &[&format!("--machine_rank{elsewhere}")]);
    check(&["--slurm", "--dry_run"], 2, &["--dry_run"]);
    check(&["--slurm"], 127, &["sbatch cannot be run, and it is Slurm's"]);
}

/// What takes the place of `sbatch` takes the job, and does not say so in time.
#[test]
fn a_job_that_may_be_submitted_is_told_how_to_be_found() {
    let folder = tempfile::tempdir().unwrap();
    let (_pipe_folder, pipe) = named_pipe();
    let sbatch = folder.path().join("sbatch");
    fs::write(&sbatch, format!("#!/bin/sh\necho asked >{pipe}\nexec sleep 600\n")).unwrap();
    fs::set_permissions(&sbatch, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = accelerate();
    command.args(["launch", "--slurm", "bin/train"]).env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
    let child = started(command);
    fs::read_to_string(&pipe).unwrap();
    send(&child, Signal::INT);
    let done = ended(child);
    let words = "not known whether the job is submitted; `squeue --me --name train` shows it";
    assert!(done.code != Some(0) && done.stderr.contains(words), "{done:?}");
}

/// `ACCELERATE_TEST_PROGRAM` names a built `nlp_example`.
fn program() -> Option<String> {
    let program = std::env::var("ACCELERATE_TEST_PROGRAM").ok();
    if program.is_none() {
        println!(
            "skipped, because ACCELERATE_TEST_PROGRAM names no program to train with; `cargo xtask soak slurm` builds it"
        );
    }
    program
}

/// The last line of a training that says its loss, without what went before it.
#[track_caller]
fn final_loss(done: &Finished) -> String {
    assert_eq!(done.code, Some(0), "{done:?}");
    let lines = done.stdout.lines().chain(done.stderr.lines());
    let losses: Vec<_> = lines.filter_map(|line| line.split_once("loss=")).map(|(_, loss)| loss.to_owned()).collect();
    losses.last().unwrap_or_else(|| panic!("no loss in {done:?}")).clone()
}

/// Built once, and started by `srun`, by a launch in an allocation, and on one machine.
#[test]
fn a_training_ends_with_the_loss_of_one_machine() {
    let (Some(cluster), Some(program)) = (Cluster::start(), program()) else { return };
    let training = |mut command: Command| {
        command
            .env("ACCELERATE_USE_CPU", "true")
            .env("OMP_NUM_THREADS", "1")
            .env("ACCELERATE_RUN_SECRET", "of the test");
        final_loss(&finished(command))
    };
    let train = [program.as_str(), "--num_epochs", "1"];
    let alone = training({
        let mut command = launch(&cluster, &["--num_processes", "3"]);
        command.args(train);
        command
    });
    let mut srun = Command::new("srun");
    srun.args(["--quiet", "--mpi=none", "-N2", "-n3"]).args(train);
    cluster.prepare(&mut srun);
    assert_eq!(training(srun), alone);
    assert_eq!(training(in_allocation(&cluster, &["-N2", "-n3"], &train)), alone);
}
