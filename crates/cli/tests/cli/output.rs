//! What ranks print arrives whole, in order, and with its origin.

use std::io::Write;
use std::process::Stdio;

use crate::support::{Witness, finished, launch, launch_script};

#[test]
fn lines_begin_with_their_rank_on_their_own_stream() {
    let ended = finished(launch_script(2, &[], "echo out $RANK; echo err $RANK >&2"));
    assert_eq!(ended.sorted_stdout(), ["[rank 0] out 0", "[rank 1] out 1"]);
    ended.expect(0, &["[rank 0] err 0\n", "[rank 1] err 1\n"]);
}

#[test]
fn one_process_prints_as_if_started_by_hand() {
    let ended = finished(launch_script(1, &[], "echo ${RANK-unset}; echo err >&2; printf 'no line end'"));
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("unset\nno line end", "err\n"));
}

#[test]
fn prefixes_can_be_switched_off() {
    assert_eq!(finished(launch_script(2, &["--no_prefix"], "echo $RANK")).sorted_stdout(), ["0", "1"]);
}

#[test]
fn a_missing_line_end_is_added() {
    let ended = finished(launch_script(2, &[], "printf 'last words of %s' $RANK"));
    assert_eq!(ended.sorted_stdout(), ["[rank 0] last words of 0", "[rank 1] last words of 1"]);
}

#[test]
fn no_line_of_many_is_lost_or_cut() {
    const NUM_LINES: usize = 5000;
    let script = format!("i=0; while [ $i -lt {NUM_LINES} ]; do echo \"line $i of rank $RANK\"; i=$((i+1)); done");
    let ended = finished(launch_script(3, &[], &script));
    for rank in 0..3 {
        let prefix = format!("[rank {rank}] ");
        let mut own = ended.stdout.lines().filter_map(|line| line.strip_prefix(&prefix));
        for number in 0..NUM_LINES {
            assert_eq!(own.next(), Some(format!("line {number} of rank {rank}").as_str()));
        }
        assert_eq!(own.next(), None);
    }
    assert_eq!(ended.stdout.lines().count(), 3 * NUM_LINES);
}

#[test]
fn huge_lines_stay_in_one_piece() {
    const NUM_BYTES: usize = 3_000_000;
    let script = format!("head -c {NUM_BYTES} /dev/zero | tr '\\0' $RANK; echo");
    let ended = finished(launch_script(2, &[], &script));
    let expected = [0, 1].map(|rank| format!("[rank {rank}] {}", rank.to_string().repeat(NUM_BYTES)));
    assert!(ended.sorted_stdout() == expected, "{} bytes", ended.stdout.len());
}

#[test]
fn bytes_that_are_no_text_pass_unchanged() {
    let mut command = launch_script(2, &[], "[ $RANK = 1 ] || printf '\\377\\376\\001\\n'");
    assert_eq!(command.output().unwrap().stdout, b"[rank 0] \xff\xfe\x01\n");
}

#[test]
fn the_first_rank_reads_what_the_launcher_was_given() {
    let mut command = launch_script(2, &[], "echo \"read: $(cat)\"");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"some data").unwrap();
    let ended = crate::support::Finished::from(child.wait_with_output().unwrap());
    assert_eq!(ended.sorted_stdout(), ["[rank 0] read: some data", "[rank 1] read: "]);
}

#[test]
fn when_nobody_reads_the_run_goes_on_to_its_end_and_says_so() {
    let mut witness = Witness::new();
    // Only rank 0 has an input to wait for; the other one would say the second word before rank 0 says the first.
    let script = "if [ $RANK = 0 ]; then echo ready >/dev/fd/$WITNESS; read unused; fi; \
                  for i in 1 2 3; do echo line; done; \
                  if [ $RANK = 0 ]; then echo end >/dev/fd/$WITNESS; fi";
    let mut command = launch_script(2, &[], script);
    let mut child = witness.start({
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    });
    witness.wait_for("ready", 1);
    drop(child.stdout.take());
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.matches("standard output cannot be written").count(), 1, "{text}");
    witness.wait_for("end", 1);
    witness.expect_nobody_survives();
}

#[test]
fn a_full_disk_behind_the_output_is_told_and_ends_nothing() {
    let mut command = launch_script(2, &[], "for i in 1 2 3; do echo line; done; exit 0");
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap()).stderr(Stdio::piped());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(text.matches("standard output cannot be written").count(), 1, "{text}");
}

#[test]
fn a_working_folder_that_is_gone_is_told_before_anything_is_started() {
    for words in ["launch --num_processes 2 true", "test --cpu --program true"] {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &format!("mkdir \"$1\" && cd \"$1\" && rmdir \"$1\" && exec \"$0\" {words}")]);
        let parent = tempfile::tempdir().unwrap();
        command.arg(env!("CARGO_BIN_EXE_accelerate")).arg(parent.path().join("gone"));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
        assert!(text.contains("error: the working folder cannot be used; change to one that exists"), "{text}");
    }
}

/// Printed, never asserted: the machine may be busy.
#[test]
fn starting_takes_milliseconds() {
    for num_processes in [1, 2, 8] {
        let mut times: Vec<_> = (0..11)
            .map(|_| {
                let started_at = std::time::Instant::now();
                let mut command = launch(num_processes, &[]);
                command.arg("true");
                finished(command).expect(0, &[]);
                started_at.elapsed()
            })
            .collect();
        times.sort_unstable();
        println!("launch of {num_processes} x true: median {:?}, least {:?}", times[5], times[0]);
    }
}
