//! Results reach whoever asked for them, or an error says that they did not.

use std::fs::File;

use rstest::rstest;
use rustix::pipe::{PipeFlags, pipe_with};

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
