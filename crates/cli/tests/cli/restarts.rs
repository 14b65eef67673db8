//! `--max_restarts` on one machine: what starts again, what does not, and what is told of it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::Stdio;

use rstest::rstest;
use rustix::process::Signal;

use crate::support::{Finished, LIVE_ON, Witness, finished, launch_script, named_pipe, send};

const READY: &str = "echo ready >/dev/fd/$WITNESS";

/// A file in which each attempt of a single process leaves a line, and the words that do so.
fn attempts() -> (tempfile::TempDir, std::path::PathBuf, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("attempts");
    let note = format!("echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS >>{}", path.display());
    (folder, path, note)
}

#[test]
fn all_ranks_start_again_and_learn_how_often() {
    let (_folder, pipe) = named_pipe();
    let script = format!(
        "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS $RANK/$WORLD_SIZE $MASTER_PORT $ACCELERATE_RUN_SECRET
         [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
         if [ $RANK = 0 ]; then echo >{pipe}; exec sleep 600; else read line <{pipe}; exit 3; fi"
    );
    let ended = finished(launch_script(2, &["--max_restarts", "4", "--no_prefix"], &script));
    ended.expect(
        0,
        &["accelerate launch: rank 1 (process ", ") exited with code 3 after ", "; restart 1 of 4 begins now\n"],
    );
    assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    let lines: Vec<Vec<_>> = ended.sorted_stdout().into_iter().map(|line| line.split(' ').collect()).collect();
    let who: Vec<_> = lines.iter().map(|words| words[..2].join(" ")).collect();
    assert_eq!(who, ["0/4 0/2", "0/4 1/2", "1/4 0/2", "1/4 1/2"]);
    let secrets: Vec<_> = lines.iter().map(|words| words[3]).collect();
    assert!(secrets[0] == secrets[1] && secrets[2] == secrets[3] && secrets[0] != secrets[2], "{secrets:?}");
    assert_eq!(lines[2][2], lines[3][2]);
}

#[test]
fn a_port_that_somebody_has_chosen_stays() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let script = "echo $MASTER_PORT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1";
    let flags = ["--max_restarts", "1", "--main_process_port", &port, "--no_prefix"];
    let ended = finished(launch_script(2, &flags, script));
    ended.expect(0, &[]);
    assert!(ended.stdout.lines().count() >= 3 && ended.stdout.lines().all(|line| line == port), "{ended:?}");
}

/// The second restart in a row waits for a second.
#[test]
fn a_program_that_fails_twice_succeeds_then() {
    let (_folder, path, note) = attempts();
    let script = format!("{note}; [ $(wc -l <{}) = 3 ] || exit 9", path.display());
    let ended = finished(launch_script(1, &["--max_restarts", "5"], &script));
    ended.expect(0, &["restart 1 of 5 begins now\n", "restart 2 of 5 begins in 1 s\n"]);
    assert_eq!(fs::read_to_string(path).unwrap(), "0/5\n1/5\n2/5\n");
}

#[test]
fn a_crash_loop_ends_with_its_cause() {
    let (_folder, path, note) = attempts();
    let ended = finished(launch_script(1, &["--max_restarts", "1"], &format!("{note}; exit 3")));
    let told = [
        "error: after 1 restart: rank 0 (process ",
        "exited with code 3",
        "\n  every attempt failed in the same way\n",
    ];
    ended.expect(3, &told);
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
    let ended = finished(launch_script(1, &["--max_restarts", "1", "--quiet"], "exit 3"));
    assert!(ended.stderr.starts_with("accelerate launch: error: after 1 restart: rank 0 "), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
}

/// It is looked at for that, and writes as if it had been started by hand all the same.
#[test]
fn the_last_lines_of_a_single_process_are_shown() {
    let script = "echo to work; echo attempt $TORCHELASTIC_RESTART_COUNT has no data >&2; exit 3";
    let ended = finished(launch_script(1, &["--max_restarts", "1"], script));
    let whole =
        "\n  last lines of rank 0:\n    to work\n    attempt 1 has no data\n  every attempt failed in the same way\n";
    ended.expect(3, &["\nattempt 1 has no data\n", whole]);
    assert_eq!(ended.stdout, "to work\nto work\n");
    assert_eq!(ended.stderr.matches("last lines").count(), 1, "{ended:?}");
}

#[test]
fn attempts_that_died_of_other_things_are_listed() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 4; echo the reason >&2; kill -SEGV $$";
    let ended = finished(launch_script(2, &["--max_restarts", "1"], &format!("[ $RANK = 0 ] && sleep 600; {script}")));
    ended.expect(
        139,
        &[
            "error: after 1 restart: rank 1 (process ",
            "was ended by SIGSEGV (11)",
            "\n  last lines of rank 1:\n    the reason\n",
            "\n  attempt 0 had failed: rank 1 exited with code 4\n",
        ],
    );
}

#[rstest]
#[case::wrong_arguments("exit 2", 2, "not restarted: programs exit with 2 when their arguments are wrong")]
#[case::no_program("exec /no/such/program", 127, "not restarted: 127 says that a program is missing")]
#[case::by_hand("kill -INT $$", 130, "not restarted: somebody has interrupted the program")]
fn what_would_be_the_same_again_is_not_restarted(#[case] end: &str, #[case] code: i32, #[case] words: &str) {
    let (_folder, path, note) = attempts();
    let ended = finished(launch_script(1, &["--max_restarts", "3"], &format!("{note}; {end}")));
    ended.expect(code, &["error: rank 0 ", words]);
    assert!(!ended.stderr.contains("begins"), "{ended:?}");
    assert_eq!(fs::read_to_string(path).unwrap(), "0/3\n");
}

#[test]
fn what_stands_in_the_way_of_the_start_is_not_restarted() {
    let mut command = crate::support::launch(2, &["--max_restarts", "3"]);
    command.arg("/no/such/program");
    let ended = finished(command);
    ended.expect(127, &["error: the program /no/such/program was not found"]);
    assert!(!ended.stderr.contains("restart"), "{ended:?}");
    let flags = ["--max_restarts", "3", "--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "a"];
    finished(launch_script(2, &flags, "true")).expect(2, &["--max_restarts 3 needs one launcher for all machines"]);
}

/// Its ranks fail because they are told to end, and that is no failure.
#[test]
fn a_run_that_is_stopped_is_not_restarted() {
    let (_folder, path, note) = attempts();
    let mut witness = Witness::new();
    let script = format!("trap 'exit 1' TERM; [ $RANK = 1 ] && {note}; {READY}; {LIVE_ON}");
    let mut command = launch_script(2, &["--max_restarts", "3"], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(143, &["stopped by SIGTERM"]);
    assert_eq!(fs::read_to_string(path).unwrap(), "0/3\n");
    witness.expect_nobody_survives();
}

/// Some systems tell every process of a service to end, and a rank may be the first to do so. The others still save.
#[test]
fn a_rank_that_is_told_to_end_with_its_launcher_has_not_failed() {
    let (_folder, ready) = named_pipe();
    let (_other_folder, saves) = named_pipe();
    let mut witness = Witness::new();
    let script = format!(
        "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then [ $RANK = 0 ] && exit 4; exec sleep 600; fi
         [ $RANK = 0 ] && {{ read line <{ready}; kill -TERM $$; }}
         trap 'echo told >/dev/fd/$WITNESS; read line <{saves}; echo saved; exit' TERM
         echo >{ready}; {LIVE_ON}"
    );
    let flags = ["--max_restarts", "3", "--grace_period", "600", "--shutdown_grace_period", "600", "--no_prefix"];
    let mut command = launch_script(2, &flags, &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = witness.start(command);
    witness.wait_for("told", 1);
    send(&child, Signal::TERM);
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut stderr = String::new();
    while !stderr.contains("received and passed on") {
        assert!(errors.read_line(&mut stderr).unwrap() > 0, "{stderr}");
    }
    fs::write(&saves, "now\n").unwrap();
    errors.read_to_string(&mut stderr).unwrap();
    let ended = Finished { stderr, ..Finished::from(child.wait_with_output().unwrap()) };
    let told =
        ["error: after 1 restart: stopped by SIGTERM\n", "\n  attempt 0 had failed: rank 0 exited with code 4\n"];
    ended.expect(143, &told);
    assert!(!ended.stderr.contains("restart 2 of 3"), "{ended:?}");
    assert_eq!(ended.stdout, "saved\n");
    witness.expect_nobody_survives();
}

#[rstest]
#[case(Signal::TERM, 143, "stopped by SIGTERM")]
#[case(Signal::INT, 130, "stopped by SIGINT")]
fn a_signal_in_a_pause_ends_the_run_at_once(#[case] signal: Signal, #[case] code: i32, #[case] words: &str) {
    let (_folder, path, note) = attempts();
    let mut command = launch_script(1, &["--max_restarts", "9"], &format!("{note}; exit 1"));
    command.stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    // The longest pause that does not make this test a long one.
    lines.find(|line| line.as_ref().unwrap().ends_with("restart 3 of 9 begins in 2 s")).unwrap().unwrap();
    send(&child, signal);
    assert_eq!(child.wait().unwrap().code(), Some(code));
    let rest: Vec<_> = lines.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line.contains(words)), "{rest:?}");
    // That of the last as well.
    assert_eq!(rest.last().unwrap(), "  attempts 0-2 had failed: rank 0 exited with code 1");
    assert_eq!(fs::read_to_string(path).unwrap().lines().count(), 3);
}

#[test]
fn nothing_of_an_attempt_lives_when_the_next_one_begins() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid").display().to_string();
    let script = format!(
        "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then kill -0 $(cat {pid}); echo $?; exit 0; fi
         [ $RANK = 0 ] && exec sleep 600
         setsid sh -c 'trap \"\" TERM INT HUP; echo $$ >{pid}; while :; do sleep 0.05; done' &
         until [ -s {pid} ]; do sleep 0.01; done; exit 5"
    );
    let ended = finished(launch_script(2, &["--max_restarts", "1", "--no_prefix"], &script));
    ended.expect(0, &["restart 1 of 1 begins now"]);
    assert_eq!(ended.stdout, "1\n1\n", "{ended:?}");
}

/// Named as torchrun names them.
#[test]
fn each_attempt_has_files_of_its_own_in_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (_pipe, pipe) = named_pipe();
    let log_dir = folder.path().to_str().unwrap();
    let script = format!(
        "echo attempt $TORCHELASTIC_RESTART_COUNT of $RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
         if [ $RANK = 0 ]; then echo >{pipe}; exec sleep 600; else read line <{pipe}; exit 1; fi"
    );
    let ended = finished(launch_script(2, &["--max_restarts", "1", "--tee", "1", "--log_dir", log_dir], &script));
    ended.expect(0, &[]);
    assert_eq!(ended.stderr.matches("files of the processes' output are in").count(), 1, "{ended:?}");
    let runs: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    for (attempt, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let file = runs[0].join(format!("attempt_{attempt}/{rank}/stdout.log"));
        assert_eq!(fs::read_to_string(file).unwrap(), format!("attempt {attempt} of {rank}\n"));
    }
}
