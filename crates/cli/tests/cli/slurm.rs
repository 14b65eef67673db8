//! Launching through Slurm: a controller and two nodes of it on this machine, out of unpacked packages.
//!
//! `cargo xtask soak slurm` gets the packages and runs these tests; without them they are skipped.

mod cluster;

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::support::{Finished, accelerate, finished, send};
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
    assert_eq!(done.sorted_stdout(), ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]);
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
    let mut lines: Vec<_> = output.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] here is 0", "[rank 1] here is 1"]);
}

/// Without a cluster.
#[test]
fn flags_about_a_job_without_a_job_are_refused() {
    let check = |flags: &[&str], code: i32, words: &[&str]| {
        let mut command = accelerate();
        command.args(["launch"]).args(flags).arg("true").env("PATH", "/usr/bin:/bin");
        finished(command).expect(code, words);
    };
    check(&["--nodes", "2"], 2, &["--nodes is about a job of Slurm; say --slurm to submit one"]);
    check(&["--emit", "slurm", "--time", "1 day"], 2, &["--time \"1 day\" cannot stand in a batch script"]);
    check(&["--slurm", "--nodes", "0"], 2, &["--nodes"]);
    check(&["--slurm", "--dry_run"], 2, &["--dry_run"]);
    check(&["--slurm"], 1, &["sbatch cannot be run, and it is Slurm's"]);
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
    let losses: Vec<_> = lines.filter_map(|line| line.split_once("loss")).map(|(_, loss)| loss.to_owned()).collect();
    losses.last().unwrap_or_else(|| panic!("no loss in {done:?}")).clone()
}
