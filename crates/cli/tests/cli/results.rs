//! Results reach whoever asked for them, or an error says that they did not.

use std::fs::File;
use std::io::Read;

use rstest::rstest;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::ioctl_fionread;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::support::{Finished, accelerate};

/// What ends with this for somebody whose standard output is this file.
fn printed_into(words: &str, output: File) -> Finished {
    let mut command = accelerate();
    command.args(words.split_whitespace()).stdout(output).stderr(std::process::Stdio::piped());
    Finished::from(command.output().unwrap())
}

/// All subcommands that print a result.
#[rstest]
#[case("launch --num_processes 2 --dry_run true")]
#[case("launch --num_processes 2 --dry_run --json true")]
#[case("env")]
#[case("config explain")]
#[case("config explain --json")]
#[case("completions bash")]
#[case("tpu-config --tpu_name a --tpu_zone b --command c")]
#[case("test --cpu --program true --checks test_ops")]
#[case("--version")]
#[case("--help")]
#[case("launch -h")]
#[case("help man")]
fn a_result_that_cannot_be_written_is_an_error(#[case] words: &str) {
    let full = printed_into(words, File::options().write(true).open("/dev/full").unwrap());
    full.expect(1, &["error: the result cannot be written to standard output", "caused by: No space left on device"]);
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    drop(reader);
    let unread = printed_into(words, writer.into());
    unread.expect(0, &[]);
    assert_eq!(unread.stderr, "", "somebody who reads only the first lines has made no mistake");
}

/// Whoever shares a pipe with this command may have made it non-blocking.
#[test]
fn a_pipe_without_room_is_waited_for() {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let num_bytes = fcntl_setpipe_size(&writer, 4096).unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    let mut command = accelerate();
    let mut child = command.args(["completions", "bash"]).stdout(writer).spawn().unwrap();
    drop(command);
    while ioctl_fionread(&reader).unwrap() < num_bytes as u64 {
        std::thread::yield_now();
    }
    let mut script = String::new();
    File::from(reader).read_to_string(&mut script).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(script.ends_with('\n') && script.contains("complete -F _accelerate"), "{} bytes", script.len());
}
